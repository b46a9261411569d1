"""What every figure shares: colours, axes, and a file that is written whole or not at all."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...analysis.distribution import LOG10_EDGES
from ...errors import FileError, SquisherError
from ...storage.atomic import write_file

BLUE, ORANGE, GREY, RED = "#2f6690", "#d9822b", "#8a8a8a", "#b23a48"
LABELLED = 40
"""More parameters than this are numbered instead of named."""
PLACES = len(LOG10_EDGES) - 1

Progress = Callable[[int, int], None]
"""Called with the entries done and the entries in all."""


@contextmanager
def figure_at(path: str | os.PathLike[str], width: float, height: float) -> Iterator[Any]:
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
    write_file(path, buffer.getvalue())


def filled(counts: Sequence[int] | Tensor) -> tuple[int, int]:
    """The first and the last place to show: at most one entry in a thousand lies below, and none above."""
    upto = torch.as_tensor(counts).cumsum(0)
    if not upto[-1]:
        return PLACES // 2, PLACES // 2 + 10
    first = int((upto <= upto[-1] // 1000).sum())
    return first, int((upto < upto[-1]).sum())


def powers_of_ten(axis: Any) -> None:
    """Label an axis of logarithms with what they are the logarithms of."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=2))
    axis.set_major_formatter(FuncFormatter(lambda power, _: f"$10^{{{power:g}}}$"))


def legend_above(axes: Any) -> None:
    """A legend that covers no data, if there is anything to say."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)


def parameter_axis(axes: Any, names: Sequence[str], named: bool) -> None:
    """Parameters from top to bottom, by name or just in order."""
    axes.set_ylim(len(names) - 0.4, -0.6)
    if named:
        axes.set_yticks(range(len(names)), [short_name(name) for name in names], fontsize=7)
        axes.tick_params(axis="y", length=0)
    else:
        axes.set_ylabel("parameter, in the order of the file")
    axes.grid(axis="x", alpha=0.3)


def short_name(name: str, width: int = 36) -> str:
    """A name without its middle, if it is too long."""
    head = (width - 1) // 2
    return name if len(name) <= width else name[:head] + "…" + name[len(name) - (width - 1 - head) :]
