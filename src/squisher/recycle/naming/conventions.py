"""Conventions that divide parameters into groups: decay and no decay, a rate for each layer, the Hugging Face Trainer's over the years."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..states import Candidate, OptimizerState

__all__ = ["CONVENTIONS", "Convention", "divisions", "galore_convention", "trainer_conventions"]

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
    """Yield the divisions into groups: of two by plain orders of the groups, then by conventions that leave out nobody.

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


def _name(candidate: Candidate) -> str:
    return candidate.live_name or candidate.name


def _is_layer_norm(candidate: Candidate) -> bool:
    return _LAYER_NORM in candidate.module


def _is_one_of(candidate: Candidate, classes: frozenset[str]) -> bool:
    return _is_layer_norm(candidate) or (bool(candidate.module) and candidate.module[0] in classes)


def _by_name(candidate: Candidate) -> int:
    return 1 if any(part in _name(candidate) for part in ("bias", "LayerNorm.weight")) else 0


def _by_class(is_norm: Callable[[Candidate], bool]) -> Convention:
    def convention(candidate: Candidate) -> int | None:
        if not candidate.module:
            return None
        return 1 if is_norm(candidate) or "bias" in _name(candidate) else 0

    return convention


def _by_class_and(is_norm: Callable[[Candidate], bool], pattern: str) -> Convention:
    search = re.compile(pattern).search

    def convention(candidate: Candidate) -> int:
        return 1 if is_norm(candidate) or search(_name(candidate).lower()) else 0

    return convention


_SUBSTRINGS = r"bias|layernorm|rmsnorm"
_PATTERNS = r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)"
_MOST_CLASSES = 4


def trainer_conventions(candidates: Sequence[Candidate]) -> list[tuple[str, Convention]]:
    """Every convention since version 3.5, newest first. Two that divide a model alike are one answer, so one too many does no harm.

    Between 4.24 and 4.52 a norm counted if its model file had registered the class (Llama's since 4.31, Mistral's never).
    Which ones had is a matter of the version, so every choice among the model's own norm classes is a convention.

    Args:
        candidates: The parameters of the model.
    """
    conventions: list[tuple[str, Convention]] = [
        ("the Trainer's groups since transformers 4.53", _by_class_and(_is_layer_norm, _PATTERNS)),
    ]
    choices = _registered(candidates)
    for choice in choices:
        conventions.append((_label("4.49 to 4.52", choice), _by_class_and(_norm_among(choice), _SUBSTRINGS)))
    for choice in choices:
        conventions.append((_label("4.6 to 4.48", choice), _by_class(_norm_among(choice))))
    conventions.append(("the Trainer's groups of transformers before 4.6", _by_name))
    return conventions


def _registered(candidates: Sequence[Candidate]) -> list[frozenset[str]]:
    """Return the sets of norm classes, beside torch's own, that may have been registered."""
    owners = {c.module[0] for c in candidates if c.module and not _is_layer_norm(c)}
    norms = sorted(cls for cls in owners if "norm" in cls.rpartition(".")[2].lower())
    sizes = range(len(norms) + 1) if len(norms) <= _MOST_CLASSES else (0, len(norms))
    return [frozenset(some) for size in sizes for some in itertools.combinations(norms, size)]


def _norm_among(classes: frozenset[str]) -> Callable[[Candidate], bool]:
    return lambda candidate: _is_one_of(candidate, classes)


def _label(versions: str, classes: frozenset[str]) -> str:
    names = ", ".join(sorted(cls.rpartition(".")[2] for cls in classes))
    return f"the Trainer's groups of transformers {versions}" + (f" with {names}" if names else "")


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
        return 1 if parameter == "weight" and _LINEAR in candidate.module and _targeted(targets, module) else 0

    return "the Trainer's groups for GaLore and Apollo", convention


def _targeted(targets: str | Sequence[str], module: str) -> bool:
    if isinstance(targets, str):
        return targets.replace("_", "-") == "all-linear" or _matches(targets, module)
    return any(target in module or _matches(target, module) for target in targets)


def _matches(pattern: str, module: str) -> bool:
    try:
        return re.fullmatch(pattern, module) is not None
    except re.error:
        return False
