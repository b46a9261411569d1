"""One importance: how its values are distributed, and what was chosen by it."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from ...analysis.distribution import LOG10_EDGES
from ...analysis.health import Health
from ...importance import Importance
from .canvas import (
    BLUE,
    GREY,
    LABELLED,
    ORANGE,
    RED,
    figure_at,
    filled,
    legend_above,
    parameter_axis,
    powers_of_ten,
)

__all__ = ["plot_importance", "plot_sparsity"]


def plot_importance(importance: Importance, health: Health, path: str | os.PathLike[str]) -> None:
    """Draw how the values are distributed, overall and through the depth of the model.

    Args:
        importance: Names the figure.
        health: What `examine` found.
        path: A `.png` file.

    Raises:
        SquisherError: matplotlib is missing, or the file cannot be written.
    """
    named = len(health.rows) <= LABELLED
    height = max(4.2, 1.6 + 0.19 * len(health.rows)) if named else 6.0
    with figure_at(path, 11.0, height) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
        _draw_distribution(left, health)
        _draw_depth(right, health, named)
        figure.suptitle(_title(importance, health), fontsize=11)


def plot_sparsity(counts: Mapping[str, tuple[int, int]], path: str | os.PathLike[str], what: str) -> None:
    """Draw which share of every tensor is chosen (kept, or set to zero), through the depth of the model.

    Args:
        counts: For each tensor, how many entries are chosen and how many there are.
        path: A `.png` file.
        what: What the chosen ones are, in words.

    Raises:
        SquisherError: matplotlib is missing, or the file cannot be written.
    """
    named = len(counts) <= LABELLED
    chosen, total = (sum(pair[k] for pair in counts.values()) for k in (0, 1))
    shares = [some / size if size else 0.0 for some, size in counts.values()]
    with figure_at(path, 8.0, max(3.0, 1.4 + 0.19 * len(counts)) if named else 6.0) as figure:
        axes = figure.subplots()
        if named:
            axes.barh(range(len(shares)), shares, height=0.7, color=BLUE, alpha=0.85)
        else:
            axes.scatter(shares, range(len(shares)), s=6, color=BLUE, alpha=0.8)
        overall = chosen / total if total else 0.0
        axes.axvline(overall, color=ORANGE, lw=1.4, label=f"all entries {overall:.3%}")
        legend_above(axes)
        axes.set_xlim(0, min(1.0, max([*shares, overall, 1e-6]) * 1.05))
        axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
        axes.set_xlabel(f"share of entries {what}")
        parameter_axis(axes, list(counts), named)


def _title(importance: Importance, health: Health) -> str:
    p = importance.provenance
    what = "Fisher" if p.kind == "fisher" else f"Squisher of {(p.optimizer or {}).get('class', 'an optimizer')}"
    return f"{what}: {health.totals.numel:,} values in {len(health.rows):,} parameters"


def _draw_distribution(axes: Any, health: Health) -> None:
    counts = health.totals.histogram
    first, last = filled(counts)
    edges = LOG10_EDGES[first : last + 2]
    shares = [count / max(1, health.totals.numel) for count in counts[first : last + 1]]
    axes.stairs(shares, edges, fill=True, color=BLUE, alpha=0.85)
    axes.set_xlim(edges[0] - 0.3, edges[-1] + 0.3)
    for value, label, color in ((health.totals.median, "median", ORANGE), (health.totals.mean, "mean", RED)):
        if value > 0:
            axes.axvline(math.log10(value), color=color, lw=1.4, label=f"{label} {value:.2g}")
    axes.set_xlabel("value")
    axes.set_ylabel("share of entries per tenth of a decade")
    axes.set_ylim(0, max(shares, default=0) * 1.15 or 1)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8, loc="upper left")
    hidden = [(health.totals.zeros, "zeros"), (sum(counts[:first]), "smallest values")]
    note = " and ".join(f"{number:,} {what}" for number, what in hidden if number)
    axes.set_title(f"{note} not shown" if note else "", fontsize=9)
    powers_of_ten(axes.xaxis)


def _draw_depth(axes: Any, health: Health, named: bool) -> None:
    rows = health.rows
    place = list(range(len(rows)))
    shown = [i for i in place if rows[i].values.p90 > 0]
    floor = min((rows[i].values.p10 for i in shown if rows[i].values.p10 > 0), default=1.0)
    lows = [math.log10(rows[i].values.p10 or floor) for i in shown]
    highs = [math.log10(rows[i].values.p90) for i in shown]
    axes.hlines(shown, lows, highs, color=BLUE, lw=2.2 if named else 1.0, alpha=0.45, zorder=1)
    for key, color, marker in (("median", BLUE, "o"), ("mean", RED, "|")):
        points = [(math.log10(getattr(rows[i].values, key)), i) for i in shown if getattr(rows[i].values, key) > 0]
        label = "median, 10% to 90%" if key == "median" else key
        if points:
            size = (22 if marker == "o" else 50) if named else (5 if marker == "o" else 12)
            axes.scatter(*zip(*points, strict=True), s=size, color=color, marker=marker, label=label, zorder=2)
    empty = [i for i in place if i not in set(shown)]
    if empty and shown:
        axes.scatter([math.log10(floor)] * len(empty), empty, marker="x", s=18, color=GREY, label="zero or invalid")
    parameter_axis(axes, [row.name for row in rows], named)
    axes.set_xlabel("value")
    legend_above(axes)
    powers_of_ten(axes.xaxis)
