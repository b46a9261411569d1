"""`squisher mask`: choose the entries that a sparse fine-tune may move."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import shell


@shell.command(shell.USE, "squisher mask squisher.safetensors --keep 0.005 --always classifier --out mask.safetensors")
def mask(
    file: shell.ImportanceFile,
    keep: Annotated[float, typer.Option(metavar="K", help="The fraction of entries that may train.")],
    out: Annotated[Path, typer.Option("--out", metavar="MASK", help="The mask to write (.safetensors).")],
    always: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Parameters that train whole, inside the budget.")
    ] = None,
    smallest: Annotated[
        bool, typer.Option("--smallest", help="Take the least important entries: protect what mattered so far.")
    ] = False,
    minimum: Annotated[
        float, typer.Option(metavar="F", help="The fraction of every tensor that is kept at least.")
    ] = 0.0,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The model, where parameters without importance count.")
    ] = None,
    overwrite: shell.Overwrite = False,
    as_json: shell.Json = False,
    plot: shell.Plot = None,
) -> None:
    """Choose the entries that a sparse fine-tune may move: the most important ones."""
    from ..mask import top_k
    from ..storage.folders import open_model

    shell.check_target(out, overwrite, file, model)
    weights = None if model is None else open_model(model).weights
    with shell.progress_bar("ranking") as progress, shell.notes():
        chosen = top_k(
            shell.open_importance(file),
            keep,
            always,
            model=weights,
            largest=not smallest,
            minimum=minimum,
            progress=progress,
        )
    chosen.save(out)
    kept = {name: chosen.count(name) for name in chosen}
    if plot is not None:
        from ..report import plot_sparsity

        plot_sparsity({name: (kept[name], chosen.shape(name).numel()) for name in chosen}, plot, "kept")
    document = {"file": str(out), "kept": chosen.kept, "total": chosen.total, "per_tensor": kept}
    text = f"{out}: {chosen.kept:,} of {chosen.total:,} entries in {len(chosen)} tensors may train."
    shell.print_result(as_json, document, text)
    if not chosen.kept:
        typer.echo(
            f"This mask freezes everything: {keep:g} of {chosen.total:,} entries is less than one; give a larger --keep.",
            err=True,
        )
