"""The order of an adapter's parameters from the names in its file alone, where the base model is not at hand.

A file sorts its names, but a module cannot have its parameters in any order: those of one submodule stay together, numbered
submodules count up, and a LoRA layer keeps A, B and its magnitude in this order. What is left open is the order of
submodules beside each other (q_proj before v_proj?), which is the same in every layer. Each such order is one proposal.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

from ...storage.folders import Weights
from ..states import Candidate

__all__ = ["adapter_orders"]

_MOST = 5000
_LORA = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")

Tree = dict[str, Any]


def adapter_orders(weights: Weights) -> list[list[Candidate]]:
    """Every order that an adapter's parameters may have; none if there are too many to try.

    Args:
        weights: The adapter's file.
    """
    tree: Tree = {}
    for name in weights.tensors:
        node = tree
        *path, last = name.split(".")
        for part in path:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                return []
        node[last] = name
    open_sets = sorted(set(_unordered(tree, "")))
    if math.prod(math.factorial(len(children)) for _, children in open_sets) > _MOST:
        return []
    orders = []
    for choice in itertools.product(*(itertools.permutations(children) for _, children in open_sets)):
        chosen = dict(zip(open_sets, choice, strict=True))
        orders.append([_candidate(name, weights) for name in _walk(tree, "", chosen)])
    return orders


def _candidate(name: str, weights: Weights) -> Candidate:
    return Candidate(name, tuple(weights.tensors[name].shape), weight=weights.tensors[name])


def _key(node: Tree, path: str) -> tuple[str, tuple[str, ...]]:
    """Return what makes two modules the same: their place, whatever the layer's number, and the children whose order is open."""
    children = {"#" if name.isdigit() else name for name in node if name not in _LORA}
    return re.sub(r"\d+", "#", path), tuple(sorted(children))


def _unordered(node: Tree, path: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    key = _key(node, path)
    if len(key[1]) > 1:
        yield key
    for name, child in node.items():
        if isinstance(child, dict):
            yield from _unordered(child, f"{path}.{name}")


def _walk(node: Tree, path: str, chosen: dict[tuple[str, tuple[str, ...]], tuple[str, ...]]) -> Iterator[str]:
    key = _key(node, path)
    numbered = sorted((name for name in node if name.isdigit()), key=int)
    named = [name for child in chosen.get(key, key[1]) for name in (numbered if child == "#" else [child])]
    lora = [name for name in _LORA if name in node]
    # A module's own parameters come before its submodules'; the magnitude is a submodule that its file names like a parameter.
    own = [name for name in named if not isinstance(node[name], dict)]
    below = [name for name in named if isinstance(node[name], dict)]
    for name in (*own, *below, *lora):
        child = node[name]
        if isinstance(child, dict):
            yield from _walk(child, f"{path}.{name}", chosen)
        else:
            yield child
