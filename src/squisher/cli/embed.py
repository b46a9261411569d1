"""`squisher embed`: an importance summed up into the vector of its task."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app import USE, Json, Overwrite, app, check_target, open_importance, print_json


@app.command(rich_help_panel=USE, epilog="Example: squisher embed squisher.safetensors --out task.safetensors --by row")
def embed(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An importance file, or a checkpoint to extract from.")],
    out: Annotated[Path, typer.Option("--out", metavar="EMB", help="The embedding to write (.safetensors).")],
    by: Annotated[str, typer.Option(help="tensor (one number each), row (as Task2Vec), full.")] = "tensor",
    exclude: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Parameters to leave out, such as heads.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Sum an importance up into the vector of its task."""
    from ..embed import embedding

    check_target(out, overwrite, file)
    vector = embedding(open_importance(file), by=by, exclude=exclude)
    vector.save(out)
    numbers = sum(vector.shape(name).numel() for name in vector)
    if as_json:
        print_json({"file": str(out), "numbers": numbers, "tensors": len(vector), "by": by})
    else:
        typer.echo(f"{out}: {numbers:,} numbers of {len(vector)} tensors, by {by}.")
