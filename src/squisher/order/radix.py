"""The k-th largest digit by digit: several k at once, and over several processes.

One pass over all scores counts the upper 16 bits, which names the bin that holds the k-th largest; the next pass counts
the next 16 bits of the entries in that bin. Two passes settle float32, one bfloat16, four float64, with one histogram of
65,536 counts and one chunk in memory, however many scores there are. Histograms add up, so that processes that hold
different scores need one sum of 65,536 integers a pass to agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

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

__all__ = ["thresholds"]

_DIGIT = 16
_BINS = 1 << _DIGIT


def thresholds(
    sources: Mapping[str, Source], ks: Sequence[int], reduce: Callable[[Tensor], Tensor] | None = None
) -> list[Threshold]:
    """Return the k-th largest of all scores for several k, exactly, in the passes that one k takes.

    Args:
        sources: For each name, a callable that gives the scores as flat chunks. Order decides between equal scores.
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
                keys = checked(keys_of(chunk, width), width, name)
                upper = keys >> keys.dtype.type(shift + _DIGIT)
                for prefix, row in prefixes.items():
                    inside = keys[np.flatnonzero(upper == prefix)]
                    _count((inside >> keys.dtype.type(shift)) & keys.dtype.type(_BINS - 1), all_mine[row])
        all_counts = gather(all_mine.flatten()).view_as(all_mine)
        rows = {k: prefixes[prefix] for k, (prefix, _) in found.items()}
        found = {k: _descend(all_counts[rows[k]], prefix, above, k) for k, (prefix, above) in found.items()}
        here = {prefix: all_mine[rows[k]] for k, (prefix, _) in found.items()}

    results = []
    for k in ks:
        if k == 0:
            results.append(Threshold(math.inf, 0, 0, 0, total, INFINITY[width], width))
            continue
        prefix, above = found[k]
        key, equal = prefix << shift, int(here[prefix][prefix & (_BINS - 1)])
        results.append(Threshold(value_of(key, width), above, k - above, equal, total, key, width))
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
                finest = max(finest, bits_of(chunk, name))
                if finest > width:
                    break
                keys = checked(keys_of(chunk, width), width, name)
                _count(keys >> keys.dtype.type(width - _DIGIT), mine[:_BINS])
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
    if place == _BINS:
        raise SquisherError(CHANGED)
    above += int(from_top[place - 1]) if place else 0
    return (prefix << _DIGIT) | (_BINS - 1 - place), above


def _count(digits: Keys, into: Tensor) -> None:
    """Add to the counts how often each digit occurs; a small chunk is not worth a whole histogram of its own."""
    if digits.size < _BINS // 4:
        np.add.at(into.numpy(), digits, 1)
    else:
        into += torch.bincount(torch.from_numpy(digits.astype(np.int32)), minlength=_BINS)
