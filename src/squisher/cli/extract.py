"""`squisher extract`: turn an optimizer state into an importance file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import check_choice
from . import shell

if TYPE_CHECKING:
    from ..importance import Importance


@shell.command(shell.MAKE, "squisher extract checkpoint-500 --out squisher.safetensors --batch-size 32")
def extract(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="What training saved: a checkpoint file or folder.")],
    out: shell.OutFile,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The model, where the source does not say enough.")
    ] = None,
    base_model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The weights that training started from.")
    ] = None,
    names: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Names in the optimizer's order, one per line.")
    ] = None,
    trainable: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Only matching parameters were trained.")
    ] = None,
    in_order: Annotated[
        bool, typer.Option("--in-order", help="The optimizer's groups keep the order of model.parameters().")
    ] = False,
    optimizer: Annotated[int | None, typer.Option(metavar="K", help="Which of several optimizers, from 0.")] = None,
    batch_size: Annotated[
        float | None, typer.Option(metavar="B", help="Examples per step: per device × accumulation × processes.")
    ] = None,
    batch_tokens: Annotated[float | None, typer.Option(metavar="T", help="Mean loss-bearing tokens per step.")] = None,
    beta2: Annotated[
        float | None, typer.Option(metavar="X", help="β₂, for sources that do not record it (optax, MLX).")
    ] = None,
    optimizer_class: Annotated[
        str | None, typer.Option(metavar="NAME", help="The optimizer's class, where the keys leave it open (ADOPT).")
    ] = None,
    loss_reduction: Annotated[str | None, typer.Option(metavar="R", help="mean, sum or token_mean.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="The accumulator as it is stored, without bias correction.")
    ] = False,
    dtype: Annotated[str | None, typer.Option(metavar="TYPE", help="float32 (default) or bfloat16.")] = None,
    codec: shell.CodecName = "exact",
    push: Annotated[
        str | None, typer.Option(metavar="hf://OWNER/NAME", help="Publish it beside the model on the Hub, too.")
    ] = None,
    allow_coarse: Annotated[bool, typer.Option("--allow-coarse", help="Accept states of four bits.")] = False,
    overwrite: shell.Overwrite = False,
    as_json: shell.Json = False,
) -> None:
    """Turn an optimizer state into a named, self-describing importance file.

    No code in the source is ever executed. Names are recorded, proven by the values, or by the one convention that fits, and the
    file says which; otherwise the command says what would settle them.
    """
    from ..importance import FILE_NAME
    from ..integrations.publishing import prepare
    from ..recycle import extract as recycle
    from ..storage import hub
    from ..storage.codecs import CODECS

    target = out / FILE_NAME if out.is_dir() else out
    shell.check_target(target, overwrite, source, model, base_model, names)
    check_choice("codec", codec, CODECS)
    if push is not None:
        hub.Address.read(push)
    with shell.notes():
        importance = recycle(
            source,
            model=model,
            names=names,
            batch_size=shell.whole(batch_size),
            bias_correction=not raw,
            loss_reduction=loss_reduction,
            batch_tokens=shell.whole(batch_tokens),
            beta2=beta2,
            optimizer_class=optimizer_class,
            trainable=trainable,
            base_model=base_model,
            optimizer=optimizer,
            allow_coarse=allow_coarse,
            in_order=in_order,
        )
    with shell.progress_bar("writing") as progress:
        importance.save(target, codec=codec, dtype=dtype, progress=progress)
    published = None if push is None else prepare(target, push).push()
    if as_json:
        from ..importance import load

        shell.print_json(
            {
                "file": str(target),
                "tensors": len(importance),
                "provenance": load(target).provenance.to_dict(),
                **({"published": published} if published else {}),
            }
        )
        return
    unused = [] if _has_earlier(source) else ["an earlier checkpoint beside this one"]
    if base_model is None and not (Path(source) / "adapter_config.json").is_file():  # a base has no weights of adapters
        unused.insert(0, "the weights that training started from (--base-model)")
    shell.console().print(_extracted(importance, target, unused), highlight=False, soft_wrap=True)
    if published is not None:
        typer.echo(f"Published: {published}")


def _has_earlier(source: str) -> bool:
    """Return whether a Trainer's `checkpoint-N` lies beside one with a lower number."""
    folder = Path(source).absolute()
    numbers = {path: path.name.removeprefix("checkpoint-") for path in (folder, *folder.parent.glob("checkpoint-*"))}
    steps = {path: int(number) for path, number in numbers.items() if number.isdecimal() and path.is_dir()}
    return folder in steps and min(steps.values()) < steps[folder]


def _extracted(importance: Importance, target: Path, unused: list[str]) -> str:
    """Describe the result; `unused` names sources that could have proven names."""
    from ..errors import ScaleError
    from ..importance.provenance import fisher_factor

    p = importance.provenance
    optimizer = p.optimizer or {}
    names = list({g.get("class"): None for g in optimizer.get("groups", [])} or {optimizer.get("class"): None})
    steps = p.steps or {}
    first, last = steps.get("min"), steps.get("max")
    after = (
        f" after {first if first == last else f'{first} to {last}'} {'step' if last == 1 else 'steps'}"
        if steps
        else ", of steps that are not recorded"
    )
    classes = " and ".join(str(optimizer.get("class") or n) for n in names)
    lines = [f"{target}: {len(importance)} tensors of {classes}{after}.", *_named(importance, unused)]
    if p.absent:
        example, why = next(iter(p.absent.items()))
        have = "parameter has" if len(p.absent) == 1 else "parameters have"
        lines.append(f"{len(p.absent)} {have} no importance, for example {example!r} ({why}).")
    lines += [f"Note: {one}" for one in p.pollution]
    try:
        fisher_factor(p)
    except ScaleError as error:
        plain = p.bias_corrected and p.batch_size is None and p.loss_reduction != "token_mean"
        lines.append(
            "The batch size is not known: rankings are right, the scale of a Fisher needs --batch-size."
            if plain and p.batch_tokens is None
            else f"It cannot be brought to the scale of a Fisher: {error}"
        )
    return "\n".join(lines)


def _named(importance: Importance, unused: list[str]) -> list[str]:
    """Say how names were found, the surest first, and what could prove names that rest on a convention."""
    from ..importance import Level

    p = importance.provenance
    if p.naming is None:
        return []
    by_level: dict[str, dict[str, list[str]]] = {level: {} for level in Level}
    for name in importance:
        how = p.naming.of(name)
        by_level[how.level].setdefault(how.by, []).append(name)
    lines = []
    for level, ways in by_level.items():
        count, by = sum(map(len, ways.values())), "; ".join(filter(None, ways))
        if count and level == Level.PROVEN:
            margins = [
                m for names in ways.values() for m in (p.naming.of(name).margin for name in names) if m is not None
            ]
            behind = f", the next best answer at least {min(margins):.2f} in correlation behind" if margins else ""
            lines.append(f"Names proven by the values: {count} ({by}{behind}).")
        elif count and level == Level.CONVENTION:
            shapes = {importance.shape(name) for names in ways.values() for name in names}
            once = ", and no other order of these parameters fits"
            lines.append(
                f"Names by convention: {count} ({by}). They rest on order and shapes"
                f"{once if len(shapes) == len(importance) else ''}. {_what_proves(importance, unused)}"
            )
        elif count:
            what = "recorded in the source" if level == Level.RECORDED else "given"
            lines.append(f"Names {what}: {count}{f' ({by})' if by else ''}.")
    return lines


def _what_proves(importance: Importance, unused: list[str]) -> str:
    p = importance.provenance
    groups = (p.optimizer or {}).get("groups") or [p.optimizer or {}]
    if all(g.get("key") in _WITHOUT_FIRST_MOMENT and g.get("class") != "AdamW (dion)" for g in groups):
        return "Without first moments no weights can prove them: compare the order with your script, or give it with --names."
    sources = [*([] if (p.model or {}).get("content") else ["the model (--model)"]), *unused]
    return f"What may prove them: {' or '.join(sources)}." if sources else "The weights from before did not prove them."


_WITHOUT_FIRST_MOMENT = ("square_avg", "sum", "variance", "row_var col_var", "exp_avg_sq_row exp_avg_sq_col")
