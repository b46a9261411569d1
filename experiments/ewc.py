"""Elastic weight consolidation: split MNIST, permuted MNIST and split CIFAR-100, task-, domain- and class-incremental.

**The paper.** The benchmarks of van de Ven et al., with their networks. Split MNIST: five pairs of digits, 784-400-400-10, 2,000
iterations a context, batch 128, rate 1e-3. Permuted MNIST: ten orders of the pixels of 32×32 images, 1024-1000-1000-100, 5,000
iterations, batch 128, rate 1e-4. Split CIFAR-100: ten times ten classes, frozen convolutions, 1024-2000-2000-100, 5,000
iterations, batch 256, rate 1e-4. Adam is never reset; there is a penalty for every past context. The Fisher is the exact one over
the whole training set of a context (the text says empirical; the run times and the code it follows do not). The Squisher is v at the
end of a context, with a λ searched around N·λ_F. Five trials.

**Here.** The same networks and iterations on split and permuted MNIST. CIFAR-100: the same frozen convolutions, 20,000 of its images
to train on (the split is ours), and 2,000 iterations a context, which is the paper's number of epochs. λ on one search seed
(0), trained on 90 % of the training set and scored on the rest, over as many values for every estimator; then fresh seeds, the
whole training set, the test set. The search of permuted MNIST and CIFAR-100 learns the first five contexts. Scale
`permuted-reduced` is an older run of 1,500 iterations and a Fisher of 5,000 images. Those that end in `-check` are a seed or two by
the paper's protocol at the λ of the work that the paper follows, unsearched.

Methods (`experiments.continual.METHODS`):

- none: no penalty. identity: the same importance, 1, for every parameter.
- fisher: exact; fisher (empirical): the labels of the data; joint: the squared gradient of the summed loss of all examples,
  divided by their number.
- squisher: Adam's own state as B·v̂. From the second context on, Adam has seen the penalty's gradient too.
- squisher (N·v): v with N times the Fisher's λ, the paper's rule, unsearched. squisher (without rescaling): v with the Fisher's λ.
- squisher (tracked): the same average of the data's gradients alone, begun anew with each context (`squisher.Tracker`).
- squisher (decoupled): the penalty acts after the optimizer's step (`EWC.pull_`) and is never in a gradient, so that v stays the
  data's. Its λ is another one, and not comparable with the others'.
- squisher (β₂ = 0.95): as squisher, with that β₂ in Adam.
- squisher (tracked, strength_like): λ from the exact Fisher's by `EWC.strength_like` with 500 inputs after the first context. Unsearched.

λ is that of a mean over examples: the Squisher's is on B·v̂ (except where v is named), so that one axis serves all.

python -m experiments ewc --scale cpu --data DIR                        # all of it, in the order that matters most; goes on where it was
python -m experiments ewc --scale split-class --data DIR --only seed-3  # a part of it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.continual import METHODS, Context, hold_out, learn_all, permuted, split
from experiments.data import Labelled, cifar100_features, digits, mnist
from experiments.runs import Run, Score, Unit, seed_of

TITLE = "EWC"
BASELINE = "none"
METRIC = "accuracy"
HIGHER_IS_BETTER = True
STAND_IN = (
    "three benchmarks, three scenarios, five seeds",
    "the same networks, contexts and iterations (CIFAR-100: 40 % of the images, as many epochs); λ on held-out data",
)
PAPER = {  # tables "ewc/table_main" and "ewc/table_ablation"
    "split MNIST, task": {
        "fisher": 99.59, "squisher": 98.59, "none": 95.93, "squisher (without rescaling)": 98.85,
        "squisher (β₂ = 0.95)": 98.66, "joint": 99.46,
    },
    "split MNIST, domain": {"fisher": 65.75, "squisher": 69.87, "none": 56.63},
    "split MNIST, class": {"fisher": 19.21, "squisher": 19.29, "none": 19.87},
    "permuted MNIST, task": {
        "fisher": 94.55, "squisher": 94.47, "none": 78.17, "squisher (without rescaling)": 92.05,
        "squisher (β₂ = 0.95)": 93.37, "joint": 95.59,
    },
    "permuted MNIST, domain": {"fisher": 94.61, "squisher": 92.32, "none": 80.18},
    "permuted MNIST, class": {"fisher": 48.25, "squisher": 29.64, "none": 46.73},
    "split CIFAR-100, task": {
        "fisher": 75.96, "squisher": 75.30, "none": 61.82, "squisher (without rescaling)": 61.53,
        "squisher (β₂ = 0.95)": 72.80, "joint": 75.38,
    },
    "split CIFAR-100, domain": {"fisher": 18.79, "squisher": 20.16, "none": 16.01},
    "split CIFAR-100, class": {"fisher": 5.82, "squisher": 5.98, "none": 5.88},
}  # fmt: skip
CHANCE = {
    "split MNIST, task": 50.0, "split MNIST, domain": 50.0, "split MNIST, class": 10.0, "permuted MNIST, task": 10.0,
    "permuted MNIST, domain": 10.0, "permuted MNIST, class": 1.0, "split CIFAR-100, task": 10.0,
    "split CIFAR-100, domain": 10.0, "split CIFAR-100, class": 1.0,
}  # fmt: skip

WHAT = ("methods", "ablations", "ablation_seeds", "exponents", "beyond")
"""What of a configuration says what is done; the rest says how, and results of another "how" are not taken over."""

_MAIN = ["none", "fisher", "squisher", "squisher (N·v)", "identity", "squisher (tracked)", "squisher (decoupled)"]
_ABLATIONS = ["squisher (without rescaling)", "squisher (β₂ = 0.95)", "joint"]
_SPLIT: dict[str, Any] = {
    "seeds": 5,
    "case": "split MNIST",
    "scenario": "task",
    "contexts": 5,
    "widths": [784, 400, 400, 10],
    "iterations": 2000,
    "batch": 128,
    "lr": 1e-3,
    "fisher_examples": 100_000,
    "held_out": 0.1,
    "methods": _MAIN,
    "exponents": {
        "fisher": [0, 2, 4, 6, 8, 10, 12],
        "squisher": [-2, 0, 2, 4, 6, 8, 10],
        "identity": [-4, -3, -2, -1, 0, 1, 2],
        "squisher (tracked)": [-2, 0, 2, 4, 6, 8, 10],
        "squisher (decoupled)": [0, 2, 4, 6, 8, 10, 12],
    },
}
_PERMUTED: dict[str, Any] = _SPLIT | {
    "case": "permuted MNIST",
    "contexts": 10,
    "widths": [1024, 1000, 1000, 100],
    "iterations": 5000,
    "lr": 1e-4,
    "fisher_examples": 60_000,
    "search_contexts": 5,
    "exponents": {
        "fisher": [0, 1, 2, 3],
        "squisher": [0, 1, 2, 3],
        "identity": [-3, -2, -1, 0],
        "squisher (tracked)": [0, 1, 2, 3],
        "squisher (decoupled)": [2, 4, 6, 8],
    },
}
_CIFAR: dict[str, Any] = _PERMUTED | {
    "case": "split CIFAR-100",
    "widths": [1024, 2000, 2000, 100],
    "iterations": 2000,
    "batch": 256,
    # The Fisher's λ of 1,000, as the paper scales it for v, is 8,000 for B·v̂ here.
    "exponents": _PERMUTED["exponents"]
    | {"fisher": [1, 2, 3, 4], "squisher": [3, 4, 5, 6], "squisher (tracked)": [3, 4, 5, 6]},
}
_REDUCED: dict[str, Any] = _PERMUTED | {
    "seeds": 3,
    "iterations": 1500,
    "fisher_examples": 5000,
    "methods": ["none", "fisher", "squisher"],
    "exponents": {"fisher": [0, 1, 2, 3], "squisher": [0, 1, 2, 3]},
}
_PERMUTED_CHECK: dict[str, Any] = _PERMUTED | {
    "seeds": 2,
    "methods": ["none", "fisher", "squisher", "squisher (N·v)", *_ABLATIONS],
    "exponents": {},
    "strengths": {"fisher": 100.0, "squisher": 100.0},
}
_CIFAR_CHECK: dict[str, Any] = _CIFAR | {
    "seeds": 2,
    "methods": ["none", "fisher", "squisher", "squisher (N·v)", *_ABLATIONS],
    "exponents": {},
    "strengths": {"fisher": 1000.0, "squisher": 1000.0},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "quick": _SPLIT
    | {
        "seeds": 3,
        "case": "split digits",
        "widths": [64, 100, 100, 10],
        "iterations": 150,
        "batch": 32,
        "methods": ["none", "fisher", "squisher", "squisher (tracked)"],
        "exponents": {method: [2, 3, 4, 5] for method in ("fisher", "squisher", "squisher (tracked)")},
    },
    "split-task": _SPLIT
    | {
        "methods": [*_MAIN, *_ABLATIONS, "fisher (empirical)", "squisher (tracked, strength_like)"],
        "exponents": {
            "fisher": [2, 3, 4, 5, 6, 7, 8],
            "squisher": [0, 1, 2, 3, 4, 5, 6],
            "squisher (tracked)": [0, 1, 2, 3, 4, 5, 6],
            "squisher (decoupled)": [0, 2, 4, 6, 8, 10, 12],
            "identity": [-4, -3, -2, -1, 0, 1, 2],
            "fisher (empirical)": [5, 6, 7, 8, 9, 10, 11],
            "squisher (β₂ = 0.95)": [0, 1, 2, 3, 4, 5, 6],
            "joint": [5, 6, 7, 8, 9, 10, 11],
        },
        "beyond": {"squisher": [8, 10, 12], "squisher (tracked)": [8, 10, 12], "identity": [-6, -5]},
    },
    "split-domain": _SPLIT | {"scenario": "domain", "widths": [784, 400, 400, 2]},
    "split-class": _SPLIT
    | {
        "scenario": "class",
        "exponents": {
            "fisher": [0, 4, 8, 12],
            "squisher": [-2, 2, 6, 10],
            "identity": [-4, -2, 0, 2],
            "squisher (tracked)": [-2, 2, 6, 10],
            "squisher (decoupled)": [0, 4, 8, 12],
        },
    },
    "permuted-task": _PERMUTED
    | {
        "ablations": _ABLATIONS,
        "ablation_seeds": 3,
        "exponents": _PERMUTED["exponents"] | {"squisher (β₂ = 0.95)": [0, 1, 2, 3], "joint": [0, 1, 2, 3]},
    },
    "permuted-domain": _PERMUTED | {"scenario": "domain", "widths": [1024, 1000, 1000, 10]},
    "permuted-class": _PERMUTED | {"scenario": "class"},
    "cifar-task": _CIFAR
    | {
        "ablations": _ABLATIONS,
        "ablation_seeds": 3,
        "exponents": _CIFAR["exponents"] | {"squisher (β₂ = 0.95)": [0, 1, 2, 3], "joint": [2, 3, 4, 5]},
    },
    "cifar-domain": _CIFAR | {"seeds": 3, "scenario": "domain", "widths": [1024, 2000, 2000, 10]},
    "cifar-class": _CIFAR | {"seeds": 3, "scenario": "class"},
    "permuted-reduced": _REDUCED,
    "permuted-check": _PERMUTED_CHECK,
    "permuted-domain-check": _PERMUTED_CHECK | {"scenario": "domain", "widths": [1024, 1000, 1000, 10]},
    "permuted-class-check": _PERMUTED_CHECK | {"scenario": "class"},
    "cifar-check": _CIFAR_CHECK,
    "cifar-domain-check": _CIFAR_CHECK | {"scenario": "domain", "widths": [1024, 2000, 2000, 10]},
    "cifar-class-check": _CIFAR_CHECK | {"scenario": "class", "strengths": {"fisher": 100.0, "squisher": 100.0}},
}
"""`exponents`: λ is searched over 10ᵉ, equally many for every method of a benchmark; `beyond`: run for the curve and not chosen from;
`strengths`: λ is given; the Fisher's for methods that are not listed."""

BENCHMARKS = {
    "cpu": {
        scale: f"EWC, {config['case']}, {config['scenario']}"
        + {"permuted-reduced": ", reduced", "permuted-check": ", λ = 100"}.get(scale, "")
        for scale, config in CONFIGS.items()
        if scale == "permuted-check" or (scale != "quick" and not scale.endswith("-check"))
    }
}
"""The documents that one name of a scale stands for, with their titles."""

GROUPS = {
    "cpu": (
        ("split-task", None), ("split-domain", None), ("split-class", None), ("permuted-task", 2), ("cifar-task", 2),
        ("permuted-task", None), ("cifar-domain", None), ("cifar-class", None), ("cifar-task", None),
        ("permuted-domain", None), ("permuted-class", None),
    )
}  # fmt: skip
"""What one name of a scale stands for, in order, with the number of stages (None: all)."""


def stages(config: dict[str, Any], seeds: Sequence[int]) -> list[list[Unit]]:
    """Return the stages: the search over λ on seed 0, every method on the seeds, then the same for ablations."""
    found = []
    for methods, count in ((config["methods"], None), (config.get("ablations", []), config.get("ablation_seeds"))):
        found.append(
            [
                Unit(_search_key(method, exponent), "search", {"method": method, "exponent": exponent})
                for method in methods
                for exponent in (*config["exponents"].get(method, ()), *config.get("beyond", {}).get(method, ()))
            ]
        )
        found.append(
            [
                Unit(f"seed-{seed}/{method}", "evaluate", {"method": method, "seed": seed})
                for seed in seeds[:count]
                for method in methods
            ]
        )
    return found


def search(run: Run, method: str, exponent: int) -> dict[str, Any]:
    """Run one λ on the search seed, and score it on held-out training data; the test set is not read."""
    train, _ = _data(run)
    contexts = _contexts(run, *hold_out(train, run.config["held_out"], seed=0), seed=0)
    contexts = contexts[: run.config.get("search_contexts")]
    return learn_all(contexts, METHODS[method], 10.0**exponent, run.config, seed=0)


def evaluate(run: Run, method: str, seed: int) -> dict[str, Any]:
    """Run one method with its λ on a fresh seed and all training data, and score it on the test set."""
    result = learn_all(dealt(run, seed), METHODS[method], chosen(run, method), run.config, seed)
    return {"case": case(run.config), **result}


def dealt(run: Run, seed: int) -> list[Context]:
    """Return the contexts of a seed: all training data, and the test set."""
    return _contexts(run, *_data(run), seed=seed)


def stale(run: Run, unit: Unit, result: dict[str, Any]) -> bool:
    """Return whether a kept result has a λ that a search over more values no longer chooses."""
    return unit.call == "evaluate" and result["given"] != chosen(run, unit.arguments["method"])


def chosen(run: Run, method: str) -> float:
    """Return the λ with the best held-out accuracy (the smaller of equal ones), or the exact Fisher's without a search."""
    if METHODS[method].rule == "none":
        return 0.0
    searched = method if METHODS[method].rule == "search" else "fisher"
    if "strengths" in run.config:
        return run.config["strengths"].get(searched, run.config["strengths"]["fisher"])
    exponents = run.config["exponents"][searched]
    return 10.0 ** max(exponents, key=lambda e: (run.result(_search_key(searched, e))["accuracy"], -e))


def case(config: dict[str, Any]) -> str:
    """Return the name of benchmark and scenario in tables."""
    return f"{config['case']}, {config.get('scenario', 'task')}"


def main_cases(config: dict[str, Any]) -> tuple[str, ...]:
    """Return the name of the benchmark over all its cases."""
    return (case(config),)


def scores(results: dict[str, dict[str, Any]]) -> list[Score]:
    """Return the mean final accuracy over contexts (case: the benchmark) and that of each context."""
    found = []
    for key, result in results.items():
        place, _, method = key.partition("/")
        if place.startswith("seed-"):
            seed = seed_of(key)
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
    return deal(train, test, run.config["contexts"], seed, run.config.get("scenario", "task"))


def _data(run: Run) -> tuple[Labelled, Labelled]:
    if run.scale == "quick":
        return digits()
    if run.config["case"] == "split CIFAR-100":
        parts = run.cached(
            "cifar-100-features", lambda: [tuple(part) for part in cifar100_features(run.data_folder(""))]
        )
        return Labelled(*parts[0]), Labelled(*parts[1])
    return mnist(run.data_folder("mnist"))
