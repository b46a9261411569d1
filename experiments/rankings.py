"""Task embedding's rankings: the order in which a method puts the sources for a target, and how good it is by real transfers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

import squisher

__all__ = ["METRICS", "by_chance", "by_size", "matrices", "measured", "nearest", "rank_correlation", "total"]

METRICS = {"rho": "rho", "MRR": "mrr", "NDCG": "ndcg"}
"""Names of tables -> those of `squisher.embed.evaluate`. NDCG is in percent here."""

Orders = Mapping[str, Sequence[str]]
"""By target, the sources, best first."""


def matrices(importances: Mapping[str, Mapping[str, Mapping[str, Tensor]]], by: str) -> dict[str, np.ndarray]:
    """Return distances between tasks by method.

    Args:
        importances: By task and estimator.
        by: The granularity: "tensor", "row" or "full".

    Returns:
        Task2Vec's distance by every estimator; for "fisher" and "squisher" also with equal traces, and the plain cosine.
    """
    out = {}
    for estimator in next(iter(importances.values())):
        vectors = {task: squisher.embed.embedding(found[estimator], by) for task, found in importances.items()}
        out[estimator] = squisher.embed.distances(vectors)[1].numpy()
        if estimator in ("fisher", "squisher"):
            equal = {task: vector * (1 / total(vector)) for task, vector in vectors.items()}
            out[f"{estimator} (equal traces)"] = squisher.embed.distances(equal, scale="stored")[1].numpy()
            out[f"{estimator} (cosine)"] = squisher.embed.distances(vectors, metric="cosine")[1].numpy()
    return out


def total(vector: Mapping[str, Tensor]) -> float:
    """Return the sum of all entries."""
    return sum(float(vector[name].double().sum()) for name in vector)


def nearest(tasks: Sequence[str], matrix: np.ndarray) -> dict[str, list[str]]:
    """Return the other tasks of each task, nearest first."""
    return {
        task: [tasks[k] for k in np.argsort(matrix[row], kind="stable") if k != row] for row, task in enumerate(tasks)
    }


def by_size(sizes: Mapping[str, int]) -> dict[str, list[str]]:
    """Return the other tasks of each task, those with most data first."""
    return {task: sorted((t for t in sizes if t != task), key=lambda t: (-sizes[t], t)) for task in sizes}


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Return Spearman's correlation of distances, which have no ties."""
    return float(np.corrcoef(a.argsort().argsort(), b.argsort().argsort())[0, 1])


def measured(orders: Orders, gains: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return ρ, MRR and NDCG of an order, as means over targets."""
    found: Any = squisher.embed.evaluate(orders, gains)
    return {metric: found[name] * (100 if metric == "NDCG" else 1) for metric, name in METRICS.items()}


def by_chance(gains: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric for a random order."""
    found = []
    for by_source in gains.values():
        places = np.arange(1, len(by_source) + 1)
        values = np.array(list(by_source.values()))
        best = values == values.max()
        # The best rank of the best sources: P(rank > r) is that of none of them among the first r.
        beyond = np.cumprod([1 - best.sum() / (len(values) - r) for r in range(len(values) - best.sum() + 1)])
        chances = -np.diff(np.concatenate([[1.0], beyond]))
        ranks = places[: len(chances)]
        spread = values.max() - values.min()
        worth = 2 ** ((values - values.min()) / spread if spread else np.ones_like(values)) - 1
        discounts = 1 / np.log2(places + 1)
        ndcg = worth.mean() * discounts.sum() / (np.sort(worth)[::-1] * discounts).sum()
        found.append([(chances * ranks).sum(), (chances / ranks).sum(), 100 * ndcg])
    return dict(zip(METRICS, np.mean(found, 0).tolist(), strict=True))
