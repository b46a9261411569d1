"""GPT-NeoX with DeeperSpeed 1 (Pythia), by its published layout: flat groups in intervals, stages, tensor-parallel ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from squisher.errors import FileError, NoAccumulatorError
from squisher.recycle import extract
from squisher.storage.tensors import chunks_of

NEOX = {"0.word_embeddings.weight": (7, 3), "2.attention.dense.weight": (3, 5), "2.attention.dense.bias": (5,),
        "2.norm.weight": (3,), "4.final_linear.weight": (4, 3)}  # fmt: skip


def neox(folder: Path, world: int, intervals: int, shapes: Any = NEOX, stage: int = 0, stages: int = 1) -> dict[str, torch.Tensor]:  # fmt: skip
    """Write random moments of these shapes, or those given, as one model-parallel rank of GPT-NeoX does.

    Two Adam groups leave them behind flat, cut into intervals, each dealt out to the ranks, padding removed.
    """
    torch.manual_seed(stage)
    moments = {name: one if isinstance(one, torch.Tensor) else torch.rand(one) for name, one in shapes.items()}
    ranks: list[list[list[dict[str, Any]]]] = [[] for _ in range(world)]
    for matrices in (True, False):
        flat = torch.cat([m.flatten() for m in moments.values() if (m.dim() > 1) == matrices])
        size = -(-flat.numel() // (world * intervals))
        for rank in range(world):
            begins = [(interval * world + rank) * size for interval in range(intervals)]
            ranks[rank].append(
                [{"exp_avg": -flat[b : b + size], "exp_avg_sq": flat[b : b + size].clone()} for b in begins]
            )
    folder.mkdir(exist_ok=True)
    for rank, groups in enumerate(ranks):
        saved = {
            "base_optimizer_state": groups,
            "zero_stage": 1,
            "partition_count": world,
            "num_comm_intervals_per_group": [intervals] * 2,
        }
        content = {"optimizer_state_dict": saved, "param_shapes": {n: m.shape for n, m in moments.items()}}
        torch.save(content, folder / f"zero_pp_rank_{rank}_mp_rank_{stage:02d}_optim_states.pt")
    model = {
        "module": None,
        "optimizer": None,
        "global_steps": 12,
        "skipped_steps": 2,
        "dp_world_size": world,
        "mp_world_size": stages,
    }
    torch.save(model, folder / f"mp_rank_{stage:02d}_model_states.pt")
    torch.save({"word_embeddings.weight": torch.zeros(7, 3)}, folder / "layer_00-model_00-model_states.pt")
    return moments


@pytest.mark.parametrize(("world", "intervals"), [(1, 1), (2, 1), (3, 2)])
def test_pythia(tmp_path, world, intervals):
    moments = neox(tmp_path / "global_step12", world, intervals)
    imp = extract(tmp_path / "global_step12", beta2=0.95)
    assert set(imp) == set(moments)
    for name, moment in moments.items():
        torch.testing.assert_close(imp[name], moment / (1 - 0.95**10))
        for size in (1, 7, 1 << 20):
            assert torch.equal(torch.cat(list(chunks_of(imp, name, size))), imp[name].flatten())
    with pytest.raises(NoAccumulatorError, match="beta2"):
        extract(tmp_path / "global_step12")


def test_pythia_with_other_groups_or_ranks_is_refused(tmp_path):
    neox(tmp_path / "global_step12", 2, 1)
    last = tmp_path / "global_step12" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = torch.load(last, weights_only=False)
    groups = content["optimizer_state_dict"].pop("base_optimizer_state")
    content["optimizer_state_dict"]["base_optimizer_state"] = groups[:1]
    torch.save(content, last)
    with pytest.raises(FileError, match="rank 1 lists other parameters or groups"):
        extract(tmp_path / "global_step12")
    content["optimizer_state_dict"]["base_optimizer_state"] = groups
    content["param_shapes"]["2.norm.weight"] = torch.Size((1, 3))
    for rank in range(2):
        torch.save(content, last.with_name(f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))
    with pytest.raises(FileError, match="GPT-NeoX divides them"):
        extract(tmp_path / "global_step12")
    last.unlink()
    with pytest.raises(FileError, match="lacks"):
        extract(tmp_path / "global_step12")


@pytest.mark.parametrize("world", [1, 2])
def test_stages_of_a_pipeline(tmp_path, world):
    """DeepSpeed numbers the stages as model-parallel ranks; each has its own layers."""
    folder = tmp_path / "global_step12"
    own = [dict(list(NEOX.items())[:3]), dict(list(NEOX.items())[3:])]
    moments = {n: m for k in range(2) for n, m in neox(folder, world, 2, own[k], k, 2).items()}
    imp = extract(folder, beta2=0.95)
    assert set(imp) == set(NEOX)
    for name, moment in moments.items():
        torch.testing.assert_close(imp[name], moment / (1 - 0.95**10))
    (folder / "zero_pp_rank_0_mp_rank_01_optim_states.pt").rename(tmp_path / "elsewhere.pt")
    with pytest.raises(FileError, match="lacks|states of 1 such"):
        extract(folder, beta2=0.95)


def test_a_layer_that_two_stages_share(tmp_path):
    """Tied embeddings are in the first and in the last stage, with the same state."""
    folder = tmp_path / "global_step12"
    tied = {"tied_modules.embed.word_embeddings.weight": (7, 3)}
    first = neox(folder, 1, 1, {**tied, "2.norm.weight": (3,)}, 0, 2)
    second = neox(folder, 1, 1, {**tied, "4.norm.weight": (3,)}, 1, 2)
    file = folder / "zero_pp_rank_0_mp_rank_01_optim_states.pt"
    content = torch.load(file, weights_only=False)
    held = content["optimizer_state_dict"]["base_optimizer_state"][0][0]
    held.update(exp_avg_sq=first[next(iter(tied))].flatten(), exp_avg=-first[next(iter(tied))].flatten())
    torch.save(content, file)
    imp = extract(folder, beta2=0.95)
    assert set(imp) == {*first, *second}
    torch.testing.assert_close(imp[next(iter(tied))], first[next(iter(tied))] / (1 - 0.95**10))


def test_pythia_under_the_names_of_its_published_weights(tmp_path):
    published = {
        "0.word_embeddings.weight": "gpt_neox.embed_in.weight",
        "2.attention.dense.weight": "gpt_neox.layers.0.attention.dense.weight",
        "3.attention.dense.weight": "gpt_neox.layers.1.attention.dense.weight",
        "5.norm.bias": "gpt_neox.final_layer_norm.bias",
        "6.final_linear.weight": "embed_out.weight",
    }
    shapes = {name: (3,) if name.endswith("bias") else (5, 3) for name in published}
    moments = neox(tmp_path / "global_step12", 2, 2, shapes)
    weights = {hf: torch.zeros(shapes[name]) for name, hf in published.items()}
    (tmp_path / "pythia").mkdir()
    save_file(weights, tmp_path / "pythia" / "model.safetensors")
    imp = extract(tmp_path / "global_step12", model=tmp_path / "pythia", beta2=0.95)
    assert set(imp) == set(weights)
    for name, moment in moments.items():
        torch.testing.assert_close(imp[published[name]], moment / (1 - 0.95**10))
        assert imp.provenance.live_names[published[name]] == name


# -- tensor parallelism, as Pythia 6.9B (two ranks) and 12B (four) were trained ----------------------------------------


def layer(number: int) -> dict[str, tuple[int, ...]]:
    """The parameters of one layer with 8 channels."""
    inside = {"input_layernorm.weight": (8,), "attention.query_key_value.weight": (24, 8), "attention.query_key_value.bias": (24,),
              "attention.dense.weight": (8, 8), "attention.dense.bias": (8,), "mlp.dense_h_to_4h.weight": (12, 8),
              "mlp.dense_h_to_4h.bias": (12,), "mlp.dense_4h_to_h.weight": (8, 12), "mlp.dense_4h_to_h.bias": (8,)}  # fmt: skip
    return {f"{number}.{name}": shape for name, shape in inside.items()}


STAGES = [
    {"0.word_embeddings.weight": (16, 8), **layer(2)},
    {**layer(3), "5.norm.weight": (8,), "6.final_linear.weight": (16, 8)},
]
ROW_PARALLEL = ("attention.dense.weight", "dense_4h_to_h.weight")
COPIED = ("norm.weight", "dense.bias", "4h_to_h.bias")


def share(name: str, whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """What one rank holds of a parameter."""
    if name.endswith(COPIED):
        return whole
    return whole.chunk(ranks, dim=1 if name.endswith(ROW_PARALLEL) else 0)[rank]


def cut(folder: Path, ranks: int, stages: list[dict[str, Any]], world: int = 2, change: Any = None) -> dict[str, torch.Tensor]:  # fmt: skip
    """Write the files of all tensor-parallel ranks of all stages; `change` may change what a rank holds."""
    torch.manual_seed(7)
    whole = [{name: torch.rand(shape) for name, shape in stage.items()} for stage in stages]
    for number, stage in enumerate(whole):
        for rank in range(ranks):
            held = {name: share(name, value, rank, ranks) for name, value in stage.items()}
            if change is not None:
                change(rank, held)
            neox(folder, world, 2, held, number * ranks + rank, ranks * len(stages))
    return {name: value for stage in whole for name, value in stage.items()}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("stages", [[{**STAGES[0], **STAGES[1]}], STAGES], ids=["one stage", "two stages"])
def test_tensor_parallel_ranks(tmp_path, ranks, stages):
    whole = cut(tmp_path / "global_step12", ranks, stages)
    imp = extract(tmp_path / "global_step12", beta2=0.95)
    assert set(imp) == set(whole)
    assert imp.provenance.naming.level == "recorded"
    assert not imp.provenance.pollution
    for name, value in whole.items():
        torch.testing.assert_close(imp[name], value / (1 - 0.95**10))
        for size in (1, 7, 1 << 20):
            assert torch.equal(torch.cat(list(chunks_of(imp, name, size))), imp[name].flatten())


def test_tensor_parallel_ranks_under_published_names(tmp_path):
    whole = cut(tmp_path / "global_step12", 2, STAGES)
    names = {
        name: f"gpt_neox.layers.{int(name[0]) - 2}.{name[2:]}"
        if name[0] in "23"
        else {"0": "gpt_neox.embed_in.weight", "5": "gpt_neox.final_layer_norm.weight", "6": "embed_out.weight"}[
            name[0]
        ]
        for name in whole
    }
    (tmp_path / "pythia").mkdir()
    save_file({hf: torch.zeros_like(whole[n]) for n, hf in names.items()}, tmp_path / "pythia" / "model.safetensors")
    imp = extract(tmp_path / "global_step12", model=tmp_path / "pythia", beta2=0.95)
    for name, value in whole.items():
        torch.testing.assert_close(imp[names[name]], value / (1 - 0.95**10))


def test_copies_that_drift_apart(tmp_path):
    """Nothing synchronises norms and row-parallel biases: rounding parts them, and parts of something else are no copies."""

    def drift(by: float) -> Any:
        def change(rank: int, held: dict[str, torch.Tensor]) -> None:
            held["2.input_layernorm.weight"] = held["2.input_layernorm.weight"] * (1 + by * rank)

        return change

    whole = cut(tmp_path / "near", 2, STAGES[:1], change=drift(0.01))
    imp = extract(tmp_path / "near", beta2=0.95)
    torch.testing.assert_close(imp["2.input_layernorm.weight"], whole["2.input_layernorm.weight"] / (1 - 0.95**10))
    (said,) = imp.provenance.pollution
    assert said.parameters == ("2.input_layernorm.weight",)
    assert said.numbers["apart"] == pytest.approx(0.01, rel=0.01)
    cut(tmp_path / "far", 2, STAGES[:1], change=drift(0.5))
    with pytest.raises(FileError, match=r"2\.input_layernorm\.weight.* copy"):
        extract(tmp_path / "far", beta2=0.95)


def test_tensor_parallel_ranks_that_do_not_belong_together(tmp_path):
    def swap(rank: int, held: dict[str, torch.Tensor]) -> None:
        if rank == 1:
            name = "2.attention.dense.weight"
            held[name] = held[name].T.contiguous()

    cut(tmp_path / "shapes", 2, STAGES[:1], change=swap)
    with pytest.raises(FileError, match=r"2\.attention\.dense\.weight.*shapes"):
        extract(tmp_path / "shapes", beta2=0.95)
    cut(tmp_path / "missing", 4, STAGES[:1])
    for file in (tmp_path / "missing").glob("zero_*mp_rank_02*"):
        file.unlink()
    with pytest.raises(FileError, match="lacks.* 02"):
        extract(tmp_path / "missing", beta2=0.95)
    cut(tmp_path / "last", 4, STAGES[:1])
    for file in (tmp_path / "last").glob("*mp_rank_03*"):
        file.unlink()
    with pytest.raises(FileError, match="states of 3 such ranks"):
        extract(tmp_path / "last", beta2=0.95)
    cut(tmp_path / "shard", 2, STAGES[:1])
    (tmp_path / "shard" / "zero_pp_rank_1_mp_rank_01_optim_states.pt").unlink()
    with pytest.raises(FileError, match="lacks"):
        extract(tmp_path / "shard", beta2=0.95)


@pytest.mark.parametrize(
    ("shapes", "why"),
    [
        ({"2.attention.adapter.weight": (8, 8)}, "adapter.*no parameter"),
        ({"2.attention.query_key_value.weight": (16, 8)}, "key heads"),
        ({"2.mlp.linear1.weight": (24, 8), "2.mlp.linear2.weight": (8, 12)}, "gate"),
    ],
)
def test_what_was_cut_in_an_unknown_order_is_refused(tmp_path, shapes, why):
    def change(rank: int, held: dict[str, torch.Tensor]) -> None:
        if "2.mlp.linear2.weight" in shapes:
            held["2.mlp.linear2.weight"] = torch.zeros(8, 6)

    cut(
        tmp_path / "global_step12",
        2,
        [{"0.word_embeddings.weight": (16, 8), "5.norm.weight": (8,), **shapes}],
        change=change,
    )
    with pytest.raises(FileError, match=why):
        extract(tmp_path / "global_step12", beta2=0.95)
