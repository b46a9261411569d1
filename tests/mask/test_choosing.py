"""The mask of the most important entries, against sorting."""

import math

import pytest
import torch
from torch import nn

import squisher
from squisher import mask
from squisher.errors import ArgumentError, NamingError, SquisherError, SquisherWarning
from tests.processes import run_together


def importance(seed=0, **provenance):
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "body.weight": torch.rand(20, 30, generator=generator),
        "body.bias": torch.rand(20, generator=generator) * 0.1,
        "head.weight": torch.rand(4, 20, generator=generator) * 0.1,
    }
    return squisher.Importance(tensors, **provenance)


def flat(masks):
    return torch.cat([masks[name].flatten() for name in masks])


@pytest.mark.parametrize("keep", [0.0, 0.005, 0.1, 0.29, 0.5, 0.999, 1.0])
def test_exactly_the_largest(keep):
    imp = importance()
    found = mask.top_k(imp, keep)
    values = flat(imp)
    k = math.floor(keep * values.numel())
    expected = torch.zeros(values.numel(), dtype=torch.bool)
    expected[values.sort(descending=True, stable=True).indices[:k]] = True
    assert torch.equal(flat(found), expected)
    assert found.kept == k


@pytest.mark.parametrize("keep", [0.0, 0.005, 0.29, 0.999, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_exactly_the_smallest(keep, dtype):
    tensors = {name: values.to(dtype) for name, values in importance().items()}
    tensors["body.bias"][:6] = torch.tensor(
        [0.0, -0.0, 1e-40, 1e-44, 0.0, 3e38], dtype=dtype
    )  # zeros and denormals too
    found = mask.top_k(tensors, keep, largest=False)
    values = flat(tensors)
    k = math.floor(keep * values.numel())
    expected = torch.zeros(values.numel(), dtype=torch.bool)
    expected[values.sort(stable=True).indices[:k]] = True
    assert torch.equal(flat(found), expected)
    assert found.provenance["largest"] is False
    ahead = mask.top_k(tensors, 0.3, largest=False, always="head", minimum=0.05)
    assert ahead["head.weight"].all()
    assert not ahead["body.bias"][5]
    with pytest.raises(SquisherError, match="NaN|negative"):
        mask.top_k({"a": torch.tensor([1.0, float("nan")], dtype=dtype)}, 0.5, largest=False)


def test_a_common_factor_and_a_plain_dict_change_nothing():
    imp = importance()
    expected = mask.top_k(imp, 0.1)
    for other in (imp * 1000.0, dict(imp)):
        found = mask.top_k(other, 0.1)
        assert all(torch.equal(found[name], expected[name]) for name in imp)


def test_always_counts_inside_the_budget():
    imp = importance()
    found = mask.top_k(imp, 0.2, always=r"head")
    assert found["head.weight"].all()
    assert found.kept == math.floor(0.2 * 700)
    rest = mask.top_k(imp.restrict("body"), 60 / 620)
    assert all(torch.equal(found[name], rest[name]) for name in rest)


def test_a_minimum_for_every_tensor():
    imp = importance()
    assert mask.top_k(imp, 0.1).count("body.bias") == 0
    found = mask.top_k(imp, 0.1, minimum=0.05)
    assert found.kept == 70
    assert found.count("body.bias") == 1
    assert found.count("head.weight") == 4
    best = imp["head.weight"].flatten().topk(4).indices.sort().values
    assert found.indices("head.weight").tolist() == best.tolist()


def test_a_file_gives_the_same_mask(tmp_path):
    importance().save(tmp_path / "i.safetensors")
    found = mask.top_k(squisher.load(tmp_path / "i.safetensors"), 0.05)
    assert torch.equal(flat(found), flat(mask.top_k(importance(), 0.05)))
    assert found.provenance["k"] == 35
    assert found.provenance["total"] == 700
    assert found.provenance["importance"]["kind"] == "fisher"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(30, 20)
        self.head = nn.Linear(20, 4)
        self.fixed = nn.Linear(2, 2)


ABSENT = {"head.bias": "no gradient ever reached it", "fixed.weight": "frozen (requires_grad is False)"}


@pytest.mark.parametrize("model", [Net(), Net().state_dict()], ids=["module", "weights"])
def test_trainable_parameters_without_importance_count(model):
    found = mask.top_k(importance(absent=ABSENT), 0.5, model=model)
    assert found.kept == 704 // 2
    assert found.total == 704
    assert not found["head.bias"].any()
    assert "fixed.weight" not in found
    found = mask.top_k(importance(absent=ABSENT), 0.5, always="head", model=model)
    assert found["head.bias"].all()
    assert found.kept == 704 // 2


def test_without_their_sizes_they_are_warned_about_or_refused():
    with pytest.warns(SquisherWarning, match=r"1 trainable.*'head\.bias'.*frozen"):
        assert mask.top_k(importance(absent=ABSENT), 0.5).kept == 350
    with pytest.raises(SquisherError, match=r"'head\.bias'.*model="):
        mask.top_k(importance(absent=ABSENT), 0.5, always="head")
    with pytest.raises(ArgumentError, match="regular expression"):
        mask.top_k(importance(absent=ABSENT), 0.5, always="(", model=Net())
    with pytest.raises(NamingError, match=r"'head\.bias'.*the model"):
        mask.top_k(importance(absent=ABSENT), 0.5, model={"body.weight": torch.zeros(1)})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep": 1.5}, r"from 0 to 1, not 1\.5"),
        ({"keep": math.nan}, "from 0 to 1, not nan"),
        ({"keep": 0.1, "minimum": 2}, "minimum is the fraction"),
        ({"keep": 0.1, "always": "head"}, r"keep=0\.1.* 70 .* 80 "),
        ({"keep": 0.5, "always": "nose"}, "'nose' matches no parameter"),
        ({"keep": 0.5, "always": "("}, "not a regular expression"),
    ],
)
def test_impossible_wishes(arguments, message):
    with pytest.raises(SquisherError, match=message):
        mask.top_k(importance(), **arguments)
    with pytest.raises(SquisherError, match="empty"):
        mask.top_k({}, 0.5)


def _shard(rank):
    mine = importance().restrict("bias|head" if rank else "body.weight")
    return dict(mask.top_k(mine, 0.2, always="head", sharded=True))


def test_processes_that_hold_other_parameters_share_one_budget(tmp_path):
    first, second = run_together(_shard, tmp_path)
    found = {**first, **second}
    expected = mask.top_k(importance(), 0.2, always="head")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
