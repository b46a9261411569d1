"""Numbers as people read them. `page.js` has the same four functions; a browser test holds them together.

Halves are rounded up, as JavaScript does, so that a table reads the same before and after it was sorted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

__all__ = ["fixed", "formatted", "number", "power_of_ten", "share", "whole"]

MISSING = "–"
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits: `0.0123`, `12.3`, `1.23e-7`."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    exact = Decimal(value)
    rounded = exact.quantize(Decimal((0, (1,), exact.adjusted() - digits + 1)), ROUND_HALF_UP)
    exponent = rounded.adjusted()
    if -4 <= exponent < 6:
        text = f"{rounded:f}"
        return text.rstrip("0").rstrip(".") if "." in text else f"{int(rounded):,}"
    mantissa = f"{rounded.scaleb(-exponent):f}"
    return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{exponent}"


def fixed(value: float | None, places: int = 3) -> str:
    """Three places after the point."""
    if value is None or not math.isfinite(value):
        return MISSING
    rounded = Decimal(value).quantize(Decimal((0, (1,), -places)), ROUND_HALF_UP)
    return f"{abs(rounded):f}" if rounded == 0 else f"{rounded:f}"


def share(value: float | None) -> str:
    """Return a share in percent, with three digits; never 0% or 100% unless it is."""
    if value is None or not math.isfinite(value):
        return MISSING
    if 0.9995 <= value < 1:  # what is missing to the whole is what matters
        return f"{fixed(100 * value)}%" if value < 0.999995 else ">99.999%"
    if 0 < value < 1e-6:
        return "<0.0001%"
    return f"{number(100 * value)}%"


def whole(value: int | None) -> str:
    """Return a count, with commas between thousands."""
    return MISSING if value is None else f"{value:,}"


def formatted(value: Any, kind: str) -> str:
    """Return a value of a table's column: `text`, `whole`, `number`, `fixed` or `share`."""
    if kind == "text":
        return "" if value is None else str(value)
    write: dict[str, Callable[[Any], str]] = {"whole": whole, "number": number, "fixed": fixed, "share": share}
    return write[kind](value)


def power_of_ten(exponent: float) -> str:
    """`10⁻⁷`, for an axis."""
    return "1" if exponent == 0 else f"10{f'{exponent:g}'.translate(_SUPERSCRIPTS)}"
