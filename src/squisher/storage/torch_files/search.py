"""Dictionaries of named tensors in what a torch file holds, however deep a training script has put them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .values import Record, StoredTensor

__all__ = ["find_weights", "is_optimizer", "walk"]

_DEPTH = 8  # deeper than any training script nests; the walk stays short on hostile files


def find_weights(tree: Any) -> Iterator[tuple[str, dict[str, StoredTensor]]]:
    """Every dictionary of named tensors outside what optimizers save, with the place where it was."""
    for place, value in walk(tree):
        if isinstance(value, dict) and len(value) > 1 and not is_optimizer(value):
            tensors = {k: v for k, v in value.items() if isinstance(v, StoredTensor)}
            if len(tensors) == len(value) and all(isinstance(name, str) for name in tensors):
                yield place, tensors


def is_optimizer(value: Any) -> bool:
    """Whether it is what an optimizer saves, or a pickled optimizer: what is in there has names of its own."""
    content = value.attributes if isinstance(value, Record) else value
    return (
        isinstance(content, dict)
        and isinstance(content.get("state"), dict)
        and isinstance(content.get("param_groups"), list)
        and bool(content["param_groups"])
    )


def walk(tree: Any) -> Iterator[tuple[str, Any]]:
    """Everything that may hold an optimizer or weights, breadth first, each object once."""
    seen: set[int] = set()
    level: list[tuple[str, Any]] = [("", tree)]
    for _ in range(_DEPTH):
        following: list[tuple[str, Any]] = []
        for place, value in level:
            if id(value) in seen:
                continue
            seen.add(id(value))
            yield place, value
            if not is_optimizer(value):
                following.extend(_inside(place, value))
        level = following


def _inside(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Record):
        value = {**value.attributes, **value.mapping}
    if isinstance(value, dict):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(str(k), item) for k, item in enumerate(value)]
    else:
        return
    for key, item in items:
        if isinstance(item, (dict, list, tuple, Record)):
            yield f"{place}.{key}" if place else key, item
