"""Model folders from Python, as the commands use them."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import squisher
from squisher.errors import SquisherError
from squisher.integrations.model_folders import open_importance, open_model, prune_folder, write_model
from tests.commands import run


@pytest.fixture
def model(tmp_path):
    torch.manual_seed(0)
    weights = {"a.weight": torch.randn(40, 30), "a.bias": torch.randn(40)}
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    squisher.Importance({name: torch.rand_like(t) for name, t in weights.items()}).save(folder)
    return folder


def test_open_change_write(model, tmp_path):
    opened = open_model(model)
    importance = open_importance(model)
    assert set(importance) == set(opened.weights)
    halved = {name: tensor / 2 for name, tensor in opened.weights.items()}
    write_model(tmp_path / "half", halved, like=opened.path)
    assert (tmp_path / "half" / "config.json").exists()
    assert torch.equal(load_file(tmp_path / "half" / "model.safetensors")["a.bias"], halved["a.bias"])


def test_pruning_gives_what_the_command_gives(model, tmp_path):
    done = prune_folder(model, tmp_path / "python", sparsity=0.5)
    assert run("prune", model, "--sparsity", "0.5", "--out", tmp_path / "command").returncode == 0
    for name in ("model.safetensors", "README.md", "config.json"):
        assert (tmp_path / "python" / name).read_bytes() == (tmp_path / "command" / name).read_bytes()
    assert (done.zeros, done.total) == (620, 1240)
    other = open_importance(model / "squisher.safetensors") * 2.0
    told = []
    again = prune_folder(model, tmp_path / "again", other, sparsity=0.5, progress=lambda what, k, n: told.append(what))
    assert again.counts == done.counts
    assert {"ranking", "counting", "writing"} <= set(told)


def test_a_model_without_an_importance(model, tmp_path):
    (model / "squisher.safetensors").unlink()
    with pytest.raises(SquisherError, match="no optimizer state"):
        open_importance(model)
    assert prune_folder(model, tmp_path / "out", sparsity=0.5, score="magnitude").zeros == 600  # weights alone


def test_how_sentences_are_pooled_comes_along(model, tmp_path):
    """Without these files sentence-transformers would pool in its own way, without a word."""
    files = {"modules.json": "[]", "sentence_bert_config.json": "{}", "1_Pooling/config.json": '{"a": 1}'}
    (model / "1_Pooling").mkdir()
    for name, text in files.items():
        (model / name).write_text(text)
    assert run("prune", model, "--sparsity", "0.5", "--out", tmp_path / "out").returncode == 0
    assert {name: (tmp_path / "out" / name).read_text() for name in files} == files


@pytest.mark.parametrize("command", ["prune", "unlearn", "patch"])
def test_an_adapter_stays_an_adapter(tmp_path, command):
    folder, out = tmp_path / "adapter", tmp_path / "out"
    folder.mkdir()
    tensors = {f"base_model.model.w.lora_{ab}.weight": torch.randn(4, 4) for ab in "AB"}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    importance = tmp_path / "importance.safetensors"
    squisher.Importance({name: t.square() for name, t in tensors.items()}, unit="example").save(importance)
    squisher.patch.make(tensors, {name: t + 1 for name, t in tensors.items()}, tmp_path / "patch.safetensors")
    arguments = {
        "prune": ["prune", folder, "--importance", importance, "--sparsity", "0.5"],
        "unlearn": ["unlearn", folder, "--importance", importance, "--forget", importance],
        "patch": ["patch", "apply", folder, tmp_path / "patch.safetensors"],
    }
    done = run(*arguments[command], "--out", out)
    assert done.returncode == 0, done.stderr
    assert {file.name for file in out.iterdir()} - {"README.md"} == {"adapter_model.safetensors", "adapter_config.json"}
