"""The layer and the kind of each parameter, from its name.

`encoder.layer.3.attention.query.weight` is the kind `attention.query.weight` of the layer `encoder.layer.3`: the first number in
a name ends the layer. Later numbers (experts, branches) do not distinguish kinds. In a name without a number the last part is
the kind and the rest the layer: `classifier.weight`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Place", "grid", "labels", "layers_in_order", "place"]

_FIRST = re.compile(r"embed|^wte$|^wpe$|^stem|^conv1$|cls_token")
_LAST = re.compile(r"head|classifier|^score$|^fc$|pooler|^ln_f$|^norm$|final|output_projection")
_VAGUE = 6  # letters; words as short as dense, norm and proj say little alone


@dataclass(frozen=True)
class Place:
    """A parameter's place.

    Attributes:
        layer: The name of its layer, with the number where it has one.
        kind: Its name within the layer.
        stack: The layer's name without the number, which similar layers share.
        index: The number; None without one.
    """

    layer: str
    kind: str
    stack: str
    index: int | None


def place(name: str) -> Place:
    """Return the place of the parameter of this name."""
    parts = name.split(".")
    for position, part in enumerate(parts):
        if part.isdecimal() and part.isascii():
            rest = ["*" if later.isdecimal() else later for later in parts[position + 1 :]]
            layer = ".".join(parts[: position + 1])
            return Place(layer, ".".join(rest) or "value", ".".join(parts[:position]), int(part))
    layer = ".".join(parts[:-1])
    return Place(layer or name, parts[-1] if layer else "value", layer or name, None)


def layers_in_order(places: Iterable[Place]) -> list[Place]:
    """Return one place of each layer, in the order of the modules.

    Optimizers often list all weights before all biases and norms, so that the order of names would put `embeddings.LayerNorm`
    after the classifier. So a module stands where its first parameter does, and numbered modules are sorted by number. An
    alphabetical order tells nothing: then embeddings come first and heads last.
    """
    layers: dict[str, Place] = {}
    for one in places:
        layers.setdefault(one.layer, one)
    seen: dict[tuple[str, ...], int] = {}
    for name in layers:
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            seen.setdefault(tuple(parts[:depth]), len(seen))
    alphabetical = len(layers) > 2 and list(layers) == sorted(layers)

    def key(name: str) -> list[tuple[int, int]]:
        parts = name.split(".")
        return [_rank(part, seen[tuple(parts[: k + 1])], alphabetical) for k, part in enumerate(parts)]

    return [layers[name] for name in sorted(layers, key=key)]


def _rank(part: str, seen: int, alphabetical: bool) -> tuple[int, int]:
    if part.isdecimal():
        return 1, int(part)
    if alphabetical and _FIRST.search(part):
        return 0, seen
    if alphabetical and _LAST.search(part):
        return 2, seen
    return 1, seen


def labels(layers: Sequence[Place]) -> list[str]:
    """Return short, distinct names of layers: as few of their last parts as possible, but two if the last is short or a number."""
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
    """Return kinds × layers: the weighted mean over the parameters of each kind in each layer; None without parameters."""
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
