"""Rows that are sorted by expert keep their examples: mixtures of experts are measured at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from squisher.measure import fisher

WIDTH, EXPERTS, EACH = 8, 4, 2


class Experts(nn.Module):
    """Tokens go to two experts each, sorted by expert, as Hugging Face's grouped implementation does it.

    `way`: "plain" · "stored" (experts stored as (columns of the input, columns of the output)) · "frozen" (no gradient for them) ·
    "biased" (a bias for each expert, looked up for sorted rows) · "mixed" (the rows of an expert influence each other) · "gain" (a parameter on sorted rows, without a rule) · "lost" (not put back).
    """

    def __init__(self, way: str):
        super().__init__()
        self.way = way
        self.embed, self.router = nn.Linear(5, WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH, requires_grad=True))
        self.down = nn.Parameter(torch.randn(EXPERTS, 4, WIDTH))
        self.gain = nn.Parameter(torch.rand(WIDTH))
        self.bias = nn.Parameter(torch.rand(EXPERTS, WIDTH))
        if way == "frozen":
            self.up.requires_grad_(False)

    def forward(self, x):
        h = self.embed(x).flatten(0, 1)
        weights, chosen = self.router(h).softmax(-1).topk(EACH, -1)
        sorted_by, order = chosen.reshape(-1).sort()
        ends = torch.bincount(sorted_by, minlength=EXPERTS).cumsum(0).int()
        rows = h[order // EACH]
        rows = rows.cumsum(0) if self.way == "mixed" else rows * self.gain if self.way == "gain" else rows
        up = self.up if self.way == "stored" else self.up.transpose(-2, -1)
        rows = F.grouped_mm(rows, up, offs=ends)
        rows = F.silu(rows + self.bias[sorted_by] if self.way == "biased" else rows)
        rows = F.grouped_mm(rows, self.down.transpose(-2, -1), offs=ends)
        rows = rows * weights.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        rows = rows if self.way == "lost" else rows[back]
        return rows.view(len(x), -1, 4).sum(1)


def _case(way):
    torch.manual_seed(0)
    model = Experts(way)
    return model, [(torch.randn(6, 3, 5), torch.randint(0, 4, (6,))), (torch.randn(4, 3, 5), torch.randint(0, 4, (4,)))]


@pytest.mark.parametrize("labels", ["data", "exact"])
@pytest.mark.parametrize("way", ["plain", "stored", "frozen", "biased"])
def test_sorted_tokens(way, labels):
    model, batches = _case(way)
    expected = fisher(model, batches, labels=labels, method="loop")
    found = fisher(model, batches, labels=labels, method="fast")
    assert found.provenance.coverage["loop"] == {}
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) <= 1e-5 * float(value.max()), name


@pytest.mark.parametrize("way", ["gain"])
def test_what_has_no_rule_is_left_to_the_loop(way):
    model, batches = _case(way)
    expected, found = fisher(model, batches, method="loop"), fisher(model, batches)
    assert found.provenance.coverage["method"] == "loop"
    for name, value in expected.items():
        assert torch.equal(found[name], value)


@pytest.mark.parametrize("way", ["mixed", "lost"])
def test_rows_that_mix_or_are_not_put_back_are_refused(way):
    model, batches = _case(way)
    with pytest.raises(Exception, match="Examples influence each other"):
        fisher(model, batches)


def test_rows_that_are_taken_in_another_order_and_put_back():
    class Shuffled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 4)

        def forward(self, x):
            order = x[:, 0].argsort()
            return self.last(torch.tanh(self.first(x)[order])[order.argsort()])

    torch.manual_seed(0)
    model, batches = Shuffled().double(), [(torch.randn(7, 5, dtype=torch.float64), torch.randint(0, 4, (7,)))]
    expected, found = fisher(model, batches, method="loop"), fisher(model, batches, method="fast")
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-6), name
