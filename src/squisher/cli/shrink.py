"""`squisher shrink`: remove the least important channels and heads of a Hugging Face model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import shell


@shell.command(shell.USE, "squisher shrink model --importance squisher.safetensors --sparsity 0.5 --out smaller")
def shrink(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A Hugging Face model folder; it must fit into memory.")
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="The folder to make; squisher.prune.load opens it.")
    ],
    sparsity: Annotated[float, typer.Option(metavar="S", help="The fraction of channels and heads to remove.")],
    importance: shell.OfModel = None,
    scope: Annotated[str, typer.Option(help="global (all layers together) or tensor (each by itself).")] = "global",
    exclude: Annotated[str | None, typer.Option(metavar="REGEX", help="Modules that keep their channels.")] = None,
    any_weights: shell.AnyWeights = False,
    as_json: shell.Json = False,
) -> None:
    """Remove whole channels, neurons and attention heads: the model becomes smaller and faster.

    Layers then have widths of their own, which no config describes: open the folder with squisher.prune.load.
    """
    from ..importance.weights import check_weights
    from ..prune import channels, example_input, load, save
    from ..storage.folders import open_model

    shell.check_target(out, False, model, importance, suffix=None)
    found = shell.open_importance(model if importance is None else importance)
    with shell.notes():
        check_weights([found], [open_model(model).weights], [str(model)], any_weights)
    whole = load(model)
    smaller = channels(whole, found, example_input(whole), sparsity, scope=scope, exclude=exclude)
    save(smaller, out)
    before, after = (sum(p.numel() for p in one.parameters()) for one in (whole, smaller))
    document = {"out": str(out), "parameters_before": before, "parameters": after}
    shell.print_result(as_json, document, f"{out}: {after:,} of {before:,} parameters are left ({after / before:.1%}).")
