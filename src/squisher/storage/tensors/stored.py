"""Tensors in files, read when asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ...errors import FileError, near
from .named import CHUNK
from .room import room_for

__all__ = ["FileTensor", "LazyTensors", "TensorSource", "read_into"]


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
        """The whole tensor."""

    def read_flat(self, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` in flat order."""


class FileTensor(NamedTuple):
    """A tensor that lies in one stretch of bytes of a file."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    def load(self) -> Tensor:
        """The whole tensor."""
        return self.read_flat(0, math.prod(self.shape)).view(self.shape)

    def read_flat(self, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` in flat order, read with plain `read` calls so that no page stays mapped."""
        out = room_for(stop - start, self.dtype)
        if stop > start:
            read_into(self.path, self.offset + start * self.dtype.itemsize, out)
        return out


def read_into(path: str, offset: int, out: Tensor) -> None:
    """Fills a contiguous tensor with the bytes of a file from `offset` on.

    Raises:
        FileError: The file cannot be read or ends too early.
    """
    view = out.view(-1).view(torch.uint8).numpy().data
    done = 0
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            while done < len(view):
                got = file.readinto(view[done:])
                if not got:
                    break
                done += got
    except OSError as error:
        raise FileError(f"Cannot read {path}: {error.strerror or error}.") from error
    if done < len(view):
        raise FileError(
            f"{path} ends at byte {offset + done}, but a tensor should reach to byte {offset + len(view)}: "
            "the file is truncated; copy or download it again."
        )


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
        """The shape of one tensor, without reading it."""
        return torch.Size(self._source(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        """The data type of one tensor, without reading it."""
        return self._source(name).dtype

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[Tensor]:
        """The tensor in flat pieces of at most `size` elements, in order."""
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
