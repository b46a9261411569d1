"""How much does λ matter? EWC on split MNIST (task) over many λ, with the penalty in the gradient, tracked and decoupled.

The network, contexts, batch and rate of `ewc --scale split-task`; 500 iterations a context instead of 2,000, so that five seeds of every
λ can be run. Test images; nothing is chosen by them. The penalty's λ after the step (decoupled) is another one than in the gradient, so
each method has a range of its own, of as many values. The search of split MNIST has the same curves of one seed at 2,000 iterations.

python -m experiments strengths --scale cpu --data DIR
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import ewc
from experiments.comparison import document
from experiments.continual import METHODS, learn_all
from experiments.page_parts import COLOURS, Parts, save, subplots, table
from experiments.runs import Run, Score, Unit, seed_of
from experiments.spread import mean

TITLE = "λ of EWC"
BASELINE = "none"
METRIC = "accuracy"
HIGHER_IS_BETTER = True
PAPER: dict[str, dict[str, float]] = {}  # the paper does not ask
PICTURE = "ewc-decoupled.png"

_EXPONENTS = {
    "squisher": [0, 2, 4, 6, 8, 10, 12],
    "squisher (tracked)": [0, 2, 4, 6, 8, 10, 12],
    "squisher (decoupled)": [4, 6, 8, 10, 12, 14, 16],
}
_SHAPE = ("case", "scenario", "contexts", "widths", "batch", "lr", "fisher_examples")
CONFIGS: dict[str, dict[str, Any]] = {
    "quick": {key: ewc.CONFIGS["quick"][key] for key in _SHAPE}
    | {"seeds": 2, "iterations": 60, "exponents": {method: [2, 8] for method in _EXPONENTS}},
    "cpu": {key: ewc.CONFIGS["split-task"][key] for key in _SHAPE}
    | {"seeds": 5, "iterations": 500, "exponents": _EXPONENTS},
}
WHAT = ("exponents",)


def stages(config: Mapping[str, Any], seeds: Sequence[int]) -> list[list[Unit]]:
    """Return the stages: a unit for each seed, method and λ."""
    return [
        [
            Unit(f"seed-{seed}/{method}/1e{e}", "curve", {"method": method, "exponent": e, "seed": seed})
            for seed in seeds
            for method, exponents in config["exponents"].items()
            for e in exponents
        ]
    ]


def curve(run: Run, method: str, exponent: int, seed: int) -> dict[str, Any]:
    """Run one method with one λ on one seed."""
    return learn_all(ewc.dealt(run, seed), METHODS[method], 10.0**exponent, run.config, seed)


def scores(results: Mapping[str, Mapping[str, Any]]) -> list[Score]:
    """Return mean accuracy over contexts; a case is a λ."""
    out = []
    for key, result in results.items():
        _, method, strength = key.split("/")
        out.append(Score(strength, method, seed_of(key), result["accuracy"]))
    return out


Curves = Mapping[str, Mapping[int, Sequence[Mapping[str, Any]]]]
"""Method -> exponent of λ -> results, one a seed."""


def parts(folder: Path, images: Path) -> Parts:
    """Return the section of docs/continual-learning.md: the curves of one seed from the search, and of all seeds that were run."""
    panels = {"one seed, 2,000 iterations, held-out images": _curves(document("ewc", "split-task", folder), "search")}
    made = document("strengths", "cpu", folder)
    if made is not None:
        seeds = len({score["seed"] for score in made["scores"]})
        panels[f"{seeds} seeds, {made['config']['iterations']} iterations, test images"] = _curves(made, "seed-")
    _draw(panels, images / PICTURE)
    blocks = [f"![Accuracy against λ, with the penalty in the gradient, tracked and decoupled](images/{PICTURE})"]
    for title, curves in panels.items():
        exponents = sorted({e for by in curves.values() for e in by})
        rows = [[method, *(_cell(by.get(e, ())) for e in exponents)] for method, by in curves.items()]
        blocks += [f"{title[:1].upper()}{title[1:]}:", table(["λ", *(f"1e{e}" for e in exponents)], rows)]
    return Parts({"decoupled curves": "\n\n".join([*blocks, "† Numbers overflowed; later contexts were not learnt."])})


def _curves(made: Mapping[str, Any], places: str) -> Curves:
    out: dict[str, dict[int, list[Mapping[str, Any]]]] = {method: defaultdict(list) for method in _EXPONENTS}
    for key, unit in made["units"].items():
        place, _, rest = key.partition("/")
        method, _, strength = rest.rpartition("/1e")
        if place.startswith(places) and method in out:
            out[method][int(strength)].append(unit["result"])
    return out


def _cell(results: Sequence[Mapping[str, Any]]) -> str:
    if not results:
        return ""
    found = mean([result["accuracy"] for result in results])
    overflowed = any(result["diverged"] is not None for result in results)
    return (f"{found.value:.2f}" if found.count == 1 else str(found)) + "†" * overflowed


def _draw(panels: Mapping[str, Curves], path: Path) -> None:
    figure, axes = subplots(len(panels), (5.4 * len(panels), 3.4))
    labels = {"squisher": "in the gradient", "squisher (tracked)": "in the gradient, tracked"}
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        for (method, by), colour in zip(curves.items(), (COLOURS[1], COLOURS[0], COLOURS[2]), strict=True):
            values = {e: [result["accuracy"] for result in by[e]] for e in sorted(by)}
            x = [10.0**e for e in values]
            axis.plot(
                x, [mean(v).value for v in values.values()], "o-", color=colour, label=labels.get(method, "decoupled")
            )
            axis.fill_between(x, *([f(v) for v in values.values()] for f in (min, max)), color=colour, alpha=0.15)
        axis.set_xscale("log")
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("λ")
        axis.tick_params(labelsize=8)
    axes[0].set_ylabel("accuracy, mean over contexts (%)", fontsize=8)
    axes[0].legend(fontsize=8, frameon=False)
    save(figure, path)
