"""Charts are well-formed, escaped, and put values where they belong."""

from __future__ import annotations

import itertools
import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from squisher.report.drawing import STEPS, Axis, colour_steps, domain_of
from squisher.report.svg import (
    Mark,
    Series,
    bars_with_error_bars,
    density,
    heat_map,
    histogram,
    lines,
    points_with_error_bars,
    scatter,
)

EVIL = "<script>alert('x')</script>&\"'"
X, Y = Axis("x", 0, 10), Axis("y", 0, 100)
WORDS = {"title": EVIL, "description": EVIL}


def parsed(svg):
    tree = ElementTree.fromstring(svg)
    assert tree.tag == "svg"
    assert tree.get("role") == "img"
    assert not tree.findall(".//script")
    return tree


def points(tree, name):
    return [
        tuple(float(p) for p in pair.split(","))
        for pair in tree.find(f".//polyline[@class='{name}']").get("points").split()
    ]


def test_an_axis_maps_and_ticks():
    assert [X.part(v) for v in (0, 5, 10)] == [0, 0.5, 1]
    assert [v for v, _ in X.ticks(5)] == [0, 2, 4, 6, 8, 10]
    log = Axis("v", 1e-6, 1e-2, log=True)
    assert log.part(1e-4) == pytest.approx(0.5)
    assert log.ticks() == [
        (pytest.approx(10.0**k), text)
        for k, text in zip(range(-6, -1), ("10⁻⁶", "10⁻⁵", "10⁻⁴", "10⁻³", "10⁻²"), strict=True)
    ]
    assert [text for _, text in Axis("s", 0.001, 1, log=True, kind="share").ticks()] == ["0.1%", "1%", "10%", "100%"]
    assert Axis("one", 3, 3).part(3) == 0.5


def test_a_domain_leaves_out_what_an_axis_cannot_show():
    assert domain_of([0, None, math.nan, 2.0, 5.0], log=True) == (2.0, 5.0)
    assert domain_of([], log=True) == (0.1, 1.0)
    assert domain_of([None]) == (0.0, 1.0)
    assert domain_of([3.0]) == (2.5, 3.5)


def test_colours_get_darker_step_by_step():
    def lightness(colour):
        parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    light = [lightness(colour) for colour in colour_steps()]
    assert len(light) == STEPS
    assert all(a > b for a, b in itertools.pairwise(light))
    assert light[0] > 0.75
    assert light[-1] < 0.05


def test_lines_are_where_the_values_are_and_break_where_there_is_none():
    tree = parsed(lines([Series("a", [0, 5, 10], [0, 50, 100]), Series(EVIL, [0, 10], [None, 3.0])], X, Y, **WORDS))
    (x0, y0), (x1, y1), (x2, y2) = points(tree, "line s0")
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.02)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.02)
    assert y0 > y2  # up is more
    assert tree.find(".//polyline[@class='line s1']") is None
    tips = [mark.get("data-tip") for mark in tree.iter() if mark.get("data-tip")]
    assert "5: 50" in tips
    assert EVIL in [text.text for text in tree.iter("text")]


def test_lines_over_many_categories_have_few_labels_and_a_tip_each():
    names = [f"layer.{k}" for k in range(1000)]
    svg = lines(
        [Series("mean", range(1000), [1e-7 * (k + 1) for k in range(1000)])],
        X,
        Axis("m", 1e-7, 1e-4, log=True),
        categories=names,
        **WORDS,
    )
    tree = parsed(svg)
    assert sum("layer." in (text.text or "") for text in tree.iter("text")) <= 16
    tips = [mark.get("data-tip") for mark in tree.iter("rect") if mark.get("data-tip")]
    assert len(tips) == 1000
    assert tips[41] == "layer.41\n4.2e-6"
    assert len(svg) < 250_000


def test_bars_have_error_bars():
    tree = parsed(
        bars_with_error_bars(
            [Series("a", [], [1.0, None, 50.0], low=[0.5, None, 40.0], high=[1.5, None, 60.0])],
            ["p", "q", EVIL],
            Y,
            **WORDS,
        )
    )
    bars = [mark for mark in tree.iter("rect") if mark.get("class") == "bar s0"]
    assert len(bars) == 2
    assert float(bars[1].get("height")) == pytest.approx(50 * float(bars[0].get("height")), rel=0.02)
    errors = [mark for mark in tree.iter("path") if mark.get("class") == "error s0"]
    assert len(errors) == 2
    tips = [mark.get("data-tip") for mark in tree.iter("rect") if mark.get("data-tip")]
    assert tips == ["p\n1 (0.5 to 1.5)", "q\n–", f"{EVIL}\n50 (40 to 60)"]


def test_points_of_a_category_stand_beside_one_another():
    series = [
        Series("a", [], [10.0, None], low=[5.0, None], high=[15.0, None]),
        Series("b", [], [10.0, 20.0], low=[5.0, 15.0], high=[15.0, 25.0]),
    ]
    tree = parsed(points_with_error_bars(series, ["p", EVIL], Y, **WORDS))
    circles = [mark for mark in tree.iter("circle") if mark.get("class") == "dot s0"]
    squares = [mark for mark in tree.iter("rect") if mark.get("class") == "dot s1"]
    assert (len(circles), len(squares)) == (1, 2)
    assert float(circles[0].get("cy")) == pytest.approx(float(squares[0].get("y")) + 3)
    assert float(circles[0].get("cx")) < float(squares[0].get("x"))
    assert len([mark for mark in tree.iter("path") if (mark.get("class") or "").startswith("error")]) == 3
    tips = [mark.get("data-tip") for mark in tree.iter("rect") if mark.get("data-tip")]
    assert tips == ["p\na: 10 (5 to 15)\nb: 10 (5 to 15)", f"{EVIL}\na: –\nb: 20 (15 to 25)"]


def test_points_have_their_own_shapes():
    tree = parsed(
        scatter(
            [Series("a", [1], [2.0]), Series("b", [3], [4.0], tips=[EVIL]), Series("c", [5, 6], [6.0, None])],
            X,
            Y,
            **WORDS,
        )
    )
    shapes = [mark.tag for mark in tree.iter() if (mark.get("class") or "").startswith("dot")]
    assert shapes == ["circle", "rect", "path"]


def test_the_label_of_a_mark_stays_inside_the_chart():
    marks = [Mark(1.1e-8, "median 1.1e-8"), Mark(8e-7, "mean 8e-7")]
    words = [
        t
        for t in parsed(histogram(-8.0, 0.5, [1, 3, 0, 4], label="v", marks=marks, **WORDS)).iter()
        if t.text in ("median 1.1e-8", "mean 8e-7")
    ]
    assert [t.get("text-anchor") for t in words] == ["start", "end"]


def test_a_histogram_shows_shares_and_counts():
    tree = parsed(histogram(-8.0, 0.5, [1, 3, 0, 4], label="v", marks=[Mark(1e-7, EVIL), Mark(0.0, "zero")], **WORDS))
    bars = [mark for mark in tree.iter("rect") if (mark.get("class") or "").startswith("bar")]
    heights = [float(bar.get("height")) for bar in bars]
    assert heights[1] == pytest.approx(3 * heights[0], rel=0.01)
    assert heights[2] == 0
    assert bars[1].get("data-tip") == "3.16e-8 to 1e-7: 3 (37.5%)"
    assert len([mark for mark in tree.iter("line") if mark.get("class") == "mark"]) == 1


def classes(svg):
    return {path.get("class"): path.get("d").count("M") for path in parsed(svg).iter("path")}


def test_a_heat_map_groups_cells_by_colour():
    values = [[1e-8, 1e-2, None], [0.0, 1e-2, float("nan")]]
    found = classes(heat_map(values, [EVIL, "b"], ["x", "y", EVIL], label=EVIL, log=True, domain=(1e-8, 1e-2), **WORDS))
    assert found == {"q0": 1, f"q{STEPS - 1}": 2, "none": 1}


def test_a_few_cells_far_below_do_not_take_the_colours_from_the_others():
    values = [[10.0 ** (-5 - k / 10) for k in range(30)] + [1e-20]]
    svg = heat_map(values, ["a"], [str(k) for k in range(31)], label="m", log=True, **WORDS)
    assert len(classes(svg)) > STEPS // 2


def test_written_values_and_sources():
    svg = heat_map(
        [[0.25]], ["a"], ["b"], label="v", source="p.q rows columns values", kind="fixed", written=True, **WORDS
    )
    assert "0.250" in svg
    group = parsed(svg).find(".//g[@class='cells']")
    assert [group.get(f"data-{key}") for key in ("source", "rows", "columns", "values", "kind")] == [
        "p.q",
        "rows",
        "columns",
        "values",
        "fixed",
    ]


def test_a_thousand_layers_are_light():
    svg = heat_map([[1e-7 * (1 + (j * k) % 97) for k in range(1000)] for j in range(12)], [f"kind {j}" for j in range(12)],
                   [f"layer.{k}" for k in range(1000)], label="m", log=True, **WORDS)  # fmt: skip
    tree = parsed(svg)
    assert sum(1 for _ in tree.iter()) < 400
    assert len(svg) < 500_000
    assert tree.get("class") == "scrolls"


def test_density_counts_and_diagonal():
    data = {"first_edge": -8.0, "step": 0.5, "bins": 3, "cells": [[0, 0, 1], [2, 2, 1000], [1, 0, 1000]]}
    svg = density(data, EVIL, "b", source="agreements.0.density", **WORDS)
    found = classes(svg)
    assert found == {"q0": 1, f"q{STEPS - 1}": 2}
    first = re.search(r'class="q0" d="M([\d.]+) ([\d.]+)', svg)
    assert (float(first[1]), float(first[2])) == (0, 240)  # the smallest values are at the lower left
    assert parsed(density({**data, "bins": 0, "cells": []}, "a", "b", source="s", **WORDS)) is not None
