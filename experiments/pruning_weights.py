"""Single weights of a perceptron on MNIST, pruned by the paper's own formula, ½θ²F: what is lost, and what retraining gives back.

python -m experiments pruning_weights --scale cpu --data DIR     # DIR/mnist holds the four IDX files

"fisher" is measured with exact labels on all training images, "squisher" is what AdamW holds at its last step; "magnitude" is |θ|
and not in the paper. Network, sparsities and scopes were fixed before the first run.
"""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import squisher
from experiments import data, networks
from experiments.comparison import document
from experiments.data import Labelled
from experiments.page_parts import Parts, table
from experiments.runs import Run, Score, Unit
from experiments.spread import paired

TITLE = "Pruning of weights"
BASELINE = "random"
METRIC = "accuracy"
HIGHER_IS_BETTER = True
MAIN_CASES = ("global, 50% pruned", "global, 75% pruned", "global, 90% pruned")
PAPER: dict[str, dict[str, float]] = {}
METHODS = ("fisher", "squisher", "random", "magnitude")

PERCEPTRON = {
    "train": 10_000,  # the first of the training set
    "widths": [784, 300, 100, 10],
    "epochs": 15,
    "batch": 64,
    "rate": 1e-3,
    "decay": 0.01,
    "retrain_epochs": 2,
    "sparsities": [0.5, 0.75, 0.9],
    "scopes": ["global", "tensor"],
    "exclude": "bias",
}
CONFIGS: dict[str, dict[str, Any]] = {"cpu": {"seeds": 10, "perceptron": PERCEPTRON}}


def stages(config: dict[str, Any], seeds: range) -> list[list[Unit]]:
    """Return the stages: a unit for each network. Nothing is searched for, so 0 is a seed like any other."""
    return [[Unit(f"seed-{seed - 1}", "perceptron", {"seed": seed - 1}) for seed in seeds]]


def scores(results: Mapping[str, dict[str, Any]]) -> list[Score]:
    """Return accuracy in percent by case, method and seed."""
    out = []
    for result in results.values():
        for row in result["rows"]:
            case = f"{row['scope']}, {row['sparsity']:.0%} pruned"
            out.append(Score(case, row["method"], result["seed"], row["after"]))
            out.append(Score(f"{case}, before retraining", row["method"], result["seed"], row["before"]))
    return out


def perceptron(run: Run, seed: int) -> dict[str, Any]:
    """Run one network on images with mean 0 and variance 1."""
    train, test = data.mnist(run.data_folder("mnist"))
    train, test = (Labelled((part.inputs - 0.1307) / 0.3081, part.labels) for part in (train, test))
    return pruned_in_every_way(run.config["perceptron"], train, test, seed)


def pruned_in_every_way(p: dict[str, Any], train: Labelled, test: Labelled, seed: int) -> dict[str, Any]:
    """Train one perceptron, prune copies of it in every way, and return accuracies before and after retraining."""
    train = train[: p["train"]]
    torch.manual_seed(seed)
    model = networks.perceptron(p["widths"])
    optimizer = _fit(model, train, p, p["epochs"], seed)
    times, importances = {}, {}
    start = time.perf_counter()
    importances["fisher"] = squisher.fisher(model, train.batches(500), labels="exact")
    times["fisher"] = time.perf_counter() - start
    start = time.perf_counter()
    importances["squisher"] = squisher.extract(optimizer, model, batch_size=p["batch"])
    times["squisher"] = time.perf_counter() - start
    rows = []
    for method, scope, sparsity in itertools.product(METHODS, p["scopes"], p["sparsities"]):
        smaller = copy.deepcopy(model)
        squisher.prune.weights(
            smaller,
            importances.get(method, importances["fisher"]),  # the others only take its names
            sparsity=sparsity,
            scope=scope,
            score="fisher" if method in importances else method,
            exclude=p["exclude"],
            seed=seed,
        )
        layers = [layer for layer in smaller if isinstance(layer, nn.Linear)]
        zeros = sum(int((layer.weight == 0).sum()) for layer in layers)
        before = networks.accuracy(smaller, test)
        _fit(smaller, train, p, p["retrain_epochs"], seed + 1000)
        rows.append(
            {
                "method": method,
                "scope": scope,
                "sparsity": sparsity,
                "zeros": zeros,
                "zeros_after": sum(int((layer.weight == 0).sum()) for layer in layers),
                "weights": sum(layer.weight.numel() for layer in layers),
                "before": before,
                "after": networks.accuracy(smaller, test),
            }
        )
    return {
        "seed": seed,
        "unpruned": networks.accuracy(model, test),
        "spearman": round(squisher.compare(importances["squisher"], importances["fisher"]).spearman, 4),
        "times": times,
        "rows": rows,
    }


def _fit(model: nn.Module, train: Labelled, p: dict[str, Any], epochs: int, seed: int) -> torch.optim.Optimizer:
    """Train with AdamW over shuffled epochs at a constant rate, without the smaller last batch of an epoch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=p["rate"], weight_decay=p["decay"])
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for rows in data.shuffled(len(train), p["batch"], generator):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(train.inputs[rows]), train.labels[rows]).backward()
            optimizer.step()
    return optimizer


PAIRS = (
    ("squisher", "fisher"),
    ("fisher", "magnitude"),
    ("squisher", "magnitude"),
    ("fisher", "random"),
    ("squisher", "random"),
)


def parts(folder: Path, images: Path) -> Parts:
    """Return the table of docs/pruning.md: means, and differences paired by seed with their intervals."""
    found = document("pruning_weights", "cpu", folder)
    seeds = [unit["result"] for unit in found["units"].values()]
    p = found["config"]["perceptron"]
    cases = [(c, s, w) for c in p["scopes"] for s in p["sparsities"] for w in ("before", "after")]
    values = {
        (r["method"], r["scope"], r["sparsity"], when): {} for r in seeds[0]["rows"] for when in ("before", "after")
    }
    for entry in seeds:
        for row in entry["rows"]:
            for when in ("before", "after"):
                values[row["method"], row["scope"], row["sparsity"], when][entry["seed"]] = row[when]
    named = [[scope, f"{sparsity:.0%}", when] for scope, sparsity, when in cases]
    means = [
        [*name, *(f"{statistics.fmean(values[(m, *case)].values()):.2f}" for m in METHODS)]
        for name, case in zip(named, cases, strict=True)
    ]
    gaps = [
        [*name, *(str(paired(values[(a, *case)], values[(b, *case)])) for a, b in PAIRS)]
        for name, case in zip(named, cases, strict=True)
    ]
    head = ["scope", "sparsity", "when"]
    return Parts(
        {
            "weights": "\n\n".join(
                [
                    f"MNIST ({p['train']:,} training images, all test images), {'-'.join(map(str, p['widths']))} perceptron,"
                    f" {len(seeds)} seeds; {p['epochs']} epochs of AdamW, then pruned, then {p['retrain_epochs']} epochs more."
                    f" Test accuracy in percent; unpruned {statistics.fmean(entry['unpruned'] for entry in seeds):.2f}, chance 10.",
                    table([*head, *METHODS], means),
                    "Differences paired by seed, in points, with 95 % t intervals:",
                    table([*head, *(f"{a} − {b}" for a, b in PAIRS)], gaps),
                ]
            )
        }
    )
