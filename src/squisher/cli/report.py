"""`squisher report`: show importances and their agreement on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import ArgumentError, SquisherError
from . import shell


@shell.command(shell.LOOK, "squisher report sst2/squisher.safetensors trec6/squisher.safetensors --out report.html")
def report(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="Importance files, or checkpoints to extract from.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="HTML", help="The page to write; it needs no network.")
    ] = None,
    model: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR", help="The model of each FILE, in their order, or one for all: what pruning would cost."
        ),
    ] = None,
    any_weights: shell.AnyWeights = False,
    overwrite: shell.Overwrite = False,
    as_json: shell.Json = False,
) -> None:
    """Show what importances are, how healthy they are, which layers hold them, and how far they agree."""
    if out is None and not as_json:
        raise ArgumentError(
            "report writes a page with --out report.html, or prints its data with --json: give one of them."
        )
    if out is not None:
        if out.suffix.lower() not in (".html", ".htm"):
            raise ArgumentError(f"--out {out}: a report is a page and ends in .html.")
        if out.is_dir():
            raise SquisherError(f"--out {out}: this is a folder; name a file in it.")
        shell.check_target(out, overwrite, *files, *(model or []), suffix=None)
    folders: list[Path | None] = [*(model or ())] or [None]
    if len(folders) == 1:
        folders *= len(files)
    if len(folders) != len(files):
        raise ArgumentError(
            f"{len(files)} importances and {len(folders)} models were given: give --model once for each, in their order, or once."
        )

    from ..importance.weights import check_weights
    from ..report import Subject, collect, report_page, write
    from ..storage.folders import open_model

    subjects = [
        Subject(name, shell.open_importance(file), None if folder is None else open_model(folder).weights)
        for name, file, folder in zip(shell.distinct_names(files), files, folders, strict=True)
    ]
    if len(model or []) > 1 or len(files) == 1:  # one model for several importances cannot belong to each
        with shell.notes():
            checked = [one for one in subjects if one.weights is not None]
            weights = [one.weights or {} for one in checked]
            check_weights([one.importance for one in checked], weights, [one.name for one in checked], any_weights)
    with shell.progress_bar("reading") as progress:
        data = collect(subjects, None if progress is None else lambda _, done, total: progress(done, total))
    if out is not None:
        write(out, report_page(data))
    shell.print_result(as_json, data, f"{out}: {data['summary']}")
