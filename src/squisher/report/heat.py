"""Maps of many cells: one path for each colour, so that ten thousand cells are as light as two dozen marks.

What a cell holds is not repeated in the drawing: `data-source` names the place in the page's data where a script finds it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from torch import Tensor

from .drawing import STEPS, Axis, domain_of, formatted, opening, px, shortened, slanted, text_at

__all__ = ["clustered", "density", "heat_map"]

_WIDTH = 1080.0


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
    width: float = _WIDTH,
) -> str:
    """Draw values of rows × columns as colours, with a legend.

    Args:
        values: A list for each row; None is left blank, and what a logarithm cannot show is hatched.
        rows: Names of the rows.
        columns: Names of the columns.
        title: The name of the map.
        description: What it shows, in a sentence.
        label: Of the colours, with the unit.
        source: Where the page's data hold the values: `path rows columns values`, the last three being keys below the path.
        log: Whether colours follow the logarithm.
        domain: The values of the first and the last colour; by default the extremes, without what is far below the others.
        kind: How values are written: `number`, `fixed` or `share`.
        written: Whether each cell also has its value written in it.
        width: Of the whole, unless the columns need more.
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
    out.append(_legend(scale, left))
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
        x: What is along the horizontal axis.
        y: What is along the vertical one.
        title: The name of the chart.
        description: What it shows, in a sentence.
        source: Where the page's data hold `data`.
    """
    bins = max(1, data["bins"])
    side, left, top, below = 360.0, 62.0, 44.0, 48.0
    cell = side / bins
    ends = [10.0 ** (data["first_edge"] + k * data["step"]) for k in (0, bins)]
    most = max((count for _, _, count in data["cells"]), default=1)
    scale = Axis("entries in a square", 1.0, float(max(2, most)), log=True)
    axis = Axis("", ends[0], ends[1], log=True)
    out = [opening(title, description, 540, top + side + below), _legend(scale, left)]
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
    """Return an order of the rows that puts like ones side by side: average linkage, the nearer end of each cluster inwards."""
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


def _most(values: Iterable[float | None], log: bool) -> tuple[float, float]:
    """Return the smallest and the largest value; a few values that are far below the others share the first colour."""
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


def _legend(scale: Axis, left: float) -> str:
    """Draw the colours and what they stand for."""
    step = 7.0
    out = [f'<g transform="translate({px(left)} 4)">']
    out += [f'<rect class="q{k}" x="{px(k * step)}" width="{px(step + 0.3)}" height="9"/>' for k in range(STEPS)]
    for value, text in scale.ticks(4):
        out.append(text_at(scale.part(value) * step * STEPS, 22, text, "middle", "tick"))
    out.append(text_at(step * STEPS + 14, 9, scale.label, "start", "label"))
    return "".join([*out, "</g>"])
