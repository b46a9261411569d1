"""Distances between tasks."""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch import Tensor

from .canvas import figure_at, short_name

__all__ = ["clustered", "plot_distances"]


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
    labels = [short_name(names[k], 28) for k in order]
    count = len(labels)
    side = min(max(4.0, 0.42 * count + 2.5), 30.0)
    with figure_at(path, side + 1.2, side) as figure:
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
