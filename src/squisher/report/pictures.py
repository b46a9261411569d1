"""Charts in files of their own: `.svg` as they are drawn, `.png` with the `plots` extra.

The charts are the page's. A file has no page around it, so it carries the page's light style, written without the variables
and colour pairs that only browsers know.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from xml.etree import ElementTree

from ..errors import FileError, SquisherError
from .drawing import px
from .page import HATCH, chart_style, resource, write

__all__ = ["Panel", "check_picture", "write_picture"]

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
        SquisherError: The file ends in neither .svg nor .png, or what writes .png files is not installed.
        FileError: There is no such folder.
    """
    path = Path(path)
    if path.suffix.lower() not in (".svg", ".png"):
        raise SquisherError(f"A picture is an .svg or a .png file; {path.name!r} is neither.")
    if not path.parent.is_dir():
        raise FileError(f"The folder {path.parent} for the picture does not exist.")
    if path.suffix.lower() == ".png":
        _renderer()


def write_picture(path: str | os.PathLike[str], heading: str, panels: Sequence[Panel]) -> None:
    """Write charts into one file, side by side where they fit.

    The bytes depend on nothing but the charts (and, of a .png, on the version of resvg).

    Args:
        path: Ends in `.svg` or `.png`.
        heading: What the picture shows.
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


def _renderer():  # type: ignore[no-untyped-def]  # the extra's own function
    try:
        import font_roboto  # noqa: F401
        import resvg_py
    except ImportError as error:
        raise SquisherError(
            "A .png file needs more packages: pip install 'torch-squisher[plots]'. An .svg file needs none."
        ) from error
    return resvg_py.svg_to_bytes


def _together(heading: str, panels: Sequence[Panel]) -> str:
    """Return one `<svg>` of several: panels fill rows of the page's width."""
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
