"""The definition against closed forms, and the invariants that every engine inherits from it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from squisher.measure import fisher

torch.manual_seed(0)
X = torch.randn(12, 5).double()
Y = torch.randint(0, 4, (12,))


def _model():
    torch.manual_seed(1)
    return nn.Linear(5, 4).double()


def _batches(x, y, size):
    return list(zip(x.split(size), y.split(size), strict=True))


def _fisher(model, batches, **settings):
    return fisher(model, batches, method="loop", dtype=torch.float64, **settings)


def test_softmax_regression_has_a_closed_form():
    model = _model()
    p = model(X).softmax(1).detach()
    error = p - nn.functional.one_hot(Y, 4)
    data = _fisher(model, _batches(X, Y, 5))
    assert torch.allclose(data["weight"], torch.einsum("nc,nd->cd", error**2, X**2) / 12, rtol=1e-12)
    assert torch.allclose(data["bias"], (error**2).mean(0), rtol=1e-12)
    exact = _fisher(model, [X], labels="exact")
    assert torch.allclose(exact["weight"], torch.einsum("nc,nd->cd", p * (1 - p), X**2) / 12, rtol=1e-12)
    assert torch.allclose(exact["bias"], (p * (1 - p)).mean(0), rtol=1e-12)
    joint = _fisher(model, _batches(X, Y, 4), per="batch")
    expected = sum((e.T @ x) ** 2 for e, x in zip(error.split(4), X.split(4), strict=True)) / 12
    assert torch.allclose(joint["weight"], expected, rtol=1e-12)


def test_linear_regression_and_bernoulli_have_closed_forms():
    model = _model()
    y = torch.randn(12, 4).double()
    data = _fisher(model, [(X, y)], likelihood="gaussian")
    assert torch.allclose(data["bias"], ((model(X) - y) ** 2).mean(0).detach(), rtol=1e-12)
    exact = _fisher(model, [X], likelihood="gaussian", labels="exact")
    assert torch.allclose(exact["bias"], torch.ones(4).double(), rtol=1e-12)
    p = model(X).sigmoid().detach()
    exact = _fisher(model, [X], likelihood="bernoulli", labels="exact")
    assert torch.allclose(exact["bias"], (p * (1 - p)).mean(0), rtol=1e-12)


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
@pytest.mark.parametrize("per", ["example", "batch"])
def test_sampled_labels_are_unbiased_for_the_fisher(likelihood, per):
    model = _model()
    exact = _fisher(model, [X], likelihood=likelihood, labels="exact")
    draws = 300
    sampled = _fisher(model, X.split(6), likelihood=likelihood, labels="sampled", draws=draws, per=per)
    for name in exact:
        assert float((sampled[name] - exact[name]).abs().max() / exact[name].max()) < 0.3
    assert float(sampled["weight"].sum() / exact["weight"].sum()) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("labels", ["data", "sampled", "exact"])
def test_batch_size_does_not_matter(labels):
    whole = _fisher(_model(), [(X, Y)], labels=labels, seed=3)
    parts = _fisher(_model(), _batches(X, Y, 5), labels=labels, seed=3)
    for name in whole:
        assert torch.allclose(whole[name], parts[name], rtol=1e-12)


def test_order_does_not_matter_and_seeds_do():
    order = torch.randperm(12)
    a, b = _fisher(_model(), [(X, Y)]), _fisher(_model(), [(X[order], Y[order])])
    assert torch.allclose(a["weight"], b["weight"], rtol=1e-12)
    one, two = (_fisher(_model(), [X], labels="sampled", seed=seed) for seed in (0, 1))
    assert not torch.allclose(one["weight"], two["weight"])


class _Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, ids):
        return self.head(self.embedding(ids).cumsum(1))


def test_a_sequence_is_as_much_as_its_tokens_for_sampled_labels():
    """E[per sequence] = mean length × E[per token]; with data labels it is not so."""
    torch.manual_seed(0)
    model = _Tokens().double()
    ids, labels = torch.randint(0, 7, (6, 5)), torch.randint(0, 7, (6, 5))
    labels[::2, 3:] = -100  # lengths 3 and 5
    settings = {"likelihood": "tokens", "labels": "sampled", "draws": 150}
    sequence = _fisher(model, [(ids, labels)], **settings)
    token = _fisher(model, [(ids, labels)], unit="token", **settings)
    assert token.provenance.unit == "token"
    assert sequence.provenance.unit == "sequence"
    assert token.provenance.tokens == 24
    for name in sequence:
        assert float(sequence[name].sum() / token[name].sum()) == pytest.approx(4, rel=0.15)


@pytest.mark.parametrize("labels", ["data", "sampled"])
def test_signed_sums_of_tokens_are_unbiased_for_their_squares(labels):
    torch.manual_seed(0)
    model = _Tokens().double()
    ids, targets = torch.randint(0, 7, (6, 5)), torch.randint(0, 7, (6, 5))
    targets[::2, 3:] = -100
    settings = {"likelihood": "tokens", "unit": "token", "labels": labels, "dtype": torch.float64}
    each = fisher(model, [(ids, targets)], **settings)
    signed = fisher(model, [(ids, targets)], signs=3000, **settings)
    assert signed.provenance.tokens == 24
    sequence = fisher(model, [(ids, targets)], **{**settings, "unit": "sequence"})
    for name in each:
        error = float((signed[name] - each[name]).abs().max() / each[name].max())
        assert error < 0.1
        # Without signs the products of tokens would stay.
        assert labels == "sampled" or float((sequence[name] / 4 - each[name]).abs().max() / each[name].max()) > 0.2


def test_token_unit_squares_each_token():
    torch.manual_seed(0)
    model = _Tokens().double()
    ids, labels = torch.randint(0, 7, (3, 4)), torch.randint(0, 7, (3, 4))
    found = _fisher(model, [(ids, labels)], likelihood="tokens", unit="token")
    expected = torch.zeros_like(model.head.weight)
    for n in range(3):
        for t in range(4):
            loss = nn.functional.cross_entropy(model(ids[n : n + 1])[0, t], labels[n, t])
            expected += torch.autograd.grad(loss, model.head.weight)[0] ** 2
    assert torch.allclose(found["head.weight"], expected / 12, rtol=1e-12)
