"""What the largest entries of two importances have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import SquisherError
from ...order import Selection, Source, thresholds

__all__ = ["Overlap", "overlap_by_sorting", "overlaps_of"]


@dataclass(frozen=True)
class Overlap:
    """What the k largest entries of both have in common.

    Attributes:
        fraction: k relative to the number of common entries.
        k: How many of the largest entries were taken of each.
        overlap: The share of k that is in both.
        chance: What two unrelated importances share on average: k/n.
        threshold_a: The k-th largest value of a. At 0, k reaches into entries without importance, and which of them are
            taken depends on their place alone: the overlap then says little.
        threshold_b: The same of b.
    """

    fraction: float
    k: int
    overlap: float
    chance: float
    threshold_a: float
    threshold_b: float


def overlaps_of(
    a: Mapping[str, Source], b: Mapping[str, Source], sizes: Sequence[float | int], numel: int
) -> list[Overlap]:
    """Return the overlaps at several k, each a fraction or a count, in the passes of one."""
    ks = [_entries(size, numel) for size in sizes]
    kth_a, kth_b = thresholds(a, ks), thresholds(b, ks)
    chosen = [(Selection(of_a), Selection(of_b)) for of_a, of_b in zip(kth_a, kth_b, strict=True)]
    common = [0] * len(ks)
    for name in a:
        for x, y in zip(a[name](), b[name](), strict=True):
            for place, (in_a, in_b) in enumerate(chosen):
                common[place] += int((in_a(x) & in_b(y)).sum())
    return [
        Overlap(
            fraction=size if isinstance(size, float) else k / numel,
            k=k,
            overlap=shared / k,
            chance=k / numel,
            threshold_a=of_a.value,
            threshold_b=of_b.value,
        )
        for size, k, shared, of_a, of_b in zip(sizes, ks, common, kth_a, kth_b, strict=True)
    ]


def _entries(size: float | int, numel: int) -> int:
    if isinstance(size, float) and 0 < size <= 1:
        return max(1, math.floor(size * numel))
    if isinstance(size, int) and not isinstance(size, bool) and 1 <= size <= numel:
        return size
    raise SquisherError(
        f"overlap(k) takes a fraction (a float between 0 and 1) or a number of entries (1 to {numel:,}), not {size!r}."
    )


def overlap_by_sorting(x: Tensor, y: Tensor, size: float | int) -> float:
    """Return the same for two tensors of few entries, of which a model may have thousands; nan where it reaches into zeros."""
    k = _entries(size, x.numel())
    (values_x, order_x), (values_y, order_y) = (side.sort(descending=True, stable=True) for side in (x, y))
    if not (values_x[k - 1] > 0 and values_y[k - 1] > 0):
        return math.nan
    chosen = torch.zeros(x.numel(), dtype=torch.bool)
    chosen[order_x[:k]] = True
    return int(chosen[order_y[:k]].sum()) / k
