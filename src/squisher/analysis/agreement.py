"""How far two importances agree: in rank, in scale, and on which entries matter most.

Stored values of the parameters that both have are compared; convert with `imp.as_fisher()` first to compare scales. Up to
`EXACT_LIMIT` common entries everything is exact. Beyond, values are read in chunks, and ranks and the median ratio are those of
values rounded to the upper 16 bits of their float32 (relative resolution 2⁻⁷; a histogram of 32,768 bins holds all ranks).
Overlaps are exact at any size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..importance import Importance
from ..names import align
from ..order import Rounded, Selection, Source, median, ratios, spearman, thresholds, top_overlap, total
from ..storage.tensors import Progress, one_thread

__all__ = ["EXACT_LIMIT", "FRACTIONS", "Agreement", "Overlap", "Row", "compare", "json_safe"]


EXACT_LIMIT = 10_000_000
"""Up to this many common entries are kept in memory and ranked exactly."""

FRACTIONS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5)
"""The fractions of `Agreement.overlaps`."""

ROW_FRACTION = 0.1
"""The fraction of `Row.overlap`."""

_SORTED = 1 << 16
"""Up to this many entries of a tensor are sorted; for more, counting digits is faster."""


@dataclass(frozen=True)
class Row:
    """The agreement on one parameter; with the fields of `Agreement`.

    `overlap` is the overlap of the largest 10%, and nan where these include entries that are 0.
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
        overlaps: The overlap of the largest entries at several fractions; fractions of less than one entry are left out.
        rows: The agreement on each parameter.
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
        """Return the share of the k largest entries of a that are among the k largest of b; exact, computed on demand.

        Args:
            k: A number of entries (int), or a fraction of all common entries (float, rounded down, at least one entry).
                Of equal values the first are taken.

        Raises:
            SquisherError: k is neither.
        """
        return overlaps_of(self._pair.sources(0), self._pair.sources(1), [k], self.numel)[0].overlap

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values for JSON, with None for nan."""
        numbers = ("exact", "spearman", "scale", "median_ratio", "total_a", "total_b")
        plain: dict[str, Any] = {"numel": self.numel, "parameters": len(self.rows)}
        plain |= {name: getattr(self, name) for name in numbers}
        plain |= {"overlaps": list(map(asdict, self.overlaps)), "only_a": self.only_a, "only_b": self.only_b}
        return {key: json_safe(value) for key, value in {**plain, "rows": list(map(asdict, self.rows))}.items()}

    def __repr__(self) -> str:
        at = next((f", overlap at 10% {o.overlap:.3f}" for o in self.overlaps if o.fraction == ROW_FRACTION), "")
        return (
            f"Agreement(spearman {self.spearman:.3f}, scale {self.scale:.3g}, median ratio {self.median_ratio:.3g}{at}; "
            f"{len(self.rows)} parameters, {self.numel:,} values)"
        )


@one_thread()
def compare(a: Mapping[str, Tensor], b: Mapping[str, Tensor], progress: Progress | None = None) -> Agreement:
    """Compare two importances: rank, scale, and overlap of the largest entries, overall and per parameter.

    Stored values of the parameters that both have are compared. Ranks and overlaps do not depend on the scale; to compare
    scales, use `imp.as_fisher()` first.

    Args:
        a: An importance or any mapping from names to non-negative tensors; lazy ones are read in chunks.
        b: Another importance; shapes must agree.
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
        in_memory = pair.in_memory()
        whole = in_memory.joined()  # one tensor: thousands of small ones are slow
        spearman, median_ratio, rows = _exactly(in_memory, whole)
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
    """Return Spearman and median ratio over everything, and the rows, from values in memory: by name, and as one tensor."""
    rows = []
    for name in pair.names:
        x, y = (joined(pair.chunks(side, name)) for side in (0, 1))
        rows.append(_row(pair, name, spearman(x, y), median(ratios(x, y)), total(x), total(y)))
    x, y = (joined(whole.chunks(side, "all")) for side in (0, 1))
    return spearman(x, y), median(ratios(x, y)), rows


def _streamed(pair: Pair) -> tuple[float, float, list[Row]]:
    """Return the same for rounded values, in two passes over importances that need not fit into memory."""
    overall = Rounded()
    rows: dict[str, Row] = {}
    large: dict[str, Rounded] = {}
    for name in pair.names:
        rounded = Rounded()
        if pair.numels[name] <= EXACT_LIMIT:  # small enough to keep in memory for both passes and the overlap
            small = Pair({name: joined(pair.chunks(0, name))}, {name: joined(pair.chunks(1, name))})
            rounded.count(small.both(name))
            rounded.cross(small.both(name))
            rows[name] = _row(small, name, rounded.spearman(), rounded.median_ratio(), *rounded.totals)
            overall.include(rounded)
        else:
            rounded.count(pair.both(name))
            overall.include(rounded)
            large[name] = rounded.packed()
    for name in pair.names:
        if name not in large:
            overall.cross(pair.both(name))
            continue
        rounded = large.pop(name)
        for both in pair.both(name):
            overall.cross([both])
            rounded.cross([both])
        rows[name] = _row(pair, name, rounded.spearman(), rounded.median_ratio(), *rounded.totals)
    return overall.spearman(), overall.median_ratio(), [rows[name] for name in pair.names]


def _row(pair: Pair, name: str, spearman: float, median_ratio: float, total_a: float, total_b: float) -> Row:
    numel = pair.numels[name]
    overlap = math.nan
    if 0 < numel <= _SORTED:
        x, y = (joined(pair.chunks(side, name)) for side in (0, 1))
        overlap = top_overlap(x, y, _entries(ROW_FRACTION, numel))
    elif numel:
        found = overlaps_of(pair.sources(0, [name]), pair.sources(1, [name]), [ROW_FRACTION], numel)[0]
        overlap = found.overlap if found.threshold_a > 0 and found.threshold_b > 0 else math.nan
    return Row(name, numel, spearman, total_a, total_b, _ratio(total_a, total_b), median_ratio, overlap)


def _ratio(total_a: float, total_b: float) -> float:
    return total_a / total_b if total_b else math.nan


def json_safe(value: Any) -> Any:
    """Return a value without nan and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Pair:
    """The common parameters of two importances, read side by side in chunks."""

    def __init__(self, a: Mapping[str, Tensor], b: Mapping[str, Tensor], progress: Progress | None = None) -> None:
        self.sides = tuple(side if isinstance(side, Importance) else Importance(side) for side in (a, b))
        called = ("one importance", "the other")
        self.names = list(align(a, b, called, partial=True, advice="They must be of the same model."))
        self.only_a = [name for name in a if name not in b]
        self.only_b = [name for name in b if name not in a]
        self.numels = {name: math.prod(self.sides[0].shape(name)) for name in self.names}
        self.numel = sum(self.numels.values())
        self.passes = 1  # passes over both importances in all, for the progress
        self._done = 0
        self._progress = progress

    def chunks(self, side: int, name: str) -> Iterator[Tensor]:
        """Yield one tensor of one side, chunk by chunk."""
        for chunk in self.sides[side].chunks(name):
            yield chunk
            work = 2 * self.numel * self.passes
            self._done = min(self._done + chunk.numel(), work)
            if self._progress:
                self._progress(self._done, work)

    def sources(self, side: int, names: Sequence[str] | None = None) -> dict[str, Source]:
        """Return one side (or some of its names) as sources that can be read several times."""
        return {name: partial(self.chunks, side, name) for name in names or self.names}

    def both(self, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the same chunks of both sides."""
        return zip(self.chunks(0, name), self.chunks(1, name), strict=True)

    def in_memory(self) -> Pair:
        """Return the pair read into memory."""
        a, b = ({name: joined(self.chunks(side, name)) for name in self.names} for side in (0, 1))
        return Pair(a, b)

    def joined(self) -> Pair:
        """Return the pair with all its parameters joined into one tensor, in memory."""
        a, b = (joined(chunk for name in self.names for chunk in self.chunks(side, name)) for side in (0, 1))
        return Pair({"all": a}, {"all": b})

    def finish(self) -> None:
        """Report all work as done."""
        work = 2 * self.numel * self.passes
        if self._progress and self._done < work:
            self._progress(work, work)
        self._progress = None


def joined(chunks: Iterable[Tensor]) -> Tensor:
    """Join chunks into one tensor."""
    listed = list(chunks)
    return torch.cat(listed) if listed else torch.zeros(0)


@dataclass(frozen=True)
class Overlap:
    """How many of the k largest entries two importances have in common.

    Attributes:
        fraction: k relative to the number of common entries.
        k: How many of the largest entries were taken of each.
        overlap: The share of k that is in both.
        chance: What two unrelated importances share on average: k/n.
        threshold_a: The k-th largest value of a. If it is 0, some of the k have no importance and are taken by position, so that
            the overlap says little.
        threshold_b: The k-th largest value of b.
    """

    fraction: float
    k: int
    overlap: float
    chance: float
    threshold_a: float
    threshold_b: float


def overlaps_of(
    a: Mapping[str, Source], b: Mapping[str, Source], sizes: Sequence[float | int], numel: int
) -> list[Overlap]:
    """Return the overlaps at several k, each a fraction or a count, in as many passes as one k takes."""
    ks = [_entries(size, numel) for size in sizes]
    kth_a, kth_b = thresholds(a, ks), thresholds(b, ks)
    chosen = [(Selection(of_a), Selection(of_b)) for of_a, of_b in zip(kth_a, kth_b, strict=True)]
    common = [0] * len(ks)
    for name in a:
        for x, y in zip(a[name](), b[name](), strict=True):
            for place, (in_a, in_b) in enumerate(chosen):
                common[place] += int((in_a(x) & in_b(y)).sum())
    return [
        Overlap(
            fraction=size if isinstance(size, float) else k / numel,
            k=k,
            overlap=shared / k,
            chance=k / numel,
            threshold_a=of_a.value,
            threshold_b=of_b.value,
        )
        for size, k, shared, of_a, of_b in zip(sizes, ks, common, kth_a, kth_b, strict=True)
    ]


def _entries(size: float | int, numel: int) -> int:
    if isinstance(size, float) and 0 < size <= 1:
        return max(1, math.floor(size * numel))
    if isinstance(size, int) and not isinstance(size, bool) and 1 <= size <= numel:
        return size
    raise ArgumentError(
        f"overlap(k) takes a fraction (a float between 0 and 1) or a number of entries (1 to {numel:,}), not {size!r}."
    )
