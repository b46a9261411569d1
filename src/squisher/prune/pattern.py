"""N:M sparsity: of every M weights in a row of inputs, the N best stay. Some processors multiply 2:4 faster."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import SquisherError

__all__ = ["fits", "keep_pattern", "parse_pattern"]


def parse_pattern(pattern: str) -> tuple[int, int]:
    """`"2:4"` as (2, 4).

    Raises:
        SquisherError: It is not of that form.
    """
    found = re.fullmatch(r"(\d+):(\d+)", pattern.strip())
    if found is None or not 0 < int(found[1]) < int(found[2]) <= 64:
        raise SquisherError(f"A pattern is written N:M with 0 < N < M ≤ 64, such as 2:4, not {pattern!r}.")
    return int(found[1]), int(found[2])


def fits(name: str, shape: torch.Size, of: int) -> bool:
    """Whether a tensor takes part: vectors do not.

    Raises:
        SquisherError: Its inputs cannot be divided into groups.
    """
    if len(shape) < 2 or not shape.numel():
        return False
    if shape[1] % of:
        raise SquisherError(
            f"{name!r} of the shape {tuple(shape)} has {shape[1]} inputs, which groups of {of} do not divide. "
            "Leave it out with exclude."
        )
    return True


def keep_pattern(scores: Tensor, keep: int, of: int) -> Tensor:
    """Return True for the `keep` best of every `of` neighbours along the inputs (dimension 1); the first of equal ones stay."""
    grouped = scores.movedim(1, -1).reshape(-1, of)
    columns: list[Any] = [np.ascontiguousarray(grouped[:, k].numpy()) for k in range(of)]
    if any(bool(np.isnan(column).any()) for column in columns):
        raise SquisherError("The scores hold NaN, which has no rank. Remove it where the scores are made.")
    kept = np.empty(grouped.shape, dtype=bool)
    for k, column in enumerate(columns):
        better = np.zeros(column.shape, dtype=np.uint8)
        for other, rival in enumerate(columns):
            if other != k:
                better += rival >= column if other < k else rival > column
        kept[:, k] = better < keep
    moved = scores.movedim(1, -1)
    return torch.from_numpy(kept).view(moved.shape).movedim(-1, 1).contiguous()
