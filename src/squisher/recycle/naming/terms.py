"""What the values say of an assignment of entries to candidates, law by law.

Each law gives a term: the logarithm of how much likelier the values are if it holds for these entries than by accident. There are

- laws of the first moment: the sums of weight times moment over the outputs of one matrix are those over the inputs of the
  next one, or of all that read it; over the outputs of two that are multiplied (a query and its key) they are equal; those of
  a convolution before a norm are zero;
- v carried from layer to layer: a unit with large weights behind it has large gradients, one with large weights before it
  has large activations, so the v of one layer follows from the weights and the v of the next. This needs no first moment;
- the direction in which a weight has moved: what it is now goes with the last steps.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import NormalDist
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from .laws import Reading
from .values import Array, Values, carried, certainty, concordance, independent, ranks

__all__ = ["NEAR", "NORM", "OF_V", "Assignment", "Term", "terms"]

# From scripts made to mislead (benchmarks/naming_scripts.py); rates in docs/formats.md.
SPREAD = 4.0  # standard deviations between a law that holds and an accident
MOST = 100.0  # that one law between neighbours may count, and less between others: none decides against all the rest
NORM = 30.0  # that one law of a norm may count
OF_V = 15.0  # that v carried from one layer to the next may count
OF_NORM = 8.0  # that v of a norm beside a layer may count
NEAR = 6  # matrices between which a law of the first moment is looked for
CARRIED = 3  # and between which v is
FACTORS, FACTOR = 2, 20.0  # matrices between which two factors are looked for, and what the law between them may count
EMBEDDINGS = 2  # first matrices whose columns may be outputs, added to what every later layer adds to
COME, COME_MATRIX = (
    8.0,
    3.0,
)  # that the movement of a vector, of a matrix may count: a query's gradient goes with the weights of its key
STILL = 0.05  # variance of a sum that a law says is zero, relative to what an accident would give
UNITS = 12  # fewer channels agree by accident too often: the ranks of small adapters
SIBLINGS = 6  # readers of one layer that are added up

T = TypeVar("T")
Assignment = dict[int, int]
"""Candidate to entry; an entry without a state has a negative number."""


class Term(NamedTuple):
    """One law: the candidates in it, how likely their entries make it, and whose weights it is read from.

    Attributes:
        choice: Of the laws with one such number only the likeliest holds: a norm is read in one place.
        exact: Whether other weights hardly obey it: v goes with the activity of units, whatever the weights are.
    """

    members: tuple[int, ...]
    weigh: Callable[[Sequence[int]], float]
    weights: tuple[int, ...]
    choice: int | None = None
    exact: bool = False


class _Side(NamedTuple):
    """Channel sums: of a matrix and its bias, a norm and its bias, or of several matrices that read one layer."""

    kind: str  # "outputs", "inputs" or "norm"
    first: int
    members: tuple[int, ...]
    readings: tuple[Reading, ...]  # of each member
    length: int

    def sums(self, values: Values, entries: Sequence[int]) -> Array:
        """Return the sums with these entries."""
        every = zip(self.members, entries, self.readings, strict=True)
        return np.sum([values.together(c, e, reading) for c, e, reading in every], axis=0)


class _Places(Generic[T]):
    """Find what belongs to the candidates near a candidate, by their places among the model's matrices.

    Two layers with one number in two lists of one module (w1.3 and w2.3) are neighbours wherever they stand, if one may read the other.
    """

    def __init__(self, values: Values, things: Sequence[tuple[int, T]]):
        self._values = values
        self._things: dict[int, list[T]] = defaultdict(list)
        self._listed: dict[tuple[str, ...], list[tuple[int, T]]] = defaultdict(list)
        for candidate, thing in things:
            self._things[values.place[candidate]].append(thing)
            for key in _in_lists(values, candidate):
                self._listed[key].append((candidate, thing))

    def around(self, candidate: int, first: int, last: int) -> Iterator[T]:
        """Yield what is between two distances from a candidate, and its neighbours by number."""
        place = self._values.place[candidate]
        for k in range(place + first, place + last + 1):
            yield from self._things.get(k, ())
        for other, thing in self.listed(candidate):
            if not first <= self._values.place[other] - place <= last and self._reads(candidate, other):
                yield thing

    def apart(self, candidate: int, other: int) -> int:
        """Return how far another is from where the next matrix is expected."""
        far = abs(self._values.place[other] - self._values.place[candidate] - 1)
        listed = {*_in_lists(self._values, candidate)}.intersection(_in_lists(self._values, other))
        return min(far, 1) if listed and self._reads(candidate, other) else far

    def listed(self, candidate: int) -> Iterator[tuple[int, T]]:
        """Yield what has a candidate's number in another list and another shape; with one shape, they may be twin networks."""
        shape = self._values.candidates[candidate].shape
        for key in _in_lists(self._values, candidate):
            yield from (both for both in self._listed.get(key, ()) if self._values.candidates[both[0]].shape != shape)

    def _reads(self, candidate: int, other: int) -> bool:
        """Return whether the shapes are those of a layer into a wider space and of the one back."""
        a, b = (self._values.candidates[c].shape for c in (candidate, other))
        return len(a) == 2 and a != b == a[::-1]


def _in_lists(values: Values, candidate: int) -> Iterator[tuple[str, ...]]:
    """Yield a candidate's name with that of a numbered list left blank: w1.3.weight and w2.3.weight give the same."""
    words = values.candidates[candidate].name.split(".")
    for k, word in enumerate(words[1:]):
        if word.isdecimal() and not words[k].isdecimal():
            yield (*words[:k], "", *words[k + 1 :])


def terms(values: Values, usable: Assignment, families: Sequence[Sequence[Sequence[int]]]) -> Iterator[Term]:
    """Yield every law that the values of these candidates may obey.

    Args:
        values: The weights and states.
        usable: The candidates that have a weight, and their entries.
        families: Parts with one parent and the same shapes, which may read one layer together.
    """
    matrices = [c for c in usable if len(values.candidates[c].shape) > 1]
    kept = [e for e in usable.values() if e >= 0]
    if all(map(values.has_moment, kept)):
        yield from _of_moments(values, _sides(values, usable, families))
        yield from (_still(values, c) for c in matrices if len(values.candidates[c].shape) > 2)
        if all(map(values.has_square, kept)):
            yield from (_come(values, c) for c in usable if values.small or len(values.candidates[c].shape) == 1)
    if values.wants_squares:
        yield from _of_biases(values, usable, matrices)
        yield from _of_norms(values, usable, matrices)
        yield from _of_neighbours(values, matrices)
    if values.wants_squares or all(map(values.has_square, kept)):
        yield from _of_directions(values, usable, matrices)


def _of_moments(values: Values, sides: Iterator[_Side]) -> Iterator[Term]:
    """Yield the laws that sums over the outputs of a matrix, or over a norm, are those over the inputs of what reads it."""
    every = list(sides)
    inputs = _Places(values, [(side.first, side) for side in every if side.kind == "inputs"])
    outputs = _Places(values, [(side.first, side) for side in every if side.kind == "outputs"])
    coupled = any(e.group.get("weight_decay") and not e.group.get("decoupled_weight_decay") for e in values.entries)
    for a in (side for side in every if side.kind != "inputs"):
        # Of twins whose decay is part of the gradient, the exchanged sums are equal, too.
        for b in outputs.around(a.first, 1, FACTORS) if a.kind == "outputs" and not coupled else ():
            if values.candidates[a.first].shape == values.candidates[b.first].shape and a.length == b.length:
                yield _law(values, a, b, 0.3, FACTOR)
        for b in inputs.around(a.first, -NEAR, NEAR):
            if a.length != b.length or {*a.members} & {*b.members} or _own_gain(values, a.first, b.first):
                continue
            # Zero where b alone is the next matrix. Neither its weights, all near one, nor its place tell which norm is meant.
            apart = inputs.apart(a.first, b.first) + (len(b.members) > 1)
            prior, most = 0.5 / (1 + apart), MOST / (1 + apart) ** 2
            if a.kind == "norm":
                prior, most = 0.1 if _apart(values, a.first, b.first) else 0.3, NORM
            yield _law(values, a, b, prior, most)._replace(choice=a.first if a.kind == "norm" else None)


def _own_gain(values: Values, gain: int, other: int) -> bool:
    """Return whether the first is the gain of the second, as weight norm has it: one number a row. It reads no layer of its own."""
    module, own = (values.candidates[c].name.rpartition(".")[0] for c in (gain, other))
    return module == own and math.prod(values.candidates[gain].shape[1:]) == 1


def _of_biases(values: Values, usable: Assignment, matrices: Sequence[int]) -> Iterator[Term]:
    """Yield the laws that v of a bias goes with the outputs of its weight; in lists of their own, `weights.3` has `biases.3`."""
    number = {values.candidates[c].name: c for c in usable}
    for c in matrices:
        name, axis = values.candidates[c].name, values.out[c]
        bias = number.get(name.replace("weight", "bias"), number.get(name.replace("weights", "biases"), c))
        if (
            bias != c
            and values.candidates[bias].shape == values.candidates[c].shape[axis : axis + 1]
            and len(usable) > 2
        ):
            by_values = values.outputs(usable[c]) if usable[c] >= 0 else 0
            yield _alike(values, (c, axis or by_values), (bias, 0), 0.8, OF_V)


def _of_neighbours(values: Values, matrices: Sequence[int]) -> Iterator[Term]:
    """Yield what v of a matrix says of v of those near it in the model."""
    # Of an embedding, which has no bias, the columns are outputs. Layers of a stack are none, however early they come, nor is a
    # head that is registered first.
    names = {c.name for c in values.candidates}
    tables = [
        c
        for k, c in enumerate(matrices)
        if not re.search(r"\d+\..*\.|head|out", values.candidates[c].name)
        and (k < EMBEDDINGS or "emb" in values.candidates[c].name)
        and f"{values.candidates[c].name.removesuffix('weight')}bias" not in names
    ]
    near = _Places(values, [(d, d) for d in matrices])
    for c in matrices:
        for d, _ in near.listed(c):
            if c < d and values.length(c, 0) == values.length(d, 0) >= UNITS:
                yield _alike(values, (c, values.out[c]), (d, values.out[d]), 0.5, OF_V)
    pairs = [(c, d) for c in matrices for d in {*near.around(c, -CARRIED, 2 * CARRIED), *tables} if d != c]
    for c, d in pairs:
        given, read, taken = values.length(c, 0), values.length(c, 1), values.length(d, 1)
        far, apart = values.place[d] - values.place[c], near.apart(c, d)
        own, other = values.out[c], 1 - values.out[d]
        if given == taken >= UNITS and apart <= CARRIED:
            yield from _carried_v(values, c, d, 0.5 / (1 + apart), OF_V / (1 + apart))
            yield _alike(values, (c, own), (d, other), 0.5 / (1 + apart), OF_V / (1 + apart))
        elif given == taken >= UNITS and d in tables and far < 0:
            yield _alike(values, (c, own), (d, other), 0.3, OF_V / 2)
        if read == taken >= UNITS and c in tables and 0 < far <= 2 and given != values.length(d, 0):
            yield _back(values, (c, 1 - own), d, 0.3 / far, OF_V / 2 / far)
        if read == taken >= UNITS and 0 < far <= CARRIED and _hidden_is_read(values, c, d):
            yield _alike(values, (c, 1), (d, 1), 0.5 / far, OF_V / far)


def _of_directions(values: Values, usable: Assignment, matrices: Sequence[int]) -> Iterator[Term]:
    """Yield the laws that v of a direction of a recurrent layer goes with its half of what the next layer reads of both."""
    names = {values.candidates[c].name for c in usable}
    near = _Places(values, [(d, d) for d in matrices])
    for c in matrices:
        read = values.candidates[c].shape[1]
        if f"{values.candidates[c].name.removesuffix('_reverse')}_reverse" in names and read >= UNITS:
            for d in near.around(c, 1, 2 * CARRIED):
                if values.candidates[d].shape[1] == 2 * read and _hidden_is_read(values, c, d):
                    yield _half_alike(values, c, d, 0.5, OF_V)


def _hidden_is_read(values: Values, a: int, b: int) -> bool:
    """Return whether b may read what the hidden-to-hidden weight a of a recurrent layer reads: the next layer, or another module.

    What reads the state of a single cell may be registered before it: the attention of a decoder.
    """
    (module, _, own), (other, _, name) = (values.candidates[k].name.rpartition(".") for k in (a, b))
    if own == "weight_hh":
        return other != module
    number = own.removeprefix("weight_hh_l").removesuffix("_reverse")
    if not number.isdecimal():
        return False
    following = other != module or name.removesuffix("_reverse") == f"weight_ih_l{int(number) + 1}"
    return following and values.place[b] > values.place[a]


def _half_alike(values: Values, a: int, b: int, prior: float, most: float) -> Term:
    """Return the law that v goes alike over what a direction of a recurrent layer reads and its half of what b reads of both."""
    half = int(values.candidates[a].name.endswith("_reverse"))

    def weigh(entries: Sequence[int]) -> float:
        return _agreement(values.square(entries[0], 1), values.half(entries[1], half), prior, most)

    return Term((a, b), weigh, ())


def _sides(values: Values, usable: Assignment, families: Sequence[Sequence[Sequence[int]]]) -> Iterator[_Side]:
    shapes = {c: values.candidates[c].shape for c in usable}
    number = {values.candidates[c].name: c for c in usable}
    for c, shape in shapes.items():
        name = values.candidates[c].name
        bias = number.get(f"{name.removesuffix('weight')}bias") if name.endswith("weight") else None
        axis = values.out[c]
        own = (c,) if bias is None or shapes[bias] != shape[axis : axis + 1] else (c, bias)
        if len(shape) == 1:
            if len(own) > 1 and shape[0] >= UNITS:
                yield _Side("norm", c, own, (Reading(0),) * 2, shape[0])
            continue
        given, read = values.length(c, 0), values.length(c, 1)
        if given >= UNITS:
            yield _Side("outputs", c, own, (Reading(axis), Reading(0))[: len(own)], given)
        if read >= UNITS:
            yield _Side("inputs", c, (c,), (Reading(1 - axis),), read)
        if given == 3 * read and read >= UNITS:  # the last third of a fused projection is the value
            yield _Side("outputs", c, own, (Reading(axis, third=2), Reading(0, third=2))[: len(own)], read)
    for family in families:
        for same in zip(*family, strict=True) if len(family) <= SIBLINGS else ():
            if len(shapes[same[0]]) > 1 and values.length(same[0], 1) >= UNITS:
                readings = tuple(Reading(1 - values.out[c]) for c in same)
                yield _Side("inputs", same[0], same, readings, values.length(same[0], 1))


def _law(values: Values, a: _Side, b: _Side, prior: float, most: float) -> Term:
    count = len(a.members)

    def weigh(entries: Sequence[int]) -> float:
        x, y = a.sums(values, entries[:count]), b.sums(values, entries[count:])
        agreement = float(concordance(x[None], y[None])[0, 0])
        if a.kind == b.kind == "outputs":  # weights that moved alike agree with each other's moments, too
            agreement -= abs(values.alike(entries[0], entries[count]))
        return _likelier(certainty(agreement, min(carried(x), carried(y))), prior, most)

    # What several layers read together holds without one of them nearly as well.
    readers = b.members if b.kind == "outputs" or len(b.members) == 1 else ()
    return Term((*a.members, *b.members), weigh, (*a.members, *readers), exact=True)


def _carried_v(values: Values, a: int, b: int, prior: float, most: float) -> Iterator[Term]:
    """Yield the laws that v of a's units follows from b's weights, v of what b reads from a's weights, and that the two balance.

    A unit that is seldom active has small gradients on both sides of it. Their ratio does not depend on that: it is what the
    weights before the unit and those behind it say.
    """
    given, read = values.out[a], 1 - values.out[b]

    def forth(entries: Sequence[int]) -> float:
        return _agreement(values.square(entries[1], read), values.predicted(a, entries[0], given), prior, most)

    def balanced(entries: Sequence[int]) -> float:
        known = values.square(entries[1], read) - values.square(entries[0], given)
        predicted = values.predicted(a, entries[0], given) - values.predicted(b, entries[1], read)
        return _agreement(known, predicted, prior, most)

    yield from (_back(values, (a, given), b, prior, most), Term((a, b), forth, (a,)), Term((a, b), balanced, (a, b)))


def _back(values: Values, a: tuple[int, int], b: int, prior: float, most: float) -> Term:
    """Return the law that v over an axis of a follows from the weights and v of b, which reads it."""

    def weigh(entries: Sequence[int]) -> float:
        predicted = values.predicted(b, entries[1], 1 - values.out[b])
        return _agreement(values.square(entries[0], a[1]), predicted, prior, most)

    return Term((a[0], b), weigh, (b,))


def _of_norms(values: Values, usable: Assignment, matrices: Sequence[int]) -> Iterator[Term]:
    """Yield the laws that v of a norm's weight and bias goes with the rows of the layer before it, or follows from the one behind."""
    number = {values.candidates[c].name: c for c in usable}
    others, layers = _Places(values, [(d, d) for d in matrices]), defaultdict(list)
    for d in matrices:
        layers[_numbers(values, d)].append(d)
    for c in usable:
        name, shape = values.candidates[c].name, values.candidates[c].shape
        owner = number.get(re.sub("bias$", "weight", name), c)
        if len(shape) != 1 or shape[0] < UNITS or len(values.candidates[owner].shape) != 1:
            continue
        layer = layers[_numbers(values, c)] if _numbers(values, c) else []
        for d in sorted({*layer, *others.around(c, -CARRIED - 1, CARRIED)}):
            apart = _apart(values, c, d)
            prior, most = 0.3 / (1 + apart), OF_NORM / (1 + apart)
            if apart <= CARRIED and values.length(d, 0) == shape[0]:
                yield _alike(values, (c, 0), (d, values.out[d]), prior, most)
            if apart <= CARRIED and values.length(d, 1) == shape[0]:
                yield _back(values, (c, 0), d, prior, most)


def _apart(values: Values, norm: int, matrix: int) -> int:
    """Return how far a matrix is from a norm: not at all in a layer of the same number, or next to it."""
    numbers = _numbers(values, norm)
    far = values.place[matrix] - values.place[norm]
    return 0 if numbers and numbers == _numbers(values, matrix) else min(abs(far), abs(far + 1))


def _numbers(values: Values, candidate: int) -> tuple[str, ...]:
    return tuple(re.findall(r"\d+", values.candidates[candidate].name))


def _alike(values: Values, a: tuple[int, int], b: tuple[int, int], prior: float, most: float) -> Term:
    """Return the law that v goes alike over an axis of a and one of b: a unit that is seldom active, an input that both read."""

    def weigh(entries: Sequence[int]) -> float:
        return _agreement(values.square(entries[0], a[1]), values.square(entries[1], b[1]), prior, most)

    return Term((a[0], b[0]), weigh, ())


def _still(values: Values, c: int) -> Term:
    """Return the law that a filter's sum of weight times moment is zero, as before a norm."""

    def weigh(entries: Sequence[int]) -> float:
        squares = values.still(c, entries[0])
        if len(squares) < UNITS:
            return 0.0
        log = float(np.sum(squares / 2 - squares / (2 * STILL) - math.log(STILL) / 2))
        return min(math.log(0.8 + 0.2 * math.exp(min(max(log, -50.0), 2 * NORM))), NORM)

    return Term((c,), weigh, (c,), exact=True)


def _come(values: Values, c: int) -> Term:
    """Return the law that a weight goes with the steps of its state: from zero, or from a random start, it has moved that way."""

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

    return Term((c,), weigh, (c,))


def _agreement(x: Array, y: Array, prior: float, most: float) -> float:
    """Return how much likelier a law between two vectors is than an accident, by the ranks of their channels."""
    a, b = ranks(x), ranks(y)
    return _likelier(certainty(float(a @ b), independent(a, b)), prior, most)


def _likelier(z: float, prior: float, most: float) -> float:
    """Return the logarithm of how much likelier a result of z standard deviations is if a law may hold than if none does."""
    variance = 1 + SPREAD**2
    shrunk = SPREAD / math.sqrt(variance)
    log = (shrunk * z) ** 2 / 2 + math.log(2 * NormalDist().cdf(min(max(shrunk * z, -8.0), 8.0)) / math.sqrt(variance))
    return min(math.log(1 - prior + prior * math.exp(min(log, 2 * MOST))), most)
