"""Rank correlation, medians and concentration (how few entries hold most of a sum), in bounded memory.

`spearman` and `median` are the definitions. `Rounded` computes both for values rounded to the upper 16 bits of their float32 (a
relative resolution of 2⁻⁷): a histogram of 32,768 bins holds all their ranks. `concentration` uses the same bins.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import SquisherError
from .selection import BINS, DIGIT, DIGITS, INFINITY, Keys, Source, bins_of, checked, keys_of, middles

__all__ = ["Largest", "Rounded", "concentration", "median", "ratios", "spearman", "top_overlap", "total"]

_SMALLEST = torch.finfo(torch.float32).tiny  # below are denormals, which count as 0 in ratios
_LARGEST = torch.finfo(torch.float32).max


def spearman(x: Tensor, y: Tensor) -> float:
    """Return the rank correlation with mid-ranks for ties; nan where there is nothing, or a side is constant."""
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
    """Return the correlation of ranks from the sum of their products and their counts; nan where a side is constant."""
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
        """Add the counts of another instance."""
        self._counts += other._counts
        self.totals = (self.totals[0] + other.totals[0], self.totals[1] + other.totals[1])

    def packed(self) -> Rounded:
        """Compress the counts until the second pass (most bins are empty); return itself."""
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
        """Return the rank correlation with mid-ranks; nan where there is nothing, or all rounded values of a side are equal."""
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


def top_overlap(x: Tensor, y: Tensor, k: int) -> float:
    """Return the share of the k largest entries that both have; the first of equal ones; nan where zeros are among them."""
    if not x.numel():
        return math.nan
    (values_x, order_x), (values_y, order_y) = (side.sort(descending=True, stable=True) for side in (x, y))
    if not (values_x[k - 1] > 0 and values_y[k - 1] > 0):
        return math.nan
    chosen = torch.zeros(x.numel(), dtype=torch.bool)
    chosen[order_x[:k]] = True
    return int(chosen[order_y[:k]].sum()) / k


def ratios(x: Tensor, y: Tensor) -> Tensor:
    """Return x/y where both are more than denormals; clipped to what a float32 can hold."""
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


@dataclass(frozen=True)
class Largest:
    """What the largest `k` values hold.

    Attributes:
        k: How many there are.
        share: Their share of the total.
        rest: The sum of all others, summed from the smallest up.
        threshold: The smallest of the k; infinity for k = 0.
    """

    k: int
    share: float
    rest: float
    threshold: float


def concentration(
    sources: Mapping[str, Source], ks: Sequence[int] = (), shares: Sequence[float] = ()
) -> tuple[list[Largest], list[Largest]]:
    """Return how much of the total the largest values of several sources hold; exact, in two passes; float64 becomes float32.

    The first pass counts and sums the values by their upper 16 bits. This leads each question to one bin, and the second pass
    counts the lower 16 bits in those bins alone.

    Args:
        sources: For each name, a callable that gives non-negative values as flat chunks.
        ks: Numbers of values: what do the largest k hold?
        shares: Of the total, each above 0 and at most 1: how many values, the largest first, hold as much?

    Returns:
        An answer for each k, and an answer for each share.

    Raises:
        SquisherError: A value is negative, NaN or infinite, or all are 0.
    """
    counts, sums = np.zeros(BINS, np.int64), np.zeros(BINS)
    for keys in _finite_keys(sources):
        upper = keys >> np.uint32(DIGIT)
        counts += np.bincount(upper, minlength=BINS)
        sums += np.bincount(upper, weights=keys.view(np.float32), minlength=BINS)
    total = math.fsum(sums)
    if not total > 0:
        raise SquisherError("All values are 0, so no entry holds more than another.")
    around = _Around(counts, sums, total)
    bins_of_k = [int(np.flatnonzero(around.count_above < k)[0]) if k else None for k in ks]
    goals = [share * total for share in shares]
    bins_of_goal = [int(np.flatnonzero((around.sum_above < goal) & (sums > 0))[0]) for goal in goals]
    fine = _fine(sources, {b for b in (*bins_of_k, *bins_of_goal) if b is not None})
    return (
        [
            Largest(0, 0.0, total, math.inf) if b is None else around.largest(k, b, *fine[b])
            for k, b in zip(ks, bins_of_k, strict=True)
        ],
        [around.fewest(goal, b, *fine[b]) for goal, b in zip(goals, bins_of_goal, strict=True)],
    )


class _Around:
    """Counts and sums above and below each bin, which answer a question once its bin is counted finely."""

    def __init__(self, counts: Keys, sums: Keys, total: float) -> None:
        self.count_above = np.concatenate([[0], np.cumsum(counts[::-1])])[:-1][::-1]
        self.sum_above = np.concatenate([[0.0], np.cumsum(sums[::-1])])[:-1][::-1]
        self.sum_below = np.concatenate([[0.0], np.cumsum(sums)])[:-1]
        self.total = total

    def largest(self, k: int, number: int, values: Keys, counts: Keys) -> Largest:
        """Return the k largest, the last of which is in this bin."""
        left = k - int(self.count_above[number])
        place = int(np.searchsorted(np.cumsum(counts), left))
        return self._answer(number, place, left - int(counts[:place].sum()), values, counts)

    def fewest(self, goal: float, number: int, values: Keys, counts: Keys) -> Largest:
        """Return the fewest that hold `goal`, the last of which is in this bin."""
        upto = float(self.sum_above[number]) + np.cumsum(values * counts)
        place = min(int(np.searchsorted(upto, goal)), int((values > 0).sum()) - 1)
        before = float(upto[place - 1]) if place else float(self.sum_above[number])
        some = min(int(counts[place]), max(1, math.ceil((goal - before) / float(values[place]))))
        return self._answer(number, place, some, values, counts)

    def _answer(self, number: int, place: int, some: int, values: Keys, counts: Keys) -> Largest:
        value, ties = float(values[place]), int(counts[place])
        above = float(self.sum_above[number]) + float(np.dot(values[:place], counts[:place])) + some * value
        after = float(np.dot(values[place + 1 :], counts[place + 1 :]))
        rest = float(self.sum_below[number]) + after + (ties - some) * value
        k = int(self.count_above[number]) + int(counts[:place].sum()) + some
        return Largest(k, 1.0 if rest == 0 else min(1.0, above / self.total), rest, value)


def _finite_keys(sources: Mapping[str, Source]) -> Iterator[Keys]:
    for name, chunks in sources.items():
        for chunk in chunks():
            keys = checked(keys_of(chunk, 32), 32, name)
            if keys.size and int(keys.max()) == INFINITY[32]:
                raise SquisherError(f"The values of {name!r} are infinite in places and cannot be summed.")
            yield keys


def _fine(sources: Mapping[str, Source], bins: set[int]) -> dict[int, tuple[Keys, Keys]]:
    """Return the values of some bins from the largest down, and how often each occurs."""
    slots = np.full(BINS, -1, np.int64)
    for slot, number in enumerate(sorted(bins)):
        slots[number] = slot
    counts = np.zeros(len(bins) * DIGITS, np.int64)
    waiting_keys: list[Keys] = []
    waiting = 0
    for keys in _finite_keys(sources):
        slot = slots[keys >> DIGIT]
        chosen = slot >= 0
        waiting_keys.append(slot[chosen] * DIGITS + (keys[chosen] & 0xFFFF).astype(np.int64))
        waiting += waiting_keys[-1].size
        if waiting > counts.size:  # the cost of counting grows with the number of counters
            counts += np.bincount(np.concatenate(waiting_keys), minlength=counts.size)
            waiting_keys.clear()
            waiting = 0
    if waiting_keys:
        counts += np.bincount(np.concatenate(waiting_keys), minlength=counts.size)
    found = {}
    for slot, number in enumerate(sorted(bins)):
        in_bin = counts[slot * DIGITS : (slot + 1) * DIGITS]
        lower = np.flatnonzero(in_bin)[::-1]
        found[number] = (
            (np.uint32(number << 16) | lower.astype(np.uint32)).view(np.float32).astype(float),
            in_bin[lower],
        )
    return found
