"""`squisher compare`: how far two importances agree."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import SquisherError, check_choice
from . import shell

if TYPE_CHECKING:
    from ..importance import Importance


@shell.command(shell.LOOK, "squisher compare squisher.safetensors fisher.safetensors --json")
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="An importance file, or a checkpoint to extract from.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another importance or checkpoint.")],
    scale: Annotated[
        str, typer.Option(metavar="S", help="stored (as they are), as_fisher, or auto (as_fisher where both can).")
    ] = "stored",
    exclude: shell.LeaveOut = None,
    as_json: shell.Json = False,
    plot: shell.Plot = None,
) -> None:
    """Compare two importances: rank correlation, scale, and overlap of the largest entries."""
    from ..analysis.agreement import compare as measure
    from ..importance import without
    from ..report import compare_tables

    first, second = _scaled([without(shell.open_importance(file), exclude) for file in (a, b)], scale)
    name_a, name_b = shell.distinct_names([a, b]) if a != b else (str(a), str(b))
    with shell.progress_bar("comparing") as progress:
        agreement = measure(first, second, progress=progress)
    if plot is not None:
        from ..report import plot_agreement

        plot_agreement(agreement, first, second, plot, (name_a, name_b))
    if as_json:
        shell.print_json(agreement.to_dict())
    else:
        shell.console().print(compare_tables(agreement, name_a, name_b))


def _scaled(importances: list[Importance], scale: str) -> list[Importance]:
    """Return the importances on the scale of `--scale`."""
    check_choice("--scale", scale, ("stored", "as_fisher", "auto"))
    if scale == "stored":
        return importances
    try:
        return [importance.as_fisher() for importance in importances]
    except SquisherError:
        if scale == "as_fisher":
            raise
        return importances
