"""The demo: what a newcomer runs first, and runs again."""

from __future__ import annotations

import pytest

from experiments import demo


def test_demo_runs_the_papers_six_settings():
    assert demo.small_settings() == ["merging", "ubgm", "pruning", "fish", "embedding", "ewc"]


def test_demo_runs_a_second_time_into_the_same_folder(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "EPOCHS", 1)
    demo.recycle(tmp_path)
    before = (tmp_path / "squisher.safetensors").read_bytes()
    demo.recycle(tmp_path)
    assert (tmp_path / "squisher.safetensors").read_bytes() == before
    assert (tmp_path / "report.html").exists()
