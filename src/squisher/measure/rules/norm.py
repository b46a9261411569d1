"""Norms, gains and biases: what is broadcast over an output, added or multiplied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Gradients, Uses, to_examples

__all__ = ["BROADCAST", "Broadcast", "Dense"]


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
        """Make the rule of a tensor that is added, or copied."""
        return cls(t.shape, tuple(t.shape))

    def apart_from(self, dim: int, dims: int) -> bool:
        """Return whether all rows of this dimension of the output share the entries of the parameter."""
        place = dim - (dims - len(self.aligned))
        return place < 0 or self.aligned[place] == 1

    def gradients(self, g: Tensor, dim: int, examples: int, squared: bool = False) -> Gradients:
        """Return the gradients of this use."""
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
        """Return the tensors that must not change before the backward pass."""
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
class Dense:
    """Full gradients, (examples, *parameter)."""

    values: Tensor

    def add_squares(self, total: Tensor) -> None:
        """Add Σ_n (gradient of example n)²."""
        values = self.values.to(total.dtype)
        if values.shape[0] == 1:
            total.addcmul_(values[0], values[0])
        else:
            total += values.square().sum(0)

    def example(self, n: int, shape: torch.Size) -> Tensor:
        """Return the gradient of one example, in full."""
        return self.values[n].reshape(shape)


def _add(input: Any, other: Any, *, alpha: float = 1) -> Uses:
    if alpha == 1:
        for candidate in (input, other):
            if isinstance(candidate, Tensor):
                yield candidate, Broadcast.of(candidate)


def _mul(input: Any, other: Any) -> Uses:
    for candidate, factor in ((input, other), (other, input)):
        if isinstance(candidate, Tensor) and candidate is not factor:
            given = (
                factor
                if isinstance(factor, Tensor)
                else torch.tensor(factor, dtype=candidate.dtype, device=candidate.device)
            )
            yield candidate, Broadcast(candidate.shape, tuple(candidate.shape), given.detach(), (given,))


def _layer_norm(
    input: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Uses:
    if weight is not None:
        yield weight, _gain(weight, input, lambda: F.layer_norm(input.detach(), normalized_shape, None, None, eps))
    if bias is not None:
        yield bias, Broadcast.of(bias)


def _rms_norm(input: Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Uses:
    if weight is not None:
        yield weight, _gain(weight, input, lambda: F.rms_norm(input.detach(), normalized_shape, None, eps))


def _group_norm(input: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Uses:
    yield from _channels(input, weight, bias, lambda: F.group_norm(input.detach(), num_groups, None, None, eps))


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Uses:
    if training or running_mean is None:  # the statistics of the batch: examples are not apart
        return
    yield from _channels(
        input,
        weight,
        bias,
        lambda: F.batch_norm(input.detach(), running_mean, running_var, None, None, False, 0.0, eps),
    )


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Uses:
    def normalized() -> Tensor:
        if use_input_stats:
            return F.instance_norm(input.detach(), eps=eps)
        return F.batch_norm(input.detach(), running_mean, running_var, None, None, False, 0.0, eps)

    yield from _channels(input, weight, bias, normalized)


def _prelu(input: Tensor, weight: Tensor) -> Uses:
    aligned = (weight.numel(), *(1,) * (input.dim() - 2)) if weight.numel() > 1 else (1,)
    yield weight, Broadcast(weight.shape, aligned, lambda: input.detach().clamp(max=0), (input,))


def _gain(parameter: Tensor, input: Tensor, normalized: Callable[[], Tensor]) -> Broadcast:
    return Broadcast(parameter.shape, tuple(parameter.shape), normalized, (input,))


def _channels(input: Tensor, weight: Tensor | None, bias: Tensor | None, normalized: Callable[[], Tensor]) -> Uses:
    ones = (1,) * (input.dim() - 2)
    if weight is not None:
        yield weight, Broadcast(weight.shape, (weight.numel(), *ones), normalized, (input,))
    if bias is not None:
        yield bias, Broadcast(bias.shape, (bias.numel(), *ones))


BROADCAST: dict[Any, Callable[..., Uses]] = {
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    F.group_norm: _group_norm,
    F.batch_norm: _batch_norm,
    F.instance_norm: _instance_norm,
    F.prelu: _prelu,
    torch.add: _add,
    Tensor.add: _add,
    Tensor.__add__: _add,
    Tensor.__radd__: _add,
    Tensor.add_: _add,
    Tensor.__iadd__: _add,
    torch.mul: _mul,
    Tensor.mul: _mul,
    Tensor.__mul__: _mul,
    Tensor.__rmul__: _mul,
}
