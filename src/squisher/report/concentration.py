"""On how few entries a sum rests: what the largest k of them hold, and how many hold a given share. Exact, in two passes.

The first pass counts and sums the values in 32,768 bins, one for each setting of the upper 16 bits of a float32. Each
question then ends within one bin; the second pass counts the lower 16 bits in these few, and the bits are the value.
float64 values are rounded to float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import SquisherError
from ..storage.tensors import chunks_of, one_thread

__all__ = ["Held", "concentration"]

_UPPER = 1 << 15  # without the sign
_LOWER = 1 << 16
_Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Held:
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


@one_thread()
def concentration(
    values: Mapping[str, Tensor], ks: Sequence[int] = (), shares: Sequence[float] = ()
) -> tuple[list[Held], list[Held]]:
    """Return what the largest entries of several tensors hold together.

    Args:
        values: Non-negative tensors; lazy ones are read in pieces, twice.
        ks: Numbers of entries: what do the largest k hold?
        shares: Of the total, each above 0 and at most 1: how many entries, the largest first, hold as much?

    Returns:
        An answer for each k, and an answer for each share.

    Raises:
        SquisherError: A value is negative, NaN or infinite, or all are 0.
    """
    counts, sums = np.zeros(_UPPER, np.int64), np.zeros(_UPPER)
    for name, keys in _keys(values):
        upper = (keys >> 16).astype(np.int64)
        if upper.size and int(upper.max()) >= 0x7F80:
            raise SquisherError(f"The values of {name!r} are negative, NaN or infinite in places and cannot be summed.")
        counts += np.bincount(upper, minlength=_UPPER)
        sums += np.bincount(upper, weights=keys.view(np.float32), minlength=_UPPER)
    total = math.fsum(sums)
    if not total > 0:
        raise SquisherError("All values are 0, so no entry holds more than another.")
    around = _Around(counts, sums, total)
    bins_of_k = [int(np.flatnonzero(around.count_above < k)[0]) if k else None for k in ks]
    goals = [share * total for share in shares]
    bins_of_goal = [int(np.flatnonzero((around.sum_above < goal) & (sums > 0))[0]) for goal in goals]
    fine = _fine(values, {b for b in (*bins_of_k, *bins_of_goal) if b is not None})
    return (
        [
            Held(0, 0.0, total, math.inf) if b is None else around.held_by(k, b, *fine[b])
            for k, b in zip(ks, bins_of_k, strict=True)
        ],
        [around.holding(goal, b, *fine[b]) for goal, b in zip(goals, bins_of_goal, strict=True)],
    )


class _Around:
    """What lies above and below each bin, and where a question ends within one."""

    def __init__(self, counts: _Array, sums: _Array, total: float) -> None:
        self.count_above = np.concatenate([[0], np.cumsum(counts[::-1])])[:-1][::-1]
        self.sum_above = np.concatenate([[0.0], np.cumsum(sums[::-1])])[:-1][::-1]
        self.sum_below = np.concatenate([[0.0], np.cumsum(sums)])[:-1]
        self.total = total

    def held_by(self, k: int, number: int, values: _Array, counts: _Array) -> Held:
        """Return the k largest, the last of which is in this bin."""
        left = k - int(self.count_above[number])
        place = int(np.searchsorted(np.cumsum(counts), left))
        return self._held(number, place, left - int(counts[:place].sum()), values, counts)

    def holding(self, goal: float, number: int, values: _Array, counts: _Array) -> Held:
        """Return the fewest that hold `goal`, the last of which is in this bin."""
        upto = float(self.sum_above[number]) + np.cumsum(values * counts)
        place = min(int(np.searchsorted(upto, goal)), int((values > 0).sum()) - 1)
        before = float(upto[place - 1]) if place else float(self.sum_above[number])
        some = min(int(counts[place]), max(1, math.ceil((goal - before) / float(values[place]))))
        return self._held(number, place, some, values, counts)

    def _held(self, number: int, place: int, some: int, values: _Array, counts: _Array) -> Held:
        value, ties = float(values[place]), int(counts[place])
        held = float(self.sum_above[number]) + float(np.dot(values[:place], counts[:place])) + some * value
        after = float(np.dot(values[place + 1 :], counts[place + 1 :]))
        rest = float(self.sum_below[number]) + after + (ties - some) * value
        k = int(self.count_above[number]) + int(counts[:place].sum()) + some
        return Held(k, 1.0 if rest == 0 else min(1.0, held / self.total), rest, value)


def _keys(values: Mapping[str, Tensor]) -> Iterable[tuple[str, _Array]]:
    for name in values:
        for piece in chunks_of(values, name):
            keys = piece.detach().to(torch.float32).contiguous().numpy().view(np.uint32)
            yield name, np.where(keys == 0x8000_0000, np.uint32(0), keys)  # -0.0 is 0


def _fine(values: Mapping[str, Tensor], bins: set[int]) -> dict[int, tuple[_Array, _Array]]:
    """For each of some bins, its values from the largest down and how often each occurs."""
    slots = np.full(_UPPER, -1, np.int64)
    for slot, number in enumerate(sorted(bins)):
        slots[number] = slot
    counts = np.zeros(len(bins) * _LOWER, np.int64)
    held: list[_Array] = []
    waiting = 0
    for _, keys in _keys(values):
        slot = slots[keys >> 16]
        chosen = slot >= 0
        held.append(slot[chosen] * _LOWER + (keys[chosen] & 0xFFFF).astype(np.int64))
        waiting += held[-1].size
        if waiting > counts.size:  # counting costs as much as the counts are long
            counts += np.bincount(np.concatenate(held), minlength=counts.size)
            held.clear()
            waiting = 0
    if held:
        counts += np.bincount(np.concatenate(held), minlength=counts.size)
    found = {}
    for slot, number in enumerate(sorted(bins)):
        own = counts[slot * _LOWER : (slot + 1) * _LOWER]
        lower = np.flatnonzero(own)[::-1]
        found[number] = ((np.uint32(number << 16) | lower.astype(np.uint32)).view(np.float32).astype(float), own[lower])
    return found
