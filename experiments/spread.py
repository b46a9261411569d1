"""Means and differences with their spread: what a handful of seeds can carry, and no more.

Differences are paired by seed. Their interval is Student's t, which is right for few seeds where the differences are about normal; a
percentile bootstrap is not (of null comparisons it calls a quarter clear with three seeds, and one in six with five: the test simulates
it). The exact sign-flip p stands beside it and assumes nothing but symmetry; with three seeds it cannot be below 0.25, with
five not below 0.0625. Where the right and wrong test rows are known, the rows are a sample too, and widen the interval.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

__all__ = ["Difference", "Mean", "holm", "mean", "paired", "row_error"]


class Mean(NamedTuple):
    """A mean over seeds; the standard deviation is of single seeds (0 for one)."""

    value: float
    deviation: float
    count: int

    def __str__(self) -> str:
        return f"{self.value:.2f} ± {self.deviation:.2f}" if self.count > 1 else f"{self.value:.2f} (one seed)"


class Difference(NamedTuple):
    """A mean paired difference.

    Attributes:
        value: The mean.
        error: Its standard error; NaN for one seed.
        gaps: The differences of the seeds.
    """

    value: float
    error: float
    gaps: tuple[float, ...]

    @property
    def count(self) -> int:
        """How many seeds."""
        return len(self.gaps)

    @property
    def low(self) -> float:
        """The lower end of the 95 % interval."""
        return self.value - self._reach

    @property
    def high(self) -> float:
        """The upper end of the 95 % interval."""
        return self.value + self._reach

    @property
    def _reach(self) -> float:
        return float(stats.t.ppf(0.975, self.count - 1)) * self.error if self.count > 1 else math.inf

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0

    def p(self, against: float = 0.0) -> float:
        """Return the two-sided p of the t test that the true difference is `against`; 1 for one seed."""
        gap = abs(self.value - against)
        if self.count < 2 or gap == 0:
            return 1.0
        return float(2 * stats.t.sf(gap / self.error, self.count - 1)) if self.error else 0.0

    def sign_flip(self, against: float = 0.0) -> float:
        """Return the exact two-sided p of a sign test: the share of all sign patterns whose mean is at least as far from `against`."""
        away = np.asarray(self.gaps) - against
        signs = np.array(list(itertools.product((-1, 1), repeat=self.count)))
        rounding = 1e-12 * float(
            np.abs(away).sum()
        )  # patterns as far away as the data count, whatever the order of adding
        return float((np.abs(signs @ away) >= abs(float(away.sum())) - rounding).mean())

    def __str__(self) -> str:
        if self.count < 2:
            return f"{self.value:+.2f} (one seed)"
        return f"{self.value:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def mean(values: Sequence[float]) -> Mean:
    """Return mean and standard deviation."""
    return Mean(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0, len(values))


def paired(first: Mapping[int, float], second: Mapping[int, float], row_error: float = 0.0) -> Difference:
    """Return first − second over the seeds that both have.

    Args:
        first: Values by seed.
        second: Values by seed.
        row_error: The standard error that comes from the choice of test rows, where these are the same for all seeds.
    """
    gaps = [first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())]
    error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
    return Difference(statistics.fmean(gaps), math.hypot(error, row_error), tuple(gaps))


def row_error(first: Mapping[int, Sequence[str]], second: Mapping[int, Sequence[str]]) -> float:
    """Return the standard error of a difference in mean accuracy over tasks, in points, from the choice of each task's test rows.

    Args:
        first: By seed, for every task a 1 or a 0 for each row; the same rows for every seed.
        second: The same of the other method.
    """
    seeds = sorted(first.keys() & second.keys())
    errors = []
    for task in range(len(first[seeds[0]])):
        rows = [[[int(one) for one in by[s][task]] for s in seeds] for by in (first, second)]
        gaps = np.subtract(*rows).mean(axis=0)
        errors.append(100 * float(gaps.std(ddof=1)) / math.sqrt(len(gaps)))
    return math.hypot(*errors) / len(errors)


def holm(values: Sequence[float]) -> list[float]:
    """Return p values after Holm's correction, which hold over the whole family of tests."""
    order = sorted(range(len(values)), key=values.__getitem__)
    out, largest = [1.0] * len(values), 0.0
    for place, index in enumerate(order):
        largest = max(largest, min(1.0, (len(values) - place) * values[index]))
        out[index] = largest
    return out
