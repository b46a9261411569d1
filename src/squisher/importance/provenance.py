"""What an importance says about itself (the JSON in its file, a frozen dataclass in Python), and the scale that follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..errors import FileError, ScaleError, SquisherError, near

__all__ = ["FORMAT_VERSION", "KINDS", "LOSS_REDUCTIONS", "UNITS", "Provenance", "fisher_factor", "scale_differences"]

FORMAT_VERSION = 1
KINDS = ("squisher", "fisher")
UNITS = ("example", "sequence", "token")
LOSS_REDUCTIONS = ("mean", "sum", "token_mean")


@dataclass(frozen=True)
class Provenance:
    """Where an importance comes from and what its numbers are; None where it is not known.

    Attributes:
        kind: `squisher` (an optimizer's accumulator) or `fisher` (measured on data).
        estimator: For a Fisher: `labels`, `per`, `draws`, and what was computed how.
        optimizer: For a Squisher: `class`, `key`, `beta2`, `eps`, `weight_decay`, `amsgrad`, `pollution` (sentences on
            what else is in the squared gradient); `groups` where parameter groups differ.
        steps: `min` and `max` optimizer steps, and `per_parameter` where they differ.
        unit: What the mean is over: `example`, `sequence` or `token`.
        loss_reduction: How the training loss was reduced over a step: `mean`, `sum` or `token_mean`.
        batch_size: Examples per optimizer step, over devices and accumulation; only if proven.
        batch_tokens: Mean number of loss-bearing tokens per optimizer step.
        examples: Examples that a Fisher was measured on.
        bias_corrected: Whether a Squisher was divided by 1 − β₂ᵗ.
        scale: The product of all factors applied since.
        per_unit: Whether the values are per-unit means already (`as_fisher`).
        dtype_of_source: Type of the accumulator or of the model measured.
        absent: Parameters without an importance, and why.
        tied: Other names of parameters that are here under one name: alias to name.
        naming: How names were found: `recorded`, `convention: …` or `given`.
        live_names: Names in the running model, where they differ from those of its weight file.
        model: `structure` (hash of names and shapes), `content` (hash per weight, where weights were at hand).
        sum: Sum of each tensor.
        sum_of_squares: Sum of squares of each tensor.
        created_with: The version of this library.
        format_version: Of the file.
        extra: Keys that this version does not know; they survive a round trip.
    """

    kind: str
    estimator: dict[str, Any] | None = None
    optimizer: dict[str, Any] | None = None
    steps: dict[str, Any] | None = None
    unit: str | None = None
    loss_reduction: str | None = None
    batch_size: int | float | None = None
    batch_tokens: int | float | None = None
    examples: int | None = None
    bias_corrected: bool | None = None
    scale: float = 1.0
    per_unit: bool = False
    dtype_of_source: str | None = None
    absent: dict[str, str] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    naming: str | None = None
    live_names: dict[str, str] = field(default_factory=dict)
    model: dict[str, Any] | None = None
    sum: dict[str, float] = field(default_factory=dict)
    sum_of_squares: dict[str, float] = field(default_factory=dict)
    created_with: str | None = None
    format_version: int = FORMAT_VERSION
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _one_of("unit", self.unit, UNITS)
        _one_of("loss_reduction", self.loss_reduction, LOSS_REDUCTIONS)
        for name in ("batch_size", "batch_tokens", "scale"):
            value = getattr(self, name)
            valid = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")
            if value is not None and not valid:
                raise SquisherError(f"{name} is a positive number, not {value!r}.")
        for f in fields(self):
            if f.type.startswith("dict") and not isinstance(getattr(self, f.name), (dict, type(None))):
                raise SquisherError(f"The provenance field {f.name} is a mapping, not {getattr(self, f.name)!r}.")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Provenance:
        """Provenance from keyword arguments or from a file's JSON; unknown keys are kept in `extra`.

        Raises:
            FileError: A later version of the format.
            SquisherError: A known field has a value that it cannot have.
        """
        known = {f.name for f in fields(cls)} - {"extra"}
        version = values.get("format_version", FORMAT_VERSION)
        if not isinstance(version, int) or version > FORMAT_VERSION:
            raise FileError(
                f"This importance has format version {version}, and this version of squisher reads up to {FORMAT_VERSION}: "
                "update torch-squisher."
            )
        given = {name: value for name, value in values.items() if name in known and value is not None}
        extra = {**(values.get("extra") or {}), **{k: v for k, v in values.items() if k not in known and k != "extra"}}
        return cls(**given, extra=extra)

    def to_dict(self) -> dict[str, Any]:
        """What goes into the file: everything that is known, the unknown keys beside it."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "extra"}
        return {**self.extra, **{name: value for name, value in own.items() if value is not None and value != {}}}


def _one_of(name: str, value: str | None, allowed: tuple[str, ...]) -> None:
    if value is not None and value not in allowed:
        raise SquisherError(
            f"{name} is {', '.join(allowed[:-1])} or {allowed[-1]}, not {value!r}.{near(str(value), allowed)}"
        )


def fisher_factor(p: Provenance, unit: str | None = None) -> tuple[float, str]:
    """What stored values must be multiplied by to be means per unit, and the unit; see `Importance.as_fisher`.

    Raises:
        ScaleError: What the factor needs is not known, or the unit cannot be reached; the message says which.
    """
    _one_of("unit", unit, UNITS)
    if p.kind == "fisher":
        if unit is not None and p.unit not in (None, unit):
            raise ScaleError(f"This Fisher is per {p.unit} and cannot be turned into one per {unit}: measure it so.")
        return 1.0, p.unit or unit or "example"
    if p.bias_corrected is False:
        raise ScaleError("This Squisher was extracted without bias correction: extract it again with it.")
    if p.loss_reduction is None:
        raise ScaleError(
            f"{'batch_size and ' if p.batch_size is None else ''}loss_reduction of this Squisher not known, so it has no "
            "scale. Give them when extracting (--batch-size, --loss-reduction mean, sum or token_mean), or with "
            "imp.with_provenance(batch_size=..., loss_reduction=...)."
        )
    if p.loss_reduction == "token_mean":
        target = unit or p.unit or "token"
        factor = _token_factor(p, target)
        return (factor / _token_factor(p, p.unit or "token") if p.per_unit else factor), target
    target = unit or p.unit or "example"
    if target == "token":
        raise ScaleError(
            f"The {p.loss_reduction} of whole examples has no mean per token: token gradients were never apart."
        )
    if p.unit not in (None, target):
        raise ScaleError(f"This Squisher is per {p.unit} and cannot be turned into one per {target}.")
    batch = _needs(p, "batch_size", "the number of examples per optimizer step")
    if p.per_unit:
        return 1.0, target
    return (batch if p.loss_reduction == "mean" else 1.0 / batch), target


def _token_factor(p: Provenance, unit: str) -> float:
    if unit == "example":
        raise ScaleError("A mean over tokens can be turned into one per token or per sequence, not per example.")
    tokens = _needs(p, "batch_tokens", "the mean number of loss-bearing tokens per optimizer step")
    if unit == "token":
        return tokens
    return tokens * tokens / _needs(p, "batch_size", "the number of sequences per optimizer step")


def _needs(p: Provenance, field_name: str, meaning: str) -> float:
    value = getattr(p, field_name)
    if value is None:
        raise ScaleError(
            f"{field_name} of this Squisher is not known ({meaning}), so it has no scale. Give it with "
            f"--{field_name.replace('_', '-')} or imp.with_provenance({field_name}=...)."
        )
    return float(value)


def scale_differences(provenances: Sequence[Provenance]) -> list[str]:
    """What makes the numbers of several importances unlike, in words; empty if nothing known does."""
    names = ("kind", "unit", "loss_reduction", "batch_size", "batch_tokens", "bias_corrected", "per_unit", "estimator")
    found = []
    for name in names:
        values = list({repr(getattr(p, name)): None for p in provenances})
        if len(values) > 1:
            found.append(f"{name} ({' against '.join(values)})")
    return found
