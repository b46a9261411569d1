"""Which parameter a number of the optimizer stands for, by the values: weights and first moments obey laws that few pairs fit.

A network does not change when a channel is scaled up in one tensor and down in the next one. So, channel by channel, the
sums of weight times gradient over the rows of the one equal those over the columns of the other, and the first moment, a
mean of gradients, obeys the same law almost exactly. Which tensors are tied by such a law is not asked of the model: for two
neighbours in the model, every pair of entries of their shapes is tried, and where exactly one pair obeys, both are
known. Where weights of an earlier moment are at hand, how a tensor moved is compared with the steps that its state asks
for. A moving average or a frozen teacher beside the weights obeys the laws as well as they do: between copies only movement
from the one to the other can tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist

import numpy as np

from ..states import Candidate, Entry, Source
from .laws import NO_HEADS, Law, Reading
from .values import FEWEST, Array, Values, carried, centred, certainty, concordance, concordance_of

__all__ = ["Evidence", "weigh"]

# From a simulation of wrong assignments on real runs (benchmarks/naming_rates.py); rates in docs/formats.md.
AGREE = 0.8  # a pair obeys a law: its channel sums are equal to within a few percent of their variance
APART = 0.3  # and no other entry comes nearer than this in the same law
CLEARER = 3.0  # nor, in any law, does another entry or another parameter come so near that its error is less than so many times
ALIKE = 0.7  # correlation of the logarithms of v of a bias and of the rows of its weight
ALONE = 0.5  # and no other bias, nor another weight, comes nearer than this: norms beside a layer look like its bias
WINDOW = 128  # entries of one shape beyond which a law is looked for only among those that stand nearby
NEIGHBOURS = 6  # matrices of the model, on either side, that a matrix may be tied to
MOVED = 0.1  # correlation of a movement with the steps of its state
TIMES = 3.0  # and so many times that of any other entry
COPY = 0.5  # correlation of two weights beyond which one may be an earlier, averaged or otherwise trained copy of the other
CHANCE = 1e-4  # that one of all the comparisons made comes out as well as this by accident


@dataclass(frozen=True)
class Evidence:
    """Entries whose parameter the values tell.

    Attributes:
        names: Entry to name.
        margins: Entry to the distance of the second best answer, in correlation.
        by: What told them, for people.
        values: What was read for it, of each network that has these names.
    """

    names: Mapping[int, str] = field(default_factory=dict)
    margins: Mapping[int, float] = field(default_factory=dict)
    by: str = ""
    values: Sequence[Values] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True)
class _Vote:
    """An entry's parameter, how well it agrees, how much worse every other entry does, and how sure that is."""

    entry: int
    candidate: int
    agreement: float
    margin: float
    certainty: float


def weigh(
    sources: Sequence[Source], entries: Sequence[Entry], derived: Callable[[], Sequence[Law]] = tuple
) -> Evidence:
    """Return which parameters the values tell; of several networks with the same names, those of the clearest.

    Args:
        sources: The parameters of the model by where they come from; those whose weight is not at hand say nothing.
        entries: What the optimizer keeps.
        derived: Returns the laws of the model's own structure, where they are known.
    """
    every: dict[str, Candidate] = {}
    for _, own in sources:
        if any(
            c.name in every and every[c.name].weight is not c.weight for c in own
        ):  # generator, critic, moving average
            each = [weigh([source], entries, derived) for source in sources]
            clearest = max(each, key=lambda evidence: len(evidence.names))
            return replace(clearest, values=[values for evidence in each for values in evidence.values])
        every.update({c.name: c for c in own})
    candidates = list(every.values())
    values = Values(candidates, entries)
    copies = _copies(values)
    laws = [vote for vote in _by_laws(values) if vote.candidate not in copies]
    moves = list(_by_movement(values, copies))
    laws += _by_derived_laws(values, derived, _agreed([*laws, *moves]), copies)
    profiles = list(_by_profiles(values, _agreed([*laws, *moves])))
    agreed = _agreed([*laws, *moves, *profiles])
    kinds = [n for n, v in (("first moments", laws), ("movement", moves), ("profiles of v", profiles)) if v]
    return Evidence(
        {entry: candidates[vote.candidate].name for entry, vote in agreed.items()},
        {entry: vote.margin for entry, vote in agreed.items()},
        " and ".join(kinds),
        [values],
    )


def _agreed(votes: Sequence[_Vote]) -> dict[int, _Vote]:
    """Return the clearest vote for each entry, where all votes for it and for its candidate say the same."""
    said: dict[int, set[int]] = {}
    claimed: dict[int, set[int]] = {}
    for vote in votes:
        said.setdefault(vote.entry, set()).add(vote.candidate)
        claimed.setdefault(vote.candidate, set()).add(vote.entry)
    agreed: dict[int, _Vote] = {}
    for vote in sorted(votes, key=lambda v: v.margin):
        if len(said[vote.entry]) == 1 and len(claimed[vote.candidate]) == 1:
            agreed[vote.entry] = vote
    return agreed


# -- laws ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Side:
    """One axis of the tensors of one shape: the channel sums of every candidate with every entry.

    A norm's weight and bias are one: they scale together.
    """

    length: int
    axis: int
    candidates: Sequence[tuple[int, ...]]
    entries: Sequence[tuple[int, ...]]
    sums: tuple[Array, Array, Array]  # candidate, entry, channel: centred, with means and squares

    def part(self, candidate: int, entries: slice = slice(None)) -> tuple[Array, Array, Array]:
        """Return the sums of a candidate with some entries."""
        centred, means, squares = self.sums
        return centred[candidate, entries], means[candidate, entries], squares[candidate, entries]


def _side(
    length: int, axis: int, candidates: Sequence[tuple[int, ...]], entries: Sequence[tuple[int, ...]], sums: Array
) -> _Side:
    return _Side(length, axis, candidates, entries, centred(np.ascontiguousarray(np.moveaxis(sums, 0, -1))))


def _by_laws(values: Values) -> Iterator[_Vote]:
    """Yield votes by the laws between neighbours: the rows of one matrix, or a norm, and the columns of another."""
    sides = [*_matrices(values), *_norms(values)]
    nearest = np.full((len(values.candidates), len(values.entries)), -1.0)
    groups = [entry.group for entry in values.entries]
    coupled = any(group.get("weight_decay") and not group.get("decoupled_weight_decay") for group in groups)
    votes: list[_Vote] = []
    compared = 0
    for i, left in enumerate(sides):
        for right in sides[i:]:
            if left.length != right.length or max(len(left.entries), len(right.entries)) < 2:
                continue
            # Twins look exchanged, since W₁·m₂ goes with W₂·m₁, most of all where the decay is part of the gradient. Between
            # two of one shape there is a law only over rows: of a query and its key. Two alone (users and items) have none.
            if left is right and (left.axis == 1 or coupled or len(left.candidates) == 2):
                continue
            own_numbers, other_numbers = (np.array(side.entries) for side in (left, right))
            same = (own_numbers[:, None, :, None] == other_numbers[None, :, None, :]).any((2, 3))
            windows = list(_windows(left, right))
            for a, own in enumerate(left.candidates):
                for b, other in enumerate(right.candidates):
                    near = abs(values.place[own[0]] - values.place[other[0]]) <= NEIGHBOURS
                    if not near or set(own) & set(other) or (left is right and a >= b):
                        continue
                    best = [np.full(len(side.entries), -1.0) for side in (left, right)]
                    pair = (-1.0, 0, 0)
                    for rows, columns in windows:
                        agreement = concordance_of(left.part(a, rows), right.part(b, columns))
                        agreement[same[rows, columns]] = -1.0
                        compared += agreement.size
                        best[0][rows] = agreement.max(1)
                        best[1][columns] = np.maximum(best[1][columns], agreement.max(0))
                        row, column = divmod(int(agreement.argmax()), agreement.shape[1])
                        pair = max(pair, (float(agreement[row, column]), rows.start + row, columns.start + column))
                    _remember(nearest, own, left.entries, best[0])
                    _remember(nearest, other, right.entries, best[1])
                    votes += _best_pair(left, a, right, b, pair, best)
    for vote in votes:
        rivals = [np.delete(nearest[:, vote.entry], vote.candidate), np.delete(nearest[vote.candidate], vote.entry)]
        error = 1 - max(float(r.max(initial=-1.0)) for r in rivals)
        if vote.certainty >= _needed(compared) and error >= CLEARER * (1 - vote.agreement):
            yield vote


def _windows(left: _Side, right: _Side) -> Iterator[tuple[slice, slice]]:
    """Yield which entries are compared with which: all with all, or in a crowd those that are as far along the optimizer."""
    rows, columns = len(left.entries), len(right.entries)
    step = rows if max(rows, columns) <= WINDOW else WINDOW // 2
    for first in range(0, rows, step):
        middle = int((first + step / 2) * columns / rows)
        start = max(0, min(middle - WINDOW // 2, columns - WINDOW))
        yield slice(first, first + step), slice(start, start + WINDOW)


def _remember(nearest: Array, candidates: Sequence[int], entries: Sequence[tuple[int, ...]], agreement: Array) -> None:
    """Keep the best agreement of each candidate with each entry."""
    for candidate, numbers in zip(candidates, zip(*entries, strict=True), strict=True):
        nearest[candidate, list(numbers)] = np.maximum(nearest[candidate, list(numbers)], agreement)


def _needed(compared: int) -> float:
    """Return how many standard deviations rule out an accident among so many comparisons."""
    return -NormalDist().inv_cdf(min(0.5, CHANCE / max(compared, 1)))


def _matrices(values: Values) -> Iterator[_Side]:
    for shape in values.comparable:
        candidates = [(k,) for k, c in enumerate(values.candidates) if c.shape == shape and c.weight is not None]
        entries = [(k,) for k, e in enumerate(values.entries) if e.shape == shape and values.has_moment(k)]
        if len(shape) >= 2 and candidates and entries:
            for axis in (0, 1):
                if shape[axis] >= FEWEST:
                    yield _side(shape[axis], axis, candidates, entries, values.read(shape, Reading(axis), NO_HEADS))


def _norms(values: Values) -> Iterator[_Side]:
    """Yield the sums of the norms of one length: weight and bias together, with every two neighbours among the entries."""
    for shape in values.comparable:
        if len(shape) != 1 or shape[0] < FEWEST:
            continue
        own = {c.name: k for k, c in enumerate(values.candidates) if c.shape == shape and c.weight is not None}
        both = [(k, own.get(f"{name[:-6]}bias")) for name, k in own.items() if name.endswith("weight")]
        candidates = [(weight, bias) for weight, bias in both if bias is not None]
        fits = [e.shape == shape and values.has_moment(k) for k, e in enumerate(values.entries)]
        groups = [e.group_number for e in values.entries]
        entries = [(k, k + 1) for k in range(len(fits) - 1) if fits[k] and fits[k + 1] and groups[k] == groups[k + 1]]
        if candidates and entries:
            table = values.read(shape, Reading(0), NO_HEADS)
            weights, biases = ([values.row(both[k]) for both in candidates] for k in (0, 1))
            first, second = ([values.column(both[k]) for both in entries] for k in (0, 1))
            sums = table[:, weights][:, :, first] + table[:, biases][:, :, second]
            yield _side(shape[0], 0, candidates, entries, sums)


def _best_pair(
    left: _Side, a: int, right: _Side, b: int, pair: tuple[float, int, int], nearest: Sequence[Array]
) -> Iterator[_Vote]:
    """Yield the entries of two candidates, if the best pair is the only one that obeys a law between them."""
    best, i, j = pair
    if best < AGREE:
        return
    x, y = left.part(a), right.part(b)
    sure = certainty(best, min(carried(x[0][i]), carried(y[0][j])))
    # Those beyond the window too.
    every = (
        concordance_of(x, right.part(b, slice(j, j + 1)))[:, 0],
        concordance_of(left.part(a, slice(i, i + 1)), y)[0],
    )
    theirs = {*right.entries[j]}, {*left.entries[i]}
    for own, (k, side, chosen) in enumerate(((i, left, a), (j, right, b))):
        apart = [theirs[own].isdisjoint(numbers) for numbers in side.entries]
        rivals = np.maximum(nearest[own], np.where(apart, every[own], -1.0))
        margin = best - float(np.delete(rivals, k).max(initial=-1.0))
        # A norm's weights are all near one: its sums tell which entry it is tied to, not which norm that entry is.
        if margin >= APART and len(side.candidates[chosen]) == 1:
            yield _Vote(side.entries[k][0], side.candidates[chosen][0], best, margin, sure)


# -- laws of the model's structure -----------------------------------------------------------------------------------------


def _by_derived_laws(
    values: Values, derived: Callable[[], Sequence[Law]], known: Mapping[int, _Vote], copies: Mapping[int, object]
) -> list[_Vote]:
    """Return votes by laws of which all members but one or two are known: every entry of their shapes is tried for these."""
    number = {
        c.live_name or c.name: k for k, c in enumerate(values.candidates) if c.weight is not None and not c.slices
    }
    laws = derived() if values.shapes and any(map(values.has_moment, range(len(values.entries)))) else ()
    usable = [law for law in laws if all(name in number for name, _, _ in law.terms)]
    entry_of = {vote.candidate: entry for entry, vote in known.items()}
    entry_of |= {k: e for k in number.values() if (e := values.alone(k)) is not None and values.has_moment(e)}
    members = [_members(values, law, number) for law in usable]
    sizes = [sorted(len(m.entries) for m in law.values())[-2:] for law in members if law]
    needed = _needed(sum(math.prod(size) for size in sizes))
    votes: list[_Vote] = []
    while True:
        told = [law for law in members if not any(k in copies and k not in entry_of for k in law)]
        found = [vote for law in told for vote in _law_votes(law, entry_of) if vote.certainty >= needed]
        agreed = list(_agreed(found).values())
        votes += agreed
        entry_of |= {vote.candidate: vote.entry for vote in agreed}
        if not agreed:
            return votes


@dataclass(frozen=True)
class _Member:
    """A candidate in a law: its channel sums with every entry of its shape."""

    entries: Sequence[int]
    sums: Array  # channel, entry
    minor: bool  # a vector that starts at zero: it carries little of the law


def _members(values: Values, law: Law, number: Mapping[str, int]) -> dict[int, _Member]:
    """Return the candidates of a law; none if it cannot be read from this checkpoint."""
    shapes = {name: values.candidates[number[name]].shape for name, _, _ in law.terms}
    sets = [reading.channels(shapes[name][reading.axis], law.heads) for name, reading, _ in law.terms]
    if any(s is None for s in sets) or len({len(s) for s in sets if s is not None}) > 1:
        return {}
    if any(shape not in values.comparable for shape in shapes.values()):
        return {}
    most = max(16, values.channels // max(s.shape[1] for s in sets if s is not None))
    members: dict[int, _Member] = {}
    for name, reading, sign in law.terms:
        k = number[name]
        entries = [e for e, entry in enumerate(values.entries) if entry.shape == shapes[name] and values.has_moment(e)]
        if not entries:
            return {}
        sums = sign * values.read(shapes[name], reading, law.heads, most)[:, values.row(k), :]
        before = members.get(k)
        total = sums if before is None else before.sums + sums
        members[k] = _Member(entries, total, len(shapes[name]) == 1 and name.endswith("bias"))
    return members


def _law_votes(law: Mapping[int, _Member], entry_of: Mapping[int, int]) -> Iterator[_Vote]:
    """Yield the entries of the one or two unknown members of a law, if one choice obeys it and no other does."""
    unknown = [k for k in law if k not in entry_of]
    if len(unknown) > 2:
        unknown = [k for k in unknown if not law[k].minor]
    if not unknown or len(unknown) > 2:
        return
    fixed = np.zeros(len(next(iter(law.values())).sums))
    for k in law.keys() & entry_of.keys():
        fixed = fixed + law[k].sums[:, law[k].entries.index(entry_of[k])]
    first = law[unknown[0]]
    rest = -fixed[:, None] if len(unknown) == 1 else -fixed[:, None] - law[unknown[1]].sums
    others = [-1] if len(unknown) == 1 else law[unknown[1]].entries
    agreement = concordance(first.sums.T, rest.T)
    agreement[np.equal.outer(np.array(first.entries), np.array(others))] = -1.0
    i, j = divmod(int(agreement.argmax()), agreement.shape[1])
    best = float(agreement[i, j])
    if best < AGREE:
        return
    sure = certainty(best, min(carried(first.sums[:, i]), carried(rest[:, j])))
    for candidate, place, axis in ((unknown[0], i, 1), (unknown[-1], j, 0))[: len(unknown)]:
        second = float(np.delete(agreement.max(axis), place).max(initial=-1.0))
        if best - second >= APART and 1 - second >= CLEARER * (1 - best):
            yield _Vote(law[candidate].entries[place], candidate, best, best - second, sure)


# -- profiles of v -------------------------------------------------------------------------------------------------------


def _by_profiles(values: Values, known: Mapping[int, _Vote]) -> Iterator[_Vote]:
    """Yield votes for biases by their weights: both have the gradient of the same outputs, so v of a bias goes with the rows of the weight's."""
    number = {c.name: k for k, c in enumerate(values.candidates)}
    entry_of = {vote.candidate: entry for entry, vote in known.items()}
    weights: dict[int, list[tuple[int, int]]] = {}  # length to the entry of a weight and the bias that belongs to it
    for name, weight in number.items():
        bias = number.get(f"{name[:-6]}bias") if name.endswith("weight") else None
        entry = entry_of.get(weight, values.alone(weight))
        if bias is None or entry is None or len(values.candidates[weight].shape) < 2 or not values.has_square(entry):
            continue
        shape = values.candidates[bias].shape
        if len(shape) == 1 and shape[0] == values.candidates[weight].shape[0] and not values.outputs(entry):
            weights.setdefault(shape[0], []).append((entry, bias))
    found: list[_Vote] = []
    compared = 0
    for length, own in weights.items():
        biases = [k for k, e in enumerate(values.entries) if e.shape == (length,) and values.has_square(k)]
        if len(biases) < 2:
            continue
        rows = np.stack([_profile(values, entry) for entry, _ in own])
        profiles = np.stack([_profile(values, k) for k in biases])
        agreement = _unit(rows) @ _unit(profiles).T
        compared += agreement.size
        for i, (_, bias) in enumerate(own):
            j = int(agreement[i].argmax())
            best = float(agreement[i, j])
            second = max(np.delete(agreement[i], j).max(), np.delete(agreement[:, j], i).max(initial=-1.0))
            sure = certainty(best, min(carried(rows[i]), carried(profiles[j])))
            if best >= ALIKE and best - second >= ALONE:
                found.append(_Vote(biases[j], bias, best, best - float(second), sure))
    yield from (vote for vote in found if vote.certainty >= _needed(compared))


def _profile(values: Values, entry: int) -> Array:
    """Return the logarithm of v by output; channels that never had a gradient do not stand out from small ones."""
    return np.maximum(values.square(entry, 0), math.log(1e-30))


# -- movement ------------------------------------------------------------------------------------------------------------


def _copies(values: Values) -> dict[int, list[int]]:
    """Return the matrices that have copies among the candidates, each with its copies."""
    found: dict[int, list[int]] = {}
    for shape in values.comparable:
        own = [k for k, c in enumerate(values.candidates) if c.shape == shape and c.weight is not None]
        if len(shape) < 2 or len(own) < 2 or not any(map(values.has_moment, range(len(values.entries)))):
            continue
        weights = np.stack([_unit_norm(values.weight(k)).reshape(-1) for k in own])
        alike = weights @ weights.T > COPY
        for k, row in zip(own, alike, strict=True):
            if row.sum() > 1:
                found[k] = [other for other, is_copy in zip(own, row, strict=True) if is_copy and other != k]
    return found


def _by_movement(values: Values, copies: Mapping[int, Sequence[int]]) -> Iterator[_Vote]:
    """Yield votes by how each weight differs from its earlier values, and from each of its copies: as the steps of its entry."""
    found: list[_Vote] = []
    compared = 0
    for shape in values.comparable:
        members = [k for k, c in enumerate(values.candidates) if c.shape == shape]
        candidates = [k for k in members if values.candidates[k].before is not None or k in copies]
        entries = [
            k
            for k, e in enumerate(values.entries)
            if e.shape == shape and values.has_moment(k) and values.has_square(k)
        ]
        if not candidates or len(members) < 2 or not entries:
            continue
        moved = [[_unit_norm(x) for x in values.moved(k, copies.get(k, ()))] for k in candidates]
        steps = [_unit_norm(values.steps(k)) for k in entries]
        agreement = np.array([[min(float((x * y).sum()) for x in own) for y in steps] for own in moved])
        compared += agreement.size
        for i, j in enumerate(agreement.argmax(1).tolist()):
            best = float(agreement[i, j])
            rivals = np.delete(agreement[i], j)
            second = float(rivals.max(initial=0.0))
            if best < max(MOVED, TIMES * second) or int(agreement[:, j].argmax()) != i:
                continue
            other = np.delete(np.stack(steps), j, 0)[int(rivals.argmax())] if len(rivals) else 0.0
            sure = min(_moved_surely(x, steps[j], other, best, second) for x in moved[i])
            found.append(_Vote(entries[j], candidates[i], best, best - second, sure))
    yield from (vote for vote in found if vote.certainty >= _needed(compared))


def _moved_surely(moved: Array, step: Array, other: Array | float, best: float, second: float) -> float:
    """Return how surely a movement is that of one entry's steps, and not of another's."""
    consistent = min(_spread(moved * step), _spread(moved * (step - other)))
    lines = _lines(moved, step)
    return max(consistent, certainty(best, lines) - certainty(max(second, 0.0), lines))


def _spread(products: Array) -> float:
    """Return by how many standard deviations a sum of products differs from zero, if whole rows or columns go together.

    The elements of a layer's gradient are not independent: one active input, or one output, fills a column or a row.
    """
    total = float(products.sum())
    sums = [products.sum(axis) for axis in range(products.ndim)] if products.ndim > 1 else [products]
    return min(total / max(float(np.sqrt((part**2).sum())), 1e-300) for part in sums)


def _lines(x: Array, y: Array) -> float:
    """Return how many rows, or columns if they are fewer, carry the product of two matrices of norm one."""
    axes = range(x.ndim) if x.ndim > 1 else [None]
    squares = [(x**2, y**2) if axis is None else ((x**2).sum(axis), (y**2).sum(axis)) for axis in axes]
    return min(1 / max(float(a @ b), 1e-300) for a, b in squares)


def _unit_norm(x: Array) -> Array:
    centred = x.astype(np.float64) - x.mean(dtype=np.float64)
    return np.asarray(centred / max(float(np.sqrt((centred**2).sum())), 1e-300))


def _unit(rows: Array) -> Array:
    centred = rows - rows.mean(1, keepdims=True)
    return np.asarray(centred / np.maximum(np.sqrt((centred**2).sum(1, keepdims=True)), 1e-300))
