"""Describe an importance, and the findings of a report, in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..analysis.distribution import Distribution
from ..importance import Provenance
from .drawing import fixed, number, share, whole

__all__ = ["answer", "counted", "facts", "in_words", "listed", "shape_text", "short_names", "summary"]

_LABELS = {
    "data": "the labels of the data (the empirical Fisher)",
    "sampled": "labels drawn from the model (an unbiased estimate of the Fisher)",
    "exact": "every label, weighted by the model's own probability (the Fisher itself)",
}
_REDUCTIONS = {"mean": "averaged over examples", "sum": "summed over examples", "token_mean": "averaged over tokens"}


def in_words(p: Provenance) -> list[str]:
    """Describe an importance: one sentence for each known fact."""
    return _squisher(p) if p.kind == "squisher" else _fisher(p)


def _squisher(p: Provenance) -> list[str]:
    optimizer, steps = p.optimizer or {}, p.steps or {}
    who = optimizer.get("class") or "an optimizer"
    kept = "sum" if optimizer.get("meaning") == "sum" else "running average"
    what = f"The {kept} of squared gradients that {who} kept while it trained the network"
    low, high = steps.get("min"), steps.get("max")
    if low is not None and high is not None:
        what += f", after {whole(low)} steps" if low == high else f", after {whole(low)} to {whole(high)} steps"
    sentences = [f"{what}. No data were needed to read it."]
    beta2 = optimizer.get("beta2")
    if beta2 is not None and 0 < beta2 < 1:
        sentences.append(f"Its memory is about {whole(round(1 / (1 - beta2)))} steps long (β₂ = {beta2:g}).")
    if p.bias_corrected:
        sentences.append("It is corrected for its start at zero.")
    elif p.bias_corrected is False:
        sentences.append("It is not corrected for its start at zero.")
    size = None if p.batch_size is None else f"{p.batch_size:g} examples per step"
    how = _REDUCTIONS.get(p.loss_reduction or "")
    if p.per_unit:
        sentences.append(f"It has been brought to the scale of a Fisher, a mean per {p.unit or 'example'}.")
    elif size and how:
        sentences.append(f"Each gradient was the gradient of {size}, with the loss {how}.")
    elif size:
        sentences.append(f"Each gradient was the gradient of {size}; how the loss was reduced is not known.")
    else:
        sentences.append("The batch size is not known, so ranks can be trusted but the scale cannot.")
    return sentences


def _fisher(p: Provenance) -> list[str]:
    how = p.estimator or {}
    labels = _LABELS.get(str(how.get("labels")))
    what = "The diagonal of the Fisher information, measured on data"
    sentences = [f"{what} with {labels}." if labels else f"{what}; how is not recorded."]
    if p.examples is not None:
        sentences.append(f"It is a mean over {whole(p.examples)} examples.")
    if how.get("per") == "batch":
        sentences.append("Gradients were squared once per batch, not once per example.")
    return sentences


def facts(p: Provenance, totals: Distribution, parameters: int) -> list[tuple[str, str]]:
    """Return the known facts about an importance, as pairs of a label and a few words."""
    optimizer, steps = p.optimizer or {}, p.steps or {}
    known: list[tuple[str, str | None]] = []
    if p.kind == "squisher":
        what = "Squisher: the mean squared gradient that an optimizer kept"
        if p.bias_corrected is False:
            what += ", not bias-corrected"
        known.append(("kind", what))
        beta2 = f", β₂ = {optimizer['beta2']:g}" if optimizer.get("beta2") is not None else ""
        known.append(("optimizer", f"{optimizer['class']}{beta2}" if optimizer.get("class") else None))
        low, high = steps.get("min"), steps.get("max")
        if low is not None and high is not None:
            known.append(("steps", f"{low:,}" if low == high else f"{low:,} to {high:,}"))
        known.append(("batch", _batch(p)))
    else:
        how = p.estimator or {}
        labels = f", {how['labels']} labels" if how.get("labels") else ""
        per = f", squared per {how['per']}" if how.get("per") else ""
        known.append(("kind", f"Fisher: measured on data{labels}{per}"))
        known.append(("examples", f"{p.examples:,}" if p.examples is not None else None))
    per_unit = p.kind == "fisher" or p.per_unit
    known.append(("unit", (f"mean per {p.unit}" if per_unit else p.unit) if p.unit else None))
    known.append(("scale", f"multiplied by {p.scale:g}" if p.scale != 1 else None))
    known.append(("values", f"{totals.numel:,} in {counted(parameters, 'parameter')}"))
    known.append(("source type", p.dtype_of_source))
    known.append(("names", str(p.naming) if p.naming else None))
    low_, high_, mean, median = (number(value) for value in (totals.min, totals.max, totals.mean, totals.median))
    known.append(("range", f"{low_} to {high_}; mean {mean}, median {median}"))
    return [(label, value) for label, value in known if value]


def _batch(p: Provenance) -> str:
    size = "size not known" if p.batch_size is None else f"{p.batch_size:g} examples"
    tokens = f", {p.batch_tokens:g} tokens" if p.batch_tokens is not None else ""
    reductions = {"mean": "mean loss", "sum": "summed loss", "token_mean": "mean loss over tokens"}
    return f"{size}{tokens}, {reductions.get(p.loss_reduction or '', 'loss reduction not known')}"


def summary(document: Mapping[str, Any]) -> str:
    """Return the one line at the top of a report."""
    importances, agreements = document["importances"], document["agreements"]
    first = importances[0]
    entries = f"{whole(first['totals']['numel'])} entries in {counted(first['tensors'], 'parameter')}"
    parts = []
    if len(importances) == 1:
        parts += [*first["answer"], f"There are {entries}."]
    else:
        same = len({item["totals"]["numel"] for item in importances}) == 1
        parts.append(
            f"{len(importances)} importances" + (f", each of {entries}." if same else f"; the first has {entries}.")
        )
        known = [item for item in agreements if item.get("spearman") is not None]
        if len(known) == 1:
            overlaps = known[0]["overlaps"]
            common = dict(zip(overlaps["fraction"], overlaps["overlap"], strict=True)).get(0.01)
            more = "" if common is None else f", and {share(common)} of the largest 1% are in both"
            parts.append(f"Their ranks agree at {fixed(known[0]['spearman'])} (Spearman){more}.")
        elif known:
            low, high = (f([item["spearman"] for item in known]) for f in (min, max))
            parts.append(f"Their ranks agree at {fixed(low)} to {fixed(high)} (Spearman).")
    parts.append(_worst(importances))
    return " ".join(parts)


def answer(depth: Mapping[str, Any], budget: Mapping[str, Any]) -> list[str]:
    """Say where the importance is: which layers hold the most, and how few entries hold most of it."""
    known = [
        (part, k) for k, part in enumerate(depth["share"]) if part is not None and part > 0
    ]  # NaN if the total is 0
    if not known:
        return ["All entries are 0: nothing matters more than anything else."]
    top = [k for _, k in sorted(known, key=lambda pair: (-pair[0], pair[1]))[:3]]
    shown = [f"{share(depth['share'][k])} in {share(depth['entries'][k])} of the entries" for k in top]
    sentences = [f"{depth['label'][top[0]]} holds {shown[0].replace(' in ', ' of the importance in ', 1)}."]
    if len(top) > 1:
        others = " and ".join(f"{depth['label'][k]} ({what})" for k, what in zip(top[1:], shown[1:], strict=True))
        sentences.append(f"Then {'comes' if len(top) == 2 else 'come'} {others}.")
    if "needed" in budget:
        at = budget["needed"]["share"].index(0.9)
        sentences.append(f"90% of the importance lies in {share(budget['needed']['fraction'][at])} of all entries.")
    return sentences


def _worst(importances: list[Mapping[str, Any]]) -> str:
    counts = {
        severity: sum(d["severity"] == severity for item in importances for d in item["diagnoses"])
        for severity in ("problem", "warning")
    }
    what = "it" if len(importances) == 1 else "them"
    if counts["problem"]:
        return f"{counted(counts['problem'], 'problem')} found: see below before using {what}."
    strange = [item["name"] for item in importances if "error" in (item.get("model") or {})]
    if strange:
        return f"{' and '.join(strange)}: no weight of the model that was given has this importance, see below."
    if counts["warning"]:
        return f"No problem, {counted(counts['warning'], 'warning')}."
    return f"Nothing speaks against using {what}."


def counted(count: int, noun: str) -> str:
    """Write `1 layer`, `2 layers`."""
    return f"{whole(count)} {noun}{'' if count == 1 else 's'}"


def listed(names: Sequence[str], count: int = 4) -> str:
    """Return the first few names, and how many more there are."""
    more = f" and {whole(len(names) - count)} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more


def shape_text(shape: Sequence[int]) -> str:
    """Write `3×4`."""
    return "×".join(map(str, shape)) or "scalar"


def short_names(names: Sequence[str], width: int) -> list[str]:
    """Return names that fit into a width and still differ.

    A name that is too long loses its first parts without a number, because the parameters of a network mostly differ in the layer's
    number and at the end. Names that would become equal stay as they are.
    """
    short = [_without_beginning(name, width) for name in names]
    often = Counter(short)
    return [name if often[label] > 1 else label for name, label in zip(names, short, strict=True)]


def _without_beginning(name: str, width: int) -> str:
    kept: list[str | None] = list(name.split("."))
    for k in range(len(kept) - 1):
        text = _joined(kept)
        if len(text) <= width:
            return text
        if not any(letter.isdecimal() for letter in kept[k] or ""):
            kept[k] = None
    return _joined(kept)


def _joined(parts: Sequence[str | None]) -> str:
    """Join parts with dots, and with one ellipsis for the parts left out."""
    out = ""
    for part in parts:
        if part is None:
            out += "" if out.endswith("…") else "…"
        else:
            out += part if not out or out.endswith("…") else f".{part}"
    return out
