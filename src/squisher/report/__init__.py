"""Tables for a terminal, dictionaries for JSON, charts, pictures, and the page of a report.

    data = collect([Subject("mine", squisher.load("squisher.safetensors"))])
    write("report.html", report_page(data))

`data` computes what a report shows; `words`, `charts` and `sections` write, draw and arrange it. `drawing`, `svg` and `page` know
nothing of importances, so other pages can be made of them, too:

    drawing = lines([Series("loss", steps, losses)], Axis("step", 0, 100), Axis("loss", 0, 3), title="Loss", description="…")
    write_picture("loss.svg", "Training", [Panel("Loss", drawing)])
    write("page.html", page("Training", "", [section("loss", "Loss", figure(drawing, "Loss"))], {}))
"""

from __future__ import annotations

from .data import Subject, collect
from .drawing import Axis, domain_of
from .figures import (
    Panel,
    check_picture,
    plot_agreement,
    plot_importance,
    plot_similarities,
    plot_sparsity,
    write_picture,
)
from .page import Column, Part, figure, note, page, section, table, write
from .sections import report_page
from .svg import Mark, Series, bars_with_error_bars, heat_map, histogram, lines, points_with_error_bars, scatter
from .tables import compare_tables, inspect_json, inspect_tables, similarity_json, similarity_table

__all__ = [  # noqa: RUF022
    # a report on importances
    "Subject", "collect", "report_page",
    # tables and JSON of the commands
    "compare_tables", "inspect_json", "inspect_tables", "similarity_json", "similarity_table",
    # pictures of the commands
    "check_picture", "plot_agreement", "plot_importance", "plot_similarities", "plot_sparsity",
    # charts
    "Axis", "Mark", "Series", "bars_with_error_bars", "domain_of", "heat_map", "histogram", "lines", "points_with_error_bars", "scatter",
    # pages and pictures of any charts
    "Column", "Panel", "Part", "figure", "note", "page", "section", "table", "write", "write_picture",
]  # fmt: skip
