"""Where the examples are after an operation: a placement for each one that is known to keep them apart.

What is not in the table, and whatever gathers, sorts or packs rows, makes the output `UNKNOWN`; the caller then takes the loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .examples import SHARED, UNKNOWN, Call, Examples, Look, Routed, State, tensors_in
from .indexing import GROUPED, indexed
from .rules import einsum_terms

__all__ = ["broadcasts", "reshapes", "routed_state_after", "state_after", "why_unknown"]

Placement = Callable[[Call], State]
_UNKNOWN_FORMS = (TypeError, IndexError, ValueError, AttributeError, KeyError, RuntimeError)
"""What arguments in a form that is not known here lead to."""


def state_after(call: Call) -> State:
    """Return where the examples are in what an operation returned, given where they were in its arguments."""
    placement = _PLACEMENTS.get(call.name)
    if placement is None:
        return UNKNOWN
    try:
        return call.look.fits(call.output.shape, placement(call))
    except _UNKNOWN_FORMS:
        return UNKNOWN


def routed_state_after(call: Call, owners: list[Tensor]) -> State:
    """Return the state of the output of an operation on `Routed` rows: as if each row were an example, if it keeps rows apart.

    Args:
        call: the operation.
        owners: for each number of `Routed.owner`, the example of every row.
    """
    states = call.look.states
    if call.name in GROUPED:
        rows = states.get(id(call.args[0]))
        return rows if isinstance(rows, Routed) else UNKNOWN
    found = {s.owner for s in states.values() if isinstance(s, Routed)}
    if len(found) != 1 or any(s is UNKNOWN or isinstance(s, Examples) for s in states.values()):
        return UNKNOWN
    (owner,) = found
    single: dict[int, State] = {key: Examples(s.dim) if isinstance(s, Routed) else s for key, s in states.items()}
    after = state_after(replace(call, look=Look(single, len(owners[owner]))))
    return Routed(after.dim, owner) if isinstance(after, Examples) and after.inner == 1 else UNKNOWN


def why_unknown(name: str) -> str:
    """Return the reason why rows cannot be followed through an operation."""
    known = name in _PLACEMENTS
    return f"{name} moves or mixes the rows of examples" if known else f"{name} is an operation without a rule"


def reshapes(name: str) -> bool:
    """Return whether an operation leaves all entries as they are and in their order."""
    return _PLACEMENTS.get(name) is _same_order


def broadcasts(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], look: Look
) -> tuple[tuple[int, ...] | None, State]:
    """Return the shape that the arguments are broadcast to, and where the examples will be in it; (None, UNKNOWN) for other operations."""
    placement, tensors = _PLACEMENTS.get(name), tensors_in((args, kwargs))
    matrices = placement in (_matmul, _attention)
    if placement in (_pointwise, _where, _dropout):
        shapes = [tuple(t.shape) for t in tensors]
    elif matrices and all(t.dim() >= 2 for t in tensors):
        shapes = [(*t.shape[:-2], 1, 1) for t in tensors]
    else:
        return None, UNKNOWN
    try:
        shape = tuple(torch.broadcast_shapes(*shapes))
        call = Call(name, args, kwargs, tensors, look, torch.empty(shape, device="meta"))
        state = _matmul(call) if placement is _matmul else _pointwise(call)
    except _UNKNOWN_FORMS:
        return None, UNKNOWN
    if matrices and isinstance(state, Examples) and state.dim >= len(shape) - 2:
        return None, UNKNOWN  # examples in the rows or columns of a matrix, which are not broadcast
    return shape, state


def _pointwise(call: Call) -> State:
    """Every entry of the output is made of the entries at its place, with the usual broadcasting."""
    found: State = SHARED
    for t in call.tensors:
        state = call.look(t)
        if isinstance(state, Examples):
            placed = Examples(state.dim + call.output.dim() - t.dim(), state.inner)
            if isinstance(found, Examples) and found != placed:
                return UNKNOWN
            found = placed
    return found


def _same_order(call: Call) -> State:
    """Reshapes: the entries stay in their order, so rows stay neighbours exactly if their number in memory is the same."""
    t, state = call.first, call.state
    if not isinstance(state, Examples):
        return state
    before = math.prod(t.shape[: state.dim])
    block = state.inner * math.prod(t.shape[state.dim + 1 :])
    for dim in range(call.output.dim()):
        inner, rest = divmod(block, max(1, math.prod(call.output.shape[dim + 1 :])))
        if (
            math.prod(call.output.shape[:dim]) == before
            and not rest
            and call.output.shape[dim] == call.look.examples * inner
        ):
            return Examples(dim, inner)
    return UNKNOWN


def _permuted(call: Call) -> State:
    t, state = call.first, call.state
    if not isinstance(state, Examples):
        return state
    n = t.dim()
    if call.name in ("get.mT", "get.mH", "adjoint"):
        order = [*range(n - 2), n - 1, n - 2]
    elif call.name in ("get.T", "get.H", "t", "numpy_T"):
        order = list(reversed(range(n)))
    elif call.name in ("transpose", "swapaxes", "swapdims"):
        a = call.argument(1, ("dim0", "axis0"), None) % n
        b = call.argument(2, ("dim1", "axis1"), None) % n
        order = list(range(n))
        order[a], order[b] = order[b], order[a]
    else:  # permute, movedim: ask a tensor without memory whose sizes all differ
        probe = torch.empty(tuple(range(2, 2 + n)), device="meta")
        moved = getattr(torch.Tensor, call.name)(
            probe, *call.args[1:], **{k: v for k, v in call.kwargs.items() if k != "input"}
        )
        order = [size - 2 for size in moved.shape]
    return Examples(order.index(state.dim), state.inner)


def _dims(value: Any, n: int) -> list[int]:
    values = list(value) if isinstance(value, (tuple, list)) else [value]
    return [int(v) % n for v in values]


def _along(place: int, default: Any, names: tuple[str, ...] = ("dim", "axis", "dims")) -> Placement:
    """Operations along some dimensions, which they keep, drop or sum over: not along the examples'."""

    def rule(call: Call) -> State:
        t, state = call.first, call.state
        if not call.alone:
            return UNKNOWN
        if not isinstance(state, Examples):
            return state
        dim = call.argument(place, names, default)
        if place == 1 and len(call.args) > 2 and isinstance(dim, int) and call.name in ("flip", "amax", "amin"):
            dim = call.args[1:]
        if isinstance(dim, Tensor) or dim is None or dim == ():
            return UNKNOWN
        dims = _dims(dim, t.dim())
        if state.dim in dims:
            return UNKNOWN
        dropped = 0 if call.output.dim() == t.dim() else sum(d < state.dim for d in dims)
        return Examples(state.dim - dropped, state.inner)

    return rule


def _renorm(call: Call) -> State:
    t, state = call.first, call.state
    dim = call.argument(2, "dim", None) % t.dim()  # each slice of it has its own norm
    return state if isinstance(state, Examples) and state.dim == dim else UNKNOWN


def _max(call: Call) -> State:
    other = call.argument(1, "other", None)
    rule = _pointwise if isinstance(other, Tensor) else _along(1, None)
    return rule(call)


def _unfold(call: Call) -> State:
    t = call.first
    if call.output.dim() == t.dim() + 1:  # Tensor.unfold(dim, size, step): the windows are a new last dimension
        return _along(1, None, ("dimension",))(replace(call, output=t))
    return _images(call)


def _repeat(call: Call) -> State:
    t, state = call.first, call.state
    if not isinstance(state, Examples):
        return state
    dim = state.dim + call.output.dim() - t.dim()
    # As many rows as before and nothing in front: the examples themselves are not repeated.
    same = math.prod(call.output.shape[: dim + 1]) == math.prod(t.shape[: state.dim + 1])
    return Examples(dim, state.inner) if same else UNKNOWN


def _repeat_interleave(call: Call) -> State:
    t, state = call.first, call.state
    times, dim = call.argument(1, "repeats", None), call.argument(2, "dim", None)
    if not isinstance(state, Examples) or not isinstance(times, int) or (dim is None and t.dim() != 1):
        return UNKNOWN
    return Examples(state.dim, state.inner * times) if (dim or 0) % t.dim() == state.dim else state


def _matmul(call: Call) -> State:
    left, right = call.args[0], call.argument(1, ("other", "mat2"), None)
    if call.name == "rmatmul":
        left, right = right, left
    a, b = call.look(left), call.look(right)
    n = call.output.dim()
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


def _addmm(call: Call) -> State:
    factors = tuple(call.argument(n, (f"batch{n}", f"mat{n}"), None) for n in (1, 2))
    product = _matmul(replace(call, name="matmul", args=factors, kwargs={}))
    added = call.look(call.args[0])
    if isinstance(added, Examples):
        added = Examples(added.dim + call.output.dim() - call.args[0].dim(), added.inner)
        return product if product in (added, SHARED) else UNKNOWN
    return product


def _linear(call: Call) -> State:
    t, state = call.first, call.state
    return state if call.alone and isinstance(state, Examples) and state.dim != t.dim() - 1 else UNKNOWN


def _attention(call: Call) -> State:
    """Products of matrices, which are the last two dimensions, in any number; what comes before is broadcast."""
    found = _pointwise(call)
    return UNKNOWN if isinstance(found, Examples) and found.dim >= call.output.dim() - 2 else found


def _einsum(call: Call) -> State:
    operands = tensors_in(call.args[1:])
    found = einsum_terms(call.args[0], operands)
    if found is None:
        return UNKNOWN
    terms, result = found
    letters = set()
    for term, t in zip(terms, operands, strict=True):
        state = call.look(t)
        if isinstance(state, Examples):
            letters.add((term[state.dim], state.inner))
            if term.count(term[state.dim]) > 1:
                return UNKNOWN
    if len(letters) != 1:
        return UNKNOWN
    ((letter, inner),) = letters
    return Examples(result.index(letter), inner)


def _images(call: Call) -> State:
    """Operations on (examples, channels, ...) that keep the first dimension."""
    t, state = call.first, call.state
    if not isinstance(state, Examples) or state.dim or not call.alone:
        return UNKNOWN
    weight = call.argument(1, "weight", None)
    if call.name.startswith("conv") and (not isinstance(weight, Tensor) or t.dim() != weight.dim()):
        return UNKNOWN  # without a batch dimension
    return state


def _grid_sample(call: Call) -> State:
    return Examples(0) if {call.look(t) for t in call.tensors} - {SHARED} == {Examples(0)} else UNKNOWN


def _pad(call: Call) -> State:
    t, state = call.first, call.state
    if not isinstance(state, Examples):
        return state
    sizes = call.argument(1, "pad", None)
    place = 2 * (t.dim() - 1 - state.dim)  # they begin with the last dimension
    return UNKNOWN if any(sizes[place : place + 2]) else state


def _complex(call: Call) -> State:
    """Pairs of reals in a last dimension as complex numbers, and back."""
    t, state = call.first, call.state
    in_pairs = call.name == "view_as_complex" and isinstance(state, Examples) and state.dim == t.dim() - 1
    return UNKNOWN if in_pairs else state


def _batch_norm(call: Call) -> State:
    if call.argument(5, "training", False) or call.argument(1, "running_mean", None) is None:
        return UNKNOWN  # the statistics of the batch: examples are not apart
    return _images(call)


def _layer_norm(call: Call) -> State:
    t, state = call.first, call.state
    if not call.alone:
        return UNKNOWN
    count = len(call.argument(1, "normalized_shape", ()))
    return state if isinstance(state, Examples) and state.dim < t.dim() - count else UNKNOWN


def _lookup(call: Call) -> State:
    if call.name == "embedding" and call.look(call.argument(1, "weight", None)) is not SHARED:
        return UNKNOWN
    return call.state


def _joined(call: Call) -> State:
    tensors = tensors_in(call.argument(0, ("tensors", "arrays"), ()))
    tensors = [t for t in tensors if t.shape != (0,)]  # an empty list of numbers, to which a cache appends
    dim = call.argument(1, ("dim", "axis"), 0) % call.output.dim()
    found = {call.look(t) for t in tensors} - {SHARED}
    if (
        len(found) != 1
        or not isinstance(state := found.pop(), Examples)
        or any(t.dim() != tensors[0].dim() for t in tensors)
    ):
        return UNKNOWN
    if call.name == "stack":
        return Examples(state.dim + (dim <= state.dim), state.inner)
    return state if dim != state.dim else UNKNOWN


def _gathered(call: Call) -> State:
    """Gather and scatter along a dimension that is not the examples'; all tensors have the same dimensions."""
    t = call.first
    dim = call.argument(2 if call.name == "take_along_dim" else 1, "dim", None)
    tensors = call.tensors
    found = {call.look(o) for o in tensors} - {SHARED}
    if dim is None or len(found) != 1 or not isinstance(state := found.pop(), Examples) or dim % t.dim() == state.dim:
        return UNKNOWN
    # A shared index with fewer rows would take the first rows of the first examples: in their places still.
    return state if all(o.dim() == t.dim() for o in tensors if o.dim()) else UNKNOWN


def _index_select(call: Call) -> State:
    state, index = call.state, call.argument(2, "index", None)
    dim = call.argument(1, "dim", None) % call.first.dim()
    if state is SHARED and dim == 0:  # a table, looked up for each example
        return call.look(index)
    return state if isinstance(state, Examples) and state.dim != dim and call.look(index) is SHARED else UNKNOWN


def _triangle(call: Call) -> State:
    state = call.state
    return state if isinstance(state, Examples) and state.dim < call.first.dim() - 2 else UNKNOWN


def _loss(call: Call) -> State:
    if call.kwargs.get("reduction", "mean") != "none":
        return UNKNOWN
    if call.name in ("cross_entropy", "nll_loss"):
        states = {call.look(t) for t in (call.args[0], call.args[1])} - {SHARED}
        state = states.pop() if len(states) == 1 else UNKNOWN
        return state if isinstance(state, Examples) and state.dim == 0 and call.args[0].dim() > 1 else UNKNOWN
    return _pointwise(call)


def _where(call: Call) -> State:
    return _pointwise(call) if len(call.args) + len(call.kwargs) == 3 else UNKNOWN


def _dropout(call: Call) -> State:
    training = call.argument(2, ("training", "train"), True)
    chance = call.argument(1, "p", 0.5)
    return _pointwise(call) if not training or not chance else UNKNOWN


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
    expand expand_as broadcast_to broadcast_tensors and or xor zeros_like ones_like full_like empty_like logit i0
"""


def _each(names: str, placement: Placement) -> dict[str, Placement]:
    return dict.fromkeys(names.split(), placement)


_PLACEMENTS: dict[str, Placement] = {
    **_each(_POINTWISE, _pointwise),
    **_each("to type_as", lambda call: call.state),  # another tensor only says which type and device
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
    **_each("new_empty new_zeros new_ones new_full", lambda _: SHARED),  # the tensor only says which type and device
    **dict.fromkeys(("tril", "triu"), _triangle),
    **_each(
        "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss "
        "binary_cross_entropy_with_logits kl_div poisson_nll_loss gaussian_nll_loss",
        _loss,
    ),
    "where": _where,
    **_each("dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout", _dropout),
    "getitem": indexed,
}
