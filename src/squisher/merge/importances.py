"""The importances of a merge: matched to the weights by name, on one scale, with the sums that floors and norms need."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
from torch import Tensor

from ..errors import NamingError, ScaleError, SquisherError, SquisherWarning, near
from ..importance import Absence, Importance, check_values, on_common_scale
from ..names import check_like, find
from ..storage.tensors import CHUNK, Computed, chunks_of, numel_of

__all__ = ["Graded", "graded", "matched", "tied_in"]

_ROW = 4096


class Graded(Computed):
    """One importance under the names of the weights; `factor` brings its stored values to the common scale."""

    def __init__(self, stored: Mapping[str, Tensor], names: Mapping[str, str], factor: float, who: str):
        super().__init__(stored, dict(names))
        self._who = who
        self._stored = stored
        self.factor = factor
        self._sums: dict[str, tuple[float, float]] = {}

    def __getitem__(self, name: str) -> Tensor:
        with self._named():
            values = self._stored[self._name_there(name)]
            check_values(name, values)
        return values

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[Tensor]:
        """Return the stored values in flat pieces, each checked."""
        checked = isinstance(self._stored, Importance)  # by itself
        with self._named():
            for piece in chunks_of(self._stored, self._name_there(name), size):
                if not checked:
                    check_values(name, piece)
                yield piece

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Says whose values are bad; what is wrong with a file says so itself."""
        try:
            yield
        except SquisherError as error:
            raise (SquisherError(f"In {self._who}: {error}") if type(error) is SquisherError else error) from None

    def sums(self, name: str) -> tuple[float, float]:
        """Sum and sum of squares on the common scale: from the file where it has them, otherwise by one pass, once."""
        if name not in self._sums:
            p = self._stored.provenance if isinstance(self._stored, Importance) else None
            own = self._name_there(name)
            if p is not None and own in p.sum and own in p.sum_of_squares:
                total, squares = p.sum[own], p.sum_of_squares[own]
            else:
                total, squares = _pass_over(self.chunks(name))
            self._sums[name] = (total * self.factor, squares * self.factor * self.factor)
        return self._sums[name]

    def norm(self, names: Sequence[str], kind: str) -> float:
        """Return the mean or the L2 norm over several tensors.

        Raises:
            SquisherError: It is 0, so that nothing can be divided by it.
        """
        if kind == "mean":
            count = sum(math.prod(self.shape(name)) for name in names)
            value = math.fsum(self.sums(name)[0] for name in names) / max(count, 1)
        else:
            value = math.sqrt(math.fsum(self.sums(name)[1] for name in names))
        if not value > 0:
            raise SquisherError(f"An importance is 0 everywhere and has no {kind} to be normalized by.")
        return value


def _pass_over(pieces: Iterator[Tensor]) -> tuple[float, float]:
    # Rows of fixed length and numpy: the same result, and no stalled threads, however many the machine has.
    totals, squares = [], []
    for piece in pieces:
        for start in range(0, piece.numel(), _ROW):
            row = np.asarray(piece[start : start + _ROW].double())
            totals.append(float(row.sum()))
            squares.append(float(np.dot(row, row)))
    return math.fsum(totals), math.fsum(squares)


def graded(
    importances: Sequence[Mapping[str, Tensor]],
    names: Sequence[Mapping[str, str]],
    scale: str,
    who: Sequence[str],
    dropped: bool = False,
) -> list[Graded]:
    """Return importances on one common scale.

    The factor of the scale is kept apart from the values, so that it costs nothing to apply.

    Args:
        importances: Those that take part.
        names: For each one the names of its tensors, by weight name.
        scale: `auto`, `as_fisher` or `stored`.
        who: What the importances are called in messages.
        dropped: Whether the user gave more than these.

    Raises:
        ScaleError: They have no common scale.
    """
    try:
        common = on_common_scale(importances, scale)
    except ScaleError as error:
        raise (ScaleError(f"{error} (Models with a coefficient of 0 are not counted.)") if dropped else error) from None
    out = []
    for stored, converted, own, called in zip(importances, common, names, who, strict=True):
        factor = 1.0
        if isinstance(stored, Importance) and isinstance(converted, Importance):
            factor = converted.provenance.scale / stored.provenance.scale
        out.append(Graded(stored, own, factor, called))
    return out


def tied_in(importances: Sequence[Mapping[str, Tensor]]) -> dict[str, str]:
    """Which names are one parameter, by what the importances know: alias to name."""
    out: dict[str, str] = {}
    for imp in importances:
        if isinstance(imp, Importance):
            out |= imp.provenance.tied
    return out


def matched(
    weights: Mapping[str, Tensor],
    merged: Sequence[str],
    tied: Mapping[str, str],
    importances: Sequence[Mapping[str, Tensor]],
    missing: str,
    who: Sequence[str],
) -> tuple[list[dict[str, str]], dict[str, str]]:
    """For every importance the names of its tensors by weight name; and the weights that have none, with the reason.

    Args:
        weights: A model, for shapes.
        merged: Names of the weights to be merged.
        tied: Other names of the same tensors: alias to name.
        importances: One a model.
        missing: `error` or `average`.
        who: What the importances are called in messages.

    Raises:
        NamingError: A weight has no importance, a shape differs, or most weights have none.
    """
    if missing not in ("error", "average"):
        raise SquisherError(f"missing is error or average, not {missing!r}.")
    found: list[dict[str, str]] = [{} for _ in importances]
    averaged: dict[str, str] = {}
    unexplained: list[str] = []
    for name in merged:
        here = [_name_in(imp, name, tied) for imp in importances]
        reasons = [_absent(imp).get(name) for imp in importances]
        if None not in here:
            for own, imp, called, table in zip(here, importances, who, found, strict=True):
                if own is not None:
                    check_like(weights, name, imp, own, ("the models", called))
                    table[name] = own
        elif None not in reasons:
            averaged[name] = str(reasons[0])
        else:
            unexplained.append(name)
            averaged[name] = "no importance"
    _check_coverage(weights, merged, averaged, unexplained, importances, missing, who)
    return found, averaged


def _check_coverage(
    weights: Mapping[str, Tensor],
    merged: Sequence[str],
    averaged: Mapping[str, str],
    unexplained: Sequence[str],
    importances: Sequence[Mapping[str, Tensor]],
    missing: str,
    who: Sequence[str],
) -> None:
    total = sum(numel_of(weights, name) for name in merged)
    without = sum(numel_of(weights, name) for name in averaged)
    lost = sum(numel_of(weights, name) for name in unexplained)
    if unexplained:
        name = unexplained[0]
        k = next(k for k, imp in enumerate(importances) if _name_in(imp, name, {}) is None)
        example = f"{name!r}, for example, is not in {who[k]}.{near(name, importances[k])}"
        if without == total or 2 * lost > total:
            raise NamingError(
                f"Only {total - without:,} of {total:,} values have an importance in every model: these importances are not "
                f"those of these models, or their names differ. {example}"
            )
        if missing == "error":
            raise NamingError(
                f"{len(unexplained)} of {len(merged)} weights have no importance: {example} Average these with missing='average', or "
                "leave them out with exclude."
            )
    elif without == total:
        raise NamingError(
            "The importances list every weight as absent, so nothing says how to weight the models: use the average, or an "
            "importance of what was trained."
        )
    if 2 * without > total:
        warnings.warn(
            f"{without:,} of {total:,} values have no importance and are averaged; {len(averaged)} tensors, for example "
            f"{next(iter(averaged))!r} ({next(iter(averaged.values()))}).",
            SquisherWarning,
            stacklevel=4,
        )


def _name_in(imp: Mapping[str, Tensor], name: str, tied: Mapping[str, str]) -> str | None:
    own = imp.provenance.tied if isinstance(imp, Importance) else {}
    return find(name, imp, {**tied, **own})


def _absent(imp: Mapping[str, Tensor]) -> Mapping[str, Absence]:
    return imp.provenance.absent if isinstance(imp, Importance) else {}
