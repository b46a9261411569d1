"""Every way a summand can be squared (tiles, blocks, sparse rows) gives the square of the summed gradient."""

from __future__ import annotations

import pytest
import torch

import squisher
from squisher.measure.rules import add_squares
from squisher.measure.rules import linear as module
from squisher.measure.rules.linear import Outer
from squisher.measure.rules.lookup import Rows
from squisher.measure.rules.norm import Dense

torch.manual_seed(0)


def _outer(shape, positions):
    left, right = (torch.randn(4, positions, size).double() for size in shape)
    return Outer(left, right)


def _rows(shape):
    keys = torch.randint(-1, shape[0], (4, 6))
    return Rows(keys, torch.randn(4, 6, shape[1]).double())


def _dense(shape):
    return Dense(torch.randn(4, *shape).double())


def _expected(shape, summands):
    total = torch.zeros(shape).double()
    for n in range(4):
        gradient = torch.zeros(shape).double()
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
    "vectors": lambda shape: [_outer(shape, 1)],
    "sequences": lambda shape: [_outer(shape, 3)],
    "rows": lambda shape: [_rows(shape)],
    "dense": lambda shape: [_dense(shape)],
    "two outer": lambda shape: [_outer(shape, 1), _outer(shape, 3)],
    "two vectors": lambda shape: [_outer(shape, 1), _outer(shape, 1)],
    "two rows": lambda shape: [_rows(shape), _rows(shape)],
    "two dense": lambda shape: [_dense(shape), _dense(shape)],
    "tied": lambda shape: [_outer(shape, 3), _rows(shape)],
    "tied, vectors": lambda shape: [_outer(shape, 1), _rows(shape)],
    "tied twice": lambda shape: [_outer(shape, 3), _rows(shape), _rows(shape), _outer(shape, 2)],
    "everything": lambda shape: [_outer(shape, 3), _rows(shape), _dense(shape)],
}


@pytest.mark.parametrize("name", COMBINATIONS)
@pytest.mark.parametrize("shape", [(7, 5), (5, 7)], ids=["tall", "wide"])
@pytest.mark.parametrize(("tile", "small"), [(1 << 19, 1 << 14), (1 << 19, 0), (10, 0), (1, 0), (50, 1 << 14)])
def test_sums_are_squared_per_example(monkeypatch, name, shape, tile, small):
    monkeypatch.setattr(module, "TILE", tile)
    monkeypatch.setattr(module, "SMALL", small)
    summands = COMBINATIONS[name](shape)
    total = torch.ones(shape).double()
    add_squares(total, summands)
    assert torch.allclose(total, _expected(shape, summands) + 1, rtol=1e-12)


LAYOUTS = {
    "rows": lambda t: t,
    "columns": lambda t: t.mT.contiguous().mT,
    "every second": lambda t: t.repeat_interleave(2, 2)[:, :, ::2],
    "one for all examples": lambda t: t[:1].expand_as(t),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("shape", [(300, 40), (40, 300), (129, 400), (20, 300)])
@pytest.mark.parametrize("tile", [1 << 20, 1 << 13])
def test_products_in_single_precision_are_right_however_the_factors_lie_in_memory(
    monkeypatch, shape, positions, layout, tile
):
    monkeypatch.setattr(module, "TILE", tile)
    torch.manual_seed(0)
    left, right = (LAYOUTS[layout](torch.randn(4, positions, size)) for size in shape)
    total = torch.zeros(shape)
    Outer(left, right).add_squares(total)
    exact = torch.bmm(left.double().mT, right.double()).square().sum(0)
    torch.testing.assert_close(total.double(), exact, rtol=1e-4, atol=1e-4)


def test_a_product_that_is_wrong_is_noticed(monkeypatch):
    model = torch.nn.Sequential(torch.nn.Linear(40, 200), torch.nn.ReLU(), torch.nn.Linear(200, 3))
    batches = [(torch.randn(8, 40), torch.randint(0, 3, (8,)))]
    monkeypatch.setattr(module, "_ONEDNN", lambda left, right, *_: 1.01 * (left @ right.T))
    found = squisher.fisher(model, batches, likelihood="categorical")
    expected = squisher.fisher(model, batches, likelihood="categorical", method="loop")
    assert "differs from the loop" in found.provenance.coverage["loop"]["0.weight"]
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("used", [[0], [2], [1, 3], []])
@pytest.mark.parametrize("on_left", [True, False])
@pytest.mark.parametrize("shape", [(5, 7), (200, 100)])
def test_positions_without_a_gradient_are_left_out(shape, on_left, used):
    torch.manual_seed(0)
    left, right = (torch.randn(4, 6, size) for size in shape)
    gradient = left if on_left else right
    gradient[:, [n for n in range(6) if n not in used]] = 0.0
    outer, total = Outer(left, right, on_left), torch.zeros(shape)
    outer.add_squares(total)
    torch.testing.assert_close(total, torch.bmm(left.mT, right).square().sum(0), rtol=1e-4, atol=1e-5)
    (right if on_left else left)[0, 5, 0] = torch.inf  # zero times infinity is not a number, as in the loop
    outer.add_squares(total)
    assert total.isnan().any() == torch.bmm(left.mT, right).isnan().any()


class _ClassToken(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.below, self.mix, self.above = (torch.nn.Linear(*form) for form in ((8, 8), (5, 5), (8, 200)))
        self.head = torch.nn.Linear(200, 4)

    def forward(self, x):
        return self.head(self.above(self.mix(self.below(x).tanh().mT).mT)[:, 2].tanh())


@pytest.mark.parametrize("labels", ["data", "exact"])
def test_a_class_tokens_layers(labels):
    torch.manual_seed(0)
    model, batches = _ClassToken(), [(torch.randn(6, 5, 8), torch.randint(0, 4, (6,)))]
    found = squisher.fisher(model, batches, likelihood="categorical", labels=labels, method="fast")
    expected = squisher.fisher(model, batches, likelihood="categorical", labels=labels, method="loop")
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-7)
