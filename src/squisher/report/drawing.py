"""What charts are drawn with: axes, ticks, words, coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from .scales import Axis

__all__ = ["HEIGHT", "PAGE_WIDTH", "SERIES", "Chart", "attribute", "opening", "px", "shortened", "slanted", "text_at"]

WIDTH, HEIGHT = 540, 300
PAGE_WIDTH = 1120
"""A wider drawing scrolls in a box of its own."""

SERIES = 6
"""Colours, dashes and shapes of series repeat after so many."""


@dataclass
class Chart:
    """The axes of a chart: maps values to places, and collects what is drawn into one `<svg>`.

    Args:
        title: The name of the chart.
        description: What it shows, in a sentence.
        x: The horizontal axis.
        y: The vertical one.
        width: Of the whole.
        height: Of the whole.
        bottom: Room for labels below.
        legend: Names of series, shown above.
        left: Room for the labels of the vertical axis.
        right: Room at the end.
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
        """Draw something."""
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
    """Text within the quotes of an attribute; lines stay lines in XML too."""
    return escape(text).replace("\n", "&#10;")


def px(value: float) -> str:
    """Return a coordinate: two places are finer than a screen."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value else "0"


def text_at(x: float, y: float, text: str, anchor: str, kind: str) -> str:
    """Words at a place: `anchor` is start, middle or end, `kind` their class."""
    return f'<text class="{kind}" text-anchor="{anchor}" x="{px(x)}" y="{px(y)}">{escape(text)}</text>'


def slanted(x: float, y: float, text: str) -> str:
    """Words that end at a place, turned so that many fit side by side."""
    short = shortened(text, 22)
    return f'<text class="tick" text-anchor="end" transform="translate({px(x + 4)} {px(y)}) rotate(-38)">{escape(short)}</text>'


def shortened(name: str, width: int) -> str:
    """Return a name that fits; the middle goes, because the ends tell names apart."""
    head = (width - 1) // 2
    return name if len(name) <= width else name[:head] + "…" + name[len(name) - (width - 1 - head) :]
