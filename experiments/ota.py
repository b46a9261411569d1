"""OTA with fast Fisher grafting beside Fisher merging and gradient matching, on the rotations of `experiments.merging`.

Not in the paper. Five rotations of MNIST are learnt from one network that was pretrained on upright digits; bodies are merged,
heads are kept. `ota` weights what each model changed with √F and keeps the entries with the largest F·(θ − θ₀)²; which fraction is
chosen by seed on held-out rows. `fisher` is the empirical Fisher of `fisher_examples` rows, `squisher` the accumulator. Gradient
matching has no importance of the base here (size 0).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import squisher
from experiments import rotated
from experiments.comparison import document
from experiments.merging import BODY
from experiments.merging import CONFIGS as MERGING
from experiments.page_parts import COLOURS, Parts, save, subplots, table
from experiments.runs import Run, Score, Unit
from experiments.spread import paired
from experiments.tuning import Splits, accuracy, importance

KINDS = ("fisher", "squisher")
_KEEPS = [1.0, 0.7, 0.5, 0.3, 0.2, 0.1]

CONFIGS: dict[str, dict[str, Any]] = {
    "quick": {**MERGING["quick"]["benchmarks"]["rotated digits"], "seeds": 2, "keeps": [1.0, 0.5]},
    "cpu": {**MERGING["cpu"]["benchmarks"]["MNIST rotations"], "seeds": 5, "keeps": _KEEPS},
}


def stages(config: Mapping[str, Any], seeds: Sequence[int]) -> list[list[Unit]]:
    """Return the stages: a unit for each seed."""
    return [[Unit(str(seed), "merge", {"seed": seed}) for seed in seeds]]


def merge(run: Run, seed: int) -> dict[str, Any]:
    """Fine-tune every task, merge in every way, and test with each task's own head."""
    config = {key: value for key, value in run.config.items() if key != "keeps"}
    base = rotated.pretrained(run, seed, config)
    bodies, data, heads = [], [], []
    found: dict[str, list[squisher.Importance]] = {kind: [] for kind in KINDS}
    individual = {}
    for task, steps in config["tasks"].items():
        recipe = {**config, "steps": steps, "keep": [], "every": None}
        snapshot = rotated.fine_tune(run, task, seed, recipe)["snapshots"]["final"]
        parts = rotated.splits(run, task, config)
        model = rotated.network(config, seed)
        model.load_state_dict(snapshot["weights"])
        individual[task] = accuracy(model, parts.test)
        rows = parts.train.take(slice(0, config["fisher_examples"]))
        found["fisher"].append(
            squisher.fisher(model, [(b["inputs"], b["labels"]) for b in rows.batches(64)]).restrict(BODY)
        )
        found["squisher"].append(importance(snapshot, BODY))
        bodies.append(_body(snapshot["weights"]))
        data.append(parts)
        heads.append(model)
    start = _body(base)
    scored = {
        method: _scored(weights, heads, data)
        for method, weights in _merged(start, bodies, found, run.config["keeps"]).items()
    }
    tasks = list(config["tasks"])
    return {
        "accuracy": {method: dict(zip(tasks, test, strict=True)) for method, (_, test) in scored.items()},
        "validation": {method: statistics.fmean(validation) for method, (validation, _) in scored.items()},
        "individual": individual,
    }


def _body(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: w for name, w in weights.items() if name.startswith("body.")}


def _merged(
    start: Mapping[str, Tensor], bodies: list[dict[str, Tensor]], found: Mapping[str, Any], keeps: Sequence[float]
) -> dict[str, Mapping[str, Tensor]]:
    out: dict[str, Mapping[str, Tensor]] = {"linear": squisher.merge.average(bodies)}
    for kind, imps in found.items():
        out[f"fisher merging, {kind}"] = squisher.merge.fisher(bodies, imps)
        out[f"ubgm, {kind}"] = squisher.merge.ubgm(start, bodies, None, imps, base_size=0.0)
        for keep in keeps:
            out[f"ota, {kind}, keep {keep:g}"] = squisher.merge.ota(start, bodies, imps, keep)
    return out


def _scored(
    weights: Mapping[str, Tensor], models: Sequence[nn.Module], data: Sequence[Splits]
) -> tuple[list[float], list[float]]:
    """Return accuracy on held-out and on test rows by task."""
    body = dict(weights)
    out: tuple[list[float], list[float]] = ([], [])
    for model, part in zip(models, data, strict=True):
        model.load_state_dict(body, strict=False)
        for where, rows in zip(out, (part.validation, part.test), strict=True):
            where.append(accuracy(model, rows))
    return out


def scores(results: Mapping[str, Mapping[str, Any]]) -> list[Score]:
    """Return means over tasks; `ota, KIND` is the fraction that is best on held-out rows."""
    out = []
    for seed, result in results.items():
        means = {method: statistics.fmean(tasks.values()) for method, tasks in result["accuracy"].items()}
        means["individual"] = statistics.fmean(result["individual"].values())
        for kind in KINDS:
            mine = [m for m in means if m.startswith(f"ota, {kind}, ")]
            means[f"ota, {kind}"] = means[max(mine, key=lambda m: result["validation"][m])]
        out += [Score("average", method, int(seed), value) for method, value in means.items()]
    return out


def parts(folder: Path, images: Path) -> Parts:
    """Return the table and the figure of the section on OTA in docs/merging.md."""
    found = document("ota", "cpu", folder)
    values: dict[str, dict[int, float]] = {}
    for score in found["scores"]:
        values.setdefault(score["method"], {})[score["seed"]] = score["value"]
    shown = ["individual", "linear", *(f"{how}, {kind}" for how in ("fisher merging", "ubgm", "ota") for kind in KINDS)]
    rows = []
    for method in shown:
        own = values[method]
        gap = "" if method in ("linear", "individual") else str(paired(own, values["linear"]))
        rows.append([method, f"{statistics.fmean(own.values()):.1f} ± {statistics.stdev(own.values()):.1f}", gap])
    figure, (axis,) = subplots(1, (5.2, 2.8))
    keeps = found["config"]["keeps"]
    for kind, colour in zip(KINDS, COLOURS, strict=False):
        means = [statistics.fmean(values[f"ota, {kind}, keep {k:g}"].values()) for k in keeps]
        axis.plot(keeps, means, "o-", color=colour, label=f"ota, {kind}")
        axis.axhline(
            statistics.fmean(values[f"fisher merging, {kind}"].values()),
            color=colour,
            ls="--",
            lw=1,
            label=f"fisher merging, {kind}",
        )
    axis.axhline(statistics.fmean(values["linear"].values()), color=COLOURS[6], ls=":", label="linear")
    axis.set_xlabel("fraction of changes kept")
    axis.set_ylabel("accuracy, %")
    axis.legend(fontsize=7, frameon=False)
    save(figure, images / "ota.png")
    return Parts({"ota": table(["method", "accuracy, %", "− linear, points [95 %]"], rows)})
