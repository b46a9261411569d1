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


def subplots(count: int, size: tuple[float, float]) -> tuple[Any, list[Any]]:
    """A figure with so many panels in a row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, count, figsize=size, squeeze=False)
    for axis in axes[0]:
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    return figure, list(axes[0])


def save(figure: Any, path: Path) -> None:
    """Writes a figure, the same bytes every time."""
    from matplotlib import pyplot

    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None})
    pyplot.close(figure)
