"""Budgets: exactly k entries in all, of which some sources are kept whole and others at least in part."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import Tensor

from .. import ranks
from ..errors import SquisherError
from .keys import Source
from .narrow import narrow
from .radix import thresholds
from .selection import Selection, Threshold, equal_in

__all__ = ["Choice", "choose", "per_source"]

Progress = Callable[[int, int], None]
"""Called with the scores read so far and those that will probably be read in all."""


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
        """Boolean chunks, cut as the source cuts its scores."""
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
                else:  # a later round saw only what the earlier ones left
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
    """Exactly k entries: the sources in `always` whole, each other one's best `minimum`, then the best of what is left.

    Args:
        sources: For each name, a callable that gives the scores as flat chunks. Order decides between equal scores.
        k: How many entries to choose, in all processes together.
        sizes: The number of scores of each source.
        always: Sources that are chosen whole; they count inside k.
        minimum: How many of a source's entries are chosen at least; they count inside k.
        sharded: Each process holds other sources (or other parts); their order is that of ranks. One sum a pass.
        progress: Called with the scores read so far and those that will probably be read in all.

    Raises:
        SquisherError: What must be kept is more than k, k is more than there is, or scores cannot be ranked.
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
        raise SquisherError(
            f"{k:,} entries are to be chosen, but {all_whole:,} are always kept"
            + (f" and {all_least:,} are the minimum of the others" if all_least else "")
            + f" (of {total:,}). Keep more in all, or demand less."
        )
    choice = Choice(watched, [name for name in watched if name not in ranked])
    rest: Mapping[str, Source] = ranked
    if all_least:
        for name, count in least.items():
            choice._add(name, narrow({name: ranked[name]}, count), 0)
        rest = {name: _left(choice, name) if name in least else source for name, source in ranked.items()}
    if sharded and not ranks.is_alone():
        kth = thresholds(rest, [k - all_whole - all_least], _sum_over_ranks)[0]
        before = sum(ranks.gather(kth.equal)[: ranks.rank()])
    else:
        kth, before = narrow(rest, k - all_whole - all_least), 0
    ties = equal_in(rest, kth)
    for name in rest:
        choice._add(name, kth, before)
        before += ties[name]
    choice._sources = dict(sources)  # what is read from now on is not part of choosing
    return choice


def per_source(
    sources: Mapping[str, Source],
    ks: Mapping[str, int],
    sizes: Mapping[str, int] | None = None,
    progress: Progress | None = None,
) -> Choice:
    """Exactly `ks[name]` entries of each source, every one ranked by itself.

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
        choice._add(name, narrow({name: source}, ks[name]), 0)
    return choice


def _left(choice: Choice, name: str) -> Source:
    # The choice goes on to learn a round about this source; what was left is what the rounds so far left.
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
