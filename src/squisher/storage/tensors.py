"""Named tensors, in memory or in files, read chunk by chunk when asked for.

Callers treat a lazy mapping, a `state_dict()` and a test dict alike: `shape_of`, `dtype_of` and `chunks_of` work on all of them
and read nothing else. In a file a tensor may be one byte range (`FileTensor`), slices of several tensors (`Joined`) or rectangular
blocks (`Blocks`), as ranks save their shards.
"""

from __future__ import annotations

import math
import re
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from threading import Lock
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from ..errors import ArgumentError, SquisherError, near
from ..ranks import local_of, whole
from .byte_range import ByteRange

__all__ = [
    "CHUNK", "Block", "Blocks", "Computed", "FileTensor", "Joined", "LazyTensors", "Progress", "Slice", "TensorSource", "buffer_for",
    "check_finite", "chunks_of", "dtype_of", "filled", "is_finite", "name_pattern", "not_finite", "numel_of", "one_thread", "recut",
    "shape_of", "tied_names",
]  # fmt: skip

CHUNK = 1 << 18
"""Elements per chunk: 1 MB of float32, so that a chunk and what is computed from it stay in the cache."""

Progress = Callable[[int, int], None]
"""Called with how much is done and how much there is in all: bytes or entries."""


def shape_of(tensors: Mapping[str, Tensor], name: str) -> torch.Size:
    """Return the shape of one tensor of any mapping; reads no data from a lazy one."""
    shape = getattr(tensors, "shape", None)
    return torch.Size(shape(name)) if callable(shape) else _tensor(tensors, name).shape


def numel_of(tensors: Mapping[str, Tensor], name: str) -> int:
    """Return the number of elements of one tensor of any mapping; reads no data from a lazy one."""
    return math.prod(shape_of(tensors, name))


def dtype_of(tensors: Mapping[str, Tensor], name: str) -> torch.dtype:
    """Return the data type of one tensor of any mapping; reads no data from a lazy one."""
    dtype = getattr(tensors, "dtype", None)
    return cast(torch.dtype, dtype(name)) if callable(dtype) else _tensor(tensors, name).dtype


def chunks_of(tensors: Mapping[str, Tensor], name: str, size: int = CHUNK) -> Iterator[Tensor]:
    """Return one tensor of any mapping in flat chunks on the CPU, in order; memory is bounded by a chunk for a lazy one.

    A tensor that is sharded over processes is gathered first: all of them must ask for it at the same time.
    """
    chunks = getattr(tensors, "chunks", None)
    return cast(Iterator[Tensor], chunks(name, size)) if callable(chunks) else _chunks(tensors, name, size)


def _chunks(tensors: Mapping[str, Tensor], name: str, size: int) -> Iterator[Tensor]:
    tensor = _tensor(tensors, name)
    if tensor.is_meta or tensor.is_quantized or tensor.layout != torch.strided:
        what = "on the meta device" if tensor.is_meta else "quantised" if tensor.is_quantized else "sparse"
        raise SquisherError(
            f"{name!r} is {what}, so its values cannot be read one by one: give a dense tensor that has some."
        )
    flat = whole(tensor.detach()).resolve_conj().resolve_neg().reshape(-1)
    for start in range(0, flat.numel(), size):
        yield flat[start : start + size].cpu()


def _tensor(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    value = tensors[name]
    if not isinstance(value, Tensor):
        raise SquisherError(f"{name!r} is a {type(value).__name__}; a tensor was expected.")
    return value


def name_pattern(pattern: str | None) -> re.Pattern[str] | None:
    """Return a user's regular expression over parameter names.

    Raises:
        ArgumentError: It is not a regular expression.
    """
    try:
        return None if pattern is None else re.compile(pattern)
    except re.error as error:
        raise ArgumentError(f"{pattern!r} is not a regular expression: {error}.") from error


def is_finite(chunk: Tensor) -> bool:
    """Return whether a tensor holds neither NaN nor infinite values."""
    if not chunk.numel():
        return True
    if chunk.device.type != "cpu":
        return bool(torch.isfinite(chunk).all())
    if chunk.dtype != torch.bfloat16:
        return bool(np.isfinite(chunk.detach().numpy()).all())
    # numpy has no such type. As integers, the bits of NaN and infinity are above those of all numbers of their sign: signed
    # integers show the positive ones, unsigned integers the negative ones.
    bits = chunk.detach().view(torch.int16).numpy()
    return bool(bits.max() < 0x7F80 and bits.view(np.uint16).max() < 0xFF80)


def check_finite(chunk: Tensor, name: str, called: str = "the model") -> None:
    """Refuse weights that cannot be calculated with.

    Raises:
        SquisherError: They hold NaN or infinite values.
    """
    if not is_finite(chunk):
        raise not_finite(name, called)


def not_finite(name: str, called: str = "the model") -> SquisherError:
    """Return the error for weights that cannot be calculated with."""
    return SquisherError(
        f"{name!r} of {called} has NaN or infinite values: its training diverged, or its file is damaged. Take an earlier "
        "checkpoint of it, or leave the tensor out with exclude."
    )


def filled(chunks: Iterable[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return one tensor made of flat chunks; no more than it and a chunk are in memory.

    Raises:
        SquisherError: The chunks end early, so that the rest would be whatever the memory held before.
    """
    out, start = torch.empty(math.prod(shape), dtype=dtype), 0
    for chunk in chunks:
        out[start : start + chunk.numel()] = chunk
        start += chunk.numel()
    if start != out.numel():
        raise SquisherError(
            f"A tensor of the shape {tuple(shape)} has {out.numel()} entries, but its chunks end after {start}."
        )
    return out.view(tuple(shape))


def recut(chunks: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    """Yield the same entries in flat chunks of `size`; only the last may be shorter."""
    waiting: list[Tensor] = []
    missing = size
    for chunk in chunks:
        while chunk.numel() >= missing:
            waiting.append(chunk[:missing])
            chunk = chunk[missing:]
            yield waiting[0] if len(waiting) == 1 else torch.cat(waiting)
            waiting, missing = [], size
        if chunk.numel():
            waiting.append(chunk)
            missing -= chunk.numel()
    if waiting:
        yield torch.cat(waiting)


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch from sharing small chunks among threads, for work that streams over many of them.

    A chunk fits a cache, and its threads would wait for one another at every operation: on a busy machine that is ten times
    slower than one thread.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Computed(Mapping[str, Tensor]):
    """Named tensors that are computed from another mapping when they are asked for.

    Names, shapes and types are the other mapping's unless a subclass says otherwise; what it computes is in its `chunks`.

    Args:
        like: The other mapping.
        names: Each name with its name in `like`, in order; None for the names of `like`.
    """

    def __init__(self, like: Mapping[str, Tensor], names: Mapping[str, str] | None = None) -> None:
        self._like = like
        self._names = names

    def __getitem__(self, name: str) -> Tensor:
        return filled(self.chunks(name), self.shape(name), self.dtype(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._like if self._names is None else self._names)

    def __len__(self) -> int:
        return len(self._like if self._names is None else self._names)

    def __contains__(self, name: object) -> bool:
        return name in (
            self._like if self._names is None else self._names
        )  # the inherited method would read the tensor

    def shape(self, name: str) -> torch.Size:
        """Return the shape of one tensor, without computing it."""
        return shape_of(self._like, self._name_there(name))

    def dtype(self, name: str) -> torch.dtype:
        """Return the data type of one tensor, without computing it."""
        return dtype_of(self._like, self._name_there(name))

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[Tensor]:
        """Yield one tensor in flat chunks of at most `size` elements, in order."""
        return chunks_of(self._like, self._name_there(name), size)

    def _name_there(self, name: str) -> str:
        if self._names is None:
            return name
        try:
            return self._names[name]
        except KeyError:
            raise KeyError(f"no tensor named {name!r}.{near(name, self._names)}") from None


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
        """Return the whole tensor."""

    def read_flat(self, start: int, stop: int) -> Tensor:
        """Return elements `start` to `stop` in flat order."""


class FileTensor(NamedTuple):
    """A tensor that is one byte range."""

    byte_range: ByteRange
    dtype: torch.dtype
    shape: tuple[int, ...]

    def load(self) -> Tensor:
        """Return the whole tensor."""
        return self.read_flat(0, math.prod(self.shape)).view(self.shape)

    def read_flat(self, start: int, stop: int) -> Tensor:
        """Return elements `start` to `stop` in flat order."""
        out = buffer_for(stop - start, self.dtype)
        if stop > start:
            self.byte_range.read_into(out.view(torch.uint8).numpy().data, start * self.dtype.itemsize)
        return out


class LazyTensors(Mapping[str, Tensor]):
    """Named tensors that are read when asked for; opening it costs no more than reading the headers."""

    def __init__(self, sources: Mapping[str, TensorSource], metadata: Mapping[str, str] | None = None):
        self._sources = dict(sources)
        self.metadata = dict(metadata or {})

    def __getitem__(self, name: str) -> Tensor:
        return self.source(name).load()

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def __repr__(self) -> str:
        return f"LazyTensors({len(self)} tensors)"

    def shape(self, name: str) -> torch.Size:
        """Return the shape of one tensor, without reading it."""
        return torch.Size(self.source(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return the data type of one tensor, without reading it."""
        return self.source(name).dtype

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[Tensor]:
        """Yield the tensor in flat chunks of at most `size` elements, in order."""
        source = self.source(name)
        chunks = getattr(source, "chunks", None)  # where one chunk needs what the chunks before it found
        if callable(chunks):
            yield from chunks(size)
            return
        numel = math.prod(source.shape)
        for start in range(0, numel, size):
            yield source.read_flat(start, min(start + size, numel))

    def source(self, name: str) -> TensorSource:
        """Return the source of one tensor."""
        try:
            return self._sources[name]
        except KeyError:
            raise KeyError(f"no tensor named {name!r}.{near(name, self._sources)}") from None


def tied_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the names that share a tensor with an earlier name: `{alias: first name}`.

    In memory they have one address, in files the same bytes; and one type, shape and strides. A mapping that computes its
    tensors names them in its attribute `tied`.
    """
    if not isinstance(tensors, LazyTensors) and callable(getattr(tensors, "chunks", None)):
        return dict(getattr(tensors, "tied", {}))  # its tensors are new objects each time: their addresses may repeat
    first: dict[Any, str] = {}
    tied = {}
    alive = []  # kept alive, so that no other tensor gets its address
    for name in tensors:
        if not numel_of(tensors, name):
            continue
        if isinstance(tensors, LazyTensors):
            key = _place(tensors.source(name))
        else:
            alive.append(tensors[name])
            key = _address(alive[-1])
        if key is not None and first.setdefault(key, name) != name:
            tied[name] = first[key]
    return tied


def _place(source: Any) -> Any:
    if isinstance(source, FileTensor):
        return (source.byte_range, id(source.byte_range.buffer), source.dtype, source.shape)
    return getattr(source, "place", None)


def _address(tensor: Tensor) -> Any:
    tensor = local_of(tensor)
    if tensor.is_meta or tensor.layout != torch.strided or not tensor.numel():
        return None
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


_BUFFER_BYTES = 8 * CHUNK  # bytes
_MOST_BUFFERS = 32
_buffers: list[np.ndarray] = []
_buffers_lock = Lock()


def buffer_for(numel: int, dtype: torch.dtype) -> Tensor:
    """Return memory for a chunk, with arbitrary content: that of an earlier chunk, if nothing refers to it any more.

    The system would take memory of this size back at once, and a page fault for every 4 kB of a new chunk costs as much as the
    work on it. The first free buffer is taken, so that few are in use and those are in the cache.
    """
    size = numel * dtype.itemsize
    if not _BUFFER_BYTES // 16 <= size <= _BUFFER_BYTES:
        return torch.empty(numel, dtype=dtype)
    with _buffers_lock:
        place = next((k for k in range(len(_buffers)) if _references(_buffers, k) == _UNUSED), None)
        if place is None:
            if len(_buffers) == _MOST_BUFFERS:
                return torch.empty(numel, dtype=dtype)
            _buffers.append(np.empty(_BUFFER_BYTES, np.uint8))
            place = -1
        return torch.from_numpy(_buffers[place][:size]).view(dtype)


def _references(buffers: list[np.ndarray], place: int) -> int:
    return sys.getrefcount(buffers[place])


_UNUSED = _references(
    [np.empty(0, np.uint8)], 0
)  # as this interpreter counts it: only the list and the call refer to it


@dataclass(frozen=True)
class Slice:
    """Elements `start` to `stop`, in flat order, of a tensor in some file."""

    source: TensorSource
    start: int
    stop: int


class Joined:
    """A tensor that is several slices, one after the other."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, slices: Sequence[Slice]) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self._slices = [one for one in slices if one.stop > one.start]
        self._ends = list(accumulate(one.stop - one.start for one in self._slices))
        if (self._ends[-1] if self._ends else 0) != math.prod(self.shape):
            raise ValueError(f"{self._ends[-1:]} elements for the shape {self.shape}")

    def load(self) -> Tensor:
        """Return the whole tensor."""
        return self.read_flat(0, math.prod(self.shape)).reshape(self.shape)

    def read_flat(self, start: int, stop: int) -> Tensor:
        """Return elements `start` to `stop` in flat order; only the slices that hold them are read."""
        found = []
        k = bisect_right(self._ends, start)
        while start < stop:
            one, end = self._slices[k], self._ends[k]
            taken = min(stop, end)
            shift = one.stop - end  # from places in this tensor to places in the slice's source
            found.append(one.source.read_flat(start + shift, taken + shift))
            start, k = taken, k + 1
        if len(found) == 1:
            return found[0]
        return torch.cat(found) if found else torch.empty(0, dtype=self.dtype)


class Block:
    """A rectangular block of a tensor, itself stored as a tensor.

    It consists of runs: elements that are neighbours in the block and in the whole, which have the runs in the same order.

    Attributes:
        offsets: Where it begins, in each dimension.
        sizes: Its shape.
        source: The stored block.
    """

    def __init__(
        self, whole: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], source: TensorSource
    ) -> None:
        self.offsets, self.sizes, self.source = tuple(offsets), tuple(sizes), source
        self.numel = math.prod(self.sizes)
        split = max((d for d in range(len(whole)) if sizes[d] != whole[d]), default=0)
        self.run = math.prod(sizes[split:])
        self.count = math.prod(sizes[:split])
        self._split = split
        self._steps = [math.prod(whole[d + 1 :]) for d in range(len(whole))]
        self._first = sum(o * step for o, step in zip(offsets, self._steps, strict=True))

    def place(self, run: int) -> int:
        """Return where a run begins in the flat order of the whole."""
        place = self._first
        for d in reversed(range(self._split)):
            run, k = divmod(run, self.sizes[d])
            place += k * self._steps[d]
        return place

    def places(self, first: int, last: int) -> Tensor:
        """Return where each element of the runs `first` to `last` is in the flat order of the whole."""
        run = torch.arange(first, last)
        place = torch.full_like(run, self._first)
        for d in reversed(range(self._split)):
            place += run % self.sizes[d] * self._steps[d]
            run = run // self.sizes[d]
        return (place[:, None] + torch.arange(self.run)).reshape(-1)

    def first_run(self, position: int) -> int:
        """Return the first run that ends after a flat position of the whole."""
        return bisect_right(range(self.count), position, key=lambda run: self.place(run) + self.run)

    def overlaps(self, other: Block) -> bool:
        """Return whether two blocks of one tensor have an element in common."""
        parts = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        return all(a < b + n and b < a + m for a, m, b, n in parts)


class Blocks:
    """A tensor that is cut into rectangular blocks."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, blocks: Sequence[Block]) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self._blocks = [block for block in blocks if block.numel]

    @property
    def gap(self) -> str | None:
        """What is wrong with the blocks, if they do not cover every element once."""
        total = math.prod(self.shape)
        for block in self._blocks:
            if any(o < 0 or o + n > size for o, n, size in zip(block.offsets, block.sizes, self.shape, strict=True)):
                return "one of its parts lies outside of it"
        found = sum(block.numel for block in self._blocks)
        if found != total:
            return f"its parts hold {found} elements instead of {total}"
        ordered = sorted(self._blocks, key=lambda block: block.place(0))
        if all(block.count == 1 for block in ordered):
            pairs = pairwise(ordered)  # flat ranges: only neighbours can overlap
            clash = any(a.place(0) + a.numel > b.place(0) for a, b in pairs)
        else:
            clash = any(a.overlaps(b) for k, a in enumerate(ordered) for b in ordered[k + 1 :])
        return "two of its parts overlap" if clash else None

    def load(self) -> Tensor:
        """Return the whole tensor."""
        numel = math.prod(self.shape)
        chunks = (self.read_flat(start, min(start + CHUNK, numel)) for start in range(0, numel, CHUNK))
        return filled(chunks, self.shape, self.dtype)

    def read_flat(self, start: int, stop: int) -> Tensor:
        """Return elements `start` to `stop` in flat order; only these are read from each block."""
        out = torch.empty(stop - start, dtype=self.dtype)
        for block in self._blocks:
            if stop > start:
                _copy(block, start, stop, out)
        return out


def _copy(block: Block, start: int, stop: int, out: Tensor) -> None:
    first, last = block.first_run(start), bisect_left(range(block.count), stop, key=block.place)
    if first >= last:
        return
    if last - first == 1:
        place = block.place(first)
        begin, end = max(start, place), min(stop, place + block.run)
        shift = first * block.run - place  # from places in the whole to places in the block
        out[begin - start : end - start] = block.source.read_flat(begin + shift, end + shift)
        return
    places = block.places(first, last)
    inside = (places >= start) & (places < stop)
    values = block.source.read_flat(first * block.run, last * block.run)
    out[places[inside] - start] = values[inside]
