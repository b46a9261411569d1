"""The arithmetic of merging on one piece of one tensor: pure functions of the models' pieces.

Everything is built from differences of weights, never from products of weights: what is equal in all models comes back to the bit. All steps are done on one block before the next block is touched, so that what is between them stays in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["TINY", "Term", "differences", "gradient_matched", "grafted", "saliency", "weighted"]

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


def differences(pieces: Sequence[Tensor], factors: Sequence[float], work: torch.dtype, out: Tensor) -> None:
    """Start + Σ factor·(θ − start); the start comes first.

    Args:
        pieces: The pieces, in this order.
        factors: One for each piece after the first.
        work: The type to compute in.
        out: Is filled with the result, in its own type.
    """
    for blocks, target, (a, b, c, d) in _in_blocks(pieces, out, 4, work):
        start = _as(blocks[0], a)
        total = start
        for k, factor in enumerate(factors):
            torch.sub(_as(blocks[k + 1], b), start, out=c)
            total = torch.add(total, c, alpha=factor, out=_last(target, d) if k + 1 == len(factors) else d)
        _deliver(total, target)


def weighted(pieces: Sequence[Tensor], terms: Sequence[Term], work: torch.dtype, careful: bool, out: Tensor) -> None:
    """Σ wθ / Σ w from pieces θ₁, F₁, θ₂, F₂, …; where all weights are 0 the mean with the coefficients.

    Args:
        pieces: The pieces, in this order.
        terms: One a model, two or more.
        work: The type to compute in.
        careful: Whether a sum of weights may be 0.
        out: Is filled with the result, in its own type.
    """
    shares = list(accumulate(term.coefficient for term in terms))
    for blocks, target, (a, b, total, w, d) in _in_blocks(pieces, out, 5, work):
        # A running mean, θ ← θ + (θₖ − θ)·wₖ/(w₁ + … + wₖ): one step less for each model than sums that are divided at the end.
        mean = _as(blocks[0], a)
        _weigh(blocks[1], terms[0], total, careful)
        for k, term in enumerate(terms[1:], 1):
            _weigh(blocks[2 * k + 1], term, w, careful)
            total.add_(w)
            torch.div(w, total, out=w)
            if careful:
                w.copy_(torch.where(total == 0, term.coefficient / shares[k], w))
            last = k + 1 == len(terms)
            mean = torch.lerp(mean, _as(blocks[2 * k], b), w, out=_last(target, d) if last else d)
        _deliver(mean, target)


def gradient_matched(
    pieces: Sequence[Tensor],
    base: Term | None,
    terms: Sequence[Term],
    delta: float,
    work: torch.dtype,
    careful: bool,
    out: Tensor,
) -> None:
    """θ₀ + Σ α(H + G)(θ − θ₀) / (Σ αH + G) with G = H₀ + δ, and Σ α(θ − θ₀) where that is 0/0.

    Args:
        pieces: θ₀, H₀, θ₁, H₁, …; no H₀ where `base` is None.
        base: Of the base's importance.
        terms: One a model; its coefficient is α.
        delta: Added to both sums.
        work: The type to compute in.
        careful: Whether a denominator may be 0.
        out: Is filled with the result, in its own type.
    """
    first = 1 if base is None else 2
    for blocks, target, (a, b, common, total, w, d, above, plain) in _in_blocks(pieces, out, 8, work):
        start = _as(blocks[0], a)
        if base is None:
            common.fill_(delta)
        else:
            _weigh(blocks[1], base, common, careful)
            common.add_(delta)
        total.copy_(common)
        above.zero_()
        plain.zero_()
        for k, term in enumerate(terms):
            theta, importance = blocks[first + 2 * k : first + 2 * k + 2]
            _weigh(importance, term, w, careful)
            total.add_(w, alpha=term.coefficient)
            w.add_(common)
            torch.sub(_as(theta, b), start, out=d)
            if careful:
                plain.add_(d, alpha=term.coefficient)
            above.addcmul_(d, w, value=term.coefficient)
        if careful:
            none = total == 0
            above[none] = plain[none]
            total[none] = 1.0
        _deliver(torch.addcdiv(start, above, total, out=_last(target, above)), target)


def grafted(
    pieces: Sequence[Tensor],
    terms: Sequence[Term],
    least: Sequence[float],
    work: torch.dtype,
    careful: bool,
    out: Tensor,
) -> None:
    """θ₀ + Σ √w·m·(θ − θ₀) / Σ √w, where m keeps the entries whose saliency is at least a model's threshold.

    Args:
        pieces: θ₀, θ₁, F₁, θ₂, F₂, …
        terms: One a model: how F becomes the weight w.
        least: One threshold a model.
        work: The type to compute in.
        careful: Whether a sum of weights may be 0; the models' mean is taken there.
        out: Is filled with the result, in its own type.
    """
    for blocks, target, (a, b, w, d, total, above, plain) in _in_blocks(pieces, out, 7, work):
        start = _as(blocks[0], a)
        for buffer in (total, above, plain):
            buffer.zero_()
        for k, term in enumerate(terms):
            theta, importance = blocks[1 + 2 * k : 3 + 2 * k]
            torch.sub(_as(theta, b), start, out=d)
            if least[k] > 0:
                d.mul_(saliency(blocks[0], theta, importance) >= least[k])
            _weigh(importance, term, w, careful)
            w.sqrt_()
            total.add_(w)
            above.addcmul_(d, w)
            if careful:
                plain.add_(d, alpha=1 / len(terms))
        if careful:
            none = total == 0
            above[none] = plain[none]
            total[none] = 1.0
        _deliver(torch.addcdiv(start, above, total, out=_last(target, above)), target)


def saliency(start: Tensor, theta: Tensor, importance: Tensor) -> Tensor:
    """√F·|θ − θ₀| in float32: the order of F·(θ − θ₀)², without its underflow."""
    return importance.float().sqrt().mul_(theta.float().sub(start.float()).abs_())


def _in_blocks(
    pieces: Sequence[Tensor], out: Tensor, count: int, work: torch.dtype
) -> Iterator[tuple[tuple[Tensor, ...], Tensor, list[Tensor]]]:
    """Return the blocks of all pieces, where their result goes, and room to compute in."""
    room = [torch.empty(min(_BLOCK, out.numel()), dtype=work) for _ in range(count)]
    for *blocks, target in zip(*(piece.split(_BLOCK) for piece in (*pieces, out)), strict=True):
        short = target.numel() < room[0].numel()
        yield tuple(blocks), target, [buffer[: target.numel()] for buffer in room] if short else room


def _weigh(importance: Tensor, term: Term, out: Tensor, careful: bool) -> None:
    values = _as(importance, out)
    if careful:  # what float32 holds only as a denormal says nothing
        values = torch.where(values < TINY, 0.0, values)
    if term.factor != 1.0:
        values = torch.mul(values, term.factor, out=out)
    if term.adds:
        torch.add(values, term.floor, out=out)
    else:
        torch.clamp_min(values, term.floor, out=out)  # no importance is negative, so that a floor of 0 changes nothing


def _as(block: Tensor, spare: Tensor) -> Tensor:
    return block if block.dtype == spare.dtype else spare.copy_(block)


def _last(target: Tensor, spare: Tensor) -> Tensor:
    """Where the last step puts its result: into the target itself, if that has the type."""
    return target if target.dtype == spare.dtype else spare


def _deliver(result: Tensor, target: Tensor) -> None:
    if result is not target:
        target.copy_(result)
