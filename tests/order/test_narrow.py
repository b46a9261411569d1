"""The fast way against the digit-by-digit one, with a sample so small that every branch is taken."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from squisher.order import thresholds
from squisher.order.narrow import _Sample, narrow


def counted(tensor: Tensor, size: int = 97):
    calls = []

    def chunks() -> Iterator[Tensor]:
        calls.append(1)
        return iter(tensor.split(size))

    return chunks, calls


def uniform(n: int, generator: torch.Generator) -> Tensor:
    return torch.rand(n, generator=generator)


SHAPES = {
    "uniform": uniform,
    "many scales": lambda n, g: torch.randn(n, generator=g).mul(8).exp(),
    "few values": lambda n, g: torch.randint(0, 4, (n,), generator=g).float(),
    "two values": lambda n, g: torch.arange(n).ge(n // 2).float(),
    "all zero": lambda n, g: torch.zeros(n),
    "all equal": lambda n, g: torch.full((n,), 3.0),
    "mostly zero": lambda n, g: torch.rand(n, generator=g) * (torch.rand(n, generator=g) < 0.02),
    "denormal": lambda n, g: torch.rand(n, generator=g) * 1e-42,
    "sorted": lambda n, g: torch.arange(n).float(),
    "periodic": lambda n, g: (torch.arange(n) % 64).float(),
    "one large": lambda n, g: torch.cat([torch.tensor([9.0]), torch.zeros(n - 1)]),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("held", [1, 2, 64, 500, 1 << 21])
def test_agrees_with_the_digits(shape: str, held: int) -> None:
    tensor = SHAPES[shape](3000, torch.Generator().manual_seed(0))
    for k in (0, 1, 2, 299, 1499, 1500, 1501, 2940, 2999, 3000):
        sources = {"a": counted(tensor[:1111])[0], "empty": counted(tensor[:0])[0], "b": counted(tensor[1111:])[0]}
        kth = narrow(sources, k, held)
        assert kth == thresholds(sources, [k])[0]
        if k:
            assert kth.equal_in == {
                "a": int((tensor[:1111] == kth.value).sum()),
                "empty": 0,
                "b": int((tensor[1111:] == kth.value).sum()),
            }


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.sampled_from([0.0, 1e-45, 0.5, 1.0, 2.0, 3.0, 1e30, float("inf")]), min_size=1, max_size=60),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
    share=st.floats(0, 1),
    held=st.integers(1, 8),
)
def test_agrees_with_the_digits_whatever_comes(
    values: list[float], dtype: torch.dtype, share: float, held: int
) -> None:
    tensor = torch.tensor(values, dtype=torch.float64).to(dtype)
    sources = {"x": counted(tensor, 5)[0]}
    k = round(share * len(values))
    assert narrow(sources, k, held) == thresholds(sources, [k])[0]


@pytest.mark.parametrize("shape", ["uniform", "many scales", "sorted", "periodic", "mostly zero", "denormal"])
def test_two_passes_where_the_sample_is_thinned(shape: str) -> None:
    tensor = SHAPES[shape](1_000_000, torch.Generator().manual_seed(1))
    chunks, calls = counted(tensor, 1 << 18)
    narrow({"x": chunks}, 100_000, held=1 << 16)
    assert len(calls) <= 3
    if shape == "uniform":
        assert len(calls) == 2


def test_one_pass_where_everything_fits() -> None:
    chunks, calls = counted(torch.rand(1000))
    narrow({"x": chunks}, 10)
    assert len(calls) == 1


def test_the_sample_holds_no_more_than_it_may_and_is_spread_evenly() -> None:
    sample = _Sample(1000, seed=0, width=32)
    keys = torch.arange(100_000, dtype=torch.int32).numpy().view("uint32")
    for start in range(0, keys.size, 37):
        sample.add(keys[start : start + 37])
    picked = sample.keys()
    assert 500 <= picked.size <= 1000
    assert not sample.complete
    assert abs(picked.mean() - 50_000) < 500
    whole = _Sample(1000, seed=0, width=32)
    whole.add(keys[:50_000])
    assert 500 <= whole.keys().size <= 1000
