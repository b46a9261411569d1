"""safetensors: read by byte range, written front to back, one file or shards with an index, whole or not at all.

The format is eight bytes of length, a JSON header and the bytes, so that reading ranges and writing streams is simpler
without the library than with it. Our own files have one JSON more, under the metadata key `squisher`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ArgumentError, FileError, NamingError, SquisherError, SquisherWarning
from .atomic import PartialFile, as_file_error, check_free, check_not_read, exclusive, write_file
from .byte_range import ByteRange, shown
from .json_files import no_duplicates, parse_json, read_json
from .tensors import CHUNK, FileTensor, LazyTensors, Progress, TensorSource, chunks_of, dtype_of, one_thread, shape_of

__all__ = [
    "KEY", "SHARD_BYTES", "WIDEST", "SafetensorsWriter", "check_dtype", "exists", "open_archive", "open_kind",
    "open_safetensors", "open_shards", "read_header", "read_index", "rounded", "save", "sums_of",
]  # fmt: skip

KEY = "squisher"
"""The metadata key that holds the JSON."""

SHARD_BYTES = 5_000_000_000

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
_DTYPES |= {  # types that older versions of torch lack
    name: getattr(torch, dtype)
    for name, dtype in {
        "F8_E8M0": "float8_e8m0fnu",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
    }.items()
    if hasattr(torch, dtype)
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_FLUSH = 1 << 25
_HEADER_LIMIT = 100_000_000  # what the safetensors library itself accepts
_ROW = 8192
_ONES = np.ones(_ROW)

WIDEST = -1.2345678901234567e-300
"""No float prints longer; not a denormal, which torch may have switched off."""


def read_header(path: str | os.PathLike[str]) -> tuple[dict[str, FileTensor], dict[str, str]]:
    """Return the tensors of a safetensors file, by name and in file order, and its string metadata; no tensor is read.

    Raises:
        FileError: The file is not a safetensors file, or its header does not fit it.
        NamingError: A name appears twice.
    """
    file = ByteRange.of(path)
    prefix = file.read(0, min(8, file.length))
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
    if not 2 <= length <= min(_HEADER_LIMIT, file.length - 8):
        raise FileError(f"{file.label} is not a safetensors file, or it is truncated ({file.length} bytes).")
    header = parse_json(file.read(8, length), f"The header of {file.label}", no_duplicates)
    if not isinstance(header, dict):
        raise FileError(f"{file.label} is not a safetensors file: its header is not a JSON object.")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FileError(f"{file.label}: the metadata of a safetensors file must be strings.")
    data = file.part(8 + length, file.length - 8 - length)
    tensors = {name: _file_tensor(data, name, entry) for name, entry in header.items()}
    ordered = sorted(tensors.items(), key=lambda item: item[1].byte_range.offset)
    end = data.offset
    for name, tensor in ordered:  # overlaps would let one tensor pose as two
        if tensor.byte_range.offset < end and tensor.byte_range.length:
            raise FileError(f"{file.label}: tensor {name!r} overlaps another one; the file is damaged.")
        end = max(end, tensor.byte_range.offset + tensor.byte_range.length)
    return dict(ordered), metadata


def _file_tensor(data: ByteRange, name: str, entry: Any) -> FileTensor:
    kind = entry.get("dtype") if isinstance(entry, dict) else None
    if isinstance(kind, str) and kind not in _DTYPES:
        raise FileError(
            f"{data.label}: tensor {name!r} has the type {kind[:40]!r}, which is not read: take the weights as they were before they were "
            "quantised."
        )
    try:
        dtype, shape, (start, stop) = _DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        valid = all(type(n) is int and n >= 0 for n in (*shape, start, stop))
        valid = valid and math.prod(n or 1 for n in shape) < 1 << 62  # torch counts with 64 bits, also beside a 0
    except (KeyError, TypeError, ValueError):
        valid = False
    if not valid or stop - start != math.prod(shape) * dtype.itemsize or stop > data.length or len(shape) > 64:
        raise FileError(f"{data.label}: tensor {name!r} does not fit the file; it is damaged or truncated.")
    _check_name(name, data.label)
    return FileTensor(data.part(start, stop - start), dtype, shape)


def _check_name(name: object, where: str) -> None:
    """Refuse a name that no file can hold, or that no message could show."""
    if isinstance(name, str) and name and name != "__metadata__":
        with contextlib.suppress(UnicodeEncodeError):
            name.encode("utf-8")
            return
    raise NamingError(f"{where}: a tensor cannot have the name {name!r}; names are text, and not empty.")


def read_index(path: str | os.PathLike[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the `weight_map` of an index and the strings of its metadata; all shards must be in the folder of the index.

    Raises:
        FileError: It is not an index, a shard is missing, or it names something outside its own folder.
        NamingError: A name appears twice.
    """
    path = Path(path)
    index = read_json(path, no_duplicates)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise FileError(f"{path} is not an index of weight shards: it has no weight_map.")
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard or shard in ("..", ".") or "\0" in shard:
            raise FileError(f"{path} names the shard {shard!r}, which is outside its own folder.")
        if not os.path.isfile(path.parent / shard):
            raise FileError(f"{path} names the shard {shard!r}, which is missing; copy the whole set.")
    metadata = index.get("metadata")
    strings = {k: v for k, v in metadata.items() if isinstance(v, str)} if isinstance(metadata, dict) else {}
    return weight_map, strings


def open_shards(
    index: Path, weight_map: Mapping[str, str], opened: Callable[[Path], Mapping[str, TensorSource]]
) -> dict[str, TensorSource]:
    """Return the tensors that an index names, from its shards in order; warn of tensors that it does not name.

    Args:
        index: The index.
        weight_map: The shard of each tensor, as the index has it.
        opened: Opens one shard.

    Raises:
        NamingError: A tensor that the index names is missing.
    """
    found: dict[str, TensorSource] = {}
    left_out: list[str] = []
    for shard in sorted(set(weight_map.values())):
        held = opened(index.parent / shard)
        found.update({name: held[name] for name in held if weight_map.get(name) == shard})
        left_out += [name for name in held if name not in weight_map]
    for name, shard in weight_map.items():
        if name not in found:
            raise NamingError(f"{index} promises {name!r} in {shard}, which does not have it.")
    if left_out:
        warnings.warn(
            f"{index} does not name {len(left_out)} tensors that its shards hold, {left_out[0]!r} for example: they are left out.",
            SquisherWarning,
            stacklevel=3,
        )
    return found


def open_safetensors(path: str | os.PathLike[str]) -> LazyTensors:
    """Return a safetensors file, or a sharded set through its `….safetensors.index.json`, as lazy named tensors.

    The metadata of a sharded set are the strings under `metadata` in the index.

    Raises:
        FileError: A file is missing, damaged, or outside the folder of the index, or is replaced while it is opened.
        NamingError: A name appears twice, or is not where the index says.
    """
    path = Path(path)
    if path.suffix != ".json":
        return LazyTensors(*read_header(path))
    opened = ByteRange.of(path)
    weight_map, metadata = read_index(path)
    found = open_shards(path, weight_map, lambda shard: read_header(shard)[0])
    opened.read()  # replacing a set begins with its index: if that is unchanged, so were all shards
    return LazyTensors({name: found[name] for name in weight_map}, metadata)


def open_archive(path: str | os.PathLike[str]) -> tuple[LazyTensors, dict[str, Any] | None]:
    """Open what `save` wrote, lazily: the tensors, and the metadata or None where the file has none of ours.

    Raises:
        FileError: Nothing is there, or it is damaged.
    """
    path = Path(path)
    if path.suffix != ".json" and not os.path.exists(path) and os.path.isfile(_index_path(path)):
        path = _index_path(path)
    if not os.path.lexists(path):
        raise FileError(f"There is no file {shown(str(path))}.")
    tensors = open_safetensors(path)
    text = tensors.metadata.get(KEY)
    if text is None:
        return tensors, None
    metadata = parse_json(text, f"The metadata under {KEY!r} of {path}")
    if not isinstance(metadata, dict):
        raise FileError(f"{path}: the metadata under {KEY!r} is not a JSON object; the file is damaged.")
    return tensors, metadata


def open_kind(path: str | os.PathLike[str], kind: str, version: int, make: str) -> tuple[LazyTensors, dict[str, Any]]:
    """Open what `save` wrote of one kind, lazily: the tensors and the metadata.

    Args:
        path: The file.
        kind: The kind that its metadata must give: `mask` or `patch`.
        version: The version of the format that is read.
        make: The command that makes such a file, for messages.

    Raises:
        FileError: Nothing is there, it is damaged, or it is something else.
    """
    tensors, metadata = open_archive(path)
    if metadata is None or metadata.get("kind") != kind:
        what = "nothing that says so" if metadata is None else repr(str(metadata.get("kind"))[:80])
        raise FileError(f"{path} is not a {kind}: it holds {what}. Make one with: {make}")
    if metadata.get("format_version") != version:
        found = str(metadata.get("format_version"))[:80]
        raise FileError(f"{path} is a {kind} of format {found}; this version reads {version}.")
    return tensors, metadata


def exists(path: str | os.PathLike[str]) -> bool:
    """Return whether `open_archive` would find something under this name."""
    return os.path.isfile(path) or os.path.isfile(_index_path(Path(path)))


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Refuse a tensor that the format has no type for.

    Raises:
        SquisherError: The format has no type for it.
    """
    if dtype not in _DTYPE_NAMES:
        raise SquisherError(
            f"{name!r} has the type {dtype}, which a safetensors file cannot hold: convert it, or leave it out."
        )


class SafetensorsWriter:
    """Write one safetensors file front to back and the header last; it appears under its name whole or not at all.

    The header comes first in the file but holds what is known only at the end (sums over the tensors). So it gets as much room
    as it would need with `metadata_bound`, and spaces, which the format allows, fill the rest.
    """

    def __init__(self, path: str | os.PathLike[str], layout: Layout, metadata_bound: Mapping[str, str]):
        self.path = Path(path)
        self._layout = dict(layout)
        self._ends: dict[str, int] = {}
        end = 0
        for name, (dtype, shape) in self._layout.items():
            check_dtype(name, dtype)
            end += math.prod(shape) * dtype.itemsize
            self._ends[name] = end
        self._total = end
        self._room = -(-len(self._header(metadata_bound)) // 8) * 8
        self._done = 0
        self._flushed = 0
        self._partial = PartialFile(self.path)

    def _header(self, metadata: Mapping[str, str]) -> bytes:
        entries: dict[str, Any] = {"__metadata__": dict(metadata)}
        start = 0
        for name, (dtype, shape) in self._layout.items():
            stop = self._ends[name]
            entries[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
            start = stop
        return json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode("utf-8")

    def __enter__(self) -> SafetensorsWriter:
        check_free(self.path.parent, self._total + self._room)
        self._partial.__enter__()
        self._partial.file.seek(8 + self._room)
        return self

    def write(self, chunk: Tensor) -> None:
        """Append a flat chunk of the current tensor; the chunks come in the order of the layout.

        Raises:
            FileError: The disk is full or the file cannot be written.
        """
        if not chunk.numel():
            return  # nothing to write; torch gives empty tensors strides that cannot be viewed as bytes
        with as_file_error(self.path):
            view = chunk.contiguous().view(-1).view(torch.uint8).numpy().data
            self._partial.write(view)
            self._done += len(view)
            new = self._done - self._flushed
            if new >= _FLUSH and hasattr(os, "posix_fadvise"):
                # Lets the system write while more is computed, so that the last `fsync` has little left to wait for.
                start = 8 + self._room + self._flushed
                os.posix_fadvise(self._partial.file.fileno(), start, new, os.POSIX_FADV_DONTNEED)
                self._flushed = self._done

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Write the header and make the bytes durable; `publish` then gives the file its name.

        Raises:
            FileError: Fewer or more bytes were written than the layout promises, or the disk is full.
        """
        if self._done != self._total:
            raise FileError(f"Cannot write {self.path}: {self._done} bytes came instead of {self._total}.")
        header = self._header(metadata)
        if len(header) > self._room:
            raise FileError(f"Cannot write {self.path}: its header outgrew the room kept for it.")
        with as_file_error(self.path):
            self._partial.file.seek(0)
            self._partial.write(struct.pack("<Q", self._room) + header.ljust(self._room))
            os.fsync(self._partial.file.fileno())

    def publish(self) -> None:
        """Give the finished file its final name, replacing what was there, in one step."""
        self._partial.publish()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._partial.discard()


@one_thread()
def save(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, Any] | None,
    *,
    dtype: torch.dtype | None = None,
    statistics: bool = False,
    measured: tuple[Mapping[str, Any], Callable[[], Mapping[str, Any]]] | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> None:
    """Write named tensors with their metadata; memory is bounded by one chunk for a lazy mapping.

    Args:
        path: A `.safetensors` file. Above `shard_bytes`, shards and `<path>.index.json` are written instead.
        tensors: Any mapping; a lazy one is read chunk by chunk.
        metadata: Becomes one JSON string under the key `squisher`. No date, host or path belongs into it. With None the
            file is a plain weight file.
        dtype: The type to write; the stored one if none is given.
        statistics: Add the keys `sum` and `sum_of_squares` to the metadata: each tensor's, as written.
        measured: More metadata, known only when all tensors have been written: a mapping whose JSON is at least as long, and
            the function to call then.
        shard_bytes: Largest file.
        progress: Called with the bytes written so far and in all.

    Raises:
        SquisherError: A name or a tensor cannot be written.
        FileError: The disk is full or the folder cannot be written.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ArgumentError(f"{path}: a file of named tensors ends in .safetensors; choose such a name.")
    layout = {}
    for name in tensors:
        _check_name(name, f"Cannot write {path}")
        layout[name] = (dtype or dtype_of(tensors, name), tuple(shape_of(tensors, name)))
    shards = list(_shards(layout, shard_bytes))
    total = sum(_bytes(spec) for spec in layout.values())
    longest, measure = measured or ({}, dict)
    alone, count = len(shards) == 1, len(shards)
    files = [path.with_name(f"{path.stem}-{k + 1:05d}-of-{count:05d}.safetensors") for k in range(count)]
    files = [path] if alone else files
    sums: dict[str, float] = {}
    squares: dict[str, float] = {}
    done = 0

    def described(sums: Mapping[str, float], squares: Mapping[str, float], more: Mapping[str, Any]) -> dict[str, str]:
        known = {**(metadata or {}), **({"sum": sums, "sum_of_squares": squares} if statistics else {}), **more}
        return {} if metadata is None else {KEY: _dumps(known)}

    for target in {*files, *_old_files(path)}:
        check_not_read(target)
    with ExitStack() as stack:
        writers = []
        widest = dict.fromkeys(layout, WIDEST)
        bound = {"format": "pt", **(described(widest, widest, longest) if alone else {})}
        for file, shard in zip(files, shards, strict=True):
            writer = stack.enter_context(SafetensorsWriter(file, shard, bound))
            for name, (target_dtype, _) in shard.items():
                parts = []
                for chunk in chunks_of(tensors, name, CHUNK):
                    chunk = chunk.to(target_dtype)
                    if statistics:
                        parts.append(sums_of(chunk))
                    writer.write(chunk)
                    done += chunk.numel() * target_dtype.itemsize
                    if progress is not None:
                        progress(done, total)
                if statistics:
                    sums[name], squares[name] = (rounded(name, [pair[k] for pair in parts]) for k in (0, 1))
            writer.finish({"format": "pt", **(described(sums, squares, measure()) if alone else {})})
            writers.append(writer)
        index = None
        if not alone:
            weight_map = {name: file.name for file, shard in zip(files, shards, strict=True) for name in shard}
            found = described(sums, squares, measure())
            index = _dumps({"metadata": {"total_size": total, **found}, "weight_map": weight_map}, indent=2)
        _publish(path, writers, index)


def _publish(path: Path, writers: list[SafetensorsWriter], index: str | None) -> None:
    """Give finished files their names, replacing what was there; other writers of the same set wait.

    Until the last rename nothing answers to the name of a set: an old index goes first, a new one comes last.
    """
    with as_file_error(path), exclusive(path.parent):
        old = _old_files(path)
        for target in {*old, path}:
            check_not_read(target)
        _index_path(path).unlink(missing_ok=True)
        if index is not None:
            path.unlink(missing_ok=True)
        for writer in writers:
            writer.publish()
        if index is not None:
            write_file(_index_path(path), (index + "\n").encode("utf-8"))
        for leftover in old - {writer.path for writer in writers}:
            leftover.unlink(missing_ok=True)


def sums_of(chunk: Tensor) -> tuple[float, float]:
    """Return the sum of a flat chunk and the sum of its squares, in float64."""
    # Rows of fixed length, each summed by itself, so that the result does not depend on a number of threads; numpy, because
    # torch would share even a chunk of this size among threads, which stalls on a machine that has other work to do.
    values: np.ndarray[Any, Any] = chunk.view(torch.int16 if chunk.dtype == torch.bfloat16 else chunk.dtype).numpy()
    if chunk.dtype == torch.bfloat16:
        values = (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    row = np.empty(_ROW)
    total, squares = [], []
    for start in range(0, values.size, _ROW):
        part = row[: min(_ROW, values.size - start)]
        np.copyto(part, values[start : start + _ROW])
        total.append(float(np.dot(part, _ONES[: part.size])))
        with np.errstate(over="ignore"):  # the sum of squares may be infinite
            squares.append(float(np.dot(part, part)))
    return math.fsum(total), math.fsum(squares)


def rounded(name: str, parts: Iterable[float]) -> float:
    """Return the sum of a tensor's values (or squares) as files have it, from the sums of its chunks.

    Raises:
        SquisherError: It is infinite.
    """
    total = math.fsum(parts)
    if not math.isfinite(total):
        raise SquisherError(
            f"The values of {name!r}, or the sum of their squares, are more than their type holds: scale them down, or take a wider type."
        )
    return float(f"{total:.12g}")  # more digits than a sum of float32 deserves, and the same on every kind of processor


def _shards(layout: Layout, limit: int) -> Iterator[dict[str, tuple[torch.dtype, tuple[int, ...]]]]:
    shard: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    size = 0
    for name, spec in layout.items():
        if shard and size + _bytes(spec) > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = spec
        size += _bytes(spec)
    yield shard


def _bytes(spec: tuple[torch.dtype, tuple[int, ...]]) -> int:
    return math.prod(spec[1]) * spec[0].itemsize


def _index_path(path: Path) -> Path:
    return path.with_name(path.name + ".index.json")


def _old_files(path: Path) -> set[Path]:
    """Return the shards of an earlier set of this name, to be replaced or removed.

    The index is not trusted: only regular files directly in its folder, with names that we give to shards, count.
    """
    ours = re.compile(re.escape(path.stem) + r"-\d{5}-of-\d{5}\.safetensors")
    found: set[Path] = set()
    with contextlib.suppress(FileError, OSError):
        index = read_json(_index_path(path)) if os.path.isfile(_index_path(path)) else None
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        for name in weight_map.values() if isinstance(weight_map, dict) else ():
            if isinstance(name, str) and ours.fullmatch(name):
                place = path.parent / name
                if os.path.lexists(place) and stat.S_ISREG(os.lstat(place).st_mode):
                    found.add(place)
    return found


def _dumps(value: Any, indent: int | None = None) -> str:
    try:
        return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False, indent=indent)
    except (TypeError, ValueError) as error:
        raise SquisherError(f"The metadata cannot be written as JSON: {error}.") from error
