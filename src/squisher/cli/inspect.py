"""`squisher inspect`: show an importance's facts, health and distribution."""

from __future__ import annotations

from . import shell


@shell.command(shell.LOOK, "squisher inspect squisher.safetensors --plot importance.svg")
def inspect(file: shell.ImportanceFile, as_json: shell.Json = False, plot: shell.Plot = None) -> None:
    """Show what an importance is, how healthy it is, and how it is distributed."""
    from ..analysis.health import examine
    from ..report import inspect_json, inspect_tables

    importance = shell.open_importance(file)
    with shell.progress_bar("reading") as progress:
        health = examine(importance, progress=progress)
    if plot is not None:
        from ..report import plot_importance

        plot_importance(importance, health, plot)
    if as_json:
        shell.print_json(inspect_json(importance, health))
    else:
        shell.console().print(inspect_tables(importance, health))
