"""Commands about few entries: `prune`, `mask`, `patch make` and `patch apply`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import SquisherError, SquisherWarning
from .app import Plot, app, check_target, open_importance, progress_bar

if TYPE_CHECKING:
    from ..importance import Importance

patches = typer.Typer(
    help="A fine-tune as base + sparse difference, exact to the bit.",
    no_args_is_help=True,
    epilog="Example: squisher patch make BASE TUNED --mask MASK --drop-outside --out PATCH, then squisher patch apply BASE PATCH --out DIR",
)
app.add_typer(patches, name="patch")


@app.command(epilog="Example: squisher prune model --importance squisher.safetensors --sparsity 0.75 --out pruned")
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
    plot: Plot = None,
) -> None:
    """Set the least important weights of a model to zero, piece by piece: it need not fit into memory.

    The zeros make the model neither smaller nor faster by themselves; formats and processors that use them do.
    """
    from ..integrations.folders import open_model, write_model
    from ..prune import weights as prune_weights
    from ..storage.tensors import tied_names

    opened = open_model(model)
    found = _importance_of(model, importance, needed=score in ("fisher", "importance"))
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
    with progress_bar("writing") as progress:
        like = model if model.is_dir() else None
        write_model(out, pruned, like, leave_out=tied_names(opened.weights), progress=progress)
    with progress_bar("counting") as progress:
        counts = pruned.counts(progress)
    kept, total = (sum(pair[k] for pair in counts.values()) for k in (0, 1))
    if plot is not None:
        from ..report.figures import plot_sparsity

        zeros = {name: (size - stays, size) for name, (stays, size) in counts.items()}
        plot_sparsity(zeros, plot, "set to zero")
    typer.echo(
        f"{out}: {total - kept:,} of {total:,} weights in {len(counts)} tensors are zero ({(total - kept) / total:.2%})."
    )


@app.command(
    epilog="Example: squisher mask squisher.safetensors --keep 0.005 --always classifier --out mask.safetensors"
)
def mask(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An importance file, or a checkpoint to extract from.")],
    keep: Annotated[float, typer.Option(metavar="K", help="The fraction of entries that may train.")],
    out: Annotated[Path, typer.Option("--out", metavar="MASK", help="The mask to write (.safetensors).")],
    always: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Parameters that train whole, inside the budget.")
    ] = None,
    minimum: Annotated[
        float, typer.Option(metavar="F", help="The fraction of every tensor that is kept at least.")
    ] = 0.0,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The model, where parameters without importance count.")
    ] = None,
    plot: Plot = None,
) -> None:
    """Choose the entries that a sparse fine-tune may move: the most important ones."""
    from ..integrations.folders import open_model
    from ..mask import top_k

    check_target(out)
    weights = None if model is None else open_model(model).weights
    with progress_bar("ranking") as progress, _notes():
        chosen = top_k(open_importance(file), keep, always, model=weights, minimum=minimum, progress=progress)
    chosen.save(out)
    if plot is not None:
        from ..report.figures import plot_sparsity

        plot_sparsity({name: (chosen.count(name), chosen.shape(name).numel()) for name in chosen}, plot, "kept")
    typer.echo(f"{out}: {chosen.kept:,} of {chosen.total:,} entries in {len(chosen)} tensors may train.")


@patches.command(
    "make", epilog="Example: squisher patch make base tuned --mask mask.safetensors --out patch.safetensors"
)
def patch_make(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="The model that training started from.")],
    tuned: Annotated[Path, typer.Argument(metavar="TUNED", help="The fine-tuned model.")],
    out: Annotated[Path, typer.Option("--out", metavar="PATCH", help="The patch to write (.safetensors).")],
    mask: Annotated[
        Path | None, typer.Option("--mask", metavar="MASK", help="Refuse differences outside this mask.")
    ] = None,
    drop_outside: Annotated[
        bool, typer.Option("--drop-outside", help="Leave them out instead: the patch gives another model.")
    ] = False,
) -> None:
    """Write what a fine-tune changed: the entries whose bits differ, and their new values."""
    from ..integrations.folders import open_model
    from ..mask import load
    from ..patch import make

    check_target(out)
    if drop_outside and mask is None:
        raise SquisherError("--drop-outside needs --mask: without one nothing is outside.")
    allowed = None if mask is None else load(mask)
    with progress_bar("comparing") as progress:
        summary = make(
            open_model(base).weights,
            open_model(tuned).weights,
            out,
            mask=allowed,
            drop_outside=drop_outside,
            progress=progress,
        )
    changed, dropped = sum(summary.changed.values()), sum(summary.dropped.values())
    typer.echo(
        f"{out}: {changed:,} of {summary.total:,} entries differ, in {len(summary.changed)} tensors"
        + (f"; {dropped:,} outside the mask were left out." if dropped else ".")
    )


@patches.command("apply", epilog="Example: squisher patch apply base patch.safetensors --out tuned")
def patch_apply(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="The model that the patch was made from.")],
    patch: Annotated[Path, typer.Argument(metavar="PATCH", help="What patch make wrote.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder to make, or a .safetensors file.")],
) -> None:
    """Give the fine-tuned model back from its base and a patch; another base is refused."""
    from ..integrations.folders import open_model, write_model
    from ..patch import apply

    patched = apply(open_model(base).weights, patch)
    with progress_bar("writing") as progress:
        write_model(out, patched, base if base.is_dir() else None, progress=progress)
    typer.echo(f"{out}: {len(patched)} tensors.")


def _importance_of(model: Path, given: Path | None, needed: bool) -> Importance | None:
    """The importance that was named, or the one beside the model, or one extracted from its optimizer state."""
    if given is not None:
        return open_importance(given)
    if not needed:
        from ..importance import FILE_NAME
        from ..storage import archive

        if not (model.is_dir() and archive.exists(model / FILE_NAME)):
            return None
    return open_importance(model)


@contextmanager
def _notes() -> Iterator[None]:
    """Warnings as notes on standard error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SquisherWarning)
        yield
    for warning in caught:
        typer.echo(f"Note: {warning.message}", err=True)
