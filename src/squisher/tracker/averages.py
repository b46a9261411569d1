"""The arithmetic of the average: v ← β₂·v + (1 − β₂)·g², for many tensors at once.

Dense tensors go through torch's multi-tensor operations, one call for all of a device and dtype, with the operations that torch's
Adam uses; sharded tensors (DTensor) through elementwise operations only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["all_finite", "average_squares_"]

GROUP = 1 << 24


def average_squares_(values: Sequence[Tensor], gradients: Sequence[Tensor], beta2: float, scale: float = 1.0) -> None:
    """Update v ← β₂·v + (1 − β₂)·(g / scale)² in place, computed in the dtype of v.

    Args:
        values: The averages, all of one dtype, float32 or float64.
        gradients: One for each value, of its shape and on its device, of any real dtype. Sparse ones are coalesced.
        beta2: The decay.
        scale: A factor that the gradients still carry.
    """
    buckets: dict[tuple[object, ...], tuple[list[Tensor], list[Tensor]]] = {}
    for value, gradient in zip(values, gradients, strict=True):
        if gradient.is_sparse:
            squares = gradient.values().to(value.dtype).div(scale).square()
            squared = torch.sparse_coo_tensor(gradient.indices(), squares, gradient.shape, check_invariants=False)
            value.mul_(beta2).add_(squared, alpha=1 - beta2)
        else:
            bucket = buckets.setdefault(_kind(gradient), ([], []))
            bucket[0].append(value)
            bucket[1].append(gradient)
    for same_values, same_gradients in buckets.values():
        dtype = same_values[0].dtype
        if same_gradients[0].dtype == dtype and scale == 1.0:
            _average_dense_(same_values, same_gradients, beta2)
            continue
        for some_values, some_gradients in _groups(same_values, same_gradients):
            wide = [gradient.to(dtype) for gradient in some_gradients]
            if scale != 1.0:
                wide = [gradient / scale for gradient in wide]
            _average_dense_(some_values, wide, beta2)


def all_finite(gradients: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Return whether the squared norm of all gradients together is finite, that is, whether they can be averaged in `dtype`.

    One pass over the gradients and one wait for the device; for sharded tensors all processes get the same answer.

    Args:
        gradients: Dense or coalesced sparse tensors of any real dtype.
        dtype: The dtype of the averages.
    """
    buckets: dict[tuple[object, ...], list[Tensor]] = {}
    for gradient in gradients:
        entries = gradient.values() if gradient.is_sparse else gradient
        buckets.setdefault(_kind(entries), []).append(entries)
    totals = []
    for bucket in buckets.values():
        wide = torch.promote_types(bucket[0].dtype, dtype)
        norms = list(torch._foreach_norm(bucket, 2, dtype=wide))
        total: Any = torch.linalg.vector_norm(torch.stack(norms)).to(dtype)
        totals.append(total.full_tensor() if hasattr(total, "full_tensor") else total)
    return not totals or bool(torch.stack([total.to(totals[0].device) for total in totals]).square().isfinite().all())


def _kind(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that is equal for tensors that one multi-tensor operation can take; sharded tensors need the same mesh."""
    return tensor.device, tensor.dtype, type(tensor), getattr(tensor, "device_mesh", None)


def _average_dense_(values: list[Tensor], gradients: list[Tensor], beta2: float) -> None:
    torch._foreach_mul_(values, beta2)
    torch._foreach_addcmul_(values, gradients, gradients, 1 - beta2)


def _groups(values: list[Tensor], gradients: list[Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield the same pairs in groups of at most GROUP elements; a larger tensor is taken in blocks of rows."""
    some_values: list[Tensor] = []
    some_gradients: list[Tensor] = []
    size = 0
    for value, gradient in zip(values, gradients, strict=True):
        parts = 1
        if gradient.dim() and not hasattr(gradient, "device_mesh"):  # slicing a sharded tensor would gather it
            parts = max(1, min(gradient.shape[0], math.ceil(gradient.numel() / GROUP)))
        blocks = [(value, gradient)] if parts == 1 else zip(value.chunk(parts), gradient.chunk(parts), strict=True)
        for some_value, some_gradient in blocks:
            if some_values and size + some_gradient.numel() > GROUP:
                yield some_values, some_gradients
                some_values, some_gradients, size = [], [], 0
            some_values.append(some_value)
            some_gradients.append(some_gradient)
            size += some_gradient.numel()
    if some_values:
        yield some_values, some_gradients
