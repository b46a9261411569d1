"""The gradient of a whole batch, squared: one plain backward pass, with every gradient squared as soon as it is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .batches import Batch
from .likelihood import Objective

__all__ = ["Joint"]


class Joint:
    """The engine of per="batch".

    Args:
        model: in the mode and on the device that are wanted.
        objective: which Fisher.
        parameters: with respect to what, by name.
    """

    def __init__(self, model: nn.Module, objective: Objective, parameters: Mapping[str, Tensor]):
        self.model, self.objective, self.parameters = model, objective, parameters
        self.coverage: dict[str, Any] = {"method": "batch"}

    def add(self, sums: Mapping[str, Tensor], batch: Batch, index: Tensor) -> int:
        """Add (Σ_n ∇ loss_n)² for every column; returns how many units the batch had."""
        everything = list(self.model.parameters())
        flags = [p.requires_grad for p in everything]
        handles = []
        try:
            for name, parameter in self.parameters.items():
                parameter.requires_grad_()
                handles.append(parameter.register_post_accumulate_grad_hook(_squaring(sums[name])))
            outputs = self.objective.outputs(self.model, batch)
            many = self.objective.draws > 1
            if outputs.values.requires_grad:
                for column in self.objective.columns(outputs, index):
                    torch.autograd.backward(outputs.values, column, retain_graph=many)
            return self.objective.units(outputs)
        finally:
            for handle in handles:
                handle.remove()
            for parameter, flag in zip(everything, flags, strict=True):
                parameter.requires_grad_(flag)
                parameter.grad = None


def _squaring(total: Tensor) -> Any:
    def square(parameter: Tensor) -> None:
        # While the gradient is still in the cache; and its memory is free for the next one.
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            gradient = (gradient.to_dense() if gradient.is_sparse else gradient).to(total.dtype)
            total.addcmul_(gradient, gradient)

    return square
