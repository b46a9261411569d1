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
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from ..optimizers import step_of
from .laws import Reading
from .values import Array, Shape, Values, carried, certainty, concordance, independent, ranks

__all__ = ["AGAINST", "BEYOND_DOUBT", "CLEARLY", "Exchange", "Parts", "compared_parts"]

# From scripts made to mislead (benchmarks/naming_scripts.py); rates in docs/formats.md.
AGAINST = 2.0  # by so much, after the price of having looked for it, must an exchange be likelier to contradict
CLEARLY = 4.0  # and by so much to contradict names that were given
BEYOND_DOUBT = 20.0  # and by so much to contradict an order that somebody vouches for: small networks err by exp(15)
NOISE = 0.5  # of the length of a random walk: so far may accidents move a sum of comparisons of v alone
STEP = 3.0  # no longer is a step of that walk: larger changes are no accident
FOR = 2.0  # by so much must the order proposed be likelier than an exchange, or nothing tells which of them is right
SPREAD = 4.0  # standard deviations that a law, where it holds, is away from an accident
MOST = 100.0  # of one law between neighbours, and less between others: none decides against all the rest
NORM = 30.0  # that one law of a norm may count
OF_V = 15.0  # that v carried from one layer to the next may count
OF_NORM = 8.0  # that v of a norm beside a layer may count
NEAR = 6  # matrices between which a law of the first moment is looked for
CARRIED = 3  # and between which v is
EMBEDDINGS = 2  # first matrices whose columns may be outputs, added to what every later layer adds to
COME, COME_MATRIX = 8.0, 3.0  # the way of a vector, of a matrix: a query's gradient goes with the weights of its key
STILL = 0.05  # variance of a sum that a law says is nought, of what an accident would give
UNITS = 12  # fewer channels agree by accident too often: the ranks of small adapters
SIBLINGS = 6  # readers of one layer that are added up
VECTORS = 8.0  # the price of exchanging vectors alone
STACK = 8  # layers beyond which only neighbours are exchanged
ROUNDS = 4  # exchanges on top of each other
_EFFORT = 20_000  # evaluations of a law

_RECURRENT = re.compile(r"((?:weight|bias)_(?:ih|hh|hr))_(l\d+(?:_reverse)?)$")

Assignment = dict[int, int]
"""Candidate to entry; an entry without a state by a number below nought."""


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
    """One law: the candidates in it, how likely their entries make it, and whose weights it is read from."""

    members: tuple[int, ...]
    weigh: Callable[[Sequence[int]], float]
    weights: tuple[int, ...]


class Parts(NamedTuple):
    """What the values say of a proposal's parts of one shape.

    Attributes:
        better: The likeliest exchange, or None without one to try; its gain is what the price of the search leaves.
        untold: An exchange that a plausible script makes and that is nearly as likely as the proposal, or None.
    """

    better: Exchange | None = None
    untold: Exchange | None = None


class _Move(NamedTuple):
    """An exchange: to each candidate the one whose entry it gets, the price of having looked for it, whether a plausible script makes it."""

    to: dict[int, int]
    price: float
    plausible: bool = False


def compared_parts(values: Values, assignment: Assignment, proven: Collection[int] = ()) -> Parts:
    """Return which exchange of parts is likelier than a proposal, and which is as likely.

    Args:
        values: The weights and states.
        assignment: The entry that the proposal gives each candidate.
        proven: Entries whose name is known, so that they stay where they are.
    """
    usable = {
        c: e if values.entries[e].state else -1 - e
        for c, e in sorted(assignment.items())
        if values.candidates[c].shape
        and values.candidates[c].shape in values.shapes
        and values.candidates[c].weight is not None
        and not values.candidates[c].slices
        and values.entries[e].shape in (values.candidates[c].shape, None)
    }
    moves = [
        move
        for move in _moves(values, usable)
        if not any(usable[c] in proven for c in move.to) and any(usable[c] >= 0 for c in move.to)
    ]
    noisy = not any(e >= 0 and values.has_moment(e) for e in usable.values())
    search = _Search(list(_terms(values, usable, _families(values, usable))), noisy)
    gain, better = search.best(usable, moves)
    found = _exchange(values, usable, better, gain)
    if gain >= AGAINST:
        return Parts(found)
    likely = [(sum(search.change(usable, move)), move) for move in moves if move.plausible]
    untold = max(likely, key=lambda m: m[0], default=None)
    if untold is not None and untold[0] > -FOR:
        return Parts(found, _exchange(values, usable, _moved(usable, untold[1]), untold[0]))
    stale = next((c for c in _stopped(values, usable) if search.support(usable, c) < FOR), None)
    return Parts(
        found, None if stale is None else Exchange(values.candidates[stale].name, "", search.support(usable, stale))
    )


def _stopped(values: Values, usable: Assignment) -> Iterator[int]:
    """Yield the matrices whose state took fewer steps than others of its group: their module may have been replaced."""
    steps = {e: step_of(values.entries[e].state, values.entries[e].group) or 0 for e in usable.values() if e >= 0}
    last: dict[int, int] = defaultdict(int)
    for e, count in steps.items():
        last[values.entries[e].group_number] = max(last[values.entries[e].group_number], count)
    for c, e in usable.items():
        shape = values.candidates[c].shape
        if e >= 0 and len(shape) > 1 and steps[e] < last[values.entries[e].group_number]:
            yield c


def _moved(assignment: Assignment, move: _Move) -> Assignment:
    return {**assignment, **{a: assignment[b] for a, b in move.to.items()}}


def _exchange(values: Values, old: Assignment, new: Assignment, gain: float) -> Exchange | None:
    changed = next((c for c in old if new[c] != old[c]), None)
    if changed is None:
        return None
    other = next(c for c in old if new[c] == old[changed])  # where the entry of `changed` goes
    return Exchange(values.candidates[changed].name, values.candidates[other].name, gain)


class _Search:
    """The terms of all laws, each weighed once for the same entries."""

    def __init__(self, terms: Sequence[_Term], noisy: bool):
        self.terms = terms
        self._of: dict[int, list[int]] = defaultdict(list)
        for k, term in enumerate(terms):
            for member in set(term.members):
                self._of[member].append(k)
        self._known: dict[tuple[int, tuple[int, ...]], float] = {}
        self._left = _EFFORT
        self._noisy = noisy

    def best(self, start: Assignment, moves: Sequence[_Move]) -> tuple[float, Assignment]:
        """Return what the best assignment but the first gains over it, less its price, and that assignment."""
        found, better, reached, current = -math.inf, start, 0.0, start
        for _ in range(ROUNDS):
            for move in moves:
                following = _moved(current, move)
                if self._left <= 0:
                    return found, better
                if following != start:
                    change, accident = self.change(current, move)
                    gain = reached + change - accident - move.price
                    if gain > found:
                        found, better = gain, following
            if found <= reached or found >= AGAINST:
                break
            reached, current = found, better
        return found, better

    def support(self, assignment: Assignment, member: int) -> float:
        """Return by how much likelier the laws of one candidate's weight make its entry than an accident."""
        return sum(self._weight(k, assignment) for k in self._of[member] if member in self.terms[k].weights)

    def change(self, old: Assignment, move: _Move) -> tuple[float, float]:
        """Return by how much likelier one exchange is, and how much of that may be accident.

        Without first moments many weak comparisons add up: each may come out either way, like a step of a random walk.
        """
        new = _moved(old, move)
        terms = {k for member in move.to for k in self._of[member]}
        changes = [self._weight(k, new) - self._weight(k, old) for k in terms]
        walk = math.sqrt(sum(min(abs(change), STEP) ** 2 for change in changes))
        return sum(changes), NOISE * walk if self._noisy else 0.0

    def _weight(self, k: int, assignment: Assignment) -> float:
        entries = tuple(assignment[c] for c in self.terms[k].members)
        if min(entries) < 0:  # without a state
            return 0.0
        if (k, entries) not in self._known:
            self._left -= 1
            self._known[k, entries] = self.terms[k].weigh(entries)
        return self._known[k, entries]


# -- exchanges ---------------------------------------------------------------------------------------------------------------


def _words(name: str) -> list[str]:
    """Return the parts of a name, the layers of a recurrent module apart: rnn.weight_ih_l1_reverse is in rnn.l1_reverse."""
    return _RECURRENT.sub(r"\2.\1", name).split(".")


def _families(values: Values, usable: Assignment) -> list[list[list[int]]]:
    """Return the parts with one parent and the same shapes: the members of an ensemble, the heads, the layers."""
    children: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for c in usable:
        words = _words(values.candidates[c].name)
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
    """Yield the exchanges to try, those that a plausible script makes first, those of vectors alone last."""
    families = _families(values, usable)
    near = [dict(move) for family in families if _whole(values, family[0]) for move in _orders(family)]
    # Norms count where they have a list of their own: between layers, nobody exchanges them alone.
    doubtful = [f for f in families if _whole(values, f[0]) or _is_list_of_norms(values, usable, f)]
    plausible = [*_in_all_layers(values, doubtful), *_kinds_apart(values, usable)]
    lists = [part for family in families if _is_list_of_norms(values, usable, family) for part in family]
    plausible += [{a: b for part in lists for a, b in _swap(part[:1], part[1:]).items()}] if lists else []
    plausible += [move for move in _habits(values, usable) if move not in plausible]
    far: list[dict[int, int]] = []
    parts: dict[str, list[int]] = defaultdict(list)
    for c in usable:
        words = _words(values.candidates[c].name)
        for depth in range(1, len(words) + 1):
            parts[".".join(words[:depth])].append(c)
    alike: dict[tuple[Shape, ...], dict[tuple[int, ...], None]] = defaultdict(dict)
    for part in parts.values():
        alike[tuple(values.candidates[c].shape for c in part)][tuple(part)] = None
    vectors: list[dict[int, int]] = []
    for same in alike.values():
        for a, b in itertools.combinations(same, 2):
            move = _swap(a, b)
            # The gains of weight norm, one a row, obey no law of their own.
            rows = any(len(values.candidates[c].shape) > 1 and math.prod(values.candidates[c].shape[1:]) > 1 for c in a)
            if set(a) & set(b):
                continue
            if rows and move not in near:
                far.append(move)
            elif not _whole(values, a) and abs(values.place[a[0]] - values.place[b[0]]) <= NEAR:
                vectors.append(move)
    norms = [family for family in families if _is_norm(values, family[0])]
    vectors += [*_in_all_layers(values, norms), *(dict(move) for family in norms for move in _orders(family))]
    kind = _kinds(values, usable)
    for same in alike.values():
        biases = [part for part in same if len(part) == 1 and kind.get(part[0]) == "bias"]
        vectors += [move for move in _orders(biases) if len(move) > 2]
    yield from (_Move(move, math.log(len(near) + len(plausible)), True) for move in plausible)
    yield from (_Move(move, math.log(len(near) + len(plausible))) for move in near if move not in plausible)
    noisy = not any(e >= 0 and values.has_moment(e) for e in usable.values())
    for move in far:
        yield _Move(move, math.log(len(near) + len(far)) + (2 * OF_V if noisy and _two_apart(values, move) else 0.0))
    # Seldom is a norm or a bias handed over in another place without its layer. A bias in the place of a norm's weight makes one
    # law by itself: its moment goes with the columns of what reads the norm.
    for move in vectors:
        halves = not noisy and len(move) == 2 and {kind.get(c) for c in move} != {"bias"}
        yield _Move(move, math.log(len(near) + len(far) + len(vectors)) + VECTORS + (NORM if halves else 0.0))


def _two_apart(values: Values, move: dict[int, int]) -> bool:
    """Whether an exchange is of parts whose names, but for numbers, differ in two words: `encoder.q` and `decoder.o`."""
    a, b = (re.sub(r"\d+", "#", values.candidates[c].name).split(".") for c in (min(move), move[min(move)]))
    return len(a) != len(b) or sum(x != y for x, y in zip(a, b, strict=True)) > 1


def _in_all_layers(values: Values, families: Sequence[Sequence[Sequence[int]]]) -> Iterator[dict[int, int]]:
    """Yield the orders of parts with one parent: where the parent is one of numbered layers, in all of them alike."""
    stacks: dict[tuple[str, ...], list[Sequence[Sequence[int]]]] = defaultdict(list)
    for family in families:
        stacks[tuple(re.sub(r"\d+(?=\..*\.)", "#", values.candidates[part[0]].name) for part in family)].append(family)
    for same in stacks.values():
        for moves in zip(*(_orders(family) for family in same), strict=True):
            both = {a: b for move in moves for a, b in move.items()}
            cells = {
                _words(values.candidates[c].name)[-2] for c in both if _RECURRENT.search(values.candidates[c].name)
            }
            if len(both) != 2 or len(cells) != 1:  # not the two weights of one recurrent cell
                yield both


def _habits(values: Values, usable: Assignment) -> Iterator[dict[int, int]]:
    """Yield the orders that scripts make of one list of all parameters, where the shapes fit them as well."""
    own = sorted(usable, key=lambda c: usable[c])
    names, shapes = [c.name for c in values.candidates], [c.shape for c in values.candidates]
    module = {c: names[c].rpartition(".")[0] for c in usable}
    place = {name: k for k, name in enumerate(dict.fromkeys(module.values()))}
    habits: list[Callable[[int], Any]] = [
        lambda c: names[c],
        lambda c: (names[c].partition(".")[0], c),  # the children by name
        lambda c: (re.sub(r"\d+", "", names[c]), c),  # a kind after the other, over all layers
        lambda c: -c,
        lambda c: (-place[module[c]], c),  # modules from the last to the first
        lambda c: (place[module[c]], -c),  # every module's bias first
        lambda c: (names[c].count("."), c),  # what a module has itself before its children
        lambda c: (math.prod(shapes[c]), c),
        lambda c: (-math.prod(shapes[c]), c),
    ]
    for listed in (sorted(own, key=habit) for habit in habits if len({e.group_number for e in values.entries}) == 1):
        move = {a: b for a, b in zip(listed, own, strict=True) if a != b}
        if move and all(shapes[a] == shapes[b] for a, b in move.items()):
            yield move


def _kinds_apart(values: Values, usable: Assignment) -> Iterator[dict[int, int]]:
    """Yield the orders of groups of vectors in which somebody listed biases and norms one after the other."""
    kind, groups = _kinds(values, usable), defaultdict(list)
    for c in sorted(usable, key=lambda c: usable[c]):
        groups[values.entries[usable[c]].group_number].append(c)
    shape = lambda c: values.candidates[c].shape  # noqa: E731
    for first in (["bias"], ["weight", "shift"], ["weight"], ["bias", "shift"]):
        move: dict[int, int] = {}
        for own in groups.values():
            listed = sorted(own, key=lambda c: kind.get(c) not in first)
            if all(c in kind for c in own) and list(map(shape, own)) == list(map(shape, listed)):
                move |= {a: b for a, b in zip(listed, own, strict=True) if a != b}
        if len(move) > 3:  # of one norm and one bias, nobody makes lists
            yield move


def _kinds(values: Values, usable: Assignment) -> dict[int, str]:
    """Return which vectors are the bias of a matrix, a norm's weight, or what a norm adds (its shift)."""
    number = {values.candidates[c].name: c for c in usable}
    kinds: dict[int, str] = {}
    for name, c in number.items():
        owner = number.get(re.sub("bias$", "weight", name), c)
        if len(values.candidates[c].shape) == 1:
            alone = "shift" if name.endswith("bias") else "weight"
            kinds[c] = "bias" if len(values.candidates[owner].shape) > 1 else alone
    return kinds


def _orders(family: Sequence[Sequence[int]]) -> Iterator[dict[int, int]]:
    """Yield a family's exchanges of two parts, in a long one of neighbours, and its parts reversed and rotated."""
    pairs = itertools.combinations(family, 2) if len(family) <= STACK else itertools.pairwise(family)
    yield from (_swap(a, b) for a, b in pairs)
    if len(family) > 2:
        for order in (family[::-1], [*family[1:], family[0]], [family[-1], *family[:-1]]):
            moved = zip(itertools.chain(*family), itertools.chain(*order), strict=True)
            yield {a: b for a, b in moved if a != b}


def _swap(a: Sequence[int], b: Sequence[int]) -> dict[int, int]:
    return dict(zip([*a, *b], [*b, *a], strict=True))


def _whole(values: Values, part: Sequence[int]) -> bool:
    """Whether a part has a matrix; a class token, (1, 1, n), is none."""
    shapes = [values.candidates[c].shape for c in part]
    return any(len(shape) == 2 or sum(n > 1 for n in shape) > 1 for shape in shapes)


def _is_norm(values: Values, part: Sequence[int]) -> bool:
    """Whether a part is a weight and a bias of one length, not two vectors of a list."""
    shapes = [values.candidates[c].shape for c in part]
    numbered = values.candidates[part[0]].name.rpartition(".")[2].isdecimal()
    return len(part) == 2 and not _whole(values, part) and shapes[0] == shapes[1] and not numbered


def _is_list_of_norms(values: Values, usable: Assignment, family: Sequence[Sequence[int]]) -> bool:
    """Whether parts are norms that their parent lists alone, and that stand side by side in one group of the optimizer."""
    parent = _words(values.candidates[family[0][0]].name)[:-2]
    under = [c for c in usable if _words(values.candidates[c].name)[: len(parent)] == parent]
    entries = [usable[c] for c in under]
    beside = max(entries) - min(entries) < len(entries) == sum(map(len, family))
    return beside and _is_norm(values, family[0]) and len({values.entries[e].group_number for e in entries}) == 1


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
    kept = [e for e in usable.values() if e >= 0]
    if all(map(values.has_moment, kept)):
        sides = list(_sides(values, usable, matrices, families))
        for a, b in itertools.product(sides, sides):
            far = values.place[b.first] - values.place[a.first]
            if a.kind == "columns" or b.kind != "columns" or a.length != b.length or abs(far) > NEAR:
                continue
            if {*a.members} & {*b.members}:
                continue
            # Nought where b alone is the next matrix. Which norm is meant, neither its weights near one tell nor its place.
            apart = abs(far - 1) + (len(b.members) > 1)
            prior, most = 0.5 / (1 + apart), MOST / (1 + apart) ** 2
            if a.kind == "norm":
                prior, most = 0.1 if _apart(values, a.first, b.first) else 0.3, NORM
            yield _law(values, a, b, prior, most)
        yield from (_still(values, c) for c in matrices if len(values.candidates[c].shape) > 2)
        if all(map(values.has_square, kept)):
            yield from (_come(values, c) for c in usable if values.small or len(values.candidates[c].shape) == 1)
    if values.wants_squares:
        number = {values.candidates[c].name: c for c in usable}
        for c in matrices:
            bias = number.get(values.candidates[c].name.replace("weight", "bias"), c)
            if bias != c and values.candidates[bias].shape == values.candidates[c].shape[:1] and len(usable) > 2:
                yield _alike(values, (c, 0), (bias, 0), 0.8, OF_V)
        yield from _of_norms(values, usable, matrices)
        # Of an embedding the columns are outputs. Layers of a stack are none, however early they come.
        tables = {c for c in matrices[:EMBEDDINGS] if not re.search(r"\d+\..*\.", values.candidates[c].name)}
        for c, d in itertools.permutations(matrices, 2):
            (rows, read), columns = values.candidates[c].shape[:2], values.candidates[d].shape[1]
            far = values.place[d] - values.place[c]
            apart = abs(far - 1)
            if rows == columns >= UNITS and apart <= CARRIED:
                yield from _carried_v(values, c, d, 0.5 / (1 + apart), OF_V / (1 + apart))
                yield _alike(values, (c, 0), (d, 1), 0.5 / (1 + apart), OF_V / (1 + apart))
            elif rows == columns >= UNITS and d in tables and far < 0:
                yield _alike(values, (c, 0), (d, 1), 0.3, OF_V / 2)
            if read == columns >= UNITS and c in tables and 0 < far <= 2 and rows != values.candidates[d].shape[0]:
                yield _back(values, (c, 1), d, 0.3 / far, OF_V / 2 / far)
            if read == columns >= UNITS and 0 < far <= CARRIED and _hidden_is_read(values, c, d):
                yield _alike(values, (c, 1), (d, 1), 0.5 / far, OF_V / far)


def _hidden_is_read(values: Values, a: int, b: int) -> bool:
    """Whether b may read what the hidden-to-hidden weight a of a recurrent layer reads: the next layer, or another module."""
    (module, _, own), (other, _, name) = (values.candidates[k].name.rpartition(".") for k in (a, b))
    number = own.removeprefix("weight_hh_l")
    return number.isdecimal() and (other != module or name == f"weight_ih_l{int(number) + 1}")


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

    return _Term((*a.members, *b.members), weigh, (*a.members, *b.members))


def _carried_v(values: Values, a: int, b: int, prior: float, most: float) -> Iterator[_Term]:
    """Yield that v of a's units follows from b's weights, v of what b reads from a's weights, and that the two balance.

    A unit that is seldom active has small gradients on both sides of it. Their ratio does not depend on that: it is what the
    weights before the unit and those behind it say.
    """

    def forth(entries: Sequence[int]) -> float:
        return _agreement(values.square(entries[1], 1), values.predicted(a, entries[0], 0), prior, most)

    def balanced(entries: Sequence[int]) -> float:
        known = values.square(entries[1], 1) - values.square(entries[0], 0)
        return _agreement(known, values.predicted(a, entries[0], 0) - values.predicted(b, entries[1], 1), prior, most)

    yield from (_back(values, (a, 0), b, prior, most), _Term((a, b), forth, (a,)), _Term((a, b), balanced, (a, b)))


def _back(values: Values, a: tuple[int, int], b: int, prior: float, most: float) -> _Term:
    """Return that v over an axis of a follows from the weights and v of b, which reads it."""

    def weigh(entries: Sequence[int]) -> float:
        return _agreement(values.square(entries[0], a[1]), values.predicted(b, entries[1], 1), prior, most)

    return _Term((a[0], b), weigh, (b,))


def _of_norms(values: Values, usable: Assignment, matrices: Sequence[int]) -> Iterator[_Term]:
    """Yield that v of a norm's weight and bias goes with the rows of the layer before it, or follows from the one behind."""
    number = {values.candidates[c].name: c for c in usable}
    for c in usable:
        name, shape = values.candidates[c].name, values.candidates[c].shape
        owner = number.get(re.sub("bias$", "weight", name), c)
        if len(shape) != 1 or shape[0] < UNITS or len(values.candidates[owner].shape) != 1:
            continue
        for d in matrices:
            apart = _apart(values, c, d)
            prior, most = 0.3 / (1 + apart), OF_NORM / (1 + apart)
            if apart <= CARRIED and values.candidates[d].shape[0] == shape[0]:
                yield _alike(values, (c, 0), (d, 0), prior, most)
            if apart <= CARRIED and values.candidates[d].shape[1] == shape[0]:
                yield _back(values, (c, 0), d, prior, most)


def _apart(values: Values, norm: int, matrix: int) -> int:
    """Return how far a matrix is from a norm: not at all in a layer of the same number, or next to it."""
    numbers = [re.findall(r"\d+", values.candidates[k].name) for k in (norm, matrix)]
    far = values.place[matrix] - values.place[norm]
    return 0 if numbers[0] and numbers[0] == numbers[1] else min(abs(far), abs(far + 1))


def _alike(values: Values, a: tuple[int, int], b: tuple[int, int], prior: float, most: float) -> _Term:
    """Return that v goes alike over an axis of a and one of b: a unit that is seldom active, an input that both read."""

    def weigh(entries: Sequence[int]) -> float:
        return _agreement(values.square(entries[0], a[1]), values.square(entries[1], b[1]), prior, most)

    return _Term((a[0], b[0]), weigh, ())


def _still(values: Values, c: int) -> _Term:
    """Return that a filter's sum of weight times moment is nought, as before a norm."""

    def weigh(entries: Sequence[int]) -> float:
        squares = values.still(c, entries[0])
        if len(squares) < UNITS:
            return 0.0
        log = float(np.sum(squares / 2 - squares / (2 * STILL) - math.log(STILL) / 2))
        return min(math.log(0.8 + 0.2 * math.exp(min(max(log, -50.0), 2 * NORM))), NORM)

    return _Term((c,), weigh, (c,))


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

    return _Term((c,), weigh, (c,))


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
