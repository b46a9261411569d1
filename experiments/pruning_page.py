"""Writes the table of single weights pruned on MNIST into docs/pruning.md, from the committed results.

python -m experiments.pruning_page
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "pruning_weights-cpu.json"
PAGE = Path(__file__).parents[1] / "docs" / "pruning.md"
BEGIN, END = "<!-- made by experiments.pruning_page -->", "<!-- end -->"
METHODS = ("fisher", "squisher", "magnitude", "random")
PAIRS = (
    ("squisher", "fisher"),
    ("fisher", "magnitude"),
    ("squisher", "magnitude"),
    ("fisher", "random"),
    ("squisher", "random"),
)


def table(document: dict[str, Any]) -> str:
    """The means, and the paired differences with their standard errors, as Markdown."""
    seeds = [unit["result"] for unit in document["units"].values()]
    p = document["config"]["perceptron"]
    cases = [(c, s, w) for c in p["scopes"] for s in p["sparsities"] for w in ("before", "after")]
    lines = [
        f"MNIST ({p['train']:,} training images, all test images), {'-'.join(map(str, p['widths']))} perceptron,"
        f" {len(seeds)} seeds; {p['epochs']} epochs of AdamW, then pruned, then {p['retrain_epochs']} epochs more. Test"
        f" accuracy in percent; unpruned {statistics.fmean(entry['unpruned'] for entry in seeds):.2f}.",
        "",
        f"| scope | sparsity | when | {' | '.join(METHODS)} |",
        f"|---|---|---|{'---|' * len(METHODS)}",
    ]
    for case in cases:
        means = [statistics.fmean(_value(entry, method, *case) for entry in seeds) for method in METHODS]
        lines.append(_row(case, [f"{mean:.2f}" for mean in means]))
    lines += [
        "",
        "Paired differences over seeds, in points (mean ± standard error):",
        "",
        f"| scope | sparsity | when | {' | '.join(f'{a} − {b}' for a, b in PAIRS)} |",
        f"|---|---|---|{'---|' * len(PAIRS)}",
    ]
    for case in cases:
        cells = []
        for first, second in PAIRS:
            gaps = [_value(entry, first, *case) - _value(entry, second, *case) for entry in seeds]
            cells.append(f"{statistics.fmean(gaps):+.2f} ± {statistics.stdev(gaps) / math.sqrt(len(gaps)):.2f}")
        lines.append(_row(case, cells))
    return "\n".join(lines)


def _row(case: tuple[str, float, str], cells: list[str]) -> str:
    scope, sparsity, when = case
    return f"| {scope} | {sparsity:.0%} | {when} | {' | '.join(cells)} |"


def _value(entry: dict[str, Any], method: str, scope: str, sparsity: float, when: str) -> float:
    wanted = (method, scope, sparsity)
    return next(float(r[when]) for r in entry["rows"] if (r["method"], r["scope"], r["sparsity"]) == wanted)


def main() -> None:
    """Puts the table between its two marks; what stands around it is left alone."""
    head, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(f"{head}{BEGIN}\n{table(json.loads(RESULTS.read_text()))}\n{END}{tail}")


if __name__ == "__main__":
    main()
