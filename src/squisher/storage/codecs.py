"""Compress named non-negative tensors: encoded in one pass as they are written, decoded chunk by chunk.

A codec replaces a tensor called `n` by a few plain ones:

    log8    n.log8.code   uint8, of the tensor's shape; entry k of the flat order belongs to block k // 4096
            n.log8.base   int32, one per block
            n.log8.step   int32, one per block
            n.log8.scale  float32, one per block
            value = scale · (the float32 whose bits are base + step · code), and 0 where the code is 0
    rank1   n.rank1.row      float32, the first axes of the tensor: means over the others
            n.rank1.column   float32, the other axes: means over the first, divided by the mean of all
            value = row × column (outer product)

The bits of a positive float32, read as an integer, are nearly its logarithm. So log8 has nearly the same relative error
everywhere, and needs only integers to decode. Both codecs preserve sums: log8 of every block, rank1 of every row and column.
A tensor that would not become smaller is kept under its own name. Decoded values are float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import FileError, NamingError, SquisherError
from .safetensors import sums_of
from .tensors import (
    CHUNK,
    Computed,
    LazyTensors,
    TensorSource,
    buffer_for,
    chunks_of,
    dtype_of,
    numel_of,
    recut,
    shape_of,
)

__all__ = ["BLOCK", "CODECS", "Encoded", "decoded"]

CODECS = ("exact", "log8", "rank1")
BLOCK = 4096
"""Entries of a tensor, in flat order, that share a scale and a step in log8."""

_PARTS = {"log8": ("code", "base", "step", "scale"), "rank1": ("row", "column")}
_CODES = 255  # beside the code 0, which is the value 0
_BLOCK_BYTES = 12
_SAMPLE = 1 << 21  # entries that the error is measured on

Array = np.ndarray[Any, Any]


class Encoded(Computed):
    """The tensors of a file with a codec, computed from a mapping as they are written, in order.

    Args:
        tensors: Non-negative and finite; read once, chunk by chunk.
        codec: `log8` or `rank1`.

    Attributes:
        sources: The names of the tensors before encoding.
        sums: The sum, and the sum of squares, of each tensor's decoded values; complete when everything has been written.
        totals: The sum of each tensor's values before encoding.

    Raises:
        NamingError: A name is one that the codec uses.
    """

    def __init__(self, tensors: Mapping[str, Tensor], codec: str) -> None:
        self._tensors = tensors
        self.sources = list(tensors)
        self._layout: dict[str, tuple[str, str, torch.dtype, tuple[int, ...]]] = {}
        for name in tensors:
            for part, (dtype, shape) in _parts(codec, dtype_of(tensors, name), tuple(shape_of(tensors, name))).items():
                stored = f"{name}.{codec}.{part}" if part else name
                if stored in self._layout or _owner(name, codec) is not None:
                    raise NamingError(
                        f"The codec {codec} uses the name {stored!r}: rename that tensor, or save exactly."
                    )
                self._layout[stored] = name, part, dtype, shape
        super().__init__(tensors, {stored: of[0] for stored, of in self._layout.items()})
        self._ready: dict[str, Tensor] = {}
        self.sums: dict[str, tuple[float, float]] = {}
        self.totals: dict[str, float] = {}
        self._sample = _Sample(tensors)

    def shape(self, name: str) -> torch.Size:
        """Return the shape of one stored tensor."""
        return torch.Size(self._layout[name][3])

    def dtype(self, name: str) -> torch.dtype:
        """Return the data type of one stored tensor."""
        return self._layout[name][2]

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[Tensor]:
        """Yield one stored tensor in flat chunks; the tensors of one parameter are asked for in order."""
        source, part, _, _ = self._layout[name]
        if part == "code":
            chunks = self._log8(source)
        elif part == "row":
            chunks = self._rank1(source)
        else:
            chunks = iter([self._ready.pop(name)]) if part else self._whole(source)
        for chunk in chunks:
            yield from chunk.split(size)

    def sample(self) -> tuple[Tensor, Tensor]:
        """Return a sample of the values, evenly spread (all of them, if they are few), and their decoded values."""
        return self._sample.pairs()

    def _whole(self, name: str) -> Iterator[Tensor]:
        sums = [(0.0, 0.0)]
        for start, chunk in _placed(chunks_of(self._tensors, name)):
            sums.append(sums_of(chunk))
            kept = self._sample.of(name, start, chunk)
            self._sample.add(kept, kept)
            yield chunk
        total, squares = map(math.fsum, zip(*sums, strict=True))
        self.sums[name], self.totals[name] = (total, squares), total

    def _log8(self, name: str) -> Iterator[Tensor]:
        before, sums = [0.0], [(0.0, 0.0)]
        blocks = [(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32))]  # base, step and scale
        for start, chunk in _placed(recut(chunks_of(self._tensors, name), CHUNK)):  # of whole blocks
            values = _float32(chunk, name)
            code, base, step, scale = _log8_codes(values.numpy())
            before.append(float(values.numpy().sum(dtype=np.float64)))
            back = torch.from_numpy(_log8_values(code, base, step, scale, 0, np.empty(code.size, np.float32)))
            sums.append(sums_of(back))
            if not math.isfinite(sums[-1][0]):
                raise _too_large(name)
            self._sample.add(self._sample.of(name, start, values), self._sample.of(name, start, back))
            blocks.append((base, step, scale))
            yield torch.from_numpy(code)
        for part, arrays in zip(("base", "step", "scale"), zip(*blocks, strict=True), strict=True):
            self._ready[f"{name}.log8.{part}"] = torch.from_numpy(np.concatenate(arrays))
        total, squares = map(math.fsum, zip(*sums, strict=True))
        self.sums[name], self.totals[name] = (total, squares), math.fsum(before)

    def _rank1(self, name: str) -> Iterator[Tensor]:
        shape = tuple(shape_of(self._tensors, name))
        split = _split(shape)
        rows, columns = np.zeros(math.prod(shape[:split])), np.zeros(math.prod(shape[split:]))
        originals, places = [], []
        for start, chunk in _placed(chunks_of(self._tensors, name)):
            values = _float32(chunk, name)
            _add_sums(values.numpy(), start, rows, columns)
            originals.append(self._sample.of(name, start, values).clone())
            places.append(self._sample.places(name, start, values.numel()))
        row, column = _rank1_factors(rows, columns)
        if float(row.max()) * float(column.max()) > torch.finfo(torch.float32).max:
            raise _too_large(name)
        where = np.concatenate([np.empty(0, np.int64), *places])
        back = row[where // columns.size] * column[where % columns.size]
        self._sample.add(torch.cat(originals), torch.from_numpy(back))
        self._ready[f"{name}.rank1.column"] = torch.from_numpy(column)
        long_row, long_column = row.astype(np.float64), column.astype(np.float64)
        self.sums[name] = (
            float(long_row.sum() * long_column.sum()),
            float(np.square(long_row).sum() * np.square(long_column).sum()),
        )
        self.totals[name] = float(rows.sum())
        yield torch.from_numpy(row)


def decoded(tensors: LazyTensors, codec: str) -> LazyTensors:
    """Return the lazy tensors that a codec's were made from, with decoded values.

    Raises:
        FileError: One is missing, or does not fit the others.
    """
    if codec == "exact":
        return tensors
    groups: dict[str, dict[str, TensorSource]] = {}
    for stored in tensors:
        name, part = _owner(stored, codec) or (stored, "")
        groups.setdefault(name, {})[part] = tensors.source(stored)
    sources: dict[str, TensorSource] = {}
    for name, parts in groups.items():
        if set(parts) == {""}:
            sources[name] = parts[""]
            continue
        if set(parts) != set(_PARTS[codec]):
            raise FileError(
                f"The {codec} tensors of {name!r} are {', '.join(sorted(parts))}, not {', '.join(_PARTS[codec])}: the file is damaged."
            )
        source = Log8Tensor(**parts) if codec == "log8" else Rank1Tensor(**parts)
        if not source.fits():
            raise FileError(f"The {codec} tensors of {name!r} do not fit one another: the file is damaged.")
        sources[name] = source
    return LazyTensors(sources, tensors.metadata)


class Log8Tensor(NamedTuple):
    """A tensor that is decoded from log8 codes when it is read."""

    code: TensorSource
    base: TensorSource
    step: TensorSource
    scale: TensorSource

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the decoded values."""
        return torch.float32

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return tuple(self.code.shape)

    def fits(self) -> bool:
        """Return whether types and shapes are as they must be."""
        blocks = (-(-math.prod(self.shape) // BLOCK),)
        types = [one.dtype for one in self]
        one_each = all(tuple(one.shape) == blocks for one in (self.base, self.step, self.scale))
        return one_each and types == [torch.uint8, torch.int32, torch.int32, torch.float32]

    def load(self) -> Tensor:
        """Return the whole tensor."""
        return self.read_flat(0, math.prod(self.shape)).view(self.shape)

    def read_flat(self, start: int, stop: int) -> Tensor:
        """Return elements `start` to `stop` in flat order."""
        first, last = start // BLOCK, -(-stop // BLOCK)
        return self._decoded(start, stop, first, *(one.read_flat(first, last) for one in self[1:]))

    def chunks(self, size: int) -> Iterator[Tensor]:
        """Yield flat chunks, in order; bases, steps and scales are read once."""
        of_blocks = [one.load() for one in self[1:]]
        for start, stop in _bounds(math.prod(self.shape), size):
            yield self._decoded(start, stop, 0, *of_blocks)

    def _decoded(self, start: int, stop: int, first: int, base: Tensor, step: Tensor, scale: Tensor) -> Tensor:
        """Return elements `start` to `stop`, given base, step and scale of the blocks from block `first` on."""
        out = buffer_for(stop - start, torch.float32)
        code = self.code.read_flat(start, stop).numpy()
        _log8_values(code, base.numpy(), step.numpy(), scale.numpy(), start - first * BLOCK, out.numpy())
        return out


class Rank1Tensor(NamedTuple):
    """A tensor that is the outer product of two when it is read."""

    row: TensorSource
    column: TensorSource

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the decoded values."""
        return torch.float32

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return (*self.row.shape, *self.column.shape)

    def fits(self) -> bool:
        """Return whether types are as they must be."""
        return self.row.dtype == self.column.dtype == torch.float32

    def load(self) -> Tensor:
        """Return the whole tensor."""
        return self.read_flat(0, math.prod(self.shape)).view(self.shape)

    def read_flat(self, start: int, stop: int) -> Tensor:
        """Return elements `start` to `stop` in flat order."""
        width = max(1, math.prod(self.column.shape))
        first, last = start // width, -(-stop // width)
        return _outer(self.row.read_flat(first, last), self.column.load().view(-1), start, stop, first)

    def chunks(self, size: int) -> Iterator[Tensor]:
        """Yield flat chunks, in order; rows and columns are read once."""
        row, column = self.row.load().view(-1), self.column.load().view(-1)
        for start, stop in _bounds(math.prod(self.shape), size):
            yield _outer(row, column, start, stop, 0)


def _outer(row: Tensor, column: Tensor, start: int, stop: int, first: int) -> Tensor:
    """Return elements `start` to `stop` of the product of the rows from row `first` on, and the columns."""
    out = buffer_for(stop - start, torch.float32)
    for begin, end, rows, columns in _segments(start, stop, column.numel()):
        place = out[begin - start : end - start].view(rows.stop - rows.start, -1)
        torch.mul(row[rows.start - first : rows.stop - first, None], column[columns], out=place)
    return out


def _bounds(numel: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of each flat chunk."""
    for start in range(0, numel, size):
        yield start, min(start + size, numel)


def _parts(codec: str, dtype: torch.dtype, shape: tuple[int, ...]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return the tensors that one becomes; the key "" is the tensor unchanged."""
    numel = math.prod(shape)
    blocks = (-(-numel // BLOCK),)
    if codec == "log8" and numel + _BLOCK_BYTES * blocks[0] < numel * dtype.itemsize:
        integers = {"base": (torch.int32, blocks), "step": (torch.int32, blocks)}
        return {"code": (torch.uint8, shape), **integers, "scale": (torch.float32, blocks)}
    split = _split(shape)
    if codec == "rank1" and 4 * (math.prod(shape[:split]) + math.prod(shape[split:])) < numel * dtype.itemsize:
        return {"row": (torch.float32, shape[:split]), "column": (torch.float32, shape[split:])}
    return {"": (dtype, shape)}


def _split(shape: tuple[int, ...]) -> int:
    """Return how many leading axes form the rows, such that rows and columns are fewest."""
    return min(range(1, max(2, len(shape))), key=lambda k: math.prod(shape[:k]) + math.prod(shape[k:]))


def _owner(stored: str, codec: str) -> tuple[str, str] | None:
    """Return the tensor that a stored name belongs to, and its component; None for a plain name."""
    name, _, part = stored.rpartition(f".{codec}.")
    return (name, part) if name and part in _PARTS[codec] else None


def _placed(chunks: Iterator[Tensor]) -> Iterator[tuple[int, Tensor]]:
    start = 0
    for chunk in chunks:
        yield start, chunk
        start += chunk.numel()


def _float32(chunk: Tensor, name: str) -> Tensor:
    values = chunk.to(torch.float32)
    if chunk.dtype == torch.float64 and not bool(values.isfinite().all()):
        raise _too_large(name)
    return values


def _too_large(name: str) -> SquisherError:
    return SquisherError(
        f"{name!r} has values that are too large for a codec, which decodes to float32: save it exactly."
    )


def _log8_codes(values: Array) -> tuple[Array, Array, Array, Array]:
    """Return the code of each value, and base, step and scale of each block."""
    code = np.empty(values.size, np.uint8)
    base, step = (np.zeros(-(-values.size // BLOCK), np.int32) for _ in range(2))
    scale = np.zeros(base.size, np.float32)
    for blocks, places in _block_runs(values.size, 0):
        bits = np.maximum(values[places].view(np.int32), 0).reshape(blocks.stop - blocks.start, -1)  # -0.0 is 0
        high = bits.max(1).astype(np.int64)
        low = (bits - 1).view(np.uint32).min(1).astype(np.int64) + 1  # a zero becomes the largest of all
        low = np.minimum(low, high)
        one = np.maximum(-(-(high - low) // (_CODES - 1)), 1)
        found = np.rint((bits - low[:, None]) * (1 / one)[:, None]) + 1
        code[places] = np.where(bits == 0, 0, found).astype(np.uint8).ravel()
        base[blocks], step[blocks] = low - one, one  # the first code is 1
        ones = np.ones(blocks.stop - blocks.start, np.float32)
        back = _log8_values(code[places], base[blocks], step[blocks], ones, 0, np.empty(bits.size, np.float32))
        total, coded = (x.reshape(bits.shape).sum(1, dtype=np.float64) for x in (values[places], back))
        with np.errstate(over="ignore"):  # the caller refuses what cannot be decoded
            scale[blocks] = total / np.where(coded > 0, coded, 1)
    return code, base, step, scale


def _log8_values(code: Array, base: Array, step: Array, scale: Array, first: int, out: Array) -> Array:
    """Write the values of codes that begin at place `first` of the first block into `out`, and return it."""
    integers = torch.from_numpy(out.view(np.int32))  # torch converts and multiplies bytes twice as fast as numpy
    for blocks, places in _block_runs(code.size, first):
        codes = code[places].reshape(blocks.stop - blocks.start, -1)
        bits = integers[places].view(codes.shape).copy_(torch.from_numpy(codes))
        bits.mul_(torch.from_numpy(step[blocks, None])).add_(torch.from_numpy(base[blocks, None]))
        bits.view(torch.float32).mul_(torch.from_numpy(scale[blocks, None]))
        if not codes.min():
            np.copyto(out[places].reshape(codes.shape), 0, where=codes == 0)
    return out


def _block_runs(size: int, first: int) -> Iterator[tuple[slice, slice]]:
    """Yield (blocks, places): runs of whole blocks or one partial block, for flat values that begin at place `first` of a block."""
    start = 0
    while start < size:
        block, place = divmod(first + start, BLOCK)
        whole = (size - start) // BLOCK if place == 0 else 0
        stop = start + whole * BLOCK if whole else min(size, start + BLOCK - place)
        yield slice(block, block + max(1, whole)), slice(start, stop)
        start = stop


def _segments(start: int, stop: int, width: int) -> Iterator[tuple[int, int, slice, slice]]:
    """Yield (start, stop, rows, columns): flat elements of a matrix as the end of a row, whole rows, and the start of a row."""
    while start < stop:
        row, column = divmod(start, width)
        if column or stop - start < width:
            end = min(stop, start - column + width)
            yield start, end, slice(row, row + 1), slice(column, column + end - start)
        else:
            rows = (stop - start) // width
            end = start + rows * width
            yield start, end, slice(row, row + rows), slice(0, width)
        start = end


def _add_sums(values: Array, start: int, rows: Array, columns: Array) -> None:
    """Add a chunk that begins at flat place `start` to the sums of its rows and columns."""
    long = values.astype(np.float64)
    for begin, end, of_rows, of_columns in _segments(start, start + long.size, columns.size):
        part = long[begin - start : end - start].reshape(of_rows.stop - of_rows.start, -1)
        rows[of_rows] += part.sum(1)
        columns[of_columns] += part.sum(0)


def _rank1_factors(rows: Array, columns: Array) -> tuple[Array, Array]:
    """Return the means of the rows, and those of the columns divided by the mean of all, from their sums."""
    total = float(rows.sum())
    row = rows / columns.size
    column = columns * (columns.size / total) if total else np.ones(columns.size)
    return row.astype(np.float32), column.astype(np.float32)


class _Sample:
    """Every k-th entry of all tensors, one after the other; k is a prime, so that no column of a matrix is left out."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        total, self._offsets = 0, {}
        for name in tensors:
            self._offsets[name] = total
            total += numel_of(tensors, name)
        self._every = _prime(-(-total // _SAMPLE))
        self._before: list[Tensor] = []
        self._after: list[Tensor] = []

    def places(self, name: str, start: int, numel: int) -> Array:
        """Return the flat indices, in one tensor, of the entries sampled from a chunk."""
        first = start + (-(self._offsets[name] + start)) % self._every
        return np.arange(first, start + numel, self._every)

    def of(self, name: str, start: int, chunk: Tensor) -> Tensor:
        """Return the entries of a chunk that are sampled."""
        return chunk[(-(self._offsets[name] + start)) % self._every :: self._every].to(torch.float32)

    def add(self, before: Tensor, after: Tensor) -> None:
        """Keep values and their decoded values."""
        self._before.append(before.clone())
        self._after.append(after.clone())

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Return all sampled pairs."""
        return torch.cat([torch.empty(0), *self._before]), torch.cat([torch.empty(0), *self._after])


def _prime(least: int) -> int:
    while least > 1 and any(least % k == 0 for k in range(2, math.isqrt(least) + 1)):
        least += 1
    return max(1, least)
