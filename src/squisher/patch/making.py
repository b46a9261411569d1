"""Making a patch: two models compared bit by bit, and what differs written."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import __version__
from ..errors import NamingError, SquisherError, near
from ..names import align
from ..storage import safetensors
from ..storage.tensors import CHUNK, chunks_of, dtype_of, numel_of, shape_of

__all__ = ["FORMAT_VERSION", "INDICES", "VALUES", "Digest", "Summary", "bits", "hash_of", "make"]

FORMAT_VERSION = 1
INDICES, VALUES = "indices/", "values/"

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Progress = Callable[[int, int], None]
"""Called with what is done and what there is in all."""


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
        tuned: The fine-tuned weights. Tensors that the base has not are stored whole.
        path: The patch to write, a `.safetensors` file.
        mask: True where an entry may differ; tensors that it does not name may not.
        drop_outside: Leave out what differs outside the mask, instead of refusing it.
        progress: Called with the entries compared so far and in all.

    Returns:
        What changed and what was dropped.

    Raises:
        SquisherError: Something differs outside the mask; the message says how much.
        NamingError: Names, shapes or types do not fit.
    """
    _check_names(base, tuned, mask)
    found, hashes = _compare(base, tuned, mask, progress)
    outside = {name: part.outside for name, part in found.items() if part.outside}
    if outside and not drop_outside:
        worst = max(outside, key=lambda name: outside[name])
        raise SquisherError(
            f"{sum(outside.values()):,} entries differ outside the mask, in {len(outside)} tensors (most in {worst!r}: "
            f"{outside[worst]:,}). Either this is not the mask of that training, or the training did not keep to it. "
            "--drop-outside leaves them out: the patch then gives another model than the tuned one."
        )
    entries = {}
    stored: dict[str, _Part] = {}
    for name, part in found.items():
        if part.inside:
            stored[name] = part
            entries[name] = {
                "encoding": "whole" if part.whole else "indices",
                "shape": list(shape_of(tuned, name)),
                "changed": part.inside,
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
        {name: part.inside for name, part in stored.items()}, outside, sum(numel_of(tuned, name) for name in tuned)
    )


@dataclass
class _Part:
    """How one tensor differs."""

    inside: int = 0
    outside: int = 0
    new: bool = False
    whole: bool = False


def _check_names(base: Mapping[str, Tensor], tuned: Mapping[str, Tensor], mask: Mapping[str, Tensor] | None) -> None:
    if not any(name in base for name in tuned):
        example = next(iter(tuned), "")
        raise NamingError(f"No tensor of the tuned model is in the base, for example {example!r}.{near(example, base)}")
    for name in tuned:
        safetensors.check_dtype(name, dtype_of(tuned, name))
        if name in base and dtype_of(tuned, name) != dtype_of(base, name):
            raise NamingError(
                f"{name!r} is {dtype_of(base, name)} in the base and {dtype_of(tuned, name)} in the tuned model: every entry "
                "would differ. Convert one of them first."
            )
    if mask:
        align(mask, tuned, ("the mask", "the tuned model"))


def _compare(
    base: Mapping[str, Tensor],
    tuned: Mapping[str, Tensor],
    mask: Mapping[str, Tensor] | None,
    progress: Progress | None,
) -> tuple[dict[str, _Part], dict[str, str]]:
    """Count what differs, tensor by tensor, and hash the base on the way."""
    found: dict[str, _Part] = {}
    hashes: dict[str, str] = {}
    total, done = sum(numel_of(tuned, name) for name in tuned), 0
    for name in base:
        if name not in tuned:
            hashes[name] = hash_of(base, name)
    for name in tuned:
        part = found[name] = _Part()
        size = numel_of(tuned, name)
        if name not in base or shape_of(base, name) != shape_of(tuned, name):
            part.new = part.whole = True
            allowed = mask is None or name in mask
            part.inside, part.outside = (size, 0) if allowed else (0, size)
            if name in base:
                hashes[name] = hash_of(base, name)
            done += size
            continue
        digest = Digest(base, name)
        for old, differs, kept in _compared(base, tuned, mask, name):
            digest.add(old)
            count = int(np.count_nonzero(differs))
            inside = count if kept is None else int(np.count_nonzero(differs & kept))
            part.inside += inside
            part.outside += count - inside
            done += differs.size
            if progress is not None:
                progress(done, total)
        hashes[name] = digest.text()
        width = dtype_of(tuned, name).itemsize
        # With entries outside the mask, whole tensors would bring them back.
        part.whole = (
            not part.outside and part.inside * (_index_type(size).itemsize + width) >= size * width and size > 0
        )
    return found, hashes


def _compared(
    base: Mapping[str, Tensor], tuned: Mapping[str, Tensor], mask: Mapping[str, Tensor] | None, name: str
) -> Iterator[tuple[Tensor, Any, Any]]:
    """Yield chunks of the base, where the tuned bits differ, and where the mask allows it (None: everywhere)."""
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
    """Return the bits of a chunk as integers, which every type can be compared by and moved as."""
    return chunk.contiguous().view(-1).view(_INTEGERS[chunk.dtype.itemsize]).numpy()


def _index_type(size: int) -> torch.dtype:
    return torch.int32 if size <= torch.iinfo(torch.int32).max else torch.int64


def _indices(places: np.ndarray[Any, Any], start: int, size: int) -> Tensor:
    """Return places in a chunk that begins at entry `start` as places in a tensor of `size` entries."""
    return torch.from_numpy(places + start).to(_index_type(size))


class _Stored(Mapping[str, Tensor]):
    """What goes into the file: found again chunk by chunk, so that nothing large is ever held."""

    def __init__(
        self,
        base: Mapping[str, Tensor],
        tuned: Mapping[str, Tensor],
        mask: Mapping[str, Tensor] | None,
        parts: Mapping[str, _Part],
    ) -> None:
        self._base, self._tuned, self._mask, self._parts = base, tuned, mask, parts
        self._names = [
            key for name, part in parts.items() for key in ([] if part.whole else [INDICES + name]) + [VALUES + name]
        ]

    def __getitem__(self, key: str) -> Tensor:
        return torch.cat([*self.chunks(key), torch.zeros(0, dtype=self.dtype(key))]).view(self.shape(key))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def shape(self, key: str) -> torch.Size:
        name = key.partition("/")[2]
        part = self._parts[name]
        return shape_of(self._tuned, name) if part.whole else torch.Size([part.inside])

    def dtype(self, key: str) -> torch.dtype:
        kind, _, name = key.partition("/")
        if kind + "/" == VALUES:
            return dtype_of(self._tuned, name)
        return _index_type(numel_of(self._tuned, name))

    def chunks(self, key: str, size: int = CHUNK) -> Iterator[Tensor]:
        kind, _, name = key.partition("/")
        if self._parts[name].whole:
            yield from chunks_of(self._tuned, name, size)
            return
        start = 0
        for new, (old, differs, kept) in zip(
            chunks_of(self._tuned, name), _compared(self._base, self._tuned, self._mask, name), strict=True
        ):
            places = np.flatnonzero(differs if kept is None else differs & kept)
            if kind + "/" == VALUES:
                yield torch.from_numpy(bits(new)[places]).view(new.dtype)
            else:
                yield _indices(places, start, numel_of(self._tuned, name))
            start += old.numel()


class Digest:
    """The hash of one tensor: of its type, its shape and its bytes."""

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
