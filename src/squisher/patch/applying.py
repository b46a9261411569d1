"""Applying a patch: the base, checked as it is read, with the new values in their places."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import FileError, SquisherError
from ..names import check_known
from ..storage import safetensors
from ..storage.tensors import (
    CHUNK,
    Computed,
    LazyTensors,
    chunks_of,
    dtype_of,
    numel_of,
    shape_of,
)
from .making import FORMAT_VERSION, INDICES, VALUES, Digest, bits, hash_of

__all__ = ["apply"]


def apply(base: Mapping[str, Tensor], path: str | os.PathLike[str]) -> Mapping[str, Tensor]:
    """Return the fine-tuned weights: a lazy mapping that checks every tensor of the base against the patch as it is read.

    Args:
        base: The weights that the patch was made from, to the bit.
        path: What `make` wrote.

    Raises:
        FileError: The file is no patch, or damaged.
        NamingError: The base has other tensors than the patch's; one with other values is refused when it is read.
    """
    path = Path(path)
    data, metadata = safetensors.open_archive(path)
    if metadata is None or metadata.get("kind") != "patch":
        raise FileError(f"{path} is not a patch; make one with: squisher patch make BASE TUNED --out {path}")
    if metadata.get("format_version") != FORMAT_VERSION:
        raise FileError(
            f"{path} is a patch of format {metadata.get('format_version')}; this version reads {FORMAT_VERSION}."
        )
    hashes, entries, names = (metadata.get(key) for key in ("base", "tensors", "names"))
    if not (isinstance(hashes, dict) and isinstance(entries, dict) and isinstance(names, list)):
        raise FileError(f"{path}: the description of the patch is damaged.")
    check_known(hashes, base, (f"the base that {path} was made from", "this one"), "It is another base.")
    for name in names:
        if name not in hashes and entries.get(name, {}).get("encoding") != "whole":
            raise FileError(f"{path}: nothing is known about {name!r}; the file is damaged.")
    return _Patched(base, data, hashes, entries, names, path)


class _Patched(Computed):
    """The base with a patch, read when asked for; every tensor of the base is checked before its last chunk is out."""

    def __init__(
        self,
        base: Mapping[str, Tensor],
        data: LazyTensors,
        hashes: Mapping[str, str],
        entries: Mapping[str, Any],
        names: list[str],
        path: Path,
    ) -> None:
        super().__init__(base, {name: name for name in names})
        self._base, self._data, self._hashes, self._entries = base, data, hashes, entries
        self._path = path

    def _whole(self, name: str) -> bool:
        return bool(self._entries.get(self._name_there(name), {}).get("encoding") == "whole")

    def shape(self, name: str) -> torch.Size:
        return self._data.shape(VALUES + name) if self._whole(name) else shape_of(self._base, name)

    def dtype(self, name: str) -> torch.dtype:
        return self._data.dtype(VALUES + name) if self._whole(name) else dtype_of(self._base, name)

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[Tensor]:
        if self._whole(name):
            if name in self._hashes:
                self._check(name, hash_of(self._base, name))
            yield from self._data.chunks(VALUES + name, size)
            return
        digest = Digest(self._base, name)
        changes = self._changes(name)
        held: Tensor | None = None
        start = 0
        for chunk in chunks_of(self._base, name, size):
            digest.add(chunk)
            if held is not None:  # one chunk late, so that the last one comes out only if the base is the right one
                yield held
            held = changes(chunk, start)
            start += chunk.numel()
        self._check(name, digest.text())
        if held is not None:
            yield held

    def _changes(self, name: str) -> Callable[[Tensor, int], Tensor]:
        if name not in self._entries:
            return lambda chunk, start: chunk
        indices, values = self._data[INDICES + name].numpy(), self._data[VALUES + name]
        size = numel_of(self._base, name)
        rising = indices.size < 2 or bool((np.diff(indices) > 0).all())
        if (
            indices.shape != tuple(values.shape)
            or not rising
            or (indices.size and not 0 <= indices[0] <= indices[-1] < size)
        ):
            raise FileError(f"{self._path}: the changes of {name!r} do not fit the tensor; the file is damaged.")

        return lambda chunk, start: _changed(chunk, start, indices, values)

    def _check(self, name: str, found: str) -> None:
        if found != self._hashes[name]:
            raise SquisherError(
                f"{self._path} was made from another base: {name!r} has other values here ({found[:19]}… instead of "
                f"{self._hashes[name][:19]}…). Apply it to the weights that it was made from."
            )


def _changed(chunk: Tensor, start: int, indices: np.ndarray[Any, Any], values: Tensor) -> Tensor:
    """Return a chunk of a tensor that begins at entry `start`, with the new values in it."""
    # In the type of the indices: with another one, all of them would be converted for each chunk.
    ends = np.array([start, start + chunk.numel() - 1], indices.dtype)
    first, last = int(np.searchsorted(indices, ends[0])), int(np.searchsorted(indices, ends[1], side="right"))
    if first == last:
        return chunk
    new = bits(chunk).copy()
    new[indices[first:last].astype(np.int64) - start] = bits(values[first:last])
    return torch.from_numpy(new).view(chunk.dtype)
