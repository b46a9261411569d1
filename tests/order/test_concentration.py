"""Against sorting everything."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from squisher.errors import SquisherError
from squisher.order import concentration, threshold


def concentration_of(tensors, ks=(), shares=()):
    return concentration({name: lambda t=t: t.reshape(-1).split(97) for name, t in tensors.items()}, ks, shares)


def sorted_values(tensors):
    return torch.cat([t.reshape(-1) for t in tensors.values()]).double().sort(descending=True).values


@pytest.mark.parametrize("seed", range(3))
def test_the_same_as_sorting(seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "a": torch.randn(300, 40, generator=generator).square() * 1e-9,
        "ties": torch.full((777,), 3e-10),
        "zeros": torch.zeros(2000),
        "wide": 10 ** (torch.randn(5000, generator=generator) * 2),
        "half": torch.rand(100, generator=generator).to(torch.bfloat16),
    }
    values = sorted_values(tensors)
    ks = [0, 1, 2, 77, 5000, 12000, 13000, len(values) - 1, len(values)]
    shares = [0.1, 0.5, 0.9, 0.999]
    held, needed = concentration_of(tensors, ks, shares)
    for k, found in zip(ks, held, strict=True):
        assert found.k == k
        assert found.share == pytest.approx(float(values[:k].sum() / values.sum()), rel=1e-12)
        assert found.rest == pytest.approx(float(values[k:].flip(0).sum()), rel=1e-9)
        kth = threshold({name: lambda t=t: iter([t.float().reshape(-1)]) for name, t in tensors.items()}, k)
        assert found.threshold == pytest.approx(kth.value)
    upto = values.cumsum(0)
    for share, found in zip(shares, needed, strict=True):
        assert found.share >= share * (1 - 1e-12)
        assert float(upto[found.k - 1]) >= share * float(upto[-1]) * (1 - 1e-12)
        if found.k > 1:
            assert float(upto[found.k - 2]) < share * float(upto[-1])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 2.0**100, width=32), min_size=1, max_size=40).filter(any), st.floats(0.01, 1))
def test_what_is_held_and_what_is_needed_belong_together(values, share):
    tensors = {"x": torch.tensor(values)}
    (one, every), (needed,) = concentration_of(tensors, [1, len(values)], [share])
    assert one.threshold == max(values)
    assert every.share == 1.0
    assert every.rest == 0
    (again,), _ = concentration_of(tensors, [needed.k])
    assert again == needed
    assert needed.share >= share * (1 - 1e-9)


def test_nothing_to_hold_and_invalid_values():
    with pytest.raises(SquisherError, match="All values are 0"):
        concentration_of({"x": torch.zeros(3)}, [1])
    for bad in (math.nan, math.inf, -1.0):
        with pytest.raises(SquisherError, match="'x' (hold|are) (negative|NaN|infinite)"):
            concentration_of({"x": torch.tensor([1.0, bad])}, [1])
    held, _ = concentration_of({"x": torch.tensor([-0.0, 2.0])}, [1])
    assert held[0].share == 1.0
