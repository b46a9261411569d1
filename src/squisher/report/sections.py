"""The page of a report: its sections, from the data that `collect` returned. Nothing is computed here but places on a screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .page import (
    Column,
    Part,
    figure,
    page,
    section,
    table,
)
from .scales import Axis
from .single import KEPT_CAPTION, importance_parts, kept_chart, padded
from .svg import Series, lines
from .together import agreement_part, similarities_part

__all__ = ["report_page"]

_OVERVIEW = (
    Column("name", "Importance", "text"),
    Column("kind", "Kind", "text"),
    Column("numel", "Entries", "whole"),
    Column("mean", "Mean"),
    Column("median", "Median"),
    Column("max", "Largest"),
    Column("zeros", "Zeros", "share"),
    Column("for_90_percent", "Hold 90%", "share", "The share of the entries that hold 90% of the importance"),
    Column("findings", "Problems, warnings", "text"),
)


def report_page(data: Mapping[str, Any]) -> str:
    """Return the page of a report.

    Args:
        data: What `collect` returned; the page embeds it whole.
    """
    importances = data["importances"]
    names = [item["name"] for item in importances]
    parts: list[Part] = []
    if len(importances) > 1:
        parts.append(_overview(importances, data["overview"]))
    for k, item in enumerate(importances):
        parts += importance_parts(item, k, alone=len(importances) == 1)
    if data["agreements"]:
        parts.append(
            agreement_part(
                data["agreements"], all_pairs=len(data["agreements"]) == len(importances) * (len(importances) - 1) // 2
            )
        )
    if data["tasks"]:
        parts.append(similarities_part(data["tasks"]))
    title = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return page(
        title,
        data["summary"],
        parts,
        data,
        "What matters in this network" if len(names) == 1 else "What matters, compared",
    )


def _overview(importances: Sequence[Mapping[str, Any]], overview: Mapping[str, Any]) -> Part:
    layers = max((item["depth"] for item in importances), key=lambda depth: len(depth["layer"]))
    order = layers["layer"]
    place = {layer: k for k, layer in enumerate(order)}
    series, means = [], []
    for item in importances:
        values: list[float | None] = [None] * len(order)
        for layer, mean in zip(item["depth"]["layer"], item["depth"]["mean"], strict=True):
            if layer in place:
                values[place[layer]] = mean
        means += values
        series.append(Series(item["name"], range(len(order)), values))
    depth = lines(
        series,
        Axis("layer", 0, 1),
        Axis("mean importance of an entry", *padded(means), log=True),
        title="Mean importance through the layers",
        description="One line for each importance, on a logarithmic scale.",
        categories=layers["label"],
    )
    kept = [item for item in importances if "kept" in item["budget"]]
    return section(
        "overview",
        "Side by side",
        table("overview-table", "All importances", _OVERVIEW, overview, "overview", filtered=False),
        '<div class="figures">',
        figure(
            depth, "Through the layers", "Values as stored: importances from different batch sizes differ in scale."
        ),
        figure(kept_chart(kept), "How concentrated", KEPT_CAPTION) if kept else "",
        "</div>",
    )
