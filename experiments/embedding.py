"""Task embedding: which source task helps a target most, told from how alike their importances are.

The paper takes Vu et al.'s 22 text tasks on BERT: every task fine-tunes the same pretrained network, its embedding is the
Fisher of the body (or v̂ of that fine-tuning), sources are ranked by Task2Vec's distance to the target, and the ranking is
judged by real transfers: rho (mean predicted rank of the truly best source, lower is better), MRR and NDCG. The baseline
ranks sources by the size of their data. The text says "empirical Fisher", the code it builds on squares the mean gradient
of mini-batches.

Here: twelve structured tasks on MNIST, a 784-256-256 body that was pretrained to tell four rotations apart (so that it knows
the pixels and no label), and all 12 × 11 transfers as ground truth. Sources have 250 to 16,000 examples, dealt out anew
for every seed, so that size tells something and is not tied to a task; the recipe is the paper's (AdamW, linear decay, clip
1.0) at a rate for perceptrons. A target has 150 examples. Source training, target and test examples are disjoint. A task's
embedding comes from its training as a source, as in the paper.

Methods: "squisher" is B·v̂; "fisher" the empirical Fisher; "fisher (exact)"; "joint" what the reference code
computes. "(equal traces)": every task's importance is first divided by its sum; "(cosine)": the plain cosine, which needs no such
thing, instead of Task2Vec's distance. "random order" is what no ranking at all would give.

A weakness of this stand-in: all sources train for 1,000 steps, whatever their size, so that small ones are fitted to the last
example. The empirical Fisher's trace then differs by a factor of millions between tasks and mostly tells the size of the data (a new
run writes down both, as `traces`), which Task2Vec's distance sees. What it says of Fisher against Squisher is therefore an artefact in
part. The committed run is older and has neither these traces nor the variants "(equal traces)" and "(cosine)". It is one draw of a noisy
procedure: when all sources were trained again with the same seeds, most rankings came out different.

Three granularities: one number a tensor (the paper's wording; but a perceptron's body has only four tensors, BERT two
hundred), a row (Task2Vec), or all entries. "row" was chosen as the main one before the first run. Nothing is tuned.

python -m experiments embedding --scale cpu --data DIR
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import squisher
from experiments.data import Labelled, digits, mnist
from experiments.networks import Headed, accuracy
from experiments.rankings import METRICS, by_chance, by_size, matrices, measured, nearest, rank_correlation, total
from experiments.runs import Run, Score, Unit, seed_of

TITLE = "Task embedding"
BASELINE = "data size"
METRIC = "NDCG"
HIGHER_IS_BETTER = True
STAND_IN = (
    "22 text tasks on BERT",
    "12 tasks on MNIST, a perceptron; all sources train for as many steps, so the Fisher's scale tells the size of the data",
)
MAIN_CASES = ("row: NDCG",)
PAPER = {  # tables.json task_embedding/table_main: mean of CR in-class(10) and QA in-class(10)
    "row: rho": {"fisher": 4.95, "squisher": 4.15, "data size": 6.1},
    "row: NDCG": {"fisher": 84.15, "squisher": 84.35, "data size": 83.05},
    "row: MRR": {"fisher": 0.4405, "squisher": 0.5155, "data size": 0.2275},
}

LOOPS = [0, 1, 2, 2, 1, 2, 0, 1, 0, 0]  # coarse classes: closed loops, straight lines, curves
LABELS: dict[str, list[int]] = {  # the class of each digit; -1: not in this task
    "digits": list(range(10)),
    "0-4": [0, 1, 2, 3, 4, -1, -1, -1, -1, -1],
    "5-9": [-1, -1, -1, -1, -1, 0, 1, 2, 3, 4],
    "parity": [0, 1] * 5,
    "high": [0] * 5 + [1] * 5,
    "coarse": LOOPS,
}
TASKS = [
    "upright/0-4", "upright/5-9", "upright/parity", "upright/high", "upright/coarse",
    "rotated/digits", "rotated/parity", "rotated/coarse",
    "inverted/digits", "inverted/parity", "inverted/high", "inverted/0-4",
]  # fmt: skip
ESTIMATORS = ("fisher", "fisher (exact)", "joint", "squisher")
GRANULARITIES = ("tensor", "row", "full")
HEAD = r"^head"

CONFIGS: dict[str, dict[str, Any]] = {
    "quick": {
        "seeds": 3, "data": "digits", "widths": [64, 32, 32], "tasks": TASKS[:3] + TASKS[5:7] + TASKS[8:10],
        "sizes": [40, 900], "source_pool": 1000, "target_examples": 60, "test_examples": 360,
        "body_steps": 200, "source_steps": 200, "target_steps": 120, "batch": 32, "rate": 2e-3, "clip": 1.0,
        "fisher_examples": 300,
    },
    "cpu": {
        "seeds": 5, "data": "mnist", "widths": [784, 256, 256], "tasks": TASKS,
        "sizes": [250, 16000], "source_pool": 50000, "target_examples": 150, "test_examples": 4000,
        "body_steps": 1000, "source_steps": 1000, "target_steps": 100, "batch": 64, "rate": 1e-3, "clip": 1.0,
        "fisher_examples": 1000,
    },
}  # fmt: skip


def stages(config: dict[str, Any], seeds: range) -> list[list[Unit]]:
    """Return the stages: sources, transfers, rankings against them, all seeds together."""
    tasks = config["tasks"]
    return [
        [Unit(f"seed-{s}/source/{t}", "source", {"task": t, "seed": s}) for s in seeds for t in tasks],
        [Unit(f"seed-{s}/target/{t}", "target", {"task": t, "seed": s}) for s in seeds for t in tasks],
        [Unit(f"seed-{s}/ranking", "ranking", {"seed": s}) for s in seeds],
        [Unit(f"summary-{len(seeds)}", "summary", {"seeds": list(seeds)})],
    ]


def scores(results: dict[str, dict[str, Any]]) -> list[Score]:
    """Return ρ, MRR and NDCG by granularity."""
    out = []
    for key, result in results.items():
        if not key.endswith("/ranking"):
            continue
        seed = seed_of(key)
        for by in GRANULARITIES:
            orders = {**result["orders"][by], "data size": result["orders"]["data size"]}
            found = {method: measured(order, result["gains"]) for method, order in orders.items()}
            found["random order"] = by_chance(result["gains"])
            for method, values in found.items():
                out += [Score(f"{by}: {metric}", method, seed, value, metric) for metric, value in values.items()]
    return out


@functools.lru_cache(maxsize=1)
def _images(folder: Path | None) -> tuple[Labelled, Labelled]:
    train, test = digits() if folder is None else mnist(folder)
    mean, deviation = train.inputs.mean(), train.inputs.std()
    return tuple(Labelled((part.inputs - mean) / deviation, part.labels) for part in (train, test))


def pools(run: Run, seed: int) -> tuple[Labelled, Labelled, Labelled]:
    """Return disjoint sets of plain images for source, target and test examples."""
    train, test = _images(None if run.config["data"] == "digits" else run.data_folder("mnist"))
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    cut = run.config["source_pool"]
    return train[order[:cut]], train[order[cut:]], test[: run.config["test_examples"]]


def task_examples(task: str, images: Labelled, count: int | None = None) -> Labelled:
    """Return the first `count` images (all by default) that belong to a task, as the task shows and labels them."""
    view, labels = task.split("/")
    classes = torch.tensor(LABELS[labels])[images.labels]
    rows = torch.nonzero(classes >= 0).flatten()[:count]
    return Labelled(shown(images.inputs[rows], view), classes[rows])


def shown(inputs: Tensor, view: str) -> Tensor:
    """Return images as vectors: upright, turned by a right angle, or with black and white exchanged."""
    side = int(inputs.shape[1] ** 0.5)
    if view == "inverted":
        return -inputs  # they have mean 0
    return inputs.view(-1, side, side).rot90(1, (1, 2)).flatten(1) if view == "rotated" else inputs


def size_of(config: Mapping[str, Any], task: str, seed: int) -> int:
    """Return the number of examples of each source: sizes in geometric steps, shuffled by the seed."""
    low, high = config["sizes"]
    sizes = np.geomspace(low, high, len(config["tasks"])).round().astype(int)
    return int(np.random.default_rng(seed).permutation(sizes)[config["tasks"].index(task)])


def train(model: nn.Module, data: Labelled, steps: int, config: Mapping[str, Any], seed: int) -> torch.optim.Optimizer:
    """Train with AdamW, linear decay and clipping; batches are drawn with replacement (some sources are small)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["rate"], weight_decay=0.0, fused=True)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        batch = data[torch.randint(len(data), (config["batch"],), generator=generator)]
        optimizer.param_groups[0]["lr"] = config["rate"] * (1 - step / steps)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch.inputs), batch.labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), config["clip"])
        optimizer.step()
    return optimizer


def pretrained(run: Run, seed: int) -> dict[str, Tensor]:
    """Return the body that all tasks start from, trained to tell four rotations of unlabelled images apart."""

    def make() -> dict[str, Tensor]:
        images = pools(run, seed)[0].inputs
        side = int(images.shape[1] ** 0.5)
        turns = torch.arange(len(images)) % 4
        turned = torch.empty_like(images)
        for turn in range(4):
            turned[turns == turn] = images[turns == turn].view(-1, side, side).rot90(turn, (1, 2)).flatten(1)
        torch.manual_seed(seed)
        model = Headed(run.config["widths"], 4)
        train(model, Labelled(turned, turns), run.config["body_steps"], run.config, seed)
        return model.body.state_dict()

    return run.cached(f"embedding-{run.scale}/seed-{seed}/body", make)


def start(run: Run, task: str, body: Mapping[str, Tensor], seed: int) -> Headed:
    """Return a network with a given body and a new head."""
    torch.manual_seed(seed)
    model = Headed(run.config["widths"], max(LABELS[task.split("/")[1]]) + 1)
    model.body.load_state_dict(body)
    return model


def source(run: Run, task: str, seed: int) -> dict[str, Any]:
    """Train a source, and keep its body and its importances."""
    config = run.config
    times: dict[str, float] = {}

    def make() -> dict[str, Any]:
        size = size_of(config, task, seed)
        data = task_examples(task, pools(run, seed)[0], size)
        model = start(run, task, pretrained(run, seed), seed)
        optimizer = train(model, data, config["source_steps"], config, seed)
        seen = data[: config["fisher_examples"]]
        found = {}
        for name, options in (
            ("fisher", {"labels": "data"}),
            ("fisher (exact)", {"labels": "exact"}),
            ("joint", {"labels": "data", "per": "batch"}),
        ):
            began = time.perf_counter()
            found[name] = squisher.fisher(model, seen.batches(config["batch"]), **options)
            times[name] = time.perf_counter() - began
        began = time.perf_counter()
        found["squisher"] = squisher.extract(optimizer, model, batch_size=config["batch"]).as_fisher()
        times["squisher"] = time.perf_counter() - began
        whole = {name: dict(squisher.embed.embedding(one, "full", exclude=HEAD)) for name, one in found.items()}
        train_accuracy = accuracy(model, data)
        return {
            "body": model.body.state_dict(),
            "importances": whole,
            "train_accuracy": train_accuracy,
            "size": len(data),
        }

    kept = run.cached(f"embedding-{run.scale}/seed-{seed}/{task}", make)
    return {"size": kept["size"], "train_accuracy": kept["train_accuracy"], "times": times}


def _source(run: Run, task: str, seed: int) -> dict[str, Any]:
    return run.cached(f"embedding-{run.scale}/seed-{seed}/{task}", lambda: None)


def target(run: Run, task: str, seed: int) -> dict[str, Any]:
    """Test accuracy on a target with few examples, after starting from every other task's body, and from none."""
    _, pool, test_images = pools(run, seed)
    data = task_examples(task, pool, run.config["target_examples"])
    test = task_examples(task, test_images)
    gains = {}
    for other in ["none", *run.config["tasks"]]:
        if other != task:
            body = pretrained(run, seed) if other == "none" else _source(run, other, seed)["body"]
            model = start(run, task, body, seed + 1000)
            train(model, data, run.config["target_steps"], run.config, seed + 1000)
            gains[other] = accuracy(model, test)
    none = gains.pop("none")
    return {"none": none, "gains": gains}


def ranking(run: Run, seed: int) -> dict[str, Any]:
    """Return every method's order of the sources for every target, and how the distances of the estimators compare."""
    tasks = run.config["tasks"]
    gains = {task: run.result(f"seed-{seed}/target/{task}")["gains"] for task in tasks}
    sizes = {task: run.result(f"seed-{seed}/source/{task}")["size"] for task in tasks}
    importances = {task: _source(run, task, seed)["importances"] for task in tasks}
    orders: dict[str, Any] = {}
    agreement: dict[str, Any] = {}
    families: dict[str, Any] = {}
    for by in GRANULARITIES:
        found = matrices(importances, by)
        orders[by] = {name: nearest(tasks, matrix) for name, matrix in found.items()}
        families[by] = {name: family_share(tasks, matrix) for name, matrix in found.items()}
        pairs = np.tril_indices(len(tasks), -1)
        ours = found["squisher"][pairs]
        agreement[by] = {name: rank_correlation(ours, matrix[pairs]) for name, matrix in found.items() if name != "squisher"}  # fmt: skip
    orders["data size"] = by_size(sizes)
    traces = {name: {task: total(importances[task][name]) for task in tasks} for name in ESTIMATORS}
    return {
        "orders": orders,
        "gains": gains,
        "distance_spearman": agreement,
        "families": families,
        "traces": traces,
        "trace_and_size": {
            name: rank_correlation(np.array([by_task[t] for t in tasks]), np.array([sizes[t] for t in tasks]))
            for name, by_task in traces.items()
        },
    }


def family_share(tasks: Sequence[str], matrix: np.ndarray) -> float:
    """Return how often a task of the same view (upright, rotated, inverted) is nearer than one of another; ½ by chance."""
    views = [task.split("/")[0] for task in tasks]
    hits = [
        float(matrix[a, b] < matrix[a, c])
        for a in range(len(tasks))
        for b in range(len(tasks))
        for c in range(len(tasks))
        if a != b and views[a] == views[b] and views[a] != views[c]
    ]
    return float(np.mean(hits))


def summary(run: Run, seeds: list[int]) -> dict[str, Any]:
    """Return means over all seeds, and intervals from drawing target tasks (with all their seeds) with replacement."""
    tasks = run.config["tasks"]
    found = {seed: run.result(f"seed-{seed}/ranking") for seed in seeds}
    draws = np.random.default_rng(0).integers(0, len(tasks), (10_000, len(tasks)))
    others = {seed: _other_seeds(found, seed) for seed in seeds} if len(seeds) > 1 else {}
    out: dict[str, Any] = {}
    for by in GRANULARITIES:
        table: dict[str, np.ndarray] = {}  # method -> (tasks, metrics), mean over seeds
        for method in [*found[seeds[0]]["orders"][by], "data size", *(["other seeds' transfers"] if others else [])]:
            rows = []
            for task in tasks:
                values = []
                for seed in seeds:
                    result = found[seed]
                    order = (
                        result["orders"]["data size"][task] if method == "data size"
                        else others[seed][task] if method == "other seeds' transfers"
                        else result["orders"][by][method][task]
                    )  # fmt: skip
                    one = squisher.embed.evaluate({task: order}, {task: result["gains"][task]})
                    values.append([one[name] for name in METRICS.values()])
                rows.append(np.mean(values, 0))
            table[method] = np.array(rows)
        out[by] = {method: _interval(values, draws) for method, values in table.items()}
        out[by]["squisher − fisher"] = _interval(table["squisher"] - table["fisher"], draws)
        out[by]["squisher − data size"] = _interval(table["squisher"] - table["data size"], draws)
        out[by]["fisher − data size"] = _interval(table["fisher"] - table["data size"], draws)
    return out


def _other_seeds(found: Mapping[int, dict[str, Any]], seed: int) -> dict[str, list[str]]:
    """Return the order by the mean gain in all other seeds, which knows the tasks but not this seed's sizes."""
    out = {}
    for task, gains in found[seed]["gains"].items():
        means = {s: np.mean([one["gains"][task][s] for k, one in found.items() if k != seed]) for s in gains}
        out[task] = sorted(gains, key=lambda s: -means[s])
    return out


def _interval(values: np.ndarray, draws: np.ndarray) -> dict[str, list[float]]:
    means = values[draws].mean(1)
    low, high = np.quantile(means, [0.025, 0.975], axis=0)
    return {
        metric: [round(float(x), 4) for x in (values[:, k].mean(), low[k], high[k])] for k, metric in enumerate(METRICS)
    }
