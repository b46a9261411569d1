"""An importance and the weights that it belongs to: what is covered, and what pruning would cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..errors import NamingError, ScaleError, near
from ..importance import Importance
from ..prune import scores
from ..storage.tensors import numel_of, shape_of
from .concentration import concentration

__all__ = ["SPARSITIES", "on_model"]

SPARSITIES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
"""Shares of the entries to remove, the cheapest first."""


def on_model(importance: Importance, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """How an importance fits a model, and what setting its cheapest weights to zero would add to the loss.

    The cost of an entry is ½θ²F. Where the importance can be brought to the scale of a Fisher, the sum over the removed
    entries is the increase of the mean loss that the second order predicts; otherwise only its share of the whole is known.

    Args:
        importance: Of this model.
        weights: Any mapping, in memory or in files; read in pieces.

    Raises:
        NamingError: No weight has an importance of its shape.
    """
    fitting = {name for name in importance if name in weights and shape_of(weights, name) == importance.shape(name)}
    if not fitting:
        first = next(iter(importance))
        raise NamingError(
            f"The importance does not belong to this model: no weight has the name and shape of {first!r} or of any other."
            f"{near(first, weights)}"
        )
    try:
        scaled, absolute = importance.as_fisher(), True
    except ScaleError:
        scaled, absolute = importance, False
    covered = scaled.restrict(fitting.__contains__)
    numel = sum(numel_of(covered, name) for name in covered)
    removed = [math.floor(sparsity * numel) for sparsity in SPARSITIES]
    kept, _ = concentration(scores(weights, covered), [0, *(numel - some for some in removed)])
    total = kept.pop(0).rest  # of none kept
    return {
        "tensors": len(weights),
        "entries": sum(numel_of(weights, name) for name in weights),
        "covered_tensors": len(fitting),
        "covered_entries": numel,
        "without_importance": [name for name in weights if name not in fitting],
        "without_weight": [name for name in importance if name not in fitting],
        "unit": scaled.provenance.unit if absolute else None,
        "pruning": {
            "sparsity": list(SPARSITIES),
            "removed": removed,
            "share": [held.rest / total for held in kept],
            "loss": [held.rest if absolute else math.nan for held in kept],
        },
    }
