"""Rank correlation and median ratio of two sets of values: exactly, or of rounded values in bounded memory.

`spearman` and `median` are the definitions. `Rounded` gives the same of values rounded to the upper 16 bits of their
float32, which has a relative resolution of 2⁻⁷: a histogram of 32,768 bins then holds all ranks, however many values
there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from .keys import BINS, bins_of, middles

__all__ = ["Rounded", "centred_ranks", "correlation", "median", "ratios", "spearman", "total"]

_SMALLEST = torch.finfo(torch.float32).tiny  # below are denormals, which count as 0 in ratios
_LARGEST = torch.finfo(torch.float32).max


def spearman(x: Tensor, y: Tensor) -> float:
    """Rank correlation with mid-ranks for ties; nan where there is nothing, or a side is constant."""
    if not x.numel():
        return math.nan
    _, bins_x, counts_x = x.unique(return_inverse=True, return_counts=True)
    _, bins_y, counts_y = y.unique(return_inverse=True, return_counts=True)
    ranks_x, ranks_y = centred_ranks(counts_x), centred_ranks(counts_y)
    return correlation(float(torch.dot(ranks_x[bins_x], ranks_y[bins_y])), ranks_x, ranks_y, counts_x, counts_y)


def centred_ranks(counts: Tensor) -> Tensor:
    """Return the mid-rank of each distinct value (or bin), from how often each occurs; mean 0, within ±½."""
    counts = counts.double()
    number = counts.sum()
    return (counts.cumsum(0) - counts / 2 - number / 2) / number.clamp(min=1)


def correlation(cross: float, ranks_x: Tensor, ranks_y: Tensor, counts_x: Tensor, counts_y: Tensor) -> float:
    """Return the correlation, from the sum of products of ranks and how often each rank occurs; nan where a side is constant."""
    spread = float((counts_x * ranks_x.square()).sum()) * float((counts_y * ranks_y.square()).sum())
    return max(-1.0, min(1.0, cross / math.sqrt(spread))) if spread > 0 else math.nan


class Rounded:
    """Spearman and median ratio of rounded values: `count` everything, then `cross` everything once more."""

    def __init__(self) -> None:
        self._counts = torch.zeros(3, BINS, dtype=torch.int64)  # of a, of b, of a/b
        self._ranks: tuple[Tensor, Tensor] | None = None
        self._cross = 0.0
        self.totals = (0.0, 0.0)

    def count(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Make the first pass: how often each rounded value and each rounded ratio occurs, and both sums."""
        for x, y in pairs:
            for row, values in enumerate((x, y, ratios(x, y))):
                self._counts[row] += torch.bincount(bins_of(values), minlength=BINS)
            self.totals = (self.totals[0] + total(x), self.totals[1] + total(y))

    def include(self, other: Rounded) -> None:
        """Add what another one has counted."""
        self._counts += other._counts
        self.totals = (self.totals[0] + other.totals[0], self.totals[1] + other.totals[1])

    def packed(self) -> Rounded:
        """Itself, small while it waits for the second pass: most bins are empty."""
        self._counts = self._counts.to_sparse()
        return self

    def cross(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Make the second pass: the products of the ranks, which are known now."""
        if self._ranks is None:
            self._counts = self._counts.to_dense()
            self._ranks = centred_ranks(self._counts[0]), centred_ranks(self._counts[1])
        for x, y in pairs:
            of_x, of_y = self._ranks[0].index_select(0, bins_of(x)), self._ranks[1].index_select(0, bins_of(y))
            self._cross += float(torch.dot(of_x, of_y))

    def spearman(self) -> float:
        """Rank correlation with mid-ranks; nan where there is nothing, or all rounded values of a side are equal."""
        if self._ranks is None:
            return math.nan
        return correlation(self._cross, *self._ranks, self._counts[0], self._counts[1])

    def median_ratio(self) -> float:
        """Return the middle of the bin that holds the median; nan where there is no ratio."""
        counts = self._counts[2]
        number = int(counts.sum())
        if not number:
            return math.nan
        middle = torch.searchsorted(counts.cumsum(0), torch.tensor([(number + 1) // 2, number // 2 + 1]))
        low, high = middles()[middle].tolist()
        return math.sqrt(low) * math.sqrt(high)


def ratios(x: Tensor, y: Tensor) -> Tensor:
    """x/y where both are more than denormals; clipped to what a float32 can hold."""
    both = (x >= _SMALLEST) & (y >= _SMALLEST)
    return (x[both].double() / y[both].double()).clamp_(_SMALLEST, _LARGEST)


def median(values: Tensor) -> float:
    """Return the middle value, or the geometric mean of the two middle ones, so that it inverts with its values."""
    number = values.numel()
    if not number:
        return math.nan
    low, high = (float(values.kthvalue(place).values) for place in ((number + 1) // 2, number // 2 + 1))
    return math.sqrt(low) * math.sqrt(high)


def total(values: Tensor) -> float:
    """Return the sum, in float64."""
    return float(values.sum(dtype=torch.float64))
