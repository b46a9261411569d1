"""Files of JAX programs as trees of dictionaries: flax's msgpack files, and Orbax checkpoints. Arrays are read when asked for.

In msgpack a length stands before every value, so arrays can be stepped over; only what flax uses is read: maps with text keys,
lists, numbers, text, and its extension for arrays. Of an Orbax checkpoint `_METADATA` has the tree, and tensorstore the arrays.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ...errors import FileError, require
from ...storage.byte_range import ByteRange
from ...storage.json_files import read_object
from ...storage.tensors import FileTensor, Joined, Slice

__all__ = ["StoreTensor", "is_msgpack", "is_orbax", "read_msgpack", "read_orbax"]

_DTYPES = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
} | {"uint32": torch.int32, "uint64": torch.int64, "uint16": torch.int16}
_ARRAY, _SCALAR = 1, 3
_MAX_DEPTH, _MAX_VALUES = 100, 4_000_000
_CHUNKED = "__msgpack_chunked_array__"
_SIZE = 1 << 28  # bytes of metadata: millions of arrays
_NUMBERS = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}  # fmt: skip
_TEXT = {0xD9: "B", 0xDA: "H", 0xDB: "I"}
_BYTES = {0xC4: "B", 0xC5: "H", 0xC6: "I"}
_LISTS = {0xDC: "H", 0xDD: "I"}
_MAPS = {0xDE: "H", 0xDF: "I"}
_FIXED = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_EXTENSIONS = {0xC7: "B", 0xC8: "H", 0xC9: "I"}


def is_msgpack(path: Path) -> bool:
    """Return whether a file begins with a map that is not empty and whose first key is text."""
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
    """The values of a msgpack file, one after the other: maps, lists, numbers, text, and arrays as lazy tensors."""

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


def _unchunked(tree: dict[str, Any]) -> Joined:
    """Join an array of over a gigabyte, which is stored in flat chunks."""
    shape, chunks = tree.get("shape"), tree.get("chunks")
    if isinstance(shape, dict) and isinstance(chunks, dict):
        sizes = tuple(shape[str(k)] for k in range(len(shape)) if str(k) in shape)
        flat = [chunks[str(k)] for k in range(len(chunks)) if str(k) in chunks]
        known = flat and all(isinstance(one, FileTensor) for one in flat) and all(isinstance(n, int) for n in sizes)
        if known and sum(math.prod(one.shape) for one in flat) == math.prod(sizes):
            return Joined(sizes, flat[0].dtype, [Slice(one, 0, math.prod(one.shape)) for one in flat])
    raise ValueError("it has an array in chunks that do not fit together")


# -- Orbax -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class StoreTensor:
    """One array of a checkpoint; opened when its shape is asked for, read in whole rows.

    Attributes:
        folder: The checkpoint.
        name: The array's name in it.
        ocdbt: Whether all arrays share one store; otherwise each has a folder.
        zarr3: Whether arrays are of the third version of zarr.
    """

    folder: Path
    name: str
    ocdbt: bool
    zarr3: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return tuple(int(n) for n in self._array.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the array."""
        name = str(self._array.dtype.name)
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise FileError(f"{self.folder}: {self.name} has the type {name}, which is not read.")
        return dtype

    def load(self) -> Tensor:
        """Read the whole array."""
        return self._tensor(self._array)

    def read_flat(self, start: int, stop: int) -> Tensor:
        """Read elements `start` to `stop` in flat order; whole rows are read for it."""
        if not self.shape:
            return self.load().reshape(-1)[start:stop]
        row = math.prod(self.shape[1:]) or 1
        first = start // row
        rows = self._tensor(self._array[first : -(-stop // row)])
        return rows.reshape(-1)[start - first * row : stop - first * row]

    def _tensor(self, array: Any) -> Tensor:
        try:
            values = array.read().result()
        except Exception as error:  # tensorstore raises ValueError, OSError and RuntimeError alike
            raise FileError(f"{self.folder}: {self.name} cannot be read: {_first_line(error)}") from error
        if values.dtype.name == "bfloat16":
            return torch.from_numpy(values.view("int16").copy()).view(torch.bfloat16)
        return torch.from_numpy(values.copy())

    @cached_property
    def _array(self) -> Any:
        tensorstore = require("tensorstore", "jax", "Reading an Orbax checkpoint")
        base = f"file://{self.folder.resolve()}/"
        store = {"driver": "ocdbt", "base": base, "path": f"{self.name}/"} if self.ocdbt else f"{base}{self.name}/"
        spec = {"driver": "zarr3" if self.zarr3 else "zarr", "kvstore": store}
        try:
            return tensorstore.open(spec, open=True, read=True).result()
        except Exception as error:  # as above
            raise FileError(f"{self.folder} lacks {self.name}, or it is damaged: {_first_line(error)}") from error


def is_orbax(path: Path) -> bool:
    """Return whether a folder is an Orbax checkpoint, or one step or all steps of a CheckpointManager."""
    return path.is_dir() and bool(_items(path) or _steps(path))


def read_orbax(path: Path) -> dict[str, Any]:
    """Read the tree of a checkpoint; several items become branches with their names.

    Raises:
        FileError: It is damaged, unfinished, or holds several steps.
        SquisherError: tensorstore is not installed.
    """
    require("tensorstore", "jax", "Reading an Orbax checkpoint")
    items = _items(path)
    if not items:
        steps = _steps(path)
        if len(steps) != 1:
            raise FileError(f"{path} holds the steps {', '.join(s.name for s in steps[:5])}: give the folder of one.")
        items = _items(steps[0])
    tree: dict[str, Any] = {}
    for item in items:
        if ".orbax-checkpoint-tmp" in str(item):
            raise FileError(f"{item} is a checkpoint that was not finished. Give a finished one.")
        branch = _tree(item)
        tree.update(branch if item == path or len(items) == 1 else {item.name: branch})
    return tree


def _items(path: Path) -> list[Path]:
    """Return the folders with arrays: the path itself, or the items below it."""
    if (path / "_METADATA").is_file():
        return [path]
    return sorted(child for child in path.iterdir() if child.is_dir() and (child / "_METADATA").is_file())


def _steps(path: Path) -> list[Path]:
    children = [child for child in path.iterdir() if child.is_dir() and child.name.rpartition("_")[2].isdecimal()]
    return sorted(child for child in children if _items(child))


def _tree(folder: Path) -> dict[str, Any]:
    """Return the tree that `_METADATA` describes, with an unopened array for every leaf."""
    file = folder / "_METADATA"
    try:
        if file.stat().st_size > _SIZE:
            raise FileError(f"{file} is too long to be read.")
        metadata = read_object(file)
        leaves = metadata["tree_metadata"].values()
        ocdbt = metadata.get("use_ocdbt", (folder / "manifest.ocdbt").is_file())
        zarr3 = bool(metadata.get("use_zarr3"))
        tree: dict[str, Any] = {}
        for leaf in leaves:
            keys = [str(key["key"]) for key in leaf["key_metadata"]]
            if any("/" in key or "\\" in key or key == ".." for key in keys) and not ocdbt:
                raise FileError(f"{file} names an array outside of its folder.")
            if leaf["value_metadata"].get("value_type") in ("None", "Dict", "List", "Tuple", "Empty", "NamedTuple"):
                continue
            at = tree
            for key in keys[:-1]:
                at = at.setdefault(key, {})
            at[keys[-1]] = StoreTensor(folder, ".".join(keys), bool(ocdbt), zarr3)
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise FileError(f"{file} cannot be read: {_first_line(error)}") from error
    return tree


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
