"""State index to parameter name, with proof, or a refusal.

An optimizer numbers its parameters in the order of its groups; the names are somewhere else. Every convention that is known
makes one proposal of how a model's parameters, in registration order, were put into groups. A proposal counts only if it
fits every group's size and every known shape. If all that count say the same, that is the answer; if they differ, nobody
can know, and the user is asked. A wrong name is worse than none.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...errors import FileError, NamingError
from ...importance import Level
from ...importance import Naming as How
from ...storage.tensors import adapter_file_name
from ..states import Candidate, OptimizerState

__all__ = [
    "RULES",
    "Naming",
    "Rule",
    "clean_names",
    "exact",
    "fitting",
    "given_names",
    "matching",
    "recorded_name",
    "resolve",
]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Naming:
    """Names in the optimizer's order, and how they were found."""

    names: list[str]
    how: How


def resolve(
    optimizer: OptimizerState,
    sources: Sequence[tuple[str, Sequence[Candidate]]],
    given: Sequence[str] | None = None,
    rules: Sequence[tuple[str, Rule]] | None = None,
) -> Naming:
    """The names of an optimizer's parameters.

    Args:
        optimizer: Its entries in its own order.
        sources: Where names may come from, each with a label and the model's parameters in registration order.
        given: Names by the user, in the optimizer's order; they win.
        rules: Grouping conventions to try; by default all that need no knowledge of the framework.

    Raises:
        NamingError: Nothing fits, or several different answers do.
    """
    count = len(optimizer.entries)
    if given is not None:
        return Naming(_checked_given(optimizer, given), How(Level.GIVEN))
    recorded = [entry.name for entry in optimizer.entries]
    if count and all(name is not None for name in recorded):
        names = clean_names([name for name in recorded if name is not None])
        return Naming(names, How(Level.RECORDED))
    found = fitting(optimizer, sources, rules)
    if len(found) == 1:
        names_found, how = next(iter(found.items()))
        return Naming(list(names_found), How(Level.CONVENTION, how))
    if not found:
        raise NamingError(_nothing_fits(optimizer, sources))
    spare = len({c.name for _, candidates in sources for c in candidates}) > count
    raise NamingError(_several_fit(found, spare))


def fitting(
    optimizer: OptimizerState,
    sources: Sequence[tuple[str, Sequence[Candidate]]],
    rules: Sequence[tuple[str, Rule]] | None = None,
) -> dict[tuple[str, ...], str]:
    """The different names, in the optimizer's order, that fit its groups and shapes, each with how it was found.

    Args:
        optimizer: Its entries in its own order.
        sources: Where names may come from, each with a label and the model's parameters in registration order.
        rules: Grouping conventions to try; by default all that need no knowledge of the framework.
    """
    found: dict[tuple[str, ...], str] = {}
    for label, candidates in sources:
        for rule_label, names in _proposals(optimizer, candidates, rules or RULES):
            found.setdefault(tuple(names), f"{label}, {rule_label}")
    return found


def exact(
    optimizer: OptimizerState,
    sources: Sequence[tuple[str, Sequence[Candidate]]],
    rules: Sequence[tuple[str, Rule]] | None = None,
) -> list[tuple[str, Sequence[Candidate]]]:
    """The sources that have exactly as many parameters as the optimizer and fit it.

    Args:
        optimizer: Its entries in its own order.
        sources: Where names may come from.
        rules: Grouping conventions to try.
    """
    same = [source for source in sources if len(source[1]) == len(optimizer.entries)]
    return [source for source in same if fitting(optimizer, [source], rules)]


def given_names(names: Sequence[str] | str | os.PathLike[str]) -> list[str]:
    """Names by the user: a sequence, or a file with one name a line or a JSON list.

    Raises:
        FileError: The file cannot be read or holds something else.
    """
    if not isinstance(names, (str, os.PathLike)):
        return list(names)
    path = Path(names)
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise FileError(f"Cannot read the names in {path}: {reason}.") from error
    if not text.lstrip().startswith("["):
        return [line.strip() for line in text.splitlines() if line.strip()]
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} starts like a JSON list of names but is not one: {error}.") from error
    if not all(isinstance(name, str) for name in listed):
        raise FileError(f"{path} must be a JSON list of strings: the names in the optimizer's order.")
    return listed


def matching(candidates: Sequence[Candidate], pattern: str) -> list[Candidate]:
    """The candidates whose name, in the weight file or in the running model, a regular expression finds.

    Raises:
        NamingError: It is not a regular expression.
    """
    try:
        search = re.compile(pattern).search
    except re.error as error:
        raise NamingError(f"{pattern!r} is not a regular expression: {error}.") from error
    return [c for c in candidates if any(map(search, (c.name, c.live_name or c.name, *(p.name for p in c.pieces))))]


_ANYWHERE = re.compile(r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def clean_names(names: Sequence[str]) -> list[str]:
    """Names without what wrappers add: `_orig_mod.` and the like anywhere, `module.` where every name begins with it.

    Raises:
        NamingError: Two names become the same.
    """
    clean = [_ANYWHERE.sub("", name) for name in names]
    while clean and all(name.startswith("module.") for name in clean):
        clean = [name.removeprefix("module.") for name in clean]
    _no_duplicates(clean, "after the names of wrappers are removed")
    return clean


_ADAPTER = re.compile(r"\.(?:lora_\w+\.[^.]+\.weight$|lora_embedding_[AB]\.[^.]+$|modules_to_save\.)")


def recorded_name(live_name: str) -> str:
    """The name in the weight file of a parameter that was recorded in the running model: PEFT drops the adapter's own name."""
    return adapter_file_name(live_name) if _ADAPTER.search(live_name) else live_name


def _no_duplicates(names: Sequence[str], when: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise NamingError(
                f"The parameter name {name!r} appears twice {when}; every parameter needs a name of its own."
            )
        seen.add(name)


def _checked_given(optimizer: OptimizerState, given: Sequence[str]) -> list[str]:
    if len(given) != len(optimizer.entries):
        raise NamingError(
            f"{len(given)} names were given, but the optimizer has {len(optimizer.entries)} parameters (groups of "
            f"{', '.join(map(str, optimizer.group_sizes))}). Give one name each, in the optimizer's order."
        )
    _no_duplicates(given, "among the given ones")
    return list(given)


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


def _proposals(
    optimizer: OptimizerState, candidates: Sequence[Candidate], rules: Sequence[tuple[str, Rule]]
) -> Iterable[tuple[str, list[str]]]:
    shapes = [entry.shape for entry in optimizer.entries]
    sizes = optimizer.group_sizes
    groups = "one group" if len(sizes) == 1 else f"{len(sizes)} groups one after the other"
    for names in _fits(shapes, candidates):
        yield f"registration order in {groups}", names
    if len(sizes) != 2:
        return
    for label, rule in rules:
        chosen = [rule(c) for c in candidates]
        if None in chosen:
            continue
        parts = [[c for c, group in zip(candidates, chosen, strict=True) if group == k] for k in range(2)]
        for first in _fits(shapes[: sizes[0]], parts[0]):
            for second in _fits(shapes[sizes[0] :], parts[1]):
                yield label, first + second


def _fits(shapes: Sequence[Shape | None], candidates: Sequence[Candidate]) -> list[list[str]]:
    """The ways to find these shapes among the candidates, in order: none, the only one, or two that differ.

    Candidates beyond the optimizer's may be frozen parameters or buffers, unless they are required. A shape that is not
    known fits anything.
    """
    search = _with_required if any(c.required for c in candidates) else _greedy
    left = search(shapes, candidates)
    if left is None:
        return []
    # There is one way exactly if choosing from the left and choosing from the right give the same.
    mirrored = search(shapes[::-1], candidates[::-1]) or []
    right = [len(candidates) - 1 - k for k in reversed(mirrored)]
    return [[candidates[k].name for k in way] for way in ([left] if left == right else [left, right])]


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
    """The leftmost way that leaves out no required candidate."""
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


# -- messages ----------------------------------------------------------------------------------------------------------

_WHAT_SETTLES_IT = (
    "Give the names in the optimizer's order with --names FILE (names=[...]), or the model with --model; next time build the "
    "optimizer from model.named_parameters(), which makes torch >= 2.6 record the names."
)


def _nothing_fits(optimizer: OptimizerState, sources: Sequence[tuple[str, Sequence[Candidate]]]) -> str:
    groups = ", ".join(map(str, optimizer.group_sizes))
    what = f"The optimizer state numbers its parameters (groups of {groups}) and records no names"
    shapes = [entry.shape for entry in optimizer.entries if entry.shape is not None]
    if shapes and all(len(shape) == 1 for shape in shapes):
        return (
            f"{what}, and all it holds is one-dimensional, as in a file that one FSDP rank wrote for itself: flat shards, whose "
            "parameters cannot be told. Save FSDP.optim_state_dict(model, optimizer) or with torch.distributed.checkpoint. If "
            "it is no such file, give the names with --names FILE (names=[...])."
        )
    if not sources:
        return f"{what}, and nothing in the source has them. {_WHAT_SETTLES_IT}"
    tried = "; ".join(f"{label} has {len(candidates)} parameters" for label, candidates in sources)
    return f"{what}, and no known convention proves them from what is at hand ({tried}). {_WHAT_SETTLES_IT}"


def _several_fit(found: dict[tuple[str, ...], str], spare: bool) -> str:
    (first, how_first), (second, how_second) = list(found.items())[:2]
    k = next(k for k, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    frozen = (
        "If some parameters were not trained, say which were with --trainable REGEX (trainable=...), or give the weights "
        "that training started from with --base-model DIR (base_model=...). "
    )
    return (
        f"{len(found)} conventions fit the optimizer's groups and shapes but give different names: parameter {k} is "
        f"{first[k]!r} by «{how_first}» and {second[k]!r} by «{how_second}». {frozen if spare else ''}{_WHAT_SETTLES_IT}"
    )
