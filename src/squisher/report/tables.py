"""Tables for a terminal, and dictionaries for JSON.

Tables fit into 100 columns. Long tables are shortened in the middle, with a line that says how many rows are left out; the JSON
has all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from ..analysis.agreement import Agreement
from ..analysis.health import Diagnosis, Health
from ..importance import Importance
from .drawing import fixed, number, share
from .svg import clustered
from .words import counted, facts, listed, shape_text, short_names

__all__ = [
    "compare_tables", "inspect_json", "inspect_tables", "similarity_json", "similarity_table",
]  # fmt: skip

MAX_ROWS = 30
"""Longer tables are shortened in the middle."""

_NAME_WIDTH = 42
_MARKS = {"problem": ("✗", "bold red"), "warning": ("!", "yellow"), "info": ("·", "cyan")}

T = TypeVar("T")


def inspect_json(importance: Importance, health: Health) -> dict[str, Any]:
    """Return provenance and health of an importance as plain values; the sums are in the rows."""
    provenance = importance.provenance.to_dict()
    known = {key: value for key, value in provenance.items() if key not in ("sum", "sum_of_squares")}
    return {"provenance": known, **health.to_dict()}


def inspect_tables(importance: Importance, health: Health, max_rows: int = MAX_ROWS) -> RenderableType:
    """Return an importance's facts, its diagnoses, and its parameters."""
    table = _table("parameter", "shape", "mean", "median", "90%", "max", "zeros")
    labels = _labels(health.rows)
    for row in _shortened(health.rows, max_rows, table):
        v = row.values
        numbers = [number(x) for x in (v.mean, v.median, v.p90, v.max)]
        zeros = "" if not v.zeros else share(v.zeros / v.numel)
        if row.invalid:
            numbers, zeros = ["invalid", "", "", ""], ""
        style = "red" if row.invalid else "yellow" if v.numel and v.zeros == v.numel else ""
        table.add_row(labels[row.name], shape_text(row.shape), *numbers, zeros, style=style)
    return Group(
        _list(facts(importance.provenance, health.totals, len(health.rows))),
        *_findings(health.diagnoses),
        Text(),
        table,
    )


def compare_tables(agreement: Agreement, a: str = "A", b: str = "B", max_rows: int = MAX_ROWS) -> RenderableType:
    """Return how far two importances agree, overall and per parameter.

    Args:
        agreement: What `compare` returned.
        a: The name of the first importance.
        b: The name of the second importance.
        max_rows: Longer tables are shortened in the middle.
    """
    known = [
        ("A", a),
        ("B", b),
        ("common entries", f"{agreement.numel:,} in {counted(len(agreement.rows), 'parameter')}"),
        ("only in A", f"{len(agreement.only_a):,}: {_listed(agreement.only_a)}" if agreement.only_a else ""),
        ("only in B", f"{len(agreement.only_b):,}: {_listed(agreement.only_b)}" if agreement.only_b else ""),
        ("Spearman", fixed(agreement.spearman)),
        ("scale A/B", f"{number(agreement.scale)} of the totals, {number(agreement.median_ratio)} in the median"),
        ("ranks and ratios", "" if agreement.exact else "of values rounded to 16 bits"),
    ]

    overlap = _table("largest", "entries of each", "in both", "by chance", title="Overlap of the largest entries")
    cut = False
    for o in agreement.overlaps:
        at_zero = o.threshold_a == 0 or o.threshold_b == 0
        cut |= at_zero
        overlap.add_row(share(o.fraction), f"{o.k:,}", share(o.overlap) + ("*" if at_zero else ""), share(o.chance))
    note = [Text("* reaches into entries that are 0; which of them are taken depends on their place.", style="dim")]

    rows = _table(
        "parameter", "entries", "Spearman", "scale A/B", "median A/B", "overlap at 10%", title="Per parameter"
    )
    labels = _labels(agreement.rows)
    for row in _shortened(agreement.rows, max_rows, rows):
        cells = fixed(row.spearman), number(row.scale), number(row.median_ratio), share(row.overlap)
        rows.add_row(labels[row.name], f"{row.numel:,}", *cells)
    return Group(_list(known), Text(), overlap, *(note if cut else []), Text(), rows)


def similarity_json(names: Sequence[str], distances: Tensor) -> dict[str, Any]:
    """Return similarities and distances of tasks as plain values."""
    return {"tasks": list(names), "similarities": (1 - distances).tolist(), "distances": distances.tolist()}


def similarity_table(names: Sequence[str], distances: Tensor) -> RenderableType:
    """Return the similarities (1 − distance) of tasks, similar ones side by side; of many tasks, each one's nearest."""
    order = clustered(distances)
    labels = short_names(names, _NAME_WIDTH)
    if len(names) <= 12:
        table = _table("similarity", *(labels[k] for k in order))
        for row in order:
            table.add_row(labels[row], *(f"{1 - distances[row, column]:.3f}" for column in order))
        return table
    table = _table("task", "nearest", "similarity", "second", "similarity")
    for row in order:
        nearest = sorted((float(distances[row, k]), k) for k in range(len(names)) if k != row)[:2]
        cells = [text for value, k in nearest for text in (labels[k], f"{1 - value:.3f}")]
        table.add_row(labels[row], *cells)
    return table


def _findings(diagnoses: Sequence[Diagnosis]) -> list[RenderableType]:
    if not diagnoses:
        return [Text(), Text("Nothing to remark.", style="green")]
    grid = Table.grid(padding=(0, 1))
    for diagnosis in diagnoses:
        mark, style = _MARKS[diagnosis.severity]
        grid.add_row(Text(mark, style=style), Text(diagnosis.sentence))
        for more in (diagnosis.advice, _listed(diagnosis.parameters)):
            if more:
                grid.add_row("", Text(more, style="dim"))
    return [Text(), grid]


def _list(known: Sequence[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")  # the end of a path says most
    for label, value in known:
        if value:
            grid.add_row(Text(label, style="dim"), Text(value))
    return grid


def _table(first: str, *others: str, title: str | None = None) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, title=title, title_justify="left", title_style="bold")
    table.add_column(first, no_wrap=True, header_style="dim")
    for header in others:
        table.add_column(header, justify="right", no_wrap=True, header_style="dim")
    return table


def _shortened(rows: Sequence[T], max_rows: int, table: Table) -> Iterator[T]:
    """Yield the rows; of too many, the first and the last, with a line between them that counts the others."""
    if len(rows) <= max_rows:
        yield from rows
        return
    head = math.ceil(max_rows / 2)
    tail = max_rows - head
    yield from rows[:head]
    table.add_row(Text(f"… {len(rows) - max_rows:,} left out (--json has all)", style="dim italic"))
    yield from rows[len(rows) - tail :]


def _labels(rows: Sequence[Any]) -> dict[str, str]:
    """Return short forms of the rows' names, all different."""
    names = [row.name for row in rows]
    return dict(zip(names, short_names(names, _NAME_WIDTH), strict=True))


def _listed(names: Sequence[str]) -> str:
    return listed(short_names(names, _NAME_WIDTH))
