"""`squisher embed`: sum an importance up into the vector of its task."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import shell


@shell.command(shell.USE, "squisher embed squisher.safetensors --out task.safetensors --by row")
def embed(
    file: shell.ImportanceFile,
    out: Annotated[Path, typer.Option("--out", metavar="EMB", help="The embedding to write (.safetensors).")],
    by: Annotated[str, typer.Option(help="tensor (one number each), row (as Task2Vec), full.")] = "tensor",
    exclude: shell.LeaveOut = None,
    overwrite: shell.Overwrite = False,
    as_json: shell.Json = False,
) -> None:
    """Sum an importance up into the vector of its task."""
    from ..embed import embedding

    shell.check_target(out, overwrite, file)
    vector = embedding(shell.open_importance(file), by=by, exclude=exclude)
    vector.save(out)
    numbers = sum(vector.shape(name).numel() for name in vector)
    document = {"file": str(out), "numbers": numbers, "tensors": len(vector), "by": by}
    shell.print_result(as_json, document, f"{out}: {numbers:,} numbers of {len(vector)} tensors, by {by}.")
