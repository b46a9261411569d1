"""The comparison: exact in memory, or with rounded ranks over what need not fit into it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from ...order.correlation import Rounded, median, ratios, spearman, total
from ...storage.tensors import one_thread
from .overlap import Overlap, overlap_by_sorting, overlaps_of
from .pair import Pair, Progress, joined

__all__ = ["EXACT_LIMIT", "FRACTIONS", "Agreement", "Row", "compare"]

EXACT_LIMIT = 10_000_000
"""Up to this many common entries are held in memory and ranked exactly."""

FRACTIONS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5)
"""Where `Agreement.overlaps` looks."""

ROW_FRACTION = 0.1
"""Where `Row.overlap` looks."""

_SORTED = 1 << 16
"""Up to this many entries of a tensor are sorted; beyond, counting digits is faster."""


@dataclass(frozen=True)
class Row:
    """The agreement on one parameter; the fields are those of `Agreement`.

    `overlap` is that of the largest 10%, and nan where this reaches into entries that are 0.
    """

    name: str
    numel: int
    spearman: float
    total_a: float
    total_b: float
    scale: float
    median_ratio: float
    overlap: float


@dataclass(frozen=True)
class Agreement:
    """How far two importances, a and b, agree on the parameters that both have.

    Attributes:
        spearman: Rank correlation over all common entries, mid-ranks for ties; nan where a or b is constant.
        scale: The total of a divided by the total of b; nan where the total of b is 0.
        median_ratio: The median of a/b over the entries where both are at least 1.2e-38 (the middle one; of two middle
            ones the geometric mean, so that exchanging a and b inverts it); nan where there are none.
        overlaps: The overlap of the largest entries at several fractions; those of less than one entry are left out.
        rows: The same for each parameter.
        numel: Number of common entries.
        total_a: Sum of a over the common entries.
        total_b: Sum of b.
        only_a: Names that b does not have; they are left out.
        only_b: Names that a does not have.
        exact: False where ranks and median ratios are of values rounded to 16 bits.
    """

    spearman: float
    scale: float
    median_ratio: float
    overlaps: list[Overlap]
    rows: list[Row]
    numel: int
    total_a: float
    total_b: float
    only_a: list[str]
    only_b: list[str]
    exact: bool
    _pair: Pair = field(repr=False, compare=False)

    def overlap(self, k: float | int) -> float:
        """Return the share of the k largest entries of a that are among the k largest of b; exact, and computed when asked.

        Args:
            k: A number of entries (int), or a fraction of all common entries (float, rounded down, at least one entry).
                Of equal values the first are taken.

        Raises:
            SquisherError: k is neither.
        """
        return overlaps_of(self._pair.sources(0), self._pair.sources(1), [k], self.numel)[0].overlap

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values for JSON; what is not defined (nan) is None."""
        plain = {
            "numel": self.numel,
            "parameters": len(self.rows),
            "exact": self.exact,
            "spearman": self.spearman,
            "scale": self.scale,
            "median_ratio": self.median_ratio,
            "total_a": self.total_a,
            "total_b": self.total_b,
            "overlaps": [asdict(overlap) for overlap in self.overlaps],
            "only_a": self.only_a,
            "only_b": self.only_b,
            "rows": [asdict(row) for row in self.rows],
        }
        return {key: _plain(value) for key, value in plain.items()}

    def __repr__(self) -> str:
        at = next((f", overlap at 10% {o.overlap:.3f}" for o in self.overlaps if o.fraction == ROW_FRACTION), "")
        return (
            f"Agreement(spearman {self.spearman:.3f}, scale {self.scale:.3g}, median ratio {self.median_ratio:.3g}{at}; "
            f"{len(self.rows)} parameters, {self.numel:,} values)"
        )


@one_thread()
def compare(a: Mapping[str, Tensor], b: Mapping[str, Tensor], progress: Progress | None = None) -> Agreement:
    """Compare two importances: rank, scale, and overlap of the largest entries, overall and per parameter.

    Stored values are compared, of the parameters that both have. Ranks and overlaps do not depend on the scale; to
    compare scales, use `imp.as_fisher()` first.

    Args:
        a: An importance or any mapping from names to non-negative tensors; lazy ones are read in pieces.
        b: Another one. Shapes must agree.
        progress: Called with the number of entries done and in all.

    Returns:
        The agreement; beyond 10 million common entries with ranks of rounded values, see the module.

    Raises:
        SquisherError: No common name, shapes that differ, NaN, infinite or negative values.
    """
    pair = Pair(a, b, progress)
    exact = pair.numel <= EXACT_LIMIT
    # Beyond the limit: one pass for histograms, one for cross sums, two for thresholds, one for overlaps.
    pair.passes = 1 if exact else 5
    whole = pair
    if exact:
        held = pair.in_memory()
        whole = held.joined()  # one tensor, because thousands of small ones take their time
        spearman, median_ratio, rows = _exactly(held, whole)
    else:
        spearman, median_ratio, rows = _streamed(pair)
    fractions = [fraction for fraction in FRACTIONS if fraction * pair.numel >= 1]
    overlaps = overlaps_of(whole.sources(0), whole.sources(1), fractions, pair.numel)
    total_a, total_b = math.fsum(row.total_a for row in rows), math.fsum(row.total_b for row in rows)
    pair.finish()
    return Agreement(
        spearman=spearman,
        scale=_ratio(total_a, total_b),
        median_ratio=median_ratio,
        overlaps=overlaps,
        rows=rows,
        numel=pair.numel,
        total_a=total_a,
        total_b=total_b,
        only_a=pair.only_a,
        only_b=pair.only_b,
        exact=exact,
        _pair=pair,
    )


def _exactly(pair: Pair, whole: Pair) -> tuple[float, float, list[Row]]:
    """Spearman and median ratio over everything, and the rows; all values are in memory, by name and as one tensor."""
    rows = []
    for name in pair.names:
        x, y = (joined(pair.pieces(side, name)) for side in (0, 1))
        rows.append(_row(pair, name, spearman(x, y), median(ratios(x, y)), total(x), total(y)))
    x, y = (joined(whole.pieces(side, "all")) for side in (0, 1))
    return spearman(x, y), median(ratios(x, y)), rows


def _streamed(pair: Pair) -> tuple[float, float, list[Row]]:
    """Return the same of rounded values, in two passes over what need not fit into memory."""
    overall = Rounded()
    rows: dict[str, Row] = {}
    large: dict[str, Rounded] = {}
    for name in pair.names:
        own = Rounded()
        if pair.numels[name] <= EXACT_LIMIT:  # held, so that its own ranks and overlap need no other reading
            held = Pair({name: joined(pair.pieces(0, name))}, {name: joined(pair.pieces(1, name))})
            own.count(held.both(name))
            own.cross(held.both(name))
            rows[name] = _row(held, name, own.spearman(), own.median_ratio(), *own.totals)
            overall.include(own)
        else:
            own.count(pair.both(name))
            overall.include(own)
            large[name] = own.packed()
    for name in pair.names:
        if name not in large:
            overall.cross(pair.both(name))
            continue
        own = large.pop(name)
        for both in pair.both(name):
            overall.cross([both])
            own.cross([both])
        rows[name] = _row(pair, name, own.spearman(), own.median_ratio(), *own.totals)
    return overall.spearman(), overall.median_ratio(), [rows[name] for name in pair.names]


def _row(pair: Pair, name: str, spearman: float, median_ratio: float, total_a: float, total_b: float) -> Row:
    numel = pair.numels[name]
    overlap = math.nan
    if 0 < numel <= _SORTED:
        x, y = (joined(pair.pieces(side, name)) for side in (0, 1))
        overlap = overlap_by_sorting(x, y, ROW_FRACTION)
    elif numel:
        found = overlaps_of(pair.sources(0, [name]), pair.sources(1, [name]), [ROW_FRACTION], numel)[0]
        overlap = found.overlap if found.threshold_a > 0 and found.threshold_b > 0 else math.nan
    return Row(name, numel, spearman, total_a, total_b, _ratio(total_a, total_b), median_ratio, overlap)


def _ratio(total_a: float, total_b: float) -> float:
    return total_a / total_b if total_b else math.nan


def _plain(value: Any) -> Any:
    """Without nan and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
