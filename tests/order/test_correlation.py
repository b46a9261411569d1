from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from squisher.order import Rounded, median, ratios, spearman

values = st.lists(st.sampled_from([0.0, 1e-45, 1e-38, 0.5, 1.0, 1.5, 2.0, 3e38]), min_size=1, max_size=30)


def slow_spearman(x: Tensor, y: Tensor) -> float:
    ranks = [((v[:, None] > v).sum(1) + (v[:, None] == v).sum(1) / 2).double() for v in (x, y)]
    if any(rank.unique().numel() == 1 for rank in ranks):
        return math.nan
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


@settings(max_examples=100, deadline=None)
@given(left=values, right=values)
def test_both_ways_agree_with_the_definition_where_rounding_changes_nothing(
    left: list[float], right: list[float]
) -> None:
    number = min(len(left), len(right))
    # 16 bits hold these exactly, but for the two smallest, which become 0 and something near 1e-38.
    x, y = (torch.tensor(side[:number]).bfloat16().float() for side in (left, right))
    expected = pytest.approx(slow_spearman(x, y), abs=1e-12, nan_ok=True)
    assert spearman(x, y) == expected
    rounded = Rounded()
    rounded.count([(x[:7], y[:7]), (x[7:], y[7:])])
    rounded.cross([(x[:7], y[:7]), (x[7:], y[7:])])
    assert rounded.spearman() == expected
    assert rounded.median_ratio() == pytest.approx(median(ratios(x, y)), rel=2.0**-7, nan_ok=True)
    assert rounded.totals == pytest.approx((float(x.double().sum()), float(y.double().sum())))


def test_packing_changes_nothing() -> None:
    x, y = torch.rand(2, 100, generator=torch.Generator().manual_seed(0))
    plain, packed = Rounded(), Rounded()
    for rounded in (plain, packed):
        rounded.count([(x, y)])
    packed = packed.packed()
    for rounded in (plain, packed):
        rounded.cross([(x, y)])
    assert packed.spearman() == plain.spearman()
    assert packed.median_ratio() == plain.median_ratio()


def test_ranks_of_many_values_keep_their_digits() -> None:
    number = 40_000_000  # more than a float32 can count
    rounded = Rounded()
    rounded._counts[0, 1000], rounded._counts[0, 2000] = number, 1
    rounded._counts[1] = rounded._counts[0]
    bins = torch.tensor([1000, 2000], dtype=torch.int32) << 16
    rounded.cross([(bins[1:].view(torch.float32), bins[1:].view(torch.float32))])
    assert rounded._cross == pytest.approx((0.5 * number / (number + 1)) ** 2, rel=1e-12)


@pytest.mark.parametrize(("numbers", "expected"), [([4.0], 4), ([1.0, 4.0], 2), ([9.0, 1.0, 2.0], 2), ([], math.nan)])
def test_median(numbers: list[float], expected: float) -> None:
    assert median(torch.tensor(numbers)) == pytest.approx(expected, nan_ok=True)


def test_ratios_leave_out_what_is_zero_or_denormal_in_either() -> None:
    x, y = torch.tensor([0.0, 1.0, 1e-39, 6.0, 1e-30]), torch.tensor([1.0, 0.0, 1.0, 3.0, 1e30])
    assert ratios(x, y).tolist() == [2.0, torch.finfo(torch.float32).tiny]
