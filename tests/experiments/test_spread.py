"""Means, paired differences and their tests, against definitions, and the simulation that justifies the rule."""

from __future__ import annotations

import itertools
import statistics

import numpy as np
import pytest
from scipy import stats

from experiments.spread import holm, mean, paired, row_error


def test_mean_and_deviation_are_those_of_the_seeds():
    result = mean([90.0, 92.0, 97.0])
    assert result.value == statistics.mean([90, 92, 97])
    assert result.deviation == statistics.stdev([90, 92, 97])
    assert str(mean([3.0])) == "3.00 (one seed)"


def test_pairs_are_taken_within_a_seed_and_lone_seeds_left_out():
    difference = paired({1: 10.0, 2: 30.0, 4: 99.0}, {1: 8.0, 2: 27.0, 3: 0.0})
    assert difference.value == 2.5
    assert difference.count == 2


def test_interval_and_p_are_students():
    gaps = [1.0, 2.5, 0.5, 3.0, 1.5]
    difference = paired(dict(enumerate(gaps)), dict.fromkeys(range(5), 0.0))
    expected = stats.ttest_1samp(gaps, 0.0)
    assert (difference.low, difference.high) == pytest.approx(expected.confidence_interval(0.95))
    assert difference.p() == pytest.approx(expected.pvalue)
    assert difference.p(-1.0) == pytest.approx(stats.ttest_1samp(gaps, -1.0).pvalue)
    assert difference.clear


def test_sign_flips_are_counted_one_by_one():
    gaps = [1.0, 2.0, -0.5, 3.0]
    difference = paired(dict(enumerate(gaps)), dict.fromkeys(range(4), 0.0))
    patterns = [
        abs(sum(s * g for s, g in zip(signs, gaps, strict=True))) for signs in itertools.product((-1, 1), repeat=4)
    ]
    assert difference.sign_flip() == sum(p >= abs(sum(gaps)) - 1e-12 for p in patterns) / 16
    shifted = paired({k: g + 1.0 for k, g in enumerate(gaps)}, dict.fromkeys(range(4), 0.0))
    assert difference.sign_flip(-1.0) == shifted.sign_flip() != difference.sign_flip()
    assert paired({1: 1.0, 2: 2.0, 3: 3.0}, {1: 0.0, 2: 0.0, 3: 0.0}).sign_flip() == 0.25  # it cannot be less
    assert paired({1: 0.3, 2: -0.1, 3: -0.2}, dict.fromkeys((1, 2, 3), 0.0)).sign_flip() == 1.0  # their sum is rounding


def test_one_seed_says_nothing_about_spread_and_equal_gaps_leave_no_doubt():
    one = paired({1: 5.0}, {1: 1.0})
    assert not one.clear
    assert one.p() == 1.0
    assert str(one) == "+4.00 (one seed)"
    same = paired({1: 2.0, 2: 3.0}, {1: 1.0, 2: 2.0})
    assert (same.low, same.high, same.p()) == (1.0, 1.0, 0.0)


def test_holm_is_stepwise_and_keeps_the_order():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_rows_that_all_seeds_share_widen_the_interval():
    generator = np.random.default_rng(0)
    good, bad = ({s: [generator.random(n) < p for n in (400, 250)] for s in (1, 2, 3)} for p in (0.8, 0.7))
    error = row_error(*({s: ["".join("01"[int(x)] for x in task) for task in by[s]] for s in by} for by in (good, bad)))
    drawn = np.zeros(2000)  # the slow definition: the rows of each of the two tasks drawn again
    for task, count in enumerate((400, 250)):
        gaps = np.mean([good[s][task].astype(float) - bad[s][task] for s in good], axis=0)
        drawn += gaps[generator.integers(0, count, (2000, count))].mean(1) / 2
    assert error == pytest.approx(100 * drawn.std(), rel=0.1)
    values = [{s: 100 * np.mean([task.mean() for task in by[s]]) for s in by} for by in (good, bad)]
    assert paired(*values, error).error > paired(*values).error


@pytest.mark.parametrize(("seeds", "bootstrap"), [(3, 0.20), (5, 0.12)])
def test_of_null_comparisons_one_in_twenty_looks_clear_and_not_one_in_five(seeds, bootstrap):
    """Why intervals are Student's: a percentile bootstrap over three or five seeds finds differences that are not there."""
    generator = np.random.default_rng(seeds)
    gaps = generator.normal(0, 1, (2000, seeds))
    error = gaps.std(1, ddof=1) / np.sqrt(seeds)
    ours = np.abs(gaps.mean(1)) > stats.t.ppf(0.975, seeds - 1) * error
    assert 0.035 < ours.mean() < 0.065
    first = paired(dict(enumerate(gaps[0])), dict.fromkeys(range(seeds), 0.0))
    assert first.clear == ours[0]
    draws = generator.integers(0, seeds, (400, seeds))
    low, high = np.quantile(gaps[:, draws].mean(2), [0.025, 0.975], axis=1)
    assert ((low > 0) | (high < 0)).mean() > bootstrap


def test_over_a_family_of_null_claims_hardly_ever_one_holds():
    generator = np.random.default_rng(7)
    families = generator.normal(0, 1, (300, 20, 5))  # twenty claims, five seeds each
    p = stats.ttest_1samp(families, 0.0, axis=2).pvalue
    assert np.mean([min(holm(list(family))) < 0.05 for family in p]) < 0.09
    assert np.mean([min(family) < 0.05 for family in p]) > 0.5  # without the correction
