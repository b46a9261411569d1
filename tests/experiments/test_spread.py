"""Means and paired differences, against their definitions."""

from __future__ import annotations

import statistics

import numpy as np

from experiments.spread import mean, paired


def test_mean_and_deviation_are_those_of_the_seeds():
    result = mean([90.0, 92.0, 97.0])
    assert result.value == statistics.mean([90, 92, 97])
    assert result.deviation == statistics.stdev([90, 92, 97])
    assert mean([3.0]).deviation == 0


def test_pairs_are_taken_within_a_seed_and_lone_seeds_left_out():
    difference = paired({1: 10.0, 2: 30.0, 4: 99.0}, {1: 8.0, 2: 28.0, 3: 0.0})
    assert difference.value == 2.0
    assert (difference.low, difference.high) == (2.0, 2.0)
    assert difference.count == 2
    assert difference.clear


def test_the_interval_covers_the_mean_about_as_often_as_it_says():
    generator = np.random.default_rng(1)
    covered = 0
    for _ in range(40):
        gaps = generator.normal(1.0, 2.0, 30)
        difference = paired(dict(enumerate(gaps)), dict.fromkeys(range(30), 0.0))
        covered += difference.low <= 1.0 <= difference.high
    assert 33 <= covered <= 40


def test_no_difference_is_not_clear():
    assert not paired({1: 1.0, 2: 2.0}, {1: 2.0, 2: 1.0}).clear
