"""Charts as SVG text: lines, bars with error bars, points, histograms. `heat.py` has maps of many cells.

Each function returns one `<svg>` with a title and a description for those who do not see it. Colours are classes of the
page's style, so that a chart follows its theme. A mark that has `data-tip` shows it under the pointer and, by the arrow keys,
to a keyboard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .drawing import (
    HEIGHT,
    SERIES,
    Axis,
    Chart,
    attribute,
    formatted,
    px,
    text_at,
)

__all__ = ["Mark", "Series", "bars_with_error_bars", "histogram", "lines", "points_with_error_bars", "scatter"]


@dataclass(frozen=True)
class Series:
    """One line or one set of bars or points.

    Attributes:
        name: What the legend calls it.
        x: Places along the axis.
        y: Values; None where there is none.
        low: Lower ends of error bars, where there are any.
        high: Upper ends.
        tips: What to say of each point; by default its coordinates.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    tips: Sequence[str] = ()


@dataclass(frozen=True)
class Mark:
    """A value that a chart points out, such as a median."""

    value: float
    label: str


def lines(
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    *,
    title: str,
    description: str,
    categories: Sequence[str] = (),
    diagonal: bool = False,
) -> str:
    """Draw values along an axis, a line for each series.

    Args:
        series: What to draw. A value that the axis cannot show (None; 0 on a logarithmic one) breaks its line.
        x: The horizontal axis; ignored but for its label where there are categories.
        y: The vertical one.
        title: The name of the chart.
        description: What it shows, in a sentence.
        categories: Names of places 0, 1, …, such as layers, in the place of a scale.
        diagonal: Whether to draw where both axes are equal.
    """
    if categories:
        x = Axis(x.label, -0.5, len(categories) - 0.5)
    chart = _chart(series, categories, x, y, title, description)
    if diagonal:
        steps = [
            x.low * (x.high / x.low) ** (k / 40) if x.log else x.low + (x.high - x.low) * k / 40 for k in range(41)
        ]
        places = " ".join(f"{px(chart.across(a))},{px(chart.up(a))}" for a in steps if y.low <= a <= y.high)
        chart.add(f'<polyline class="mark" fill="none" points="{places}"/>')
    for k, one in enumerate(series):
        shown = [
            (a, b if b is not None and math.isfinite(b) and (b > 0 or not y.log) else None)
            for a, b in zip(one.x, one.y, strict=True)
        ]
        for segment in _unbroken(shown):
            places = " ".join(f"{px(chart.across(a))},{px(chart.up(b))}" for a, b in segment)
            chart.add(f'<polyline class="line s{k % SERIES}" points="{places}"/>')
        _error_bars(chart, one, k)
        for number, (a, b) in enumerate(shown):
            if b is not None and len(shown) <= 60:
                tip = one.tips[number] if one.tips else f"{formatted(a, x.kind)}: {formatted(b, y.kind)}"
                chart.add(_dot(chart.across(a), chart.up(b), k, tip if not categories else ""))
    if categories:
        _columns(chart, series, categories)
    return chart.svg(x_ticks=_named(categories) if categories else None, turned=bool(categories))


def bars_with_error_bars(
    series: Sequence[Series], categories: Sequence[str], y: Axis, *, title: str, description: str, label: str = ""
) -> str:
    """Draw a group of bars for each category, one of each series, with error bars where the series has them.

    Args:
        series: Its `y` has a value for each category; `x` is not used.
        categories: Names of the groups.
        y: The vertical axis.
        title: The name of the chart.
        description: What it shows, in a sentence.
        label: Of the horizontal axis.
    """
    x = Axis(label, -0.5, len(categories) - 0.5)
    chart = _chart(series, categories, x, y, title, description, swatch="bar")
    base = chart.up(max(y.low, min(y.high, 0.0)) if not y.log else y.low)
    wide = 0.8 / max(1, len(series))
    for k, one in enumerate(series):
        places = [place - 0.4 + (k + 0.5) * wide for place in range(len(categories))]
        for place, value in zip(places, one.y, strict=True):
            if value is None or not math.isfinite(value) or (y.log and value <= 0):
                continue
            left, right, top = chart.across(place - wide / 2), chart.across(place + wide / 2), chart.up(value)
            gap = min(1.0, (right - left) / 8)
            chart.add(
                f'<rect class="bar s{k % SERIES}" x="{px(left + gap)}" width="{px(right - left - 2 * gap)}" '
                f'y="{px(min(base, top))}" height="{px(abs(base - top))}"/>'
            )
        _error_bars(chart, Series(one.name, places, one.y, one.low, one.high), k)
    _columns(chart, series, categories)
    return chart.svg(x_ticks=_named(categories), turned=True)


def points_with_error_bars(
    series: Sequence[Series], categories: Sequence[str], y: Axis, *, title: str, description: str, label: str = ""
) -> str:
    """Draw as `bars_with_error_bars` with points, for axes that do not begin at 0."""
    chart = _chart(series, categories, Axis(label, -0.5, len(categories) - 0.5), y, title, description)
    for k, one in enumerate(series):
        places = [place + (k - (len(series) - 1) / 2) * 0.6 / len(series) for place in range(len(categories))]
        _error_bars(chart, Series(one.name, places, one.y, one.low, one.high), k)
        for place, value in zip(places, one.y, strict=True):
            if value is not None and math.isfinite(value):
                chart.add(_dot(chart.across(place), chart.up(value), k, ""))
    _columns(chart, series, categories)
    return chart.svg(x_ticks=_named(categories), turned=True)


def scatter(series: Sequence[Series], x: Axis, y: Axis, *, title: str, description: str) -> str:
    """Draw a point for each pair of values; each series has a colour and a shape of its own."""
    chart = Chart(title, description, x, y, legend=_legend(series))
    for k, one in enumerate(series):
        _error_bars(chart, one, k)
        for number, (a, b) in enumerate(zip(one.x, one.y, strict=True)):
            if b is None or not math.isfinite(b):
                continue
            tip = one.tips[number] if one.tips else f"{formatted(a, x.kind)}: {formatted(b, y.kind)}"
            chart.add(_dot(chart.across(a), chart.up(b), k, tip))
    return chart.svg()


def histogram(
    first_edge: float,
    step: float,
    counts: Sequence[int],
    *,
    title: str,
    description: str,
    label: str,
    marks: Sequence[Mark] = (),
) -> str:
    """Draw how many values lie in each bin of their logarithm.

    Args:
        first_edge: log₁₀ of the lower end of the first bin.
        step: The width of a bin, in decades.
        counts: How many are in each.
        title: The name of the chart.
        description: What it shows, in a sentence.
        label: Of the horizontal axis.
        marks: Values to point out.
    """
    numel = sum(counts)
    shares = [count / numel if numel else 0.0 for count in counts]
    x = Axis(label, 10.0**first_edge, 10.0 ** (first_edge + step * max(1, len(counts))), log=True)
    y = Axis("share of the values shown", 0.0, max([*shares, 1e-9]) * 1.12, kind="share")
    chart = Chart(title, description, x, y)
    base = chart.up(0.0)
    edges = [10.0 ** (first_edge + k * step) for k in range(len(counts) + 1)]
    for k, (count, part) in enumerate(zip(counts, shares, strict=True)):
        left, right = chart.across(edges[k]), chart.across(edges[k + 1])
        tip = f"{formatted(edges[k], 'number')} to {formatted(edges[k + 1], 'number')}: {count:,} ({formatted(part, 'share')})"
        chart.add(
            f'<rect class="bar s0" x="{px(left)}" width="{px(max(0.6, right - left - 0.6))}" y="{px(chart.up(part))}" '
            f'height="{px(base - chart.up(part))}" data-tip="{attribute(tip)}"/>'
        )
    for k, mark in enumerate(marks):
        if mark.value > 0:
            at = chart.across(mark.value)
            chart.add(f'<line class="mark" x1="{px(at)}" x2="{px(at)}" y1="{px(chart.top)}" y2="{px(base)}"/>')
            chart.add(text_at(at + 4, chart.top + 10 + 15 * k, mark.label, "start", "key halo"))
    return chart.svg()


# -- parts  ------------------------------------------------------------------------------------------------------------


def _chart(
    series: Sequence[Series],
    categories: Sequence[str],
    x: Axis,
    y: Axis,
    title: str,
    description: str,
    swatch: str = "line",
) -> Chart:
    """Return a chart with room for the names of the categories, where there are any."""
    return Chart(
        title,
        description,
        x,
        y,
        height=HEIGHT - 44 + _room(categories),
        bottom=_room(categories),
        left=_margin(categories),
        legend=_legend(series),
        swatch=swatch,
    )


def _legend(series: Sequence[Series]) -> Sequence[str]:
    return [one.name for one in series] if len(series) > 1 else ()


def _room(categories: Sequence[str]) -> float:
    longest = max((min(22, len(name)) for name in categories), default=0)
    return 44 + (3.9 * longest if categories else 0)


def _margin(categories: Sequence[str]) -> float:
    """Return the room on the left, which the first of the slanted names needs more of than the ticks."""
    return max(58.0, 12 + 4.9 * min(22, len(categories[0])) if categories else 0.0)


def _named(categories: Sequence[str], most: int = 16) -> list[tuple[float, str]]:
    every = max(1, math.ceil(len(categories) / most))
    return [(float(k), name) for k, name in enumerate(categories) if k % every == 0]


def _unbroken(points: Sequence[tuple[float, float | None]]) -> list[list[tuple[float, float]]]:
    segments: list[list[tuple[float, float]]] = [[]]
    for a, b in points:
        if b is None:
            segments.append([])
        else:
            segments[-1].append((a, b))
    return [segment for segment in segments if len(segment) > 1]


def _dot(x: float, y: float, series: int, tip: str) -> str:
    attributes = f' data-tip="{attribute(tip)}"' if tip else ""
    if series % SERIES % 3 == 1:
        shape = f'<rect x="{px(x - 3)}" y="{px(y - 3)}" width="6" height="6"'
    elif series % SERIES % 3 == 2:
        shape = f'<path d="M{px(x)} {px(y - 4.2)}l4.2 7h-8.4z"'
    else:
        shape = f'<circle cx="{px(x)}" cy="{px(y)}" r="3.2"'
    return f'{shape} class="dot s{series % SERIES}"{attributes}/>'


def _error_bars(chart: Chart, one: Series, series: int) -> None:
    for x, low, high in zip(one.x, one.low, one.high, strict=False):
        if low is None or high is None:
            continue
        at, top, bottom = chart.across(x), chart.up(high), chart.up(low)
        path = f"M{px(at)} {px(top)}V{px(bottom)}M{px(at - 3)} {px(top)}h6M{px(at - 3)} {px(bottom)}h6"
        chart.add(f'<path class="error s{series % SERIES}" d="{path}"/>')


def _columns(chart: Chart, series: Sequence[Series], categories: Sequence[str]) -> None:
    """Return what lies under the pointer in each category, whichever mark it is nearest to."""
    for k, name in enumerate(categories):
        left, right = chart.across(k - 0.5), chart.across(k + 0.5)
        tips = []
        for one in series:
            said = one.tips[k] if one.tips else formatted(one.y[k], chart.y.kind) + _range(one, k, chart.y.kind)
            tips.append(f"{one.name}: {said}" if len(series) > 1 else said)
        tip = f"{name}\n" + "\n".join(tips)
        chart.add(
            f'<rect class="hit" x="{px(left)}" width="{px(right - left)}" y="{px(chart.top)}" '
            f'height="{px(chart.height - chart.bottom - chart.top)}" data-tip="{attribute(tip)}"/>'
        )


def _range(one: Series, k: int, kind: str) -> str:
    if k >= len(one.low) or one.low[k] is None or one.high[k] is None:
        return ""
    return f" ({formatted(one.low[k], kind)} to {formatted(one.high[k], kind)})"
