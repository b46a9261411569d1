"""An average of the squared gradient for runs whose optimizer keeps none, or keeps a polluted one.

SGD, Lion and Muon keep no squared gradient. Adam with L2 weight decay, with clipping, or with an EWC penalty keeps one
of something else than the data's gradient. A `Tracker` keeps the same average that Adam keeps, v ← β₂·v + (1 − β₂)·g²,
of the gradient as it stands when `observe()` is called.

It is a call and not a gradient hook: a hook sees the gradient of one process, of one micro-batch, and scaled.

With `per="example"` it is the average of (1/B) Σ_n g_n² instead, the empirical Fisher of each step's batch: the gradients of
single examples are squared inside the training step, by the rules of `squisher.fisher`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .. import ranks
from ..errors import NamingError, SquisherError, SquisherWarning, near
from ..importance import Absence, Reason
from .averages import all_finite, average_squares_

__all__ = ["Tracker"]


class Tracker:
    """Average the squared gradient of a model's parameters over the optimizer's steps, as Adam does.

    Call `observe()` once per optimizer step, in this order:

        loss.backward()                 # the last one, with gradient accumulation
        scaler.unscale_(optimizer)      # with a GradScaler
        tracker.observe()
        ewc.add_gradient_()             # whatever else is not the data's gradient
        clip_grad_norm_(...)
        optimizer.step()

    A parameter whose gradient is None is left alone, its step count too; a gradient of zeros decays its average.
    A step with a gradient that is not finite, or whose squared norm is not, is not counted for any parameter, as a
    GradScaler leaves such a step out (`skipped` says how many there were). That test costs one wait for the device per
    step. With `fully_shard` it is made over all processes; where shards are plain tensors (the older FSDP) each process
    decides for its own.

    A gradient that a GradScaler has scaled looks like any other: give `scaler` and `observe()` refuses it.

    With `per="example"` there is no `observe()`; the forward and backward passes of an optimizer step are made inside `step()`:

        with tracker.step():
            loss = loss_function(model(inputs), labels)
            loss.backward()             # with gradient accumulation, all micro-batches inside
        optimizer.step()

    The gradients that training gets are the same to the bit. The factors of the loss (1/B of a mean, 1/T of a mean over tokens,
    accumulation, a scaler) are divided out, so that the average is a Fisher, and `as_fisher()` changes nothing. A parameter that no
    rule can do is absent. The average starts with a proof, one backward pass more, and so does every new sequence of operations.
    With several processes (DDP, `fully_shard`), each squares its own examples, and they are summed in every observed step; of a
    sharded model every process keeps its shard.

    Attributes:
        model: The model whose parameters are observed.
        optimizer: The optimizer whose parameters alone are observed, or None.
        beta2: The decay of the average.
        dtype: The dtype of the average.
        automatic: Whether the optimizer's step makes the observation.
        after_clipping: Whether (some of) the gradients may have been clipped or changed before they were seen.
        skipped: How many observations were left out because a gradient was not finite.
        per: "batch" or "example".
        every: Only each `every`-th step is observed.
        examples: How many examples were observed, with `per="example"`; one whose labels are all ignored (-100) is none.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        beta2: float = 0.999,
        per: str = "batch",
        every: int = 1,
        *,
        automatic: bool = False,
        scaler: torch.amp.GradScaler | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Start with nothing observed.

        Args:
            model: Any module, wrapped (DDP) or compiled ones too. Names are those of `model.named_parameters()`.
            optimizer: Observe only what this optimizer trains; otherwise everything that requires a gradient. With it,
                two observations without a step between them are noticed.
            beta2: The decay, in [0, 1).
            per: "batch" averages the square of the batch's gradient, "example" the squares of the examples' gradients.
            every: Observe only each `every`-th step, beginning with the first.
            automatic: Observe just before each step of `optimizer`, by a step hook. That is after clipping and after a
                penalty, and so it is recorded.
            scaler: The GradScaler of the run; `observe()` then checks that the gradients were unscaled.
            dtype: float32 or float64. Less than that stalls: (1 − β₂)·g² is lost beside v.

        Raises:
            SquisherError: If an argument is not what it should be, or the optimizer trains nothing of the model.
        """
        if not isinstance(model, nn.Module):
            raise SquisherError(f"Tracker expects a torch.nn.Module as its model, and got {type(model).__name__}.")
        if isinstance(beta2, bool) or not isinstance(beta2, (int, float)) or not 0.0 <= beta2 < 1.0:
            raise SquisherError(f"Tracker expects 0 <= beta2 < 1, and got {beta2!r}.")
        if dtype not in (torch.float32, torch.float64):
            raise SquisherError(
                f"Tracker keeps its average in float32 or float64, not in {dtype}: in a shorter one it stops moving."
            )
        if per not in ("batch", "example"):
            raise SquisherError(f"Tracker(per={per!r}) is not known; expected 'batch' or 'example'.")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise SquisherError(f"Tracker expects every to be a positive whole number, and got {every!r}.")
        if per == "example" and automatic:
            raise SquisherError(
                "Tracker(per='example') observes inside `with tracker.step():`; leave automatic=True out."
            )
        if optimizer is None and (automatic or scaler is not None):
            raise SquisherError(
                f"Tracker({'automatic=True' if automatic else 'scaler=...'}) needs to know the optimizer: "
                "use Tracker(model, optimizer, ...)."
            )
        self.model = model
        self.optimizer = None if optimizer is None else _unwrapped(optimizer)
        self.beta2 = float(beta2)
        self.dtype = dtype
        self.automatic = automatic
        self.after_clipping = automatic
        self.skipped = 0
        self.per, self.every, self.examples = per, every, 0
        self._calls = 0
        self._refused: dict[str, str] = {}
        self._positions = False
        self._proven: Any = None
        self._scaler = scaler
        self._values: dict[str, Tensor] = {}
        self._steps: dict[str, int] = {}
        self._clock: _Clock | None = None
        self._observed_at: int | None = None
        self._handles: list[Any] = []
        if self.optimizer is not None:
            if not self._tracked():
                raise SquisherError(
                    "Tracker: none of the optimizer's parameters belongs to the model. Make the optimizer from this "
                    "very model (a copy or a reloaded model has other parameters)."
                )
            self._register(self.optimizer)

    def __repr__(self) -> str:
        steps = max(self._steps.values(), default=0)
        return f"Tracker(beta2 {self.beta2:g}: {len(self._values)} tensors, {steps} steps observed, {self.skipped} skipped)"

    def observe(self) -> bool:
        """Take the parameters' present gradients into the average.

        Returns:
            True, or False if the step was left out, because a gradient is not finite or it is not its turn (`every`).

        Raises:
            SquisherError: If no parameter has a gradient, if gradients are known to be scaled, or if the tracker
                observes by itself.
        """
        if self.automatic:
            raise SquisherError(
                "observe() was called on a Tracker(automatic=True), which observes at each step of its optimizer. "
                "Leave the call out, or make the tracker with automatic=False to observe before clipping."
            )
        if self.per == "example":
            raise SquisherError(
                "observe() was called on a Tracker(per='example'), which observes inside `with tracker.step():` around the "
                "forward and backward passes. Use that, or per='batch'."
            )
        if not self._turn():
            return False
        self._check_unscaled()
        if self._clock is not None and self._clock.steps == self._observed_at:
            warnings.warn(
                "Tracker.observe() was called twice without a step of the optimizer between: call it once per step, "
                "after the backward of the last micro-batch. Both observations were counted.",
                SquisherWarning,
                stacklevel=2,
            )
        found = self._gradients()
        if not found:
            raise SquisherError(
                "Tracker.observe() found no gradient: it must be called after backward() and before zero_grad(). "
                "Engines that keep gradients elsewhere than in .grad (DeepSpeed) cannot be observed."
            )
        counted = self._update(found)
        if counted and self._clock is not None:
            self._observed_at = self._clock.steps
        return counted

    @contextmanager
    def step(self, factor: float | None = None) -> Iterator[None]:
        """Observe the forward and backward passes of one optimizer step, which are made inside; for `per="example"`.

        Every example is a row of the model's inputs, and the loss a sum or mean over them by torch's own operations. A step that
        cannot be observed raises an error as long as nothing was observed, and is left out with a warning afterwards.

        Args:
            factor: What the sum of the examples' losses was multiplied by; only where the parts of a loss have different factors.

        Raises:
            SquisherError: Examples have no gradients of their own, or the loss could not be followed; the message says why.
        """
        if self.per != "example":
            raise SquisherError(
                "Tracker.step() is for per='example'; with per='batch' call observe() before each step."
            )
        if not self._turn():
            yield
            return
        from ..measure.fast import PROVEN_ANEW
        from ..measure.training.sharded_step import ShardedStep
        from ..measure.training.step import Proven, Step

        every = {name: p for name, p in self._tracked() if p.requires_grad}
        tracked = {name: p for name, p in every.items() if name not in self._refused}
        if every and not tracked:
            name, reason = next(iter(self._refused.items()))
            raise SquisherError(f"Tracker(per='example') can observe no parameter; {name}: {reason}.")
        kind = ShardedStep if any(map(ranks.is_sharded, every.values())) else Step
        self._proven = Proven() if self._proven is None else self._proven
        anew = max(self._steps.values(), default=0) + 1 in PROVEN_ANEW  # others when they do something new
        with kind(self.model, tracked, self._proven, anew, self.dtype, factor) as one:
            yield
        self._average(one, tracked)

    @property
    def estimator(self) -> dict[str, Any] | None:
        """What kind of Fisher the average is, or None if it is the batch's squared gradient."""
        if self.per != "example":
            return None
        return {
            "labels": "data",
            "per": "example",
            "draws": 1,
            "average": "moving",
            "beta2": self.beta2,
            "every": self.every,
        }

    @property
    def unit(self) -> str | None:
        """What the average is per, with `per="example"`: an example, or the summed positions of a sequence."""
        return None if self.per != "example" else "sequence" if self._positions else "example"

    def items(self) -> Iterator[tuple[str, nn.Parameter, Tensor, int]]:
        """Yield name, parameter, average (uncorrected, not a copy) and steps of every observed parameter that the model has now.

        The mean squared gradient is average / (1 − β₂ ** steps).
        """
        for name, parameter in self.model.named_parameters():
            if name in self._values:
                yield name, parameter, self._values[name], self._steps[name]

    def absent(self) -> dict[str, Absence]:
        """Return the model's parameters that were never observed, each with the reason."""
        tracked = {name for name, _ in self._tracked()}
        reasons = {}
        for name, parameter in self.model.named_parameters():
            if name not in self._values:
                if not parameter.requires_grad:
                    reasons[name] = Absence(Reason.FROZEN, "frozen")
                elif name not in tracked:
                    reasons[name] = Absence(Reason.NOT_IN_OPTIMIZER, "not in the optimizer")
                elif name in self._refused:
                    reasons[name] = Absence(Reason.NO_RULE, self._refused[name])
                else:
                    reasons[name] = Absence(Reason.NO_GRADIENT, "never had a gradient")
        return reasons

    def reset(self) -> None:
        """Forget what was observed, for instance when a new task begins."""
        self._values.clear()
        self._steps.clear()
        self.skipped = self.examples = self._calls = 0
        self._refused.clear()
        self._positions, self._proven = False, None
        self.after_clipping = self.automatic
        self._observed_at = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain types and tensors (not copies), readable by `torch.load(weights_only=True)`."""
        return {
            "beta2": self.beta2,
            "after_clipping": self.after_clipping,
            "skipped": self.skipped,
            "per": self.per,
            "calls": self._calls,
            "examples": self.examples,
            "positions": self._positions,
            "refused": dict(self._refused),
            "steps": dict(self._steps),
            "values": dict(self._values),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict()` gave; to the bit, if the dtype is the same.

        Args:
            state: The state; its tensors are copied to where the parameters are.

        Raises:
            SquisherError: If the state is not a tracker's, has another beta2, or a tensor has another shape.
            NamingError: If the state has a name that the model has not. Nothing is loaded in any of these cases.
        """
        missing = [k for k in ("beta2", "after_clipping", "skipped", "steps", "values") if k not in state]
        if missing or state["steps"].keys() != state["values"].keys():
            what = f"{', '.join(missing)} missing" if missing else "steps and values have different names"
            raise SquisherError(f"This is not the state_dict of a Tracker: {what}.")
        if state["beta2"] != self.beta2:
            raise SquisherError(
                f"The tracker's state was made with beta2={state['beta2']}, and this tracker has beta2={self.beta2}. "
                f"Use Tracker(..., beta2={state['beta2']}) to go on."
            )
        if state.get("per", "batch") != self.per:
            raise SquisherError(
                f"The tracker's state was made with per={state.get('per', 'batch')!r}, and this tracker has per={self.per!r}: "
                f"other averages. Use Tracker(..., per={state.get('per', 'batch')!r}) to go on."
            )
        parameters = dict(self.model.named_parameters())
        values = {}
        for name, value in state["values"].items():
            if name not in parameters:
                raise NamingError(
                    f"The tracker's state has {name!r}, and the model has no such parameter. "
                    f"Wrap (DDP, compile) the model as it was when the state was saved.{near(name, parameters)}"
                )
            if value.shape != parameters[name].shape:
                raise SquisherError(
                    f"The tracker's state for {name!r} has shape {tuple(value.shape)}, and the model's parameter "
                    f"has {tuple(parameters[name].shape)}. Load a state of the same model."
                )
            values[name] = value.detach().to(device=parameters[name].device, dtype=self.dtype, copy=True)
        self._values = values
        self._steps = {name: int(state["steps"][name]) for name in values}
        self.skipped = int(state["skipped"])
        self._calls, self.examples = int(state.get("calls", 0)), int(state.get("examples", 0))
        self._positions, self._refused = bool(state.get("positions", False)), dict(state.get("refused", {}))
        self.after_clipping = self.automatic or bool(state["after_clipping"])
        self._observed_at = None

    def close(self) -> None:
        """Remove the tracker's hooks from the optimizer; what was observed stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._clock = None

    remove = close

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _turn(self) -> bool:
        """Return whether this step is to be observed."""
        self._calls += 1
        return (self._calls - 1) % self.every == 0

    @torch.no_grad()
    def _average(self, one: Any, tracked: Mapping[str, Tensor]) -> None:
        """Take the squares of a step, of all processes together, into the average."""
        finite = one.finite and all(map(_is_finite, one.sums.values()))
        every = ranks.gather((one.problem, one.refused, one.examples, one.positions, finite, sorted(one.sums)))
        problems = [problem for problem, *_ in every if problem]
        for _, refused, *_ in every:
            self._refused.update(refused)
        for name in self._refused:
            self._values.pop(name, None)
            self._steps.pop(name, None)
        if problems:
            if not self._values:
                raise SquisherError(f"Tracker(per='example') cannot observe this step: {problems[0]}.")
            self.skipped += 1
            warnings.warn(f"Tracker(per='example') left out a step: {problems[0]}.", SquisherWarning, stacklevel=4)
            return
        examples = sum(count for _, _, count, *_ in every)
        if not examples or not all(finite for *_, finite, _ in every):
            self.skipped += 1
            return
        self.examples += examples
        self._positions = self._positions or any(positions for *_, positions, _, _ in every)
        seen = {name for *_, names in every for name in names} - self._refused.keys()
        names = [name for name in tracked if name in seen or name in self._values]
        sums = {name: one.sums.get(name) for name in names}
        sums = {
            name: torch.zeros_like(ranks.local_of(tracked[name]), dtype=self.dtype) if s is None else s
            for name, s in sums.items()
        }
        ranks.sum_in_place(s for name, s in sums.items() if not ranks.is_sharded(tracked[name]))
        for name, total in sums.items():
            if name not in self._values:
                self._values[name] = ranks.sharded_like(torch.zeros_like(total), tracked[name])
            whole = self._values[name] = self._values[name].to(total.device)
            value = ranks.local_of(whole)
            value.mul_(self.beta2).add_(total.to(value.dtype), alpha=(1 - self.beta2) / examples)
            self._steps[name] = self._steps.get(name, 0) + 1
        if self.every == 1:
            one.proven.keep(one.sums)

    def _register(self, optimizer: torch.optim.Optimizer) -> None:
        try:
            if self.automatic:
                self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            else:
                # The hook holds the clock and not the tracker, so that a forgotten tracker does not live on in it.
                clock = self._clock = _Clock()
                self._handles.append(optimizer.register_step_post_hook(clock.tick))
        except AttributeError as error:
            self._clock = None
            if self.automatic:
                raise SquisherError(
                    f"Tracker(automatic=True): {type(optimizer).__name__} has no step hooks. "
                    "Use automatic=False and call observe() before each step."
                ) from error

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("closure") is not None or any(callable(a) for a in args if a is not optimizer):
            raise SquisherError(
                "Tracker(automatic=True) cannot observe a step that is given a closure: the gradient does not exist "
                "before it. Use automatic=False and call observe() at the end of the closure."
            )
        # Fused optimizers unscale inside their kernel; a GradScaler leaves the factor on the optimizer for them.
        scale = getattr(optimizer, "grad_scale", None)
        self._update(self._gradients(), 1.0 if scale is None else float(scale))

    def _check_unscaled(self) -> None:
        """Refuse scaled gradients. The test is to ask the scaler to unscale, which it refuses if that was done: nothing else public tells."""
        if self._scaler is None or not self._scaler.is_enabled() or self.optimizer is None:
            return
        try:
            self._scaler.unscale_(self.optimizer)
        except RuntimeError as error:
            if "after step" in str(error):
                raise SquisherError(
                    "Tracker.observe() was called after scaler.step(): call it before, right after "
                    "scaler.unscale_(optimizer)."
                ) from error
            return
        except (AssertionError, ValueError) as error:
            raise SquisherError(f"Tracker.observe(): the scaler cannot unscale these gradients: {error}") from error
        raise SquisherError(
            "Tracker.observe() was called with gradients that the GradScaler had not unscaled: "
            "call scaler.unscale_(optimizer) before it."
        )

    def _tracked(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters to observe. Walked anew each time: parameters may come, go and be replaced."""
        named = self.model.named_parameters()
        if self.optimizer is None:
            return [(name, parameter) for name, parameter in named if parameter.requires_grad]
        held = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        return [(name, parameter) for name, parameter in named if id(parameter) in held]

    def _gradients(self) -> list[tuple[str, nn.Parameter, Tensor]]:
        # A parameter that was frozen may still hold the gradient of an earlier step.
        found = []
        for name, parameter in self._tracked():
            gradient = parameter.grad
            if gradient is None or not parameter.requires_grad:
                continue
            if gradient.is_complex():
                raise SquisherError(f"Tracker: {name!r} is complex; only real parameters can be observed.")
            known = self._values.get(name)
            if known is not None and known.shape != parameter.shape:
                raise SquisherError(
                    f"Tracker: {name!r} had shape {tuple(known.shape)} and now has {tuple(parameter.shape)}. "
                    "Make a new Tracker after changing the model."
                )
            if gradient.is_sparse:
                # Converted first: repeated rows are summed in the average's precision.
                gradient = gradient.to(self.dtype).coalesce()
            found.append((name, parameter, gradient))
        return found

    @torch.no_grad()
    def _update(self, found: list[tuple[str, nn.Parameter, Tensor]], scale: float = 1.0) -> bool:
        gradients = [gradient for _, _, gradient in found]
        if not all_finite(gradients, self.dtype):
            self.skipped += 1
            return False
        for name, parameter, gradient in found:
            if name not in self._values:
                self._values[name] = torch.zeros_like(parameter, dtype=self.dtype, requires_grad=False)
            elif self._values[name].device != gradient.device:  # the model was moved
                self._values[name] = self._values[name].to(gradient.device)
            self._steps[name] = self._steps.get(name, 0) + 1
        average_squares_([self._values[name] for name, _, _ in found], gradients, self.beta2, scale)
        return True


def _is_finite(squares: Tensor) -> bool:
    # A sum of numbers that are not negative shows it, many times faster than a norm; it may overflow where none of them does.
    return bool(squares.sum().isfinite()) or bool(squares.isfinite().all())


class _Clock:
    """A count of the steps of an optimizer."""

    def __init__(self) -> None:
        self.steps = 0

    def tick(self, *_: object) -> None:
        self.steps += 1


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside the wrappers of training libraries, which hold it as `.optimizer`."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    if not hasattr(optimizer, "param_groups"):
        raise SquisherError(f"Tracker expects a torch.optim.Optimizer, and got {type(optimizer).__name__}.")
    return optimizer
