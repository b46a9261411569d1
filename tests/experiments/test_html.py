"""The results as a page: its numbers are those of the comparisons."""

from __future__ import annotations

import json
import re

import pytest

from experiments.claims import CLAIMS, judge
from experiments.html import results_page
from experiments.page import Comparison


@pytest.fixture
def found():
    values = {"fisher": [90.0, 91.0, 95.0], "squisher": [89.0, 92.0, 93.5], "none": [70.0, 60.0, 80.0]}
    scores = [
        {"case": case, "method": method, "seed": seed, "value": value + extra, "metric": "accuracy"}
        for method, by_seed in values.items()
        for seed, value in enumerate(by_seed, 1)
        for case, extra in (("one", 0.0), ("<two>", 2.0), ("beside", -50.0))
    ]
    document = {"scores": scores, "seeds": 3, "seconds": 1.0, "scale": "cpu"}
    return [Comparison("ewc", "EWC & more", "none", "accuracy", True, ("one", "<two>"), {}, document)]


def test_every_number_is_that_of_the_comparison(found):
    text = results_page(found, "cpu")
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL).group(1))
    assert data["overview"]["fisher"] == [93.0]
    assert data["overview"]["squisher"] == [92.5]
    assert data["overview"]["baseline"] == [71.0]
    gap = found[0].difference("squisher", "fisher")
    assert [data["overview"][key][0] for key in ("difference", "low", "high", "seeds")] == list(gap)
    rows = list(zip(data["claims"]["claim"], data["claims"]["verdict"], data["claims"]["numbers"], strict=True))
    assert rows == [(c.text, *judge(c, found)) for c in CLAIMS if judge(c, found)[0]]
    assert rows
    scores = data["settings"]["ewc"]
    at = list(zip(scores["case"], scores["method"], strict=True)).index(("<two>", "fisher"))
    assert scores["mean"][at] == pytest.approx(94.0)
    assert scores["deviation"][at] == pytest.approx(7**0.5)


def test_names_are_escaped_and_quick_runs_are_called_an_illustration(found):
    text = results_page(found, "cpu")
    assert "<two>" not in text
    assert "EWC &amp; more" in text
    assert "illustration" not in text
    found[0].document["scale"] = "quick"
    assert "illustration, not evidence" in results_page(found, "quick")
