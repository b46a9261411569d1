from __future__ import annotations

import json
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from squisher.analysis import agreement
from squisher.analysis.agreement import FRACTIONS, Agreement, compare
from squisher.errors import SquisherError
from squisher.importance import Importance, load


def related(seed: int = 0, noise: float = 1.0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two importances that agree in part: one is the other times a log-normal factor."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (40, 30), "layer.weight": (30, 30), "layer.bias": (30,), "scalar": ()}
    a = {name: torch.randn(shape, generator=generator).square() * 1e-6 for name, shape in shapes.items()}
    b = {n: 3 * t * torch.exp(noise * torch.randn(t.shape, generator=generator)) for n, t in a.items()}
    a["embed.weight"][5:9] = 0
    b["embed.weight"][7:12] = 0
    return a, b


def flat(tensors: dict[str, Tensor]) -> list[float]:
    return [value for tensor in tensors.values() for value in tensor.flatten().double().tolist()]


def slow_ranks(values: list[float]) -> list[float]:
    """Mid-ranks by their definition: the number of smaller ones and half of the equal ones."""
    return [sum(v < x for v in values) + sum(v == x for v in values) / 2 for x in values]


def slow_spearman(x: list[float], y: list[float]) -> float:
    rx, ry = torch.tensor(slow_ranks(x), dtype=torch.float64), torch.tensor(slow_ranks(y), dtype=torch.float64)
    return float(torch.corrcoef(torch.stack([rx, ry]))[0, 1])


def slow_overlap(x: list[float], y: list[float], k: int) -> float:
    best = [set(sorted(range(len(v)), key=lambda i, v=v: (-v[i], i))[:k]) for v in (x, y)]
    return len(best[0] & best[1]) / k


def slow_median_ratio(x: list[float], y: list[float]) -> float:
    logs = sorted(math.log(i / j) for i, j in zip(x, y, strict=True) if min(i, j) >= 1.1754943508222875e-38)
    return math.exp((logs[(len(logs) - 1) // 2] + logs[len(logs) // 2]) / 2)


def test_agrees_with_the_definitions() -> None:
    a, b = related()
    x, y = flat(a), flat(b)
    found = compare(a, b)
    assert found.exact
    assert found.numel == len(x)
    assert found.spearman == pytest.approx(slow_spearman(x, y), abs=1e-12)
    assert found.scale == pytest.approx(sum(x) / sum(y), rel=1e-12)
    assert found.median_ratio == pytest.approx(slow_median_ratio(x, y), rel=1e-12)
    for k in (1, 7, 500, len(x)):
        assert found.overlap(k) == slow_overlap(x, y, k)
    for name, row in zip(a, found.rows, strict=True):
        one, two = flat({name: a[name]}), flat({name: b[name]})
        assert (row.name, row.numel) == (name, len(one))
        assert (row.total_a, row.total_b) == pytest.approx((sum(one), sum(two)), rel=1e-12)
        assert row.scale == pytest.approx(sum(one) / sum(two), rel=1e-12)
        assert row.median_ratio == pytest.approx(slow_median_ratio(one, two), rel=1e-12)
        assert row.overlap == slow_overlap(one, two, max(1, len(one) // 10))
        if name != "scalar":
            assert row.spearman == pytest.approx(slow_spearman(one, two), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_are_the_same_sorted_and_counted(monkeypatch, dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    a, b = (
        {
            f"w{n}": (torch.rand(n, generator=generator) * 20).round().to(dtype) for n in (1, 9, 10, 57, 2000)
        }  # many ties
        for _ in range(2)
    )
    sorted_rows = compare(a, b).rows
    monkeypatch.setattr("squisher.analysis.agreement._SORTED", 0)
    counted = compare(a, b).rows
    assert [repr(row) for row in sorted_rows] == [repr(row) for row in counted]


def test_overlaps_are_those_of_overlap() -> None:
    found = compare(*related())
    assert [o.fraction for o in found.overlaps] == list(FRACTIONS)
    for o in found.overlaps:
        assert o.k == math.floor(o.fraction * found.numel)
        assert o.chance == o.k / found.numel
        assert o.overlap == found.overlap(o.fraction) == found.overlap(o.k)


def test_fractions_of_less_than_one_entry_are_left_out() -> None:
    found = compare({"x": torch.rand(20)}, {"x": torch.rand(20)})
    assert [o.fraction for o in found.overlaps] == [0.05, 0.1, 0.25, 0.5]
    assert found.overlap(0.001) in (0.0, 1.0)


@pytest.mark.parametrize("limit", [2131, 1000, 100, 0])
def test_rounded_ranks_differ_little_from_exact_ones(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = related(noise=0.3)
    exact = compare(a, b)
    monkeypatch.setattr(agreement, "EXACT_LIMIT", limit)
    rounded = compare(a, b)
    if limit == exact.numel:
        assert rounded == exact
        return
    assert not rounded.exact
    assert rounded.spearman != exact.spearman
    assert rounded.spearman == pytest.approx(exact.spearman, abs=1e-4)
    assert rounded.median_ratio == pytest.approx(exact.median_ratio, rel=2.0**-7)
    assert (rounded.total_a, rounded.total_b) == pytest.approx((exact.total_a, exact.total_b), rel=1e-12)
    assert rounded.overlaps == exact.overlaps
    for rough, fine in zip(rounded.rows, exact.rows, strict=True):
        assert (rough.name, rough.numel, rough.overlap) == (fine.name, fine.numel, fine.overlap)
        assert (rough.total_a, rough.scale) == pytest.approx((fine.total_a, fine.scale), rel=1e-12)
        assert rough.median_ratio == pytest.approx(fine.median_ratio, rel=2.0**-7)
        assert rough.spearman == pytest.approx(fine.spearman, abs=2e-3, nan_ok=True)


def test_values_of_16_bits_have_the_same_ranks_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = ({name: tensor.bfloat16() for name, tensor in side.items()} for side in related())
    exact = compare(a, b)
    monkeypatch.setattr(agreement, "EXACT_LIMIT", 100)
    streamed = compare(a, b)
    assert streamed.spearman == pytest.approx(exact.spearman, abs=1e-12)
    for rough, fine in zip(streamed.rows, exact.rows, strict=True):
        assert rough.spearman == pytest.approx(fine.spearman, abs=1e-12, nan_ok=True)


def test_a_million_streamed_entries_against_exact_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    a = {"x": torch.randn(1_000_000, generator=generator).square()}
    b = {"x": a["x"] * torch.exp(2 * torch.randn(1_000_000, generator=generator))}
    exact = compare(a, b)
    monkeypatch.setattr(agreement, "EXACT_LIMIT", 100_000)
    streamed = compare(a, b)
    assert streamed.spearman == pytest.approx(exact.spearman, abs=2e-5)
    assert streamed.overlaps == exact.overlaps


def test_exchanging_the_two_inverts_scale_and_keeps_the_rest() -> None:
    a, b = related()
    one, two = compare(a, b), compare(b, a)
    assert one.spearman == pytest.approx(two.spearman, abs=1e-15)
    assert one.scale == pytest.approx(1 / two.scale)
    assert one.median_ratio == pytest.approx(1 / two.median_ratio, rel=1e-12)
    assert [o.overlap for o in one.overlaps] == [o.overlap for o in two.overlaps]


def test_an_importance_agrees_with_itself_and_a_factor_changes_only_the_scale() -> None:
    a, b = related()
    same = compare(a, a)
    assert (same.spearman, same.scale, same.median_ratio) == pytest.approx((1.0, 1.0, 1.0), abs=1e-12)
    assert all(o.overlap == 1 for o in same.overlaps)
    once, scaled = compare(a, b), compare(Importance(a) * 4.0, b)
    assert scaled.spearman == once.spearman
    assert scaled.scale == pytest.approx(4 * once.scale)
    assert scaled.median_ratio == pytest.approx(4 * once.median_ratio)
    assert [o.overlap for o in scaled.overlaps] == [o.overlap for o in once.overlaps]


def test_opposite_ranks() -> None:
    rising = torch.arange(1.0, 100.0)
    found = compare({"x": rising}, {"x": rising.flip(0)})
    assert found.spearman == pytest.approx(-1)
    assert found.overlap(0.5) == 0


@pytest.mark.parametrize("limit", [10, 1_000])
def test_constant_and_zero_tensors(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "EXACT_LIMIT", limit)
    a = {"zero": torch.zeros(20), "one": torch.ones(20), "empty": torch.zeros(0, 3), "varied": torch.rand(20) + 1}
    found = compare(a, a)
    assert found.spearman == pytest.approx(1)
    zero, one, empty, varied = found.rows
    assert math.isnan(zero.spearman)
    assert math.isnan(zero.scale)
    assert math.isnan(zero.median_ratio)
    assert math.isnan(zero.overlap)
    assert math.isnan(one.spearman)
    assert (one.scale, one.overlap) == (1, 1)
    assert math.isnan(empty.spearman)
    assert empty.numel == 0
    assert varied.spearman == pytest.approx(1)

    nothing = compare({"zero": torch.zeros(20)}, {"zero": torch.zeros(20)})
    assert math.isnan(nothing.spearman)
    assert math.isnan(nothing.scale)
    assert nothing.overlaps[0].threshold_a == 0
    plain = json.loads(json.dumps(nothing.to_dict(), allow_nan=False))
    assert plain["spearman"] is None
    assert plain["rows"][0]["overlap"] is None


def test_denormals_count_as_zero_in_ratios() -> None:
    found = compare({"x": torch.tensor([1e-40, 1.0, 3e-39])}, {"x": torch.tensor([1.0, 4.0, 2e-39])})
    assert found.median_ratio == 0.25


def test_only_common_names_count() -> None:
    a, b = related()
    expected = compare(a, b)
    found = compare({"extra": torch.rand(9), **a}, {**b, "head.weight": torch.rand(2), "head.bias": torch.rand(1)})
    assert found.only_a == ["extra"]
    assert found.only_b == ["head.weight", "head.bias"]
    assert found.rows == expected.rows
    assert found.spearman == expected.spearman


def test_files_are_compared_without_loading_them(
    tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = related()
    expected = compare(a, b)
    Importance(a).save(f"{tmp_path}/a.safetensors")
    Importance(b).save(f"{tmp_path}/b.safetensors")
    assert compare(load(f"{tmp_path}/a.safetensors"), load(f"{tmp_path}/b.safetensors")) == expected

    monkeypatch.setattr(agreement, "EXACT_LIMIT", 100)
    monkeypatch.setattr(Importance, "__getitem__", lambda self, name: pytest.fail(f"{name} was read whole"))
    found = compare(load(f"{tmp_path}/a.safetensors"), load(f"{tmp_path}/b.safetensors"))
    assert found.overlaps == expected.overlaps


@pytest.mark.parametrize("limit", [10, 10_000_000])
def test_progress_rises_to_the_end(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "EXACT_LIMIT", limit)
    calls: list[tuple[int, int]] = []
    found = compare(*related(), progress=lambda done, total: calls.append((done, total)))
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert len({total for _, total in calls}) == 1
    assert calls[-1][0] == calls[-1][1]
    before = len(calls)
    found.overlap(3)
    assert len(calls) == before


def test_repr_is_short() -> None:
    text = repr(compare(*related()))
    assert text.startswith("Agreement(spearman 0.")
    assert len(text) < 150
    assert str(compare(*related())) == text


def test_to_dict_is_json() -> None:
    found = compare(*related())
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert plain["spearman"] == found.spearman
    assert [row["name"] for row in plain["rows"]] == [row.name for row in found.rows]
    assert plain["overlaps"][0]["chance"] == found.overlaps[0].chance
    assert not [key for key in plain if key.startswith("_")]


def refusals() -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor], str]]:
    x = torch.rand(3, 2)
    yield {"model.w": x}, {"module.w": x}, r"no name is in both, 'model\.w' for example.* mean 'module\.w'"
    yield {"w": x}, {"w": x.t(), "w1": x}, r"'w' has the shape \(3, 2\) in one importance and \(2, 3\) in the other"
    yield {"w": x}, {}, "at least one"
    yield {"w": x}, {"w": -x}, "'w' has negative"
    yield {"w": x * math.nan}, {"w": x}, "'w' has NaN"


@pytest.mark.parametrize(("a", "b", "text"), list(refusals()))
def test_refusals(a: dict[str, Tensor], b: dict[str, Tensor], text: str) -> None:
    with pytest.raises(SquisherError, match=text):
        compare(a, b)


@pytest.mark.parametrize("k", [0, -1, 0.0, 1.5, 2132, True, "10%"])
def test_refuses_an_impossible_k(k: float) -> None:
    a, b = related()
    found: Agreement = compare(a, b)
    with pytest.raises(SquisherError, match="fraction.*2,131"):
        found.overlap(k)
