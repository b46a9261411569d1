"""Exact top-k over any number of tensors, in bounded memory.

Non-negative floats are ordered as the integers that their bits spell. So the k-th largest value is found digit by
digit: one pass over all scores counts the upper 16 bits, which names the bin that holds the k-th largest; the next
pass counts the next 16 bits of the entries in that bin. Two passes settle float32, one bfloat16, four float64, with
one histogram of 65,536 counts and one chunk in memory, however many scores there are.

Equal scores are taken in order, the first source and its lowest flat index first, so that exactly k are chosen and the
same k every time. Everything happens on integers: denormals are ordered exactly, whatever the processor is told to do
with them.

    sources = {"a": lambda: iter([a.flatten()]), "b": lambda: chunks_of(file, "b")}
    kth = threshold(sources, k)
    chosen = Selection(kth)
    masks = {name: torch.cat([chosen(chunk) for chunk in chunks()]) for name, chunks in sources.items()}
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .errors import SquisherError

__all__ = ["Selection", "Source", "Threshold", "threshold", "thresholds"]

Source = Callable[[], Iterable[Tensor]]
"""Gives the scores of one tensor as pieces in order; called once a pass, and each time from the start."""

_DIGIT = 16
_BINS = 1 << _DIGIT
_INFINITY = {32: 0x7F800000, 64: 0x7FF0000000000000}
_SIGNLESS = {32: 0x7FFFFFFF, 64: 0x7FFFFFFFFFFFFFFF}


@dataclass(frozen=True)
class Threshold:
    """The k-th largest score, and what is needed to choose exactly k.

    Attributes:
        value: The k-th largest score; infinity for k = 0.
        above: How many scores are larger.
        ties: How many of the scores equal to `value` belong to the k: `above + ties == k`.
        equal: How many scores equal to `value` there are among these sources (in this process).
        total: How many scores there are in all (over all processes).
        key: The bits of `value` as an integer of `width` bits.
        width: 32, or 64 where a source holds float64.
    """

    value: float
    above: int
    ties: int
    equal: int
    total: int
    key: int
    width: int


class Selection:
    """Marks the k chosen scores, chunk by chunk.

    Call it once with every piece of every source, in the order in which `threshold` saw and checked them (the pieces may
    be cut differently). It counts the ties that it has taken.

    Args:
        kth: What `threshold` returned for the same scores.
        before: How many scores equal to the threshold come before these sources, because other processes hold them.
    """

    def __init__(self, kth: Threshold, before: int = 0) -> None:
        self._kth = kth
        self._left = max(0, kth.ties - before)

    def __call__(self, scores: Tensor) -> Tensor:
        """Return a boolean tensor of the shape of `scores`: True where a score is among the k."""
        keys = _bits(scores.reshape(-1), self._kth.width)
        if self._kth.key == 0:  # only then does it matter that -0.0 counts as 0
            keys = keys & _SIGNLESS[self._kth.width]
        chosen = keys > self._kth.key
        if self._left:
            taken = _where(keys == self._kth.key)[: self._left]
            chosen[taken] = True
            self._left -= taken.numel()
        return chosen.view(scores.shape)


def threshold(sources: Mapping[str, Source], k: int, reduce: Callable[[Tensor], Tensor] | None = None) -> Threshold:
    """The k-th largest of all scores, exactly; see `thresholds`."""
    return thresholds(sources, [k], reduce)[0]


def thresholds(
    sources: Mapping[str, Source], ks: Sequence[int], reduce: Callable[[Tensor], Tensor] | None = None
) -> list[Threshold]:
    """The k-th largest of all scores for several k, exactly, in the passes that one k takes.

    Args:
        sources: For each name, a callable that gives the scores as flat pieces. Order decides between equal scores.
        ks: How many to choose, each from 0 to the number of all scores.
        reduce: Sums an int64 vector over processes, where each holds some of the sources; called once a pass.

    Returns:
        One threshold for each k, from which `Selection` marks exactly k scores.

    Raises:
        SquisherError: For NaN or negative scores (the message names the source), scores that are not floats, and a k
            that is negative or larger than the number of scores.
    """
    gather = reduce or (lambda counts: counts)
    width = 32
    counts, mine, finest = _first_digit(sources, width, gather)
    if finest == 64:
        width = 64
        counts, mine, _ = _first_digit(sources, width, gather)
    total = int(counts.sum())
    for k in ks:
        if not 0 <= k <= total:
            raise SquisherError(f"The {k} largest scores were asked for; k must be from 0 to {total}, their number.")

    # For each k the bits known so far and the number of scores above them; k = 0 asks for nothing more.
    found = {k: _descend(counts, 0, 0, k) for k in ks if k}
    here = {prefix: mine for prefix, _ in found.values()}
    shift = width - _DIGIT
    while shift and finest > 16 and found:
        shift -= _DIGIT
        prefixes = {prefix: row for row, prefix in enumerate(here)}
        all_mine = torch.zeros(len(prefixes), _BINS, dtype=torch.int64)
        for name, chunks in sources.items():
            for chunk in chunks():
                keys = _keys(chunk, width, name)
                upper = keys >> (shift + _DIGIT)
                for prefix, row in prefixes.items():
                    inside = keys[_where(upper == prefix)]
                    _count((inside >> shift) & (_BINS - 1), all_mine[row])
        all_counts = gather(all_mine.flatten()).view_as(all_mine)
        rows = {k: prefixes[prefix] for k, (prefix, _) in found.items()}
        found = {k: _descend(all_counts[rows[k]], prefix, above, k) for k, (prefix, above) in found.items()}
        here = {prefix: all_mine[rows[k]] for k, (prefix, _) in found.items()}

    results = []
    for k in ks:
        if k == 0:
            results.append(Threshold(math.inf, 0, 0, 0, total, _INFINITY[width], width))
            continue
        prefix, above = found[k]
        key, equal = prefix << shift, int(here[prefix][prefix & (_BINS - 1)])
        results.append(Threshold(_value(key, width), above, k - above, equal, total, key, width))
    return results


def _first_digit(
    sources: Mapping[str, Source], width: int, gather: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, int]:
    """Count the upper 16 bits: over all processes, in this one; and the bits that the finest dtype needs."""
    mine = torch.zeros(_BINS + 3, dtype=torch.int64)
    problem: SquisherError | None = None
    finest = 16
    try:
        for name, chunks in sources.items():
            for chunk in chunks():
                finest = max(finest, _bits_of(chunk, name))
                if finest > width:
                    break
                _count(_keys(chunk, width, name) >> (width - _DIGIT), mine[:_BINS])
            if finest > width:
                break
    except SquisherError as found:
        problem = found
    # A process that raised at once would leave the others waiting for its sums.
    mine[_BINS:] = torch.tensor([finest >= 32, finest >= 64, problem is not None])
    both = gather(mine.clone())
    if problem is not None:
        raise problem
    if both[_BINS + 2]:
        raise SquisherError("Another process found scores that cannot be ranked; its message says which.")
    finest = 64 if both[_BINS + 1] else 32 if both[_BINS] else 16
    return both[:_BINS], mine[:_BINS], finest


def _descend(counts: Tensor, prefix: int, above: int, k: int) -> tuple[int, int]:
    """From the counts of the next digit: the prefix that holds the k-th largest, and how many scores lie above it."""
    from_top = counts.flip(0).cumsum(0)
    place = int(torch.searchsorted(from_top, k - above))
    above += int(from_top[place - 1]) if place else 0
    return (prefix << _DIGIT) | (_BINS - 1 - place), above


def _count(digits: Tensor, into: Tensor) -> None:
    """Add to the counts how often each digit occurs; a small piece is not worth a whole histogram of its own."""
    if digits.numel() < _BINS // 4:
        into.index_add_(0, digits.cpu(), torch.ones(digits.numel(), dtype=torch.int64))
    else:
        into += torch.bincount(digits, minlength=_BINS).cpu()


def _where(condition: Tensor) -> Tensor:
    """The flat indices where it holds; numpy finds them twice as fast as torch."""
    return torch.from_numpy(np.flatnonzero(condition.cpu().numpy())).to(condition.device)


def _bits_of(chunk: Tensor, name: str) -> int:
    """How many upper bits of a float32 (or float64) tell all values of this dtype apart."""
    if chunk.dtype in (torch.float32, torch.float16):
        return 32
    if chunk.dtype == torch.bfloat16:
        return 16
    if chunk.dtype == torch.float64:
        return 64
    raise SquisherError(
        f"The scores of {name!r} are {chunk.dtype}, which are not ranked; expected float64, float32, bfloat16 or "
        "float16. Convert them first."
    )


def _bits(chunk: Tensor, width: int) -> Tensor:
    if width == 64:
        return chunk.to(torch.float64).view(torch.int64)
    return chunk.to(torch.float32).view(torch.int32)


def _keys(chunk: Tensor, width: int, name: str) -> Tensor:
    """Integers in the order of the scores; refuses what has no place in that order."""
    bits = _bits(chunk, width)
    if not bits.numel():
        return bits
    low, high = (int(end) for end in bits.aminmax())
    if high <= _INFINITY[width] and low >= 0:
        return bits
    keys = bits & _SIGNLESS[width]  # -0.0 counts as 0
    if int(keys.max()) > _INFINITY[width]:
        raise SquisherError(f"The scores of {name!r} hold NaN, which has no rank. Remove it where the scores are made.")
    if bool(((bits < 0) & (keys > 0)).any()):
        raise SquisherError(
            f"The scores of {name!r} hold negative values; importances and scores are 0 or more. "
            "Take the absolute value first if that is what should be ranked."
        )
    return keys


def _value(key: int, width: int) -> float:
    if width == 64:
        return float(struct.unpack("<d", struct.pack("<q", key))[0])
    return float(struct.unpack("<f", struct.pack("<i", key))[0])
