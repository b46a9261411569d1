"""How large the sums are that a gradient is made of: what its rounding errors are measured by when the fast engine is proven."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .pieces import Outer, Piece, Rows

__all__ = ["bound_of"]


def bound_of(pieces: Sequence[Piece], like: Tensor, at: Tensor) -> tuple[Tensor, float]:
    """Σ of the squares of pieces of absolute values, without a tensor of the parameter's size where it is large.

    Args:
        pieces: made with `absolute=True`.
        like: has the parameter's shape and the type of the sums.
        at: places in the flattened parameter.

    Returns:
        The sum at these places, and a bound on its largest entry.
    """
    values, largest = like.new_zeros(at.shape), 0.0
    for piece in pieces:
        if isinstance(piece, Outer) and piece.left.shape[1] == 1:
            left, right = (t[:, 0].to(like.dtype).square() for t in (piece.left, piece.right))
            values += (left[:, at // right.shape[1]] * right[:, at % right.shape[1]]).sum(0)
            largest += float((left.amax(1) * right.amax(1)).sum())
        elif isinstance(piece, Rows):
            for n in range(piece.keys.shape[0]):
                keys, rows = piece.sums(n, like.dtype)
                if keys.numel():
                    wanted = at // rows.shape[1]
                    place = torch.searchsorted(keys, wanted).clamp_(max=keys.numel() - 1)
                    values += torch.where(keys[place] == wanted, rows[place, at % rows.shape[1]], 0.0).square()
                    largest += float(rows.max()) ** 2
        else:
            whole = torch.zeros_like(like)
            piece.add_squares(whole)
            values += whole.view(-1)[at]
            largest += float(whole.max())
    return values, largest
