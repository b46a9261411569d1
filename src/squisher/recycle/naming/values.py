"""The numbers of a checkpoint that tell its parameters apart: sums of weight times first moment, v by channel, movement and steps.

Everything is read in chunks, and of each tensor at most some channels of an axis are kept.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...storage.tensors import CHUNK
from ..optimizers import identify, is_tensor, step_of, stored
from ..states import Candidate, Entry
from .laws import NO_HEADS, Heads, Reading

__all__ = [
    "CROSSED",
    "FEWEST",
    "Array",
    "Shape",
    "Values",
    "carried",
    "centred",
    "certainty",
    "concordance",
    "concordance_of",
    "independent",
    "ranks",
]

_ELEMENTS = 1 << 14  # of one tensor, for movement
_WIDTH = 128  # of a row of it
_OPENING = 1 << 15  # elements that are read in the time it takes to open a file
CROSSED = 6.0  # elements that should have crossed an edge, for it to matter that none did
_EVEN = 1.6  # distance from a uniform distribution that one of a hundred samples of it reaches (Kolmogorov and Smirnov)
FEWEST = 8  # channels; fewer cannot tell anything
_SOON = 20_000_000  # elements of a model whose v is read beside its first moments
_MOST = 2_000_000_000  # elements of the model beyond which a look would take minutes
_CROWD = 400  # tensors of one shape beyond which not all are compared with all: the experts of many layers
_RECENT = 512  # tensors whose sampled channels are kept

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
        self._kept: dict[tuple[int, int], bool] = {}
        self._outputs: dict[int, int] = {}
        self._weights: dict[int, Array] = {}
        self._steps: dict[int, Array] = {}
        self._read: dict[tuple[Shape, Reading, int], Array] = {}
        self._squares: dict[tuple[int, int], Array] = {}
        self._means: dict[tuple[int, int], Array] = {}
        self._predicted: dict[tuple[int, int, int], Array] = {}
        self._halves: dict[tuple[int, int], Array] = {}
        self._recent: dict[tuple[str, int, Reading], Array] = {}
        total = sum(math.prod(c.shape) for c in candidates)
        self.channels = 128 if total <= 200_000_000 else 64 if total <= 1_000_000_000 else 32
        wanted = {entry.shape for entry in entries}
        self.shapes: list[Shape] = [s for s in dict.fromkeys(c.shape for c in candidates) if s in wanted]
        if total > _MOST:
            self.shapes = []
        self._weighty: dict[
            Shape, dict[int, int]
        ] = {}  # candidates with weights, and their places among those of their shape
        self._moving: dict[Shape, dict[int, int]] = {}  # entries with a first moment, likewise
        for shape in self.shapes:
            weighty = [k for k, c in enumerate(candidates) if c.shape == shape and c.weight is not None]
            moving = [k for k, e in enumerate(entries) if e.shape == shape and self.has_moment(k)]
            self._weighty[shape] = {k: place for place, k in enumerate(weighty)}
            self._moving[shape] = {k: place for place, k in enumerate(moving)}
        self.comparable = [s for s in self.shapes if max(len(self._weighty[s]), len(self._moving[s])) <= _CROWD]
        # Laws of the first moment say more; v and the way of matrices are looked at too where that is soon done.
        self.small = total <= _SOON
        self.wants_squares = self.small or not any(map(self.has_moment, range(len(entries))))
        matrices = 0
        self.place: list[int] = []  # how many matrices come before each candidate
        for c in candidates:
            self.place.append(matrices)
            matrices += len(c.shape) >= 2
        self.out = _output_axes(candidates)  # the axis of each candidate's outputs

    def length(self, candidate: int, side: int) -> int:
        """Return how many outputs (0) or inputs (1) a matrix has."""
        return self.candidates[candidate].shape[abs(side - self.out[candidate])]

    def has_moment(self, entry: int) -> bool:
        """Return whether an entry keeps a first moment of the parameter's shape."""
        return self._keeps(entry, 0)

    def has_square(self, entry: int) -> bool:
        """Return whether an entry keeps an average of the squared gradient of the parameter's shape."""
        return self._keeps(entry, 1)

    def _keeps(self, entry: int, moment: int) -> bool:
        if (entry, moment) not in self._kept:
            kept = _moments(self.entries[entry])[moment]
            self._kept[entry, moment] = is_tensor(kept) and tuple(kept.shape) == self.entries[entry].shape
        return self._kept[entry, moment]

    def alone(self, candidate: int) -> int | None:
        """Return the one entry of a candidate's shape, if no other candidate has it."""
        shape = self.candidates[candidate].shape
        entries = [k for k, e in enumerate(self.entries) if e.shape == shape]
        return entries[0] if len(entries) == 1 and sum(c.shape == shape for c in self.candidates) == 1 else None

    def read(self, shape: Shape, reading: Reading, heads: Heads, most: int | None = None) -> Array:
        """Return Σ weight · first moment over all axes but one, of all candidates with all entries of a shape.

        Args:
            shape: Of the candidates and the entries.
            reading: The axis whose channels are kept apart, and which of them are summed into one.
            heads: How attention divides that axis.
            most: Sums to take at most.

        Returns:
            Channel, candidate, entry.
        """
        most = most or self.channels
        key = (shape, reading, most)
        if key not in self._read:
            sets = _chosen_sets(shape, reading, heads, most)
            chosen, axis, entries = sets.reshape(-1), reading.axis, list(self._moving[shape])
            weights = np.stack(
                [self._channels(self.candidates[k].weight, axis, chosen) for k in self._weighty[shape]], 1
            )
            moments = np.stack([self._channels(_moments(self.entries[k])[0], axis, chosen) for k in entries], 2)
            sums = np.asarray(np.matmul(weights, moments), dtype=np.float64)
            decay = np.array([self._decay(k) for k in entries])
            if decay.any():
                sums -= np.square(weights, dtype=np.float64).sum(-1)[:, :, None] * decay
            self._read[key] = sums.reshape(*sets.shape, *sums.shape[1:]).sum(1)
        return self._read[key]

    def _decay(self, entry: int) -> float:
        """Return the part of the weight that a first moment contains, where the decay is part of the gradient."""
        group, state = self.entries[entry].group, self.entries[entry].state
        decay, betas = group.get("weight_decay"), group.get("betas")
        if not decay or group.get("decoupled_weight_decay", True) or not isinstance(betas, (tuple, list)):
            return 0.0
        steps = step_of(state, group)
        return float(decay) * (1 - float(betas[0]) ** (steps or 1000))

    def together(self, candidate: int, entry: int, reading: Reading) -> Array:
        """Return the channel sums of one weight with one first moment."""
        shape = self.candidates[candidate].shape
        if shape in self.comparable:
            table = self.read(shape, reading, NO_HEADS)
            return np.asarray(table[:, self.row(candidate), self._moving[shape][entry]])
        weight, moment = self._sampled("weight", candidate, reading), self._sampled("moment", entry, reading)
        sums = (weight * moment).sum(-1, dtype=np.float64)
        return np.asarray(sums - np.square(weight, dtype=np.float64).sum(-1) * self._decay(entry))

    def _sampled(self, what: str, number: int, reading: Reading) -> Array:
        """Return the sampled channels of a candidate's weight or an entry's first moment, kept for a while."""
        if (what, number, reading) not in self._recent:
            if len(self._recent) >= _RECENT:
                self._recent.clear()
            source: Any = self.candidates[number].weight if what == "weight" else _moments(self.entries[number])[0]
            chosen = _chosen_sets(tuple(source.shape), reading, NO_HEADS, self.channels).reshape(-1)
            self._recent[what, number, reading] = self._channels(source, reading.axis, chosen)
        return self._recent[what, number, reading]

    def row(self, candidate: int) -> int:
        """Return a candidate's place among those of its shape."""
        return self._weighty[self.candidates[candidate].shape][candidate]

    def column(self, entry: int) -> int:
        """Return an entry's place among those of its shape that keep a first moment."""
        return self._moving[self.entries[entry].shape or ()][entry]

    def still(self, candidate: int, entry: int) -> Array:
        """Return the square of each row's sum of weight times first moment, relative to what an accident would give."""
        sums = self.together(candidate, entry, Reading(0)) ** 2
        weight, moment = self._sampled("weight", candidate, Reading(0)), self._sampled("moment", entry, Reading(0))
        scale = float(np.max(np.abs(moment), initial=1e-30))  # squares of small moments would vanish
        by_chance = (weight**2 * (moment / scale) ** 2).sum(-1) * np.float64(scale) ** 2
        return np.asarray((sums / np.maximum(by_chance, 1e-300))[by_chance > 0])

    def square(self, entry: int, axis: int) -> Array:
        """Return the logarithm of the mean of v over all axes but one, for the sampled channels."""
        if (entry, axis) not in self._squares:
            v = self._channels(_square(self.entries[entry]), axis)
            self._squares[entry, axis], self._means[entry, axis] = _logarithm(v.mean(1, dtype=np.float64)), v.mean(0)
        return self._squares[entry, axis]

    def outputs(self, entry: int) -> int:
        """Return the axis of a matrix's outputs: 0, or 1 for a square one of `x @ w`.

        v over the outputs of a layer is nearly that of its bias, so of the two axes it is the one that some bias resembles more.
        """
        shape = self.entries[entry].shape or ()
        if len(shape) != 2 or shape[0] != shape[1]:
            return 0
        if entry not in self._outputs:
            rows = ranks(self.square(entry, 0))
            columns = ranks(self._means[entry, 0][_chosen(shape[1], self.channels)])
            vectors = [k for k, e in enumerate(self.entries) if e.shape == shape[:1] and e.state]
            biases = np.array([ranks(self.square(k, 0)) for k in vectors]).reshape(-1, len(rows))
            best = [float(np.max(biases @ axis, initial=0.0)) for axis in (rows, columns)]
            self._outputs[entry] = int(best[1] > best[0])
        return self._outputs[entry]

    def half(self, entry: int, which: int) -> Array:
        """Return the same for the first or the second half of the second axis, sampled like an axis of that length."""
        if (entry, which) not in self._halves:
            length = (self.entries[entry].shape or ())[1] // 2
            chosen = _chosen(length, self.channels) + which * length
            v = self._channels(_square(self.entries[entry]), 1, chosen)
            self._halves[entry, which] = _logarithm(v.mean(1, dtype=np.float64))
        return self._halves[entry, which]

    def predicted(self, candidate: int, entry: int, axis: int) -> Array:
        """Return the logarithm of the sums of weight² · v over all axes but one, v as it is on average along that axis."""
        if (candidate, entry, axis) not in self._predicted:
            self.square(entry, axis)
            sums = np.square(self._sampled("weight", candidate, Reading(axis))) @ self._means[entry, axis]
            self._predicted[candidate, entry, axis] = _logarithm(sums)
        return self._predicted[candidate, entry, axis]

    def steps(self, entry: int) -> Array:
        """Return the direction of the last steps, −m / √v, of sampled elements."""
        if entry not in self._steps:
            m, v = map(_sample, _moments(self.entries[entry]))
            root = np.sqrt(np.maximum(v, 0))
            self._steps[entry] = np.asarray(-m / (root + 1e-2 * root.mean() + 1e-30))
        return self._steps[entry]

    def alike(self, a: int, b: int) -> float:
        """Return the correlation of two entries' steps, element by element, if they have one shape."""
        if self.entries[a].shape != self.entries[b].shape or not all(map(self.has_square, (a, b))):
            return 0.0
        x, y = (self.steps(k).astype(np.float64) for k in (a, b))
        return float((x * y).sum() / max(math.sqrt(float((x**2).sum() * (y**2).sum())), 1e-300))

    def liveliness(self, entry: int) -> float:
        """Return the mean square of the first moment relative to v: small where there was no gradient of late; 1 without first moments."""
        if not (self.has_moment(entry) and self.has_square(entry)):
            return 1.0
        m, v = (_sample(moment).astype(np.float64) for moment in _moments(self.entries[entry]))
        return float(np.square(m).sum() / max(v.sum(), 1e-300))

    def begun(self, candidate: int, entry: int) -> float:
        """Return how many elements of a weight that is as torch's initialisers leave it should have moved out of their range; 0 if it is not so.

        Zeros and ones should not be that. Over the edges of a uniform distribution a walk takes few elements, but some.
        """
        group, source = self.entries[entry].group, self.candidates[candidate].weight
        rate, eps, way = group.get("lr"), group.get("eps"), self._way(entry)
        if source is None or not isinstance(rate, float) or not isinstance(eps, float):
            return 0.0
        weight, v = self.weight(candidate).reshape(-1), _sample(_square(self.entries[entry])).reshape(-1)
        size = np.sort(np.abs(weight[v > (1e3 * eps) ** 2])).astype(np.float64)
        count, fine = len(size), torch.finfo(source.dtype).eps
        if count < max(FEWEST, len(weight) / 2) or rate <= fine * size[-1]:
            return 0.0
        if len(np.unique(weight)) == 1:
            return float(count) if weight[0] in (0.0, 1.0) else 0.0
        for edge in _edges(tuple(source.shape)):
            apart = float(np.abs(size / edge - (np.arange(count) + 0.5) / count).max())
            if edge * (1 - CROSSED / count) <= size[-1] <= edge * (1 + fine) and apart * math.sqrt(count) < _EVEN:
                return 0.4 * count * rate * way / edge
        return 0.0

    def _way(self, entry: int) -> float:
        """Return how far an element has walked, in steps of the learning rate: each is g / √v, in Adam, RMSprop and Adagrad."""
        state, group = self.entries[entry].state, self.entries[entry].group
        count = np.arange(1, min(step_of(state, group) or 0, 10_000) + 1)
        alpha = group.get("alpha")
        if self.has_moment(entry):
            return math.sqrt(len(count))
        if "square_avg" in state and isinstance(alpha, float):
            return math.sqrt(float((1 / (1 - alpha**count)).sum()))
        return math.sqrt(float((1 / count).sum())) if "sum" in state else 0.0

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
        """Return the sampled channels of one axis, one a row, in single precision; the tensor is read in chunks of whole rows."""
        shape = tuple(source.shape)
        chosen = _chosen(shape[axis], self.channels) if chosen is None else chosen
        row = math.prod(shape[1:])
        in_file = not isinstance(source, Tensor) and getattr(source, "is_contiguous", True)
        if in_file and axis == 0 and len(chosen) * (row + _OPENING) < shape[0] * row:
            return np.stack([numbers(source.read_flat(k * row, (k + 1) * row)) for k in chosen.tolist()])
        whole = None if in_file else source.detach() if isinstance(source, Tensor) else source.load()
        out = np.empty((len(chosen), math.prod(shape) // max(shape[axis], 1)), np.float32)
        width = out.shape[1] // max(shape[0], 1)  # of what one row gives each channel of another axis
        step = max(1, CHUNK // max(row, 1)) if in_file else max(1, shape[0])
        for start in range(0, shape[0], step):
            stop = min(start + step, shape[0])
            rows = (
                source.read_flat(start * row, stop * row).reshape(stop - start, *shape[1:]) if whole is None else whole
            )
            if axis == 0:
                here = (start <= chosen) & (chosen < stop)
                out[here] = numbers(rows.reshape(-1, row)[torch.from_numpy(chosen[here] - start)])
            else:
                picked = numbers(rows.movedim(axis, 0)[torch.from_numpy(chosen)])
                out[:, start * width : stop * width] = picked.reshape(len(picked), -1)
        return out


def _output_axes(candidates: Sequence[Candidate]) -> list[int]:
    """Return the axis of every matrix's outputs: 0, or 1 for layers of `x @ w` (GPT-2's) and transposed convolutions.

    The length of its bias tells; where both axes have it, a layer is like those nearest to it in the tree of modules.
    """
    shapes = {c.name: c.shape for c in candidates}
    out, inside, square = [0] * len(candidates), defaultdict[str, set[int]](set), []
    for k, c in enumerate(candidates):
        bias = shapes.get(f"{c.name[:-6]}bias", ()) if c.name.endswith("weight") and len(c.shape) > 1 else ()
        if len(bias) == 1 and c.shape[0] == c.shape[1]:
            square.append(k)
        elif len(bias) == 1:
            out[k] = int(bias == c.shape[1:2])
            for above in _above(c.name):
                inside[above].add(out[k])
    for k in square:
        nearest = next((inside[above] for above in _above(candidates[k].name) if above in inside), set())
        out[k] = int(nearest == {1} and len(candidates[k].shape) == 2)
    return out


def _edges(shape: Shape) -> list[float]:
    """Return how far the uniform distributions reach that torch begins a weight with: that of its layers, and Xavier's."""
    if len(shape) < 2:
        return []
    read, given = math.prod(shape[1:]), shape[0] * math.prod(shape[2:])
    return [math.sqrt(1 / n) for n in (read, (read + given) / 6)]


def _above(name: str) -> Iterator[str]:
    """Yield the modules around a parameter's own, from the nearest to the model."""
    words = name.split(".")[:-2]
    return (".".join(words[:depth]) for depth in range(len(words), -1, -1))


def _chosen(length: int, most: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    if length <= most:
        return np.arange(length)
    return np.linspace(0, length - 1, most).round().astype(np.int64)


def _chosen_sets(shape: Shape, reading: Reading, heads: Heads, most: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the sampled channels of a law, each as the channels of the axis that are summed."""
    sets = reading.channels(shape[reading.axis], heads)
    if sets is None:
        raise ValueError(f"{reading} does not fit {shape}.")
    return sets[_chosen(len(sets), most)]


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


_ADAMS = (("m", "v"), ("momentum", "variance"), ("moment1", "moment2"))  # of scripts, dion, and AdamW beside Muon


def _moments(entry: Entry) -> tuple[Any, Any]:
    """Return the first and the second moment of an entry, under whatever names Adam's writers give them."""
    names = next((names for names in _ADAMS if entry.state.keys() >= set(names)), ("exp_avg", "exp_avg_sq"))
    return entry.state.get(names[0]), entry.state.get(names[1])


def _square(entry: Entry) -> Any:
    return stored(identify(entry.state, entry.group).key, entry.state, entry.group)


def _logarithm(x: Array) -> Array:
    return np.asarray(np.log(np.maximum(x.astype(np.float64), 1e-300)))


def ranks(x: Array) -> Array:
    """Return the ranks of a vector's elements, equal ones alike, centred and of norm one; zero where all are equal."""
    _, place, counts = np.unique(x, return_inverse=True, return_counts=True)
    own = (np.cumsum(counts) - (counts + 1) / 2)[place]
    centred = own - own.mean()
    return np.asarray(centred / max(math.sqrt(float(centred @ centred)), 1e-12))


def numbers(tensor: Tensor) -> Array:
    """Return a tensor's elements as a numpy array of single precision."""
    return np.asarray(tensor.to(torch.float32).cpu().numpy())


# -- how well two vectors agree --------------------------------------------------------------------------------------------


def certainty(agreement: float, channels: float) -> float:
    """Return by how many standard deviations a correlation over so many channels differs from none (Fisher's z)."""
    return math.atanh(max(min(agreement, 1 - 1e-9), 1e-9 - 1)) * math.sqrt(channels - 3) if channels >= FEWEST else 0.0


def concordance(a: Array, b: Array) -> Array:
    """Return how nearly each row of a equals each of b: 1 if it does, 0 if they have nothing to do with each other."""
    return concordance_of(centred(a), centred(b))


def centred(rows: Array) -> tuple[Array, Array, Array]:
    """Return rows less their means, the means, and the sums of their squares, as a concordance takes them."""
    means = rows.mean(-1)
    return rows - means[..., None], means, np.square(rows).sum(-1)


def concordance_of(a: tuple[Array, Array, Array], b: tuple[Array, Array, Array]) -> Array:
    """Return the concordance of rows that are centred already."""
    size = np.add.outer(a[2], b[2]) - np.outer(2 * a[0].shape[-1] * a[1], b[1])
    return np.asarray(2 * (a[0] @ b[0].T) / np.maximum(size, 1e-300))


def carried(sums: Array) -> float:
    """Return by how many channels a vector is carried: (Σ x²)² / Σ x⁴, three times that for a normal distribution."""
    squares = (sums - sums.mean()) ** 2
    fourth = float(squares @ squares)
    return min(len(sums), 3 * float(squares.sum()) ** 2 / fourth) if fourth > 0 else 0.0


def independent(x: Array, y: Array) -> float:
    """Return how many of the channels of two vectors of norm one count: those of one attention head go together.

    That is n / (1 + 2 Σ ρx(k) ρy(k)), over the lags k.
    """
    n = len(x)
    in_x, in_y = (np.correlate(z, z, "full")[n : n + n // 4 - 1] for z in (x, y))
    return n / max(1 + 2 * float(in_x @ in_y), 1.0)
