"""From values to places and colours: linear and logarithmic axes, their ticks, and one colour scale.

The colours run from yellow over green to dark blue in steps of equal lightness (in OKLab), so that they keep their order for
colour-blind readers and in grey. On a dark page the order is reversed: what is large always stands out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from .numbers import number, power_of_ten, share

__all__ = ["STEPS", "Axis", "colour_steps", "domain_of"]

STEPS = 24
"""Colours of the scale; the classes `q0` to `q23` of the page's style."""


@dataclass(frozen=True)
class Axis:
    """One direction of a chart.

    Attributes:
        label: What it shows, with the unit.
        low: The value at its beginning.
        high: The value at its end.
        log: Whether it is logarithmic; then both are above 0.
        kind: How its ticks are written: `number` or `share`.
    """

    label: str
    low: float
    high: float
    log: bool = False
    kind: str = "number"

    def part(self, value: float) -> float:
        """Where a value stands, from 0 to 1."""
        low, high, at = (
            (math.log10(v) for v in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        )
        return (at - low) / (high - low) if high > low else 0.5

    def ticks(self, count: int = 6) -> list[tuple[float, str]]:
        """Round values within the axis, and how they are written."""
        if self.log:
            return self._powers(count)
        step = _round_step((self.high - self.low) / max(1, count))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        values = [k * step for k in range(first, last + 1)]
        return [(value, self._text(value)) for value in values]

    def _powers(self, count: int) -> list[tuple[float, str]]:
        low, high = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        every = max(1, math.ceil((high - low + 1) / count))
        powers = [k for k in range(low, high + 1) if k % every == 0]
        if self.kind == "share":
            return [(10.0**k, share(10.0**k)) for k in powers]
        return [(10.0**k, power_of_ten(k)) for k in powers]

    def _text(self, value: float) -> str:
        rounded = float(f"{value:.10g}")
        return share(rounded) if self.kind == "share" else number(rounded)


def domain_of(values: Iterable[float | None], log: bool = False) -> tuple[float, float]:
    """Return the smallest and the largest of the values that an axis can show; a little room where they are one."""
    shown = [v for v in values if v is not None and math.isfinite(v) and (v > 0 or not log)]
    if not shown:
        return (0.1, 1.0) if log else (0.0, 1.0)
    low, high = min(shown), max(shown)
    if low == high:
        return (low / 2, high * 2) if log else (low - 0.5, high + 0.5)
    return low, high


def _round_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least)) if least > 0 else 1.0
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least * 0.999)


_ANCHORS = (
    (0.955, 0.075, 104.0),
    (0.80, 0.125, 150.0),
    (0.62, 0.105, 200.0),
    (0.46, 0.115, 255.0),
    (0.27, 0.10, 288.0),
)
"""Lightness, chroma and hue of the scale, from low to high."""


def colour_steps() -> list[str]:
    """Return the colours of the scale on a light page, from low to high."""
    colours = []
    for step in range(STEPS):
        at = step / (STEPS - 1) * (len(_ANCHORS) - 1)
        k = min(int(at), len(_ANCHORS) - 2)
        lightness, chroma, hue = (a + (b - a) * (at - k) for a, b in zip(_ANCHORS[k], _ANCHORS[k + 1], strict=True))
        colours.append(_hex(lightness, chroma, math.radians(hue)))
    return colours


def _hex(lightness: float, chroma: float, hue: float) -> str:
    """Return an sRGB colour from OKLab; what the screen cannot show is cut."""
    a, b = chroma * math.cos(hue), chroma * math.sin(hue)
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    return "#" + "".join(f"{round(255 * _gamma(min(1.0, max(0.0, part)))):02x}" for part in linear)


def _gamma(part: float) -> float:
    return 12.92 * part if part <= 0.0031308 else 1.055 * part ** (1 / 2.4) - 0.055
