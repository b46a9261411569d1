"""Numbers of a checkpoint that only fit one way: sums of weight times first moment, movement and the steps that caused it.

Everything is read in chunks, and of each tensor at most some channels of an axis are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...storage.tensors import CHUNK
from ..states import Candidate, Entry, is_tensor
from .laws import Heads, Reading

__all__ = ["Array", "Values", "numbers"]

_ELEMENTS = 1 << 14  # of one tensor, for movement
_WIDTH = 128  # of a row of it
_OPENING = 1 << 15  # elements that are read in the time it takes to open a file
_MOST = 2_000_000_000  # elements of the model beyond which a look would take minutes

Array = np.ndarray[Any, np.dtype[Any]]
Shape = tuple[int, ...]


class Values:
    """The sampled numbers of the candidates' weights and of the entries' states.

    Args:
        candidates: The model's parameters.
        entries: What the optimizer keeps.
    """

    def __init__(self, candidates: Sequence[Candidate], entries: Sequence[Entry]):
        self.candidates = candidates
        self.entries = entries
        self._profiles: dict[int, Array] = {}
        self._weights: dict[int, Array] = {}
        self._read: dict[tuple[Shape, Reading, int], Array] = {}
        total = sum(math.prod(c.shape) for c in candidates)
        self.channels = 128 if total <= 200_000_000 else 64 if total <= 1_000_000_000 else 32
        wanted = {entry.shape for entry in entries}
        self.shapes: list[Shape] = [s for s in dict.fromkeys(c.shape for c in candidates) if s in wanted]
        if total > _MOST:
            self.shapes = []
        matrices = 0
        self.place: list[int] = []  # how many matrices come before each candidate
        for c in candidates:
            self.place.append(matrices)
            matrices += len(c.shape) >= 2

    def has_moment(self, entry: int) -> bool:
        """Return whether an entry keeps a first moment of the parameter's shape."""
        state, shape = self.entries[entry].state, self.entries[entry].shape
        return is_tensor(state.get("exp_avg")) and tuple(state["exp_avg"].shape) == shape

    def has_square(self, entry: int) -> bool:
        """Return whether an entry keeps an average of the squared gradient of the parameter's shape."""
        state, shape = self.entries[entry].state, self.entries[entry].shape
        return is_tensor(state.get("exp_avg_sq")) and tuple(state["exp_avg_sq"].shape) == shape

    def alone(self, candidate: int) -> int | None:
        """Return the one entry of a candidate's shape, if no other candidate has it."""
        shape = self.candidates[candidate].shape
        entries = [k for k, e in enumerate(self.entries) if e.shape == shape]
        return entries[0] if len(entries) == 1 and sum(c.shape == shape for c in self.candidates) == 1 else None

    def profile(self, entry: int) -> Array:
        """Return the logarithm of the mean of v over all axes but the first, for the sampled channels of that axis."""
        if entry not in self._profiles:
            v = self._channels(self.entries[entry].state["exp_avg_sq"], 0).astype(np.float64).mean(1)
            self._profiles[entry] = np.log(np.maximum(v, 1e-30))
        return self._profiles[entry]

    def sums(
        self, candidates: Sequence[tuple[int]], entries: Sequence[tuple[int]], axis: int, sets: Array | None = None
    ) -> Array:
        """Return Σ weight · first moment over all axes but one: channel, candidate, entry.

        Args:
            candidates: Numbers of candidates of one shape.
            entries: Numbers of entries of that shape.
            axis: The axis whose channels are kept apart.
            sets: Channels to sum into one, one set a row; by default each of the sampled channels alone.
        """
        chosen = None if sets is None else sets.reshape(-1)
        weights = np.stack([self._channels(self.candidates[k].weight, axis, chosen) for (k,) in candidates], 1)
        moments = np.stack([self._channels(self.entries[k].state["exp_avg"], axis, chosen) for (k,) in entries], 2)
        sums = np.asarray(np.matmul(weights, moments), dtype=np.float64)
        return sums if sets is None else sums.reshape(*sets.shape, *sums.shape[1:]).sum(1)

    def read(self, shape: Shape, reading: Reading, heads: Heads, most: int) -> Array:
        """Return the channel sums of one reading, of all candidates with all entries of a shape: channel, candidate, entry."""
        key = (shape, reading, most)
        if key not in self._read:
            sets = reading.channels(shape[reading.axis], heads)
            if sets is None:
                raise ValueError(f"{reading} does not fit {shape}.")
            candidates = [(k,) for k, c in enumerate(self.candidates) if c.shape == shape and c.weight is not None]
            entries = [(k,) for k, e in enumerate(self.entries) if e.shape == shape and self.has_moment(k)]
            self._read[key] = self.sums(candidates, entries, reading.axis, sets[_chosen(len(sets), most)])
        return self._read[key]

    def row(self, candidate: int) -> int:
        """Return a candidate's place among those of its shape."""
        shape = self.candidates[candidate].shape
        return sum(c.shape == shape and c.weight is not None for c in self.candidates[:candidate])

    def steps(self, entry: int) -> Array:
        """Return the direction of the last steps, −m / √v, of sampled elements."""
        state = self.entries[entry].state
        m, v = _sample(state["exp_avg"]), _sample(state["exp_avg_sq"])
        root = np.sqrt(np.maximum(v, 0))
        return np.asarray(-m / (root + 1e-2 * root.mean() + 1e-30))

    def weight(self, candidate: int) -> Array:
        """Return sampled elements of a weight."""
        if candidate not in self._weights:
            self._weights[candidate] = _sample(self.candidates[candidate].weight)
        return self._weights[candidate]

    def moved(self, candidate: int, copies: Sequence[int]) -> Iterator[Array]:
        """Yield weight minus earlier weight, and weight minus each copy, of sampled elements."""
        before = self.candidates[candidate].before
        if before is not None:
            yield self.weight(candidate) - _sample(before)
        for copy in copies:
            yield self.weight(candidate) - self.weight(copy)

    def _channels(self, source: Any, axis: int, chosen: Array | None = None) -> Array:
        """Return the sampled channels of one axis, one a row: of the first axis they are read alone where they are few."""
        shape = tuple(source.shape)
        chosen = _chosen(shape[axis], self.channels) if chosen is None else chosen
        row = math.prod(shape[1:])
        few = len(chosen) * (row + _OPENING) < shape[0] * row
        if axis == 0 and few and not isinstance(source, Tensor) and getattr(source, "is_contiguous", True):
            return np.stack([numbers(source.read_flat(k * row, (k + 1) * row)) for k in chosen.tolist()])
        if axis == 0:
            rows, first = np.empty((len(chosen), row), np.float32), 0
            for block in _blocks(source):
                here = (first <= chosen) & (chosen < first + len(block))
                rows[here] = numbers(block.reshape(-1, row)[torch.from_numpy(chosen[here] - first)])
                first += len(block)
            return rows
        blocks = []
        for block in _blocks(source):
            picked = block.movedim(axis, 0)[torch.from_numpy(chosen)]
            blocks.append(numbers(picked).reshape(len(picked), -1))
        return np.concatenate(blocks, 1)


def _blocks(source: Any) -> Iterator[Tensor]:
    """Yield a tensor in blocks of its first axis."""
    if isinstance(source, Tensor) or not getattr(source, "is_contiguous", True):
        yield source.detach() if isinstance(source, Tensor) else source.load()
        return
    shape = tuple(source.shape)
    row = math.prod(shape[1:])
    step = max(1, CHUNK // max(row, 1))
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        yield source.read_flat(start * row, stop * row).reshape(stop - start, *shape[1:])


def _chosen(length: int, most: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    if length <= most:
        return np.arange(length)
    return np.linspace(0, length - 1, most).round().astype(np.int64)


def _sample(source: Any) -> Array:
    """Return a tensor's elements as a matrix, or some of its rows, of each the same columns; of a vector, all of it."""
    shape = tuple(source.shape)
    rows, columns = (1, math.prod(shape)) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))
    if rows * columns <= _ELEMENTS or rows == 1:
        whole = source if isinstance(source, Tensor) else source.load()
        return numbers(whole.detach().reshape(rows, columns) if rows > 1 else whole.detach().reshape(-1))
    width = min(columns, max(_WIDTH, _ELEMENTS // rows))
    first = (columns - width) // 2
    chosen = _chosen(rows, _ELEMENTS // width).tolist()
    if isinstance(source, Tensor) or not getattr(source, "is_contiguous", True):
        flat = (source if isinstance(source, Tensor) else source.load()).detach().reshape(rows, columns)
        return numbers(flat[chosen, first : first + width])
    starts = [k * columns + first for k in chosen]
    return np.stack([numbers(source.read_flat(start, start + width)) for start in starts])


def numbers(tensor: Tensor) -> Array:
    """Return a tensor's elements as a numpy array of single precision."""
    return np.asarray(tensor.to(torch.float32).cpu().numpy())
