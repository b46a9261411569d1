"""Proof on two examples: where the examples are in every operation, and that what the fast engine computes is what the loop computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from .batches import Batch
from .layers import Rule
from .likelihood import IGNORED, Objective
from .loop import add_squares
from .passes import Layout, Pass, Watch, anchored, run
from .pieces import Piece
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
def frozen(model: nn.Module) -> Iterator[None]:
    """Inside, no parameter requires a gradient; `preserved` puts the flags back."""
    parameters = list(model.parameters())
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
        sums: used as scratch memory; empty before and after.
        model: in the mode and on the device that are wanted.
        objective: which Fisher.
        batch: the first batch.
        index: where its examples are in the stream.
        parameters: what is to be computed, by name.

    Returns:
        What can be captured and what cannot, or None if no label of the batch counts.
    """
    if objective.labels == "exact":
        # The same gradients with fewer columns.
        objective = replace(objective, labels="sampled", draws=2)
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
        self.expected = Sums(parameters, sums.dtype)
        self.gradients: set[str] = set()
        add_squares(self.expected, model, two, index, objective, parameters, self.gradients)

    def result(self) -> Proven:
        one, both = self._shapes(self.two.take(0, 1)), self._shapes(self.two)
        layouts: dict[str, list[Layout]] = {}
        failed: dict[str, str] = {}
        unused: set[str] = set()
        for name in self.parameters:
            if name in both:
                found = _layouts(one.get(name, []), both[name])
                if found is None:
                    failed[name] = "how it is used depends on the data"
                else:
                    layouts[name] = found
            elif name in self.gradients:
                failed[name] = "it is used in an operation without a rule"
            else:
                unused.add(name)
        alike = [name for name, uses in layouts.items() if any(use.dim is None for use in uses)]
        wrong = self._compare(layouts)
        if alike and (wrong is None or wrong):
            layouts, wrong = self._some_of(layouts, alike, failed)
        for name, reason in (wrong or {}).items():
            failed[name] = reason
            del layouts[name]
        return Proven(layouts, failed, unused)

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

        with frozen(self.model), Watch(self.parameters, seen):
            self.objective.outputs(self.model, batch)
        return found

    def _compare(self, layouts: Mapping[str, list[Layout]]) -> dict[str, str] | None:
        """What differs from the loop, and how; None if the model cannot be run so."""
        many = self.objective.draws > 1 or self.objective.unit == "token"
        one = Pass(self.sums, layouts, 2, many, bounds={})
        try:
            with frozen(self.model):
                run(one, self.model, self.objective, self.two, self.index, self.parameters)
            return self._differences(one, layouts)
        except (RuntimeError, ValueError, IndexError, TypeError):
            if any(use.dim is None for uses in layouts.values() for use in uses):
                return None
            raise
        finally:
            self.sums.clear()

    @torch.no_grad()
    def _differences(self, one: Pass, layouts: Mapping[str, list[Layout]]) -> dict[str, str]:
        wrong = dict(one.spoiled)
        bounds = one.bounds or {}
        # One coarse type anywhere (autocast) makes every gradient after it coarse.
        tolerance = max((_TOLERANCE.get(t, _COARSEST) for t in one.types), default=0.0)
        for name in layouts:
            if name not in wrong:
                error = _error(self.sums[name], self.expected[name], bounds.get(name, []))
                if not error <= tolerance:
                    wrong[name] = f"it differs from the loop (by {error:.1e}, allowed {tolerance:.0e})"
        return wrong


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


def _error(found: Tensor, expected: Tensor, bounds: list[Piece]) -> float:
    """The largest difference of the square roots, relative to the size of what was added up in them.

    Every entry counts relative to the largest bound of the tensor; entries at regular distances, some ten thousand of them, also
    relative to their own.
    """
    if not found.numel():
        return 0.0
    bound = torch.zeros_like(found)
    for piece in bounds:
        piece.add_squares(bound)
    step = max(1, found.numel() // _SAMPLED) | 1
    f, e, b = (t.reshape(-1)[::step].sqrt() for t in (found, expected, bound))
    tiny = torch.finfo(bound.dtype).tiny
    own = float(((f - e).abs() / torch.maximum(b, b.mean()).clamp(min=tiny)).max())
    largest = float(bound.max())
    # |√f − √e| ≥ |f − e| / (√f + √e), without a square root of every entry
    low, high = torch.aminmax(bound.copy_(found).sub_(expected))
    difference = max(-float(low), float(high))
    scale = max(2 * float(expected.max()) ** 0.5 * largest**0.5, tiny)
    return max(own, difference / scale)
