"""Which of a model's parameters is in which of an optimizer's groups: every division whose shapes fit, and the usual conventions.

An optimizer numbers its parameters group by group. Inside a group they nearly always stand in the order in which the model
registers them, but which parameter is in which group is the user's affair: layers from the top down, one group per
projection, the second of two towers first. So every division into groups counts whose shapes fit. Conventions (decay and no
decay, a rate for each layer, the Hugging Face Trainer's over the years) decide where several do.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..states import Candidate, OptimizerState

__all__ = [
    "CONVENTIONS",
    "Convention",
    "Ways",
    "by_shape",
    "divisions",
    "galore_convention",
    "in_order",
    "sorted_as_text",
    "trainer_conventions",
    "ways",
]

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


def by_shape(optimizer: OptimizerState, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates in the optimizer's order, if their shapes alone tell it; otherwise none."""
    shapes = [c.shape for c in candidates]
    wanted = [entry.shape for entry in optimizer.entries]
    if any(shape is None or shapes.count(shape) != 1 for shape in wanted) or len(set(wanted)) < len(wanted):
        return []
    of = {c.shape: c for c in candidates}
    return [of[shape] for shape in wanted if shape is not None]


def _known(way: Sequence[int], shapes: Sequence[tuple[int, ...] | None]) -> list[int]:
    return [k for k, shape in zip(way, shapes, strict=True) if shape is not None]


class _Search:
    """A walk over the candidates: each is the next entry of some group, or none. Ends that lead nowhere are remembered."""

    def __init__(
        self,
        optimizer: OptimizerState,
        shapes: Sequence[tuple[int, ...] | None],
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


def in_order(shapes: Sequence[tuple[int, ...] | None], candidates: Sequence[Candidate]) -> list[tuple[int, ...]]:
    """Return the ways to find these shapes among the candidates, in order: none, the only one, or two that differ."""
    search = _with_required if any(c.required for c in candidates) else _greedy
    left = search(shapes, candidates)
    if left is None:
        return []
    # There is one way exactly if choosing from the left and choosing from the right give the same.
    mirrored = search(shapes[::-1], candidates[::-1]) or []
    right = [len(candidates) - 1 - k for k in reversed(mirrored)]
    return [tuple(way) for way in ([left] if left == right else [left, right])]


def _greedy(shapes: Sequence[tuple[int, ...] | None], candidates: Sequence[Candidate]) -> list[int] | None:
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


def _with_required(shapes: Sequence[tuple[int, ...] | None], candidates: Sequence[Candidate]) -> list[int] | None:
    """Return the leftmost way that leaves out no required candidate."""
    count, size = len(shapes), len(candidates)
    if count > size:
        return None
    places: dict[tuple[int, ...], np.ndarray] = {}
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


# -- conventions ---------------------------------------------------------------------------------------------------------

Convention = Callable[[Candidate], "int | None"]
"""The group that a convention puts a parameter into; None if it cannot tell from what is known of the parameter."""

CONVENTIONS: list[tuple[str, Convention]] = [
    ("weights of two or more dimensions first", lambda c: 0 if len(c.shape) >= 2 else 1),
    ("weights of fewer than two dimensions first", lambda c: 1 if len(c.shape) >= 2 else 0),
    ("no decay for biases", lambda c: 1 if c.name.endswith("bias") else 0),
    (
        "no decay for biases and LayerNorm.weight",
        lambda c: 1 if "bias" in c.name or "LayerNorm.weight" in c.name else 0,
    ),
    ("no decay for biases and norms", lambda c: 1 if re.search(r"bias|norm|(^|\.)ln_", c.name.lower()) else 0),
]


def divisions(
    optimizer: OptimizerState, candidates: Sequence[Candidate], conventions: Sequence[tuple[str, Convention]]
) -> Iterable[tuple[str, list[int], bool]]:
    """Yield the divisions into groups: of two by plain orders of the groups, then by conventions that place every parameter.

    A plain order is no convention, but as likely as one, so that it casts doubt on it. Each division comes with its label and
    whether it is by a convention.
    """
    sizes, numbers = optimizer.group_sizes, list(range(len(candidates)))
    if len(sizes) == 2:
        turned = [*numbers[sizes[1] :], *numbers[: sizes[1]]]
        for label, way in (("one group after the other", numbers), ("the second group first", turned)):
            if _fits(optimizer, candidates, way):
                yield label, way, False
    proposals = (
        [(label, [convention(c) for c in candidates]) for label, convention in conventions] if len(sizes) == 2 else []
    )
    if len(sizes) == 3:  # as YOLO's scripts do
        kinds = [0 if len(c.shape) >= 2 else 2 if c.name.endswith("bias") else 1 for c in candidates]
        orders = itertools.permutations(range(3))
        proposals = [("matrices, norms and biases apart", [order[kind] for kind in kinds]) for order in orders]
    if len(sizes) > 3:
        proposals = [("a rate for each layer, decay and none apart", own) for own in _by_layer(optimizer, candidates)]
    for label, chosen in proposals:
        if [chosen.count(k) for k in range(len(sizes))] == sizes:
            way = sorted(numbers, key=lambda k: chosen[k] or 0)
            if _fits(optimizer, candidates, way):
                yield label, way, True


def _name(candidate: Candidate) -> str:
    return candidate.live_name or candidate.name


def _by_layer(optimizer: OptimizerState, candidates: Sequence[Candidate]) -> Iterator[list[int | None]]:
    """Yield the groups of MAE, BEiT and timm: a layer's decayed and other parameters, in the order in which they first appear.

    The rates that the groups record must grow from layer to layer. Tokens and positions, (1, n, width), are decayed or not.
    """
    layers: list[int] = []
    for c in candidates:  # what comes before the numbered layers is below them, what comes behind is above
        numbers = [int(word) for word in _name(c).split(".") if word.isdecimal()]
        layers.append(numbers[0] + 1 if numbers else len(candidates) if any(layers) else 0)
    rates = {e.group_number: float(e.group.get("lr_scale", e.group.get("lr", 0.0))) for e in optimizer.entries}
    for tokens in (True, False):
        alike = [len(c.shape) == 1 or (tokens and len(c.shape) == 3 and c.shape[0] == 1) for c in candidates]
        keys = list(zip(layers, alike, strict=True))
        groups = list(dict.fromkeys(keys))
        recorded = sorted({(layer, rates.get(k, 0.0)) for k, (layer, _) in enumerate(groups)})
        if all(a[0] < b[0] and a[1] < b[1] for a, b in itertools.pairwise(recorded)):
            yield [groups.index(key) for key in keys]


def _fits(optimizer: OptimizerState, candidates: Sequence[Candidate], way: Sequence[int]) -> bool:
    shapes = [entry.shape for entry in optimizer.entries]
    if len(way) != len(shapes):
        return False
    return all(shape in (None, candidates[k].shape) for shape, k in zip(shapes, way, strict=True))


# -- the Trainer ----------------------------------------------------------------------------------------------------------

_LAYER_NORM = "torch.nn.modules.normalization.LayerNorm"
_LINEAR = "torch.nn.modules.linear.Linear"
_SUBSTRINGS = r"bias|layernorm|rmsnorm"
_PATTERNS = r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)"
_MOST_CLASSES = 4


def trainer_conventions(candidates: Sequence[Candidate]) -> list[tuple[str, Convention]]:
    """Return every convention of the Trainer since version 3.5, newest first; two that divide a model alike are one answer.

    Between 4.24 and 4.52 a norm counted if its model file had registered the class (Llama's since 4.31, Mistral's never).
    Which ones had is a matter of the version, so every choice among the model's own norm classes is a convention.

    Args:
        candidates: The parameters of the model.
    """
    owners = {c.module[0] for c in candidates if c.module and _LAYER_NORM not in c.module}
    norms = sorted(cls for cls in owners if "norm" in cls.rpartition(".")[2].lower())
    sizes = range(len(norms) + 1) if len(norms) <= _MOST_CLASSES else (0, len(norms))
    choices = [some for size in sizes for some in itertools.combinations(norms, size)]
    conventions = [("the Trainer's groups since transformers 4.53", _without_norms((), _PATTERNS))]
    for versions, pattern in (("4.49 to 4.52", _SUBSTRINGS), ("4.6 to 4.48", None)):
        for choice in choices:
            names = ", ".join(sorted(cls.rpartition(".")[2] for cls in choice))
            label = f"the Trainer's groups of transformers {versions}" + (f" with {names}" if names else "")
            conventions.append((label, _without_norms(choice, pattern)))
    conventions.append(
        (
            "the Trainer's groups of transformers before 4.6",
            lambda c: 1 if any(part in _name(c) for part in ("bias", "LayerNorm.weight")) else 0,
        )
    )
    return conventions


def _without_norms(classes: Collection[str], pattern: str | None) -> Convention:
    """Return the convention that decays neither norms (torch's, and of these classes) nor what a pattern finds.

    Without a pattern, biases are not decayed, and a parameter whose module is not known is in no group.
    """

    def convention(candidate: Candidate) -> int | None:
        if pattern is None and not candidate.module:
            return None
        norm = _LAYER_NORM in candidate.module or any(owner in classes for owner in candidate.module[:1])
        named = re.search(pattern, _name(candidate).lower()) if pattern else "bias" in _name(candidate)
        return 1 if norm or named else 0

    return convention


def galore_convention(targets: str | Sequence[str]) -> tuple[str, Convention]:
    """Return the convention for GaLore and Apollo: everything else first, then the weights of the targeted linear layers.

    Args:
        targets: `optim_target_modules` of the training arguments: a regular expression, `all-linear`, or a list of names,
            parts of names and expressions.
    """

    def convention(candidate: Candidate) -> int | None:
        if not candidate.module:
            return None
        module, _, parameter = _name(candidate).rpartition(".")
        return 1 if parameter == "weight" and _LINEAR in candidate.module and targeted(module) else 0

    def targeted(module: str) -> bool:
        if isinstance(targets, str):
            return targets.replace("_", "-") == "all-linear" or _matches(targets, module)
        return any(target in module or _matches(target, module) for target in targets)

    return "the Trainer's groups for GaLore and Apollo", convention


def _matches(pattern: str, module: str) -> bool:
    try:
        return re.fullmatch(pattern, module) is not None
    except re.error:
        return False
