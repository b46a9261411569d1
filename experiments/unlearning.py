"""One class is forgotten by selective synaptic dampening, beside retraining without it and fine-tuning on the rest.

Not in the paper. A network learns ten classes; then the class `seed mod 10` is to be forgotten. `squisher` dampens with the
optimizer's accumulator as the importance of all data, `fisher` with a Fisher of `fisher_examples` training rows; both with the
same Fisher of the rows to forget. `select` and `strength` are chosen by seed on held-out rows: the best mean of accuracy on the rest
and error on the class. All data contain the class, so F is at least a tenth of its Fisher, and a `select` of 10 dampens nothing.
`fine-tuned` trains the network on the rest for one epoch, `retrained` a new one for as long as the first.

Three numbers by method: accuracy on test rows of the class (forget), of the others (retain), and the share of the class's training
rows that a membership attack takes for training rows: logistic regression on the entropy of the outputs, fitted to training rows of
the rest against test rows, as in the paper of the method (Foster et al., 2024). The retrained network says what to aim at.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import squisher
from experiments.comparison import document
from experiments.data import Labelled, cifar, digits, mnist
from experiments.networks import accuracy, perceptron
from experiments.page_parts import COLOURS, Parts, save, subplots, table
from experiments.runs import Run, Score, Unit

METHODS = ("original", "retrained", "fine-tuned", "fisher", "squisher")
MEASURES = {"forget": "accuracy on the class", "retain": "accuracy on the rest", "membership": "taken for members"}

_COMMON = {"batch": 64, "rate": 1e-3, "fisher_examples": 2000, "forget_examples": 500, "held_out": 1000}
CONFIGS: dict[str, dict[str, Any]] = {
    "quick": {
        "seeds": 2,
        "selects": [0.3, 1.0, 3.0],
        "strengths": [0.1, 1.0],
        "benchmarks": {"digits": {**_COMMON, "train": 1000, "epochs": 10, "held_out": 200, "widths": [64, 64, 32, 10]}},
    },
    "cpu": {
        "seeds": 5,
        "selects": [0.1, 0.3, 1.0, 3.0],
        "strengths": [0.1, 1.0],
        "benchmarks": {
            "mnist": {**_COMMON, "train": 10_000, "epochs": 5, "widths": [784, 256, 128, 10]},
            "cifar-10": {**_COMMON, "train": 5000, "epochs": 5, "channels": [12, 24, 24]},
        },
    },
}


def stages(config: Mapping[str, Any], seeds: Sequence[int]) -> list[list[Unit]]:
    """Return the stages: a unit for each benchmark and seed."""
    return [[Unit(f"{b}/{s}", "forget", {"benchmark": b, "seed": s}) for b in config["benchmarks"] for s in seeds]]


def forget(run: Run, benchmark: str, seed: int) -> dict[str, Any]:
    """Train, forget in every way, and measure."""
    config = run.config["benchmarks"][benchmark]
    training, held, test = _splits(run, benchmark, config)
    lost = seed % 10
    rest = training[training.labels != lost]
    gone = training[training.labels == lost]
    times: dict[str, float] = {}
    model, optimizer, times["original"] = _trained(config, training, seed)
    models = {"original": model}
    models["retrained"], _, times["retrained"] = _trained(config, rest, seed)
    models["fine-tuned"] = _copy(model, config)
    _, times["fine-tuned"] = _train(models["fine-tuned"], rest, config, seed, epochs=1)
    start = time.perf_counter()
    forgotten = squisher.fisher(model, gone[: config["forget_examples"]].batches(64))
    times["fisher of the class"] = time.perf_counter() - start
    start = time.perf_counter()
    measured = squisher.fisher(model, training[: config["fisher_examples"]].batches(64))
    times["fisher"] = time.perf_counter() - start
    recycled = squisher.extract(optimizer, model, batch_size=config["batch"])
    chosen, dampened = {}, {}
    for name, whole in (("fisher", measured), ("squisher", recycled)):
        pairs = [(a, b) for a in run.config["selects"] for b in run.config["strengths"]]
        chosen[name], models[name], dampened[name] = _best(model, config, whole, forgotten, held, lost, pairs)
    found = {name: _measured(one, rest, gone, test, lost) for name, one in models.items()}
    return {"class": lost, "measures": found, "chosen": chosen, "dampened": dampened, "seconds": times}


def scores(results: Mapping[str, Mapping[str, Any]]) -> list[Score]:
    """Return every measure of every method."""
    out = []
    for key, result in results.items():
        benchmark, seed = key.split("/")
        for method, found in result["measures"].items():
            out += [Score(f"{benchmark}: {what}", method, int(seed), value) for what, value in found.items()]
    return out


def parts(folder: Path, images: Path) -> Parts:
    """Return the table and the figure of docs/unlearn.md."""
    found = document("unlearning", "cpu", folder)
    values: dict[tuple[str, str], list[float]] = {}
    for score in found["scores"]:
        values.setdefault((score["case"], score["method"]), []).append(score["value"])
    benchmarks = list(found["config"]["benchmarks"])
    rows = []
    for benchmark in benchmarks:
        for method in METHODS:
            cells = [values[f"{benchmark}: {what}", method] for what in MEASURES]
            rows.append([benchmark, method, *(f"{statistics.fmean(c):.1f} ± {statistics.stdev(c):.1f}" for c in cells)])
    figure, axes = subplots(len(benchmarks), (3.8 * len(benchmarks), 2.8))
    for axis, benchmark in zip(axes, benchmarks, strict=True):
        for k, method in enumerate(METHODS):
            heights = [statistics.fmean(values[f"{benchmark}: {what}", method]) for what in MEASURES]
            places = [i + 0.16 * (k - 2) for i in range(len(MEASURES))]
            axis.bar(places, heights, 0.16, color=COLOURS[k], label=method)
        axis.set_xticks(range(len(MEASURES)), list(MEASURES))
        axis.set_title(benchmark)
        axis.set_ylabel("%")
    axes[-1].legend(fontsize=7, frameon=False)
    save(figure, images / "unlearn.png")
    units = [unit["result"] for unit in found["units"].values()]
    selects = {m: sorted(u["chosen"][m]["select"] for u in units) for m in ("fisher", "squisher")}
    words = {f"{m} selects": f"{s[0]:g} to {s[-1]:g}" for m, s in selects.items()}
    head = ["data", "method", *(f"{what}: {long}, %" for what, long in MEASURES.items())]
    return Parts({"unlearning": table(head, rows)}, words)


def _splits(run: Run, benchmark: str, config: Mapping[str, Any]) -> tuple[Labelled, Labelled, Labelled]:
    if benchmark == "digits":
        whole, test = digits()
    elif benchmark == "mnist":
        whole, test = mnist(run.data_folder("mnist"))
    else:
        whole, test = cifar(run.data_folder("cifar-10-batches-bin"), 10)
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))
    count = config["train"]
    return whole[order[:count]], whole[order[count : count + config["held_out"]]], test


def _network(config: Mapping[str, Any]) -> nn.Module:
    if "widths" in config:
        return perceptron(config["widths"])
    layers: list[nn.Module] = []
    inputs = 3
    for width in config["channels"]:
        layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        inputs = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(inputs * 16, 10))


def _trained(config: Mapping[str, Any], data: Labelled, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, float]:
    torch.manual_seed(seed)
    model = _network(config)
    optimizer, seconds = _train(model, data, config, seed, config["epochs"])
    return model, optimizer, seconds


def _train(
    model: nn.Module, data: Labelled, config: Mapping[str, Any], seed: int, epochs: int
) -> tuple[torch.optim.Optimizer, float]:
    start = time.perf_counter()
    optimizer = torch.optim.Adam(model.parameters(), lr=config["rate"], fused=True)
    generator = torch.Generator().manual_seed(seed)
    size = config["batch"]
    for _ in range(epochs):
        order = torch.randperm(len(data), generator=generator)
        for rows in order[: len(order) // size * size].split(size):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data.inputs[rows]), data.labels[rows]).backward()
            optimizer.step()
    return optimizer, time.perf_counter() - start


def _copy(model: nn.Module, config: Mapping[str, Any], weights: Mapping[str, Tensor] | None = None) -> nn.Module:
    out = _network(config)
    out.load_state_dict(dict(weights or model.state_dict()))
    return out


def _best(
    model: nn.Module,
    config: Mapping[str, Any],
    whole: squisher.Importance,
    forgotten: squisher.Importance,
    held: Labelled,
    lost: int,
    pairs: Sequence[tuple[float, float]],
) -> tuple[dict[str, float], nn.Module, float]:
    """Return the `select` and `strength` that are best on held-out rows, the resulting network, and the share of weights dampened."""
    best: tuple[float, dict[str, float], nn.Module, float] | None = None
    for select, strength in pairs:
        weights = squisher.unlearn.dampen(model.state_dict(), whole, forgotten, select, strength)
        one = _copy(model, config, weights)
        kept, gone = (accuracy(one, held[mask]) for mask in (held.labels != lost, held.labels == lost))
        if best is None or kept + 100 - gone > best[0]:
            counts = weights.counts().values()
            chosen = {"select": select, "strength": strength}
            best = kept + 100 - gone, chosen, one, sum(c for c, _ in counts) / sum(n for _, n in counts)
    assert best is not None
    return best[1:]


def _measured(model: nn.Module, rest: Labelled, gone: Labelled, test: Labelled, lost: int) -> dict[str, float]:
    return {
        "forget": accuracy(model, test[test.labels == lost]),
        "retain": accuracy(model, test[test.labels != lost]),
        "membership": 100 * _taken_for_members(model, rest, gone, test[test.labels != lost]),
    }


@torch.no_grad()
def _taken_for_members(model: nn.Module, members: Labelled, asked: Labelled, others: Labelled) -> float:
    from sklearn.linear_model import LogisticRegression

    def entropy(data: Labelled) -> Tensor:
        logs = torch.cat([model(inputs).log_softmax(-1) for inputs, _ in data.batches(512)])
        return -(logs.exp() * logs).sum(-1, keepdim=True)

    count = min(len(members), len(others))
    known = torch.cat([entropy(members[:count]), entropy(others[:count])]).numpy()
    labels = [1] * count + [0] * count
    attack = LogisticRegression().fit(known, labels)
    return float(attack.predict(entropy(asked).numpy()).mean())
