"""`squisher similarity`: how much tasks have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import SquisherError
from .app import LOOK, Json, Plot, app, console, open_importance, print_json


@app.command(
    rich_help_panel=LOOK,
    epilog="Example: squisher similarity a.safetensors b.safetensors c.safetensors --plot tasks.png",
)
def similarity(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Embeddings, importances or checkpoints of tasks.")
    ],
    scale: Annotated[str, typer.Option(metavar="S", help="auto, as_fisher or stored.")] = "auto",
    by: Annotated[str, typer.Option(help="How importances are summed up first: tensor, row or full.")] = "tensor",
    exclude: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Parameters to leave out, such as heads.")
    ] = None,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Show how far apart tasks are: 0 for the same, 1 for nothing in common."""
    from ..embed import distances, embedding

    if len(files) < 2:
        raise SquisherError("similarity compares at least two files.")
    tasks = {}
    for name, file in zip(_labels(files), files, strict=True):
        importance = open_importance(file)
        embedded = "embedding" in importance.provenance.extra
        tasks[name] = importance if embedded else embedding(importance, by=by, exclude=exclude)
    names, matrix = distances(tasks, scale=scale, exclude=exclude)
    if plot is not None:
        from ..report import plot_distances

        plot_distances(names, matrix, plot)
    if as_json:
        print_json({"tasks": names, "distances": matrix.tolist()})
        return
    from ..report import distance_table

    console().print(distance_table(names, matrix))


def _labels(files: list[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    for depth in range(1, 8):
        labels = ["/".join(file.with_suffix("").parts[-depth:]) for file in files]
        if len(set(labels)) == len(labels):
            return labels
    raise SquisherError("The same file was given twice; every task needs a file of its own.")
