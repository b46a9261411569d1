"""Everything that the page shows, as plain values: what `squisher report --json` prints and what the page embeds.

Importances are read in pieces; memory does not grow with their size. What cannot be computed (values that are invalid,
scales that differ) is a sentence in its place, because a report on a broken file is the one that is needed most.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from torch import Tensor

from ..analysis.health import Health, examine
from ..errors import FileError, SquisherError, SquisherWarning
from ..importance import Importance
from .atlas import grid, labels, layers_in_order, place
from .concentration import concentration
from .model import on_model
from .pairs import agreement_of, similarities_between
from .tables import facts
from .words import answer, counted, in_words, summary

__all__ = ["FRACTIONS", "SHARES", "Subject", "collect", "depth_of"]

FRACTIONS = (0.0001, 0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
"""Of the entries, the largest first: what share of the importance do they hold?"""

SHARES = (0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
"""Of the importance: how few entries hold it?"""

ALL_PAIRS = 4
"""Up to so many importances each is compared with each; of more, each with the first."""

_SAID = ("kind", "values", "range")  # by the sentences and the totals
_HIDDEN = ("sum", "sum_of_squares", "live_names")  # long, and said by the rows

Progress = Callable[[str, int, int], None]
"""Called with what is being done, the entries done and the entries in all."""


@dataclass(frozen=True)
class Subject:
    """One importance of a report: what to call it, and the weights of its model where they are at hand."""

    name: str
    importance: Importance
    weights: Mapping[str, Tensor] | None = None


def collect(subjects: Sequence[Subject], progress: Progress | None = None) -> dict[str, Any]:
    """Compute everything that a report shows.

    Args:
        subjects: At least one importance.
        progress: Called with what is being done, the entries done and the entries in all.

    Returns:
        Plain values for JSON; what is not defined is None. Tables are mappings from column to values.

    Raises:
        FileError: A file cannot be read.
        SquisherError: There is no importance, or two have one name.
    """
    if not subjects:
        raise SquisherError("A report needs at least one importance.")
    names = [subject.name for subject in subjects]
    if len(set(names)) < len(names):
        raise SquisherError(f"Every importance of a report needs a name of its own; these are {', '.join(names)}.")
    found = [_one(subject, progress) for subject in subjects]
    pairs = [_pair(a, b, progress) for a, b in _pairs(subjects)]
    tasks = {subject.name: subject.importance for subject in subjects}
    document: dict[str, Any] = {
        "format": "squisher report 1",
        "summary": "",
        "overview": _overview(found),
        "importances": found,
        "agreements": pairs,
        "tasks": _or_sentence(lambda: similarities_between(tasks)) if len(tasks) > 1 else None,
    }
    document["summary"] = summary(document)
    return _plain(document)


def _pairs(subjects: Sequence[Subject]) -> list[tuple[Subject, Subject]]:
    if len(subjects) <= ALL_PAIRS:
        return list(combinations(subjects, 2))
    return [(subjects[0], other) for other in subjects[1:]]


def _pair(a: Subject, b: Subject, progress: Progress | None) -> dict[str, Any]:
    told = _as(f"comparing {a.name} and {b.name}", progress)
    return {"a": a.name, "b": b.name, **_or_sentence(lambda: agreement_of(a.importance, b.importance, told))}


# -- one importance ----------------------------------------------------------------------------------------------------


def _one(subject: Subject, progress: Progress | None) -> dict[str, Any]:
    importance = subject.importance
    health = examine(importance, progress=_as(f"reading {subject.name}", progress))
    provenance = {key: value for key, value in importance.provenance.to_dict().items() if key not in _HIDDEN}
    if isinstance(provenance.get("model"), dict):
        provenance["model"] = {key: value for key, value in provenance["model"].items() if key != "content"}
    places = [place(row.name) for row in health.rows]
    totals = health.totals
    depth, budget = depth_of(health), _or_sentence(lambda: _budget(importance, totals.numel))
    return {
        "name": subject.name,
        "in_words": in_words(importance.provenance),
        "facts": [list(fact) for fact in facts(importance, health) if fact[0] not in _SAID],
        "provenance": provenance,
        "tensors": len(health.rows),
        "totals": totals.to_dict(),
        "diagnoses": [asdict(diagnosis) for diagnosis in health.diagnoses],
        "parameters": _parameters(health),
        "atlas": grid(
            places, "mean", [row.values.mean for row in health.rows], [row.values.numel for row in health.rows]
        ),
        "depth": depth,
        "budget": budget,
        "answer": answer(depth, budget),
        "model": None if subject.weights is None else _or_sentence(lambda: on_model(importance, subject.weights or {})),
    }


def _parameters(health: Health) -> dict[str, list[Any]]:
    total = health.totals.total
    values = [row.values for row in health.rows]
    return {
        "name": [row.name for row in health.rows],
        "shape": ["×".join(map(str, row.shape)) or "scalar" for row in health.rows],
        "numel": [math.prod(row.shape) for row in health.rows],
        "share": [v.total / total if total else math.nan for v in values],
        **{key: [getattr(v, key) for v in values] for key in ("mean", "median", "p90", "max")},
        "zeros": [v.zeros / v.numel if v.numel else math.nan for v in values],
    }


def depth_of(health: Health) -> dict[str, list[Any]]:
    """Return what each layer holds, in the order of the network."""
    places = [place(row.name) for row in health.rows]
    layers = layers_in_order(places)
    sums, numels = dict.fromkeys((one.layer for one in layers), 0.0), dict.fromkeys((one.layer for one in layers), 0)
    for row, one in zip(health.rows, places, strict=True):
        sums[one.layer] += row.values.total
        numels[one.layer] += row.values.numel
    total, numel = health.totals.total, health.totals.numel
    return {
        "layer": list(sums),
        "label": labels(layers),
        "numel": list(numels.values()),
        "entries": [n / numel if numel else math.nan for n in numels.values()],
        "share": [s / total if total else math.nan for s in sums.values()],
        "mean": [s / n if n else math.nan for s, n in zip(sums.values(), numels.values(), strict=True)],
    }


def _budget(importance: Importance, numel: int) -> dict[str, Any]:
    kept, needed = concentration(importance, [math.floor(fraction * numel) for fraction in FRACTIONS], SHARES)
    return {
        "kept": {
            "fraction": list(FRACTIONS),
            "k": [held.k for held in kept],
            "share": [held.share for held in kept],
        },
        "needed": {
            "share": list(SHARES),
            "k": [held.k for held in needed],
            "fraction": [held.k / numel for held in needed],
            "sparsity": [1 - held.k / numel for held in needed],
        },
    }


def _overview(found: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return a row for each importance."""
    return {
        "name": [item["name"] for item in found],
        "kind": [item["provenance"]["kind"] for item in found],
        "tensors": [item["tensors"] for item in found],
        **{key: [item["totals"][key] for item in found] for key in ("numel", "mean", "median", "max")},
        "zeros": [
            item["totals"]["zeros"] / item["totals"]["numel"] if item["totals"]["numel"] else None for item in found
        ],
        "for_90_percent": [
            item["budget"]["needed"]["fraction"][SHARES.index(0.9)] if "needed" in item["budget"] else None
            for item in found
        ],
        "findings": [_counted(item["diagnoses"]) for item in found],
    }


def _counted(diagnoses: Sequence[dict[str, Any]]) -> str:
    found = Counter(diagnosis["severity"] for diagnosis in diagnoses)
    told = [counted(found[severity], severity) for severity in ("problem", "warning") if found[severity]]
    return ", ".join(told) or "none"


def _or_sentence(compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SquisherWarning)  # the diagnoses say it
            return compute()
    except FileError:
        raise
    except SquisherError as error:
        return {"error": str(error)}


def _as(what: str, progress: Progress | None) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(what, done, total)


def _plain(value: Any) -> Any:
    """Without nan and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
