"""`squisher mergekit`: mergekit's own pipeline with our Fisher merging."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app import USE, app


@app.command(rich_help_panel=USE, epilog="Example: squisher mergekit config.yml --out merged")
def mergekit(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yml", help="A mergekit configuration.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder to make.")],
) -> None:
    """Run mergekit with the method squisher_fisher: Fisher merging inside its own pipeline."""
    from ..integrations.mergekit import run

    run(config, out)
    typer.echo(f"{out}: merged.")
