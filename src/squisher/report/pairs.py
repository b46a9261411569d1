"""What a report says of two and more importances: agreement, and distances between tasks.

Parameters that are not in all of them, or not in one shape (heads of different tasks), are left out and listed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..analysis.agreement import Agreement, compare
from ..analysis.distribution import LOG10_EDGES, places_of
from ..embed import distances, embedding
from ..errors import SquisherError
from ..importance import Importance
from ..order.correlation import Rounded
from ..storage.tensors import numel_of, one_thread
from .atlas import Place, grid, labels, layers_in_order, place

__all__ = ["agreement_data", "agreement_of", "joint_counts", "similarities_between"]

_PLACES = len(LOG10_EDGES) - 1
_MAX_DENSITY = 60  # bins along an axis of the density


def agreement_of(a: Importance, b: Importance, progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
    """How far two importances agree: what `compare` says of the parameters that they share, per layer too, as plain values.

    Raises:
        SquisherError: They share no parameter, or values are invalid.
    """
    shared, unlike = _alike([a, b])
    first, second = (side.restrict(shared.__contains__) if shared else side for side in (a, b))
    return {**agreement_data(compare(first, second, progress=progress), first, second), "left_out": unlike}


def agreement_data(agreement: Agreement, a: Importance, b: Importance) -> dict[str, Any]:
    """Return what charts and tables show of an agreement, as plain values; reads the importances once more."""
    plain = agreement.to_dict()
    rows = {key: [row[key] for row in plain["rows"]] for key in (plain["rows"] or [{"name": ""}])[0]}
    places = [place(name) for name in rows["name"]]
    overlaps = {key: [o[key] for o in plain["overlaps"]] for key in ("fraction", "k", "overlap", "chance")}
    overlaps["reaches_zeros"] = [o.threshold_a == 0 or o.threshold_b == 0 for o in agreement.overlaps]
    return {
        **plain,
        "overlaps": overlaps,
        "rows": rows,
        "layers": _per_layer(a, b, places, rows["name"]),
        "atlas": grid(
            places, "spearman", [float("nan") if v is None else v for v in rows["spearman"]], [1] * len(places)
        ),
        "density": _density(agreement, a, b),
    }


def _alike(importances: Sequence[Importance]) -> tuple[set[str], list[str]]:
    """Return the names that all have in the same shape, and the others (heads of different tasks, mostly)."""
    names = list(dict.fromkeys(name for importance in importances for name in importance))
    shared = {
        name
        for name in names
        if all(name in importance for importance in importances)
        and len({tuple(importance.shape(name)) for importance in importances}) == 1
    }
    return shared, [name for name in names if name not in shared]


@one_thread()
def _per_layer(a: Importance, b: Importance, places: Sequence[Place], names: Sequence[str]) -> dict[str, list[Any]]:
    """Return the rank correlation of all entries of each layer; of values rounded to 16 bits, in two passes."""
    members: dict[str, list[str]] = {}
    for name, one in zip(names, places, strict=True):
        members.setdefault(one.layer, []).append(name)
    layers = layers_in_order(places)
    correlations = []
    for layer in layers:
        ranks = Rounded()
        ranks.count(_both(a, b, members[layer.layer]))
        ranks.cross(_both(a, b, members[layer.layer]))
        correlations.append(ranks.spearman())
    return {
        "layer": [layer.layer for layer in layers],
        "label": labels(layers),
        "numel": [sum(numel_of(a, name) for name in members[layer.layer]) for layer in layers],
        "spearman": correlations,
    }


def _both(a: Importance, b: Importance, names: Sequence[str]) -> Iterator[tuple[Tensor, Tensor]]:
    for name in names:
        yield from zip(a.chunks(name), b.chunks(name), strict=True)


def joint_counts(
    agreement: Agreement,
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Count how many entries have a in one and b in the other tenth of a decade; entries that are 0 in either are left out."""
    sides = [side if isinstance(side, Importance) else Importance(side) for side in (a, b)]
    counts = torch.zeros(_PLACES * _PLACES, dtype=torch.int64)
    done = 0
    for row in agreement.rows:
        for x, y in zip(sides[0].chunks(row.name), sides[1].chunks(row.name), strict=True):
            both = (x > 0) & (y > 0)
            place = places_of(x[both]) * _PLACES + places_of(y[both])
            counts.index_add_(0, place, torch.ones_like(place))
            done += x.numel()
            if progress:
                progress(done, agreement.numel)
    return counts.view(_PLACES, _PLACES)


@one_thread()
def _density(agreement: Agreement, a: Importance, b: Importance) -> dict[str, Any]:
    """How many entries have both values in each square of logarithms; squares so wide that a few dozen fill an axis."""
    counts = joint_counts(agreement, a, b)
    filled = [int(k) for k in (counts.sum(0) + counts.sum(1)).nonzero()]
    if not filled:
        return {"first_edge": 0.0, "step": 0.1, "bins": 0, "cells": [], "shown": 0}
    width = math.ceil((filled[-1] + 1 - filled[0]) / _MAX_DENSITY)
    first = filled[0] // width * width
    bins = (filled[-1] - first) // width + 1
    part = counts[first : first + bins * width, first : first + bins * width]
    short = bins * width - part.shape[0]  # at the very end of the scale
    if short:
        first -= short
        part = counts[first : first + bins * width, first : first + bins * width]
    squares = part.reshape(bins, width, bins, width).sum((1, 3))
    cells = [[int(x), int(y), int(squares[x, y])] for x, y in squares.nonzero().tolist()]
    return {
        "first_edge": round(LOG10_EDGES[first], 6),
        "step": round(width / 10, 6),
        "bins": bins,
        "cells": cells,
        "shown": sum(cell[2] for cell in cells),
    }


def similarities_between(tasks: Mapping[str, Importance]) -> dict[str, Any]:
    """Return the distances between tasks and their similarities (1 − distance), from the mean importance of each tensor that all of them share.

    Raises:
        SquisherError: They share no parameter, or have no common scale.
    """
    shared, unlike = _alike(list(tasks.values()))
    if not shared:
        raise SquisherError("No parameter is in all importances, so tasks cannot be compared.")
    names, matrix = distances({name: embedding(task.restrict(shared.__contains__)) for name, task in tasks.items()})
    return {
        "tasks": names,
        "similarity": (1 - matrix).tolist(),
        "distance": matrix.tolist(),
        "left_out": unlike,
    }
