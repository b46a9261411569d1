"""What well-known libraries call the Fisher, re-implemented from their formulas on one small model; docs/which-fisher.md.

The table on that page holds the numbers that this test computes: it fails if they are not the same.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from squisher.measure import fisher

PAGE = Path(__file__).parents[1] / "docs" / "which-fisher.md"
N, FEATURES, CLASSES = 512, 20, 10


@pytest.fixture(scope="module")
def setting():
    """Softmax regression with labels drawn from the model: the data's labels are as good as the model's."""
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, CLASSES).double()
    with torch.no_grad():
        model.weight.normal_(std=0.3)
    x = torch.randn(N, FEATURES).double()
    return model, x, drawn(model(x).softmax(1))


def drawn(probabilities: Tensor) -> Tensor:
    """One label for each row, by the inverse of its distribution function: torch.multinomial draws others in each version."""
    return (torch.rand(len(probabilities), 1) > probabilities.detach().cumsum(1)).sum(1).clamp_max(CLASSES - 1)


def _gradient(model: nn.Linear, scalar: Tensor) -> Tensor:
    return torch.autograd.grad(scalar, model.weight, retain_graph=True)[0]


def _log_p(model, x):
    return model(x).log_softmax(1)


def squared_batch_mean(model, x, y, batch, sampled=False):
    """Avalanche's EWC (data labels) and task2vec's montecarlo_fisher (sampled): the mean over batches of (mean gradient)²."""
    total = []
    for part, labels in zip(x.split(batch), y.split(batch), strict=True):
        logs = _log_p(model, part)
        if sampled:
            labels = drawn(logs.exp())
        total.append(_gradient(model, nn.functional.nll_loss(logs, labels)) ** 2)
    return torch.stack(total).mean(0)


def cross_terms(model, x, y, batch):
    """fusion_bench's and MergeLM's Fisher merging: (Σ over the batch and the classes of √p · ∇ log p)², over the examples."""
    total = torch.zeros_like(model.weight)
    for part in x.split(batch):
        logs = _log_p(model, part)
        total += _gradient(model, (logs.detach().exp().sqrt() * logs).sum()) ** 2
    return total / len(x)


def weighted_true_label(model, x, y):
    """mammoth's EwcOn: the probability of the true label times its squared gradient, one example at a time."""
    total = torch.zeros_like(model.weight)
    for n in range(len(x)):
        log = _log_p(model, x[n : n + 1])[0, y[n]]
        total += log.detach().exp() * _gradient(model, log) ** 2
    return total / len(x)


def all_classes(model, x, y):
    """van de Ven's EWC: every class, weighted by its probability, one example at a time, over N − 1."""
    total = torch.zeros_like(model.weight)
    for n in range(len(x)):
        logs = _log_p(model, x[n : n + 1])[0]
        for c in range(CLASSES):
            total += logs[c].detach().exp() * _gradient(model, logs[c]) ** 2
    return total / (len(x) - 1)


def _rows(model, x, y):
    exact = fisher(model, [x], labels="exact", dtype=torch.float64)["weight"]
    ours = {
        "data": fisher(model, [(x, y)], dtype=torch.float64),
        "sampled": fisher(model, [x], labels="sampled", dtype=torch.float64),
        "batch": fisher(model, x.split(32), labels="sampled", per="batch", dtype=torch.float64),
    }
    torch.manual_seed(1)
    rows = {
        'squisher `labels="exact"`': exact,
        'squisher `labels="data"`': ours["data"]["weight"],
        'squisher `labels="sampled"`': ours["sampled"]["weight"],
        'squisher `labels="sampled", per="batch"`, batch 32': ours["batch"]["weight"],
        "GMvandeVen/continual-learning (default)": all_classes(model, x, y),
        "Avalanche `EWCPlugin`, batch 8": squared_batch_mean(model, x, y, 8),
        "Avalanche `EWCPlugin`, batch 32": squared_batch_mean(model, x, y, 32),
        "aws-cv-task2vec `montecarlo`, batch 32": squared_batch_mean(model, x, y, 32, sampled=True),
        "fusion_bench / MergeLM, batch 1": cross_terms(model, x, y, 1),
        "fusion_bench / MergeLM, batch 32": cross_terms(model, x, y, 32),
        "mammoth `EwcOn`": weighted_true_label(model, x, y),
    }
    out = {}
    for name, value in rows.items():
        ratio = float(value.sum() / exact.sum())
        out[name] = (ratio, float((value / ratio - exact).abs().sum() / exact.sum()))
    return out


def test_the_page_says_what_each_formula_gives(setting):
    found = _rows(*setting)
    written = dict(re.findall(r"^\| ([^|]+?) \|.*\| ([\d.]+ / [\d.]+) \|$", PAGE.read_text(), re.MULTILINE))
    assert written == {name: f"{ratio:.3f} / {error:.2f}" for name, (ratio, error) in found.items()}


def test_what_the_page_claims(setting):
    found = {name: ratio for name, (ratio, _) in _rows(*setting).items()}
    assert found['squisher `labels="data"`'] == pytest.approx(1, abs=0.1)
    assert found['squisher `labels="sampled"`'] == pytest.approx(1, abs=0.1)
    assert found['squisher `labels="sampled", per="batch"`, batch 32'] == pytest.approx(1, abs=0.3)
    assert found["GMvandeVen/continual-learning (default)"] == pytest.approx(N / (N - 1), rel=1e-9)
    # The square of a mean of B gradients is smaller by about B, so a penalty's strength silently depends on the batch size.
    assert 8 * found["Avalanche `EWCPlugin`, batch 8"] == pytest.approx(1, abs=0.2)
    assert 32 * found["Avalanche `EWCPlugin`, batch 32"] == pytest.approx(1, abs=0.3)
    assert 32 * found["aws-cv-task2vec `montecarlo`, batch 32"] == pytest.approx(1, abs=0.3)
    assert found["mammoth `EwcOn`"] < 0.5


def test_recycled_second_moments_have_the_scale_of_a_squared_batch_mean(setting):
    """E[B·v] = s² + B·μ² at frozen weights: Adam's second moment is the Avalanche quantity, times B it is a Fisher."""
    model, x, y = setting
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.9, 0.999))
    generator = torch.Generator().manual_seed(0)
    for _ in range(1500):
        index = torch.randint(0, N, (8,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[index]), y[index]).backward()
        optimizer.step()
    state = optimizer.state[model.weight]
    corrected = state["exp_avg_sq"] / (1 - 0.999 ** float(state["step"]))
    gradients = fisher(model, [(x, y)], dtype=torch.float64)["weight"]
    mean = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), model.weight)[0]
    expected = gradients + 7 * mean**2
    assert float(8 * corrected.sum() / expected.sum()) == pytest.approx(1, abs=0.1)
    model.zero_grad(set_to_none=True)
