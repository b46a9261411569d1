"""How many examples of a Fisher is a Squisher worth? The score of what is done with it, against the number of examples.

Whoever has data can measure a Fisher on a few of them. Here the Fisher of 8 to N training examples (nested subsets in a random order of
the seed's; exact, and with the labels of the data) does the same work as the Squisher of the same network:

- *Pruning*: single weights of a perceptron on MNIST by ½θ²F, 75 % and 90 % of all, test accuracy before any retraining. The recipe of
  `experiments.pruning_weights`.
- *Merging*: five rotations of MNIST from one pretrained perceptron, mean test accuracy of the merge with each task's head. The recipe of
  `experiments.merging`.
- *EWC*, scale `ewc`: split MNIST, task-incremental, the network and contexts of `ewc --scale split-task` with 150 iterations a context
  instead of 2,000; final test accuracy, mean over contexts. λ is searched on a seed of its own with held-out images, over as many
  powers of ten for each kind of importance; a Fisher of fewer examples takes the λ of its kind's largest, because means over few
  and over many examples estimate the same thing.

"fisher (moving average)" is what the paper leaves to future work: an average along training like Adam's, with the same β₂ and
the same batches, of per-example squares instead of squared sums (`Tracker(per="example")`). It has the memory of v without its sum-then-square, so it tells
apart what each of them does. In EWC it begins anew with each context and does not see the penalty; what to hold it against there is
"squisher (tracked)", the same average of squared sums. Nothing but λ is searched for.

python -m experiments examples --scale cpu --data DIR
python -m experiments examples --scale ewc --data DIR
"""

from __future__ import annotations

import copy
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import squisher
from experiments import ewc, merging, networks, pruning_weights, rotated
from experiments.claims import LEVEL
from experiments.comparison import document
from experiments.continual import METHODS, Method, hold_out, learn_all, split
from experiments.data import Labelled, digits, mnist, shuffled
from experiments.page_parts import COLOURS, Parts, save, subplots, table
from experiments.runs import Run, Score, Unit, seed_of
from experiments.spread import Difference, holm, mean, paired
from experiments.tuning import accuracy

TITLE = "How many examples"
BASELINE = "without"
METRIC = "accuracy"
HIGHER_IS_BETTER = True
PAPER: dict[str, dict[str, float]] = {}  # the paper does not ask
MAIN_CASES = ("pruning, 90%", "merging", "EWC")
FISHERS = ("fisher (exact)", "fisher (empirical)")

CONFIGS: dict[str, dict[str, Any]] = {
    "quick": {
        "seeds": 2,
        "examples": [8, 128],
        "pruning": {"train": 500, "widths": [64, 32, 10], "epochs": 3, "batch": 32, "rate": 3e-3, "decay": 0.01, "sparsities": [0.75]},
        "merging": merging.CONFIGS["quick"]["benchmarks"]["rotated digits"],
    },
    "cpu": {
        "seeds": 5,
        "examples": [8, 32, 128, 512, 2048],
        "pruning": {
            **{key: pruning_weights.PERCEPTRON[key] for key in ("train", "widths", "epochs", "batch", "rate", "decay")},
            "sparsities": [0.75, 0.9],
        },
        "merging": merging.CONFIGS["cpu"]["benchmarks"]["MNIST rotations"],
    },
    "ewc": {key: ewc.CONFIGS["split-task"][key] for key in ("case", "scenario", "contexts", "widths", "batch", "lr", "held_out")}
    | {
        "seeds": 5,
        "iterations": 150,
        "fisher_examples": 10_000,
        "examples": [8, 32, 128, 512, 2048],
        "exponents": {
            method: [0, 1, 2, 3, 4, 5]
            for method in ("squisher", "squisher (tracked)", "fisher (moving average)", "fisher (exact)", "fisher (empirical)")
        },
    },
}  # fmt: skip


def stages(config: dict[str, Any], seeds: range) -> list[list[Unit]]:
    """Return the stages: a unit for each use and seed; for EWC the search over λ, then a unit for each method and seed."""
    if "exponents" not in config:
        return [[Unit(f"seed-{seed}/{use}", use, {"seed": seed}) for seed in seeds for use in ("prune", "merge")]]
    searches = [(method, e) for method, exponents in config["exponents"].items() for e in exponents]
    return [
        [Unit(f"search/{m}/1e{e}", "search", {"method": m, "exponent": e}) for m, e in searches],
        [Unit(f"seed-{seed}/{m}", "learn_contexts", {"method": m, "seed": seed}) for seed in seeds for m in _methods(config)],
    ]  # fmt: skip


def _methods(config: Mapping[str, Any]) -> list[str]:
    """Return EWC's methods: without a penalty, with the recycled importances, and with Fishers of several numbers of examples."""
    counts = (*config["examples"], config["fisher_examples"])
    kept = [method for method in config["exponents"] if method not in FISHERS]
    return ["without", *kept, *(f"{fisher}, {count}" for fisher in FISHERS for count in counts)]


def scores(results: Mapping[str, Mapping[str, Any]]) -> list[Score]:
    """Return accuracy by case, method (with its number of examples) and seed."""
    return [
        Score(case, method, seed_of(key), value)
        for key, result in results.items()
        if not key.startswith("search/")
        for case, by_method in result["accuracy"].items()
        for method, value in by_method.items()
    ]


def search(run: Run, method: str, exponent: int) -> dict[str, Any]:
    """Run EWC with one λ on the search seed, and score it on held-out training images."""
    train, _ = mnist(run.data_folder("mnist"))
    contexts = split(*hold_out(train, run.config["held_out"], seed=0), run.config["contexts"], 0)
    return learn_all(contexts, _method(method, None), 10.0**exponent, run.config, seed=0)


def learn_contexts(run: Run, method: str, seed: int) -> dict[str, Any]:
    """Run EWC with one importance and the λ of its kind on a fresh seed, and score it on the test images."""
    train, test = mnist(run.data_folder("mnist"))
    train = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))]  # which come first
    kind, _, count = method.partition(", ")
    strength = 0.0
    if kind != "without":
        exponents = run.config["exponents"][kind]
        strength = 10.0 ** max(exponents, key=lambda e: (run.result(f"search/{kind}/1e{e}")["accuracy"], -e))
    contexts = split(train, test, run.config["contexts"], seed)
    result = learn_all(contexts, _method(kind, int(count) if count else None), strength, run.config, seed)
    return {**result, "accuracy": {"EWC": {method: result["accuracy"]}}}


def _method(kind: str, count: int | None) -> Method:
    name = {"without": "none", "fisher (exact)": "fisher"}.get(kind, kind)
    return replace(METHODS[name], examples=count)


def learn(
    model: nn.Module, train: Labelled, recipe: Mapping[str, Any], steps: int, seed: int
) -> dict[str, squisher.Importance]:
    """Train in place with AdamW over shuffled epochs; return the Squisher at the end, and the moving average of Fishers."""
    beta2 = recipe.get("beta2", 0.999)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe["rate"], betas=(0.9, beta2), weight_decay=recipe["decay"]
    )
    moving = squisher.Tracker(model, optimizer, beta2, per="example")
    generator = torch.Generator().manual_seed(seed)
    order: list[Tensor] = []
    for _ in range(steps):
        if not order:
            order = list(shuffled(len(train), recipe["batch"], generator))
        rows = order.pop()
        inputs, labels = train.inputs[rows], train.labels[rows]
        optimizer.zero_grad()
        with moving.step():
            nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return {
        "squisher": squisher.extract(optimizer, model, batch_size=recipe["batch"]).as_fisher(),
        "fisher (moving average)": squisher.extract(moving, model).as_fisher(),
    }


def fishers(model: nn.Module, train: Labelled, counts: list[int], seed: int) -> dict[str, squisher.Importance]:
    """Return the Fisher of the first 8, 16, … and of all training examples, in a random order; exact and with the data's labels."""
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    rows = Labelled(train.inputs[order], train.labels[order])
    return {
        f"fisher ({labels}), {count}": squisher.fisher(
            model, rows[:count].batches(500), labels="exact" if labels == "exact" else "data"
        )
        for labels in ("exact", "empirical")
        for count in [c for c in counts if c < len(train)] + [len(train)]
    }


def prune(run: Run, seed: int) -> dict[str, Any]:
    """Prune one perceptron by every importance."""
    p = run.config["pruning"]
    train, test = digits() if run.scale == "quick" else mnist(run.data_folder("mnist"))
    if run.scale != "quick":
        train, test = (Labelled((part.inputs - 0.1307) / 0.3081, part.labels) for part in (train, test))
    train = train[: p["train"]]
    torch.manual_seed(seed)
    model = networks.perceptron(p["widths"])
    found = learn(model, train, p, p["epochs"] * (len(train) // p["batch"]), seed)
    found |= fishers(model, train, run.config["examples"], seed)
    whole = found[f"fisher (exact), {len(train)}"]
    out: dict[str, dict[str, float]] = {}
    for sparsity in p["sparsities"]:
        scored = {method: (importance, "fisher") for method, importance in found.items()}
        scored |= {"without": (whole, "random"), "magnitude": (whole, "magnitude")}
        out[f"pruning, {sparsity:.0%}"] = {
            method: _pruned(model, test, importance, sparsity, score, seed)
            for method, (importance, score) in scored.items()
        }
    return {
        "accuracy": out,
        "examples": len(train),
        "unpruned": networks.accuracy(model, test),
        "spearman": {m: round(squisher.compare(i, whole).spearman, 4) for m, i in found.items()},
    }


def _pruned(
    model: nn.Module, test: Labelled, importance: squisher.Importance, sparsity: float, score: str, seed: int
) -> float:
    smaller = copy.deepcopy(model)
    squisher.prune.weights(
        smaller, importance, sparsity=sparsity, scope="global", score=score, exclude="bias", seed=seed
    )
    return networks.accuracy(smaller, test)


def merge(run: Run, seed: int) -> dict[str, Any]:
    """Merge fine-tunes of one network by every importance, and test each task with its own head."""
    config = run.config["merging"]
    start = rotated.pretrained(run, seed, config)
    models, tests, found = [], [], []
    for task, steps in config["tasks"].items():
        data = rotated.splits(run, task, config)
        train = Labelled(data.train.inputs, data.train.labels)
        model = rotated.network(config, seed)
        model.load_state_dict(start)
        importances = learn(model, train, config, steps, seed)
        found.append(importances | fishers(model, train, run.config["examples"], seed))
        models.append(model)
        tests.append(data.test)
    weights = [{name: p.detach().clone() for name, p in model.named_parameters()} for model in models]
    merged = {"without": squisher.merge.average(weights)}
    for method in found[0]:
        merged[method] = squisher.merge.fisher(weights, [importances[method] for importances in found])
    out = {}
    for method, mixture in merged.items():
        body = {name: mixture[name] for name in weights[0] if name.startswith("body.")}
        for model in models:
            model.load_state_dict(body, strict=False)  # its head stays its own
        out[method] = statistics.fmean(accuracy(model, test) for model, test in zip(models, tests, strict=True))
    return {"accuracy": {"merging": out}, "examples": len(train)}


Values = Mapping[str, Mapping[str, Mapping[int, float]]]
"""Case -> method -> seed -> accuracy."""
LINES = ("squisher", "fisher (moving average)", "without")
PICTURE, MEMORY = "fisher-examples.png", "fisher-memory.png"
PARTS = ("memory", "squaring sums")
ENOUGH = 3  # seeds


def parts(folder: Path, images: Path) -> Parts:
    """Return the section of docs/when-to-trust-it.md: table, figure, and how many examples the Squisher is worth."""
    values = _values(folder)
    gaps = memory(values)
    _draw(values, images / PICTURE)
    _draw_memory(gaps, images / MEMORY)
    figure = f"![Accuracy against the number of examples of the Fisher](images/{PICTURE})"
    apart = f"![What memory and squaring sums change, by use: mean and 95 % interval](images/{MEMORY})"
    return Parts(
        {"examples": f"{figure}\n\n{_table(values)}", "memory": f"{apart}\n\n{_memory(gaps)}"}, _words(values, gaps)
    )


def numbers(folder: Path, images: Path) -> Parts:
    """Return the parts for docs/results.md: how many examples of which Fisher the Squisher is worth in each use."""
    values = _values(folder)
    enough = {
        f"worth/{case}/{labels}": worth(by_method, labels)
        for case, by_method in values.items()
        for labels in ("exact", "empirical")
    }
    return Parts({}, enough | _words(values, memory(values)))


def _values(folder: Path) -> Values:
    values: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for scale in ("cpu", "ewc"):
        made = document("examples", scale, folder)
        for score in made["scores"] if made is not None else ():
            values[score["case"]][score["method"]][score["seed"]] = score["value"]
    return values


def worth(by_method: Mapping[str, Mapping[int, float]], labels: str) -> str:
    """Return how many examples the Fisher needs until it is not clearly behind the Squisher, and until its mean is not lower.

    Clearly: the 95 % interval of the difference paired by seed is below 0. Nothing is said where a number was run on two seeds or one.
    """
    gaps = {
        count: paired(by_method[f"fisher ({labels}), {count}"], by_method["squisher"])
        for count in sorted(_curve(by_method, labels), reverse=True)
    }
    if min(gap.count for gap in gaps.values()) < ENOUGH:
        return "too few seeds"
    clear = [gap.high < 0 for gap in gaps.values()]
    lower = [gap.value < 0 for gap in gaps.values()]
    ends = [_first_enough(list(gaps), behind) for behind in (clear, lower)]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def _first_enough(counts: list[int], behind: list[bool]) -> str:
    """Return the last of falling counts before the first that is behind."""
    reached = behind.index(True) if True in behind else len(counts)
    return f"{counts[reached - 1]:,}" if reached else f"more than {counts[0]:,}"


def _curve(by_method: Mapping[str, Mapping[int, float]], labels: str) -> dict[int, float]:
    prefix = f"fisher ({labels}), "
    return {
        int(method.removeprefix(prefix)): mean(list(by_seed.values())).value
        for method, by_seed in by_method.items()
        if method.startswith(prefix)
    }


def _table(values: Values) -> str:
    counts = sorted({count for by_method in values.values() for count in _curve(by_method, "exact")})
    rows = []
    for case, by_method in values.items():
        for labels in ("exact", "empirical"):
            curve = _curve(by_method, labels)
            lines = [str(mean(list(by_method[m].values()))) if m in by_method else "" for m in (*LINES, "magnitude")]
            cells = [f"{curve[c]:.1f}" if c in curve else "" for c in counts]
            rows.append([f"{case}, {labels}", *lines, *cells, _seeds(by_method, labels), worth(by_method, labels)])
    return table(
        [
            "use, labels of the Fisher",
            *LINES,
            "magnitude",
            *(f"{count:,}" for count in counts),
            "seeds",
            "the Squisher is worth",
        ],
        rows,
    )


def _seeds(by_method: Mapping[str, Mapping[int, float]], labels: str) -> str:
    """Return the number of seeds behind the means of a curve."""
    found = sorted({len(by_method[f"fisher ({labels}), {count}"]) for count in _curve(by_method, labels)})
    return " to ".join(str(n) for n in dict.fromkeys((found[0], found[-1])))


def memory(values: Values) -> dict[tuple[str, str], tuple[Difference, float]]:
    """Return the effect of the two parts of the Squisher, by use and part: the difference, and its p after Holm's correction over all of them.

    Memory: the moving average of Fishers along training against the Fisher of all examples at the end, both with the data's labels.
    Squaring sums: the Squisher against that moving average; in EWC, where Adam's own state has seen the penalty, the tracked one.
    """
    gaps = {}
    for case, by_method in values.items():
        last = by_method[f"fisher (empirical), {max(_curve(by_method, 'empirical'))}"]
        moving = by_method["fisher (moving average)"]
        sums = by_method.get("squisher (tracked)", by_method["squisher"])
        gaps |= dict(zip([(case, part) for part in PARTS], (paired(moving, last), paired(sums, moving)), strict=True))
    return dict(zip(gaps, zip(gaps.values(), holm([gap.p() for gap in gaps.values()]), strict=True), strict=True))


def _memory(gaps: Mapping[tuple[str, str], tuple[Difference, float]]) -> str:
    rows = [
        [case, *(cell for part in PARTS for gap, p in [gaps[case, part]] for cell in (str(gap), f"{p:.2g}")), str(gaps[case, PARTS[0]][0].count)]
        for case in dict.fromkeys(case for case, _ in gaps)
    ]  # fmt: skip
    head = ["memory: moving average − Fisher at the end", "p", "squaring sums: Squisher − moving average", "p"]
    return table(["use", *head, "seeds"], rows)


def _words(values: Values, gaps: Mapping[tuple[str, str], tuple[Difference, float]]) -> dict[str, str]:
    """Return the numbers for sentences: differences, the widest interval, how many are clear, and means."""
    out = {f"{part}/{case}": str(gap) for (case, part), (gap, _) in gaps.items()}
    for part in PARTS:
        found = [(gap, p) for (_, one), (gap, p) in gaps.items() if one == part]
        out[f"{part}/reach"] = f"{max(max(-gap.low, gap.high) for gap, _ in found):.1f}"
        out[f"{part}/clear"] = f"{sum(p < LEVEL for _, p in found)} of {len(found)}"
    for case, by_method in values.items():
        out |= {f"{case}/{method}": f"{mean(list(by.values())).value:.1f}" for method, by in by_method.items()}
        out |= {f"{case}/{labels}/seeds": _seeds(by_method, labels) for labels in ("exact", "empirical")}
    return out


def _draw_memory(gaps: Mapping[tuple[str, str], tuple[Difference, float]], path: Path) -> None:
    cases = list(dict.fromkeys(case for case, _ in gaps))
    figure, (axis,) = subplots(1, (6.4, 0.7 + 0.62 * len(cases)))
    labels = ("memory of earlier weights", "squaring sums of examples")
    for offset, part, label, colour in zip((0.13, -0.13), PARTS, labels, (COLOURS[0], COLOURS[1]), strict=True):
        found = [gaps[case, part][0] for case in cases]
        axis.errorbar(
            [gap.value for gap in found], [offset - row for row in range(len(cases))], color=colour, label=label, fmt="o", capsize=3,
            xerr=[gap.high - gap.value for gap in found],
        )  # fmt: skip
    axis.axvline(0, color=COLOURS[-1], linewidth=0.8)
    axis.set_yticks([-row for row in range(len(cases))], cases, fontsize=8)
    axis.set_xlabel("what it changes, in points of accuracy (95 % interval)", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.legend(fontsize=7, frameon=False)
    save(figure, path)


def _draw(values: Values, path: Path) -> None:
    figure, axes = subplots(len(values), (3.4 * len(values), 3.2))
    for axis, (case, by_method) in zip(axes, values.items(), strict=True):
        for labels, colour in (("exact", COLOURS[0]), ("empirical", COLOURS[3])):
            curve = _curve(by_method, labels)
            axis.plot(sorted(curve), [curve[c] for c in sorted(curve)], "o-", color=colour, label=f"fisher ({labels})")
        styles = ((COLOURS[1], "-"), (COLOURS[6], ":"), (COLOURS[-1], "-"))
        for method, (colour, style) in zip(LINES, styles, strict=True):
            axis.axhline(mean(list(by_method[method].values())).value, color=colour, linestyle=style, label=method)
        axis.set_xscale("log", base=2)
        axis.set_title(case, fontsize=9)
        axis.set_xlabel("examples of the Fisher", fontsize=8)
        axis.tick_params(labelsize=8)
    axes[0].set_ylabel("test accuracy (%)", fontsize=8)
    axes[0].legend(fontsize=7, frameon=False)
    save(figure, path)
