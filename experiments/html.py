"""The results as a page of their own, made of the parts of `squisher report`: charts, sortable tables, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from experiments.claims import CLAIMS, judge
from experiments.spread import mean
from squisher.report.page import (
    Column,
    Part,
    figure,
    note,
    page,
    section,
    table,
)
from squisher.report.scales import Axis, domain_of
from squisher.report.svg import Series, points_with_error_bars

if TYPE_CHECKING:
    from experiments.page import Comparison

__all__ = ["results_page"]

_OVERVIEW = (
    Column("setting", "setting", "text"),
    Column("metric", "measure", "text"),
    Column("fisher", "Fisher", "fixed"),
    Column("squisher", "Squisher", "fixed"),
    Column("baseline", "baseline", "fixed"),
    Column("difference", "Squisher − Fisher", "fixed", "Paired by seed; signed so that more is better."),
    Column("low", "from", "fixed", "Lower end of the 95 % bootstrap interval over seeds."),
    Column("high", "to", "fixed", "Its upper end."),
    Column("seeds", "seeds", "whole"),
)
_CLAIMS = (
    Column("claim", "claim", "text"),
    Column("where", "where", "text"),
    Column("verdict", "here", "text"),
    Column("numbers", "numbers", "text"),
)
_SCORES = (
    Column("case", "case", "text"),
    Column("method", "method", "text"),
    Column("mean", "mean", "fixed"),
    Column("deviation", "standard deviation", "fixed", "Over seeds."),
    Column("seeds", "seeds", "whole"),
)


def results_page(found: Sequence[Comparison], scale: str) -> str:
    """One self-contained page of all settings."""
    data: dict[str, Any] = {
        "scale": scale,
        "overview": _overview(found),
        "claims": _claims(found),
        "settings": {c.name: _scores(c) for c in found},
    }
    parts = [
        section("overview", "Overview", table("overview-table", "All settings", _OVERVIEW, data["overview"], "overview", filtered=False)),
        section("claims", "The paper's claims", table("claims-table", "One by one", _CLAIMS, data["claims"], "claims")),
        *(_setting(c, data["settings"][c.name]) for c in found),
    ]  # fmt: skip
    lead = "Fisher, Squisher and the Fisher-free baseline in every setting of the paper, with the spread over seeds."
    return page("What the Squisher does in place of the Fisher", lead, parts, data, eyebrow=f"results, scale {scale}")


def _overview(found: Sequence[Comparison]) -> dict[str, list[Any]]:
    out: dict[str, list[Any]] = {column.key: [] for column in _OVERVIEW}
    for c in found:
        gap = c.difference("squisher", "fisher")
        values = {m: mean(list(c.main(m).values())).value for m in ("fisher", "squisher", c.baseline)}
        row = (
            c.title, f"{c.metric} ({'higher' if c.higher_is_better else 'lower'} is better)", values["fisher"],
            values["squisher"], values[c.baseline], gap.value, gap.low, gap.high, gap.count,
        )  # fmt: skip
        for column, value in zip(_OVERVIEW, row, strict=True):
            out[column.key].append(value)
    return out


def _claims(found: Sequence[Comparison]) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {column.key: [] for column in _CLAIMS}
    for claim in CLAIMS:
        verdict, numbers = judge(claim, found)
        if verdict:
            for column, value in zip(_CLAIMS, (claim.text, claim.where, verdict, numbers), strict=True):
                out[column.key].append(value)
    return out


def _scores(c: Comparison) -> dict[str, list[Any]]:
    out: dict[str, list[Any]] = {column.key: [] for column in _SCORES}
    for case, methods in c.values.items():
        for method, by_seed in methods.items():
            m = mean(list(by_seed.values()))
            for column, value in zip(_SCORES, (case, method, m.value, m.deviation, m.count), strict=True):
                out[column.key].append(value)
    return out


def _setting(c: Comparison, scores: Mapping[str, Sequence[Any]]) -> Part:
    cases = list(c.main_cases)
    series = []
    for method in ("fisher", "squisher", c.baseline):
        means = [mean(list(c.values[case][method].values())) for case in cases]
        series.append(
            Series(
                method, list(range(len(cases))), [m.value for m in means],
                [m.value - m.deviation for m in means], [m.value + m.deviation for m in means],
            )
        )  # fmt: skip
    low, high = domain_of([v for one in series for v in (*one.low, *one.high)])
    room = 0.08 * (high - low)
    drawing = points_with_error_bars(
        series,
        cases,
        Axis(c.metric, low - room, high + room),
        title=c.title,
        description=f"{c.metric} of Fisher, Squisher and baseline, mean and standard deviation over seeds.",
    )
    direction = "Higher is better." if c.higher_is_better else "Lower is better."
    caption = f"{direction} Mean and standard deviation over {c.document['seeds']} seeds; the axis does not begin at 0."
    return section(
        c.name,
        c.title,
        note("Small networks on digits: an illustration, not evidence.") if c.document.get("scale") == "quick" else "",
        figure(drawing, c.title, caption, wide=len(cases) > 2),
        table(f"{c.name}-table", "All cases and methods", _SCORES, scores, f"settings.{c.name}"),
    )
