"""Which parameter an operation uses, its gradient for each example, and the square of it: one file for each subject.

Operations rather than modules: a functional call, a bare `nn.Parameter` that is added, an attention module"s projections and a
Hugging Face `Conv1D` all end in one of these. What is not in the table is not seen, and is left to the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .attention import multi_head_attention, supports
from .base import Piece, Rule, Squares, Uses
from .convolution import CONVOLUTION, ConvolutionPiece
from .linear import LINEAR, Linear, Outer, join_outer, outer_squares
from .lookup import LOOKUP, Lookup, Rows, join_rows
from .norm import BROADCAST, Broadcast, Dense
from .recurrent import in_steps

__all__ = [
    "OPERATIONS",
    "Broadcast",
    "Dense",
    "Linear",
    "Lookup",
    "Outer",
    "Piece",
    "Rule",
    "Squares",
    "add_squares",
    "examples_of",
    "in_steps",
    "multi_head_attention",
    "supports",
]

OPERATIONS: dict[Any, Callable[..., Uses]] = {**LINEAR, **CONVOLUTION, **LOOKUP, **BROADCAST}


def add_squares(total: Tensor, pieces: Sequence[Piece]) -> None:
    """Add Σ_n (Σ_pieces gradient of example n)² to `total`."""
    if len(pieces) == 1:
        pieces[0].add_squares(total)
        return
    dense = [p for p in pieces if isinstance(p, Dense)]
    outer = [p for p in pieces if isinstance(p, Outer)]
    rows = [p for p in pieces if isinstance(p, Rows)]
    convolutions = [p for p in pieces if isinstance(p, ConvolutionPiece)]
    if len(dense) == len(pieces):
        Dense(torch.stack([p.values for p in dense]).sum(0)).add_squares(total)
    elif len(rows) == len(pieces):
        join_rows(rows).add_squares(total)
    elif outer and len(outer) + len(rows) == len(pieces) and total.dim() == 2:
        outer_squares(total, join_outer(outer), join_rows(rows) if rows else None)
    elif convolutions and len(convolutions) + len(outer) == len(pieces) and all(c.can_unfold() for c in convolutions):
        joined = join_outer([*outer, *(c.unfolded() for c in convolutions)])
        outer_squares(total.view(total.shape[0], -1), joined)
    else:
        examples = examples_of(pieces[0])
        for n in range(examples):
            gradient = torch.zeros_like(total)
            for piece in pieces:
                gradient += piece.example(n, total.shape)
            total.addcmul_(gradient, gradient)


def examples_of(piece: Any) -> int:
    """Return how many examples a piece holds gradients of."""
    for name in ("values", "left", "keys"):
        if hasattr(piece, name):
            return int(getattr(piece, name).shape[0])
    return int(piece.examples)
