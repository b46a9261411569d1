"""Rank correlation of two sets of values."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["centred_ranks", "correlation", "spearman"]


def spearman(x: Tensor, y: Tensor) -> float:
    """Rank correlation with mid-ranks for ties; nan where there is nothing, or a side is constant."""
    if not x.numel():
        return math.nan
    _, bins_x, counts_x = x.unique(return_inverse=True, return_counts=True)
    _, bins_y, counts_y = y.unique(return_inverse=True, return_counts=True)
    ranks_x, ranks_y = centred_ranks(counts_x), centred_ranks(counts_y)
    return correlation(float(torch.dot(ranks_x[bins_x], ranks_y[bins_y])), ranks_x, ranks_y, counts_x, counts_y)


def centred_ranks(counts: Tensor) -> Tensor:
    """Return the mid-rank of each distinct value (or bin), from how often each occurs; mean 0, within ±½."""
    counts = counts.double()
    number = counts.sum()
    return (counts.cumsum(0) - counts / 2 - number / 2) / number.clamp(min=1)


def correlation(cross: float, ranks_x: Tensor, ranks_y: Tensor, counts_x: Tensor, counts_y: Tensor) -> float:
    """Return the correlation, from the sum of products of ranks and how often each rank occurs; nan where a side is constant."""
    spread = float((counts_x * ranks_x.square()).sum()) * float((counts_y * ranks_y.square()).sum())
    return max(-1.0, min(1.0, cross / math.sqrt(spread))) if spread > 0 else math.nan
