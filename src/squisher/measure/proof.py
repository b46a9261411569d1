"""Proof on two examples: where the examples are in every operation, and that what the fast engine computes is what the loop computes.

The gradients that are sent back are drawn at random instead of following from the likelihood: those of a network that is sure of
its answer are too small for their squares to be compared, or zero, and would prove nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor, nn

from .batches import Batch
from .bounds import bound_of
from .layers import Rule
from .likelihood import IGNORED, Objective, Outputs
from .loop import each_gradient
from .passes import Layout, Pass, Watch, anchored, run
from .pieces import Piece
from .sampling import normals
from .sums import Sums

__all__ = ["Proven", "frozen", "prove"]

# How far the square roots may differ, relative to the sum of the absolute values of what is added up in them.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}

_COARSEST = max(_TOLERANCE.values())
_SAMPLED = 1 << 14

Shapes = dict[str, list[tuple[int, ...]]]


@dataclass
class Proven:
    """What the proof found.

    Attributes:
        layouts: for every parameter that can be captured, where the examples are in each of its uses.
        failed: what cannot be captured, and why.
        unused: parameters that nothing depends on, so far.
    """

    layouts: dict[str, list[Layout]]
    failed: dict[str, str] = field(default_factory=dict)
    unused: set[str] = field(default_factory=set)


@contextmanager
def frozen(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Inside, none of these requires a gradient."""
    parameters = list(parameters)
    flags = [p.requires_grad for p in parameters]
    for p in parameters:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p, flag in zip(parameters, flags, strict=True):
            p.requires_grad_(flag)


def prove(
    sums: Sums,
    model: nn.Module,
    objective: Objective,
    batch: Batch,
    index: Tensor,
    parameters: Mapping[str, Tensor],
) -> Proven | None:
    """Compare the fast engine with the loop on two examples, parameter by parameter.

    Args:
        sums: used as scratch memory; empty before, zeros after.
        model: in the mode and on the device that are wanted.
        objective: which Fisher.
        batch: the first batch.
        index: where its examples are in the stream.
        parameters: what is to be computed, by name.

    Returns:
        What can be captured and what cannot, or None if no label of the batch counts.
    """
    if not callable(objective.likelihood):
        objective = _Probe.of(objective)
    chosen = _two(batch)
    if chosen is None:
        return None
    two, index = batch.select(chosen), index[chosen]
    modes = [(m, m.training) for m in model.modules()]
    model.eval()  # random layers would make two passes differ
    try:
        proof = _Proof(sums, model, objective, two, index, parameters)
        return proof.result()
    finally:
        for module, mode in modes:
            module.training = mode


class _Probe(Objective):
    """Random gradients with respect to the outputs, the same for an example wherever it is: r(example, position) · r(class)."""

    @classmethod
    def of(cls, objective: Objective) -> _Probe:
        """With two draws where the objective has several columns, which the engine adds up in another way."""
        given = {f.name: getattr(objective, f.name) for f in fields(objective)}
        several = objective.labels == "exact" or (objective.labels == "sampled" and objective.draws > 1)
        return cls(**{**given, "draws": 2 if several else 1})

    def terms(self, outputs: Outputs, index: Tensor) -> Iterator[Tensor]:
        for draw in range(self.draws):
            products = outputs.values * self._random(outputs, index, draw)
            by_position = products.sum(2) if products.dim() == 3 else products
            if self.unit == "token":
                yield from by_position.unbind(1)
            else:
                yield by_position.sum(1)

    @torch.no_grad()
    def columns(self, outputs: Outputs, index: Tensor) -> Iterator[Tensor]:
        for draw in range(self.draws):
            yield from self._per_unit(self._random(outputs, index, draw))

    @torch.no_grad()
    def _random(self, outputs: Outputs, index: Tensor, draw: int) -> Tensor:
        values = outputs.values
        r = normals(self.seed, index, draw, values.shape[1]).to(values.device, values.dtype) * outputs.mask
        if values.dim() == 2:
            return r
        classes = normals(self.seed, torch.zeros(1, dtype=torch.long), draw, values.shape[2])
        return r[:, :, None] * classes[0].to(values.device, values.dtype)


class _Proof:
    def __init__(
        self,
        sums: Sums,
        model: nn.Module,
        objective: Objective,
        two: Batch,
        index: Tensor,
        parameters: Mapping[str, Tensor],
    ):
        self.sums, self.model, self.objective, self.two, self.index = sums, model, objective, two, index
        self.parameters = parameters
        self.reached: set[str] = set()

    def result(self) -> Proven:
        one, both = self._shapes(self.two.take(0, 1)), self._shapes(self.two)
        layouts: dict[str, list[Layout]] = {}
        failed: dict[str, str] = {}
        for name in both:
            found = _layouts(one.get(name, []), both[name])
            if found is None:
                failed[name] = "how it is used depends on the data"
            else:
                layouts[name] = found
        alike = [name for name, uses in layouts.items() if any(use.dim is None for use in uses)]
        wrong = self._compare(layouts)
        if alike and (wrong is None or wrong):
            layouts, wrong = self._some_of(layouts, alike, failed)
        for name, reason in (wrong or {}).items():
            failed[name] = reason
            del layouts[name]
        unseen = [name for name in self.parameters if name not in both]
        failed.update({name: "it is used in an operation without a rule" for name in unseen if name in self.reached})
        return Proven(layouts, failed, {name for name in unseen if name not in self.reached})

    def _some_of(
        self, layouts: dict[str, list[Layout]], alike: list[str], failed: dict[str, str]
    ) -> tuple[dict[str, list[Layout]], dict[str, str]]:
        """Giving each example its own copy of what all share broke something: find out for which parameters it works."""
        kept = {name: uses for name, uses in layouts.items() if name not in alike}
        wrong = self._compare(kept) or {}
        for name in alike:
            tried = self._compare({**kept, name: layouts[name]})
            if tried is not None and set(tried) <= set(wrong):
                kept[name], wrong = layouts[name], tried
            else:
                failed[name] = "all examples share what it makes"
        return kept, wrong

    def _shapes(self, batch: Batch) -> Shapes:
        found: Shapes = {}
        leaf = torch.zeros((), requires_grad=True)

        def seen(uses: list[tuple[str, Rule]], output: Tensor) -> Tensor:
            for name, _ in uses:
                found.setdefault(name, []).append(tuple(output.shape))
            # Code may ask whether there is a gradient to come (checkpointing does), so there is one, as later.
            return anchored(output, leaf) if torch.is_grad_enabled() else output

        with frozen(self.model.parameters()), Watch(self.parameters, seen):
            self.objective.outputs(self.model, batch)
        return found

    def _compare(self, layouts: Mapping[str, list[Layout]]) -> dict[str, str] | None:
        """What differs from the loop, and how; None if the model cannot be run so."""
        many = self.objective.draws > 1 or self.objective.unit == "token"
        one = Pass(self.sums, layouts, 2, many, bounds={})
        try:
            with frozen(self.model.parameters()):
                run(one, self.model, self.objective, self.two, self.index, self.parameters)
        except (RuntimeError, ValueError, IndexError, TypeError):
            if any(use.dim is None for uses in layouts.values() for use in uses):
                self._clear()
                return None
            raise
        differences = {name: _Difference(self.sums[name]) for name in layouts if name not in one.spoiled}

        def receive(name: str, gradient: Tensor) -> None:
            self.reached.add(name)
            if name in differences:
                differences[name].subtract(gradient)

        early = not one.computed_again
        each_gradient(receive, self.model, self.two, self.index, self.objective, self.parameters, on_arrival=early)
        # One coarse type anywhere (autocast) makes every gradient after it coarse.
        tolerance = max((_TOLERANCE.get(t, _COARSEST) for t in one.types), default=0.0)
        wrong = dict(one.spoiled)
        for name, difference in differences.items():
            error = difference.relative_to((one.bounds or {}).get(name, []))
            if not error <= tolerance:
                wrong[name] = f"it differs from the loop (by {error:.1e}, allowed {tolerance:.0e})"
        self._clear()
        return wrong

    @torch.no_grad()
    def _clear(self) -> None:
        for total in self.sums.values():  # in place: its memory is used again at once
            total.zero_()


class _Difference:
    """What we found for one parameter; the loop's squares are subtracted from it in place, gradient by gradient."""

    def __init__(self, found: Tensor):
        self.rest = found
        self.step = max(1, found.numel() // _SAMPLED) | 1
        self.ours = self._some(found).clone()
        self.theirs = torch.zeros_like(self.ours)
        self.largest = float(found.max()) if found.numel() else 0.0

    def _some(self, t: Tensor) -> Tensor:
        return t.reshape(-1)[:: self.step]

    def subtract(self, gradient: Tensor) -> None:
        gradient = gradient.to(self.rest.dtype)
        self.rest.addcmul_(gradient, gradient, value=-1)
        some = self._some(gradient)
        self.theirs.addcmul_(some, some)

    @torch.no_grad()
    def relative_to(self, bounds: list[Piece]) -> float:
        """The largest difference of the square roots, relative to the size of what was added up in them.

        Every entry counts relative to the largest bound of the tensor; entries at regular distances, some ten thousand of them,
        also relative to their own.
        """
        if not self.rest.numel():
            return 0.0
        at = torch.arange(0, self.rest.numel(), self.step, device=self.rest.device)
        bound, largest = bound_of(bounds, self.rest, at)
        f, e, b = self.ours.sqrt(), self.theirs.sqrt(), bound.sqrt()
        tiny = torch.finfo(b.dtype).tiny
        # The mean of what anything was added to: an embedding's other rows say nothing about the size of its gradient.
        typical = b.sum() / (b > 0).sum().clamp(min=1)
        own = float(((f - e).abs() / torch.maximum(b, typical).clamp(min=tiny)).max())
        low, high = torch.aminmax(self.rest)
        difference = max(-float(low), float(high))
        # |√f − √e| ≥ |f − e| / (√f + √e), without a square root of every entry
        roots = self.largest**0.5 + (self.largest + difference) ** 0.5
        # A difference that is not a number comes first, so that it is what is returned.
        return max(difference / max(roots * largest**0.5, tiny), own)


def _two(batch: Batch) -> list[int] | None:
    """Two examples whose labels count (one of them twice if there is only one)."""
    indices = list(range(batch.size))
    if batch.labels is not None and not batch.labels.is_floating_point():
        counts = (batch.labels != IGNORED).reshape(batch.size, -1).sum(1)
        indices = [n for n in indices if counts[n] > 0]
    if not indices:
        return None
    return (indices * 2)[:2]


def _layouts(one: list[tuple[int, ...]], both: list[tuple[int, ...]]) -> list[Layout] | None:
    """The dimension that doubles with the number of examples, for every use; None where there is no such pattern."""
    if len(one) != len(both):
        return None
    found = []
    for a, b in zip(one, both, strict=True):
        if len(a) != len(b):
            return None
        changed = [d for d in range(len(a)) if a[d] != b[d]]
        if not changed:
            found.append(Layout(None))
        elif len(changed) == 1 and b[changed[0]] == 2 * a[changed[0]]:
            found.append(Layout(changed[0], a[changed[0]] != 1))
        else:
            return None
    return found
