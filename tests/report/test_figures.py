from __future__ import annotations

import struct
import sys
import zlib
from pathlib import Path

import matplotlib as mpl
import pytest
import torch
from torch import Tensor

from squisher.analysis.agreement import compare
from squisher.analysis.distribution import LOG10_EDGES
from squisher.analysis.health import examine
from squisher.errors import FileError, SquisherError
from squisher.importance import Importance
from squisher.report import figures, plot_agreement, plot_importance
from squisher.report.figures import canvas, one


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


def draw_both(a: dict[str, Tensor], b: dict[str, Tensor], folder: Path) -> tuple[bytes, bytes]:
    imp = Importance(a)
    plot_importance(imp, examine(imp), folder / "one.png")
    plot_agreement(compare(a, b), a, b, folder / "two.png", ("first", "second"))
    return (folder / "one.png").read_bytes(), (folder / "two.png").read_bytes()


@pytest.mark.parametrize("parameters", [3, 60])
def test_same_data_same_bytes_and_nothing_but_pixels(parameters: int, tmp_path: Path) -> None:
    a, b = pair(parameters)
    first = draw_both(a, b, tmp_path)
    with mpl.rc_context({"font.size": 30, "figure.dpi": 20}):  # the user's settings do not count
        assert draw_both(a, b, tmp_path) == first
    assert draw_both(b, a, tmp_path) != first
    for png in first:
        found = chunks(png)
        assert set(found) == {"IHDR", "pHYs", "IDAT", "IEND"}
        width, height = struct.unpack(">II", found["IHDR"][0][:8])
        assert width > 1500
        assert height > 500
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.png", "two.png"]


STRANGE = {"zero": torch.zeros(5), "one": torch.ones(5), "tiny": torch.tensor(1e-45), "empty": torch.zeros(0)}


@pytest.mark.parametrize("names", [["zero"], ["one"], ["empty"], list(STRANGE)])
def test_strange_values_are_drawn_too(names: list[str], tmp_path: Path) -> None:
    tensors = {name: STRANGE[name] for name in names}
    draw_both(tensors, tensors, tmp_path)


def test_leaves_pyplot_and_the_settings_alone(tmp_path: Path) -> None:
    before = dict(mpl.rcParams)
    sys.modules.pop("matplotlib.pyplot", None)
    draw_both(*pair(2), tmp_path)
    assert dict(mpl.rcParams) == before
    assert "matplotlib.pyplot" not in sys.modules


def test_the_joint_histogram_counts_every_positive_pair() -> None:
    a, b = pair(2, size=300)
    a["layers.0.weight"][:7] = 0
    b["layers.1.weight"][:5] = 0
    calls: list[tuple[int, int]] = []
    counts = figures.joint_counts(compare(a, b), a, b, lambda done, work: calls.append((done, work)))
    assert int(counts.sum()) == 600 - 12
    assert calls[-1] == (600, 600)
    x, y = (torch.cat([side[name] for name in a]) for side in (a, b))
    both = (x > 0) & (y > 0)
    edges = torch.tensor(LOG10_EDGES, dtype=torch.float64)
    slow = torch.histogramdd(torch.stack([x[both], y[both]], 1).double().log10(), [edges, edges]).hist
    assert float((counts - slow).abs().sum()) / 2 < 0.1 * 588  # but for values within 2⁻⁷ of an edge


def test_the_range_shown_leaves_out_one_in_a_thousand_at_the_bottom() -> None:
    counts = [0] * 850
    counts[100], counts[300], counts[500] = 1, 998, 1
    assert canvas.filled(counts) == (300, 500)
    counts[100] = 2
    assert canvas.filled(counts) == (100, 500)


def test_matplotlib_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    imp = Importance({"x": torch.rand(3)})
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SquisherError, match=r"pip install 'torch-squisher\[plots\]'"):
        plot_importance(imp, examine(imp), tmp_path / "x.png")


def test_where_a_figure_cannot_go(tmp_path: Path) -> None:
    imp = Importance({"x": torch.rand(3)})
    health = examine(imp)
    with pytest.raises(SquisherError, match=r"\.png files, not as 'x\.pdf'"):
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

    monkeypatch.setattr(one, "_draw_depth", broken)
    with pytest.raises(RuntimeError, match="broken"):
        plot_importance(imp, health, tmp_path / "x.png")
    assert not list(tmp_path.iterdir())
