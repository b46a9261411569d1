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

from ..order.correlation import centred_ranks, correlation, spearman

__all__ = ["Rounded", "median", "ratios", "spearman", "total"]

_SMALLEST = torch.finfo(torch.float32).tiny  # below are denormals, which count as 0 in ratios
_LARGEST = torch.finfo(torch.float32).max
_BINS = 1 << 15  # 16 bits without the sign


class Rounded:
    """Spearman and median ratio of rounded values: `count` everything, then `cross` everything once more."""

    def __init__(self) -> None:
        self._counts = torch.zeros(3, _BINS, dtype=torch.int64)  # of a, of b, of a/b
        self._ranks: tuple[Tensor, Tensor] | None = None
        self._cross = 0.0
        self.totals = (0.0, 0.0)

    def count(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Make the first pass: how often each rounded value and each rounded ratio occurs, and both sums."""
        for x, y in pairs:
            for row, values in enumerate((x, y, ratios(x, y))):
                self._counts[row] += torch.bincount(_bins(values), minlength=_BINS)
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
            of_x, of_y = self._ranks[0].index_select(0, _bins(x)), self._ranks[1].index_select(0, _bins(y))
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
        low, high = ((middle.int() << 16) | 0x8000).view(torch.float32).tolist()
        return math.sqrt(low) * math.sqrt(high)


def _bins(values: Tensor) -> Tensor:
    """Return the upper 16 bits of each value as float32, without the sign: integers in the order of the values."""
    return (values.to(torch.float32).view(torch.int32) >> 16) & (_BINS - 1)


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
