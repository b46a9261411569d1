"""What commands share: the application, its errors, common options, progress bars."""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import __version__
from ..errors import ArgumentError, SquisherError, SquisherWarning

if TYPE_CHECKING:
    from ..importance import Importance

__all__ = [
    # groups of `squisher --help`
    "LOOK", "MAKE", "USE",
    # arguments and options
    "AnyWeights", "CodecName", "ImportanceFile", "Json", "LeaveAsIs", "LeaveOut", "ModelPath", "OfModel", "OutFile", "OutModel", "Overwrite", "Plot", "Scale",
    # what commands do
    "app", "check_target", "command", "console", "distinct_names", "main", "notes", "open_importance", "print_json", "print_result",
    "progress_bar", "whole", "with_reasons",
]  # fmt: skip

app = typer.Typer(
    name="squisher",
    help="Which parameters of a trained network matter: recycled from its optimizer, or measured on data.",
    no_args_is_help=True,
    rich_markup_mode="markdown",  # so that paragraphs are filled to the width of the terminal
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# The groups of `squisher --help`.
MAKE, LOOK, USE = "Make an importance", "Look at importances", "Use them"

ISSUES = "https://github.com/torch-squisher/torch-squisher/issues"

_debug = False
_claims = ExitStack()  # outputs that this command writes


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"squisher {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    global _debug
    _debug = debug
    context.call_on_close(_claims.close)


def main() -> None:
    """Run the command line; an error of the user is one paragraph, not a traceback."""
    if not sys.stderr.isatty():  # transformers draws bars of its own, also in a pipe
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        app()
    except (SquisherError, OSError) as error:
        if _debug:
            raise
        typer.echo(f"squisher: {_spoken(error)}", err=True)
        sys.exit(2 if isinstance(error, ArgumentError) else 1)  # 2 is wrong usage, for Typer as well
    except Exception as error:
        if _debug:
            raise
        typer.echo(_unexpected(error), err=True)
        sys.exit(1)


def _spoken(error: Exception) -> str:
    """Return an error's message, with the option in the place of an argument of a Python function (METHOD is no option)."""
    if not isinstance(error, ArgumentError) or not error.argument.isidentifier() or error.argument.isupper():
        return str(error)
    return f"--{error.argument.replace('_', '-')} {error.problem}"


def _unexpected(error: Exception) -> str:
    """Return the message for an unexpected error: what happened, where to report it, and what to include."""
    import platform
    import shlex
    from importlib.metadata import PackageNotFoundError, version

    versions = [f"squisher {__version__}", f"Python {platform.python_version()}"]
    for package in ("torch", "transformers"):
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    place = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"squisher: an unexpected {type(error).__name__}: {error}\n\n"
        f"This is a fault of squisher. Please report it at {ISSUES} with these lines, and with what --debug adds:\n"
        f"  command   {shlex.join(['squisher', *sys.argv[1:]])}\n"
        f"  versions  {', '.join(versions)}; {platform.system()} {platform.machine()}\n"
        f"  place     {Path(place.filename).name}:{place.lineno} in {place.name}"
    )


def command(panel: str, example: str, **settings: Any) -> Callable[[Any], Any]:
    """Return a decorator that adds a command to a group of `squisher --help`, with an example below its options."""
    return app.command(rich_help_panel=panel, epilog=f"Example: {example}", **settings)


def _picture(path: Path | None) -> Path | None:
    if path is not None:
        from ..report.figures import check_picture

        check_picture(path)
    return path


def _model(path: Path) -> Path:
    called = path.suffix in (".bin", ".ckpt", ".gguf", ".json", ".pt", ".pth")
    if called or (path.suffix != ".safetensors" and os.path.lexists(path) and not path.is_dir()):
        raise ArgumentError(f"--out {path}: a model is written as a folder, or as a file that ends in .safetensors.")
    return path


# Arguments and options that several commands have.
ImportanceFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="An importance file, or a checkpoint to extract from.")
]
ModelPath = Annotated[Path, typer.Argument(metavar="MODEL", help="A model folder or weight file, of any size.")]
OfModel = Annotated[
    Path | None, typer.Option("--importance", metavar="FILE", help="An importance file, or a checkpoint.")
]
OutFile = Annotated[
    Path, typer.Option("--out", metavar="FILE", help="The importance to write (.safetensors, or a folder).")
]
OutModel = Annotated[
    Path,
    typer.Option("--out", metavar="DIR", callback=_model, help="The folder to make, or a .safetensors file."),
]
CodecName = Annotated[
    str,
    typer.Option("--codec", metavar="CODEC", help="exact, log8 (a byte per entry) or rank1 (two vectors per matrix)."),
]
Scale = Annotated[str, typer.Option("--scale", metavar="S", help="auto, as_fisher or stored.")]
LeaveOut = Annotated[
    str | None, typer.Option("--exclude", metavar="REGEX", help="Parameters to leave out, such as heads.")
]
LeaveAsIs = Annotated[str | None, typer.Option("--exclude", metavar="REGEX", help="Tensors to leave as they are.")]
AnyWeights = Annotated[
    bool, typer.Option("--any-weights", help="Do not ask whether an importance belongs to these weights.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output file if it exists.")]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", callback=_picture, help="Also draw it into this .svg or .png file."),
]


def open_importance(path: Path) -> Importance:
    """Open an importance file, or extract the importance of a checkpoint."""
    from ..integrations.model_folders import open_importance as opened

    return opened(path)


def distinct_names(files: list[Path]) -> list[str]:
    """Return the shortest path suffixes that are all different.

    Raises:
        SquisherError: A path was given twice.
    """
    from ..integrations.publishing import short_paths

    names = short_paths(files)
    if len(set(names)) < len(names):
        raise ArgumentError("The same file was given twice; every importance needs a file of its own.")
    return names


def check_target(path: Path, overwrite: bool, *sources: str | Path | None, suffix: str | None = ".safetensors") -> None:
    """Refuse an output that cannot or should not be written, before hours of work and not after them.

    Other commands cannot write it until this command ends.

    Args:
        path: The value of `--out`.
        overwrite: Whether `--overwrite` was given.
        sources: What the output is made from; it is never replaced.
        suffix: The suffix of such a file; None for a model, which may be a folder.
    """
    from ..storage.atomic import check_target as check
    from ..storage.atomic import claim

    if suffix is not None and path.suffix != suffix:
        raise ArgumentError(f"--out {path}: the name of this file ends in {suffix}.")
    given = [source for source in sources if source is not None]
    check(path, overwrite=overwrite, sources=given)
    folder = next((s for s in given if path.resolve().is_relative_to(Path(s).resolve())), None)
    if folder is not None and path.is_file() and not _is_ours(path):
        raise SquisherError(
            f"{path} lies in {folder}, which the output is made from, and does not say that it was made by squisher: choose another name."
        )
    if path.suffix == ".safetensors":
        check(path.with_name(f"{path.name}.index.json"), overwrite=overwrite, sources=given)  # a set of shards
    if os.environ.get("RANK", "0") == "0":  # the processes of one job write one output
        _claims.enter_context(claim(path, overwrite=overwrite, sources=given))


def _is_ours(path: Path) -> bool:
    """Return whether a file is a page or has our metadata; weights, configs and checkpoints do not."""
    from ..storage.json_files import read_object
    from ..storage.safetensors import KEY, read_header

    try:
        if path.suffix == ".json":
            return "quantizers" in read_object(path)
        return path.suffix.lower() in (".html", ".htm") or KEY in read_header(path)[1]
    except SquisherError:
        return False


def whole(number: float | None) -> float | int | None:
    """Return 32 for 32.0, and other numbers as they are."""
    return int(number) if number is not None and float(number).is_integer() else number


def print_json(document: Any) -> None:
    """Print the document of `--json`."""
    typer.echo(json.dumps(document, indent=2, ensure_ascii=False))


def with_reasons(what: str, names: Mapping[str, str]) -> str:
    """Return a line with the first few names and their reasons; an empty one without names."""
    shown = ", ".join(f"{name} ({why})" for name, why in list(names.items())[:5])
    return f"{what}: {shown}{', …' if len(names) > 5 else ''}." if names else ""


def print_result(as_json: bool, document: Any, *lines: str) -> None:
    """Print the result of a command: the document of `--json`, or the lines that are not empty."""
    if as_json:
        print_json(document)
    else:
        typer.echo("\n".join(filter(None, lines)))


def console() -> Any:
    """Return the console that tables are printed on."""
    from rich.console import Console

    # A pipe has no width, and a table broken at 80 columns is hard to read.
    return Console() if sys.stdout.isatty() else Console(width=120, no_color=True)


@contextmanager
def progress_bar(what: str, counted: bool = False) -> Iterator[Callable[[int, int | None], None] | None]:
    """Show a bar on a terminal, with percent, time and time left, and nothing in a pipe.

    Args:
        what: One word for the work.
        counted: Whether to show numbers, too: those of examples mean something to people, those of bytes do not.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress as rich
    from rich.console import Console

    columns: list[rich.ProgressColumn] = [
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.TaskProgressColumn(),
    ]
    columns += [rich.MofNCompleteColumn()] if counted else []
    columns += [rich.TimeElapsedColumn(), rich.TextColumn("left"), rich.TimeRemainingColumn()]
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def notes() -> Iterator[None]:
    """Show our warnings as notes on standard error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SquisherWarning)
        yield
    for message in dict.fromkeys(str(warning.message) for warning in caught):
        typer.echo(f"Note: {message}", err=True)
