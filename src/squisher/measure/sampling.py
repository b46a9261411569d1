"""Labels drawn from the model: a function of (seed, index in the stream, draw, position), and of nothing else.

The uniform numbers come from a counter-based hash, not from a generator that is advanced: the label of an example does not
depend on the batch it came in, on the number of processes, or on what else was drawn.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["categories", "normals", "uniforms"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 128  # classes per block of the two-level inverse CDF
_TILE = 1 << 22  # probabilities looked at in one go


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply the finalizer of splitmix64: a bijection of 64 bits in which every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seed: int, index: Tensor, draw: int, positions: int) -> Tensor:
    """Return uniform numbers in (0, 1), float64, of shape (examples, positions), on the CPU.

    Args:
        seed: any integer.
        index: position of each example in the whole stream of data.
        draw: which of several draws.
        positions: how many numbers each example needs; the k-th does not depend on how many there are.

    Returns:
        One number for each example and position.
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is the point
        key = _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64) + _GOLDEN)
        for word in (np.array([draw], dtype=np.uint64), index.cpu().numpy().astype(np.uint64)[:, None]):
            key = _mix(key + _GOLDEN * (word + np.uint64(1)))
        counter = np.arange(1, positions + 1, dtype=np.uint64)[None, :]
        bits = _mix(key + _GOLDEN * counter)
    # 52 bits and a half: never 0 and never 1, so that neither end of an inverse CDF is reached.
    return torch.from_numpy(((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52)


def normals(seed: int, index: Tensor, draw: int, positions: int) -> Tensor:
    """Return standard normal numbers in the layout of `uniforms`."""
    return torch.special.ndtri(uniforms(seed, index, draw, positions))


def categories(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Return the class at which the cumulative probability first exceeds the uniform number, for every row.

    Blocks of classes are summed first, and only the block that holds the answer is cumulated: one read of the
    probabilities, and no table of the size of a vocabulary times the number of positions.

    Args:
        probabilities: (rows, classes); need not sum to one exactly.
        uniform: (rows,), float64.

    Returns:
        Class indices, (rows,).
    """
    rows, classes = probabilities.shape
    uniform = uniform.to(probabilities.device)
    if classes <= 2 * _BLOCK:
        return _invert(probabilities.double(), uniform)
    step = max(1, _TILE // classes)
    if rows > step:
        return torch.cat([categories(probabilities[i : i + step], uniform[i : i + step]) for i in range(0, rows, step)])
    whole = classes // _BLOCK * _BLOCK
    sums = probabilities[:, :whole].unflatten(1, (-1, _BLOCK)).sum(2).double()
    if whole < classes:
        sums = torch.cat([sums, probabilities[:, whole:].sum(1, keepdim=True).double()], 1)
    block = _invert(sums, uniform)
    before = torch.where(block > 0, sums.cumsum(1).gather(1, (block - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    inside = (block * _BLOCK)[:, None] + torch.arange(_BLOCK, device=block.device)
    values = probabilities.gather(1, inside.clamp(max=classes - 1)).double().masked_fill_(inside >= classes, 0.0)
    target = uniform * sums.sum(1) - before
    return block * _BLOCK + _first_above(values, target)


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    return _first_above(weights, uniform * weights.sum(1))


def _first_above(weights: Tensor, target: Tensor) -> Tensor:
    """Return the first column whose cumulative weight exceeds the target; where rounding leaves none, the last one with weight."""
    cumulative = weights.cumsum(1)
    found = torch.searchsorted(cumulative, target[:, None].contiguous(), right=True)[:, 0]
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())[:, 0]
    return torch.minimum(found, last)
