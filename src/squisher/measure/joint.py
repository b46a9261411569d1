"""The gradient of a whole batch, squared: one plain backward pass, with every gradient squared as soon as it is there.

Re-entrant checkpointing adds the gradient of a parameter that several blocks share in several steps; such parameters are
squared at the end of the pass. A pass may start from a column: a given gradient with respect to the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SquisherError
from .batches import Batch
from .likelihood import Objective
from .loop import forget, requiring
from .sums import Sums, add_square

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
        self.reached: set[str] = set()
        self.in_parts: set[str] | None = None

    def add(self, sums: Sums, batch: Batch, index: Tensor) -> int:
        """Add (Σ_n ∇ loss_n)² for every column; returns how many units the batch had."""
        arrivals: dict[str, int] = {}
        with requiring(self.model, self.parameters) as everything, ExitStack() as hooks:
            outputs = self.objective.outputs(self.model, batch)
            forget(everything)
            for name, parameter in self.parameters.items():
                hook = parameter.register_post_accumulate_grad_hook(self._arrival(name, sums, arrivals))
                hooks.callback(hook.remove)
            if outputs.values.requires_grad:
                for column in self.objective.columns(outputs, index):
                    arrivals.clear()
                    send_back(outputs.values, column, self.objective.several)
                    self._rest(sums, arrivals)
            return self.objective.units(outputs)

    def _arrival(self, name: str, sums: Sums, arrivals: dict[str, int]) -> Callable[[Tensor], None]:
        def arrived(parameter: Tensor) -> None:
            arrivals[name] = arrivals.get(name, 0) + 1
            self.reached.add(name)
            if self.in_parts is None or name in self.in_parts:
                return
            if arrivals[name] > 1:
                raise SquisherError(
                    f"The gradient of {name!r} comes in several parts (re-entrant checkpointing), which it did not in the "
                    "first batch, so it was squared too early. Use method='loop'."
                )
            # While the gradient is still in the cache; and its memory is free for the next one.
            _square(parameter, sums[name])

        return arrived

    def _rest(self, sums: Sums, arrivals: dict[str, int]) -> None:
        """Square the gradients that could not be squared on arrival: in the first backward pass all, later those that come in several parts."""
        for name in self.parameters if self.in_parts is None else self.in_parts:
            _square(self.parameters[name], sums[name])
        if self.in_parts is None:
            self.in_parts = {name for name, times in arrivals.items() if times > 1}


def _square(parameter: Tensor, total: Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None
    if gradient is not None:
        add_square(total, gradient)


def send_back(values: Tensor, column: Tensor, again: bool = False) -> None:
    """`values.backward(column)`, without the import of sympy (40 MB) that torch needs to check a gradient's shape.

    Args:
        values: what the model returned.
        column: the gradient with respect to it.
        again: whether another column follows, so that the graph must stay.
    """
    start: Tensor = _Start.apply(values, column)
    start.backward(retain_graph=again)


class _Start(torch.autograd.Function):
    """A scalar whose gradient with respect to the values is the column."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, column: Tensor) -> Tensor:
        ctx.column = column
        return values.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.column, None
