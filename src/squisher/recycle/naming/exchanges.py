"""Return whether parts of a model that have the same shapes are exchanged in a proposal: which exchanges there are, and which is likelier.

Two towers, the members of an ensemble, the layers of a stack: handed to the optimizer in another order, every shape still
fits. One tensor alone seldom tells, but a whole part has many. For the proposal and for every exchange of parts that is tried,
the terms of all laws (terms.py) are added up. The sum can contradict a proposal but proves no name.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from ..optimizers import step_of
from .terms import NEAR, NORM, OF_V, Assignment, Term, terms
from .values import CROSSED, Shape, Values

__all__ = ["AGAINST", "BEYOND_DOUBT", "CLEARLY", "Exchange", "Parts", "compared_parts"]

# From scripts made to mislead (benchmarks/naming_scripts.py); rates in docs/formats.md.
AGAINST = 2.0  # an exchange that is likelier by so much, after the price of having looked for it, refuses an order
# So much contradicts an order that is vouched for, twice that by v alone: small networks err by exp(15), by v alone by exp(22).
BEYOND_DOUBT = 20.0
NOISE = 0.5  # of the length of a random walk: how far accidents may move a sum of comparisons of v alone
STEP = 3.0  # the longest step of that walk: larger changes are no accident
FOR = 2.0  # an exchange that is less likely than the proposal by less than this is not told from it
CLEARLY = 10.0  # the same for given names, which v of small networks may prefer by exp(8) though they are wrong
VECTORS = 8.0  # the price of exchanging vectors alone
PAIRS = 10_000  # of parts of one shape that are exchanged
STACK = 8  # layers beyond which only neighbours are exchanged
SILENT = 0.02  # square of the first moment over v, relative to the usual: noise alone is not so silent; there was no gradient of late
ROUNDS = 4  # exchanges on top of each other
_EFFORT = 20_000  # evaluations of a law

_RECURRENT = re.compile(r"((?:weight|bias)_(?:ih|hh|hr))_(l\d+(?:_reverse)?)$")
_OF_CELL = re.compile(r"(?:weight|bias)_(?:ih|hh|hr)((?:_l\d+(?:_reverse)?)?)$")


class Exchange(NamedTuple):
    """A parameter whose state belongs to another part.

    Attributes:
        name: Under which the proposal has it.
        other: Whose it is by the values.
        gain: The logarithm of how much likelier that is.
        beyond_doubt: Whether it contradicts an order that somebody vouches for, too.
        why: What is strange about its state, if that belongs to no part.
    """

    name: str
    other: str
    gain: float
    beyond_doubt: bool = False
    why: str = ""


class Parts(NamedTuple):
    """What the values say of a proposal's parts of one shape.

    Attributes:
        better: The likeliest exchange, if it passes the bar; its gain is what the price of the search leaves.
        untold: Exchanges that are nearly as likely as the proposal, the likeliest first, no parameter in two of them.
    """

    better: Exchange | None = None
    untold: Sequence[Exchange] = ()


class _Move(NamedTuple):
    """An exchange of entries among candidates.

    Attributes:
        to: To each candidate, the one whose entry it gets.
        price: What having looked for it costs.
        doubtful: Whether the proposal is a guess if nothing speaks against this exchange: a plausible script makes it, or it
            exchanges layers with the same role.
        script: Whether a plausible script makes it.
    """

    to: dict[int, int]
    price: float
    doubtful: bool = False
    script: bool = False


def compared_parts(
    values: Values, assignment: Assignment, proven: Collection[int] = (), *, vouched: bool = False, given: bool = False
) -> Parts:
    """Return which exchange of parts is likelier than a proposal, and which are as likely.

    Args:
        values: The weights and states.
        assignment: The entry that the proposal gives each candidate.
        proven: Entries whose name is known, so that they stay where they are.
        vouched: Whether the user or the framework vouches for the order.
        given: Whether a user made it, whose mistakes no script explains: every exchange is in question, and one is told only if
            the values are clear.
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
    noisy = not any(e >= 0 and values.has_moment(e) for e in usable.values())
    moves = [
        move
        for move in _moves(values, usable, noisy)
        if not any(usable[c] in proven for c in move.to) and any(usable[c] >= 0 for c in move.to)
    ]
    search = _Search(list(terms(values, usable, _families(values, usable))), noisy)
    beyond = BEYOND_DOUBT * (2 if noisy else 1)
    bar = beyond if vouched else AGAINST
    gain, better = search.best(usable, moves, bar)
    if gain >= bar:
        return Parts(_exchange(values, usable, better, gain)._replace(beyond_doubt=gain >= beyond))
    search.left = _EFFORT
    weighed = [(sum(search.change(usable, m)), m) for m in moves if (given or m.doubtful) and search.left > 0]
    # A script exchanges two lists, not one layer of each: where the whole is told, a part of it with one number is no doubt.
    told = [] if given else [m.to.items() for change, m in weighed if m.script and change <= -CLEARLY]
    likely = [
        (change, m.to)
        for change, m in weighed
        if m.script or not (_one_number(values, m.to) and any(m.to.items() <= whole for whole in told))
    ]
    if given:
        likely += [(0.0, move) for move in _uncompared(values, assignment, proven, [to for _, to in likely])]
    untold = _untold(values, likely, CLEARLY if given else FOR)
    if given:
        return Parts(None, untold)
    if not untold:
        untold = list(_strange(values, usable, search))
    return Parts(None, untold)


def _untold(values: Values, moves: Sequence[tuple[float, Mapping[int, int]]], bar: float) -> list[Exchange]:
    """Return the exchanges that are less likely than a proposal by less than a bar, no parameter in two of them."""
    untold: list[Exchange] = []
    seen: set[int] = set()
    for change, to in sorted(moves, key=lambda m: -m[0]):
        if change > -bar and not seen & to.keys():
            seen |= to.keys()
            a, b = next(iter(to.items()))
            untold.append(Exchange(values.candidates[a].name, values.candidates[b].name, change))
    return untold


def _one_number(values: Values, move: Mapping[int, int]) -> bool:
    """Return whether an exchange stays inside one numbered layer: `gates.1` and `layers.1`."""
    return len({tuple(re.findall(r"\d+", values.candidates[c].name)) for c in move}) == 1


def _uncompared(
    values: Values, assignment: Assignment, proven: Collection[int], moves: Sequence[Mapping[int, int]]
) -> Iterator[dict[int, int]]:
    """Yield each parameter that no exchange was tried of, with another of its shape: nothing was read of it."""
    tried = {c for move in moves for c in move}
    same: dict[Shape, list[int]] = defaultdict(list)
    for c, e in assignment.items():
        if e not in proven:
            same[values.candidates[c].shape].append(c)
    for own in same.values():
        yield from (_swap([c], [next(d for d in own if d != c)]) for c in own if c not in tried and len(own) > 1)


def _strange(values: Values, usable: Assignment, search: _Search) -> Iterator[Exchange]:
    """Yield the parameters whose state is hardly theirs: their module was replaced after the optimizer was made.

    A state that stopped before the rest of its group, by its steps or its gradients, is doubted unless the laws are clear. So is
    one that obeys no law where those of all layers of its kind do. A weight that is as an initialiser leaves it was never stepped;
    if most of them are, the weights are those of the start.
    """
    real = {c for c in usable if (w := values.candidates[c].weight) is not None and not w.dtype.is_complex}
    own = {c: e for c, e in usable.items() if e >= 0 and c in real}
    if sum(_whole(values, [c]) for c in own) < 2:
        return  # nothing to compare with
    name = lambda c: values.candidates[c].name  # noqa: E731
    steps = {c: step_of(values.entries[e].state, values.entries[e].group) or 0 for c, e in own.items()}
    groups, roles = defaultdict(list), defaultdict(list)
    for c in (c for c in own if _whole(values, [c])):
        groups[values.entries[own[c]].group_number].append(c)
        roles[re.sub(r"\d+", "#", name(c)), values.candidates[c].shape].append(c)
    for members in groups.values():
        lively = {c: values.liveliness(own[c]) for c in members}
        usual, last = statistics.median(lively.values()), max(steps[c] for c in members)
        for c in members:
            stopped = "took fewer steps than the rest of its group" if steps[c] < last else ""
            if lively[c] < SILENT * usual:
                stopped = stopped or "had no gradient of late, unlike the rest of its group"
            if stopped and (support := search.support(usable, c)) < CLEARLY:
                yield Exchange(name(c), "", support, why=f"{stopped}, and does not fit that weight")
    for members in roles.values():
        supports = {c: search.support(usable, c) for c in members}
        for c, support in list(supports.items())[1:-1]:  # the first and the last have other neighbours
            if support < FOR and all(supports[d] > 2 * CLEARLY for d in members if d != c):
                yield Exchange(
                    name(c), "", support, why="does not fit that weight, as those of the other layers fit theirs"
                )
    begun = {c: crossed for c, e in own.items() if (crossed := values.begun(c, e))}
    if 2 * sum(c in begun for c in itertools.chain(*groups.values())) <= sum(map(len, groups.values())):
        for c in (c for c, crossed in begun.items() if crossed > CROSSED):
            yield Exchange(
                name(c), "", 0.0, why=f"took {steps[c]} steps, but that weight is as an initialiser leaves it"
            )


def _exchange(values: Values, old: Assignment, new: Assignment, gain: float) -> Exchange:
    changed = next(c for c in old if new[c] != old[c])
    other = next(c for c in old if new[c] == old[changed])  # where the entry of `changed` goes
    return Exchange(values.candidates[changed].name, values.candidates[other].name, gain)


class _Search:
    """The terms of all laws; each is weighed once for the same entries."""

    def __init__(self, terms: Sequence[Term], noisy: bool):
        self.terms = terms
        self._of: dict[int, list[int]] = defaultdict(list)
        choices: dict[object, list[int]] = defaultdict(list)
        for k, term in enumerate(terms):
            choices[k if term.choice is None else (term.choice,)].append(k)
            for member in set(term.members):
                self._of[member].append(k)
        self._choice = {k: tuple(own) for own in choices.values() for k in own}
        self._known: dict[tuple[int, tuple[int, ...]], float] = {}
        self.left = _EFFORT
        self._noisy = noisy

    def best(self, start: Assignment, moves: Sequence[_Move], bar: float) -> tuple[float, Assignment]:
        """Return the gain of the best assignment other than the first, less its price, and that assignment; stop at the bar."""
        found, better, reached, current = -math.inf, start, 0.0, start
        for _ in range(ROUNDS):
            for move in moves:
                if self.left <= 0:
                    return found, better
                change, accident = self.change(current, move)
                gain = reached + change - accident - move.price
                if gain > found and (following := {**current, **{a: current[b] for a, b in move.to.items()}}) != start:
                    found, better = gain, following
            if found <= reached or found >= bar:
                break
            reached, current = found, better
        return found, better

    def support(self, assignment: Assignment, member: int) -> float:
        """Return by how much likelier the laws of one candidate's weight make its entry than an accident."""
        choices = {self._choice[k] for k in self._of[member] if member in self.terms[k].weights}
        best = [max(terms, key=lambda k: self._weight(k, assignment)) for terms in choices]
        own = [k for k in best if member in self.terms[k].weights and (self.terms[k].exact or self._noisy)]
        return sum(self._weight(k, assignment) for k in own)

    def change(self, old: Assignment, move: _Move) -> tuple[float, float]:
        """Return by how much likelier one exchange is, and how much of that may be accident.

        Without first moments many weak comparisons add up: each may come out either way, like a step of a random walk.
        """
        total, walk = 0.0, 0.0
        for choice in {self._choice[k] for member in move.to for k in self._of[member]}:
            change = self._likeliest(choice, old, move.to) - self._likeliest(choice, old)
            total += change
            walk += min(abs(change), STEP) ** 2
        return total, NOISE * math.sqrt(walk) if self._noisy else 0.0

    def _likeliest(self, terms: Sequence[int], assignment: Assignment, to: Mapping[int, int] | None = None) -> float:
        return max(self._weight(k, assignment, to) for k in terms)

    def _weight(self, k: int, assignment: Assignment, to: Mapping[int, int] | None = None) -> float:
        entries = tuple(assignment[c if to is None else to.get(c, c)] for c in self.terms[k].members)
        if min(entries) < 0:  # without a state
            return 0.0
        if (k, entries) not in self._known:
            self.left -= 1
            self._known[k, entries] = self.terms[k].weigh(entries)
        return self._known[k, entries]


# -- exchanges ---------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1 << 16)
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


def _moves(values: Values, usable: Assignment, noisy: bool) -> Iterator[_Move]:
    """Yield the exchanges to try, those that a plausible script makes first, those of vectors alone last."""
    families = _families(values, usable)
    near = [dict(move) for family in families if _whole(values, family[0]) for move in _orders(family)]
    # Norms and biases count where they have a list of their own: no script exchanges them alone between layers.
    doubtful = [
        f
        for f in families
        if _whole(values, f[0]) or _is_list_of_norms(values, usable, f) or _is_list_of_vectors(values, f)
    ]
    plausible = [*_in_all_layers(values, doubtful), *_kinds_apart(values, usable), *_between_groups(values, usable)]
    lists = [part for family in families if _is_list_of_norms(values, usable, family) for part in family]
    plausible += [{a: b for part in lists for a, b in _swap(part[:1], part[1:]).items()}] if lists else []
    plausible += [move for move in _habits(values, usable) if move not in plausible]
    known, likely = ({frozenset(move.items()) for move in moves} for moves in (near, plausible))
    far: list[dict[int, int]] = []
    parts: dict[str, list[int]] = defaultdict(list)
    for c in usable:
        words = _words(values.candidates[c].name)
        for depth in range(1, len(words) + 1):
            parts[".".join(words[:depth])].append(c)
    alike: dict[tuple[Shape, ...], dict[tuple[int, ...], None]] = defaultdict(dict)
    for part in parts.values():
        alike[tuple(values.candidates[c].shape for c in part)][tuple(part)] = None
    loose: list[dict[int, int]] = []
    for same in alike.values():
        one = next(iter(same))
        # The gains of weight norm, one a row, obey no law of their own.
        rows = any(len(values.candidates[c].shape) > 1 and math.prod(values.candidates[c].shape[1:]) > 1 for c in one)
        for a, b in _pairs(list(same)):
            if set(a) & set(b):
                continue
            move = _swap(a, b)
            if rows and frozenset(move.items()) not in known:
                far.append(move)
            elif not _whole(values, a) and abs(values.place[a[0]] - values.place[b[0]]) <= NEAR:
                loose.append(move)
    norms = [family for family in families if _is_norm(values, family[0])]
    vectors = [*_in_all_layers(values, norms), *(dict(move) for family in norms for move in _orders(family))]
    kind = _kinds(values, usable)
    for same in alike.values():
        biases = [part for part in same if len(part) == 1 and kind.get(part[0]) == "bias"]
        vectors += [move for move in _orders(biases) if len(move) > 2]
    yield from (_Move(move, math.log(len(near) + len(plausible)), True, True) for move in plausible)
    for move in (move for move in near if frozenset(move.items()) not in likely):
        yield _Move(move, math.log(len(near) + len(plausible)), _same_role(values, move))
    for move in far:
        price = math.log(len(near) + len(far)) + (2 * OF_V if noisy and _two_apart(values, move) else 0.0)
        yield _Move(move, price, _same_role(values, move))
    # Seldom is a norm or a bias handed over in another place without its layer. One law of a norm does not tell where: what its
    # bias is to the layer that reads it, or another norm of the same stream, makes that law nearly as well.
    price = math.log(max(1, len(near) + len(far) + len(vectors) + len(loose))) + VECTORS
    yield from (_Move(move, price) for move in vectors)
    for move in loose:
        yield _Move(move, price + (0.0 if noisy or {kind.get(c) for c in move} == {"bias"} else NORM))


def _pairs(parts: Sequence[tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the pairs of parts of one shape; of a crowd, those that are not far from each other."""
    reach = max(1, PAIRS // len(parts))
    for k, a in enumerate(parts):
        yield from ((a, b) for b in parts[k + 1 : k + 1 + reach])


def _two_apart(values: Values, move: dict[int, int]) -> bool:
    """Return whether an exchange is of parts whose names, but for numbers, differ in two words: `encoder.q` and `decoder.o`."""
    a, b = (re.sub(r"\d+", "#", values.candidates[c].name).split(".") for c in (min(move), move[min(move)]))
    return len(a) != len(b) or sum(x != y for x, y in zip(a, b, strict=True)) > 1


def _same_role(values: Values, move: dict[int, int]) -> bool:
    """Return whether an exchange is of layers with a bias, but for numbers under one name or beside each other: the gates of two layers."""
    return len(move) > 2 and not _RECURRENT.search(values.candidates[min(move)].name) and not _two_apart(values, move)


def _in_all_layers(values: Values, families: Sequence[Sequence[Sequence[int]]]) -> Iterator[dict[int, int]]:
    """Yield the orders of parts with one parent: where the parent is one of numbered layers, in all of them alike."""
    stacks: dict[tuple[str, ...], list[Sequence[Sequence[int]]]] = defaultdict(list)
    for family in families:
        stacks[tuple(re.sub(r"\d+(?=\..*\.)", "#", values.candidates[part[0]].name) for part in family)].append(family)
    for same in stacks.values():
        for moves in zip(*(_orders(family) for family in same), strict=True):
            both = {a: b for move in moves for a, b in move.items()}
            cells = {_OF_CELL.sub(r"\1", values.candidates[c].name) for c in both}
            ways = {values.candidates[part[0]].name.removesuffix("_reverse") for part in same[0]}
            # No script lists the two directions of a recurrent layer, nor the two weights of a single cell.
            if len(ways) > 1 and (len(both) != 2 or len(cells) != 1):
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
        lambda c: ([int(n) for n in re.findall(r"\d+", names[c])], c),  # the first of every list, then the second
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
    """Yield the orders of a script that lists the vectors of each group by their kind: the norms and then the biases."""
    kind, groups = _kinds(values, usable), defaultdict(list)
    for c in sorted(usable, key=lambda c: usable[c]):
        groups[values.entries[usable[c]].group_number].append(c)
    shape = lambda c: values.candidates[c].shape  # noqa: E731
    known: set[frozenset[tuple[int, int]]] = set()
    for ranks in itertools.product(range(3), repeat=3):
        rank = dict(zip(("weight", "shift", "bias"), ranks, strict=True))
        move: dict[int, int] = {}
        for own in groups.values():
            if all(c in kind for c in own):
                listed = sorted(own, key=lambda c: rank[kind[c]])
                if list(map(shape, own)) == list(map(shape, listed)):
                    move |= {a: b for a, b in zip(listed, own, strict=True) if a != b}
        if len(move) > 3 and frozenset(move.items()) not in known:  # no script makes lists of one norm and one bias
            known.add(frozenset(move.items()))
            yield move


def _between_groups(values: Values, usable: Assignment) -> Iterator[dict[int, int]]:
    """Yield the orders of norms and biases that stand in several groups of vectors: which is in which is up to the script.

    Groups with rates of their own are those of layers, which the rates tell.
    """
    kind, modules = _kinds(values, usable), defaultdict(list)
    group = {c: values.entries[e].group_number for c, e in usable.items()}
    rate = {c: values.entries[e].group.get("lr") for c, e in usable.items()}
    mixed = {g for c, g in group.items() if c not in kind}
    for c in (c for c in sorted(kind, key=lambda c: usable[c]) if group[c] not in mixed):
        modules[values.candidates[c].name.rpartition(".")[0]].append(c)
    alike: dict[tuple[tuple[Shape, str], ...], list[list[int]]] = defaultdict(list)
    for own in modules.values():
        alike[tuple((values.candidates[c].shape, kind[c]) for c in own)].append(own)
    for parts in alike.values():
        for move in _orders(parts):
            if any(group[a] != group[b] for a, b in move.items()) and all(rate[a] == rate[b] for a, b in move.items()):
                yield move


def _kinds(values: Values, usable: Assignment) -> dict[int, str]:
    """Return which vectors are the bias of a matrix, trained or not, a norm's weight, or what a norm adds (its shift)."""
    shapes = {c.name: c.shape for c in values.candidates}
    kinds: dict[int, str] = {}
    for c in usable:
        name = values.candidates[c].name
        owner = shapes.get(re.sub("bias$", "weight", name), ())
        if len(shapes[name]) == 1:
            alone = "shift" if name.endswith("bias") else "weight"
            kinds[c] = "bias" if len(owner) > 1 else alone
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
    """Return whether a part has a matrix; a class token, (1, 1, n), is none."""
    shapes = [values.candidates[c].shape for c in part]
    return any(len(shape) == 2 or sum(n > 1 for n in shape) > 1 for shape in shapes)


def _is_norm(values: Values, part: Sequence[int]) -> bool:
    """Return whether a part is a weight and a bias of one length, not two vectors of a list."""
    shapes = [values.candidates[c].shape for c in part]
    numbered = values.candidates[part[0]].name.rpartition(".")[2].isdecimal()
    return len(part) == 2 and not _whole(values, part) and shapes[0] == shapes[1] and not numbered


def _is_list_of_vectors(values: Values, family: Sequence[Sequence[int]]) -> bool:
    """Return whether parts are the single vectors of a numbered list: the biases of an `nn.ParameterList`."""
    return all(
        len(part) == 1
        and len(values.candidates[part[0]].shape) == 1
        and values.candidates[part[0]].name.rpartition(".")[2].isdecimal()
        for part in family
    )


def _is_list_of_norms(values: Values, usable: Assignment, family: Sequence[Sequence[int]]) -> bool:
    """Return whether parts are norms that their parent lists alone, and that stand side by side in one group of the optimizer."""
    parent = _words(values.candidates[family[0][0]].name)[:-2]
    under = [c for c in usable if _words(values.candidates[c].name)[: len(parent)] == parent]
    entries = [usable[c] for c in under]
    beside = max(entries) - min(entries) < len(entries) == sum(map(len, family))
    return beside and _is_norm(values, family[0]) and len({values.entries[e].group_number for e in entries}) == 1
