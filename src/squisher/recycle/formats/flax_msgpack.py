"""msgpack files as flax writes them: a tree of dictionaries whose arrays stay in the file until they are asked for.

Only what flax uses is read: maps with text keys, arrays, numbers, text, and its extension for arrays. Nothing else is needed for
it: the format is a length before every value, so that arrays can be stepped over.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ...errors import FileError
from ...storage.byte_range import ByteRange
from ...storage.tensors import FileTensor, Joined, Slice

__all__ = ["is_msgpack", "read_msgpack"]

_DTYPES = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
} | {"uint32": torch.int32, "uint64": torch.int64, "uint16": torch.int16}
_ARRAY, _SCALAR = 1, 3
_MAX_DEPTH, _MAX_VALUES = 100, 4_000_000
_CHUNKED = "__msgpack_chunked_array__"


def is_msgpack(path: Path) -> bool:
    """Whether a file begins with a map that is not empty and whose first key is text."""
    try:
        head = ByteRange.of(path).read(0, 6)
    except FileError:
        return False
    after = {0xDE: 3, 0xDF: 5}.get(head[0] if head else 0, 1 if head and 0x81 <= head[0] <= 0x8F else 0)
    return bool(after) and len(head) > after and (0xA0 <= head[after] <= 0xBF or head[after] == 0xD9)


def read_msgpack(path: Path) -> dict[str, Any]:
    """Read the tree in a msgpack file.

    Raises:
        FileError: It is damaged, or not what flax writes.
    """
    span = ByteRange.of(path)
    with span.open() as file:
        try:
            tree = _Parser(span, file).value(0)
        except (struct.error, ValueError, IndexError, UnicodeDecodeError) as error:
            raise FileError(f"{path} is damaged or no msgpack file that flax wrote: {error}. Get it again.") from error
    if not isinstance(tree, dict):
        raise FileError(f"{path} is a msgpack file, but holds no tree of named arrays.")
    return tree


class _Parser:
    def __init__(self, span: ByteRange, file: BinaryIO):
        self.span, self.file, self.count = span, file, 0

    def value(self, depth: int) -> Any:
        self.count += 1
        if depth > _MAX_DEPTH or self.count > _MAX_VALUES:
            raise ValueError("it is nested too deep, or has too many values")
        kind = self._byte()
        if kind <= 0x7F or kind >= 0xE0:
            return kind if kind <= 0x7F else kind - 256
        if kind <= 0x8F:
            return self._map(kind & 0x0F, depth)
        if kind <= 0x9F:
            return [self.value(depth + 1) for _ in range(kind & 0x0F)]
        if kind <= 0xBF:
            return self._take(kind & 0x1F).decode()
        return self._sized(kind, depth)

    def _sized(self, kind: int, depth: int) -> Any:
        if kind in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[kind]
        if kind in _NUMBERS:
            return struct.unpack(_NUMBERS[kind], self._take(struct.calcsize(_NUMBERS[kind])))[0]
        if kind in _TEXT:
            return self._take(self._length(_TEXT[kind])).decode()
        if kind in _BYTES:
            self._skip(self._length(_BYTES[kind]))
            return None
        if kind in _LISTS:
            return [self.value(depth + 1) for _ in range(self._length(_LISTS[kind]))]
        if kind in _MAPS:
            return self._map(self._length(_MAPS[kind]), depth)
        if kind in _FIXED:
            return self._extension(_FIXED[kind])
        if kind in _EXTENSIONS:
            return self._extension(self._length(_EXTENSIONS[kind]))
        raise ValueError(f"it has a value of the unknown kind {kind:#x}")

    def _map(self, size: int, depth: int) -> Any:
        out: dict[str, Any] = {}
        for _ in range(size):
            key = self.value(depth + 1)
            if not isinstance(key, (str, int)) or str(key) in out:
                raise ValueError(f"it has the key {key!r}, which is no text or is there twice")
            out[str(key)] = self.value(depth + 1)
        return _unchunked(out) if out.get(_CHUNKED) else out

    def _extension(self, length: int) -> Any:
        """Decode an array: (shape, name of its type, bytes), packed once more; step over other extensions."""
        kind = self._byte()
        start = self.file.tell()
        found = None
        if kind in (_ARRAY, _SCALAR):
            if self._byte() != 0x93:
                raise ValueError("it has an array of an unknown form")
            shape, name = self.value(0), self.value(0)
            size = self._length(_BYTES.get(self._byte(), "?"))
            place = self.file.tell()
            if place + size != start + length:
                raise ValueError("it has an array whose sizes contradict each other")
            dtype = _DTYPES.get(name) if isinstance(name, str) else None
            if dtype is not None and isinstance(shape, list) and all(isinstance(n, int) and n >= 0 for n in shape):
                if math.prod(shape) * dtype.itemsize != size:
                    raise ValueError("it has an array whose shape does not fit its bytes")
                found = FileTensor(self.span.part(place, size), dtype, tuple(shape))
        self.file.seek(start)
        self._skip(length)
        return found

    def _length(self, form: str) -> int:
        return struct.unpack(f">{form}", self._take(struct.calcsize(form)))[0]

    def _byte(self) -> int:
        return self._take(1)[0]

    def _take(self, size: int) -> bytes:
        if size > self.span.length - self.file.tell():
            raise ValueError("it is cut short")
        return self.file.read(size)

    def _skip(self, size: int) -> None:
        if size > self.span.length - self.file.tell():
            raise ValueError("it is cut short")
        self.file.seek(size, 1)


_NUMBERS = {
    0xCA: ">f",
    0xCB: ">d",
    0xCC: ">B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}
_TEXT = {0xD9: "B", 0xDA: "H", 0xDB: "I"}
_BYTES = {0xC4: "B", 0xC5: "H", 0xC6: "I"}
_LISTS = {0xDC: "H", 0xDD: "I"}
_MAPS = {0xDE: "H", 0xDF: "I"}
_FIXED = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_EXTENSIONS = {0xC7: "B", 0xC8: "H", 0xC9: "I"}


def _unchunked(tree: dict[str, Any]) -> Joined:
    """Join an array of over a gigabyte, which is stored as flat pieces."""
    shape, chunks = tree.get("shape"), tree.get("chunks")
    if isinstance(shape, dict) and isinstance(chunks, dict):
        sizes = tuple(shape[str(k)] for k in range(len(shape)) if str(k) in shape)
        parts = [chunks[str(k)] for k in range(len(chunks)) if str(k) in chunks]
        whole = (
            bool(parts)
            and all(isinstance(part, FileTensor) for part in parts)
            and all(isinstance(n, int) for n in sizes)
        )
        if whole and sum(math.prod(part.shape) for part in parts) == math.prod(sizes):
            return Joined(sizes, parts[0].dtype, [Slice(part, 0, math.prod(part.shape)) for part in parts])
    raise ValueError("it has an array in pieces that do not fit together")
