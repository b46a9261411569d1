"""What is known about a training run and its parameters: typed values for code, each with a note for people.

Files of format version 1 have sentences instead of codes; the tables at the end turn them into codes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cache
from numbers import Integral, Real
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from ..errors import ArgumentError, check_choice, check_positive

__all__ = [
    "LOSS_REDUCTIONS", "UNITS", "Absence", "Level", "Naming", "Pollution", "Reason", "RunFacts", "Spoiler",
]  # fmt: skip

UNITS = ("example", "sequence", "token")
LOSS_REDUCTIONS = ("mean", "sum", "token_mean")


class _Code(str, Enum):
    def __str__(self) -> str:
        return str(self.value)

    __repr__ = __str__


class Reason(_Code):
    """Why a parameter has no importance."""

    FROZEN = "frozen"
    NOT_IN_OPTIMIZER = "not_in_optimizer"
    NOT_REQUESTED = "not_requested"
    NOT_FLOATING = "not_floating"
    NO_GRADIENT = "no_gradient"
    NO_ACCUMULATOR = "no_accumulator"
    NO_RULE = "no_rule"
    OTHER = "other"


_UNTRAINED = (Reason.FROZEN, Reason.NOT_IN_OPTIMIZER, Reason.NOT_REQUESTED, Reason.NOT_FLOATING)


@dataclass(frozen=True)
class Absence:
    """Why a parameter has no importance.

    Attributes:
        reason: A `Reason`; a code that this version does not know stays as it is.
        note: The reason for people.
    """

    reason: str
    note: str = ""

    @property
    def trained(self) -> bool:
        """Whether the parameter was trained, as far as is known."""
        return self.reason not in _UNTRAINED

    def __str__(self) -> str:
        return self.note or self.reason.replace("_", " ")

    @classmethod
    def read(cls, value: Any) -> Absence:
        """Return an absence from itself, from JSON, from a code, or from a sentence of version 1."""
        if isinstance(value, str):
            old = "not_floating" if value.startswith("not a floating-point tensor") else _ABSENT.get(value, "other")
            value = {"reason": value} if value in _values(Reason) else {"reason": old, "note": value}
        return _read(cls, value, "reason", Reason)


class Spoiler(_Code):
    """What a squared gradient holds beside the gradient of the data, or what was done to it."""

    L2 = "l2"
    CLIPPING = "clipping"
    AMSGRAD = "amsgrad"
    PENALTY = "penalty"
    LABEL_SMOOTHING = "label_smoothing"
    ADDED_BATCHES = "added_batches"
    ACCUMULATED = "accumulated"
    STEPS_DISAGREE = "steps_disagree"
    FACTORED = "factored"
    EPSILON = "epsilon"
    STEP_SIZE = "step_size"
    START = "start"
    SPARSE = "sparse"
    OTHER_WEIGHTS = "other_weights"
    MASK = "mask"
    UNCERTAIN = "uncertain"
    OTHER = "other"


@dataclass(frozen=True)
class Pollution:
    """What a squared gradient holds beside the gradient of the data.

    Attributes:
        code: A `Spoiler`; a code that this version does not know stays as it is.
        numbers: The numbers of the note, by name.
        note: The pollution for people.
        parameters: The parameters concerned; empty for all.
    """

    code: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    parameters: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.note or self.code.replace("_", " ")

    def __hash__(self) -> int:
        return hash((self.code, self.note, self.parameters))

    @classmethod
    def read(cls, value: Any) -> Pollution:
        """Return a pollution from itself, from JSON, from a code, or from a sentence of version 1."""
        if isinstance(value, str):
            old = next((code for start, code in _POLLUTION.items() if value.startswith(start)), "other")
            value = {"code": value} if value in _values(Spoiler) else {"code": old, "note": value}
        found = _read(cls, value, "code", Spoiler)
        return replace(found, parameters=tuple(found.parameters))

    @classmethod
    def clipping(cls, limit: float, what: str = "norm") -> Pollution:
        """Return the pollution by clipping gradients to a norm (or a value) before they are squared."""
        note = f"Gradients were clipped to the {what} {float(limit)} before they were squared."
        return cls(Spoiler.CLIPPING, {what: float(limit)}, note)


class Level(_Code):
    """How sure the names of parameters are, from the surest to the least sure."""

    RECORDED = "recorded"
    GIVEN = "given"
    PROVEN = "proven"
    CONVENTION = "convention"


@dataclass(frozen=True)
class Naming:
    """How the names of parameters were found.

    Attributes:
        level: A `Level`: recorded in the source, given by the user, proven by values, or by a framework's convention.
        by: What recorded, proved or proposed them.
        margin: How much worse the second best answer was, where values decided.
        each: The parameters whose names were found in another way, with their naming.
    """

    level: str
    by: str = ""
    margin: float | None = None
    each: Mapping[str, Naming] = field(default_factory=dict)

    def of(self, name: str) -> Naming:
        """Return how the name of one parameter was found."""
        return self.each.get(name, self)

    def __str__(self) -> str:
        kinds = list(dict.fromkeys([self, *self.each.values()]))
        return "; ".join(f"{kind.level}: {kind.by}" if kind.by else str(kind.level) for kind in kinds)

    def __hash__(self) -> int:
        return hash((self.level, self.by, self.margin))

    @classmethod
    def read(cls, value: Any) -> Naming:
        """Return a naming from itself, from JSON, or from text such as `proven: first moments`."""
        if isinstance(value, str):
            level, _, by = value.partition(": ")
            value = {"level": level, "by": by}
        if isinstance(value, Mapping) and isinstance(value.get("each"), Mapping):
            value = {**value, "each": {name: cls.read(one) for name, one in value["each"].items()}}
        return _read(cls, value, "level", Level)

    @classmethod
    def of_all(cls, found: Mapping[str, Naming]) -> Naming:
        """Return one naming for several parameters: the most common one, with the others in `each`."""
        kinds = list(dict.fromkeys(found.values()))
        common = max(kinds, key=list(found.values()).count)
        each = {name: one for name, one in found.items() if one != common}
        return cls(common.level, common.by, common.margin, each)


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What is known about a training run and the parameters of its model; None where it is not known.

    Readers of checkpoints, live extraction and the integrations fill it in, and every provenance has it.

    Attributes:
        unit: What the mean is over: `example`, `sequence` or `token`.
        loss_reduction: How the training loss was reduced over a step: `mean`, `sum` or `token_mean`.
        batch_size: Examples per optimizer step, over devices and accumulation; only if proven.
        batch_tokens: Mean number of loss-bearing tokens per optimizer step.
        pollution: What was squared beside the gradient of the data.
        after_clipping: Whether gradients were clipped before they were squared.
        absent: Parameters without an importance, and why.
        tied: Other names of tied parameters: alias to name.
        naming: How names were found.
        live_names: Names in the running model, where they differ from the names in its weight file.
        training: What else a trainer knows about its run.
    """

    unit: str | None = None
    loss_reduction: str | None = None
    batch_size: int | float | None = None
    batch_tokens: int | float | None = None
    pollution: tuple[Pollution, ...] = ()
    after_clipping: bool | None = None
    absent: dict[str, Absence] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    naming: Naming | None = None
    live_names: dict[str, str] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)

    def keywords(self) -> dict[str, Any]:
        """Return the facts as keyword arguments of an importance."""
        return {f.name: getattr(self, f.name) for f in fields(RunFacts)}

    def __post_init__(self) -> None:
        for name, allowed in (("unit", UNITS), ("loss_reduction", LOSS_REDUCTIONS)):
            if getattr(self, name) is not None:
                check_choice(name, getattr(self, name), allowed)
        for name in ("batch_size", "batch_tokens"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))


types_of: Callable[[Any], dict[str, Any]] = cache(get_type_hints)
"""The annotations of a class, with those that it inherits."""


def fits(value: Any, kind: Any) -> bool:
    """Return whether a value has the type of an annotation; an int is a float, too, and no value fits None."""
    inside = get_args(kind)
    if kind is Any or get_origin(kind) in (Union, UnionType):
        return kind is Any or any(fits(value, one) for one in inside)
    if get_origin(kind) in (dict, Mapping):
        if not isinstance(value, Mapping) or not all(isinstance(key, inside[0]) for key in value):
            return False
        return all(
            fits(one, inside[1]) for one in {type(one): one for one in value.values()}.values()
        )  # one value of each type
    if get_origin(kind) in (list, tuple):
        return isinstance(value, (list, tuple)) and all(fits(one, inside[0]) for one in value)
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return kind is not None and isinstance(value, kind)


def _values(codes: type[Enum]) -> list[str]:
    return [code.value for code in codes]


def _read(cls: Any, value: Any, key: str, codes: type[Enum]) -> Any:
    if isinstance(value, cls):
        return value
    kinds = types_of(cls)
    if isinstance(value, Mapping):
        value = {k: one for k, one in value.items() if one is not None}
    if not isinstance(value, Mapping) or key not in value or not all(fits(value[k], kinds.get(k)) for k in value):
        raise ArgumentError(
            f"The provenance has {value!r} where {key} ({', '.join(_values(codes))}) and a note belong."
        )
    code = value[key]
    return cls(**{**value, key: codes(code) if code in _values(codes) else code})


# The sentences of version 1: whole ones, and beginnings.
_ABSENT = {
    "no gradient ever reached it": "no_gradient",
    "never had a gradient": "no_gradient",
    "not in the optimizer": "not_in_optimizer",
    "not in the optimizer: frozen, or never given to it": "not_in_optimizer",
    "frozen (requires_grad is False)": "frozen",
    "not asked for": "not_requested",
}
_POLLUTION = {
    "It holds the L2 weight decay": "l2",
    "It may hold (Adam and AdamW cannot be told apart in this file) the L2 weight decay": "l2",
    "Gradients were clipped": "clipping",
    "The gradients were clipped": "clipping",
    "The optimizer itself clips": "clipping",
    "AMSGrad": "amsgrad",
    "The gradient of an EWC penalty": "penalty",
    "The loss smooths its labels": "label_smoothing",
    "A step is made of": "added_batches",
    "Each step squares the mean gradient": "accumulated",
    "The optimizer counts": "steps_disagree",
    "It is factored": "factored",
    "It averages g² + eps": "epsilon",
    "The optimizer squares d·g": "step_size",
    "Its average started at one": "start",
    "Rows without a gradient": "sparse",
    "Its gradients are taken at": "other_weights",
    "Another transformation comes before it": "uncertain",
}


for _class in (Absence, Pollution, Naming):
    types_of(_class)  # on import: this compiles annotations, and nothing is compiled while a file is read
