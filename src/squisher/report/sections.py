"""The page of a report: its sections, from the data that `collect` returned. Nothing is computed here but places on a screen.

`together.py` has the sections on several importances.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from .drawing import Axis, domain_of, number, share, whole
from .heat import heat_map
from .page import Column, Part, facts_list, figure, note, page, section, table
from .svg import Mark, Series, bars_with_error_bars, histogram, lines
from .together import agreement_part, similarities_part
from .words import counted, listed

__all__ = ["atlas_chart", "depth_chart", "distribution_chart", "layer_bars", "report_page", "share_chart"]

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


_MOST_BARS = 80
"""More layers than this are lines, because bars would be thinner than a screen can show."""

_PARAMETERS = (
    Column("name", "Parameter", "text"),
    Column("shape", "Shape", "text"),
    Column("numel", "Entries", "whole"),
    Column("share", "Share of all", "share", "Its part of the sum of all importances"),
    Column("mean", "Mean"),
    Column("median", "Median"),
    Column("p90", "90%", help="Nine tenths of the values are at most this large"),
    Column("max", "Largest"),
    Column("zeros", "Zeros", "share", "Entries that are exactly 0"),
)
_LAYERS = (
    Column("layer", "Layer", "text"),
    Column("numel", "Entries", "whole"),
    Column("entries", "Share of the entries", "share"),
    Column("share", "Share of the importance", "share"),
    Column("mean", "Mean"),
)
_NEEDED = (
    Column("share", "Importance kept", "share"),
    Column("fraction", "Entries", "share"),
    Column("k", "Number", "whole"),
    Column("sparsity", "Sparsity", "share"),
)
_KEPT = (
    Column("fraction", "Entries kept", "share"),
    Column("k", "Number", "whole"),
    Column("share", "Importance kept", "share"),
)
_PRUNING = (
    Column("sparsity", "Sparsity", "share"),
    Column("removed", "Removed", "whole"),
    Column("share", "Of the cost", "share", "Of the sum of ½θ²F over all entries"),
)


def importance_parts(item: Mapping[str, Any], k: int, alone: bool) -> list[Part]:
    """Return the sections of the only importance, or one section of one of several."""
    prefix = f"importances.{k}"
    anchor = f"importance-{k + 1}"
    blocks = [
        ("answer", "Where it lies", _answer(item, alone)),
        ("what", "What it is", _what(item)),
        ("health", "Health", _findings(item["diagnoses"])),
        ("atlas", "Atlas of the network", _atlas(item, prefix, anchor)),
        ("budget", "Distribution and budgets", _budget(item, prefix, anchor)),
        ("model", "With the weights of the model", _model(item["model"], prefix, anchor)),
        (
            "parameters",
            "Parameters",
            table(
                f"{anchor}-parameters-table",
                "All parameters",
                _PARAMETERS,
                item["parameters"],
                f"{prefix}.parameters",
                by="share",
            ),
        ),
    ]
    blocks = [block for block in blocks if block[2]]
    if alone:
        return [section(slug, heading, html) for slug, heading, html in blocks]
    inner = [f'<h3 class="sub" id="{anchor}-{slug}">{escape(heading)}</h3>{html}' for slug, heading, html in blocks[1:]]
    return [section(anchor, item["name"], blocks[0][2], *inner)]


def _answer(item: Mapping[str, Any], alone: bool) -> str:
    """Return the layers that hold the most; the lead of the page says it already where there is one importance."""
    caption = "A layer with more of the importance than of the entries matters more than its size suggests."
    words = "" if alone else f'<p class="answer">{escape(" ".join(item["answer"]))}</p>'
    shares = figure(share_chart(item["depth"]), "What each layer holds", caption)
    depth = figure(depth_chart(item["depth"]), "Depth profile", "Layers in the order of the network.")
    return f'{words}<div class="figures">{shares}{depth}</div>'


def _what(item: Mapping[str, Any]) -> str:
    totals, budget = item["totals"], item["budget"]
    tiles = [
        ("entries", whole(totals["numel"]), f"entries in {counted(item['tensors'], 'parameter')}"),
        (
            "median",
            number(totals["median"]),
            f"median entry; the mean is {number(totals['mean'])}, the largest {number(totals['max'])}",
        ),
    ]
    if "needed" in budget:
        at = budget["needed"]["share"].index(0.9)
        tiles.append(("needed", share(budget["needed"]["fraction"][at]), "of the entries hold 90% of the importance"))
    zeros = share(totals["zeros"] / totals["numel"]) if totals["numel"] else "–"
    tiles.append(("zeros", zeros, "of the entries are exactly 0"))
    return f'<p class="words">{escape(" ".join(item["in_words"]))}</p>{_tiles(tiles)}{facts_list(item["facts"])}'


def atlas_chart(atlas: Mapping[str, Any], source: str) -> str:
    """Draw the mean importance of each kind of parameter in each layer; `source` is where the page's data hold it."""
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


def _atlas(item: Mapping[str, Any], prefix: str, anchor: str) -> str:
    drawing = atlas_chart(item["atlas"], f"{prefix}.atlas kinds layers mean")
    caption = (
        "Each cell is the mean over the entries of one kind of parameter in one layer. Blank: the layer has no such parameter. "
        "Hatched: exactly 0 everywhere. A few cells far below the others share the first colour."
    )
    return (
        '<div class="figures">'
        + figure(drawing, "Layers and kinds of parameters", caption, wide=True)
        + "</div>"
        + table(f"{anchor}-layers", "All layers", _LAYERS, item["depth"], f"{prefix}.depth", by="share")
    )


def _budget(item: Mapping[str, Any], prefix: str, anchor: str) -> str:
    budget = item["budget"]
    if "error" in budget:
        return note(budget["error"], "warning") + f'<div class="figures">{_distribution_figure(item["totals"])}</div>'
    needed = table(
        f"{anchor}-needed",
        "How sparse a budget lets it be",
        _NEEDED,
        budget["needed"],
        f"{prefix}.budget.needed",
        filtered=False,
    )
    kept = table(
        f"{anchor}-kept",
        "What the largest entries hold",
        _KEPT,
        budget["kept"],
        f"{prefix}.budget.kept",
        filtered=False,
    )
    return (
        f'<div class="figures">{_distribution_figure(item["totals"])}'
        f"{figure(kept_chart([item]), 'How concentrated', KEPT_CAPTION)}{needed}{kept}</div>"
    )


def _tiles(tiles: Sequence[tuple[str, str, str]]) -> str:
    cells = "".join(
        f'<div data-tile="{escape(key)}"><dd>{escape(value)}</dd><dt>{escape(label)}</dt></div>'
        for key, value, label in tiles
    )
    return f'<dl class="tiles">{cells}</dl>'


def _findings(diagnoses: Sequence[Mapping[str, Any]]) -> str:
    if not diagnoses:
        return "<p>Nothing to remark.</p>"
    out = []
    for finding in diagnoses:
        advice = f'<p class="advice">{escape(finding["advice"])}</p>' if finding["advice"] else ""
        names = finding["parameters"]
        concerned = ""
        if names:
            words = escape(listed(names, 40))
            concerned = f"<details><summary>{counted(len(names), 'parameter')}</summary><p>{words}</p></details>"
        severity = escape(finding["severity"])
        label = {"problem": "Problem", "warning": "Warning", "info": "Note"}[finding["severity"]]
        out.append(
            f'<li><span class="severity {severity}">{label}</span><p>{escape(finding["sentence"])}</p>{advice}{concerned}</li>'
        )
    return f'<ul class="findings">{"".join(out)}</ul>'


def depth_chart(depth: Mapping[str, Any]) -> str:
    """Draw the mean importance of an entry through the layers."""
    return lines(
        [Series("mean", range(len(depth["layer"])), depth["mean"])],
        Axis("layer", 0, 1),
        Axis("mean importance of an entry", *padded(depth["mean"]), log=True),
        title="Depth profile",
        description="The mean importance of an entry in each layer, on a logarithmic scale.",
        categories=depth["label"],
    )


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
    """Draw how many entries have which value; also return how many of the smallest are not shown."""
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


def _distribution_figure(totals: Mapping[str, Any]) -> str:
    drawing, hidden = distribution_chart(totals)
    left_out = [f"{whole(totals['zeros'])} zeros"] if totals["zeros"] else []
    left_out += [f"{whole(hidden)} smallest values"] if hidden else []
    caption = "Tenths of a decade." + (f" Not shown: {' and '.join(left_out)}." if left_out else "")
    return figure(drawing, "Distribution of the values", caption)


def _without_tail(first: float, step: float, counts: Sequence[int]) -> tuple[float, Sequence[int]]:
    """Leave out the lowest bins that hold at most one value in a thousand: a few stragglers would take half of the axis."""
    allowed, start = sum(counts) // 1000, 0
    while start < len(counts) - 1 and counts[start] <= allowed:
        allowed -= counts[start]
        start += 1
    return first + start * step, counts[start:]


KEPT_CAPTION = "The largest entries first. If all mattered alike, the line would be the dashed one."


def kept_chart(items: Sequence[Mapping[str, Any]]) -> str:
    """Draw what share of the importance the largest entries hold, a line for each importance."""
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


def _model(model: Mapping[str, Any] | None, prefix: str, anchor: str) -> str:
    if model is None:
        return ""
    if "error" in model:
        return note(model["error"], "problem")
    covered = model["covered_entries"] / model["entries"] if model["entries"] else 0.0
    text = (
        f"{whole(model['covered_tensors'])} of {counted(model['tensors'], 'tensor')} of the model have an importance: "
        f"{share(covered)} of its entries."
    )
    for key, what in (("without_importance", "Without one"), ("without_weight", "Not in the model")):
        if model[key]:
            text += f" {what}: {listed(model[key])}."
    text += (
        " Removing a weight costs about ½θ²F by itself. The sum says which weights to remove first, not what the loss will be when "
        "many go at once: measure that on data."
    )
    pruning = model["pruning"]
    drawing = lines(
        [Series("cost", [0.0, *pruning["sparsity"]], [0.0, *pruning["share"]])],
        Axis("share of the entries set to zero, cheapest first", 0.0, 1.0, kind="share"),
        Axis("share of the sum of all costs", 0.0, 1.0, kind="share"),
        title="Which share of the cost is removed with them",
        description="The share of the sum of ½θ²F that the cheapest entries hold. It is a ranking and no forecast of the loss.",
        diagonal=True,
    )
    chart = figure(
        drawing,
        "Cheap and dear weights",
        "A ranking, no forecast. If all weights cost alike, the line would be the dashed one.",
    )
    rows = table(
        f"{anchor}-pruning", "Pruning, predicted", _PRUNING, pruning, f"{prefix}.model.pruning", filtered=False
    )
    return f'<p class="words">{escape(text)}</p><div class="figures">{chart}{rows}</div>'


def padded(values: Sequence[float | None]) -> tuple[float, float]:
    """Return the ends of a logarithmic axis that leave a little room."""
    low, high = domain_of(values, log=True)
    return low / 1.6, high * 1.6
