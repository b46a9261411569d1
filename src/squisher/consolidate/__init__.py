"""Elastic weight consolidation: learn the next task and keep the parameters that past tasks need.

The penalty of all past tasks together, ½·λ·Σₖ Σ Fₖ(θ − θₖ)², is one parabola per parameter: with A = Σ Fₖ and the weighted
centre θ̄ it equals ½·λ·Σ A(θ − θ̄)² plus a constant, exactly. So neither memory nor time grows with the number of tasks. The
class is here, its arithmetic in `arithmetic`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, NamingError, ScaleError, SquisherError, SquisherWarning, check_choice
from ..importance import Importance, checked, on_common_scale
from ..importance.weights import match
from ..names import align, check_like, live_tensors
from ..storage.tensors import check_finite, is_finite, name_pattern
from .arithmetic import METRICS, Energy, Pull, StepsTaken, add_force_, denominator, pull_together_, unwrapped, was_taken

__all__ = ["EWC", "strength_like"]

GROWTH = 1000.0
"""A task whose importance is larger than the last one's by this factor gets a warning."""


@dataclass(frozen=True)
class _Scale:
    """The scale of the tasks so far: means per unit, or stored numbers.

    For stored numbers, `first` is the provenance of the first task: empty for a plain mapping, None if the user asked for "stored".
    """

    as_fisher: bool
    unit: str | None = None
    first: dict[str, Any] | None = None


class EWC:
    """The quadratic penalty that keeps a network near what past tasks need.

    Use it in a training loop: `ewc.consolidate(importance)` after each task; then for every step of the next one either
    `loss = loss + ewc.penalty()`, or, cheaper, `ewc.add_gradient_()` after `backward()` and before clipping. With an optimizer
    whose state is recycled, call `tracker.observe()` before `add_gradient_()`: otherwise the penalty's gradient is squared
    into the next task's importance, which then grows doubly exponentially from task to task. Or leave the gradient alone and
    call `ewc.pull_(optimizer)` after `optimizer.step()`: then no tracker is needed.

    With PEFT, adapters are parameters like any other: the penalty is on the factors A and B, not on their product.

    Args:
        model: The module whose parameters are protected, by name; a parameter may be replaced by another one.
        strength: λ. It depends on the scale of the importances: a factor common to all of them is a factor of λ.
        online: None protects every task alike. A number γ in (0, 1] keeps one centre, the last task's weights, and lets earlier
            importances fade: A ← γ·A + F.
        dtype: The type of stored importances: float32, or bfloat16 for half the memory. Centres are always float32.
        device: Where importances and centres are stored; by default with the parameters. The CPU saves an accelerator's memory.
        exclude: A regular expression: parameters that are never protected, such as heads.

    Raises:
        SquisherError: An argument is not one of these.
    """

    def __init__(
        self,
        model: nn.Module,
        strength: float = 1.0,
        online: float | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        exclude: str | None = None,
    ):
        if not isinstance(model, nn.Module):
            raise SquisherError(f"EWC expects a torch.nn.Module, and got {type(model).__name__}.")
        _check_settings(strength, online)
        if dtype not in (torch.float32, torch.bfloat16, torch.float64):
            raise ArgumentError(f"Importances are kept as float32, bfloat16 or float64, not {dtype}.")
        self.strength = float(strength)
        self.online = online
        self.tasks = 0
        self.totals: list[float] = []
        name_pattern(exclude)
        self._exclude = exclude
        self._dtype, self._device = dtype, None if device is None else torch.device(device)
        self._model = model
        self._seen: list[Tensor] = []
        self._look()
        self._weight: dict[str, Tensor] = {}  # A
        self._centre: dict[str, Tensor] = {}  # θ̄
        self._constant = 0.0  # by which the sum over tasks differs from the parabola around θ̄, without ½·strength
        self._scale: _Scale | None = None
        self._steps = StepsTaken()

    def __repr__(self) -> str:
        count = sum(weight.numel() for weight in self._weight.values())
        kept = "" if self.online is None else f", online {self.online:g}"
        return f"EWC(strength {self.strength:g}{kept}: {self.tasks} tasks, {len(self._weight)} tensors, {count:,} values held)"

    @torch.no_grad()
    def consolidate(self, importance: Mapping[str, Tensor], scale: str = "auto") -> None:
        """Protect the task that has just been learnt, at the model's present weights.

        Args:
            importance: The task's importance, measured or recycled. Parameters without one are not protected for this task.
            scale: How it is converted to the scale of earlier tasks: `"auto"`, `"as_fisher"` or `"stored"`.

        Raises:
            NamingError: A name or shape is not the model's.
            ScaleError: Its scale differs from that of earlier tasks.
            SquisherError: The model's weights or the importance are not finite; then nothing has changed.
        """
        list(self._held())  # refuses a model that lost a protected parameter
        scaled = self._on_scale(importance, scale)
        names = self._matched(scaled)
        self._warn_of_other_weights(importance, names)
        total = 0.0
        new_weight, new_centre, constant = dict(self._weight), dict(self._centre), self._constant
        for name, source in names.items():
            parameter = self._parameters[name]
            # Copies: the caller may reuse the memory of the importance, and training moves the parameter.
            force, now = (self._copied(tensor, parameter) for tensor in (scaled[source], parameter.detach()))
            check_finite(now, name)
            total += float(force.double().sum())
            if self.online is not None or name not in self._weight:
                old = self._weight.get(name)
                new_weight[name] = force if old is None else old.float().mul(self.online or 1.0).add_(force)
                new_centre[name] = now
            else:
                before, centre = self._weight[name].float(), self._centre[name]
                together = before + force
                share = torch.where(together > 0, force / together, torch.zeros_like(force))
                gap = now - centre
                constant += float((before * share * gap * gap).double().sum())
                new_weight[name], new_centre[name] = together, torch.addcmul(centre, share, gap)
            new_weight[name] = new_weight[name].to(self._dtype)
            if not (is_finite(new_weight[name]) and math.isfinite(constant)):
                raise SquisherError(
                    f"The importance of {name!r}, with those of the tasks before, is more than float32 holds: the penalty would be NaN. Scale "
                    "all of them down (importance * 1e-10) and the strength up."
                )
        if self.online is not None:  # parameters without an importance in this task fade like the others
            new_weight |= {name: old * self.online for name, old in self._weight.items() if name not in names}
        self._warn_if_exploding(total)
        self._weight, self._centre, self._constant = new_weight, new_centre, constant
        self.tasks += 1
        self.totals.append(total)

    def penalty(self) -> Tensor:
        """Return the penalty as a differentiable scalar, equal to the sum over tasks; 0 before the first one.

        Raises:
            NamingError: The model no longer has a protected parameter, or has it with another shape.
        """
        energies = [Energy.apply(parameter, weight, centre) for parameter, weight, centre in self._held()]
        if not energies:
            return torch.zeros(())
        device = energies[0].device
        return 0.5 * self.strength * (torch.stack([one.to(device) for one in energies]).sum() + self._constant)

    @torch.no_grad()
    def add_gradient_(self) -> None:
        """Add the penalty's gradient, strength·A·(θ − θ̄), to `.grad`, without a graph.

        Call it after the last `backward()` (and `scaler.unscale_`), after `tracker.observe()`, and before clipping. For the value,
        call `penalty()` inside `torch.no_grad()`.
        """
        for parameter, weight, centre in self._held():
            if not parameter.requires_grad:  # a gradient of zeros would make an optimizer apply weight decay
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.is_sparse:  # the penalty pulls every row
                parameter.grad = parameter.grad.to_dense()
            add_force_(parameter.grad, parameter.detach(), weight, centre, self.strength)

    def pull_(self, optimizer: torch.optim.Optimizer, metric: str = "plain") -> bool:
        """Pull the parameters towards the past tasks' centre: the exact proximal step θ ← (θ + κAθ̄)/(1 + κA).

        Call it after `optimizer.step()` (or `scaler.step(optimizer)`) and before the scheduler's step, instead of `penalty()` or
        `add_gradient_()`. The penalty never enters the gradient, so the optimizer's state holds the gradients of the data alone and can be
        recycled for the next task without a tracker. It is stable for any strength.

        λ here is not the λ of the gradient, whose step Adam divides by √v̂ + ε. `strength_like(None, λ, optimizer)` converts.

        Args:
            optimizer: The optimizer that has just taken a step. κ is the strength times the learning rate of a parameter's group.
            metric: `"plain"`, or `"adam"`: κ is also divided by √v̂ + ε entry by entry, as Adam's step is; λ is then the λ of
                the gradient.

        Returns:
            Whether the optimizer took a step: False if a `GradScaler` skipped it.

        Raises:
            SquisherError: The metric does not exist, or the optimizer has none of the parameters or no state for the metric.
        """
        check_choice("metric", metric, METRICS)
        inner = unwrapped(optimizer)
        taken = self._steps.since_asked(inner)
        if taken:
            self._pull(inner, metric)
        return taken

    def pull_after_steps(
        self, optimizer: torch.optim.Optimizer, metric: str = "plain"
    ) -> torch.utils.hooks.RemovableHandle:
        """Call `pull_` after every step of the optimizer, until the returned handle is removed.

        Args:
            optimizer: The optimizer.
            metric: As in `pull_`.

        Raises:
            SquisherError: The metric does not exist.
        """
        check_choice("metric", metric, METRICS)

        def follow(stepped: torch.optim.Optimizer, *_: Any) -> None:
            if was_taken(stepped):
                self._pull(stepped, metric)

        return unwrapped(optimizer).register_step_post_hook(follow)

    @torch.no_grad()
    def _pull(self, optimizer: torch.optim.Optimizer, metric: str) -> None:
        held = list(self._held_by(optimizer))
        if self._weight and not held:
            raise SquisherError(
                "The optimizer has none of the parameters that EWC protects: was the EWC made of another model?"
            )
        pulls = []
        for group, parameter, weight, centre in held:
            below = denominator(optimizer, group, parameter) if metric == "adam" else None
            if parameter.requires_grad and (metric == "plain" or below is not None):
                pulls.append(Pull(parameter, weight, centre, self.strength * float(group["lr"]), below))
        pull_together_(pulls)

    def is_of(self, model: nn.Module) -> bool:
        """Return whether this model (not a copy of it) has every protected parameter under the same name."""
        self._look()
        live, _ = live_tensors(model)
        return all(name in live and live[name] is self._parameters.get(name) for name in self._weight)

    def strength_like(
        self, fisher: Mapping[str, Tensor] | None, strength: float, optimizer: torch.optim.Optimizer | None = None
    ) -> float:
        """Return the strength at which the last task's importance weighs as much as its Fisher at `strength`.

        Args:
            fisher: A Fisher of the last task over the same parameters, from a few hundred inputs. None: `strength` suits the
                importance itself.
            strength: The λ that suits that Fisher, in the gradient (`penalty`, `add_gradient_`, `pull_` with `metric="adam"`).
            optimizer: Adam or one with its state, after some steps: convert to a strength for `pull_` with `metric="plain"`, which
                then pulls as far, over all parameters together, as Adam would step along the penalty's gradient alone.

        Raises:
            SquisherError: Nothing has been consolidated, or the Fisher or the importance is 0 everywhere.
        """
        if not self.totals:
            raise SquisherError("strength_like compares with the last task: consolidate one first.")
        if fisher is not None:
            names = self._matched(fisher)
            strength *= _ratio(math.fsum(_total(fisher, source) for source in names.values()), self.totals[-1])
        return strength if optimizer is None else strength * self._mean_step(unwrapped(optimizer))

    @torch.no_grad()
    def _mean_step(self, optimizer: torch.optim.Optimizer) -> float:
        """Return Σ A / (√v̂ + ε) over Σ A: the factor by which Adam multiplies the penalty's gradient, on average."""
        above, total = [], []
        for group, parameter, weight, _ in self._held_by(optimizer):
            below = denominator(optimizer, group, parameter)
            if below is not None:
                root = below.average.to(weight.device).double().sqrt() / below.root + below.eps
                above.append(float((weight.double() / root).sum()))
                total.append(float(weight.double().sum()))
        return _ratio(math.fsum(above), math.fsum(total))

    def state_dict(self) -> dict[str, Any]:
        """Return all state, in plain types and tensors."""
        return {
            "strength": self.strength,
            "online": self.online,
            "tasks": self.tasks,
            "totals": list(self.totals),
            "constant": self._constant,
            "scale": None if self._scale is None else asdict(self._scale),
            "weight": dict(self._weight),
            "centre": dict(self._centre),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            SquisherError: It is not the state of an EWC, or belongs to another model.
        """
        expected = {"strength", "online", "tasks", "totals", "constant", "scale", "weight", "centre"}
        known = isinstance(state, Mapping) and set(state) == expected
        if not known or set(state["weight"]) != set(state["centre"]):
            raise SquisherError(
                "This is not the state of an EWC: it needs the keys " + ", ".join(sorted(expected)) + "."
            )
        _check_settings(state["strength"], state["online"])
        scale = state["scale"]
        if scale is not None and (not isinstance(scale, Mapping) or set(scale) != {f.name for f in fields(_Scale)}):
            raise SquisherError(
                f"The state of this EWC has a scale that is not read: {str(scale)[:80]}. Take the whole state_dict()."
            )
        self._look()
        names = self._matched(state["weight"]) if state["weight"] else {}  # before the first task nothing is protected
        for source in names.values():
            check_like(state["weight"], source, state["centre"], source, ("the importance of the state", "its centre"))
        self.strength, self.online, self.tasks = state["strength"], state["online"], state["tasks"]
        self.totals, self._constant = list(state["totals"]), state["constant"]
        self._scale = None if scale is None else _Scale(**scale)
        found = [(name, source, self._parameters[name]) for name, source in names.items()]
        self._weight = {name: self._copied(state["weight"][source], p, self._dtype) for name, source, p in found}
        self._centre = {name: self._copied(state["centre"][source], p) for name, source, p in found}

    # -- inside --------------------------------------------------------------------------------------------------------

    def _held(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield every protected parameter with its A and its centre."""
        self._look()
        for name, weight in self._weight.items():
            parameter = self._parameters.get(name)
            if parameter is None or parameter.shape != weight.shape:
                now = "it is gone" if parameter is None else f"it has the shape {tuple(parameter.shape)}"
                raise NamingError(
                    f"EWC protects {name!r} with the shape {tuple(weight.shape)}, and now {now}: the module was replaced. To go on without it, "
                    "make a new EWC(model, exclude=...) that leaves it out, and load this one's state_dict()."
                )
            yield parameter, weight, self._centre[name]

    def _held_by(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], Tensor, Tensor, Tensor]]:
        """Yield group, parameter, A and centre of the protected parameters that an optimizer has."""
        group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for parameter, weight, centre in self._held():
            if id(parameter) in group_of:
                yield group_of[id(parameter)], parameter, weight, centre

    def _look(self) -> None:
        """Look up the model's parameters again if some were replaced."""
        now: list[Tensor] = list(self._model.parameters())
        if len(now) != len(self._seen) or any(a is not b for a, b in zip(now, self._seen, strict=True)):
            self._parameters, self._aliases = live_tensors(self._model)
            self._seen = now

    def _copied(self, tensor: Tensor, parameter: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return tensor.to(self._device or parameter.device, dtype, copy=True)

    def _matched(self, importance: Mapping[str, Tensor]) -> dict[str, str]:
        """Return the importance's name for each parameter that it has."""
        advice = "Leave out heads that grew or differ with EWC(model, exclude=...), or restrict the importance."
        called = ("the importance", "the model")
        return align(importance, self._parameters, called, tied=self._aliases, exclude=self._exclude, advice=advice)

    def _on_scale(self, importance: Mapping[str, Tensor], scale: str) -> Mapping[str, Tensor]:
        """Return the importance on the scale of earlier tasks: the first task decides, the others must be convertible."""
        check_choice("scale", scale, ("auto", "stored", "as_fisher"))
        if scale == "stored":
            self._scale = (self._scale if self.tasks else None) or _Scale(as_fisher=False)
            return checked(importance)
        if self._scale is None or self.tasks == 0:
            converted = on_common_scale([importance], scale)[0]
            first = importance.provenance.to_dict() if isinstance(importance, Importance) else {}
            p = converted.provenance if isinstance(converted, Importance) else None
            per_unit = p is not None and (p.per_unit or p.kind == "fisher")
            self._scale = _Scale(True, p.unit) if p is not None and per_unit else _Scale(False, first=first)
            return converted
        if self._scale.as_fisher:
            converted = on_common_scale([importance], "as_fisher")[0]
            unit = converted.provenance.unit if isinstance(converted, Importance) else None
            if self._scale.unit != unit:
                raise ScaleError(
                    f"Earlier tasks are per {self._scale.unit}, this one is per {unit}: bring it to their unit with "
                    f"as_fisher({self._scale.unit!r}), or measure it so."
                )
            return converted
        if self._scale.first is None:  # the first task was taken as it was stored
            if scale == "as_fisher":
                raise ScaleError(
                    "Earlier tasks were taken as they are stored, and scale='as_fisher' would mix two scales: use 'stored' for this one too, "
                    "or begin a new EWC."
                )
            return checked(importance)
        # The provenance of the first task's importance is enough: its tensors are not kept.
        earlier = Importance({"none": torch.zeros(0)}, **self._scale.first) if self._scale.first else {}
        return on_common_scale([earlier, importance], scale)[1]

    def _warn_of_other_weights(self, importance: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
        found = match(importance, {source: self._parameters[name].detach() for name, source in names.items()})
        if found.same is False:
            warnings.warn(
                f"The importance was made with other weights than the model has now: {len(found.differing)} of {found.compared} tensors "
                f"compared differ, {found.differing[0]} for example. EWC keeps parameters near their values of now: load the weights that "
                "it belongs to first, or take the importance of these.",
                SquisherWarning,
                stacklevel=4,  # torch.no_grad() stands between
            )

    def _warn_if_exploding(self, total: float) -> None:
        if self.totals and self.totals[-1] > 0 and total > GROWTH * self.totals[-1]:
            warnings.warn(
                f"This task's importance is {total / self.totals[-1]:.0f} times the last one's. If the optimizer saw the penalty's "
                "gradient, its state holds the square of it, and the next importance grows again: observe the data's gradient "
                "alone with squisher.Tracker before add_gradient_(), or use pull_(optimizer) after the step instead.",
                SquisherWarning,
                stacklevel=4,
            )


def _check_settings(strength: Any, online: Any) -> None:
    if not (isinstance(strength, (int, float)) and math.isfinite(strength) and strength >= 0):
        raise ArgumentError(f"strength is a number of at least 0, not {strength!r}.")
    if online is not None and not (isinstance(online, (int, float)) and 0 < online <= 1):
        raise ArgumentError(f"online is None or a decay γ in (0, 1], not {online!r}.")


def strength_like(importance: Mapping[str, Tensor], fisher: Mapping[str, Tensor], strength: float) -> float:
    """Return the λ at which an importance has the same total weight as a Fisher of the same task at `strength`.

    No fixed factor converts one into the other: measure the Fisher on a few hundred inputs (the exact one needs no labels).
    Stored values of the common parameters are compared.

    Raises:
        SquisherError: There is no common parameter, or one of the two is 0 everywhere.
    """
    names = [name for name in importance if name in fisher]
    if not names:
        raise NamingError("The importance and the Fisher share no parameter name.")
    totals = [math.fsum(_total(source, name) for name in names) for source in (fisher, importance)]
    return strength * _ratio(*totals)


def _ratio(fisher: float, importance: float) -> float:
    if not (fisher > 0 and importance > 0):
        raise SquisherError("A total of 0 has no strength: one of the two importances is 0 everywhere.")
    return fisher / importance


def _total(importance: Mapping[str, Tensor], name: str) -> float:
    if isinstance(importance, Importance):
        return importance.total(name)
    return float(checked(importance)[name].double().sum())
