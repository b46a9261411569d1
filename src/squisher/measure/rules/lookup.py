"""Embeddings and indexing: rows of a table, looked up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Gradients, Uses, to_examples

__all__ = ["LOOKUP", "Lookup", "RoutedLookup", "Rows", "join_rows"]


@dataclass
class Lookup:
    """output = W[ids]; the gradient of the row `padding` is zero by definition."""

    ids: Tensor
    padding: int | None = None

    def gradients(self, g: Tensor, dim: int, examples: int, squared: bool = False) -> Gradients:
        """Return the gradients of this use."""
        g = to_examples(g, dim, examples).flatten(1, -2)
        ids = to_examples(self.ids, dim, examples).flatten(1)
        if self.padding is not None:
            ids = ids.masked_fill(ids == self.padding, -1)
        return Rows(ids, g)

    def saved(self) -> Sequence[Tensor]:
        """Return the tensors that must not change before the backward pass."""
        return (self.ids,)


@dataclass
class RoutedLookup:
    """output = W[ids], with rows in any order: row k belongs to example owner[k]."""

    ids: Tensor
    owner: Tensor

    def gradients(self, g: Tensor, dim: int, examples: int, squared: bool = False) -> Gradients:
        """Return the gradients of this use."""
        order = self.owner.argsort(stable=True)
        owner, counts = self.owner[order], torch.bincount(self.owner, minlength=examples)
        place = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[owner]
        keys = self.ids.new_full((examples, int(counts.max())), -1)  # as many positions for each, the rest nothing
        values = g.new_zeros(*keys.shape, g.shape[1])
        keys[owner, place], values[owner, place] = self.ids[order], g[order]
        return Rows(keys, values)

    def saved(self) -> Sequence[Tensor]:
        """Return the tensors that must not change before the backward pass."""
        return (self.ids, self.owner)


@dataclass
class Rows:
    """Gradient of example n = Σ_t values[n, t] in row keys[n, t]; keys (examples, positions), -1 for none."""

    keys: Tensor
    values: Tensor

    def add_squares(self, total: Tensor) -> None:
        """Add Σ_n (gradient of example n)²."""
        examples = self.keys.shape[0]
        height = total.shape[0]
        where = self.keys + torch.arange(examples, device=self.keys.device)[:, None] * height
        where, values = where.flatten(), self.values.flatten(0, 1).to(total.dtype)
        if bool((self.keys < 0).any()):
            kept = self.keys.flatten() >= 0
            where, values = where[kept], values[kept]
        unique, inverse = where.unique(return_inverse=True)
        sums = total.new_zeros(unique.numel(), total.shape[1]).index_add_(0, inverse, values)
        total.index_add_(0, unique % height, sums.square_())

    def sums(self, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the rows that example n touches, sorted, and their gradients."""
        kept = self.keys[n] >= 0
        unique, inverse = self.keys[n][kept].unique(return_inverse=True)
        values = self.values[n][kept].to(dtype)
        return unique, values.new_zeros(unique.numel(), values.shape[1]).index_add_(0, inverse, values)

    def example(self, n: int, shape: torch.Size) -> Tensor:
        """Return the gradient of one example, in full."""
        keys, values = self.sums(n, self.values.dtype)
        return values.new_zeros(shape).index_add_(0, keys, values)


def join_rows(summands: Sequence[Rows]) -> Rows:
    """Join several uses into one summand, whose positions are added up."""
    if len(summands) == 1:
        return summands[0]
    return Rows(torch.cat([p.keys for p in summands], 1), torch.cat([p.values for p in summands], 1))


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Uses:
    if not scale_grad_by_freq:
        if padding_idx is not None and padding_idx < 0:
            padding_idx += weight.shape[0]
        yield weight, Lookup(input, padding_idx)


def _rows(table: Tensor, index: Any) -> Uses:
    """Rows of a table by their number: `table[index]`."""
    if isinstance(index, Tensor) and index.dtype in (torch.long, torch.int) and index.dim() and table.dim() == 2:
        yield table, Lookup(index.long() % table.shape[0])


def _selected(input: Tensor, dim: int, index: Tensor) -> Uses:
    if dim in (0, -input.dim()):
        yield from _rows(input, index)


LOOKUP: dict[Any, Callable[..., Uses]] = {
    F.embedding: _embedding,
    Tensor.__getitem__: _rows,
    Tensor.index_select: _selected,
    torch.index_select: _selected,
}
