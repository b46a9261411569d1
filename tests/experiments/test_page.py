"""The results page: means, differences and verdicts from documents, against values worked out by hand."""

from __future__ import annotations

import json
import sys
import types

import pytest

from experiments import page
from experiments.claims import Claim, judge


@pytest.fixture
def documents(tmp_path, monkeypatch):
    """A folder with one pretended setting: lower is better, two main cases."""
    module = types.ModuleType("experiments.pretended")
    module.__doc__ = "What was done."
    module.TITLE, module.BASELINE, module.METRIC = "Pretended", "none", "error"
    module.HIGHER_IS_BETTER, module.MAIN_CASES = False, ("a", "b")
    module.PAPER = {"big model": {"fisher": 1.5, "squisher": 1.6, "none": 9.0}}
    monkeypatch.setitem(sys.modules, "experiments.pretended", module)
    monkeypatch.setattr(page, "SETTINGS", ("merging", "pretended"))

    def write(**methods):
        scores = [
            {"case": case, "method": method, "seed": seed, "value": value + extra, "metric": "error"}
            for method, values in methods.items()
            for seed, value in enumerate(values, 1)
            for case, extra in (("a", 0.0), ("b", 1.0), ("beside", 50.0))
        ]
        scores.append({"case": "a", "method": "fisher", "seed": 1, "value": 99.0, "metric": "time"})
        document = {"scores": scores, "seeds": 3, "seconds": 90.0}
        (tmp_path / "pretended-cpu.json").write_text(json.dumps(document))
        return page.comparisons(tmp_path, "cpu")

    return write


def test_main_cases_are_averaged_and_differences_signed_so_that_more_is_better(documents):
    (c,) = documents(fisher=[1, 2, 3], squisher=[2, 3, 4], none=[8, 8, 8])
    assert c.main("fisher") == {1: 1.5, 2: 2.5, 3: 3.5}
    assert c.difference("squisher", "fisher").value == -1
    assert c.difference("squisher", "none").value == 5
    assert c.difference("squisher", "none", "beside").value == 5
    (row,) = page.overview([c])
    assert [row[2].value, row[3].value, row[4].value] == [2.5, 3.5, 8.5]


@pytest.mark.parametrize(
    ("squisher", "better", "alike"),
    [
        ([2, 3, 1], "holds", "holds"),  # as the Fisher, far from the baseline
        ([3, 4, 5], "holds", "holds in part"),  # clearly worse than the Fisher, yet near it
        ([6, 7, 7], "holds", "does not hold"),
        ([7, 9, 7], "holds in part", "does not hold"),  # a little better than the baseline, not clearly
        ([9, 9, 9], "does not hold", "does not hold"),
    ],
)
def test_verdicts(documents, squisher, better, alike):
    found = documents(fisher=[1, 2, 3], squisher=squisher, none=[8, 8, 8])
    assert judge(Claim("", "pretended", "squisher", "baseline"), found)[0] == better
    verdict, numbers = judge(Claim("", "pretended", "squisher", "fisher", alike=True), found)
    assert verdict == alike
    assert "over 3 seeds" in numbers


def test_a_case_without_a_baseline_is_judged_by_the_interval(documents):
    (c,) = documents(fisher=[1, 2, 3], squisher=[2, 3, 1], none=[8, 8, 8])
    for score in c.document["scores"]:
        score["case"] = score["case"] + (" alone" if score["method"] == "none" else "")
    claim = Claim("", "pretended", "squisher", "fisher", alike=True, case="beside")
    assert judge(claim, [c])[0] == "holds"
    for score in c.document["scores"]:
        score["value"] += 10 * (score["method"] == "squisher")
    assert judge(claim, [c])[0] == "does not hold"


def test_claims_about_what_was_not_run_are_left_out(documents):
    found = documents(fisher=[1], squisher=[1], none=[2])
    assert judge(Claim("", "pretended", "joint", "fisher"), found) == ("", "")
    assert judge(Claim("", "ubgm", "fisher", "baseline"), found) == ("", "")


def test_the_page_is_written_between_its_marks_and_the_same_twice(documents, tmp_path):
    found = documents(fisher=[1, 2, 3], squisher=[2, 3, 4], none=[8, 8, 8])
    target = tmp_path / "results.md"
    target.write_text(f"# Results\n\nBefore.\n\n{page.BEGIN}\nold\n{page.END}\n\nAfter.\n")
    page.write(target, page.text(found, "images/x.png"))
    once = target.read_text()
    page.write(target, page.text(found, "images/x.png"))
    assert target.read_text() == once
    assert once.startswith("# Results\n\nBefore.")
    assert once.endswith("After.\n")
    assert "old" not in once
    assert "| Pretended | error (lower is better) | 2.50 ± 1.00 | 3.50 ± 1.00 | 8.50 ± 0.00 |" in once
    assert "| big model | 1.5 | 1.6 | 9 |" in once
    assert "What was done." in once


def test_a_run_by_the_papers_protocol_stands_beside_the_same_seed_of_the_reduced_one(documents, tmp_path):
    scores = [
        {"case": case, "method": method, "seed": 2, "value": value, "metric": "error"}
        for case in ("a", "b")
        for method, value in (("none", 7.0), ("fisher", 0.25))
    ]
    (tmp_path / "pretended-paper.json").write_text(json.dumps({"scores": scores, "seeds": 1, "seconds": 3600.0}))
    (c,) = documents(fisher=[1, 2, 3], squisher=[2, 3, 4], none=[8, 8, 8])
    text = "\n".join(page._section(c))
    assert "60 minutes" in text
    assert "| a | the paper's protocol | 2 | 7.00 | 0.25 |\n| a | reduced | 2 | 8.00 | 2.00 |" in text


def test_the_figure_is_drawn(documents, tmp_path):
    page.draw(documents(fisher=[1, 2], squisher=[2, 3], none=[8, 9]), tmp_path / "a.png")
    page.draw(documents(fisher=[1, 2], squisher=[2, 3], none=[8, 9]), tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_run_times_stand_beside_the_training(tmp_path):
    assert page._run_times(tmp_path, "cpu") == []
    seconds = {"fisher (loop)": 12_345.6, "fisher": 30.0, "squisher": 0.0123}
    document = {
        "scores": [
            {"case": "UBGM", "method": m, "seed": 1, "value": v, "metric": "seconds"} for m, v in seconds.items()
        ],
        "units": {"seed-1/UBGM": {"seconds": 1.0, "result": {"training_seconds": 120.0}}},
    }
    (tmp_path / "runtime-cpu.json").write_text(json.dumps(document))
    text = "\n".join(page._run_times(tmp_path, "cpu"))
    assert "| UBGM | 12,346 | 30 | 0.012 | 120 | 25% |" in text
    assert "| UBGM | 435.877 |  | 0.1 |" in text  # the paper's
