"""State index to parameter name: sources and conventions propose, shapes and values decide.

An optimizer numbers its parameters in the order of its groups; the names are somewhere else. Every source of names proposes
every division of its parameters into the groups whose shapes fit. If there is one, it is the answer, unless the values
contradict it. If there are several, the values decide, or a framework's own convention that fits to the last parameter;
otherwise the answer is a refusal that says what would settle it. A wrong name is worse than none.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from ...errors import NamingError, SquisherWarning
from ...importance.facts import Level, Naming
from ..states import Candidate, OptimizerState, Source
from .candidates import GIVE_OTHERS, check_known, clean_names, no_duplicates
from .conventions import CONVENTIONS, Convention, by_shape, divisions, sorted_as_text, ways
from .evidence import Evidence, weigh
from .exchanges import CLEARLY, Exchange, Parts, compared_parts
from .laws import Law

__all__ = ["Solution", "resolve"]


class Solution(NamedTuple):
    """Names in the optimizer's order, how each was found, and the parameters of the model that they were found in, if in one."""

    names: list[str]
    how: list[Naming]
    parameters: Sequence[Candidate] = ()


def resolve(
    optimizer: OptimizerState,
    sources: Sequence[Source],
    given: Sequence[str] | None = None,
    conventions: Sequence[tuple[str, Convention]] | None = None,
    later: Iterable[Sequence[Source]] = (),
    hint: str = "",
    laws: Callable[[], Sequence[Law]] = tuple,
    vouched: bool = False,
    distant: bool = False,
) -> Solution:
    """Return the names of an optimizer's parameters.

    Args:
        optimizer: Its entries in its own order.
        sources: Where names may come from, each with a label and the model's parameters in registration order.
        given: Names by the user, in the optimizer's order; they win unless shapes or values contradict them.
        conventions: Grouping conventions to try; by default all that need no knowledge of the framework.
        later: Other sources, to be tried one after the other where the first leave the question open.
        hint: What would settle it, in the terms of the format.
        laws: Returns the laws of the model's structure, where they can be derived.
        vouched: Whether the order of the model is known to be kept in each group: the user says so, or the framework that
            wrote the source makes the optimizer itself.
        distant: Whether the weights may be of another moment than the state: they contradict beyond doubt only.

    Raises:
        NamingError: Nothing fits, several different answers do, or the values contradict the only one that does.
    """
    if given is not None:
        return _checked_given(optimizer, given, sources, laws)
    settles = hint or _WHAT_SETTLES_IT
    recorded = [entry.name for entry in optimizer.entries]
    if recorded and all(name is not None for name in recorded):
        return _recorded(optimizer, [name for name in recorded if name is not None], sources)
    several_fit, parts_untold = "", ""
    for tier in itertools.chain([sources], later):
        proposed, several = _proposed(optimizer, tier, {})
        if not proposed:
            continue
        evidence = weigh(tier, optimizer.entries, laws)
        answer = next(iter(proposed.items())) if not several else None
        if several and evidence.names:
            left, several = _proposed(optimizer, tier, evidence.names)
            answer = next(iter(left.items())) if len(left) == 1 and not several else None
        if answer is None:
            answer, found = _by_convention(optimizer, tier, conventions or CONVENTIONS)
            proposed = {**found, **proposed}
        if answer is None:
            several_fit = several_fit or _several_fit(optimizer, proposed, tier, settles)
            continue
        parts = _checked(*answer, evidence, settles, vouched=vouched or distant)
        if vouched or not parts.untold:
            return _with_levels(optimizer, tier, evidence, *answer)
        parts_untold = parts_untold or _untold(answer[1], parts.untold[0], settles)
    raise NamingError(parts_untold or several_fit or _nothing_fits(optimizer, sources, settles))


def _proposed(
    optimizer: OptimizerState, sources: Sequence[Source], said: Mapping[int, str]
) -> tuple[dict[tuple[str, ...], str], bool]:
    """Return the answers whose shapes fit, each with how it was found, and whether there are several.

    Args:
        optimizer: Its entries in its own order.
        sources: Where names may come from.
        said: Entries whose name the values tell.
    """
    answers: dict[tuple[str, ...], list[str]] = {}
    several = False
    count = len(optimizer.group_sizes)
    order = "in one group" if count == 1 else f"inside each of {count} groups"
    single = _single_numbers(optimizer)
    for label, candidates in sources:
        numbers = {c.name: k for k, c in enumerate(candidates)}
        if any(name not in numbers for name in said.values()) or (single and len(candidates) > len(optimizer.entries)):
            continue
        if sorted_as_text([c.live_name or c.name for c in candidates]):
            candidates = by_shape(optimizer, candidates)
            numbers = {c.name: k for k, c in enumerate(candidates)}
        found = ways(optimizer, candidates, {entry: numbers[name] for entry, name in said.items() if name in numbers})
        for way in found.found:
            answers.setdefault(tuple(candidates[k].name for k in way), []).append(label)
        several |= bool(found.found) and not found.complete
    several |= len(answers) > 1
    only = ", the only division that fits" if count > 1 and not several else ""
    # Of two networks with the same names and shapes (two generators, a moving average) nothing says here which was trained.
    by = {names: " or ".join(dict.fromkeys(labels)) for names, labels in answers.items()}
    return {names: f"{label}, registration order {order}{only}" for names, label in by.items()}, several


def _single_numbers(optimizer: OptimizerState) -> bool:
    """Return whether all that an optimizer steps are single numbers, which may be any."""
    shapes = [entry.shape for entry in optimizer.entries if entry.shape is not None]
    return bool(shapes) and all(len(shape) <= 1 and math.prod(shape) <= 1 for shape in shapes)


def _by_convention(
    optimizer: OptimizerState, sources: Sequence[Source], conventions: Sequence[tuple[str, Convention]]
) -> tuple[tuple[tuple[str, ...], str] | None, dict[tuple[str, ...], str]]:
    """Return the answer of the conventions, where one fits to the last parameter and no plain order does, and all they allow."""
    found: dict[tuple[str, ...], str] = {}
    plain = False
    for label, candidates in sources:
        for by, way, is_convention in divisions(optimizer, candidates, conventions):
            found.setdefault(tuple(candidates[k].name for k in way), f"{label}, {by}")
            plain |= not is_convention
    return (next(iter(found.items())) if len(found) == 1 and not plain else None), found


def _checked(
    names: Sequence[str],
    by: str,
    evidence: Evidence,
    settles: str,
    *,
    vouched: bool,
    given: Collection[str] | None = None,
) -> Parts:
    """Return which exchanges of parts of one shape the values do not tell from an answer.

    Args:
        names: The answer, in the optimizer's order.
        by: How it was found.
        evidence: What the values say.
        settles: What would settle the names.
        vouched: Whether the user or the framework vouches for the order.
        given: Which of the names are parameters of the source, where the user gave them.

    Raises:
        NamingError: The values contradict it.
    """
    known = names if given is None else given
    wrong = [entry for entry, name in evidence.names.items() if names[entry] != name and names[entry] in known]
    if wrong:
        raise NamingError(_contradicted(names, by, evidence, wrong, settles))
    found: list[Parts] = []
    for values in evidence.values:
        if given is None and sorted_as_text([c.live_name or c.name for c in values.candidates]):
            return Parts()  # without an order there is none to doubt
        number = {c.name: k for k, c in enumerate(values.candidates)}
        assignment = {number[n]: k for k, n in enumerate(names) if n in number}
        fits = all(values.entries[e].shape in (None, values.candidates[c].shape) for c, e in assignment.items())
        if (fits and len(assignment) == len(names)) or len(evidence.values) == 1:
            parts = compared_parts(values, assignment, evidence.names, vouched=vouched, given=given is not None)
            found.append(parts)
    # Of several networks with the same names, the one that the values doubt least.
    best = min(found, key=lambda parts: (parts.better is not None, len(parts.untold)), default=Parts())
    if best.better is not None:
        raise NamingError(_other_parts(by, best.better, settles))
    return best


def _with_levels(
    optimizer: OptimizerState, sources: Sequence[Source], evidence: Evidence, names: Sequence[str], by: str
) -> Solution:
    """Return an answer, with what the values say about each name of it."""
    shapes = list({c.name: c.shape for _, candidates in sources for c in candidates}.values())
    alone = {k for k, entry in enumerate(optimizer.entries) if entry.shape and shapes.count(entry.shape) == 1}
    proven = alone | set(evidence.names) if evidence.names else set()
    if len(alone) == len(names):
        by = f"{by}; every shape occurs once"
    convention = Naming(Level.CONVENTION, by)
    proof = Naming(Level.PROVEN, f"{evidence.by}; {by}", min(evidence.margins.values(), default=None))
    how = [proof if k in proven else convention for k in range(len(names))]
    return Solution(list(names), how, list(_network_of(optimizer, names, sources).values()))


def _not_told(exchanges: Sequence[Exchange]) -> str:
    more = f", nor {len(exchanges) - _SHOWN} others of one shape" if len(exchanges) > _SHOWN else ""
    shown = ", ".join(f"{exchange.name!r} from {exchange.other!r}" for exchange in exchanges[:_SHOWN])
    return f"the values do not tell {shown}{more}" if exchanges else ""


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
    evidence = weigh(sources, optimizer.entries, laws)
    untold = _checked(given, "the names that were given", evidence, GIVE_OTHERS, vouched=True, given=known).untold
    by = _not_told(untold)
    if known.keys().isdisjoint(given):
        by = "not checked: the source has no weights of these names"
    if untold and untold[0].gain > CLEARLY:
        # Not enough to refuse what somebody says, but right names seldom come so far.
        favoured = f"the values favour {untold[0].other!r} for what is named {untold[0].name!r}"
        by = f"{favoured}; {by}"
        warnings.warn(f"Of the given names, {favoured}: check their order.", SquisherWarning, stacklevel=2)
    return Solution(list(given), [Naming(Level.GIVEN, by)] * len(given), list(known.values()))


def _network_of(optimizer: OptimizerState, names: Sequence[str], sources: Sequence[Source]) -> dict[str, Candidate]:
    """Return the parameters by name; of several networks with the same names (generator, critic), of the first that these fit."""
    for _, candidates in sources:
        known = {c.name: c for c in candidates}
        shapes = [entry.shape for entry in optimizer.entries]
        if all(n in known and shape in (None, known[n].shape) for n, shape in zip(names, shapes, strict=True)):
            return known
    return {c.name: c for _, candidates in sources for c in candidates}


# -- messages ----------------------------------------------------------------------------------------------------------

_WHAT_SETTLES_IT = (
    "Give the names in the optimizer's order with --names FILE (names=[...]), or the model with --model; next time build the "
    "optimizer from model.named_parameters(), which makes torch >= 2.6 record the names."
)

_SHOWN = 3  # exchanges that the note on given names lists


def _nothing_fits(optimizer: OptimizerState, sources: Sequence[Source], settles: str) -> str:
    groups = ", ".join(map(str, optimizer.group_sizes))
    what = f"The optimizer state numbers its parameters (groups of {groups}) and records no names"
    shapes = [entry.shape for entry in optimizer.entries if entry.shape is not None]
    if _single_numbers(optimizer):
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


def _several_fit(
    optimizer: OptimizerState, answers: Mapping[tuple[str, ...], str], sources: Sequence[Source], settles: str
) -> str:
    if len(answers) == 1:
        return (
            f"There are too many ways to divide the parameters into the optimizer's groups to try them all. {settles}"
        )
    (first, how_first), (second, how_second) = list(answers.items())[:2]
    k = next(k for k, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    spare = len({c.name for _, candidates in sources for c in candidates}) > len(optimizer.entries)
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
    clear = exchange.beyond_doubt
    doubt = (
        "the values of small networks err so far now and then: if each group of the optimizer keeps the order of model.parameters(), "
        f"say so with --in-order (in_order=True), and only what is beyond doubt contradicts it. Otherwise {settles[:1].lower()}{settles[1:]}"
    )
    return (
        f"The values {'contradict' if clear else 'speak against'} the names: what is {exchange.name!r} by «{by}» is "
        f"{'' if clear else 'rather '}{exchange.other!r} by the weights, moments and v of the parts they belong to "
        f"(exp({exchange.gain:.0f}) times likelier), so that these stand in another order{f'. {settles}' if clear else f'; but {doubt}'}"
    )


def _untold(by: str, exchange: Exchange, settles: str) -> str:
    if not exchange.other:
        return (
            f"The state that is {exchange.name!r} by «{by}» {exchange.why}: "
            "was the module replaced after the optimizer was made? If not, and each group of the optimizer keeps the order of "
            f"model.parameters(), say so with --in-order (in_order=True). {settles}"
        )
    return (
        f"Nothing tells {exchange.name!r} from {exchange.other!r}: they have the same shapes, and the values fit both orders about "
        f"as well, so «{by}» is a guess. If each group of the optimizer keeps the order of model.parameters(), say so with "
        f"--in-order (in_order=True); the weights that training started from may decide (--base-model DIR). {settles}"
    )
