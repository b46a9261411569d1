"""The scale rule of everything that combines several importances, in one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ..errors import ScaleError, SquisherError
from .checks import Checked
from .core import Importance
from .provenance import scale_differences

__all__ = ["checked", "on_common_scale"]


def on_common_scale(importances: Sequence[Mapping[str, Tensor]], scale: str = "auto") -> list[Mapping[str, Tensor]]:
    """Return importances that may be added to one another: the scale rule of everything that combines several.

    Args:
        importances: Importances or plain mappings.
        scale: `"as_fisher"` converts all; `"stored"` takes all as they are; `"auto"` converts if all can be, takes them
            as they are if none can be and nothing known about them differs, and refuses otherwise.

    Raises:
        ScaleError: They have no common scale; the message says what differs.
    """
    if scale not in ("auto", "stored", "as_fisher"):
        raise SquisherError(f"scale is auto, stored or as_fisher, not {scale!r}.")
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
    """Return an importance as it is, and a plain mapping so that NaN, infinite and negative values are refused on reading."""
    return importance if isinstance(importance, Importance) else Checked(importance)


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
    raise ScaleError(f"The importances are per {' and per '.join(map(str, units))}, which have no common scale.")
