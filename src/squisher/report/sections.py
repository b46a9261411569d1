"""The sections of a report's page, from the data that `collect` returned. Nothing is computed here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from . import charts
from .drawing import fixed, number, share, whole
from .page import Column, Part, facts_list, figure, note, page, section, table
from .words import counted, listed

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
        data: What `collect` returned; the page embeds all of it.
    """
    importances = data["importances"]
    names = [item["name"] for item in importances]
    alone, pairs = len(names) == 1, len(names) * (len(names) - 1) // 2
    parts = [] if alone else [_overview(importances, data["overview"])]
    for k, item in enumerate(importances):
        parts += _importance(item, k, alone)
    if data["agreements"]:
        parts.append(_agreements(data["agreements"], all_pairs=len(data["agreements"]) == pairs))
    if data["tasks"]:
        parts.append(_similarities(data["tasks"]))
    title = names[0] if alone else f"{', '.join(names[:-1])} and {names[-1]}"
    eyebrow = "What matters in this network" if alone else "What matters, compared"
    return page(title, data["summary"], parts, data, eyebrow)


def _overview(importances: Sequence[Mapping[str, Any]], overview: Mapping[str, Any]) -> Part:
    kept = [item for item in importances if "kept" in item["budget"]]
    caption = "Values as stored: importances from different batch sizes differ in scale."
    return section(
        "overview",
        "Side by side",
        table("overview-table", "All importances", _OVERVIEW, overview, "overview", filtered=False),
        '<div class="figures">',
        figure(charts.overview_chart(importances), "Through the layers", caption),
        figure(charts.kept_chart(kept), "How concentrated", _KEPT_CAPTION) if kept else "",
        "</div>",
    )


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


def _importance(item: Mapping[str, Any], k: int, alone: bool) -> list[Part]:
    """Return the sections of a report's only importance, or one section for one of several."""
    prefix, anchor = f"importances.{k}", f"importance-{k + 1}"
    anchor_of, source = f"{anchor}-parameters-table", f"{prefix}.parameters"
    parameters = table(anchor_of, "All parameters", _PARAMETERS, item["parameters"], source, by="share")
    blocks = [
        ("answer", "Where it lies", _answer(item, alone)),
        ("what", "What it is", _what(item)),
        ("health", "Health", _findings(item["diagnoses"])),
        ("atlas", "Atlas of the network", _atlas(item, prefix, anchor)),
        ("budget", "Distribution and budgets", _budget(item, prefix, anchor)),
        ("model", "With the weights of the model", _model(item["model"], prefix, anchor)),
        ("parameters", "Parameters", parameters),
    ]
    blocks = [block for block in blocks if block[2]]
    if alone:
        return [section(slug, heading, html) for slug, heading, html in blocks]
    inner = [f'<h3 class="sub" id="{anchor}-{slug}">{escape(heading)}</h3>{html}' for slug, heading, html in blocks[1:]]
    return [section(anchor, item["name"], blocks[0][2], *inner)]


def _answer(item: Mapping[str, Any], alone: bool) -> str:
    """Return charts of the layers' shares; with sentences, unless the lead of the page has them."""
    caption = "A layer with more of the importance than of the entries matters more than its size suggests."
    words = "" if alone else f'<p class="answer">{escape(" ".join(item["answer"]))}</p>'
    shares = figure(charts.share_chart(item["depth"]), "What each layer holds", caption)
    depth = figure(charts.depth_chart(item["depth"]), "Depth profile", "Layers in the order of the network.")
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
    cells = "".join(
        f'<div data-tile="{escape(key)}"><dd>{escape(value)}</dd><dt>{escape(label)}</dt></div>'
        for key, value, label in tiles
    )
    words = f'<p class="words">{escape(" ".join(item["in_words"]))}</p>'
    return f'{words}<dl class="tiles">{cells}</dl>{facts_list(item["facts"])}'


def _atlas(item: Mapping[str, Any], prefix: str, anchor: str) -> str:
    drawing = charts.atlas_chart(item["atlas"], f"{prefix}.atlas kinds layers mean")
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
    tables = [
        table(f"{anchor}-{key}", heading, columns, budget[key], f"{prefix}.budget.{key}", filtered=False)
        for key, heading, columns in (
            ("needed", "How sparse a budget lets it be", _NEEDED),
            ("kept", "What the largest entries hold", _KEPT),
        )
    ]
    kept = figure(charts.kept_chart([item]), "How concentrated", _KEPT_CAPTION)
    return f'<div class="figures">{_distribution_figure(item["totals"])}{kept}{"".join(tables)}</div>'


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


def _distribution_figure(totals: Mapping[str, Any]) -> str:
    drawing, hidden = charts.distribution_chart(totals)
    left_out = [f"{whole(totals['zeros'])} zeros"] if totals["zeros"] else []
    left_out += [f"{whole(hidden)} smallest values"] if hidden else []
    caption = "Tenths of a decade." + (f" Not shown: {' and '.join(left_out)}." if left_out else "")
    return figure(drawing, "Distribution of the values", caption)


_KEPT_CAPTION = "The largest entries first. If all mattered alike, the line would be the dashed one."


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
    caption = "A ranking, no forecast. If all weights cost alike, the line would be the dashed one."
    chart = figure(charts.pruning_chart(pruning), "Cheap and dear weights", caption)
    rows = table(
        f"{anchor}-pruning", "Pruning, predicted", _PRUNING, pruning, f"{prefix}.model.pruning", filtered=False
    )
    return f'<p class="words">{escape(text)}</p><div class="figures">{chart}{rows}</div>'


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


def _agreements(agreements: Sequence[Mapping[str, Any]], all_pairs: bool) -> Part:
    """Return how far each pair agrees, in rank, in scale, and on the largest entries."""
    out = [] if all_pairs else [note("There are many importances: each is compared with the first one only.")]
    for k, item in enumerate(agreements):
        if len(agreements) > 1:
            out.append(f'<h3 class="sub" id="agreement-{k + 1}">{escape(item["a"])} and {escape(item["b"])}</h3>')
        out.append(note(item["error"], "warning") if "error" in item else _agreement(item, k))
    return section("agreement", "Agreement", *out)


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
    largest = table(
        f"{anchor}-overlaps",
        "Overlap of the largest entries",
        _OVERLAPS,
        item["overlaps"],
        f"{prefix}.overlaps",
        filtered=False,
    )
    overlap = "Of the largest entries of one, the share that are among the largest of the other."
    if any(item["overlaps"]["reaches_zeros"]):
        overlap += " The last ones reach into entries that are 0, where only their place decides."
    per_layer = "All entries of a layer ranked together; 1 is the same order, 0 none in common."
    per_parameter = "Mean over the parameters of one kind in one layer."
    figures = [
        figure(charts.density_chart(item, f"{prefix}.density"), "Entry against entry", caption),
        figure(charts.overlap_chart(item), "Do they agree on what matters most?", overlap),
        figure(charts.layer_chart(item["layers"]), "Rank correlation per layer", per_layer),
        largest,
        figure(charts.agreement_map(item["atlas"], prefix), "Rank correlation per parameter", per_parameter, wide=True),
    ]
    rows = table(f"{anchor}-rows", "Agreement per parameter", _ROWS, item["rows"], f"{prefix}.rows")
    return f'{facts_list(facts)}<div class="figures">{"".join(figures)}</div>{rows}'


def _similarities(data: Mapping[str, Any]) -> Part:
    if "error" in data:
        return section("tasks", "Similarity of tasks", note(data["error"], "warning"))
    drawing = charts.similarity_chart(data["tasks"], data["similarity"], "tasks tasks tasks similarity")
    caption = (
        "1 minus Task2Vec's distance of the mean importance of each tensor: 1 is the same task, 0 is nothing in common."
    )
    if data["left_out"]:
        caption += f" Left out, because not all have it in one shape: {listed(data['left_out'])}."
    return section("tasks", "Similarity of tasks", figure(drawing, "How similar the tasks are", caption, wide=True))
