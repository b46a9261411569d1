"""Mask: which entries of which parameters may move, in as few bytes as possible; its file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import __version__
from ..errors import FileError, SquisherError, near
from ..storage import safetensors
from ..storage.tensors import CHUNK, LazyTensors, chunks_of, dtype_of, shape_of

__all__ = ["FORMAT_VERSION", "Mask", "Packed", "load", "pack"]

FORMAT_VERSION = 1
_BLOCK = 1 << 15  # bytes of bits that are unpacked at once


class Packed(NamedTuple):
    """One tensor of a mask: nothing or everything needs no data; otherwise bits or flat indices, the smaller of the two."""

    shape: tuple[int, ...]
    encoding: str
    kept: int


class Mask(Mapping[str, Tensor]):
    """A mapping from parameter name to a boolean tensor: True where training may move an entry.

    It holds bits or indices, whichever is smaller, and gives out boolean tensors when asked for. From a file it reads them
    then. Names that are missing from it are frozen.

    Args:
        tensors: Boolean tensors by name.
        **provenance: What the mask says about itself; goes into its file as JSON.

    Attributes:
        provenance: The same.
        kept: How many entries are True.
        total: How many entries there are.
    """

    def __init__(self, tensors: Mapping[str, Tensor], **provenance: Any) -> None:
        layout: dict[str, Packed] = {}
        data: dict[str, Tensor] = {}
        for name in tensors:
            if dtype_of(tensors, name) != torch.bool:
                raise SquisherError(
                    f"The mask of {name!r} has the type {dtype_of(tensors, name)}; a mask is made of boolean tensors."
                )
            layout[name], data[name] = pack(tuple(shape_of(tensors, name)), chunks_of(tensors, name))
        self._set(layout, data, provenance)

    def _set(self, layout: dict[str, Packed], data: Mapping[str, Tensor], provenance: Mapping[str, Any]) -> None:
        self._layout = layout
        self._data = data
        self.provenance = dict(provenance)
        self.kept = sum(part.kept for part in layout.values())
        self.total = sum(torch.Size(part.shape).numel() for part in layout.values())

    @classmethod
    def from_packed(cls, layout: dict[str, Packed], data: Mapping[str, Tensor], provenance: Mapping[str, Any]) -> Mask:
        """Return a mask from parts that are packed already."""
        new = cls.__new__(cls)
        new._set(layout, data, provenance)
        return new

    def __getitem__(self, name: str) -> Tensor:
        part = self._part(name)
        return torch.cat([*self.chunks(name), torch.zeros(0, dtype=torch.bool)]).view(part.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout)

    def __len__(self) -> int:
        return len(self._layout)

    def __contains__(self, name: object) -> bool:
        return name in self._layout

    def __repr__(self) -> str:
        return f"Mask({self.kept:,} of {self.total:,} entries in {len(self)} tensors)"

    def shape(self, name: str) -> torch.Size:
        """Return the shape of one tensor, without unpacking it."""
        return torch.Size(self._part(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return torch.bool: a mask has no other type."""
        return torch.bool

    def count(self, name: str) -> int:
        """How many entries of one tensor are True, without unpacking it."""
        return self._part(name).kept

    def indices(self, name: str) -> Tensor:
        """Return the flat indices of the True entries of one tensor, ascending, int64."""
        if self._part(name).encoding == "indices":
            return self._data[name].to(torch.int64)
        found, start = [torch.zeros(0, dtype=torch.int64)], 0
        for piece in self.chunks(name):
            found.append(torch.from_numpy(np.flatnonzero(piece.numpy())) + start)
            start += piece.numel()
        return torch.cat(found)

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[Tensor]:
        """One tensor in flat boolean pieces, in order."""
        shape, encoding, _ = self._part(name)
        numel = torch.Size(shape).numel()
        if encoding == "indices":
            indices = self._data[name].numpy()
        for start in range(0, numel, size):
            count = min(size, numel - start)
            if encoding in ("none", "all"):
                yield torch.full((count,), encoding == "all")
            elif encoding == "indices":
                first, last = np.searchsorted(indices, (start, start + count))
                piece = np.zeros(count, dtype=bool)
                piece[indices[first:last].astype(np.int64) - start] = True
                yield torch.from_numpy(piece)
            else:
                from_byte, to_byte = start // 8, -(-(start + count) // 8)
                bits = np.unpackbits(self._bytes(name, from_byte, to_byte), bitorder="little").view(bool)
                skip = start - 8 * from_byte
                yield torch.from_numpy(bits[skip : skip + count].copy())

    def _bytes(self, name: str, start: int, stop: int) -> Any:
        if isinstance(self._data, LazyTensors):
            return self._data.source(name).read_flat(start, stop).numpy()
        return self._data[name][start:stop].numpy()

    def _part(self, name: str) -> Packed:
        try:
            return self._layout[name]
        except KeyError:
            raise KeyError(f"no mask for {name!r}.{near(name, self._layout)}") from None

    def save(self, path: str | os.PathLike[str], progress: safetensors.Progress | None = None) -> None:
        """Write the mask as safetensors, whole or not at all.

        Args:
            path: A `.safetensors` file.
            progress: Called with the bytes written so far and in all.

        Raises:
            SquisherError: The file cannot be written.
        """
        tensors = [  # a list, because the keys of an object would be sorted
            {"name": name, "shape": list(part.shape), "encoding": part.encoding, "kept": part.kept}
            for name, part in self._layout.items()
        ]
        metadata = {
            **self.provenance,
            "kind": "mask",
            "format_version": FORMAT_VERSION,
            "created_with": f"torch-squisher {__version__}",
            "tensors": tensors,
        }
        safetensors.save(path, self._data, metadata, progress=progress)


def pack(shape: tuple[int, ...], pieces: Iterable[Tensor]) -> tuple[Packed, Tensor]:
    """One boolean tensor that comes in pieces, as bits or as flat indices, whichever is smaller.

    Raises:
        SquisherError: The pieces do not add up to the shape.
    """
    numel = torch.Size(shape).numel()
    parts: list[Any] = []
    carried: Any = np.zeros(0, dtype=bool)
    kept = seen = 0
    for piece in pieces:
        flags = piece.numpy()
        kept += int(np.count_nonzero(flags))
        seen += flags.size
        flags = np.concatenate([carried, flags]) if carried.size else flags
        whole = flags.size // 8 * 8
        parts.append(np.packbits(flags[:whole], bitorder="little"))
        carried = flags[whole:].copy()
    if seen != numel:
        raise SquisherError(f"A mask of {seen} entries came for a tensor of the shape {shape}.")
    if kept in (0, numel):
        return Packed(shape, "all" if kept else "none", kept), torch.zeros(0, dtype=torch.uint8)
    bits = np.concatenate([*parts, np.packbits(carried, bitorder="little")])
    index_type = np.dtype(np.int32 if numel <= np.iinfo(np.int32).max else np.int64)
    if kept * index_type.itemsize >= bits.size:
        return Packed(shape, "bits", kept), torch.from_numpy(bits)
    found = [
        (np.flatnonzero(np.unpackbits(bits[start : start + _BLOCK], bitorder="little")) + 8 * start).astype(index_type)
        for start in range(0, bits.size, _BLOCK)
    ]
    return Packed(shape, "indices", kept), torch.from_numpy(np.concatenate(found))


def load(path: str | os.PathLike[str]) -> Mask:
    """Open a mask file, lazily: its tensors are read and unpacked when asked for.

    Raises:
        FileError: Nothing is there, it is damaged, or it is no mask.
    """
    path = Path(path)
    data, metadata = safetensors.open_archive(path)
    if metadata is None or metadata.get("kind") != "mask":
        what = "nothing that says so" if metadata is None else repr(metadata.get("kind"))
        raise FileError(
            f"{path} is not a mask: it holds {what}. Make one with: squisher mask FILE --keep 0.005 --out {path}"
        )
    if metadata.get("format_version") != FORMAT_VERSION:
        raise FileError(
            f"{path} is a mask of format {metadata.get('format_version')}; this version reads {FORMAT_VERSION}."
        )
    layout = dict(_checked(path, entry, data) for entry in metadata.pop("tensors", []))
    ordered = LazyTensors({name: data.source(name) for name in layout})  # empty tensors have no order in a file
    return Mask.from_packed(layout, ordered, metadata)


def _checked(path: Path, entry: Any, data: LazyTensors) -> tuple[str, Packed]:
    name = entry.get("name") if isinstance(entry, dict) else None
    try:
        part = Packed(tuple(int(n) for n in entry["shape"]), str(entry["encoding"]), int(entry["kept"]))
        numel = torch.Size(part.shape).numel()
        expected = {"none": 0, "all": 0, "bits": -(-numel // 8), "indices": part.kept}[part.encoding]
        fits = data.shape(str(name)) == (expected,) and 0 <= part.kept <= numel
    except (KeyError, TypeError, ValueError, RuntimeError):
        fits = False
    if not fits:
        raise FileError(f"{path}: the mask of {name!r} does not fit its own description; the file is damaged.")
    return str(name), part
