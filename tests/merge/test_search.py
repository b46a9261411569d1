import math

import pytest

from squisher import merge
from squisher.errors import SquisherError


def test_two_models_are_a_grid_that_includes_both_ends():
    best, tried = merge.search(lambda c: -abs(c[0] - 0.3), 2, draws=11)
    assert best.coefficients == pytest.approx((0.3, 0.7))
    assert [c.coefficients[0] for c in tried] == pytest.approx([k / 10 for k in range(11)])


def test_more_models_are_draws_that_add_up_to_one_and_start_even():
    best, tried = merge.search(lambda c: c[2], 4, draws=200, seed=3)
    assert tried[0].coefficients == (0.25,) * 4
    assert all(sum(c.coefficients) == pytest.approx(1) and min(c.coefficients) >= 0 for c in tried)
    assert best.score == max(c.score for c in tried)
    assert tried == merge.search(lambda c: c[2], 4, draws=200, seed=3)[1]
    means = [sum(c.coefficients[k] for c in tried) / 200 for k in range(4)]
    assert all(abs(mean - 0.25) < 0.06 for mean in means)  # four standard errors


def test_scores_that_are_no_numbers_are_passed_over():
    best, _ = merge.search(lambda c: math.nan if c[0] > 0.5 else c[0], 2, draws=5)
    assert best.coefficients[0] == 0.5
    with pytest.raises(SquisherError, match="No coefficients"):
        merge.search(lambda c: math.nan, 2)
    with pytest.raises(SquisherError, match="two models"):
        merge.search(lambda c: 0.0, 1)
