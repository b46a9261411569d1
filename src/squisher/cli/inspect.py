"""`squisher inspect`: what an importance is, its health and its distribution."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app import LOOK, Json, Plot, app, console, open_importance, print_json, progress_bar


@app.command(rich_help_panel=LOOK, epilog="Example: squisher inspect squisher.safetensors --plot importance.svg")
def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An importance file, or a checkpoint to extract from.")],
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Show what an importance is, how healthy it is, and how it is distributed."""
    from ..analysis.health import examine
    from ..report import inspect_json, inspect_tables

    importance = open_importance(file)
    with progress_bar("reading") as progress:
        health = examine(importance, progress=progress)
    if plot is not None:
        from ..report import plot_importance

        plot_importance(importance, health, plot)
    if as_json:
        print_json(inspect_json(importance, health))
    else:
        console().print(inspect_tables(importance, health))
