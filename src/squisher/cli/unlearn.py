"""`squisher unlearn`: forget some of the training data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app import USE, AnyWeights, Json, Overwrite, app, check_target, notes, open_importance, print_json, progress_bar


@app.command(
    rich_help_panel=USE,
    epilog="Example: squisher unlearn model --importance squisher.safetensors --forget forget.safetensors --out forgot",
)
def unlearn(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A model folder or weight file, of any size.")],
    importance: Annotated[
        Path,
        typer.Option("--importance", metavar="FILE", help="Of all training data; a checkpoint's optimizer will do."),
    ],
    forget: Annotated[Path, typer.Option("--forget", metavar="FILE", help="Of the data to forget: squisher fisher.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder to make, or a .safetensors file.")],
    select: Annotated[
        float, typer.Option(metavar="X", help="Dampen where the forget importance is this many times larger.")
    ] = 10.0,
    strength: Annotated[
        float, typer.Option(metavar="X", help="Weights become strength·F/F_forget of what they were.")
    ] = 1.0,
    scale: Annotated[str, typer.Option(metavar="S", help="auto, as_fisher or stored.")] = "auto",
    exclude: Annotated[str | None, typer.Option(metavar="REGEX", help="Tensors to leave as they are.")] = None,
    any_weights: AnyWeights = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Dampen the weights that matter far more to the data to forget than to all data (selective synaptic dampening)."""
    from ..importance.weights import check_weights
    from ..storage.folders import open_model, write_model
    from ..storage.tensors import tied_names
    from ..unlearn import dampen

    check_target(out, overwrite, model, importance, forget, suffix=None)
    opened, whole, part = open_model(model), open_importance(importance), open_importance(forget)
    with notes():
        check_weights([whole], [opened.weights], [str(model)], any_weights)
        check_weights([part], [opened.weights], [f"{model} (--forget)"], any_weights)
        dampened = dampen(opened.weights, whole, part, select, strength, scale, exclude=exclude)
    with progress_bar("writing") as progress:
        like = model if model.is_dir() else None
        write_model(out, dampened, like, leave_out=tied_names(opened.weights), progress=progress)
    counts = dampened.counts()
    changed, total = sum(changed for changed, _ in counts.values()), sum(total for _, total in counts.values())
    if as_json:
        per_tensor = {name: dampened_here for name, (dampened_here, _) in counts.items()}
        print_json({"out": str(out), "dampened": changed, "total": total, "per_tensor": per_tensor})
        return
    typer.echo(
        f"{out}: {changed:,} of {total:,} weights in {len(counts)} tensors were dampened ({changed / max(total, 1):.2%})."
    )
