"""How the proof measures a difference, and what it is made with."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import squisher
from squisher.measure.proof import Difference, total_of
from squisher.measure.rules.linear import Outer
from squisher.measure.rules.lookup import Rows


def _error(theirs):
    """Of an embedding of which one row in a thousand is used, with a large and a small gradient in it."""
    ours = torch.zeros(1000, 2)
    ours[7] = torch.tensor([1.0, 1e-3])
    difference = Difference(ours.square())
    difference.subtract(ours + theirs)
    bound = total_of([Rows(torch.tensor([[7]]), ours[7].square().view(1, 1, 2))], ours)
    with_bound, without = difference.error(bound), difference.error()
    assert with_bound == pytest.approx(without, rel=0.5, nan_ok=True)  # nothing cancels here
    return with_bound


def test_rounding_counts_relative_to_the_rows_that_are_used():
    small = torch.zeros(1000, 2)
    small[7, 1] = 1e-6
    assert 0 < _error(small) < 1e-5


def test_a_wrong_entry_is_seen():
    wrong = torch.zeros(1000, 2)
    wrong[7, 1] = 0.1
    assert _error(wrong) > 1e-2


def test_a_gradient_in_an_unused_row_is_seen():
    wrong = torch.zeros(1000, 2)
    wrong[500, 0] = 0.1
    assert _error(wrong) > 1e-3


def test_what_is_not_a_number_is_no_proof():
    wrong = torch.zeros(1000, 2)
    wrong[501, 1] = float("nan")
    assert not _error(wrong) <= 1e9


def _sure(gap):
    """A network whose two logits differ by about the gap."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 2))
    with torch.no_grad():
        model[-1].weight.mul_(0.01)
        model[-1].bias.copy_(torch.tensor([gap / 2, -gap / 2]))
    return model, [(torch.randn(6, 20), torch.zeros(6, dtype=torch.long))]


@pytest.mark.parametrize("labels", ["data", "sampled", "exact"])
@pytest.mark.parametrize("gap", [1.0, 40.0, 80.0, 200.0])
def test_a_network_that_is_sure_of_its_answer_is_not_left_to_the_loop(gap, labels):
    model, data = _sure(gap)
    found = squisher.fisher(model, data, labels=labels)
    assert found.provenance.coverage["loop"] == {}
    slow = squisher.fisher(model, data, labels=labels, method="loop")
    for name in slow:
        torch.testing.assert_close(found[name], slow[name], rtol=1e-4, atol=1e-37)


def test_a_wrong_rule_is_seen_even_where_every_gradient_is_zero(monkeypatch):
    model, data = _sure(200.0)
    true = Outer.add_squares

    def wrong(self, total, squares=None):
        true(self, total, squares)
        total.mul_(2.0)

    monkeypatch.setattr(Outer, "add_squares", wrong)
    found = squisher.fisher(model, data, labels="data")
    assert set(found.provenance.coverage["loop"]) == {"0.weight", "2.weight"}
    assert found.provenance.coverage["method"] == "loop"
