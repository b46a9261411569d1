"""Rows of examples that were put into another order: tokens that are sorted by the expert that they go to.

An index that takes whole rows says by its values which example each row belongs to, however the index was computed. So the rows can be
followed until they are back in their order. In between, only operations that keep rows apart and products with the matrices of experts
(`grouped_mm`) are followed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .examples import UNKNOWN, Call, Examples, Look, Routed, State, argument, tensors_in
from .placements import state_after

__all__ = ["GROUPED", "Routes", "behind_transpose", "ends_of"]

GROUPED = {"grouped_mm", "_grouped_mm", "grouped_mm_fallback", "grouped_mm_fallback.default"}
"""Names of the product of rows with one matrix of several, in torch and in transformers."""


class Routes:
    """To which examples the rows of tensors belong.

    Args:
        examples: how many there are.
    """

    def __init__(self, examples: int):
        self.examples = examples
        self.owners: list[Tensor] = []

    def taken(self, t: Tensor, state: State, index: Any) -> State | None:
        """Return the state of `t[index]`, where that takes rows of examples by their number or by a mask; otherwise None."""
        if isinstance(index, tuple) and index and all(isinstance(p, slice) and p == slice(None) for p in index[1:]):
            index = index[0]
        if not isinstance(state, (Examples, Routed)) or state.dim or not isinstance(index, Tensor) or not index.dim():
            return None
        if index.dtype == torch.bool:
            rows = index.detach().nonzero()[:, 0]
        elif index.dim() == 1 and index.dtype in (torch.long, torch.int):
            rows = index.detach().long() % t.shape[0]
        else:
            return None
        return self._state_of(rows // state.inner if isinstance(state, Examples) else self.owners[state.owner][rows])

    def after(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, states: Any) -> State:
        """Return the state of the output of an operation on such rows: as if each were an example, if it keeps them apart."""
        if name in GROUPED:
            return states[id(args[0])] if isinstance(states.get(id(args[0])), Routed) else UNKNOWN
        found = {s.owner for s in states.values() if isinstance(s, Routed)}
        if len(found) != 1 or any(s is UNKNOWN or isinstance(s, Examples) for s in states.values()):
            return UNKNOWN
        (owner,) = found
        single = {key: Examples(s.dim) if isinstance(s, Routed) else s for key, s in states.items()}
        look = Look(single, len(self.owners[owner]))
        after = state_after(Call(name, args, kwargs, tensors_in((args, kwargs)), look, output))
        return Routed(after.dim, owner) if isinstance(after, Examples) and after.inner == 1 else UNKNOWN

    def _state_of(self, owner: Tensor) -> State:
        inner, rest = divmod(len(owner), self.examples)
        order = torch.arange(self.examples, device=owner.device).repeat_interleave(inner)
        if not rest and torch.equal(owner, order):
            return Examples(0, inner)
        for number, known in enumerate(self.owners):
            if known.shape == owner.shape and torch.equal(known, owner):
                return Routed(0, number)
        self.owners.append(owner)
        return Routed(0, len(self.owners) - 1)


def ends_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return where the rows of each matrix end, for a product in `GROUPED`; None if its arguments have another form."""
    ends = argument(args, kwargs, 2, "offs", None)
    plain = len(tensors_in((args, kwargs))) == 3 and args[0].dim() == 2 and args[1].dim() == 3
    return ends if isinstance(ends, Tensor) and plain else None


def behind_transpose(t: Tensor) -> tuple[Tensor, bool]:
    """Return the parameter behind a tensor that swaps its last two dimensions, and True; otherwise the tensor itself, and False."""
    node = t.grad_fn
    if node is None or node.name() != "TransposeBackward0" or t.dim() != 3:
        return t, False
    leaf = getattr(node.next_functions[0][0], "variable", None)
    if leaf is None or leaf.shape != t.mT.shape or leaf.stride() != t.mT.stride():
        return t, False
    return leaf, True
