"""The forward and backward pass of a training step, watched: its loss and its gradients stay the user's own.

An operation that sums over the examples makes (a part of) the loss. It is known with its own factor, and the gradient that arrives at
its output is all that came later: accumulation, a scaler, a weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..batches import Batch
from ..examples import SHARED, UNKNOWN, Call, Examples, Look, Other, State, replaced, tensors_in
from ..following import is_custom, is_random, nodes_behind
from ..likelihood import Objective
from ..proof import distance, tolerance_of, total_of
from ..rules import Dense, Gradients, Rule, add_squares
from ..squaring import Pass
from ..sums import Sums
from .reductions import BY_CLASS, BY_ENTRY, REDUCTIONS, counted_in, factor_of

__all__ = ["StepPass", "weighted_rows"]

REDUCED = Other("reduced")
"""A number that is a sum over examples, or made of such numbers."""
FLAT = Other("flat")
"""Rows of examples that are no neighbours: (positions, examples, ...) in one dimension, as torch's attention has them."""
_OBJECTIVE = Objective("categorical")


@dataclass
class _Reduction:
    """Where the loss sums over examples: what it sums, by which factor, and the gradient that arrives."""

    inputs: list[tuple[Tensor, Examples]]
    output: Tensor | None
    factor: float
    arrived: list[Tensor] = field(default_factory=list)


class StepPass(Pass):
    """The forward pass of one (micro-)batch and its backward pass.

    Attributes:
        refused: Parameters that are used in an operation without a rule, or for which the rules were wrong.
        evident: Parameters for which they were seen to be right.
        spoiled: Why the gradients of examples cannot be told apart, seen in the backward pass.
        finite: Whether what arrived at the loss, and at the parameters where they were proven, is finite.
    """

    _makes_copies = False  # the gradient of a copy would be summed in another order
    _compares = False  # the gradients are those of examples in their batch, whatever Python decided for it

    DIFFERENT_FACTORS = (
        "the loss is a sum of several parts with different factors, so that the loss of an example is not known: give "
        "step(factor=...), or reduce them together"
    )

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        parameters: Mapping[str, Tensor],
        guess: bool,
        gathered: Iterable[Tensor] | None = None,
    ):
        super().__init__(model, _OBJECTIVE, batch, parameters, guess, gathered)
        self.refused: dict[str, str] = {}
        self.evident: set[str] = set()
        self.spoiled, self.positions, self.finite = "", False, True
        self._flat: dict[int, tuple[Tensor, torch.Size, Examples]] = {}
        self.reductions: list[_Reduction] = []
        self.weights: Tensor | None = None
        self._wanted: dict[str, Tensor | None] = {}
        self._passing = False
        self._counted: Tensor | None = None
        for tensor, apart in batch.tensors():
            self._mark(tensor, Examples(0) if apart else SHARED)

    # -- forward -------------------------------------------------------------------------------------------------------

    def call(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation; see `Pass.call`. What sums over the examples is kept as part of the loss."""
        if self.reductions:
            tensors = tensors_in((args, kwargs))
            if any(self.is_reduced(t) for t in tensors):
                mixing = [t for t in tensors if t.requires_grad and self._state(t) not in (REDUCED, SHARED)]
                state = UNKNOWN if mixing else REDUCED
                return self._finish(func(*args, **kwargs), name, state, "a part of the loss mixes examples")
        if args and id(args[0]) in self._flat:
            return self._of_flat(func, name, args, kwargs)
        if name in REDUCTIONS:
            reduced = self._reduced(func, name, args, kwargs)
            if reduced is not None:
                return reduced
        return super().call(func, name, args, kwargs)

    def _of_flat(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on flat rows: a linear layer is given them as they were before, and a view may bring that back."""
        flat, shape, state = self._flat[id(args[0])]
        if func is F.linear:
            rows = flat.view(*shape[:2], -1)
            self._mark(rows, state)
            output = self.call(func, name, (rows, *args[1:]), kwargs)
            return self._flattened(output, output.flatten(0, 1), state)
        output = func(*args, **kwargs)
        back = name in ("view", "reshape", "unflatten") and output.shape[:2] == shape[:2] and output.dim() == 3
        return self._finish(output, name, state if back else UNKNOWN, f"{name} mixes the rows of examples")

    def _flattened(self, t: Tensor, output: Tensor, state: Examples) -> Tensor:
        self._flat[id(output)] = (output, t.shape, state)
        return self._finish(output, "flat", FLAT)

    def is_reduced(self, t: Tensor) -> bool:
        """Return whether this is (a part of) the loss."""
        return self._state(t) is REDUCED

    def without_gradient(self, args: Any, kwargs: Any) -> None:
        """Note that a parameter was used without gradients, perhaps to be used again in the backward pass."""
        self.reentrant = self.reentrant or any(id(t) in self._names for t in tensors_in((args, kwargs)))

    def _reduced(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = args[0] if args else kwargs.get("input")
        if not isinstance(first, Tensor):
            return None
        state = self._state(first)
        other = args[1] if name in BY_ENTRY and len(args) > 1 else None
        if state is SHARED and isinstance(other, Tensor) and other.shape == first.shape:
            state = self._state(other)  # the labels were given first
        attached = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
        # Of a loss, only the function in torch.nn.functional: the one below it has the same name and other arguments.
        if not isinstance(state, Examples) or not attached or func is not getattr(F, name, func):
            return None
        factor = factor_of(name, state, args, kwargs)
        if factor is None:
            return None
        inputs: list[tuple[Tensor, Examples]] = []
        instead: dict[int, Tensor] = {}
        for t in attached:
            where = self._state(t)
            if isinstance(where, Examples):
                instead[id(t)] = t.view_as(t)  # so that this use of it has a gradient of its own
                inputs.append((instead[id(t)], where))
            elif where is SHARED:
                self._refuse(t, "it is used in the loss")
            else:
                return None
        output = func(*replaced(args, instead), **replaced(kwargs, instead))
        reduction = _Reduction(inputs, output, factor)
        counted = counted_in(name, self.examples, args, kwargs)
        self._counted = counted if self._counted is None else self._counted | counted
        output.register_hook(lambda g: reduction.arrived.append(g.detach()) if self._in_backward else None)
        self.reductions.append(reduction)
        # A loss over classes with several positions for each example, as a language model has.
        self.positions = self.positions or (name in BY_CLASS and (state.inner > 1 or first.dim() > 2))
        return self._finish(output, name, REDUCED)

    def _state(self, t: Tensor) -> State:
        state = super()._state(t)
        return SHARED if state is UNKNOWN and not t.requires_grad else state  # without a gradient it is a constant

    def _state_after(self, call: Call) -> State:
        if "dropout" in call.name and is_random(call.name, call.args, call.kwargs):
            return call.look.fits(call.output.shape, call.look(call.first))
        if call.name in ("view", "reshape", "flatten"):
            t, output = call.first, call.output
            state = call.look(t)
            if isinstance(state, Examples) and state.dim == 1 and output.dim() == 2:
                shape = torch.Size((t.shape[0], self.examples, state.inner * math.prod(t.shape[2:])))
                if output.shape == (shape[0] * shape[1], shape[2]) and shape[0] > 1:
                    self._flat[id(output)] = (output, shape, Examples(1))
                    return FLAT
        return super()._state_after(call)

    def _finish(self, output: Any, name: str, states: State | list[State], reason: str = "") -> Any:
        output = super()._finish(output, name, states, reason)
        for t in tensors_in(output):
            if t.requires_grad and self._state(t) is UNKNOWN:
                t.register_hook(partial(self._spoil, self._why(t)))
        return output

    def _spoil(self, reason: str, _: Tensor) -> None:
        if self._in_backward and not self.spoiled:
            self.spoiled = reason

    # -- uses of parameters --------------------------------------------------------------------------------------------

    def _detach(self, t: Tensor) -> Tensor:
        return t  # training needs its gradient

    def _replaced(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], sources: list[Tensor], look: Look
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[tuple[Tensor, Rule]]]:
        args, kwargs, uses = super()._replaced(func, name, args, kwargs, sources, look)
        seen = {id(t) for t, _ in uses}
        for t in sources:
            if id(t) not in seen:
                self._refuse(t, f"it is used in an operation without a rule ({name})")
        return args, kwargs, [(t, rule) for t, rule in uses if self._names_of(t)]

    def _captured(self, output: Tensor, uses: list[tuple[Tensor, Rule]], state: Examples) -> Tensor:
        new = [source for source, _ in uses if id(source) not in self._names and id(source) not in self._behind]
        output = super()._captured(output, uses, state)
        for source in {id(s): s for s in new}.values():
            if id(source) in self._behind:
                # Before the gradient goes on, and the graph behind it is freed. By its key: the hook must not hold its own tensor.
                source.register_hook(partial(self._pass_on, id(source)))
        return output

    def _refuse(self, source: Tensor, reason: str) -> None:
        self.refused.update(dict.fromkeys(self._names_of(source), reason))

    # -- backward ------------------------------------------------------------------------------------------------------

    def hindrance(self, loss: Tensor, settings: Mapping[str, Any]) -> str:
        """Return why a backward pass from this loss cannot be observed; "" if it can."""
        if settings.get("create_graph") or settings.get("inputs") is not None:
            return "backward was called with create_graph or inputs"
        if not self.is_reduced(loss):
            if self.reentrant:
                return "a part of the model runs without gradients first (checkpointing: give use_reentrant=False)"
            return f"the loss is no sum over examples that could be followed: {self._why(loss)}"
        return ""

    def runs_python(self, loss: Tensor) -> bool:
        """Return whether a step of the backward pass is written in Python, and may mix examples now and then."""
        return self.hooked or any(map(is_custom, nodes_behind(loss)))

    def weighted(self, loss: Tensor, gradient: Tensor | None) -> dict[str, Tensor | None]:
        """Return Σ_n r_n g_n for every parameter, by a backward pass with the loss of example n multiplied by r_n."""
        outputs, columns = weighted_rows(self, loss, gradient)
        arrived = torch.autograd.grad(
            outputs, list(self.parameters.values()), columns, retain_graph=True, allow_unused=True
        )
        return dict(zip(self.parameters, arrived, strict=True))

    def start(
        self, dtype: torch.dtype, expected: dict[str, Tensor | None] | None, spare: dict[str, Tensor] | None = None
    ) -> None:
        """Begin to take the squares of what arrives; compare it with what is expected, if that is given."""
        self.sums = Sums(self.parameters, dtype)
        self.sums.spare = {} if spare is None else spare
        self._wanted = expected or {}
        if expected is None:
            self.weights = None
        else:
            self.bounds = {}
        for use in self._uses:
            if not use.intact():
                self._refuse(use.source, "its input is changed in place after use")
        self._uses.clear()
        self._in_backward = True

    def _take(self, source: Tensor, summand: Gradients) -> None:
        key = id(source)
        self._arrivals[key] = self._arrivals.get(key, 0) + 1
        self._pending.setdefault(key, []).append(summand)
        name = self._names.get(key)
        if name is not None and name not in self._parts and self._arrivals[key] == self._expected[key]:
            self._add(name, self._pending.pop(key))

    @torch.no_grad()
    def _pass_on(self, key: int, _: Tensor) -> None:
        """Send each example's gradient of what was made of parameters on to the parameters."""
        summands = None if self._passing or not self._in_backward else self._pending.pop(key, None)
        if summands is None:
            return
        source, behind = self._behind[key]
        names = sorted(behind)
        found: dict[str, list[Tensor]] = {name: [] for name in names}
        self._passing = True
        for n in range(self.examples):
            arriving = sum(p.example(n, source.shape) for p in summands).to(source.dtype)  # type: ignore[union-attr]
            if self.bounds is not None:
                self._bound_through(self.bounds, names, [arriving])
            parameters = [self.parameters[name] for name in names]
            gradients = torch.autograd.grad([source], parameters, [arriving], retain_graph=True, allow_unused=True)
            for name, gradient, p in zip(names, gradients, parameters, strict=True):
                found[name].append(torch.zeros_like(p) if gradient is None else gradient.to_dense())
        self._passing = False
        for name, gradients_of in found.items():
            self._pending.setdefault(id(self.parameters[name]), []).append(Dense(torch.stack(gradients_of)))

    @torch.no_grad()
    def finish(self) -> None:
        """Complete what waited: the backward pass is over."""
        self._complete()
        for name, gradient in self._wanted.items():
            if gradient is not None and bool(gradient.any()):
                self.refused.setdefault(name, "it is used in an operation that was not seen")
        self.sums = {name: total for name, total in self.sums.items() if name not in self.refused}
        self._wanted.clear()

    def _complete(self) -> None:
        """Add what waited for a use whose output did not matter."""
        self._in_backward = False
        self.finite = self.finite and all(bool(g.isfinite().all()) for r in self.reductions for g in r.arrived)
        for key, summands in self._pending.items():
            if key in self._names:
                self._add(self._names[key], summands)
        self._pending.clear()

    def release(self) -> None:
        """Drop the graph. Its hooks refer to this pass, so neither would ever be freed."""
        self._in_backward = False
        for reduction in self.reductions:
            reduction.inputs.clear()
            reduction.output = None
        for held in (
            self.reductions,
            self._flat,
            self._behind,
            self._uses,
            self._pending,
            self._detached,
            self._wanted,
        ):
            held.clear()
        self.sums, self.bounds = {}, None

    def _add(self, name: str, summands: list[Gradients]) -> None:
        if name in self.refused:
            self._wanted.pop(name, None)
        elif self.weights is not None:
            self._compare(name, summands, self.weights)
        else:
            add_squares(self.sums[name], summands)

    def _compare(self, name: str, summands: list[Gradients], weights: Tensor) -> None:
        """Add the squares, and check that Σ r_n g_n is what arrived when the losses were multiplied by r_n."""
        own = self.sums[name]
        add_squares(own, summands)
        given, one_by_one = torch.zeros_like(own), torch.zeros_like(own)
        bound = self._one_by_one(name, summands, weights, given, one_by_one)
        arrived = self._wanted.pop(name, None)
        arrived = torch.zeros_like(own) if arrived is None else arrived.to_dense().to(own.dtype)
        self._judge(name, own, given, arrived, one_by_one, bound)
        if name not in self.refused and self.finite and bool(one_by_one.any()):
            self.evident.add(name)

    def _one_by_one(
        self, name: str, summands: list[Gradients], weights: Tensor, given: Tensor, squares: Tensor
    ) -> Tensor:
        """Add Σ r_n g_n and Σ g_n², one example after the other; return the bound of their rounding errors."""
        for n, weight in enumerate(weights.tolist()):
            gradient: Tensor = sum(p.example(n, given.shape).to(given.dtype) for p in summands)  # type: ignore[assignment]
            given.add_(gradient, alpha=weight)
            squares.addcmul_(gradient, gradient)
        bounds = (self.bounds or {}).pop(name, None)
        return total_of(bounds, given) if bounds else squares

    def _judge(self, name: str, own: Tensor, given: Tensor, arrived: Tensor, one_by_one: Tensor, bound: Tensor) -> None:
        """Refuse a parameter if our squares, or Σ r_n g_n, are not what they should be."""
        wrong = max(distance(given, arrived, bound), distance(own.sqrt(), one_by_one.sqrt(), bound))
        if not bool(arrived.isfinite().all()):
            self.finite = False
        elif not wrong <= tolerance_of(self.types):
            self.refused.setdefault(name, f"the rules differ from the gradient (by {wrong:.1e})")

    @property
    def counted(self) -> int:
        """How many examples have a loss: as in `squisher.fisher`, one whose labels are all ignored has none."""
        return self.examples if self._counted is None else int(self._counted.sum())

    def factor(self) -> float | None:
        """Return what the loss of each example was multiplied by, or None if that differs between parts of the loss."""
        found: list[Tensor] = []
        for reduction in self.reductions:
            found += [g.double().reshape(-1).cpu() * reduction.factor for g in reduction.arrived]
        if not found:
            return 0.0
        factors = torch.cat(found)
        low, high = float(factors.min()), float(factors.max())
        return high if high - low <= 1e-5 * max(abs(high), abs(low)) else None


def weighted_rows(one: StepPass, loss: Tensor, gradient: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that the loss sums over examples, and their gradients with the rows of example n multiplied by r_n; the pass keeps r."""
    generator = torch.Generator().manual_seed(one.examples)
    weights = one.weights = torch.rand(one.examples, generator=generator, dtype=torch.float64) + 0.5
    inputs = [pair for reduction in one.reductions for pair in reduction.inputs]
    found = torch.autograd.grad(loss, [t for t, _ in inputs], gradient, retain_graph=True, allow_unused=True)
    used = [(t, g * _rows(weights, g, state)) for (t, state), g in zip(inputs, found, strict=True) if g is not None]
    return [t for t, _ in used], [g for _, g in used]


def _rows(weights: Tensor, g: Tensor, state: Examples) -> Tensor:
    """Return a number for each example, against the rows of a gradient."""
    rows = weights.to(g.device, g.dtype).repeat_interleave(state.inner)
    return rows.view([-1 if d == state.dim else 1 for d in range(g.dim())])
