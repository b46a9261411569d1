"""The five methods: what each weighs a model's tensors with."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..errors import SquisherError
from .arguments import (
    Floor,
    Weights,
    as_dtype,
    as_floors,
    as_many,
    as_number,
    as_numbers,
    as_work,
    taking_part,
)
from .importances import graded, matched, tied_in
from .lazy import Merged
from .names import plan
from .rules import Fisher, Grafting, Matching, Mean

__all__ = ["average", "fisher", "ota", "task_arithmetic", "ubgm"]


def average(
    models: Sequence[Weights],
    coefficients: Sequence[float] | None = None,
    *,
    exclude: str | None = None,
    dtype: torch.dtype | str | None = None,
    precision: str = "float32",
) -> Merged:
    """Return the weighted mean of models: Σ cθ / Σ c.

    Args:
        models: Two or more mappings of weights.
        coefficients: One a model, not negative; 0 drops the model. Equal ones by default.
        exclude: A regular expression; what it finds is kept as each model has it.
        dtype: The type of the result; by default the first model's.
        precision: What is computed in: `float32` or `float64`.

    Raises:
        SquisherError: The models do not belong together, or an argument is not one that can be.
    """
    used, numbers = taking_part(models, coefficients)
    models = [models[k] for k in used]
    rule = Mean(models, [c / math.fsum(numbers) for c in numbers[1:]], as_work(precision))
    return Merged(models, plan(models, exclude, numbers=used), rule, dtype=as_dtype(dtype))


def task_arithmetic(
    base: Weights,
    models: Sequence[Weights],
    coefficients: Sequence[float] | None = None,
    *,
    exclude: str | None = None,
    dtype: torch.dtype | str | None = None,
    precision: str = "float32",
) -> Merged:
    """Return the base and what each model changed of it: θ₀ + Σ α(θ − θ₀).

    Args:
        base: The weights that the models started from.
        models: One or more mappings of weights.
        coefficients: One α a model, negative ones too; they are not divided by anything. 1 by default.
        exclude: A regular expression; what it finds is kept as each model has it.
        dtype: The type of the result; by default the first model's.
        precision: What is computed in: `float32` or `float64`.

    Raises:
        SquisherError: The models do not belong together, or an argument is not one that can be.
    """
    used, numbers = taking_part(models, coefficients, base, negative=True)
    models = [models[k] for k in used]
    everyone = [*models, base]
    rule = Mean([base, *models], numbers, as_work(precision))
    return Merged(everyone, plan(everyone, exclude, numbers=used), rule, dtype=as_dtype(dtype))


def fisher(
    models: Sequence[Weights],
    importances: Sequence[Weights],
    coefficients: Sequence[float] | None = None,
    scale: str = "auto",
    normalize: str | None = None,
    floor: Floor = "relative",
    missing: str = "error",
    *,
    exclude: str | None = None,
    dtype: torch.dtype | str | None = None,
    precision: str = "float32",
) -> Merged:
    """Every entry is the mean of the models' entries, weighted with their importances: Σ cFθ / Σ cF.

    Args:
        models: Two or more mappings of weights.
        importances: One a model: importances, or plain mappings of non-negative tensors.
        coefficients: One a model, not negative; 0 drops the model. Equal ones by default.
        scale: How importances are brought to one scale: `auto`, `as_fisher` or `stored`.
        normalize: `mean` or `l2`: divides each importance by that of all its merged parameters.
        floor: `relative`: no entry counts less than 1e-6 of its tensor's mean over entries and models. A number: an absolute
            floor on the importances before they are normalized, one for all or one a model; 0 is none. `"+1e-6"` adds
            instead.
        missing: `average` takes the mean where a weight has no importance; `error` refuses.
        exclude: A regular expression; what it finds is kept as each model has it.
        dtype: The type of the result; by default the first model's.
        precision: What is computed in: `float32` or `float64`.

    Returns:
        The merged weights. Where every importance is 0 they are the mean with the coefficients, never NaN.

    Raises:
        NamingError: Names or shapes do not match.
        ScaleError: The importances have no common scale.
    """
    if normalize not in (None, "mean", "l2"):
        raise SquisherError(f"normalize is mean or l2, or nothing, not {normalize!r}.")
    importances = as_many("importance", importances, models)
    floors, adds = as_floors(floor, len(models))
    used, numbers = taking_part(models, coefficients)
    dropped = len(used) < len(models)
    models, importances = [models[k] for k in used], [importances[k] for k in used]
    who = [f"the importance of model {k + 1}" for k in used]
    layout = plan(models, exclude, numbers=used, tied=tied_in(importances))
    names, averaged = matched(models[0], layout.merged, layout.tied, importances, missing, who)
    rule = Fisher(
        models,
        graded(importances, names, scale, who, dropped),
        numbers,
        normalize,
        None if floors is None else [floors[k] for k in used],
        adds,
        frozenset(averaged),
        as_work(precision),
    )
    return Merged(models, layout, rule, averaged=averaged, dtype=as_dtype(dtype))


def ubgm(
    base: Weights,
    models: Sequence[Weights],
    base_importance: Weights | None,
    importances: Sequence[Weights],
    coefficients: Sequence[float] | None = None,
    sizes: Sequence[float] | None = None,
    base_size: float = 1.0,
    delta: float | str = "relative",
    scale: str = "auto",
    *,
    missing: str = "error",
    exclude: str | None = None,
    dtype: torch.dtype | str | None = None,
    precision: str = "float32",
) -> Merged:
    """Uncertainty-based gradient matching: θ₀ + Σ α(sH + s₀H₀ + δ)(θ − θ₀) / (Σ αsH + s₀H₀ + δ).

    Args:
        base: The weights that the models started from.
        models: One or more mappings of weights.
        base_importance: That of the base; None only with a `base_size` of 0.
        importances: One a model.
        coefficients: One α a model, not negative; 0 drops the model. 1 by default.
        sizes: One s a model, its number of training examples for importances that are means. 1 by default.
        base_size: s₀ of the base.
        delta: δ. `relative` is 1e-6 of the tensor's mean denominator; 0 is none.
        scale: How importances are brought to one scale: `auto`, `as_fisher` or `stored`.
        missing: `average` uses task arithmetic where a weight has no importance; `error` refuses.
        exclude: A regular expression; what it finds is kept as each model has it.
        dtype: The type of the result; by default the first model's.
        precision: What is computed in: `float32` or `float64`.

    Returns:
        The merged weights. Where the denominator is 0 they are those of task arithmetic.

    Raises:
        NamingError: Names or shapes do not match.
        ScaleError: The importances have no common scale.
    """
    importances = as_many("importance", importances, models)
    lengths = as_numbers("size", sizes, len(models), least=0.0)
    (base_length,) = as_numbers("base_size", [base_size], 1, least=0.0)
    if delta != "relative":
        (delta,) = as_numbers("delta", [as_number(delta)], 1, least=0.0)
    if base_importance is None and base_length:
        raise SquisherError("ubgm needs the importance of the base too; without one, pass base_size=0.")
    used, alphas = taking_part(models, coefficients, base)
    dropped = len(used) < len(models)
    models, importances = [models[k] for k in used], [importances[k] for k in used]
    everyone, every_importance = [*models, base], list(importances)
    who = [f"the importance of model {k + 1}" for k in used]
    if base_importance is not None and base_length:
        every_importance.append(base_importance)
        who.append("the importance of the base")
    layout = plan(everyone, exclude, numbers=used, tied=tied_in(every_importance))
    names, averaged = matched(models[0], layout.merged, layout.tied, every_importance, missing, who)
    ready = graded(every_importance, names, scale, who, dropped)
    own = ready[len(models)] if len(ready) > len(models) else None
    rule = Matching(
        base,
        models,
        own,
        ready[: len(models)],
        alphas,
        [lengths[k] for k in used],
        base_length,
        delta,
        frozenset(averaged),
        as_work(precision),
    )
    return Merged(everyone, layout, rule, averaged=averaged, dtype=as_dtype(dtype))


def ota(
    base: Weights,
    models: Sequence[Weights],
    importances: Sequence[Weights],
    keep: float | Sequence[float] = 1.0,
    scale: str = "auto",
    floor: Floor = "relative",
    *,
    missing: str = "error",
    exclude: str | None = None,
    dtype: torch.dtype | str | None = None,
    precision: str = "float32",
) -> Merged:
    """Merge by OTA with fast Fisher grafting: θ₀ + Σ √F·m·(θ − θ₀) / Σ √F (Mahdavinia et al., arXiv 2509.11167).

    m keeps of each model the entries whose F·(θ − θ₀)² is among the largest, over all its parameters together; what it drops
    still counts in the denominator, as in the paper. Finding m takes passes over the files; `keep=1` needs none.

    Args:
        base: The weights that the models started from.
        models: One or more mappings of weights.
        importances: One a model; the paper uses Adam's accumulator.
        keep: The fraction of a model's entries that m keeps, one for all or one a model. Entries as salient as the last one that
            is kept are kept too.
        scale: How importances are brought to one scale: `auto`, `as_fisher` or `stored`.
        floor: As in `fisher`; it does not affect m.
        missing: `average` takes the mean change where a weight has no importance; `error` refuses.
        exclude: A regular expression; what it finds is kept as each model has it.
        dtype: The type of the result; by default the first model's.
        precision: What is computed in: `float32` or `float64`.

    Raises:
        NamingError: Names or shapes do not match.
        ScaleError: The importances have no common scale.
        SquisherError: A fraction is not one.
    """
    importances = as_many("importance", importances, models)
    floors, adds = as_floors(floor, len(models))
    keeps = [float(k) for k in ([keep] * len(models) if isinstance(keep, (int, float)) else keep)]
    if len(keeps) != len(models) or not all(0 <= k <= 1 for k in keeps):
        raise SquisherError(
            f"keep is a fraction from 0 to 1, one for all or one for each of {len(models)} models, not {keep!r}."
        )
    used, _ = taking_part(models, None, base)
    everyone = [*models, base]
    who = [f"the importance of model {k + 1}" for k in used]
    layout = plan(everyone, exclude, numbers=used, tied=tied_in(importances))
    names, averaged = matched(models[0], layout.merged, layout.tied, importances, missing, who)
    rule = Grafting(
        base,
        list(models),
        graded(importances, names, scale, who),
        keeps,
        floors,
        adds,
        frozenset(averaged),
        as_work(precision),
    )
    return Merged(everyone, layout, rule, averaged=averaged, dtype=as_dtype(dtype))
