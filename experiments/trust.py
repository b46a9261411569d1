"""The numbers of docs/when-to-trust-it.md, from the committed results of `experiments.quality`.

Ratios are geometric means over seeds, so that the steps of the chain multiply to the whole; the rest are plain means.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.comparison import document
from experiments.page_parts import Parts, table

RATIOS = ("scale", "median_ratio")
NETWORKS = {"mlp": "perceptron", "conv": "conv net"}
CAUSES = {
    "live → frozen": "staleness",
    "frozen → clean": "train mode, clipping, decay",
    "clean → empirical": "sum-then-square",
    "empirical → exact": "labels",
}


class Results:
    """The results by network, variant and seed, and means over seeds of anything in them."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self.by: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for key in sorted(document["units"]):
            _, network, variant = key.split("/", 2)
            self.by.setdefault((network, variant), []).append(document["units"][key]["result"])

    def variants(self, network: str) -> list[str]:
        """Return the values in the order of the configuration."""
        return list(self.document["config"]["variants"].get(network, {}))

    def values(self, network: str, variant: str, *path: Any) -> list[float]:
        """Return one value for each seed."""
        out = []
        for result in self.by[network, variant]:
            value: Any = result
            for step in path:
                value = value[step]
            out.append(float(value))
        return out

    def has(self, network: str, variant: str, *path: Any) -> bool:
        """Return whether that was measured."""
        try:
            self.values(network, variant, *path)
        except (KeyError, IndexError):
            return False
        return True

    def mean(self, network: str, variant: str, *path: Any) -> float:
        """Return the mean over seeds, for ratios the geometric mean."""
        values = self.values(network, variant, *path)
        return statistics.geometric_mean(values) if path[-1] in RATIOS else statistics.fmean(values)


def number(value: float) -> str:
    """Format two significant digits, without exponents."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def spread(values: Sequence[float], show: Callable[[float], str] = number) -> str:
    """Return the range over seeds as text; one value if the ends look the same."""
    low, high = show(min(values)), show(max(values))
    return low if low == high else f"{low}–{high}"


def variants(results: Results) -> str:
    """Return how far B·v̂ agrees, by variant, at the end of training."""
    parts = []
    for network, title in NETWORKS.items():
        rows = []
        for variant in results.variants(network):
            here = (network, variant)
            exact, empirical = ("against_exact", "live"), ("against_empirical", "live")
            rows.append(
                [
                    variant,
                    f"{results.mean(*here, 'snapshots', -1, 'train_accuracy'):.1f}",
                    f"{results.mean(*here, *exact, 'spearman'):.3f} ({spread(results.values(*here, *exact, 'spearman'))})",
                    f"{results.mean(*here, *empirical, 'spearman'):.3f}",
                    f"{number(results.mean(*here, *exact, 'scale'))} ({spread(results.values(*here, *exact, 'scale'))})",
                    number(results.mean(*here, *empirical, "scale")),
                    number(results.mean(*here, *exact, "median_ratio")),
                    f"{results.mean(*here, *exact, 'top_1'):.0%}",
                    f"{results.mean(*here, *exact, 'top_10'):.0%}",
                ]
            )
        if rows:
            head = [
                title, "train accuracy", "Spearman, exact", "Spearman, empirical", "trace ratio, exact",
                "trace ratio, empirical", "median ratio, exact", "top 1%", "top 10%",
            ]  # fmt: skip
            parts.append(table(head, rows))
    return "\n\n".join(parts)


def references(results: Results) -> str:
    """Return the table of other quantities that agree with the exact Fisher, in the base recipe."""
    names = {
        "other": "exact Fisher of as many other examples",
        "empirical": "empirical Fisher of the same examples",
        "clean": "B·v̂ collected at frozen weights",
        "live": "B·v̂ as the optimizer holds it",
        "initial": "exact Fisher of the untrained network",
    }
    rows = []
    for name, title in names.items():
        cells = []
        for network in NETWORKS:
            here = (network, "base", "against_exact", name)
            cells += [
                f"{results.mean(*here, 'spearman'):.3f}",
                f"{results.mean(*here, 'per_tensor'):.3f}",
                f"{results.mean(*here, 'top_10'):.0%}",
            ]
        rows.append([title, *cells])
    head = ["against the exact Fisher"]
    for title in NETWORKS.values():
        head += [f"{title}: Spearman", "inside a tensor (median)", "top 10%"]
    return table(head, rows)


def along(results: Results) -> str:
    """Return the table of the agreement step by step."""
    rows = []
    for network in NETWORKS:
        for variant in results.variants(network):
            for place, snapshot in enumerate(results.by[network, variant][0]["snapshots"][:-1] or []):
                rows.append(_moment(results, network, variant, place, snapshot["step"]))
            if len(results.by[network, variant][0]["snapshots"]) > 1:
                rows.append(
                    _moment(results, network, variant, -1, results.by[network, variant][0]["snapshots"][-1]["step"])
                )
    head = [
        "run", "step", "train accuracy", "Spearman, exact", "trace ratio, exact", "trace ratio, empirical",
        "predicted by the mean gradient alone",
    ]  # fmt: skip
    return table(head, rows)


def _moment(results: Results, network: str, variant: str, place: int, step: int) -> list[str]:
    here = (network, variant, "snapshots", place)
    return [
        f"{NETWORKS[network]}: {variant}", f"{step:,}", f"{results.mean(*here, 'train_accuracy'):.1f}",
        f"{results.mean(*here, 'squisher', 'exact', 'spearman'):.3f}",
        number(results.mean(*here, "squisher", "exact", "scale")),
        number(results.mean(*here, "squisher", "empirical", "scale")),
        f"{results.mean(*here, 'predicted_scale'):.2f}",
    ]  # fmt: skip


def causes(results: Results) -> str:
    """Return the table of the steps of the chain: factors and rank correlations."""
    rows = []
    for network in NETWORKS:
        for variant in results.variants(network):
            cells = [
                f"×{number(results.mean(network, variant, 'links', link, 'scale'))}"
                f" ({results.mean(network, variant, 'links', link, 'spearman'):.2f})"
                for link in CAUSES
            ]
            whole = results.mean(network, variant, "against_exact", "live", "scale")
            rank = results.mean(network, variant, "against_exact", "live", "spearman")
            rows.append([f"{NETWORKS[network]}: {variant}", *cells, f"×{number(whole)} ({rank:.2f})"])
    return table(["run", *CAUSES.values(), "B·v̂ against the exact Fisher"], rows)


def remedies(results: Results) -> str:
    """Return the table of the tracker's agreement where the optimizer's average is polluted."""
    rows = []
    for network in NETWORKS:
        for variant in results.variants(network):
            if not results.has(network, variant, "against_exact", "tracker", "spearman"):
                continue
            cells = [f"{NETWORKS[network]}: {variant}"]
            for name in ("live", "tracker"):
                here = (network, variant, "against_exact", name)
                cells += [f"{results.mean(*here, 'spearman'):.3f}", number(results.mean(*here, "scale"))]
            rows.append(cells)
    return table(["run", "optimizer: Spearman", "trace ratio", "tracker: Spearman", "trace ratio"], rows)


def setup(results: Results) -> str:
    """Return the table of what was run."""
    config, seeds = results.document["config"], results.document["seeds"]
    recipe = config["recipe"]
    widths = "-".join(str(w) for w in config["networks"]["mlp"]["widths"])
    n = {name: f"{one['fisher_examples']:,}" for name, one in config["networks"].items()}
    return (
        f"MNIST, {seeds} seeds; a {widths} perceptron (Fishers of {n['mlp']} training examples) and a small conv net"
        f" ({n['conv']}). Base recipe: AdamW, learning rate {recipe['lr']:g} and constant, β₂ = {recipe['beta2']}, batch"
        f" {recipe['batch']}, {recipe['steps']:,} steps, no dropout, no clipping. Every other row changes one thing. Frozen: "
        f"{config['frozen_steps']:,} more steps at learning rate 0 with a fresh optimizer."
    )


def words(results: Results) -> dict[str, str]:
    """Return the numbers for sentences."""
    runs = [(n, v) for n in NETWORKS for v in results.variants(n)]
    plain = [(n, v) for n, v in runs if not v.startswith(("clip", "L2"))]
    rank = [x for run in plain for x in results.values(*run, "against_exact", "live", "spearman")]
    scale = [x for run in plain for x in results.values(*run, "against_exact", "live", "scale")]
    out = {"spearman range": spread(rank), "scale range": spread(scale)}
    for n, v in runs:
        for source in ("exact", "empirical"):
            for measure in ("spearman", "scale", "median_ratio"):
                out[f"{n}/{v}/{source}/{measure}"] = number(results.mean(n, v, f"against_{source}", "live", measure))
        out[f"{n}/{v}/top 1"] = f"{results.mean(n, v, 'against_exact', 'live', 'top_1'):.0%}"
        out[f"{n}/{v}/top 10"] = f"{results.mean(n, v, 'against_exact', 'live', 'top_10'):.0%}"
        out[f"{n}/{v}/accuracy"] = f"{results.mean(n, v, 'snapshots', -1, 'train_accuracy'):.1f}%"
        out[f"{n}/{v}/predicted"] = f"{results.mean(n, v, 'snapshots', -1, 'predicted_scale'):.2f}"
        out[f"{n}/{v}/initial"] = number(results.mean(n, v, "against_exact", "initial", "spearman"))
        for link, cause in CAUSES.items():
            out[f"{n}/{v}/{cause}"] = f"×{number(results.mean(n, v, 'links', link, 'scale'))}"
            out[f"{n}/{v}/{cause}/spearman"] = f"{results.mean(n, v, 'links', link, 'spearman'):.2f}"
        if results.has(n, v, "against_exact", "tracker", "scale"):
            for measure in ("spearman", "scale"):
                out[f"{n}/{v}/tracker/{measure}"] = number(results.mean(n, v, "against_exact", "tracker", measure))
    return out


BLOCKS: dict[str, Callable[[Results], str]] = {
    "setup": setup, "references": references, "variants": variants, "along": along, "causes": causes,
    "remedies": remedies,
}  # fmt: skip


def parts(folder: Path, images: Path) -> Parts:
    """Return every table and number of docs/when-to-trust-it.md."""
    results = Results(document("quality", "cpu", folder))
    return Parts({name: make(results) for name, make in BLOCKS.items()}, words(results))
