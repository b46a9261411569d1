"""One example at a time: the definition of the Fisher diagonal, the oracle of the fast engine, and its fallback."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..ranks import local_of
from .batches import Batch
from .likelihood import Objective
from .sums import add_square

__all__ = ["Loop", "each_gradient", "forget", "requiring"]


class Loop:
    """The definition as an engine.

    Args:
        model: in the mode and on the device that are wanted.
        objective: which Fisher.
        parameters: with respect to what, by name.
    """

    def __init__(self, model: nn.Module, objective: Objective, parameters: Mapping[str, Tensor]) -> None:
        self.model, self.objective, self.parameters = model, objective, parameters
        self.coverage: dict[str, Any] = {"method": "loop"}
        self.reached: set[str] = set()

    def add(self, sums: Mapping[str, Tensor], batch: Batch, index: Tensor) -> int:
        """Add Σ_n Σ_terms (∇ term_n)² over the examples of a batch; returns how many units (examples, or tokens) it had."""

        def receive(name: str, gradient: Tensor) -> None:
            self.reached.add(name)
            add_square(sums[name], gradient)

        return each_gradient(receive, self.model, batch, index, self.objective, self.parameters)


def each_gradient(
    receive: Callable[[str, Tensor], None],
    model: nn.Module,
    batch: Batch,
    index: Tensor,
    objective: Objective,
    parameters: Mapping[str, Tensor],
    on_arrival: bool = False,
    seen: list[Tensor] | None = None,
) -> int:
    """Call `receive` with the name and gradient of every parameter that a term depends on, example by example, term by term.

    Where the objective squares the gradients of whole batches, the batch takes the place of the example.

    Args:
        receive: what gets them.
        model: in the mode and on the device that are wanted.
        batch: the examples.
        index: where each example is in the stream.
        objective: which Fisher.
        parameters: with respect to what, by name.
        on_arrival: receive each gradient, and free its memory, before the next one is there. Under re-entrant checkpointing, where
            a gradient comes in several parts, this would be wrong.
        seen: gets the outputs of each example.

    Returns:
        How many units (examples, or tokens) there were.
    """
    units, step = 0, 1 if objective.per == "example" else batch.size
    with requiring(model, parameters) as everything, ExitStack() as hooks:
        if on_arrival:
            for name, parameter in parameters.items():
                hook = parameter.register_post_accumulate_grad_hook(partial(_arrived, receive, name))
                hooks.callback(hook.remove)
        for n in range(0, batch.size, step):
            outputs = objective.outputs(model, batch.take(n, n + step))
            forget(everything)
            units += objective.units(outputs)
            if seen is not None:
                seen.append(outputs.values[0].detach())
            for term in objective.terms(outputs, index[n : n + step]):
                if not term.requires_grad:
                    continue  # this output does not depend on any of these parameters
                # Not autograd.grad: re-entrant activation checkpointing refuses it.
                term.sum().backward(retain_graph=True)
                for name, parameter in parameters.items():
                    if parameter.grad is not None:
                        _arrived(receive, name, parameter)
                forget(everything)
    return units


def forget(parameters: Iterable[Tensor]) -> None:
    """Drop the gradients of parameters: those of the last term, or what a model that calls `backward` in its forward pass leaves."""
    for parameter in parameters:
        parameter.grad = None


@torch.no_grad()
def _arrived(receive: Callable[[str, Tensor], None], name: str, parameter: Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None
    if gradient is not None:
        gradient = local_of(gradient)  # of a sharded parameter, each process squares its shard
        receive(name, gradient.to_dense() if gradient.is_sparse else gradient)


class requiring:  # noqa: N801 (used like a function)
    """Inside, these parameters require a gradient.

    The others stay as they are: freezing them would save time, but re-entrant checkpointing gives no gradient to a block
    whose inputs require none.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, Tensor]):
        self.wanted = {id(p) for p in parameters.values()}
        self.all: list[Tensor] = list(model.parameters())

    def __enter__(self) -> list[Tensor]:
        self.flags = [p.requires_grad for p in self.all]
        for p in self.all:
            p.requires_grad_(p.requires_grad or id(p) in self.wanted)
        return self.all

    def __exit__(self, *_: object) -> None:
        for p, flag in zip(self.all, self.flags, strict=True):
            p.requires_grad_(flag)
        forget(self.all)
