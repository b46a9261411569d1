"""Names that share one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...ranks import local_of
from .lazy import FileTensor, LazyTensors
from .named import numel_of

__all__ = ["tied_names"]


def tied_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Names that are another name's very tensor: `{alias: first name}`.

    In memory, tensors that share address and shape; in files, those that share their bytes. A mapping that computes its tensors
    knows it itself, in its attribute `tied`.
    """
    if not isinstance(tensors, LazyTensors) and callable(getattr(tensors, "chunks", None)):
        return dict(getattr(tensors, "tied", {}))  # each tensor is new when asked for, and an address may come twice
    first: dict[Any, str] = {}
    tied = {}
    alive = []  # as long as it is, no other tensor can get its address
    for name in tensors:
        if not numel_of(tensors, name):
            continue
        if isinstance(tensors, LazyTensors):
            key = _place(tensors.source(name))
        else:
            alive.append(tensors[name])
            key = _address(alive[-1])
        if key is not None and first.setdefault(key, name) != name:
            tied[name] = first[key]
    return tied


def _place(source: Any) -> Any:
    if isinstance(source, FileTensor):
        return (source.byte_range, source.shape)
    storage = getattr(source, "storage", None)
    return None if storage is None else (storage.byte_range, source.storage_offset, source.shape)


def _address(tensor: Tensor) -> Any:
    tensor = local_of(tensor)
    return (
        None
        if tensor.is_meta or not tensor.numel()
        else (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
    )
