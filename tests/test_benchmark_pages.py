"""The numbers in the documents are those of the committed benchmark results."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import page

ROOT = Path(__file__).parents[1]
PARTS = [(document, name) for document, parts in page.PARTS.items() for name in parts]


@pytest.mark.parametrize(("document", "name"), PARTS)
def test_a_table_is_what_the_results_give(document, name):
    text = (ROOT / document).read_text()
    assert page.fill(text, name, page.PARTS[document][name]()) == text, "run `python -m benchmarks.page`"


def test_what_stands_around_a_table_stays():
    text = "before\n<!-- benchmarks: a -->\nold\n<!-- end -->\nafter\n<!-- benchmarks: b -->\nkept\n<!-- end -->\n"
    filled = page.fill(text, "a", "| new |")
    assert filled == text.replace("old", "| new |")
    with pytest.raises(SystemExit, match="There is no mark"):
        page.fill(text, "c", "")


def test_wrong_and_failing_peers_are_told_apart():
    assert page._fisher_cell({"ratio": 1.234, "max_error": 1e-6}) == "1.23×"
    assert page._fisher_cell({"ratio": 1.234, "max_error": 0.5}) == "1.23× (wrong)"
    assert page._fisher_cell({"failed": "out of memory"}) == "fails"
    assert page._fisher_cell(None) == ""


@pytest.mark.parametrize(("name", "make"), [("naming", page.naming_figure), ("codecs", page.codec_figure)])
def test_figures_are_those_of_the_results(name, make):
    figure = (page.ROOT / "docs" / "images" / f"{name}.svg").read_text()
    assert figure == make(), "run `python -m benchmarks.page`"
