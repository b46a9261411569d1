"""Rules: from what went into an operation and the gradient of what came out to the gradients of one parameter, for all examples.

A *rule* knows one use of one parameter in one operation (its input, its settings). Given the gradient of the output it makes a
*piece* (see `pieces`). Rules find the examples at `dim` of the operation's output; where several rows belong to one example (sequences
that were flattened into the batch), `size(dim)` is a multiple of the number of examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .pieces import (
    ConvolutionPiece,
    ConvolutionSettings,
    Dense,
    Outer,
    Piece,
    Rows,
)

__all__ = ["Broadcast", "Convolution", "Linear", "Lookup", "Rule"]


class Rule(Protocol):
    """One use of a parameter: what is needed to turn the gradient of the output into a piece."""

    def piece(self, g: Tensor, dim: int, examples: int, squared: bool = False) -> Piece:
        """The gradients of this use.

        Args:
            g: gradient with respect to the output of the operation.
            dim: the dimension of the output that the examples are in.
            examples: how many there are.
            squared: `g` is squared, and what it is multiplied by is to be squared too: what rounding errors are measured by.
        """

    def saved(self) -> Sequence[Tensor]:
        """The tensors that must not change between the forward and the backward pass."""


def to_examples(t: Tensor, dim: int, examples: int) -> Tensor:
    """(examples, rows per example, ...), where the examples are at `dim` and rows of one example are neighbours."""
    t = t.movedim(dim, 0) if dim else t
    if t.shape[0] == examples:
        return t.unsqueeze(1)
    return t.unflatten(0, (examples, t.shape[0] // examples))


@dataclass
class Broadcast:
    """output = ... + factor · parameter, broadcast: biases, gains, position embeddings, class tokens.

    Attributes:
        shape: of the parameter.
        aligned: the same elements as they lie against the output, from the right: (C, 1, 1) for a channel's bias.
        factor: what the parameter is multiplied by, None for 1; a function where it is cheaper to compute it again.
        held: what the factor is computed from.
    """

    shape: torch.Size
    aligned: tuple[int, ...]
    factor: Tensor | Callable[[], Tensor] | None = None
    held: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, t: Tensor) -> Broadcast:
        """A tensor that is added, or copied."""
        return cls(t.shape, tuple(t.shape))

    def apart_from(self, dim: int, dims: int) -> bool:
        """Whether it has no entries of its own for each row of this dimension of the output."""
        place = dim - (dims - len(self.aligned))
        return place < 0 or self.aligned[place] == 1

    def piece(self, g: Tensor, dim: int, examples: int, squared: bool = False) -> Piece:
        """The gradients of this use."""
        if self.factor is None and g.shape == (examples, *self.shape) and not dim:
            return Dense(g)  # a bias behind a plain matrix product: nothing to sum
        factor = self.factor() if callable(self.factor) else self.factor
        if squared and factor is not None:
            factor = factor.square()
        aligned = (1,) * (g.dim() - len(self.aligned)) + self.aligned
        if aligned[dim] != 1 and examples > 1:
            raise ValueError("the parameter has an entry for each example")
        if factor is not None:
            factor = factor.to(g.dtype)
            if factor.shape != g.shape:
                factor = factor.expand(g.shape)
        kept = [i for i in range(g.dim()) if aligned[i] != 1 and i != dim]
        if examples == 1:
            kept = [i for i in range(g.dim()) if aligned[i] != 1]
            summed = _sum_to(g, factor, kept)
            return Dense(summed.reshape(1, *self.shape))
        if g.shape[dim] != examples:
            g = to_examples(g, dim, examples)
            factor = None if factor is None else to_examples(factor, dim, examples)
            kept = [i + 1 if i > dim else i + 2 for i in kept]
            dim = 0
        summed = _sum_to(g, factor, [dim, *kept])
        return Dense(summed.reshape(examples, *self.shape))

    def saved(self) -> Sequence[Tensor]:
        """The tensors that must not change before the backward pass."""
        return self.held


def _sum_to(g: Tensor, factor: Tensor | None, kept: list[int]) -> Tensor:
    """Sum g (times factor) over all dimensions but these; they come out in this order."""
    others = [i for i in range(g.dim()) if i not in kept]
    order = sorted(kept)
    if factor is not None:
        g = g * factor
    if others:
        g = g.sum(others)
    return g.permute([order.index(i) for i in kept])


@dataclass
class Linear:
    """output = a Wᵀ, or a W if transposed; positions are all dimensions of a but the last and the examples'."""

    a: Tensor
    transposed: bool = False

    def piece(self, g: Tensor, dim: int, examples: int, squared: bool = False) -> Piece:
        """The gradients of this use."""
        a = self.a.square() if squared else self.a
        a, g = (to_examples(t, dim, examples).flatten(1, -2) for t in (a, g))
        return Outer(a, g, False) if self.transposed else Outer(g, a)

    def saved(self) -> Sequence[Tensor]:
        """The tensors that must not change before the backward pass."""
        return (self.a,)


@dataclass
class Lookup:
    """output = W[ids]; the gradient of the row `padding` is zero by definition."""

    ids: Tensor
    padding: int | None = None

    def piece(self, g: Tensor, dim: int, examples: int, squared: bool = False) -> Piece:
        """The gradients of this use."""
        g = to_examples(g, dim, examples).flatten(1, -2)
        ids = to_examples(self.ids, dim, examples).flatten(1)
        if self.padding is not None:
            ids = ids.masked_fill(ids == self.padding, -1)
        return Rows(ids, g)

    def saved(self) -> Sequence[Tensor]:
        """The tensors that must not change before the backward pass."""
        return (self.ids,)


@dataclass
class Convolution:
    """output = convolution of a with a weight (transposed or not), any number of dimensions."""

    a: Tensor
    settings: ConvolutionSettings

    def piece(self, g: Tensor, dim: int, examples: int, squared: bool = False) -> Piece:
        """The gradients of this use."""
        return ConvolutionPiece(self.settings, self.a.square() if squared else self.a, g, examples)

    def saved(self) -> Sequence[Tensor]:
        """The tensors that must not change before the backward pass."""
        return (self.a,)
