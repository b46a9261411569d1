"""A measurement that is interrupted, and goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import squisher
from squisher import SquisherError
from squisher.errors import FileError
from squisher.measure import unfinished
from squisher.storage import safetensors


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def data(batches: int = 6, size: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator))
        for _ in range(batches)
    ]


class Stopped(Exception):  # noqa: N818
    pass


def stopping(batches: list[Any], after: int, how: Any = Stopped) -> Iterator[Any]:
    for number, batch in enumerate(batches):
        if number == after:
            raise how
        yield batch


@pytest.mark.parametrize("settings", [{}, {"labels": "sampled", "seed": 3}, {"per": "batch"}, {"method": "loop"}])
def test_going_on_gives_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr(unfinished, "SECONDS", 0.0)
    path, model = tmp_path / "f.unfinished.safetensors", network()
    whole = squisher.fisher(model, data(), **settings)
    with pytest.raises(Stopped):
        squisher.fisher(model, stopping(data(), 3), unfinished=path, **settings)
    assert path.is_file()
    seen: list[int] = []
    found = squisher.fisher(model, data(), unfinished=path, progress=lambda done, _: seen.append(done), **settings)
    assert seen == [16, 20, 24]
    assert found.provenance.to_dict() == whole.provenance.to_dict()
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    again = squisher.fisher(model, data(), unfinished=path, **settings)  # all of it was kept
    assert all(torch.equal(again[name], whole[name]) for name in whole)
    assert again.provenance.to_dict() == whole.provenance.to_dict()


def test_ctrl_c_keeps_the_batch_that_was_being_measured(tmp_path: Path) -> None:
    path, model = tmp_path / "f.unfinished.safetensors", network()
    whole = squisher.fisher(model, data())

    def interrupted() -> Iterator[Any]:
        for number, batch in enumerate(data()):
            if number == 2:
                os.kill(os.getpid(), signal.SIGINT)
            yield batch

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        squisher.fisher(model, interrupted(), unfinished=path)
    assert signal.getsignal(signal.SIGINT) is before
    seen: list[int] = []
    found = squisher.fisher(model, data(), unfinished=path, progress=lambda done, _: seen.append(done))
    assert seen == [16, 20, 24]
    assert all(torch.equal(found[name], whole[name]) for name in whole)


@pytest.mark.parametrize("how", [KeyboardInterrupt, OSError])
def test_data_that_fail_or_are_interrupted_keep_what_was_measured(tmp_path: Path, how: Any) -> None:
    path, model = tmp_path / "f.unfinished.safetensors", network()
    with pytest.raises(how):
        squisher.fisher(model, stopping(data(), 3, how), unfinished=path)
    seen: list[int] = []
    found = squisher.fisher(model, data(), unfinished=path, progress=lambda done, _: seen.append(done))
    assert seen == [16, 20, 24]
    whole = squisher.fisher(model, data())
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    kept = path.read_bytes()
    with pytest.raises(SquisherError, match="of other data"):
        squisher.fisher(model, data(7, 3), unfinished=path)
    with pytest.raises(Stopped):  # before anything new was measured
        squisher.fisher(model, stopping(data(), 2), unfinished=path)
    assert path.read_bytes() == kept


def test_a_batch_that_fails_half_way_is_not_kept(tmp_path: Path) -> None:
    path, model = tmp_path / "f.unfinished.safetensors", network()
    calls = 0

    def losses(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 10:
            raise Stopped
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    with pytest.raises(Stopped):
        squisher.fisher(model, data(), likelihood=losses, method="loop", unfinished=path)
    assert not path.exists()


def test_a_name_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    for name, words in (("name", "does not end in .safetensors"), ("no/where.safetensors", "no folder")):
        with pytest.raises(SquisherError, match=words):
            squisher.fisher(network(), stopping(data(), 0, AssertionError), unfinished=tmp_path / name)


def test_other_settings_models_and_data_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unfinished, "SECONDS", 0.0)
    path, model = tmp_path / "f.unfinished.safetensors", network()
    with pytest.raises(Stopped):
        squisher.fisher(model, stopping(data(), 3), unfinished=path)
    with pytest.raises(SquisherError, match="settings.*labels: data.*sampled"):
        squisher.fisher(model, data(), labels="sampled", unfinished=path)
    with pytest.raises(SquisherError, match="other data"):
        squisher.fisher(model, data(size=3), unfinished=path)
    with pytest.raises(SquisherError, match="other data"):
        squisher.fisher(model, data()[1:], unfinished=path)
    with pytest.raises(SquisherError, match="other data"):
        squisher.fisher(model, data(2), unfinished=path)
    other = network()
    with torch.no_grad():
        other[0].weight[0, 0] += 1
    with pytest.raises(SquisherError, match="other settings .model"):
        squisher.fisher(other, data(), unfinished=path)
    with pytest.raises(SquisherError, match="standard_error"):
        squisher.fisher(model, data(), unfinished=path, standard_error=True)


def test_without_an_accident_nothing_is_written_for_a_minute(tmp_path: Path) -> None:
    squisher.fisher(network(), data(), unfinished=tmp_path / "f.unfinished.safetensors")
    assert not list(tmp_path.iterdir())


def test_sums_of_another_process_are_not_taken_for_those_that_were_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unfinished, "SECONDS", 0.0)
    path, later, model = tmp_path / "f.unfinished.safetensors", tmp_path / "later.safetensors", network()
    for place, batches in ((path, 2), (later, 4)):
        with pytest.raises(Stopped):
            squisher.fisher(model, stopping(data(), batches), unfinished=place)
    look = unfinished.Unfinished._open

    def replaced_after(self: unfinished.Unfinished) -> None:
        look(self)
        os.replace(later, path)

    monkeypatch.setattr(unfinished.Unfinished, "_open", replaced_after)
    with pytest.raises(SquisherError, match="changed"):
        squisher.fisher(model, data(), unfinished=path)


@pytest.mark.parametrize("what", ["an importance", "weights", "a part of it", "no sums", "other sums", "broken"])
def test_a_file_of_something_else_is_said_to_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(unfinished, "SECONDS", 0.0)
    path, model = tmp_path / "f.unfinished.safetensors", network()
    with pytest.raises(Stopped):
        squisher.fisher(model, stopping(data(), 3), unfinished=path)
    sums, metadata = safetensors.open_archive(path)
    sums, state = dict(sums), dict(metadata or {})
    if what == "an importance":
        squisher.fisher(model, data()).save(path)
    elif what == "broken":
        path.write_bytes(b"not a file of ours")
    else:
        sums = {"no sums": {}, "other sums": {name: t[:1] for name, t in sums.items()}}.get(what, sums)
        if what == "a part of it":
            del state["unfinished"]["reached"]
        safetensors.save(path, sums, None if what == "weights" else state)
    before = path.read_bytes()
    with pytest.raises(FileError, match=path.name):
        squisher.fisher(model, data(), unfinished=path)
    assert path.read_bytes() == before
