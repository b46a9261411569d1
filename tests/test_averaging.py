from __future__ import annotations

import pytest
import torch
from torch import Tensor

from squisher.tracker import averages as averaging
from squisher.tracker.averages import all_finite, average_squares_

SHAPES = [(), (1,), (0,), (7,), (5, 3), (2, 0, 4), (3, 4, 2, 2)]


def naive(values: list[Tensor], gradients: list[Tensor], beta2: float, scale: float = 1.0) -> list[Tensor]:
    pairs = zip(values, gradients, strict=True)
    return [beta2 * v.double() + (1 - beta2) * (g.to_dense().double() / scale) ** 2 for v, g in pairs]


def random_case(dtypes: list[torch.dtype], value_dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    gradients = [torch.randn(shape).to(dtype) for shape in SHAPES for dtype in dtypes]
    return [torch.rand(g.shape, dtype=value_dtype) for g in gradients], gradients


@pytest.mark.parametrize("value_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("beta2", [0.0, 0.9, 0.999])
def test_equals_the_formula_for_any_mixture_of_dtypes(value_dtype: torch.dtype, scale: float, beta2: float) -> None:
    values, gradients = random_case([torch.float32, torch.bfloat16, torch.float16, torch.float64], value_dtype)
    expected = naive(values, gradients, beta2, scale)
    average_squares_(values, gradients, beta2, scale)
    for value, right in zip(values, expected, strict=True):
        assert value.dtype == value_dtype
        torch.testing.assert_close(value.double(), right, rtol=1e-6 if value_dtype == torch.float32 else 1e-12, atol=0)


@pytest.mark.parametrize("group", [1, 2, 5, 16, 1000])
def test_groups_change_nothing_and_bound_what_is_converted(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values, gradients = random_case([torch.bfloat16], torch.float32)
    whole = [v.clone() for v in values]
    average_squares_(whole, gradients, 0.9)
    sizes = []
    inner = averaging._average_dense_
    monkeypatch.setattr(averaging, "GROUP", group)
    monkeypatch.setattr(
        averaging, "_average_dense_", lambda v, g, b: (sizes.append(sum(x.numel() for x in g)), inner(v, g, b))
    )
    average_squares_(values, gradients, 0.9)
    for value, right in zip(values, whole, strict=True):
        torch.testing.assert_close(value, right, rtol=1e-6, atol=0)
    largest_row = max(g[0].numel() for g in gradients if g.dim() and g.numel())
    assert sum(sizes) == sum(g.numel() for g in gradients)
    assert max(sizes) <= max(group, largest_row)


def test_rows_of_a_transposed_tensor_are_updated_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(averaging, "GROUP", 4)
    gradient = torch.randn(3, 6).bfloat16().t()
    value = torch.rand(3, 6).t()
    expected = naive([value], [gradient], 0.5)[0]
    average_squares_([value], [gradient], 0.5)
    torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("sparse_dims", [1, 2])
def test_sparse_gradients_decay_all_and_add_to_the_touched(sparse_dims: int) -> None:
    dense = torch.zeros(6, 3)
    dense[1], dense[4, 2] = torch.tensor([1.0, -2.0, 3.0]), 5.0
    value = torch.rand(6, 3)
    expected = naive([value], [dense], 0.9, 2.0)[0]
    average_squares_([value], [dense.to_sparse(sparse_dims).coalesce()], 0.9, 2.0)
    torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_one_entry_that_is_not_finite_is_found(bad: float, dtype: torch.dtype) -> None:
    gradients = [torch.zeros(0, dtype=dtype), torch.randn(1000).to(dtype), torch.randn(3, 3)]
    assert all_finite(gradients, torch.float32)
    gradients[1][777] = bad
    assert not all_finite(gradients, torch.float32)


def test_large_but_finite_gradients_are_finite_where_their_squares_are() -> None:
    assert all_finite([torch.full((100,), 65504.0, dtype=torch.float16)], torch.float32)
    assert all_finite([torch.tensor([1e18])], torch.float32)
    assert not all_finite([torch.tensor([1e20])], torch.float32)
    assert all_finite([torch.tensor([1e20])], torch.float64)
    assert not all_finite([torch.tensor([1e20], dtype=torch.float64)], torch.float32)


def test_nothing_is_finite_and_sparse_entries_are_looked_at() -> None:
    assert all_finite([], torch.float32)
    gradient = torch.tensor([[0.0, 0.0], [1.0, float("inf")]]).to_sparse(1).coalesce()
    assert not all_finite([gradient], torch.float32)
