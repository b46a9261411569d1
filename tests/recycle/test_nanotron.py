"""nanotron checkpoints, synthesised by the layout of its serializer: names in the state, runs of elements with ZeRO-1."""

import json

import pytest
import torch
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


def test_tensor_parallel_shares_are_refused(tmp_path, run):
    folder = save(tmp_path, *run)
    (folder / "optimizer_pp-0-of-1_tp-0-of-1_exp-0-of-1.pt").rename(folder / "optimizer_pp-0-of-1_tp-0-of-2.pt")
    with pytest.raises(FileError, match="tensor-parallel"):
        squisher.extract(tmp_path)
