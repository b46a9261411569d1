"""Names by the user, in a wrong order that fits every shape: refused, or it is said what the values do not tell apart."""

from __future__ import annotations

import itertools

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
            naming = squisher.extract(tmp_path / "c.pt", names=names).provenance.naming
        except NamingError:
            continue
        assert {naming.of(name).level for name in names} == {"given"}
        assert "do not tell" in naming.of(names[0]).by


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
