"""Several importances together: their common scale, and their weighted mean."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, NamingError, ScaleError, SquisherError, check_choice
from ..names import align, excluded
from ..storage.tensors import CHUNK, Computed
from .checks import Checked
from .core import Importance
from .provenance import Codec, Provenance, scale_differences

__all__ = ["Mean", "Spread", "checked", "known_of_all", "on_common_scale", "tied_in", "with_shares", "without"]


def on_common_scale(importances: Sequence[Mapping[str, Tensor]], scale: str = "auto") -> list[Mapping[str, Tensor]]:
    """Return importances that may be added to one another: the scale rule for everything that combines several.

    Args:
        importances: Importances or plain mappings.
        scale: `"as_fisher"` converts all; `"stored"` takes all as they are; `"auto"` converts if all can be, takes them
            as they are if none can be and nothing known about them differs, and refuses otherwise.

    Raises:
        ScaleError: They have no common scale; the message says what differs.
    """
    check_choice("scale", scale, ("auto", "stored", "as_fisher"))
    if scale == "stored":
        return [checked(imp) for imp in importances]
    converted: list[Importance | ScaleError] = [_converted(imp) for imp in importances]
    fishers = [c for c in converted if isinstance(c, Importance)]
    failures = [(k, c) for k, c in enumerate(converted) if isinstance(c, ScaleError)]
    if not failures:
        return list(_one_unit(fishers))
    if scale == "as_fisher":
        k, error = failures[0]
        raise ScaleError(f"Importance {k + 1} of {len(converted)} cannot be brought to the scale of a Fisher: {error}")
    if fishers:
        k, error = failures[0]
        raise ScaleError(
            f"{len(fishers)} of {len(converted)} importances can be brought to the scale of a Fisher, but number {k + 1} "
            f"cannot: {error} Supply that, or pass scale='stored' to combine the numbers as they are."
        )
    differing = scale_differences([imp.provenance for imp in importances if isinstance(imp, Importance)])
    if differing:
        raise ScaleError(
            f"The importances differ in {', '.join(differing)} and cannot be brought to the scale of a Fisher: "
            f"{failures[0][1]} Supply that, or pass scale='stored' to combine the numbers as they are."
        )
    return [checked(imp) for imp in importances]


def checked(importance: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return an importance as it is, and a plain mapping so that invalid values are refused when they are read.

    Raises:
        SquisherError: It is not a mapping.
    """
    if not isinstance(importance, Mapping):
        raise SquisherError(f"An importance maps names to tensors; got a {type(importance).__name__}.")
    return importance if isinstance(importance, Importance) else Checked(importance)


def without(importance: Importance, exclude: str | None) -> Importance:
    """Return an importance without the parameters whose names a regular expression matches.

    Raises:
        ArgumentError: It is not a regular expression.
        NamingError: Nothing is left.
    """
    left_out = excluded(exclude, importance)
    if not left_out:
        return importance
    if len(left_out) == len(importance):
        raise NamingError(
            f"Nothing of the importance is left: {exclude!r} excludes all of its {len(importance)} parameters."
        )
    return importance.restrict(lambda name: name not in left_out)


def tied_in(importances: Sequence[Mapping[str, Tensor]]) -> dict[str, str]:
    """Return the tied names that the importances know: alias to name."""
    known = [imp.provenance.tied for imp in importances if isinstance(imp, Importance)]
    return {alias: name for tied in known for alias, name in tied.items()}


def _converted(imp: Mapping[str, Tensor]) -> Importance | ScaleError:
    if not isinstance(imp, Importance):
        return ScaleError("it is a plain mapping without provenance; wrap it in squisher.Importance(...).")
    try:
        return imp.as_fisher()
    except ScaleError as error:
        return error


def _one_unit(fishers: list[Importance]) -> list[Importance]:
    units = list(dict.fromkeys(imp.provenance.unit for imp in fishers))
    if len(units) <= 1:
        return fishers
    for unit in units:
        try:
            return [imp.as_fisher(unit) for imp in fishers]
        except ScaleError:
            continue
    raise ScaleError(
        f"The importances are per {' and per '.join(map(str, units))}, which have no common scale. Measure one of them like the other, or "
        "pass scale='stored' to combine the numbers as they are."
    )


class Mean(Computed):
    """The weighted mean of several importances, computed when asked for."""

    def __init__(self, importances: Sequence[tuple[Importance, float]]):
        super().__init__(importances[0][0])
        self._importances = [imp for imp, _ in importances]
        self._weights = [weight for _, weight in importances]

    def __getitem__(self, name: str) -> Tensor:
        return self._of(name, [imp[name] for imp in self._importances])

    def dtype(self, name: str) -> torch.dtype:
        """Return float64 where one of the importances has it, and float32 otherwise."""
        kinds = [imp.dtype(name) for imp in self._importances]
        return torch.float64 if torch.float64 in kinds else torch.float32

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[Tensor]:
        """Yield one tensor in flat chunks, in order."""
        for chunks in zip(*(imp.chunks(name, size) for imp in self._importances), strict=True):
            yield self._of(name, chunks)

    def _of(self, name: str, values: Sequence[Tensor]) -> Tensor:
        kind = self.dtype(name)
        pairs = zip(self._weights, values, strict=True)
        return torch.stack([weight * value.to(kind) for weight, value in pairs]).sum(0)


class Spread(Mean):
    """The standard error of each entry of the mean, from how far the importances differ."""

    def dtype(self, name: str) -> torch.dtype:
        """Return float32: errors are not known to more digits."""
        return torch.float32

    def _of(self, name: str, values: Sequence[Tensor]) -> Tensor:
        stacked = torch.stack([value.double() for value in values])
        shares = torch.tensor(self._weights, dtype=torch.float64, device=stacked.device)
        shares = shares.view(-1, *[1] * (stacked.dim() - 1))
        mean = (shares * stacked).sum(0)
        count = len(values)
        return (count / (count - 1) * (shares * (stacked - mean)).square().sum(0)).sqrt().float()


def weights_of(importances: Sequence[Importance], weights: str | Sequence[float]) -> list[float]:
    """Return one positive number each; see `Importance.combine`."""
    if weights == "equal":
        return [1.0] * len(importances)
    if weights == "examples":
        counts = []
        for k, p in enumerate(imp.provenance for imp in importances):
            what = "tokens" if p.kind == "fisher" and p.unit == "token" else "examples"
            counts.append(float(getattr(p, what) or 0))
            if not counts[-1]:
                raise SquisherError(
                    f"Importance {k + 1} does not say how many {what} it saw; pass weights='equal' or one number each."
                )
        return counts
    if isinstance(weights, str):
        raise ArgumentError(f"weights is 'examples', 'equal' or one number each, not {weights!r}.")
    if len(weights) != len(importances) or not all(math.isfinite(w) and w > 0 for w in weights):
        raise ArgumentError(f"combine needs {len(importances)} positive weights, but got {list(weights)}.")
    return [float(w) for w in weights]


def with_shares(importances: Sequence[Importance], weights: str | Sequence[float]) -> list[tuple[Importance, float]]:
    """Return each importance with its share of the mean; refuse those that cannot be averaged."""
    if not importances:
        raise SquisherError("combine needs at least one importance, but got none.")
    for importance in importances:
        if not isinstance(importance, Importance):
            raise SquisherError(
                f"combine takes importances, and a {type(importance).__name__} does not say what it is: wrap it in squisher.Importance(...)."
            )
    first = importances[0]
    for other in importances[1:]:
        align(first, other, ("one importance", "the other"), both=True)
        differing = scale_differences([first.provenance, other.provenance])
        if differing:
            raise ScaleError(f"Cannot combine importances that differ in {', '.join(differing)}.")
    factors = weights_of(importances, weights)
    total = math.fsum(factors)
    return [(imp, factor / total) for imp, factor in zip(importances, factors, strict=True)]


def known_of_all(parts: Sequence[Provenance]) -> Provenance:
    """Return the provenance of a mean: what all of them say, and what pollutes any of them."""
    first = parts[0]
    kept: dict[str, Any] = {}
    for f in fields(first):
        value = getattr(first, f.name)
        if isinstance(value, dict):
            kept[f.name] = _agreed([getattr(p, f.name) or {} for p in parts])
        elif all(getattr(p, f.name) == value for p in parts):
            kept[f.name] = value
    for union in ("absent", "tied", "live_names"):
        kept[union] = {name: one for p in reversed(parts) for name, one in getattr(p, union).items()}
    counts = [p.examples for p in parts], [p.tokens for p in parts]
    kept["examples"], kept["tokens"] = (sum(c for c in found if c) if all(found) else None for found in counts)
    types = {one for p in parts for one in (p.dtype_of_source or "").split("+") if one}
    codecs = [name for p in parts if p.codec for name in (*p.codec.before, p.codec.name) if name != "exact"]
    kept |= {
        "kind": first.kind,
        "scale": first.scale,
        "pollution": tuple(dict.fromkeys(one for p in parts for one in p.pollution)),
        "after_clipping": True if any(p.after_clipping for p in parts) else kept.get("after_clipping"),
        "dtype_of_source": "+".join(sorted(types)) or None,
        "codec": Codec("exact", before=tuple(dict.fromkeys(codecs))) if codecs else None,
        "standard_error": None,
        "sum": {},
        "sum_of_squares": {},
    }
    return Provenance(**kept)


def _agreed(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the entries on which all records agree, also inside of nested records."""
    first, out = records[0], {}
    for key, value in first.items():
        found = [record.get(key) for record in records]
        if isinstance(value, Mapping) and all(isinstance(one, Mapping) for one in found):
            out[key] = _agreed([one for one in found if isinstance(one, Mapping)])
        elif all(one == value for one in found):
            out[key] = value
    return out
