"""Commands that make an importance or look at one: extract, fisher, inspect, compare."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .app import (
    Json,
    Plot,
    app,
    check_target,
    console,
    open_importance,
    print_json,
    progress_bar,
    whole,
)

if TYPE_CHECKING:
    from ..importance import Importance


@app.command(
    epilog="Example: squisher extract checkpoint-500 --out squisher.safetensors --batch-size 32",
)
def extract(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="What training saved: a checkpoint file or folder.")],
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="The importance to write (.safetensors, or a folder).")
    ],
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The model, where the source does not say enough.")
    ] = None,
    base_model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The weights that training started from.")
    ] = None,
    names: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Names in the optimizer's order, one a line.")
    ] = None,
    trainable: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Only matching parameters were trained.")
    ] = None,
    optimizer: Annotated[int | None, typer.Option(metavar="K", help="Which of several optimizers, from 0.")] = None,
    batch_size: Annotated[
        float | None, typer.Option(metavar="B", help="Examples per step: per device × accumulation × processes.")
    ] = None,
    batch_tokens: Annotated[float | None, typer.Option(metavar="T", help="Mean loss-bearing tokens per step.")] = None,
    beta2: Annotated[
        float | None, typer.Option(metavar="X", help="β₂, for sources that do not record it (optax).")
    ] = None,
    loss_reduction: Annotated[str | None, typer.Option(metavar="R", help="mean, sum or token_mean.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="The accumulator as it is stored, without bias correction.")
    ] = False,
    dtype: Annotated[str | None, typer.Option(metavar="TYPE", help="float32 (default) or bfloat16.")] = None,
    allow_coarse: Annotated[bool, typer.Option("--allow-coarse", help="Accept states of four bits.")] = False,
    as_json: Json = False,
) -> None:
    """Turn an optimizer state into a named, self-describing importance file.

    No code in the source is ever executed. Names are proven, or the command says what would settle them.
    """
    from ..importance import FILE_NAME
    from ..recycle import extract as recycle

    target = out / FILE_NAME if out.is_dir() else out
    check_target(target)
    importance = recycle(
        source,
        model=model,
        names=names,
        batch_size=whole(batch_size),
        bias_correction=not raw,
        loss_reduction=loss_reduction,
        batch_tokens=whole(batch_tokens),
        beta2=beta2,
        trainable=trainable,
        base_model=base_model,
        optimizer=optimizer,
        allow_coarse=allow_coarse,
    )
    with progress_bar("writing") as progress:
        importance.save(target, dtype=dtype, progress=progress)
    if as_json:
        from ..importance import load

        print_json({"file": str(target), "tensors": len(importance), "provenance": load(target).provenance.to_dict()})
        return
    console().print(_extracted(importance, target), highlight=False, soft_wrap=True)


@app.command(epilog="Example: squisher fisher my-model --data train.jsonl --out fisher.safetensors --labels sampled")
def fisher(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Folder of a sequence classifier or causal language model.")
    ],
    data: Annotated[Path, typer.Option(metavar="FILE.jsonl", help="Lines with text, text_pair, label; or text alone.")],
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="The importance to write (.safetensors, or a folder).")
    ],
    labels: Annotated[str, typer.Option(help="data (empirical Fisher), sampled (unbiased), exact.")] = "data",
    per: Annotated[str, typer.Option(help="example, or batch (joint, one backward a batch).")] = "example",
    unit: Annotated[
        str | None, typer.Option(metavar="U", help="For language models: sequence (default) or token.")
    ] = None,
    draws: Annotated[int, typer.Option(metavar="N", help="Sampled labels per example.")] = 1,
    batch_size: Annotated[
        int, typer.Option(metavar="B", help="Examples at a time; changes nothing but the speed.")
    ] = 8,
    max_examples: Annotated[int | None, typer.Option(metavar="N", help="Stop after this many.")] = None,
    max_length: Annotated[int | None, typer.Option(metavar="L", help="Tokens per example.")] = None,
    parameters: Annotated[str | None, typer.Option(metavar="REGEX", help="Only matching parameters.")] = None,
    device: Annotated[str, typer.Option(metavar="D", help="cpu, cuda, mps.")] = "cpu",
    seed: Annotated[int, typer.Option(metavar="S", help="Of sampled labels.")] = 0,
    as_json: Json = False,
) -> None:
    """Measure the Fisher diagonal of a Hugging Face model on a file of text."""
    from ..importance import FILE_NAME
    from ..integrations.text import load_text_model, text_batches
    from ..measure import fisher as measure

    target = out / FILE_NAME if out.is_dir() else out
    check_target(target)
    loaded = load_text_model(model, device)
    batches = text_batches(
        data, loaded, batch_size=batch_size, max_length=max_length, max_examples=max_examples, labelled=labels == "data"
    )
    with progress_bar("measuring") as progress:
        importance = measure(
            loaded.model,
            batches,
            labels=labels,
            per=per,
            unit=unit,
            draws=draws,
            parameters=parameters,
            max_examples=max_examples,
            seed=seed,
            progress=progress,
        )
    importance.save(target)
    if as_json:
        print_json({"file": str(target), "tensors": len(importance), "provenance": importance.provenance.to_dict()})
        return
    p = importance.provenance
    typer.echo(
        f"{target}: {len(importance)} tensors of the Fisher ({labels} labels, per {p.unit}) on {p.examples} examples."
    )


@app.command(epilog="Example: squisher inspect squisher.safetensors --plot importance.png")
def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An importance file, or a checkpoint to extract from.")],
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Show what an importance is, how healthy it is, and how it is distributed."""
    from ..analysis.health import examine
    from ..report import inspect_json, inspect_tables

    importance = open_importance(file)
    with progress_bar("reading") as progress:
        health = examine(importance, progress=progress)
    if plot is not None:
        from ..report import plot_importance

        plot_importance(importance, health, plot)
    if as_json:
        print_json(inspect_json(importance, health))
    else:
        console().print(inspect_tables(importance, health))


@app.command(epilog="Example: squisher compare squisher.safetensors fisher.safetensors --json")
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="An importance file, or a checkpoint to extract from.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Compare two importances: rank correlation, scale, and overlap of the largest entries."""
    from ..analysis.agreement import compare as measure
    from ..report import compare_json, compare_tables

    first, second = open_importance(a), open_importance(b)
    with progress_bar("comparing") as progress:
        agreement = measure(first, second, progress=progress)
    if plot is not None:
        from ..report import plot_agreement

        plot_agreement(agreement, first, second, plot)
    if as_json:
        print_json(compare_json(agreement))
    else:
        console().print(compare_tables(agreement, a.name or str(a), b.name or str(b)))


def _extracted(importance: Importance, target: Path) -> str:
    p = importance.provenance
    optimizer = p.optimizer or {}
    names = list({g.get("class"): None for g in optimizer.get("groups", [])} or {optimizer.get("class"): None})
    steps = p.steps or {}
    count = (
        f"{steps.get('min')}" if steps.get("min") == steps.get("max") else f"{steps.get('min')} to {steps.get('max')}"
    )
    lines = [
        f"{target}: {len(importance)} tensors of {' and '.join(str(optimizer.get('class') or n) for n in names)} after {count} steps"
        f" (names: {p.naming})."
    ]
    if p.absent:
        lines.append(f"{len(p.absent)} parameters have no importance, for example {next(iter(p.absent.items()))}.")
    lines += [f"Note: {sentence}" for sentence in optimizer.get("pollution", [])]
    if p.batch_size is None and p.batch_tokens is None:
        lines.append("The batch size is not known: rankings are right, the scale of a Fisher needs --batch-size.")
    return "\n".join(lines)
