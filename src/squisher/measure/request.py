"""What the user asked for, checked, and completed with what the model says about itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..errors import SquisherError, near
from .likelihood import KINDS, LABELS, Objective

__all__ = ["objective_for"]


def objective_for(
    model: nn.Module,
    likelihood: str | Callable[[nn.Module, Any], Tensor] = "auto",
    labels: str = "data",
    per: str = "example",
    unit: str | None = None,
    draws: int = 1,
    seed: int = 0,
    shift: int | None = None,
) -> Objective:
    """Check what the user asked for, and fill in what the model says about itself.

    Args:
        model: asked for its Hugging Face configuration, if it has one.
        likelihood: a kind, "auto", or a function.
        labels: "data", "sampled" or "exact".
        per: "example" or "batch".
        unit: "example", "sequence" or "token"; None for the likelihood's own.
        draws: how many sampled labels for each example.
        seed: of sampled labels.
        shift: how far labels lie behind outputs; None asks the model.

    Returns:
        The objective.

    Raises:
        SquisherError: for anything unknown or refused.
    """
    if isinstance(likelihood, nn.Module):
        named = {"MSELoss": "gaussian", "BCEWithLogitsLoss": "bernoulli", "CrossEntropyLoss": "categorical"}
        better = named.get(type(likelihood).__name__)
        raise SquisherError(
            f"likelihood is a module ({type(likelihood).__name__}), which knows neither the model nor the batch. "
            + (f"Use likelihood={better!r}" if better else "Use one of the named likelihoods")
            + ", or a function (model, batch) -> losses, one per example."
        )
    if not callable(likelihood):
        _one_of("likelihood", likelihood, ("auto", *KINDS))
    _one_of("labels", labels, LABELS)
    _one_of("per", per, ("example", "batch"))
    if callable(likelihood):
        if labels != "data":
            raise SquisherError(f"A function as likelihood knows its own labels; labels={labels!r} needs a named one.")
        kind: str | Callable[[nn.Module, Any], Tensor] = likelihood
    else:
        kind = likelihood if likelihood != "auto" else _kind_of(model)
    if kind == "tokens" and labels == "exact":
        raise SquisherError(
            "labels='exact' is not done for tokens (one backward pass per position and token of the vocabulary). Use "
            "labels='sampled': it estimates the same Fisher without bias."
        )
    if per == "batch" and labels == "exact":
        raise SquisherError("per='batch' with labels='exact' has no meaning; use labels='sampled'.")
    units = ("sequence", "token") if kind == "tokens" else ("example",)
    unit = units[0] if unit is None else unit
    if unit not in units:
        raise SquisherError(
            f"unit={unit!r} does not fit the likelihood {kind if isinstance(kind, str) else 'function'!r}; expected "
            f"{' or '.join(map(repr, units))}."
        )
    if per == "batch" and unit == "token":
        raise SquisherError("per='batch' squares the gradient of a whole batch; unit='token' has no meaning there.")
    if not isinstance(draws, int) or draws < 1 or (draws > 1 and labels != "sampled"):
        raise SquisherError(
            f"draws={draws!r} with labels={labels!r}: expected a positive number, above 1 only with labels='sampled'."
        )
    return Objective(kind, labels, unit, draws, seed, _shift_of(model) if shift is None else shift)


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise SquisherError(
            f"{name}={value!r} is not known; expected {', '.join(map(repr, allowed))}.{near(str(value), allowed)}"
        )


def _loss_type(model: nn.Module) -> str:
    return str(getattr(model, "loss_type", None) or type(model).__name__)


def _kind_of(model: nn.Module) -> str:
    """Return the likelihood that a Hugging Face model is trained with; categorical for anything else."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return "categorical"
    problem = getattr(config, "problem_type", None)
    if problem in ("regression", "multi_label_classification"):
        return "gaussian" if problem == "regression" else "bernoulli"
    name = type(model).__name__
    if "ForSequenceClassification" in name and getattr(config, "num_labels", 2) == 1:
        return "gaussian"
    marks = ("CausalLM", "LMHead", "MaskedLM", "ForConditionalGeneration", "ForPreTraining", "Seq2SeqLM")
    return "tokens" if any(mark in name for mark in marks) else "categorical"


def _shift_of(model: nn.Module) -> int | None:
    """1 where output t is about label t + 1, 0 where it is about label t, None where the model does not say."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return None
    if getattr(config, "is_encoder_decoder", False):
        return 0
    names = (type(model).__name__, _loss_type(model))
    causal = any(mark in name for name in names for mark in ("CausalLM", "LMHead", "ForConditionalGeneration"))
    return int(causal and "MaskedLM" not in type(model).__name__)
