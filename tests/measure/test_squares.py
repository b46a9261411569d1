"""Every way a summand can be squared (tiles, blocks, sparse rows) gives the square of the summed gradient."""

from __future__ import annotations

import pytest
import torch

from squisher.measure.rules import add_squares
from squisher.measure.rules import linear as module
from squisher.measure.rules.linear import Outer
from squisher.measure.rules.lookup import Rows
from squisher.measure.rules.norm import Dense

torch.manual_seed(0)
SHAPE = torch.Size((7, 5))


def _outer(positions):
    return Outer(torch.randn(4, positions, 7).double(), torch.randn(4, positions, 5).double())


def _rows():
    keys = torch.randint(-1, 7, (4, 6))
    return Rows(keys, torch.randn(4, 6, 5).double())


def _dense():
    return Dense(torch.randn(4, 7, 5).double())


def _expected(summands):
    total = torch.zeros(SHAPE).double()
    for n in range(4):
        gradient = torch.zeros(SHAPE).double()
        for summand in summands:
            if isinstance(summand, Outer):
                gradient += summand.left[n].T @ summand.right[n]
            elif isinstance(summand, Dense):
                gradient += summand.values[n]
            else:
                for key, value in zip(summand.keys[n].tolist(), summand.values[n], strict=True):
                    if key >= 0:
                        gradient[key] += value
        total += gradient**2
    return total


COMBINATIONS = {
    "vectors": lambda: [_outer(1)],
    "sequences": lambda: [_outer(3)],
    "rows": lambda: [_rows()],
    "dense": lambda: [_dense()],
    "two outer": lambda: [_outer(1), _outer(3)],
    "two vectors": lambda: [_outer(1), _outer(1)],
    "two rows": lambda: [_rows(), _rows()],
    "two dense": lambda: [_dense(), _dense()],
    "tied": lambda: [_outer(3), _rows()],
    "tied, vectors": lambda: [_outer(1), _rows()],
    "tied twice": lambda: [_outer(3), _rows(), _rows(), _outer(2)],
    "everything": lambda: [_outer(3), _rows(), _dense()],
}


@pytest.mark.parametrize("name", COMBINATIONS)
@pytest.mark.parametrize(("tile", "small"), [(1 << 19, 1 << 14), (1 << 19, 0), (10, 0), (1, 0), (50, 1 << 14)])
def test_sums_are_squared_per_example(monkeypatch, name, tile, small):
    monkeypatch.setattr(module, "TILE", tile)
    monkeypatch.setattr(module, "SMALL", small)
    summands = COMBINATIONS[name]()
    total = torch.ones(SHAPE).double()
    add_squares(total, summands)
    assert torch.allclose(total, _expected(summands) + 1, rtol=1e-12)
