"""How the proof measures a difference."""

from __future__ import annotations

import torch

from squisher.measure.pieces import Rows
from squisher.measure.proof import _Difference


def _error(theirs):
    """Of an embedding of which one row in a thousand is used, with a large and a small gradient in it."""
    ours = torch.zeros(1000, 2)
    ours[7] = torch.tensor([1.0, 1e-3])
    difference = _Difference(ours.square())
    difference.subtract(ours + theirs)
    return difference.relative_to([Rows(torch.tensor([[7]]), ours[7].view(1, 1, 2))])


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
