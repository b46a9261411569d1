"""What each method weighs a tensor's pieces with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..order import threshold
from ..storage.tensors import chunks_of, numel_of
from .arithmetic import Term, differences, gradient_matched, grafted, saliency, weighted
from .importances import Graded

__all__ = ["Fisher", "Grafting", "Matching", "Mean"]

Weights = Mapping[str, Tensor]

_RELATIVE = 1e-6
_SAFE = (1e-30, 1e30)  # factors and floors within it leave float32 room on both sides


@dataclass(frozen=True)
class Mean:
    """The first one and the others' differences to it, times their factors."""

    models: list[Weights]
    factors: list[float]
    work: torch.dtype

    def inputs(self, name: str) -> list[Weights]:
        """Return what is read for a piece, in this order."""
        return self.models

    def piece(self, name: str, pieces: Sequence[Tensor], out: Tensor) -> None:
        """Fill `out` with the merged piece."""
        differences(pieces, self.factors, self.work, out)


class Fisher:
    """Weighted with importances: scale, normalize, floor, coefficient, in this order."""

    def __init__(
        self,
        models: list[Weights],
        importances: list[Graded],
        coefficients: list[float],
        normalize: str | None,
        floors: list[float] | None,
        adds: bool,
        averaged: frozenset[str],
        work: torch.dtype,
    ):
        self._models, self._importances, self._coefficients = models, importances, coefficients
        self._normalize, self._floors, self._adds = normalize, floors, adds
        self._averaged, self._work = averaged, work
        self._mean = Mean(models, [c / math.fsum(coefficients) for c in coefficients[1:]], work)
        self._norms: list[float] | None = None
        self._terms: dict[str, list[Term]] = {}

    def inputs(self, name: str) -> list[Weights]:
        """Return what is read for a piece, in this order."""
        if not self.terms(name):
            return self._models
        return [source for pair in zip(self._models, self._importances, strict=True) for source in pair]

    def piece(self, name: str, pieces: Sequence[Tensor], out: Tensor) -> None:
        """Fill `out` with the merged piece."""
        terms = self.terms(name)
        if not terms:
            self._mean.piece(name, pieces, out)
            return
        careful = not all(_safe(t.factor) and _safe(t.floor) for t in terms)
        weighted(pieces, terms, torch.float64 if careful else self._work, careful, out)

    def terms(self, name: str) -> list[Term]:
        """How importances become weights in this tensor; empty where it is averaged."""
        if name not in self._terms:
            self._terms[name] = self._new_terms(name)
        return self._terms[name]

    def _new_terms(self, name: str) -> list[Term]:
        if name in self._averaged or len(self._models) == 1:
            return []
        factors = [g.factor / norm for g, norm in zip(self._importances, self._all_norms(), strict=True)]
        floors = self._floors
        if floors is None:
            sums = [g.sums(name)[0] / norm for g, norm in zip(self._importances, self._all_norms(), strict=True)]
            mean = math.fsum(sums) / (len(sums) * max(numel_of(self._models[0], name), 1))
            if not mean > 0:
                return []
            floors = [_RELATIVE * mean for _ in factors]
        else:
            floors = [f / norm for f, norm in zip(floors, self._all_norms(), strict=True)]
        # Only ratios matter: with the first factor at 1 its importance needs no multiplication, and often none does.
        unit = 1.0 / (factors[0] * self._coefficients[0])
        return [
            Term(factor * c * unit, floor * c * unit, self._adds, c)
            for factor, floor, c in zip(factors, floors, self._coefficients, strict=True)
        ]

    def _all_norms(self) -> list[float]:
        if self._norms is None:
            kind = self._normalize
            self._norms = [1.0 if kind is None else g.norm(list(g), kind) for g in self._importances]
        return self._norms


class Matching:
    """Uncertainty-based gradient matching."""

    def __init__(
        self,
        base: Weights,
        models: list[Weights],
        base_importance: Graded | None,
        importances: list[Graded],
        alphas: list[float],
        sizes: list[float],
        base_size: float,
        delta: float | str,
        averaged: frozenset[str],
        work: torch.dtype,
    ):
        self._base, self._models, self._alphas = base, models, alphas
        self._base_importance, self._importances = base_importance, importances
        self._sizes, self._base_size, self._delta = sizes, base_size, delta
        self._averaged, self._work = averaged, work
        self._plain = Mean([base, *models], alphas, work)

    def inputs(self, name: str) -> list[Weights]:
        """Return what is read for a piece, in this order."""
        if self._unit_and_delta(name) is None:
            return self._plain.models
        pairs = [source for pair in zip(self._models, self._importances, strict=True) for source in pair]
        return [self._base, *([] if self._base_importance is None else [self._base_importance]), *pairs]

    def piece(self, name: str, pieces: Sequence[Tensor], out: Tensor) -> None:
        """Fill `out` with the merged piece."""
        found = self._unit_and_delta(name)
        if found is None:
            self._plain.piece(name, pieces, out)
            return
        unit, delta = found
        own = None
        if self._base_importance is not None:
            own = Term(self._base_importance.factor * self._base_size * unit)
        terms = [
            Term(g.factor * size * unit, coefficient=alpha)
            for g, size, alpha in zip(self._importances, self._sizes, self._alphas, strict=True)
        ]
        factors = [t.factor for t in ([own] if own else []) + terms if t.factor]
        careful = not (_safe(delta) and all(map(_safe, factors)))
        gradient_matched(pieces, own, terms, delta, torch.float64 if careful else self._work, careful, out)

    def _unit_and_delta(self, name: str) -> tuple[float, float] | None:
        if name in self._averaged:
            return None
        if not isinstance(self._delta, str):
            return 1.0, self._delta
        numel = max(numel_of(self._base, name), 1)
        parts = [a * s * g.sums(name)[0] for a, s, g in zip(self._alphas, self._sizes, self._importances, strict=True)]
        if self._base_importance is not None:
            parts.append(self._base_size * self._base_importance.sums(name)[0])
        mean = math.fsum(parts) / numel
        if not mean > 0:
            return None
        unit = _unit(mean)
        return unit, _RELATIVE * mean * unit


class Grafting:
    """What the models changed of the base, masked by √F·|θ − θ₀| and weighted with √F."""

    def __init__(
        self,
        base: Weights,
        models: list[Weights],
        importances: list[Graded],
        keeps: list[float],
        floors: list[float] | None,
        adds: bool,
        averaged: frozenset[str],
        work: torch.dtype,
    ):
        ones = [1.0] * len(models)
        self._base, self._models, self._importances, self._keeps = base, models, importances, keeps
        self._weights = Fisher(models, importances, ones, None, floors, adds, averaged, work)
        self._mean = Mean([base, *models], [1 / len(models) for _ in models], work)
        self._averaged, self._work = averaged, work
        self._least: list[float] | None = None

    def inputs(self, name: str) -> list[Weights]:
        """Return what is read for a piece, in this order."""
        if name in self._averaged:
            return self._mean.models
        pairs = zip(self._models, self._importances, strict=True)
        return [self._base, *(source for pair in pairs for source in pair)]

    def piece(self, name: str, pieces: Sequence[Tensor], out: Tensor) -> None:
        """Fill `out` with the merged piece."""
        if name in self._averaged:
            self._mean.piece(name, pieces, out)
            return
        # One model has no terms, and a tensor whose importance is 0 everywhere has none: all weights are equal then.
        terms = self._weights.terms(name) or [Term(0.0, 1.0) for _ in self._models]
        careful = not all(_safe(t.factor or 1.0) and _safe(t.floor) for t in terms)
        grafted(pieces, terms, self._thresholds(), torch.float64 if careful else self._work, careful, out)

    def _thresholds(self) -> list[float]:
        """Return the saliency of the last entry that each model keeps; found once, by passes over everything."""
        if self._least is None:
            self._least = [self._threshold(k) for k in range(len(self._models))]
        return self._least

    def _threshold(self, k: int) -> float:
        if self._keeps[k] == 1.0:
            return 0.0
        model, importance = self._models[k], self._importances[k]

        def source(name: str) -> Callable[[], Iterator[Tensor]]:
            def scores() -> Iterator[Tensor]:
                for start, weights, values in zip(
                    *(chunks_of(s, name) for s in (self._base, model, importance)), strict=True
                ):
                    yield saliency(start, weights, values)

            return scores

        names = [name for name in importance if name not in self._averaged]
        total = sum(numel_of(self._base, name) for name in names)
        return threshold({name: source(name) for name in names}, math.floor(self._keeps[k] * total)).value


def _unit(mean: float) -> float:
    """Return a power of two near 1 / mean: exact to multiply by, and it takes float32 far away from its limits."""
    return float(2.0 ** min(-round(math.log2(mean)), 1000))


def _safe(value: float) -> bool:
    return _SAFE[0] < value < _SAFE[1]
