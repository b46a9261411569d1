"""DeepSpeed checkpoints: parameters out of flat buffers, and a refusal of what does not belong together."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from squisher.errors import FileError, NoAccumulatorError, ScaleError, SquisherError
from squisher.importance import Importance, RunFacts
from squisher.recycle import extract
from squisher.recycle.formats.zero_run import Run
from squisher.storage.tensors import chunks_of

FIXTURES = Path(__file__).parents[1] / "fixtures"
ZERO = FIXTURES / "zero"
READ = ["z1", "z1bf16", "z2", "z2rr", "z2pa", "z2elastic", "z2offload", "z2tied", "z3", "z3p0", "z3sub", "z3bf16"]
UNIVERSAL = ["universal_z2", "universal_z3"]


def check(imp: Importance, reference: Path, tolerance: float = 0.0) -> None:
    expected = load_file(reference)
    assert set(imp) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(imp[name], value, rtol=tolerance, atol=0.0)
        assert torch.equal(torch.cat(list(chunks_of(imp, name, 4))), imp[name].reshape(-1)), name


@pytest.mark.parametrize("variant", [*READ, *UNIVERSAL])
def test_values_names_and_steps(variant):
    imp = extract(ZERO / variant, bias_correction=False)
    check(imp, ZERO / variant / "reference.safetensors")
    assert imp.provenance.steps == {"min": 3, "max": 3}
    assert imp.provenance.naming.level == "recorded"
    assert imp.provenance.dtype_of_source == "float32"
    assert set(imp.provenance.absent) == {"frozen.weight", "frozen.bias"}
    assert imp.provenance.tied == ({"head.weight": "embed.weight"} if "tied" in variant else {})


@pytest.mark.parametrize("variant", ["z1", "z2", "z2rr", "z2pa", "z3", "z3p0", "z3sub"])
def test_all_stages_of_one_run_agree(variant):
    check(extract(ZERO / variant, bias_correction=False), ZERO / "z3" / "reference.safetensors", 1e-5)


@pytest.mark.parametrize("variant", ["z1bf16", "z2", "z3sub", *UNIVERSAL])
def test_each_group_has_its_own_settings(variant):
    imp, stored = (extract(ZERO / variant, bias_correction=b) for b in (True, False))
    by_name = {name: g for g in imp.provenance.optimizer["groups"] for name in g["parameters"]}
    for name in imp:
        beta2, decay = (0.99, 0.0) if name.endswith("bias") else (0.999, 0.1)
        assert (by_name[name]["beta2"], by_name[name]["weight_decay"]) == (beta2, decay)
        torch.testing.assert_close(imp[name], stored[name] / (1 - beta2**3))


def test_what_the_run_proves():
    provenance = extract(ZERO / "z2").provenance
    assert provenance.batch_size == 8  # 2 examples × 2 accumulated × 2 ranks
    assert provenance.loss_reduction is None
    assert provenance.after_clipping is True
    assert [(one.code, one.numbers) for one in provenance.pollution] == [("clipping", {"norm": 0.5})]
    with pytest.raises(ScaleError):
        extract(ZERO / "z2").as_fisher()
    torch.testing.assert_close(
        extract(ZERO / "z2", loss_reduction="mean").as_fisher()["fc1.bias"], 8 * extract(ZERO / "z2")["fc1.bias"]
    )


def test_a_given_batch_size_means_a_mean_unless_told_otherwise():
    assert extract(ZERO / "z2", batch_size=8).provenance.loss_reduction == "mean"


def test_a_slice_table_that_is_wrong_is_said_and_not_followed():
    notes = extract(ZERO / "z2rr").provenance.pollution
    assert any(one.code == "uncertain" and "round-robin" in one.note for one in notes)


def test_a_converted_round_robin_checkpoint_is_refused_because_its_names_are_wrong():
    folder = ZERO / "universal_z2rr" / "global_step3_universal"
    converted = torch.load(folder / "zero" / "fc1.weight" / "exp_avg_sq.pt")["param"]
    true = load_file(ZERO / "universal_z2rr" / "reference.safetensors")
    assert not torch.equal(converted, true["fc1.weight"])  # the reason for the refusal
    with pytest.raises(FileError, match="round_robin_gradients.*names"):
        extract(ZERO / "universal_z2rr")


@pytest.mark.parametrize("variant", ["universal_z2", "universal_z2rr", "universal_z3"])
def test_a_converted_checkpoint_that_does_not_say_how_it_was_trained(tmp_path, variant):
    folder = Path(shutil.copytree(ZERO / variant, tmp_path / "run"))
    change_model_states(folder, lambda content: content.update(ds_config="ds_config.json"))  # a path, if that was given
    if variant == "universal_z2rr":
        with pytest.raises(FileError, match="round_robin_gradients"):
            extract(folder)
    else:
        check(extract(folder, bias_correction=False), folder / "reference.safetensors")


def test_elastic_checkpoints_keep_no_decay():
    with pytest.raises(NoAccumulatorError, match="β₂ of Adam.*--raw"):
        extract(ZERO / "z2elastic")


# -- where it is looked for --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["z2", "z3", *UNIVERSAL])
def test_the_tag_folder_itself(variant):
    (tag,) = [p for p in (ZERO / variant).iterdir() if p.is_dir()]
    check(extract(tag, bias_correction=False), ZERO / variant / "reference.safetensors")


@pytest.fixture
def z2(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ZERO / "z2", tmp_path / "run"))


@pytest.fixture
def z3(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ZERO / "z3", tmp_path / "run"))


def test_latest_decides(z2):
    shutil.copytree(z2 / "global_step3", z2 / "global_step9")
    (z2 / "global_step9" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    check(extract(z2, bias_correction=False), z2 / "reference.safetensors")
    (z2 / "latest").unlink()
    with pytest.raises(FileError, match="global_step3, global_step9.*latest"):
        extract(z2)
    shutil.rmtree(z2 / "global_step9")
    check(extract(z2, bias_correction=False), z2 / "reference.safetensors")


@pytest.mark.parametrize("tag", ["global_step7", "../run/global_step3", "", "."])
def test_latest_that_names_nothing(z2, tag):
    (z2 / "latest").write_text(tag)
    with pytest.raises(FileError, match="checkpoint .*not there"):
        extract(z2)


def test_one_file_is_not_the_checkpoint(z2):
    with pytest.raises(FileError, match="one rank.*DeepSpeed.*folder"):
        extract(z2 / "global_step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")


def test_inside_a_trainer_folder(z3):
    folder = z3.rename(z3.parent / "checkpoint-3")
    (folder / "trainer_state.json").write_text('{"global_step": 3}')
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    check(extract(folder, bias_correction=False), folder / "reference.safetensors")


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_rank(z2, rank):
    (z2 / "global_step3" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(FileError, match=rf"optimizer states.* 1 of .*2 ranks.*rank {rank}"):
        extract(z2)


def test_no_rank_at_all(z2):
    for file in (z2 / "global_step3").glob("*optim_states.pt"):
        file.unlink()
    with pytest.raises(FileError, match="optimizer states"):
        extract(z2)


def test_no_model_states(z2):
    (z2 / "global_step3" / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(FileError, match="model states"):
        extract(z2)


def test_ranks_of_another_stage_do_not_fit(z2):
    name = "global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(ZERO / "z3" / name, z2 / name)
    with pytest.raises(FileError, match="several runs"):
        extract(z2)


def test_a_file_that_is_cut_short(z2):
    file = z2 / "global_step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    file.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(FileError):
        extract(z2)


@pytest.mark.parametrize("variant", ["z2", "z3", "universal_z3"])
def test_a_bit_that_flipped_is_noticed(tmp_path, variant):
    folder = Path(shutil.copytree(ZERO / variant, tmp_path / "run"))
    wanted = load_file(folder / "reference.safetensors")["embed.weight"].reshape(-1)[:1].numpy().tobytes()
    (file,) = [
        file for file in folder.glob("**/*.pt") if wanted in file.read_bytes() and "optimizer_state" not in file.name
    ]
    content = bytearray(file.read_bytes())
    content[content.index(wanted)] ^= 1
    file.write_bytes(content)
    imp = extract(folder)
    with pytest.raises(FileError, match="damaged.*checksum"):
        imp["embed.weight"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("layer_1_expert_0_mp_rank_00_optim_states.pt", "the experts of a mixture"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "the experts of a mixture"),
        ("layer_01-model_01-model_states.pt", "tensor parallelism"),
    ],
)
def test_other_kinds_of_parallelism(z2, name, why):
    shutil.copy(z2 / "global_step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt", z2 / "global_step3" / name)
    with pytest.raises(FileError, match=why):
        extract(z2)


def test_a_rank_without_its_model_states(z2):
    folder = z2 / "global_step3"
    shutil.copy(
        folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt", folder / "zero_pp_rank_0_mp_rank_01_optim_states.pt"
    )
    with pytest.raises(FileError, match=r"mp_rank_01_model_states.pt"):
        extract(z2)


def change_model_states(folder: Path, change: Any) -> None:
    for file in folder.glob("**/*model_states.pt"):
        content = torch.load(file, weights_only=False)
        change(content)
        torch.save(content, file)


def test_tensor_parallelism(z3):
    change_model_states(z3, lambda content: content.update(mp_world_size=2))
    with pytest.raises(FileError, match="tensor or pipeline parallelism"):
        extract(z3)


def test_states_on_another_disk(z3):
    offload = {"offload_optimizer": {"device": "nvme"}}
    change_model_states(z3, lambda content: content["ds_config"]["zero_optimization"].update(offload))
    with pytest.raises(FileError, match="disk.*nvme.*cpu"):
        extract(z3)


def test_shards_that_are_repeated(z3):
    change_model_states(z3, lambda content: content["ds_config"]["zero_optimization"].update(mics_shard_size=1))
    with pytest.raises(FileError, match="MiCS.* 1 ranks"):
        extract(z3)


def without_zero(folder: Path, optimizer: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    (folder / "global_step2").mkdir(parents=True)
    content = {"module": weights, "optimizer": optimizer, "param_shapes": None, "ds_config": {"gradient_clipping": 1.0}}
    torch.save(content, folder / "global_step2" / "mp_rank_00_model_states.pt")
    return folder


def test_stage_0_is_an_ordinary_state(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    imp = extract(without_zero(tmp_path / "run", optimizer.state_dict(), model.state_dict()), bias_correction=False)
    for name, parameter in model.named_parameters():
        assert torch.equal(imp[name], optimizer.state[parameter]["exp_avg_sq"])
    assert str(imp.provenance.naming).startswith("convention: the weights under 'module'")
    assert imp.provenance.after_clipping is True


def test_flat_buffers_without_a_list_of_parameters(tmp_path):
    optimizer = {"optimizer_state_dict": {}, "fp32_groups_flat": [torch.zeros(3)]}
    with pytest.raises(FileError, match="without ZeRO"):
        extract(without_zero(tmp_path / "run", optimizer, {}))


def test_one_bit_adam(z3):
    change_model_states(z3, lambda content: content["ds_config"].update(optimizer={"type": "OneBitAdam"}))
    with pytest.raises(NoAccumulatorError, match="OneBitAdam"):
        extract(z3)


def test_parameters_that_do_not_fit_the_buffers(z3):
    change_model_states(z3, lambda content: content["param_shapes"][0].update({"fc1.weight": torch.Size([3, 4])}))
    with pytest.raises(FileError, match="end inside 'head.weight'"):
        extract(z3)


def test_parameters_that_do_not_fill_the_buffers(z2):
    change_model_states(z2, lambda content: content["param_shapes"][0].update({"fc1.weight": torch.Size([3, 2])}))
    with pytest.raises(FileError, match="60 elements.* 57"):
        extract(z2)


def test_model_states_of_two_steps(z3):
    file = next(z3.glob("*/zero_pp_rank_1_mp_rank_00_model_states.pt"))
    torch.save({**torch.load(file, weights_only=False), "global_steps": 5}, file)
    with pytest.raises(FileError, match="steps 3, 5"):
        extract(z3)


@pytest.fixture
def universal(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ZERO / "universal_z2", tmp_path / "run"))


def test_a_universal_folder_that_is_not_whole(universal):
    shutil.rmtree(universal / "global_step3_universal" / "zero" / "fc2.weight")
    with pytest.raises(FileError, match="folder of 'fc2.weight'"):
        extract(universal)


def test_a_universal_parameter_without_state(universal):
    for file in (universal / "global_step3_universal" / "zero" / "fc2.weight").glob("[es]*.pt"):
        file.unlink()
    with pytest.raises(FileError, match="no optimizer state"):
        extract(universal)


def test_a_universal_parameter_that_is_not_listed(universal):
    inside = universal / "global_step3_universal" / "zero"
    shutil.copytree(inside / "fc2.weight", inside / "fc3.weight")
    with pytest.raises(FileError, match="'fc3.weight'.*model states"):
        extract(universal)


def test_a_universal_file_of_another_parameter(universal):
    inside = universal / "global_step3_universal" / "zero"
    shutil.copy(inside / "fc2.bias" / "exp_avg_sq.pt", inside / "fc2.weight" / "exp_avg_sq.pt")
    with pytest.raises(FileError, match=r"\(3,\).*\(3, 3\)"):
        extract(universal)


# -- written here, in the layout of DeepSpeed, with any number of ranks ------------------------------------------------


def padded(parts: list[torch.Tensor], length: int) -> torch.Tensor:
    flat = torch.cat([part.reshape(-1) for part in parts])
    return torch.cat([flat, flat.new_full((length - flat.numel(),), -7.0)])  # padding must never come out


def write(
    folder: Path,
    groups: list[dict[str, torch.Tensor]],
    world: int,
    stage: int,
    *,
    align: int = 1,
    steps: list[int] | None = None,
    config: dict[str, Any] | None = None,
    paddings: bool = True,
    extra: dict[str, Any] | None = None,
) -> Path:
    """A checkpoint of these accumulators."""
    tag = folder / "global_step4"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    shapes = [{name: value.shape for name, value in group.items()} for group in groups]
    content = {
        "param_shapes": shapes,
        "ds_config": {"zero_optimization": {"stage": stage}, **(config or {})},
        "dp_world_size": world,
        **(extra or {}),
    }
    for rank in range(world):
        states, gaps, ends = {}, [], []
        for k, group in enumerate(groups):
            values = list(group.values())
            if stage == 3:
                shares = [-(-value.numel() // world) for value in values]
                cut = [padded([v], n * world)[rank * n : (rank + 1) * n] for v, n in zip(values, shares, strict=True)]
                flat = torch.cat(cut)
            else:
                gap = [0 if v is values[-1] else -v.numel() % align for v in values]
                spaced = [padded([v], v.numel() + n) for v, n in zip(values, gap, strict=True)]
                total = sum(v.numel() for v in spaced)
                length = -(-total // (2 * world)) * 2
                flat = padded(spaced, length * world)[rank * length : (rank + 1) * length]
                gaps.append(gap)
                ends.append(max(0, min(length, (rank + 1) * length - total)))
            step = torch.tensor(float(steps[rank] if steps else 4))
            states[k] = {"step": step, "exp_avg": flat * 0 - 1, "exp_avg_sq": flat}
        settings = [{"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "params": [k]} for k in range(len(groups))]
        optimizer = {"state": states, "param_groups": settings}
        if stage == 3:
            saved = {"optimizer_state_dict": optimizer, "partition_count": world, "zero_stage": 3}
        else:
            saved = {"base_optimizer_state": optimizer, "partition_count": [world] * len(groups), "zero_stage": stage}
            saved |= {"group_paddings": ends} if paddings else {}
            saved |= {"param_alignment_paddings": gaps} if align > 1 else {}
        torch.save({"optimizer_state_dict": saved}, tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
        torch.save(content, tag / name)
    return folder


shapes = st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(shapes, min_size=1, max_size=3),
    st.integers(1, 5),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 4]),
    st.booleans(),
)
def test_any_shapes_on_any_number_of_ranks(tmp_path_factory, listed, world, stage, align, paddings):
    folder = tmp_path_factory.mktemp("zero") / "run"
    groups, first = [], 1.0
    for k, group in enumerate(listed):
        groups.append({})
        for j, shape in enumerate(group):
            numel = math.prod(shape)
            groups[-1][f"m{k}.p{j}"] = torch.arange(first, first + numel).reshape(shape)
            first += numel
    imp = extract(write(folder, groups, world, stage, align=align, paddings=paddings), bias_correction=False)
    expected = {name: value for group in groups for name, value in group.items()}
    assert list(imp) == list(expected)
    for name, value in expected.items():
        assert torch.equal(imp[name], value)
        assert torch.equal(torch.cat(list(chunks_of(imp, name, 3))), value.reshape(-1))


GROUP = [{"a": torch.ones(3, 3), "b": torch.ones(2)}]


@pytest.mark.parametrize("stage", [2, 3])
def test_mixed_steps(tmp_path, stage):
    write(tmp_path / "run", GROUP, 3, stage, steps=[4, 4, 5])
    with pytest.raises(FileError, match="rank 2 .*step 5.*rank 0 .*step 4"):
        extract(tmp_path / "run")


@pytest.mark.parametrize("stage", [2, 3])
def test_no_step_was_taken(tmp_path, stage):
    write(tmp_path / "run", GROUP, 2, stage, steps=[0, 0])
    with pytest.raises(NoAccumulatorError, match="taken no step"):
        extract(tmp_path / "run")


@pytest.mark.parametrize(
    ("config", "extra", "size"),
    [
        ({"train_batch_size": 12}, {}, 12),
        ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}, {}, 12),
        ({"train_micro_batch_size_per_gpu": 3}, {}, 6),
        ({"train_batch_size": 13, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}, {}, None),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}, {}, None),
        ({"train_batch_size": 12}, {"global_steps": 4, "global_samples": 48}, 12),
        ({"train_batch_size": 12}, {"global_steps": 4, "global_samples": 50}, None),
        ({}, {}, None),
    ],
)
def test_the_batch_size_is_recorded_only_if_all_agrees(tmp_path, config, extra, size):
    write(tmp_path / "run", GROUP, 2, 2, config=config, extra=extra)
    assert extract(tmp_path / "run").provenance.batch_size == size


@pytest.mark.parametrize(
    ("said", "name", "holds"),
    [
        ({"type": "AdamW"}, "AdamW", False),
        ({"type": "Adam"}, "AdamW", False),  # DeepSpeed's default
        ({"type": "Adam", "params": {"adam_w_mode": False}}, "Adam", True),
        (None, "Adam or AdamW", None),
    ],
)
def test_whether_weight_decay_is_inside(tmp_path, said, name, holds):
    write(tmp_path / "run", GROUP, 2, 2, config={"optimizer": said} if said else {})
    for file in (tmp_path / "run" / "global_step4").glob("*optim_states.pt"):
        content = torch.load(file)
        content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][0]["weight_decay"] = 0.1
        torch.save(content, file)
    provenance = extract(tmp_path / "run").provenance
    assert provenance.optimizer["class"] == name
    decays = [one for one in provenance.pollution if one.code == "l2"]
    assert bool(decays) == (holds is not False)
    assert ["may hold" in one.note for one in decays] == ([holds is None] if decays else [])


def test_groups_of_muon_are_absent_and_those_of_its_adam_are_read(tmp_path):
    config = {"optimizer": {"type": "Muon"}}
    write(tmp_path / "run", [{"a": torch.ones(3, 3)}, {"b": torch.ones(2)}], 2, 2, config=config)
    for file in (tmp_path / "run" / "global_step4").glob("*optim_states.pt"):
        content = torch.load(file)
        state = content["optimizer_state_dict"]["base_optimizer_state"]["state"]
        state[0] = {"momentum_buffer": state[0]["exp_avg"]}
        torch.save(content, file)
    imp = extract(tmp_path / "run")
    assert list(imp) == ["b"]
    assert "moving average of the gradient" in imp.provenance.absent["a"].note


def test_names_of_adapters_are_those_of_the_adapter_file(tmp_path):
    live = "base_model.model.q.lora_A.default.weight"
    imp = extract(write(tmp_path / "run", [{live: torch.ones(2, 3)}], 2, 3))
    assert list(imp) == ["base_model.model.q.lora_A.weight"]
    assert imp.provenance.live_names == {"base_model.model.q.lora_A.weight": live}


def test_names_do_not_leave_the_folder(universal):
    change_model_states(universal, lambda content: content["param_shapes"][0].update({"../../../x": torch.Size([1])}))
    with pytest.raises(FileError, match=r"folder of '\.\./\.\./\.\./x'"):
        extract(universal)


@pytest.mark.parametrize("variant", ["z2", "z3"])
def test_bytes_changed_at_random_never_give_a_python_error(tmp_path, variant):
    folder = Path(shutil.copytree(ZERO / variant, tmp_path / "run"))
    files = sorted(folder.glob("*/*.pt"))
    generator = torch.Generator().manual_seed(0)
    for k in range(100):
        file = files[k % len(files)]
        original = file.read_bytes()
        changed = bytearray(original)
        for _ in range(3):
            place = int(torch.randint(len(changed), (), generator=generator))
            changed[place] = int(torch.randint(256, (), generator=generator))
        file.write_bytes(changed)
        try:
            imp = extract(folder, bias_correction=False)
            for name in imp:
                imp[name]
        except SquisherError:
            pass
        file.write_bytes(original)


def test_what_is_not_needed_is_not_read(tmp_path, monkeypatch):
    from squisher.storage.byte_range import ByteRange

    folder = write(tmp_path / "run", [{"a": torch.ones(1000, 30), "b": torch.ones(5)}], 3, 2)
    read = []
    original = ByteRange.read_into
    monkeypatch.setattr(
        ByteRange,
        "read_into",
        lambda self, target, offset=0: (read.append(target.nbytes), original(self, target, offset))[1],
    )
    imp = extract(folder, bias_correction=False)
    assert sum(read) < 10_000  # headers and steps; the state is 120,000 bytes
    read.clear()
    pieces = list(chunks_of(imp, "a", 1000))
    assert all(piece.numel() <= 1000 for piece in pieces)
    assert sum(read) < 5 * 4 * 30_000  # the values once, and the storages of both ranks for their checksums


def written_by_deepspeed(folder, variants, seconds):
    """Let DeepSpeed write checkpoints, and end whatever it started.

    It compiles its operators into a folder of this run: a compiler that was killed leaves a lock in the shared one, for which every
    later run waits without end.
    """
    run = [sys.executable, FIXTURES / "make_zero.py", folder, *variants]
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(folder / "compiled")}
    said = folder / "said.txt"
    with (
        said.open("w") as out,
        subprocess.Popen(run, stdout=out, stderr=out, env=environment, start_new_session=True) as running,
    ):
        try:
            code = running.wait(seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
    assert code == 0, said.read_text()[-4000:]


@pytest.mark.formats
def test_with_deepspeed_itself(tmp_path):
    variants = [*READ, *UNIVERSAL, "z2bf16", "z3tied"]
    variants.remove("z2offload")
    written_by_deepspeed(tmp_path, [*variants, "universal_z2rr"], 1800)
    for variant in variants:
        check(extract(tmp_path / variant, bias_correction=False), tmp_path / variant / "reference.safetensors")
    with pytest.raises(FileError, match="round_robin_gradients"):
        extract(tmp_path / "universal_z2rr")


@pytest.mark.formats
def test_with_the_adam_that_deepspeed_compiles(tmp_path):
    written_by_deepspeed(
        tmp_path, ["z2offload", "z3offload"], 1800
    )  # two minutes of a compiler, without other work beside it
    for variant in ("z2offload", "z3offload"):
        check(extract(tmp_path / variant, bias_correction=False), tmp_path / variant / "reference.safetensors")


def test_a_pipeline_of_one_stage_is_plain_data_parallelism(tmp_path):
    """GPT-NeoX and Megatron-DeepSpeed keep the weights of each layer in a file of its own."""
    shutil.copytree(ZERO / "z1", tmp_path / "run")
    for layer in range(3):
        torch.save(
            {"weight": torch.zeros(2)}, tmp_path / "run" / "global_step3" / f"layer_0{layer}-model_00-model_states.pt"
        )
    check(extract(tmp_path / "run", bias_correction=False), ZERO / "z1" / "reference.safetensors")


BLOOM = {"tied_modules.embed.word_embeddings.weight": (8, 4), "tied_modules.embed.word_embeddings.norm.weight": (4,),
         "3.self_attention.query_key_value.weight": (12, 4), "3.self_attention.query_key_value.bias": (12,),
         "3.self_attention.dense.weight": (4, 4), "3.self_attention.dense.bias": (4,),
         "3.mlp.dense_h_to_4h.weight": (6, 4), "3.mlp.dense_4h_to_h.weight": (4, 6), "5.bias": (4,)}  # fmt: skip


@pytest.mark.parametrize("stage", [1, 3])
def test_tensor_parallel_ranks_of_megatron_deepspeed(tmp_path, stage):
    """Column-parallel layers and embeddings are cut by rows, row-parallel ones by columns, and the rest is copied."""
    torch.manual_seed(0)
    whole = {name: torch.rand(shape) for name, shape in BLOOM.items()}
    columns = ("dense.weight", "4h_to_h.weight")
    copied = ("norm.weight", "dense.bias", "5.bias")
    folder = tmp_path / "global_step4"
    for rank in range(2):
        cut = {n: v if n.endswith(copied) else v.chunk(2, dim=int(n.endswith(columns)))[rank] for n, v in whole.items()}
        extra = {"checkpoint_parallel_dimensions": {"tp_degree": 2}, "mp_world_size": 2}
        source = write(tmp_path / str(rank), [cut], 2, stage, extra=extra) / "global_step4"
        folder.mkdir(exist_ok=True)
        for file in source.iterdir():
            file.rename(folder / file.name.replace("mp_rank_00", f"mp_rank_{rank:02d}"))
    imp = extract(folder, bias_correction=False)
    assert {name: tuple(value.shape) for name, value in imp.items()} == BLOOM
    for name, value in whole.items():
        assert torch.equal(imp[name], value)
    change_model_states(folder, lambda content: content["checkpoint_parallel_dimensions"].update(tp_degree=1))
    with pytest.raises(FileError, match="degree 1"):
        extract(folder)


def test_batch_sizes_that_contradict_one_another_are_not_recorded(z3):
    def changed(content):
        content["ds_config"].update(train_batch_size=8)
        content["global_samples"] = 8 * content["global_steps"]

    assert extract(z3).provenance.batch_size
    change_model_states(z3, changed)
    run = Run(next(z3.glob("global_step*")))
    assert run.facts(RunFacts(batch_size=8)).batch_size == 8
    assert run.facts(RunFacts(batch_size=4)).batch_size is None
    change_model_states(z3, lambda content: content.update(global_samples=1))
    assert Run(next(z3.glob("global_step*"))).facts(RunFacts(batch_size=8)).batch_size is None


def test_exchanged_ranks_contradict_the_table_of_slices(z2):
    first, second = sorted(z2.glob("global_step3/*optim_states.pt"))
    other = first.rename(z2 / "other")
    second.rename(first)
    other.rename(second)
    with pytest.raises(FileError, match="table of slices.*exchanged"):
        extract(z2)
