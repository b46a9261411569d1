"""FISH mask: fine-tuning half a percent of a model's parameters, the ones that the Fisher finds important.

What the paper did: BERT-large on GLUE after Sung et al. (2021). The squared gradients of 1024 single examples with their labels,
at the pretrained weights with a new head, are summed; the head and the highest entries, 0.5 % of all together, are trained, the
rest is frozen from the first step. (The paper's text tells of 50 %, and of a fine-tuned model whose other entries are reset; its
table and the code that it follows do what is described here.) The Squisher there: AdamW trains densely on as many examples as
the mask would have looked at, its accumulator is taken, and training starts again from the pretrained weights.

What we do at scale `cpu`: MiniLM (6 layers, 22.6 million parameters; word embeddings frozen, so that 10.8 million can be chosen
from), two tasks of short sentences (SST-2 and TREC's six classes of questions; at most 32 tokens), 120 steps of 16 sentences.
The learning rate is chosen for each method from the same five values, on seed 0 of the first task and validation rows, and used
for all tasks; cases "… one rate" use the Fisher's for every method, as the paper uses one. Scale `glue` is the same on all eight tasks of the
paper's table (STS-B is a regression, scored by Pearson's correlation), with a search of dense training's rate too; not run, about 12
hours of one thread. Scale `glue-upper` trains the upper two layers alone, 200 steps on at most 4,800 rows, 1,000 test rows at most; not run, about 3
hours. The ninth column is MNLI's second test set: it is scored, and counts in the average, where the folder of the task
has a file `mismatched.jsonl.gz`. Scale `paper` is the recipe itself, all nine columns, from `--data` or from the Hub; validation
splits stand in for the test server. Methods:

    fisher, squisher, random    the mask by 1024 examples, by v̂ after 1024/16 dense steps, by chance
    dense                       all parameters trained, at the rate of dense training

Cases "… reset outside K %" are the operation of the paper's text: the densely trained model, everything outside the mask put
back to where it was. There the Fisher is that of the trained weights, the Squisher what AdamW holds at its last step, and
nothing is trained again. `overlap` in the units' results is the share of the chosen entries (head left out) that a mask has in
common with the Fisher's. The Squisher is not free here: its dense steps are made for it alone (`times`).

Scale `quick`: a perceptron that learned the digits 0 to 4, wherever they are on a canvas of nine places, learns 5 to 9 in one
place with 2 % of its parameters. The canvas makes it like a pretrained model, much of which one task does not need. It was added
after "nothing to spare", the same without it, had been tried: there random masks are better than both others.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import squisher
from experiments import text, upper
from experiments.fish_digits import METHODS, chosen, overlap_of
from experiments.fish_digits import digits as digits  # units call it here
from experiments.fish_digits import search_digits as search_digits
from experiments.glue import SECOND, download, measured
from experiments.runs import Run, Score, Unit

TITLE = "FISH mask"
BASELINE = "random"
METRIC = "score"
HIGHER_IS_BETTER = True
STAND_IN = (
    "BERT-large, nine GLUE columns, one learning rate for all methods",
    "MiniLM, two tasks, 120 steps, 1,000 fixed test rows; at one rate and at each method's own",
)
FIXED_ROWS = True
MAIN_CASES = ("average",)
PAPER = {  # BERT-large, GLUE test server, 0.5 %
    "average": {"fisher": 82.4, "squisher": 82.3, "random": 73.2},
    "cola": {"fisher": 56.5, "squisher": 58.8, "random": 33.5},
    "mnli": {"fisher": 85.2, "squisher": 85.5, "random": 80.0},
    "mnli mismatched": {"fisher": 85.7, "squisher": 85.8, "random": 81.3},
    "mrpc": {"fisher": 85.5, "squisher": 85.9, "random": 76.8},
    "qnli": {"fisher": 93.4, "squisher": 93.1, "random": 84.4},
    "qqp": {"fisher": 87.3, "squisher": 87.1, "random": 83.1},
    "rte": {"fisher": 67.1, "squisher": 65.0, "random": 60.6},
    "sst2": {"fisher": 92.5, "squisher": 92.3, "random": 88.9},
    "stsb": {"fisher": 88.1, "squisher": 87.9, "random": 70.1},
}

RECIPE = {  # AdamW without decay, linear to zero, the norm of what the mask leaves clipped to 1
    "schedule": "linear", "warmup": 0, "beta2": 0.999, "eps": 1e-8, "decay": 0.0, "clip": 1.0, "every": None,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "quick": {
        "seeds": 5,
        "stand_ins": {
            "average": {"places": 9, "widths": [576, 64, 64], "keep": 0.02},
            "nothing to spare": {"places": 1, "widths": [64, 128, 64], "keep": 0.05},
        },
        "examples": 256,
        "batch": 16,
        "dense_rate": 1e-3,
        "rates": [1e-2, 3e-2, 1e-1],
        "steps": 150,
        "pretrain_steps": 600,
    },
    "cpu": {
        "seeds": 3,
        "tasks": ["sst2", "trec6"],
        "keep": 0.005,
        "reset_keeps": [0.001, 0.005, 0.02],
        "examples": 1024,
        "rates": [3e-4, 1e-3, 3e-3, 1e-2, 3e-2],
        "text": RECIPE
        | {
            "model": "minilm",
            "pooling": "mean",
            "frozen": "word_embeddings",
            "length": 32,
            "validation": 500,
            "test": 1000,
            "train": None,
            "steps": 120,
            "batch": 16,
            "rate": 1e-4,
            "keep": [64],
        },
    },
    "glue": {
        "seeds": 3,
        "tasks": ["sst2", "cola", "mnli", "mrpc", "qnli", "qqp", "rte", "stsb"],
        "keep": 0.005,
        "reset_keeps": [0.005],
        "examples": 1024,
        "rates": [3e-4, 1e-3, 3e-3, 1e-2, 3e-2],
        "dense_rates": [2e-5, 5e-5, 1e-4, 2e-4, 5e-4],
        "text": RECIPE
        | {
            "model": "minilm",
            "pooling": "mean",
            "frozen": "word_embeddings",
            "length": 64,
            "validation": 300,
            "test": None,
            "train": None,
            "steps": 300,
            "batch": 16,
            "keep": [64],
        },
    },
    "paper": {
        "seeds": 1,
        "tasks": ["cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb"],
        "keep": 0.005,
        "reset_keeps": [0.005, 0.5],
        "examples": 1024,
        "rates": [5e-5],  # the one that the reference gives for all tasks
        "epochs": 7,
        "batches": {"rte": 8},
        "text": RECIPE
        | {
            "model": "bert-large-cased-whole-word-masking",
            "pooling": "own",
            "frozen": None,
            "length": 128,
            "validation": 500,
            "test": None,
            "train": None,
            "batch": 16,
            "rate": 5e-5,
            "device": "auto",
        },
    },
}
_GLUE = CONFIGS["glue"]
CONFIGS["glue-upper"] = {
    **_GLUE,
    "text": {**_GLUE["text"], "layers": 2, "frozen": None, "train": 4800, "test": 1000, "steps": 200},
}
BENCHMARKS = {
    "cpu": {"glue": "FISH mask, GLUE", "glue-upper": "FISH mask, GLUE, two layers", "cpu": "FISH mask, two tasks"}
}
_GUESSED = dict.fromkeys(("sst2", "mrpc", "qnli", "qqp", "rte"), 50.0) | {
    "trec6": 50 / 3,
    "mnli": 100 / 3,
    "cola": 0.0,
    "stsb": 0.0,
}


def stages(config: dict[str, Any], seeds: range) -> list[list[Unit]]:
    """Return the stages: importances, the search of a learning rate for each method, sparse training and resetting."""
    if "text" not in config:
        kinds = list(config["stand_ins"])
        search = [Unit(f"search/{kind}", "search_digits", {"kind": kind}) for kind in kinds]
        seeded = [(kind, seed) for kind in kinds for seed in seeds]
        return [search, [Unit(f"{k}/seed-{s}", "digits", {"kind": k, "seed": s}) for k, s in seeded]]
    first = config["tasks"][0]
    pairs = [(task, seed) for task in config["tasks"] for seed in seeds]
    searching = len(config["rates"]) > 1
    masks = [(first, 0)] if searching else []
    dense = [Unit(f"search/dense/{r:g}", "search_dense", {"rate": r}) for r in config.get("dense_rates", ())]
    out = [dense] if dense else []
    out.append([Unit(f"{t}/seed-{s}/masks", "masks", {"task": t, "seed": s}) for t, s in masks + pairs])
    if searching:
        wanted = [(m, r) for m in METHODS for r in config["rates"]]
        out.append([Unit(f"search/{m}/{r:g}", "search", {"method": m, "rate": r}) for m, r in wanted])
    last = [Unit(f"{t}/seed-{s}/{m}", "sparse", {"task": t, "seed": s, "method": m}) for t, s in pairs for m in METHODS]
    last += [Unit(f"{t}/seed-{s}/reset", "reset", {"task": t, "seed": s}) for t, s in pairs]
    out.append(last)
    if searching:
        out.append(
            [replace(unit, key=f"{unit.key}, one rate", call="one_rate") for unit in last if unit.call == "sparse"]
        )
    return out


def chance(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the score of guessing by the beginning of a case's name."""
    guessed = [_GUESSED[task] for task in config.get("tasks", ()) if task in _GUESSED]
    return {**_GUESSED, **({"average": sum(guessed) / len(guessed)} if guessed else {})}


def scores(results: Mapping[str, dict[str, Any]]) -> list[Score]:
    """Return scores in percent by task, and their average over tasks."""
    out = []
    for key, result in results.items():
        if key.startswith("search/") or key.endswith("/masks"):
            continue
        for row in result["rows"]:
            out.append(Score(row["case"], row["method"], result["seed"], row["score"], METRIC))
    if not any("task" in result for result in results.values()):
        return out  # digits: every case is an average already
    columns = {score.case.partition(", ")[0] for score in out}
    columns |= {result["task"] for result in results.values() if result.get("seed", 0) > 0}  # and what is still to come
    by: dict[tuple[str, str, int], list[float]] = {}
    for score in out:
        ending = score.case.removeprefix(score.case.partition(", ")[0])
        by.setdefault((f"average{ending}", score.method, score.seed), []).append(score.value)
    return out + [
        Score(case, method, seed, sum(values) / len(values), METRIC)
        for (case, method, seed), values in sorted(by.items(), key=lambda item: item[0][0])
        if len(values) == len(columns)
    ]


# A pretrained encoder


def masks(run: Run, task: str, seed: int) -> dict[str, Any]:
    """Make the importances of a task; return how far their masks agree, and their cost."""
    recipe = _recipe(run, task)
    dense = _kind(run).fine_tune(_with_data(run), task, seed, recipe)
    steps = _mask_steps(run, recipe)
    found = importances(run, task, seed)
    overlap = {}
    for keep in sorted({run.config["keep"], *run.config["reset_keeps"]}):
        of = {method: chosen(found[method], keep) for method in METHODS}
        overlap[f"{keep:g}"] = {method: overlap_of(of["fisher"], of[method]) for method in ("squisher", "random")}
    extracting = dense["snapshots"][str(steps)]["seconds"]
    return {
        "task": task,
        "seed": seed,
        "parameters": sum(value.numel() for value in found["fisher"].values()),
        "overlap": overlap,
        "spearman": round(squisher.compare(found["squisher"], found["fisher"]).spearman, 4),
        "times": {
            "fisher": _fishers(run, task, seed)["seconds"],
            "squisher": extracting,
            "squisher with its dense steps": extracting + dense["seconds"] * steps / recipe["steps"],
        },
    }


def search(run: Run, method: str, rate: float) -> dict[str, Any]:
    """Return the validation score of one learning rate on seed 0 of the first task."""
    task = run.config["tasks"][0]
    splits = _splits(run, task)
    model = _trained(run, task, 0, method, rate)
    return {"method": method, "rate": rate, "validation": measured(model, splits.validation, task)}


def search_dense(run: Run, rate: float) -> dict[str, Any]:
    """Return the validation score of dense training on the first task, with a seed of its own."""
    task = run.config["tasks"][0]
    recipe, splits = {**run.config["text"], "rate": rate}, _splits(run, task)
    model = _kind(run).load(recipe, splits.classes, 0)
    text.train(model, splits.train, recipe, 0)
    return {"method": "dense", "rate": rate, "validation": measured(model, splits.validation, task)}


def chosen_rate(run: Run, method: str) -> float:
    """Return the learning rate that was best on validation data, the smaller of equal ones."""
    rates = run.config["dense_rates" if method == "dense" else "rates"]
    if len(rates) == 1:
        return rates[0]
    found = [run.result(f"search/{method}/{rate:g}") for rate in rates]
    return max(found, key=lambda result: (result["validation"], -result["rate"]))["rate"]


def sparse(run: Run, task: str, seed: int, method: str) -> dict[str, Any]:
    """Train under the mask of one method."""
    rate = chosen_rate(run, method)
    rows = _rows(run, _trained(run, task, seed, method, rate), task, method)
    return {"task": task, "seed": seed, "rate": rate, "rows": rows}


def one_rate(run: Run, task: str, seed: int, method: str) -> dict[str, Any]:
    """Train sparsely at the Fisher's learning rate, whichever rate suits the method."""
    rate = chosen_rate(run, "fisher")
    if rate == chosen_rate(run, method):
        rows = run.result(f"{task}/seed-{seed}/{method}")["rows"]
    else:
        rows = _rows(run, _trained(run, task, seed, method, rate), task, method)
    rows = [row | {"case": f"{row['case']}, one rate"} for row in rows]
    return {"task": task, "seed": seed, "rate": rate, "rows": rows}


def reset(run: Run, task: str, seed: int) -> dict[str, Any]:
    """Return the scores of the densely trained model, as it is and with everything outside the mask reset."""
    recipe = _recipe(run, task)
    tuned = _kind(run).fine_tune(_with_data(run), task, seed, recipe)["snapshots"]["final"]["weights"]
    model = _kind(run).load(recipe, _splits(run, task).classes, seed)
    base = text.weights_of(model)
    model.load_state_dict(tuned, strict=False)
    rows = _rows(run, model, task, "dense")
    found = importances(run, task, seed, tuned=True)
    for keep in run.config["reset_keeps"]:
        for method in METHODS:
            mask = chosen(found[method], keep)
            model.load_state_dict(dict(squisher.mask.reset_outside(tuned, base, mask)), strict=False)
            rows += _rows(run, model, task, method, f", reset outside {100 * keep:g} %")
    return {"task": task, "seed": seed, "rows": rows}


def importances(run: Run, task: str, seed: int, tuned: bool = False) -> dict[str, Mapping[str, Tensor]]:
    """Return the importances by method, at the pretrained weights or at the densely trained ones."""
    recipe = _recipe(run, task)
    fisher = _fishers(run, task, seed)["tuned" if tuned else "pretrained"]
    snapshot = "final" if tuned else str(_mask_steps(run, recipe))
    generator = torch.Generator().manual_seed(seed)
    return {
        "fisher": fisher,
        "squisher": _kind(run).fine_tune(_with_data(run), task, seed, recipe)["snapshots"][snapshot]["squares"],
        "random": {name: torch.rand(value.shape, generator=generator) for name, value in fisher.items()},
    }


def _trained(run: Run, task: str, seed: int, method: str, rate: float) -> nn.Module:
    recipe, splits = _recipe(run, task), _splits(run, task)
    model = _kind(run).load(
        recipe, splits.classes, seed
    )  # the pretrained weights and the head that the mask was made with
    mask = chosen(importances(run, task, seed)[method], run.config["keep"])
    optimizer = squisher.mask.compact(
        model, mask, torch.optim.AdamW, lr=rate, betas=(0.9, recipe["beta2"]), eps=recipe["eps"], weight_decay=0.0
    )
    text.train(model, splits.train, recipe, seed, optimizer=optimizer)
    optimizer.release()
    return model


def _rows(run: Run, model: nn.Module, task: str, method: str, ending: str = "") -> list[dict[str, Any]]:
    """Return the scores of a model: one for each column of the paper's table that its task has a test file for."""
    columns: dict[str, Any] = {task: _splits(run, task).test}
    second, whole = SECOND.get(task), _with_data(run)
    if second and (whole.data_folder("text") / task / f"{second}.jsonl.gz").exists():
        columns[f"{task} {second}"] = _kind(run).second_test(whole, task, second, run.config["text"])
    return [
        {"case": f"{column}{ending}", "method": method, "score": measured(model, rows, task)}
        for column, rows in columns.items()
    ]


def _fishers(run: Run, task: str, seed: int) -> dict[str, Any]:
    """Return the Fishers of single examples and their labels, at the pretrained weights with a new head and at the densely trained ones."""

    def make() -> dict[str, Any]:
        recipe, splits = _recipe(run, task), _splits(run, task)
        model = _kind(run).load(recipe, splits.classes, seed)
        order = torch.randperm(len(splits.train), generator=torch.Generator().manual_seed(seed))
        batches = splits.train.take(order[: run.config["examples"]]).batches(32)
        begin = time.perf_counter()
        kind = "gaussian" if splits.train.labels.is_floating_point() else "auto"
        out: dict[str, Any] = {"pretrained": _on_cpu(squisher.fisher(model, batches, likelihood=kind))}
        out["seconds"] = time.perf_counter() - begin
        tuned = _kind(run).fine_tune(_with_data(run), task, seed, recipe)["snapshots"]["final"]["weights"]
        model.load_state_dict(tuned, strict=False)
        return out | {"tuned": _on_cpu(squisher.fisher(model, batches, likelihood=kind))}

    return run.cached(f"fish-{run.scale}/{task}-{seed}", make)


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in tensors.items()}


def _mask_steps(run: Run, recipe: Mapping[str, Any]) -> int:
    """Return the number of dense steps that see as many examples as the Fisher."""
    return -(-run.config["examples"] // recipe["batch"])


def _recipe(run: Run, task: str) -> dict[str, Any]:
    recipe = dict(run.config["text"])
    if "dense_rates" in run.config:
        recipe["rate"] = chosen_rate(run, "dense")
    recipe["batch"] = run.config.get("batches", {}).get(task, recipe["batch"])
    if "epochs" in run.config:
        rows = len(text.splits(_with_data(run), task, recipe).train)
        recipe["steps"] = run.config["epochs"] * (rows // recipe["batch"])
        recipe["keep"] = [_mask_steps(run, recipe)]
    return recipe


def _kind(run: Run) -> Any:
    """Return the module with `splits`, `load` and `fine_tune`, for the whole encoder or for its upper layers."""
    return upper if "layers" in run.config["text"] else text


def _splits(run: Run, task: str) -> text.Splits:
    return _kind(run).splits(_with_data(run), task, run.config["text"])


def _with_data(run: Run) -> Run:
    """Return the run with a folder of tasks: the given one, or GLUE from the Hub, written once in the same layout."""
    if run.data is not None:
        return run
    folder = run.out / "glue"
    for task in run.config["tasks"]:
        if not (folder / "text" / task / "eval.jsonl.gz").exists():
            download(task, folder / "text" / task)
    return replace(run, data=folder)
