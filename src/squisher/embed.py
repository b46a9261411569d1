"""Tasks as vectors: embeddings of importances, distances between them, and how good a ranking by distance is.

An embedding is itself an importance with fewer numbers: one per tensor, one per row, or all of them. So it can be saved, has a
provenance, and follows the same scale rule. A factor common to all tasks does not change distances; a factor of one task does,
which is what `scale` is for.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from .errors import NamingError, SquisherError, check_choice
from .importance import Importance, on_common_scale, without
from .names import align
from .order import TINY
from .storage.tensors import CHUNK, chunks_of, numel_of, one_thread

__all__ = ["distance", "distances", "embedding", "evaluate", "rank"]

BY = ("tensor", "row", "full")
METRICS = ("task2vec", "cosine")


@one_thread()
def embedding(importance: Mapping[str, Tensor], by: str = "tensor", *, exclude: str | None = None) -> Importance:
    """Return a task's vector: the importance that it gives to a network's parameters, summed up.

    Args:
        importance: The importance of a network that all tasks share.
        by: `"tensor"` is one mean per tensor; `"row"` one per output row of every weight, without biases, as Task2Vec;
            `"full"` keeps every entry.
        exclude: A regular expression: parameters to leave out, such as heads that tasks do not share.

    Returns:
        An importance with those numbers, under the names of the parameters.

    Raises:
        SquisherError: Nothing is left, or `by` does not exist.
    """
    check_choice("by", by, BY)
    whole = importance if isinstance(importance, Importance) else Importance(importance)
    whole = without(whole, exclude)
    if by == "full":
        return whole
    filled = [name for name in whole if numel_of(whole, name)]
    if not filled:
        raise SquisherError("The importance has no entry, so there is nothing to sum up.")
    names = [name for name in filled if by == "tensor" or name.rsplit(".", 1)[-1] != "bias"]
    if not names:
        raise NamingError("Only biases are left, and an embedding by row has none of them: use the one by tensor.")
    means = {
        name: torch.tensor([whole.total(name) / numel_of(whole, name)]) if by == "tensor" else _row_means(whole, name)
        for name in names
    }
    # With the shapes, means of different tensors (two tasks' heads) can be told from means of one tensor.
    summed = {"by": by, "shapes": {name: list(whole.shape(name)) for name in names}}
    record = replace(whole.provenance, sum={}, sum_of_squares={}, embedding=summed)
    return Importance(means, **record.to_dict())


def distance(
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    *,
    scale: str = "auto",
    metric: str = "task2vec",
    exclude: str | None = None,
) -> float:
    """Return how far apart two tasks are: 0 for the same, symmetric, at most 1.

    Args:
        a: An importance or an embedding of one.
        b: Another, over the same network.
        scale: How the two are brought to one scale: `"auto"`, `"as_fisher"` or `"stored"`.
        metric: `"task2vec"` is one minus the cosine of a/(a+b) and b/(a+b), without entries that are 0 in both; `"cosine"` is
            one minus the cosine of a and b themselves.
        exclude: A regular expression: parameters to leave out.

    Raises:
        SquisherError: Names or shapes differ, or all entries are 0 in both.
    """
    check_choice("metric", metric, METRICS)
    first, second = on_common_scale([a, b], scale)
    return _distance(first, second, metric, exclude, ("one task", "the other task"))


@one_thread()
def _distance(
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    metric: str,
    exclude: str | None,
    called: tuple[str, str],
) -> float:
    advice = "Leave out what tasks do not share (heads) with exclude."
    names = align(first, second, called, exclude=exclude, both=True, advice=advice)
    _check_summed(first, second, names, called, advice)
    products = np.zeros(3)  # sums of u·w, u², w²
    seen = False
    for name in names:
        for chunk_a, chunk_b in zip(chunks_of(first, name), chunks_of(second, name), strict=True):
            u, w = _pair(chunk_a, chunk_b, metric)
            seen = seen or u.size > 0
            products += (np.dot(u, w), np.dot(u, u), np.dot(w, w))
    if not seen:
        raise SquisherError("Both importances are 0 everywhere, so there is nothing to compare.")
    inner, norm_a, norm_b = products
    if norm_a == 0 or norm_b == 0:
        return 1.0  # one of them is 0 everywhere
    return float(max(0.0, 1.0 - inner / math.sqrt(norm_a * norm_b)))


def _check_summed(
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    names: Collection[str],
    called: tuple[str, str],
    advice: str,
) -> None:
    """Refuse embeddings of two kinds, or of tensors of different shapes."""
    summed = [(one.provenance.embedding if isinstance(one, Importance) else None) or {} for one in (first, second)]
    kinds = [f"is an embedding by {one['by']}" if "by" in one else "has every entry" for one in summed]
    if kinds[0] != kinds[1]:
        raise NamingError(f"{called[0]} {kinds[0]}, and {called[1]} {kinds[1]}: make both in one way.")
    shapes = [one.get("shapes", {}) for one in summed]
    for name in names:
        found = [tuple(one[name]) for one in shapes if name in one]
        if len(set(found)) > 1:
            raise NamingError(
                f"{name!r} has the shape {found[0]} in {called[0]} and {found[1]} in {called[1]}. {advice}"
            )


def distances(
    tasks: Mapping[str, Mapping[str, Tensor]],
    *,
    scale: str = "auto",
    metric: str = "task2vec",
    exclude: str | None = None,
) -> tuple[list[str], Tensor]:
    """Return all distances between several tasks: their names, and a symmetric matrix with zeros on its diagonal."""
    check_choice("metric", metric, METRICS)
    names = list(tasks)
    scaled = dict(zip(names, on_common_scale(list(tasks.values()), scale), strict=True))
    matrix = torch.zeros(len(names), len(names), dtype=torch.float64)
    for j, one in enumerate(names):
        for k in range(j):
            matrix[j, k] = _distance(
                scaled[one], scaled[names[k]], metric, exclude, (f"task {one!r}", f"task {names[k]!r}")
            )
            matrix[k, j] = matrix[j, k]
    return names, matrix


def rank(
    target: Mapping[str, Tensor],
    sources: Mapping[str, Mapping[str, Tensor]],
    *,
    scale: str = "auto",
    metric: str = "task2vec",
    exclude: str | None = None,
) -> list[tuple[str, float]]:
    """Return source tasks with their distance to the target, nearest first; equally near ones by name.

    Raises:
        SquisherError: There is no source, or scales, names or shapes differ.
    """
    check_choice("metric", metric, METRICS)
    if not isinstance(sources, Mapping) or not sources:
        what = f"a {type(sources).__name__}" if sources else "none"
        raise SquisherError(f"rank needs at least one source task, in a mapping by name, but got {what}.")
    names = list(sources)
    scaled = on_common_scale([target, *sources.values()], scale)
    found = [
        (name, _distance(scaled[0], source, metric, exclude, ("the target", f"task {name!r}")))
        for name, source in zip(names, scaled[1:], strict=True)
    ]
    return sorted(found, key=lambda item: (item[1], item[0]))


def evaluate(predictions: Mapping[str, Sequence[str]], gains: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Score rankings of source tasks, given how well each source really transfers.

    Args:
        predictions: The sources of each target, most promising first.
        gains: The performance of each target after transfer from each source.

    Returns:
        `rho`, the mean predicted rank of the best source (1 is perfect); `mrr`, the mean of its inverse; `ndcg`, the
        discounted gain relative to the best order, with gains scaled to 0..1 per target so that their unit does not matter.

    Raises:
        SquisherError: A target or a source is in one of the two only.
    """
    if not predictions:
        raise SquisherError("There are no predictions to evaluate.")
    ranks, ndcgs = [], []
    for target, order in predictions.items():
        if not order or target not in gains or set(order) != set(gains[target]):
            raise SquisherError(f"The sources ranked for {target!r} are not the ones whose gains are known.")
        known = gains[target]
        best = max(known.values())
        ranks.append(min(k for k, source in enumerate(order, 1) if known[source] == best))
        ndcgs.append(_ndcg([known[source] for source in order]))
    return {
        "rho": float(np.mean(ranks)),
        "mrr": float(np.mean([1 / r for r in ranks])),
        "ndcg": float(np.mean(ndcgs)),
    }


def _ndcg(gains: Sequence[float]) -> float:
    low, high = min(gains), max(gains)
    relevance = [(gain - low) / (high - low) if high > low else 1.0 for gain in gains]

    def discounted(values: Sequence[float]) -> float:
        return sum((2**value - 1) / math.log2(place + 2) for place, value in enumerate(values))

    return discounted(relevance) / discounted(sorted(relevance, reverse=True))


def _pair(a: Tensor, b: Tensor, metric: str) -> tuple[np.ndarray, np.ndarray]:
    x, y = (chunk.double().numpy() for chunk in (a, b))
    x, y = (np.where(values < TINY, 0.0, values) for values in (x, y))
    kept = (x + y) > 0
    x, y = x[kept], y[kept]
    if metric == "cosine":
        return x, y
    u = x / (x + y)
    return u, y / (x + y)


def _row_means(importance: Importance, name: str) -> Tensor:
    shape = importance.shape(name)
    if len(shape) < 2:
        return torch.cat([chunk.float() for chunk in importance.chunks(name)])
    length = shape[1:].numel()
    means, done = torch.empty(shape[0]), 0
    # Chunks of whole rows; a row longer than a chunk is read at once. The means have memory of their own: small tensors between
    # large ones that are freed would fragment it.
    for chunk in importance.chunks(name, length * max(1, CHUNK // length)):
        values = chunk.view(-1, length).double().mean(1)
        means[done : done + len(values)] = values
        done += len(values)
    return means
