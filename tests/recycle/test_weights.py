from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from squisher.errors import FileError, NamingError, SquisherWarning
from squisher.recycle.formats.model_source import pinned
from squisher.recycle.states import Entry, OptimizerState
from squisher.storage.folders import open_weights

TENSORS = {"b": torch.zeros(2, 3), "a": torch.zeros(4), "c": torch.zeros(1, 2)}


def test_only_torch_files_keep_the_order(tmp_path):
    torch.save(TENSORS, tmp_path / "pytorch_model.bin")
    found = open_weights(tmp_path)
    assert (found.label, list(found.tensors), found.in_module_order) == ("pytorch_model.bin", ["b", "a", "c"], True)
    save_file(TENSORS, tmp_path / "model.safetensors")
    found = open_weights(tmp_path)
    assert (found.label, found.in_module_order) == ("model.safetensors", False)
    assert found.has("b", (2, 3))
    assert not found.has("b", (3, 2))
    assert not found.has("d", (2, 3))


def test_an_adapter_comes_before_the_model(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    save_file(TENSORS, tmp_path / "adapter_model.safetensors")
    assert open_weights(tmp_path).label == "adapter_model.safetensors"


def test_a_folder_without_weights(tmp_path):
    assert open_weights(tmp_path) is None


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "../x.bin"}}, "outside its own folder"),
        ({"weight_map": {"a": ".."}}, "outside its own folder"),
        ({"weight_map": {"a": "gone.bin"}}, "which is missing"),
        ({"weight_map": {"a": 3}}, "no weight_map"),
        ({}, "no weight_map"),
        ([], "no weight_map"),
    ],
)
def test_a_bad_index_is_refused(tmp_path, index, message):
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(FileError, match=message):
        open_weights(tmp_path)


def test_an_index_and_its_shards_name_the_same_tensors(tmp_path):
    torch.save({"a": torch.zeros(2), "b": torch.zeros(2)}, tmp_path / "x.bin")
    save_file({"a": torch.zeros(2), "b": torch.zeros(2)}, tmp_path / "x.safetensors")
    for name in ("pytorch_model.bin", "model.safetensors"):
        shard = "x" + Path(name).suffix
        index = tmp_path / f"{name}.index.json"
        index.write_text(json.dumps({"weight_map": {"a": shard, "gone": shard}}))
        with pytest.raises(NamingError, match="promises 'gone'"):
            open_weights(index)
    index.write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.warns(SquisherWarning, match="1 tensors.*shards.*'b'"):
        assert set(open_weights(index).tensors) == {"a"}


def test_a_torch_file_without_weights_is_refused(tmp_path):
    torch.save({"epoch": 3}, tmp_path / "x.pt")
    with pytest.raises(FileError, match="holds no weights"):
        open_weights(tmp_path / "x.pt")


def state(*shapes):
    return OptimizerState([Entry({"exp_avg_sq": torch.zeros(s)} if s else {}, {}) for s in shapes])


def test_shapes_that_occur_once_say_what_an_entry_is(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    weights = [open_weights(tmp_path)]
    ((_, order),) = pinned(state((4,), (1, 2), (2, 3)), weights)
    assert [c.name for c in order] == ["a", "c", "b"]
    assert pinned(state((4,), (4,)), weights) == []
    assert pinned(state((4,), None), weights) == []
    assert pinned(state((9,)), weights) == []
    save_file({**TENSORS, "d": torch.zeros(4)}, tmp_path / "model.safetensors")
    assert pinned(state((4,)), [open_weights(tmp_path)]) == []
