"""Whether parts of a model that have the same shapes are exchanged in a proposal: all that the values say of them, added up.

Two towers, the members of an ensemble, the layers of a stack: handed to the optimizer in another order, every shape still
fits. One tensor alone seldom tells, but a whole part has many. What is added up, each as the logarithm of how much likelier
it is by a law than by accident:

- laws of the first moment: the sums of weight times moment over the rows of one matrix are those over the columns of the
  next one, or of all that read it; those of a convolution before a norm are nought;
- v carried from layer to layer: a unit with large weights behind it has large gradients, one with large weights before it
  has large activations, so the v of one layer follows from the weights and the v of the next. This needs no first moment;
- the way a weight has come: what it is now goes with the last steps.

For the proposal and for every exchange of parts the sums are compared. It can contradict a proposal but proves no name.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from .laws import Reading
from .values import Array, Shape, Values, carried, certainty, concordance, independent

__all__ = ["Exchange", "exchanged_parts"]

# From scripts made to mislead (benchmarks/naming_scripts.py); rates in docs/formats.md.
AGAINST = 6.0  # by so much, after the price of having looked for it, must an exchange be likelier to contradict
SPREAD = 4.0  # standard deviations that a law, where it holds, is away from an accident
MOST = 100.0  # of one law between neighbours, and less between others: none decides against all the rest
NORM = 30.0  # that one law of a norm may count
OF_V = 15.0  # that v carried from one layer to the next may count
NEAR = 6  # matrices between which a law of the first moment is looked for
CARRIED = 3  # and between which v is
COME, COME_MATRIX = 8.0, 3.0  # the way of a vector, of a matrix: a query's gradient goes with the weights of its key
STILL = 0.05  # variance of a sum that a law says is nought, of what an accident would give
UNITS = 12  # fewer channels agree by accident too often: the ranks of small adapters
SIBLINGS = 6  # readers of one layer that are added up
ROUNDS = 4  # exchanges on top of each other
_EFFORT = 20_000  # evaluations of a law

Assignment = dict[int, int]
"""Candidate to entry."""


class Exchange(NamedTuple):
    """A parameter whose state belongs to another part.

    Attributes:
        name: Under which the proposal has it.
        other: Whose it is by the values.
        gain: The logarithm of how much likelier that is.
    """

    name: str
    other: str
    gain: float


class _Term(NamedTuple):
    """One law: the candidates in it, and how likely their entries make it."""

    members: tuple[int, ...]
    weigh: Callable[[Sequence[int]], float]


class _Move(NamedTuple):
    """An exchange: to each candidate the one whose entry it gets, and the price of having looked for it."""

    to: dict[int, int]
    price: float


def exchanged_parts(values: Values, assignment: Assignment, proven: Collection[int] = ()) -> Exchange | None:
    """Return an exchange of parts that fits much better than a proposal; None where the proposal may be right.

    Args:
        values: The weights and states.
        assignment: The entry that the proposal gives each candidate.
        proven: Entries whose name is known, so that they stay where they are.
    """
    usable = {
        c: e
        for c, e in sorted(assignment.items())
        if values.candidates[c].shape in values.shapes
        and values.candidates[c].weight is not None
        and not values.candidates[c].slices
        and values.entries[e].shape == values.candidates[c].shape
    }
    moves = [move for move in _moves(values, usable) if not any(usable[c] in proven for c in move.to)]
    if not moves:
        return None
    gain, better = _Search(list(_terms(values, usable, _families(values, usable)))).best(usable, moves)
    if gain < AGAINST:
        return None
    owner = {e: c for c, e in usable.items()}
    changed = next(c for c in usable if better[c] != usable[c])
    names = values.candidates
    # The entry that the proposal gives to `changed` goes elsewhere.
    other = next(c for c in usable if better[c] == usable[changed])
    return Exchange(names[owner[usable[changed]]].name, names[other].name, gain)


class _Search:
    """The terms of all laws, each weighed once for the same entries."""

    def __init__(self, terms: Sequence[_Term]):
        self.terms = terms
        self._of: dict[int, list[int]] = defaultdict(list)
        for k, term in enumerate(terms):
            for member in set(term.members):
                self._of[member].append(k)
        self._known: dict[tuple[int, tuple[int, ...]], float] = {}
        self._left = _EFFORT

    def best(self, start: Assignment, moves: Sequence[_Move]) -> tuple[float, Assignment]:
        """Return what the best assignment but the first gains over it, less its price, and that assignment."""
        found, better, reached, current = -math.inf, start, 0.0, start
        for _ in range(ROUNDS):
            for move in moves:
                following = {**current, **{a: current[b] for a, b in move.to.items()}}
                if self._left <= 0:
                    return found, better
                if following != start:
                    gain = reached + self._gain(current, following, move.to) - move.price
                    if gain > found:
                        found, better = gain, following
            if found <= reached or found >= AGAINST:
                break
            reached, current = found, better
        return found, better

    def _gain(self, old: Assignment, new: Assignment, changed: Mapping[int, int]) -> float:
        terms = {k for member in changed for k in self._of[member]}
        self._left -= len(terms)
        return sum(self._weight(k, new) - self._weight(k, old) for k in terms)

    def _weight(self, k: int, assignment: Assignment) -> float:
        entries = tuple(assignment[c] for c in self.terms[k].members)
        if (k, entries) not in self._known:
            self._known[k, entries] = self.terms[k].weigh(entries)
        return self._known[k, entries]


# -- exchanges ---------------------------------------------------------------------------------------------------------------


def _families(values: Values, usable: Assignment) -> list[list[list[int]]]:
    """Return the parts with one parent and the same shapes: the members of an ensemble, the heads, the layers."""
    children: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for c in usable:
        words = values.candidates[c].name.split(".")
        for depth, word in enumerate(words):
            children[".".join(words[:depth])][word].append(c)
    families = []
    for own in children.values():
        alike: dict[tuple[Shape, ...], list[list[int]]] = defaultdict(list)
        for part in own.values():
            alike[tuple(values.candidates[c].shape for c in part)].append(part)
        families += [parts for parts in alike.values() if len(parts) > 1]
    return sorted(families, key=lambda parts: -len(parts[0]))


def _moves(values: Values, usable: Assignment) -> Iterator[_Move]:
    """Yield the exchanges to try, those of parts with one parent first."""
    near = [dict(move) for family in _families(values, usable) for move in _orders(values, family)]
    far: list[dict[int, int]] = []
    parts: dict[str, list[int]] = defaultdict(list)
    for c in usable:
        words = values.candidates[c].name.split(".")
        for depth in range(1, len(words) + 1):
            parts[".".join(words[:depth])].append(c)
    alike: dict[tuple[Shape, ...], dict[tuple[int, ...], None]] = defaultdict(dict)
    for part in parts.values():
        alike[tuple(values.candidates[c].shape for c in part)][tuple(part)] = None
    for same in alike.values():
        for a, b in itertools.combinations(same, 2):
            move = _swap(a, b)
            if not set(a) & set(b) and _whole(values, a) and move not in near:
                far.append(move)
    yield from (_Move(move, math.log(len(near))) for move in near)
    yield from (_Move(move, math.log(len(near) + len(far))) for move in far)


def _orders(values: Values, family: Sequence[Sequence[int]]) -> Iterator[dict[int, int]]:
    """Yield a family's exchanges of two parts, and its parts reversed and rotated."""
    if not _whole(values, family[0]):
        return
    yield from (_swap(a, b) for a, b in itertools.combinations(family, 2))
    if len(family) > 2:
        for order in (family[::-1], [*family[1:], family[0]], [family[-1], *family[:-1]]):
            moved = zip(itertools.chain(*family), itertools.chain(*order), strict=True)
            yield {a: b for a, b in moved if a != b}


def _swap(a: Sequence[int], b: Sequence[int]) -> dict[int, int]:
    return dict(zip([*a, *b], [*b, *a], strict=True))


def _whole(values: Values, part: Sequence[int]) -> bool:
    """Whether a part has a matrix: nobody hands over a norm or a bias alone in another place."""
    return any(len(values.candidates[c].shape) > 1 for c in part)


# -- laws --------------------------------------------------------------------------------------------------------------------


class _Side(NamedTuple):
    """Channel sums: of a matrix and its bias, a norm and its bias, or of several matrices that read one layer."""

    kind: str  # "rows", "columns" or "norm"
    first: int
    members: tuple[int, ...]
    reading: Reading
    length: int

    def sums(self, values: Values, entries: Sequence[int]) -> Array:
        """Return the sums with these entries."""
        every = zip(self.members, entries, strict=True)
        return np.sum([values.together(c, e, self.reading) for c, e in every], axis=0)


def _terms(values: Values, usable: Assignment, families: Sequence[Sequence[Sequence[int]]]) -> Iterator[_Term]:
    matrices = [c for c in usable if len(values.candidates[c].shape) > 1]
    if all(values.has_moment(e) for e in usable.values()):
        sides = list(_sides(values, usable, matrices, families))
        for a, b in itertools.product(sides, sides):
            far = values.place[b.first] - values.place[a.first]
            if a.kind == "columns" or b.kind != "columns" or a.length != b.length or abs(far) > NEAR:
                continue
            if {*a.members} & {*b.members}:
                continue
            # Nought where b alone is the next matrix. Which norm is meant, neither its weights near one tell nor its place.
            apart = abs(far - 1) + (len(b.members) > 1)
            prior, most = (0.1, NORM) if a.kind == "norm" else (0.5 / (1 + apart), MOST / (1 + apart) ** 2)
            yield _law(values, a, b, prior, most)
        yield from (_still(values, c) for c in matrices if len(values.candidates[c].shape) > 2)
        yield from (_come(values, c) for c in usable if all(map(values.has_square, usable.values())))
    if values.wants_squares:
        for c, d in itertools.permutations(matrices, 2):
            rows, columns = values.candidates[c].shape[0], values.candidates[d].shape[1]
            apart = abs(values.place[d] - values.place[c] - 1)
            if rows == columns >= UNITS and apart <= CARRIED:
                yield from _carried_v(values, c, d, 0.5 / (1 + apart), OF_V / (1 + apart))


def _sides(
    values: Values, usable: Assignment, matrices: Sequence[int], families: Sequence[Sequence[Sequence[int]]]
) -> Iterator[_Side]:
    shapes = {c: values.candidates[c].shape for c in usable}
    number = {values.candidates[c].name: c for c in usable}
    for c, shape in shapes.items():
        name = values.candidates[c].name
        bias = number.get(f"{name.removesuffix('weight')}bias") if name.endswith("weight") else None
        own = (c,) if bias is None or shapes[bias] != shape[:1] else (c, bias)
        if len(shape) == 1:
            if len(own) > 1 and shape[0] >= UNITS:
                yield _Side("norm", c, own, Reading(0), shape[0])
            continue
        if shape[0] >= UNITS:
            yield _Side("rows", c, own, Reading(0), shape[0])
        if shape[1] >= UNITS:
            yield _Side("columns", c, (c,), Reading(1), shape[1])
        if shape[0] == 3 * shape[1] and shape[1] >= UNITS:  # the last third of a fused projection is the value
            yield _Side("rows", c, own, Reading(0, third=2), shape[1])
    for family in families:
        for same in zip(*family, strict=True) if len(family) <= SIBLINGS else ():
            shape = shapes[same[0]]
            if len(shape) > 1 and shape[1] >= UNITS:
                yield _Side("columns", same[0], same, Reading(1), shape[1])


def _law(values: Values, a: _Side, b: _Side, prior: float, most: float) -> _Term:
    count = len(a.members)

    def weigh(entries: Sequence[int]) -> float:
        x, y = a.sums(values, entries[:count]), b.sums(values, entries[count:])
        agreement = float(concordance(x[:, None], y[:, None])[0, 0])
        return _likelier(certainty(agreement, min(carried(x), carried(y))), prior, most)

    return _Term((*a.members, *b.members), weigh)


def _carried_v(values: Values, a: int, b: int, prior: float, most: float) -> Iterator[_Term]:
    """Yield that the gradients of a's units follow from b's weights, and the activations that b reads from a's."""

    def back(entries: Sequence[int]) -> float:
        known, predicted = values.square(entries[0], 0), values.predicted(b, entries[1], 1)
        return _likelier(certainty(float(known @ predicted), independent(known, predicted)), prior, most)

    def forth(entries: Sequence[int]) -> float:
        known, predicted = values.square(entries[1], 1), values.predicted(a, entries[0], 0)
        return _likelier(certainty(float(known @ predicted), independent(known, predicted)), prior, most)

    yield from (_Term((a, b), back), _Term((a, b), forth))


def _still(values: Values, c: int) -> _Term:
    """Return that a filter's sum of weight times moment is nought, as before a norm."""

    def weigh(entries: Sequence[int]) -> float:
        squares = values.still(c, entries[0])
        if len(squares) < UNITS:
            return 0.0
        log = float(np.sum(squares / 2 - squares / (2 * STILL) - math.log(STILL) / 2))
        return min(math.log(0.8 + 0.2 * math.exp(min(max(log, -50.0), 2 * NORM))), NORM)

    return _Term((c,), weigh)


def _come(values: Values, c: int) -> _Term:
    """Return that a weight goes with the steps of its state: from nought, or from a random start, it has come that way."""

    def weigh(entries: Sequence[int]) -> float:
        weight, steps = values.weight(c), values.steps(entries[0])
        if weight.size < UNITS:
            return 0.0
        products = (weight - weight.mean()) * (steps - steps.mean())
        sums = [products.reshape(-1)]
        sums += [products.sum(axis) for axis in (0, 1) if products.ndim > 1 and products.shape[1 - axis] >= UNITS]
        total = abs(float(products.sum()))
        return _likelier(
            min(total / max(math.sqrt(float(s @ s)), 1e-300) for s in sums),
            0.3,
            COME_MATRIX if weight.ndim > 1 else COME,
        )

    return _Term((c,), weigh)


def _likelier(z: float, prior: float, most: float) -> float:
    """Return the logarithm of how much likelier a result of z standard deviations is if a law may hold than if none does."""
    variance = 1 + SPREAD**2
    shrunk = SPREAD / math.sqrt(variance)
    log = (shrunk * z) ** 2 / 2 + math.log(2 * NormalDist().cdf(min(max(shrunk * z, -8.0), 8.0)) / math.sqrt(variance))
    return min(math.log(1 - prior + prior * math.exp(min(log, 2 * MOST))), most)
