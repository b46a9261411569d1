"""One row of the table of optimizers: how it is recognised, and what its accumulator is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["MOMENTUM", "Accumulator", "Group", "betas", "coupled", "known", "says_decoupled", "value"]

Group = Mapping[str, Any]

MOMENTUM = "keeps a moving average of the gradient, whose square is not the average of the squares"


@dataclass(frozen=True)
class Accumulator:
    """One row: how an optimizer is recognised, and what its accumulator is.

    Attributes:
        optimizer: Its usual name.
        keys: Keys that the state of a parameter must have.
        without: Keys that it must not have.
        group: Keys that its group must have.
        classes: Class names, for a live optimizer; they settle what the keys leave open.
        class_only: Whether the keys are another optimizer's too, so that only the class can tell.
        key: The accumulator: one key, or the two factors of a factored one.
        meaning: `ema` (exponential moving average from zero), `sum`, `average` (weights sum to one: no correction needed),
            or `none` (nothing that averages squared gradients).
        beta: Where β₂ is, for an `ema`.
        start: What the accumulator held before the first step.
        scale: What the squared gradients were multiplied by.
        ahead: By how much the step count is ahead of the steps taken.
        l2_inside: Whether weight decay is added to the gradient before it is squared.
        notes: What else is in it, in sentences; always said.
        refusal: Why it cannot be used, for `none`.
    """

    optimizer: str
    keys: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()
    group: frozenset[str] = frozenset()
    classes: tuple[str, ...] = ()
    class_only: bool = False
    key: tuple[str, ...] = ()
    meaning: str = "none"
    beta: Callable[[Group], float] | None = None
    start: Callable[[Group], float] | None = None
    scale: Callable[[Group], float] | None = None
    ahead: int = 0
    l2_inside: Callable[[Group], bool] | bool = False
    notes: tuple[str, ...] = ()
    refusal: str = ""

    def matches(self, state: Collection[str], group: Collection[str]) -> bool:
        """Whether the keys of a parameter's state and of its group are this optimizer's."""
        return self.keys <= set(state) and not self.without & set(state) and self.group <= set(group)


def known(optimizer: str, keys: str, key: str = "", meaning: str = "none", **more: Any) -> Accumulator:
    """A row, with its sets and tuples written as words; its class is called like the optimizer unless it is said otherwise."""
    for name in ("without", "group"):
        more[name] = frozenset(more.get(name, "").split())
    more["classes"] = tuple(more.get("classes", optimizer).split())
    return Accumulator(optimizer, frozenset(keys.split()), key=tuple(key.split()), meaning=meaning, **more)


def betas(position: int) -> Callable[[Group], float]:
    """The decay at a position of the group's `betas`."""
    return lambda group: float(group["betas"][position])


def value(name: str) -> Callable[[Group], float]:
    """The decay under a name of its own."""
    return lambda group: float(group[name])


_SAID = (
    "decoupled_weight_decay",
    "weight_decouple",
    "decouple",
    "decoupled_decay",
    "decoupled",
    "decouple_weight_decay",
)
_DECOUPLED = ("caution", "correct_bias")  # keys of timm's and of transformers' own optimizers, which all decouple it


def says_decoupled(group: Group) -> bool:
    """Whether a group tells if weight decay is decoupled; classes differ in it, and no file names the class."""
    return any(key in group for key in (*_SAID, *_DECOUPLED))


def coupled(group: Group) -> bool:
    """Whether weight decay may have been added to the gradient before it was squared."""
    for key in _SAID:
        if key in group:
            return not group[key]
    return not says_decoupled(group)
