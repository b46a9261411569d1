"""Rules: convolutions in both ways, examples at any dimension, bounds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from squisher.measure.rules import add_squares
from squisher.measure.rules.base import to_examples
from squisher.measure.rules.convolution import Convolution, ConvolutionGradients, ConvolutionSettings
from squisher.measure.rules.linear import Linear
from squisher.measure.rules.norm import Broadcast

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
    monkeypatch.setattr(ConvolutionGradients, "_unfolding_pays", lambda self, total: unfold)
    module = nn.Conv2d(3, 6, bias=False, **settings).double()
    rule_settings = [list(getattr(module, name)) for name in ("stride", "padding", "dilation")]
    summands, gradients = [], torch.zeros(4, *module.weight.shape).double()
    for _ in range(uses):
        a = torch.randn(4 * images, 3, 6, 7).double()
        g = torch.randn_like(module(a))
        summands.append(
            Convolution(a, ConvolutionSettings(module.weight, *rule_settings, module.groups)).gradients(g, 0, 4)
        )
        for n in range(4):
            part = slice(n * images, (n + 1) * images)
            gradients[n] += torch.autograd.grad((module(a[part]) * g[part]).sum(), module.weight)[0]
    total = torch.zeros_like(module.weight)
    add_squares(total, summands)
    assert torch.allclose(total, gradients.square().sum(0), rtol=1e-10)
    assert not unfold or summands[0].can_unfold() or module.groups > 1


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
    summand = Broadcast(torch.Size((6,)), (6,), factor).gradients(g, dim, 2)
    product = (g * factor).movedim(dim, 0).reshape(2, -1, 6).sum(1)
    assert torch.allclose(summand.values, product)
    with pytest.raises(ValueError, match="for each example"):
        Broadcast(torch.Size(shape), tuple(shape)).gradients(g, dim, 2)


def test_squared_is_the_sum_of_the_squares():
    """What the proof divides by: the squares of everything that is added up in a gradient."""
    a, g = torch.randn(3, 4, 5).double(), torch.randn(3, 4, 7).double()
    linear = Linear(a).gradients(g.square(), 0, 3, squared=True).example(1, torch.Size((7, 5)))
    assert torch.allclose(linear, (g[1, :, :, None] * a[1, :, None, :]).square().sum(0))
    scale = (
        Broadcast(torch.Size((7,)), (7,), g.cos())
        .gradients(g.square(), 0, 3, squared=True)
        .example(2, torch.Size((7,)))
    )
    assert torch.allclose(scale, (g[2] * g[2].cos()).square().sum(0))
    image, back = torch.randn(3, 2, 5, 5).double(), torch.randn(3, 4, 5, 5).double()
    rule = Convolution(image, ConvolutionSettings(torch.randn(4, 2, 1, 1).double(), [1, 1], [0, 0], [1, 1], 1))
    found = rule.gradients(back.square(), 0, 3, squared=True).example(0, torch.Size((4, 2, 1, 1)))
    expected = (back[0, :, None] * image[0, None]).square().sum((2, 3))
    assert torch.allclose(found[:, :, 0, 0], expected)
