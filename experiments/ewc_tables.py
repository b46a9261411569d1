"""EWC as tables: the paper's whole table beside ours, and the λ curves, contexts and totals of docs/continual-learning.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments import ewc
from experiments.comparison import document
from experiments.page_parts import COLOURS, Parts, save, subplots, table
from experiments.runs import seed_of
from experiments.spread import mean, paired

__all__ = ["ablations", "beside", "ours", "parts"]

CELLS = tuple(f"{b}-{s}" for b in ("split", "permuted", "cifar") for s in ("task", "domain", "class"))
PICTURE = "ewc-strength.png"


class Runs:
    """A document's units, by what they are; some may be missing."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.config = found["config"]
        self.case = ewc.case(self.config)
        self.curves: dict[str, dict[int, dict[str, Any]]] = {}
        self.seeds: dict[str, dict[int, dict[str, Any]]] = {}
        for key, unit in found["units"].items():
            place, _, rest = key.partition("/")
            if place == "search":
                method, _, strength = rest.rpartition("/")
                self.curves.setdefault(method, {})[int(strength.removeprefix("1e"))] = unit["result"]
            else:
                self.seeds.setdefault(rest, {})[seed_of(key)] = unit["result"]
        methods = [*self.config["methods"], *self.config.get("ablations", [])]
        self.seeds = {method: self.seeds[method] for method in methods if method in self.seeds}
        self.curves = {method: self.curves[method] for method in methods if method in self.curves}

    def accuracies(self, method: str) -> dict[int, float]:
        """Return the final mean accuracy over contexts by seed; empty if it was not run."""
        return {seed: result["accuracy"] for seed, result in sorted(self.seeds.get(method, {}).items())}

    def middle(self, method: str, value: Callable[[dict[str, Any]], list[float]]) -> list[float]:
        """Return the median over seeds of a value that every context has."""
        return [statistics.median(column) for column in zip(*map(value, self.seeds[method].values()), strict=False)]


def beside(folder: Path) -> str:
    """Return the table of all nine cells: the paper's three columns beside ours."""
    names = {"Fisher": "fisher", "Squisher (N·v)": "squisher (N·v)", "Squisher (B·v̂)": "squisher", "none": "none"}
    return _side_by_side(folder, names)


def ablations(folder: Path) -> str:
    """Return the paper's ablations, all task-incremental, beside ours."""
    names = ("fisher", "squisher", "squisher (without rescaling)", "squisher (β₂ = 0.95)", "joint")
    return _side_by_side(folder, {name: name for name in names}, "-task")


def _side_by_side(folder: Path, methods: Mapping[str, str], ending: str = "") -> str:
    rows = []
    for cell, runs in _cells(folder):
        if cell.endswith(ending):
            case = ewc.case(ewc.CONFIGS[cell])
            note = ""
            if runs is None and (check := document("ewc", f"{cell.removesuffix('-task')}-check", folder)):
                runs = Runs(check)  # λ is not searched for there
                note = f", λ = {runs.config['strengths']['fisher']:,g}"
            paper = ewc.PAPER[case]
            cells = []
            for method in methods.values():
                cells += [_accuracy(runs, method), *([f"{paper[method]:.2f}"] if method in paper else [])]
            rows.append([case + note, *cells, f"{ewc.CHANCE[case]:g}"])
    heads = [x for name, method in methods.items() for x in (name, "paper")[: 1 + (method in paper)]]
    return table(["benchmark", *heads, "chance"], rows)


def ours(folder: Path) -> str:
    """Return the table of all nine cells with the columns that the paper does not have."""
    methods = ("none", "fisher", "squisher", "squisher (N·v)", "identity", "squisher (tracked)", "squisher (decoupled)")
    rows = []
    for cell, runs in _cells(folder):
        case = ewc.case(ewc.CONFIGS[cell])
        rows.append([case, *(_accuracy(runs, method) for method in methods), f"{ewc.CHANCE[case]:g}"])
    return table(["benchmark", *methods, "chance"], rows)


def _cells(folder: Path) -> list[tuple[str, Runs | None]]:
    out = []
    for cell in CELLS:
        found = document("ewc", cell, folder)
        out.append((cell, None if found is None else Runs(found)))
    return out


def _accuracy(runs: Runs | None, method: str) -> str:
    values = list(runs.accuracies(method).values()) if runs is not None else []
    if not values:
        return "not run"
    return str(mean(values)) + (f" ({len(values)} seeds)" if 1 < len(values) < 5 else "")


def comparison(runs: Runs) -> str:
    """Return the table of every method with its λ on the test set, beside the paper."""
    paper = ewc.PAPER[runs.case]
    rows = []
    for method in runs.seeds:
        found = runs.accuracies(method)
        strengths = [result["strength"] for result in runs.seeds[method].values()]
        gap = "" if method == "fisher" else str(paired(found, runs.accuracies("fisher")))
        searched = runs.config["exponents"].get(method)
        edge = bool(searched) and _power(strengths[0]) in (min(searched), max(searched))
        rows.append(
            [
                method, _range(strengths) + " (end of the range)" * edge, str(mean(list(found.values()))),
                f"{min(found.values()):.2f}", gap, f"{paper[method]:.2f}" if method in paper else "",
            ]
        )  # fmt: skip
    return table(["method", "λ", "accuracy", "worst seed", "− fisher", "paper"], rows)


def curves(runs: Runs) -> str:
    """Return the table of the search seed's held-out accuracy by λ, the best of each method in bold."""
    exponents = sorted({e for curve in runs.curves.values() for e in curve})
    rows = []
    for method, curve in runs.curves.items():
        searched = [e for e in curve if e in runs.config["exponents"].get(method, curve)]
        best = max(searched, key=lambda e: (curve[e]["accuracy"], -e))
        cells = {e: f"{r['accuracy']:.2f}" + "†" * (r["diverged"] is not None) for e, r in curve.items()}
        cells[best] = f"**{cells[best]}**"
        rows.append([method, *(cells.get(e, "") for e in exponents)])
    note = "" if "†" not in str(rows) else "\n\n† Numbers overflowed; later contexts were not learnt."
    return table(["λ", *(f"1e{e}" for e in exponents)], rows) + note


def contexts(runs: Runs) -> str:
    """Return the final accuracy of every context, mean over seeds."""
    rows = []
    for method, by_seed in runs.seeds.items():
        columns = zip(*(result["contexts"] for result in by_seed.values()), strict=True)
        rows.append([method, *(f"{statistics.fmean(column):.2f}" for column in columns)])
    return table(["context", *map(str, range(1, runs.config["contexts"] + 1))], rows)


def totals(runs: Runs) -> str:
    """Return the table of the importance's sum per context in the penalty, and that of a small exact Fisher at the same weights."""
    past = runs.config["contexts"] - 1
    rows = []
    for method, by_seed in runs.seeds.items():
        if method in ("none", "identity"):
            continue
        own = runs.middle(method, lambda result: result["traces"])
        beside = runs.middle(method, lambda result: result["reference_traces"])
        agreement = runs.middle(method, lambda result: result["spearman"])
        warned = sum(bool(result["warned"]) for result in by_seed.values())
        cells = [f"{a:.1e} ({b:.0e})" for a, b in zip(own, beside, strict=True)] + [""] * (past - len(own))
        rows.append([method, *cells, f"{warned} of {len(by_seed)}", f"{min(agreement):.2f} to {max(agreement):.2f}"])
    return table(["after context", *map(str, range(1, past + 1)), "warned", "Spearman"], rows)


def times(runs: Runs) -> str:
    """Return the cost of a run's importances."""
    results = runs.seeds["fisher"].values()
    exact, free = (statistics.median(result["times"][name] for result in results) for name in ("fisher", "squisher"))
    looped = sum(any(result["left_to_loop"]) for result in results)
    note = f" In {looped} of {len(results)} runs some of the Fisher was left to the loop." if looped else ""
    return (
        f"Importances of all {runs.config['contexts'] - 1} past contexts together, median over seeds: exact Fisher {exact:.2f} s,"
        f" Squisher {free:.3f} s.{note}"
    )


def draw(runs: Runs, path: Path) -> None:
    """Draw held-out accuracy against λ, one line for each estimator."""
    figure, (axis,) = subplots(1, (6.4, 3.6))
    for (method, curve), colour in zip(runs.curves.items(), COLOURS[: len(runs.curves)], strict=True):
        exponents = sorted(curve)
        axis.plot(
            [10.0**e for e in exponents], [curve[e]["accuracy"] for e in exponents], "o-", color=colour, label=method
        )
    axis.set_xscale("log")
    axis.set_xlabel("λ")
    axis.set_ylabel("held-out accuracy, mean over contexts (%)")
    axis.legend(fontsize=8, frameon=False)
    save(figure, path)


def parts(folder: Path, images: Path) -> Parts:
    """Return every table of docs/continual-learning.md, and its figure."""
    task, reduced = (Runs(document("ewc", scale, folder)) for scale in ("split-task", "permuted-reduced"))
    draw(task, images / PICTURE)
    blocks = {part.__name__: part(task) for part in (comparison, curves, contexts, totals, times)}
    blocks["curves"] = f"![Held-out accuracy against λ for each estimator](images/{PICTURE})\n\n{blocks['curves']}"
    blocks |= {f"permuted {part.__name__}": part(reduced) for part in (curves, comparison, totals)}
    return Parts(blocks)


def _power(strength: float) -> int:
    return int(f"{strength:.0e}".partition("e")[2])


def _range(strengths: list[float]) -> str:
    low, high = min(strengths), max(strengths)
    if high == 0:
        return ""
    return f"{low:.2g}" if low == high else f"{low:.2g} to {high:.2g}"
