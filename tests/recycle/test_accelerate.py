from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import squisher
from squisher.errors import FileError, NamingError
from squisher.recycle.formats.accelerate import is_accelerate_folder

FIXTURES = Path(__file__).parents[1] / "fixtures" / "accelerate"


@pytest.fixture
def ordered(tmp_path):
    return Path(shutil.copytree(FIXTURES / "ordered", tmp_path / "ordered"))


@pytest.fixture
def by_name(tmp_path):
    return Path(shutil.copytree(FIXTURES / "sorted", tmp_path / "sorted"))


def same(imp, *references):
    truth = {name: t for file in references for name, t in load_file(file).items()}
    assert set(imp) == set(truth)
    assert all(torch.equal(imp[name], value) for name, value in truth.items())


def test_two_models_and_two_optimizers(ordered):
    imp = squisher.extract(ordered, bias_correction=False)
    same(imp, *sorted(ordered.glob("reference_*")))
    assert imp.provenance.steps == {"min": 3, "max": 3}
    assert "the order of pytorch_model.bin" in str(imp.provenance.naming)
    assert "the order of pytorch_model_1.bin" in str(imp.provenance.naming)


def test_one_of_several_optimizers(ordered):
    same(squisher.extract(ordered, bias_correction=False, optimizer=1), ordered / "reference_1.safetensors")


def test_two_models_that_fit_one_optimizer_are_refused(ordered):
    shutil.copy(ordered / "optimizer.bin", ordered / "optimizer_1.bin")
    weights = torch.load(ordered / "pytorch_model.bin", weights_only=True)
    torch.save({f"twin.{name}": t for name, t in weights.items()}, ordered / "pytorch_model_1.bin")
    with pytest.raises(NamingError, match="parameter 0 .*'0.weight'.*'twin.0.weight'"):
        squisher.extract(ordered)


def test_sorted_weights_name_what_no_other_shape_could_be(by_name):
    for second in by_name.glob("*_1.*"):
        second.unlink()
    imp = squisher.extract(by_name, bias_correction=False)
    same(imp, by_name / "reference_0.safetensors")
    assert "in which every shape occurs once" in str(imp.provenance.naming)


def test_sorted_weights_with_shapes_that_repeat_are_refused(by_name):
    with pytest.raises(NamingError, match=r"optimizer_1\.bin.*--model.*torch\.save"):
        squisher.extract(by_name)


def second_model():
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 2))
    return nn.ModuleDict({"critic": model})


def test_a_model_settles_it(by_name, tmp_path):
    torch.save(second_model().state_dict(), tmp_path / "model.pt")
    for model in (tmp_path / "model.pt", second_model()):
        imp = squisher.extract(by_name, model, bias_correction=False, optimizer=1)
        same(imp, by_name / "reference_1.safetensors")


def test_a_sorted_model_cannot_settle_it(by_name, tmp_path):
    save_file(second_model().state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(NamingError, match="sorted by name"):
        squisher.extract(by_name, tmp_path / "model.safetensors", optimizer=1)


def test_a_gap_in_the_numbers_is_refused(ordered):
    (ordered / "optimizer_1.bin").rename(ordered / "optimizer_2.bin")
    with pytest.raises(FileError, match="missing"):
        squisher.extract(ordered)


def test_folders_of_fsdp_are_not_claimed(ordered):
    assert is_accelerate_folder(ordered)
    (ordered / "pytorch_model_fsdp_0").mkdir()
    assert not is_accelerate_folder(ordered)


@pytest.mark.formats
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("safe", [True, False])
def test_a_fresh_folder(tmp_path, safe):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8))
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), weight_decay=0.0))
    for _ in range(2):
        accelerator.backward(model(torch.randn(4, 6)).square().sum())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(str(tmp_path / "state"), safe_serialization=safe)
    if safe:
        with pytest.raises(NamingError, match="by name"):
            squisher.extract(tmp_path / "state")
    imp = squisher.extract(tmp_path / "state", plain if safe else None, bias_correction=False)
    live = {name: optimizer.optimizer.state[p]["exp_avg_sq"] for name, p in plain.named_parameters()}
    assert set(imp) == set(live)
    assert all(torch.equal(imp[name], live[name]) for name in live)


def test_the_optimizer_file_of_a_folder_means_the_folder(ordered):
    with pytest.raises(NamingError):  # one of two optimizers
        squisher.extract(ordered / "optimizer.bin")
    (ordered / "optimizer_1.bin").unlink()
    same(squisher.extract(ordered / "optimizer.bin", bias_correction=False), ordered / "reference_0.safetensors")
