"""Compute everything that a report shows, as plain values: `squisher report --json` prints them, and the page embeds them.

Importances are read in chunks. Where something cannot be computed (invalid values, scales that differ), the error's message takes
its place, because a report is needed most for a broken file. Several importances are compared on the parameters that all have
with one shape; the others (heads of different tasks) are listed.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from ..analysis.agreement import Agreement, compare, json_safe
from ..analysis.distribution import LOG10_EDGES, places_of
from ..analysis.health import Health, examine
from ..embed import distances, embedding
from ..errors import FileError, NamingError, ScaleError, SquisherError, SquisherWarning, near
from ..importance import Importance
from ..names import shared
from ..order import Rounded, Source, concentration
from ..prune import scores
from ..storage.tensors import chunks_of, numel_of, one_thread
from .atlas import Place, grid, labels, layers_in_order, place
from .words import answer, counted, facts, in_words, shape_text, summary

__all__ = [
    "FRACTIONS", "SHARES", "SPARSITIES", "Subject", "agreement_data", "atlas_of", "collect", "depth_of", "joint_counts",
]  # fmt: skip

FRACTIONS = (0.0001, 0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
"""Fractions of the entries, the largest first, whose share of the importance is computed."""

SHARES = (0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
"""Shares of the importance for which the fewest entries are computed."""

ALL_PAIRS = 4
"""Up to this many importances all pairs are compared; of more, each is compared with the first."""

_SAID = ("kind", "values", "range")  # the sentences and totals say it
_HIDDEN = ("sum", "sum_of_squares", "live_names")  # long, and shown in the rows

Progress = Callable[[str, int, int], None]
"""Called with the current work, the entries done and the entries in all."""


@dataclass(frozen=True)
class Subject:
    """One importance of a report: its name, and the weights of its model if they are given."""

    name: str
    importance: Importance
    weights: Mapping[str, Tensor] | None = None


def collect(subjects: Sequence[Subject], progress: Progress | None = None) -> dict[str, Any]:
    """Compute everything that a report shows.

    Args:
        subjects: At least one importance.
        progress: Called with the current work, the entries done and the entries in all.

    Returns:
        Plain values for JSON, None for undefined ones. Tables are mappings from column to values.

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
    return json_safe(document)


def _pairs(subjects: Sequence[Subject]) -> list[tuple[Subject, Subject]]:
    if len(subjects) <= ALL_PAIRS:
        return list(combinations(subjects, 2))
    return [(subjects[0], other) for other in subjects[1:]]


def _pair(a: Subject, b: Subject, progress: Progress | None) -> dict[str, Any]:
    report = _as(f"comparing {a.name} and {b.name}", progress)
    return {"a": a.name, "b": b.name, **_or_sentence(agreement_of, a.importance, b.importance, report)}


# -- one importance ----------------------------------------------------------------------------------------------------


def _one(subject: Subject, progress: Progress | None) -> dict[str, Any]:
    importance = subject.importance
    health = examine(importance, progress=_as(f"reading {subject.name}", progress))
    provenance = {key: value for key, value in importance.provenance.to_dict().items() if key not in _HIDDEN}
    if isinstance(provenance.get("model"), dict):
        provenance["model"] = {key: value for key, value in provenance["model"].items() if key != "content"}
    totals = health.totals
    depth, budget = depth_of(health), _or_sentence(_budget, importance, totals.numel)
    return {
        "name": subject.name,
        "in_words": in_words(importance.provenance),
        "facts": [
            list(fact) for fact in facts(importance.provenance, totals, len(health.rows)) if fact[0] not in _SAID
        ],
        "provenance": provenance,
        "tensors": len(health.rows),
        "totals": totals.to_dict(),
        "diagnoses": [asdict(diagnosis) for diagnosis in health.diagnoses],
        "parameters": _parameters(health),
        "atlas": atlas_of(health),
        "depth": depth,
        "budget": budget,
        "answer": answer(depth, budget),
        "model": None if subject.weights is None else _or_sentence(on_model, importance, subject.weights),
    }


def _parameters(health: Health) -> dict[str, list[Any]]:
    total = health.totals.total
    values = [row.values for row in health.rows]
    return {
        "name": [row.name for row in health.rows],
        "shape": [shape_text(row.shape) for row in health.rows],
        "numel": [math.prod(row.shape) for row in health.rows],
        "share": [v.total / total if total else math.nan for v in values],
        **{key: [getattr(v, key) for v in values] for key in ("mean", "median", "p90", "max")},
        "zeros": [v.zeros / v.numel if v.numel else math.nan for v in values],
    }


def atlas_of(health: Health) -> dict[str, Any]:
    """Return the mean importance of each kind of parameter in each layer."""
    values = [row.values for row in health.rows]
    return grid([place(row.name) for row in health.rows], "mean", [v.mean for v in values], [v.numel for v in values])


def depth_of(health: Health) -> dict[str, list[Any]]:
    """Return each layer's share of the importance and of the entries, in the order of the network."""
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
    kept, needed = concentration(_sources(importance), [math.floor(fraction * numel) for fraction in FRACTIONS], SHARES)
    return {
        "kept": {
            "fraction": list(FRACTIONS),
            "k": [largest.k for largest in kept],
            "share": [largest.share for largest in kept],
        },
        "needed": {
            "share": list(SHARES),
            "k": [largest.k for largest in needed],
            "fraction": [largest.k / numel for largest in needed],
            "sparsity": [1 - largest.k / numel for largest in needed],
        },
    }


def _overview(found: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the table that compares the importances."""
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
    parts = [counted(found[severity], severity) for severity in ("problem", "warning") if found[severity]]
    return ", ".join(parts) or "none"


def _or_sentence(compute: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Return the result of a function, or the message of its error under "error"."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SquisherWarning)  # there is a diagnosis for it
            return compute(*args)
    except FileError:
        raise
    except SquisherError as error:
        return {"error": str(error)}


def _as(what: str, progress: Progress | None) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(what, done, total)


SPARSITIES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
"""Shares of the entries to remove, the cheapest first."""


def on_model(importance: Importance, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return how an importance fits a model, and what setting its cheapest weights to zero would add to the loss.

    The cost of an entry is ½θ²F. If the importance can be brought to the scale of a Fisher, the sum over the removed entries is
    the second-order increase of the mean loss; otherwise only its share of the whole is known.

    Args:
        importance: The importance of this model.
        weights: Any mapping, in memory or in files; read in chunks.

    Raises:
        NamingError: No weight has an importance of its shape.
    """
    fitting = set(shared([importance, weights]))
    if not fitting:
        first = next(iter(importance))
        raise NamingError(
            f"The importance does not belong to this model: no weight has the name and shape of {first!r} or of any other."
            f"{near(first, weights)}"
        )
    try:
        scaled, absolute = importance.as_fisher(), True
    except ScaleError:
        scaled, absolute = importance, False
    covered = scaled.restrict(fitting.__contains__)
    numel = sum(numel_of(covered, name) for name in covered)
    removed = [math.floor(sparsity * numel) for sparsity in SPARSITIES]
    kept, _ = concentration(_sources(scores(weights, covered)), [0, *(numel - some for some in removed)])
    total = kept.pop(0).rest  # if none is kept
    return {
        "tensors": len(weights),
        "entries": sum(numel_of(weights, name) for name in weights),
        "covered_tensors": len(fitting),
        "covered_entries": numel,
        "without_importance": [name for name in weights if name not in fitting],
        "without_weight": [name for name in importance if name not in fitting],
        "unit": scaled.provenance.unit if absolute else None,
        "pruning": {
            "sparsity": list(SPARSITIES),
            "removed": removed,
            "share": [largest.rest / total for largest in kept],
            "loss": [largest.rest if absolute else math.nan for largest in kept],
        },
    }


_PLACES = len(LOG10_EDGES) - 1
_MAX_DENSITY = 60  # bins along an axis of the density


def agreement_of(a: Importance, b: Importance, progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
    """Compare two importances on their common parameters, overall and per layer; return plain values.

    Raises:
        SquisherError: They share no parameter, or values are invalid.
    """
    alike, unlike = _alike([a, b])
    first, second = (side.restrict(alike.__contains__) if alike else side for side in (a, b))
    return {**agreement_data(compare(first, second, progress=progress), first, second), "left_out": unlike}


def agreement_data(agreement: Agreement, a: Importance, b: Importance) -> dict[str, Any]:
    """Return the data of charts and tables of an agreement; reads the importances once more."""
    plain = agreement.to_dict()
    rows = {key: [row[key] for row in plain["rows"]] for key in (plain["rows"] or [{"name": ""}])[0]}
    places = [place(name) for name in rows["name"]]
    overlaps = {key: [o[key] for o in plain["overlaps"]] for key in ("fraction", "k", "overlap", "chance")}
    overlaps["reaches_zeros"] = [o.threshold_a == 0 or o.threshold_b == 0 for o in agreement.overlaps]
    return {
        **plain,
        "overlaps": overlaps,
        "rows": rows,
        "layers": _per_layer(a, b, places, rows["name"]),
        "atlas": grid(
            places, "spearman", [float("nan") if v is None else v for v in rows["spearman"]], [1] * len(places)
        ),
        "density": _density(agreement, a, b),
    }


def _alike(importances: Sequence[Importance]) -> tuple[set[str], list[str]]:
    """Return the names that all importances have with one shape, and the others (mostly heads of different tasks)."""
    names = dict.fromkeys(name for importance in importances for name in importance)
    alike = set(shared(importances))
    return alike, [name for name in names if name not in alike]


@one_thread()
def _per_layer(a: Importance, b: Importance, places: Sequence[Place], names: Sequence[str]) -> dict[str, list[Any]]:
    """Return the rank correlation of the entries of each layer, rounded to 16 bits, in two passes."""
    members: dict[str, list[str]] = {}
    for name, one in zip(names, places, strict=True):
        members.setdefault(one.layer, []).append(name)
    layers = layers_in_order(places)
    correlations = []
    for layer in layers:
        ranks = Rounded()
        ranks.count(_both(a, b, members[layer.layer]))
        ranks.cross(_both(a, b, members[layer.layer]))
        correlations.append(ranks.spearman())
    return {
        "layer": [layer.layer for layer in layers],
        "label": labels(layers),
        "numel": [sum(numel_of(a, name) for name in members[layer.layer]) for layer in layers],
        "spearman": correlations,
    }


def _both(a: Importance, b: Importance, names: Sequence[str]) -> Iterator[tuple[Tensor, Tensor]]:
    for name in names:
        yield from zip(a.chunks(name), b.chunks(name), strict=True)


def joint_counts(
    agreement: Agreement,
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Return the joint histogram of two importances over tenths of a decade, without entries that are 0 in either."""
    sides = [side if isinstance(side, Importance) else Importance(side) for side in (a, b)]
    counts = torch.zeros(_PLACES * _PLACES, dtype=torch.int64)
    done = 0
    for row in agreement.rows:
        for x, y in zip(sides[0].chunks(row.name), sides[1].chunks(row.name), strict=True):
            both = (x > 0) & (y > 0)
            place = places_of(x[both]) * _PLACES + places_of(y[both])
            counts.index_add_(0, place, torch.ones_like(place))
            done += x.numel()
            if progress:
                progress(done, agreement.numel)
    return counts.view(_PLACES, _PLACES)


@one_thread()
def _density(agreement: Agreement, a: Importance, b: Importance) -> dict[str, Any]:
    """Return the joint histogram with bins so wide that a few dozen fill an axis."""
    counts = joint_counts(agreement, a, b)
    filled = [int(k) for k in (counts.sum(0) + counts.sum(1)).nonzero()]
    if not filled:
        return {"first_edge": 0.0, "step": 0.1, "bins": 0, "cells": [], "shown": 0}
    width = math.ceil((filled[-1] + 1 - filled[0]) / _MAX_DENSITY)
    first = filled[0] // width * width
    bins = (filled[-1] - first) // width + 1
    first = min(first, _PLACES - bins * width)  # at the very end of the scale
    part = counts[first : first + bins * width, first : first + bins * width]
    squares = part.reshape(bins, width, bins, width).sum((1, 3))
    cells = [[int(x), int(y), int(squares[x, y])] for x, y in squares.nonzero().tolist()]
    return {
        "first_edge": round(LOG10_EDGES[first], 6),
        "step": round(width / 10, 6),
        "bins": bins,
        "cells": cells,
        "shown": sum(cell[2] for cell in cells),
    }


def similarities_between(tasks: Mapping[str, Importance]) -> dict[str, Any]:
    """Return distances and similarities (1 − distance) of tasks, from the mean importance of each common tensor.

    Raises:
        SquisherError: There is no common parameter, or no common scale.
    """
    alike, unlike = _alike(list(tasks.values()))
    if not alike:
        raise SquisherError("No parameter is in all importances, so tasks cannot be compared.")
    names, matrix = distances({name: embedding(task.restrict(alike.__contains__)) for name, task in tasks.items()})
    return {"tasks": names, "similarity": (1 - matrix).tolist(), "distance": matrix.tolist(), "left_out": unlike}


def _sources(values: Mapping[str, Tensor]) -> dict[str, Source]:
    return {name: partial(chunks_of, values, name) for name in values}
