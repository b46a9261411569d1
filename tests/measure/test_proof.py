"""How the proof measures a difference, and what it is made with."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import squisher
from squisher.measure.proof import Difference, difference_of, total_of
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

    def wrong(self, total):
        true(self, total)
        total.mul_(2.0)

    monkeypatch.setattr(Outer, "add_squares", wrong)
    found = squisher.fisher(model, data, labels="data")
    assert set(found.provenance.coverage["loop"]) == {"0.weight", "2.weight"}
    assert found.provenance.coverage["method"] == "loop"


class _Allocations(TorchDispatchMode):
    """Note the size of every memory block that an operation makes."""

    def __init__(self):
        super().__init__()
        self.blocks = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for t in tree_leaves(found):
            if isinstance(t, torch.Tensor):
                self.blocks[t.untyped_storage().data_ptr(), len(self.blocks)] = t.untyped_storage().nbytes()
        return found


def test_the_logits_of_a_language_model_are_not_copied_to_check_them():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 5000))
    ids = torch.randint(0, 50, (8, 16))
    logits = 8 * 16 * 5000 * 4
    with _Allocations() as seen:
        squisher.fisher(model, [(ids, ids)], likelihood="tokens")
    large = {address for (address, _), size in seen.blocks.items() if size >= logits}
    assert max(seen.blocks.values()) == logits
    assert len(large) <= 2  # the logits and the gradient that is sent back


@pytest.mark.parametrize("odd", [float("inf"), float("nan")])
def test_outputs_that_are_not_finite_are_compared_by_the_others(odd):
    values = torch.tensor([[1.0, 2.0], [odd, 4.0]])
    assert not difference_of(nn.Identity(), torch.tensor([odd, 4.0]), values, 1)
    assert "differ" in difference_of(nn.Identity(), torch.tensor([odd, 4.5]), values, 1)
