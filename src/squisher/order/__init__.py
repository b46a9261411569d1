"""Order statistics of more scores than fit in memory: top-k, rank correlation, medians, concentration.

Scores come as flat chunks, and non-negative floats are ordered as the integers that their bits spell. `selection` finds the
k-th largest score and chooses exactly k; `statistics` has rank correlation, medians and concentration. Read them in this order.
"""

from .selection import (
    BINS,
    TINY,
    Choice,
    Selection,
    Source,
    Threshold,
    bins_of,
    choose,
    middles,
    per_source,
    reverse,
    threshold,
    thresholds,
)
from .statistics import Largest, Rounded, concentration, median, ratios, spearman, top_overlap, total

__all__ = [
    "BINS", "TINY", "Choice", "Largest", "Rounded", "Selection", "Source", "Threshold", "bins_of", "choose", "concentration", "median", "middles",
    "per_source", "ratios", "reverse", "spearman", "threshold", "thresholds", "top_overlap", "total",
]  # fmt: skip
