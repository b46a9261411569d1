"""Make a page of sections, figures, tables, data, style and script, in one file that needs no network.

All text is escaped here or where it is drawn, the data are in a JSON block that they cannot end, and the page allows the browser
no script but its own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib import resources
from typing import Any

from .. import __version__
from ..errors import SquisherError
from ..storage.atomic import write_file
from .drawing import colour_steps, formatted

__all__ = [
    "HATCH", "Column", "Part", "chart_style", "dumped", "facts_list", "figure", "note", "page", "resource", "section", "table", "write",
]  # fmt: skip

HATCH = (
    '<pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect class="hatch-ground" width="5" height="5"/><rect class="hatch-line" width="1.6" height="5"/></pattern>'
)
"""The fill of cells that a logarithmic scale cannot show."""

ROWS = 20
"""The number of rows that a longer table begins with; a button shows more."""


@dataclass(frozen=True)
class Column:
    """A column of a table: its key in the data, its heading, and how its values are written.

    Attributes:
        key: The key of the list of its values.
        label: The heading.
        kind: `text`, `whole`, `number`, `fixed` or `share`.
        help: An explanation of the heading, if it needs one.
    """

    key: str
    label: str
    kind: str = "number"
    help: str = ""


@dataclass(frozen=True)
class Part:
    """A section of a page: its anchor, its heading, and its HTML."""

    anchor: str
    heading: str
    html: str


def page(title: str, lead: str, parts: Sequence[Part], data: Mapping[str, Any], eyebrow: str = "") -> str:
    """Return a whole page.

    Args:
        title: Its heading.
        lead: The line below the heading.
        parts: Its sections; the navigation lists them.
        data: The data of tables and tooltips, which others may take from the page.
        eyebrow: A few words above the heading.
    """
    style, script = resource("style.css") + chart_style(), resource("page.js")
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )
    links = "".join(f'<li><a href="#{escape(part.anchor)}">{escape(part.heading)}</a></li>' for part in parts)
    themes = "".join(
        f'<button type="button" data-theme-choice="{choice}" aria-pressed="{str(choice == "auto").lower()}">{label}</button>'
        for choice, label in (("auto", "Auto"), ("light", "Light"), ("dark", "Dark"))
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
<a class="skip" href="#content">Skip to the content</a>
<header class="top">
<nav aria-label="Sections"><ol>{links}</ol></nav>
<div class="themes" role="group" aria-label="Colours of the page">{themes}</div>
</header>
<main id="content">
<div class="title"><p class="eyebrow">{escape(eyebrow)}</p>
<h1>{escape(title)}</h1>
<p class="lead">{escape(lead)}</p></div>
{"".join(part.html for part in parts)}
</main>
<footer>Made with squisher {escape(__version__)}. The numbers are in this file, in the element with the id “data”.</footer>
<div id="tip" role="status" aria-live="polite" hidden></div>
<svg class="defs" width="0" height="0" aria-hidden="true"><defs>{HATCH}</defs></svg>
<script type="application/json" id="data">{_embedded(data)}</script>
<script>{script}</script>
</body>
</html>
"""


def section(anchor: str, heading: str, *parts: str) -> Part:
    """Return a section that folds, with an anchor for links."""
    link = f'<a class="anchor" href="#{escape(anchor)}" aria-label="Link to {escape(heading)}">#</a>'
    html = (
        f'<section id="{escape(anchor)}" aria-labelledby="{escape(anchor)}-h"><details class="fold" open>'
        f'<summary><h2 id="{escape(anchor)}-h">{escape(heading)}{link}</h2></summary>'
    )
    return Part(anchor, heading, html + "".join(parts) + "</details></section>\n")


def figure(drawing: str, heading: str, caption: str = "", *, wide: bool = False) -> str:
    """Return a drawing with its heading and caption; one that is wider than the page scrolls in its own box."""
    hint = f"{heading}: arrow keys read the values"
    return (
        f'<figure class="{"wide" if wide else "half"}"><h3>{escape(heading)}</h3>'
        f'<div class="scroll chart" tabindex="0" role="group" aria-label="{escape(hint)}">{drawing}</div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def note(text: str, kind: str = "info") -> str:
    """Return a highlighted sentence: `info`, `warning` or `problem`."""
    return f'<p class="note {escape(kind)}">{escape(text)}</p>'


def facts_list(facts: Sequence[Sequence[str]]) -> str:
    """Return a list of pairs of a label and a value."""
    return f'<dl class="facts">{"".join(f"<div><dt>{escape(a)}</dt><dd>{escape(b)}</dd></div>" for a, b in facts)}</dl>'


def table(
    anchor: str,
    caption: str,
    columns: Sequence[Column],
    values: Mapping[str, Sequence[Any]],
    source: str,
    *,
    filtered: bool = True,
    by: str | None = None,
) -> str:
    """Return a table that can be sorted by each column and filtered.

    The first rows are in the HTML; the script reads all of them from the page's data.

    Args:
        anchor: Its id.
        caption: What it holds.
        columns: In the order of the table; the first one names the row.
        values: A list for each column's key.
        source: Where the page's data hold `values`.
        filtered: Whether there is a field to filter by name.
        by: The key of a column with numbers: its largest values come first.
    """
    count = len(values[columns[0].key])
    order = list(range(count))
    if by is not None:
        order.sort(key=lambda k: -math.inf if values[by][k] is None else values[by][k], reverse=True)
    head = "".join(_heading(column, column.key == by) for column in columns)
    body = "".join(_row(columns, [values[column.key][k] for column in columns]) for k in order[:ROWS])
    find = (
        f'<label class="filter">Filter <input type="search" data-filter="{escape(anchor)}" placeholder="words in a name" '
        f'autocomplete="off" spellcheck="false"></label>'
    )
    tools = f'<div class="tools">{find}<output data-status="{escape(anchor)}">{count:,} rows</output></div>'
    more = f'<button type="button" class="more" data-more="{escape(anchor)}">Show more rows</button>'
    return (
        f'<div class="table"><h3>{escape(caption)}</h3>{tools if filtered else ""}<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f'<table id="{escape(anchor)}" data-source="{escape(source)}" data-rows="{ROWS}"><caption class="unseen">{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{more if count > ROWS else ''}</div>"
    )


def _heading(column: Column, sorted_by: bool) -> str:
    about = f' title="{escape(column.help)}"' if column.help else ""
    return (
        f'<th scope="col" aria-sort="{"descending" if sorted_by else "none"}" class="{column.kind}" data-key="{escape(column.key)}" data-kind="{column.kind}"{about}>'
        f'<button type="button">{escape(column.label)}</button></th>'
    )


def _row(columns: Sequence[Column], values: Sequence[Any]) -> str:
    name, *numbers = (escape(formatted(value, column.kind)) for column, value in zip(columns, values, strict=True))
    name = name.replace(".", ".<wbr>")  # a long name breaks at a dot
    cells = [f'<td class="{column.kind}">{text}</td>' for column, text in zip(columns[1:], numbers, strict=True)]
    return f'<tr><th scope="row" class="{columns[0].kind}">{name}</th>{"".join(cells)}</tr>'


def dumped(data: Mapping[str, Any]) -> str:
    """Return the data as JSON, in one line, as the page embeds them before it escapes them."""
    try:
        return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise SquisherError(f"The data of the page cannot be written as JSON: {error}.") from error


def _embedded(data: Mapping[str, Any]) -> str:
    text = dumped(data)
    for character in "<>&\u2028\u2029":  # they could end the element, or mean something in HTML
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def write(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a page or a picture, whole or not at all.

    Raises:
        FileError: The disk is full, or the folder cannot be written to.
    """
    write_file(path, content.encode("utf-8", "replace") if isinstance(content, str) else content)


@cache
def resource(name: str) -> str:
    """Return the text of a file of this folder."""
    return resources.files(__package__).joinpath(name).read_text("utf-8")


@cache
def chart_style() -> str:
    """Return the rules that charts need, with the colours of their scale."""
    light = colour_steps()
    steps = "".join(
        f".q{k}{{fill:light-dark({low},{high})}}" for k, (low, high) in enumerate(zip(light, light[::-1], strict=True))
    )
    return resource("charts.css") + steps + "\n"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
