"""Dictionaries of named tensors in what a torch file holds, however deep a training script has put them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .values import Record, StoredTensor

__all__ = ["find_weights", "is_in_backward", "is_optimizer", "walk"]

_DEPTH = 8  # deeper than any training script nests; the walk stays short on hostile files


def find_weights(tree: Any) -> Iterator[tuple[str, dict[str, StoredTensor]]]:
    """Yield every dictionary of named tensors outside what optimizers save, and every pickled module, with its place."""
    for place, value in walk(tree):
        if _is_module(value):
            yield place, dict(_of_module(value))
        elif isinstance(value, dict) and len(value) > 1 and not is_optimizer(value):
            tensors = {k: v for k, v in value.items() if isinstance(v, StoredTensor)}
            if len(tensors) == len(value) and all(isinstance(name, str) for name in tensors):
                yield place, tensors


def is_optimizer(value: Any) -> bool:
    """Whether something is an optimizer's state dict, a pickled optimizer, or a dictionary of them by parameter."""
    content = value.attributes if isinstance(value, Record) else value
    if not isinstance(content, dict):
        return False
    groups = content.get("param_groups")
    state = content.get("state", content.get("opt_state"))  # torchcontrib's SWA keeps the inner one's under this key
    return (isinstance(state, dict) and isinstance(groups, list) and bool(groups)) or is_in_backward(content)


def is_in_backward(content: dict[Any, Any]) -> bool:
    """Whether a dictionary has an optimizer of one parameter under each parameter's name, as torchtune's in-backward steps do."""
    return len(content) > 1 and all(
        isinstance(name, str) and "." in name and isinstance(one, dict) and _of_one_parameter(one)
        for name, one in content.items()
    )


def _of_one_parameter(one: dict[Any, Any]) -> bool:
    groups = one.get("param_groups")
    if not isinstance(one.get("state"), dict) or not isinstance(groups, list) or len(groups) != 1:
        return False
    members = groups[0].get("params") if isinstance(groups[0], dict) else None
    return isinstance(members, list) and len(members) == 1


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
        own = ("_parameters", "_modules", "_buffers") if _is_module(value) else ()  # these are read as one
        value = {**{k: v for k, v in value.attributes.items() if k not in own}, **value.mapping}
    if isinstance(value, dict):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(str(k), item) for k, item in enumerate(value)]
    else:
        return
    for key, item in items:
        if isinstance(item, (dict, list, tuple, Record)):
            yield f"{place}.{key}" if place else key, item


def _is_module(value: Any) -> bool:
    """Whether something is a pickled `nn.Module`."""
    if not isinstance(value, Record):
        return False
    return isinstance(value.get("_parameters"), dict) and isinstance(value.get("_modules"), dict)


def _of_module(module: Record, prefix: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the parameters of a pickled module by their full names, in registration order, each module once."""
    seen = set() if seen is None else seen
    seen.add(id(module))
    for name, tensor in module.get("_parameters").items():
        if isinstance(tensor, StoredTensor):
            yield f"{prefix}{name}", tensor
    for name, child in module.get("_modules").items():
        if _is_module(child) and id(child) not in seen and prefix.count(".") < 64:
            yield from _of_module(child, f"{prefix}{name}.", seen)
