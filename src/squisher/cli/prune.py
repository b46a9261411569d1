"""`squisher prune`: the least important weights become zero."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app import USE, AnyWeights, Json, Overwrite, Plot, app, check_target, notes, print_json, progress_bar


@app.command(
    rich_help_panel=USE,
    epilog="Example: squisher prune model --importance squisher.safetensors --sparsity 0.75 --out pruned",
)
def prune(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A model folder or weight file, of any size.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder to make, or a .safetensors file.")],
    importance: Annotated[
        Path | None, typer.Option("--importance", metavar="FILE", help="An importance file, or a checkpoint.")
    ] = None,
    sparsity: Annotated[float | None, typer.Option(metavar="S", help="The fraction of weights to set to zero.")] = None,
    scope: Annotated[str, typer.Option(help="global (all together) or tensor (each by itself).")] = "global",
    score: Annotated[str, typer.Option(help="fisher (½θ²F), magnitude, importance or random.")] = "fisher",
    nm: Annotated[
        str | None, typer.Option("--nm", metavar="N:M", help="A pattern such as 2:4, not a sparsity.")
    ] = None,
    exclude: Annotated[str | None, typer.Option(metavar="REGEX", help="Tensors to leave as they are.")] = None,
    seed: Annotated[int, typer.Option(help="Of random scores.")] = 0,
    any_weights: AnyWeights = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Set the least important weights of a model to zero, chunk by chunk: it need not fit into memory.

    The zeros make the model neither smaller nor faster by themselves; formats and processors that use them do.
    """
    from ..integrations.model_folders import prune_folder

    check_target(out, overwrite, model, importance, suffix=None)
    with notes(), progress_bar("pruning") as progress:
        done = prune_folder(
            model,
            out,
            importance,
            any_weights=any_weights,
            sparsity=sparsity,
            scope=scope,
            score=score,
            nm=nm,
            exclude=exclude,
            seed=seed,
            progress=None if progress is None else lambda _, part, whole: progress(part, whole),
        )
    if plot is not None:
        from ..report import plot_sparsity

        plot_sparsity({name: (size - stays, size) for name, (stays, size) in done.counts.items()}, plot, "set to zero")
    if as_json:
        per_tensor = {name: size - stays for name, (stays, size) in done.counts.items()}
        print_json(
            {
                "out": str(out),
                "zeros": done.zeros,
                "total": done.total,
                "per_tensor": per_tensor,
                "settings": done.settings,
            }
        )
        return
    typer.echo(
        f"{out}: {done.zeros:,} of {done.total:,} weights in {len(done.counts)} tensors are zero ({done.zeros / done.total:.2%})."
    )
