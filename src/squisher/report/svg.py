"""Charts as SVG text: lines, bars with error bars, points, histograms, maps of many cells.

Each function returns one `<svg>` with a title and a description for screen readers. Colours are classes of the page's style, so
a chart follows its theme. A mark with `data-tip` shows it under the pointer, or by the arrow keys. A map draws one path for each
colour, so that ten thousand cells are as light as two dozen marks; instead of the values of its cells, it has in `data-source`
the place in the page's data where a script finds them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from torch import Tensor

from .drawing import (
    HEIGHT,
    SERIES,
    STEPS,
    Axis,
    Chart,
    attribute,
    domain_of,
    formatted,
    opening,
    px,
    shortened,
    slanted,
    text_at,
)  # fmt: skip

__all__ = [
    "Mark", "Series", "bars_with_error_bars", "clustered", "density", "heat_map", "histogram", "lines", "points_with_error_bars", "scatter",
]  # fmt: skip


@dataclass(frozen=True)
class Series:
    """One line or one set of bars or points.

    Attributes:
        name: Its name in the legend.
        x: Places along the axis.
        y: Values; None for none.
        low: Lower ends of error bars, if there are any.
        high: Upper ends of error bars.
        tips: The tooltip of each point; by default its coordinates.
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
        series: The lines. A value that the axis cannot show (None; 0 on a logarithmic one) breaks its line.
        x: The horizontal axis; with categories only its label is used.
        y: The vertical axis.
        title: The name of the chart.
        description: What it shows, in a sentence.
        categories: Names of the places 0, 1, …, such as layers, instead of a scale.
        diagonal: Whether to draw the line where both axes are equal.
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
    """Draw a group of bars for each category, one for each series, with error bars if the series has them.

    Args:
        series: Its `y` has a value for each category; `x` is not used.
        categories: Names of the groups.
        y: The vertical axis.
        title: The name of the chart.
        description: What it shows, in a sentence.
        label: The label of the horizontal axis.
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
    """Draw points instead of the bars of `bars_with_error_bars`, for axes that do not begin at 0."""
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
        counts: How many values are in each bin.
        title: The name of the chart.
        description: What it shows, in a sentence.
        label: The label of the horizontal axis.
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
    shown = [(chart.across(mark.value), mark.label) for mark in marks if mark.value > 0]
    for at, _ in shown:
        chart.add(f'<line class="mark" x1="{px(at)}" x2="{px(at)}" y1="{px(chart.top)}" y2="{px(base)}"/>')
    for k, (at, words) in enumerate(shown):  # above all lines, and on the side where there is room
        side, anchor = (-4, "end") if at + 4 + 6.6 * len(words) > chart.width else (4, "start")
        chart.add(text_at(at + side, chart.top + 10 + 15 * k, words, anchor, "key halo"))
    return chart.svg()


_MAP_WIDTH = 1080.0


def heat_map(
    values: Sequence[Sequence[float | None]],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    title: str,
    description: str,
    label: str,
    source: str = "",
    log: bool = False,
    domain: tuple[float, float] | None = None,
    kind: str = "number",
    written: bool = False,
    width: float = _MAP_WIDTH,
) -> str:
    """Draw values of rows × columns as colours, with a legend.

    Args:
        values: A list for each row; None is left blank, and values without a logarithm are hatched.
        rows: Names of the rows.
        columns: Names of the columns.
        title: The name of the map.
        description: What it shows, in a sentence.
        label: The label of the colours, with the unit.
        source: The place of the values in the page's data: `path rows columns values`, the last three being keys below the path.
        log: Whether colours follow the logarithm.
        domain: The values of the first and the last colour; by default the extremes, without values far below the others.
        kind: How values are written: `number`, `fixed` or `share`.
        written: Whether to write the values into the cells.
        width: The width of the whole, unless the columns need more.
    """
    low, high = domain or _most((value for row in values for value in row), log)
    scale = Axis(label, low, high, log, "share" if kind == "share" else "number")
    left = min(320.0, 16 + 6.7 * max(map(len, rows), default=0))
    below = 24 + 4.6 * max((min(22, len(name)) for name in columns), default=0)
    cell_width = max(2.0, min(76.0, (width - left - 16) / max(1, len(columns))))
    cell_height = 22.0 if len(rows) <= 40 else 14.0
    top = 40.0
    across, down = cell_width * len(columns), cell_height * len(rows)
    out = [opening(title, description, max(left + across + 40, 420), top + down + below)]
    out.append(_colour_legend(scale, left))
    for k, name in enumerate(rows):
        out.append(text_at(left - 8, top + (k + 0.5) * cell_height + 4, shortened(name, 46), "end", "tick name"))
    every = max(1, math.ceil(26 / cell_width))
    for k in range(0, len(columns), every):
        out.append(slanted(left + (k + 0.5) * cell_width, top + down + 14, columns[k]))
    attributes = ""
    if source:
        path, *keys = source.split()
        names = zip(("source", "rows", "columns", "values"), (path, *keys), strict=True)
        attributes = "".join(f' data-{name}="{escape(key)}"' for name, key in names) + f' data-kind="{kind}"'
    gap = f' data-count="{len(columns)} {len(rows)}"'
    out.append(f'<g class="cells" transform="translate({px(left)} {px(top)})"{attributes}{gap}>')
    out.append(f'<rect class="blank" width="{px(across)}" height="{px(down)}"/>')
    inner = (cell_width - (1.5 if cell_width > 8 else 0), cell_height - 1.5)
    out += _paths(values, scale, cell_width, cell_height, *inner)
    if written:
        out += _written(values, scale, cell_width, cell_height, kind)
    out.append('<rect class="cursor" width="0" height="0"/></g></svg>')
    return "".join(out)


def density(data: Mapping[str, Any], x: str, y: str, *, title: str, description: str, source: str) -> str:
    """Draw two values of each entry against each other: how many entries lie in each square of a logarithmic grid.

    Args:
        data: `first_edge` and `step` (log₁₀), `bins` along an axis, `cells` as lists of column, row and count.
        x: The label of the horizontal axis.
        y: The label of the vertical axis.
        title: The name of the chart.
        description: What it shows, in a sentence.
        source: The place of `data` in the page's data.
    """
    bins = max(1, data["bins"])
    side, left, top, below = 360.0, 62.0, 44.0, 48.0
    cell = side / bins
    ends = [10.0 ** (data["first_edge"] + k * data["step"]) for k in (0, bins)]
    most = max((count for _, _, count in data["cells"]), default=1)
    scale = Axis("entries in a square", 1.0, float(max(2, most)), log=True)
    axis = Axis("", ends[0], ends[1], log=True)
    out = [opening(title, description, 540, top + side + below), _colour_legend(scale, left)]
    for value, text in axis.ticks(7):
        at = axis.part(value) * side
        out.append(text_at(left + at, top + side + 18, text, "middle", "tick"))
        out.append(text_at(left - 8, top + side - at + 4, text, "end", "tick"))
    out.append(text_at(left + side / 2, top + side + 40, x, "middle", "label"))
    out.append(
        f'<text class="label" text-anchor="middle" transform="translate(13 {px(top + side / 2)}) rotate(-90)">{escape(y)}</text>'
    )
    out.append(
        f'<g class="cells" transform="translate({px(left)} {px(top)})" data-density="{escape(source)}" '
        f'data-count="{bins} {bins}" data-across="{escape(x)}" data-down="{escape(y)}">'
    )
    out.append(f'<rect class="blank" width="{px(side)}" height="{px(side)}"/>')
    grid: list[list[float | None]] = [[None] * bins for _ in range(bins)]
    for column, row, count in data["cells"]:
        grid[bins - 1 - row][column] = float(count)
    out += _paths(grid, scale, cell, cell, cell + 0.15, cell + 0.15)
    out.append(f'<line class="mark" x1="0" y1="{px(side)}" x2="{px(side)}" y2="0"/>')
    out.append('<rect class="cursor" width="0" height="0"/></g></svg>')
    return "".join(out)


def clustered(matrix: Tensor) -> list[int]:
    """Return an order that puts similar rows side by side: average linkage, joining clusters at their nearest ends."""
    clusters = [[k] for k in range(len(matrix))]
    while len(clusters) > 1:
        pairs = [
            (float(matrix[a][:, b].mean()), j, k) for j, a in enumerate(clusters) for k, b in enumerate(clusters[:j])
        ]
        _, j, k = min(pairs)
        a, b = clusters[k], clusters[j]
        joined = min(
            (x + y for x in (a, a[::-1]) for y in (b, b[::-1])),
            key=lambda order: float(matrix[order[len(a) - 1], order[len(a)]]),
        )
        clusters = [c for place, c in enumerate(clusters) if place not in (j, k)] + [joined]
    return clusters[0]


# -- inside ------------------------------------------------------------------------------------------------------------


def _chart(
    series: Sequence[Series],
    categories: Sequence[str],
    x: Axis,
    y: Axis,
    title: str,
    description: str,
    swatch: str = "line",
) -> Chart:
    """Return a chart with room for the slanted names of the categories, below and on the left of the first one."""
    longest = max((min(22, len(name)) for name in categories), default=0)
    below = 44 + 3.9 * longest
    left = max(58.0, 12 + 4.9 * min(22, len(categories[0])) if categories else 0.0)
    legend = _legend(series)
    return Chart(
        title, description, x, y, height=HEIGHT - 44 + below, bottom=below, left=left, legend=legend, swatch=swatch
    )


def _legend(series: Sequence[Series]) -> Sequence[str]:
    return [one.name for one in series] if len(series) > 1 else ()


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
    """Add an area to each category, whose tooltip has its values."""
    for k, name in enumerate(categories):
        left, right = chart.across(k - 0.5), chart.across(k + 0.5)
        tips = []
        for one in series:
            tip = one.tips[k] if one.tips else formatted(one.y[k], chart.y.kind) + _range(one, k, chart.y.kind)
            tips.append(f"{one.name}: {tip}" if len(series) > 1 else tip)
        tip = f"{name}\n" + "\n".join(tips)
        chart.add(
            f'<rect class="hit" x="{px(left)}" width="{px(right - left)}" y="{px(chart.top)}" '
            f'height="{px(chart.height - chart.bottom - chart.top)}" data-tip="{attribute(tip)}"/>'
        )


def _range(one: Series, k: int, kind: str) -> str:
    if k >= len(one.low) or one.low[k] is None or one.high[k] is None:
        return ""
    return f" ({formatted(one.low[k], kind)} to {formatted(one.high[k], kind)})"


def _most(values: Iterable[float | None], log: bool) -> tuple[float, float]:
    """Return the smallest and the largest value; a few values far below the others share the first colour."""
    shown = sorted(v for v in values if v is not None and math.isfinite(v) and (v > 0 or not log))
    low, high = domain_of(shown, log)
    return (max(low, shown[len(shown) // 10] / 10) if log and shown else low), high


def _paths(
    values: Sequence[Sequence[float | None]], scale: Axis, width: float, height: float, inner_w: float, inner_h: float
) -> list[str]:
    paths: dict[str, list[str]] = {}
    for j, row in enumerate(values):
        for k, value in enumerate(row):
            if value is None or math.isnan(value):
                continue
            box = f"M{px(k * width)} {px(j * height)}h{px(inner_w)}v{px(inner_h)}h-{px(inner_w)}z"
            paths.setdefault(_class(value, scale), []).append(box)
    return [f'<path class="{name}" d="{"".join(paths[name])}"/>' for name in sorted(paths)]


def _class(value: float, scale: Axis) -> str:
    if scale.log and value <= 0:
        return "none"
    return f"q{min(STEPS - 1, max(0, int(scale.part(value) * STEPS)))}"


def _written(
    values: Sequence[Sequence[float | None]], scale: Axis, width: float, height: float, kind: str
) -> list[str]:
    out = []
    for j, row in enumerate(values):
        for k, value in enumerate(row):
            if value is not None and not math.isnan(value):
                tone = "on-high" if scale.part(value) > 0.5 else "on-low"
                at = (k + 0.5) * width, (j + 0.5) * height + 4
                out.append(text_at(*at, formatted(value, kind), "middle", f"value {tone}"))
    return out


def _colour_legend(scale: Axis, left: float) -> str:
    """Return the colours with their values."""
    step = 7.0
    out = [f'<g transform="translate({px(left)} 4)">']
    out += [f'<rect class="q{k}" x="{px(k * step)}" width="{px(step + 0.3)}" height="9"/>' for k in range(STEPS)]
    for value, text in scale.ticks(4):
        out.append(text_at(scale.part(value) * step * STEPS, 22, text, "middle", "tick"))
    out.append(text_at(step * STEPS + 14, 9, scale.label, "start", "label"))
    return "".join([*out, "</g>"])
