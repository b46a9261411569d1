"""FISH masks: the most important entries, within a budget."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .. import ranks
from ..errors import NamingError, SquisherError, SquisherWarning
from ..importance import Importance, checked, structure_hash
from ..names import check_known, live_tensors
from ..order import choose, reverse
from ..storage.tensors import chunks_of, shape_of
from .packed import Mask, pack

__all__ = ["top_k"]

Progress = Callable[[int, int], None]
"""Called with what is done and what there is in all."""


def top_k(
    importance: Mapping[str, Tensor],
    keep: float,
    always: str | None = None,
    *,
    model: nn.Module | Mapping[str, Tensor] | None = None,
    largest: bool = True,
    minimum: float = 0.0,
    sharded: bool = False,
    progress: Progress | None = None,
) -> Mask:
    """Return the most important entries: exactly ⌊keep · total⌋ of them, over all parameters together.

    The total is that of the importance, plus parameters that were trainable and are listed as absent in its provenance
    (a head that no gradient reached yet), whose sizes `model` gives. Equal values are taken in order, so that the same
    importance always gives the same mask.

    Args:
        importance: Any mapping; read in pieces, so it may be larger than memory.
        keep: The fraction to keep, from 0 to 1.
        always: A regular expression: parameters with a match are kept whole, inside the budget (a fresh classifier).
        model: A module or its weights, for the sizes of absent parameters.
        largest: False takes the least important entries instead: what mattered so far is protected, and the rest trains.
        minimum: The fraction of every tensor that is kept at least, best first, inside the budget.
        sharded: Each process holds other parameters and gets the mask of its own; the budget is that of all together.
        progress: Called with the entries read so far and those that will probably be read in all.

    Raises:
        SquisherError: The budget is impossible, a pattern matches nothing, or values cannot be ranked.
    """
    if not 0 <= keep <= 1:
        raise SquisherError(f"keep is the fraction of entries to keep, from 0 to 1, not {keep}.")
    if not 0 <= minimum <= 1:
        raise SquisherError(f"minimum is a fraction of each tensor, from 0 to 1, not {minimum}.")
    shapes = {name: tuple(shape_of(importance, name)) for name in importance}
    if not shapes and not sharded:
        raise SquisherError("A mask needs an importance with at least one tensor, but this one is empty.")
    values = checked(importance)
    absent = _absent_shapes(importance, always, model)
    shapes |= absent
    kept = _matching(always, shapes, sharded)
    unranked = [name for name in absent if name not in kept]
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    total = torch.tensor([sum(sizes.values())])
    if sharded:
        ranks.sum_in_place([total])
    k = math.floor(keep * int(total))
    least = {name: math.floor(minimum * size) for name, size in sizes.items()} if minimum else None

    def source(name: str) -> Callable[[], Iterator[Tensor]]:
        if name in absent:  # nothing is known about it, and it comes last where it is not kept whole
            return lambda: iter([torch.zeros(sizes[name])])
        return lambda: chunks_of(values, name) if largest else map(reverse, chunks_of(values, name))

    sources = {name: source(name) for name in shapes if name not in unranked}
    try:
        choice = choose(sources, k, sizes, always=kept, minimum=least, sharded=sharded, progress=progress)
    except SquisherError as error:
        raise SquisherError(f"keep={keep} of {int(total):,} entries: {error}") from error
    layout, data = {}, {}
    for name, shape in shapes.items():
        pieces = choice.pieces(name) if name in sources else iter([torch.zeros(sizes[name], dtype=torch.bool)])
        layout[name], data[name] = pack(shape, pieces)
    return Mask.from_packed(
        layout, data, _provenance(importance, shapes, keep, k, int(total), always, minimum, largest)
    )


def _matching(always: str | None, names: Mapping[str, Any], sharded: bool) -> frozenset[str]:
    if always is None:
        return frozenset()
    try:
        found = frozenset(name for name in names if re.search(always, name))
    except re.error as error:
        raise SquisherError(f"always={always!r} is not a regular expression: {error}.") from error
    if not found and not sharded:
        raise NamingError(f"always={always!r} matches no parameter; there are {', '.join(list(names)[:4])}, ….")
    return found


def _absent_shapes(
    importance: Mapping[str, Tensor], always: str | None, model: nn.Module | Mapping[str, Tensor] | None
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of parameters that were trainable and have no importance."""
    listed = importance.provenance.absent if isinstance(importance, Importance) else {}
    trainable = [name for name, why in listed.items() if name not in importance and why.trained]
    if always is not None:  # a parameter that is to be trained now counts, whatever it was before
        trainable += [name for name in listed if name not in (*importance, *trainable) and re.search(always, name)]
    if not trainable:
        return {}
    if model is None:
        wanted = [name for name in trainable if always is not None and re.search(always, name)]
        if wanted:
            raise SquisherError(
                f"always={always!r} asks for {wanted[0]!r}, which has no importance ({listed[wanted[0]]}), so its size is "
                "not known. Give model= (a module or its weights; --model on the command line)."
            )
        warnings.warn(
            f"{len(trainable)} trainable parameters have no importance, among them {trainable[0]!r} "
            f"({listed[trainable[0]]}). Without model= their sizes are not known: they are not counted, and stay frozen.",
            SquisherWarning,
            stacklevel=3,
        )
        return {}
    weights, tied = live_tensors(model) if isinstance(model, nn.Module) else (model, {})
    check_known(trainable, [*weights, *tied], ("the importance", "the model"))
    return {name: tuple(shape_of(weights, tied.get(name, name))) for name in trainable}


def _provenance(
    importance: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    keep: float,
    k: int,
    total: int,
    always: str | None,
    minimum: float,
    largest: bool,
) -> dict[str, Any]:
    record: dict[str, Any] = {"keep": keep, "k": k, "total": total, "model": {"structure": structure_hash(shapes)}}
    if always is not None:
        record["always"] = always
    if minimum:
        record["minimum"] = minimum
    if not largest:
        record["largest"] = False
    if isinstance(importance, Importance):
        known = importance.provenance.to_dict()
        for bulky in ("sum", "sum_of_squares", "model"):
            known.pop(bulky, None)
        record["importance"] = known
    return record
