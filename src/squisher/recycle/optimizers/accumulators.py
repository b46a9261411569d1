"""From the state of one parameter to how its importance is made: the row of the table, the step, the correction."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import NoAccumulatorError
from ...importance import Pollution, Spoiler
from .table import TABLE, Accumulator, Group, says_decoupled

__all__ = ["GIVEN_BETA2", "Reading", "identify", "optimizer_name", "reading", "rows_of_class", "step_of"]

_TRACK = (
    "Train with Adam or AdamW, or keep the average yourself: tracker = squisher.Tracker(model), tracker.observe() before "
    "every step, squisher.extract(tracker, model)."
)


GIVEN_BETA2 = "beta2 given by the user"
"""A group's key for the decay that the user said, for sources that do not record it."""


@dataclass(frozen=True)
class Reading:
    """How one parameter's importance is made from its state: `(stored − offset) · factor`, after factors are joined.

    Attributes:
        accumulator: The row of the table.
        key: The keys to read; two of them are the row and column factors.
        offset: Subtracted first.
        factor: Multiplied then.
        step: Optimizer steps that this parameter has seen.
        beta2: Decay of the average, where it is one.
        pollution: What else is in the squared gradient.
    """

    accumulator: Accumulator
    key: tuple[str, ...]
    offset: float
    factor: float
    step: int | None
    beta2: float | None
    pollution: tuple[Pollution, ...]


def identify(state: Collection[str], group: Collection[str], class_name: str | None = None) -> Accumulator:
    """Return the row of the table that a parameter's state belongs to.

    Args:
        state: Keys of the parameter's state.
        group: Keys of its parameter group.
        class_name: Of a live optimizer, or of a pickled one.

    Raises:
        NoAccumulatorError: It keeps no average of the squared gradient, or nothing is known about it.
    """
    fitting = [row for row in TABLE if row.matches(state, group)]
    named = rows_of_class(class_name)
    both = [row for row in fitting if row in named]
    plain = [row for row in fitting if not row.class_only]
    # A known refusal stands even where the keys are unusual; a known accumulator must be where the table says.
    refused = [row for row in named if row.meaning == "none"]
    row = next(iter(both or refused or plain), None)
    if row is None:
        what = f"The optimizer {class_name}" if class_name else "This optimizer"
        raise NoAccumulatorError(
            f"{what} is not one that is known: its state has the keys {', '.join(sorted(map(str, state))) or 'none'}, and "
            "none of them is a known average of the squared gradient",
            _TRACK,
        )
    if row.meaning == "none":
        raise NoAccumulatorError(f"{class_name or row.optimizer} {row.refusal}", _TRACK)
    return row


def rows_of_class(class_name: str | None) -> list[Accumulator]:
    """Return the rows of the table for a class, however its capitals are written (optax's `adopt`)."""
    name = (class_name or "").lower()
    return [row for row in TABLE if any(name == known.lower() for known in row.classes)]


def optimizer_name(row: Accumulator, group: Group, class_name: str | None = None) -> str:
    """Return what to call an optimizer whose file does not name it."""
    if class_name or row.optimizer != "Adam":
        return class_name or row.optimizer
    if "decoupled_weight_decay" not in group:
        return "Adam or AdamW"
    return "AdamW" if group["decoupled_weight_decay"] else "Adam"


def reading(
    state: Mapping[str, Any], group: Group, class_name: str | None = None, *, bias_correction: bool = True
) -> Reading:
    """How to turn one parameter's state into the mean squared gradient.

    Args:
        state: The parameter's state; tensors may be lazy.
        group: The hyperparameters of its group.
        class_name: Of a live optimizer, where known.
        bias_correction: False leaves the accumulator as it is stored.

    Raises:
        NoAccumulatorError: There is none, it has seen no step, or its bias cannot be corrected.
    """
    row = identify(state, group, class_name)
    step = step_of(state, group, row.ahead)
    beta2 = _beta2(row, group, class_name, bias_correction)
    offset, factor = 0.0, 1.0
    if bias_correction and row.meaning in ("ema", "sum"):
        if step is None:
            raise NoAccumulatorError(
                f"The state of {row.optimizer} has no step count, so its bias cannot be corrected",
                "Extract it as it is stored (--raw, bias_correction=False).",
            )
        if step < 1:
            raise NoAccumulatorError(
                "The optimizer has taken no step (its count is 0), so there is nothing to recycle yet."
            )
        offset = row.start(group) if row.start else 0.0
        if row.meaning == "ema":
            left = _one_minus_power(beta2 or 0.0, step)
            offset, factor = offset * (1.0 - left), 1.0 / left
        else:
            factor = 1.0 / step
        if row.scale:
            factor /= row.scale(group)
    return Reading(row, row.key, offset, factor, step, beta2, _pollution(row, state, group, class_name))


def _beta2(row: Accumulator, group: Group, class_name: str | None, needed: bool) -> float | None:
    if row.beta is None:
        return None
    try:
        beta2 = row.beta(group)
    except (KeyError, IndexError, TypeError, ValueError):
        beta2 = math.nan
    if math.isnan(beta2) and group.get(GIVEN_BETA2) is not None:
        beta2 = float(group[GIVEN_BETA2])
    if 0 <= beta2 < 1:
        return beta2
    if not needed:
        return None
    found = "is missing" if math.isnan(beta2) else f"is {beta2}"
    raise NoAccumulatorError(
        f"The decay β₂ of {class_name or row.optimizer} {found}, but must lie in [0, 1) for its bias to be corrected",
        "Give it (--beta2 0.999, beta2=0.999), or extract the accumulator as it is stored (--raw, bias_correction=False).",
    )


def _pollution(row: Accumulator, state: Collection[str], group: Group, class_name: str | None) -> tuple[Pollution, ...]:
    found = list(row.notes)
    decay = float(group.get("weight_decay") or 0.0)
    inside = row.l2_inside(group) if callable(row.l2_inside) else row.l2_inside
    inside = inside and not group.get("decoupled_weight_decay")
    if decay > 0 and inside and not (class_name or "").startswith("AdamW"):
        certain = class_name is not None or says_decoupled(group) or row.l2_inside is True
        verb = "holds" if certain else "may hold (Adam and AdamW cannot be told apart in this file)"
        note = f"It {verb} the L2 weight decay {decay:g}: the squares of g + {decay:g}·θ."
        found.append(Pollution(Spoiler.L2, {"weight_decay": decay}, note))
    if "gnorm_vec" in state:
        note = "The gradients were clipped at a percentile of their recent norms, tensor by tensor."
        found.append(Pollution(Spoiler.CLIPPING, note=note))
    if group.get("amsgrad"):
        note = "AMSGrad steps by the running maximum; this is the average itself, not that maximum."
        found.append(Pollution(Spoiler.AMSGRAD, note=note))
    return tuple(found)


def step_of(state: Mapping[str, Any], group: Group, ahead: int = 0) -> int | None:
    """Return the steps that a parameter has seen: its own count, else the one that some optimizers keep in the group."""
    for place, key in ((state, "step"), (state, "t"), (group, "step"), (group, "k"), (group, "t")):
        count = place.get(key)
        if count is None:
            continue
        load = getattr(count, "load", None)
        try:
            number = float(load() if callable(load) else count)
        except (TypeError, ValueError, RuntimeError):
            continue
        if math.isfinite(number):
            return int(number) - ahead
    return None


def _one_minus_power(beta: float, step: int) -> float:
    """1 − βᵗ without cancellation for β near one."""
    return -math.expm1(step * math.log(beta)) if beta > 0 else 1.0
