"""Named tensors and one JSON of metadata in safetensors: one file, or shards and an index; whole or not at all."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import FileError, NamingError, SquisherError
from .safetensors import SafetensorsWriter, open_safetensors, sync_folder
from .tensors import CHUNK, LazyTensors, chunks_of, dtype_of, shape_of

__all__ = ["KEY", "Progress", "exists", "open_archive", "save"]

KEY = "squisher"
"""The metadata key that holds the JSON."""

SHARD_BYTES = 5_000_000_000

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""

_ROW = 8192
_ONES = np.ones(_ROW)
_WIDEST = -1.2345678901234567e-300  # no float prints longer; not a denormal, which torch may have switched off


def save(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, Any] | None,
    *,
    dtype: torch.dtype | None = None,
    statistics: bool = False,
    check: Callable[[str, Tensor], None] | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> None:
    """Writes named tensors with their metadata; memory is bounded by one piece for a lazy mapping.

    Args:
        path: A `.safetensors` file. Above `shard_bytes`, shards and `<path>.index.json` are written instead.
        tensors: Any mapping; a lazy one is read piece by piece.
        metadata: Becomes one JSON string under the key `squisher`. No date, host or path belongs into it. With None the
            file is a plain weight file.
        dtype: The type to write; the stored one if none is given.
        statistics: Adds the keys `sum` and `sum_of_squares` to the metadata: each tensor's, as written.
        check: Called with the name and every piece that is written; raises to stop. Nothing is then left behind.
        shard_bytes: Largest file.
        progress: Called with the bytes written so far and in all.

    Raises:
        SquisherError: The name or a tensor is not one that can be written, or `check` objects.
        FileError: The disk is full or the folder cannot be written.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise SquisherError(f"{path}: a file of named tensors ends in .safetensors; choose such a name.")
    layout = {}
    for name in tensors:
        if not isinstance(name, str) or not name or name == "__metadata__":
            raise NamingError(f"Cannot write a tensor under the name {name!r}; names are non-empty strings.")
        layout[name] = (dtype or dtype_of(tensors, name), tuple(shape_of(tensors, name)))
    shards = list(_shards(layout, shard_bytes))
    total = sum(_bytes(spec) for spec in layout.values())
    bound = dict(metadata or {})
    if statistics:
        widest = dict.fromkeys(layout, _WIDEST)
        bound |= {"sum": widest, "sum_of_squares": widest}
    files = _file_names(path, len(shards))
    alone = len(shards) == 1
    sums: dict[str, float] = {}
    squares: dict[str, float] = {}
    done = 0

    def texts(values: dict[str, Any]) -> dict[str, str]:
        return {} if metadata is None else {KEY: _dumps(values)}

    def final_metadata() -> dict[str, str]:
        return texts({**(metadata or {}), "sum": sums, "sum_of_squares": squares} if statistics else bound)

    with ExitStack() as stack:
        writers = []
        for file, shard in zip(files, shards, strict=True):
            text = {"format": "pt", **(texts(bound) if alone else {})}
            writer = SafetensorsWriter(file, shard, text)
            stack.callback(writer.discard)  # harmless once it is published
            with writer:
                for name, (target, _) in shard.items():
                    parts = []
                    for piece in chunks_of(tensors, name, CHUNK):
                        piece = piece.to(target)
                        if check is not None:
                            check(name, piece)
                        if statistics:
                            parts.append(_sums(piece))
                        writer.write(piece)
                        done += piece.numel() * target.itemsize
                        if progress is not None:
                            progress(done, total)
                    sums[name], squares[name] = (_rounded([pair[k] for pair in parts]) for k in (0, 1))
                writer.finish({"format": "pt", **(final_metadata() if alone else {})})
            writers.append(writer)
        # Until the last rename nothing answers to the final name: an old index goes first, a new one comes last.
        old = _old_files(path)
        index = _index_path(path)
        index.unlink(missing_ok=True)
        if not alone:
            path.unlink(missing_ok=True)
        for writer in writers:
            writer.publish()
        if not alone:
            weight_map = {name: file.name for file, shard in zip(files, shards, strict=True) for name in shard}
            text_index = {"metadata": {"total_size": total, **final_metadata()}, "weight_map": weight_map}
            _write_text(index, _dumps(text_index, indent=2) + "\n")
        for leftover in old - {*files, index}:
            leftover.unlink(missing_ok=True)


def open_archive(path: str | os.PathLike[str]) -> tuple[LazyTensors, dict[str, Any] | None]:
    """Opens what `save` wrote, lazily: the tensors, and the metadata or None where the file has none of ours.

    Raises:
        FileError: Nothing is there, or it is damaged.
    """
    path = Path(path)
    if path.suffix != ".json" and not path.is_file() and _index_path(path).is_file():
        path = _index_path(path)
    if not path.is_file():
        raise FileError(f"There is no file {path}.")
    tensors = open_safetensors(path)
    text = tensors.metadata.get(KEY)
    if text is None:
        return tensors, None
    try:
        metadata = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: the metadata under {KEY!r} is not JSON; the file is damaged.") from error
    if not isinstance(metadata, dict):
        raise FileError(f"{path}: the metadata under {KEY!r} is not a JSON object; the file is damaged.")
    return tensors, metadata


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether `open_archive` would find something under this name."""
    return Path(path).is_file() or _index_path(Path(path)).is_file()


def _sums(piece: Tensor) -> tuple[float, float]:
    # Rows of fixed length, each summed by itself, so that the result does not depend on a number of threads; numpy, because
    # torch would share even a piece of this size among threads, which stalls on a machine that has other work to do.
    values = _plain(piece)
    row = np.empty(_ROW)
    total, squares = [], []
    for start in range(0, values.size, _ROW):
        part = row[: min(_ROW, values.size - start)]
        np.copyto(part, values[start : start + _ROW])
        total.append(float(np.dot(part, _ONES[: part.size])))
        squares.append(float(np.dot(part, part)))
    return math.fsum(total), math.fsum(squares)


def _plain(piece: Tensor) -> np.ndarray[Any, Any]:
    if piece.dtype != torch.bfloat16:
        return piece.numpy()
    return (piece.view(torch.int16).numpy().view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _rounded(parts: list[float]) -> float:
    # Twelve digits: more than a sum of float32 deserves, and the same on every kind of processor.
    return float(f"{math.fsum(parts):.12g}") if all(map(math.isfinite, parts)) else math.nan


def _shards(
    layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], limit: int
) -> Iterator[dict[str, tuple[torch.dtype, tuple[int, ...]]]]:
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


def _file_names(path: Path, count: int) -> list[Path]:
    if count == 1:
        return [path]
    return [path.with_name(f"{path.stem}-{k + 1:05d}-of-{count:05d}.safetensors") for k in range(count)]


def _index_path(path: Path) -> Path:
    return path.with_name(path.name + ".index.json")


def _old_files(path: Path) -> set[Path]:
    """The shards of an earlier archive of this name: replaced, or removed where the new one has fewer."""
    try:
        names = set(json.loads(_index_path(path).read_text("utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()
    return {path.parent / name for name in names if isinstance(name, str) and name.startswith(f"{path.stem}-")}


def _write_text(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise FileError(f"Cannot write {path}: {error.strerror or error}.") from error
    sync_folder(path.parent)


def _dumps(value: Any, indent: int | None = None) -> str:
    try:
        return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False, indent=indent)
    except (TypeError, ValueError) as error:
        raise SquisherError(f"The metadata cannot be written as JSON: {error}.") from error
