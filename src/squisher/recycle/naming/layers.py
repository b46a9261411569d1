"""Whether layers of one kind stand in another order than a proposal says: by the size of their weights and by v.

A hidden unit with large weights has larger or smaller gradients than one with small weights, and the units of one layer have
nothing to do with those of another. So, over the units, the size of the weights is correlated with v in the right layer and in
no other. This needs no first moment, so that it also speaks of RMSprop, Adagrad and Adafactor. It tells layers apart, not the
tensors of one layer: it can contradict a proposal but proves no name.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ...errors import NoAccumulatorError
from ..optimizers.accumulators import identify
from ..states import Candidate, Entry, stored
from .values import Array, numbers

__all__ = ["Exchange", "exchanged_layers"]

CHANCE = 1e-4  # that one of all the exchanges tried looks right by accident
UNRELATED = (
    1.5  # spread of the correlations between different layers, in standard deviations, where their units are unrelated
)
WORTH = 3.0  # standard deviations that an exchange of two layers must gain to be tried
UNITS = 16  # fewer cannot tell anything
_ROWS, _COLUMNS = 256, 1024  # of a matrix that are looked at
_WHOLE = 1 << 20  # elements that are read at once sooner than row by row


class Exchange(NamedTuple):
    """A parameter whose state belongs to another layer.

    Attributes:
        name: Under which the proposal has it.
        other: Whose it is by the sizes of the weights.
        certainty: By how many standard deviations that fits better.
    """

    name: str
    other: str
    certainty: float


def exchanged_layers(candidates: Sequence[Candidate], entries: Sequence[Entry]) -> Exchange | None:
    """Return an exchange of layers that fits much better than a proposal; None where the proposal may be right.

    Args:
        candidates: The parameter that the proposal gives each entry.
        entries: What the optimizer keeps.
    """
    tables = [(own, table) for own in _repeated(candidates, entries) for table in _tables(own, candidates, entries)]
    found: list[Exchange] = []
    for own, table in tables:
        for sign in (1.0, -1.0):
            order, certainty = _better(sign * table, len(tables))
            if certainty > 0:
                k = next(k for k, to in enumerate(order) if to != k)
                found.append(Exchange(candidates[own[order[k]]].name, candidates[own[k]].name, certainty))
    return max(found, key=lambda exchange: exchange.certainty, default=None)


def _repeated(candidates: Sequence[Candidate], entries: Sequence[Entry]) -> Iterator[list[int]]:
    """Yield the entries that play one part in three or more layers of one kind, in the order of the layers' numbers."""
    parts: dict[tuple[str, str, tuple[int, ...]], dict[int, int]] = defaultdict(dict)
    for k, (candidate, entry) in enumerate(zip(candidates, entries, strict=True)):
        if candidate.weight is None or candidate.pieces or entry.shape != candidate.shape or not entry.state:
            continue
        words = candidate.name.split(".")
        for place in (place for place, word in enumerate(words) if word.isdecimal()):
            key = (".".join(words[:place]), ".".join(words[place + 1 :]), candidate.shape)
            parts[key][int(words[place])] = k
    for own in parts.values():
        if len(own) > 2:
            yield [own[number] for number in sorted(own)]


def _tables(own: Sequence[int], candidates: Sequence[Candidate], entries: Sequence[Entry]) -> Iterator[Array]:
    """Yield, for each axis, how surely the weights of each layer go with the v of each entry, where layers are unrelated."""
    try:
        squares = [_sizes(_square(entries[k]), square=False) for k in own]
    except NoAccumulatorError:
        return
    weights = [_sizes(candidates[k].weight, square=True) for k in own]
    for of_weights, of_squares in zip(zip(*weights, strict=True), zip(*squares, strict=True), strict=True):
        if len(of_weights[0]) < UNITS:
            continue
        table = _sure(np.stack(of_weights), np.stack(of_squares))
        others = table[~np.eye(len(own), dtype=bool)]
        if float(np.median(np.abs(others))) <= 0.6745 * UNRELATED:
            yield table - table.mean(0) - table.mean(1)[:, None] + table.mean()


def _better(table: Array, tables: int) -> tuple[list[int], float]:
    """Return the order of the entries that fits best, and by how much more than an accident it beats the one proposed."""
    count = len(table)
    order = list(range(count))
    while True:
        gains = {
            (a, b): table[a, order[b]] + table[b, order[a]] - table[a, order[a]] - table[b, order[b]]
            for a, b in itertools.combinations(range(count), 2)
        }
        (a, b), gain = max(gains.items(), key=lambda item: item[1])
        if gain < 2 * WORTH:
            break
        order[a], order[b] = order[b], order[a]
    moved = sum(k != to for k, to in enumerate(order))
    if not moved:
        return order, 0.0
    total = float(sum(table[k, to] for k, to in enumerate(order)))
    # Whether large weights go with large or with small v is not known: the proposal may be right by either.
    gained = (total - abs(float(np.trace(table)))) / math.sqrt(2 * moved)
    tried = math.log(2 * tables) + math.lgamma(count + 1) - math.lgamma(count - moved + 1)
    needed = -NormalDist().inv_cdf(max(math.exp(math.log(CHANCE) - tried), 1e-300))
    certainty = min(gained, total / math.sqrt(count))
    return order, certainty if certainty >= needed else 0.0


def _sure(x: Array, y: Array) -> Array:
    """Return by how many standard deviations the correlation of each profile in x with each in y differs from none.

    Channels of one attention head go together, so that fewer of them count: n / (1 + 2 Σ ρx(k) ρy(k)), over the lags k.
    """
    n = x.shape[1]
    lags = range(1, n // 4)
    in_x, in_y = (np.stack([(z[:, k:] * z[:, :-k]).sum(1) for k in lags], 1) for z in (x, y))
    counted = n / np.maximum(1 + 2 * in_x @ in_y.T, 1.0)
    return np.asarray(np.arctanh(np.clip(x @ y.T, -0.999, 0.999)) * np.sqrt(np.maximum(counted - 3, 0.0)))


def _square(entry: Entry) -> Any:
    return stored(identify(entry.state, entry.group).key, entry.state, entry.group)


def _sizes(source: Any, square: bool) -> list[Array]:
    """Return the mean size of a tensor's elements per row, and per column, as ranks of norm one, from a sample of both."""
    shape = tuple(source.shape)
    inner = math.prod(shape[2:])
    rows, columns = shape[0], math.prod(shape[1:])
    width = min(columns, _COLUMNS * inner)
    chosen = range(rows) if rows <= _ROWS or columns == 1 else np.linspace(0, rows - 1, _ROWS).round().astype(int)
    if isinstance(source, Tensor) or not getattr(source, "is_contiguous", True) or rows * columns <= _WHOLE:
        whole = (source if isinstance(source, Tensor) else source.load()).detach().reshape(rows, columns)
        block = numbers(whole[list(chosen), :width])
    else:
        block = np.stack([numbers(source.read_flat(int(k) * columns, int(k) * columns + width)) for k in chosen])
    block = block.astype(np.float64) ** (2 if square else 1)
    sizes = [block.mean(1)] if len(shape) == 1 else [block.mean(1), block.mean(0).reshape(-1, inner).mean(1)]
    return [_ranks(size) for size in sizes]


def _ranks(x: Array) -> Array:
    """Return the ranks of a vector's elements, equal ones alike, centred and of norm one; nought where all are equal."""
    _, place, counts = np.unique(x, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts + 1) / 2)[place]
    centred = ranks - ranks.mean()
    return np.asarray(centred / max(math.sqrt(float(centred @ centred)), 1e-12))
