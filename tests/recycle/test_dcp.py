"""Distributed checkpoints: right values under right names from whatever layout, and a refusal of what is not whole."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from squisher.errors import FileError, NamingError, SquisherError
from squisher.importance import Importance
from squisher.recycle import extract
from squisher.storage.tensors import chunks_of

FIXTURES = Path(__file__).parents[1] / "fixtures"
SHARDED = ["fsdp2", "fsdp1_sharded", "tensor_parallel", "ddp_raw_ids"]


def check(imp: Importance, reference: Path) -> None:
    expected = load_file(reference)
    assert set(imp) == set(expected)
    for name, value in expected.items():
        assert torch.equal(imp[name], value), name
        assert torch.equal(torch.cat(list(chunks_of(imp, name, 4))), value.reshape(-1)), name


@pytest.fixture
def fsdp2(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / "dcp" / "fsdp2", tmp_path / "checkpoint"))


def rewrite(folder: Path, change: Any) -> None:
    """Changes the metadata of a checkpoint of our own."""
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("variant", SHARDED)
def test_values_names_and_steps(variant):
    imp = extract(FIXTURES / "dcp" / variant, bias_correction=False, in_order=True)
    check(imp, FIXTURES / "dcp" / variant / "reference.safetensors")
    assert imp.provenance.steps == {"min": 3, "max": 3}
    assert imp.provenance.optimizer["class"] == "AdamW"
    assert imp.provenance.dtype_of_source == "float32"


def test_recorded_names_and_the_settings_of_each_group():
    provenance = extract(FIXTURES / "dcp" / "fsdp2").provenance
    assert provenance.naming.level == "recorded"
    assert {name: why.reason for name, why in provenance.absent.items()} == {"unused.weight": "no_gradient"}
    by_name = {name: group for group in provenance.optimizer["groups"] for name in group["parameters"]}
    assert (by_name["blocks.0.weight"]["beta2"], by_name["blocks.0.weight"]["weight_decay"]) == (0.999, 0.01)
    assert (by_name["blocks.0.bias"]["beta2"], by_name["blocks.0.bias"]["weight_decay"]) == (0.99, 0.0)


def test_each_parameter_is_corrected_with_its_own_decay():
    corrected, stored = (extract(FIXTURES / "dcp" / "fsdp2", bias_correction=b) for b in (True, False))
    for name in stored:
        beta2 = 0.99 if name.endswith("bias") else 0.999
        torch.testing.assert_close(corrected[name], stored[name] / (1 - beta2**3))


def test_numbers_are_named_by_the_planner_not_by_the_shuffled_entries():
    folder = FIXTURES / "dcp" / "ddp_raw_ids"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    shuffled = [key for key in metadata.state_dict_metadata if key.startswith("model.")]
    planned = [key for key in metadata.planner_data if key.startswith("model.")]
    assert shuffled != planned  # otherwise this test could not fail
    imp = extract(folder, bias_correction=False, in_order=True)
    assert str(imp.provenance.naming).startswith("convention: the weights under 'model'")
    check(imp, folder / "reference.safetensors")


def test_columns_on_two_ranks_are_no_flat_ranges():
    metadata = pickle.loads((FIXTURES / "dcp" / "tensor_parallel" / ".metadata").read_bytes())
    chunks = metadata.state_dict_metadata["optimizer.state.blocks.1.weight.exp_avg_sq"].chunks
    assert [tuple(chunk.offsets) for chunk in chunks] == [(0, 0), (0, 2)]


# -- layouts, written here in one process ------------------------------------------------------------------------------


def trained(names: bool = False) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model.named_parameters() if names else model.parameters(), betas=(0.9, 0.99))
    for _ in range(2):
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def by_name(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What get_optimizer_state_dict gives: names instead of numbers."""
    names = [name for name, _ in model.named_parameters()]
    state = optimizer.state_dict()
    groups = [{**group, "params": [names[k] for k in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[k]: entry for k, entry in state["state"].items()}, "param_groups": groups}


def flattened(state: dict[str, Any]) -> dict[str, Any]:
    out = {f"state.{n}.{key}": value for n, entry in state["state"].items() for key, value in entry.items()}
    for group in state["param_groups"]:
        out |= {f"param_groups.{n}.{key}": v for n in group["params"] for key, v in group.items() if key != "params"}
    return out


def save(tree: dict[str, Any], folder: Path) -> Path:
    dcp.save(tree, checkpoint_id=folder, no_dist=True)
    return folder


def layouts(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    weights, state = model.state_dict(), by_name(model, optimizer)
    return {
        "app": {"app": {"model": weights, "optim": state}},
        "flattened": {"model": weights, "optimizer": flattened(state)},
        "flattened at the top": {**weights, **flattened(state)},
        "bare": state,
        "without weights": {"optimizer": state},
        "with a scheduler": {"model": weights, "optim": state, "lr_scheduler": {"best": torch.zeros(2)}},
        "torch >= 2.6 names": {"optimizer": trained(names=True)[1].state_dict()},
        "numbers": {"net": weights, "optimizer": optimizer.state_dict()},
    }


@pytest.mark.parametrize("layout", list(layouts(*trained())))
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_layouts(tmp_path, layout):
    model, optimizer = trained()
    imp = extract(save(layouts(model, optimizer)[layout], tmp_path / "c"), bias_correction=False, in_order=True)
    assert list(imp) == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        assert torch.equal(imp[name], optimizer.state[parameter]["exp_avg_sq"])
    assert imp.provenance.optimizer["beta2"] == 0.99
    assert imp.provenance.steps == {"min": 2, "max": 2}
    assert imp.provenance.absent == {}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_accelerate_keeps_weights_and_optimizer_in_two_folders(tmp_path):
    model, optimizer = trained()
    save({"model": {**model.state_dict(), "frozen": torch.zeros(2)}}, tmp_path / "pytorch_model_fsdp_0")
    save({"optimizer": by_name(model, optimizer)}, tmp_path / "optimizer_0")
    imp = extract(tmp_path)
    assert set(imp) == {name for name, _ in model.named_parameters()}
    assert list(imp.provenance.absent) == ["frozen"]
    assert set(extract(tmp_path / "optimizer_0")) == set(imp)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_tied_weights_are_told_by_their_values(tmp_path):
    model, optimizer = trained()
    weights = {**model.state_dict(), "head.weight": model[0].weight.detach().clone(), "frozen.weight": torch.ones(3, 3)}
    imp = extract(save({"model": weights, "optimizer": by_name(model, optimizer)}, tmp_path / "c"))
    assert imp.provenance.tied == {"head.weight": "0.weight"}
    assert list(imp.provenance.absent) == ["frozen.weight"]


def test_accelerate_full_state(tmp_path):
    model, optimizer = trained()
    torch.save(by_name(model, optimizer), tmp_path / "optimizer.bin")
    torch.save(model.state_dict(), tmp_path / "pytorch_model_fsdp.bin")
    imp = extract(tmp_path)
    assert imp.provenance.naming.level == "recorded"
    assert list(imp) == [name for name, _ in model.named_parameters()]


def test_accelerate_local_state_is_refused(tmp_path):
    torch.save(trained()[1].state_dict(), tmp_path / "optimizer_0_rank0.bin")
    with pytest.raises(FileError, match="FSDP.*flat shards"):
        extract(tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_without_planner_data_the_keys_are_enough(tmp_path):
    model, optimizer = trained()
    folder = save({"model": model.state_dict(), "optimizer": flattened(by_name(model, optimizer))}, tmp_path / "c")
    rewrite(folder, lambda metadata: setattr(metadata, "planner_data", None))
    assert list(extract(folder)) == [name for name, _ in model.named_parameters()]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("prefix", ["optimizer.", "app.optim.", ""])
def test_groups_in_one_entry_as_older_versions_wrote_them(tmp_path, prefix):
    model, optimizer = trained()
    state = by_name(model, optimizer)
    tree = {prefix + key: value for key, value in flattened(state).items() if key.startswith("state.")}
    tree[prefix + "param_groups"] = state["param_groups"]
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(tree, checkpoint_id=tmp_path / "c", no_dist=True, planner=planner)
    imp = extract(tmp_path / "c", bias_correction=False)
    assert list(imp) == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        assert torch.equal(imp[name], optimizer.state[parameter]["exp_avg_sq"])


def test_numbers_without_planner_data_are_not_named_by_the_shuffled_entries(tmp_path):
    folder = Path(shutil.copytree(FIXTURES / "dcp" / "ddp_raw_ids", tmp_path / "c"))
    rewrite(folder, lambda metadata: setattr(metadata, "planner_data", None))
    with pytest.raises(NamingError, match="records no names"):
        extract(folder)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_more_than_ten_groups_stay_in_order(tmp_path):
    parameters = {f"p{k}": torch.nn.Parameter(torch.full((k + 2,), float(k))) for k in range(12)}
    optimizer = torch.optim.AdamW(
        [{"params": [p], "betas": (0.9, 0.9 + k / 1000)} for k, p in enumerate(parameters.values())]
    )
    sum(k * p.sum() for k, p in enumerate(parameters.values())).backward()
    optimizer.step()
    tree = {"model": {name: p.detach() for name, p in parameters.items()}, "optimizer": optimizer.state_dict()}
    imp = extract(save(tree, tmp_path / "c"), bias_correction=False)
    for k, name in enumerate(parameters):
        torch.testing.assert_close(imp[name], torch.full((k + 2,), (1 - 0.9 - k / 1000) * k**2), atol=1e-6, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_names_of_adapters_are_those_of_the_adapter_file(tmp_path):
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([("base_model.model.q.lora_A.default.weight", parameter)])
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert list(extract(save({"optimizer": optimizer.state_dict()}, tmp_path / "c"))) == [
        "base_model.model.q.lora_A.weight"
    ]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_megatron_by_names(tmp_path):
    value = torch.rand(2, 3, 4)
    tree = {
        "decoder.layers.mlp.weight": torch.zeros(2, 3, 4),
        "optimizer.state.exp_avg_sq.decoder.layers.mlp.weight": value,
    }
    save(tree, tmp_path / "iter_0000007")
    group = {"betas": (0.9, 0.95), "step": 7, "eps": 1e-8, "weight_decay": 0.0, "params": []}
    torch.save(
        {"iteration": 7, "optimizer": {"optimizer": {"param_groups": [group]}}}, tmp_path / "iter_0000007" / "common.pt"
    )
    imp = extract(tmp_path / "iter_0000007")
    torch.testing.assert_close(imp["decoder.layers.mlp.weight"], value / (1 - 0.95**7))
    assert ["experimental" in one.note for one in imp.provenance.pollution] == [True]
    shutil.copytree(tmp_path / "iter_0000007", tmp_path / "iter_0000009")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    assert list(extract(tmp_path)) == list(imp)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_megatron_by_buckets_is_refused(tmp_path):
    key = (
        "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.bfloat16).bucket_idx_0.exp_avg_sq"
    )
    save({key: torch.zeros(4)}, tmp_path / "c")
    torch.save({"iteration": 7}, tmp_path / "c" / "common.pt")
    with pytest.raises(FileError, match="buckets"):
        extract(tmp_path / "c")


def test_a_missing_shard_is_named(fsdp2):
    (fsdp2 / "__1_0.distcp").unlink()
    with pytest.raises(FileError, match="__1_0.distcp.*'optimizer"):
        extract(fsdp2)


def test_a_shard_that_is_cut_short(fsdp2):
    shard = fsdp2 / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-2000])
    with pytest.raises(FileError, match="cut short or damaged"):
        extract(fsdp2)


def test_a_bit_that_flipped_is_noticed(fsdp2):
    wanted = load_file(fsdp2 / "reference.safetensors")["embed.weight"].reshape(-1)[:1].numpy().tobytes()
    content = bytearray((fsdp2 / "__0_0.distcp").read_bytes())
    content[content.index(wanted)] ^= 1
    (fsdp2 / "__0_0.distcp").write_bytes(content)
    imp = extract(fsdp2)
    with pytest.raises(FileError, match="damaged.*checksum"):
        list(chunks_of(imp, "embed.weight", 4))


def test_without_metadata_it_is_half_written(fsdp2):
    (fsdp2 / ".metadata").unlink()
    with pytest.raises(FileError, match=r"no \.metadata.*interrupted"):
        extract(fsdp2)


KEY = "optimizer.state.embed.weight.exp_avg_sq"


def test_a_hole(fsdp2):
    rewrite(fsdp2, lambda metadata: metadata.state_dict_metadata[KEY].chunks.pop())
    with pytest.raises(FileError, match=f"{KEY}'.*12.*21"):
        extract(fsdp2)


def test_an_overlap(fsdp2):
    def shift(metadata: Any) -> None:
        entry = metadata.state_dict_metadata[KEY]
        entry.chunks[1] = replace(entry.chunks[1], offsets=torch.Size([3, 0]), sizes=torch.Size([3, 3]))
        for index in [i for i in metadata.storage_data if i.fqn == KEY and tuple(i.offset) == (4, 0)]:
            metadata.storage_data[replace(index, offset=torch.Size([3, 0]))] = metadata.storage_data.pop(index)

    rewrite(fsdp2, shift)
    with pytest.raises(FileError, match="overlap"):
        extract(fsdp2)


def test_a_blob_of_another_shape(fsdp2):
    def swap(metadata: Any) -> None:
        places = metadata.storage_data
        one = next(i for i in places if i.fqn == KEY)
        other = next(i for i in places if i.fqn == "optimizer.state.blocks.0.bias.exp_avg_sq")
        places[one] = places[other]

    rewrite(fsdp2, swap)
    imp = extract(fsdp2)
    with pytest.raises(FileError, match=r"\(2,\).*\(4, 3\).*float32"):
        imp["embed.weight"]


@pytest.mark.parametrize("name", ["../secret.distcp", "/etc/passwd", "a/../../b"])
def test_paths_do_not_leave_the_folder(fsdp2, name):
    def point(metadata: Any) -> None:
        for index, info in list(metadata.storage_data.items()):
            metadata.storage_data[index] = replace(info, relative_path=name)

    rewrite(fsdp2, point)
    with pytest.raises(FileError, match="outside"):
        extract(fsdp2)


def test_compressed_shards(fsdp2):
    def describe(metadata: Any) -> None:
        for index, info in list(metadata.storage_data.items()):
            metadata.storage_data[index] = replace(info, transform_descriptors=["stream.zstd"])

    rewrite(fsdp2, describe)
    with pytest.raises(FileError, match="stream.zstd"):
        extract(fsdp2)


def test_shards_of_safetensors(fsdp2):
    def rename(metadata: Any) -> None:
        for index, info in list(metadata.storage_data.items()):
            metadata.storage_data[index] = replace(info, relative_path="shard-00001.safetensors")

    rewrite(fsdp2, rename)
    with pytest.raises(FileError, match="safetensors files.*shards"):
        extract(fsdp2)


def test_a_state_that_no_group_lists(fsdp2):
    def drop(metadata: Any) -> None:
        for key in [k for k in metadata.planner_data if k.startswith("optimizer.param_groups.1.")]:
            del metadata.planner_data[key], metadata.state_dict_metadata[key]

    rewrite(fsdp2, drop)
    with pytest.raises(FileError, match="'blocks.0.bias'.*group"):
        extract(fsdp2)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_weights_alone(tmp_path):
    with pytest.raises(FileError, match="without an optimizer state"):
        extract(save({"model": {"a": torch.zeros(2)}}, tmp_path / "c"))


def test_several_checkpoints(fsdp2):
    fsdp2.rename(fsdp2.parent / "step-10")
    shutil.copytree(fsdp2.parent / "step-10", fsdp2.parent / "step-20")
    with pytest.raises(FileError, match="step-10, step-20"):
        extract(fsdp2.parent)


@pytest.mark.parametrize("part", [".metadata", "__0_0.distcp"])
def test_a_part_is_not_the_checkpoint(fsdp2, part):
    with pytest.raises(FileError, match="distributed checkpoint.*folder"):
        extract(fsdp2 / part)


@pytest.mark.parametrize("content", [b"", b"\x80\x02}.", b"\x80\x04N.", b"garbage"])
def test_metadata_that_is_none(fsdp2, content):
    (fsdp2 / ".metadata").write_bytes(content)
    with pytest.raises(SquisherError):
        extract(fsdp2)


def test_bytes_changed_at_random_never_give_a_python_error(fsdp2):
    generator = torch.Generator().manual_seed(0)
    original = (fsdp2 / ".metadata").read_bytes()
    for _ in range(150):
        changed = bytearray(original)
        for _ in range(int(torch.randint(1, 4, (), generator=generator))):
            place = int(torch.randint(len(changed), (), generator=generator))
            changed[place] = int(torch.randint(256, (), generator=generator))
        (fsdp2 / ".metadata").write_bytes(changed)
        try:
            imp = extract(fsdp2, bias_correction=False)
            for name in imp:
                imp[name]
        except SquisherError:
            pass


def test_what_is_not_needed_is_not_read(fsdp2):
    metadata = pickle.loads((fsdp2 / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        if index.fqn.endswith(".exp_avg") or index.fqn.startswith("model."):
            with (fsdp2 / info.relative_path).open("r+b") as shard:
                shard.seek(info.offset)
                shard.write(b"\xff" * info.length)
    check(extract(fsdp2, bias_correction=False), fsdp2 / "reference.safetensors")


# -- files of one rank, and full ones ----------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["fsdp2_full", "zero_redundancy"])
def test_full_files(variant):
    folder = FIXTURES / "dcp" / variant
    check(extract(folder / "checkpoint.pt", bias_correction=False, in_order=True), folder / "reference.safetensors")


def test_the_share_of_one_fsdp2_rank_is_refused():
    with pytest.raises(FileError, match="one of 2 ranks.*DTensor"):
        extract(FIXTURES / "dcp" / "fsdp2_raw" / "rank0.pt")


def test_the_shares_of_all_fsdp2_ranks_are_joined():
    imp = extract(FIXTURES / "dcp" / "fsdp2_raw", bias_correction=False)
    check(imp, FIXTURES / "dcp" / "fsdp2" / "reference.safetensors")
    assert str(imp.provenance.naming).startswith("convention: the weights under 'model'")


def test_a_rank_that_is_missing_among_files(tmp_path):
    for old, new in ((0, 0), (1, 2)):
        shutil.copy(FIXTURES / "dcp" / "fsdp2_raw" / f"rank{old}.pt", tmp_path / f"rank{new}.pt")
    with pytest.raises(FileError, match="ranks 0, 2.* 2"):
        extract(tmp_path)


def test_a_rank_in_the_place_of_another(tmp_path):
    for new in (0, 1):
        shutil.copy(FIXTURES / "dcp" / "fsdp2_raw" / "rank0.pt", tmp_path / f"rank{new}.pt")
    with pytest.raises(FileError, match="rank 1 .*rank 0"):
        extract(tmp_path)


def test_flat_shards_of_fsdp1_are_refused_with_advice():
    with pytest.raises(NamingError, match="flat shards.*FSDP.optim_state_dict"):
        extract(FIXTURES / "dcp" / "fsdp1_raw" / "rank0.pt")


# -- fresh ones --------------------------------------------------------------------------------------------------------


@pytest.mark.formats
def test_two_processes(tmp_path):
    script = FIXTURES / "make_dcp.py"
    subprocess.run([sys.executable, script, tmp_path], check=True, capture_output=True, timeout=600)
    files = ["fsdp2_full/checkpoint.pt", "zero_redundancy/checkpoint.pt", "fsdp2_raw"]
    for file in [*SHARDED, "fsdp2_app", "fsdp2_flattened", "fsdp2_accelerate", *files]:
        reference = tmp_path / file.partition("/")[0] / "reference.safetensors"
        check(extract(tmp_path / file, bias_correction=False, in_order=True), reference)  # layers of eight channels
    for variant in ("fsdp1_raw", "fsdp1_flat"):
        with pytest.raises(FileError, match="flat shards of FSDP1"):
            extract(tmp_path / variant)
    for variant in ("fsdp2_raw", "fsdp1_raw", "fsdp1_flat"):
        for rank in (0, 1):
            with pytest.raises(SquisherError, match="one of 2 ranks|flat shards"):
                extract(tmp_path / variant / f"rank{rank}.pt")
