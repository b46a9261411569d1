"""Weights in torch files, as an application reads them: each tensor its own values, or an error, never another's."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path

import pytest
import torch

import squisher
from squisher.errors import FileError, SquisherWarning
from squisher.storage.folders import open_model, write_model
from squisher.storage.tensors import CHUNK, LazyTensors, chunks_of, tied_names
from squisher.storage.torch_files import read

SIZES = [1, 7, CHUNK]


def rand(seed: int, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


class _ThroughNumpy:
    """Pickled as a tensor of an accelerator is: through a numpy array."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self):
        return torch._utils._rebuild_device_tensor_from_numpy, (self.tensor.numpy(), torch.float32, "xla:0", False)


def same(found, expected: dict[str, torch.Tensor]) -> bool:
    return all(
        torch.equal(torch.cat(list(chunks_of(found, n, k))).view(t.shape), t)
        for n, t in expected.items()
        for k in SIZES
    )


@pytest.mark.parametrize("legacy", [False, True])
def test_a_matrix_and_its_transpose_share_bytes_and_are_not_tied(tmp_path, legacy):
    square, other = rand(0, 6, 6), rand(1, 6, 6)
    states = [
        {"a": square, "tied": square, "b": square.t(), "c": rand(2, 3)},
        {"a": other, "tied": other, "b": other.t() + 1, "c": rand(3, 3)},
    ]
    for k, state in enumerate(states):
        torch.save(state, tmp_path / f"{k}.bin", _use_new_zipfile_serialization=not legacy)
    models = [open_model(tmp_path / f"{k}.bin").weights for k in range(2)]
    assert tied_names(models[0]) == {"tied": "a"}
    assert all(same(model, state) for model, state in zip(models, states, strict=True))
    merged = squisher.merge.average(models)
    for name in states[0]:
        torch.testing.assert_close(merged[name], (states[0][name] + states[1][name]) / 2)


def test_the_same_bytes_as_another_type_are_not_tied():
    whole = torch.arange(6, dtype=torch.int32)
    assert tied_names({"a": whole, "b": whole.view(torch.float32), "c": whole.view(6)}) == {"c": "a"}


@pytest.mark.parametrize("container", ["numpy", "pickle"])
def test_tensors_inside_a_pickle_are_tied_only_if_they_are_one(tmp_path, container):
    made = _ThroughNumpy if container == "numpy" else (lambda tensor: tensor)
    state = {"a": rand(0, 4, 4), "b": rand(1, 4, 4)}
    held = {name: made(tensor) for name, tensor in state.items()}
    (tmp_path / "m.bin").write_bytes(pickle.dumps({**held, "tied": held["a"]}))
    model = open_model(tmp_path / "m.bin").weights
    assert tied_names(model) == {"tied": "a"}
    assert same(model, {**state, "tied": state["a"]})


def _flip(path: Path, entry: str) -> None:
    with zipfile.ZipFile(path) as archive:
        info = next(info for info in archive.infolist() if info.filename.endswith(entry))
        start = archive.open(info)._orig_compress_start  # type: ignore[attr-defined]
    data = bytearray(path.read_bytes())
    data[start + info.file_size - 3] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("entry", ["data/0", "data/1"])
@pytest.mark.parametrize("kind", ["whole", "transposed", "rows of a larger one"])
def test_no_damaged_tensor_is_merged_also_not_the_last(tmp_path, entry, kind):
    def tensor(seed: int) -> torch.Tensor:
        whole = rand(seed, 20, 20)
        return {"whole": whole, "transposed": whole.t(), "rows of a larger one": whole[3:9]}[kind]

    for k in range(2):
        torch.save({"a": tensor(k), "b": tensor(9 + k)}, tmp_path / f"{k}.bin")
    _flip(tmp_path / "1.bin", entry)
    merged = squisher.merge.average([open_model(tmp_path / f"{k}.bin").weights for k in range(2)])
    with pytest.raises(FileError, match="checksum"):
        write_model(tmp_path / "out", merged)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", [1, 7, CHUNK])
def test_a_damaged_tensor_never_gives_its_last_chunk(tmp_path, size):
    torch.save({"a": rand(0, 10, 5), "b": rand(1, 10, 5)}, tmp_path / "m.bin")
    _flip(tmp_path / "m.bin", "data/1")
    taken = 0
    with pytest.raises(FileError, match="checksum"):
        for chunk in LazyTensors(read(tmp_path / "m.bin")).chunks("b", size):
            taken += chunk.numel()
    assert taken < 50


def test_the_index_says_which_shard_a_value_is_from(tmp_path):
    torch.save({"a": torch.zeros(2), "b": torch.zeros(2)}, tmp_path / "pytorch_model-1.bin")
    torch.save({"a": torch.ones(2), "c": torch.ones(2), "left": torch.ones(2)}, tmp_path / "pytorch_model-2.bin")
    index = {"a": "pytorch_model-1.bin", "b": "pytorch_model-1.bin", "c": "pytorch_model-2.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.warns(SquisherWarning, match="'left'"):
        model = open_model(tmp_path).weights
    assert {name: model[name][0].item() for name in model} == {"a": 0.0, "b": 0.0, "c": 1.0}


def test_one_tensor_is_a_model_if_it_has_a_name(tmp_path):
    torch.save({"model": {"weight": torch.ones(2)}, "epoch": 3}, tmp_path / "named.pt")
    assert list(open_model(tmp_path / "named.pt").weights) == ["weight"]
    torch.save(torch.ones(2), tmp_path / "bare.pt")
    with pytest.raises(FileError, match="without a name"):
        open_model(tmp_path / "bare.pt")


@pytest.mark.parametrize("shard_bytes", [10**9, 8])
@pytest.mark.parametrize("kind", ["importance", "mask", "patch"])
def test_a_file_of_ours_is_no_model(tmp_path, kind, shard_bytes):
    """Merged or pruned as weights, an importance gave a model of squared gradients without a word."""
    one = {"a": torch.ones(2, 2), "b": torch.ones(2, 2)}
    path = tmp_path / "ours.safetensors"
    if kind == "importance":
        squisher.Importance(one).save(path, shard_bytes=shard_bytes)
    elif kind == "mask":
        squisher.mask.top_k(one, 0.5).save(path)
    else:
        squisher.patch.make(one, {"a": torch.zeros(2, 2), "b": one["b"]}, path)
    for name in (path, tmp_path / "ours.safetensors.index.json"):
        if name.exists():
            with pytest.raises(FileError, match="importance.*mask.*patch.*not the weights of a model"):
                open_model(name)


def test_of_several_models_in_a_file_none_is_taken_without_a_word(tmp_path):
    one, other = ({"weight": torch.full((2,), x), "bias": torch.zeros(1)} for x in (1.0, 2.0))
    torch.save({"ema": other, "model": one, "best": {"loss": torch.ones(())}}, tmp_path / "average.pt")
    with pytest.warns(SquisherWarning, match="'model' is taken, 'ema' left out"):
        assert open_model(tmp_path / "average.pt").weights["weight"].tolist() == [1.0, 1.0]
    torch.save({"generator": one, "discriminator": other}, tmp_path / "pair.pt")
    with pytest.raises(FileError, match="'generator', 'discriminator'"):
        open_model(tmp_path / "pair.pt")


def test_a_pickled_module_has_what_its_state_dict_has(tmp_path):
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4), torch.nn.Sequential(torch.nn.Linear(4, 2))
    )
    model.register_buffer("kept", rand(0, 3))
    model.register_buffer("passing", rand(1, 3), persistent=False)
    torch.save(model, tmp_path / "model.pt")
    weights = open_model(tmp_path / "model.pt").weights
    assert list(weights) == list(model.state_dict())
    assert same(weights, model.state_dict())
