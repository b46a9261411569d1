"""Turns the documents of finished runs into docs/results.md, results-page.html and a figure: every number there comes from here.

python -m experiments.page [--scale cpu] [--documents experiments/results] [--page docs/results.md]
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.claims import CLAIMS, judge
from experiments.html import results_page
from experiments.spread import Difference, Mean, mean, paired
from squisher.report import write as write_html

HERE = Path(__file__).parent
SETTINGS = ("merging", "ubgm", "pruning", "fish", "embedding", "ewc", "ewc_permuted")
BEGIN, END = "<!-- made by experiments.page -->", "<!-- end of what experiments.page made -->"


@dataclass(frozen=True)
class Comparison:
    """The scores of one setting, and what its module says of them."""

    name: str
    title: str
    baseline: str
    metric: str
    higher_is_better: bool
    main_cases: tuple[str, ...]
    paper: Mapping[str, Mapping[str, float]]
    document: Mapping[str, Any]
    exact: Mapping[str, Any] | None = None
    """The same setting by the paper's own protocol, where that was run."""

    @property
    def values(self) -> dict[str, dict[str, dict[int, float]]]:
        """Case -> method -> seed -> value; of the main metric."""
        out: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
        for score in self.document["scores"]:
            if score["metric"] == self.metric:
                out[score["case"]][score["method"]][score["seed"]] = score["value"]
        return {case: dict(methods) for case, methods in out.items()}

    def main(self, method: str) -> dict[int, float]:
        """A method's value by seed, averaged over the main cases."""
        values = self.values
        cases = [values[case][method] for case in self.main_cases]
        common = set.intersection(*(set(case) for case in cases))
        return {seed: sum(case[seed] for case in cases) / len(cases) for seed in sorted(common)}

    def difference(self, first: str, second: str, case: str | None = None) -> Difference:
        """First − second, signed so that more is better, on one case or on the average of the main ones."""
        a, b = ((self.main(m) if case is None else self.values[case][m]) for m in (first, second))
        return paired(a, b) if self.higher_is_better else paired(b, a)


def comparisons(folder: Path, scale: str) -> list[Comparison]:
    """What is there of the settings, in the paper's order."""
    found = []
    for name in SETTINGS:
        path = folder / f"{name}-{scale}.json"
        if path.exists():
            module = importlib.import_module(f"experiments.{name}")
            document = json.loads(path.read_text())
            # The quick scale has cases of other names: its first one stands for them.
            cases = list(dict.fromkeys(score["case"] for score in document["scores"]))
            main = [case for case in module.MAIN_CASES if case in cases] or cases[:1]
            found.append(
                Comparison(
                    name, module.TITLE, module.BASELINE, module.METRIC, module.HIGHER_IS_BETTER,
                    tuple(main), module.PAPER, document, _exact(folder / f"{name}-paper.json", scale),
                )
            )  # fmt: skip
    return found


def _exact(path: Path, scale: str) -> Any:
    return json.loads(path.read_text()) if scale == "cpu" and path.exists() else None


def overview(found: Iterable[Comparison]) -> list[tuple[str, str, Mean, Mean, Mean, Difference, Difference]]:
    """Title, metric, Fisher, Squisher, baseline, Squisher − Fisher, Squisher − baseline."""
    return [
        (
            c.title, f"{c.metric} ({'higher' if c.higher_is_better else 'lower'} is better)",
            *(mean(list(c.main(m).values())) for m in ("fisher", "squisher", c.baseline)),
            c.difference("squisher", "fisher"), c.difference("squisher", c.baseline),
        )
        for c in found
    ]  # fmt: skip


def draw(found: list[Comparison], path: Path) -> None:
    """One panel a setting: Fisher, Squisher and baseline, with the standard deviation over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(found), figsize=(2.0 * len(found) + 0.6, 3.0), squeeze=False)
    for axis, c in zip(axes[0], found, strict=True):
        methods = {"Fisher": "fisher", "Squisher": "squisher", c.baseline: c.baseline}
        for place, method in enumerate(methods.values()):
            m = mean(list(c.main(method).values()))
            colour = ("#0072B2", "#D55E00", "#999999")[place]  # told apart by colour-blind people too
            axis.errorbar(place, m.value, yerr=m.deviation, fmt="o", color=colour, capsize=4, markersize=7)
            axis.annotate(f"{m.value:.3g}", (place, m.value), xytext=(7, -3), textcoords="offset points", fontsize=8)
            axis.scatter([place] * m.count, list(c.main(method).values()), s=6, color=colour, alpha=0.35, linewidths=0)
        axis.set_xticks(range(3), list(methods), rotation=30, ha="right", fontsize=8)
        axis.set_xlim(-0.5, 2.8)
        axis.margins(y=0.2)
        axis.tick_params(axis="y", labelsize=8)
        axis.set_title(c.title, fontsize=9)
        axis.set_ylabel(c.metric + ("" if c.higher_is_better else " (lower is better)"), fontsize=8)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None} if path.suffix == ".png" else {"Date": None})
    pyplot.close(figure)


def text(found: list[Comparison], picture: str) -> str:
    """The generated part of the page."""
    parts = [
        f"![Fisher, Squisher and baseline in every setting: mean, standard deviation and single seeds]({picture})",
        "## In one table",
        *_rows(
            ["setting", "measure", "Fisher", "Squisher", "baseline", "Squisher − Fisher", "Squisher − baseline"],
            [[str(cell) for cell in row] for row in overview(found)],
        ),
        "Means ± standard deviations over seeds. Differences are paired by seed, with a 95 % bootstrap interval over seeds, and are signed so that more is better.",
        "## The paper's claims, one by one",
        *_rows(
            ["claim", "where", "here", "numbers"],
            [[c.text, c.where, verdict, numbers] for c in CLAIMS for verdict, numbers in [judge(c, found)] if verdict],
        ),
    ]
    for c in found:
        parts += _section(c)
    return "\n\n".join(parts)


def _section(c: Comparison) -> list[str]:
    values = c.values
    methods = list(dict.fromkeys(method for case in values.values() for method in case))
    rows = []
    for case, by_method in values.items():
        rows.append([case, *(str(mean(list(by_method[m].values()))) if m in by_method else "" for m in methods)])
    paper = [
        [case, *(f"{by_method[m]:g}" if m in by_method else "" for m in ("fisher", "squisher", c.baseline))]
        for case, by_method in c.paper.items()
    ]
    doc = (importlib.import_module(f"experiments.{c.name}").__doc__ or "").strip()
    parts = [
        f"## {c.title}",
        doc,
        f"{c.document['seeds']} seeds, {c.document['seconds'] / 60:.0f} minutes on one thread each, on a shared machine. {c.metric[:1].upper() + c.metric[1:]}, mean ± standard deviation:",
        *_rows(["case", *methods], rows),
    ]
    if c.exact is not None:
        parts += _by_the_papers_protocol(c, c.exact)
    if paper:
        parts += ["The paper's numbers (other models, other data, other budgets):"]
        parts += _rows(["paper", "Fisher", "Squisher", c.baseline], paper)
    return parts


def _by_the_papers_protocol(c: Comparison, exact: Mapping[str, Any]) -> list[str]:
    """The main cases of a few runs that reduce nothing, beside the same seeds of the reduced ones."""
    full, reduced = replace(c, document=exact).values, c.values
    rows = []
    for case in c.main_cases:
        seeds = sorted(set.intersection(*(set(by_seed) for by_seed in full[case].values())))
        for name, values in (("the paper's protocol", full[case]), ("reduced", reduced[case])):
            for seed in seeds:
                rows.append([case, name, str(seed), *(f"{values[m][seed]:.2f}" for m in full[case])])
    methods = list(dict.fromkeys(m for case in c.main_cases for m in full[case]))
    return [
        f"A check of the reduction: the paper's own protocol, {exact['seconds'] / 60:.0f} minutes in all on one thread, beside the same seeds of the reduced one.",
        *_rows(["case", "protocol", "seed", *methods], rows),
    ]


def _run_times(folder: Path, scale: str) -> list[str]:
    """The time that an importance costs in each setting, and what the paper reports."""
    path = folder / f"runtime-{scale}.json"
    if not path.exists():
        return []
    module = importlib.import_module("experiments.runtime")
    document = json.loads(path.read_text())
    by_case: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for score in document["scores"]:
        if score["metric"] == module.METRIC:
            by_case[score["case"]][score["method"]].append(score["value"])
    methods = list(dict.fromkeys(method for case in by_case.values() for method in case))
    training = {
        key.split("/", 1)[1]: unit["result"]["training_seconds"] for key, unit in document["units"].items()
    }  # of the last seed, if there are several
    rows = [
        [
            case,
            *(_seconds(mean(found[m]).value) if m in found else "" for m in methods),
            _seconds(training[case]),
            f"{mean(found['fisher']).value / training[case]:.0%}",
        ]
        for case, found in by_case.items()
    ]
    paper = [
        [case, *(f"{known[m]:g}" if m in known else "" for m in ("fisher (loop)", "joint", "squisher"))]
        for case, known in module.PAPER.items()
    ]
    return [
        f"## {module.TITLE}",
        (module.__doc__ or "").strip(),
        "Seconds for all importances of a setting, one thread:",
        *_rows(["setting", *methods, "the training itself", "fisher, of the training"], rows),
        "The paper's seconds (GPUs, larger networks):",
        *_rows(["paper", "Fisher, one example at a time", "Fisher of batches", "Squisher"], paper),
    ]


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def _rows(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)]


def write(page: Path, generated: str) -> None:
    """Puts the generated part between its two marks; what stands around it is left alone."""
    head, _, rest = page.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    page.write_text(f"{head}{BEGIN}\n\n{generated}\n\n{END}{tail}")


def main() -> None:
    """Writes the page and the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", default="cpu")
    parser.add_argument("--documents", type=Path, default=HERE / "results")
    parser.add_argument("--page", type=Path, default=HERE.parent / "docs" / "results.md")
    options = parser.parse_args()
    found = comparisons(options.documents, options.scale)
    if not found:
        raise SystemExit(
            f"There is no document of scale {options.scale} in {options.documents}; run `python -m experiments all` first."
        )
    picture = options.page.parent / "images" / f"results-{options.scale}.png"
    draw(found, picture)
    parts = [text(found, f"images/{picture.name}"), *_run_times(options.documents, options.scale)]
    write(options.page, "\n\n".join(parts))
    write_html(options.page.with_name(f"{options.page.stem}-page.html"), results_page(found, options.scale))
    print(f"{options.page}: {', '.join(c.name for c in found)}")


if __name__ == "__main__":
    main()
