"""The k-th largest by narrowing: one k, one process, at the speed of reading.

A pass counts what lies above a bracket of values and keeps a thinned sample of what lies inside. From the sample follows
a much narrower bracket, which the next pass checks by counting: a guess that was wrong is noticed and costs a pass, never
exactness. When the sample is no longer thinned, or the bracket is a single value, the answer is exact. Two passes settle
some billions of scores, three any number; what is in memory is a chunk and the sample of at most four million keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from ..errors import SquisherError
from .keys import (
    CHANGED,
    INFINITY,
    Keys,
    Source,
    bits_of,
    checked,
    keys_of,
    value_of,
)
from .selection import Threshold

__all__ = ["narrow"]

_BLOCK = 1 << 16  # keys that are handled at once: with what is computed from them they stay in the cache
_FIRST = 1 << 20  # keys in the sample of the first pass, from which the bracket is guessed
_HELD = 1 << 22  # keys in later samples: what lies in the bracket should fit whole
_SIGMA = 4.5  # how many standard errors of the sample the bracket reaches to either side
_RANDOM = np.random.default_rng(0).integers(0, 1 << 62, (1 << 16) - 15)  # its length is a prime: no stride divides it
_COIN = _RANDOM & 1 == 1
_AS_THEY_ARE = (torch.float32, torch.float64)


class _Finer(Exception):  # noqa: N818
    """A source holds float64, which keys of 32 bits cannot tell apart."""


def narrow(sources: Mapping[str, Source], k: int, held: int = _HELD) -> Threshold:
    """Return the k-th largest of all scores, exactly.

    Args:
        sources: For each name, a callable that gives the scores as flat chunks. Order decides between equal scores.
        k: How many to choose, from 0 to the number of all scores.
        held: How many keys may be held in memory.

    Raises:
        SquisherError: For NaN or negative scores (the message names the source), scores that are not floats, and a k
            that is negative or larger than the number of scores.
    """
    try:
        return _narrow(sources, k, 32, held)
    except _Finer:
        return _narrow(sources, k, 64, held)


def _narrow(sources: Mapping[str, Source], k: int, width: int, held: int) -> Threshold:
    first, last = 0, INFINITY[width]  # all scores, and surely the k-th largest, lie from first to last
    low, high = first, last
    attempt = 0
    seen = _take(sources, width, _Sample(min(held, _FIRST), attempt, width))
    clean = seen.clean
    total = seen.inside
    if not 0 <= k <= total:
        raise SquisherError(f"The {k} largest scores were asked for; k must be from 0 to {total}, their number.")
    if k == 0:
        return Threshold(math.inf, 0, 0, 0, total, INFINITY[width], width, dict.fromkeys(sources, 0))
    while True:
        if k <= seen.above:
            first, low, high = high + 1, high + 1, last
        elif k > seen.above + seen.inside:
            last, low, high = low - 1, first, low - 1
        elif low == high or seen.sample.complete:
            return _exact(seen, k, low, high, total, width)
        else:
            first, last = low, high
            low, high = _bracket(seen, k, first, last)
        if low > high:
            raise SquisherError(CHANGED)
        attempt += 1
        seen = _look(sources, width, low, high, _Sample(held, attempt, width), clean)


@dataclass
class _Seen:
    """What one pass found: counts above and inside the bracket, and a sample of what is inside."""

    sample: _Sample
    above: int = 0
    inside: int = 0
    inside_in: dict[str, int] = field(default_factory=dict)
    clean: bool = True  # no -0.0, whose bits are not in order


class _Sample:
    """One key of every `stride`, at a place that is random but always the same; the stride doubles when it is full."""

    def __init__(self, held: int, seed: int, width: int) -> None:
        self._held = held
        self._seed = seed
        self._stride = 1
        self._seen = 0
        self._size = 0
        # Memory that is not written to is not taken: a small sample stays small.
        self._keys = np.empty(held + _BLOCK, np.uint32 if width == 32 else np.uint64)

    @property
    def complete(self) -> bool:
        """Whether it is not thinned: it holds every key that was shown to it, in order."""
        return self._stride == 1

    def keys(self) -> Keys:
        return self._keys[: self._size]

    def add(self, keys: Keys) -> None:
        if self._stride > 1:
            start, stop = self._seen, self._seen + keys.size
            rows = np.arange(start // self._stride, (stop - 1) // self._stride + 1)
            # Which key of a row is taken must not depend on how the scores are cut into chunks.
            random = _RANDOM[(rows + 7919 * self._seed) % _RANDOM.size]
            places = rows * self._stride + (random & (self._stride - 1)) - start
            picked = keys[places[(places >= 0) & (places < keys.size)]]
        else:
            picked = keys
        self._seen += keys.size
        self._keys[self._size : self._size + picked.size] = picked
        self._size += picked.size
        while self._size > self._held:
            self._thin()

    def _thin(self) -> None:
        rows = self._size // 2
        pairs = self._keys[: 2 * rows].reshape(rows, 2)
        self._keys[:rows] = np.where(np.resize(_COIN, rows), pairs[:, 1], pairs[:, 0])
        self._size = rows
        self._stride *= 2


def _take(sources: Mapping[str, Source], width: int, sample: _Sample) -> _Seen:
    """Make the first pass: everything is inside, and is checked."""
    seen = _Seen(sample)
    for name, chunks in sources.items():
        before = seen.inside
        for keys in _blocks(name, chunks, width):
            fine = checked(keys, width, name)
            seen.clean &= fine is keys
            seen.inside += fine.size
            sample.add(fine)
        seen.inside_in[name] = seen.inside - before
    return seen


def _look(sources: Mapping[str, Source], width: int, low: int, high: int, sample: _Sample, clean: bool) -> _Seen:
    """Make a later pass: what lies above the bracket is counted, what lies inside is counted and sampled."""
    seen = _Seen(sample)
    kind = np.uint32 if width == 32 else np.uint64
    least, most = kind(low), kind(high)
    above, enough = np.empty(_BLOCK, bool), np.empty(_BLOCK, bool)
    for name, chunks in sources.items():
        before = seen.inside
        for keys in _blocks(name, chunks, width):
            if not clean:
                keys = checked(keys, width, name)
            over, reached = above[: keys.size], enough[: keys.size]
            count = int(np.count_nonzero(np.greater(keys, most, out=over)))
            inside = int(np.count_nonzero(np.greater_equal(keys, least, out=reached))) - count
            seen.above += count
            seen.inside += inside
            if inside and low < high:
                sample.add(keys[np.flatnonzero(np.not_equal(over, reached, out=over))])
        seen.inside_in[name] = seen.inside - before
    return seen


def _blocks(name: str, chunks: Source, width: int) -> Iterator[Keys]:
    for chunk in chunks():
        if bits_of(chunk, name) > width:
            raise _Finer
        if chunk.dtype in _AS_THEY_ARE and chunk.device.type == "cpu" and chunk.is_contiguous():
            keys = keys_of(chunk, width)
            yield from (keys[start : start + _BLOCK] for start in range(0, keys.size, _BLOCK))
        else:  # converted in parts, so that no large copy is made
            yield from (keys_of(part, width) for part in chunk.detach().reshape(-1).split(_BLOCK))


def _bracket(seen: _Seen, k: int, first: int, last: int) -> tuple[int, int]:
    """Two keys of the sample that very probably enclose the k-th largest; a single one if nothing narrower does."""
    keys = np.sort(seen.sample.keys())
    share = (k - seen.above) / seen.inside
    place = keys.size * (1.0 - share)
    error = _SIGMA * math.sqrt(keys.size * share * (1.0 - share)) + 4.0
    start, stop = math.floor(place - error), math.ceil(place + error)
    low = int(keys[start]) if start >= 0 else first
    high = int(keys[stop]) if stop < keys.size else last
    held = int(np.searchsorted(keys, high, "right") - np.searchsorted(keys, low, "left"))
    if (low, high) == (first, last) or held > keys.size // 2:
        middle = int(keys[min(keys.size - 1, max(0, math.floor(place)))])
        return middle, middle
    return low, high


def _exact(seen: _Seen, k: int, low: int, high: int, total: int, width: int) -> Threshold:
    if low == high:
        key, above, equal_in = low, seen.above, seen.inside_in
    else:
        keys = seen.sample.keys()
        place = seen.above + keys.size - k
        key = int(np.partition(keys, place)[place])
        above = seen.above + int(np.count_nonzero(keys > key))
        stops = np.cumsum(list(seen.inside_in.values()))[:-1]
        parts = np.split(keys == key, stops)
        equal_in = {name: int(np.count_nonzero(part)) for name, part in zip(seen.inside_in, parts, strict=True)}
    return Threshold(value_of(key, width), above, k - above, sum(equal_in.values()), total, key, width, equal_in)
