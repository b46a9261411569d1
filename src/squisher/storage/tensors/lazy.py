"""Tensors that are not read yet: dtype and shape are known, values are read when asked for, chunk by chunk."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from threading import Lock
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from ...errors import near
from ...ranks import local_of
from ..byte_range import ByteRange
from .named import CHUNK, numel_of

__all__ = ["FileTensor", "LazyTensors", "TensorSource", "room_for", "tied_names"]


@runtime_checkable
class TensorSource(Protocol):
    """One tensor that is not in memory: its shape and dtype are known, its values are read when asked for."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the stored values."""

    def load(self) -> Tensor:
        """Return the whole tensor."""

    def read_flat(self, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` in flat order."""


class FileTensor(NamedTuple):
    """A tensor that is one byte range."""

    byte_range: ByteRange
    dtype: torch.dtype
    shape: tuple[int, ...]

    def load(self) -> Tensor:
        """Return the whole tensor."""
        return self.read_flat(0, math.prod(self.shape)).view(self.shape)

    def read_flat(self, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` in flat order."""
        out = room_for(stop - start, self.dtype)
        if stop > start:
            self.byte_range.read_into(out.view(torch.uint8).numpy().data, start * self.dtype.itemsize)
        return out


class LazyTensors(Mapping[str, Tensor]):
    """Named tensors that are read when asked for; opening it costs no more than reading the headers."""

    def __init__(self, sources: Mapping[str, TensorSource], metadata: Mapping[str, str] | None = None):
        self._sources = dict(sources)
        self.metadata = dict(metadata or {})

    def __getitem__(self, name: str) -> Tensor:
        return self._source(name).load()

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def __repr__(self) -> str:
        return f"LazyTensors({len(self)} tensors)"

    def shape(self, name: str) -> torch.Size:
        """Return the shape of one tensor, without reading it."""
        return torch.Size(self._source(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return the data type of one tensor, without reading it."""
        return self._source(name).dtype

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[Tensor]:
        """Yield the tensor in flat chunks of at most `size` elements, in order."""
        source = self._source(name)
        numel = math.prod(source.shape)
        for start in range(0, numel, size):
            yield source.read_flat(start, min(start + size, numel))

    def source(self, name: str) -> TensorSource:
        """Where one tensor lies."""
        return self._source(name)

    def _source(self, name: str) -> TensorSource:
        try:
            return self._sources[name]
        except KeyError:
            raise KeyError(f"no tensor named {name!r}.{near(name, self._sources)}") from None


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


_ROOM = 8 * CHUNK  # bytes
_ROOMS = 32
_rooms: list[np.ndarray] = []
_rooms_lock = Lock()


def room_for(numel: int, dtype: torch.dtype) -> Tensor:
    """Return memory for a chunk, with arbitrary content; that of an earlier chunk is used again once nothing refers to it.

    The system takes chunks of this size back when they are freed, and a page fault for every 4 kB of a new one costs as much as
    the work on it. The first free one is taken, so that few are in use and those are in the cache.
    """
    size = numel * dtype.itemsize
    if not _ROOM // 16 <= size <= _ROOM:
        return torch.empty(numel, dtype=dtype)
    with _rooms_lock:
        place = next((k for k in range(len(_rooms)) if _holders(_rooms, k) == _NOBODY), None)
        if place is None:
            if len(_rooms) == _ROOMS:
                return torch.empty(numel, dtype=dtype)
            _rooms.append(np.empty(_ROOM, np.uint8))
            place = -1
        return torch.from_numpy(_rooms[place][:size]).view(dtype)


def _holders(rooms: list[np.ndarray], place: int) -> int:
    return sys.getrefcount(rooms[place])


_NOBODY = _holders([np.empty(0, np.uint8)], 0)  # as this interpreter counts: nothing but the list, and what counts
