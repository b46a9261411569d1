"""The figures of the result pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["COLOURS", "save", "subplots"]

COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#56B4E9",
    "#CC79A7",
    "#E69F00",
    "#000000",
    "#999999",
)  # told apart by colour-blind people too


def subplots(count: int, size: tuple[float, float], rows: int = 1) -> tuple[Any, list[Any]]:
    """A figure with so many panels, in one row or in several."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, -(-count // rows), figsize=size, squeeze=False)
    for axis in axes.flat:
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    for axis in axes.flat[count:]:
        axis.set_visible(False)
    return figure, list(axes.flat[:count])


def save(figure: Any, path: Path) -> None:
    """Writes a figure, the same bytes every time."""
    from matplotlib import pyplot

    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None})
    pyplot.close(figure)
