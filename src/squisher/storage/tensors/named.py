"""Any mapping of named tensors, lazy or not: shapes, types and chunks, without reading more than was asked for."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor

from ...errors import NamingError, SquisherError, near
from ...ranks import whole

__all__ = ["CHUNK", "Computed", "chunks_of", "dtype_of", "name_pattern", "numel_of", "one_thread", "shape_of"]

CHUNK = 1 << 18
"""Elements per chunk: 1 MB of float32, so that a chunk and what is computed from it stay in the cache."""


def shape_of(tensors: Mapping[str, Tensor], name: str) -> torch.Size:
    """Return the shape of one tensor of any mapping; reads no data from a lazy one."""
    shape = getattr(tensors, "shape", None)
    return torch.Size(shape(name)) if callable(shape) else _tensor(tensors, name).shape


def numel_of(tensors: Mapping[str, Tensor], name: str) -> int:
    """Return the number of elements of one tensor of any mapping; reads no data from a lazy one."""
    return math.prod(shape_of(tensors, name))


def dtype_of(tensors: Mapping[str, Tensor], name: str) -> torch.dtype:
    """Return the data type of one tensor of any mapping; reads no data from a lazy one."""
    dtype = getattr(tensors, "dtype", None)
    return cast(torch.dtype, dtype(name)) if callable(dtype) else _tensor(tensors, name).dtype


def chunks_of(tensors: Mapping[str, Tensor], name: str, size: int = CHUNK) -> Iterator[Tensor]:
    """One tensor of any mapping in flat chunks on the CPU, in order; memory is bounded by a chunk for a lazy one.

    A tensor that is spread over processes is gathered first: all of them must ask for it at the same time.
    """
    chunks = getattr(tensors, "chunks", None)
    if callable(chunks):
        yield from chunks(name, size)
        return
    tensor = _tensor(tensors, name)
    if tensor.is_meta or tensor.is_quantized or tensor.layout != torch.strided:
        what = "on the meta device" if tensor.is_meta else "quantised" if tensor.is_quantized else "sparse"
        raise SquisherError(
            f"{name!r} is {what}, so its values cannot be read one by one: give a dense tensor that has some."
        )
    flat = whole(tensor.detach()).reshape(-1)
    for start in range(0, flat.numel(), size):
        yield flat[start : start + size].cpu()


def _tensor(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    value = tensors[name]
    if not isinstance(value, Tensor):
        raise SquisherError(f"{name!r} is a {type(value).__name__}; a tensor was expected.")
    return value


def name_pattern(pattern: str | None) -> re.Pattern[str] | None:
    """Return a user's regular expression over parameter names.

    Raises:
        NamingError: It is not a regular expression.
    """
    try:
        return None if pattern is None else re.compile(pattern)
    except re.error as error:
        raise NamingError(f"{pattern!r} is not a regular expression: {error}.") from error


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch from sharing small chunks among threads, for work that streams over many of them.

    A chunk fits a cache, and its threads would wait for one another at every operation: on a machine that has other work to
    do, that is ten times slower than one thread alone.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Computed(Mapping[str, Tensor]):
    """Named tensors that are computed from those of another mapping when they are asked for.

    Names, shapes and types are the other mapping's unless a subclass says otherwise; what it computes is in its `chunks`.

    Args:
        like: The other mapping.
        names: The names here with those in `like`, in order; None for all of `like`'s own.
    """

    def __init__(self, like: Mapping[str, Tensor], names: Mapping[str, str] | None = None) -> None:
        self._like = like
        self._names = names

    def __getitem__(self, name: str) -> Tensor:
        return torch.cat([*self.chunks(name), torch.zeros(0, dtype=self.dtype(name))]).view(self.shape(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._like if self._names is None else self._names)

    def __len__(self) -> int:
        return len(self._like if self._names is None else self._names)

    def __contains__(self, name: object) -> bool:
        return name in (self._like if self._names is None else self._names)  # the inherited one would read the tensor

    def shape(self, name: str) -> torch.Size:
        """Return the shape of one tensor, without computing it."""
        return shape_of(self._like, self._name_there(name))

    def dtype(self, name: str) -> torch.dtype:
        """Return the data type of one tensor, without computing it."""
        return dtype_of(self._like, self._name_there(name))

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[Tensor]:
        """One tensor in flat chunks of at most `size` elements, in order."""
        return chunks_of(self._like, self._name_there(name), size)

    def _name_there(self, name: str) -> str:
        if self._names is None:
            return name
        try:
            return self._names[name]
        except KeyError:
            raise KeyError(f"no tensor named {name!r}.{near(name, self._names)}") from None
