"""The numbers of docs/at-scale.md are those of the committed results."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.at_scale import measurements, tables

ROOT = Path(__file__).parents[1]


def test_the_page_has_the_numbers_of_the_results():
    constants = json.loads((ROOT / "benchmarks" / "results" / "at_scale.json").read_text())["constants"]
    page = (ROOT / "docs" / "at-scale.md").read_text()
    for part in (measurements(constants), *tables(constants)):
        assert part in page
    assert f"was {constants['whole blocks, sharded']:.1f} times" in page


def test_the_arithmetic():
    constants = dict.fromkeys(("accumulator", "all-reduce, once"), 4.0)
    constants |= {"peak, per example": 8.0, "peak, per batch": 5.0, "whole blocks, sharded": 3.0}
    constants |= {"all-gather, each pass": 4.0, "reduce-scatter, each pass": 2.0}
    shared_data, shared_model = tables(constants)
    assert "| 7B | 14 GB | 28 GB | 70 GB | 49 GB | 49 GB |" in shared_data
    assert "| 70B | 8 | 70.0 GB | 5.2 GB | 75.2 GB | 367.5 GB |" in shared_model
