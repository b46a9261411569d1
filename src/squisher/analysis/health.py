"""Diagnose an importance: can it be trusted, and for what?

Every value is read once, in chunks. Diagnoses come from the values (zeros, denormals, NaN) and from the provenance (steps,
decay, pollution, precision).
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from ..errors import FileError, ScaleError, SquisherError, SquisherWarning
from ..importance import Importance, Provenance, Spoiler
from ..importance.provenance import Codec
from ..storage.tensors import Computed, Progress, one_thread
from .distribution import Distribution, Tally

__all__ = ["Diagnosis", "Health", "Row", "effective_steps", "examine"]


@dataclass(frozen=True)
class Health:
    """What `examine` found: a row for each parameter, all values together, and the diagnoses, the worst first."""

    rows: list[Row]
    totals: Distribution
    diagnoses: list[Diagnosis]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "tensors": len(self.rows),
            **self.totals.to_dict(),
            "diagnoses": [asdict(diagnosis) for diagnosis in self.diagnoses],
            "rows": [
                {"name": row.name, "shape": list(row.shape), **row.values.to_dict(), "invalid": row.invalid or None}
                for row in self.rows
            ],
        }


@one_thread()
def examine(importance: Mapping[str, Tensor], progress: Progress | None = None) -> Health:
    """Read every value once, and diagnose what is wrong with an importance or worth knowing.

    Args:
        importance: An importance, or a plain mapping of tensors (without provenance to diagnose).
        progress: Called with the entries done and the entries in all.

    Returns:
        Statistics per parameter and overall, and the diagnoses.

    Raises:
        FileError: A file cannot be read. Invalid values are a diagnosis, not an error.
    """
    known = importance if isinstance(importance, Importance) else Importance(Computed(importance))  # not checked yet
    work = sum(math.prod(known.shape(name)) for name in known)
    done = 0
    overall, rows = Tally(), []
    for name in known:
        tally, invalid = Tally(), ""
        try:
            for chunk in known.chunks(name):
                tally.add(chunk)
                done += chunk.numel()
                if progress:
                    progress(done, work)
        except FileError:
            raise
        except SquisherError as error:
            invalid = str(error)
        overall.include(tally)
        rows.append(Row(name, tuple(known.shape(name)), tally.distribution(), invalid))
    if progress and done < work:
        progress(work, work)
    totals = overall.distribution()
    found = [*of_values(rows, totals)]
    if isinstance(importance, Importance):
        found += [*of_provenance(importance)]
    return Health(rows, totals, sorted(found, key=lambda diagnosis: SEVERITIES.index(diagnosis.severity)))


NOISY = 0.25
"""The relative error of single entries above which there is a warning."""

UNUSABLE = 0.7
"""The relative error above which there is a problem: about four independent squares or fewer."""

SEVERITIES = ("problem", "warning", "info")
_TRACK = "keep the average in float32 beside the optimizer with squisher.Tracker"


@dataclass(frozen=True)
class Diagnosis:
    """One finding.

    Attributes:
        code: A short fixed name, for programs.
        severity: `problem` (the numbers are unusable), `warning` (they mean less than they seem to) or `info`.
        sentence: What was found.
        advice: What it means and what to do.
        parameters: The parameters concerned; empty for all.
        numbers: The numbers behind the sentence.
    """

    code: str
    severity: str
    sentence: str
    advice: str = ""
    parameters: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One parameter: its name, shape and distribution, and a sentence if a value is invalid.

    The distribution then covers the values before the invalid chunk.
    """

    name: str
    shape: tuple[int, ...]
    values: Distribution
    invalid: str = ""


def effective_steps(beta2: float, steps: float) -> float:
    """Return the number of equally weighted squares that an exponential average over `steps` steps is worth.

    (Σw)²/Σw² = (1+β)(1−βᵗ) / ((1−β)(1+βᵗ)) for the weights w = βᵗ⁻ⁱ: t for few steps, (1+β)/(1−β) for many.
    """
    left = beta2**steps
    return float(steps) if beta2 == 1 else (1 + beta2) * (1 - left) / ((1 - beta2) * (1 + left))


def of_values(rows: Sequence[Row], totals: Distribution) -> Iterator[Diagnosis]:
    """Yield the diagnoses of the values."""
    bad = [row for row in rows if row.invalid]
    if bad:
        more = f" So have {len(bad) - 1} other parameters." if len(bad) > 1 else ""
        yield Diagnosis(
            "invalid",
            "problem",
            bad[0].invalid.split(". ")[0].rstrip(".") + "." + more,
            "Nothing can be computed from it. The run may have diverged, or the file is damaged: take an earlier checkpoint.",
            [row.name for row in bad],
        )
    empty = [row.name for row in rows if row.values.numel and row.values.zeros == row.values.numel]
    if empty:
        yield Diagnosis(
            "all_zero",
            "warning",
            f"{_parameters(len(empty))} {'is' if len(empty) == 1 else 'are'} exactly 0 everywhere.",
            "No gradient ever reached them, or it underflowed. They say nothing about importance: pruning takes them first, "
            "and merging averages them.",
            empty,
            {"tensors": len(empty)},
        )
    if totals.zeros:
        share = totals.zeros / totals.numel
        mostly = [row.name for row in rows if row.values.zeros > row.values.numel / 2 and row.name not in set(empty)]
        yield Diagnosis(
            "zeros",
            "warning" if share > 0.5 else "info",
            f"{totals.zeros:,} of {totals.numel:,} entries are exactly 0 ({share:.2%}).",
            "Usually rows of an embedding that the data never used, and dead units. They tie: among them, a top-k takes "
            "the first by position.",
            mostly,
            {"share": share, "zeros": totals.zeros, "tensors_mostly_zero": len(mostly)},
        )
    if totals.denormals:
        share = totals.denormals / totals.numel
        yield Diagnosis(
            "denormals",
            "warning" if share > 0.1 else "info",
            f"{totals.denormals:,} of {totals.numel:,} entries are below 1.2e-38 but not 0 ({share:.2%}).",
            "Squares of gradients below 1e-19 have lost their digits. They are kept in the file; applications take them as 0.",
            [row.name for row in rows if row.values.denormals],
            {"share": share, "denormals": totals.denormals},
        )


def of_provenance(importance: Importance) -> Iterator[Diagnosis]:
    """Yield the diagnoses of the provenance."""
    p = importance.provenance
    if p.kind == "squisher":
        yield from _noise(importance)
        yield from _pollution(p)
        yield from _steps_differ(p.steps or {}, bool(p.bias_corrected))
        yield from _scale(importance)
    elif p.examples is not None:
        yield _error_of_mean(p.examples)
    if p.low_precision:
        yield _low_precision(str(p.dtype_of_source), p.kind)
    if p.codec is not None:
        yield _codec(p.codec)
    if p.absent:
        reasons = Counter(map(str, p.absent.values())).most_common()
        listed = "; ".join(f"{count} × {reason}" for reason, count in reasons[:3]) + ("; …" if len(reasons) > 3 else "")
        yield Diagnosis(
            "absent",
            "info",
            f"{_parameters(len(p.absent))} of the model {'has' if len(p.absent) == 1 else 'have'} no importance: {listed}.",
            "Merging averages them, a mask never trains them.",
            list(p.absent),
            {"parameters": len(p.absent)},
        )


def _noise(importance: Importance) -> Iterator[Diagnosis]:
    """Yield how noisy the average is, over few steps or with a short memory."""
    p = importance.provenance
    optimizer, steps = p.optimizer or {}, p.steps or {}
    each = steps.get("per_parameter") or {}
    cases: dict[tuple[float | None, int], list[str]] = {}
    groups = {name: group for group in optimizer.get("groups") or [] for name in group.get("parameters") or []}
    for name in importance:
        facts = {**optimizer, **groups.get(name, {})}
        taken, beta2 = each.get(name, steps.get("min")), facts.get("beta2")
        if taken is not None and (facts.get("meaning") == "sum" if beta2 is None else 0 <= beta2 <= 1):
            cases.setdefault((beta2, int(taken)), []).append(name)
    if not cases:
        return
    sizes = {case: float(case[1]) if case[0] is None else effective_steps(case[0], case[1]) for case in cases}
    (beta2, taken), worth = min(sizes.items(), key=lambda item: item[1])
    error = math.sqrt(2 / worth) if worth else math.inf
    concerned = [name for case, names in cases.items() if sizes[case] == worth for name in names]
    numbers = {"beta2": beta2, "steps": taken, "effective_steps": worth, "relative_error": error if worth else None}
    severity = "problem" if error > UNUSABLE else "warning" if error > NOISY else "info"
    still_filling = beta2 is None or beta2**taken > 0.05
    average = f"β₂ = {beta2:g} and {taken:,} steps" if beta2 is not None else f"{taken:,} steps"
    what = (
        f"{average} average about {worth:.3g} squared gradients: the expected relative error of one entry is {error:.2g} "
        "if batch gradients are Gaussian, and more if they have heavy tails."
    )
    if severity == "info":
        advice = (
            "That is enough to rank entries."
            if error < 0.1
            else "Ranks of single entries are noisy; sums over many are not."
        )
    elif still_filling:
        advice = "Train longer before extracting, or use it for sums over many entries only."
    else:
        advice = f"More steps do not help, because β₂ forgets: use a larger β₂, or {_TRACK} (beta2=0.999)."
    yield Diagnosis(
        "noise" if severity == "info" else "few_steps" if still_filling else "short_memory",
        severity,
        what,
        advice,
        concerned if len(concerned) < len(importance) else [],
        numbers,
    )
    if p.bias_corrected is False and beta2 is not None:
        factor = -math.expm1(taken * math.log(beta2)) if beta2 else 1.0
        yield Diagnosis(
            "not_corrected",
            "warning" if factor < 0.95 else "info",
            f"The values are not corrected for their start at 0: they are {factor:.3g} of the mean squared gradient.",
            "Ranks within one importance are right; do not combine it with others. Extract it again with bias correction.",
            numbers={"factor": factor, "beta2": beta2, "steps": taken},
        )


def _error_of_mean(examples: int) -> Diagnosis:
    error = math.sqrt(2 / examples) if examples > 0 else math.inf
    return Diagnosis(
        "examples",
        "problem" if error > UNUSABLE else "warning" if error > NOISY else "info",
        f"It was measured on {examples:,} examples: the expected relative error of one entry is {error:.2g} if gradients "
        "are Gaussian, and more if they have heavy tails.",
        "" if error <= NOISY else "Measure on more examples.",
        numbers={"examples": examples, "relative_error": error if examples > 0 else None},
    )


_ADVICE = {
    "l2": "Entries with little gradient rank by their size instead. Use AdamW, whose decay is not in the gradient, or "
    "keep the data's gradient apart with squisher.Tracker.",
    "clipping": "Steps with large gradients count less, and the scale is smaller than it seems; ranks hardly change. "
    "A squisher.Tracker that observes before clipping is free of it.",
    "amsgrad": "The running average is meant, not its maximum: check that the key is exp_avg_sq.",
    "mask": "Frozen entries are 0 here, however much they matter: choose no mask by them, and prune or merge nothing that they decide. "
    "Measure a Fisher of the trained model instead (squisher.fisher).",
    "pollution": "Keep the data's gradient apart with squisher.Tracker, if it matters.",
}


def _pollution(p: Provenance) -> Iterator[Diagnosis]:
    for one in p.pollution:
        code = str(one.code) if one.code in _ADVICE else "pollution"
        numbers = {**one.numbers, **({"pollution": str(one.code)} if code == "pollution" else {})}
        severity = "warning" if code in (Spoiler.L2, Spoiler.MASK) else "info"
        text = one.note or f"The squared gradient is not the data's alone: {one}."
        yield Diagnosis(code, severity, text, _ADVICE[code], list(one.parameters), numbers)
    codes = {one.code for one in p.pollution}
    if Spoiler.CLIPPING not in codes and p.after_clipping:
        text = "The squared gradients were taken after clipping."
        yield Diagnosis("clipping", "info", text, _ADVICE["clipping"])
    optimizer = p.optimizer or {}
    if Spoiler.AMSGRAD not in codes and optimizer.get("amsgrad"):
        text = "The optimizer ran with AMSGrad, which also keeps a running maximum."
        key = str(optimizer.get("key", ""))
        yield Diagnosis(
            "amsgrad", "warning" if "max" in key else "info", text, _ADVICE["amsgrad"], numbers={"key": key}
        )


def _steps_differ(steps: Mapping[str, Any], corrected: bool) -> Iterator[Diagnosis]:
    low, high = steps.get("min"), steps.get("max")
    if low is None or high is None or low == high:
        return
    each = steps.get("per_parameter") or {}
    fewer = [name for name, taken in each.items() if taken is not None and taken < high]
    yield Diagnosis(
        "steps_differ",
        "info" if corrected else "warning",
        f"Parameters have taken between {low:,} and {high:,} steps.",
        "Those with fewer were frozen or unused for a while; each is corrected with its own number, so the scales agree."
        if corrected
        else "Without bias correction their scales differ: extract it again with it.",
        fewer,
        {"min": low, "max": high, "parameters": len(fewer)},
    )


def _scale(importance: Importance) -> Iterator[Diagnosis]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SquisherWarning)  # low precision has a diagnosis of its own
            importance.as_fisher()
    except ScaleError as error:
        yield Diagnosis(
            "scale_unknown",
            "info",
            "It cannot be brought to the scale of a Fisher: " + str(error),
            "Pruning, masks and rank comparisons need no scale; merging models of different batch size, EWC and embeddings do.",
        )


_CODEC_ADVICE = {
    "log8": "Every application takes it as it is.",
    "rank1": "Rows and columns have their totals, single entries are off by about a third. Merging, embedding and "
    "consolidation take it at little cost; for pruning and masks log8 or the exact file is safer.",
}


def _codec(codec: Codec) -> Diagnosis:
    """Return what the codec lost, and what its values can still be used for."""
    names = [*codec.before, codec.name]
    worst = "rank1" if "rank1" in names else "log8"
    numbers = {
        "spearman": codec.spearman,
        "scale": codec.scale,
        "entries": codec.entries,
        "overlap": dict(codec.overlap),
    }
    kept = "" if codec.spearman is None else f": rank correlation with the values before {codec.spearman:.4f}"
    return Diagnosis(
        "codec",
        "info",
        f"The values went through the codec {' and then '.join(n for n in names if n != 'exact')}{kept}.",
        _CODEC_ADVICE[worst],
        numbers={key: value for key, value in numbers.items() if value not in (None, {})},
    )


def _low_precision(source: str, kind: str) -> Diagnosis:
    if kind == "fisher":
        text = f"It was measured with a model in {source}: gradients below its resolution are rounded."
        return Diagnosis("low_precision", "info", text, "Measure in float32 where single entries matter.")
    return Diagnosis(
        "low_precision",
        "warning",
        f"The optimizer kept its average in {source}, which cannot hold it: an average that moves by a thousandth of itself a "
        "step is rounded away.",
        "With β₂ = 0.999, 3000 equal gradients c leave 0.39·c² in bfloat16 (0.27 to 0.54, depending on c), because the average "
        "stalls; with Gaussian gradients it is 1.8 times too large, because it never decays. Use ranks, not the scale, "
        f"or {_TRACK}.",
        numbers={"dtype": source},
    )


def _parameters(number: int) -> str:
    return "1 parameter" if number == 1 else f"{number:,} parameters"
