from __future__ import annotations

import pytest
import torch
from torch import nn

from squisher.errors import SquisherError
from squisher.measure.batches import batches_of, parse

CPU = torch.device("cpu")
X, Y = torch.arange(12.0).view(4, 3), torch.arange(4)


@pytest.mark.parametrize("raw", [(X, Y), [X, Y], {"x": X, "labels": Y}, ({"x": X}, Y), ((X,), Y)])
def test_kinds_of_batches_with_labels(raw):
    batch = parse(raw, nn.Identity(), CPU)
    assert batch.size == 4
    assert torch.equal(batch.labels, Y)
    part = batch.take(1, 3)
    given = part.args[0] if part.args else part.kwargs["x"]
    assert torch.equal(given, X[1:3])
    assert torch.equal(part.labels, Y[1:3])


@pytest.mark.parametrize("raw", [X, [X], (X,), {"x": X}])
def test_inputs_alone(raw):
    batch = parse(raw, nn.Identity(), CPU)
    assert batch.labels is None
    assert batch.size == 4


def test_what_has_no_batch_dimension_is_passed_on():
    positions = torch.arange(3)[None]
    batch = parse({"x": X, "positions": positions, "scale": 2, "labels": Y}, nn.Identity(), CPU)
    part = batch.take(2, 3)
    assert torch.equal(part.kwargs["positions"], positions)
    assert part.kwargs["scale"] == 2
    assert batch.take(0, 4) is batch
    assert torch.equal(batch.select([0, 0]).kwargs["x"], X[[0, 0]])


def test_inputs_that_require_gradients_are_detached():
    x = X.clone().requires_grad_()
    assert not parse((x, Y), nn.Identity(), CPU).args[0].requires_grad


def test_refusals():
    with pytest.raises(SquisherError, match="tuple of 3"):
        parse((X, Y, Y), nn.Identity(), CPU)
    with pytest.raises(SquisherError, match="batch dimension"):
        parse({"x": 3}, nn.Identity(), CPU)
    with pytest.raises(SquisherError, match="put it into a list"):
        batches_of(X)
    with pytest.raises(SquisherError, match="put it into a list"):
        batches_of({"x": X})
