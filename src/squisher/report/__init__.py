"""What people see: tables for a terminal, dictionaries for JSON, figures."""

from __future__ import annotations

from ..figures import plot_agreement, plot_distances, plot_importance
from .tables import compare_json, compare_tables, distance_table, inspect_json, inspect_tables

__all__ = [
    "compare_json",
    "compare_tables",
    "distance_table",
    "inspect_json",
    "inspect_tables",
    "plot_agreement",
    "plot_distances",
    "plot_importance",
]
