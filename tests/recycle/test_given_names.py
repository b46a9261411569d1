"""Names by the user, in a wrong order that fits every shape: refused, or it is said what the values do not tell apart."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import squisher
from squisher.errors import NamingError

WIDTH = 16


class Gated(nn.Module):
    """A network of gated convolutions as WaveNet's: lists of layers of one shape, none of which reads its neighbour."""

    def __init__(self):
        super().__init__()
        self.start, self.end = nn.Conv1d(1, WIDTH, 1), nn.Conv1d(WIDTH, 5, 1)
        self.filters, self.gates, self.outputs = (
            nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 1) for _ in range(2)) for _ in range(3)
        )

    def forward(self, x):
        x, out = self.start(x[:, None]), 0
        for f, g, o in zip(self.filters, self.gates, self.outputs, strict=True):
            h = o(torch.tanh(f(x)) * torch.sigmoid(g(x)))
            x, out = x + h, out + h
        return self.end(torch.relu(out)).mean(2)


def convolutions():
    hidden = [m for _ in range(3) for m in (nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU())]
    first = [nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, WIDTH, 3, padding=1)]
    return nn.Sequential(*first, *hidden, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 5))


def linear():
    hidden = [m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 5))


MODELS = {"gated": Gated, "convolutions": convolutions, "linear": linear}


def saved(path, kind, optimizer, steps):
    """Train and save; return the names in the order of the optimizer, and the shapes."""
    torch.manual_seed(steps)
    model = MODELS[kind]()
    optimizer = optimizer(model.parameters(), lr=1e-3)
    for _ in range(steps):
        x = torch.randn(24, WIDTH)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), x[:, :5].argmax(1)).backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return {name: p.shape for name, p in model.named_parameters()}


def exchanges(shapes):
    """Yield wrong orders: of every shape two neighbours exchanged, the first and the last, and all rotated."""
    for shape in dict.fromkeys(shapes.values()):
        same = [name for name in shapes if shapes[name] == shape]
        for own in (same, *itertools.pairwise(same)):
            turned = dict(zip(own, [*own[1:], own[0]], strict=True))
            if len(set(own)) > 1:
                yield [turned.get(name, name) for name in shapes]


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
@pytest.mark.parametrize(("kind", "steps"), [("gated", 1), ("convolutions", 10), ("linear", 20)])
def test_no_wrong_order_passes_without_a_word(tmp_path, kind, steps, optimizer):
    shapes = saved(tmp_path / "c.pt", kind, optimizer, steps)
    squisher.extract(tmp_path / "c.pt", names=list(shapes))  # the right ones are not refused
    for names in list(exchanges(shapes))[::3]:
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                naming = squisher.extract(tmp_path / "c.pt", names=names).provenance.naming
        except NamingError:
            continue
        assert {naming.of(name).level for name in names} == {"given"}
        assert "do not tell" in naming.of(names[0]).by
        assert bool(said) == ("favour" in naming.of(names[0]).by)


def test_numbers_without_any_evidence_are_named_as_such(tmp_path):
    """Two temperatures: nothing can be read of a single number."""
    model = nn.Linear(WIDTH, 5)
    model.first, model.second = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(2.0))
    optimizer = torch.optim.Adam(model.parameters())
    (model(torch.randn(8, WIDTH)).square().mean() * model.first + model.second).backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    names = [name for name, _ in model.named_parameters()]
    naming = squisher.extract(tmp_path / "c.pt", names=names).provenance.naming
    assert "'first' from 'second'" in naming.of("weight").by


class Product(nn.Module):
    """A layer whose rows are inputs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 32**0.5)
        self.bias = nn.Parameter(torch.zeros(32))

    def forward(self, x):
        return torch.relu(x @ self.weight + self.bias)


@pytest.mark.parametrize("steps", [5, 60])
def test_a_bias_is_not_compared_with_the_inputs_of_its_layer(tmp_path, steps):
    """v of a bias goes with the outputs of its weight, which of a square one of `x @ w` are the columns."""
    torch.manual_seed(steps + 4)
    model = nn.Sequential(*(Product() for _ in range(4)), nn.Linear(32, 5))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(steps):
        x = torch.randn(24, 32) * torch.linspace(0.3, 2, 32) + 0.2
        optimizer.zero_grad()
        functional.cross_entropy(model(x), x[:, :5].argmax(1)).backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    squisher.extract(tmp_path / "c.pt", names=[name for name, _ in model.named_parameters()])  # not contradicted


class HeadFirst(nn.Module):
    """A language model that registers its head before its embedding."""

    def __init__(self):
        super().__init__()
        self.head, self.norm = nn.Linear(32, 40, bias=False), nn.LayerNorm(32)
        self.ups, self.downs = (nn.ModuleList(nn.Linear(*size) for _ in range(2)) for size in ((32, 64), (64, 32)))
        self.emb = nn.Embedding(40, 32)

    def forward(self, ids):
        x = self.emb(ids)
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(torch.relu(up(x)))
        return self.head(self.norm(x))


@pytest.mark.parametrize("seed", [2, 3])
def test_a_head_that_is_registered_first_is_no_embedding(tmp_path, seed):
    torch.manual_seed(seed)
    model, turned = HeadFirst(), torch.randperm(40)
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-3)
    for _ in range(20):
        ids = torch.randint(40, (8, 12))
        optimizer.zero_grad()
        functional.cross_entropy(model(ids).flatten(0, 1), turned[ids].flatten()).backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    imp = squisher.extract(tmp_path / "c.pt", bias_correction=False)
    assert all(torch.equal(imp[n], optimizer.state[p]["square_avg"]) for n, p in model.named_parameters())


class Uncertain(nn.Module):
    """A layer whose weights are drawn: means, and spreads that all begin alike."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.mu = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.rho = nn.Parameter(torch.full((outputs, inputs), -4.0))

    def forward(self, x):
        return functional.linear(x, self.mu + functional.softplus(self.rho) * torch.randn_like(self.mu))


def test_what_v_prefers_a_little_is_not_told(tmp_path):
    """After one step v of a mean looks rather like that of a spread: names that exchange them do not pass without a word."""
    torch.manual_seed(3013)
    model = nn.ModuleDict({name: Uncertain(32, outputs) for name, outputs in (("a", 32), ("b", 32), ("c", 5))})
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    x = torch.randn(24, 32) * torch.linspace(0.3, 2, 32) + 0.2
    h = torch.relu(model["b"](torch.relu(model["a"](x))))
    loss = functional.cross_entropy(model["c"](h), x[:, :5].argmax(1))
    (loss + 1e-3 * sum((p**2).mean() for p in model.parameters())).backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    names = [name for name, _ in model.named_parameters()]
    given = [*names[:4], "c.rho", "c.mu"]
    assert "'c.rho'" in squisher.extract(tmp_path / "c.pt", names=given).provenance.naming.by
