"""What a report says of two and more importances: agreement, and distances between tasks.

Parameters that are not in all of them, or not in one shape (heads of different tasks), are left out and listed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..analysis.agreement import Agreement, compare
from ..analysis.correlation import Rounded
from ..analysis.distribution import LOG10_EDGES
from ..embed import distances, embedding
from ..errors import SquisherError
from ..importance import Importance
from ..storage.tensors import numel_of, one_thread
from .atlas import Place, grid, labels, layers_in_order, place
from .figures import joint_counts

__all__ = ["agreement_of", "distances_between"]

_MAX_DENSITY = 60  # bins along an axis of the density


def agreement_of(a: Importance, b: Importance, progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
    """How far two importances agree: what `compare` says of the parameters that they share, per layer too, as plain values.

    Raises:
        SquisherError: They share no parameter, or values are invalid.
    """
    shared, unlike = _alike([a, b])
    first, second = (side.restrict(shared.__contains__) if shared else side for side in (a, b))
    agreement = compare(first, second, progress=progress)
    plain = agreement.to_dict()
    rows = {key: [row[key] for row in plain["rows"]] for key in plain["rows"][0]}
    places = [place(name) for name in rows["name"]]
    overlaps = {key: [o[key] for o in plain["overlaps"]] for key in ("fraction", "k", "overlap", "chance")}
    overlaps["reaches_zeros"] = [o.threshold_a == 0 or o.threshold_b == 0 for o in agreement.overlaps]
    return {
        **plain,
        "left_out": unlike,
        "overlaps": overlaps,
        "rows": rows,
        "layers": _per_layer(first, second, places, rows["name"]),
        "atlas": grid(
            places, "spearman", [float("nan") if v is None else v for v in rows["spearman"]], [1] * len(places)
        ),
        "density": _density(agreement, first, second),
    }


def _alike(importances: Sequence[Importance]) -> tuple[set[str], list[str]]:
    """The names that all have in the same shape, and the others (heads of different tasks, mostly)."""
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
    """The rank correlation of all entries of each layer; of values rounded to 16 bits, in two passes."""
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


def distances_between(tasks: Mapping[str, Importance]) -> dict[str, Any]:
    """The distances between tasks, of the mean importance of each tensor that all of them share.

    Raises:
        SquisherError: They share no parameter, or have no common scale.
    """
    shared, unlike = _alike(list(tasks.values()))
    if not shared:
        raise SquisherError("No parameter is in all importances, so there is no distance between tasks.")
    names, matrix = distances({name: embedding(task.restrict(shared.__contains__)) for name, task in tasks.items()})
    return {"tasks": names, "matrix": matrix.tolist(), "left_out": unlike}
