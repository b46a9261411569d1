"""The page of findings and its appendix: verdicts, tables and the figure, from the committed documents."""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import ewc_tables, runtime
from experiments.claims import MARGIN, Judged, Note, Verdict, judge
from experiments.comparison import SETTINGS, Comparison, comparisons, document
from experiments.page_parts import COLOURS, Parts, save, subplots, table
from experiments.spread import mean

__all__ = ["appendix", "draw", "overview", "parts", "units"]

PICTURE = "results-cpu.png"
PLAIN = {
    ("fisher", "baseline"): "the Fisher beats the baseline",
    ("squisher", "baseline"): "the Squisher beats the baseline",
    ("squisher", "fisher"): "the Squisher is as good as the Fisher",
}


def parts(folder: Path, images: Path) -> Parts:
    """Return the parts for docs/results.md: verdicts, EWC beside the paper, stand-ins, and numbers inside sentences."""
    found = comparisons(folder, "cpu")
    draw(found, images / PICTURE)
    judged = judge(found)
    blocks = {
        "figure": f"![Fisher, Squisher and baseline in every setting: mean, standard deviation and single seeds](images/{PICTURE})",
        "main claims": _main_claims(found, judged),
        "other claims": _others([j for j in judged if not j.claim.ours and not _is_plain(j)]),
        "ewc beside": ewc_tables.beside(folder),
        "ewc ablations": ewc_tables.ablations(folder),
        "stand-ins": _stand_ins(found),
    }
    return Parts(blocks, _words(found, judged, folder))


def appendix(folder: Path, images: Path) -> Parts:
    """Return the parts for docs/results-tables.md: every table."""
    found = comparisons(folder, "cpu")
    sections = []
    for name in SETTINGS:
        of_setting = [c for c in found if c.name.partition("/")[0] == name]
        if of_setting:
            sections += _section(name, of_setting)
    return Parts(
        {
            "overview": overview(found),
            "tests": _tests(judge(found)),
            "ewc table": ewc_tables.ours(folder),
            "check": _check(folder),
            "sections": "\n\n".join(sections),
            "units": units(folder),
            "run times": "\n\n".join(_run_times(document("runtime", "cpu", folder))),
        }
    )


def overview(found: Sequence[Comparison]) -> str:
    """Return the table of Fisher, Squisher and baseline in every setting."""
    rows = []
    for c in found:
        values = {m: list(c.main(m).values()) for m in ("fisher", "squisher", c.baseline)}
        chance = [c.chance_of(case) for case in c.main_cases]
        rows.append(
            [
                c.title, f"{c.metric} ({'higher' if c.higher_is_better else 'lower'} is better)",
                *(_mean(c, v) for v in values.values()),
                *(_gap(c, "squisher", second) for second in ("fisher", c.baseline)),
                "" if None in chance or not chance else f"{mean([x for x in chance if x is not None]).value:.3g}",
            ]
        )  # fmt: skip
    head = [
        "setting",
        "measure",
        "Fisher",
        "Squisher",
        "baseline",
        "Squisher − Fisher",
        "Squisher − baseline",
        "chance",
    ]
    return table(head, rows)


def units(folder: Path) -> str:
    """Return the table of how much of every configuration was run, and the command that continues it."""
    rows = []
    for name in (*SETTINGS, "examples", "strengths"):
        module = importlib.import_module(f"experiments.{name}")
        for scale, config in module.CONFIGS.items():
            if scale in ("quick", "paper"):  # an illustration, and what needs a large GPU
                continue
            planned = sum(len(stage) for stage in module.stages(config, range(1, config["seeds"] + 1)))
            made = document(name, scale, folder)
            title = getattr(module, "BENCHMARKS", {}).get("cpu", {}).get(scale)
            title = title or (module.TITLE if scale == "cpu" else f"{module.TITLE}, {scale}")
            rows.append(
                [
                    title, "not run" if made is None else f"{len(made['units'])} of {planned}",
                    f"`python -m experiments {name} --scale {scale} --data DIR --jobs 1`",
                ]
            )  # fmt: skip
    return table(["what", "units run", "goes on with"], rows)


def draw(found: Sequence[Comparison], path: Path) -> None:
    """Draw a panel for each setting: Fisher, Squisher and baseline, with the standard deviation over seeds."""
    shown = [c for c in found if all(c.main(m) for m in ("fisher", "squisher", c.baseline))]
    rows = 1 + (len(shown) > 6)
    figure, axes = subplots(len(shown), (2.1 * -(-len(shown) // rows) + 0.6, 3.2 * rows), rows)
    for axis, c in zip(axes, shown, strict=True):
        methods = {"Fisher": "fisher", "Squisher": "squisher", c.baseline: c.baseline}
        for place, method in enumerate(methods.values()):
            values = list(c.main(method).values())
            m = mean(values)
            colour = (COLOURS[0], COLOURS[1], COLOURS[-1])[place]
            axis.errorbar(place, m.value, yerr=m.deviation, fmt="o", color=colour, capsize=4, markersize=7)
            axis.annotate(f"{m.value:.3g}", (place, m.value), xytext=(7, -3), textcoords="offset points", fontsize=8)
            axis.scatter([place] * m.count, values, s=6, color=colour, alpha=0.35, linewidths=0)
        axis.set_xticks(range(3), list(methods), rotation=30, ha="right", fontsize=8)
        axis.set_xlim(-0.5, 2.8)
        axis.margins(y=0.2)
        axis.tick_params(axis="y", labelsize=8)
        axis.set_title("\n".join(c.title.split(", ", 2)), fontsize=8)
        axis.set_ylabel(c.metric + ("" if c.higher_is_better else " (lower is better)"), fontsize=8)
    save(figure, path)


def _is_plain(j: Judged) -> bool:
    return (
        (j.claim.first, j.claim.second) in PLAIN
        and j.claim.case is None
        and (j.claim.alike or j.claim.second == "baseline")
    )


def _cell(j: Judged) -> str:
    mark = {Note.NONE: "", Note.ROWS: "†", Note.NO_GAIN: " (F)", Note.WEAK: " (W)"}[j.note]
    return f"**{j.verdict.value}**{mark}: {j.gap}"


def _main_claims(found: Sequence[Comparison], judged: Sequence[Judged]) -> str:
    """Return the three claims about every setting."""
    by_claim = {(j.claim.setting, j.claim.first, j.claim.second): j for j in judged if _is_plain(j)}
    rows = []
    for c in found:
        cells = [by_claim.get((c.name, *pair)) for pair in PLAIN]
        if any(cells):
            seeds = {j.gap.count for j in cells if j}
            rows.append([c.title, *(_cell(j) if j else "" for j in cells), "/".join(map(str, sorted(seeds)))])
    return table(["setting", *PLAIN.values(), "seeds"], rows)


def _others(judged: Sequence[Judged]) -> str:
    return table(
        ["claim", "where", "here", "seeds"], [[j.claim.text, j.where, _cell(j), str(j.gap.count)] for j in judged]
    )


def _tests(judged: Sequence[Judged]) -> str:
    rows = []
    for j in judged:
        against = -MARGIN if j.claim.alike else 0.0
        rows.append(
            [
                "ours" if j.claim.ours else "paper", j.claim.text, j.where, j.verdict.value, str(j.gap),
                f"{j.gap.p(against):.2g}", f"{j.p:.2g}", f"{j.gap.sign_flip(against):.2g}", str(j.gap.count),
            ]
        )  # fmt: skip
    return table(
        ["who", "claim", "where", "verdict", "difference", "p", "p, corrected", "p, sign flips", "seeds"], rows
    )


def _stand_ins(found: Sequence[Comparison]) -> str:
    run = {c.name.partition("/")[0] for c in found}
    modules = [importlib.import_module(f"experiments.{name}") for name in SETTINGS if name in run]
    return table(["setting", "the paper", "here"], [[m.TITLE, *m.STAND_IN] for m in modules])


def _gap(c: Comparison, first: str, second: str) -> str:
    return str(c.difference(first, second)) if c.main(first).keys() & c.main(second).keys() else ""


def _mean(c: Comparison, values: Sequence[float]) -> str:
    """Return a mean with its spread, and the number of seeds if some are missing; nothing without seeds."""
    if not values:
        return ""
    return str(mean(values)) + (f" ({len(values)} seeds)" if 1 < len(values) < c.document["seeds"] else "")


def _section(name: str, found: Sequence[Comparison]) -> list[str]:
    module = importlib.import_module(f"experiments.{name}")
    parts = [f"## {module.TITLE}", (module.__doc__ or "").strip()]
    for c in found:
        seconds = c.document["seconds"] / 60
        missing = len(c.document.get("missing", ()))
        parts += [
            f"### {c.title}" if len(found) > 1 else "",
            f"{c.document['seeds']} seeds{' planned' if missing else ''}, {seconds:.0f} minutes on one thread, on a shared machine"
            + (f"; {missing} units were not run" if missing else "")
            + f". {c.metric[:1].upper() + c.metric[1:]}, mean ± standard deviation. One unit again: `{_command(c)}`.",
            *(_scores(c, metric) for metric in getattr(module, "METRICS", {c.metric: ""})),
        ]
    cases = {case: by_method for case, by_method in module.PAPER.items()}
    methods = list(dict.fromkeys(m for by_method in cases.values() for m in by_method))
    rows = [[case, *(f"{by[m]:g}" if m in by else "" for m in methods)] for case, by in cases.items()]
    parts += [
        "The paper's numbers (other models, other data, other budgets where the text above says so):",
        table(["paper", *methods], rows),
    ]
    return [part for part in parts if part]


def _command(c: Comparison) -> str:
    """Return a command that runs one unit of a document again, into a folder of its own."""
    name, _, part = c.name.partition("/")
    key = next(key for key in c.document["units"] if not key.startswith("search"))
    pattern = re.sub(r"[().+*?|^$]", r"\\\g<0>", key)
    return f"python -m experiments {name} --scale {part or 'cpu'} --data DIR --out again --again '^{pattern}$'"


def _scores(c: Comparison, metric: str) -> str:
    values = c.values_of(metric)
    methods = list(dict.fromkeys(method for case in values.values() for method in case))
    rows = []
    for case, by_method in values.items():
        chance = c.chance_of(case)
        rows.append(
            [
                case, *(_mean(c, list(by_method.get(m, {}).values())) for m in methods),
                *([] if not c.chance else ["" if chance is None else f"{chance:.3g}"]),
            ]
        )  # fmt: skip
    return table(["case", *methods, *(["chance"] if c.chance else [])], rows)


def _check(folder: Path) -> str:
    """Return the table of one seed by the paper's training protocol and by the reduced one, on permuted MNIST."""
    full, reduced = (document("ewc", scale, folder) for scale in ("permuted-check", "permuted-reduced"))
    rows = []
    for name, found in (("training protocol of the paper, λ = 100", full), ("reduced, λ searched for", reduced)):
        units = {key: unit["result"]["accuracy"] for key, unit in found["units"].items()}
        rows.append([name, *(f"{units[f'seed-1/{method}']:.2f}" for method in ("none", "fisher", "squisher"))])
    return table(["permuted MNIST, task, seed 1", "none", "fisher", "squisher (B·v̂)"], rows)


def _run_times(found: dict[str, Any]) -> list[str]:
    """Return the table of the time that an importance takes in each setting, beside the paper's."""
    rows = []
    for key, unit in found["units"].items():
        case, result = key.split("/", 1)[1], unit["result"]
        plan = found["config"]["cases"][case]
        step = 1000 * sorted(result["measured_seconds"]["step"])[len(result["measured_seconds"]["step"]) // 2]
        rows.append(
            [
                case, f"{plan['times']} × {plan['examples']:,}",
                *(_seconds(result["setting_seconds"][way]) for way in runtime.WAYS),
                f"{result['per_example_ms']['engine'] / (step / plan['batch']):.1f}",
            ]
        )  # fmt: skip
    paper = [
        [case, *(f"{known[m]:g}" if m in known else "" for m in ("fisher (loop)", "joint", "squisher"))]
        for case, known in runtime.PAPER.items()
    ]
    return [
        (runtime.__doc__ or "").strip(),
        "Seconds for all importances of a setting, one thread. The last column is free of how long anybody trains: what one example of the fast Fisher costs, in training examples.",
        table(["setting", "Fishers × examples", *runtime.WAYS.values(), "fisher, in training examples"], rows),
        "The paper's seconds (GPUs, larger networks):",
        table(["paper", "Fisher, one example at a time", "Fisher of batches", "Squisher"], paper),
    ]


def _words(found: Sequence[Comparison], judged: Sequence[Judged], folder: Path) -> dict[str, str]:
    """Return the numbers for sentences."""
    out: dict[str, str] = {"margin": f"{MARGIN:g}"}
    for c in found:
        out[f"{c.name}/seeds"] = str(len(c.main("fisher").keys() & c.main("squisher").keys()))
        ranges = [
            max(v) - min(v)
            for by in (c.values.get(case, {}) for case in c.main_cases)
            for v in (list(x.values()) for x in by.values())
        ]
        out[f"{c.name}/range"] = f"{max(ranges):.0f}"
        for case, by_method in c.values.items():
            words = {method: f"{mean(list(by_seed.values())).value:.1f}" for method, by_seed in by_method.items()}
            for first, second in itertools.permutations(by_method, 2):
                if by_method[first].keys() & by_method[second].keys():
                    words[f"{first} − {second}"] = str(c.difference(first, second, case))
            places = [f"{c.name}/{case}", *([c.name] if (case,) == c.main_cases else [])]
            out |= {f"{place}/{word}": value for place in places for word, value in words.items()}
    for ours, who in ((False, "paper"), (True, "ours")):
        family = [j for j in judged if j.claim.ours is ours]
        out[f"{who}/claims"] = str(len(family))
        for verdict in Verdict:
            out[f"{who}/{verdict.value}"] = str(sum(j.verdict is verdict for j in family))
    out |= _bases(document("pruning", "cifar10", folder))
    return out


def _bases(found: dict[str, Any] | None) -> dict[str, str]:
    """Return the accuracy of networks before filter pruning, and how much of their retraining was run."""
    if found is None:
        return {}
    bases = [unit["result"] for key, unit in found["units"].items() if key.endswith("/base")]
    after = str(found["config"]["filters"]["epochs"])
    done = sum("ratio" in unit["result"] for unit in found["units"].values())
    planned = done + sum(key.count("/") == 3 for key in found.get("missing", ()))
    return {
        "pruning/cifar10/unpruned of the bases": f"{mean([base['unpruned'][after] for base in bases]).value:.1f}",
        "pruning/cifar10/retrained": f"{done} of {planned} units",
    }


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"
