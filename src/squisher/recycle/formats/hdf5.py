"""Tensors in HDF5 files: found with h5py, then read straight from their bytes."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ...errors import FileError, require
from ...storage.byte_range import ByteRange
from ...storage.hdf5_probe import probe
from ...storage.tensors import FileTensor

__all__ = ["attribute", "is_hdf5", "open_hdf5", "tensor_at"]

_DTYPES = {
    "<f8": torch.float64, "<f4": torch.float32, "<f2": torch.float16, "<i8": torch.int64, "<i4": torch.int32, "<i2": torch.int16,
    "|i1": torch.int8, "|u1": torch.uint8, "<u2": torch.int16, "<u4": torch.int32,
}  # fmt: skip


def is_hdf5(path: Path) -> bool:
    """Return whether a file begins as HDF5 files do."""
    try:
        return ByteRange.of(path).read(0, 8) == b"\x89HDF\r\n\x1a\n"
    except FileError:
        return False


@contextmanager
def open_hdf5(span: ByteRange) -> Iterator[Any]:
    """Open an HDF5 file, whole or inside another one, to look around in.

    Raises:
        SquisherError: h5py is not installed.
        FileError: It is damaged.
    """
    h5py = require("h5py", "keras", "Reading a Keras file")
    _check_heaps(span)
    probe(span)
    with span.open() as raw:
        try:
            file = h5py.File(raw, "r")
        except (OSError, ValueError) as error:
            raise FileError(f"{span.label} is a damaged HDF5 file: {error}. Get it again.") from error
        try:
            yield file
        except (KeyError, RuntimeError, OSError, TypeError, ValueError, AttributeError) as error:
            raise FileError(f"{span.label} is a damaged HDF5 file: {error}. Get it again.") from error
        finally:
            file.close()


def attribute(node: Any, name: str, default: Any = None) -> Any:
    """Return an attribute of a group or dataset, if it has one; its size is looked at before it is read.

    Raises:
        FileError: It claims to be larger than any attribute that Keras writes.
    """
    if name not in node.attrs:
        return default
    place = node.attrs.get_id(name)
    if math.prod(place.shape) * max(place.dtype.itemsize, 1) > 1 << 24:
        raise FileError(f"An HDF5 file is damaged: its attribute {name!r} claims {place.shape} values. Get it again.")
    return node.attrs.get(name, default)


_HEAP = b"GCOL\x01\0\0\0"
_CHUNK = 1 << 24


def _check_heaps(span: ByteRange) -> None:
    """Walk the heaps of strings as the HDF5 library does, because it walks a damaged one for ever.

    Raises:
        FileError: An object in a heap has a size that leads nowhere.
    """
    start = 0
    while start < span.length:
        chunk = span.read(start, min(_CHUNK + len(_HEAP), span.length - start))
        found = chunk.find(_HEAP)
        while found >= 0 and found < _CHUNK:
            _check_heap(span, start + found)
            found = chunk.find(_HEAP, found + 1)
        start += _CHUNK


def _check_heap(span: ByteRange, at: int) -> None:
    if at + 16 > span.length:
        return  # HDF5 itself notices
    (size,) = struct.unpack("<Q", span.read(at + 8, 8))
    if size > min(span.length - at, 1 << 30):
        raise FileError(f"{span.label} is a damaged HDF5 file: a heap in it is longer than the file. Get it again.")
    heap = span.read(at, size)
    place = 16
    while place + 16 <= size:
        index, length = struct.unpack_from("<H6xQ", heap, place)
        step = length if index == 0 else 16 + (length + 7) // 8 * 8
        if step < 16 or place + step > size:
            raise FileError(f"{span.label} is a damaged HDF5 file: an object in a heap does not fit it. Get it again.")
        place += step


def tensor_at(span: ByteRange, file: Any, path: str) -> Any:
    """Return a dataset: its bytes in the file where they lie together, else its values.

    Raises:
        FileError: It is missing, lies in another file, or holds no numbers.
    """
    data = file.get(path)
    if data is None or not hasattr(data, "shape") or data.file.filename != file.filename:
        raise FileError(f"{span.label} lacks {path}, or keeps it in another file.")
    if data.external or data.is_virtual:
        raise FileError(f"{span.label} keeps {path} in another file, which is not read.")
    dtype = _DTYPES.get(data.dtype.newbyteorder("<").str if data.dtype.byteorder == "=" else data.dtype.str)
    if dtype is None:
        raise FileError(f"{span.label}: {path} has the type {data.dtype}, which is not read.")
    if attribute(data, "dtype") == "bfloat16" and dtype == torch.int16:
        dtype = torch.bfloat16
    shape, offset = tuple(data.shape), data.id.get_offset()
    numel = math.prod(shape)
    if offset is not None and data.chunks is None:
        return FileTensor(span.part(offset, numel * dtype.itemsize, path), dtype, shape)
    if numel * dtype.itemsize > max(64 * data.id.get_storage_size(), 1 << 20):
        raise FileError(f"{span.label}: {path} claims {numel} elements but stores few bytes, so it is not read.")
    content = data[()].tobytes()
    return FileTensor(ByteRange.of_bytes(content, f"{span.label}, {path}"), dtype, shape)
