"""Bounds against the squares of the pieces, written out in full."""

from __future__ import annotations

import torch

from squisher.measure.bounds import bound_of
from squisher.measure.pieces import Dense, Outer, Rows

AT = torch.arange(0, 35, 3)


def _full(pieces):
    total = torch.zeros(7, 5, dtype=torch.float64)
    for piece in pieces:
        piece.add_squares(total)
    return total


def _pieces():
    torch.manual_seed(0)
    values = lambda *shape: torch.rand(*shape, dtype=torch.float64)  # noqa: E731
    keys = torch.tensor([[0, 6, 6, -1], [3, 3, 3, 3]])
    return [Outer(values(2, 1, 7), values(2, 1, 5)), Rows(keys, values(2, 4, 5)), Dense(values(2, 7, 5))]


def test_values_are_those_of_the_squares():
    for pieces in ([p] for p in _pieces()):
        found, largest = bound_of(pieces, torch.zeros(7, 5, dtype=torch.float64), AT)
        assert torch.allclose(found, _full(pieces).view(-1)[AT], rtol=1e-12)
        assert largest >= float(_full(pieces).max()) * (1 - 1e-12)


def test_several_pieces_add_up():
    pieces = _pieces()
    found, largest = bound_of(pieces, torch.zeros(7, 5, dtype=torch.float64), AT)
    full = _full(pieces)
    assert torch.allclose(found, full.view(-1)[AT], rtol=1e-12)
    assert float(full.max()) <= largest <= 3 * 2 * float(full.max())


def test_rows_that_nothing_touches():
    found, largest = bound_of([Rows(torch.full((2, 3), -1), torch.ones(2, 3, 5))], torch.zeros(7, 5), AT)
    assert not found.any()
    assert largest == 0.0
