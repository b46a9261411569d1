"""Rules: convolutions in both ways, examples at any dimension, bounds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from squisher.measure.layers import Broadcast, Convolution, Linear, Lookup, to_examples
from squisher.measure.pieces import ConvolutionPiece, ConvolutionSettings, add_squares

torch.manual_seed(0)


@pytest.mark.parametrize("unfold", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": (2, 3), "stride": (2, 1), "padding": (0, 2), "dilation": (1, 2)},
        {"kernel_size": 1},
        {"kernel_size": 1, "stride": 2},
        {"kernel_size": 3, "groups": 3},
    ],
)
@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("uses", [1, 2])
def test_convolutions_unfolded_or_not(monkeypatch, unfold, settings, images, uses):
    monkeypatch.setattr(ConvolutionPiece, "_unfolding_pays", lambda self, total: unfold)
    module = nn.Conv2d(3, 6, bias=False, **settings).double()
    rule_settings = [list(getattr(module, name)) for name in ("stride", "padding", "dilation")]
    pieces, gradients = [], torch.zeros(4, *module.weight.shape).double()
    for _ in range(uses):
        a = torch.randn(4 * images, 3, 6, 7).double()
        g = torch.randn_like(module(a))
        pieces.append(Convolution(a, ConvolutionSettings(module.weight, *rule_settings, module.groups)).piece(g, 0, 4))
        for n in range(4):
            part = slice(n * images, (n + 1) * images)
            gradients[n] += torch.autograd.grad((module(a[part]) * g[part]).sum(), module.weight)[0]
    total = torch.zeros_like(module.weight)
    add_squares(total, pieces)
    assert torch.allclose(total, gradients.square().sum(0), rtol=1e-10)
    assert not unfold or pieces[0].can_unfold() or module.groups > 1


def test_examples_are_found_at_any_dimension():
    t = torch.arange(24).view(3, 4, 2)
    assert torch.equal(to_examples(t, 1, 4)[:, 0], t.movedim(1, 0))
    assert torch.equal(to_examples(t, 1, 2), t.movedim(1, 0).view(2, 2, 3, 2))


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("rows", [1, 2])
def test_broadcast_sums_over_everything_but_the_example(dim, rows):
    shape = [3, 4, 5, 6]
    shape[dim] = 2 * rows
    g, factor = torch.randn(shape).double(), torch.randn(shape).double()
    piece = Broadcast(torch.Size((6,)), (6,), factor).piece(g, dim, 2)
    product = (g * factor).movedim(dim, 0).reshape(2, -1, 6).sum(1)
    assert torch.allclose(piece.values, product)
    with pytest.raises(ValueError, match="for each example"):
        Broadcast(torch.Size(shape), tuple(shape)).piece(g, dim, 2)


def test_bounds_are_not_below_the_gradient():
    """What the proof divides by is at least as large as what it compares."""
    a, g = torch.randn(3, 4, 5).double(), torch.randn(3, 4, 7).double()
    image, back = torch.randn(3, 2, 5, 5).double(), torch.randn(3, 4, 3, 3).double()
    weight = torch.randn(4, 2, 3, 3).double()
    cases = [
        (Linear(a), g, (7, 5)),
        (Linear(a, transposed=True), g, (5, 7)),
        (Lookup(torch.randint(0, 6, (3, 4))), g, (6, 7)),
        (Broadcast(torch.Size((7,)), (7,)), g, (7,)),
        (Convolution(image, ConvolutionSettings(weight, [1, 1], [0, 0], [1, 1], 1)), back, (4, 2, 3, 3)),
    ]
    for rule, gradient, shape in cases:
        value, bound = torch.zeros(shape).double(), torch.zeros(shape).double()
        rule.piece(gradient, 0, 3).add_squares(value)
        rule.piece(gradient, 0, 3, absolute=True).add_squares(bound)
        assert (value <= bound * (1 + 1e-12)).all()
        assert value.sum() > 0
