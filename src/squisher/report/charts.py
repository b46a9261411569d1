"""The charts of importances that a report and `--plot FILE` share, drawn from the plain values that `collect` returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .drawing import Axis, domain_of, fixed, number, share, whole
from .svg import Mark, Series, bars_with_error_bars, density, heat_map, histogram, lines

__all__ = [
    "agreement_map", "atlas_chart", "density_chart", "depth_chart", "distribution_chart", "kept_chart", "layer_bars", "layer_chart", "overlap_chart",
    "overview_chart", "pruning_chart", "share_chart", "similarity_chart",
]  # fmt: skip

_MOST_BARS = 80
"""More layers than this are lines, because bars would be thinner than a screen can show."""


def overview_chart(importances: Sequence[Mapping[str, Any]]) -> str:
    """Draw the mean importance through the layers, a line for each importance."""
    layers = max((item["depth"] for item in importances), key=lambda depth: len(depth["layer"]))
    series: list[Series] = []
    for item in importances:
        means = dict(zip(item["depth"]["layer"], item["depth"]["mean"], strict=True))
        series.append(
            Series(item["name"], range(len(layers["layer"])), [means.get(layer) for layer in layers["layer"]])
        )
    about = "One line for each importance, on a logarithmic scale."
    return _mean_lines(series, layers["label"], "Mean importance through the layers", about)


def depth_chart(depth: Mapping[str, Any]) -> str:
    """Draw the mean importance of an entry through the layers."""
    series = [Series("mean", range(len(depth["layer"])), depth["mean"])]
    about = "The mean importance of an entry in each layer, on a logarithmic scale."
    return _mean_lines(series, depth["label"], "Depth profile", about)


def _mean_lines(series: Sequence[Series], layers: Sequence[str], title: str, description: str) -> str:
    low, high = domain_of([mean for one in series for mean in one.y], log=True)
    y = Axis("mean importance of an entry", low / 1.6, high * 1.6, log=True)  # with a little room
    return lines(series, Axis("layer", 0, 1), y, title=title, description=description, categories=layers)


def share_chart(depth: Mapping[str, Any]) -> str:
    """Draw each layer's share of the importance beside its share of the entries."""
    places = range(len(depth["layer"]))
    top = max([part for key in ("share", "entries") for part in depth[key] if part is not None] or [1.0])
    axis = Axis("share of the whole", 0.0, min(1.0, top * 1.1) or 1.0, kind="share")
    both = [Series("of the importance", places, depth["share"]), Series("of the entries", places, depth["entries"])]
    about = "Each layer's share of the importance beside its share of the entries."
    return layer_bars(both, depth["label"], axis, "What each layer holds", about)


def layer_bars(series: Sequence[Series], layers: Sequence[str], axis: Axis, title: str, description: str) -> str:
    """Draw bars for each layer, or lines where bars would be thinner than a screen can show."""
    if len(layers) <= _MOST_BARS:
        return bars_with_error_bars(series, layers, axis, label="layer", title=title, description=description)
    return lines(series, Axis("layer", 0, 1), axis, categories=layers, title=title, description=description)


def distribution_chart(totals: Mapping[str, Any]) -> tuple[str, int]:
    """Draw the histogram of values; also return how many of the smallest are not shown."""
    bins = totals["log10_histogram"]
    first, counts = _without_tail(bins["first_edge"], bins["step"], bins["counts"])
    marks = [
        Mark(value, f"{label} {number(value)}")
        for value, label in ((totals["median"], "median"), (totals["mean"], "mean"))
        if value and value >= 10.0**first
    ]
    drawing = histogram(
        first,
        bins["step"],
        counts,
        title="Distribution of the values",
        label="importance of an entry",
        marks=marks,
        description="How many entries lie in each tenth of a decade.",
    )
    return drawing, sum(bins["counts"]) - sum(counts)


def _without_tail(first: float, step: float, counts: Sequence[int]) -> tuple[float, Sequence[int]]:
    """Drop the lowest bins, up to one value in a thousand: a few very small values would take half of the axis."""
    allowed, start = sum(counts) // 1000, 0
    while start < len(counts) - 1 and counts[start] <= allowed:
        allowed -= counts[start]
        start += 1
    return first + start * step, counts[start:]


def kept_chart(items: Sequence[Mapping[str, Any]]) -> str:
    """Draw the share of the importance that the largest entries hold, a line for each importance."""
    kept = [item["budget"]["kept"] for item in items]
    fractions = kept[0]["fraction"]
    series = [
        Series(
            item["name"],
            part["fraction"],
            part["share"],
            tips=[
                f"{item['name']}\nlargest {share(f)}: {share(s)} of the importance"
                for f, s in zip(part["fraction"], part["share"], strict=True)
            ],
        )
        for item, part in zip(items, kept, strict=True)
    ]
    return lines(
        series,
        Axis("largest entries", min(fractions), 1.0, log=True, kind="share"),
        Axis("share of the importance", 0.0, 1.0, kind="share"),
        title="How concentrated the importance is",
        description="The share of the whole that the largest entries hold; the share of entries is on a logarithmic scale.",
        diagonal=True,
    )


def atlas_chart(atlas: Mapping[str, Any], source: str) -> str:
    """Draw the mean importance of each kind of parameter in each layer; `source` is its place in the page's data."""
    return heat_map(
        atlas["mean"],
        atlas["kinds"],
        atlas["labels"],
        title="Layers and kinds of parameters",
        description="Rows are kinds of parameters, columns are layers; the tables have all numbers.",
        label="mean importance of an entry",
        source=source,
        log=True,
    )


def pruning_chart(pruning: Mapping[str, Any]) -> str:
    """Draw the share of the cost ½θ²F that the cheapest entries hold."""
    return lines(
        [Series("cost", [0.0, *pruning["sparsity"]], [0.0, *pruning["share"]])],
        Axis("share of the entries set to zero, cheapest first", 0.0, 1.0, kind="share"),
        Axis("share of the sum of all costs", 0.0, 1.0, kind="share"),
        title="Which share of the cost is removed with them",
        description="The share of the sum of ½θ²F that the cheapest entries hold. It is a ranking and no forecast of the loss.",
        diagonal=True,
    )


def density_chart(item: Mapping[str, Any], source: str) -> str:
    """Draw the histogram of pairs of values; `source` is its place in the page's data."""
    return density(
        item["density"],
        item["a"],
        item["b"],
        title=f"{item['a']} against {item['b']}",
        source=source,
        description="How many entries have which pair of values, on logarithmic scales.",
    )


def overlap_chart(item: Mapping[str, Any]) -> str:
    """Draw the share of the largest entries of one importance that are among the largest of the other."""
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


def agreement_map(atlas: Mapping[str, Any], prefix: str) -> str:
    """Draw the rank correlation of each kind of parameter in each layer."""
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
    """Draw the similarity of each task to each other; `source` is its place in the page's data."""
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
