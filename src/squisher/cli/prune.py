"""`squisher prune`: set the least important weights to zero."""

from __future__ import annotations

from typing import Annotated

import typer

from . import shell


@shell.command(shell.USE, "squisher prune model --importance squisher.safetensors --sparsity 0.75 --out pruned")
def prune(
    model: shell.ModelPath,
    out: shell.OutModel,
    importance: shell.OfModel = None,
    sparsity: Annotated[float | None, typer.Option(metavar="S", help="The fraction of weights to set to zero.")] = None,
    scope: Annotated[str, typer.Option(help="global (all together) or tensor (each by itself).")] = "global",
    score: Annotated[str, typer.Option(help="fisher (½θ²F), magnitude, importance or random.")] = "fisher",
    nm: Annotated[
        str | None, typer.Option("--nm", metavar="N:M", help="A pattern such as 2:4, not a sparsity.")
    ] = None,
    exclude: shell.LeaveAsIs = None,
    seed: Annotated[int, typer.Option(help="The seed of random scores.")] = 0,
    any_weights: shell.AnyWeights = False,
    overwrite: shell.Overwrite = False,
    as_json: shell.Json = False,
    plot: shell.Plot = None,
) -> None:
    """Set the least important weights of a model to zero, chunk by chunk: it may be larger than memory.

    The zeros make the model neither smaller nor faster by themselves; formats and processors that use them do.
    """
    from ..integrations.model_folders import prune_folder

    shell.check_target(out, overwrite, model, importance, suffix=None)
    with shell.notes(), shell.progress_bar("pruning") as progress:
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
    per_tensor = {name: size - stays for name, (stays, size) in done.counts.items()}
    if plot is not None:
        from ..report import plot_sparsity

        plot_sparsity({name: (per_tensor[name], size) for name, (_, size) in done.counts.items()}, plot, "set to zero")
    document = {"out": str(out), "zeros": done.zeros, "total": done.total, "per_tensor": per_tensor}
    share = done.zeros / max(done.total, 1)
    unranked = ", ".join(done.unranked[:3]) + (", …" if len(done.unranked) > 3 else "")
    shell.print_result(
        as_json,
        {**document, "unranked": done.unranked, "settings": done.settings},
        f"{out}: {done.zeros:,} of {done.total:,} weights in {len(done.counts)} tensors are zero ({share:.2%}).",
        unranked and f"Without an importance, and as they were: {len(done.unranked)} matrices ({unranked}).",
    )
