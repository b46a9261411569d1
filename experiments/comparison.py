"""The scores of a setting as a comparison: case, method and seed, and what its module says of them."""

from __future__ import annotations

import importlib
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from experiments.spread import Difference, mean, paired, row_error

__all__ = ["RESULTS", "Comparison", "comparisons", "document"]

RESULTS = Path(__file__).parent / "results"
SETTINGS = ("merging", "ubgm", "pruning", "fish", "embedding", "embedding_text", "ewc")


@dataclass(frozen=True)
class Comparison:
    """The scores of one setting, and what its module says of them.

    Attributes:
        name: The setting's, with its scale where a setting has several benchmarks: "ewc/split-task".
        title: For people.
        baseline: The method without a Fisher.
        metric: What the main cases are measured in.
        higher_is_better: Of the metric.
        main_cases: The cases that a claim is about if it names none.
        paper: Case -> method -> the paper's value.
        document: What was run.
        chance: Case, or how its name begins -> what guessing gives.
        sound_from: A method and the value it must reach before anything is concluded.
        fixed_rows: Whether all seeds are tested on the same few rows.
        right: Which of these were right, by case and method, then by seed; their choice is in the intervals then.
    """

    name: str
    title: str
    baseline: str
    metric: str
    higher_is_better: bool
    main_cases: tuple[str, ...]
    paper: Mapping[str, Mapping[str, float]]
    document: Mapping[str, Any]
    chance: Mapping[str, float] = field(default_factory=dict)
    sound_from: tuple[str, float] | None = None
    fixed_rows: bool = False
    right: Mapping[tuple[str, str], Mapping[int, list[str]]] = field(default_factory=dict)

    @cached_property
    def values(self) -> dict[str, dict[str, dict[int, float]]]:
        """Case -> method -> seed -> value; of the main metric."""
        return self.values_of(self.metric)

    def values_of(self, metric: str) -> dict[str, dict[str, dict[int, float]]]:
        """Return the values: case -> method -> seed -> value."""
        out: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
        for score in self.document["scores"]:
            if score["metric"] == metric:
                out[score["case"]][score["method"]][score["seed"]] = score["value"]
        return {case: dict(methods) for case, methods in out.items()}

    def main(self, method: str) -> dict[int, float]:
        """Return a method's value by seed, averaged over the main cases."""
        cases = [self.values[case].get(method, {}) for case in self.main_cases]
        common = set.intersection(*(set(case) for case in cases))
        return {seed: sum(case[seed] for case in cases) / len(cases) for seed in sorted(common)}

    def difference(self, first: str, second: str, case: str | None = None) -> Difference:
        """Return first − second, signed so that more is better, on one case or on the average of the main ones."""
        a, b = ((self.main(m) if case is None else self.values[case][m]) for m in (first, second))
        return paired(a, b, self._row_error(first, second, case)) if self.higher_is_better else paired(b, a)

    def _row_error(self, first: str, second: str, case: str | None) -> float:
        """Return the error of a difference from the choice of test rows; 0 if it is not known."""
        cases = self.main_cases if case is None else (case,)
        if not self.rows_known(first, second, case):
            return 0.0
        errors = [row_error(self.right[one, first], self.right[one, second]) for one in cases]
        return sum(errors) / len(errors)  # cases may share their rows: nothing averages out

    def rows_known(self, first: str, second: str, case: str | None = None) -> bool:
        """Return whether it is known which test rows two methods classified correctly."""
        cases = self.main_cases if case is None else (case,)
        return all((one, method) in self.right for one in cases for method in (first, second))

    def chance_of(self, case: str) -> float | None:
        """Return the score of guessing in a case, by the longest known beginning of its name."""
        names = [name for name in self.chance if case.startswith(name)]
        return self.chance[max(names, key=len)] if names else None

    @property
    def too_weak(self) -> bool:
        """Whether nothing can be concluded from this stand-in."""
        if self.sound_from is None:
            return False
        method, least = self.sound_from
        return mean(list(self.main(method).values())).value < least


def document(name: str, scale: str, folder: Path = RESULTS) -> Any:
    """Return a document of results, or None if there is none."""
    path = folder / f"{name}-{scale}.json"
    return json.loads(path.read_text()) if path.exists() else None


def comparisons(folder: Path, scale: str) -> list[Comparison]:
    """Return the results of the settings that were run, in the paper's order, with every benchmark of EWC."""
    found = []
    for name in SETTINGS:
        module = importlib.import_module(f"experiments.{name}")
        benchmarks = getattr(module, "BENCHMARKS", {}).get(scale, {})
        if not benchmarks:
            benchmarks = {scale: module.TITLE}
        for part, title in benchmarks.items():
            made = document(name, part, folder)
            if made is not None and made["scores"]:
                found.append(_comparison(name if part == scale else f"{name}/{part}", title, module, made))
    return found


def _comparison(name: str, title: str, module: Any, made: dict[str, Any]) -> Comparison:
    wanted = module.main_cases(made["config"]) if hasattr(module, "main_cases") else module.MAIN_CASES
    methods: dict[str, set[str]] = defaultdict(set)
    for score in made["scores"]:
        methods[score["case"]].add(score["method"])
    # The quick scale has cases of other names, and not every method was run on every case.
    cases = [c for c in wanted if {"fisher", "squisher", module.BASELINE} <= methods[c]]
    cases = cases or [c for c in wanted if methods.get(c)] or list(methods)[:1]
    return Comparison(
        name, title, module.BASELINE, module.METRIC, module.HIGHER_IS_BETTER, tuple(cases), module.PAPER, made,
        module.chance(made["config"]) if hasattr(module, "chance") else getattr(module, "CHANCE", {}), getattr(module, "SOUND_FROM", None),
        bool(getattr(module, "FIXED_ROWS", False)) and made["scale"] == "cpu", _right(module, made),
    )  # fmt: skip


def _right(module: Any, made: dict[str, Any]) -> dict[tuple[str, str], dict[int, list[str]]]:
    out: dict[tuple[str, str], dict[int, list[str]]] = defaultdict(dict)
    if hasattr(module, "right"):
        results = {key: unit["result"] for key, unit in made["units"].items()}
        for (case, method, seed), rows in module.right(results).items():
            out[case, method][seed] = rows
    return dict(out)
