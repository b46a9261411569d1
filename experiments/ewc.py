"""Elastic weight consolidation on split MNIST: five pairs of digits, learnt one after the other.

**The paper.** Task-incremental split MNIST after van de Ven et al.: 784-400-400-10, 2,000 iterations a context, batch 128, Adam
with rate 1e-3 that is never reset, a penalty for every past context. Its Fisher is the exact one over the whole training set of
the context (its text says empirical; its run times and the code it follows do not). Its Squisher is v at the end of a context,
with a λ searched around N·λ_F. Five trials.

**Here.** The same, at scale `cpu`; nothing is reduced. λ on one search seed (0), trained on 90 % of the training set and scored on
the rest, over as many powers of ten for every estimator; then fresh seeds, the whole training set, the test set.

Methods (`experiments.continual.METHODS`):

- none: no penalty.
- fisher: exact; fisher (empirical): the labels of the data; joint: the squared gradient of the summed loss of all examples,
  divided by their number.
- squisher: Adam's own state, as the paper does it. From the second context on, Adam has seen the penalty's gradient too.
- squisher (tracked): the same average of the data's gradients alone, begun anew with each context (`squisher.Tracker`).
- squisher (β₂ = 0.95): as squisher, with that β₂ in Adam.
- squisher (without rescaling): v with the exact Fisher's λ, unchanged. squisher (N·λ): v with N times that λ, unsearched.
- squisher (tracked, strength_like once / each): λ from the exact Fisher's by `strength_like` with 500 inputs, after the first
  context, or for each context by itself. Unsearched.

λ is that of a mean over examples: the Squisher's is on B·v̂ (except where v is named), so that one axis serves all.

python -m experiments.ewc_page        # writes the committed results into docs/continual-learning.md
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.continual import METHODS, Context, hold_out, learn_all, permuted, split
from experiments.data import Labelled, digits, mnist
from experiments.runs import Run, Score, Unit

TITLE = "EWC"
BASELINE = "none"
METRIC = "accuracy"
HIGHER_IS_BETTER = True
MAIN_CASES = ("split MNIST",)
PAPER = {  # tables "ewc/table_main" (task-incremental) and "ewc/table_ablation"
    "split MNIST": {
        "fisher": 99.59, "squisher": 98.59, "none": 95.93, "squisher (without rescaling)": 98.85,
        "squisher (β₂ = 0.95)": 98.66, "joint": 99.46,
    }
}  # fmt: skip
PAPER_SECONDS = {"fisher": 331.684358}  # table "runtime/ewc/split_mnist/total"

SEARCHED = ("fisher", "squisher", "squisher (tracked)", "fisher (empirical)", "joint", "squisher (β₂ = 0.95)")
CONFIGS: dict[str, dict[str, Any]] = {
    "quick": {
        "seeds": 3,
        "case": "split digits",
        "contexts": 5,
        "widths": [64, 100, 100, 10],
        "iterations": 150,
        "batch": 32,
        "lr": 1e-3,
        "fisher_examples": 10_000,
        "held_out": 0.1,
        "methods": ["none", "fisher", "squisher", "squisher (tracked)"],
        "exponents": {"fisher": [2, 6], "squisher": [2, 6], "squisher (tracked)": [2, 6]},
    },
    "cpu": {
        "seeds": 5,
        "case": "split MNIST",
        "contexts": 5,
        "widths": [784, 400, 400, 10],
        "iterations": 2000,
        "batch": 128,
        "lr": 1e-3,
        "fisher_examples": 100_000,
        "held_out": 0.1,
        "methods": [
            "none", "fisher", "squisher", "squisher (tracked)", "fisher (empirical)", "squisher (without rescaling)",
            "squisher (N·λ)", "squisher (tracked, strength_like once)", "squisher (β₂ = 0.95)", "joint",
        ],
        "exponents": {
            "fisher": [2, 9], "squisher": [0, 7], "squisher (tracked)": [0, 7], "fisher (empirical)": [5, 12],
            "squisher (β₂ = 0.95)": [0, 7], "joint": [5, 12],
        },
    },
}  # fmt: skip
"""`exponents`: λ is searched over 10ᵉ for e from the first up to the second, without it; equally many for every method."""


def stages(config: dict[str, Any], seeds: Sequence[int]) -> list[list[Unit]]:
    """The search over λ on seed 0, then every method on the seeds."""
    search = [
        Unit(_search_key(method, exponent), "search", {"method": method, "exponent": exponent})
        for method, limits in config["exponents"].items()
        for exponent in range(*limits)
    ]
    runs = [
        Unit(f"seed-{seed}/{method}", "evaluate", {"method": method, "seed": seed})
        for seed in seeds
        for method in config["methods"]
    ]
    return [search, runs]


def search(run: Run, method: str, exponent: int) -> dict[str, Any]:
    """One λ on the search seed: held-out training data is what is scored, the test set is not read."""
    train, _ = _data(run)
    contexts = _contexts(run, *hold_out(train, run.config["held_out"], seed=0), seed=0)
    contexts = contexts[: run.config.get("search_contexts")]
    return learn_all(contexts, METHODS[method], 10.0**exponent, run.config, seed=0)


def evaluate(run: Run, method: str, seed: int) -> dict[str, Any]:
    """One method with its λ on a fresh seed, all training data, scored on the test set."""
    contexts = _contexts(run, *_data(run), seed=seed)
    result = learn_all(contexts, METHODS[method], chosen(run, method), run.config, seed)
    return {"case": run.config["case"], **result}


def chosen(run: Run, method: str) -> float:
    """The λ of best held-out accuracy, the smaller of equal ones; the exact Fisher's for methods without a search."""
    if METHODS[method].rule == "none":
        return 0.0
    searched = method if METHODS[method].rule == "search" else "fisher"
    if "strengths" in run.config:
        return run.config["strengths"][searched]
    exponents = range(*run.config["exponents"][searched])
    return 10.0 ** max(exponents, key=lambda e: (run.result(_search_key(searched, e))["accuracy"], -e))


def scores(results: dict[str, dict[str, Any]]) -> list[Score]:
    """Mean final accuracy over contexts (case: the benchmark) and that of each context."""
    found = []
    for key, result in results.items():
        place, _, method = key.partition("/")
        if place.startswith("seed-"):
            seed = int(place.removeprefix("seed-"))
            found.append(Score(result["case"], method, seed, result["accuracy"]))
            found += [
                Score(f"{result['case']}, context {number}", method, seed, value)
                for number, value in enumerate(result["contexts"], 1)
            ]
    return found


def _search_key(method: str, exponent: int) -> str:
    return f"search/{method}/1e{exponent}"


def _contexts(run: Run, train: Labelled, test: Labelled, seed: int) -> list[Context]:
    deal = permuted if run.config["case"] == "permuted MNIST" else split
    return deal(train, test, run.config["contexts"], seed)


def _data(run: Run) -> tuple[Labelled, Labelled]:
    return digits() if run.scale == "quick" else mnist(run.data_folder("mnist"))
