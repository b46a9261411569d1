"""What an optimizer's accumulator means: the row of the table, the step, the correction, and factors joined.

Adafactor and CAME keep a mean over one axis and a mean over another: v = row ⊗ column / mean(row), as torch, transformers,
timm, CAME and optax all reconstruct it. They differ in the two axes and in whether an averaged axis is kept with length 1.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError, NoAccumulatorError
from ...importance.facts import Pollution, Spoiler
from ...storage.tensors import TensorSource
from .table import FACTORED, TABLE, TRACK, Accumulator, Group, number, says_decoupled

__all__ = [
    "GIVEN_BETA2", "TABLE", "Accumulator", "Factored", "Reading", "identify", "is_tensor", "loaded", "optimizer_name", "reading",
    "rows_of_class", "step_of", "stored",
]  # fmt: skip

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
    state, group = set(state), set(group)
    fitting = [row for row in TABLE if row.matches(state, group)]
    named = rows_of_class(class_name)
    # Two libraries may give one name to different classes: keys that are proof whatever the class is called come first.
    both = [row for row in fitting if row in named or not row.classes] if any(row in named for row in fitting) else []
    plain = [row for row in fitting if not row.class_only]
    # A known refusal stands even where the keys are unusual; a known accumulator must be where the table says.
    refused = [row for row in named if row.meaning == "none"]
    row = next(iter(both or refused or plain), None)
    if row is None:
        what = f"The optimizer {class_name}" if class_name else "This optimizer"
        raise NoAccumulatorError(
            f"{what} is not one that is known: its state has the keys {', '.join(sorted(map(str, state))) or 'none'}, and "
            "none of them is a known average of the squared gradient",
            TRACK,
        )
    if row.meaning == "none":
        raise NoAccumulatorError(f"{class_name or row.optimizer} {row.refusal}", row.advice)
    return row


def rows_of_class(class_name: str | None) -> list[Accumulator]:
    """Return the rows of the table for a class, however its capitals are written (optax's `adopt`)."""
    return [row for row in TABLE if class_name.lower() in map(str.lower, row.classes)] if class_name else []


def optimizer_name(row: Accumulator, group: Group, class_name: str | None = None) -> str:
    """Return what to call an optimizer whose file does not name it."""
    if class_name or row.optimizer != "Adam":
        return class_name or row.optimizer
    if "differentiable" in group and "amsgrad" not in group:
        return "RAdam"
    if "decoupled_weight_decay" not in group:
        return "Adam or AdamW"
    return "AdamW" if group["decoupled_weight_decay"] else "Adam"


def reading(
    state: Mapping[str, Any], group: Group, class_name: str | None = None, *, bias_correction: bool = True
) -> Reading:
    """Return how one parameter's state becomes the mean squared gradient.

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
    if step is None and bias_correction and row.meaning in ("ema", "sum"):
        raise NoAccumulatorError(
            f"The state of {row.optimizer} has no step count, so its bias cannot be corrected",
            "Extract it as it is stored (--raw, bias_correction=False).",
        )
    beta2 = _beta2(row, group, class_name, bias_correction)
    offset, factor = 0.0, 1.0
    if step is not None and bias_correction and row.meaning in ("ema", "sum"):
        if step < 1:
            raise NoAccumulatorError(f"The optimizer has taken no step (its count is {step}): train first.")
        offset = row.start(group) if row.start else 0.0
        if row.meaning == "ema":
            left = -math.expm1(step * math.log(beta2)) if beta2 else 1.0  # 1 − β₂ᵗ, without cancellation near one
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
    given = group.get(GIVEN_BETA2)
    if given is not None and 0 <= beta2 < 1 and not math.isclose(beta2, given, rel_tol=1e-6):
        raise ArgumentError(f"is {given}, but the source records {beta2}: leave it out.", "beta2")
    if given is not None and not 0 <= beta2 < 1:
        beta2 = number(given)
    if 0 <= beta2 < 1:
        return beta2
    if not needed:
        return None
    found = "is missing" if math.isnan(beta2) else f"is {beta2}"
    raise NoAccumulatorError(
        f"The decay β₂ of {class_name or row.optimizer} {found}, but must lie in [0, 1) for its bias to be corrected",
        "Give it (--beta2 0.999, beta2=0.999), or extract the accumulator as it is stored (--raw, bias_correction=False).",
    )


def _pollution(
    row: Accumulator, state: Mapping[str, Any], group: Group, class_name: str | None
) -> tuple[Pollution, ...]:
    found = [*row.notes, *[FACTORED for key in row.key if isinstance(state[key], Factored)]]
    decay = number(group.get("weight_decay") or 0.0)
    inside = row.l2_inside(group) if callable(row.l2_inside) else row.l2_inside
    inside = inside and not group.get("decoupled_weight_decay")
    if decay > 0 and inside and not (class_name or "").startswith("AdamW"):
        certain = class_name is not None or says_decoupled(group) or row.l2_inside is True
        verb = "holds" if certain else "may hold (Adam and AdamW cannot be told apart in this file)"
        note = f"It {verb} the L2 weight decay {decay:g}: the squares of g + {decay:g}·θ."
        found.append(Pollution(Spoiler.L2, {"weight_decay": decay}, note))
    if class_name and row.optimizer in ("Adam", "RMSprop", "Adagrad") and not rows_of_class(class_name.split()[0]):
        note = f"The class {class_name} is not known: its {row.key[0]} is taken for {row.optimizer}'s by the keys."
        found.append(Pollution(Spoiler.UNCERTAIN, note=note))
    if "gnorm_vec" in state:
        note = "The gradients were clipped at a percentile of their recent norms, tensor by tensor."
        found.append(Pollution(Spoiler.CLIPPING, note=note))
    if group.get("amsgrad"):
        note = "AMSGrad steps by the running maximum; this is the average itself, not that maximum."
        found.append(Pollution(Spoiler.AMSGRAD, note=note))
    return tuple(found)


def step_of(state: Mapping[str, Any], group: Group, ahead: int = 0) -> int | None:
    """Return the steps that a parameter has seen: its count, else the count that some optimizers keep in the group."""
    for place, key in ((state, "step"), (state, "t"), (group, "step"), (group, "k"), (group, "t")):
        count = place.get(key)
        if count is None:
            continue
        try:
            steps = number(count)
        except (TypeError, ValueError, RuntimeError):
            continue
        if steps.is_integer():  # neither NaN nor infinite
            return int(steps) - ahead
    return None


# -- the stored accumulator --------------------------------------------------------------------------------------------


def stored(keys: Sequence[str], state: Mapping[str, Any], group: Group) -> Any:
    """Return the accumulator as it is stored: a tensor, lazy or not, or the product of two factors.

    Raises:
        NoAccumulatorError: It is no tensor of real numbers, or the factors do not fit together, or fit together in two ways.
    """
    for key in keys:
        value = state[key]
        if not is_tensor(value):  # a reader says in words what it could not put together
            what = value if isinstance(value, str) else f"a {type(value).__name__}, not a tensor"
            raise NoAccumulatorError(f"Its {key} is {what}")
        if value.dtype.is_complex:
            raise NoAccumulatorError(f"Its {key} is complex: squares of two parts, not one value per weight")
        if not value.dtype.is_floating_point or value.dtype.itemsize < 2:
            kind = str(value.dtype).removeprefix("torch.")
            raise NoAccumulatorError(f"Its {key} has the type {kind}: codes of a quantisation that is not known", TRACK)
    if len(keys) == 1:
        return state[keys[0]]
    row, column = (state[key] for key in keys)
    ways = _ways(keys[0], tuple(row.shape), tuple(column.shape), group)
    if len(ways) != 1:
        how = "do not fit together" if not ways else "fit together in two ways"
        raise NoAccumulatorError(f"Its factors, of shapes {tuple(row.shape)} and {tuple(column.shape)}, {how}")
    shape, (row_axis, column_axis) = ways[0]
    return Factored(row, column, row_axis, column_axis, shape)


def is_tensor(value: Any) -> bool:
    """Return whether something is a tensor, in memory or in a file."""
    return isinstance(value, (Tensor, TensorSource))


def loaded(tensor: Any) -> Tensor:
    """Return a tensor in memory, whole whatever it was sharded over (every process must take part)."""
    if not isinstance(tensor, Tensor):
        return tensor.load()
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@dataclass(frozen=True, eq=False)
class Factored:
    """The product of two factors, computed when asked for.

    Attributes:
        row: The mean over `column_axis`.
        column: The mean over `row_axis`.
        row_axis: The axis that only the row factor has.
        column_axis: The axis that only the column factor has.
        shape: Shape of the product.
    """

    row: Tensor | TensorSource
    column: Tensor | TensorSource
    row_axis: int
    column_axis: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the factors."""
        return self.row.dtype

    def load(self) -> Tensor:
        """Read the whole product."""
        row, column = self._factors
        return row * column

    def read_flat(self, start: int, stop: int) -> Tensor:
        """Read elements `start` to `stop` of the product in flat order."""
        row, column = self._factors
        rest = torch.arange(start, stop, device=row.device)
        at_row, at_column = torch.zeros_like(rest), torch.zeros_like(rest)
        for axis in reversed(range(len(self.shape))):
            index = rest % self.shape[axis]
            rest = rest // self.shape[axis]
            if axis != self.column_axis:
                at_row += index * row.stride(axis)
            if axis != self.row_axis:
                at_column += index * column.stride(axis)
        return row.reshape(-1)[at_row] * column.reshape(-1)[at_column]

    @cached_property
    def _factors(self) -> tuple[Tensor, Tensor]:
        """Both factors with every axis of the product, the row divided by its mean: only their product is left to take."""
        row, column = (loaded(factor).float().contiguous() for factor in (self.row, self.column))
        row = row.reshape([1 if axis == self.column_axis else n for axis, n in enumerate(self.shape)])
        column = column.reshape([1 if axis == self.row_axis else n for axis, n in enumerate(self.shape)])
        mean = row.mean(self.row_axis, keepdim=True)
        return torch.where(mean > 0, row / mean, torch.zeros_like(row)), column


Shape = tuple[int, ...]


def _ways(key: str, row: Shape, column: Shape, group: Group) -> list[tuple[Shape, tuple[int, int]]]:
    """Return the ways to join two factors of these shapes: the shape of the product, and the axis of each factor alone."""
    if len(row) != len(column) or not row:
        return []
    if key != "exp_avg_sq_row":  # the averaged axis is kept, with length 1
        return _kept_axes(row, column, last_two=key == "row_var")
    ndim = len(row) + 1
    ways = []
    if row[:-1] == column[:-1]:
        ways.append(((*row, column[-1]), (ndim - 2, ndim - 1)))
    least = group.get("min_dim_size_to_factor")
    if isinstance(least, int) and ndim > 2:  # timm: the first two axes of a convolution, where both are long enough
        leading = row[1:] == column[1:] and min(row[0], column[0]) > least
        trailing = min(row[-1], column[-1]) > least and not min(row[:2]) > least
        ways = ways if trailing else []
        if leading:
            ways.append(((row[0], column[0], *row[1:]), (0, 1)))
    return ways


def _kept_axes(row: Shape, column: Shape, last_two: bool) -> list[tuple[Shape, tuple[int, int]]]:
    shape: Shape = tuple(max(r, c) for r, c in zip(row, column, strict=True))
    if last_two:
        axes = (len(shape) - 2, len(shape) - 1)
    else:
        row_axis = [k for k, (r, c) in enumerate(zip(row, column, strict=True)) if c == 1 < r]
        column_axis = [k for k, (r, c) in enumerate(zip(row, column, strict=True)) if r == 1 < c]
        if len(row_axis) != 1 or len(column_axis) != 1:
            return []
        axes = (row_axis[0], column_axis[0])
    without = [tuple(1 if k == axis else n for k, n in enumerate(shape)) for axis in reversed(axes)]
    return [(shape, axes)] if len(shape) >= 2 and without == [row, column] else []
