"""Starting a backward pass from a column: a given gradient with respect to the outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["send_back"]


def send_back(values: Tensor, column: Tensor, again: bool = False) -> None:
    """`values.backward(column)`, without the import of sympy (40 MB) that torch needs to check a gradient's shape.

    Args:
        values: what the model returned.
        column: the gradient with respect to it.
        again: whether another column follows, so that the graph must stay.
    """
    start: Tensor = _Start.apply(values, column)
    start.backward(retain_graph=again)


class _Start(torch.autograd.Function):
    """A scalar whose gradient with respect to the values is the column."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, column: Tensor) -> Tensor:
        ctx.column = column
        return values.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.column, None
