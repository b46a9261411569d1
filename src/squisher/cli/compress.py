"""`squisher compress`: the same importance in a smaller file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import check_choice
from . import shell


@shell.command(shell.MAKE, "squisher compress squisher.safetensors --codec log8 --out small.safetensors")
def compress(
    file: shell.ImportanceFile,
    codec: shell.CodecName,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The importance to write (.safetensors).")],
    overwrite: shell.Overwrite = False,
    as_json: shell.Json = False,
) -> None:
    """Write an importance with a codec, which makes it smaller, and show the codec's error."""
    from ..importance import load
    from ..storage.codecs import CODECS

    check_choice("codec", codec, CODECS)
    shell.check_target(out, overwrite, file)
    with shell.progress_bar("writing") as progress:
        shell.open_importance(file).save(out, codec=codec, progress=progress)
    written = load(out)
    error = written.provenance.codec
    entries = sum(written.shape(name).numel() for name in written)
    files = [out] if out.exists() else out.parent.glob(f"{out.stem}-*-of-*.safetensors")
    size = sum(one.stat().st_size for one in files)
    document = {"file": str(out), "bytes": size, "entries": entries}
    text = f"{out}: {size:,} bytes, {size / max(1, entries):.3g} per entry."
    if error is not None and error.spearman is not None:
        shared = ", ".join(f"{float(k):.1%}: {v:.1%}" for k, v in error.overlap.items() if v is not None)
        text += f" Rank correlation with the values before {error.spearman:.4f}; of the largest entries it keeps ({shared})."
    shell.print_result(as_json, {**document, "codec": error.plain() if error else {"name": codec}}, text)
