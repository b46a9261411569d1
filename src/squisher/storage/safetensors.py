"""safetensors as streams: read by byte range, written front to back, whole or not at all.

The format is eight bytes of length, a JSON header and the bytes, so that reading ranges and writing streams is simpler
without the library than with it.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ..errors import FileError, NamingError, SquisherError
from .tensors import FileTensor, LazyTensors

__all__ = ["SafetensorsWriter", "open_safetensors", "read_header", "sync_folder"]

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_FLUSH = 1 << 25
_HEADER_LIMIT = 100_000_000  # what the safetensors library itself accepts


def read_header(path: str | os.PathLike[str]) -> tuple[dict[str, FileTensor], dict[str, str]]:
    """The tensors of a safetensors file, by name and in file order, and its string metadata; no tensor is read.

    Raises:
        FileError: The file is not a safetensors file, or lies about itself.
    """
    path = os.fspath(path)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            if not 2 <= length <= min(_HEADER_LIMIT, size - 8):
                raise FileError(f"{path} is not a safetensors file, or it is truncated ({size} bytes).")
            header = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=_no_duplicates)
    except OSError as error:
        raise FileError(f"Cannot read {path}: {error.strerror or error}.") from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise FileError(f"{path} is not a safetensors file: its header is not JSON.") from error
    except NamingError as error:
        raise NamingError(f"{path}: {error}") from None
    if not isinstance(header, dict):
        raise FileError(f"{path} is not a safetensors file: its header is not a JSON object.")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FileError(f"{path}: the metadata of a safetensors file must be strings.")
    tensors = {name: _file_tensor(path, name, entry, 8 + length, size) for name, entry in header.items()}
    ordered = sorted(tensors.items(), key=lambda item: item[1].offset)
    end = 8 + length
    for name, tensor in ordered:  # overlaps would let one tensor pose as two
        if tensor.offset < end and _numel(tensor.shape):
            raise FileError(f"{path}: tensor {name!r} overlaps another one; the file is damaged.")
        end = max(end, tensor.offset + _numel(tensor.shape) * tensor.dtype.itemsize)
    return dict(ordered), metadata


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _file_tensor(path: str, name: str, entry: Any, base: int, size: int) -> FileTensor:
    try:
        dtype, shape, (start, stop) = _DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        valid = all(type(n) is int and n >= 0 for n in (*shape, start, stop))
    except (KeyError, TypeError, ValueError):
        valid = False
    if not valid or stop - start != _numel(shape) * dtype.itemsize or base + stop > size:
        raise FileError(f"{path}: tensor {name!r} does not fit the file; it is damaged or truncated.")
    return FileTensor(path, dtype, shape, base + start)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        names = [name for name, _ in pairs]
        raise NamingError(f"the name {next(n for n in names if names.count(n) > 1)!r} appears twice.")
    return out


def open_safetensors(path: str | os.PathLike[str]) -> LazyTensors:
    """A safetensors file, or a sharded set through its `….safetensors.index.json`, as lazy named tensors.

    The metadata of a sharded set are the strings under `metadata` in the index.

    Raises:
        FileError: A file is missing, damaged, or outside the folder of the index.
        NamingError: A name appears twice, or is not where the index says.
    """
    path = Path(path)
    if path.suffix != ".json":
        return LazyTensors(*read_header(path))
    try:
        index = json.loads(path.read_text("utf-8"), object_pairs_hook=_no_duplicates)
        weight_map = index["weight_map"]
        metadata = {k: v for k, v in (index.get("metadata") or {}).items() if isinstance(v, str)}
        shards = sorted(set(weight_map.values()))
        if not all(isinstance(name, str) for name in shards):
            raise TypeError("a shard is not a file name")
    except OSError as error:
        raise FileError(f"Cannot read {path}: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FileError(f"{path} is not an index of safetensors shards: it has no weight_map.") from error
    found: dict[str, FileTensor] = {}
    for shard in shards:
        if Path(shard).name != shard or shard in ("..", "."):
            raise FileError(f"{path} names the shard {shard!r}, which is outside its own folder.")
        if not (path.parent / shard).is_file():
            raise FileError(f"{path} names the shard {shard!r}, which is missing; copy the whole set.")
        found.update({n: t for n, t in read_header(path.parent / shard)[0].items() if weight_map.get(n) == shard})
    missing = [name for name in weight_map if name not in found]
    if missing:
        raise NamingError(f"{path} promises {missing[0]!r} in {weight_map[missing[0]]}, which does not have it.")
    return LazyTensors({name: found[name] for name in weight_map}, metadata)


class SafetensorsWriter:
    """Writes one safetensors file front to back and the header last; it appears under its name whole or not at all.

    The header comes first in the file but may hold what is known only at the end (sums over the tensors), so room for
    `metadata_bound` is kept, and what is left of it is filled with the spaces that the format allows.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        metadata_bound: Mapping[str, str],
    ):
        self.path = Path(path)
        self._layout = dict(layout)
        self._ends: dict[str, int] = {}
        end = 0
        for name, (dtype, shape) in self._layout.items():
            if dtype not in _DTYPE_NAMES:
                raise SquisherError(f"{name!r} has the type {dtype}, which a safetensors file cannot hold.")
            end += _numel(shape) * dtype.itemsize
            self._ends[name] = end
        self._total = end
        self._room = -(-len(self._header(metadata_bound)) // 8) * 8
        self._done = 0
        self._flushed = 0
        # The suffix is no extension that anything loads, and the name is unique to the process.
        self._partial = self.path.with_name(f".{self.path.name}.{os.getpid()}.partial")

    def _header(self, metadata: Mapping[str, str]) -> bytes:
        entries: dict[str, Any] = {"__metadata__": dict(metadata)}
        start = 0
        for name, (dtype, shape) in self._layout.items():
            stop = self._ends[name]
            entries[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
            start = stop
        return json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode("utf-8")

    def __enter__(self) -> SafetensorsWriter:
        folder = self.path.parent
        try:
            free = shutil.disk_usage(folder).free
            if free < self._total + self._room:
                raise FileError(
                    f"Writing {self.path} needs {self._total + self._room:,} bytes, but only {free:,} are free in its "
                    "folder. Nothing was written."
                )
            self._file = open(self._partial, "wb", buffering=0)
            self._file.seek(8 + self._room)
        except OSError as error:
            raise FileError(f"Cannot write {self.path}: {error.strerror or error}.") from error
        return self

    def write(self, piece: Tensor) -> None:
        """Appends a flat piece of the current tensor; the pieces come in the order of the layout.

        Raises:
            FileError: The disk is full or the file cannot be written.
        """
        with self._told():
            self._done += self._put(piece.contiguous().view(-1).view(torch.uint8).numpy().data)
            if self._done - self._flushed >= _FLUSH:
                _start_writing_back(self._file.fileno(), 8 + self._room + self._flushed, self._done - self._flushed)
                self._flushed = self._done

    def _put(self, view: memoryview) -> int:
        """All of the bytes: one call may write fewer, and the next one then says why."""
        done = 0
        while done < len(view):
            done += self._file.write(view[done:])
        return done

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or error
            raise FileError(f"Cannot write {self.path}: {reason}. Nothing was left behind.") from error

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Writes the header and makes the bytes durable; `publish` then gives the file its name.

        Raises:
            FileError: Fewer or more bytes were written than the layout promises, or the disk is full.
        """
        if self._done != self._total:
            raise FileError(f"Cannot write {self.path}: {self._done} bytes came instead of {self._total}.")
        header = self._header(metadata)
        if len(header) > self._room:
            raise FileError(f"Cannot write {self.path}: its header outgrew the room kept for it.")
        with self._told():
            self._file.seek(0)
            self._put(memoryview(struct.pack("<Q", self._room) + header.ljust(self._room)))
            os.fsync(self._file.fileno())

    def publish(self) -> None:
        """Gives the finished file its final name, replacing what was there, in one step.

        Raises:
            FileError: It cannot have the name; a folder has it, for example.
        """
        with self._told():
            os.replace(self._partial, self.path)
        sync_folder(self.path.parent)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if kind is not None:
            self.discard()

    def discard(self) -> None:
        """Removes what was written, if it has not been published."""
        self._partial.unlink(missing_ok=True)


def _start_writing_back(handle: int, offset: int, length: int) -> None:
    """Lets the system write what it has so far, while more is made, so that the last `fsync` has little left to wait for."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, offset, length, os.POSIX_FADV_DONTNEED)


def sync_folder(folder: Path) -> None:
    """Makes a rename durable, where the system knows how to."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # a folder cannot be opened on every system
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
