"""Norms and biases in lists of their own, in groups that a script chose: refused or right. Modules that are read by several."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import squisher
from squisher.errors import NamingError

WIDTH = 32


def batch():
    x = torch.randn(32, WIDTH) * torch.linspace(0.3, 2, WIDTH) + 0.2
    return x, x[:, :5].argmax(1)


class Block(nn.Module):
    """Two layers beside the identity, behind a norm."""

    def __init__(self, width, norm=nn.LayerNorm):
        super().__init__()
        self.norm, self.fc1, self.fc2 = norm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.fc2(functional.gelu(self.fc1(self.norm(x))))


class Residual(nn.Module):
    """Blocks between a first layer and a norm with a head."""

    def __init__(self, width=WIDTH, norm=nn.LayerNorm):
        super().__init__()
        self.inp, self.blocks = nn.Linear(WIDTH, width), nn.ModuleList(Block(width, norm) for _ in range(2))
        self.norm, self.head = norm(width), nn.Linear(width, 5, bias=False)

    def loss(self):
        x, y = batch()
        return functional.cross_entropy(self.head(self.norm(nn.Sequential(*self.blocks)(self.inp(x)))), y)


class Experts(nn.Module):
    """Four experts that read one layer."""

    def __init__(self):
        super().__init__()
        self.inp, self.gate = nn.Linear(WIDTH, 96), nn.Linear(96, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 96)) for _ in range(4))
        self.head = nn.Linear(96, 5)

    def loss(self):
        x, y = batch()
        h = torch.relu(self.inp(x))
        outputs = torch.stack([expert(h) for expert in self.experts], 1)
        return functional.cross_entropy(self.head((self.gate(h).softmax(-1)[..., None] * outputs).sum(1)), y)


class Cycle(nn.Module):
    """Two generators of one shape, each judged by what the other makes of its pictures, and two critics."""

    def __init__(self):
        super().__init__()
        self.there, self.back = (self.network(16, WIDTH, 16) for _ in range(2))
        self.critic_a, self.critic_b = (self.network(16, WIDTH, 1) for _ in range(2))

    @staticmethod
    def network(*sizes):
        a, b, c = sizes
        return nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, b), nn.ReLU(), nn.Linear(b, c))

    def loss(self):
        a, b = torch.randn(24, 16) * torch.linspace(0.2, 2, 16), torch.randn(24, 16) + torch.linspace(-1, 1, 16)
        there, back = self.there(a), self.back(b)
        judged = (self.critic_b(there) - 1).square().mean() + (self.critic_a(back) - 1).square().mean()
        return judged + (self.back(there) - a).abs().mean() + (self.there(back) - b).abs().mean()


def trained(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss().backward()
        optimizer.step()


def extracted(path, content):
    torch.save(content, path)
    return squisher.extract(path, bias_correction=False)


def right(imp, model, optimizer):
    """Whether every importance is that of the parameter of its name."""
    states = {name: optimizer.state.get(p, {}) for name, p in model.named_parameters()}
    return all(torch.equal(imp[name], states[name].get("exp_avg_sq", torch.empty(0))) for name in imp)


def kinds(model):
    """The norms' weights and biases, and the biases of layers, in the order of the model."""
    norms = {id(p) for m in model.modules() if isinstance(m, (nn.LayerNorm, nn.BatchNorm1d)) for p in m.parameters()}
    vectors = [p for p in model.parameters() if p.ndim == 1]
    return [p for p in vectors if id(p) in norms], [p for p in vectors if id(p) not in norms]


@pytest.mark.parametrize("steps", [1, 8])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("width", [24, 96])
def test_norms_and_biases_alone_are_trained_one_after_the_other(tmp_path, width, turned, steps):
    """As BitFit does: the matrices, of which no state is there, still say which vectors are biases."""
    torch.manual_seed(width)
    model = Residual(width)
    model.inp.bias = None  # so that the first vectors are a norm's
    norms, biases = kinds(model)
    optimizer = torch.optim.Adam([*biases, *norms] if turned else [*norms, *biases], lr=1e-3)
    trained(model, optimizer, steps)
    with pytest.raises(NamingError):
        extracted(tmp_path / "c.pt", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("rate", [1e-3, 5e-3])
def test_biases_before_norms_in_the_groups_of_each_layer(tmp_path, seed, rate):
    """The norms of all groups could each belong to the layer before: where they are in several groups, that is a doubt."""
    torch.manual_seed(seed)
    model = Residual(128, nn.BatchNorm1d)
    norms, biases = kinds(model)
    places = {id(p): name.split(".")[1] if name.count(".") > 1 else "" for name, p in model.named_parameters()}
    groups = []
    for place in ("", "0", "1"):
        own = [p for p in model.parameters() if places[id(p)] == place and p.ndim > 1]
        vectors = [p for p in (*biases, *norms) if places[id(p)] == place]
        groups += [{"params": own}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate)
    trained(model, optimizer, 150)
    try:
        imp = extracted(tmp_path / "c.pt", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    except NamingError:
        return
    assert right(imp, model, optimizer)


@pytest.mark.parametrize("seed", range(2))
def test_an_expert_that_was_replaced_is_not_vouched_for_by_the_others(tmp_path, seed):
    """What all experts read together holds without one of them nearly as well."""
    torch.manual_seed(seed)
    model = Experts()
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3)
    trained(model, optimizer, 100)
    model.experts[2][0] = nn.Linear(96, 96)
    trained(model, optimizer, 1)
    with pytest.raises(NamingError):
        extracted(tmp_path / "c.pt", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})


@pytest.mark.parametrize("turned", [False, True])
def test_two_of_four_networks_that_one_optimizer_steps(tmp_path, turned):
    """As CycleGAN's script saves them; a moving average beside them leaves two answers."""
    torch.manual_seed(0)
    model = Cycle()
    pair = ("back", "there") if turned else ("there", "back")
    optimizer = torch.optim.Adam([p for name in pair for p in getattr(model, name).parameters()], lr=1e-3)
    trained(model, optimizer, 60)
    content = {name: network.state_dict() for name, network in model.named_children()}
    content["optimizer_G"] = optimizer.state_dict()
    if turned:
        with pytest.raises(NamingError):
            extracted(tmp_path / "c.pt", content)
        return
    assert right(extracted(tmp_path / "c.pt", content), model, optimizer)
    average = {name: value + 1e-3 * torch.randn_like(value) for name, value in content["there"].items()}
    with pytest.raises(NamingError):
        extracted(tmp_path / "two.pt", {**content, "there_ema": average})
