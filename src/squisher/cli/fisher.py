"""`squisher fisher`: measure the Fisher of a Hugging Face model on a file of text."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from ..errors import check_choice
from . import shell


@shell.command(shell.MAKE, "squisher fisher my-model --data train.jsonl --out fisher.safetensors --labels sampled")
def fisher(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL", help="Folder of a sequence classifier or causal language model, or a LoRA adapter."
        ),
    ],
    data: Annotated[
        Path, typer.Option(metavar="FILE.jsonl", help="Lines with text, text_pair, label; or text alone. Also .gz.")
    ],
    out: shell.OutFile,
    labels: Annotated[str, typer.Option(help="data (empirical Fisher), sampled (unbiased), exact.")] = "data",
    per: Annotated[str, typer.Option(help="example, or batch (joint, one backward per batch).")] = "example",
    unit: Annotated[
        str | None, typer.Option(metavar="U", help="For language models: sequence (default) or token.")
    ] = None,
    draws: Annotated[int, typer.Option(metavar="N", help="Sampled labels per example.")] = 1,
    signs: Annotated[
        int | None,
        typer.Option(metavar="N", help="With --unit token: N sums of randomly signed tokens, not one pass a position."),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(metavar="B", help="Examples at a time: a matter of speed, except with --per batch.")
    ] = 8,
    max_examples: Annotated[int | None, typer.Option(metavar="N", help="Stop after this many.")] = None,
    max_length: Annotated[int | None, typer.Option(metavar="L", help="Tokens per example.")] = None,
    parameters: Annotated[str | None, typer.Option(metavar="REGEX", help="Only matching parameters.")] = None,
    device: Annotated[str, typer.Option(metavar="D", help="cpu, cuda, mps.")] = "cpu",
    seed: Annotated[int, typer.Option(metavar="S", help="The seed of sampled labels and signs.")] = 0,
    base: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="For an adapter: its base, where the adapter does not name a folder."),
    ] = None,
    shard: Annotated[
        bool, typer.Option("--shard", help="Under torchrun: each process loads and keeps its shard only (FSDP2).")
    ] = False,
    codec: shell.CodecName = "exact",
    overwrite: shell.Overwrite = False,
    as_json: shell.Json = False,
) -> None:
    """Measure the Fisher diagonal of a Hugging Face model on a file of text.

    To continue an interrupted run, give the same command again: OUT.unfinished.safetensors keeps what is done.
    Under torchrun the processes share the batches, and one file is written; with --shard they share the model, too.
    """
    from .. import ranks
    from ..importance import FILE_NAME
    from ..integrations.recording import under_file_names
    from ..integrations.text import count_rows, load_text_model, text_batches
    from ..measure import fisher as measure
    from ..storage.codecs import CODECS

    target = out / FILE_NAME if out.is_dir() else out
    shell.check_target(target, overwrite, model, data, base)
    check_choice("codec", codec, CODECS)
    lines = count_rows(data)  # before loading a model
    unfinished = target.with_suffix(".unfinished.safetensors")
    with _job(device):
        loaded = load_text_model(model, _own(device), base, shard)
        batches = text_batches(
            data,
            loaded,
            batch_size=batch_size,
            max_length=max_length,
            max_examples=max_examples,
            labelled=labels == "data",
        )
        total = lines if max_examples is None else min(lines, max_examples)
        if unfinished.is_file() and ranks.is_alone():
            typer.echo(f"Going on with {unfinished}, where an earlier run was interrupted.", err=True)
        with shell.progress_bar("measuring", counted=True) as progress:
            importance = measure(
                loaded.model,
                batches,
                labels=labels,
                per=per,
                unit=unit,
                draws=draws,
                signs=signs,
                parameters=parameters,
                max_examples=max_examples,
                seed=seed,
                unfinished=unfinished if ranks.is_alone() else None,
                progress=None if progress is None else lambda done, _: progress(done, total),
            )
        importance = under_file_names(importance, loaded.model)
        failure: BaseException | None = None
        try:
            if shard or ranks.rank() == 0:  # shards are gathered from all processes, and the first one writes
                importance.save(target, codec=codec)
            if ranks.rank() == 0:
                unfinished.unlink(missing_ok=True)
        except Exception as error:
            failure = error
        ranks.agree(failure)
        first = ranks.rank() == 0
    if not first:
        return
    p = importance.provenance
    document = {"file": str(target), "tensors": len(importance), "provenance": p.to_dict()}
    text = (
        f"{target}: {len(importance)} tensors of the Fisher ({labels} labels, per {p.unit}) on {p.examples} examples."
    )
    shell.print_result(as_json, document, text)


@contextmanager
def _job(device: str) -> Iterator[None]:
    """Join the processes of torchrun, if it started this one."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    import torch.distributed as dist

    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def _own(device: str) -> str:
    """Return the device of this process: with `cuda`, each process of a machine has its own."""
    rank = os.environ.get("LOCAL_RANK")
    return f"cuda:{rank}" if device == "cuda" and rank is not None else device
