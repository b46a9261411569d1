"""The report in a real browser: it loads in silence, sorts, filters, switches its theme, and can be used by keyboard."""

from __future__ import annotations

import json
import re
import struct

import pytest
import torch

import squisher
from squisher.report import Subject, collect, report_page, write
from squisher.report.drawing import formatted
from tests.report import examples

from .chromium import Browser

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser():
    started = Browser()
    yield started
    started.close()


@pytest.fixture(scope="module")
def data():
    weights = {
        name: torch.randn(t.shape, generator=torch.Generator().manual_seed(3))
        for name, t in examples.tensors(9).items()
    }
    return collect(
        [Subject("sst2", examples.squisher(9), weights), Subject("trec", examples.squisher(9, seed=1, classes=5))]
    )


@pytest.fixture(scope="module")
def path(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    write(path, report_page(data))
    return path


@pytest.fixture
def page(browser, path):
    browser.resize(1280, 900)
    browser.prefer("light")
    browser.open(path)
    browser.run("try { localStorage.clear() } catch {}")
    browser.open(path)
    yield browser
    assert browser.complaints == []


TABLE = "importance-1-parameters-table"


def column(page, place, table=TABLE):
    return page.run(
        f"[...document.getElementById('{table}').tBodies[0].rows].map(row => row.cells[{place}].textContent)"
    )


def click(page, selector):
    page.run(f"document.querySelector({json.dumps(selector)}).click()")


def head(page, place, table=TABLE):
    return f"#{table} thead th:nth-child({place + 1})"


def test_it_loads_without_a_complaint_and_asks_for_nothing(page):
    assert page.run("document.querySelectorAll('section').length") == 5
    assert page.run("performance.getEntriesByType('resource').length") == 0
    assert page.run("getComputedStyle(document.body).backgroundColor") != "rgba(0, 0, 0, 0)"
    assert page.run("document.documentElement.scrollWidth <= innerWidth")


def test_that_a_complaint_would_be_seen(browser, tmp_path):
    broken = tmp_path / "broken.html"
    broken.write_text(
        "<script>console.error('one'); throw new Error('two')</script><img src='http://127.0.0.1:9/x.png'>"
    )
    browser.open(broken)
    browser.run("new Promise(done => setTimeout(done, 200))")
    assert any("one" in complaint for complaint in browser.complaints)
    assert any("two" in complaint for complaint in browser.complaints)
    assert any("127.0.0.1:9" in complaint for complaint in browser.complaints)
    browser.complaints.clear()


def test_sorting_by_each_column_orders_all_rows(page, data):
    values = data["importances"][0]["parameters"]
    for place, key in ((0, "name"), (2, "numel"), (4, "mean"), (8, "zeros")):
        kind = page.run(f"document.querySelector('{head(page, place)}').dataset.kind")
        first = "ascending" if kind == "text" else "descending"
        for direction in (first, "descending" if first == "ascending" else "ascending"):
            click(page, f"{head(page, place)} button")
            assert page.run(f"document.querySelector('{head(page, place)}').getAttribute('aria-sort')") == direction
            natural = [
                [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", v)] if kind == "text" else v
                for v in values[key]
            ]
            order = sorted(range(len(natural)), key=lambda k, n=natural: n[k], reverse=direction == "descending")
            expected = [formatted(values[key][k], kind) for k in order]
            assert column(page, place) == expected[: len(column(page, place))]
    sorts = page.run(f"[...document.querySelectorAll('#{TABLE} thead th')].map(th => th.getAttribute('aria-sort'))")
    assert sorts == ["none"] * 8 + ["ascending"]


def test_what_is_not_known_is_sorted_last(browser, tmp_path):
    path = tmp_path / "zeros.html"
    tensors = {"a.0.w": torch.ones(3), "a.1.w": torch.zeros(0), "a.2.w": torch.full((3,), 2.0)}
    write(path, report_page(collect([Subject("x", squisher.Importance(tensors))])))
    browser.open(path)
    for _ in range(2):
        click(browser, f"{head(browser, 4)} button")
        assert column(browser, 4)[-1] == "–"


def test_numbers_read_the_same_after_sorting(page, data):
    """The script writes every number of every table as Python does."""
    for table in page.run("[...document.querySelectorAll('table')].map(t => t.id)"):
        source = page.run(f"document.getElementById('{table}').dataset.source")
        values = data
        for key in source.split("."):
            values = values[int(key)] if isinstance(values, list) else values[key]
        page.run(f"document.querySelector('[data-more=\"{table}\"]')?.click()")
        click(page, f"#{table} thead th button")
        heads = page.run(
            f"[...document.querySelectorAll('#{table} thead th')].map(th => [th.dataset.key, th.dataset.kind])"
        )
        for place, (key, kind) in enumerate(heads):
            assert sorted(column(page, place, table)) == sorted(formatted(value, kind) for value in values[key])


def test_scripts_and_python_round_alike(page, tmp_path):
    from squisher.report.page import Column, section, table
    from squisher.report.page import page as whole

    generator = torch.Generator().manual_seed(0)
    numbers = (10 ** (torch.rand(800, generator=generator, dtype=torch.float64) * 20 - 12)).tolist()
    numbers += (
        [k / 8 for k in range(500)]
        + [-k / 16 for k in range(100)]
        + [0.0, 1e-45, 3e38, 99950.0, 999500.0, 0.9995, 0.99999, None]
    )
    shares = [None if v is None else abs(v) % 1 for v in numbers]
    values = {"name": [f"{k:05d}" for k in range(len(numbers))], "number": numbers, "fixed": shares, "share": shares}
    columns = [
        Column("name", "n", "text"),
        Column("number", "number", "number"),
        Column("fixed", "f", "fixed"),
        Column("share", "s", "share"),
    ]
    path = tmp_path / "numbers.html"
    write(
        path, whole("numbers", "", [section("s", "s", table("t", "t", columns, values, "values"))], {"values": values})
    )
    page.open(path)
    page.run("for (let k = 0; k < 8; k++) document.querySelector('.more').click()")
    click(page, "#t thead th button")
    for place, own in enumerate(columns):
        assert column(page, place, "t") == [formatted(v, own.kind) for v in values[own.key]]


def type_in(page, text):
    page.run(
        f"{{ const field = document.querySelector('[data-filter=\"{TABLE}\"]'); field.value = {json.dumps(text)}; field.dispatchEvent(new Event('input')) }}"
    )


def test_filtering_by_words(page, data):
    rows = data["importances"][0]["parameters"]
    names = sorted(
        rows["name"], key=lambda name: -rows["share"][rows["name"].index(name)]
    )  # by share, as the table begins
    type_in(page, "LAYER.3 bias")
    expected = [name for name in names if "layer.3" in name and "bias" in name]
    assert column(page, 0) == expected
    status = f"document.querySelector('[data-status=\"{TABLE}\"]').textContent"
    assert page.run(status) == f"{len(expected)} of {len(names)} rows"
    type_in(page, "<nothing>")
    assert column(page, 0) == []
    type_in(page, "")
    assert page.run(status) == f"{len(names)} rows"
    assert len(column(page, 0)) == 20
    click(page, f"[data-more='{TABLE}']")
    assert column(page, 0) == names
    assert page.run(f"document.querySelector('[data-more=\"{TABLE}\"]').hidden") is True


def ground(page):
    rgb = page.run("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, re.findall(r"\d+", rgb)[:3]))


def test_the_theme_follows_the_system_and_can_be_chosen(page, path):
    assert ground(page) > 700
    page.prefer("dark")
    assert ground(page) < 150
    click(page, "[data-theme-choice=light]")
    assert ground(page) > 700
    pressed = "[...document.querySelectorAll('[data-theme-choice]')].map(b => b.getAttribute('aria-pressed'))"
    assert page.run(pressed) == ["false", "true", "false"]
    page.open(path)  # it is kept
    assert ground(page) > 700
    page.prefer("light")
    click(page, "[data-theme-choice=dark]")
    assert ground(page) < 150
    dark = page.run("getComputedStyle(document.querySelector('.q0')).fill")
    click(page, "[data-theme-choice=auto]")
    assert ground(page) > 700
    assert page.run("getComputedStyle(document.querySelector('.q0')).fill") != dark


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_words_stand_out_from_the_page(page, theme):
    click(page, f"[data-theme-choice={theme}]")

    def luminance(rgb):
        parts = [int(p) / 255 for p in re.findall(r"\d+", rgb)[:3]]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    behind = luminance(page.run("getComputedStyle(document.body).backgroundColor"))
    for selector, key in (
        (".lead", "color"),
        ("td", "color"),
        ("figcaption", "color"),
        ("svg .tick", "fill"),
        (".severity", "color"),
        ("nav a", "color"),
    ):
        ink = luminance(page.run(f"getComputedStyle(document.querySelector('{selector}')).{key}"))
        contrast = (max(ink, behind) + 0.05) / (min(ink, behind) + 0.05)
        assert contrast >= 4.5, (selector, contrast)


def tip(page):
    return page.run("document.getElementById('tip').hidden ? null : document.getElementById('tip').textContent")


def test_tooltips_tell_what_is_under_the_pointer(page, data):
    atlas = data["importances"][0]["atlas"]
    page.run("document.querySelector('#importance-1 .cells').scrollIntoView({block: 'center', behavior: 'instant'})")
    box = page.run(
        "(() => { const b = document.querySelector('#importance-1 .cells .blank').getBoundingClientRect(); return [b.left, b.top, b.width, b.height] })()"
    )
    for row, column_ in ((1, 3), (2, 5)):
        x = box[0] + (column_ + 0.5) * box[2] / len(atlas["layers"])
        y = box[1] + (row + 0.5) * box[3] / len(atlas["kinds"])
        page.point(x, y)
        value = atlas["mean"][row][column_]
        expected = (
            None
            if value is None
            else f"{atlas['layers'][column_]} · {atlas['kinds'][row]}\n{formatted(value, 'number')}"
        )
        assert tip(page) == expected
    page.point(2, 2)
    assert tip(page) is None


def test_the_density_tells_its_counts(page, data):
    density = data["agreements"][0]["density"]
    page.run("document.querySelector('[data-density]').scrollIntoView({block: 'center', behavior: 'instant'})")
    box = page.run(
        "(() => { const b = document.querySelector('[data-density] .blank').getBoundingClientRect(); return [b.left, b.top, b.width, b.height] })()"
    )
    column_, row, count = max(density["cells"], key=lambda cell: cell[2])
    page.point(
        box[0] + (column_ + 0.5) * box[2] / density["bins"],
        box[1] + (density["bins"] - row - 0.5) * box[3] / density["bins"],
    )
    assert tip(page).endswith(f"\n{count:,} entries")


def test_a_keyboard_reads_charts_and_sorts_tables(page, data):
    page.run("document.querySelector('#importance-1-atlas ~ .figures .chart').focus()")
    page.press("ArrowRight")
    first = tip(page)
    assert first.startswith("embeddings.word · weight")
    page.press("Escape")
    assert tip(page) is None
    page.run("[...document.querySelectorAll('#importance-1 .chart')].find(c => c.querySelector('[data-tip]')).focus()")
    page.press("ArrowRight")
    page.press("ArrowRight")
    assert tip(page).startswith(data["importances"][0]["depth"]["label"][1] + "\n")
    page.run(f"document.querySelector('{head(page, 2)} button').focus()")
    page.press("Enter")
    assert page.run(f"document.querySelector('{head(page, 2)}').getAttribute('aria-sort')") == "descending"
    outline = page.run("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.run("document.activeElement.blur()")
    page.press("Tab")
    assert page.run("document.activeElement.className || document.activeElement.tagName") is not None


def test_a_phone_scrolls_boxes_not_the_page(page):
    page.resize(390, 844, mobile=True)
    assert page.run("document.documentElement.scrollWidth") <= 390
    assert page.run("[...document.querySelectorAll('.scroll')].some(box => box.scrollWidth > box.clientWidth)")
    narrow = "[...document.querySelectorAll('figure.half .chart svg')]"  # nobody looks for a bar that is cut off
    assert page.run(f"{narrow}.length > 0 && {narrow}.every(svg => svg.getBoundingClientRect().right <= 390)")


def test_long_names_leave_room_for_their_numbers(browser, tmp_path):
    tensors = {f"bert.encoder.layer.{k}.attention.output.dense.weight": torch.rand(384, 384) for k in range(4)}
    path = tmp_path / "long.html"
    write(path, report_page(collect([Subject("long", squisher.Importance(tensors))])))
    box = f"document.getElementById('{TABLE}').parentElement"
    browser.resize(1280, 900)
    browser.open(path)
    assert browser.run(f"{box}.scrollWidth <= {box}.clientWidth")
    browser.resize(390, 844, mobile=True)
    for _ in range(2):  # as it is written, and as the script draws it
        assert browser.run(f"{box}.querySelector('tbody td').getBoundingClientRect().right") <= 390
        click(browser, f"{head(browser, 0)} button")
    assert column(browser, 0) == sorted(tensors)[::-1]


def test_print_is_light_and_without_controls(page, tmp_path):
    click(page, "[data-theme-choice=dark]")
    page.media("print")
    try:
        assert ground(page) == 3 * 255
        assert page.run("getComputedStyle(document.querySelector('.top')).display") == "none"
    finally:
        page.media("")
        page.prefer("light")
    page.pdf(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")


def test_names_that_are_markup_stay_names(browser, tmp_path):
    evil = "</script><img src=x onerror=\"document.title='owned'\"><b>"
    tensors = {f"{evil}.{k}.w": torch.rand(2) + 0.1 for k in range(2)}
    path = tmp_path / "evil.html"
    write(
        path,
        report_page(collect([Subject(evil, squisher.Importance(tensors)), Subject("b", squisher.Importance(tensors))])),
    )
    browser.open(path)
    click(browser, f"{head(browser, 0)} button")
    assert column(browser, 0) == [f"{evil}.0.w", f"{evil}.1.w"]
    assert browser.run("document.title") == f"{evil} and b"
    assert browser.run("document.images.length") == 0
    assert browser.complaints == []


def test_a_thousand_layers_draw_and_sort(browser, tmp_path):
    kinds = ("q.weight", "k.weight", "v.weight", "up.weight", "norm.weight")
    tensors = {f"model.layers.{k}.{kind}": torch.full((2,), 1e-9 * (1 + k)) for k in range(1000) for kind in kinds}
    path = tmp_path / "deep.html"
    write(path, report_page(collect([Subject("deep", squisher.Importance(tensors))])))
    browser.resize(1280, 900)
    browser.open(path)
    click(browser, f"{head(browser, 4)} button")
    assert column(browser, 0)[0].startswith("model.layers.999.")
    assert browser.run("document.getElementsByTagName('*').length") < 6000
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    picture = tmp_path / "deep.png"
    browser.picture(picture)
    assert struct.unpack(">II", picture.read_bytes()[16:24]) == (1280, 900)
    assert browser.complaints == []


def test_sections_fold_and_the_one_that_is_read_is_marked(page):
    assert page.run("document.querySelector('nav [aria-current]').hash") == "#overview"
    page.run("document.querySelectorAll('details.fold').forEach(one => { one.open = false })")
    click(page, "nav a[href='#agreement']")
    assert page.run("document.querySelector('#agreement details.fold').open") is True
    assert page.run("document.querySelector('#overview details.fold').open") is False
    page.run(
        "document.querySelector('#agreement').scrollIntoView({ behavior: 'instant' }); dispatchEvent(new Event('scroll'))"
    )
    assert page.run("document.querySelectorAll('nav [aria-current]').length") == 1
