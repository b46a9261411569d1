"""Tensors that are still in their file: dtype, shape and place are known, the numbers are read when asked for."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import FileError
from .records import shortened
from .spans import Span

__all__ = ["Storage", "StoredTensor"]

MAX_DIMENSIONS = 64
# An expanded tensor (stride 0) holds more elements than its storage; beyond this it is taken for an attack, not a broadcast.
MAX_EXPANDED_BYTES = 1 << 28
PIECE = 1 << 24


class Storage:
    """A block of bytes that tensors look into; equal only to itself.

    Attributes:
        dtype: What its elements are, as the file says.
        nbytes: Its size as the file says; checked against the file.
        location: The device it was on.
        checksum: The bytes that the zip archive keeps a CRC-32 of, and the CRC-32, if it does.
    """

    __slots__ = ("_span", "checksum", "dtype", "location", "nbytes")

    def __init__(self, dtype: torch.dtype, nbytes: int, location: str = "cpu", span: Span | None = None) -> None:
        self.dtype = dtype
        self.nbytes = nbytes
        self.location = location
        self.checksum: tuple[Span, int] | None = None
        self._span = span

    @property
    def span(self) -> Span:
        """Where its bytes are."""
        if self._span is None:
            raise FileError("A storage has no data in the file. Get the file again.")
        return self._span

    def place(self, span: Span) -> None:
        """Say where its bytes are; a file of the old format tells only at its end."""
        self._span = span

    def verify(self) -> None:
        """Compare the bytes with the checksum in the file; does nothing where the file keeps none."""
        if self.checksum is None:
            return
        span, expected = self.checksum
        found = 0
        for start in range(0, span.length, PIECE):
            found = zlib.crc32(span.read(start, min(PIECE, span.length - start)), found)
        if found != expected:
            raise self.damaged()

    def damaged(self) -> FileError:
        """The error for bytes that are not the ones that were written."""
        return FileError(f"{self.span.label} is damaged: its checksum does not fit its bytes. Get the file again.")

    def __repr__(self) -> str:
        return f"<Storage of {self.nbytes} bytes, {self.dtype}>"


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class StoredTensor:
    """A tensor in a file; equal only to itself, so that a pickled optimizer can use it as a key.

    All of it has been checked against the size of its storage. Two tensors with the same `span`, offset and shape are tied.

    Attributes:
        storage: The block of bytes that it looks into.
        dtype: The element type.
        shape: The sizes.
        stride: The steps, in elements.
        storage_offset: The first element's place in the storage, in elements.
        requires_grad: As saved.
        subclass: The name of the tensor subclass it was, if any (`torch.nn.parameter.Parameter` for parameters).
        attributes: What was attached to it.
    """

    storage: Storage
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int = 0
    requires_grad: bool = False
    subclass: str | None = None
    attributes: Mapping[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = (*self.shape, *self.stride, self.storage_offset)
        if len(self.shape) != len(self.stride) or len(self.shape) > MAX_DIMENSIONS:
            raise ValueError(f"a tensor with {len(self.shape)} sizes and {len(self.stride)} strides")
        for size in sizes:
            if type(size) is not int or not 0 <= size < 1 << 62:
                raise ValueError(f"a tensor with the size, stride or offset {shortened(size)}")
        if self.nbytes >= 1 << 62:
            raise ValueError(f"a tensor of {self.numel} elements")
        if self.numel and (self._last + 1) * self.dtype.itemsize > self.storage.nbytes:
            raise ValueError(
                f"a tensor of shape {self.shape} at element {self.storage_offset} reaches beyond its storage "
                f"of {self.storage.nbytes} bytes"
            )
        if self.nbytes > max(self.storage.nbytes, MAX_EXPANDED_BYTES):
            raise ValueError(f"an expanded tensor of {self.nbytes} bytes over a storage of {self.storage.nbytes}")

    @property
    def span(self) -> Span:
        """Where the whole storage is."""
        return self.storage.span

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the elements in bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements stand in the file in order and without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected and self.numel:
                return False
            expected *= size
        return True

    def byte_range(self) -> tuple[int, int]:
        """Offset in the file and number of bytes of a contiguous tensor.

        Raises:
            ValueError: If it is not contiguous.
        """
        if not self.is_contiguous:
            raise ValueError("only a contiguous tensor is one range of bytes; use load()")
        return self.span.offset + self.storage_offset * self.dtype.itemsize, self.nbytes

    def load(self) -> torch.Tensor:
        """Read it: a fresh contiguous CPU tensor."""
        if self.is_contiguous:
            flat = self.read_flat(0, self.numel)
            self._compare(zlib.crc32(flat.view(torch.uint8).numpy().data) if self._checksum is not None else 0)
            return flat.reshape(self.shape)
        flat = self._read(self.storage_offset, self._last + 1)
        return flat.as_strided(self.shape, self.stride).contiguous()

    def read_flat(self, start: int, stop: int) -> torch.Tensor:
        """Read the elements [start, stop) of a contiguous tensor, counted in its flat order.

        Raises:
            ValueError: If it is not contiguous, or the range is not inside the tensor.
        """
        if not self.is_contiguous:
            raise ValueError("only a contiguous tensor can be read in pieces; use load()")
        if not 0 <= start <= stop <= self.numel:
            raise ValueError(f"elements {start} to {stop} of a tensor of {self.numel}")
        return self._read(self.storage_offset + start, self.storage_offset + stop)

    def pieces(self, size: int) -> Iterator[torch.Tensor]:
        """Read a contiguous tensor front to back in flat pieces of at most `size` elements.

        Where the file keeps a checksum of exactly these bytes, it is compared on the way, at no further read.

        Raises:
            FileError: If the checksum does not fit; after the last piece, since it cannot be known before.
        """
        found = 0
        for start in range(0, self.numel, size):
            piece = self.read_flat(start, min(start + size, self.numel))
            if self._checksum is not None:
                found = zlib.crc32(piece.view(torch.uint8).numpy().data, found)
            yield piece
        self._compare(found)

    @property
    def _checksum(self) -> int | None:
        """The checksum that the file keeps of exactly the bytes of this tensor, if it does."""
        kept = self.storage.checksum
        alone = kept is not None and self.storage_offset == 0 and 0 < self.nbytes == kept[0].length
        return kept[1] if alone and kept is not None else None

    def _compare(self, found: int) -> None:
        if self._checksum not in (None, found):
            raise self.storage.damaged()

    @property
    def _last(self) -> int:
        return self.storage_offset + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))

    def _read(self, start: int, stop: int) -> torch.Tensor:
        if start == stop:  # may stand beyond the end of an empty storage
            return torch.empty(0, dtype=self.dtype)
        size = self.dtype.itemsize
        data = torch.empty((stop - start) * size, dtype=torch.uint8)
        self.span.read_into(data.numpy().data, start * size)
        return data.view(self.dtype)

    def __repr__(self) -> str:
        return f"<StoredTensor {self.shape}, {self.dtype}>"
