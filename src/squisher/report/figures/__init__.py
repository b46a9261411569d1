"""Figures, as PNG files whose bytes depend on nothing but the data and matplotlib's version."""

from .one import plot_importance, plot_sparsity
from .pair import joint_counts, plot_agreement
from .tasks import clustered, plot_distances

__all__ = ["clustered", "joint_counts", "plot_agreement", "plot_distances", "plot_importance", "plot_sparsity"]
