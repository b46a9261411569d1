"""Exact sparsity, against sorting; on mappings, files and modules."""

import math

import pytest
import torch
import torch.nn.utils.prune as torch_prune
from torch import nn

import squisher
from squisher import prune
from squisher.errors import NamingError, SquisherError
from squisher.storage import safetensors as archive
from squisher.storage.tensors import chunks_of


def example(seed=0):
    generator = torch.Generator().manual_seed(seed)
    weights = {
        "a.weight": torch.randn(16, 20, generator=generator),
        "a.bias": torch.randn(16, generator=generator),
        "b.weight": torch.randn(8, 16, generator=generator) * 0.01,
        "steps": torch.tensor(7),
    }
    fisher = {name: torch.rand(w.shape, generator=generator) for name, w in weights.items() if name != "steps"}
    return weights, fisher


def lowest(weights, fisher, sparsity, names):
    """The obvious definition: sort by score, the last of equal ones go first."""
    scores = torch.cat([(0.5 * weights[n] ** 2 * fisher[n]).flatten() for n in names])
    kept = torch.ones(scores.numel(), dtype=torch.bool)
    count = math.floor(sparsity * scores.numel())
    kept[scores.flip(0).sort(stable=True).indices[:count].neg() + scores.numel() - 1] = False
    out, start = {}, 0
    for name in names:
        out[name] = kept[start : start + weights[name].numel()].view(weights[name].shape)
        start += weights[name].numel()
    return out


@pytest.mark.parametrize("sparsity", [0, 0.5, 0.75, 0.9, 0.999, 1])
@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_exactly_the_lowest_become_zero(sparsity, scope):
    weights, fisher = example()
    pruned = prune.weights(weights, fisher, sparsity=sparsity, scope=scope)
    names = list(fisher)
    if scope == "global":
        expected = lowest(weights, fisher, sparsity, names)
    else:
        expected = {n: lowest(weights, fisher, sparsity, [n])[n] for n in names}
    for name in names:
        assert torch.equal(pruned[name], torch.where(expected[name], weights[name], 0.0))
        assert torch.equal(pruned.mask(name), expected[name])
        for size in (3, 1000):
            assert torch.equal(torch.cat(list(chunks_of(pruned, name, size))), pruned[name].flatten())
        assert pruned.counts()[name] == (int(expected[name].sum()), expected[name].numel())
    assert pruned["steps"] == 7
    assert pruned.mask("steps").all()
    assert list(pruned) == list(weights)


def test_ties_zeros_and_denormals_are_cut_exactly():
    for weights in (torch.ones(10, 10), torch.zeros(10, 10), torch.full((10, 10), 1e-20)):
        pruned = prune.weights({"w": weights + 1e-30}, {"w": torch.full((10, 10), 1e-3)}, sparsity=0.37)
        assert int((~pruned.mask("w")).sum()) == 37
        assert pruned.mask("w").flatten()[:63].all()


def test_a_common_factor_changes_nothing_and_scores_differ():
    weights, fisher = example()
    first = prune.weights(weights, squisher.Importance(fisher), sparsity=0.5)
    second = prune.weights(weights, squisher.Importance(fisher) * 7.0, sparsity=0.5)
    assert all(torch.equal(first.mask(n), second.mask(n)) for n in fisher)
    masks = {
        s: prune.weights(weights, fisher, sparsity=0.5, score=s).mask("a.weight") for s in prune.unstructured.SCORES
    }
    assert len({tuple(m.flatten().tolist()) for m in masks.values()}) == 4


def test_exclude_minimum_and_pattern():
    weights, fisher = example()
    pruned = prune.weights(weights, fisher, sparsity=0.5, exclude="bias")
    assert torch.equal(pruned["a.bias"], weights["a.bias"])
    assert sum(int((~pruned.mask(n)).sum()) for n in ("a.weight", "b.weight")) == 448 // 2
    assert prune.weights(weights, fisher, sparsity=0.75).mask("b.weight").sum() == 0
    guarded = prune.weights(weights, fisher, sparsity=0.75, minimum=0.1)
    assert guarded.mask("b.weight").sum() == math.ceil(12.8)
    assert sum(int((~guarded.mask(n)).sum()) for n in fisher) == math.floor(0.75 * 464)
    pattern = prune.weights(weights, fisher, nm="2:4")
    assert (pattern.mask("a.weight").view(-1, 4).sum(1) == 2).all()
    assert pattern.mask("a.bias").all()
    assert torch.equal(torch.cat(list(chunks_of(pattern, "b.weight", 7))), pattern["b.weight"].flatten())


def test_without_an_importance_matrices_are_pruned():
    weights, _ = example()
    pruned = prune.weights(weights, sparsity=0.5, score="magnitude")
    assert pruned.mask("a.bias").all()
    assert sum(int((~pruned.mask(n)).sum()) for n in weights) == 448 // 2


def test_tied_names_are_one_tensor():
    weights = {"embed": torch.randn(5, 4)}
    weights["head"] = weights["embed"]
    pruned = prune.weights(weights, {"embed": torch.rand(5, 4)}, sparsity=0.5)
    assert torch.equal(pruned["embed"], pruned["head"])
    assert int((pruned["head"] == 0).sum()) == 10
    only = {"head": weights["head"]}
    importance = squisher.Importance({"embed": torch.rand(5, 4)}, tied={"head": "embed"})
    assert int((prune.weights(only, importance, sparsity=0.5)["head"] == 0).sum()) == 10


def test_files_in_and_out(tmp_path):
    weights, fisher = example()
    archive.save(tmp_path / "model.safetensors", weights, {})
    squisher.Importance(fisher).save(tmp_path / "i.safetensors")
    lazy, _ = archive.open_archive(tmp_path / "model.safetensors")
    pruned = prune.weights(lazy, squisher.load(tmp_path / "i.safetensors"), sparsity=0.6)
    archive.save(tmp_path / "out.safetensors", pruned, {})
    out, _ = archive.open_archive(tmp_path / "out.safetensors")
    expected = prune.weights(weights, fisher, sparsity=0.6)
    assert all(torch.equal(out[name], expected[name]) for name in weights)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.body = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.norm(self.body(self.embed(x))))


def net_and_fisher():
    torch.manual_seed(0)
    model = Net()
    return model, {name: torch.rand(p.shape) for name, p in model.named_parameters()}


def test_a_module_is_pruned_in_place_as_torch_does():
    model, fisher = net_and_fisher()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected = prune.weights(before, fisher, sparsity=0.5)
    pruned = prune.weights(model, fisher, sparsity=0.5)
    assert torch.equal(model.body.weight, expected["body.weight"])
    assert torch.equal(model.body.weight_orig, before["body.weight"])
    assert torch.equal(model.body.weight_mask.bool(), expected.mask("body.weight"))
    assert pruned.counts() == expected.counts()
    with torch.no_grad():
        model.body.weight_orig.copy_(torch.randn(model.body.weight.shape))  # trained on: the same entries are zero
    assert torch.equal(pruned.mask("body.weight"), expected.mask("body.weight"))
    assert torch.equal(pruned["body.weight"], model.body.weight_orig * model.body.weight_mask)
    with torch.no_grad():
        model.body.weight_orig.copy_(before["body.weight"])
    assert model.head.weight_orig is model.embed.weight_orig  # still tied
    assert torch.equal(model.embed.weight, expected["embed.weight"])
    out = model(torch.arange(4))
    out.sum().backward()
    assert not model.body.weight_orig.grad[~expected.mask("body.weight")].any()
    for module, name in ((model.body, "weight"), (model.body, "bias"), (model.embed, "weight"), (model.head, "weight")):
        assert torch_prune.is_pruned(module)
        torch_prune.remove(module, name)
    assert torch.equal(model.body.weight, expected["body.weight"])
    assert "weight_mask" not in dict(model.body.named_buffers())
    zeros = sum(int((~expected.mask(name)).sum()) for name in before)
    assert zeros == math.floor(0.5 * sum(f.numel() for f in fisher.values()))
    assert torch.equal(model.norm.weight, expected["norm.weight"])


def test_pruning_goes_on_from_what_was_pruned():
    model, fisher = net_and_fisher()
    prune.weights(model, fisher, sparsity=0.3)
    first = {
        n: getattr(model.get_submodule(n.rpartition(".")[0]), n.rpartition(".")[2] + "_mask").bool().clone()
        for n in fisher
    }
    prune.weights(model, fisher, sparsity=0.6)
    total = kept = 0
    for name, mask in first.items():
        now = getattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2] + "_mask").bool()
        assert not (now & ~mask).any()
        total, kept = total + now.numel(), kept + int(now.sum())
    assert kept == total - math.floor(0.6 * total)


def test_a_module_without_importance():
    model, _ = net_and_fisher()
    prune.weights(model, sparsity=0.5, score="random", scope="tensor", exclude="embed")
    assert int((model.body.weight == 0).sum()) == 18
    assert not torch_prune.is_pruned(model.norm)
    assert not torch_prune.is_pruned(model.embed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either a sparsity"),
        ({"sparsity": 0.5, "nm": "2:4"}, "either a sparsity"),
        ({"sparsity": 1.5}, r"from 0 to 1, not 1\.5"),
        ({"sparsity": math.nan}, "not nan"),
        ({"sparsity": 0.5, "minimum": math.nan}, "minimum"),
        ({"sparsity": 0.5, "scope": "layer"}, "scope.*'layer'"),
        ({"sparsity": 0.5, "score": "fish"}, "Did you mean 'fisher'"),
        ({"sparsity": 0.5, "exclude": "("}, "not a regular expression"),
        ({"sparsity": 0.5, "exclude": "."}, "excludes all"),
        ({"sparsity": 0.9, "minimum": 0.5}, "232 are the minimum"),
        ({"sparsity": 0.9, "minimum": 0.5, "scope": "tensor"}, "minimum is for the global scope"),
        ({"nm": "2:4", "minimum": 0.5}, "minimum is for the global scope"),
    ],
)
def test_impossible_wishes(options, message):
    weights, fisher = example()
    with pytest.raises(SquisherError, match=message):
        prune.weights(weights, fisher, **options)


def test_names_and_values_that_do_not_fit():
    weights, fisher = example()
    with pytest.raises(NamingError, match=r"'a\.wight'.*'a\.weight'"):
        prune.weights(weights, {"a.wight": torch.rand(16, 20)}, sparsity=0.5)
    with pytest.raises(NamingError, match=r"'a\.bias'.*\(4,\)"):
        prune.weights(weights, {**fisher, "a.bias": torch.rand(4)}, sparsity=0.5)
    weights["a.weight"][0, 0] = math.nan
    with pytest.raises(SquisherError, match=r"'a\.weight' hold NaN"):
        prune.weights(weights, fisher, sparsity=0.5)
    with pytest.raises(SquisherError, match="needs an importance"):
        prune.weights(weights, sparsity=0.5)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(dtype):
    with pytest.raises(SquisherError, match="'w'.*quantised"):
        prune.weights({"w": torch.ones(4, 4).to(dtype)}, {"w": torch.ones(4, 4)}, sparsity=0.5)
