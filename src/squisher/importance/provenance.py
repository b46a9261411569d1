"""What an importance says about itself: JSON in its file, a frozen dataclass in Python; and the scale that follows from it.

That includes the codec of the file and its error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ..errors import ArgumentError, FileError, ScaleError, check_choice, check_positive
from .facts import UNITS, Absence, Naming, Pollution, RunFacts, fits, types_of

__all__ = ["KINDS", "Codec", "Provenance", "fisher_factor", "scale_differences"]

FORMAT_VERSION = 2
KINDS = ("squisher", "fisher")
_LOW_PRECISION = ("bfloat16", "float16", "8bit", "int8", "uint8", "fp8", "float8", "4bit")


@dataclass(frozen=True, kw_only=True, repr=False)
class Provenance(RunFacts):
    """Where an importance comes from and what its numbers mean; None where it is not known.

    The facts of the run (`batch_size`, `absent`, `naming`, …) are the fields of `RunFacts`.

    Attributes:
        kind: `squisher` (an optimizer's accumulator) or `fisher` (measured on data).
        estimator: For a Fisher: `labels`, `per`, `draws`, `signs` if there were any, and the likelihood.
        optimizer: For a Squisher: `class`, `key`, `beta2`, `eps`, `weight_decay`, `amsgrad`; `groups` where these differ.
        steps: `min` and `max` optimizer steps, and `per_parameter` where they differ.
        examples: Examples that a Fisher was measured on.
        tokens: Tokens that a Fisher per token was measured on.
        seed: The seed of sampled labels and of signs.
        coverage: For a Fisher: by which method it was measured, and which parameters by another.
        standard_error: For a Fisher: the relative standard error of each parameter's total.
        bias_corrected: Whether a Squisher was divided by 1 − β₂ᵗ.
        scale: The product of all factors since it was measured or extracted.
        per_unit: Whether the values are per-unit means already (`as_fisher`).
        dtype_of_source: Type of the accumulator or of the model measured.
        embedding: For a task embedding: what its entries are means over (`by`), and the shapes of the parameters (`shapes`).
        codec: How the file encodes the values, with the error of that; None for exact values.
        model: `structure` (hash of names and shapes), `content` (hash per weight, where the weights were available).
        sum: Sum of each tensor.
        sum_of_squares: Sum of squares of each tensor.
        created_with: The version of this library.
        format_version: The version of the file format.
        extra: Keys that this version does not know; they survive a round trip.
    """

    kind: str
    estimator: dict[str, Any] | None = None
    optimizer: dict[str, Any] | None = None
    steps: dict[str, Any] | None = None
    examples: int | None = None
    tokens: int | None = None
    seed: int | None = None
    coverage: dict[str, Any] | None = None
    standard_error: dict[str, float | None] | None = None
    bias_corrected: bool | None = None
    scale: float = 1.0
    per_unit: bool = False
    dtype_of_source: str | None = None
    embedding: dict[str, Any] | None = None
    codec: Codec | None = None
    model: dict[str, Any] | None = None
    sum: dict[str, float] = field(default_factory=dict)
    sum_of_squares: dict[str, float] = field(default_factory=dict)
    created_with: str | None = None
    format_version: int = FORMAT_VERSION
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("scale", self.scale)

    @property
    def low_precision(self) -> bool:
        """Whether the source kept its values in a type with too few digits for a slow average."""
        return any(mark in (self.dtype_of_source or "") for mark in _LOW_PRECISION)

    def __repr__(self) -> str:
        """Return the known fields in one line; long values by their number of entries."""
        parts = []
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None or value in ({}, ()) or (f.name, value) in (("scale", 1.0), ("per_unit", False)):
                continue
            text = repr(value)
            if len(text) > 60:
                text = f"<{len(value)} entries>" if isinstance(value, (dict, tuple)) else f"{text[:57]}..."
            parts.append(f"{f.name}={text}")
        return f"Provenance({', '.join(parts)})"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Provenance:
        """Return the provenance of keyword arguments or of a file's JSON; unknown keys are kept in `extra`.

        Raises:
            FileError: A later version of the format.
            ArgumentError: A known field has a value that it cannot have.
        """
        known = {f.name for f in fields(cls)} - {"extra"}
        version = values.get("format_version", FORMAT_VERSION)
        if not isinstance(version, int) or version > FORMAT_VERSION:
            raise FileError(
                f"This importance has format version {version}, and this version of squisher reads up to {FORMAT_VERSION}: "
                "update torch-squisher."
            )
        _check_types(values)
        given = {name: value for name, value in values.items() if name in known and value is not None}
        given["format_version"] = FORMAT_VERSION
        if isinstance(given.get("optimizer"), dict):
            _lift_pollution(given)
        if isinstance(given.get("absent"), Mapping):
            given["absent"] = {name: Absence.read(why) for name, why in given["absent"].items()}
        if "naming" in given:
            given["naming"] = Naming.read(given["naming"])
        given["pollution"] = tuple(Pollution.read(one) for one in given.get("pollution", ()))
        if "codec" in given:
            given["codec"] = Codec.read(given["codec"])
        extra = {**(values.get("extra") or {}), **{k: v for k, v in values.items() if k not in known and k != "extra"}}
        return cls(**given, extra=extra)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON for the file: all known fields, and the keys in `extra`."""
        record: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "extra"}
        record["absent"] = {name: _plain(why) for name, why in self.absent.items()}
        record["naming"] = _plain(self.naming) if self.naming else None
        pollution, clipped = record.pop("pollution"), record.pop("after_clipping")
        if self.optimizer is not None or pollution or clipped is not None:
            facts = {"pollution": [_plain(one) for one in pollution], "after_clipping": clipped}
            record["optimizer"] = {**(self.optimizer or {}), **{k: v for k, v in facts.items() if v is not None}}
        record["codec"] = self.codec.plain() if self.codec else None
        return {**self.extra, **{name: value for name, value in record.items() if value is not None and value != {}}}


_PLAIN = {"absent": dict[str, Any], "pollution": list[Any], "naming": Any, "codec": Any}
"""The types of fields before their classes have read them."""
_INSIDE: dict[str, dict[str, Any]] = {
    "optimizer": {"beta2": float, "groups": list[dict[str, Any]], "pollution": list[Any], "after_clipping": bool},
    "optimizer.groups": {"beta2": float, "parameters": list[str], "pollution": list[Any]},
    "steps": {"min": float, "max": float, "per_parameter": dict[str, float | None]},
    "model": {"content": dict[str, str]},
}
"""The types of what is read from nested records."""


def _check_types(values: Mapping[str, Any]) -> None:
    """Refuse values that do not have the types of the annotations of `Provenance`.

    Raises:
        ArgumentError: One has another type; the message names it.
    """
    optimizer = values.get("optimizer")
    groups = optimizer.get("groups") if isinstance(optimizer, Mapping) else ()
    checked = [("", {**types_of(Provenance), **_PLAIN}, values)]
    for place, kinds in _INSIDE.items():
        records = [values.get(place)] if place != "optimizer.groups" else groups if isinstance(groups, list) else ()
        checked += [(f"{place}.", kinds, one) for one in records if isinstance(one, Mapping)]
    for place, kinds, record in checked:
        for name, kind in kinds.items():
            if record.get(name) is not None and not fits(record[name], kind):
                raise ArgumentError(
                    f"The provenance has {str(record[name])[:80]!r} as {place}{name}; expected {getattr(kind, '__name__', kind)}."
                )


def _lift_pollution(given: dict[str, Any]) -> None:
    """Move pollution out of the optimizer's record, where files keep it, and out of its groups."""
    optimizer = dict(given["optimizer"])
    found = [Pollution.read(one) for one in [*given.get("pollution", ()), *(optimizer.pop("pollution", None) or ())]]
    groups = [dict(group) for group in optimizer.get("groups") or ()]
    for group in groups:  # version 1 has it there
        for one in map(Pollution.read, group.pop("pollution", None) or ()):
            found = [f for f in found if (f.code, f.note, f.parameters) != (one.code, one.note, ())]
            found.append(Pollution(one.code, one.numbers, one.note, tuple(group.get("parameters", ()))))
    if groups:
        optimizer["groups"] = groups
    clipped = optimizer.pop("after_clipping", None)
    given["optimizer"], given["pollution"] = optimizer, found
    if given.get("after_clipping") is None and clipped is not None:
        given["after_clipping"] = clipped


def _plain(value: Absence | Pollution | Naming) -> dict[str, Any]:
    """Return a value as JSON, without its empty fields."""
    plain = {key: one for key, one in asdict(value).items() if one not in (None, "", {}, ())}
    if "parameters" in plain:
        plain["parameters"] = list(plain["parameters"])
    if isinstance(value, Naming) and value.each:
        plain["each"] = {name: _plain(one) for name, one in value.each.items()}
    return {key: str(one) if key in ("reason", "code", "level") else one for key, one in plain.items()}


def fisher_factor(p: Provenance, unit: str | None = None) -> tuple[float, str]:
    """Return the factor that makes stored values means per unit, and the unit; see `Importance.as_fisher`.

    Raises:
        ScaleError: What the factor needs is not known, or the unit cannot be reached; the message says which.
    """
    if unit is not None:
        check_choice("unit", unit, UNITS)
    if p.kind == "fisher":
        if unit is not None and p.unit not in (None, unit):
            raise ScaleError(f"This Fisher is per {p.unit} and cannot be turned into one per {unit}: measure it so.")
        return 1.0, p.unit or unit or "example"
    if p.bias_corrected is False:
        raise ScaleError("This Squisher was extracted without bias correction: extract it again with it.")
    if p.loss_reduction is None:
        raise ScaleError(
            f"{'batch_size and ' if p.batch_size is None else ''}loss_reduction of this Squisher {'are' if p.batch_size is None else 'is'} not "
            "known, so it has no scale. Give them when extracting (--batch-size, --loss-reduction mean, sum or token_mean), or with "
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
    """Return in which respects the numbers of several importances differ, in words; empty if in no known one."""
    names = ("kind", "unit", "loss_reduction", "batch_size", "batch_tokens", "bias_corrected", "per_unit", "estimator")
    found = []
    for name in names:
        values = list({repr(getattr(p, name)): None for p in provenances})
        if len(values) > 1:
            found.append(f"{name} ({' against '.join(values)})")
    return found


@dataclass(frozen=True)
class Codec:
    """How a file encodes the values, and the error of that.

    Attributes:
        name: `exact`, `log8` or `rank1`.
        spearman: Rank correlation of decoded and original values.
        overlap: The fraction of the largest 0.5%, 10% and 50% that both have in common.
        scale: The total of all decoded values, as a fraction of the original total.
        entries: How many entries, spread evenly over all, the error was measured on.
        before: Codecs that the values went through before this one.
    """

    name: str
    spearman: float | None = None
    overlap: Mapping[str, float | None] = field(default_factory=dict)
    scale: float | None = None
    entries: int | None = None
    before: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return hash((self.name, self.spearman, self.scale, self.entries, self.before))

    def __str__(self) -> str:
        return self.name

    @classmethod
    def read(cls, value: Any) -> Codec:
        """Return a codec from itself, from its name, or from JSON; keys of later versions are left out."""
        if isinstance(value, cls):
            return value
        value, kinds = {"name": value} if isinstance(value, str) else value, types_of(cls)
        known = dict(value) if isinstance(value, Mapping) else {}
        known = {key: one for key, one in known.items() if key in kinds and one is not None}
        if "name" not in known or not all(fits(one, kinds[key]) for key, one in known.items()):
            raise ArgumentError(f"The provenance has {value!r} where a codec and its error belong.")
        return cls(**{**known, "before": tuple(known.get("before", ()))})

    def plain(self) -> dict[str, Any]:
        """Return the codec as JSON."""
        found = {key: one for key, one in asdict(self).items() if one not in (None, {}, ())}
        return {**found, "before": list(self.before)} if self.before else found

    def then(self, name: str) -> Codec | None:
        """Return the codec `name` for values that went through this one before; None if they were always exact."""
        before = self.before + ((self.name,) if self.name != "exact" else ())
        return None if name == "exact" and not before else Codec(name, before=before)


for _class in (Provenance, Codec):
    types_of(_class)  # as at the end of facts.py
