"""Comparisons, verdicts and pages from documents, against values worked out by hand; the pages are what the documents make."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from experiments import findings, pages
from experiments.claims import MARGIN, Claim, Note, Verdict, judge
from experiments.comparison import RESULTS, Comparison, comparisons
from experiments.page_parts import Parts, fill, table

BETTER = Claim("", "pretended", "squisher", "baseline")
ALIKE = Claim("", "pretended", "squisher", "fisher", alike=True)


def compared(higher=True, main=("a", "b"), **methods):
    """A pretended setting: two main cases, one point apart, and a third that only some claims are about."""
    scores = [
        {"case": case, "method": method, "seed": seed, "value": value + extra, "metric": "accuracy"}
        for method, values in methods.items()
        for seed, value in enumerate(values, 1)
        for case, extra in (("a", 0.0), ("b", 1.0), ("beside", 50.0))
    ]
    scores.append({"case": "a", "method": "fisher", "seed": 1, "value": 99.0, "metric": "time"})
    document = {"scores": scores, "seeds": 5, "seconds": 90.0, "units": {}, "scale": "cpu"}
    return Comparison("pretended", "Pretended", "none", "accuracy", higher, main, {}, document)


def verdict(claim, c):
    (found,) = judge([c], [claim])
    return found.verdict


FISHER, NONE = [80.0, 81.0, 79.5, 80.5, 80.0], [60.0, 61.5, 59.0, 60.0, 60.5]


def test_main_cases_are_averaged_and_differences_signed_so_that_more_is_better():
    c = compared(higher=False, fisher=[1, 2, 3], squisher=[2, 3, 4], none=[8, 8, 8])
    assert c.main("fisher") == {1: 1.5, 2: 2.5, 3: 3.5}
    assert c.difference("squisher", "fisher").value == -1
    assert c.difference("squisher", "none").value == 5
    assert c.difference("squisher", "none", "beside").value == 5


@pytest.mark.parametrize(
    ("shift", "better", "alike"),
    [
        ([0.1, -0.2, 0.0, 0.2, -0.1], Verdict.HOLDS, Verdict.HOLDS),
        ([-0.6, -0.5, -0.7, -0.6, -0.6], Verdict.HOLDS, Verdict.HOLDS),  # clearly behind, and within the margin
        ([-3.0, 2.0, -1.0, 3.0, -2.0], Verdict.HOLDS, Verdict.OPEN),  # noise does not help "as good as"
        ([-5.0, -6.0, -5.5, -4.5, -5.0], Verdict.HOLDS, Verdict.FAILS),
        ([-20.0, -19.0, -21.5, -20.5, -19.0], Verdict.OPEN, Verdict.FAILS),
        ([-25.0, -26.0, -24.0, -25.5, -24.5], Verdict.FAILS, Verdict.FAILS),
    ],
)
def test_verdicts(shift, better, alike):
    c = compared(fisher=FISHER, squisher=list(np.add(FISHER, shift)), none=NONE)
    assert verdict(BETTER, c) is better
    assert verdict(ALIKE, c) is alike


def test_the_correction_takes_back_what_only_looks_clear_and_the_two_families_are_apart():
    c = compared(fisher=FISHER, squisher=[61.0, 61.8, 60.1, 60.2, 61.4], none=NONE)
    alone = judge([c], [BETTER])[0]
    assert alone.verdict is Verdict.HOLDS
    others = [Claim("", "pretended", "squisher", "squisher 2") for _ in range(9)]
    again = [61.0, 61.8, 60.1, 60.2, 61.4]
    doubled = compared(**{"fisher": FISHER, "squisher": again, "squisher 2": again, "none": NONE})
    among = judge([doubled], [BETTER, *others])[0]
    assert among.verdict is Verdict.IN_PART
    assert among.p == pytest.approx(10 * alone.p)
    ours = [Claim(o.text, o.setting, o.first, o.second, ours=True) for o in others]
    assert judge([doubled], [BETTER, *ours])[0].p == alone.p
    backwards = judge([doubled], [Claim("", "pretended", "none", "squisher"), *others])[0]
    assert backwards.verdict is Verdict.AGAINST


def test_where_the_fisher_gains_nothing_nothing_can_be_said_of_what_replaces_it():
    c = compared(fisher=[60.1, 61.0, 59.4, 60.3, 60.0], squisher=[60.2, 61.2, 59.5, 60.1, 60.4], none=NONE)
    assert verdict(ALIKE, c) is Verdict.NOT_TESTABLE
    assert verdict(BETTER, c) is Verdict.NOT_TESTABLE
    assert verdict(Claim("", "pretended", "fisher", "baseline"), c) is Verdict.OPEN
    clear = compared(fisher=[60.1, 61.0, 59.4, 60.3, 60.0], squisher=list(np.add(NONE, 9)), none=NONE)
    assert verdict(BETTER, clear) is Verdict.HOLDS  # it can still be seen


def test_a_stand_in_that_is_too_weak_is_not_judged():
    c = compared(fisher=FISHER, squisher=FISHER, none=NONE, unpruned=[49.0] * 5)
    weak = replace(c, sound_from=("unpruned", 50.0))
    (found,) = judge([weak], [BETTER])
    assert (found.verdict, found.note) == (Verdict.NOT_TESTABLE, Note.WEAK)
    assert verdict(BETTER, replace(c, sound_from=("unpruned", 40.0))) is Verdict.HOLDS


def test_known_test_rows_widen_the_interval_and_take_the_mark_away():
    c = replace(compared(fisher=FISHER, squisher=FISHER, none=NONE, main=("a",)), fixed_rows=True)
    (without,) = judge([c], [BETTER])
    assert without.note is Note.ROWS
    right = {
        ("a", method): {seed: ["0110" * 5, rows] for seed in range(1, 6)}
        for method, rows in (("squisher", "1" * 20), ("none", "01" * 10))
    }
    (known,) = judge([replace(c, right=right)], [BETTER])
    assert known.note is Note.NONE
    assert known.gap.error > without.gap.error


def test_claims_about_what_was_not_run_or_run_once_are_left_out():
    c = compared(fisher=[1.0], squisher=[1.0], none=[2.0])
    assert judge([c], [BETTER, ALIKE, Claim("", "ubgm", "fisher", "baseline")]) == []


def test_the_margin_is_one_point():
    assert MARGIN == 1.0


def test_marks_are_filled_and_the_same_twice():
    parts = Parts({"one": table(["a", "b"], [["1", "x|y"]])}, {"key": "7"})
    page = "Before <!--=key-->0<!---->.\n<!-- one -->\nold\n<!-- end -->\nAfter."
    once = fill(page, parts)
    assert (
        once == "Before <!--=key-->7<!---->.\n<!-- one -->\n| a | b |\n| --- | --- |\n| 1 | x/y |\n<!-- end -->\nAfter."
    )
    assert fill(once, parts) == once
    with pytest.raises(SystemExit, match="asks for 'no such'"):
        fill("<!--=no such-->x<!---->", Parts({}, {}))
    with pytest.raises(SystemExit, match="no marks for one"):
        fill("nothing", parts)


@pytest.mark.parametrize("name", sorted(pages.PAGES))
def test_every_page_is_what_the_committed_documents_make(name, tmp_path):
    page = (pages.DOCS / name).read_text()
    assert fill(page, pages.parts(name, RESULTS, tmp_path)) == page
    assert not re.search(r"<!--=.+?--><!---->", page)


def test_scores_in_committed_documents_are_those_of_their_units():
    for c in comparisons(RESULTS, "cpu"):
        module = __import__(f"experiments.{c.name.partition('/')[0]}", fromlist=["scores"])
        made = module.scores({key: unit["result"] for key, unit in c.document["units"].items()})
        again, kept = (
            sorted((s["case"], s["method"], s["metric"], s["seed"], s["value"]) for s in scores)
            for scores in ([vars(s) for s in made], c.document["scores"])
        )
        assert [s[:-1] for s in again] == [s[:-1] for s in kept], c.name
        # Other processors add up in another order.
        assert [s[-1] for s in again] == pytest.approx([s[-1] for s in kept], rel=1e-12), c.name


def test_every_scale_that_is_written_is_listed_with_how_much_of_it_was_run(tmp_path):
    made = {"units": {"seed-1/prune": {}, "seed-2/merge": {}}}
    (tmp_path / "examples-cpu.json").write_text(json.dumps(made))
    listed = findings.units(tmp_path)
    assert (
        "| How many examples | 2 of 10 | `python -m experiments examples --scale cpu --data DIR --jobs 1` |" in listed
    )
    assert listed.count("not run") == listed.count("python -m experiments") - 1
    assert "--scale cifar-class" in listed


def test_the_figure_is_the_same_twice(tmp_path):
    for name in ("a.png", "b.png"):
        findings.draw([compared(fisher=[1, 2], squisher=[2, 3], none=[8, 9])], tmp_path / name)
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_run_times_are_not_set_against_our_short_trainings():
    result = {
        "measured_seconds": {"step": [0.2, 0.1, 0.3]},
        "per_example_ms": {"engine": 50.0},
        "setting_seconds": {"loop": 12_345.6, "engine": 30.0, "joint": 10.0, "live": 0.0123, "file": 0.02},
    }
    config = {"cases": {"UBGM": {"times": 4, "examples": 1000, "batch": 16}}}
    text = "\n".join(findings._run_times({"units": {"seed-1/UBGM": {"result": result}}, "config": config}))
    assert "| UBGM | 4 × 1,000 | 12,346 | 30 | 10 | 0.012 | 0.02 | 4.0 |" in text  # 50 ms against 200 ms / 16
    assert "| UBGM | 435.877 |  | 0.1 |" in text  # the paper's


def test_what_was_retrained_is_counted_beside_what_was_planned():
    found = {
        "config": {"filters": {"epochs": 15}},
        "units": {
            "seed-1/base": {"result": {"unpruned": {"10": 60.0, "15": 70.0}}},
            "seed-2/base": {"result": {"unpruned": {"10": 60.0, "15": 73.0}}},
            "seed-1/squisher/0.75/15": {"result": {"ratio": 0.75, "method": "squisher", "after": 71.25}},
        },
        "missing": ["seed-3/base", "seed-1/random/0.75/15", "seed-2/random/0.75/15"],
    }
    words = findings._bases(found)
    assert words["pruning/cifar10/unpruned of the bases"] == "71.5"
    assert words["pruning/cifar10/retrained"] == "1 of 3 units"
    assert findings._bases(None) == {}
