"""Trainer folders from fixtures; transformers is stood in for by a module with the same names, so none of it is needed."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import squisher
from squisher.errors import FileError, NamingError, SquisherError
from squisher.names import adapter_file_name
from squisher.recycle.formats import model_source, trainer

FIXTURES = Path(__file__).parents[1] / "fixtures" / "trainer"
BIN = FIXTURES / "bert_pytorch_model.bin"


def stand_in(shapes, device="meta"):
    """A module with parameters of these names and shapes, in this order; norms are torch's own."""
    root = nn.Module()
    for name, shape in shapes.items():
        node = root
        *path, last = name.split(".")
        for part in path:
            if part not in dict(node.named_children()):
                node.add_module(part, nn.LayerNorm(1) if part == "LayerNorm" else nn.Module())
            node = getattr(node, part)
        node.register_parameter(last, nn.Parameter(torch.zeros(shape, device=device)))
    return root


@pytest.fixture
def bert(tmp_path, monkeypatch):
    """A copy of the BERT folder, and a transformers that builds its model."""
    folder = tmp_path / "checkpoint-3"
    shutil.copytree(FIXTURES / "bert", folder)
    order = {name: tuple(t.shape) for name, t in torch.load(BIN, weights_only=True).items()}
    monkeypatch.setattr(model_source, "meta_model", lambda _: stand_in(order))
    monkeypatch.setattr(model_source, "built_by", lambda _: "")
    return folder


def same(imp, reference, rename=lambda name: name):
    truth = {rename(name): t for name, t in load_file(reference).items()}
    assert set(imp) == set(truth)
    for name, value in truth.items():
        assert torch.equal(imp[name], value), name


def test_a_folder_with_config_and_sorted_weights(bert):
    imp = squisher.extract(bert, bias_correction=False)
    same(imp, bert / "reference.safetensors")
    p = imp.provenance
    assert str(p.naming) == (
        "convention: the model of config.json, registration order inside each of 2 groups, the only division that fits"
    )
    assert p.steps == {"min": 3, "max": 3}
    assert (p.batch_size, p.loss_reduction) == (4, None)  # two batches a step, which BERT's loss does not average
    assert p.optimizer["beta2"] == 0.999
    assert p.after_clipping is True
    clipped, summed = p.pollution
    assert (clipped.code, clipped.numbers) == ("clipping", {"norm": 1.0})
    assert (summed.code, summed.numbers) == ("added_batches", {"batches": 2})
    with pytest.raises(squisher.SquisherError, match="loss_reduction"):
        squisher.extract(bert).as_fisher()
    assert squisher.extract(bert, loss_reduction="mean").as_fisher().provenance.scale == 4
    with pytest.warns(squisher.SquisherWarning, match="batch size of 4, but 7"):
        assert squisher.extract(bert, batch_size=7).provenance.batch_size == 7
    assert squisher.extract(bert, batch_size=4).provenance.batch_size == 4  # warnings are errors in tests


def test_weights_in_module_order_need_no_transformers(bert, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SquisherError, match=r"takes transformers.*pip install 'torch-squisher\[hf\]'"):
        squisher.extract(bert)
    (bert / "model.safetensors").unlink()
    shutil.copy(BIN, bert / "pytorch_model.bin")
    imp = squisher.extract(bert, bias_correction=False)
    same(imp, bert / "reference.safetensors")
    assert str(imp.provenance.naming).startswith("convention: the order of pytorch_model.bin")


def test_sharded_torch_weights_keep_their_order_too(bert, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "transformers", None)
    (bert / "model.safetensors").unlink()
    weights = torch.load(BIN, weights_only=True)
    names = list(weights)
    weight_map = {}
    for k, part in enumerate((names[:9], names[9:]), 1):
        shard = f"pytorch_model-0000{k}-of-00002.bin"
        torch.save({n: weights[n] for n in part}, bert / shard)
        weight_map.update(dict.fromkeys(sorted(part), shard))
    (bert / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    same(squisher.extract(bert, bias_correction=False), bert / "reference.safetensors")
    (bert / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(FileError, match="missing.*whole set"):
        squisher.extract(bert)


def test_names_or_a_live_model_need_no_transformers(bert, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "transformers", None)
    order = {name: tuple(t.shape) for name, t in torch.load(BIN, weights_only=True).items()}
    by_model = squisher.extract(bert, stand_in(order), bias_correction=False)
    same(by_model, bert / "reference.safetensors")
    by_file = squisher.extract(bert, BIN, bias_correction=False)
    same(by_file, bert / "reference.safetensors")
    names = [n for n in order if torch.Size(order[n]).numel() and len(order[n]) > 1]
    names += [n for n in order if n not in names]
    same(squisher.extract(bert, names=names, bias_correction=False), bert / "reference.safetensors")


def test_model_and_weights_must_belong_together(bert):
    weights = load_file(bert / "model.safetensors")
    weights["classifier.weight"] = torch.zeros(4, 8)
    save_file(weights, bert / "model.safetensors")
    with pytest.raises(NamingError, match=r"'classifier.weight'.*\(3, 8\).*\(4, 8\)"):
        squisher.extract(bert)
    del weights["classifier.weight"]
    save_file(weights, bert / "model.safetensors")
    with pytest.raises(NamingError, match="model.safetensors.*belong together"):
        squisher.extract(bert)


def test_a_state_of_another_model_is_refused(bert):
    state = torch.load(bert / "optimizer.pt", weights_only=True)
    state["state"][0]["exp_avg_sq"] = torch.zeros(17, 8)
    torch.save(state, bert / "optimizer.pt")
    with pytest.raises(NamingError, match="no known convention"):
        squisher.extract(bert)


def test_an_optimizer_of_another_step_is_noted(bert):
    state = json.loads((bert / "trainer_state.json").read_text())
    (bert / "trainer_state.json").write_text(json.dumps({**state, "global_step": 9}))
    imp = squisher.extract(bert)
    said = imp.provenance.pollution[-1]
    assert (said.code, said.numbers) == ("steps_disagree", {"optimizer": 3, "trainer": 9})
    assert imp.provenance.steps == {"min": 3, "max": 3}


# -- frozen parameters ----------------------------------------------------------------------------------------------------


def freeze(folder, trained):
    """Rewrites a folder as if only these parameters had been trained, and gives what stays in the optimizer."""
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    order = list(torch.load(BIN, weights_only=True))
    wide = [n for n in order if state_shape(n) > 1]
    names = wide + [n for n in order if n not in wide]
    groups, kept, number = [], {}, 0
    for group, part in zip(state["param_groups"], (names[: len(wide)], names[len(wide) :]), strict=True):
        chosen = [n for n in part if trained(n)]
        groups.append({**group, "params": list(range(number, number + len(chosen)))})
        kept.update({number + k: state["state"][names.index(n)] for k, n in enumerate(chosen)})
        number += len(chosen)
    torch.save({"state": kept, "param_groups": groups}, folder / "optimizer.pt")
    truth = {n: t for n, t in load_file(folder / "reference.safetensors").items() if trained(n)}
    save_file(truth, folder / "reference.safetensors")


def state_shape(name):
    return torch.load(BIN, weights_only=True)[name].ndim


def trained(name):
    return "attention.self.key" in name or "classifier" in name


def other_weights(folder, target, changed):
    weights = load_file(folder / "model.safetensors")
    target.mkdir(exist_ok=True)
    save_file({n: t + 1 if changed(n) else t for n, t in weights.items()}, target / "model.safetensors")
    return target


def test_what_was_frozen_is_asked_for(bert):
    freeze(bert, trained)
    with pytest.raises(
        NamingError,
        match="--trainable.*--base-model",
    ):
        squisher.extract(bert)


def test_frozen_parameters_by_name(bert):
    freeze(bert, trained)
    imp = squisher.extract(bert, bias_correction=False, trainable=r"self\.key|classifier")
    same(imp, bert / "reference.safetensors")
    assert "frozen" in imp.provenance.absent["bert.pooler.dense.weight"].note


def test_frozen_parameters_by_the_base_model(bert, tmp_path):
    freeze(bert, trained)
    base = other_weights(bert, tmp_path / "base", trained)
    imp = squisher.extract(bert, bias_correction=False, base_model=base)
    same(imp, bert / "reference.safetensors")
    assert "trained where the weights differ from the base model" in str(imp.provenance.naming)
    assert "bert.pooler.dense.weight" in imp.provenance.absent


def test_a_trained_parameter_that_did_not_move_comes_back(bert, tmp_path):
    freeze(bert, trained)
    base = other_weights(bert, tmp_path / "base", lambda n: trained(n) and n != "classifier.bias")
    same(squisher.extract(bert, bias_correction=False, base_model=base), bert / "reference.safetensors")


def test_a_bare_encoder_as_the_base_model(bert, tmp_path):
    freeze(bert, trained)
    base = other_weights(bert, tmp_path / "base", trained)
    weights = {
        n.removeprefix("bert."): t for n, t in load_file(base / "model.safetensors").items() if n.startswith("bert.")
    }
    save_file(weights, base / "model.safetensors")
    same(squisher.extract(bert, bias_correction=False, base_model=base), bert / "reference.safetensors")


def test_frozen_parameters_by_another_checkpoint_of_the_run(bert):
    freeze(bert, trained)
    other_weights(bert, bert.parent / "checkpoint-1", trained)
    imp = squisher.extract(bert, bias_correction=False)
    same(imp, bert / "reference.safetensors")
    assert "differ from checkpoint-1" in str(imp.provenance.naming)


def test_a_base_model_that_is_none_of_it_is_refused(bert, tmp_path):
    freeze(bert, trained)
    base = other_weights(bert, tmp_path / "base", lambda n: True)
    with pytest.raises(NamingError):
        squisher.extract(bert, base_model=base)
    with pytest.raises(FileError, match="no weights"):
        (tmp_path / "empty").mkdir()
        squisher.extract(bert, base_model=tmp_path / "empty")


# -- adapters -------------------------------------------------------------------------------------------------------------


def test_an_adapter_whose_shapes_tell_the_order():
    folder = FIXTURES / "llama_lora"
    imp = squisher.extract(folder, bias_correction=False)
    same(imp, folder / "reference.safetensors", adapter_file_name)
    assert (imp.provenance.loss_reduction, imp.provenance.unit) == ("token_mean", "token")
    assert str(imp.provenance.naming).startswith("convention: the names in adapter_model.safetensors")


def test_an_adapter_whose_shapes_do_not_tell_asks_for_the_base(tmp_path):
    folder = tmp_path / "lora"
    shutil.copytree(FIXTURES / "llama_lora", folder)
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    weights = load_file(folder / "adapter_model.safetensors")
    for entry in state["state"].values():  # as with as many key heads as query heads
        if entry["exp_avg_sq"].shape == (4, 2):
            entry["exp_avg_sq"] = torch.zeros(8, 2)
    save_file(
        {n: torch.zeros(8, 2) if "v_proj.lora_B" in n else t for n, t in weights.items()},
        folder / "adapter_model.safetensors",
    )
    torch.save(state, folder / "optimizer.pt")
    with pytest.raises(NamingError, match="--base-model.*config.json"):
        squisher.extract(folder)


def test_an_adapter_whose_shapes_do_not_tell_is_proven_by_an_earlier_checkpoint(tmp_path):
    torch.manual_seed(0)
    names = [
        f"base_model.model.layers.{k}.{m}.lora_{f}.weight" for k in range(3) for m in ("v_proj", "q_proj") for f in "AB"
    ]
    weights = {n: nn.Parameter(torch.randn(32, 64) if "lora_A" in n else torch.zeros(64, 32)) for n in names}
    pulls = {n: torch.randn_like(p) for n, p in weights.items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-2, weight_decay=0.0)
    for step in range(1, 21):
        for name, parameter in weights.items():
            parameter.grad = pulls[name] + torch.randn_like(parameter)
        optimizer.step()
        if step % 10 == 0:
            folder = tmp_path / f"checkpoint-{step}"
            folder.mkdir()
            save_file({n: p.data for n, p in weights.items()}, folder / "adapter_model.safetensors")
            shutil.copy(FIXTURES / "llama_lora" / "adapter_config.json", folder)
            torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    with pytest.raises(NamingError):
        squisher.extract(tmp_path / "checkpoint-10")
    imp = squisher.extract(tmp_path / "checkpoint-20", bias_correction=False)
    assert imp.provenance.naming.level == "proven"
    for name, parameter in weights.items():
        assert torch.equal(imp[name], optimizer.state[parameter]["exp_avg_sq"]), name


def test_an_adapter_without_its_weights_is_refused(tmp_path):
    folder = tmp_path / "lora"
    shutil.copytree(FIXTURES / "llama_lora", folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(FileError, match=r"no adapter_model\.safetensors"):
        squisher.extract(folder)


# -- which folders --------------------------------------------------------------------------------------------------------


def test_folders_of_fsdp_and_deepspeed_are_not_claimed(bert):
    assert trainer.is_trainer_folder(bert)
    for name in ("optimizer_0", "pytorch_model_fsdp_0", "global_step3"):
        (bert / name).mkdir()
        assert not trainer.is_trainer_folder(bert)
        (bert / name).rmdir()


def test_damaged_files_are_refused(bert):
    (bert / "trainer_state.json").write_text("{")
    with pytest.raises(FileError, match=r"trainer_state.json is not JSON"):
        squisher.extract(bert)
    (bert / "trainer_state.json").unlink()
    data = (bert / "optimizer.pt").read_bytes()
    (bert / "optimizer.pt").write_bytes(data[: len(data) // 2])
    with pytest.raises(FileError):
        squisher.extract(bert)


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "../..", "", None, 3, "owner/name"])
def test_a_base_model_that_is_not_on_this_disk(tmp_path, name):
    folder = tmp_path / "lora"
    shutil.copytree(FIXTURES / "llama_lora", folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": name}))
    same(squisher.extract(folder, bias_correction=False), folder / "reference.safetensors", adapter_file_name)


def test_a_sorted_file_without_a_config(tmp_path):
    """A Trainer that trained a module of the user's own writes no config."""
    layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(layers.parameters())
    layers(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    save_file(layers.state_dict(), tmp_path / "model.safetensors")
    imp = squisher.extract(tmp_path, bias_correction=False)
    assert torch.equal(imp["1.weight"], optimizer.state[layers[1].weight]["exp_avg_sq"])
    assert "every shape occurs once" in str(imp.provenance.naming)
    save_file({**layers.state_dict(), "more": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(NamingError, match="by name"):
        squisher.extract(tmp_path)


def test_the_optimizer_file_of_a_folder_means_the_folder(bert):
    same(squisher.extract(bert / "optimizer.pt", bias_correction=False), bert / "reference.safetensors")


def test_the_folder_above_says_which_checkpoint_to_give(bert):
    with pytest.raises(FileError, match="checkpoint-3"):
        squisher.extract(bert.parent)


def test_a_state_of_an_earlier_run_beside_the_other(bert):
    shutil.copy(bert / "optimizer.pt", bert / "optimizer.bin")  # as FSDP writes it into the same folder
    with pytest.raises(FileError, match=r"optimizer.pt and optimizer.bin.*earlier run"):
        squisher.extract(bert)


def test_an_empty_second_group_is_the_trainers_own(tmp_path):
    """Of adapters without biases or norms; a single group of vectors and matrices is an optimizer of the user's."""
    from squisher.recycle.formats.torch_file import optimizer_state
    from squisher.recycle.formats.trainer import _makes_its_own

    folder = tmp_path / "checkpoint-4"
    folder.mkdir()
    parameters = [torch.nn.Parameter(torch.ones(4, 3)), torch.nn.Parameter(torch.ones(4))]
    for groups, own in (([parameters], False), ([parameters, []], True), ([parameters[:1], parameters[1:]], True)):
        optimizer = torch.optim.AdamW([{"params": group} for group in groups])
        sum(p.square().sum() for p in parameters).backward()
        optimizer.step()
        assert _makes_its_own(folder, optimizer_state(optimizer.state_dict())) is own
