"""How a file keeps its values, and what that costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from ..errors import SquisherError
from ..order import spearman
from ..storage.codecs import Encoded
from ..storage.safetensors import WIDEST, rounded

__all__ = ["Codec"]

_OVERLAPS = (0.005, 0.1, 0.5)


@dataclass(frozen=True)
class Codec:
    """How values are kept, and how far the decoded ones are from what they were.

    Attributes:
        name: `exact`, `log8` or `rank1`.
        spearman: Rank correlation of decoded values with those before.
        overlap: What the largest 0.5%, 10% and 50% of both have in common; a fraction of them.
        scale: The total of all decoded values, as a fraction of the total before.
        entries: How many entries the others were measured on, spread evenly over all.
        before: Codecs that the values went through before this one.
    """

    name: str
    spearman: float | None = None
    overlap: Mapping[str, float | None] = field(default_factory=dict)
    scale: float | None = None
    entries: int | None = None
    before: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return hash((self.name, self.spearman, self.scale, self.entries, self.before))

    def __str__(self) -> str:
        return self.name

    @classmethod
    def read(cls, value: Any) -> Codec:
        """Return a codec from itself, from its name, or from JSON; keys of later versions are left out."""
        if isinstance(value, cls):
            return value
        value = {"name": value} if isinstance(value, str) else value
        if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
            raise SquisherError(f"The provenance has {value!r} where a codec and its error belong.")
        known = {key: one for key, one in value.items() if key in {f.name for f in fields(cls)}}
        return cls(**{**known, "before": tuple(value.get("before") or ())})

    def plain(self) -> dict[str, Any]:
        """Return it as JSON."""
        found = {key: one for key, one in asdict(self).items() if one not in (None, {}, ())}
        return {**found, "before": list(self.before)} if self.before else found

    def then(self, name: str) -> Codec | None:
        """Return how values are kept that were kept like this before; None for what was always exact."""
        before = self.before + ((self.name,) if self.name != "exact" else ())
        return None if name == "exact" and not before else Codec(name, before=before)

    def widest(self, encoded: Encoded) -> dict[str, Any]:
        """Return metadata whose JSON is at least as long as that of `measured`."""
        error = {
            "spearman": WIDEST,
            "overlap": {str(size): WIDEST for size in _OVERLAPS},
            "scale": WIDEST,
            "entries": 10**18,
        }
        each = dict.fromkeys(encoded.sources, WIDEST)
        return {"codec": {**self.plain(), **error}, "sum": each, "sum_of_squares": each}

    def measured(self, encoded: Encoded) -> dict[str, Any]:
        """Return the error and the sums of what has been encoded and written, as metadata."""
        before, after = encoded.sample()
        total = math.fsum(encoded.totals.values())
        error = {
            "spearman": _known(spearman(before, after)),
            "overlap": {str(size): _known(_overlap(before, after, size)) for size in _OVERLAPS},
            "scale": _known(math.fsum(both[0] for both in encoded.sums.values()) / total) if total else None,
            "entries": before.numel(),
        }
        found = {key: one for key, one in error.items() if one is not None}
        sums = [{name: rounded([both[k]]) for name, both in encoded.sums.items()} for k in (0, 1)]
        return {"codec": {**self.plain(), **found}, "sum": sums[0], "sum_of_squares": sums[1]}


def _known(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _overlap(x: Tensor, y: Tensor, size: float) -> float:
    """Return the fraction of the largest entries that both sides share; equal ones are taken in order. nan where it reaches into zeros."""
    k = max(1, math.floor(size * x.numel()))
    if not x.numel():
        return math.nan
    (values_x, order_x), (values_y, order_y) = (side.sort(descending=True, stable=True) for side in (x, y))
    if not (values_x[k - 1] > 0 and values_y[k - 1] > 0):
        return math.nan
    chosen = x.new_zeros(x.numel(), dtype=torch.bool)
    chosen[order_x[:k]] = True
    return int(chosen[order_y[:k]].sum()) / k
