"""How a loss goes from the examples to one number: the operations that sum over them, and by which factor."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..examples import Examples

__all__ = ["BY_CLASS", "BY_ENTRY", "REDUCTIONS", "counted_in", "factor_of"]

BY_CLASS = {"cross_entropy", "nll_loss"}
BY_ENTRY = {
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "poisson_nll_loss", "gaussian_nll_loss"),
}
_DIVIDED_BY_WEIGHT = {"mse_loss", "l1_loss", "huber_loss"}
"""Losses whose mean with a weight is divided by the sum of the weights, or not, as the version of torch has it."""
REDUCTIONS = {"sum", "mean", *BY_CLASS, *BY_ENTRY}
"""Names (`name_of`) of the operations that are known."""


def factor_of(name: str, state: Examples, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """Return the factor c of an operation that gives c · Σ of the entries over all examples; None for any other operation.

    Args:
        name: One of `REDUCTIONS`.
        state: Where the examples are in the first argument.
        args: Of the call.
        kwargs: Of the call.
    """
    t: Tensor = args[0] if args else kwargs["input"]
    if name in ("sum", "mean"):
        return _of_sum(name, t, state, args, kwargs)
    reduction = kwargs.get("reduction", "mean")
    old = any(kwargs.get(key) is not None for key in ("size_average", "reduce"))
    if reduction == "none" or old or state.dim or (name in BY_CLASS and t.dim() < 2):
        return None
    if reduction == "sum":
        return 1.0
    if reduction == "batchmean":
        return 1.0 / t.shape[0]
    target: Tensor = args[1] if len(args) > 1 else kwargs["target"]
    if name in _DIVIDED_BY_WEIGHT and kwargs.get("weight") is not None:
        return None
    if name in BY_ENTRY:
        return 1.0 / max(1, math.prod(torch.broadcast_shapes(t.shape, target.shape)))
    return _of_classes(t, target, args, kwargs)


def counted_in(name: str, examples: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return which examples count in a loss: all, except those whose labels a loss over classes ignores."""
    target = args[1] if len(args) > 1 else kwargs.get("target")
    if name not in BY_CLASS or not isinstance(target, Tensor) or target.is_floating_point():
        return torch.ones(examples, dtype=torch.bool)
    return (target != _ignored(args, kwargs)).reshape(examples, -1).any(1).cpu()


def _ignored(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return int(kwargs.get("ignore_index", args[4] if len(args) > 4 else -100))


def _of_sum(name: str, t: Tensor, state: Examples, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
    if isinstance(dim, torch.dtype) or dim is None or dim == ():
        dims = list(range(t.dim()))
    else:
        dims = [int(d) % t.dim() for d in (dim if isinstance(dim, (tuple, list)) else (dim,))]
    if state.dim not in dims:
        return None
    return 1.0 if name == "sum" else 1.0 / max(1, math.prod(t.shape[d] for d in dims))


def _of_classes(t: Tensor, target: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    weight = kwargs.get("weight", args[2] if len(args) > 2 else None)
    if target.is_floating_point():
        return t.shape[1] / t.numel()
    counted = target != _ignored(args, kwargs)
    total = counted.sum() if weight is None else weight.detach()[target[counted]].sum()
    return 1.0 / float(total) if float(total) else 0.0
