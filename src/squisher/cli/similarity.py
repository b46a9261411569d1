"""`squisher similarity`: show how similar tasks are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import ArgumentError
from . import shell


@shell.command(shell.LOOK, "squisher similarity a.safetensors b.safetensors c.safetensors --plot tasks.svg")
def similarity(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="Embeddings, importances or checkpoints of tasks.")
    ],
    scale: shell.Scale = "auto",
    by: Annotated[str, typer.Option(help="How importances are summed up first: tensor, row or full.")] = "tensor",
    exclude: shell.LeaveOut = None,
    as_json: shell.Json = False,
    plot: shell.Plot = None,
) -> None:
    """Show how similar tasks are: 1 for the same, 0 for nothing in common."""
    from ..embed import distances, embedding

    if len(files) < 2:
        raise ArgumentError("similarity compares at least two files.")
    tasks = {}
    for name, file in zip(shell.distinct_names(files), files, strict=True):
        importance = shell.open_importance(file)
        embedded = importance.provenance.embedding is not None
        tasks[name] = importance if embedded else embedding(importance, by=by)
    names, matrix = distances(tasks, scale=scale, exclude=exclude)
    if plot is not None:
        from ..report import plot_similarities

        plot_similarities(names, matrix, plot)
    from ..report import similarity_json, similarity_table

    if as_json:
        shell.print_json(similarity_json(names, matrix))
    else:
        shell.console().print(similarity_table(names, matrix))
