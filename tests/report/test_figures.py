from __future__ import annotations

import struct
import sys
import zlib
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from squisher.analysis.agreement import compare
from squisher.analysis.distribution import LOG10_EDGES
from squisher.analysis.health import examine
from squisher.errors import FileError, SquisherError
from squisher.importance import Importance
from squisher.report import figures as drawn
from squisher.report import plot_agreement, plot_importance, plot_similarities, plot_sparsity
from squisher.report.data import joint_counts


def pair(parameters: int, size: int = 50, seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    a = {f"layers.{i}.weight": torch.randn(size, generator=generator).square() * 1e-6 for i in range(parameters)}
    return a, {name: tensor * torch.randn(size, generator=generator).exp() for name, tensor in a.items()}


def chunks(png: bytes) -> dict[str, list[bytes]]:
    """The parts of a PNG file by type; checks the signature and every checksum."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    found: dict[str, list[bytes]] = {}
    place = 8
    while place < len(png):
        (length,) = struct.unpack(">I", png[place : place + 4])
        body = png[place + 4 : place + 8 + length]
        assert struct.unpack(">I", png[place + 8 + length : place + 12 + length])[0] == zlib.crc32(body)
        found.setdefault(body[:4].decode(), []).append(body[4:])
        place += 12 + length
    return found


def draw_all(a: dict[str, Tensor], b: dict[str, Tensor], folder: Path, ending: str) -> list[bytes]:
    imp = Importance(a)
    plot_importance(imp, examine(imp), folder / f"one.{ending}")
    plot_agreement(compare(a, b), a, b, folder / f"two.{ending}", ("first", "second"))
    counts = {name: (int((tensor > 0).sum()), tensor.numel()) for name, tensor in a.items()}
    plot_sparsity(counts, folder / f"kept.{ending}", "kept")
    return [(folder / f"{name}.{ending}").read_bytes() for name in ("one", "two", "kept")]


@pytest.mark.parametrize("parameters", [3, 60])
def test_same_data_same_bytes_and_nothing_but_pixels(parameters: int, tmp_path: Path) -> None:
    a, b = pair(parameters)
    first = draw_all(a, b, tmp_path, "png")
    assert draw_all(a, b, tmp_path, "png") == first
    assert draw_all(b, a, tmp_path, "png")[:2] != first[:2]
    for png in first:
        found = chunks(png)
        assert set(found) == {"IHDR", "IDAT", "IEND"}
        width, height = struct.unpack(">II", found["IHDR"][0][:8])
        assert width > 1000
        assert height > 500
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.png", "one.png", "two.png"]


def test_an_svg_stands_alone(tmp_path: Path) -> None:
    """Picture viewers know neither CSS variables nor colour pairs, and take no other file."""
    for picture in draw_all(*pair(3), tmp_path, "svg"):
        text = picture.decode()
        root = ElementTree.fromstring(text)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        for browser_only in ("var(", "light-dark(", "url(http", "href=", "<script", "@media"):
            assert browser_only not in text
        used = {name for node in root.iter() for name in (node.get("class") or "").split()}
        assert {"heading", "panel", "axis"} <= used
        style = root.find("{http://www.w3.org/2000/svg}style")
        assert style is not None
        assert all(f".{name}" in (style.text or "") for name in ("heading", "panel", "axis"))
    assert "of 150 entries kept (100%)" in (tmp_path / "kept.svg").read_text()


def test_similar_tasks_are_drawn_side_by_side(tmp_path: Path) -> None:
    points = torch.tensor([0.0, 0.9, 0.1])
    plot_similarities(["a", "b", "c"], (points[:, None] - points[None]).abs(), tmp_path / "tasks.svg")
    text = (tmp_path / "tasks.svg").read_text()
    assert ">1.000<" in text
    assert ">0.900<" in text
    rows = [node.text for node in ElementTree.fromstring(text).iter() if node.text in ("a", "b", "c")]
    assert rows[:3] in (["a", "c", "b"], ["b", "c", "a"])


STRANGE = {"zero": torch.zeros(5), "one": torch.ones(5), "tiny": torch.tensor(1e-45), "empty": torch.zeros(0)}


@pytest.mark.parametrize("names", [["zero"], ["one"], ["empty"], list(STRANGE)])
def test_strange_values_are_drawn_too(names: list[str], tmp_path: Path) -> None:
    tensors = {name: STRANGE[name] for name in names}
    draw_all(tensors, tensors, tmp_path, "svg")


def test_the_joint_histogram_counts_every_positive_pair() -> None:
    a, b = pair(2, size=300)
    a["layers.0.weight"][:7] = 0
    b["layers.1.weight"][:5] = 0
    calls: list[tuple[int, int]] = []
    counts = joint_counts(compare(a, b), a, b, lambda done, work: calls.append((done, work)))
    assert int(counts.sum()) == 600 - 12
    assert calls[-1] == (600, 600)
    x, y = (torch.cat([side[name] for name in a]) for side in (a, b))
    both = (x > 0) & (y > 0)
    edges = torch.tensor(LOG10_EDGES, dtype=torch.float64)
    slow = torch.histogramdd(torch.stack([x[both], y[both]], 1).double().log10(), [edges, edges]).hist
    assert float((counts - slow).abs().sum()) / 2 < 0.1 * 588  # but for values within 2⁻⁷ of an edge


def test_only_pixels_need_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    imp = Importance({"x": torch.rand(3)})
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    plot_importance(imp, examine(imp), tmp_path / "x.svg")
    with pytest.raises(SquisherError, match=r"pip install 'torch-squisher\[plots\]'"):
        plot_importance(imp, examine(imp), tmp_path / "x.png")


def test_where_a_figure_cannot_go(tmp_path: Path) -> None:
    imp = Importance({"x": torch.rand(3)})
    health = examine(imp)
    with pytest.raises(SquisherError, match=r"\.svg.*\.png.*'x\.pdf'"):
        plot_importance(imp, health, tmp_path / "x.pdf")
    with pytest.raises(FileError, match="does not exist"):
        plot_importance(imp, health, tmp_path / "no" / "x.png")
    (tmp_path / "x.png").mkdir()
    with pytest.raises(FileError, match="Cannot write"):
        plot_importance(imp, health, tmp_path / "x.png")
    assert [path.name for path in tmp_path.iterdir()] == ["x.png"]


def test_an_error_while_drawing_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imp = Importance({"x": torch.rand(3)})
    health = examine(imp)

    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(drawn.charts, "depth_chart", broken)
    with pytest.raises(RuntimeError, match="broken"):
        plot_importance(imp, health, tmp_path / "x.png")
    assert not list(tmp_path.iterdir())
