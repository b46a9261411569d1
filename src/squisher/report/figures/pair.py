"""Two importances against each other."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...analysis.agreement import Agreement
from ...analysis.distribution import LOG10_EDGES, places_of
from ...importance import Importance
from .canvas import (
    BLUE,
    GREY,
    LABELLED,
    ORANGE,
    PLACES,
    RED,
    Progress,
    figure_at,
    filled,
    legend_above,
    parameter_axis,
    powers_of_ten,
)  # fmt: skip

__all__ = ["joint_counts", "plot_agreement"]


def plot_agreement(
    agreement: Agreement,
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    names: tuple[str, str] = ("A", "B"),
    progress: Progress | None = None,
) -> None:
    """Draw two importances against each other: their joint density, ranks per parameter, and overlap.

    Args:
        agreement: What `compare(a, b)` returned.
        a: The first importance; read once more, in pieces.
        b: The second.
        path: A `.png` file.
        names: What to call them.
        progress: Called with the entries done and the entries in all.

    Raises:
        SquisherError: matplotlib is missing, or the file cannot be written.
    """
    named = len(agreement.rows) <= LABELLED
    height = max(4.4, 1.6 + 0.19 * len(agreement.rows)) if named else 5.0
    with figure_at(path, 14.0, height) as figure:
        counts = joint_counts(agreement, a, b, progress)
        left, middle, right = figure.subplots(1, 3, width_ratios=(1.15, 1.1, 1))
        _draw_density(figure, left, counts, agreement, names)
        _draw_spearman(middle, agreement, named)
        _draw_overlap(right, agreement)


def joint_counts(
    agreement: Agreement, a: Mapping[str, Tensor], b: Mapping[str, Tensor], progress: Progress | None = None
) -> Tensor:
    """How many entries have a in one and b in the other tenth of a decade; entries that are 0 in either are left out."""
    sides = [side if isinstance(side, Importance) else Importance(side) for side in (a, b)]
    counts = torch.zeros(PLACES * PLACES, dtype=torch.int64)
    done = 0
    for row in agreement.rows:
        for x, y in zip(sides[0].chunks(row.name), sides[1].chunks(row.name), strict=True):
            both = (x > 0) & (y > 0)
            place = places_of(x[both]) * PLACES + places_of(y[both])
            counts.index_add_(0, place, torch.ones_like(place))
            done += x.numel()
            if progress:
                progress(done, agreement.numel)
    return counts.view(PLACES, PLACES)


def _draw_density(figure: Any, axes: Any, counts: Tensor, agreement: Agreement, names: tuple[str, str]) -> None:
    from matplotlib.colors import LogNorm

    across, along = filled(counts.sum(1)), filled(counts.sum(0))
    first, last = min(across[0], along[0]), max(across[1], along[1])
    edges = LOG10_EDGES[first : last + 2]
    part = counts[first : last + 1, first : last + 1].double().T
    norm = LogNorm(vmin=1, vmax=max(2.0, float(part.max())))
    mesh = axes.pcolormesh(edges, edges, part.masked_fill(part == 0, math.nan).numpy(), norm=norm, cmap="viridis")
    figure.colorbar(mesh, ax=axes, label="entries", shrink=0.85)
    ends = [edges[0], edges[-1]]
    axes.plot(ends, ends, color=GREY, lw=1, ls="--", label="equal")
    if agreement.median_ratio > 0:
        shift = -math.log10(agreement.median_ratio)
        axes.plot(ends, [end + shift for end in ends], color=ORANGE, lw=1.2, label="median ratio")
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    axes.set_aspect("equal")
    axes.set_xlabel(names[0])
    axes.set_ylabel(names[1])
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    left_out = agreement.numel - int(part.sum())
    note = f"; {left_out:,} not shown (0 or off the edge)" if left_out else ""
    axes.set_title(f"{agreement.numel:,} entries{note}", fontsize=9)
    powers_of_ten(axes.xaxis)
    powers_of_ten(axes.yaxis)


def _draw_spearman(axes: Any, agreement: Agreement, named: bool) -> None:
    rows = agreement.rows
    known = [(i, row.spearman) for i, row in enumerate(rows) if not math.isnan(row.spearman)]
    if known and named:
        axes.barh(*zip(*known, strict=True), height=0.7, color=BLUE, alpha=0.85)
    elif known:
        axes.scatter([value for _, value in known], [i for i, _ in known], s=6, color=BLUE, alpha=0.8)
    if not math.isnan(agreement.spearman):
        axes.axvline(agreement.spearman, color=ORANGE, lw=1.4, label=f"all entries {agreement.spearman:.3f}")
        legend_above(axes)
    axes.set_xlim(min([0.0, *(value for _, value in known)]), 1)
    axes.set_xlabel("Spearman correlation")
    parameter_axis(axes, [row.name for row in rows], named)


def _draw_overlap(axes: Any, agreement: Agreement) -> None:
    shares = [o.fraction for o in agreement.overlaps]
    axes.plot(shares, [o.overlap for o in agreement.overlaps], "o-", color=BLUE, ms=4, label="in both")
    axes.plot(shares, [o.chance for o in agreement.overlaps], "--", color=GREY, label="by chance")
    reaching = [o for o in agreement.overlaps if o.threshold_a == 0 or o.threshold_b == 0]
    if reaching:
        label = "reaches into zeros"
        axes.plot([o.fraction for o in reaching], [o.overlap for o in reaching], "x", color=RED, ms=9, label=label)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    axes.set_xticks(shares, [f"{100 * share:g}%" for share in shares], fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("largest entries of each")
    axes.set_ylabel("overlap")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
