"""The sections on several importances: how far they agree, and how far apart their tasks are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from .drawing import Axis, fixed, number, share, whole
from .heat import density, heat_map
from .page import (
    Column,
    Part,
    facts_list,
    figure,
    note,
    section,
    table,
)
from .svg import Series, lines
from .words import counted, listed

__all__ = ["agreement_part", "density_chart", "layer_chart", "overlap_chart", "similarities_part", "similarity_chart"]

_ROWS = (
    Column("name", "Parameter", "text"),
    Column("numel", "Entries", "whole"),
    Column("spearman", "Spearman", "fixed", "Rank correlation of its entries"),
    Column("scale", "Scale A/B", "number", "The total of the first, divided by the total of the second"),
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
    """Return how far each pair agrees: in rank, in scale, and on what matters most."""
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
                density_chart(item, f"{prefix}.density"),
                "Entry against entry",
                caption,
            ),
            figure(overlap_chart(item), "Do they agree on what matters most?", _overlap_caption(item)),
            figure(
                layer_chart(item["layers"]),
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


def density_chart(item: Mapping[str, Any], source: str) -> str:
    """Draw how many entries have which pair of values; `source` is where the page's data hold it."""
    return density(
        item["density"],
        item["a"],
        item["b"],
        title=f"{item['a']} against {item['b']}",
        source=source,
        description="How many entries have which pair of values, on logarithmic scales.",
    )


def overlap_chart(item: Mapping[str, Any]) -> str:
    """Draw which share of the largest entries of one is among the largest of the other."""
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


def layer_chart(layers: Mapping[str, Any]) -> str:
    """Draw the rank correlation of the entries of each layer."""
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


def similarity_chart(tasks: Sequence[str], similarities: Sequence[Sequence[float | None]], source: str) -> str:
    """Draw the similarity of each task to each; `source` is where the page's data hold it."""
    low = min((value for row in similarities for value in row if value is not None), default=0.0)
    return heat_map(
        similarities,
        tasks,
        tasks,
        title="Similarity of tasks",
        label="similarity",
        description="1 is the same task, 0 is nothing in common.",
        source=source,
        domain=(min(low, 0.999), 1.0),
        kind="fixed",
        written=len(tasks) <= 14,
        width=540.0 if len(tasks) <= 6 else 1080.0,
    )


def similarities_part(data: Mapping[str, Any]) -> Part:
    """Return how similar the tasks are."""
    if "error" in data:
        return section("tasks", "Similarity of tasks", note(data["error"], "warning"))
    drawing = similarity_chart(data["tasks"], data["similarity"], "tasks tasks tasks similarity")
    caption = (
        "1 minus Task2Vec's distance of the mean importance of each tensor: 1 is the same task, 0 is nothing in common."
    )
    if data["left_out"]:
        caption += f" Left out, because not all have it in one shape: {listed(data['left_out'])}."
    return section("tasks", "Similarity of tasks", figure(drawing, "How similar the tasks are", caption, wide=True))
