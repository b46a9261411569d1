"""Which parameter an operation uses, and by which rule: one table, keyed by the function that is called.

Operations rather than modules: a functional call, a bare `nn.Parameter` that is added, an attention module's projections and a
Hugging Face `Conv1D` all end in one of these. What is not in the table is not seen, and is left to the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .layers import Broadcast, Convolution, Linear, Lookup, Rule
from .pieces import ConvolutionSettings

__all__ = ["OPERATIONS", "Uses"]

Uses = Iterable[tuple[Any, Rule]]
"""Candidates for parameters, each with its rule; the caller knows which of them are parameters."""


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Uses:
    yield weight, Linear(input)
    if bias is not None:
        yield bias, Broadcast.of(bias)


def _matmul(input: Tensor, other: Tensor) -> Uses:
    if other.dim() == 2 and input.dim() >= 2:
        yield other, Linear(input, transposed=True)


def _addmm(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Iterator[tuple[Any, Rule]]:
    if beta == 1 and alpha == 1:
        yield mat2, Linear(mat1, transposed=True)
        yield input, Broadcast.of(input)


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


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Uses:
    if weight is not None:
        yield weight, _gain(weight, input, lambda: F.layer_norm(input.detach(), normalized_shape, None, None, eps))
    if bias is not None:
        yield bias, Broadcast.of(bias)


def _rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Uses:
    if weight is not None:
        yield weight, _gain(weight, input, lambda: F.rms_norm(input.detach(), normalized_shape, None, eps))


def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Uses:
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


def _gain(parameter: Tensor, input: Tensor, normalized: Callable[[], Tensor]) -> Broadcast:
    return Broadcast(parameter.shape, tuple(parameter.shape), normalized, (input,))


def _channels(input: Tensor, weight: Tensor | None, bias: Tensor | None, normalized: Callable[[], Tensor]) -> Uses:
    ones = (1,) * (input.dim() - 2)
    if weight is not None:
        yield weight, Broadcast(weight.shape, (weight.numel(), *ones), normalized, (input,))
    if bias is not None:
        yield bias, Broadcast(bias.shape, (bias.numel(), *ones))


def _tuple(value: Any, length: int) -> list[int]:
    values = list(value) if isinstance(value, (tuple, list)) else [value]
    return values * length if len(values) == 1 else values


OPERATIONS: dict[Any, Callable[..., Uses]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    Tensor.matmul: _matmul,
    Tensor.mm: _matmul,
    Tensor.__matmul__: _matmul,
    torch.addmm: _addmm,
    Tensor.addmm: _addmm,
    F.embedding: _embedding,
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
    F.batch_norm: _batch_norm,
    F.instance_norm: _instance_norm,
    F.conv1d: _convolution,
    F.conv2d: _convolution,
    F.conv3d: _convolution,
    F.conv_transpose1d: _transposed_convolution,
    F.conv_transpose2d: _transposed_convolution,
    F.conv_transpose3d: _transposed_convolution,
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
if hasattr(F, "rms_norm"):
    OPERATIONS[F.rms_norm] = _rms_norm
