"""`squisher export`: write an importance in another tool's format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import shell


@shell.command(shell.USE, "squisher export squisher.safetensors --format ota --out exp_avg_sq.safetensors")
def export(
    file: shell.ImportanceFile,
    to: Annotated[str, typer.Option("--format", help="bergson, squeezellm or ota.")],
    out: Annotated[Path, typer.Option("--out", metavar="OUT", help="The folder to make; for ota a .safetensors file.")],
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="squeezellm: the model that the importance belongs to.")
    ] = None,
    overwrite: shell.Overwrite = False,
    as_json: shell.Json = False,
) -> None:
    """Write an importance in another tool's format."""
    from ..integrations.exports import export as write

    shell.check_target(out, overwrite, file, model, suffix=None)
    written = write(shell.open_importance(file), to, out, model)
    shell.print_result(as_json, {"out": str(out), "format": to, "written": written}, f"{out}: {written}.")
