"""Named tensors in files: read when asked for, piece by piece; written front to back.

A lazy mapping, a `state_dict()` and a test dict are the same to every caller: `shape_of`, `dtype_of` and `chunks_of`
work on all of them, and read nothing that was not asked for.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from .errors import FileError, NamingError, SquisherError, near

__all__ = [
    "CHUNK",
    "LazyTensors",
    "SafetensorsWriter",
    "TensorSource",
    "chunks_of",
    "dtype_of",
    "numel_of",
    "open_safetensors",
    "read_header",
    "shape_of",
    "tied_names",
]

CHUNK = 1 << 18
"""Elements per piece: 1 MB of float32, so that a piece and what is computed from it stay in the cache."""

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_HEADER_LIMIT = 100_000_000  # what the safetensors library itself accepts


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
        return self.read_flat(0, _numel(self.shape)).view(self.shape)

    def read_flat(self, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` in flat order, read with plain `read` calls so that no page stays mapped."""
        out = torch.empty(stop - start, dtype=self.dtype)
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
        numel = _numel(source.shape)
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


def shape_of(tensors: Mapping[str, Tensor], name: str) -> torch.Size:
    """The shape of one tensor of any mapping; reads no data from a lazy one."""
    shape = getattr(tensors, "shape", None)
    return torch.Size(shape(name)) if callable(shape) else tensors[name].shape


def numel_of(tensors: Mapping[str, Tensor], name: str) -> int:
    """The number of elements of one tensor of any mapping; reads no data from a lazy one."""
    return _numel(shape_of(tensors, name))


def dtype_of(tensors: Mapping[str, Tensor], name: str) -> torch.dtype:
    """The data type of one tensor of any mapping; reads no data from a lazy one."""
    dtype = getattr(tensors, "dtype", None)
    return cast(torch.dtype, dtype(name)) if callable(dtype) else tensors[name].dtype


def chunks_of(tensors: Mapping[str, Tensor], name: str, size: int = CHUNK) -> Iterator[Tensor]:
    """One tensor of any mapping in flat pieces on the CPU, in order; memory is bounded by a piece for a lazy one."""
    chunks = getattr(tensors, "chunks", None)
    if callable(chunks):
        yield from chunks(name, size)
        return
    flat = tensors[name].detach().reshape(-1)
    for start in range(0, flat.numel(), size):
        yield flat[start : start + size].cpu()


def tied_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Names that are another name's very tensor: `{alias: first name}`.

    In memory, tensors that share address and shape; in files, those that share their bytes.
    """
    first: dict[Any, str] = {}
    tied = {}
    for name in tensors:
        key = _place(tensors, name)
        if key is not None and first.setdefault(key, name) != name:
            tied[name] = first[key]
    return tied


def _place(tensors: Mapping[str, Tensor], name: str) -> Any:
    if not numel_of(tensors, name):
        return None
    if isinstance(tensors, LazyTensors):
        source: Any = tensors.source(name)
        if isinstance(source, FileTensor):
            return (source.path, source.offset, source.shape)
        return (source.span, source.storage_offset, source.shape) if hasattr(source, "span") else None
    tensor = tensors[name]
    return None if tensor.is_meta else (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for length in shape:
        numel *= length
    return numel


# ---------------------------------------------------------------------------------------------------------------------
# safetensors: the format is eight bytes of length, a JSON header and the bytes, so that reading ranges and writing
# streams is simpler without the library than with it.


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
        view = piece.contiguous().view(-1).view(torch.uint8).numpy().data
        try:
            while view:
                count = self._file.write(view)
                self._done += count
                view = view[count:]
        except OSError as error:
            reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or error
            raise FileError(f"Cannot write {self.path}: {reason}. Nothing was left behind.") from error

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Writes the header and makes the bytes durable; `publish` then gives the file its name.

        Raises:
            FileError: Fewer or more bytes were written than the layout promises.
        """
        if self._done != self._total:
            raise FileError(f"Cannot write {self.path}: {self._done} bytes came instead of {self._total}.")
        header = self._header(metadata)
        if len(header) > self._room:
            raise FileError(f"Cannot write {self.path}: its header outgrew the room kept for it.")
        self._file.seek(0)
        self._file.write(struct.pack("<Q", self._room) + header.ljust(self._room))
        os.fsync(self._file.fileno())

    def publish(self) -> None:
        """Gives the finished file its final name, replacing what was there, in one step."""
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
