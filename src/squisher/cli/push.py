"""`squisher push`: publish an importance beside its model on the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import ArgumentError
from . import shell


@shell.command(shell.MAKE, "squisher push squisher.safetensors hf://owner/name --dry-run")
def push(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An importance file, or a folder that holds one.")],
    address: Annotated[
        str,
        typer.Argument(
            metavar="hf://OWNER/NAME", help="The repository of the model; @revision and /folder may follow."
        ),
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be put there, and ask nothing of the Hub.")
    ] = False,
    create: Annotated[bool, typer.Option("--create", help="Make the repository if there is none.")] = False,
    private: Annotated[bool, typer.Option("--private", help="With --create: make it a private one.")] = False,
    as_json: shell.Json = False,
) -> None:
    """Publish an importance beside its model on the Hub, with one section of the model card that says what it is.

    Nothing else in the repository is touched. The token is that of huggingface_hub (`hf auth login`).
    """
    from ..integrations.publishing import prepare

    if private and not create:
        raise ArgumentError("--private says what a new repository is: give it together with --create.")
    publication = prepare(file, address)
    names = ", ".join(publication.files)
    if as_json:
        document = {"address": str(publication.address), "files": list(publication.files), "bytes": publication.size}
        document["pushed"] = None if dry_run else str(publication.push(create, private))
        shell.print_json({**document, "section": publication.section})
        return
    if dry_run:
        new = f" (a new {'private' if private else 'public'} repository, if there is none)" if create else ""
        typer.echo(f"{publication.address}{new} would get {names} ({publication.size:,} bytes) and in its README.md:\n")
        typer.echo(publication.section)
        return
    typer.echo(f"{publication.address}: {names} ({publication.size:,} bytes), {publication.push(create, private)}")
