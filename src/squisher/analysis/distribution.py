"""The distribution of an importance's values, per tensor and overall, from one pass in bounded memory.

A histogram of the upper 16 bits of each value as float32 gives quantiles to a relative 2⁻⁷, and the histogram over tenths of a
decade for charts. Sums, extremes and counts are exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..order import BINS, bins_of, middles

__all__ = ["LOG10_EDGES", "Distribution", "Tally", "places_of"]

_FIRST, _PER_DECADE, _DECADES = -46, 10, 85
LOG10_EDGES: tuple[float, ...] = tuple(_FIRST + i / _PER_DECADE for i in range(_DECADES * _PER_DECADE + 1))
"""The edges of every histogram, as powers of ten: from below the smallest positive float32 to above the largest."""

_NORMAL = 0x0080  # the first bin whose values are not denormal
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@cache
def _places() -> Tensor:
    """Return the place of each of the 16-bit bins in a histogram over `LOG10_EDGES`."""
    place = ((middles().double().log10() - _FIRST) * _PER_DECADE).floor()
    return place.nan_to_num(0).clamp(0, _DECADES * _PER_DECADE - 1).long()


def places_of(values: Tensor) -> Tensor:
    """Return the place of each positive value in a histogram over `LOG10_EDGES`; edges are exact to a relative 2⁻⁷."""
    return _places().index_select(0, bins_of(values))


@dataclass(frozen=True)
class Distribution:
    """The distribution of the values of one tensor, or of all.

    Attributes:
        numel: The number of values.
        total: Their sum.
        mean: Their mean; it and the following are nan if there are no values.
        min: The smallest value.
        max: The largest value.
        p10: The value that a tenth of the values does not exceed (to a relative 2⁻⁷).
        median: The value that half of them do not exceed.
        p90: The value that nine tenths of them do not exceed.
        zeros: How many are exactly 0.
        denormals: How many are positive but below 1.2e-38, where float32 loses digits; applications take them as 0.
        histogram: How many positive values are in each tenth of a decade; `LOG10_EDGES` are the edges.
    """

    numel: int
    total: float
    mean: float
    min: float
    max: float
    p10: float
    median: float
    p90: float
    zeros: int
    denormals: int
    histogram: list[int] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: None for nan, and the histogram without its empty ends."""
        filled = [place for place, count in enumerate(self.histogram) if count] or [0]
        plain: dict[str, Any] = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in vars(self).items()
            if name != "histogram"
        }
        plain["log10_histogram"] = {
            "first_edge": LOG10_EDGES[filled[0]],
            "step": 1 / _PER_DECADE,
            "counts": self.histogram[filled[0] : filled[-1] + 1],
        }
        return plain


class Tally:
    """Collects values chunk by chunk."""

    def __init__(self) -> None:
        self._counts = torch.zeros(BINS, dtype=torch.int64)
        self._numel = self._zeros = 0
        self._total = 0.0
        self._min, self._max = math.inf, -math.inf

    def add(self, values: Tensor) -> None:
        """Count one chunk of non-negative finite values."""
        if not values.numel():
            return
        low, high = values.aminmax()
        self._min, self._max = min(self._min, float(low)), max(self._max, float(high))
        self._numel += values.numel()
        self._total += float(values.sum(dtype=torch.float64))
        # By their bits, because a processor that flushes denormals takes them for zeros.
        bits = values.view(_INTEGERS[values.element_size()])
        self._zeros += values.numel() - int(torch.count_nonzero(bits & torch.iinfo(bits.dtype).max))
        self._counts += torch.bincount(bins_of(values), minlength=BINS)

    def include(self, other: Tally) -> None:
        """Add the values of another tally."""
        self._min, self._max = min(self._min, other._min), max(self._max, other._max)
        self._numel += other._numel
        self._total += other._total
        self._zeros += other._zeros
        self._counts += other._counts

    def distribution(self) -> Distribution:
        """Return the distribution of the values so far."""
        some = self._numel > 0
        p10, median, p90 = self._quantiles(0.1, 0.5, 0.9)
        positive = self._counts.clone()
        positive[0] -= self._zeros
        return Distribution(
            numel=self._numel,
            total=self._total,
            mean=self._total / self._numel if some else math.nan,
            min=self._min if some else math.nan,
            max=self._max if some else math.nan,
            p10=p10,
            median=median,
            p90=p90,
            zeros=self._zeros,
            denormals=int(self._counts[:_NORMAL].sum()) - self._zeros,
            histogram=torch.zeros(len(LOG10_EDGES) - 1, dtype=torch.int64).index_add_(0, _places(), positive).tolist(),
        )

    def _quantiles(self, *shares: float) -> Iterator[float]:
        upto, values = self._counts.cumsum(0), middles()
        for share in shares:
            place = max(1, math.ceil(share * self._numel))
            if not self._numel:
                yield math.nan
            elif place <= self._zeros:
                yield 0.0
            else:
                middle = float(values[int(torch.searchsorted(upto, place))])
                yield min(max(middle, self._min), self._max)
