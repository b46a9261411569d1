"""The k-th largest of many scores and the choice of exactly k, in bounded memory.

Non-negative floats are ordered as the integers that their bits spell. The k-th largest is found digit by digit: one pass
over all scores counts the upper 16 bits, which names the bin that holds the k-th largest; the next pass counts the next 16
bits of the entries in that bin. Two passes settle float32, one bfloat16, four float64, with a histogram of 65,536 counts
and a chunk in memory, however many scores there are. Histograms add up, so several k need no more passes than one, and
processes that hold different scores need one sum of 65,536 integers per pass to agree. Equal scores are taken in order,
the first source and its lowest flat index first, so that exactly k are chosen and the same k every time.

    sources = {"a": lambda: iter([a.flatten()]), "b": lambda: chunks_of(file, "b")}
    kth = threshold(sources, k)
    chosen = Selection(kth)
    masks = {name: torch.cat([chosen(chunk) for chunk in chunks()]) for name, chunks in sources.items()}

`choose` does the same with budgets: sources that are always kept, and a minimum for each.

Keys are handled by numpy, because torch would share even a chunk of a megabyte among threads, which stalls on a machine
that has other work to do; and as integers, so that denormals are ordered exactly, whatever the processor does with them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import ranks
from ..errors import ArgumentError, SquisherError

__all__ = [
    "BINS", "DIGIT", "DIGITS", "INFINITY", "TINY", "Choice", "Keys", "Selection", "Source", "Threshold", "bins_of", "checked", "choose", "keys_of", "middles",
    "per_source", "reverse", "threshold", "thresholds",
]  # fmt: skip


Source = Callable[[], Iterable[Tensor]]
"""Gives the scores of one tensor as chunks in order; called once per pass, and each time from the start."""

Progress = Callable[[int, int], None]
"""Called with the scores read so far and those that will probably be read in all."""

Keys = np.ndarray[Any, np.dtype[Any]]
"""Unsigned integers of 32 or 64 bits, in the order of the scores."""

INFINITY = {32: 0x7F800000, 64: 0x7FF0000000000000}

CHANGED = "The scores changed while they were being ranked; every pass over them must give the same ones."

TINY = 1.2e-38
"""Below it a float32 is denormal, and a ratio of two such numbers means nothing: applications take it as 0."""

BINS = 1 << 15
"""How many values the upper 16 bits of a non-negative float32 can have."""

_SIGNLESS = {32: np.uint32(0x7FFFFFFF), 64: np.uint64(0x7FFFFFFFFFFFFFFF)}

_NEEDS = {torch.bfloat16: 16, torch.float16: 32, torch.float32: 32, torch.float64: 64}

DIGIT = 16  # bits
DIGITS = 1 << DIGIT  # different ones


def bits_of(chunk: Tensor, name: str) -> int:
    """Return how many upper bits of a float32 (or float64) distinguish all values of this dtype.

    Raises:
        SquisherError: The scores are not floats that can be ranked.
    """
    if chunk.dtype not in _NEEDS:
        raise SquisherError(
            f"The scores of {name!r} are {chunk.dtype}, which are not ranked; expected float64, float32, bfloat16 or "
            "float16. Convert them first."
        )
    return _NEEDS[chunk.dtype]


def keys_of(chunk: Tensor, width: int) -> Keys:
    """Return the bits of the scores as float32 or float64, flat; `checked` must have seen them once.

    A chunk of the wanted width is not copied.
    """
    flat = chunk.detach().reshape(-1).cpu()
    if flat.dtype == torch.bfloat16 and width == 32:
        # Not through a conversion: one that flushes denormals would lose the order of the smallest.
        return flat.view(torch.int16).numpy().view(np.uint16).astype(np.uint32) << np.uint32(16)
    if width == 64:
        return flat.to(torch.float64).numpy().view(np.uint64)
    return flat.to(torch.float32).numpy().view(np.uint32)


def checked(keys: Keys, width: int, name: str) -> Keys:
    """Return the keys with -0.0 as 0; refuse scores without a rank.

    Raises:
        SquisherError: NaN or negative scores; the message names the source.
    """
    if not keys.size or int(keys.max()) <= INFINITY[width]:
        return keys
    magnitude = keys & _SIGNLESS[width]
    if int(magnitude.max()) > INFINITY[width]:
        raise SquisherError(
            f"The scores of {name!r} hold NaN, which has no rank: so do its weights or its importance, after a run that diverged or in a "
            "damaged file. Take an earlier checkpoint, or leave the tensor out."
        )
    if bool(((keys != magnitude) & (magnitude > 0)).any()):
        raise SquisherError(
            f"The scores of {name!r} hold negative values; importances and scores are 0 or more. "
            "Take the absolute value first if that is what should be ranked."
        )
    return magnitude


def value_of(key: int, width: int) -> float:
    """Return the score of a key."""
    if width == 64:
        return float(struct.unpack("<d", struct.pack("<Q", key))[0])
    return float(struct.unpack("<f", struct.pack("<I", key))[0])


def reverse(chunk: Tensor) -> Tensor:
    """Return scores in the opposite order, for scores of 0 or more: the k-th largest becomes the k-th smallest."""
    wide = chunk.dtype == torch.float64
    bits = chunk.abs() if wide else chunk.float().abs()  # -0.0 is 0
    top = INFINITY[64 if wide else 32]
    return (top - bits.view(torch.int64 if wide else torch.int32)).view(bits.dtype)


def bins_of(values: Tensor) -> Tensor:
    """Return the upper 16 bits of each value as float32, without the sign: integers in the order of the values."""
    return (values.to(torch.float32).view(torch.int32) >> 16) & (BINS - 1)


@cache
def middles() -> Tensor:
    """Return the value in the middle of each of these bins."""
    return ((torch.arange(BINS, dtype=torch.int32) << 16) | 0x8000).view(torch.float32)


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


def threshold(sources: Mapping[str, Source], k: int, reduce: Callable[[Tensor], Tensor] | None = None) -> Threshold:
    """Return the k-th largest of all scores, exactly; see `thresholds`."""
    return thresholds(sources, [k], reduce)[0]


def thresholds(
    sources: Mapping[str, Source], ks: Sequence[int], reduce: Callable[[Tensor], Tensor] | None = None
) -> list[Threshold]:
    """Return the k-th largest of all scores for several k, exactly, in the passes that one k takes.

    Args:
        sources: For each name, a callable that gives the scores as flat chunks. Order decides between equal scores.
        ks: How many to choose, each from 0 to the number of all scores.
        reduce: Sums an int64 vector over processes, where each holds some of the sources; called once per pass.

    Returns:
        One threshold for each k, from which `Selection` marks exactly k scores.

    Raises:
        SquisherError: For NaN or negative scores (the message names the source), scores that are not floats, and a k
            that is negative or larger than the number of scores.
    """
    gather = reduce or (lambda counts: counts)
    width = 32
    counts, counts_here, finest, clean = _first_digit(sources, width, gather)
    if finest == 64:
        width = 64
        counts, counts_here, _, clean = _first_digit(sources, width, gather)
    total = int(counts.sum())
    for k in ks:
        if not 0 <= k <= total:
            raise SquisherError(f"The {k} largest scores were asked for; k must be from 0 to {total}, their number.")

    # For each k the bits known so far and the number of scores above them; k = 0 asks for nothing more.
    found = {k: _descend(counts, 0, 0, k) for k in ks if k}
    local_counts = {prefix: counts_here for prefix, _ in found.values()}
    shift = width - DIGIT
    while shift and finest > 16 and found:
        shift -= DIGIT
        prefixes = {prefix: row for row, prefix in enumerate(local_counts)}
        all_mine = torch.zeros(len(prefixes), DIGITS, dtype=torch.int64)
        for name, chunks in sources.items():
            for chunk in chunks():
                keys = keys_of(chunk, width)
                keys = keys if clean else checked(keys, width, name)
                upper = keys >> keys.dtype.type(shift + DIGIT)
                for prefix, row in prefixes.items():
                    inside = keys[np.flatnonzero(upper == prefix)]
                    _count((inside >> keys.dtype.type(shift)) & keys.dtype.type(DIGITS - 1), all_mine[row])
        all_counts = gather(all_mine.flatten()).view_as(all_mine)
        rows = {k: prefixes[prefix] for k, (prefix, _) in found.items()}
        found = {k: _descend(all_counts[rows[k]], prefix, above, k) for k, (prefix, above) in found.items()}
        local_counts = {prefix: all_mine[rows[k]] for k, (prefix, _) in found.items()}

    results = []
    for k in ks:
        if k == 0:
            results.append(Threshold(math.inf, 0, 0, 0, total, INFINITY[width], width))
            continue
        prefix, above = found[k]
        key, equal = prefix << shift, int(local_counts[prefix][prefix & (DIGITS - 1)])
        results.append(Threshold(value_of(key, width), above, k - above, equal, total, key, width))
    return results


def _first_digit(
    sources: Mapping[str, Source], width: int, gather: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, int, bool]:
    """Count the upper 16 bits of all scores.

    Returns:
        The counts over all processes and in this one, the bits that the finest dtype needs, and whether no score is -0.0.
    """
    mine = torch.zeros(DIGITS + 3, dtype=torch.int64)
    problem: SquisherError | None = None
    finest, clean = 16, True
    try:
        for name, chunks in sources.items():
            for chunk in chunks():
                finest = max(finest, bits_of(chunk, name))
                if finest > width:
                    break
                stored = keys_of(chunk, width)
                keys = checked(stored, width, name)
                clean &= keys is stored
                _count(keys >> keys.dtype.type(width - DIGIT), mine[:DIGITS])
            if finest > width:
                break
    except SquisherError as found:
        problem = found
    # A process that raised at once would leave the others waiting for its sums.
    mine[DIGITS:] = torch.tensor([finest >= 32, finest >= 64, problem is not None])
    both = gather(mine.clone())
    if problem is not None:
        raise problem
    if both[DIGITS + 2]:
        raise SquisherError("Another process found scores that cannot be ranked; its message says which.")
    finest = 64 if both[DIGITS + 1] else 32 if both[DIGITS] else 16
    return both[:DIGITS], mine[:DIGITS], finest, clean


def _descend(counts: Tensor, prefix: int, above: int, k: int) -> tuple[int, int]:
    """Extend a prefix by the digit of the k-th largest score; return it, and how many scores lie above."""
    from_top = counts.flip(0).cumsum(0)
    place = int(torch.searchsorted(from_top, k - above))
    if place == DIGITS:
        raise SquisherError(CHANGED)
    above += int(from_top[place - 1]) if place else 0
    return (prefix << DIGIT) | (DIGITS - 1 - place), above


def _count(digits: Keys, into: Tensor) -> None:
    """Add how often each digit occurs to the counts; a small chunk does not get a histogram of its own."""
    if digits.size < DIGITS // 4:
        np.add.at(into.numpy(), digits, 1)
    else:
        # Digits fit an int32 either way, and one of 64 bits is not shared among threads.
        signed = digits.view(np.int32) if digits.itemsize == 4 else digits.astype(np.int32)
        counts = torch.bincount(torch.from_numpy(signed))
        into[: counts.numel()] += counts


class Selection:
    """Marks the k chosen scores, chunk by chunk.

    Call it once with every chunk of every source, in the order in which `threshold` saw and checked them (the chunks may
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
        keys = keys_of(scores, self._kth.width)
        if self._kth.key == 0:  # only then does it matter that -0.0 counts as 0 ...
            keys = checked(keys, self._kth.width, "a source")
        keys = keys.view(f"i{keys.itemsize}")  # ... and otherwise it is below everything
        chosen = keys > self._kth.key
        if self._left:
            taken = np.flatnonzero(keys == self._kth.key)[: self._left]
            chosen[taken] = True
            self._left -= taken.size
        return torch.from_numpy(chosen).view(scores.shape).to(scores.device)


def _equal_in(sources: Mapping[str, Source], kth: Threshold) -> dict[str, int]:
    """Return how many scores equal to the threshold each source holds, by one more pass."""
    return {
        name: sum(
            int(np.count_nonzero(checked(keys_of(chunk, kth.width), kth.width, name) == kth.key)) for chunk in chunks()
        )
        for name, chunks in sources.items()
    }


class Choice:
    """Which entries are chosen; `chunks` gives the marks of one source, as often as asked for and in any order.

    Attributes:
        kept: The sources that are chosen whole.
    """

    def __init__(self, sources: Mapping[str, Source], kept: Collection[str] = ()) -> None:
        self._sources = dict(sources)
        self.kept = frozenset(kept)
        self._rounds: dict[str, list[tuple[Threshold, int]]] = {name: [] for name in sources}

    def _add(self, name: str, kth: Threshold, before: int) -> None:
        self._rounds[name].append((kth, before))

    def chunks(self, name: str) -> Iterator[Tensor]:
        """Yield boolean chunks, cut as the source cuts its scores."""
        for _, chosen in self._marked(name):
            yield chosen

    def left(self, name: str) -> Iterator[Tensor]:
        """Return the scores of a source that are not chosen yet."""
        for chunk, chosen in self._marked(name):
            yield chunk[~chosen]

    def _marked(self, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        rounds = [Selection(kth, before) for kth, before in self._rounds[name]]
        for chunk in self._sources[name]():
            flat = chunk.reshape(-1)
            chosen = torch.full((flat.numel(),), name in self.kept)
            for number, select in enumerate(rounds):
                if number == 0:
                    chosen = select(flat)
                else:  # a later round has seen only the scores that earlier rounds left
                    chosen[~chosen] = select(flat[~chosen])
            yield flat, chosen


def choose(
    sources: Mapping[str, Source],
    k: int,
    sizes: Mapping[str, int],
    *,
    always: Collection[str] = (),
    minimum: Mapping[str, int] | None = None,
    sharded: bool = False,
    progress: Progress | None = None,
) -> Choice:
    """Choose exactly k entries: all of the sources in `always`, the best `minimum` of the others, then the best of the rest.

    Args:
        sources: For each name, a callable that gives the scores as flat chunks. Order decides between equal scores.
        k: How many entries to choose, in all processes together.
        sizes: The number of scores of each source.
        always: Sources that are chosen whole; they count inside k.
        minimum: How many of a source's entries are chosen at least; they count inside k.
        sharded: Whether each process holds other sources or shards, ordered by rank. One sum per pass.
        progress: Called with the scores read so far and those that will probably be read in all.

    Raises:
        ArgumentError: What must be kept is more than k.
        SquisherError: k is more than there is, or scores cannot be ranked.
    """
    watched = _watched(sources, sum(sizes[name] for name in sources), progress)
    ranked = {name: source for name, source in watched.items() if name not in always}
    least = {name: min(count, sizes[name]) for name, count in (minimum or {}).items() if name in ranked and count > 0}
    whole = sum(sizes[name] for name in watched if name not in ranked)
    forced = torch.tensor([whole, sum(least.values()), sum(sizes[name] for name in sources)])
    if sharded:
        ranks.sum_in_place([forced])
    all_whole, all_least, total = forced.tolist()
    if all_whole + all_least > k:
        raise ArgumentError(
            f"{k:,} entries are to be chosen, but {all_whole:,} are always kept"
            + (f" and {all_least:,} are the minimum of the others" if all_least else "")
            + f" (of {total:,}). Keep more in all, or demand less."
        )
    choice = Choice(watched, [name for name in watched if name not in ranked])
    rest: Mapping[str, Source] = ranked
    if all_least:
        for name, count in least.items():
            choice._add(name, threshold({name: ranked[name]}, count), 0)
        rest = {name: _left(choice, name) if name in least else source for name, source in ranked.items()}
    kth = threshold(rest, k - all_whole - all_least, _sum_over_ranks if sharded else None)
    equal = ranks.gather(kth.equal) if sharded else [kth.equal]
    # Where all equal scores are chosen, as they nearly always are, it does not matter how many come before.
    some = sum(equal) > kth.ties
    before = sum(equal[: ranks.rank()]) if some and len(equal) > 1 else 0
    ties = _equal_in(rest, kth) if some else {}
    for name in rest:
        choice._add(name, kth, before)
        before += ties.get(name, 0)
    choice._sources = dict(sources)  # reading the marks later is not part of choosing
    return choice


def per_source(
    sources: Mapping[str, Source],
    ks: Mapping[str, int],
    sizes: Mapping[str, int] | None = None,
    progress: Progress | None = None,
) -> Choice:
    """Choose exactly `ks[name]` entries of each source, every one ranked by itself.

    Args:
        sources: For each name, a callable that gives the scores as flat chunks.
        ks: How many entries of each.
        sizes: The number of scores of each source, for the progress.
        progress: Called with the scores read so far and those that will probably be read in all.

    Raises:
        SquisherError: A k is more than there is, or scores cannot be ranked.
    """
    choice = Choice(sources)
    watched = _watched(sources, sum((sizes or {}).values()), progress)
    for name, source in watched.items():
        choice._add(name, threshold({name: source}, ks[name]), 0)
    return choice


def _left(choice: Choice, name: str) -> Source:
    # A copy with the rounds so far: the choice itself gets another round for this source.
    before = Choice({name: choice._sources[name]})
    before._rounds[name] = list(choice._rounds[name])
    return lambda: before.left(name)


def _sum_over_ranks(counts: Tensor) -> Tensor:
    counts = counts.clone()
    ranks.sum_in_place([counts])
    return counts


def _watched(sources: Mapping[str, Source], total: int, progress: Progress | None) -> dict[str, Source]:
    if progress is None:
        return dict(sources)
    done = 0

    def watch(source: Source) -> Source:
        def chunks() -> Iterator[Tensor]:
            nonlocal done
            for chunk in source():
                yield chunk
                done += chunk.numel()
                progress(min(done, 2 * total), 2 * total)

        return chunks

    return {name: watch(source) for name, source in sources.items()}
