"""One tensor whose elements lie in several places: slices or rectangular blocks, in shards of other ranks or in other files."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from .lazy import TensorSource
from .named import CHUNK

__all__ = ["Block", "Blocks", "Joined", "Slice"]


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
        """Elements `start` to `stop` in flat order; only the slices that hold them are read."""
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
    """A rectangular part of a tensor, itself stored as a tensor.

    Elements that are neighbours in the block and in the whole form runs; block and whole have the runs in the same order.

    Attributes:
        offsets: Where it begins, in each dimension.
        sizes: Its shape.
        source: Where its elements are, in its own flat order.
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
        """Where a run begins in the flat order of the whole."""
        place = self._first
        for d in reversed(range(self._split)):
            run, k = divmod(run, self.sizes[d])
            place += k * self._steps[d]
        return place

    def places(self, first: int, last: int) -> Tensor:
        """Where each element of the runs `first` to `last` is in the flat order of the whole."""
        run = torch.arange(first, last)
        place = torch.full_like(run, self._first)
        for d in reversed(range(self._split)):
            place += run % self.sizes[d] * self._steps[d]
            run = run // self.sizes[d]
        return (place[:, None] + torch.arange(self.run)).reshape(-1)

    def first_run(self, position: int) -> int:
        """Return the first run that ends after a flat position of the whole."""
        low, high = 0, self.count
        while low < high:
            middle = (low + high) // 2
            if self.place(middle) + self.run > position:
                high = middle
            else:
                low = middle + 1
        return low

    def overlaps(self, other: Block) -> bool:
        """Whether two blocks of one tensor have an element in common."""
        parts = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        return all(a < b + n and b < a + m for a, m, b, n in parts)


class Blocks:
    """A tensor that is cut into rectangular blocks, however they lie."""

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
        whole = torch.empty(numel, dtype=self.dtype)
        for start in range(0, numel, CHUNK):
            stop = min(start + CHUNK, numel)
            whole[start:stop] = self.read_flat(start, stop)
        return whole.reshape(self.shape)

    def read_flat(self, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` in flat order; of each block only what lies among them is read."""
        out = torch.empty(stop - start, dtype=self.dtype)
        for block in self._blocks:
            if stop > start:
                _copy(block, start, stop, out)
        return out


def _copy(block: Block, start: int, stop: int, out: Tensor) -> None:
    first, last = block.first_run(start), block.first_run(stop - 1)
    if last < block.count and block.place(last) < stop:
        last += 1
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
