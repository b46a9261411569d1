"""Figures, as PNG files whose bytes depend on nothing but the data and matplotlib's version."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .agreement import Agreement
from .distribution import LOG10_EDGES, places_of
from .errors import FileError, SquisherError
from .health import Health
from .importance import Importance

__all__ = ["plot_agreement", "plot_distances", "plot_importance", "plot_sparsity"]

_BLUE, _ORANGE, _GREY, _RED = "#2f6690", "#d9822b", "#8a8a8a", "#b23a48"
_LABELLED = 40  # more parameters than this are numbered instead of named
_PLACES = len(LOG10_EDGES) - 1

Progress = Callable[[int, int], None]
"""Called with the entries done and the entries in all."""


def plot_importance(importance: Importance, health: Health, path: str | os.PathLike[str]) -> None:
    """Draw how the values are distributed, overall and through the depth of the model.

    Args:
        importance: Names the figure.
        health: What `examine` found.
        path: A `.png` file.

    Raises:
        SquisherError: matplotlib is missing, or the file cannot be written.
    """
    named = len(health.rows) <= _LABELLED
    height = max(4.2, 1.6 + 0.19 * len(health.rows)) if named else 6.0
    with _figure(path, 11.0, height) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
        _draw_distribution(left, health)
        _draw_depth(right, health, named)
        figure.suptitle(_title(importance, health), fontsize=11)


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
    named = len(agreement.rows) <= _LABELLED
    height = max(4.4, 1.6 + 0.19 * len(agreement.rows)) if named else 5.0
    with _figure(path, 14.0, height) as figure:
        counts = joint_counts(agreement, a, b, progress)
        left, middle, right = figure.subplots(1, 3, width_ratios=(1.15, 1.1, 1))
        _draw_density(figure, left, counts, agreement, names)
        _draw_spearman(middle, agreement, named)
        _draw_overlap(right, agreement)


# -- one importance ----------------------------------------------------------------------------------------------------


def plot_distances(names: Sequence[str], matrix: Tensor, path: str | os.PathLike[str]) -> None:
    """A heat map of the distances between tasks, with like ones side by side.

    Args:
        names: The tasks.
        matrix: Their distances, symmetric.
        path: The PNG to write.

    Raises:
        SquisherError: matplotlib is not installed.
    """
    order = clustered(matrix)
    labels = [_short(names[k], 28) for k in order]
    count = len(labels)
    side = min(max(4.0, 0.42 * count + 2.5), 30.0)
    with _figure(path, side + 1.2, side) as figure:
        axes = figure.subplots()
        values = matrix[order][:, order].numpy()
        image = axes.imshow(values, cmap="viridis_r", vmin=0.0, vmax=max(float(values.max()), 1e-12))
        axes.set_xticks(range(count), labels, rotation=45, ha="right", rotation_mode="anchor")
        axes.set_yticks(range(count), labels)
        axes.tick_params(length=0, labelsize=9 if count <= 30 else 6)
        if count <= 16:
            middle = float(values.max()) / 2
            for row in range(count):
                for column in range(count):
                    colour = "white" if values[row, column] > middle else "black"
                    axes.text(
                        column, row, f"{values[row, column]:.2f}", ha="center", va="center", color=colour, fontsize=8
                    )
        figure.colorbar(image, ax=axes, shrink=0.8, label="distance (0 = the same)")
        axes.set_title("Distance between tasks", loc="left", fontsize=11)


def plot_sparsity(counts: Mapping[str, tuple[int, int]], path: str | os.PathLike[str], what: str) -> None:
    """Draw which share of every tensor is chosen (kept, or set to zero), through the depth of the model.

    Args:
        counts: For each tensor, how many entries are chosen and how many there are.
        path: A `.png` file.
        what: What the chosen ones are, in words.

    Raises:
        SquisherError: matplotlib is missing, or the file cannot be written.
    """
    named = len(counts) <= _LABELLED
    chosen, total = (sum(pair[k] for pair in counts.values()) for k in (0, 1))
    shares = [some / size if size else 0.0 for some, size in counts.values()]
    with _figure(path, 8.0, max(3.0, 1.4 + 0.19 * len(counts)) if named else 6.0) as figure:
        axes = figure.subplots()
        if named:
            axes.barh(range(len(shares)), shares, height=0.7, color=_BLUE, alpha=0.85)
        else:
            axes.scatter(shares, range(len(shares)), s=6, color=_BLUE, alpha=0.8)
        overall = chosen / total if total else 0.0
        axes.axvline(overall, color=_ORANGE, lw=1.4, label=f"all entries {overall:.3%}")
        _legend_above(axes)
        axes.set_xlim(0, min(1.0, max([*shares, overall, 1e-6]) * 1.05))
        axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
        axes.set_xlabel(f"share of entries {what}")
        _parameter_axis(axes, list(counts), named)


def clustered(matrix: Tensor) -> list[int]:
    """An order of the rows that puts like ones side by side: average linkage, the nearer end of each cluster inwards."""
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


def _title(importance: Importance, health: Health) -> str:
    p = importance.provenance
    what = "Fisher" if p.kind == "fisher" else f"Squisher of {(p.optimizer or {}).get('class', 'an optimizer')}"
    return f"{what}: {health.totals.numel:,} values in {len(health.rows):,} parameters"


def _draw_distribution(axes: Any, health: Health) -> None:
    counts = health.totals.histogram
    first, last = _filled(counts)
    edges = LOG10_EDGES[first : last + 2]
    shares = [count / max(1, health.totals.numel) for count in counts[first : last + 1]]
    axes.stairs(shares, edges, fill=True, color=_BLUE, alpha=0.85)
    axes.set_xlim(edges[0] - 0.3, edges[-1] + 0.3)
    for value, label, color in ((health.totals.median, "median", _ORANGE), (health.totals.mean, "mean", _RED)):
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
    _powers_of_ten(axes.xaxis)


def _draw_depth(axes: Any, health: Health, named: bool) -> None:
    rows = health.rows
    place = list(range(len(rows)))
    shown = [i for i in place if rows[i].values.p90 > 0]
    floor = min((rows[i].values.p10 for i in shown if rows[i].values.p10 > 0), default=1.0)
    lows = [math.log10(rows[i].values.p10 or floor) for i in shown]
    highs = [math.log10(rows[i].values.p90) for i in shown]
    axes.hlines(shown, lows, highs, color=_BLUE, lw=2.2 if named else 1.0, alpha=0.45, zorder=1)
    for key, color, marker in (("median", _BLUE, "o"), ("mean", _RED, "|")):
        points = [(math.log10(getattr(rows[i].values, key)), i) for i in shown if getattr(rows[i].values, key) > 0]
        label = "median, 10% to 90%" if key == "median" else key
        if points:
            size = (22 if marker == "o" else 50) if named else (5 if marker == "o" else 12)
            axes.scatter(*zip(*points, strict=True), s=size, color=color, marker=marker, label=label, zorder=2)
    empty = [i for i in place if i not in set(shown)]
    if empty and shown:
        axes.scatter([math.log10(floor)] * len(empty), empty, marker="x", s=18, color=_GREY, label="zero or invalid")
    _parameter_axis(axes, [row.name for row in rows], named)
    axes.set_xlabel("value")
    _legend_above(axes)
    _powers_of_ten(axes.xaxis)


# -- two importances ---------------------------------------------------------------------------------------------------


def joint_counts(
    agreement: Agreement, a: Mapping[str, Tensor], b: Mapping[str, Tensor], progress: Progress | None = None
) -> Tensor:
    """How many entries have a in one and b in the other tenth of a decade; entries that are 0 in either are left out."""
    sides = [side if isinstance(side, Importance) else Importance(side) for side in (a, b)]
    counts = torch.zeros(_PLACES * _PLACES, dtype=torch.int64)
    done = 0
    for row in agreement.rows:
        for x, y in zip(sides[0].chunks(row.name), sides[1].chunks(row.name), strict=True):
            both = (x > 0) & (y > 0)
            place = places_of(x[both]) * _PLACES + places_of(y[both])
            counts.index_add_(0, place, torch.ones_like(place))
            done += x.numel()
            if progress:
                progress(done, agreement.numel)
    return counts.view(_PLACES, _PLACES)


def _draw_density(figure: Any, axes: Any, counts: Tensor, agreement: Agreement, names: tuple[str, str]) -> None:
    from matplotlib.colors import LogNorm

    across, along = _filled(counts.sum(1)), _filled(counts.sum(0))
    first, last = min(across[0], along[0]), max(across[1], along[1])
    edges = LOG10_EDGES[first : last + 2]
    part = counts[first : last + 1, first : last + 1].double().T
    norm = LogNorm(vmin=1, vmax=max(2.0, float(part.max())))
    mesh = axes.pcolormesh(edges, edges, part.masked_fill(part == 0, math.nan).numpy(), norm=norm, cmap="viridis")
    figure.colorbar(mesh, ax=axes, label="entries", shrink=0.85)
    ends = [edges[0], edges[-1]]
    axes.plot(ends, ends, color=_GREY, lw=1, ls="--", label="equal")
    if agreement.median_ratio > 0:
        shift = -math.log10(agreement.median_ratio)
        axes.plot(ends, [end + shift for end in ends], color=_ORANGE, lw=1.2, label="median ratio")
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    axes.set_aspect("equal")
    axes.set_xlabel(names[0])
    axes.set_ylabel(names[1])
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    left_out = agreement.numel - int(part.sum())
    note = f"; {left_out:,} not shown (0 or off the edge)" if left_out else ""
    axes.set_title(f"{agreement.numel:,} entries{note}", fontsize=9)
    _powers_of_ten(axes.xaxis)
    _powers_of_ten(axes.yaxis)


def _draw_spearman(axes: Any, agreement: Agreement, named: bool) -> None:
    rows = agreement.rows
    known = [(i, row.spearman) for i, row in enumerate(rows) if not math.isnan(row.spearman)]
    if known and named:
        axes.barh(*zip(*known, strict=True), height=0.7, color=_BLUE, alpha=0.85)
    elif known:
        axes.scatter([value for _, value in known], [i for i, _ in known], s=6, color=_BLUE, alpha=0.8)
    if not math.isnan(agreement.spearman):
        axes.axvline(agreement.spearman, color=_ORANGE, lw=1.4, label=f"all entries {agreement.spearman:.3f}")
        _legend_above(axes)
    axes.set_xlim(min([0.0, *(value for _, value in known)]), 1)
    axes.set_xlabel("Spearman correlation")
    _parameter_axis(axes, [row.name for row in rows], named)


def _draw_overlap(axes: Any, agreement: Agreement) -> None:
    shares = [o.fraction for o in agreement.overlaps]
    axes.plot(shares, [o.overlap for o in agreement.overlaps], "o-", color=_BLUE, ms=4, label="in both")
    axes.plot(shares, [o.chance for o in agreement.overlaps], "--", color=_GREY, label="by chance")
    reaching = [o for o in agreement.overlaps if o.threshold_a == 0 or o.threshold_b == 0]
    if reaching:
        label = "reaches into zeros"
        axes.plot([o.fraction for o in reaching], [o.overlap for o in reaching], "x", color=_RED, ms=9, label=label)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    axes.set_xticks(shares, [f"{100 * share:g}%" for share in shares], fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("largest entries of each")
    axes.set_ylabel("overlap")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, fontsize=8, loc="upper left")


# -- drawing -----------------------------------------------------------------------------------------------------------


@contextmanager
def _figure(path: str | os.PathLike[str], width: float, height: float) -> Iterator[Any]:
    """An empty figure that is written, whole or not at all, when nothing went wrong."""
    path = Path(path)
    if path.suffix.lower() != ".png":
        raise SquisherError(f"Figures are written as .png files, not as {path.name!r}.")
    if not path.parent.is_dir():
        raise FileError(f"The folder {path.parent} for the figure does not exist.")
    try:
        import matplotlib.style
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SquisherError("Figures need matplotlib: pip install 'torch-squisher[plots]'") from error
    # No pyplot and no settings of the user's: no window, no global state, and the same bytes everywhere.
    with matplotlib.style.context("default"):
        figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(buffer.getvalue())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise FileError(f"Cannot write {path}: {error.strerror or error}.") from error


def _filled(counts: Sequence[int] | Tensor) -> tuple[int, int]:
    """The first and the last place to show: at most one entry in a thousand lies below, and none above."""
    upto = torch.as_tensor(counts).cumsum(0)
    if not upto[-1]:
        return _PLACES // 2, _PLACES // 2 + 10
    first = int((upto <= upto[-1] // 1000).sum())
    return first, int((upto < upto[-1]).sum())


def _powers_of_ten(axis: Any) -> None:
    """Label an axis of logarithms with what they are the logarithms of."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=2))
    axis.set_major_formatter(FuncFormatter(lambda power, _: f"$10^{{{power:g}}}$"))


def _legend_above(axes: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)


def _parameter_axis(axes: Any, names: Sequence[str], named: bool) -> None:
    axes.set_ylim(len(names) - 0.4, -0.6)
    if named:
        axes.set_yticks(range(len(names)), [_short(name) for name in names], fontsize=7)
        axes.tick_params(axis="y", length=0)
    else:
        axes.set_ylabel("parameter, in the order of the file")
    axes.grid(axis="x", alpha=0.3)


def _short(name: str, width: int = 36) -> str:
    head = (width - 1) // 2
    return name if len(name) <= width else name[:head] + "…" + name[len(name) - (width - 1 - head) :]
