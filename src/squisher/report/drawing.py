"""The parts of every chart: numbers as text, axes, colours, and the marks of an SVG.

`page.js` has the same four functions for numbers; a browser test compares them. Halves are rounded up, as in JavaScript, so
that a table reads the same before and after it is sorted.

Colours run from yellow over green to dark blue in steps of equal lightness (in OKLab), so that they keep their order for
colour-blind readers and in grey. On a dark page the order is reversed, so that large values always stand out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal
from html import escape
from typing import Any

__all__ = [
    "HEIGHT", "SERIES", "STEPS", "Axis", "Chart", "attribute", "colour_steps", "domain_of", "fixed", "formatted", "number", "opening",
    "power_of_ten", "px", "share", "shortened", "slanted", "text_at", "whole",
]  # fmt: skip

MISSING = "–"
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float | None) -> str:
    """Write three significant digits: `0.0123`, `12.3`, `1.23e-7`."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    exact = Decimal(value)
    rounded = exact.quantize(Decimal((0, (1,), exact.adjusted() - 2)), ROUND_HALF_UP)
    exponent = rounded.adjusted()
    if -4 <= exponent < 6:
        text = f"{rounded:f}"
        return text.rstrip("0").rstrip(".") if "." in text else f"{int(rounded):,}"
    mantissa = f"{rounded.scaleb(-exponent):f}"
    return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{exponent}"


def fixed(value: float | None) -> str:
    """Write three places after the point."""
    if value is None or not math.isfinite(value):
        return MISSING
    rounded = Decimal(value).quantize(Decimal((0, (1,), -3)), ROUND_HALF_UP)
    return f"{abs(rounded):f}" if rounded == 0 else f"{rounded:f}"


def share(value: float | None) -> str:
    """Return a share in percent, with three digits; never 0% or 100% unless it is."""
    if value is None or not math.isfinite(value):
        return MISSING
    if 0.9995 <= value < 1:  # show how much is missing
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
    """Write `10⁻⁷`, for an axis."""
    return "1" if exponent == 0 else f"10{f'{exponent:g}'.translate(_SUPERSCRIPTS)}"


STEPS = 24
"""Colours of the scale; the classes `q0` to `q23` of the page's style."""


@dataclass(frozen=True)
class Axis:
    """One direction of a chart.

    Attributes:
        label: Its label, with the unit.
        low: The value at its beginning.
        high: The value at its end.
        log: Whether it is logarithmic; then both ends are above 0.
        kind: How its ticks are written: `number` or `share`.
    """

    label: str
    low: float
    high: float
    log: bool = False
    kind: str = "number"

    def part(self, value: float) -> float:
        """Return the place of a value on the axis, from 0 to 1."""
        low, high, at = (
            (math.log10(v) for v in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        )
        return (at - low) / (high - low) if high > low else 0.5

    def ticks(self, count: int = 6) -> list[tuple[float, str]]:
        """Return round values on the axis, with their text."""
        shares = self.kind == "share"
        if self.log:
            low, high = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            every = max(1, math.ceil((high - low + 1) / count))
            powers = [k for k in range(low, high + 1) if k % every == 0]
            return [(10.0**k, share(10.0**k) if shares else power_of_ten(k)) for k in powers]
        step = _round_step((self.high - self.low) / max(1, count))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        write = share if shares else number
        return [(k * step, write(float(f"{k * step:.10g}"))) for k in range(first, last + 1)]


def domain_of(values: Iterable[float | None], log: bool = False) -> tuple[float, float]:
    """Return the smallest and the largest value that an axis can show, with some room if they are equal."""
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
    """Return an sRGB colour from OKLab; clip what a screen cannot show."""
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


WIDTH, HEIGHT = 540, 300
PAGE_WIDTH = 1120
"""A wider drawing scrolls in a box of its own."""

SERIES = 6
"""The number of series after which colours, dashes and shapes repeat."""


@dataclass
class Chart:
    """A chart with two axes: maps values to places, and collects marks into one `<svg>`.

    Args:
        title: The name of the chart.
        description: What it shows, in a sentence.
        x: The horizontal axis.
        y: The vertical axis.
        width: The width of the whole chart.
        height: The height of the whole chart.
        bottom: Room for labels below.
        legend: Names of series, shown above.
        left: Room for the labels of the vertical axis.
        right: Room on the right.
        swatch: How the legend shows a series: as a `line` or as a `bar`.
    """

    title: str
    description: str
    x: Axis
    y: Axis
    width: float = WIDTH
    height: float = HEIGHT
    bottom: float = 44
    legend: Sequence[str] = ()
    left: float = 58
    right: float = 22
    swatch: str = "line"
    parts: list[str] = field(default_factory=list)

    @property
    def top(self) -> float:
        """Where the plot begins."""
        return 14 + (20 if self.legend else 0)

    def across(self, value: float) -> float:
        """Return the horizontal place of a value."""
        return self.left + self.x.part(value) * (self.width - self.left - self.right)

    def up(self, value: float) -> float:
        """Return the vertical place of a value."""
        return self.height - self.bottom - self.y.part(value) * (self.height - self.bottom - self.top)

    def add(self, part: str) -> None:
        """Add SVG text."""
        self.parts.append(part)

    def svg(self, *, x_ticks: Sequence[tuple[float, str]] | None = None, turned: bool = False) -> str:
        """Return the finished chart."""
        base, end = self.height - self.bottom, self.width - self.right
        out = [opening(self.title, self.description, self.width, self.height)]
        for value, text in self.y.ticks():
            y = self.up(value)
            out.append(f'<line class="grid" x1="{px(self.left)}" x2="{px(end)}" y1="{px(y)}" y2="{px(y)}"/>')
            out.append(
                f'<text class="tick" text-anchor="end" x="{px(self.left - 8)}" y="{px(y + 4)}">{escape(text)}</text>'
            )
        out.append(f'<line class="axis" x1="{px(self.left)}" x2="{px(end)}" y1="{px(base)}" y2="{px(base)}"/>')
        for value, text in self.x.ticks(8) if x_ticks is None else x_ticks:
            at = self.across(value)
            out.append(f'<line class="axis" x1="{px(at)}" x2="{px(at)}" y1="{px(base)}" y2="{px(base + 4)}"/>')
            out.append(slanted(at, base + 14, text) if turned else text_at(at, base + 18, text, "middle", "tick"))
        middle = (self.left + end) / 2
        out.append(text_at(middle, self.height - 6, self.x.label, "middle", "label"))
        sideways = f'transform="translate(13 {px((self.top + base) / 2)}) rotate(-90)"'
        out.append(f'<text class="label" text-anchor="middle" {sideways}>{escape(self.y.label)}</text>')
        at = self.left
        for k, name in enumerate(self.legend):
            if self.swatch == "bar":
                out.append(f'<rect class="bar s{k % SERIES}" x="{px(at + 8)}" width="12" y="6" height="12"/>')
            else:
                out.append(f'<line class="line s{k % SERIES}" x1="{px(at)}" x2="{px(at + 20)}" y1="12" y2="12"/>')
            out.append(text_at(at + 26, 16, name, "start", "key"))
            at += 42 + 6.6 * len(name)
        return "".join([*out, *self.parts, "</svg>"])


def opening(title: str, description: str, width: float, height: float) -> str:
    """Return the beginning of an `<svg>`, with its name and description for screen readers."""
    # A <title> would also pop up as the browser's own tooltip, on top of ours.
    wide = ' class="scrolls"' if width > PAGE_WIDTH else ' class="full"' if width > WIDTH + 140 else ""
    return (
        f'<svg viewBox="0 0 {px(width)} {px(height)}" width="{px(width)}" height="{px(height)}"{wide} role="img" '
        f'aria-label="{escape(title)}. {escape(description)}">'
    )


def attribute(text: str) -> str:
    """Return text within the quotes of an attribute; lines stay lines in XML too."""
    return escape(text).replace("\n", "&#10;")


def px(value: float) -> str:
    """Return a coordinate: two places are finer than a screen."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value else "0"


def text_at(x: float, y: float, text: str, anchor: str, kind: str) -> str:
    """Return text at a place: `anchor` is start, middle or end, `kind` its class."""
    return f'<text class="{kind}" text-anchor="{anchor}" x="{px(x)}" y="{px(y)}">{escape(text)}</text>'


def slanted(x: float, y: float, text: str) -> str:
    """Return text that ends at a place, slanted so that many fit side by side."""
    short = shortened(text, 22)
    return f'<text class="tick" text-anchor="end" transform="translate({px(x + 4)} {px(y)}) rotate(-38)">{escape(short)}</text>'


def shortened(name: str, width: int) -> str:
    """Return a name that fits, without its middle, because names differ at their ends."""
    head = (width - 1) // 2
    return name if len(name) <= width else name[:head] + "…" + name[len(name) - (width - 1 - head) :]
