"""`squisher quantize`: choose how many bits every tensor gets."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ArgumentError, check_choice
from . import shell

_BITS = {"json": "2,3,4,8", "llama.cpp": "2,3,4,5,6,8", "mlx": "4,5"}


@shell.command(
    shell.USE, "squisher quantize model --importance squisher.safetensors --bits-per-weight 4.5 --out plan.json"
)
def quantize(
    model: shell.ModelPath,
    importance: Annotated[
        Path, typer.Option("--importance", metavar="FILE", help="An importance file, or a checkpoint.")
    ],
    bits_per_weight: Annotated[
        float, typer.Option(metavar="B", help="The budget: a mean over the quantised weights, scales included.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="PLAN", help="The file to write.")],
    to: Annotated[
        str,
        typer.Option("--format", help="json, llama.cpp (--tensor-type-file) or mlx (dynamic_quant --sensitivities)."),
    ] = "json",
    bits: Annotated[
        str | None, typer.Option(metavar="B,B", help="Widths to choose from; mlx takes two, low and high.")
    ] = None,
    group: Annotated[int, typer.Option(metavar="N", help="Weights that share a scale.")] = 64,
    scheme: Annotated[
        str | None, typer.Option(metavar="S", help="affine, symmetric or llama.cpp, if the format does not fix it.")
    ] = None,
    exclude: Annotated[str | None, typer.Option(metavar="REGEX", help="Tensors that are not quantised.")] = None,
    any_weights: shell.AnyWeights = False,
    overwrite: shell.Overwrite = False,
    as_json: shell.Json = False,
) -> None:
    """Choose how many bits every tensor gets: the least total loss ½ Σ F·(w − Q(w))² within a budget.

    Nothing is quantised; the plan is for the tool that does it.
    """
    from ..importance.weights import check_weights
    from ..integrations.exports import PLAN_FORMATS, stacked, write_plan
    from ..quantize import allocate, sensitivity
    from ..storage.folders import open_model

    check_choice("--format", to, PLAN_FORMATS)
    shell.check_target(out, overwrite, model, importance, suffix=None)
    try:
        widths = [int(b) for b in (bits or _BITS[to]).split(",")]
    except ValueError:
        raise ArgumentError(f"--bits {bits}: widths are written with commas, such as 2,3,4,8.") from None
    if to == "mlx" and len(set(widths)) != 2:
        raise ArgumentError(f"--bits {bits}: mlx-lm chooses between two widths, such as 4,5.")
    fixed = "llama.cpp" if to == "llama.cpp" else "affine"
    weights, opened = open_model(model).weights, shell.open_importance(importance)
    with shell.notes():
        check_weights([opened], [weights], [str(model)], any_weights)
    with shell.progress_bar("measuring") as progress:
        found = sensitivity(weights, opened, widths, group, scheme=scheme or fixed, exclude=exclude, progress=progress)
    found = stacked(found) if to == "llama.cpp" else found
    plan = allocate(found, bits_per_weight)
    write_plan(plan, to, out)
    widths_used = Counter(plan.bits.values())
    listed = ", ".join(f"{widths_used[b]} at {b}" for b in sorted(widths_used))
    uniform = {b: found.uniform(b) for b in found.quantizers}
    fitting = [b for b, one in uniform.items() if one.bits_per_weight <= bits_per_weight]
    best = min(fitting, key=lambda b: uniform[b].loss, default=None)
    shell.print_result(
        as_json,
        plan.to_dict(),
        f"{out}: {len(plan.bits)} tensors at {plan.bits_per_weight:.3f} bits per weight, loss {plan.loss:.4g} ({listed}).",
        ""
        if best is None
        else f"All at {best} bits: {uniform[best].bits_per_weight:.3f} a weight, loss {uniform[best].loss:.4g}.",
        shell.with_reasons("Kept as they are", found.kept),
    )
