"""`squisher unlearn`: forget some of the training data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import shell


@shell.command(
    shell.USE, "squisher unlearn model --importance squisher.safetensors --forget forget.safetensors --out forgot"
)
def unlearn(
    model: shell.ModelPath,
    importance: Annotated[
        Path,
        typer.Option("--importance", metavar="FILE", help="The importance of all training data, or a checkpoint."),
    ],
    forget: Annotated[
        Path,
        typer.Option("--forget", metavar="FILE", help="The importance of the data to forget, from squisher fisher."),
    ],
    out: shell.OutModel,
    select: Annotated[
        float, typer.Option(metavar="X", help="Dampen where the forget importance is this many times larger.")
    ] = 10.0,
    strength: Annotated[
        float, typer.Option(metavar="X", help="Weights become strength·F/F_forget of what they were.")
    ] = 1.0,
    scale: shell.Scale = "auto",
    exclude: shell.LeaveAsIs = None,
    any_weights: shell.AnyWeights = False,
    overwrite: shell.Overwrite = False,
    as_json: shell.Json = False,
) -> None:
    """Dampen the weights that matter far more to the data to forget than to all data (selective synaptic dampening)."""
    from ..importance.weights import check_weights
    from ..storage.folders import open_model, write_model
    from ..storage.tensors import tied_names
    from ..unlearn import dampen

    shell.check_target(out, overwrite, model, importance, forget, suffix=None)
    opened, whole, part = open_model(model), shell.open_importance(importance), shell.open_importance(forget)
    with shell.notes():
        check_weights([whole], [opened.weights], [str(model)], any_weights)
        check_weights([part], [opened.weights], [f"{model} (--forget)"], any_weights)
        dampened = dampen(opened.weights, whole, part, select, strength, scale, exclude=exclude)
    with shell.progress_bar("writing") as progress:
        write_model(out, dampened, opened.path, leave_out=tied_names(opened.weights), progress=progress)
    counts = dampened.counts()
    changed, total = sum(changed for changed, _ in counts.values()), sum(total for _, total in counts.values())
    if 2 * changed > total:
        typer.echo(
            f"Note: {changed / total:.0%} of the weights were dampened, far more than forgetting should take: the scales of the two "
            "importances may differ, or --select is too small.",
            err=True,
        )
    document = {"out": str(out), "dampened": changed, "total": total}
    text = f"{out}: {changed:,} of {total:,} weights in {len(counts)} tensors were dampened ({changed / max(total, 1):.2%})."
    shell.print_result(as_json, {**document, "per_tensor": {name: some for name, (some, _) in counts.items()}}, text)
