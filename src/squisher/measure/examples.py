"""Which rows of a tensor belong to which example, followed through the operations of a forward pass.

A per-example gradient read off a batch is right only if the rows that are taken for example n influence the loss of example n and no
other. That cannot be seen from shapes (a total that happens to be divisible says nothing), so it is followed structurally, in every
batch: the inputs are `Examples(0)`, and each operation that is known to keep examples apart says where they are in its output. What is
not known here, and whatever gathers, sorts or packs rows, makes the output `UNKNOWN`; the caller then takes the loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .rules import einsum_terms

__all__ = [
    "SHARED",
    "UNKNOWN",
    "Examples",
    "Look",
    "Other",
    "Routed",
    "State",
    "argument",
    "broadcasts",
    "place_after",
    "replaced",
    "state_after",
    "tensors_in",
    "why_unknown",
]


class Examples(NamedTuple):
    """Dimension `dim` has `inner` neighbouring rows for each example, in the order of the batch."""

    dim: int
    inner: int = 1


class Routed(NamedTuple):
    """Dimension `dim` has rows of examples in any order and number; which ones, `routing.Routes` knows by this number."""

    dim: int
    owner: int


class Other(NamedTuple):
    """Where there are no examples to follow."""

    kind: str


SHARED = Other("shared")
"""No row belongs to an example: parameters, buffers, constants, and what is made of them alone."""
UNKNOWN = Other("unknown")

State = Examples | Routed | Other


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors in nested lists, tuples and mappings, in order."""
    if isinstance(value, Tensor):
        return [value]
    found, left = [], [value]
    while left:
        item = left.pop()
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            left.extend(reversed(item))
        elif isinstance(item, dict):
            left.extend(reversed(item.values()))
    return found


def replaced(value: Any, instead: Mapping[int, Tensor]) -> Any:
    """Return arguments with other tensors in the place of some, by the `id` of those."""
    if not instead:
        return value
    if isinstance(value, Tensor):
        return instead.get(id(value), value)
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(replaced(v, instead) for v in value)
    if isinstance(value, dict):
        return {k: replaced(v, instead) for k, v in value.items()}
    return value


# -- the operations -----------------------------------------------------------------------------------------------------------

Placement = Callable[[str, tuple[Any, ...], dict[str, Any], Tensor, "Look"], State]
"""(name, args, kwargs, output, look) -> where the examples are in the output."""


class Look:
    """The states of the tensors of one call."""

    def __init__(self, states: dict[int, State], examples: int):
        self.states, self.examples = states, examples

    def __call__(self, value: Any) -> State:
        """Return where the examples are in an argument; what is no tensor is shared."""
        return self.states.get(id(value), SHARED) if isinstance(value, Tensor) else SHARED

    def fits(self, shape: Sequence[int], state: State) -> State:
        """Return the state if the shape has room for it, otherwise UNKNOWN."""
        if not isinstance(state, Examples):
            return state
        right = 0 <= state.dim < len(shape) and shape[state.dim] == self.examples * state.inner
        return state if right else UNKNOWN


def state_after(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, look: Look) -> State:
    """Return where the examples are in what an operation returned, given where they were in its arguments.

    Args:
        name: of `name_of`.
        args: of the call.
        kwargs: of the call.
        output: one of the tensors it returned.
        look: the states of the arguments.
    """
    rule = _PLACEMENTS.get(name)
    if rule is None:
        return UNKNOWN
    try:
        return look.fits(output.shape, rule(name, args, kwargs, output, look))
    except (
        TypeError,
        IndexError,
        ValueError,
        AttributeError,
        KeyError,
        RuntimeError,
    ):  # arguments in a form that is not known here
        return UNKNOWN


def why_unknown(name: str) -> str:
    """Return the reason why rows cannot be followed through an operation."""
    return (
        f"{name} moves or mixes the rows of examples"
        if name in _PLACEMENTS
        else f"{name} is an operation without a rule"
    )


def broadcasts(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], look: Look
) -> tuple[tuple[int, ...] | None, State]:
    """Return the shape that the arguments are broadcast to, and where the examples will be in it; (None, UNKNOWN) for other operations."""
    tensors = tensors_in((args, kwargs))
    rule = _PLACEMENTS.get(name)
    matrices = rule in (_matmul, _attention)
    if rule in (_pointwise, _where, _dropout):
        shapes = [tuple(t.shape) for t in tensors]
    elif rule is _matmul:
        if any(t.dim() < 2 for t in tensors):
            return None, UNKNOWN
        shapes = [(*t.shape[:-2], 1, 1) for t in tensors]
    elif rule is _attention:
        shapes, rule = [(*t.shape[:-2], 1, 1) for t in tensors], _pointwise
    else:
        return None, UNKNOWN
    try:
        shape = tuple(torch.broadcast_shapes(*shapes))
        state = rule(name, args, kwargs, torch.empty(shape, device="meta"), look)
        if matrices and isinstance(state, Examples) and state.dim >= len(shape) - 2:
            return None, UNKNOWN  # examples in the rows or columns of a matrix, which are not broadcast
        return shape, state
    except (RuntimeError, TypeError, IndexError, ValueError, AttributeError):
        return None, UNKNOWN


def argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], place: int, names: str | tuple[str, ...], default: Any
) -> Any:
    """Return an argument of a call, by its names or its place."""
    for name in (names,) if isinstance(names, str) else names:
        if name in kwargs:
            return kwargs[name]
    return args[place] if len(args) > place else default


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    found: Any = args[0] if args else kwargs.get("input", kwargs.get("tensor", kwargs.get("query")))
    if not isinstance(found, Tensor):
        raise TypeError("no tensor comes first")
    return found


def _first_alone(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, look: Look) -> State:
    """Casts: other tensors only say the type."""
    return look(_first(args, kwargs))


def _pointwise(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, look: Look) -> State:
    """Every entry of the output is made of the entries at its place, with the usual broadcasting."""
    found: State = SHARED
    for t in tensors_in((args, kwargs)):
        state = look(t)
        if isinstance(state, Examples):
            placed = Examples(state.dim + output.dim() - t.dim(), state.inner)
            if isinstance(found, Examples) and found != placed:
                return UNKNOWN
            found = placed
    return found


def _same_order(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, look: Look) -> State:
    """Reshapes: the entries stay in their order, so rows stay neighbours exactly if their number in memory is the same."""
    t = _first(args, kwargs)
    state = look(t)
    if not isinstance(state, Examples):
        return state
    before = math.prod(t.shape[: state.dim])
    block = state.inner * math.prod(t.shape[state.dim + 1 :])
    for dim in range(output.dim()):
        inner, rest = divmod(block, max(1, math.prod(output.shape[dim + 1 :])))
        if math.prod(output.shape[:dim]) == before and not rest and output.shape[dim] == look.examples * inner:
            return Examples(dim, inner)
    return UNKNOWN


def _permuted(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, look: Look) -> State:
    t = _first(args, kwargs)
    state = look(t)
    if not isinstance(state, Examples):
        return state
    n = t.dim()
    if name in ("get.mT", "get.mH", "adjoint"):
        order = [*range(n - 2), n - 1, n - 2]
    elif name in ("get.T", "get.H", "t", "numpy_T"):
        order = list(reversed(range(n)))
    elif name in ("transpose", "swapaxes", "swapdims"):
        a = argument(args, kwargs, 1, ("dim0", "axis0"), None) % n
        b = argument(args, kwargs, 2, ("dim1", "axis1"), None) % n
        order = list(range(n))
        order[a], order[b] = order[b], order[a]
    else:  # permute, movedim: ask a tensor without memory whose sizes all differ
        probe = torch.empty(tuple(range(2, 2 + n)), device="meta")
        moved = getattr(torch.Tensor, name)(probe, *args[1:], **{k: v for k, v in kwargs.items() if k != "input"})
        order = [size - 2 for size in moved.shape]
    return Examples(order.index(state.dim), state.inner)


def _dims(value: Any, n: int) -> list[int]:
    values = list(value) if isinstance(value, (tuple, list)) else [value]
    return [int(v) % n for v in values]


def _along(place: int, default: Any, names: tuple[str, ...] = ("dim", "axis", "dims")) -> Placement:
    """Operations along some dimensions, which they keep, drop or sum over: not along the examples'."""

    def rule(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, look: Look) -> State:
        t = _first(args, kwargs)
        state = look(t)
        if any(isinstance(look(o), Examples) for o in tensors_in((args[1:], kwargs)) if o is not t):
            return UNKNOWN
        if not isinstance(state, Examples):
            return state
        dim = argument(args, kwargs, place, names, default)
        if place == 1 and len(args) > 2 and isinstance(dim, int) and name in ("flip", "amax", "amin"):
            dim = args[1:]
        if isinstance(dim, Tensor) or dim is None or dim == ():
            return UNKNOWN
        dims = _dims(dim, t.dim())
        if state.dim in dims:
            return UNKNOWN
        dropped = 0 if output.dim() == t.dim() else sum(d < state.dim for d in dims)
        return Examples(state.dim - dropped, state.inner)

    return rule


def _renorm(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, look: Look) -> State:
    t = _first(args, kwargs)
    state, dim = look(t), argument(args, kwargs, 2, "dim", None) % t.dim()
    return (
        state if isinstance(state, Examples) and state.dim == dim else UNKNOWN
    )  # each slice of `dim` has its own norm


def _max(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, look: Look) -> State:
    other = argument(args, kwargs, 1, "other", None)
    rule = _pointwise if isinstance(other, Tensor) else _along(1, None)
    return rule(name, args, kwargs, output, look)


def _unfold(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, look: Look) -> State:
    t = _first(args, kwargs)
    if output.dim() == t.dim() + 1:  # Tensor.unfold(dim, size, step): the windows are a new last dimension
        return _along(1, None, ("dimension",))(name, args, kwargs, t, look)
    return _images(name, args, kwargs, output, look)


def _repeat(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, look: Look) -> State:
    t = _first(args, kwargs)
    state = look(t)
    if not isinstance(state, Examples):
        return state
    dim = state.dim + output.dim() - t.dim()
    # As many rows as before and nothing in front: the examples themselves are not repeated.
    return (
        Examples(dim, state.inner)
        if math.prod(output.shape[: dim + 1]) == math.prod(t.shape[: state.dim + 1])
        else UNKNOWN
    )


def _repeat_interleave(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, look: Look) -> State:
    t = _first(args, kwargs)
    state = look(t)
    times, dim = argument(args, kwargs, 1, "repeats", None), argument(args, kwargs, 2, "dim", None)
    if not isinstance(state, Examples) or not isinstance(times, int) or (dim is None and t.dim() != 1):
        return UNKNOWN
    return Examples(state.dim, state.inner * times) if (dim or 0) % t.dim() == state.dim else state


def _matmul(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, look: Look) -> State:
    left, right = args[0], argument(args, kwargs, 1, ("other", "mat2"), None)
    if name == "rmatmul":
        left, right = right, left
    a, b = look(left), look(right)
    n = output.dim()
    if left.dim() < 2 or right.dim() < 2:  # a vector: its only dimension is summed over
        if isinstance(a, Examples) and not isinstance(b, Examples) and right.dim() == 1 and a.dim < left.dim() - 1:
            return a
        return UNKNOWN
    if (isinstance(a, Examples) and a.dim == left.dim() - 1) or (isinstance(b, Examples) and b.dim == right.dim() - 2):
        return UNKNOWN
    places = [Examples(s.dim + n - t.dim(), s.inner) for s, t in ((a, left), (b, right)) if isinstance(s, Examples)]
    if len(places) == 2 and (places[0] != places[1] or places[0].dim >= n - 2):
        return UNKNOWN
    return places[0]


def _addmm(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, look: Look) -> State:
    factors = tuple(argument(args, kwargs, n, (f"batch{n}", f"mat{n}"), None) for n in (1, 2))
    product = _matmul("matmul", factors, {}, output, look)
    added = look(args[0])
    if isinstance(added, Examples):
        added = Examples(added.dim + output.dim() - args[0].dim(), added.inner)
        return product if product in (added, SHARED) else UNKNOWN
    return product


def _linear(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, look: Look) -> State:
    t = _first(args, kwargs)
    others = [o for o in tensors_in((args[1:], kwargs)) if o is not t]
    state = look(t)
    if (
        any(isinstance(look(o), Examples) for o in others)
        or not isinstance(state, Examples)
        or state.dim == t.dim() - 1
    ):
        return UNKNOWN
    return state


def _attention(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, look: Look) -> State:
    found: State = SHARED
    for t in tensors_in((args, kwargs)):
        state = look(t)
        if isinstance(state, Examples):
            placed = Examples(state.dim + output.dim() - t.dim(), state.inner)
            if placed.dim >= output.dim() - 2 or (isinstance(found, Examples) and found != placed):
                return UNKNOWN
            found = placed
    return found


def _einsum(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, look: Look) -> State:
    operands = tensors_in(args[1:])
    found = einsum_terms(args[0], operands)
    if found is None:
        return UNKNOWN
    terms, result = found
    letters = set()
    for term, t in zip(terms, operands, strict=True):
        state = look(t)
        if isinstance(state, Examples):
            letters.add((term[state.dim], state.inner))
            if term.count(term[state.dim]) > 1:
                return UNKNOWN
    if len(letters) != 1:
        return UNKNOWN
    ((letter, inner),) = letters
    return Examples(result.index(letter), inner)


def _images(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, look: Look) -> State:
    """Operations on (examples, channels, ...) that keep the first dimension."""
    t = _first(args, kwargs)
    state = look(t)
    others = [o for o in tensors_in((args[1:], kwargs)) if o is not t]
    if not isinstance(state, Examples) or state.dim or any(isinstance(look(o), Examples) for o in others):
        return UNKNOWN
    weight = argument(args, kwargs, 1, "weight", None)
    if name.startswith("conv") and (not isinstance(weight, Tensor) or t.dim() != weight.dim()):
        return UNKNOWN  # without a batch dimension
    return state


def _grid_sample(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, look: Look) -> State:
    states = {look(t) for t in tensors_in((args, kwargs))} - {SHARED}
    return states.pop() if len(states) == 1 and next(iter(states)) == Examples(0) else UNKNOWN


def _pad(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, look: Look) -> State:
    t = _first(args, kwargs)
    state = look(t)
    if not isinstance(state, Examples):
        return state
    sizes = argument(args, kwargs, 1, "pad", None)
    place = 2 * (t.dim() - 1 - state.dim)  # they begin with the last dimension
    return UNKNOWN if any(sizes[place : place + 2]) else state


def _complex(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, look: Look) -> State:
    """Pairs of reals in a last dimension as complex numbers, and back."""
    t = _first(args, kwargs)
    state = look(t)
    in_pairs = name == "view_as_complex" and isinstance(state, Examples) and state.dim == t.dim() - 1
    return UNKNOWN if in_pairs else state


def _batch_norm(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, look: Look) -> State:
    if argument(args, kwargs, 5, "training", False) or argument(args, kwargs, 1, "running_mean", None) is None:
        return UNKNOWN  # the statistics of the batch: examples are not apart
    return _images(name, args, kwargs, output, look)


def _layer_norm(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, look: Look) -> State:
    t = _first(args, kwargs)
    state = look(t)
    if any(isinstance(look(o), Examples) for o in tensors_in((args[1:], kwargs)) if o is not t):
        return UNKNOWN
    count = len(argument(args, kwargs, 1, "normalized_shape", ()))
    return state if isinstance(state, Examples) and state.dim < t.dim() - count else UNKNOWN


def _lookup(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, look: Look) -> State:
    if name == "embedding" and look(argument(args, kwargs, 1, "weight", None)) is not SHARED:
        return UNKNOWN
    return look(_first(args, kwargs))


def _joined(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, look: Look) -> State:
    tensors = list(tensors_in(argument(args, kwargs, 0, ("tensors", "arrays"), ())))
    tensors = [t for t in tensors if t.shape != (0,)]  # an empty list of numbers, to which a cache appends
    dim = (
        argument(args, kwargs, 1, ("dim", "axis"), {"vstack": 0, "hstack": 1, "dstack": 2}.get(name, 0)) % output.dim()
    )
    found = {look(t) for t in tensors} - {SHARED}
    if (
        len(found) != 1
        or not isinstance(state := found.pop(), Examples)
        or any(t.dim() != tensors[0].dim() for t in tensors)
    ):
        return UNKNOWN
    if name == "stack":
        return Examples(state.dim + (dim <= state.dim), state.inner)
    return state if dim != state.dim else UNKNOWN


def _gathered(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, look: Look) -> State:
    """Gather and scatter along a dimension that is not the examples'; all tensors have the same dimensions."""
    t = _first(args, kwargs)
    dim = argument(args, kwargs, 2 if name == "take_along_dim" else 1, "dim", None)
    tensors = tensors_in((args, kwargs))
    found = {look(o) for o in tensors} - {SHARED}
    if dim is None or len(found) != 1 or not isinstance(state := found.pop(), Examples) or dim % t.dim() == state.dim:
        return UNKNOWN
    # A shared index with fewer rows would take the first rows of the first examples: in their places still.
    return state if all(o.dim() == t.dim() for o in tensors if o.dim()) else UNKNOWN


def _index_select(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, look: Look) -> State:
    t = _first(args, kwargs)
    state, index = look(t), argument(args, kwargs, 2, "index", None)
    dim = argument(args, kwargs, 1, "dim", None) % t.dim()
    if state is SHARED and dim == 0:  # a table, looked up for each example
        return look(index)
    return state if isinstance(state, Examples) and state.dim != dim and look(index) is SHARED else UNKNOWN


def _new(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, look: Look) -> State:
    return SHARED  # the tensor only says which type and device


def _triangle(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, look: Look) -> State:
    t = _first(args, kwargs)
    state = look(t)
    return state if isinstance(state, Examples) and state.dim < t.dim() - 2 else UNKNOWN


def _loss(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, look: Look) -> State:
    if kwargs.get("reduction", "mean") != "none":
        return UNKNOWN
    if name in ("cross_entropy", "nll_loss"):
        states = {look(t) for t in (args[0], args[1])} - {SHARED}
        state = states.pop() if len(states) == 1 else UNKNOWN
        return state if isinstance(state, Examples) and state.dim == 0 and args[0].dim() > 1 else UNKNOWN
    return _pointwise(name, args, kwargs, output, look)


def _where(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, look: Look) -> State:
    return _pointwise(name, args, kwargs, output, look) if len(args) + len(kwargs) == 3 else UNKNOWN


def _dropout(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, look: Look) -> State:
    training = argument(args, kwargs, 2, ("training", "train"), True)
    chance = argument(args, kwargs, 1, "p", 0.5)
    return _pointwise(name, args, kwargs, output, look) if not training or not chance else UNKNOWN


def _indexed(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, look: Look) -> State:
    t, index = args[0], args[1]
    state = look(t)
    parts = _spelled_out(t, index if isinstance(index, tuple) else (index,))
    advanced = [p for p in parts if isinstance(p, (Tensor, list)) or type(p).__module__ == "numpy"]
    if not isinstance(state, Examples):  # a shared table, looked up for each example
        found = look(parts[0]) if len(parts) == 1 else UNKNOWN
        return found if isinstance(found, Examples) and t.dim() != 0 and parts[0].dtype not in _MASKS else UNKNOWN
    if advanced:
        return _advanced(t, state, parts, output, look)
    place = place_after(t, state.dim, parts, look.examples * state.inner)
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


def _advanced(t: Tensor, state: Examples, parts: Sequence[Any], output: Tensor, look: Look) -> State:
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


_POINTWISE = """
    abs absolute add sub subtract mul multiply div divide true_divide pow float_power square sqrt rsqrt exp exp2 expm1 log log2 log10
    log1p sin cos tan sinh cosh tanh asin acos atan atan2 arctan asinh acosh atanh sigmoid logsigmoid log_sigmoid softplus softsign
    relu relu6 leaky_relu elu selu celu gelu silu mish hardswish hardsigmoid hardtanh tanhshrink softshrink hardshrink threshold prelu
    clamp clip clamp_min clamp_max minimum maximum fmin fmax neg negative sign sgn floor ceil round trunc frac reciprocal lerp addcmul
    addcdiv masked_fill eq ne lt le gt ge greater less greater_equal less_equal not_equal logical_and logical_or logical_not
    logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor isnan isinf isfinite nan_to_num remainder fmod floor_divide erf erfc
    erfinv lgamma digamma sinc hypot xlogy logaddexp special_expit clone contiguous detach type float double half bfloat16
    int long bool byte short char cpu cuda data real imag conj resolve_conj requires_grad positive copysign heaviside deg2rad
    rad2deg copy fill zero complex polar angle get.data get.real get.imag op.and op.or op.xor op.invert op.neg op.abs op.eq op.ne op.lt op.le op.gt op.ge op.pos
    expand expand_as broadcast_to and or xor zeros_like ones_like full_like empty_like logit i0
"""


def _each(names: str, placement: Placement) -> dict[str, Placement]:
    return dict.fromkeys(names.split(), placement)


_PLACEMENTS: dict[str, Placement] = {
    **_each(_POINTWISE, _pointwise),
    **dict.fromkeys(("to", "type_as"), _first_alone),
    **_each("reshape view flatten unflatten unsqueeze squeeze reshape_as view_as ravel", _same_order),
    **_each("transpose swapaxes swapdims permute movedim moveaxis t get.T get.mT get.H get.mH adjoint", _permuted),
    **_each(
        "sum mean nansum nanmean amax amin prod logsumexp argmax argmin all any std var softmax log_softmax softmin cumsum cumprod "
        "cummax cummin logcumsumexp std_mean var_mean count_nonzero argsort flip unbind narrow select",
        _along(1, None),
    ),
    **dict.fromkeys(("max", "min"), _max),
    **dict.fromkeys(("sort", "glu", "median", "mode"), _along(1, -1)),
    **dict.fromkeys(("topk", "kthvalue"), _along(2, -1)),
    **dict.fromkeys(("chunk", "split", "tensor_split", "split_with_sizes"), _along(2, 0)),
    **dict.fromkeys(("norm", "roll"), _along(2, None)),
    "renorm": _renorm,
    "normalize": _along(2, 1),
    "vector_norm": _along(2, None),
    "linalg_vector_norm": _along(2, None),
    "diff": _along(2, -1),
    **_each("fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft", _along(2, -1)),
    **_each("fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2", _along(2, (-2, -1))),
    **_each("fft_fftn fft_ifftn fft_rfftn fft_irfftn", _along(2, None)),
    **_each("fft_fftshift fft_ifftshift", _along(1, None)),
    **_each("view_as_complex view_as_real", _complex),
    "unfold": _unfold,
    **dict.fromkeys(("repeat", "tile"), _repeat),
    "repeat_interleave": _repeat_interleave,
    **dict.fromkeys(("matmul", "mm", "bmm", "rmatmul"), _matmul),
    **dict.fromkeys(("addmm", "baddbmm"), _addmm),
    "linear": _linear,
    "gemm_4bit.default": _linear,  # of bitsandbytes: frozen weights, dequantised inside
    "scaled_dot_product_attention": _attention,
    **_each("cdist inverse matrix_exp linalg_inv linalg_solve linalg_solve_triangular linalg_cholesky", _attention),
    "einsum": _einsum,
    **_each(
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d max_pool1d max_pool2d max_pool3d avg_pool1d "
        "avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d "
        "adaptive_max_pool2d adaptive_max_pool3d lp_pool1d lp_pool2d interpolate upsample pixel_shuffle pixel_unshuffle "
        "channel_shuffle fold group_norm instance_norm local_response_norm max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices",
        _images,
    ),
    "grid_sample": _grid_sample,
    "pad": _pad,
    "batch_norm": _batch_norm,
    **dict.fromkeys(("layer_norm", "rms_norm"), _layer_norm),
    **dict.fromkeys(("embedding", "one_hot"), _lookup),
    **_each("cat concat concatenate stack", _joined),
    **_each("gather scatter scatter_add take_along_dim", _gathered),
    "index_select": _index_select,
    **_each("new_empty new_zeros new_ones new_full", _new),
    **dict.fromkeys(("tril", "triu"), _triangle),
    **_each(
        "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss "
        "binary_cross_entropy_with_logits kl_div",
        _loss,
    ),
    "where": _where,
    **_each("dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout", _dropout),
    "getitem": _indexed,
}
