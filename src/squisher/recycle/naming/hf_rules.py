"""How the Hugging Face Trainer has divided parameters into decayed (group 0) and not decayed ones (group 1) over the years."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence

from ..states import Candidate
from .solver import Rule

__all__ = ["galore_rule", "trainer_rules"]

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


def _by_class(is_norm: Callable[[Candidate], bool]) -> Rule:
    def rule(candidate: Candidate) -> int | None:
        if not candidate.module:
            return None
        return 1 if is_norm(candidate) or "bias" in _name(candidate) else 0

    return rule


def _by_class_and(is_norm: Callable[[Candidate], bool], pattern: str) -> Rule:
    search = re.compile(pattern).search

    def rule(candidate: Candidate) -> int:
        return 1 if is_norm(candidate) or search(_name(candidate).lower()) else 0

    return rule


_SUBSTRINGS = r"bias|layernorm|rmsnorm"
_PATTERNS = r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)"
_MOST_CLASSES = 4


def trainer_rules(candidates: Sequence[Candidate]) -> list[tuple[str, Rule]]:
    """Every rule since version 3.5, newest first. Two that divide a model alike are one answer, so one too many does no harm.

    Between 4.24 and 4.52 a norm counted if its model file had registered the class (Llama's since 4.31, Mistral's never).
    Which ones had is a matter of the version, so every choice among the model's own norm classes is a rule.

    Args:
        candidates: The parameters of the model.
    """
    rules: list[tuple[str, Rule]] = [
        ("the Trainer's groups since transformers 4.53", _by_class_and(_is_layer_norm, _PATTERNS)),
    ]
    choices = _registered(candidates)
    for choice in choices:
        rules.append((_label("4.49 to 4.52", choice), _by_class_and(_norm_among(choice), _SUBSTRINGS)))
    for choice in choices:
        rules.append((_label("4.6 to 4.48", choice), _by_class(_norm_among(choice))))
    rules.append(("the Trainer's groups of transformers before 4.6", _by_name))
    return rules


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


def galore_rule(targets: str | Sequence[str]) -> tuple[str, Rule]:
    """Return the rule for GaLore and Apollo: everything else first, then the weights of the targeted linear layers.

    Args:
        targets: `optim_target_modules` of the training arguments: a regular expression, `all-linear`, or a list of names,
            parts of names and expressions.
    """

    def rule(candidate: Candidate) -> int | None:
        if not candidate.module:
            return None
        module, _, parameter = _name(candidate).rpartition(".")
        return 1 if parameter == "weight" and _LINEAR in candidate.module and _targeted(targets, module) else 0

    return "the Trainer's groups for GaLore and Apollo", rule


def _targeted(targets: str | Sequence[str], module: str) -> bool:
    if isinstance(targets, str):
        return targets.replace("_", "-") == "all-linear" or _matches(targets, module)
    return any(target in module or _matches(target, module) for target in targets)


def _matches(pattern: str, module: str) -> bool:
    try:
        return re.fullmatch(pattern, module) is not None
    except re.error:
        return False
