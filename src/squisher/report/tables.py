"""Tables for a terminal, and dictionaries for JSON.

Tables fit into 100 columns. A long model is shortened in the middle, and a line says how much was left out; the JSON has
everything.
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
from .svg import clustered
from .words import counted, short_names

__all__ = [
    "compare_json",
    "compare_tables",
    "facts",
    "inspect_json",
    "inspect_tables",
    "similarity_json",
    "similarity_table",
]

MAX_ROWS = 30
"""Longer tables are shortened in the middle."""

_NAME_WIDTH = 42
_MARKS = {"problem": ("✗", "bold red"), "warning": ("!", "yellow"), "info": ("·", "cyan")}

T = TypeVar("T")


def inspect_json(importance: Importance, health: Health) -> dict[str, Any]:
    """Return everything that `inspect` knows, as plain values."""
    provenance = importance.provenance.to_dict()
    for name in ("sum", "sum_of_squares"):  # the rows say it
        provenance.pop(name, None)
    return {"provenance": provenance, **health.to_dict()}


def compare_json(agreement: Agreement) -> dict[str, Any]:
    """Return everything that `compare` knows, as plain values."""
    return agreement.to_dict()


def inspect_tables(importance: Importance, health: Health, max_rows: int = MAX_ROWS) -> RenderableType:
    """Return what an importance is, what is wrong with it, and its parameters."""
    known = _list()
    for label, value in facts(importance, health):
        known.add_row(Text(label, style="dim"), Text(value))

    table = _table("parameter", "shape", "mean", "median", "90%", "max", "zeros")
    labels = _labels(health.rows)
    for row in _shortened(health.rows, max_rows, table):
        v = row.values
        numbers = [_number(x) for x in (v.mean, v.median, v.p90, v.max)]
        zeros = "" if not v.zeros else _share(v.zeros / v.numel)
        if row.invalid:
            numbers, zeros = ["invalid", "", "", ""], ""
        style = "red" if row.invalid else "yellow" if v.numel and v.zeros == v.numel else ""
        table.add_row(labels[row.name], _shape(row.shape), *numbers, zeros, style=style)
    return Group(known, *_findings(health.diagnoses), Text(), table)


def compare_tables(agreement: Agreement, a: str = "A", b: str = "B", max_rows: int = MAX_ROWS) -> RenderableType:
    """Return how far two importances agree, overall and per parameter.

    Args:
        agreement: What `compare` returned.
        a: What to call the first.
        b: What to call the second.
        max_rows: Longer tables are shortened in the middle.
    """
    facts = _list()
    entries = f"{agreement.numel:,} in {counted(len(agreement.rows), 'parameter')}"
    rounded = "" if agreement.exact else "; ranks and ratios of values rounded to 16 bits"
    facts.add_row(Text("A", style="dim"), Text(a))
    facts.add_row(Text("B", style="dim"), Text(b))
    facts.add_row(Text("common entries", style="dim"), Text(entries + rounded))
    for label, names in (("only in A", agreement.only_a), ("only in B", agreement.only_b)):
        if names:
            facts.add_row(Text(label, style="dim"), Text(f"{len(names):,}: {_listed(names)}", style="yellow"))
    facts.add_row(Text("Spearman", style="dim"), Text(_fixed(agreement.spearman), style="bold"))
    facts.add_row(
        Text("scale A/B", style="dim"),
        Text(f"{_number(agreement.scale)} of the totals, {_number(agreement.median_ratio)} in the median"),
    )

    overlap = _table("largest", "entries of each", "in both", "by chance", title="Overlap of the largest entries")
    cut = False
    for o in agreement.overlaps:
        at_zero = o.threshold_a == 0 or o.threshold_b == 0
        cut |= at_zero
        overlap.add_row(_share(o.fraction), f"{o.k:,}", _share(o.overlap) + ("*" if at_zero else ""), _share(o.chance))
    note = [Text("* reaches into entries that are 0; which of them are taken depends on their place.", style="dim")]

    rows = _table(
        "parameter", "entries", "Spearman", "scale A/B", "median A/B", "overlap at 10%", title="Per parameter"
    )
    labels = _labels(agreement.rows)
    for row in _shortened(agreement.rows, max_rows, rows):
        cells = _fixed(row.spearman), _number(row.scale), _number(row.median_ratio), _share(row.overlap)
        rows.add_row(labels[row.name], f"{row.numel:,}", *cells)
    return Group(facts, Text(), overlap, *(note if cut else []), Text(), rows)


def similarity_json(names: Sequence[str], distances: Tensor) -> dict[str, Any]:
    """Return similarities and distances of tasks as plain values."""
    return {"tasks": list(names), "similarities": (1 - distances).tolist(), "distances": distances.tolist()}


def similarity_table(names: Sequence[str], distances: Tensor) -> RenderableType:
    """Return the similarity (1 − distance) of tasks, like ones side by side; long lists show each task's nearest."""
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


def facts(importance: Importance, health: Health) -> list[tuple[str, str]]:
    """Return what an importance is, as pairs of a label and a few words; what is not known is left out."""
    p = importance.provenance
    optimizer, steps = p.optimizer or {}, p.steps or {}
    known: list[tuple[str, str | None]] = []
    if p.kind == "squisher":
        what = "Squisher: the mean squared gradient that an optimizer kept"
        if p.bias_corrected is False:
            what += ", not bias-corrected"
        known.append(("kind", what))
        beta2 = f", β₂ = {optimizer['beta2']:g}" if optimizer.get("beta2") is not None else ""
        known.append(("optimizer", f"{optimizer['class']}{beta2}" if optimizer.get("class") else None))
        low, high = steps.get("min"), steps.get("max")
        if low is not None and high is not None:
            known.append(("steps", f"{low:,}" if low == high else f"{low:,} to {high:,}"))
        known.append(("batch", _batch(importance)))
    else:
        how = p.estimator or {}
        labels = f", {how['labels']} labels" if how.get("labels") else ""
        per = f", squared per {how['per']}" if how.get("per") else ""
        known.append(("kind", f"Fisher: measured on data{labels}{per}"))
        known.append(("examples", f"{p.examples:,}" if p.examples is not None else None))
    per_unit = p.kind == "fisher" or p.per_unit
    known.append(("unit", (f"mean per {p.unit}" if per_unit else p.unit) if p.unit else None))
    known.append(("scale", f"multiplied by {p.scale:g}" if p.scale != 1 else None))
    known.append(("values", f"{health.totals.numel:,} in {counted(len(health.rows), 'parameter')}"))
    known.append(("source type", p.dtype_of_source))
    known.append(("names", str(p.naming) if p.naming else None))
    low_, high_ = _number(health.totals.min), _number(health.totals.max)
    known.append(
        ("range", f"{low_} to {high_}; mean {_number(health.totals.mean)}, median {_number(health.totals.median)}")
    )
    return [(label, value) for label, value in known if value]


def _batch(importance: Importance) -> str:
    p = importance.provenance
    size = "size not known" if p.batch_size is None else f"{p.batch_size:g} examples"
    tokens = f", {p.batch_tokens:g} tokens" if p.batch_tokens is not None else ""
    reductions = {"mean": "mean loss", "sum": "summed loss", "token_mean": "mean loss over tokens"}
    return f"{size}{tokens}, {reductions.get(p.loss_reduction or '', 'loss reduction not known')}"


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


def _list() -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")  # a path is of no use without its end
    return grid


def _table(first: str, *others: str, title: str | None = None) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, title=title, title_justify="left", title_style="bold")
    table.add_column(first, no_wrap=True, header_style="dim")
    for header in others:
        table.add_column(header, justify="right", no_wrap=True, header_style="dim")
    return table


def _shortened(rows: Sequence[T], max_rows: int, table: Table) -> Iterator[T]:
    """Return the rows, or the first and last of them with a line in the table between that says how many are left out."""
    if len(rows) <= max_rows:
        yield from rows
        return
    head = math.ceil(max_rows / 2)
    tail = max_rows - head
    yield from rows[:head]
    table.add_row(Text(f"… {len(rows) - max_rows:,} left out (--json has all)", style="dim italic"))
    yield from rows[len(rows) - tail :]


def _labels(rows: Sequence[Any]) -> dict[str, str]:
    """Return short forms of the rows' names that still tell them apart."""
    names = [row.name for row in rows]
    return dict(zip(names, short_names(names, _NAME_WIDTH), strict=True))


def _listed(names: Sequence[str], count: int = 4) -> str:
    more = f" and {len(names) - count:,} more" if len(names) > count else ""
    return ", ".join(short_names(names[:count], _NAME_WIDTH)) + more


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3g}"


def _fixed(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3f}"


def _share(value: float) -> str:
    """Return a share in percent, never shown as 0% or 100% unless it is."""
    if math.isnan(value):
        return "–"
    if 0 < value < 0.0005:
        return "<0.1%"
    if 0.9995 <= value < 1:
        return ">99.9%"
    return f"{100 * value:.3g}%"
