"""Factored second moments (Adafactor, CAME): a mean over one axis and a mean over another stand for the whole.

v = row ⊗ column / mean(row), as torch, transformers, timm, CAME and optax all reconstruct it; they differ in which two axes they
choose and in whether they keep the axis that was averaged away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...errors import NoAccumulatorError
from ...storage.tensors import TensorSource

__all__ = ["FACTORS", "Factored", "join"]

FACTORS = (("row_var", "col_var"), ("exp_avg_sq_row", "exp_avg_sq_col"), ("exp_avg_sq_r", "exp_avg_sq_c"))
"""Keys of the two factors: torch's, transformers' (CAME's and timm's too), and timm's Big Vision variant's."""


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
        """Elements `start` to `stop` of the product in flat order."""
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
        """Both with every axis of the product; the row divided by its mean, so that multiplying them is all that is left."""
        row, column = (_loaded(part).float().contiguous() for part in (self.row, self.column))
        row = row.reshape([1 if axis == self.column_axis else n for axis, n in enumerate(self.shape)])
        column = column.reshape([1 if axis == self.row_axis else n for axis, n in enumerate(self.shape)])
        mean = row.mean(self.row_axis, keepdim=True)
        return torch.where(mean > 0, row / mean, torch.zeros_like(row)), column


def join(keys: Sequence[str], state: Mapping[str, Any], group: Mapping[str, Any]) -> Factored:
    """Return the product of a state's two factors.

    Raises:
        NoAccumulatorError: They do not fit together, or two ways of joining them do.
    """
    row, column = state[keys[0]], state[keys[1]]
    shapes = [(shape, axes) for shape, axes in _ways(keys[0], tuple(row.shape), tuple(column.shape), group)]
    if len(shapes) != 1:
        how = "do not fit together" if not shapes else "fit together in two ways"
        raise NoAccumulatorError(f"Its factors, of shapes {tuple(row.shape)} and {tuple(column.shape)}, {how}")
    shape, (row_axis, column_axis) = shapes[0]
    return Factored(row, column, row_axis, column_axis, shape)


def _ways(
    key: str, row: tuple[int, ...], column: tuple[int, ...], group: Mapping[str, Any]
) -> list[tuple[tuple[int, ...], tuple[int, int]]]:
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


def _kept_axes(
    row: tuple[int, ...], column: tuple[int, ...], last_two: bool
) -> list[tuple[tuple[int, ...], tuple[int, int]]]:
    shape: tuple[int, ...] = tuple(max(r, c) for r, c in zip(row, column, strict=True))
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


def _loaded(part: Any) -> Tensor:
    if not isinstance(part, Tensor):
        return part.load()
    part = part.detach()
    return part.full_tensor() if hasattr(part, "full_tensor") else part
