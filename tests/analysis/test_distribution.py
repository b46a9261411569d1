from __future__ import annotations

import json
import math

import pytest
import torch

from squisher.analysis.distribution import LOG10_EDGES, Tally


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_agrees_with_the_definitions(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = (torch.randn(5000, generator=generator).square() * torch.rand(5000, generator=generator)).to(dtype)
    values[100:300] = 0
    tally = Tally()
    for piece in values.split(700):
        tally.add(piece)
    found = tally.distribution()
    wide = values.double()
    assert found.numel == 5000
    assert found.zeros == int((wide == 0).sum()) >= 200
    assert (found.min, found.max) == (float(wide.min()), float(wide.max()))
    assert found.total == pytest.approx(float(wide.sum()), rel=1e-12)
    assert found.mean == pytest.approx(float(wide.mean()), rel=1e-12)
    for share, quantile in ((0.1, found.p10), (0.5, found.median), (0.9, found.p90)):
        expected = float(wide.sort().values[math.ceil(share * 5000) - 1])
        assert quantile == pytest.approx(expected, rel=2.0**-7)
    edges = torch.tensor(LOG10_EDGES, dtype=torch.float64)
    slow = torch.histogram(wide[wide > 0].log10(), edges).hist
    fast = torch.tensor(found.histogram, dtype=torch.float64)
    assert fast.sum() == slow.sum() == 5000 - found.zeros
    # A value may lie in the neighbouring tenth of a decade if it is within 2⁻⁷ of an edge, which few are.
    assert float((fast.cumsum(0) - slow.cumsum(0)).abs().max()) < 40


def test_zeros_denormals_and_small_float64() -> None:
    tally = Tally()
    tally.add(torch.tensor([0.0, -0.0, 1e-45, 1e-39, 1.1e-38, 1.2e-38, 1.0]))
    tally.add(torch.tensor([0.0, 1e-300, 1.0], dtype=torch.float64))
    found = tally.distribution()
    assert (found.numel, found.zeros, found.denormals) == (10, 3, 4)
    assert sum(found.histogram) == 7


def test_zeros_are_told_from_denormals_where_the_processor_flushes_them() -> None:
    tally = Tally()
    values = torch.tensor([0.0, 1e-45, 1e-39, 1.0])
    torch.set_flush_denormal(True)
    try:
        tally.add(values)
    finally:
        torch.set_flush_denormal(False)
    assert (tally.distribution().zeros, tally.distribution().denormals) == (1, 2)


def test_parts_make_the_whole() -> None:
    values = torch.rand(1000, generator=torch.Generator().manual_seed(1))
    whole, first, second = Tally(), Tally(), Tally()
    whole.add(values)
    first.add(values[:300])
    second.add(values[300:])
    first.include(second)
    one, two = first.distribution(), whole.distribution()
    assert one.total == pytest.approx(two.total, rel=1e-12)
    assert (one.min, one.max, one.median, one.histogram) == (two.min, two.max, two.median, two.histogram)


def test_nothing_at_all() -> None:
    tally = Tally()
    tally.add(torch.zeros(0))
    found = tally.distribution()
    assert found.numel == 0
    assert math.isnan(found.mean)
    assert math.isnan(found.median)
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert plain["mean"] is None
    assert plain["log10_histogram"]["counts"] == [0]


def test_json_has_the_filled_part_of_the_histogram() -> None:
    tally = Tally()
    tally.add(torch.tensor([0.0, 1.5e-3, 1.5e-3, 0.15]))
    histogram = tally.distribution().to_dict()["log10_histogram"]
    assert histogram["first_edge"] == pytest.approx(-2.9)
    assert histogram["counts"][0] == 2
    assert histogram["counts"][-1] == 1
    assert len(histogram["counts"]) == 21
