"""The pictures of `--plot FILE`: the report's charts of one importance, of two, of several tasks, and of a selection.

`.svg` files hold the charts as they are drawn; `.png` files need the `plots` extra. A picture carries the page's light style,
without the variables and colour pairs that only browsers know.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from torch import Tensor

from ..analysis.agreement import Agreement
from ..analysis.health import Health
from ..errors import ArgumentError, FileError, SquisherError
from ..importance import Importance
from . import charts
from .atlas import grid, place
from .data import agreement_data, atlas_of, depth_of
from .drawing import Axis, px
from .page import HATCH, chart_style, resource, write
from .svg import Series, clustered, heat_map

__all__ = [
    "Panel", "check_picture", "plot_agreement", "plot_importance", "plot_similarities", "plot_sparsity", "write_picture",
]  # fmt: skip


def plot_importance(importance: Importance, health: Health, path: str | os.PathLike[str]) -> None:
    """Draw the distribution of an importance's values, and the layers that hold them.

    Args:
        importance: The importance, for the heading.
        health: What `examine` found.
        path: An `.svg` or `.png` file.
    """
    p, depth = importance.provenance, depth_of(health)
    what = "Fisher" if p.kind == "fisher" else f"Squisher of {(p.optimizer or {}).get('class', 'an optimizer')}"
    panels = [
        Panel("What each layer holds", charts.share_chart(depth)),
        Panel("Distribution of the values", charts.distribution_chart(health.totals.to_dict())[0]),
        Panel("Layers and kinds of parameters", charts.atlas_chart(atlas_of(health), "")),
        Panel("Depth profile", charts.depth_chart(depth)),
    ]
    write_picture(path, f"{what}: {health.totals.numel:,} values in {len(health.rows):,} parameters", panels)


def plot_agreement(
    agreement: Agreement,
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    names: tuple[str, str] = ("A", "B"),
) -> None:
    """Draw two importances against each other: entry against entry, the overlap of the largest, ranks per layer.

    Args:
        agreement: What `compare(a, b)` returned.
        a: The first importance; read once more, in chunks.
        b: The second importance.
        path: An `.svg` or `.png` file.
        names: The names of the two.
    """
    sides = [side if isinstance(side, Importance) else Importance(side) for side in (a, b)]
    data = {"a": names[0], "b": names[1], **agreement_data(agreement, *sides)}
    panels = [
        Panel("Entry against entry", charts.density_chart(data, "")),
        Panel("Do they agree on what matters most?", charts.overlap_chart(data)),
        Panel("Rank correlation per layer", charts.layer_chart(data["layers"])),
    ]
    write_picture(path, f"{names[0]} and {names[1]}: {agreement.numel:,} entries in common", panels)


def plot_similarities(names: Sequence[str], distances: Tensor, path: str | os.PathLike[str]) -> None:
    """Draw the similarity of tasks (1 − distance) as a map, with similar tasks side by side.

    Args:
        names: The tasks.
        distances: A symmetric matrix.
        path: An `.svg` or `.png` file.
    """
    order = clustered(distances)
    values = (1 - distances[order][:, order]).tolist()
    panel = Panel("1 is the same task", charts.similarity_chart([names[k] for k in order], values, ""))
    write_picture(path, "Similarity of tasks", [panel])


def plot_sparsity(counts: Mapping[str, tuple[int, int]], path: str | os.PathLike[str], what: str) -> None:
    """Draw the share of every layer and of every parameter that was chosen (kept, or set to zero).

    Args:
        counts: How many entries of each tensor were chosen, and how many there are.
        path: An `.svg` or `.png` file.
        what: A word for the chosen entries.
    """
    places = [place(name) for name in counts]
    layers: dict[str, list[int]] = {}
    for one, (some, size) in zip(places, counts.values(), strict=True):
        total = layers.setdefault(one.layer, [0, 0])
        total[0] += some
        total[1] += size
    shares = [some / size if size else 0.0 for some, size in counts.values()]
    atlas = grid(places, "share", shares, [size for _, size in counts.values()])
    by_layer = [layers[layer][0] / layers[layer][1] if layers[layer][1] else None for layer in atlas["layers"]]
    chosen, entries = (sum(pair[k] for pair in counts.values()) for k in (0, 1))
    label = f"share of the entries {what}"
    bars = charts.layer_bars(
        [Series(what, range(len(by_layer)), by_layer)],
        atlas["labels"],
        Axis(label, 0.0, max([value or 0.0 for value in by_layer] + [1e-9]), kind="share"),
        "Per layer",
        f"The share of each layer's entries that were {what}.",
    )
    parameters = heat_map(
        atlas["share"], atlas["kinds"], atlas["labels"], title="Per parameter", label=label, kind="share",
        description="Rows are kinds of parameters, columns are layers.",
    )  # fmt: skip
    overall = chosen / entries if entries else 0.0
    heading = f"{chosen:,} of {entries:,} entries {what} ({100 * overall:.3g}%)"
    write_picture(path, heading, [Panel("Per layer", bars), Panel("Per parameter", parameters)])


_WIDTH = 1160.0
_MARGIN, _GAP, _HEAD = 24.0, 36.0, 30.0
_ZOOM = 2  # pixels of a .png per unit: sharp in print and on a phone


@dataclass(frozen=True)
class Panel:
    """One chart of a picture: its heading and the `<svg>` that a chart function returned."""

    heading: str
    drawing: str


def check_picture(path: str | os.PathLike[str]) -> None:
    """Refuse a picture that cannot be written, before any work.

    Raises:
        SquisherError: The file ends in neither .svg nor .png, or the extra for .png files is not installed.
        FileError: There is no such folder.
    """
    path = Path(path)
    if path.suffix.lower() not in (".svg", ".png"):
        raise ArgumentError(f"A picture is an .svg or a .png file; {path.name!r} is neither.")
    if not path.parent.is_dir():
        raise FileError(f"The folder {path.parent} for the picture does not exist.")
    if path.suffix.lower() == ".png":
        _renderer()


def write_picture(path: str | os.PathLike[str], heading: str, panels: Sequence[Panel]) -> None:
    """Write charts into one file, side by side where they fit.

    The bytes depend on the charts alone (and for a .png on the version of resvg).

    Args:
        path: An `.svg` or `.png` file.
        heading: The heading of the picture.
        panels: The charts, in reading order.

    Raises:
        SquisherError: The file has another ending, or cannot be written; the `plots` extra is not installed.
    """
    check_picture(path)
    svg = _together(heading, panels)
    if Path(path).suffix.lower() == ".svg":
        write(path, svg)
        return
    import font_roboto

    fonts = [font_roboto.Roboto, font_roboto.RobotoMedium]
    png = _renderer()(
        svg_string=svg, zoom=_ZOOM, skip_system_fonts=True, font_files=fonts, sans_serif_family="Roboto",
        monospace_family="Roboto", font_family="Roboto",
    )  # fmt: skip
    write(path, bytes(png))


def _renderer() -> Callable[..., Any]:
    """Return the function of the extra that turns SVG into PNG."""
    try:
        import font_roboto  # noqa: F401
        import resvg_py
    except ImportError as error:
        raise SquisherError(
            "A .png file needs more packages: pip install 'torch-squisher[plots]'. An .svg file needs none."
        ) from error
    return resvg_py.svg_to_bytes


def _together(heading: str, panels: Sequence[Panel]) -> str:
    """Return one `<svg>` of several panels, in rows of the page's width."""
    rows: list[list[tuple[Panel, float, float]]] = []
    room = 0.0
    for panel in panels:
        root = ElementTree.fromstring(panel.drawing)
        width, height = float(root.get("width", 0)), float(root.get("height", 0))
        if not rows or width > room:
            rows.append([])
            room = _WIDTH
        rows[-1].append((panel, width, height))
        room -= width + _GAP
    out = [f'<text class="heading" x="{px(_MARGIN)}" y="{px(_MARGIN + 14)}">{escape(heading)}</text>']
    top, widest = _MARGIN + 34, 0.0
    for row in rows:
        left = _MARGIN
        for panel, width, _ in row:
            out.append(f'<text class="panel" x="{px(left)}" y="{px(top + 16)}">{escape(panel.heading)}</text>')
            out.append(panel.drawing.replace("<svg ", f'<svg x="{px(left)}" y="{px(top + _HEAD)}" ', 1))
            left += width + _GAP
        widest = max(widest, left - _GAP + _MARGIN)
        top += _HEAD + max(height for _, _, height in row) + _GAP
    height = top - _GAP + _MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {px(widest)} {px(height)}" width="{px(widest)}" height="{px(height)}">'
        f"<style>{_plain_style()}</style><defs>{HATCH}</defs>"
        f'<rect width="{px(widest)}" height="{px(height)}" fill="#ffffff"/>{"".join(out)}</svg>\n'
    )


@cache
def _plain_style() -> str:
    """Return the style of charts on a light page, with every variable and colour pair resolved."""
    variables = dict(re.findall(r"(--[\w-]+): ([^;]+);", resource("style.css")))
    text = re.sub(r"var\((--[\w-]+)\)", lambda found: variables[found[1]], chart_style())
    text = re.sub(r"light-dark\(([^,()]+),[^()]+\)", r"\1", text)
    return text + "svg .heading { font-size: 18px; fill: #1d2226; } svg .panel { font-size: 14px; fill: #1d2226; }\n"
