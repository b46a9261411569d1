"""The numbers of docs/at-scale.md are those of the committed results."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.at_scale import measurements, tables, times

ROOT = Path(__file__).parents[1]


def test_the_page_has_the_numbers_of_the_results():
    results = json.loads((ROOT / "benchmarks" / "results" / "at_scale.json").read_text())
    constants = results["constants"]
    page = (ROOT / "docs" / "at-scale.md").read_text()
    for part in (measurements(constants), times(results["times"]), *tables(constants)):
        assert part in page
    assert f"was {constants['whole blocks, sharded']:.1f} times" in page


def test_the_arithmetic():
    constants = dict.fromkeys(("accumulator", "all-reduce, once"), 4.0)
    constants |= {"peak, per example": 8.0, "peak, per batch": 5.0, "whole blocks, sharded": 3.0}
    constants |= {"all-gather, each batch": 4.0, "reduce-scatter, each batch": 4.0}
    constants |= {"peak, sharded in two": 8.0, "later, sharded in two": 3.0}
    shared_data, shared_model = tables(constants)
    assert "| 7B | 14 GB | 28 GB | 70 GB | 49 GB | 49 GB |" in shared_data
    assert "| 70B | 8 | 52.5 GB | 87.5 GB | 5.2 GB | 145.2 GB | 490.0 GB | 7.8 TB |" in shared_model
