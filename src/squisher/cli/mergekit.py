"""`squisher mergekit`: run mergekit's pipeline with our Fisher merging."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import shell


@shell.command(
    shell.USE,
    "squisher mergekit config.yml --out merged --lazy-unpickle",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def mergekit(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yml", help="A mergekit configuration.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder to make.")],
    as_json: shell.Json = False,
) -> None:
    """Run mergekit with the method squisher_fisher: Fisher merging inside mergekit's pipeline.

    Options of mergekit-yaml (--cuda, --lazy-unpickle, ...) are passed on to it.
    """
    from ..integrations.mergekit import run

    with shell.notes():
        run(config, out, context.args)
    shell.print_result(as_json, {"folder": str(out)}, f"{out}: merged.")
