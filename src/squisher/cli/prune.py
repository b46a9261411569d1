"""`squisher prune`: the least important weights become zero."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .app import (
    USE,
    AnyWeights,
    Json,
    Overwrite,
    Plot,
    app,
    check_target,
    notes,
    open_importance,
    print_json,
    progress_bar,
)

if TYPE_CHECKING:
    from ..importance import Importance


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
    from ..importance.weights import check_weights
    from ..integrations.cards import described, pruning_card
    from ..prune import weights as prune_weights
    from ..storage import hub
    from ..storage.folders import open_model, write_model
    from ..storage.tensors import tied_names

    check_target(out, overwrite, model, importance, suffix=None)
    opened = open_model(model)
    label = hub.Address.read(model).repo if hub.is_hub_id(model) else opened.name
    model = opened.path
    found = _importance_of(model, importance, needed=score in ("fisher", "importance"))
    with notes():
        check_weights([found], [opened.weights], [label], any_weights)
    with progress_bar("ranking") as progress:
        pruned = prune_weights(
            opened.weights,
            found,
            sparsity=sparsity,
            scope=scope,
            score=score,
            nm=nm,
            exclude=exclude,
            seed=seed,
            progress=progress,
        )
    with progress_bar("counting") as progress:
        counts = pruned.counts(progress)
    kept, total = (sum(pair[k] for pair in counts.values()) for k in (0, 1))
    settings = {"sparsity": sparsity, "nm": nm, "scope": scope, "score": score, "exclude": exclude}
    settings["seed"] = seed if score == "random" else None
    said = {key: value for key, value in settings.items() if value is not None}
    card = pruning_card(label, said, None if found is None else described(found), counts)
    with progress_bar("writing") as progress:
        like = model if model.is_dir() else None
        write_model(out, pruned, like, card=card, leave_out=tied_names(opened.weights), progress=progress)
    if plot is not None:
        from ..report import plot_sparsity

        zeros = {name: (size - stays, size) for name, (stays, size) in counts.items()}
        plot_sparsity(zeros, plot, "set to zero")
    if as_json:
        zeros_of = {name: size - stays for name, (stays, size) in counts.items()}
        print_json({"out": str(out), "zeros": total - kept, "total": total, "per_tensor": zeros_of, "settings": said})
        return
    typer.echo(
        f"{out}: {total - kept:,} of {total:,} weights in {len(counts)} tensors are zero ({(total - kept) / total:.2%})."
    )


def _importance_of(model: Path, given: Path | None, needed: bool) -> Importance | None:
    """The importance that was named, or the one beside the model, or one extracted from its optimizer state."""
    if given is not None:
        return open_importance(given)
    if not needed:
        from ..importance import FILE_NAME
        from ..storage import safetensors

        if not (model.is_dir() and safetensors.exists(model / FILE_NAME)):
            return None
    return open_importance(model)
