"""The loss that a Hugging Face model computes itself, compared with ours on the first batch: above all, how labels are shifted."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .batches import Batch
from .likelihood import IGNORED, Objective

__all__ = ["compared_with_own"]

_TOLERANCE = 1e-2  # of the loss: half precision, and sums in another order


def compared_with_own(
    model: nn.Module, objective: Objective, batch: Batch, asked: int | None
) -> tuple[Objective, dict[str, Any]]:
    """Compare the mean loss of some examples with what the model returns as its own.

    Args:
        model: as it will be measured.
        objective: with the shift that was asked for or guessed.
        batch: the first one.
        asked: the shift that the user gave, or None.

    Returns:
        The objective, with another shift if that is what the model does and nobody asked for this one; and what to write down.
    """
    own = _own_loss(model, objective, batch)
    if own is None:
        return objective, {}
    logits, loss = own
    # A model that does not say whether it shifts is asked here.
    found = {
        shift: _mean(logits, batch.labels, shift) for shift in ((0, 1) if objective.likelihood == "tokens" else (0,))
    }
    near = [shift for shift, ours in found.items() if abs(ours - loss) <= _TOLERANCE * max(abs(loss), 1e-3)]
    shift = objective.shift or 0
    if shift in near:
        return objective, {}
    name = type(model).__name__
    if near and asked is None:
        warnings.warn(
            f"{name} computes its own loss with labels that lie {near[0]} behind the outputs, where {shift} was expected of its name: "
            f"shift={near[0]} is used.",
            stacklevel=4,
        )
        return dataclasses.replace(objective, shift=near[0]), {"shift": near[0]}
    reason = (
        f"it is {loss:.4g} with shift={near[0]}, and shift={shift} was asked for"
        if near
        else "router or auxiliary losses, label smoothing, class weights or another loss can be the reason"
    )
    warnings.warn(
        f"{name} returns the loss {loss:.4g} for the first examples, and the likelihood '{objective.likelihood}' that is measured gives "
        f"{found.get(shift, float('nan')):.4g}: {reason}.",
        stacklevel=4,
    )
    return objective, {"own_loss": loss, "measured_loss": found.get(shift)}


@torch.no_grad()
def _own_loss(model: nn.Module, objective: Objective, batch: Batch) -> tuple[Tensor, float] | None:
    config = getattr(model, "config", None)
    if objective.likelihood not in ("tokens", "categorical") or batch.labels is None or not hasattr(config, "to_dict"):
        return None
    if batch.args or batch.labels.is_floating_point() or any(m.training for m in model.modules()):
        return None
    try:
        output = model(**{**batch.kwargs, "labels": batch.labels})
    except Exception:  # it takes no labels, or computes no loss: then there is nothing to compare with
        return None
    loss, logits = getattr(output, "loss", None), getattr(output, "logits", None)
    if (
        not isinstance(loss, Tensor)
        or not isinstance(logits, Tensor)
        or loss.dim()
        or logits.shape[:-1] != batch.labels.shape
    ):
        return None
    return logits, float(loss)


def _mean(logits: Tensor, labels: Tensor | None, shift: int) -> float:
    if labels is None:
        return float("nan")
    if shift:
        logits, labels = logits[:, :-shift], labels[:, shift:]
    return float(F.cross_entropy(logits.float().flatten(0, -2), labels.flatten().long(), ignore_index=IGNORED))
