"""Which parameter an operation uses, its gradient for each example, and the square of it: one file for each subject.

Operations rather than modules: a functional call, a bare `nn.Parameter` that is added, an attention module's projections and a
Hugging Face `Conv1D` all end in one of these. What is not in the table is not seen, and is left to the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .attention import multi_head_attention, supports
from .base import Gradients, Rule, Uses
from .convolution import CONVOLUTION, ConvolutionGradients
from .linear import LINEAR, Einsum, Grouped, Linear, Outer, add_outer, einsum_terms, join_outer, outer_squares
from .lookup import LOOKUP, Lookup, RoutedLookup, Rows, join_rows
from .norm import BROADCAST, Broadcast, Dense
from .recurrent import in_steps

__all__ = [
    "OPERATIONS",
    "Broadcast",
    "Dense",
    "Einsum",
    "Gradients",
    "Grouped",
    "Linear",
    "Lookup",
    "Outer",
    "RoutedLookup",
    "Rule",
    "add_outer",
    "add_squares",
    "einsum_terms",
    "examples_of",
    "in_steps",
    "multi_head_attention",
    "supports",
]

OPERATIONS: dict[Any, Callable[..., Uses]] = {**LINEAR, **CONVOLUTION, **LOOKUP, **BROADCAST}


def add_squares(total: Tensor, summands: Sequence[Gradients]) -> None:
    """Add Σ_n (Σ_uses gradient of example n)² to `total`."""
    if len(summands) == 1:
        summands[0].add_squares(total)
        return
    dense = [p for p in summands if isinstance(p, Dense)]
    outer = [p for p in summands if isinstance(p, Outer)]
    rows = [p for p in summands if isinstance(p, Rows)]
    convolutions = [p for p in summands if isinstance(p, ConvolutionGradients)]
    if len(dense) == len(summands):
        Dense(torch.stack([p.values for p in dense]).sum(0)).add_squares(total)
    elif len(rows) == len(summands):
        join_rows(rows).add_squares(total)
    elif outer and len(outer) + len(rows) == len(summands) and total.dim() == 2:
        outer_squares(total, join_outer(outer), join_rows(rows) if rows else None)
    elif convolutions and len(convolutions) + len(outer) == len(summands) and all(c.can_unfold() for c in convolutions):
        joined = join_outer([*outer, *(c.unfolded() for c in convolutions)])
        outer_squares(total.view(total.shape[0], -1), joined)
    else:
        examples = examples_of(summands[0])
        for n in range(examples):
            gradient = torch.zeros_like(total)
            for summand in summands:
                gradient += summand.example(n, total.shape)
            total.addcmul_(gradient, gradient)


def examples_of(summand: Any) -> int:
    """Return of how many examples these are the gradients."""
    for name in ("values", "left", "keys"):
        if hasattr(summand, name):
            return int(getattr(summand, name).shape[0])
    return int(summand.examples)
