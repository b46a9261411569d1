"""Elastic weight consolidation on permuted MNIST: the ten digits, with the pixels in another order in each of ten contexts.

**The paper.** Task-incremental permuted MNIST after van de Ven et al.: images padded to 32×32, 1024-1000-1000-100, 5,000
iterations a context, batch 128, Adam with rate 1e-4 that is never reset; the exact Fisher over all 60,000 images of a context.

**Here.** Scale `cpu` is reduced: 1,500 iterations a context instead of 5,000 and a Fisher of 5,000 images instead of 60,000. λ is
searched for as in `experiments.ewc`, whose methods these are: one search seed, held-out training data, the same powers of ten for
both estimators, but on the first five contexts alone; then fresh seeds and all ten. Scale `paper` is the paper's protocol, without a
search: λ is 100 for both estimators, what the work that the paper follows uses for its Fisher. One seed of it was run as a check;
it differs from the reduced one in λ as well.
"""

from __future__ import annotations

from typing import Any

from experiments.ewc import BASELINE, HIGHER_IS_BETTER, METRIC, evaluate, scores, search, stages

__all__ = ["BASELINE", "HIGHER_IS_BETTER", "METRIC", "evaluate", "scores", "search", "stages"]

TITLE = "EWC, permuted"
MAIN_CASES = ("permuted MNIST",)
PAPER = {"permuted MNIST": {"fisher": 94.55, "squisher": 94.47, "none": 78.17}}  # "ewc/table_main", task-incremental
PAPER_SECONDS = {"fisher": 15215.51869}  # table "runtime/ewc/perm_mnist/total"

_REDUCED: dict[str, Any] = {
    "seeds": 3,
    "case": "permuted MNIST",
    "contexts": 10,
    "widths": [1024, 1000, 1000, 100],
    "iterations": 1500,
    "batch": 128,
    "lr": 1e-4,
    "fisher_examples": 5000,
    "held_out": 0.1,
    "search_contexts": 5,
    "methods": ["none", "fisher", "squisher"],
    "exponents": {"fisher": [0, 4], "squisher": [0, 4]},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "cpu": _REDUCED,
    "paper": _REDUCED
    | {
        "iterations": 5000,
        "fisher_examples": 60_000,
        "exponents": {},
        "strengths": {"fisher": 100.0, "squisher": 100.0},
    },
}
