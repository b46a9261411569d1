"""Recurrent layers and bags of embeddings in single steps: the Fisher of the definition, by the fast way."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import squisher


class _Recurrent(nn.Module):
    def __init__(self, kind, **settings):
        super().__init__()
        self.words, self.layer = nn.Embedding(11, 4), kind(4, 5, **settings)
        self.first = settings.get("batch_first", False)
        self.head = nn.Linear(5 * (1 + settings.get("bidirectional", False)), 3)

    def forward(self, ids):
        x = self.words(ids)
        x, hidden = self.layer(x if self.first else x.transpose(0, 1))
        mean = (hidden[0] if isinstance(hidden, tuple) else hidden).mean((0, 2))
        return self.head(x[:, -1] if self.first else x[0]) + mean[:, None] * torch.tensor([1.0, 0.0, -1.0])


def _agree(model, batches, method="fast"):
    model = model.double().eval()
    found = squisher.fisher(model, batches, dtype=torch.float64)
    assert found.provenance.coverage["method"] == method
    expected = squisher.fisher(model, batches, method="loop", dtype=torch.float64)
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-25)


def _text(length=6):
    g = torch.Generator().manual_seed(0)
    return [(torch.randint(0, 11, (4, length), generator=g), torch.arange(4) % 3) for _ in range(2)]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"batch_first": True, "bias": False},
        {"num_layers": 2, "bidirectional": True, "batch_first": True, "dropout": 0.5},
    ],
    ids=["plain", "without bias", "two layers, both ways"],
)
def test_recurrent_layers(kind, settings):
    torch.manual_seed(0)
    _agree(_Recurrent(kind, **settings), _text())


def test_a_relu_cell_and_a_single_step():
    torch.manual_seed(0)
    _agree(_Recurrent(nn.RNN, nonlinearity="relu"), _text(length=1))


def test_what_stays_with_torch_is_done_by_the_loop():
    torch.manual_seed(0)
    model = _Recurrent(nn.LSTM, proj_size=2)
    model.head = nn.Linear(2, 3)
    _agree(model, _text(), method="loop")


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_of_embeddings(mode):
    torch.manual_seed(0)
    _agree(nn.Sequential(nn.EmbeddingBag(11, 4, mode=mode), nn.Tanh(), nn.Linear(4, 3)), _text())


def test_bags_of_the_largest_are_done_by_the_loop():
    torch.manual_seed(0)
    _agree(nn.Sequential(nn.EmbeddingBag(11, 4, mode="max"), nn.Linear(4, 3)), _text(), method="loop")
