"""Names where hundreds of tensors have one shape, as the experts of many layers: not all can be compared with all."""

import numpy as np
import pytest
import torch
from torch import nn

import squisher
from squisher.errors import NamingError
from squisher.recycle.naming import evidence, exchanges, values
from squisher.recycle.naming.laws import Reading
from squisher.recycle.states import Candidate, Entry


def _experts(layers, experts):
    """Parameters of a mixture of experts, and their states; no two alike."""
    torch.manual_seed(0)
    shapes = {
        f"layers.{layer}.experts.{expert}.{name}.weight": shape
        for layer in range(layers)
        for expert in range(experts)
        for name, shape in (("up", (16, 12)), ("down", (12, 16)))
    }
    candidates = [Candidate(name, shape, weight=torch.randn(shape)) for name, shape in shapes.items()]
    group = {"betas": (0.9, 0.999), "weight_decay": 0.1, "decoupled_weight_decay": False}
    states = [{"step": 5, "exp_avg": torch.randn(s), "exp_avg_sq": torch.rand(s)} for s in shapes.values()]
    return candidates, [Entry(state, group) for state in states]


def test_what_is_read_does_not_depend_on_how_many_there_are(monkeypatch):
    candidates, entries = _experts(2, 3)
    few = values.Values(candidates, entries)
    monkeypatch.setattr(values, "_CROWD", 2)
    many = values.Values(candidates, entries)
    assert few.comparable
    assert not many.comparable
    for candidate, entry in ((0, 0), (0, 4), (3, 9)):
        for reading in (Reading(0), Reading(1)):
            expected = few.together(candidate, entry, reading)
            np.testing.assert_allclose(many.together(candidate, entry, reading), expected, rtol=1e-5, atol=1e-5)


def test_exchanges_grow_with_the_tensors_and_not_with_their_pairs(monkeypatch):
    monkeypatch.setattr(exchanges, "PAIRS", 100)
    counts = []
    for layers in (8, 16, 32):
        own = values.Values(*_experts(layers, 8))
        usable = {c: c for c in range(len(own.candidates))}
        counts.append(sum(1 for _ in exchanges._moves(own, usable, False)))
    assert counts[2] - counts[1] < 3 * (counts[1] - counts[0]) < 3 * 16 * 8 * 2 * 20


def test_laws_looked_for_nearby_are_those_found_among_all(monkeypatch):
    """The gradients of one batch obey the laws exactly, whatever the order of the optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(14) for m in (nn.Linear(32, 32, bias=False), nn.LeakyReLU(0.5))))
    nn.init.orthogonal_(model[0].weight)
    (model(torch.randn(64, 32)) * torch.randn(64, 32)).sum().backward()
    own = [(name, p) for name, p in model.named_parameters() if p.ndim == 2]
    candidates = [Candidate(name, tuple(p.shape), weight=p.detach()) for name, p in own]
    entries = [Entry({"step": 1, "exp_avg": p.grad, "exp_avg_sq": p.grad**2}, {}) for _, p in reversed(own)]
    found = []
    for window in (128, 8):
        monkeypatch.setattr(evidence, "WINDOW", window)
        votes = list(evidence._by_laws(values.Values(candidates, entries)))
        found.append({vote.entry: vote.candidate for vote in votes})
    assert found[0] == found[1]
    assert len(found[0]) > 5
    assert all(entry == 13 - candidate for entry, candidate in found[0].items())


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.start, self.end = nn.Linear(16, 24), nn.Linear(24, 5)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))

    def forward(self, x):
        x = torch.relu(self.start(x))
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.end(x)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
def test_a_crowd_is_still_compared_part_by_part(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(values, "_CROWD", 2)
    monkeypatch.setattr(values, "_RECENT", 3)
    for turned in (False, True):
        torch.manual_seed(0)
        model = Deep()
        layers = reversed(model.layers) if turned else model.layers
        order = [
            *model.start.parameters(),
            *model.end.parameters(),
            *(p for layer in layers for p in layer.parameters()),
        ]
        optimizer = kind(order, 1e-3)
        for _ in range(120):
            x = torch.randn(48, 16)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), x[:, :5].argmax(1)).backward()
            optimizer.step()
        path = tmp_path / f"{turned}.pt"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        if turned:
            with pytest.raises(NamingError, match="contradict|Nothing tells"):
                squisher.extract(path)
        else:
            found = squisher.extract(path, bias_correction=False)
            key = "exp_avg_sq" if kind is torch.optim.AdamW else "square_avg"
            assert all(torch.equal(found[n], optimizer.state[p][key]) for n, p in model.named_parameters())
