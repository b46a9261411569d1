"""Where the examples are after indexing, `t[index]`, also where it puts their rows into another order.

Tokens that are sorted by the expert that they go to are such rows. An index that takes whole rows says by its values which example each
row belongs to, however the index was computed. So the rows can be followed until they are back in their order. In between, only
operations that keep rows apart and products with the matrices of experts (`grouped_mm`) are followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .examples import SHARED, UNKNOWN, Call, Examples, Look, Routed, State, argument, tensors_in

__all__ = ["GROUPED", "Routes", "behind_transpose", "ends_of", "indexed", "place_after"]


def indexed(call: Call) -> State:
    """Return where the examples are in `t[index]`."""
    t, index = call.args[0], call.args[1]
    state = call.look(t)
    parts = _spelled_out(t, index if isinstance(index, tuple) else (index,))
    advanced = [p for p in parts if isinstance(p, (Tensor, list)) or type(p).__module__ == "numpy"]
    if not isinstance(state, Examples):  # a shared table, looked up for each example
        found = call.look(parts[0]) if len(parts) == 1 else UNKNOWN
        return found if isinstance(found, Examples) and t.dim() != 0 and parts[0].dtype not in _MASKS else UNKNOWN
    if advanced:
        return _advanced(state, parts, call.look)
    place = place_after(t, state.dim, parts, call.look.examples * state.inner)
    return UNKNOWN if place is None else Examples(place, state.inner)


_MASKS = (torch.bool, torch.uint8)


def _spelled_out(t: Tensor, parts: Sequence[Any]) -> Sequence[Any]:
    """Return an index with a list of numbers as a tensor, and beside it the slices that `...` stands for."""
    if not any(isinstance(p, list) for p in parts) or any(p is None for p in parts):
        return parts
    found: list[Any] = []
    for part in parts:
        if part is Ellipsis:
            found += [slice(None)] * (t.dim() - len(parts) + 1)
        else:
            found.append(torch.tensor(part) if isinstance(part, list) else part)
    return tuple(found)


def place_after(t: Tensor, dim: int, parts: Sequence[Any], size: int) -> int | None:
    """Return where a dimension is after indexing with integers, slices, None and `...`; None if it is not kept whole."""
    given = sum(p is not None and p is not Ellipsis for p in parts)
    before, after = 0, 0
    for part in (*parts, *(() if any(p is Ellipsis for p in parts) else (Ellipsis,))):
        if part is None:
            after += 1
            continue
        if part is Ellipsis:
            skipped = t.dim() - given
            if dim < before + skipped:
                return after + dim - before
            before, after = before + skipped, after + skipped
            continue
        if isinstance(part, bool) or not isinstance(part, (int, slice)):
            return None
        if before == dim:
            whole = isinstance(part, slice) and part.indices(size) == (0, size, 1)
            return after if whole else None
        before, after = before + 1, after + isinstance(part, slice)
    return None


def _advanced(state: Examples, parts: Sequence[Any], look: Look) -> State:
    """One index tensor for another dimension, the same for all examples; or each example's own row: x[arange(B), index]."""
    tensors = [p for p in parts if isinstance(p, Tensor)]
    if len(tensors) != sum(not isinstance(p, slice) for p in parts) or any(p.dtype in _MASKS for p in tensors):
        return UNKNOWN
    if len(tensors) == 1:
        (index,) = tensors
        place = parts.index(index) if len(parts) == 1 else [isinstance(p, Tensor) for p in parts].index(True)
        if look(index) is not SHARED:
            return UNKNOWN
        if place == state.dim:
            return Examples(place) if state.inner == 1 and _own_rows(index, look) else UNKNOWN
        slices = [p for p in parts if isinstance(p, slice)]
        if any(s != slice(None) for s in slices):
            return UNKNOWN
        return Examples(state.dim + (index.dim() - 1 if place < state.dim else 0), state.inner)
    if state != Examples(0) or parts[0] is not tensors[0] or len(tensors) != 2 or parts[1] is not tensors[1]:
        return UNKNOWN
    rows, index = tensors
    if not _own_rows(rows, look):
        return UNKNOWN
    placed = look(index)
    alright = placed is SHARED if index.dim() < rows.dim() else placed in (SHARED, Examples(0))
    return Examples(0) if alright and rows.dim() >= index.dim() else UNKNOWN


def _own_rows(index: Tensor, look: Look) -> bool:
    """Return whether an index takes the row of every example, in their order: `arange(B)[:, None]`."""
    if not index.dim() or index.shape[0] != look.examples or index.numel() != look.examples:
        return False
    return torch.equal(index.reshape(-1), torch.arange(look.examples, device=index.device))


# -- rows in another order -----------------------------------------------------------------------------------------------

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
