"""What the weights beside an optimizer state say about its names, where their own order says nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..errors import NamingError
from ..storage.folders import Weights
from .states import Candidate, OptimizerState

__all__ = ["pinned", "sorted_by_name"]


def pinned(optimizer: OptimizerState, weights: Sequence[Weights]) -> list[tuple[str, Sequence[Candidate]]]:
    """For each file whose shapes alone say which tensor an entry is: its tensors in the optimizer's order.

    Args:
        optimizer: Its entries in its own order.
        weights: Files whose order says nothing.
    """
    sources: list[tuple[str, Sequence[Candidate]]] = []
    shapes = [entry.shape for entry in optimizer.entries]
    for one in weights:
        count = Counter(tuple(tensor.shape) for tensor in one.tensors.values())
        names = {tuple(tensor.shape): name for name, tensor in one.tensors.items()}
        if len(set(shapes)) == len(shapes) and all(shape is not None and count[shape] == 1 for shape in shapes):
            order = [
                Candidate(names[shape], shape, weight=one.tensors[names[shape]])
                for shape in shapes
                if shape is not None
            ]
            sources.append((f"{one.label}, in which every shape occurs once", order))
    return sources


def sorted_by_name(weights: Weights, state: str) -> NamingError:
    """Return what to say where only a file that sorts its names is beside an optimizer's state."""
    return NamingError(
        f"{weights.label} sorts its tensors by name, and several have the same shape, so it cannot tell which is which in "
        f"{state}. Give the model with --model: a folder with its config.json, or its state_dict() saved with torch.save, "
        "which keeps the order; or the names in the optimizer's order with --names."
    )
