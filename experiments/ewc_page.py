"""Writes the tables and the figure of EWC on split and permuted MNIST into docs/continual-learning.md, from committed results.

python -m experiments.ewc_page
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments import ewc, ewc_permuted
from experiments.spread import mean, paired

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "continual-learning.md"
PICTURE = Path("images") / "ewc-strength.png"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#56B4E9", "#CC79A7", "#E69F00")  # told apart by colour-blind people too


class Runs:
    """A document's units, by what they are."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.config = document["config"]
        self.case = self.config["case"]
        self.curves: dict[str, dict[int, dict[str, Any]]] = {}
        self.seeds: dict[str, dict[int, dict[str, Any]]] = {}
        for key, unit in document["units"].items():
            place, _, rest = key.partition("/")
            if place == "search":
                method, _, strength = rest.rpartition("/")
                self.curves.setdefault(method, {})[int(strength.removeprefix("1e"))] = unit["result"]
            else:
                self.seeds.setdefault(rest, {})[int(place.removeprefix("seed-"))] = unit["result"]
        self.seeds = {method: self.seeds[method] for method in self.config["methods"]}

    def accuracies(self, method: str) -> dict[int, float]:
        """Final mean accuracy over contexts by seed."""
        return {seed: result["accuracy"] for seed, result in sorted(self.seeds[method].items())}

    def middle(self, method: str, value: Callable[[dict[str, Any]], list[float]]) -> list[float]:
        """The median over seeds of something that every context has."""
        return [statistics.median(column) for column in zip(*map(value, self.seeds[method].values()), strict=False)]


def comparison(runs: Runs) -> str:
    """Every method with its λ on the test set, beside the paper."""
    paper = (ewc.PAPER | ewc_permuted.PAPER).get(runs.case, {})
    rows = []
    for method in runs.seeds:
        found = runs.accuracies(method)
        strengths = [result["strength"] for result in runs.seeds[method].values()]
        gap = "" if method == "fisher" else str(paired(found, runs.accuracies("fisher")))
        edge = method in runs.curves and _power(strengths[0]) in (min(runs.curves[method]), max(runs.curves[method]))
        rows.append(
            [
                method, _range(strengths) + " (end of the range)" * edge, str(mean(list(found.values()))),
                f"{min(found.values()):.2f}", gap, f"{paper[method]:.2f}" if method in paper else "",
            ]
        )  # fmt: skip
    return _table(["method", "λ", "accuracy", "worst seed", "− fisher", "paper"], rows)


def curves(runs: Runs) -> str:
    """Held-out accuracy of the search seed by λ; the best of each method in bold."""
    exponents = sorted({e for curve in runs.curves.values() for e in curve})
    rows = []
    for method, curve in runs.curves.items():
        best = max(curve, key=lambda e: (curve[e]["accuracy"], -e))
        cells = {e: f"{r['accuracy']:.2f}" + "†" * (r["diverged"] is not None) for e, r in curve.items()}
        cells[best] = f"**{cells[best]}**"
        rows.append([method, *(cells.get(e, "") for e in exponents)])
    note = "" if "†" not in str(rows) else "\n\n† Numbers overflowed; later contexts were not learnt."
    return _table(["λ", *(f"1e{e}" for e in exponents)], rows) + note


def contexts(runs: Runs) -> str:
    """Final accuracy of every context, mean over seeds."""
    rows = []
    for method, by_seed in runs.seeds.items():
        columns = zip(*(result["contexts"] for result in by_seed.values()), strict=True)
        rows.append([method, *(f"{statistics.fmean(column):.2f}" for column in columns)])
    return _table(["context", *map(str, range(1, runs.config["contexts"] + 1))], rows)


def totals(runs: Runs) -> str:
    """Σ of the importance per context as the penalty takes it, and of a small exact Fisher at the same weights."""
    past = runs.config["contexts"] - 1
    rows = []
    for method, by_seed in runs.seeds.items():
        if method != "none":
            own = runs.middle(method, lambda result: result["traces"])
            beside = runs.middle(method, lambda result: result["reference_traces"])
            agreement = runs.middle(method, lambda result: result["spearman"])
            warned = sum(bool(result["warned"]) for result in by_seed.values())
            cells = [f"{a:.1e} ({b:.0e})" for a, b in zip(own, beside, strict=True)] + [""] * (past - len(own))
            rows.append(
                [method, *cells, f"{warned} of {len(by_seed)}", f"{min(agreement):.2f} to {max(agreement):.2f}"]
            )
    return _table(["after context", *map(str, range(1, past + 1)), "warned", "Spearman"], rows)


def times(runs: Runs) -> str:
    """What the importances of a run cost."""
    results = runs.seeds["fisher"].values()
    exact, free = (statistics.median(result["times"][name] for result in results) for name in ("fisher", "squisher"))
    looped = sum(any(result["left_to_loop"]) for result in results)
    note = f" In {looped} of {len(results)} runs some of the Fisher was left to the loop." if looped else ""
    return (
        f"Importances of all {runs.config['contexts'] - 1} past contexts together, median over seeds: exact Fisher {exact:.2f} s,"
        f" Squisher {free:.3f} s.{note}"
    )


def draw(runs: Runs, path: Path) -> None:
    """Held-out accuracy against λ, one line an estimator."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6.4, 3.6))
    for (method, curve), colour in zip(runs.curves.items(), COLOURS, strict=False):
        exponents = sorted(curve)
        axis.plot(
            [10.0**e for e in exponents], [curve[e]["accuracy"] for e in exponents], "o-", color=colour, label=method
        )
    axis.set_xscale("log")
    axis.set_xlabel("λ")
    axis.set_ylabel("held-out accuracy, mean over contexts (%)")
    axis.legend(fontsize=8, frameon=False)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None})
    pyplot.close(figure)


def write(document: dict[str, Any], page: Path) -> None:
    """Puts every part of one benchmark between its marks in the page, and the figure beside it."""
    runs = Runs(document)
    if runs.case == "permuted MNIST":
        parts = {f"permuted {part.__name__}": part(runs) for part in (curves, comparison, totals)}
    else:
        draw(runs, page.parent / PICTURE)
        picture = f"![Held-out accuracy against λ for each estimator]({PICTURE.as_posix()})\n\n"
        parts = {part.__name__: part(runs) for part in (comparison, curves, contexts, totals, times)}
        parts["curves"] = picture + parts["curves"]
    text = page.read_text()
    for name, part in parts.items():
        begin, end = f"<!-- {name}: made by experiments.ewc_page -->", f"<!-- end of {name} -->"
        head, _, rest = text.partition(begin)
        _, found, tail = rest.partition(end)
        if not found:
            raise SystemExit(f"{page.name} has no marks for {name}.")
        text = f"{head}{begin}\n{part}\n{end}{tail}"
    page.write_text(text)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _power(strength: float) -> int:
    return int(f"{strength:.0e}".partition("e")[2])


def _range(strengths: list[float]) -> str:
    low, high = min(strengths), max(strengths)
    if high == 0:
        return ""
    return f"{low:.2g}" if low == high else f"{low:.2g} to {high:.2g}"


if __name__ == "__main__":
    for setting in ("ewc", "ewc_permuted"):
        write(json.loads((RESULTS / f"{setting}-cpu.json").read_text()), PAGE)
