"""One parabola per parameter: its value, and its pull added to a gradient.

Both are bound by memory alone. On a CPU they go piece by piece, so that what lies between stays in the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["PIECE", "Energy", "add_force_", "energy", "in_pieces"]

PIECE = 1 << 16
"""Elements at a time on a CPU: small enough for the cache, large enough that a call costs nothing beside them."""


class Energy(torch.autograd.Function):
    """Σ weight·(parameter − centre)², keeping nothing for the backward pass that is not there anyway."""

    @staticmethod
    def forward(parameter: Tensor, weight: Tensor, centre: Tensor) -> Tensor:
        """Return the value."""
        return energy(parameter, weight, centre)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        """Keep references, not copies."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        """Made of operations that can be differentiated again."""
        parameter, weight, centre = ctx.saved_tensors
        force = (parameter.to(device=centre.device, dtype=torch.float32) - centre) * weight * (2 * upstream)
        return force.to(device=parameter.device, dtype=parameter.dtype), None, None


def energy(parameter: Tensor, weight: Tensor, centre: Tensor) -> Tensor:
    """Σ weight·(parameter − centre)²."""
    three = (parameter, weight, centre)
    if not in_pieces(*three):
        gap = parameter.to(device=centre.device, dtype=torch.float32) - centre
        return (gap * gap * weight).sum()
    gap, force = parameter.new_empty(2, min(PIECE, parameter.numel()))
    total = parameter.new_zeros(())
    for p, w, c in zip(*(t.view(-1).split(PIECE) for t in three), strict=True):
        apart = torch.sub(p, c, out=gap[: len(p)])
        total += torch.mul(w, apart, out=force[: len(p)]).mul_(apart).sum()
    return total


def add_force_(gradient: Tensor, parameter: Tensor, weight: Tensor, centre: Tensor, strength: float) -> None:
    """Add strength · weight · (parameter − centre) in place."""
    four = (gradient, parameter, weight, centre)
    if in_pieces(*four):
        buffer = gradient.new_empty(min(PIECE, gradient.numel()))
        for g, p, w, c in zip(*(t.view(-1).split(PIECE) for t in four), strict=True):
            g.addcmul_(w, torch.sub(p, c, out=buffer[: len(p)]), value=strength)
        return
    gap = parameter.to(device=centre.device, dtype=torch.float32) - centre
    if weight.dtype == gradient.dtype == gap.dtype and weight.device == gradient.device:
        gradient.addcmul_(weight, gap, value=strength)
    else:
        gradient.add_(gap.mul_(weight).mul_(strength).to(device=gradient.device, dtype=gradient.dtype))


def in_pieces(*tensors: Tensor) -> bool:
    """Whether to go piece by piece."""
    return all(
        type(t) in (Tensor, nn.Parameter) and t.dtype == torch.float32 and t.is_cpu and t.is_contiguous()
        for t in tensors
    )
