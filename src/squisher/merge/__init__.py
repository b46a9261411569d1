"""Merging models into one: the average, Fisher merging, gradient matching, OTA and task arithmetic, larger than memory.

Weights and importances are any `Mapping[str, Tensor]`: a `state_dict()`, a lazy folder, a test dict. So is the result, whose
tensors are computed when they are asked for. Names and shapes decide what belongs together, never an architecture.

The methods are here. `inputs` decides which tensors are merged, `formulas` has the arithmetic, `lazy` the resulting mapping.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError, SquisherError, check_choice, check_fraction
from ..importance import checked
from ..names import check_named
from .formulas import Fisher, Grafting, Matching, Mean
from .inputs import prepared
from .lazy import Merged

__all__ = ["Candidate", "Merged", "average", "fisher", "ota", "search", "task_arithmetic", "ubgm"]


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
        coefficients: One per model, not negative; 0 drops the model. Equal ones by default.
        exclude: A regular expression: names that it matches are kept as each model has them.
        dtype: The type of the result; by default the first model's.
        precision: The type to compute in: `float32` or `float64`; always `float64` if an input is.

    Raises:
        SquisherError: The models do not belong together, or an argument is invalid.
    """
    used, numbers = taking_part(models, coefficients)
    models = [models[k] for k in used]
    formula = Mean(models, [c / math.fsum(numbers) for c in numbers[1:]], as_work(precision))
    layout, _, _ = prepared(models, used, exclude)
    return Merged(models, layout, formula, dtype=as_dtype(dtype))


def task_arithmetic(
    base: Weights,
    models: Sequence[Weights],
    coefficients: Sequence[float] | None = None,
    *,
    exclude: str | None = None,
    dtype: torch.dtype | str | None = None,
    precision: str = "float32",
) -> Merged:
    """Return the base plus each model's difference from it: θ₀ + Σ α(θ − θ₀).

    Args:
        base: The weights that the models started from.
        models: One or more mappings of weights.
        coefficients: One α per model; negative ones are allowed, and they are not normalized. 1 by default.
        exclude: A regular expression: names that it matches are kept as each model has them.
        dtype: The type of the result; by default the first model's.
        precision: The type to compute in: `float32` or `float64`; always `float64` if an input is.

    Raises:
        SquisherError: The models do not belong together, or an argument is invalid.
    """
    used, numbers = taking_part(models, coefficients, [base], negative=True)
    models = [models[k] for k in used]
    everyone = [*models, base]
    formula = Mean([base, *models], numbers, as_work(precision))
    layout, _, _ = prepared(everyone, used, exclude)
    return Merged(everyone, layout, formula, dtype=as_dtype(dtype))


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
    """Return the mean of the models' weights, weighted with their importances: Σ cFθ / Σ cF.

    Args:
        models: Two or more mappings of weights.
        importances: One per model: importances, or plain mappings of non-negative tensors.
        coefficients: One per model, not negative; 0 drops the model. Equal ones by default.
        scale: How importances are brought to one scale: `auto`, `as_fisher` or `stored`.
        normalize: `mean` or `l2`: divides each importance by its mean or L2 norm over all merged parameters.
        floor: The least importance of an entry. `relative`: 1e-6 of its tensor's mean over entries and models. A number:
            absolute, before importances are normalized, one for all or one per model; 0 is none. `"+1e-6"` is added instead.
        missing: `average` takes the mean where a weight has no importance; `error` refuses.
        exclude: A regular expression: names that it matches are kept as each model has them.
        dtype: The type of the result; by default the first model's.
        precision: The type to compute in: `float32` or `float64`; always `float64` if an input is.

    Returns:
        The merged weights. Where every importance is 0 they are the mean with the coefficients, never NaN.

    Raises:
        NamingError: Names or shapes do not match.
        ScaleError: The importances have no common scale.
    """
    if normalize not in (None, "mean", "l2"):
        raise ArgumentError(f"is mean or l2, or nothing, not {normalize!r}.", "normalize")
    importances = one_each(importances, models)
    floors, adds = as_floors(floor, len(models))
    used, numbers = taking_part(models, coefficients)
    dropped = len(used) < len(models)
    models, importances = [models[k] for k in used], [importances[k] for k in used]
    floors = None if floors is None else [floors[k] for k in used]
    layout, averaged, ready = prepared(models, used, exclude, importances, missing, scale, dropped)
    formula = Fisher(models, ready, numbers, normalize, floors, adds, frozenset(averaged), as_work(precision))
    return Merged(models, layout, formula, averaged=averaged, dtype=as_dtype(dtype))


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
    """Match gradients by uncertainty (UBGM): θ₀ + Σ α(sH + s₀H₀ + δ)(θ − θ₀) / (Σ αsH + s₀H₀ + δ).

    Args:
        base: The weights that the models started from.
        models: One or more mappings of weights.
        base_importance: The importance of the base; None only with a `base_size` of 0.
        importances: One per model.
        coefficients: One α per model, not negative; 0 drops the model. 1 by default.
        sizes: One s per model, its number of training examples for importances that are means. 1 by default.
        base_size: s₀ of the base.
        delta: δ. `relative` is 1e-6 of the tensor's mean denominator; 0 is none.
        scale: How importances are brought to one scale: `auto`, `as_fisher` or `stored`.
        missing: `average` uses task arithmetic where a weight has no importance; `error` refuses.
        exclude: A regular expression: names that it matches are kept as each model has them.
        dtype: The type of the result; by default the first model's.
        precision: The type to compute in: `float32` or `float64`; always `float64` if an input is.

    Returns:
        The merged weights. Where the denominator is 0, the result of task arithmetic.

    Raises:
        NamingError: Names or shapes do not match.
        ScaleError: The importances have no common scale.
    """
    importances = one_each(importances, models)
    lengths = as_numbers("size", sizes, len(models), least=0.0)
    (base_length,) = as_numbers("size of the base", [base_size], 1, least=0.0)
    if delta != "relative":
        (delta,) = as_numbers("delta", [delta], 1, least=0.0)
    if base_importance is None and base_length:
        raise ArgumentError(
            "must be 0 for ubgm without the importance of the base: give that importance, or 0.", "base_size"
        )
    used, alphas = taking_part(models, coefficients, [base])
    dropped = len(used) < len(models)
    models, importances = [models[k] for k in used], [importances[k] for k in used]
    everyone, lengths = [*models, base], [lengths[k] for k in used]
    of_base = one_each([base_importance], [base]) if base_importance is not None and base_length else []
    layout, averaged, ready = prepared(everyone, used, exclude, [*importances, *of_base], missing, scale, dropped)
    base_ready = ready.pop() if of_base else None
    without = frozenset(averaged)
    formula = Matching(
        base, models, base_ready, ready, alphas, lengths, base_length, delta, without, as_work(precision)
    )
    return Merged(everyone, layout, formula, averaged=averaged, dtype=as_dtype(dtype))


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

    The mask m keeps the entries of each model whose F·(θ − θ₀)² is among the largest, over all its parameters together. Other
    entries still count in the denominator, as in the paper. Finding m takes passes over the files; `keep=1` needs none.

    Args:
        base: The weights that the models started from.
        models: One or more mappings of weights.
        importances: One per model; the paper uses Adam's accumulator.
        keep: The fraction of a model's entries that m keeps, one for all or one per model. Entries that are equal to the last
            one are kept, too.
        scale: How importances are brought to one scale: `auto`, `as_fisher` or `stored`.
        floor: As in `fisher`; it does not affect m.
        missing: `average` takes the mean change where a weight has no importance; `error` refuses.
        exclude: A regular expression: names that it matches are kept as each model has them.
        dtype: The type of the result; by default the first model's.
        precision: The type to compute in: `float32` or `float64`; always `float64` if an input is.

    Raises:
        NamingError: Names or shapes do not match.
        ScaleError: The importances have no common scale.
        SquisherError: A fraction is not between 0 and 1.
    """
    importances = one_each(importances, models)
    floors, adds = as_floors(floor, len(models))
    keeps: Any = keep if isinstance(keep, Sequence) else [keep] * len(models)
    if len(keeps) != len(models):
        raise ArgumentError(f"is one fraction for all or one for each of {len(models)} models, not {keep!r}.", "keep")
    for k in keeps:
        check_fraction("keep", k, "of a model's changes that count")
    used, _ = taking_part(models, None, [base])
    everyone = [*models, base]
    layout, averaged, ready = prepared(everyone, used, exclude, importances, missing, scale)
    formula = Grafting(
        base, list(models), ready, list(map(float, keeps)), floors, adds, frozenset(averaged), as_work(precision)
    )
    return Merged(everyone, layout, formula, averaged=averaged, dtype=as_dtype(dtype))


Weights = Mapping[str, Tensor]
Floor = float | str | Sequence[float]

_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}


def taking_part(
    models: Sequence[Weights],
    coefficients: Sequence[float] | None,
    base: Sequence[Weights] = (),
    *,
    negative: bool = False,
) -> tuple[list[int], list[float]]:
    """Return the numbers of the models that take part, and their coefficients; a coefficient of 0 drops a model."""
    if isinstance(models, Mapping) or not isinstance(models, Sequence) or not models:
        raise SquisherError("models is a list of mappings from names to tensors, one per model.")
    everyone = [(f"Model {k + 1}", model) for k, model in enumerate(models)]
    for who, model in [*everyone, *(("The base", one) for one in base)]:
        check_named(model, who)
        if not model:
            raise SquisherError(f"{who} is empty: it holds no tensors.")
    numbers = as_numbers("coefficient", coefficients, len(models), least=-math.inf if negative else 0.0)
    used = [k for k, number in enumerate(numbers) if number]
    if not used:
        raise ArgumentError("Every coefficient is 0, so that no model is left.")
    return used, [numbers[k] for k in used]


def as_numbers(what: str, values: Sequence[Any] | None, count: int, *, least: float) -> list[float]:
    """Return one finite number per model, perhaps from text; ones by default."""
    if values is None:
        return [1.0] * count
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ArgumentError(f"There are {count} models: give a list with one {what} per model, not {values!r}.")
    numbers = []
    for value in values:
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not (number >= least and abs(number) < 1e30):
            raise ArgumentError(
                f"A {what} is a finite number{'' if least < 0 else ' and not negative'}, not {value!r}."
            )
        numbers.append(number)
    if len(numbers) != count:
        raise ArgumentError(f"There are {count} models and {len(numbers)} {what}s; give one per model.")
    return numbers


def one_each(importances: Sequence[Weights], models: Sequence[Weights]) -> list[Weights]:
    """Return the importances as a list; refuse any but one mapping per model."""
    listed = isinstance(importances, Sequence)
    if not listed or len(importances) != len(models):
        count = len(importances) if listed else 0 if importances is None else 1
        raise ArgumentError(f"There are {len(models)} models and {count} importances; give a list with one per model.")
    for importance in importances:
        checked(importance)  # refuses what is not a mapping
    return list(importances)


def as_floors(floor: Floor, count: int) -> tuple[list[float] | None, bool]:
    """Return an absolute floor per model, or None for the relative one; and whether floors are added."""
    if isinstance(floor, str) and floor == "relative":
        return None, False
    if floor is None:
        raise ArgumentError("is relative or a number; 0 is none.", "floor")
    each: Any = [floor] * count if isinstance(floor, (str, Real)) else floor
    return as_numbers("floor", each, count, least=0.0), isinstance(floor, str) and floor.startswith("+")


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return a type that weights can have; None if none is given."""
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    check_choice("dtype", name, _DTYPES)
    return _DTYPES[name]


def as_work(precision: str) -> torch.dtype:
    """Return the type to compute in."""
    check_choice("precision", precision, ("float32", "float64"))
    return _DTYPES[precision]


class Candidate(NamedTuple):
    """Coefficients that were tried, and the score of the merged model."""

    coefficients: tuple[float, ...]
    score: float


def search(
    evaluate: Callable[[Sequence[float]], float], count: int, *, draws: int = 51, seed: int = 0
) -> tuple[Candidate, list[Candidate]]:
    """Try coefficients that add up to 1 and return the best ones, and all that were tried.

    Two models: an even grid from (0, 1) to (1, 0). More: the even mixture, then draws that are uniform over all mixtures.

    Args:
        evaluate: Merges with these coefficients and returns a validation score; larger is better.
        count: Number of models.
        draws: Number of coefficients to try.
        seed: The seed of the draws.

    Raises:
        SquisherError: Nothing can be searched, or no score is a number.
    """
    if count < 2 or draws < 2:
        raise SquisherError(f"A search needs two models and two draws or more, not {count} and {draws}.")
    tried: list[tuple[float, ...]]
    if count == 2:
        tried = [(k / (draws - 1), 1 - k / (draws - 1)) for k in range(draws)]
    else:
        generator = torch.Generator().manual_seed(seed)
        # Exponential numbers over their sum are uniform over all mixtures: Dirichlet(1).
        raw = -torch.rand(draws - 1, count, generator=generator, dtype=torch.float64).clamp_min(1e-300).log()
        tried = [(1 / count,) * count, *(tuple(row) for row in (raw / raw.sum(1, keepdim=True)).tolist())]
    scores = [Candidate(tuple(c), float(evaluate(c))) for c in tried]
    usable = [candidate for candidate in scores if not math.isnan(candidate.score)]
    if not usable:
        raise SquisherError("No coefficients gave a score that is a number.")
    return max(usable, key=lambda candidate: candidate.score), scores
