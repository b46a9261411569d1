"""Masks: chosen by importance, stored as bits or indices (whichever is smaller), written to files."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .. import __version__, ranks
from ..errors import ArgumentError, FileError, NamingError, SquisherError, SquisherWarning, check_fraction, near
from ..importance import Importance, checked, structure_hash
from ..names import check_boolean, check_known, live_tensors
from ..order import choose, reverse
from ..storage import safetensors
from ..storage.tensors import CHUNK, Computed, LazyTensors, Progress, chunks_of, name_pattern, shape_of

__all__ = ["Mask", "load", "pack", "top_k"]


def top_k(
    importance: Mapping[str, Tensor],
    keep: float,
    always: str | None = None,
    *,
    model: nn.Module | Mapping[str, Tensor] | None = None,
    largest: bool = True,
    minimum: float = 0.0,
    sharded: bool = False,
    progress: Progress | None = None,
) -> Mask:
    """Return the most important entries: exactly ⌊keep · total⌋ of them, over all parameters together.

    The total counts the entries of the importance and those of trainable parameters that its provenance lists as absent (a head
    that no gradient has reached yet), whose sizes `model` gives. Of equal values the first ones are taken, so the same importance
    always gives the same mask.

    Args:
        importance: Any mapping; read in chunks, so it may be larger than memory.
        keep: The fraction to keep, from 0 to 1.
        always: A regular expression: parameters that it matches are kept whole, inside the budget (a fresh classifier).
        model: A module or its weights, for the sizes of absent parameters.
        largest: False takes the least important entries instead, to protect what matters.
        minimum: The fraction of every tensor that is kept at least, best first, inside the budget.
        sharded: Whether each process has other parameters and gets their mask; the budget is for all processes together.
        progress: Called with the entries read so far and those that will probably be read in all.

    Raises:
        SquisherError: The budget is impossible, a pattern matches nothing, or values cannot be ranked.
    """
    check_fraction("keep", keep, "of entries to keep")
    check_fraction("minimum", minimum, "of each tensor that is kept at least")
    values = checked(importance)
    shapes = {name: tuple(shape_of(values, name)) for name in values}
    if not shapes and not sharded:
        raise SquisherError("A mask needs an importance with at least one tensor, but this one is empty.")
    pattern = name_pattern(always)
    absent = _absent_shapes(importance, pattern, model)
    shapes |= absent
    kept = frozenset(name for name in shapes if pattern is not None and pattern.search(name))
    if pattern is not None and not kept and not sharded:
        raise NamingError(f"always={always!r} matches no parameter; there are {', '.join(list(shapes)[:4])}, ….")
    unranked = [name for name in absent if name not in kept]
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    total = torch.tensor([sum(sizes.values())])
    if sharded:
        ranks.sum_in_place([total])
    k = math.floor(keep * int(total))
    least = {name: math.floor(minimum * size) for name, size in sizes.items()} if minimum else None

    def source(name: str) -> Callable[[], Iterator[Tensor]]:
        if name in absent:  # without an importance, it comes last unless it is kept whole
            return lambda: iter([torch.zeros(sizes[name])])
        return lambda: chunks_of(values, name) if largest else map(reverse, chunks_of(values, name))

    sources = {name: source(name) for name in shapes if name not in unranked}
    try:
        choice = choose(sources, k, sizes, always=kept, minimum=least, sharded=sharded, progress=progress)
    except ArgumentError as error:  # the budget, and not the values
        raise SquisherError(f"keep={keep} of {int(total):,} entries: {error}") from error
    layout, data = {}, {}
    for name, shape in shapes.items():
        chunks = choice.chunks(name) if name in sources else iter([torch.zeros(sizes[name], dtype=torch.bool)])
        layout[name], data[name] = pack(shape, chunks)
    return Mask.from_packed(
        layout, data, _provenance(importance, shapes, keep, k, int(total), always, minimum, largest)
    )


def _absent_shapes(
    importance: Mapping[str, Tensor], always: re.Pattern[str] | None, model: nn.Module | Mapping[str, Tensor] | None
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of trainable parameters without an importance."""
    listed = importance.provenance.absent if isinstance(importance, Importance) else {}
    trainable = [name for name, why in listed.items() if name not in importance and why.trained]
    if always is not None:  # a parameter that will be trained now counts, even if it was frozen before
        trainable += [name for name in listed if name not in (*importance, *trainable) and always.search(name)]
    if not trainable:
        return {}
    if model is None:
        wanted = [name for name in trainable if always is not None and always.search(name)]
        if wanted and always is not None:
            raise SquisherError(
                f"always={always.pattern!r} asks for {wanted[0]!r}, which has no importance ({listed[wanted[0]]}), so its size is "
                "not known. Give model= (a module or its weights; --model on the command line)."
            )
        warnings.warn(
            f"{len(trainable)} trainable parameters have no importance, among them {trainable[0]!r} "
            f"({listed[trainable[0]]}). Without model= their sizes are not known: they are not counted, and stay frozen.",
            SquisherWarning,
            stacklevel=3,
        )
        return {}
    weights, tied = live_tensors(model) if isinstance(model, nn.Module) else (model, {})
    check_known(trainable, [*weights, *tied], ("the importance", "the model"))
    return {name: tuple(shape_of(weights, tied.get(name, name))) for name in trainable}


def _provenance(
    importance: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    keep: float,
    k: int,
    total: int,
    always: str | None,
    minimum: float,
    largest: bool,
) -> dict[str, Any]:
    record: dict[str, Any] = {"keep": keep, "k": k, "total": total, "model": {"structure": structure_hash(shapes)}}
    asked = {"always": always, "minimum": minimum or None, "largest": None if largest else False}
    record |= {key: value for key, value in asked.items() if value is not None}
    if isinstance(importance, Importance):
        bulky = ("sum", "sum_of_squares", "model")
        record["importance"] = {key: v for key, v in importance.provenance.to_dict().items() if key not in bulky}
    return record


FORMAT_VERSION = 1
_BLOCK = 1 << 15  # bytes of bits that are unpacked at once


class Packed(NamedTuple):
    """One stored tensor of a mask: `none` and `all` need no data, `bits` and `indices` do."""

    shape: tuple[int, ...]
    encoding: str
    kept: int


class Mask(Computed):
    """A mapping from parameter name to a boolean tensor: True where training may move an entry.

    It stores bits or indices, whichever is smaller, and unpacks them when asked for. Names that are missing from it are frozen.

    Args:
        tensors: Boolean tensors by name.
        **provenance: What the mask says about itself: JSON in its file.

    Attributes:
        provenance: The keywords.
        kept: How many entries are True.
        total: How many entries there are.
    """

    def __init__(self, tensors: Mapping[str, Tensor], **provenance: Any) -> None:
        layout: dict[str, Packed] = {}
        data: dict[str, Tensor] = {}
        check_boolean(tensors)
        for name in tensors:
            layout[name], data[name] = pack(tuple(shape_of(tensors, name)), chunks_of(tensors, name))
        self._set(layout, data, provenance)

    def _set(self, layout: dict[str, Packed], data: Mapping[str, Tensor], provenance: Mapping[str, Any]) -> None:
        super().__init__(layout)  # type: ignore[arg-type]  # for its names; shapes, types and chunks are overridden
        self._layout = layout
        self._data = data
        self.provenance = dict(provenance)
        self.kept = sum(packed.kept for packed in layout.values())
        self.total = sum(torch.Size(packed.shape).numel() for packed in layout.values())

    @classmethod
    def from_packed(cls, layout: dict[str, Packed], data: Mapping[str, Tensor], provenance: Mapping[str, Any]) -> Mask:
        """Return a mask from tensors that are packed already."""
        new = cls.__new__(cls)
        new._set(layout, data, provenance)
        return new

    def __repr__(self) -> str:
        return f"Mask({self.kept:,} of {self.total:,} entries in {len(self)} tensors)"

    def shape(self, name: str) -> torch.Size:
        """Return the shape of one tensor, without unpacking it."""
        return torch.Size(self._packed(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return torch.bool: a mask has no other type."""
        return torch.bool

    def count(self, name: str) -> int:
        """Return how many entries of one tensor are True, without unpacking it."""
        return self._packed(name).kept

    def indices(self, name: str) -> Tensor:
        """Return the flat indices of the True entries of one tensor, ascending, int64."""
        if self._packed(name).encoding == "indices":
            return torch.from_numpy(self._indices(name).astype(np.int64))
        found, start = [torch.zeros(0, dtype=torch.int64)], 0
        for chunk in self.chunks(name):
            found.append(torch.from_numpy(np.flatnonzero(chunk.numpy())) + start)
            start += chunk.numel()
        return torch.cat(found)

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[Tensor]:
        """Yield one tensor in flat boolean chunks, in order."""
        shape, encoding, kept = self._packed(name)
        numel = torch.Size(shape).numel()
        if encoding == "indices":
            indices = self._indices(name)
        found = 0
        for start in range(0, numel, size):
            count = min(size, numel - start)
            if encoding in ("none", "all"):
                yield torch.full((count,), encoding == "all")
            elif encoding == "indices":
                first, last = np.searchsorted(indices, (start, start + count))
                chunk = np.zeros(count, dtype=bool)
                chunk[indices[first:last].astype(np.int64) - start] = True
                yield torch.from_numpy(chunk)
            else:
                from_byte, to_byte = start // 8, -(-(start + count) // 8)
                bits = np.unpackbits(self._bytes(name, from_byte, to_byte), bitorder="little").view(bool)
                skip = start - 8 * from_byte
                chunk = bits[skip : skip + count].copy()
                found += int(np.count_nonzero(chunk))
                if start + count == numel and found != kept:
                    raise _damaged(name)
                yield torch.from_numpy(chunk)

    def _indices(self, name: str) -> Any:
        """Return the stored indices of one tensor; refuse a damaged file."""
        indices = self._data[name].numpy()
        inside = not indices.size or (indices[0] >= 0 and indices[-1] < self.shape(name).numel())
        if not (inside and (np.diff(indices) > 0).all()):
            raise _damaged(name)
        return indices

    def _bytes(self, name: str, start: int, stop: int) -> Any:
        if isinstance(self._data, LazyTensors):
            return self._data.source(name).read_flat(start, stop).numpy()
        return self._data[name][start:stop].numpy()

    def _packed(self, name: str) -> Packed:
        try:
            return self._layout[name]
        except KeyError:
            raise KeyError(f"no mask for {name!r}.{near(name, self._layout)}") from None

    def save(self, path: str | os.PathLike[str], progress: Progress | None = None) -> None:
        """Write the mask as safetensors, whole or not at all.

        Args:
            path: A `.safetensors` file.
            progress: Called with the bytes written so far and in all.

        Raises:
            SquisherError: The file cannot be written.
        """
        tensors = [  # a list, because the keys of an object would be sorted
            {"name": name, "shape": list(packed.shape), "encoding": packed.encoding, "kept": packed.kept}
            for name, packed in self._layout.items()
        ]
        metadata = {
            **self.provenance,
            "kind": "mask",
            "format_version": FORMAT_VERSION,
            "created_with": f"torch-squisher {__version__}",
            "tensors": tensors,
        }
        safetensors.save(path, self._data, metadata, progress=progress)


def _damaged(name: str) -> FileError:
    return FileError(f"The mask of {name!r} does not fit its own description; its file is damaged. Make it again.")


def pack(shape: tuple[int, ...], chunks: Iterable[Tensor]) -> tuple[Packed, Tensor]:
    """Pack one boolean tensor that comes in chunks, as bits or as flat indices, whichever is smaller.

    Raises:
        SquisherError: The chunks do not add up to the shape.
    """
    numel = torch.Size(shape).numel()
    packed: list[Any] = []
    carried: Any = np.zeros(0, dtype=bool)
    kept = seen = 0
    for chunk in chunks:
        flags = chunk.numpy()
        kept += int(np.count_nonzero(flags))
        seen += flags.size
        flags = np.concatenate([carried, flags]) if carried.size else flags
        whole = flags.size // 8 * 8
        packed.append(np.packbits(flags[:whole], bitorder="little"))
        carried = flags[whole:].copy()
    if seen != numel:
        raise SquisherError(f"A mask of {seen} entries came for a tensor of the shape {shape}.")
    if kept in (0, numel):
        return Packed(shape, "all" if kept else "none", kept), torch.zeros(0, dtype=torch.uint8)
    bits = np.concatenate([*packed, np.packbits(carried, bitorder="little")])
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
        FileError: Nothing is there, it is damaged, or it is not a mask.
    """
    path = Path(path)
    make = "squisher mask FILE --keep 0.005 --out MASK"
    data, metadata = safetensors.open_kind(path, "mask", FORMAT_VERSION, make)
    layout = dict(_checked(path, entry, data) for entry in metadata.pop("tensors", []))
    ordered = LazyTensors({name: data.source(name) for name in layout})  # empty tensors have no order in a file
    return Mask.from_packed(layout, ordered, metadata)


def _checked(path: Path, entry: Any, data: LazyTensors) -> tuple[str, Packed]:
    name = entry.get("name") if isinstance(entry, dict) else None
    try:
        packed = Packed(tuple(int(n) for n in entry["shape"]), str(entry["encoding"]), int(entry["kept"]))
        numel = torch.Size(packed.shape).numel()
        expected = {"none": 0, "all": 0, "bits": -(-numel // 8), "indices": packed.kept}[packed.encoding]
        types = (torch.int32, torch.int64) if packed.encoding == "indices" else (torch.uint8,)
        fits = data.shape(str(name)) == (expected,) and data.dtype(str(name)) in types and 0 <= packed.kept <= numel
    except (KeyError, TypeError, ValueError, RuntimeError):
        fits = False
    if not fits:
        raise FileError(f"{path}: the mask of {name!r} does not fit its own description; the file is damaged.")
    return str(name), packed
