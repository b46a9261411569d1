"""The sections on several importances: how far they agree, and how far apart their tasks are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from .heat import density, heat_map
from .numbers import fixed, number, share, whole
from .page import (
    Column,
    Part,
    facts_list,
    figure,
    note,
    section,
    table,
)
from .scales import Axis
from .svg import Series, lines
from .words import counted, listed

__all__ = ["agreement_part", "distances_part"]

_ROWS = (
    Column("name", "Parameter", "text"),
    Column("numel", "Entries", "whole"),
    Column("spearman", "Spearman", "fixed", "Rank correlation of its entries"),
    Column("scale", "Scale A/B", "number", "The total of the first, divided by that of the second"),
    Column("median_ratio", "Median A/B", "number", "The median of the ratio of entries"),
    Column("overlap", "Overlap at 10%", "share", "Of the largest tenth, the share that both have"),
)
_OVERLAPS = (
    Column("fraction", "Largest", "share"),
    Column("k", "Entries of each", "whole"),
    Column("overlap", "In both", "share"),
    Column("chance", "By chance", "share"),
)


def agreement_part(agreements: Sequence[Mapping[str, Any]], all_pairs: bool) -> Part:
    """How far each pair agrees: in rank, in scale, and on what matters most."""
    out = [] if all_pairs else [note("There are many importances: each is compared with the first one only.")]
    for k, item in enumerate(agreements):
        if len(agreements) > 1:
            out.append(f'<h3 class="sub" id="agreement-{k + 1}">{_pair(item)}</h3>')
        out.append(note(item["error"], "warning") if "error" in item else _agreement(item, k))
    return section("agreement", "Agreement", *out)


def _pair(item: Mapping[str, Any]) -> str:
    return f"{escape(item['a'])} and {escape(item['b'])}"


def _agreement(item: Mapping[str, Any], k: int) -> str:
    prefix, anchor = f"agreements.{k}", f"agreement-{k + 1}"
    facts = [
        ["A", item["a"]],
        ["B", item["b"]],
        ["in common", f"{whole(item['numel'])} entries in {counted(item['parameters'], 'parameter')}"],
        ["Spearman", fixed(item["spearman"])],
        ["scale A/B", f"{number(item['scale'])} of the totals, {number(item['median_ratio'])} in the median"],
    ]
    if item["left_out"]:
        facts.append(["left out", f"{listed(item['left_out'])}: not in both, or not in one shape"])
    if not item["exact"]:
        facts.append(["ranks", "of values rounded to 16 bits"])
    shown = item["density"]["shown"]
    caption = "Equal values lie on the dashed line."
    if shown < item["numel"]:
        caption += f" {whole(item['numel'] - shown)} entries that are 0 in either are not shown."
    return "".join(
        [
            facts_list(facts),
            '<div class="figures">',
            figure(
                density(
                    item["density"],
                    item["a"],
                    item["b"],
                    title=f"{item['a']} against {item['b']}",
                    source=f"{prefix}.density",
                    description="How many entries have which pair of values, on logarithmic scales.",
                ),
                "Entry against entry",
                caption,
            ),
            figure(_overlap_chart(item), "Do they agree on what matters most?", _overlap_caption(item)),
            figure(
                _layer_chart(item["layers"]),
                "Rank correlation per layer",
                "All entries of a layer ranked together; 1 is the same order, 0 none in common.",
            ),
            table(
                f"{anchor}-overlaps",
                "Overlap of the largest entries",
                _OVERLAPS,
                item["overlaps"],
                f"{prefix}.overlaps",
                filtered=False,
            ),
            figure(
                _map(item["atlas"], prefix),
                "Rank correlation per parameter",
                "Mean over the parameters of one kind in one layer.",
                wide=True,
            ),
            "</div>",
            table(f"{anchor}-rows", "Agreement per parameter", _ROWS, item["rows"], f"{prefix}.rows"),
        ]
    )


def _overlap_chart(item: Mapping[str, Any]) -> str:
    overlaps = item["overlaps"]
    fractions = overlaps["fraction"]
    tips = [f"largest {share(f)}: {share(o)} in both" for f, o in zip(fractions, overlaps["overlap"], strict=True)]
    return lines(
        [
            Series("in both", fractions, overlaps["overlap"], tips=tips),
            Series("by chance", fractions, overlaps["chance"]),
        ],
        Axis("largest entries of each", min(fractions, default=0.1), max([1.0, *fractions]), log=True, kind="share"),
        Axis("share in both", 0.0, 1.0, kind="share"),
        title="Overlap of the largest entries",
        description="The share of the largest entries of one that are among the largest of the other.",
    )


def _overlap_caption(item: Mapping[str, Any]) -> str:
    caption = "Of the largest entries of one, the share that are among the largest of the other."
    if any(item["overlaps"]["reaches_zeros"]):
        caption += " The last ones reach into entries that are 0, where only their place decides."
    return caption


def _layer_chart(layers: Mapping[str, Any]) -> str:
    low = min([0.0, *(value for value in layers["spearman"] if value is not None)])
    tips = [
        f"{fixed(value)} over {whole(numel)} entries"
        for value, numel in zip(layers["spearman"], layers["numel"], strict=True)
    ]
    return lines(
        [Series("Spearman", range(len(layers["layer"])), layers["spearman"], tips=tips)],
        Axis("layer", 0, 1),
        Axis("Spearman", low, 1.0),
        title="Rank correlation per layer",
        description="The rank correlation of the entries of each layer.",
        categories=layers["label"],
    )


def _map(atlas: Mapping[str, Any], prefix: str) -> str:
    low = min([0.0, *(value for row in atlas["spearman"] for value in row if value is not None)])
    return heat_map(
        atlas["spearman"],
        atlas["kinds"],
        atlas["labels"],
        title="Rank correlation per parameter",
        description="Rows are kinds of parameters, columns are layers; the table below has all numbers.",
        label="Spearman",
        source=f"{prefix}.atlas kinds layers spearman",
        domain=(low, 1.0),
        kind="fixed",
        written=len(atlas["layers"]) <= 14,
    )


def distances_part(data: Mapping[str, Any]) -> Part:
    """How far apart the tasks are."""
    if "error" in data:
        return section("distances", "Task distances", note(data["error"], "warning"))
    matrix = data["matrix"]
    most = max((value for row in matrix for value in row), default=1.0)
    drawing = heat_map(
        matrix,
        data["tasks"],
        data["tasks"],
        title="Distances between tasks",
        label="distance",
        description="0 is the same task, 1 is nothing in common.",
        source="distances tasks tasks matrix",
        domain=(0.0, most or 1.0),
        kind="fixed",
        written=len(matrix) <= 14,
        width=540.0 if len(matrix) <= 6 else 1080.0,
    )
    caption = "Task2Vec's distance of the mean importance of each tensor: 0 is the same, 1 is nothing in common."
    if data["left_out"]:
        caption += f" Left out, because not all have it in one shape: {listed(data['left_out'])}."
    return section("distances", "Task distances", figure(drawing, "How far apart the tasks are", caption, wide=True))
