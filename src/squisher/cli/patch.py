"""`squisher patch make` and `squisher patch apply`: store a fine-tune as a sparse difference."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import ArgumentError
from . import shell

patches = typer.Typer(
    help="A fine-tune as base + sparse difference, exact to the bit.",
    no_args_is_help=True,
    epilog="Example: squisher patch make BASE TUNED --mask MASK --drop-outside --out PATCH, then squisher patch apply BASE PATCH --out DIR",
)
shell.app.add_typer(patches, name="patch", rich_help_panel=shell.USE)


@patches.command(
    "make", epilog="Example: squisher patch make base tuned --mask mask.safetensors --out patch.safetensors"
)
def patch_make(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="The model that training started from.")],
    tuned: Annotated[Path, typer.Argument(metavar="TUNED", help="The fine-tuned model.")],
    out: Annotated[Path, typer.Option("--out", metavar="PATCH", help="The patch to write (.safetensors).")],
    mask: Annotated[
        Path | None, typer.Option("--mask", metavar="MASK", help="Refuse differences outside this mask.")
    ] = None,
    drop_outside: Annotated[
        bool, typer.Option("--drop-outside", help="Leave them out instead: the patch gives another model.")
    ] = False,
    overwrite: shell.Overwrite = False,
    as_json: shell.Json = False,
) -> None:
    """Write what a fine-tune changed: the entries whose bits differ, and their new values."""
    from ..mask import load
    from ..patch import make
    from ..storage.folders import open_model

    if drop_outside and mask is None:
        raise ArgumentError("--drop-outside needs --mask: without one nothing is outside.")
    shell.check_target(out, overwrite, base, tuned, mask)
    allowed = None if mask is None else load(mask)
    with shell.progress_bar("comparing") as progress:
        summary = make(
            open_model(base).weights,
            open_model(tuned).weights,
            out,
            mask=allowed,
            drop_outside=drop_outside,
            progress=progress,
        )
    changed, dropped = sum(summary.changed.values()), sum(summary.dropped.values())
    document = {"file": str(out), "changed": changed, "dropped": dropped, "total": summary.total}
    text = f"{out}: {changed:,} of {summary.total:,} entries differ, in {len(summary.changed)} tensors"
    text += f"; {dropped:,} outside the mask were left out." if dropped else "."
    shell.print_result(as_json, {**document, "per_tensor": dict(summary.changed)}, text)


@patches.command("apply", epilog="Example: squisher patch apply base patch.safetensors --out tuned")
def patch_apply(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="The model that the patch was made from.")],
    patch: Annotated[Path, typer.Argument(metavar="PATCH", help="What patch make wrote.")],
    out: shell.OutModel,
    overwrite: shell.Overwrite = False,
    as_json: shell.Json = False,
) -> None:
    """Restore the fine-tuned model from its base and a patch; another base is refused."""
    from ..patch import apply
    from ..storage.folders import open_model, write_model

    shell.check_target(out, overwrite, base, patch, suffix=None)
    opened = open_model(base)
    patched = apply(opened.weights, patch)
    with shell.progress_bar("writing") as progress:
        write_model(out, patched, opened.path, progress=progress)
    shell.print_result(as_json, {"out": str(out), "tensors": len(patched)}, f"{out}: {len(patched)} tensors.")
