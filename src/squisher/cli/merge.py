"""`squisher merge`: merge models, folder to folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import shell


@shell.command(
    shell.USE,
    "squisher merge fisher model-a model-b --out merged --importance a.safetensors --importance b.safetensors",
)
def merge(
    method: Annotated[str, typer.Argument(metavar="METHOD", help="average, fisher, ubgm, task-arithmetic or ota.")],
    models: Annotated[
        list[Path], typer.Argument(metavar="MODEL", help="Folders of models or LoRA adapters, or weight files.")
    ],
    out: shell.OutModel,
    importance: Annotated[
        list[Path] | None,
        typer.Option("--importance", metavar="FILE", help="Importance of each model in turn, or a checkpoint."),
    ] = None,
    base: Annotated[Path | None, typer.Option(metavar="DIR", help="The model that the others started from.")] = None,
    base_importance: Annotated[Path | None, typer.Option(metavar="FILE", help="The importance of the base.")] = None,
    coefficient: Annotated[
        list[float] | None,
        typer.Option("--coefficient", metavar="X", help="The coefficient of each model in turn; 0 drops it."),
    ] = None,
    size: Annotated[
        list[float] | None, typer.Option("--size", metavar="N", help="ubgm: training examples of each model.")
    ] = None,
    base_size: Annotated[float | None, typer.Option(metavar="N", help="ubgm: training examples of the base.")] = None,
    keep: Annotated[
        list[float] | None,
        typer.Option("--keep", metavar="K", help="ota: the fraction of changes kept, once or of each model in turn."),
    ] = None,
    scale: shell.Scale = "auto",
    normalize: Annotated[str | None, typer.Option(metavar="N", help="fisher: mean or l2, per model.")] = None,
    floor: Annotated[
        str, typer.Option(metavar="F", help="relative, a number, or +number to add; δ for ubgm.")
    ] = "relative",
    missing: Annotated[
        str, typer.Option(metavar="M", help="Weights without an importance: error or average.")
    ] = "error",
    exclude: Annotated[str | None, typer.Option(metavar="REGEX", help="Names to keep as in the first model.")] = None,
    dtype: Annotated[str | None, typer.Option(metavar="TYPE", help="float32, bfloat16, float16 or float64.")] = None,
    any_weights: shell.AnyWeights = False,
    overwrite: shell.Overwrite = False,
    as_json: shell.Json = False,
) -> None:
    """Merge models into one, chunk by chunk: models may be larger than memory.

    Without --importance, squisher.safetensors beside each model is used, then its optimizer state.
    """
    from ..errors import check_choice
    from ..integrations.model_folders import METHODS, merge_folders

    check_choice("METHOD", method, METHODS)
    shell.check_target(out, overwrite, *models, *(importance or []), base, base_importance, suffix=None)
    with shell.progress_bar("merging") as progress, shell.notes():
        report = merge_folders(
            method,
            models,
            out,
            importances=importance or (),
            base=base,
            base_importance=base_importance,
            coefficients=coefficient or None,
            sizes=size or None,
            base_size=base_size,
            keep=keep or None,
            scale=scale,
            normalize=normalize,
            floor=floor,
            missing=missing,
            exclude=exclude,
            dtype=dtype,
            any_weights=any_weights,
            progress=progress,
        )
    count = len([c for c in coefficient or [1.0] * len(models) if c])  # 0 drops a model
    shell.print_result(
        as_json,
        {"out": str(out), **report.to_dict()},
        f"{out}: {report.merged} tensors of {count} model{'s' * (count != 1)} merged ({method}).",
        report.adapters or "",
        "; ".join(f"{model}: {used}" for model, used in zip(report.models, report.importances, strict=False)),
        shell.with_reasons("Kept as in the first model", report.kept),
        shell.with_reasons("No importance, averaged", report.averaged),
    )
