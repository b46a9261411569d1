"""What a rule is, and what it makes.

A *rule* knows one use of one parameter in one operation (its input, its settings). From the gradient of the output it makes the
*gradients* of the parameter for all examples, in a form that is cheaper than one full gradient each; all tensors in it start with the
example. The gradient of a parameter with several uses is the sum over them: each use gives one summand. Rules find the examples at `dim`
of the operation's output; where several rows belong to one example (sequences that were flattened into the batch), `size(dim)` is a
multiple of the number of examples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Gradients", "Rule", "Uses", "to_examples"]


class Gradients(Protocol):
    """The gradients of one use of a parameter, for all examples."""

    def add_squares(self, total: Tensor) -> None:
        """Add Σ_n (gradient of example n)² to `total`, which has the parameter's shape."""

    def example(self, n: int, shape: torch.Size) -> Tensor:
        """Return the gradient of one example, in full."""


class Rule(Protocol):
    """One use of a parameter: turns the gradient of the output into the gradients of the parameter."""

    def gradients(self, g: Tensor, dim: int, examples: int, squared: bool = False) -> Gradients:
        """Return the gradients of this use.

        Args:
            g: gradient with respect to the output of the operation.
            dim: the dimension of the output that the examples are in.
            examples: how many there are.
            squared: `g` is squared, and what it is multiplied by is to be squared too: what rounding errors are measured by.
        """

    def saved(self) -> Sequence[Tensor]:
        """Return the tensors that must not change between the forward and the backward pass."""


Uses = Iterable[tuple[Any, Rule]]
"""Candidates for parameters, each with its rule; the caller knows which of them are parameters."""


def to_examples(t: Tensor, dim: int, examples: int) -> Tensor:
    """Return (examples, rows per example, ...) from a tensor with examples at `dim`, where rows of one example are neighbours."""
    t = t.movedim(dim, 0) if dim else t
    if t.shape[0] == examples:
        return t.unsqueeze(1)
    return t.unflatten(0, (examples, t.shape[0] // examples))
