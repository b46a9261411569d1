"""Convolutions, transposed or not, of any number of dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Gradients, Uses
from .linear import TILE, Outer
from .norm import Broadcast

__all__ = ["CONVOLUTION", "Convolution", "ConvolutionGradients", "ConvolutionSettings"]

MOST_GROUPED = (
    3 << 16
)  # elements of a weight up to which a group for each example is quicker than a convolution for each


@dataclass(frozen=True)
class ConvolutionSettings:
    """What is known of a convolution besides its input; of the weight only the shape matters."""

    weight: Tensor
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int
    transposed: bool = False
    output_padding: tuple[int, ...] = ()


@dataclass
class Convolution:
    """output = convolution of a with a weight (transposed or not), any number of dimensions."""

    a: Tensor
    settings: ConvolutionSettings

    def gradients(self, g: Tensor, dim: int, examples: int, squared: bool = False) -> Gradients:
        """Return the gradients of this use."""
        return ConvolutionGradients(self.settings, self.a.square() if squared else self.a, g, examples)

    def saved(self) -> Sequence[Tensor]:
        """Return the tensors that must not change before the backward pass."""
        return (self.a,)


@dataclass
class ConvolutionGradients:
    """A convolution's input and output gradient; images of one example are neighbours."""

    settings: ConvolutionSettings
    a: Tensor
    g: Tensor
    examples: int

    def add_squares(self, total: Tensor) -> None:
        """Add Σ_n (gradient of example n)²."""
        unfold = self.examples > 1 and self.can_unfold() and self._unfolding_pays(total)
        # As many examples as patches fit into the cache; of small weights some as groups of one convolution.
        patches = self.g[:, 0].numel() // self.examples * self.settings.weight[0].numel()
        size = patches if unfold else total.numel() if total.numel() <= MOST_GROUPED else TILE
        step = max(1, TILE // size)
        for start in range(0, self.examples, step):
            some = self._some(start, min(start + step, self.examples))
            if unfold:
                some.unfolded().add_squares(total)
                continue
            for gradient in some._all().to(total.dtype):
                total.addcmul_(gradient, gradient)

    def _unfolding_pays(self, total: Tensor) -> bool:
        positions, kernel = self.g[0, 0].numel(), self.settings.weight.shape[2:]
        pointwise = kernel.numel() == 1 and not any(self.settings.padding)  # the patches are the input itself
        return pointwise or (total.numel() >= 1 << 18 and positions <= 64)

    def example(self, n: int, shape: torch.Size) -> Tensor:
        """Return the gradient of one example, in full."""
        return self._some(n, n + 1)._all()[0]

    def _some(self, start: int, stop: int) -> ConvolutionGradients:
        images = self.a.shape[0] // self.examples
        part = slice(start * images, stop * images)
        return ConvolutionGradients(self.settings, self.a[part], self.g[part], stop - start)

    def _all(self) -> Tensor:
        """Return the gradients of all examples in full, from one convolution with a group for each of them."""
        rule, dtype = self.settings, torch.promote_types(self.g.dtype, torch.float32)
        a, g = (t.unflatten(0, (self.examples, -1)).transpose(0, 1).flatten(1, 2).to(dtype) for t in (self.a, self.g))
        shape = rule.weight.shape
        # For its own gradient only its shape matters; a sharded one may not be there at this moment.
        weight = rule.weight.new_empty((self.examples * shape[0], *shape[1:]), dtype=dtype)
        more = list(rule.output_padding) or [0] * len(rule.stride)
        settings = (rule.stride, rule.padding, rule.dilation, rule.transposed, more, self.examples * rule.groups)
        found = torch.ops.aten.convolution_backward(g, a, weight, None, *settings, [False, True, False])[1]
        return found.view(self.examples, *shape)

    def can_unfold(self) -> bool:
        """Return whether it can be written as an outer product."""
        return self.a.dim() == 4 and self.settings.groups == 1 and not self.settings.transposed

    def unfolded(self) -> Outer:
        """Return the same as an outer product: every output position sees one patch of the input."""
        rule, kernel = self.settings, self.settings.weight.shape[2:]
        a = self.a
        if tuple(kernel) == (1, 1) and not any(rule.padding):
            patches = a[:, :, :: rule.stride[0], :: rule.stride[1]].flatten(2)
        else:
            patches = F.unfold(a, tuple(kernel), tuple(rule.dilation), tuple(rule.padding), tuple(rule.stride))
        g = self.g.flatten(2)
        if a.shape[0] != self.examples:
            patches, g = (t.unflatten(0, (self.examples, -1)).transpose(1, 2).flatten(2) for t in (patches, g))
        return Outer(g.mT, patches.mT)


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Uses:
    spatial = weight.dim() - 2
    if input.dim() != weight.dim():  # without a batch dimension
        return
    stride, dilation = _tuple(stride, spatial), _tuple(dilation, spatial)
    if padding == "valid":
        padding = 0
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        if any(t % 2 for t in total):  # torch pads one side more: not one of the settings of a plain convolution
            input = F.pad(input.detach(), [s for t in reversed(total) for s in (t // 2, t - t // 2)])
            padding = 0
        else:
            padding = [t // 2 for t in total]
    yield weight, Convolution(input, ConvolutionSettings(weight, stride, _tuple(padding, spatial), dilation, groups))
    if bias is not None:
        yield bias, Broadcast(bias.shape, (bias.numel(), *(1,) * spatial))


def _transposed_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Uses:
    spatial = weight.dim() - 2
    if input.dim() != weight.dim():
        return
    stride, padding, dilation = (_tuple(v, spatial) for v in (stride, padding, dilation))
    more = tuple(_tuple(output_padding, spatial))
    yield weight, Convolution(input, ConvolutionSettings(weight, stride, padding, dilation, groups, True, more))
    if bias is not None:
        yield bias, Broadcast(bias.shape, (bias.numel(), *(1,) * spatial))


def _tuple(value: Any, length: int) -> list[int]:
    values = list(value) if isinstance(value, (tuple, list)) else [value]
    return values * length if len(values) == 1 else values


CONVOLUTION: dict[Any, Callable[..., Uses]] = {
    F.conv1d: _convolution,
    F.conv2d: _convolution,
    F.conv3d: _convolution,
    F.conv_transpose1d: _transposed_convolution,
    F.conv_transpose2d: _transposed_convolution,
    F.conv_transpose3d: _transposed_convolution,
}
