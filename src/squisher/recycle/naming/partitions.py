"""Every way to put a model's parameters behind an optimizer's numbers, if each group keeps the order of the model.

An optimizer numbers its parameters group by group. Inside a group they nearly always stand in the order in which the model
registers them, but which parameter is in which group is the user's affair: layers from the top down, one group per
projection, the second of two towers first. So every division into groups counts whose shapes fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..states import Candidate, OptimizerState

__all__ = ["Ways", "in_order", "sorted_as_text", "ways"]

Shape = tuple[int, ...]

_MOST_STEPS = 300_000


class Ways(NamedTuple):
    """How an optimizer's entries may be named.

    Attributes:
        found: Different answers, at most two: for each entry, which candidate it is.
        complete: Whether there is no other, as far as these go. False where a second was found or the search was given up.
    """

    found: list[tuple[int, ...]]
    complete: bool


def ways(optimizer: OptimizerState, candidates: Sequence[Candidate], fixed: Mapping[int, int] | None = None) -> Ways:
    """Return the ways to find the entries among the candidates, each group in order.

    Candidates beyond the optimizer's may be frozen parameters or buffers, unless they are required. An entry without state
    has no shape and fits anything; answers that differ in such entries alone count as one, since those have nothing to name.

    Args:
        optimizer: Its entries in its own order.
        candidates: The model's parameters in registration order.
        fixed: Entries whose candidate is known, by their numbers.
    """
    shapes = [entry.shape for entry in optimizer.entries]
    if not fixed and len(optimizer.group_sizes) == 1:
        found = in_order(shapes, candidates)
        if len(found) == 2 and _known(found[0], shapes) == _known(found[1], shapes):
            found = found[:1]
        return Ways(found, len(found) == 1)
    found = []
    search = _Search(optimizer, shapes, candidates, fixed or {})
    for way in search:
        if not found or _known(way, shapes) != _known(found[0], shapes):
            found.append(way)
        if len(found) == 2:
            return Ways(found, False)
    return Ways(found, len(found) == 1 and search.steps < _MOST_STEPS)


def sorted_as_text(names: Sequence[str]) -> bool:
    """Return whether names are in the order of a sorted list, not of a module: layer 10 before 2, every bias before its weight.

    Args:
        names: Of the parameters, in the order of their source.
    """
    last: dict[str, int] = {}
    for name in names:
        parts = name.split(".")
        for depth, part in enumerate(parts):
            if part.isdecimal():
                parent = ".".join(parts[:depth])
                if int(part) < last.get(parent, 0):
                    return True
                last[parent] = int(part)
    place = {name: k for k, name in enumerate(names)}
    both = [
        (place[f"{name[:-6]}bias"], k)
        for name, k in place.items()
        if f"{name[:-6]}bias" in place and name.endswith("weight")
    ]
    return len(both) > 1 and all(bias < weight for bias, weight in both) and list(names) == sorted(names)


def _known(way: Sequence[int], shapes: Sequence[Shape | None]) -> list[int]:
    return [k for k, shape in zip(way, shapes, strict=True) if shape is not None]


class _Search:
    """A walk over the candidates: each is the next entry of some group, or none. Ends that lead nowhere are remembered."""

    def __init__(
        self,
        optimizer: OptimizerState,
        shapes: Sequence[Shape | None],
        candidates: Sequence[Candidate],
        fixed: Mapping[int, int],
    ):
        self.steps = 0
        self._shapes = shapes
        self._candidates = candidates
        self._fixed = fixed
        self._taken = {candidate: entry for entry, candidate in fixed.items()}
        groups: dict[int, list[int]] = {}
        for number, entry in enumerate(optimizer.entries):
            groups.setdefault(entry.group_number, []).append(number)
        self._groups = list(groups.values())

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        chosen: dict[int, int] = {}
        dead: set[tuple[int, tuple[int, ...]]] = set()
        state = (0, (0,) * len(self._groups))
        # Each level: the state, the options left, the entry that was given a candidate to get there, whether it led anywhere.
        stack: list[list] = [[state, self._options(*state), None, False]]
        while stack and self.steps < _MOST_STEPS:
            (place, reached), options, entry, fruitful = stack[-1]
            if len(chosen) == len(self._shapes) and place == len(self._candidates):
                yield tuple(chosen[k] for k in range(len(self._shapes)))
                stack[-1][3] = fruitful = True
                options = iter(())
            option = next(options, None)
            if option is None:
                stack.pop()
                chosen.pop(entry, None)
                if not fruitful:
                    dead.add((place, reached))
                elif stack:
                    stack[-1][3] = True
                continue
            self.steps += 1
            following = (place + 1, option)
            if following in dead:
                continue
            given = next((k for k in range(len(reached)) if option[k] != reached[k]), None)
            own = None if given is None else self._groups[given][reached[given]]
            if own is not None:
                chosen[own] = place
            stack.append([following, self._options(*following), own, False])

    def _options(self, place: int, reached: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if place == len(self._candidates):
            return
        candidate = self._candidates[place]
        for k, members in enumerate(self._groups):
            if reached[k] == len(members):
                continue
            entry = members[reached[k]]
            shape = self._shapes[entry]
            if shape is not None and shape != candidate.shape:
                continue
            if self._fixed.get(entry, place) == place and self._taken.get(place, entry) == entry:
                yield (*reached[:k], reached[k] + 1, *reached[k + 1 :])
        left = len(self._shapes) - sum(reached)
        if not candidate.required and place not in self._taken and len(self._candidates) - place > left:
            yield reached


# -- one group: exact and fast, whatever its length ------------------------------------------------------------------------


def in_order(shapes: Sequence[Shape | None], candidates: Sequence[Candidate]) -> list[tuple[int, ...]]:
    """Return the ways to find these shapes among the candidates, in order: none, the only one, or two that differ."""
    search = _with_required if any(c.required for c in candidates) else _greedy
    left = search(shapes, candidates)
    if left is None:
        return []
    # There is one way exactly if choosing from the left and choosing from the right give the same.
    mirrored = search(shapes[::-1], candidates[::-1]) or []
    right = [len(candidates) - 1 - k for k in reversed(mirrored)]
    return [tuple(way) for way in ([left] if left == right else [left, right])]


def _greedy(shapes: Sequence[Shape | None], candidates: Sequence[Candidate]) -> list[int] | None:
    chosen = []
    k = 0
    for shape in shapes:
        while k < len(candidates) and shape is not None and candidates[k].shape != shape:
            k += 1
        if k == len(candidates):
            return None
        chosen.append(k)
        k += 1
    return chosen


def _with_required(shapes: Sequence[Shape | None], candidates: Sequence[Candidate]) -> list[int] | None:
    """Return the leftmost way that leaves out no required candidate."""
    count, size = len(shapes), len(candidates)
    if count > size:
        return None
    places: dict[Shape, np.ndarray] = {}
    for known in {c.shape for c in candidates}:
        places[known] = np.array([k for k, c in enumerate(candidates) if c.shape == known])
    # The next place must come no later than the next required candidate.
    required = np.array([k for k, c in enumerate(candidates) if c.required] + [size])
    usable: list[np.ndarray] = [np.array([size])]  # from the last entry to the first: where it can stand
    for shape in reversed(shapes):
        here = np.arange(size) if shape is None else places.get(shape, np.array([], dtype=int))
        after = usable[-1]
        following = np.searchsorted(after, here, side="right")
        here, following = here[following < len(after)], following[following < len(after)]
        here = here[after[following] <= required[np.searchsorted(required, here, side="right")]]
        usable.append(here)
    if not count and len(required) > 1:
        return None
    chosen = []
    last = -1
    for here in usable[:0:-1]:
        k = int(np.searchsorted(here, last, side="right"))
        if k == len(here) or here[k] > required[np.searchsorted(required, last, side="right")]:
            return None
        last = int(here[k])
        chosen.append(last)
    return chosen
