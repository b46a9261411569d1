"""`squisher compare`: how far two importances agree."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app import LOOK, Json, Plot, app, console, distinct_names, open_importance, print_json, progress_bar


@app.command(rich_help_panel=LOOK, epilog="Example: squisher compare squisher.safetensors fisher.safetensors --json")
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="An importance file, or a checkpoint to extract from.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Compare two importances: rank correlation, scale, and overlap of the largest entries."""
    from ..analysis.agreement import compare as measure
    from ..report import compare_json, compare_tables

    first, second = open_importance(a), open_importance(b)
    name_a, name_b = distinct_names([a, b]) if a != b else (str(a), str(b))
    with progress_bar("comparing") as progress:
        agreement = measure(first, second, progress=progress)
    if plot is not None:
        from ..report import plot_agreement

        plot_agreement(agreement, first, second, plot, (name_a, name_b))
    if as_json:
        print_json(compare_json(agreement))
    else:
        console().print(compare_tables(agreement, name_a, name_b))
