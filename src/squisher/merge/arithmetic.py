"""The arithmetic of merging on one piece of one tensor: pure functions of the pieces, which arrive model by model.

Everything is a sum of differences to a start, θ = θ₁ + Σ wᵢ(θᵢ − θ₁) / Σ wᵢ: equal weights come back to the bit, one model comes
back to the bit, and no more than one model's piece is needed at a time, however many models there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["TINY", "Term", "differences", "gradient_matched", "weighted"]

TINY = 1.2e-38
"""Below the smallest normal float32: read as 0."""

_BLOCK = 1 << 15  # torch shares longer tensors among threads, which stalls on a machine that has other work to do


class Term(NamedTuple):
    """How one model's importance F becomes its weight: max(F·factor, floor), or F·factor + floor."""

    factor: float
    floor: float = 0.0
    adds: bool = False
    coefficient: float = 1.0
    """The model's share where no importance decides."""


def differences(pieces: Iterator[Tensor], factors: Sequence[float], work: torch.dtype) -> Tensor:
    """Start + Σ factor·(θ − start); the start comes first."""
    start = _own(next(pieces), work)
    if not factors:
        return start
    out = _own(start, work)
    spare, difference = _buffers(2, work)
    for factor in factors:
        piece = next(pieces)
        for part in _parts(piece):
            d = torch.sub(_as(piece[part], spare), start[part], out=difference[: _length(part)])
            out[part].add_(d, alpha=factor)
    return out


def weighted(pieces: Iterator[Tensor], terms: Sequence[Term], work: torch.dtype, careful: bool) -> Tensor:
    """Σ wθ / Σ w from pieces θ₁, F₁, θ₂, F₂, …; where all weights are 0 the mean with the coefficients.

    Args:
        pieces: The pieces, in this order.
        terms: One a model, two or more.
        work: The type to compute in.
        careful: Whether a sum of weights may be 0.
    """
    spare, weight, difference = _buffers(3, work)
    theta, importance = next(pieces), next(pieces)
    start = theta if theta.dtype == work else _own(theta, work)
    total, above = (torch.empty(theta.numel(), dtype=work) for _ in range(2))
    plain = _zeros(theta.numel(), work) if careful else above
    for part in _parts(theta):
        _weigh(importance[part], terms[0], spare, total[part], careful)
    for number, term in enumerate(terms[1:]):
        theta, importance = next(pieces), next(pieces)
        for part in _parts(theta):
            w = weight[: _length(part)]
            _weigh(importance[part], term, spare, w, careful)
            total[part].add_(w)
            d = above[part] if number == 0 and not careful else difference[: _length(part)]
            torch.sub(_as(theta[part], spare), start[part], out=d)
            if careful:
                plain[part].add_(d, alpha=term.coefficient)
            if number == 0:
                torch.mul(d, w, out=above[part])
            else:
                above[part].addcmul_(d, w)
    share = sum(term.coefficient for term in terms)
    for part in _parts(start):
        quotient = above[part].div_(total[part])
        if careful:
            none = total[part] == 0
            quotient[none] = plain[part][none] / share
        quotient.add_(start[part])
    return above


def gradient_matched(
    pieces: Iterator[Tensor], base: Term | None, terms: Sequence[Term], delta: float, work: torch.dtype, careful: bool
) -> Tensor:
    """θ₀ + Σ α(H + G)(θ − θ₀) / (Σ αH + G) with G = H₀ + δ, and Σ α(θ − θ₀) where that is 0/0.

    Args:
        pieces: θ₀, H₀, θ₁, H₁, …; no H₀ where `base` is None.
        base: Of the base's importance.
        terms: One a model; its coefficient is α.
        delta: Added to both sums.
        work: The type to compute in.
        careful: Whether a denominator may be 0.
    """
    start = _own(next(pieces), work)
    common = _zeros(start.numel(), work)
    spare, weight, difference = _buffers(3, work)
    if base is not None:
        importance = next(pieces)
        for part in _parts(start):
            _weigh(importance[part], base, spare, common[part], careful)
    for part in _parts(start):
        common[part].add_(delta)
    total = _own(common, work)
    above = _zeros(start.numel(), work)
    plain = _zeros(start.numel(), work) if careful else above
    for term in terms:
        theta, importance = next(pieces), next(pieces)
        for part in _parts(theta):
            w = weight[: _length(part)]
            _weigh(importance[part], term, spare, w, careful)
            total[part].add_(w, alpha=term.coefficient)
            w.add_(common[part])
            d = torch.sub(_as(theta[part], spare), start[part], out=difference[: _length(part)])
            if careful:
                plain[part].add_(d, alpha=term.coefficient)
            above[part].addcmul_(d, w, value=term.coefficient)
    for part in _parts(start):
        quotient = torch.div(above[part], total[part], out=difference[: _length(part)])
        if careful:
            none = total[part] == 0
            quotient[none] = plain[part][none]
        start[part].add_(quotient)
    return start


def _weigh(importance: Tensor, term: Term, spare: Tensor, out: Tensor, careful: bool) -> None:
    values = _as(importance, spare)
    if careful:  # what float32 holds only as a denormal says nothing
        values = torch.where(values < TINY, 0.0, values)
    if term.factor != 1.0:
        values = torch.mul(values, term.factor, out=out)
    if term.adds:
        torch.add(values, term.floor, out=out)
    else:
        torch.clamp(values, min=term.floor, out=out)  # no importance is negative, so that a floor of 0 changes nothing


def _own(piece: Tensor, work: torch.dtype) -> Tensor:
    out = torch.empty(piece.numel(), dtype=work)
    for part in _parts(piece):
        out[part].copy_(piece[part])
    return out


def _zeros(length: int, work: torch.dtype) -> Tensor:
    return torch.from_numpy(np.zeros(length, np.float64 if work == torch.float64 else np.float32))


def _as(block: Tensor, spare: Tensor) -> Tensor:
    return block if block.dtype == spare.dtype else spare[: block.numel()].copy_(block)


def _buffers(count: int, work: torch.dtype) -> list[Tensor]:
    return [torch.empty(_BLOCK, dtype=work) for _ in range(count)]


def _parts(piece: Tensor) -> list[slice]:
    n = piece.numel()
    return [slice(start, min(start + _BLOCK, n)) for start in range(0, n, _BLOCK)]


def _length(part: slice) -> int:
    return int(part.stop - part.start)
