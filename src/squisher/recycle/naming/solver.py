"""State index to parameter name: conventions propose, shapes and values decide, or the answer is a refusal.

An optimizer numbers its parameters in the order of its groups; the names are somewhere else. Every source of names proposes
every division of its parameters into the groups whose shapes fit. If there is one, it is the answer, unless the values
contradict it. If there are several, the values decide, or a framework's own convention that fits to the last parameter; else
nobody can know, and the user is asked. A wrong name is worse than none.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ...errors import NamingError
from ...importance.facts import Level, Naming
from ..states import Candidate, OptimizerState
from .candidates import GIVE_OTHERS, check_known, clean_names, no_duplicates
from .evidence import Evidence, weigh
from .exchanges import AGAINST, CLEARLY, Exchange, Parts, compared_parts
from .laws import Law
from .partitions import sorted_as_text, ways

__all__ = ["RULES", "Rule", "Solution", "resolve"]

Source = tuple[str, Sequence[Candidate]]


class Solution(NamedTuple):
    """Names in the optimizer's order, how each was found, and the parameters of the model that they were found in, if in one."""

    names: list[str]
    how: list[Naming]
    parameters: Sequence[Candidate] = ()


def resolve(
    optimizer: OptimizerState,
    sources: Sequence[Source],
    given: Sequence[str] | None = None,
    rules: Sequence[tuple[str, Rule]] | None = None,
    later: Iterable[Sequence[Source]] = (),
    hint: str = "",
    laws: Callable[[], Sequence[Law]] = tuple,
    vouched: bool = False,
) -> Solution:
    """Return the names of an optimizer's parameters.

    Args:
        optimizer: Its entries in its own order.
        sources: Where names may come from, each with a label and the model's parameters in registration order.
        given: Names by the user, in the optimizer's order; they win unless shapes or values contradict them.
        rules: Grouping conventions to try; by default all that need no knowledge of the framework.
        later: Other sources, to be tried one after the other where the first leave the question open.
        hint: What would settle it, in the terms of the format.
        laws: Returns the laws of the model's structure, where they can be derived.
        vouched: Whether the order of the model is known to be kept in each group: the user says so, or the framework that
            wrote the source makes the optimizer itself.

    Raises:
        NamingError: Nothing fits, several different answers do, or the values contradict the only one that does.
    """
    if given is not None:
        return _checked_given(optimizer, given, sources, laws)
    settles = hint or _WHAT_SETTLES_IT
    recorded = [entry.name for entry in optimizer.entries]
    if recorded and all(name is not None for name in recorded):
        return _recorded(optimizer, [name for name in recorded if name is not None], sources)
    tried: list[_Tier] = []
    for tier in itertools.chain([sources], later):
        tried.append(_Tier(optimizer, tier, rules or RULES, laws, settles, vouched))
        solution = tried[-1].solution()
        if solution is not None:
            return solution
    untold = [one.untold for one in tried if one.untold]
    if untold:
        raise NamingError(untold[0])
    open_tier = next((tier for tier in tried if tier.answers), None)
    if open_tier is None:
        raise NamingError(_nothing_fits(optimizer, sources, settles))
    raise NamingError(_several_fit(optimizer, open_tier, settles))


class _Tier:
    """Sources that count alike, and the answers that they allow."""

    def __init__(
        self,
        optimizer: OptimizerState,
        sources: Sequence[Source],
        rules: Sequence[tuple[str, Rule]],
        laws: Callable[[], Sequence[Law]],
        settles: str,
        vouched: bool,
    ):
        self.optimizer = optimizer
        self.vouched = vouched
        self.settles = settles
        self.sources = sources
        self.rules = rules
        self.laws = laws
        self.answers: dict[tuple[str, ...], str] = {}
        self.parameters: dict[tuple[str, ...], Sequence[Candidate]] = {}
        self.open = False
        self.untold = ""
        self._weighed: Evidence | None = None
        for label, candidates in sources:
            self._propose(label, candidates, {}, self.answers)

    def solution(self) -> Solution | None:
        """Return the one answer, or None if there is none or several are left.

        Raises:
            NamingError: The values contradict the only answer.
        """
        if not self.answers:
            return None
        only = next(iter(self.answers.items())) if len(self.answers) == 1 and not self.open else None
        decided = only or self._decided() or self._by_rule()
        return self._levels(*decided) if decided is not None and self._stands(*decided) else None

    def _propose(
        self, label: str, candidates: Sequence[Candidate], fixed: Mapping[int, int], answers: dict[tuple[str, ...], str]
    ) -> None:
        if sorted_as_text([c.live_name or c.name for c in candidates]):
            candidates = _by_shape(self.optimizer, candidates)
            label = f"{label}, in which every shape occurs once"
        found = ways(self.optimizer, candidates, fixed)
        count = len(self.optimizer.group_sizes)
        order = "in one group" if count == 1 else f"inside each of {count} groups"
        for way in found.found:
            # Entries without a state have no shape: which of several names such a one gets is of no consequence.
            only = ", the only division that fits" if count > 1 and found.complete else ""
            answers.setdefault(self._key(way, candidates), f"{label}, registration order {order}{only}")
        self.open |= bool(found.found) and not found.complete

    def _key(self, way: Sequence[int], candidates: Sequence[Candidate]) -> tuple[str, ...]:
        names = tuple(candidates[k].name for k in way)
        self.parameters.setdefault(names, candidates)
        return names

    @property
    def evidence(self) -> Evidence:
        """What the values say, weighed once."""
        if self._weighed is None:
            self._weighed = _weighed(self.optimizer, self.sources, self.laws)
        return self._weighed

    def _stands(self, names: Sequence[str], by: str) -> bool:
        """Return whether an answer may be given: False where the values do not tell parts of one shape apart."""
        wrong = [entry for entry, name in self.evidence.names.items() if names[entry] != name]
        if wrong:
            raise NamingError(_contradicted(names, by, self.evidence, wrong, self.settles))
        better, untold = _parts(self.evidence, names)
        if better is not None and better.gain >= (CLEARLY if self.vouched else AGAINST):
            raise NamingError(_other_parts(by, better, self.settles))
        if untold is not None and not self.vouched:
            self.untold = _untold(by, untold, self.settles)
        return not self.untold

    def _decided(self) -> tuple[tuple[str, ...], str] | None:
        """Return the answer that the values leave, if they leave one."""
        said = self.evidence.names
        if not said:
            return None
        left: dict[tuple[str, ...], str] = {}
        self.open = False
        for label, candidates in self.sources:
            numbers = {c.name: k for k, c in enumerate(candidates)}
            if all(name in numbers for name in said.values()):
                fixed = {entry: numbers[name] for entry, name in said.items()}
                self._propose(label, candidates, fixed, left)
        if len(left) != 1 or self.open:
            self.open = True
            return None
        (answer,) = left.items()
        return answer

    def _by_rule(self) -> tuple[tuple[str, ...], str] | None:
        """Return the answer of the conventions, where one fits to the last parameter and no plain order of the groups does."""
        found: dict[tuple[str, ...], str] = {}
        for label, candidates in self.sources:
            for by, way in _one_after_the_other(self.optimizer, candidates):
                found.setdefault(self._key(way, candidates), f"{label}, {by}")
        plain = len(found)
        for label, candidates in self.sources:
            for by, way in _conventional(self.optimizer, candidates, self.rules):
                found.setdefault(self._key(way, candidates), f"{label}, {by}")
        if len(found) != 1 or plain:
            self.answers = {**found, **self.answers}
            return None
        (answer,) = found.items()
        return answer

    def _levels(self, names: Sequence[str], by: str) -> Solution:
        """Return the answer, with what the values say about each name of it."""
        proven = _proven(self.optimizer, self.sources, self.evidence)
        margin = min(self.evidence.margins.values(), default=None)
        convention, proof = Naming(Level.CONVENTION, by), Naming(Level.PROVEN, f"{self.evidence.by}; {by}", margin)
        how = [proof if k in proven else convention for k in range(len(names))]
        return Solution(list(names), how, self.parameters[tuple(names)])


def _weighed(optimizer: OptimizerState, sources: Sequence[Source], laws: Callable[[], Sequence[Law]]) -> Evidence:
    """Return what the values say; of several networks with the same names (generator, critic, moving average), the clearest."""
    every: dict[str, Candidate] = {}
    for _, candidates in sources:
        if any(c.name in every and every[c.name].weight is not c.weight for c in candidates):
            each = [weigh(own, optimizer.entries, laws) for _, own in sources]
            return replace(max(each, key=lambda evidence: len(evidence.names)), values=None)
        every.update({c.name: c for c in candidates})
    return weigh(list(every.values()), optimizer.entries, laws)


def _parts(evidence: Evidence, names: Sequence[str]) -> Parts:
    """Return what the values say of exchanged parts; of several networks with the same names, or without an order, nothing."""
    if evidence.values is None or sorted_as_text([c.live_name or c.name for c in evidence.values.candidates]):
        return Parts()
    number = {c.name: k for k, c in enumerate(evidence.values.candidates)}
    return compared_parts(evidence.values, {number[n]: k for k, n in enumerate(names) if n in number}, evidence.names)


def _proven(optimizer: OptimizerState, sources: Sequence[Source], evidence: Evidence) -> set[int]:
    """Return the entries that the values prove, and with them those whose shape no other parameter has."""
    if not evidence.names:
        return set()
    shapes = list({c.name: c.shape for _, candidates in sources for c in candidates}.values())
    alone = {k for k, entry in enumerate(optimizer.entries) if entry.shape and shapes.count(entry.shape) == 1}
    return alone | set(evidence.names)


def _by_shape(optimizer: OptimizerState, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates in the optimizer's order, if their shapes alone tell it; otherwise none."""
    shapes = [c.shape for c in candidates]
    wanted = [entry.shape for entry in optimizer.entries]
    if any(shape is None or shapes.count(shape) != 1 for shape in wanted) or len(set(wanted)) < len(wanted):
        return []
    of = {c.shape: c for c in candidates}
    return [of[shape] for shape in wanted if shape is not None]


def _recorded(optimizer: OptimizerState, recorded: Sequence[str], sources: Sequence[Source]) -> Solution:
    """Return the names that the source records; those of a submodule, which no weight has, with the submodule's own name."""
    names = clean_names(recorded)
    known = {name: c.shape for _, candidates in sources for c in candidates for name in (c.name, c.live_name or c.name)}
    if not known or any(name in known for name in names):
        return Solution(names, [Naming(Level.RECORDED)] * len(names))
    shapes = [entry.shape for entry in optimizer.entries]
    prefixes = {name.removesuffix(names[0]) for name in known if name.endswith(f".{names[0]}")}
    fits = [
        prefix
        for prefix in sorted(prefixes)
        if all(known.get(prefix + name) in (shape, None if shape else known.get(prefix + name))
               and prefix + name in known for name, shape in zip(names, shapes, strict=True))
    ]  # fmt: skip
    if len(fits) > 1:
        raise NamingError(
            f"The optimizer records names like {names[0]!r}, which no weight has; {' and '.join(map(repr, fits))} have such "
            f"parameters of these shapes. Give the full names in the optimizer's order with --names FILE (names=[...])."
        )
    if not fits:
        return Solution(names, [Naming(Level.RECORDED)] * len(names))
    return Solution([fits[0] + name for name in names], [Naming(Level.RECORDED, f"inside {fits[0][:-1]}")] * len(names))


def _checked_given(
    optimizer: OptimizerState, given: Sequence[str], sources: Sequence[Source], laws: Callable[[], Sequence[Law]]
) -> Solution:
    if len(given) != len(optimizer.entries):
        raise NamingError(
            f"{len(given)} names were given, but the optimizer has {len(optimizer.entries)} parameters (groups of "
            f"{', '.join(map(str, optimizer.group_sizes))}). Give one name each, in the optimizer's order."
        )
    no_duplicates(given, "among the given ones")
    known = _network_of(optimizer, given, sources)
    check_known(given, {c.live_name or c.name for c in known.values()} | known.keys())
    for k, (name, entry) in enumerate(zip(given, optimizer.entries, strict=True)):
        c = known.get(name)
        if c is not None and entry.shape is not None and not c.slices and c.shape != entry.shape:
            raise NamingError(
                f"The given names contradict the file: parameter {k} of the optimizer has the shape {entry.shape}, but "
                f"{name!r} has {c.shape}. {GIVE_OTHERS}"
            )
    evidence = _weighed(optimizer, sources, laws)
    wrong = [entry for entry, name in evidence.names.items() if given[entry] != name and given[entry] in known]
    if wrong:
        raise NamingError(_contradicted(given, _GIVEN, evidence, wrong, GIVE_OTHERS))
    better, _ = _parts(evidence, given)
    if better is not None and better.gain >= CLEARLY:
        raise NamingError(_other_parts(_GIVEN, better, GIVE_OTHERS))
    return Solution(list(given), [Naming(Level.GIVEN)] * len(given), list(known.values()))


def _network_of(optimizer: OptimizerState, names: Sequence[str], sources: Sequence[Source]) -> dict[str, Candidate]:
    """Return the parameters by name; of several networks with the same names (generator, critic), of the first that these fit."""
    for _, candidates in sources:
        known = {c.name: c for c in candidates}
        shapes = [entry.shape for entry in optimizer.entries]
        if all(n in known and shape in (None, known[n].shape) for n, shape in zip(names, shapes, strict=True)):
            return known
    return {c.name: c for _, candidates in sources for c in candidates}


# -- conventions -------------------------------------------------------------------------------------------------------

Rule = Callable[[Candidate], "int | None"]
"""The group that a convention puts a parameter into; None if it cannot tell from what is known of the parameter."""

RULES: list[tuple[str, Rule]] = [
    ("weights of two or more dimensions first", lambda c: 0 if len(c.shape) >= 2 else 1),
    ("weights of fewer than two dimensions first", lambda c: 1 if len(c.shape) >= 2 else 0),
    ("no decay for biases", lambda c: 1 if c.name.endswith("bias") else 0),
    (
        "no decay for biases and LayerNorm.weight",
        lambda c: 1 if "bias" in c.name or "LayerNorm.weight" in c.name else 0,
    ),
    ("no decay for biases and norms", lambda c: 1 if re.search(r"bias|norm|(^|\.)ln_", c.name.lower()) else 0),
]


def _conventional(
    optimizer: OptimizerState, candidates: Sequence[Candidate], rules: Sequence[tuple[str, Rule]]
) -> Iterable[tuple[str, list[int]]]:
    """Yield the divisions into two or three groups by conventions that leave out nobody."""
    sizes, numbers = optimizer.group_sizes, list(range(len(candidates)))
    proposals = [(label, [rule(c) for c in candidates]) for label, rule in rules] if len(sizes) == 2 else []
    if len(sizes) == 3:  # as YOLO's scripts do
        kinds = [0 if len(c.shape) >= 2 else 2 if c.name.endswith("bias") else 1 for c in candidates]
        orders = itertools.permutations(range(3))
        proposals = [("matrices, norms and biases apart", [order[kind] for kind in kinds]) for order in orders]
    for label, chosen in proposals:
        if [chosen.count(k) for k in range(len(sizes))] == sizes:
            way = sorted(numbers, key=lambda k: chosen[k] or 0)
            if _fits(optimizer, candidates, way):
                yield label, way


def _one_after_the_other(optimizer: OptimizerState, candidates: Sequence[Candidate]) -> Iterable[tuple[str, list[int]]]:
    """Yield the plain orders of two groups: no convention, but as likely as one, so that they cast doubt on it."""
    if len(optimizer.group_sizes) != 2:
        return
    numbers, second = list(range(len(candidates))), optimizer.group_sizes[1]
    plain = ("one group after the other", numbers), ("the second group first", [*numbers[second:], *numbers[:second]])
    yield from ((label, way) for label, way in plain if _fits(optimizer, candidates, way))


def _fits(optimizer: OptimizerState, candidates: Sequence[Candidate], way: Sequence[int]) -> bool:
    shapes = [entry.shape for entry in optimizer.entries]
    if len(way) != len(shapes):
        return False
    return all(shape in (None, candidates[k].shape) for shape, k in zip(shapes, way, strict=True))


# -- messages ----------------------------------------------------------------------------------------------------------

_WHAT_SETTLES_IT = (
    "Give the names in the optimizer's order with --names FILE (names=[...]), or the model with --model; next time build the "
    "optimizer from model.named_parameters(), which makes torch >= 2.6 record the names."
)


_GIVEN = "the names that were given"


def _nothing_fits(optimizer: OptimizerState, sources: Sequence[Source], settles: str) -> str:
    groups = ", ".join(map(str, optimizer.group_sizes))
    what = f"The optimizer state numbers its parameters (groups of {groups}) and records no names"
    shapes = [entry.shape for entry in optimizer.entries if entry.shape is not None]
    if shapes and all(len(shape) <= 1 and math.prod(shape) <= 1 for shape in shapes):
        return (
            f"{what}: each is a single number (an entropy coefficient, a temperature), and nothing in the source says which. "
            f"{settles}"
        )
    matrices = any(len(c.shape) > 1 for _, candidates in sources for c in candidates)
    if shapes and all(len(shape) == 1 for shape in shapes) and (matrices or not sources):
        return (
            f"{what}, and all it holds is one-dimensional. If one FSDP rank wrote the file for itself, these are flat shards, "
            "whose parameters cannot be told: save FSDP.optim_state_dict(model, optimizer) or with "
            f"torch.distributed.checkpoint. If it is no such file: {settles[:1].lower()}{settles[1:]}"
        )
    if not sources:
        return f"{what}, and nothing in the source has them. {settles}"
    tried = "; ".join(dict.fromkeys(_described(*source) for source in sources))
    return f"{what}, and no known convention proves them from what is at hand ({tried}). {settles}"


def _described(label: str, candidates: Sequence[Candidate]) -> str:
    if sorted_as_text([c.live_name or c.name for c in candidates]):
        return f"{label}: {len(candidates)} parameters, sorted by name, which says nothing about the order of the model"
    return f"{label}: {len(candidates)} parameters"


def _several_fit(optimizer: OptimizerState, tier: _Tier, settles: str) -> str:
    (first, how_first), (second, how_second) = list(tier.answers.items())[:2]
    k = next(k for k, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    spare = len({c.name for _, candidates in tier.sources for c in candidates}) > len(optimizer.entries)
    frozen = (
        "If some parameters were not trained, say which were with --trainable REGEX (trainable=...). " if spare else ""
    )
    single = set(optimizer.group_sizes) == {1}
    groups = (
        "If the groups, one for each parameter, are in the order of model.parameters(), say so with --in-order "
        "(in_order=True). "
    )
    return (
        "Several assignments fit the optimizer's groups and shapes, and the values do not decide between them: parameter "
        f"{k} is {first[k]!r} by «{how_first}» and {second[k]!r} by «{how_second}». {frozen}{groups if single else ''}The weights that training "
        f"started from may decide: give them with --base-model DIR (base_model=...). {settles}"
    )


def _contradicted(names: Sequence[str], by: str, evidence: Evidence, wrong: Sequence[int], settles: str) -> str:
    k = max(wrong, key=lambda entry: evidence.margins[entry])
    return (
        f"The values contradict the names: by «{by}» parameter {k} is {names[k]!r}, but by its {evidence.by} it is "
        f"{evidence.names[k]!r} (ahead of any other by {evidence.margins[k]:.2f} in correlation; {len(wrong)} such). The order "
        f"of the optimizer is not the one that this assumes. {settles}"
    )


def _other_parts(by: str, exchange: Exchange, settles: str) -> str:
    return (
        f"The values contradict the names: what is {exchange.name!r} by «{by}» is {exchange.other!r} by the weights, moments and "
        f"v of the parts they belong to (exp({exchange.gain:.0f}) times likelier), so that these stand in another order. "
        f"{settles}"
    )


def _untold(by: str, exchange: Exchange, settles: str) -> str:
    if not exchange.other:
        return (
            f"The state that is {exchange.name!r} by «{by}» took fewer steps than the rest of its group and does not fit that weight: "
            "was the module replaced after the optimizer was made? If not, and each group of the optimizer keeps the order of "
            f"model.parameters(), say so with --in-order (in_order=True). {settles}"
        )
    return (
        f"Nothing tells {exchange.name!r} from {exchange.other!r}: they have the same shapes, and the values fit both orders about "
        f"as well, so «{by}» is a guess. If each group of the optimizer keeps the order of model.parameters(), say so with "
        f"--in-order (in_order=True); the weights that training started from may decide (--base-model DIR). {settles}"
    )
