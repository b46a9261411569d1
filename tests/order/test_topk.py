from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from squisher.errors import SquisherError
from squisher.order import Selection, Source, Threshold, threshold, thresholds

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def pieces(tensor: Tensor, size: int) -> Source:
    return lambda: iter(tensor.flatten().split(size))


def sources_of(tensors: dict[str, Tensor], size: int = 7) -> dict[str, Source]:
    return {name: pieces(tensor, size) for name, tensor in tensors.items()}


def masks(sources: dict[str, Source], kth: Threshold, before: int = 0) -> dict[str, Tensor]:
    chosen = Selection(kth, before)
    return {name: torch.cat([chosen(chunk) for chunk in chunks()]) for name, chunks in sources.items()}


def by_sorting(tensors: dict[str, Tensor], k: int) -> tuple[float, list[bool]]:
    """The obvious definition: sort by falling value, then by place, with Python's floats."""
    flat = [value for tensor in tensors.values() for value in tensor.flatten().double().tolist()]
    order = sorted(range(len(flat)), key=lambda place: (-flat[place], place))[:k]
    best = set(order)
    return (flat[order[-1]] if k else math.inf), [place in best for place in range(len(flat))]


def check(tensors: dict[str, Tensor], k: int, size: int = 7) -> None:
    sources = sources_of(tensors, size)
    kth = threshold(sources, k)
    value, expected = by_sorting(tensors, k)
    assert kth.value == value
    assert kth.above + kth.ties == k
    assert kth.total == len(expected)
    flat = [place for tensor in tensors.values() for place in tensor.flatten().double().tolist()]
    assert kth.above == sum(score > kth.value for score in flat)
    if k:
        assert kth.equal == sum(score == kth.value for score in flat)
    assert torch.cat(list(masks(sources, kth).values())).tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [0, 1, 2, 50, 121, 122, 123])
def test_agrees_with_a_full_sort(dtype: torch.dtype, k: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "a": torch.randn(10, 7, generator=generator).square().to(dtype),
        "b": torch.zeros(3, dtype=dtype),
        "empty": torch.zeros(0, dtype=dtype),
        "c": torch.rand(50, generator=generator).mul(4).round().div(4).to(dtype),
    }
    check(tensors, k)


scores = st.one_of(
    st.floats(min_value=0, allow_nan=False, width=32),
    st.sampled_from([0.0, -0.0, 1.0, 1e-45, 2e-45, 1e-40, 1.1754943508222875e-38, math.inf, 1.0000001192092896]),
)


@settings(max_examples=150, deadline=None)
@given(
    values=st.lists(st.lists(scores, max_size=12), min_size=1, max_size=4),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=4, max_size=4),
    share=st.floats(0, 1),
    size=st.integers(1, 5),
)
def test_agrees_with_a_full_sort_whatever_the_dtypes(
    values: list[list[float]], dtypes: list[torch.dtype], share: float, size: int
) -> None:
    tensors = {
        str(i): torch.tensor(v, dtype=torch.float64).to(d) for i, (v, d) in enumerate(zip(values, dtypes, strict=False))
    }
    total = sum(tensor.numel() for tensor in tensors.values())
    check(tensors, round(share * total), size)


def test_float64_values_that_float32_cannot_tell_apart() -> None:
    values = 1 + torch.arange(64, dtype=torch.float64).flip(0) * 2.0**-52
    assert values.float().unique().numel() == 1
    tensors = {"plain": torch.ones(3), "fine": values}
    for k in (1, 10, 63, 64, 67):
        check(tensors, k)


def test_denormals_and_zeros() -> None:
    smallest = 1e-45
    tensors = {"x": torch.tensor([0.0, smallest, -0.0, 3 * smallest, 2 * smallest, 0.0, 1e-38])}
    for k in range(8):
        check(tensors, k, size=2)


def test_denormals_keep_their_order_where_the_processor_flushes_them() -> None:
    tensors = {"x": torch.tensor([0.0, 1e-45, 3e-45, 0.0])}
    if not torch.set_flush_denormal(True):
        pytest.fail("this processor cannot flush denormals")
    try:
        kth = threshold(sources_of(tensors), 2)
        chosen = masks(sources_of(tensors), kth)["x"]
    finally:
        torch.set_flush_denormal(False)
    assert chosen.tolist() == [False, True, True, False]


@pytest.mark.parametrize("value", [0.0, 0.3, 1e-42, math.inf])
def test_all_equal_takes_the_first(value: float) -> None:
    tensors = {"a": torch.full((5,), value), "b": torch.full((6,), value)}
    for k in range(12):
        sources = sources_of(tensors, 4)
        chosen = masks(sources, threshold(sources, k))
        assert torch.cat([chosen["a"], chosen["b"]]).tolist() == [True] * k + [False] * (11 - k)


def test_the_cut_into_pieces_changes_nothing() -> None:
    tensor = torch.randint(0, 9, (1000,), generator=torch.Generator().manual_seed(1)).float()
    expected = masks({"x": pieces(tensor, 1000)}, threshold({"x": pieces(tensor, 1000)}, 333))["x"]
    kth = threshold({"x": pieces(tensor, 13)}, 333)
    for size in (1, 17, 999):
        assert torch.equal(masks({"x": pieces(tensor, size)}, kth)["x"], expected)


def test_keeps_the_shape_of_what_it_is_given() -> None:
    tensor = torch.arange(12.0).view(3, 4)
    kth = threshold({"x": pieces(tensor, 5)}, 5)
    assert torch.equal(Selection(kth)(tensor), tensor > 6)
    assert torch.equal(Selection(kth)(tensor.t()), tensor.t() > 6)


def test_a_million_scores() -> None:
    tensor = torch.randn(1_000_003, generator=torch.Generator().manual_seed(2)).square() * 1e-9
    kth = threshold({"x": pieces(tensor, 1 << 16)}, 100_000)
    assert kth.value == tensor.topk(100_000).values[-1].item()


@pytest.mark.parametrize(("dtype", "passes"), [(torch.bfloat16, 1), (torch.float32, 2), (torch.float64, 5)])
def test_number_of_passes_digit_by_digit(dtype: torch.dtype, passes: int) -> None:
    calls = 0

    def chunks() -> Iterator[Tensor]:
        nonlocal calls
        calls += 1
        return iter([torch.linspace(0, 1, 10).to(dtype)])

    thresholds({"x": chunks}, [3])
    assert calls == passes  # float64 is noticed in a first pass that stops at once


@pytest.mark.parametrize("bad", [math.nan, -math.nan, -1.0, -1e-45, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_refuses_nan_and_negatives_by_name(bad: float, dtype: torch.dtype) -> None:
    tensors = {"fine": torch.rand(9, dtype=dtype), "layer.weight": torch.tensor([1.0, bad, 2.0], dtype=dtype)}
    text = "NaN" if math.isnan(bad) else "negative"
    for k in (0, 1, 12):
        with pytest.raises(SquisherError, match=rf"'layer\.weight' hold {text}"):
            threshold(sources_of(tensors), k)


def test_a_nan_whose_upper_bits_are_those_of_infinity() -> None:
    sneaky = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)
    with pytest.raises(SquisherError, match="'x' hold NaN"):
        threshold({"x": lambda: [sneaky]}, 1)


@pytest.mark.parametrize("k", [-1, 5])
def test_refuses_an_impossible_k(k: int) -> None:
    with pytest.raises(SquisherError, match=rf"{k} largest scores .* from 0 to 4"):
        threshold({"x": pieces(torch.rand(4), 2)}, k)


def test_refuses_integers_by_name() -> None:
    with pytest.raises(SquisherError, match=r"'counts' are torch\.int64"):
        threshold({"counts": pieces(torch.arange(4), 2)}, 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_k_in_the_same_passes(dtype: torch.dtype) -> None:
    calls = 0
    tensor = torch.randn(300, generator=torch.Generator().manual_seed(4)).square().to(dtype)
    tensor[100:200] = tensor[99]

    def chunks() -> Iterator[Tensor]:
        nonlocal calls
        calls += 1
        return iter(tensor.split(11))

    ks = [200, 0, 1, 3, 150, 150, 299, 300]
    together = thresholds({"x": chunks}, ks)
    assert calls <= 5
    assert together == [threshold({"x": chunks}, k) for k in ks]


def test_scores_that_change_between_passes_are_refused() -> None:
    answers = [torch.rand(50), torch.zeros(20), torch.zeros(20), torch.zeros(20)]
    with pytest.raises(SquisherError, match="changed"):
        threshold({"x": lambda: iter([answers.pop(0)])}, 40)


SHAPES = {
    "many scales": lambda n, g: torch.randn(n, generator=g).mul(8).exp(),
    "few values": lambda n, g: torch.randint(0, 4, (n,), generator=g).float(),
    "two values": lambda n, g: torch.arange(n).ge(n // 2).float(),
    "all zero": lambda n, g: torch.zeros(n),
    "mostly zero": lambda n, g: torch.rand(n, generator=g) * (torch.rand(n, generator=g) < 0.02),
    "denormal": lambda n, g: torch.rand(n, generator=g) * 1e-42,
    "sorted": lambda n, g: torch.arange(n).float(),
    "one large": lambda n, g: torch.cat([torch.tensor([9.0]), torch.zeros(n - 1)]),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_sorting_however_the_scores_are_distributed(shape: str) -> None:
    tensor = SHAPES[shape](3000, torch.Generator().manual_seed(0))
    bits = tensor.view(torch.int32)  # by their bits, whatever the processor does with denormals
    ordered = bits.sort(descending=True).values
    for k in (1, 2, 299, 1499, 1500, 1501, 2940, 2999, 3000):
        kth = threshold(
            {"a": pieces(tensor[:1111], 97), "empty": pieces(tensor[:0], 1), "b": pieces(tensor[1111:], 97)}, k
        )
        assert kth.key == int(ordered[k - 1])
        assert kth.above == int((bits > kth.key).sum())
        assert kth.equal == int((bits == kth.key).sum())


def test_nothing_from_nothing() -> None:
    assert threshold({}, 0) == threshold({"x": pieces(torch.zeros(0), 1)}, 0)
    assert threshold({}, 0).total == 0


# Sources split over processes: `reduce` stands in for a sum over two of them that take turns.


def split_threshold(first: dict[str, Tensor], second: dict[str, Tensor], k: int) -> list[Threshold]:
    """Replay both processes until each has been given the other's vector for every pass."""
    sent: list[list[Tensor]] = [[], []]

    class Waiting(Exception):  # noqa: N818
        pass

    def meet(me: int) -> Callable[[Tensor], Tensor]:
        step = 0

        def reduce(vector: Tensor) -> Tensor:
            nonlocal step
            if step == len(sent[me]):
                sent[me].append(vector.clone())
            assert torch.equal(sent[me][step], vector)
            if step == len(sent[1 - me]):
                raise Waiting
            step += 1
            return sent[me][step - 1] + sent[1 - me][step - 1]

        return reduce

    results: list[Threshold | None] = [None, None]
    while None in results:
        for me, tensors in enumerate((first, second)):
            try:
                results[me] = threshold(sources_of(tensors), k, meet(me))
            except Waiting:
                continue
    return [result for result in results if result is not None]


HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize("dtypes", [(HALF, HALF), (HALF, SINGLE), (SINGLE, DOUBLE)])
def test_split_over_two_processes(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    generator = torch.Generator().manual_seed(3)
    first = {"a": torch.randint(0, 5, (40,), generator=generator).to(dtypes[0])}
    second = {"b": torch.randint(0, 5, (30,), generator=generator).to(dtypes[1])}
    for k in (0, 1, 20, 69, 70):
        _, expected = by_sorting({**first, **second}, k)
        one, two = split_threshold(first, second, k)
        assert (one.value, one.above, one.ties, one.total) == (two.value, two.above, two.ties, two.total)
        chosen = [masks(sources_of(first), one)["a"], masks(sources_of(second), two, before=one.equal)["b"]]
        assert torch.cat(chosen).tolist() == expected


def test_a_nan_in_one_process_stops_both() -> None:
    bad = {"a": torch.tensor([math.nan])}
    good = {"b": torch.rand(3)}
    with pytest.raises(SquisherError, match="Another process"):  # the second of the two is the first to go on
        split_threshold(bad, good, 1)
    with pytest.raises(SquisherError, match="'a' hold NaN"):
        split_threshold(good, bad, 1)
