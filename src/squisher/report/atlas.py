"""Where each parameter stands in the network: its layer and its kind, read off its name.

`encoder.layer.3.attention.query.weight` is the kind `attention.query.weight` of the layer `encoder.layer.3`: the first
number in a name ends the layer. Later numbers (experts, branches) are of one kind. A name without a number is the kind of
its last part, of the layer that the rest names: `classifier.weight`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Place", "grid", "labels", "layers_in_order", "place"]

_VAGUE = 6  # letters: dense, norm, proj say little alone


@dataclass(frozen=True)
class Place:
    """A parameter's place.

    Attributes:
        layer: The name of its layer, with the number where it has one.
        kind: What it is within its layer.
        stack: The layer's name without the number: layers of one stack are alike.
        index: The number; None where there is none.
    """

    layer: str
    kind: str
    stack: str
    index: int | None


def place(name: str) -> Place:
    """The place of the parameter of this name."""
    parts = name.split(".")
    for position, part in enumerate(parts):
        if part.isdecimal() and part.isascii():
            rest = ["*" if later.isdecimal() else later for later in parts[position + 1 :]]
            layer = ".".join(parts[: position + 1])
            return Place(layer, ".".join(rest) or "value", ".".join(parts[:position]), int(part))
    layer = ".".join(parts[:-1])
    return Place(layer or name, parts[-1] if layer else "value", layer or name, None)


def layers_in_order(places: Iterable[Place]) -> list[Place]:
    """One place of each layer: stacks in the order of the file, layers of a stack by their number."""
    stacks: dict[str, dict[str, Place]] = {}
    for one in places:
        stacks.setdefault(one.stack, {}).setdefault(one.layer, one)
    return [
        one
        for layers in stacks.values()
        for one in sorted(layers.values(), key=lambda p: -1 if p.index is None else p.index)
    ]


def labels(layers: Sequence[Place]) -> list[str]:
    """Short names of layers that still tell them apart: the fewest last parts that do, and two of a word like `dense`."""
    names = [layer.layer.split(".") for layer in layers]
    for depth in range(1, 1 + max(map(len, names), default=0)):
        short = []
        for name, layer in zip(names, layers, strict=True):
            more = layer.index is not None or len(name[-1]) <= _VAGUE
            short.append(".".join(name[-(depth + more) :]))
        if len(set(short)) == len(short):
            return short
    return [layer.layer for layer in layers]


def grid(places: Sequence[Place], key: str, values: Sequence[float], weights: Sequence[int]) -> dict[str, Any]:
    """Kinds × layers: the weighted mean over the parameters of each kind in each layer; None where there are none."""
    layers = layers_in_order(places)
    kinds = list(dict.fromkeys(one.kind for one in places))
    row_of = {kind: k for k, kind in enumerate(kinds)}
    column_of = {layer.layer: k for k, layer in enumerate(layers)}
    sums = [[0.0] * len(layers) for _ in kinds]
    counts = [[0] * len(layers) for _ in kinds]
    for one, value, weight in zip(places, values, weights, strict=True):
        if weight and not math.isnan(value):
            sums[row_of[one.kind]][column_of[one.layer]] += value * weight
            counts[row_of[one.kind]][column_of[one.layer]] += weight
    return {
        "layers": [layer.layer for layer in layers],
        "labels": labels(layers),
        "kinds": kinds,
        key: [
            [s / n if n else None for s, n in zip(some, sizes, strict=True)]
            for some, sizes in zip(sums, counts, strict=True)
        ],
    }
