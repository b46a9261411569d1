"""nanotron checkpoints: names in the state, runs of elements with ZeRO-1, slices with tensor parallelism.

Those of one stage and one tensor-parallel rank are synthesised, the others were written by nanotron (`make_nanotron.py`).
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import squisher
from squisher.errors import FileError


@pytest.fixture
def run():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 5, bias=False), nn.LayerNorm(5, bias=False))
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [model[2].weight], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randint(0, 7, (6, 2))).square().mean().backward()
        optimizer.step()
    return model, optimizer


def save(folder, model, optimizer, world=None):
    """One file without ZeRO, `world` of them with: the first ranks hold one element more where it does not come out even."""
    names = {id(p): name for name, p in model.named_parameters()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    state = optimizer.state_dict()
    folder = folder / "optimizer"
    folder.mkdir()
    config = {
        "type": "NamedOptimizer",
        "parallelism": {"tp_size": "1", "dp_size": str(world), "pp_size": "1"},
        "configs": {},
    }
    if world is None:
        state["names"] = dict(enumerate(order))
        torch.save(state, folder / "optimizer_pp-0-of-1_tp-0-of-1_exp-0-of-1.pt")
        (folder / "optimizer_config.json").write_text(json.dumps(config))
        return folder
    offsets, shapes = {}, {}
    for name, p in model.named_parameters():
        sizes = [p.numel() // world + (rank < p.numel() % world) for rank in range(world)]
        ends = torch.tensor(sizes).cumsum(0).tolist()
        offsets[name] = {str(r): [str(e - n), str(e)] for r, (e, n) in enumerate(zip(ends, sizes, strict=True)) if n}
        shapes[name] = [str(n) for n in p.shape]
    config["configs"] = {"param_name_to_dp_rank_offsets": offsets, "orig_param_shapes": shapes}
    (folder / "optimizer_config.json").write_text(json.dumps(config))
    for rank in range(world):
        kept, own, groups = {}, {}, []
        for group in state["param_groups"]:
            members = []
            for index in group["params"]:
                place = offsets[order[index]].get(str(rank))
                if place is not None:
                    start, end = map(int, place)
                    members.append(len(kept))
                    own[len(kept)] = {
                        k: v.flatten()[start:end].clone() if v.dim() else v for k, v in state["state"][index].items()
                    }
                    kept[len(kept)] = order[index]
            groups.append({**group, "params": members})
        file = folder / f"optimizer_pp-0-of-1_dp-{rank}-of-{world}_tp-0-of-1_exp-0-of-1.pt"
        torch.save({"state": own, "param_groups": groups, "names": kept}, file)
    return folder


@pytest.mark.parametrize("world", [None, 1, 2, 6])
def test_values_and_names(tmp_path, run, world):
    folder = save(tmp_path, *run, world)
    live = squisher.extract(run[1], run[0])
    for place in (tmp_path, folder):
        imp = squisher.extract(place)
        assert set(imp) == set(live)
        for name in live:
            assert torch.equal(imp[name], live[name])
            for size in (1, 7, 1 << 20):
                assert torch.equal(torch.cat(list(imp.chunks(name, size))), live[name].flatten())
    assert imp.provenance.naming.level == "recorded"
    assert imp.provenance.optimizer["beta2"] == 0.95


def test_what_does_not_fit_together_is_refused(tmp_path, run):
    folder = save(tmp_path, *run, 2)
    config = json.loads((folder / "optimizer_config.json").read_text())
    offsets = config["configs"]["param_name_to_dp_rank_offsets"]
    offsets["0.weight"]["1"] = ["12", "21"]
    (folder / "optimizer_config.json").write_text(json.dumps(config))
    with pytest.raises(FileError, match="0.weight"):
        squisher.extract(tmp_path)
    (folder / "optimizer_config.json").write_text('{"configs": {}}')
    with pytest.raises(FileError, match="ZeRO-1"):
        squisher.extract(tmp_path)
    (folder / "optimizer_pp-0-of-1_dp-1-of-2_tp-0-of-1_exp-0-of-1.pt").unlink()
    with pytest.raises(FileError, match="lacks"):
        squisher.extract(tmp_path)


FIXTURES = Path(__file__).parents[1] / "fixtures" / "nanotron"
RUNS = ["tp2", "tp2_pp2_zero", "pp2_zero"]


def unpacked(run, folder):
    shutil.unpack_archive(FIXTURES / f"{run}.zip", folder)
    return folder, load_file(folder / "truth.safetensors")


@pytest.mark.parametrize("run", RUNS)
def test_stages_and_tensor_parallel_ranks(tmp_path, run):
    """Fused projections are cut inside each of their parts, tied embeddings are in two stages, later stages have no offsets."""
    folder, truth = unpacked(run, tmp_path)
    for place in (folder, folder / "optimizer"):
        imp = squisher.extract(place, bias_correction=False)
        assert {name: tuple(value.shape) for name, value in imp.items()} == {
            n: tuple(v.shape) for n, v in truth.items()
        }
        assert imp.provenance.naming.level == "recorded"
        assert not imp.provenance.pollution
        for name, value in truth.items():
            for size in (1, 7, 1 << 20):
                assert torch.equal(torch.cat(list(imp.chunks(name, size))), value.flatten())


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("kind", ["optimizer/optimizer_*.pt", "model/**/qkv_proj/model_weight_*.safetensors"])
def test_every_file_is_needed(tmp_path, run, kind):
    """Of the weights, the headers; with one tensor-parallel rank only for the shapes of later stages."""
    folder, truth = unpacked(run, tmp_path)
    for file in sorted(folder.glob(kind)):
        file.rename(tmp_path / "elsewhere")
        if run == "pp2_zero" and kind.startswith("model") and "decoder/0" in file.as_posix():
            assert set(squisher.extract(folder)) == set(truth)
        else:
            with pytest.raises(FileError, match="lacks"):
                squisher.extract(folder)
        (tmp_path / "elsewhere").rename(file)


def change(file, apply):
    content = torch.load(file, weights_only=False)
    apply({content["names"][index]: state for index, state in content["state"].items()})
    torch.save(content, file)


def test_copies_and_slices_must_agree(tmp_path):
    folder, truth = unpacked("tp2", tmp_path)
    file = folder / "optimizer" / "optimizer_pp-0-of-1_tp-1-of-2_exp-0-of-1.pt"
    norm, cut = "model.final_layer_norm.pp_block.weight", "model.decoder.0.pp_block.attn.o_proj.weight"
    change(file, lambda states: states[norm]["exp_avg_sq"].mul_(1.01))
    imp = squisher.extract(folder, bias_correction=False)
    assert torch.equal(imp[norm], truth[norm])
    assert imp.provenance.pollution[0].parameters == (norm,)
    change(file, lambda states: states[norm]["exp_avg_sq"].mul_(3))
    with pytest.raises(FileError, match="final_layer_norm"):
        squisher.extract(folder)
    change(file, lambda states: states[norm]["exp_avg_sq"].copy_(truth[norm]))
    change(file, lambda states: states[cut].update(step=torch.tensor(9.0)))
    with pytest.raises(FileError, match="o_proj.*steps"):
        squisher.extract(folder)
    change(file, lambda states: states[cut].update(step=torch.tensor(3.0), exp_avg_sq=torch.ones(4, 8)))
    with pytest.raises(FileError, match="o_proj.*shapes"):
        squisher.extract(folder)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("unsharded_shape", "(8, 9)"),
        ("unsharded_shape", "eight"),
        ("local_global_slices_pairs", "None,None,None|None,None,None#None,None,None|0,4,None"),
        ("local_global_slices_pairs", "None,None,None|None,None,None#None,None,None|0,8,2"),
        ("local_global_slices_pairs", "None,None,None#None,None,None"),
    ],
)
def test_slices_that_make_no_whole_are_refused(tmp_path, key, text):
    folder, _ = unpacked("tp2", tmp_path)
    file = next(folder.glob("model/**/0/**/o_proj/model_weight_*tp-rank-1-of-2.safetensors"))
    metadata = {
        "version": "1.5",
        "unsharded_shape": "(8, 8)",
        "local_global_slices_pairs": "None,None,None|None,None,None#None,None,None|4,8,None",
    }
    save_file(load_file(file), file, {**metadata, key: text})
    with pytest.raises(FileError, match="o_proj"):
        squisher.extract(folder)
    save_file(load_file(file), file, metadata)
    assert squisher.extract(folder)


def test_expert_parallel_shares_are_refused(tmp_path, run):
    folder = save(tmp_path, *run)
    (folder / "optimizer_pp-0-of-1_tp-0-of-1_exp-0-of-1.pt").rename(
        folder / "optimizer_pp-0-of-1_tp-0-of-1_exp-0-of-2.pt"
    )
    with pytest.raises(FileError, match="expert-parallel"):
        squisher.extract(tmp_path)
