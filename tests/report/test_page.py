"""The page: its numbers come from its data, it runs nothing that a file brought along, and its bytes depend on its input alone."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html import unescape
from html.parser import HTMLParser

import pytest
import torch

import squisher
from squisher.errors import FileError, SquisherError
from squisher.report import Subject, collect, report_page, write
from squisher.report.drawing import formatted
from squisher.report.page import ROWS, dumped, note, page, section

from . import examples

EVIL = "x</script><script>alert(1)</script><img src=x onerror=alert(2)>&\"'\u2028"


class Page(HTMLParser):
    """As much of a browser as these tests need: elements, their attributes, the text of tables and of the data."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.tables, self.data, self.ids = [], {}, "", []
        self._table = self._cell = None
        self._in_data = False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        known = dict(attributes)
        self.elements.append((tag, known))
        if "id" in known:
            self.ids.append(known["id"])
        if tag == "table":
            self._table = self.tables.setdefault(known["id"], {"of": known, "heads": [], "rows": []})
        if self._table is not None:
            if tag == "tr":
                self._table["rows"].append([])
            if tag == "th" and known.get("scope") == "col":
                self._table["heads"].append(known)
            if tag in ("th", "td"):
                self._cell = ""
        self._in_data = known.get("id") == "data"

    def handle_endtag(self, tag):
        if tag in ("th", "td") and self._table is not None:
            self._table["rows"][-1].append(self._cell)
            self._cell = None
        if tag == "table":
            self._table["rows"].pop(0)
            self._table = None
        if tag == "script":
            self._in_data = False

    def handle_data(self, text):
        if self._cell is not None:
            self._cell += text
        if self._in_data:
            self.data += text


def weights(seed=3):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(t.shape, generator=generator) for name, t in examples.tensors().items()}


@pytest.fixture(scope="module")
def data():
    return collect(
        [Subject("sst2", examples.squisher(), weights()), Subject("trec", examples.squisher(seed=1, classes=5))]
    )


@pytest.fixture(scope="module")
def text(data):
    return report_page(data)


def at(data, path):
    for key in path.split("."):
        data = data[int(key)] if isinstance(data, list) else data[key]
    return data


def test_the_data_are_in_the_page(data, text):
    assert json.loads(Page(text).data) == data


def test_every_table_shows_the_data(data, text):
    tables = Page(text).tables
    assert len(tables) >= 10
    for found in tables.values():
        values = at(data, found["of"]["data-source"])
        keys = [(head["data-key"], head["data-kind"]) for head in found["heads"]]
        count = len(values[keys[0][0]])
        assert len(found["rows"]) == min(ROWS, count)
        order = list(range(count))
        for head in found["heads"]:
            if head["aria-sort"] == "descending":  # a stable sort: rows of one value stay in the order of the data
                order.sort(key=lambda k, own=values[head["data-key"]]: -own[k])
        for k, row in zip(order, found["rows"], strict=False):
            assert row == [formatted(values[key][k], kind) for key, kind in keys]


def test_every_heat_map_and_chart_has_its_source_in_the_data(data, text):
    groups = [known for tag, known in Page(text).elements if tag == "g" and known.get("class") == "cells"]
    assert len(groups) == 5  # two atlases, a density, a map of correlations, distances
    for known in groups:
        if "data-density" in known:
            assert at(data, known["data-density"])["bins"] == int(known["data-count"].split()[0])
            continue
        source = at(data, known["data-source"])
        columns, rows = map(int, known["data-count"].split())
        assert len(source[known["data-rows"]]) == rows == len(source[known["data-values"]])
        assert len(source[known["data-columns"]]) == columns == len(source[known["data-values"]][0])


def test_tiles_findings_and_words(data, text):
    for item in data["importances"]:
        for sentence in [
            *item["in_words"],
            *(d["sentence"] for d in item["diagnoses"]),
            *(d["advice"] for d in item["diagnoses"]),
        ]:
            assert sentence in unescape(text)
        assert formatted(item["totals"]["numel"], "whole") in text
        assert f">{formatted(item['totals']['median'], 'number')}</dd>" in text
        assert f">{formatted(item['budget']['needed']['fraction'][2], 'share')}</dd>" in text
    assert data["summary"] in text


def test_it_asks_for_nothing_from_outside(text):
    assert not re.search(r"https?://", text)
    assert not re.search(r"@import|url\((?!#hatch)|<link|<iframe|<base", text)
    for tag, known in Page(text).elements:
        assert "src" not in known
        assert tag != "a" or known["href"].startswith("#")


def test_the_policy_allows_its_own_script_and_style_and_no_other(text):
    policy = next(known["content"] for tag, known in Page(text).elements if known.get("http-equiv"))
    assert policy.startswith("default-src 'none'")
    for tag in ("style", "script"):
        content = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[1]
        assert base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() in policy
    assert "unsafe" not in policy
    assert not any("style" in known for _, known in Page(text).elements)


def test_nothing_from_a_file_becomes_markup():
    tensors = {f"{EVIL}.{k}.{EVIL}": torch.rand(3) + 0.1 for k in range(2)}
    facts = {**examples.FACTS, "optimizer": {"class": EVIL, "pollution": [EVIL]}, "naming": EVIL, "dtype_of_source": EVIL,
             "absent": {EVIL: EVIL}, EVIL: EVIL}  # fmt: skip
    evil = squisher.Importance(tensors, **facts)
    other = squisher.Importance({**tensors, EVIL: torch.zeros(2)}, **facts)
    harmless = collect(
        [Subject("a", squisher.Importance({"l.0.w": torch.rand(3), "l.1.w": torch.rand(3)}, **examples.FACTS))]
    )
    data = collect([Subject(EVIL, evil, {EVIL: torch.ones(2), **tensors}), Subject("b" + EVIL, other)])
    found, plain = Page(report_page(data)), Page(report_page(harmless))
    assert json.loads(found.data) == data
    assert {tag for tag, _ in found.elements} <= {tag for tag, _ in plain.elements} | {"details", "summary", "polyline"}
    assert sum(tag == "script" for tag, _ in found.elements) == 2
    assert not any(key.startswith("on") or key == "src" for _, known in found.elements for key in known)


def test_a_note_and_a_heading_are_escaped():
    html = page(EVIL, EVIL, [section("s", EVIL, note(EVIL))], {"x": EVIL}, EVIL)
    assert sum(tag in ("script", "img") for tag, _ in Page(html).elements) == 2


def test_it_can_be_read_without_eyes(text):
    found = Page(text)
    assert len(set(found.ids)) == len(found.ids)
    tags = [tag for tag, _ in found.elements]
    assert tags.count("h1") == 1
    assert tags.count("caption") == tags.count("table")
    for tag, known in found.elements:
        if tag == "svg" and known.get("aria-hidden") != "true":
            assert known["role"] == "img"
            assert len(known["aria-label"]) > 20
        if tag == "th" and known.get("scope") == "col":
            assert known["aria-sort"] in ("none", "descending")
        if tag == "a":
            assert known["href"][1:] in found.ids
    headings = [int(tag[1]) for tag in tags if re.fullmatch(r"h[1-6]", tag)]
    assert all(b <= a + 1 for a, b in zip(headings, headings[1:], strict=False))  # noqa: RUF007
    assert ("html", {"lang": "en"}) in found.elements


def test_the_same_input_gives_the_same_bytes(tmp_path, text):
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        for name, seed, classes in (("sst2", 0, 2), ("trec", 1, 5)):
            examples.squisher(seed=seed, classes=classes).save(tmp_path / folder / f"{name}.safetensors")
        subjects = [Subject(n, squisher.load(tmp_path / folder / f"{n}.safetensors")) for n in ("sst2", "trec")]
        write(tmp_path / folder / "page.html", report_page(collect(subjects)))
    first, second = ((tmp_path / folder / "page.html").read_bytes() for folder in ("here", "there"))
    assert first == second
    assert str(tmp_path).encode() not in first


def test_errors_are_shown_in_their_place():
    data = collect(
        [
            Subject("a", examples.squisher(), {"other": torch.ones(1)}),
            Subject("b", squisher.Importance({"z": torch.zeros(2)})),
        ]
    )
    html = unescape(report_page(data))
    for sentence in (data["importances"][0]["model"]["error"], data["importances"][1]["budget"]["error"],
                     data["agreements"][0]["error"], data["tasks"]["error"]):  # fmt: skip
        assert sentence in html


def test_one_importance_has_a_section_for_each_question():
    found = Page(report_page(collect([Subject("only", examples.squisher(), weights())])))
    assert {"what", "health", "atlas", "budget", "model", "parameters"} <= set(found.ids)
    assert "agreement" not in found.ids


def test_many_are_said_to_be_compared_with_the_first():
    many = [Subject(str(k), examples.squisher(layers=1, seed=k)) for k in range(5)]
    assert "compared with the first one only" in report_page(collect(many))
    assert "compared with the first one only" not in report_page(collect(many[:3]))


def test_a_thousand_layers_stay_small():
    kinds = ("q.weight", "k.weight", "up.weight", "norm.weight")
    tensors = {f"model.layers.{k}.{kind}": torch.rand(4) * 1e-7 for k in range(1000) for kind in kinds}
    html = report_page(collect([Subject("deep", squisher.Importance(tensors, **examples.FACTS))]))
    found = Page(html)
    assert len(html) < 2_000_000
    assert len(found.elements) < 5_000
    assert len(json.loads(found.data)["importances"][0]["parameters"]["name"]) == 4000


def test_writing_is_whole_or_not_at_all(tmp_path):
    write(tmp_path / "a.html", "ä\ud800")
    assert (tmp_path / "a.html").read_bytes() == "ä?".encode()
    with pytest.raises(FileError, match="Cannot write"):
        write(tmp_path / "missing" / "a.html", "x")
    assert [p.name for p in tmp_path.iterdir()] == ["a.html"]


def test_data_that_json_cannot_hold_are_refused():
    with pytest.raises(SquisherError, match="JSON"):
        dumped({"x": float("nan")})
