"""What the user gave, checked: models, coefficients, floors, types."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..errors import SquisherError

__all__ = ["Floor", "Weights", "as_dtype", "as_floors", "as_many", "as_number", "as_numbers", "as_work", "taking_part"]

Weights = Mapping[str, Tensor]
Floor = float | str | Sequence[float]

_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}


def taking_part(
    models: Sequence[Weights],
    coefficients: Sequence[float] | None,
    base: Weights | None = None,
    *,
    negative: bool = False,
) -> tuple[list[int], list[float]]:
    """Which models take part (0 drops one), and their coefficients."""
    if isinstance(models, Mapping) or not isinstance(models, Sequence) or not models:
        raise SquisherError("models is a list of mappings from names to tensors, one a model.")
    everyone = [(f"Model {k + 1}", model) for k, model in enumerate(models)]
    for who, model in [*everyone, *([] if base is None else [("The base", base)])]:
        if not isinstance(model, Mapping) or not model:
            what = "empty" if isinstance(model, Mapping) else f"a {type(model).__name__}"
            raise SquisherError(f"{who} is {what}; a mapping from names to tensors is expected, such as state_dict().")
    numbers = as_numbers("coefficient", coefficients, len(models), least=-math.inf if negative else 0.0)
    used = [k for k, number in enumerate(numbers) if number]
    if not used:
        raise SquisherError("Every coefficient is 0, so that no model is left.")
    return used, [numbers[k] for k in used]


def as_numbers(what: str, values: Sequence[float] | None, count: int, *, least: float) -> list[float]:
    """Finite numbers, as many as there are models; ones by default."""
    if values is None:
        return [1.0] * count
    numbers = [as_number(value) for value in values]
    if len(numbers) != count:
        raise SquisherError(f"There are {count} models and {len(numbers)} {what}s; give one a model.")
    for number in numbers:
        if not (number >= least and abs(number) < 1e30):
            raise SquisherError(f"A {what} is a finite number{'' if least < 0 else ' and not negative'}, not {number}.")
    return numbers


def as_number(value: object) -> float:
    """Return a number, from a command line perhaps."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise SquisherError(f"A number is expected, not {value!r}.") from None


def as_many(what: str, given: Sequence[Weights], models: Sequence[Weights]) -> list[Weights]:
    """Return a list with one entry a model."""
    if isinstance(given, Mapping) or len(given) != len(models):
        count = 1 if isinstance(given, Mapping) else len(given)
        raise SquisherError(f"There are {len(models)} models and {count} {what}s; give a list with one a model.")
    return list(given)


def as_floors(floor: Floor, count: int) -> tuple[list[float] | None, bool]:
    """One absolute floor a model, or None for the relative one; and whether it is added."""
    if floor == "relative":
        return None, False
    if isinstance(floor, str):
        return as_numbers("floor", [as_number(floor)] * count, count, least=0.0), floor.startswith("+")
    if not isinstance(floor, (int, float)):
        return as_numbers("floor", floor, count, least=0.0), False
    return as_numbers("floor", [floor] * count, count, least=0.0), False


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return a type that weights can have; None if none is given."""
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise SquisherError(f"Merged weights are written as {', '.join(_DTYPES)}, not {name}.")
    return _DTYPES[name]


def as_work(precision: str) -> torch.dtype:
    """Return the type to compute in."""
    if precision not in ("float32", "float64"):
        raise SquisherError(f"precision is float32 or float64, not {precision!r}.")
    return _DTYPES[precision]
