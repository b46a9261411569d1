"""What people see: tables for a terminal, dictionaries for JSON, figures, and a page.

    data = collect([Subject("mine", squisher.load("squisher.safetensors"))])
    write("report.html", report_page(data))

Charts (`svg`, `heat`), tables and the page itself (`page`) know nothing of importances: other pages are made of them too.
"""

from __future__ import annotations

from .data import Subject, collect
from .figures import plot_agreement, plot_distances, plot_importance
from .page import write
from .sections import report_page
from .tables import compare_json, compare_tables, distance_table, inspect_json, inspect_tables

__all__ = [
    "Subject",
    "collect",
    "compare_json",
    "compare_tables",
    "distance_table",
    "inspect_json",
    "inspect_tables",
    "plot_agreement",
    "plot_distances",
    "plot_importance",
    "report_page",
    "write",
]
