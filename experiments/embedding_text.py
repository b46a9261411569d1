"""Task embedding on text: which source task helps a target most, told from how alike their importances are.

The paper: Vu et al.'s 22 tasks on BERT, classification and regression (CR) and question answering (QA), sources ranked within a
target's class (10 of them) and over all (21). Here: all eleven of its classification and regression tasks and four of question answering
(BoolQ is the paper's; WikiQA, QuaRTz and ROPES as a choice between two answers are not), a fifth of the training rows that the folder of data
has (127 to 2,184). The upper two of MiniLM's six layers are trained and compared, the lower four are frozen
(`experiments.upper`). MiniLM has seen SNLI, MNLI and QQP before. STS-B is a regression. The baseline ranks sources by these numbers of rows.

Every source is trained until it has converged, by one rule: the loss of 100 held-out rows is taken every 25 steps, and training ends when
three times in a row it is no new lowest, or after 400 steps. The last weights are what is kept, since v is of the last step. A transfer:
the source's layers with a new head learn the target from 64 rows in 24 steps; all 15 × 14 are the ground truth, scored on 200
test rows by Matthews' correlation (CoLA), Pearson's (STS-B) or accuracy. 64 rows teach little of most of these tasks: compare every value
with that of a random order.

Methods: "squisher" is B·v̂ at the end of the source's training, "fisher" the empirical Fisher of 300 of its rows at the same weights;
"(equal traces)": every task's importance is first divided by its sum; "(cosine)": the plain cosine instead of Task2Vec's distance. One number a
row (Task2Vec), the main one, or a tensor (the paper's wording); nothing is tuned.

python -m experiments embedding_text --scale cpu --data DIR --only 'seed-1/'
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import squisher
from experiments import rankings, upper
from experiments.data import text_task
from experiments.glue import measured
from experiments.rankings import METRICS as METRICS
from experiments.runs import Run, Score, Unit, seed_of
from experiments.tuning import Splits, loss, outputs, train

TITLE = "Task embedding, text"
BASELINE = "data size"
METRIC = "NDCG"
HIGHER_IS_BETTER = True
STAND_IN = (
    "22 text tasks on BERT, whole training sets",
    "15 text tasks (all 11 of classification and regression), two layers of MiniLM, a fifth of our training rows, targets of 64 rows",
)
GROUPED = {
    "classification": ["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli", "snli", "scitail"],
    "questions": ["boolq", "wiki_qa", "quartz", "ropes"],
}
GRANULARITIES = ("row", "tensor")
MAIN_CASES = tuple(
    f"row, {group}: NDCG" for group in ("classification in-class", "classification all-class", "questions all-class")
)
"""Not questions in-class: three sources are too few to rank."""
PAPER = {
    "row, classification in-class: NDCG": {"fisher": 82.0, "squisher": 84.7, "data size": 81.7},
    "row, classification all-class: NDCG": {"fisher": 82.5, "squisher": 85.9, "data size": 75.0},
    "row, questions in-class: NDCG": {"fisher": 86.3, "squisher": 84.0, "data size": 84.4},
    "row, questions all-class: NDCG": {"fisher": 88.4, "squisher": 86.1, "data size": 85.1},
    "row, classification in-class: rho": {"fisher": 4.6, "squisher": 3.8, "data size": 4.8},
    "row, classification all-class: rho": {"fisher": 9.0, "squisher": 6.7, "data size": 11.6},
    "row, questions in-class: rho": {"fisher": 5.3, "squisher": 4.5, "data size": 7.4},
    "row, questions all-class: rho": {"fisher": 8.0, "squisher": 5.8, "data size": 10.8},
    "row, classification in-class: MRR": {"fisher": 0.421, "squisher": 0.468, "data size": 0.136},
    "row, classification all-class: MRR": {"fisher": 0.312, "squisher": 0.261, "data size": 0.105},
    "row, questions in-class: MRR": {"fisher": 0.46, "squisher": 0.563, "data size": 0.319},
    "row, questions all-class: MRR": {"fisher": 0.35, "squisher": 0.301, "data size": 0.154},
}

CONFIGS: dict[str, dict[str, Any]] = {
    "cpu": {
        "seeds": 3, "groups": GROUPED, "share": 5, "model": "minilm", "pooling": "mean", "frozen": None, "layers": 2,
        "length": 48, "validation": 100, "test": 200, "batch": 16, "rate": 2e-4, "schedule": "constant", "warmup": 0,
        "beta2": 0.999, "eps": 1e-8, "decay": 0.0, "clip": 1.0, "steps": 400, "every": 25, "patience": 3,
        "target_rows": 64, "target_steps": 24, "fisher_examples": 300,
    }
}  # fmt: skip


def stages(config: Mapping[str, Any], seeds: range) -> list[list[Unit]]:
    """Return the stages: sources, transfers, rankings against them."""
    tasks = _tasks(config)
    return [
        [Unit(f"seed-{s}/source/{t}", "source", {"task": t, "seed": s}) for s in seeds for t in tasks],
        [Unit(f"seed-{s}/target/{t}", "target", {"task": t, "seed": s}) for s in seeds for t in tasks],
        [Unit(f"seed-{s}/ranking", "ranking", {"seed": s}) for s in seeds],
    ]


def source(run: Run, task: str, seed: int) -> dict[str, Any]:
    """Train a source until it has converged, and keep its layers and importances."""
    kept = _source(run, task, seed)
    return {key: kept[key] for key in ("rows", "steps", "history", "score")}


def target(run: Run, task: str, seed: int) -> dict[str, Any]:
    """Return the test scores of a target with few rows, trained from every other task's layers and from none."""
    config = {**run.config, "steps": run.config["target_steps"]}
    data = _splits(run, task)
    few = data.train.take(slice(0, config["target_rows"]))
    gains = {}
    for other in ["none", *_tasks(config)]:
        if other != task:
            model = upper.load(config, data.classes, seed + 1000)
            if other != "none":
                model.load_state_dict(_source(run, other, seed)["body"], strict=False)
            train(model, few, config, seed + 1000)
            gains[other] = measured(model, data.test, task)
    none = gains.pop("none")
    return {"none": none, "gains": gains}


def ranking(run: Run, seed: int) -> dict[str, Any]:
    """Return every method's order of all sources for every target."""
    tasks = _tasks(run.config)
    kept = {task: _source(run, task, seed) for task in tasks}
    importances = {task: found["importances"] for task, found in kept.items()}
    orders: dict[str, Any] = {
        by: {name: rankings.nearest(tasks, m) for name, m in rankings.matrices(importances, by).items()}
        for by in GRANULARITIES
    }
    return {
        "orders": orders,
        "data size": rankings.by_size({task: found["rows"] for task, found in kept.items()}),
        "gains": {task: run.result(f"seed-{seed}/target/{task}")["gains"] for task in tasks},
        "traces": {
            name: {task: rankings.total(importances[task][name]) for task in tasks} for name in ("fisher", "squisher")
        },
        "groups": run.config["groups"],
    }


def scores(results: Mapping[str, Mapping[str, Any]]) -> list[Score]:
    """Return ρ, MRR and NDCG by granularity, and by the class of targets and sources."""
    out = []
    for key, result in results.items():
        if not key.endswith("/ranking"):
            continue
        seed = seed_of(key)
        for by, orders in result["orders"].items():
            for group, tasks in result["groups"].items():
                for reach in ("in-class", "all-class"):
                    allowed = set(tasks) if reach == "in-class" else set(result["gains"])
                    gains = {t: {s: g for s, g in result["gains"][t].items() if s in allowed} for t in tasks}
                    found = {"random order": rankings.by_chance(gains)}
                    for method, order in {**orders, "data size": result["data size"]}.items():
                        within = {t: [s for s in order[t] if s in allowed] for t in tasks}
                        found[method] = rankings.measured(within, gains)
                    out += [
                        Score(f"{by}, {group} {reach}: {metric}", method, seed, value, metric)
                        for method, values in found.items()
                        for metric, value in values.items()
                    ]
    return out


def _tasks(config: Mapping[str, Any]) -> list[str]:
    return [task for group in config["groups"].values() for task in group]


def _splits(run: Run, task: str) -> Splits:
    rows = len(text_task(run.data_folder("text"), task, "train")) // run.config["share"]
    return upper.splits(run, task, {**run.config, "train": rows})


def _source(run: Run, task: str, seed: int) -> dict[str, Any]:
    """Return a source's layers and importances; train it if they are not cached."""
    config = run.config

    def make() -> dict[str, Any]:
        data = _splits(run, task)
        model = upper.load(config, data.classes, seed)
        history: list[float] = []

        def look(step: int, optimizer: torch.optim.Optimizer) -> bool:
            if step % config["every"] == 0:
                history.append(float(loss(*outputs(model, data.validation))))
            return len(history) - 1 - history.index(min(history)) >= config["patience"] if history else False

        optimizer = train(model, data.train, config, seed, after_step=look)
        rows = data.train.take(slice(0, config["fisher_examples"]))
        kind = "gaussian" if rows.labels.is_floating_point() else "categorical"
        found: dict[str, Mapping[str, Tensor]] = {
            "fisher": squisher.fisher(model, rows.batches(16), parameters=r"^body\.", labels="data", likelihood=kind),
            "squisher": squisher.extract(optimizer, model, batch_size=config["batch"]).as_fisher().restrict(r"^body\."),
        }
        return {
            "body": {name: p.detach().clone() for name, p in model.named_parameters() if name.startswith("body.")},
            "importances": {n: dict(squisher.embed.embedding(one, "full")) for n, one in found.items()},
            "rows": len(data.train),
            "steps": int(next(iter(optimizer.state.values()))["step"]),
            "history": history,
            "score": measured(model, data.test, task),
        }

    return run.cached(f"embedding_text-{run.scale}/seed-{seed}/{task}", make)
