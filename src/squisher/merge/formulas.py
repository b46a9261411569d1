"""The formulas of the methods: which numbers weigh each tensor (classes), and the arithmetic on one chunk (pure functions).

The arithmetic uses differences of weights, so entries that are equal in all models come back to the bit, except that an average
turns -0.0 into 0.0. It goes block by block, so that intermediate results stay in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import SquisherError
from ..order import TINY, threshold
from ..storage.tensors import chunks_of, numel_of
from .inputs import Graded

__all__ = ["Fisher", "Grafting", "Matching", "Mean"]

Weights = Mapping[str, Tensor]

_RELATIVE = 1e-6
_SAFE = (1e-30, 1e30)  # factors and floors in this range leave float32 room on both sides


@dataclass(frozen=True)
class Mean:
    """The first model plus the differences of the others from it, times their factors."""

    models: list[Weights]
    factors: list[float]
    work: torch.dtype

    def inputs(self, name: str) -> list[Weights]:
        """Return the mappings that a chunk is read from, in this order."""
        return self.models

    def fill(self, name: str, chunks: Sequence[Tensor], out: Tensor) -> None:
        """Fill `out` with the merged chunk."""
        differences(chunks, self.factors, self.work, out)


@dataclass
class Fisher:
    """The mean weighted with importances: scale, normalize, floor, coefficient, in this order."""

    models: list[Weights]
    importances: list[Graded]
    coefficients: list[float]
    normalize: str | None
    floors: list[float] | None
    """Absolute ones; None for the relative floor."""
    adds: bool
    averaged: frozenset[str]
    work: torch.dtype

    def __post_init__(self) -> None:
        self._mean = Mean(self.models, [c / math.fsum(self.coefficients) for c in self.coefficients[1:]], self.work)
        self._terms: dict[str, list[Term]] = {}

    def inputs(self, name: str) -> list[Weights]:
        """Return the mappings that a chunk is read from, in this order."""
        if not self.terms(name):
            return self.models
        return _paired(self.models, self.importances)

    def fill(self, name: str, chunks: Sequence[Tensor], out: Tensor) -> None:
        """Fill `out` with the merged chunk."""
        terms = self.terms(name)
        if not terms:
            self._mean.fill(name, chunks, out)
            return
        careful = not all(_in_range(t) and _safe(t.floor) for t in terms)
        weighted(chunks, terms, torch.float64 if careful else self.work, careful, out)

    def terms(self, name: str) -> list[Term]:
        """Return how importances become weights in this tensor; empty where it is averaged."""
        if name not in self._terms:
            self._terms[name] = self._new_terms(name)
        return self._terms[name]

    def _new_terms(self, name: str) -> list[Term]:
        if name in self.averaged or len(self.models) == 1:
            return []
        factors = [g.factor / norm for g, norm in zip(self.importances, self._norms, strict=True)]
        sums = [g.sums(name)[0] / norm for g, norm in zip(self.importances, self._norms, strict=True)]
        floors = self.floors
        if floors is None:
            mean = math.fsum(sums) / (len(sums) * max(numel_of(self.models[0], name), 1))
            if not mean > 0:
                return []
            floors = [_RELATIVE * mean for _ in factors]
        else:
            floors = [f / norm for f, norm in zip(floors, self._norms, strict=True)]
        # Only ratios matter: with the first factor at 1 its importance needs no multiplication, and often none does.
        unit = factors[0] * self.coefficients[0] or math.inf
        terms = [
            Term(factor * c / unit, floor * c / unit, self.adds, c, most=(total + floor) * c / unit)
            for factor, floor, c, total in zip(factors, floors, self.coefficients, sums, strict=True)
        ]
        if not all(0 < t.factor < math.inf and t.floor < math.inf for t in terms):
            raise SquisherError(
                f"The weights of the models in {name!r} are too far apart for float64: scales times coefficients are "
                f"{', '.join(f'{factor:.3g} × {c:.3g}' for factor, c in zip(factors, self.coefficients, strict=True))}."
            )
        return terms

    @cached_property
    def _norms(self) -> list[float]:
        kind = self.normalize
        return [1.0 if kind is None else g.norm(list(g), kind) for g in self.importances]


@dataclass
class Matching:
    """Uncertainty-based gradient matching."""

    base: Weights
    models: list[Weights]
    base_importance: Graded | None
    importances: list[Graded]
    alphas: list[float]
    sizes: list[float]
    base_size: float
    delta: float | str
    averaged: frozenset[str]
    work: torch.dtype

    def __post_init__(self) -> None:
        self._plain = Mean([self.base, *self.models], self.alphas, self.work)

    def inputs(self, name: str) -> list[Weights]:
        """Return the mappings that a chunk is read from, in this order."""
        if self._unit_and_delta(name) is None:
            return self._plain.models
        of_base = [] if self.base_importance is None else [self.base_importance]
        return [self.base, *of_base, *_paired(self.models, self.importances)]

    def fill(self, name: str, chunks: Sequence[Tensor], out: Tensor) -> None:
        """Fill `out` with the merged chunk."""
        found = self._unit_and_delta(name)
        if found is None:
            self._plain.fill(name, chunks, out)
            return
        unit, delta = found
        of_base = None
        if self.base_importance is not None:
            of_base = self._term(name, self.base_importance, self.base_size * unit)
        terms = [
            self._term(name, g, size * unit, alpha)
            for g, size, alpha in zip(self.importances, self.sizes, self.alphas, strict=True)
        ]
        careful = not (_safe(delta) and all(map(_in_range, [of_base, *terms] if of_base else terms)))
        gradient_matched(chunks, of_base, terms, delta, torch.float64 if careful else self.work, careful, out)

    def _term(self, name: str, importance: Graded, size: float, alpha: float = 1.0) -> Term:
        most = importance.sums(name)[0] * size * max(alpha, 1.0)
        return Term(importance.factor * size, coefficient=alpha, most=most)

    def _unit_and_delta(self, name: str) -> tuple[float, float] | None:
        if name in self.averaged:
            return None
        if not isinstance(self.delta, str):
            return 1.0, self.delta
        numel = max(numel_of(self.base, name), 1)
        totals = [a * s * g.sums(name)[0] for a, s, g in zip(self.alphas, self.sizes, self.importances, strict=True)]
        if self.base_importance is not None:
            totals.append(self.base_size * self.base_importance.sums(name)[0])
        mean = math.fsum(totals) / numel
        if not mean > 0:
            return None
        unit = _unit(mean)
        return unit, _RELATIVE * mean * unit


@dataclass
class Grafting:
    """The models' differences from the base, masked by √F·|θ − θ₀| and weighted with √F."""

    base: Weights
    models: list[Weights]
    importances: list[Graded]
    keeps: list[float]
    floors: list[float] | None
    adds: bool
    averaged: frozenset[str]
    work: torch.dtype

    def __post_init__(self) -> None:
        ones, shares = [1.0 for _ in self.models], [1 / len(self.models) for _ in self.models]
        self._weights = Fisher(
            self.models, self.importances, ones, None, self.floors, self.adds, self.averaged, self.work
        )
        self._mean = Mean([self.base, *self.models], shares, self.work)

    def inputs(self, name: str) -> list[Weights]:
        """Return the mappings that a chunk is read from, in this order."""
        if name in self.averaged:
            return self._mean.models
        return [self.base, *_paired(self.models, self.importances)]

    def fill(self, name: str, chunks: Sequence[Tensor], out: Tensor) -> None:
        """Fill `out` with the merged chunk."""
        if name in self.averaged:
            self._mean.fill(name, chunks, out)
            return
        # Without terms (one model, or importances that are 0 everywhere) all weights are equal.
        terms = self._weights.terms(name) or [Term(0.0, 1.0) for _ in self.models]
        careful = not all(_in_range(t) and _safe(t.floor) for t in terms)
        grafted(chunks, terms, self._thresholds, torch.float64 if careful else self.work, careful, out)

    @cached_property
    def _thresholds(self) -> list[float]:
        """The least saliency that each model keeps; found once, by passes over all tensors."""
        return [self._threshold(k) for k in range(len(self.models))]

    def _threshold(self, k: int) -> float:
        if self.keeps[k] == 1.0:
            return 0.0
        sources = self.base, self.models[k], self.importances[k]

        def scores(name: str) -> Iterator[Tensor]:
            for chunks in zip(*(chunks_of(source, name) for source in sources), strict=True):
                yield saliency(*chunks)

        names = [name for name in self.importances[k] if name not in self.averaged]
        total = sum(numel_of(self.base, name) for name in names)
        return threshold({name: partial(scores, name) for name in names}, math.floor(self.keeps[k] * total)).value


def _paired(models: Sequence[Weights], importances: Sequence[Weights]) -> list[Weights]:
    """Return every model followed by its importance."""
    return [source for pair in zip(models, importances, strict=True) for source in pair]


def _unit(mean: float) -> float:
    """Return a power of two near 1 / mean: an exact factor that takes float32 far away from its limits."""
    return float(2.0 ** min(-round(math.log2(mean)), 1000))


def _safe(value: float) -> bool:
    return _SAFE[0] < value < _SAFE[1]


_BLOCK = 1 << 15  # torch shares longer tensors among threads, which stalls on a busy machine


class Term(NamedTuple):
    """How one model's importance F becomes its weight: max(F·factor, floor), or F·factor + floor."""

    factor: float
    floor: float = 0.0
    adds: bool = False
    coefficient: float = 1.0
    """The model's share where all importances are 0."""
    most: float = 0.0
    """An upper bound of the weights: their sum."""


def _in_range(term: Term) -> bool:
    """Return whether all weights and their sums fit float32: otherwise they would become 0 or infinite without a NaN."""
    return _safe(term.factor or 1.0) and term.most < _SAFE[1]


def differences(chunks: Sequence[Tensor], factors: Sequence[float], work: torch.dtype, out: Tensor) -> None:
    """Fill `out` with start + Σ factor·(θ − start), computed in the type `work`; the start is the first chunk."""
    for blocks, target, (a, b, c, d) in _in_blocks(chunks, out, 4, work):
        start = _as(blocks[0], a)
        total = start
        for k, factor in enumerate(factors):
            torch.sub(_as(blocks[k + 1], b), start, out=c)
            total = torch.add(total, c, alpha=factor, out=_last(target, d) if k + 1 == len(factors) else d)
        _deliver(total, target)


def weighted(chunks: Sequence[Tensor], terms: Sequence[Term], work: torch.dtype, careful: bool, out: Tensor) -> None:
    """Fill `out` with Σ wθ / Σ w from chunks θ₁, F₁, θ₂, F₂, …; where all weights are 0, with the mean by coefficients.

    `terms` has two models or more; `careful` is whether a sum of weights may be 0.
    """
    shares = list(accumulate(term.coefficient for term in terms))
    for blocks, target, (a, b, total, w, d) in _in_blocks(chunks, out, 5, work):
        # A running mean, θ ← θ + (θₖ − θ)·wₖ/(w₁ + … + wₖ), takes one step less per model than sums divided at the end.
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
    chunks: Sequence[Tensor],
    base: Term | None,
    terms: Sequence[Term],
    delta: float,
    work: torch.dtype,
    careful: bool,
    out: Tensor,
) -> None:
    """Fill `out` with θ₀ + Σ α(H + G)(θ − θ₀) / (Σ αH + G), G = H₀ + δ; where this is 0/0, with θ₀ + Σ α(θ − θ₀).

    Chunks are θ₀, H₀, θ₁, H₁, …, without H₀ where `base` is None; `careful` is whether a denominator may be 0.
    """
    first = 1 if base is None else 2
    for blocks, target, (a, b, common, total, w, d, above, plain) in _in_blocks(chunks, out, 8, work):
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
        _divide(start, above, total, plain if careful else None, target)


def grafted(
    chunks: Sequence[Tensor],
    terms: Sequence[Term],
    least: Sequence[float],
    work: torch.dtype,
    careful: bool,
    out: Tensor,
) -> None:
    """Fill `out` with θ₀ + Σ √w·m·(θ − θ₀) / Σ √w, where m keeps the entries whose saliency reaches the model's threshold.

    Chunks are θ₀, θ₁, F₁, θ₂, F₂, …; `careful` is whether a sum of weights may be 0: there the models' mean is taken.
    """
    for blocks, target, (a, b, w, d, total, above, plain) in _in_blocks(chunks, out, 7, work):
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
        _divide(start, above, total, plain if careful else None, target)


def saliency(start: Tensor, theta: Tensor, importance: Tensor) -> Tensor:
    """Return √F·|θ − θ₀| in float32, which has the order of F·(θ − θ₀)² and does not underflow."""
    kind = _work_type([start, theta, importance], torch.float32)
    return importance.to(kind).sqrt().mul_(theta.to(kind).sub(start.to(kind)).abs_()).float()


def _in_blocks(
    chunks: Sequence[Tensor], out: Tensor, count: int, work: torch.dtype
) -> Iterator[tuple[tuple[Tensor, ...], Tensor, list[Tensor]]]:
    """Yield the blocks of all chunks, the block for the result, and buffers: in float64 if an input is."""
    work = _work_type(chunks, work)
    room = [torch.empty(min(_BLOCK, out.numel()), dtype=work) for _ in range(count)]
    for *blocks, target in zip(*(chunk.split(_BLOCK) for chunk in (*chunks, out)), strict=True):
        short = target.numel() < room[0].numel()
        yield tuple(blocks), target, [buffer[: target.numel()] for buffer in room] if short else room


def _work_type(chunks: Sequence[Tensor], work: torch.dtype) -> torch.dtype:
    return torch.float64 if any(chunk.dtype == torch.float64 for chunk in chunks) else work


def _weigh(importance: Tensor, term: Term, out: Tensor, careful: bool) -> None:
    values = _as(importance, out)
    if careful:  # denormals count as 0
        values = torch.where(values < TINY, 0.0, values)
    if term.factor != 1.0:
        values = torch.mul(values, term.factor, out=out)
    if term.adds:
        torch.add(values, term.floor, out=out)
    else:
        torch.clamp_min(values, term.floor, out=out)  # a floor of 0 changes nothing: no importance is negative


def _divide(start: Tensor, above: Tensor, total: Tensor, plain: Tensor | None, target: Tensor) -> None:
    """Fill `target` with start + above / total; where the total is 0, with start + plain."""
    if plain is not None:
        none = total == 0
        above[none] = plain[none]
        total[none] = 1.0
    _deliver(torch.addcdiv(start, above, total, out=_last(target, above)), target)


def _as(block: Tensor, spare: Tensor) -> Tensor:
    return block if block.dtype == spare.dtype else spare.copy_(block)


def _last(target: Tensor, spare: Tensor) -> Tensor:
    """Return where the last step puts its result: the target itself, if its type allows."""
    return target if target.dtype == spare.dtype else spare


def _deliver(result: Tensor, target: Tensor) -> None:
    if result is not target:
        target.copy_(result)
