"""Store a fine-tuned model as its sparse difference from the base: exact to the bit, streamed, and bound to that base.

A patch holds the flat indices and new values of the entries that changed in each tensor, or the whole tensor if that is smaller
or the base has none. Entries differ if their bits do.

    squisher.patch.make(base, tuned, "patch.safetensors", mask=mask)
    tuned = squisher.patch.apply(base, "patch.safetensors")
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import __version__
from .errors import FileError, NamingError, SquisherError, near
from .names import align_mask, check_known, check_like, check_named, shared
from .storage import safetensors
from .storage.tensors import CHUNK, Computed, LazyTensors, Progress, chunks_of, dtype_of, numel_of, shape_of

__all__ = ["Summary", "apply", "make"]


FORMAT_VERSION = 1
INDICES, VALUES = "indices/", "values/"

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Summary:
    """What `make` found.

    Attributes:
        changed: Entries that differ and are in the patch, by tensor.
        dropped: Entries outside the mask that differ and were left out, by tensor.
        total: Entries of the tuned model.
    """

    changed: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    total: int = 0


def make(
    base: Mapping[str, Tensor],
    tuned: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    *,
    mask: Mapping[str, Tensor] | None = None,
    drop_outside: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Write the difference of a fine-tuned model from its base; both are read chunk by chunk.

    Args:
        base: The weights that training started from.
        tuned: The fine-tuned weights. Tensors that the base does not have are stored whole.
        path: The patch to write, a `.safetensors` file.
        mask: True where an entry may differ; tensors that it does not name may not.
        drop_outside: Whether to leave out entries that differ outside the mask, instead of refusing them.
        progress: Called with the entries compared so far and in all.

    Returns:
        What changed and what was dropped.

    Raises:
        SquisherError: Entries differ outside the mask; the message says how many.
        NamingError: Names, shapes or types do not fit.
    """
    same, mask = _matched(base, tuned, mask)
    found, hashes = _compare(base, tuned, same, mask, progress)
    outside = {name: one.outside for name, one in found.items() if one.outside}
    if outside and not drop_outside:
        worst = max(outside, key=lambda name: outside[name])
        raise SquisherError(
            f"{sum(outside.values()):,} entries differ outside the mask, in {len(outside)} tensors (most in {worst!r}: "
            f"{outside[worst]:,}). Either this is not the mask of that training, or the training did not keep to it. "
            "--drop-outside (drop_outside=True) leaves them out: the patch then gives another model than the tuned one."
        )
    entries = {}
    stored: dict[str, _Difference] = {}
    for name, one in found.items():
        if one.inside or (one.new and not one.outside):  # a new tensor may be empty
            stored[name] = one
            entries[name] = {
                "encoding": "whole" if one.whole else "indices",
                "shape": list(shape_of(tuned, name)),
                "changed": one.inside,
            }
    metadata = {
        "kind": "patch",
        "format_version": FORMAT_VERSION,
        "created_with": f"torch-squisher {__version__}",
        "base": hashes,
        "tensors": entries,
        "names": [name for name in tuned if name in base or name in stored],
    }
    safetensors.save(path, _Stored(base, tuned, None if not drop_outside else mask, stored), metadata)
    return Summary(
        {name: one.inside for name, one in stored.items()}, outside, sum(numel_of(tuned, name) for name in tuned)
    )


@dataclass
class _Difference:
    """How one tensor differs."""

    inside: int = 0
    outside: int = 0
    new: bool = False
    whole: bool = False


def _matched(
    base: Mapping[str, Tensor], tuned: Mapping[str, Tensor], mask: Mapping[str, Tensor] | None
) -> tuple[set[str], Mapping[str, Tensor] | None]:
    """Return the tensors to compare entry by entry (others are stored whole), and the mask under all names."""
    check_named(base, "the base")
    check_named(tuned, "the tuned model")
    if not any(name in base for name in tuned):
        example = next(iter(tuned), "")
        raise NamingError(f"No tensor of the tuned model is in the base, for example {example!r}.{near(example, base)}")
    for name in tuned:
        safetensors.check_dtype(name, dtype_of(tuned, name))
    same = shared([tuned, base])
    for name in same:
        check_like(
            base, name, tuned, name, ("the base", "the tuned model"), dtypes=True, advice="Every entry would differ."
        )
    if mask:
        mask = align_mask(mask, tuned, "the tuned model")
    return set(same), mask


def _compare(
    base: Mapping[str, Tensor],
    tuned: Mapping[str, Tensor],
    same: Collection[str],
    mask: Mapping[str, Tensor] | None,
    progress: Progress | None,
) -> tuple[dict[str, _Difference], dict[str, str]]:
    """Count the entries that differ, tensor by tensor, and hash the base on the way."""
    found: dict[str, _Difference] = {}
    hashes: dict[str, str] = {}
    total, done = sum(numel_of(tuned, name) for name in tuned), 0
    for name in base:
        if name not in tuned:
            hashes[name] = hash_of(base, name)
    for name in tuned:
        one = found[name] = _Difference()
        size = numel_of(tuned, name)
        if name not in same:
            one.new = one.whole = True
            allowed = mask is None or name in mask
            one.inside, one.outside = (size, 0) if allowed else (0, size)
            if name in base:
                hashes[name] = hash_of(base, name)
            done += size
            continue
        digest = Digest(base, name)
        for old, differs, kept in _compared(base, tuned, mask, name):
            digest.add(old)
            count = int(np.count_nonzero(differs))
            inside = count if kept is None else int(np.count_nonzero(differs & kept))
            one.inside += inside
            one.outside += count - inside
            done += differs.size
            if progress is not None:
                progress(done, total)
        hashes[name] = digest.text()
        width = dtype_of(tuned, name).itemsize
        # A whole tensor would bring back the entries outside the mask.
        one.whole = not one.outside and one.inside * (_index_type(size).itemsize + width) >= size * width and size > 0
    return found, hashes


def _compared(
    base: Mapping[str, Tensor], tuned: Mapping[str, Tensor], mask: Mapping[str, Tensor] | None, name: str
) -> Iterator[tuple[Tensor, Any, Any]]:
    """Yield (chunk of the base, where the tuned bits differ, where the mask allows it); None allows it everywhere."""
    marks: Iterator[Any]
    if mask is None:
        marks = itertools.repeat(None)
    elif name in mask:
        marks = (chunk.numpy() for chunk in chunks_of(mask, name))
    else:
        marks = itertools.repeat(np.False_)
    for old, new in zip(chunks_of(base, name), chunks_of(tuned, name), strict=True):
        yield old, bits(old) != bits(new), next(marks)


def bits(chunk: Tensor) -> np.ndarray[Any, Any]:
    """Return the bits of a chunk as integers, to compare and copy any type."""
    return chunk.contiguous().view(-1).view(_INTEGERS[chunk.dtype.itemsize]).numpy()


def _index_type(size: int) -> torch.dtype:
    return torch.int32 if size <= torch.iinfo(torch.int32).max else torch.int64


def _indices(places: np.ndarray[Any, Any], start: int, size: int) -> Tensor:
    """Return places in a chunk as flat indices of a tensor of `size` entries, in which the chunk begins at `start`."""
    return torch.from_numpy(places + start).to(_index_type(size))


class _Stored(Computed):
    """The tensors of a patch file, computed chunk by chunk from the models, so that nothing large is in memory."""

    def __init__(
        self,
        base: Mapping[str, Tensor],
        tuned: Mapping[str, Tensor],
        mask: Mapping[str, Tensor] | None,
        found: Mapping[str, _Difference],
    ) -> None:
        kinds = ((kind, name, one) for name, one in found.items() for kind in (INDICES, VALUES))
        super().__init__(tuned, {kind + name: name for kind, name, one in kinds if kind == VALUES or not one.whole})
        self._base, self._mask, self._found = base, mask, found

    def shape(self, key: str) -> torch.Size:
        one = self._found[self._name_there(key)]
        return super().shape(key) if one.whole else torch.Size([one.inside])

    def dtype(self, key: str) -> torch.dtype:
        return super().dtype(key) if key.startswith(VALUES) else _index_type(super().shape(key).numel())

    def chunks(self, key: str, size: int = CHUNK) -> Iterator[Tensor]:
        name, start = self._name_there(key), 0
        if self._found[name].whole:
            yield from chunks_of(self._like, name, size)
            return
        compared = _compared(self._base, self._like, self._mask, name)
        for new, (_, differs, kept) in zip(chunks_of(self._like, name), compared, strict=True):
            places = np.flatnonzero(differs if kept is None else differs & kept)
            if key.startswith(VALUES):
                yield torch.from_numpy(bits(new)[places]).view(new.dtype)
            else:
                yield _indices(places, start, numel_of(self._like, name))
            start += new.numel()


class Digest:
    """The hash of a tensor's type, shape and bytes."""

    def __init__(self, tensors: Mapping[str, Tensor], name: str) -> None:
        kind = str(dtype_of(tensors, name)).removeprefix("torch.")
        self._hash = hashlib.sha256(f"{kind} {list(shape_of(tensors, name))}\n".encode())

    def add(self, chunk: Tensor) -> None:
        """Add the next chunk."""
        self._hash.update(bits(chunk).view(np.uint8).data)

    def text(self) -> str:
        """Return the hash of all chunks."""
        return "sha256:" + self._hash.hexdigest()[:40]


def hash_of(tensors: Mapping[str, Tensor], name: str) -> str:
    """Return the hash of a whole tensor, read chunk by chunk."""
    digest = Digest(tensors, name)
    for chunk in chunks_of(tensors, name):
        digest.add(chunk)
    return digest.text()


def apply(base: Mapping[str, Tensor], path: str | os.PathLike[str]) -> Mapping[str, Tensor]:
    """Return the fine-tuned weights: a lazy mapping that checks every tensor of the base when it is read.

    Args:
        base: The weights that the patch was made from, to the bit.
        path: What `make` wrote.

    Raises:
        FileError: The file is not a patch, or it is damaged.
        NamingError: The base lacks a tensor of the patch's base. Other values are refused when they are read.
    """
    path = Path(path)
    check_named(base, "the base")
    make = "squisher patch make BASE TUNED --out PATCH"
    data, metadata = safetensors.open_kind(path, "patch", FORMAT_VERSION, make)
    hashes, entries, names = (metadata.get(key) for key in ("base", "tensors", "names"))
    if not (isinstance(hashes, dict) and isinstance(entries, dict) and isinstance(names, list)) or not all(
        isinstance(name, str) for name in names
    ):
        raise FileError(f"{path}: the description of the patch is damaged.")
    check_known(hashes, base, (f"the base that {path} was made from", "this one"), "It is another base.")
    patched = _Patched(base, data, hashes, entries, names, path)
    patched.check_description()
    return patched


class _Patched(Computed):
    """The base with a patch, read when asked for; every tensor of the base is checked before its last chunk is returned."""

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
        self._data, self._hashes, self._entries, self._path = data, hashes, entries, path

    def check_description(self) -> None:
        """Refuse a patch whose description does not fit its tensors or the base; reads no data.

        Raises:
            FileError: It does not fit.
        """
        path, data, base = self._path, self._data, self._like
        expected: set[str] = set()
        for name, entry in self._entries.items():
            if not isinstance(entry, dict) or name not in self or entry.get("encoding") not in ("whole", "indices"):
                raise FileError(f"{path}: the description of {name!r} is damaged.")
            whole, shape = entry["encoding"] == "whole", entry.get("shape")
            kinds = [VALUES] if whole else [INDICES, VALUES]
            expected.update(kind + name for kind in kinds)
            stored = [list(data.shape(kind + name)) for kind in kinds if kind + name in data]
            if stored != ([shape] if whole else [[entry.get("changed")]] * 2):
                raise FileError(f"{path}: the changes of {name!r} are not as many as it says; the file is damaged.")
            if whole or name not in self._hashes:
                continue
            types = [data.dtype(INDICES + name), data.dtype(VALUES + name)]
            here = [_index_type(numel_of(base, name)), dtype_of(base, name)]
            if types != here or shape != list(shape_of(base, name)):
                raise FileError(
                    f"{path}: the changes of {name!r} are {types[1]} at places of {types[0]} in a tensor of {shape}, and here it is {here[1]}, "
                    f"{here[0]} and {list(shape_of(base, name))}: the file is damaged, or was made from another base."
                )
        for name in self:
            if name not in self._hashes and not self._whole(name):
                raise FileError(f"{path}: nothing is known about {name!r}; the file is damaged.")
        if set(data) != expected or not all(isinstance(text, str) for text in self._hashes.values()):
            raise FileError(f"{path}: the description of the patch does not fit what it holds; the file is damaged.")

    def _whole(self, name: str) -> bool:
        return bool(self._entries.get(self._name_there(name), {}).get("encoding") == "whole")

    def shape(self, name: str) -> torch.Size:
        return self._data.shape(VALUES + name) if self._whole(name) else super().shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._data.dtype(VALUES + name) if self._whole(name) else super().dtype(name)

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[Tensor]:
        if self._whole(name):
            if name in self._hashes:
                self._check(name, hash_of(self._like, name))
            yield from self._data.chunks(VALUES + name, size)
            return
        digest = Digest(self._like, name)
        changes = self._changes(name)
        late: Tensor | None = None
        start = 0
        for chunk in chunks_of(self._like, name, size):
            digest.add(chunk)
            if late is not None:  # yielded one chunk late, so that the last one comes only after the check
                yield late
            late = changes(chunk, start)
            start += chunk.numel()
        self._check(name, digest.text())
        if late is not None:
            yield late

    def _changes(self, name: str) -> Callable[[Tensor, int], Tensor]:
        if name not in self._entries:
            return lambda chunk, start: chunk
        indices, values = self._data[INDICES + name].numpy(), self._data[VALUES + name]
        size = numel_of(self._like, name)
        rising = bool((indices[1:] > indices[:-1]).all())  # a difference could overflow
        if not rising or (indices.size and not 0 <= indices[0] <= indices[-1] < size):
            raise FileError(f"{self._path}: the changes of {name!r} do not fit the tensor; the file is damaged.")

        return lambda chunk, start: _changed(chunk, start, indices, values)

    def _check(self, name: str, found: str) -> None:
        if found != self._hashes[name]:
            raise SquisherError(
                f"{self._path} was made from another base: {name!r} has other values here ({found[:19]}… instead of "
                f"{self._hashes[name][:19]}…). Apply it to the weights that it was made from."
            )


def _changed(chunk: Tensor, start: int, indices: np.ndarray[Any, Any], values: Tensor) -> Tensor:
    """Return a chunk, which begins at entry `start` of its tensor, with the new values."""
    # In the type of the indices: for another type, each chunk would convert all of them.
    ends = np.array([start, start + chunk.numel() - 1], indices.dtype)
    first, last = int(np.searchsorted(indices, ends[0])), int(np.searchsorted(indices, ends[1], side="right"))
    if first == last:
        return chunk
    new = bits(chunk).copy()
    new[indices[first:last].astype(np.int64) - start] = bits(values[first:last])
    return torch.from_numpy(new).view(chunk.dtype)
