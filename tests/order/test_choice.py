"""Budgets against a full sort; and the same answer from two processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from squisher.errors import SquisherError
from squisher.order import Source, choose, per_source
from tests.processes import run_together


def sources_of(tensors: dict[str, Tensor], size: int = 5) -> dict[str, Source]:
    return {name: (lambda t=tensor: iter(t.flatten().split(size))) for name, tensor in tensors.items()}


def sizes_of(tensors: dict[str, Tensor]) -> dict[str, int]:
    return {name: tensor.numel() for name, tensor in tensors.items()}


def marks(choice, tensors: dict[str, Tensor]) -> dict[str, list[bool]]:
    return {name: torch.cat([*choice.chunks(name), torch.zeros(0, dtype=bool)]).tolist() for name in tensors}


def by_sorting(tensors: dict[str, Tensor], k: int, always=(), minimum=None) -> dict[str, list[bool]]:
    """The obvious definition: what must be kept, then the best of the rest in the order of value and place."""
    chosen = {name: [name in always] * tensor.numel() for name, tensor in tensors.items()}
    for name, count in (minimum or {}).items():
        if name not in always:
            values = tensors[name].tolist()
            for place in sorted(range(len(values)), key=lambda p: (-values[p], p))[:count]:
                chosen[name][place] = True
    rest = [
        (-value, order, place)
        for order, (name, tensor) in enumerate(tensors.items())
        for place, value in enumerate(tensor.tolist())
        if not chosen[name][place]
    ]
    names = list(tensors)
    for _, order, place in sorted(rest)[: k - sum(map(sum, chosen.values()))]:
        chosen[names[order]][place] = True
    return chosen


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.rand(40, generator=generator),
        "weak": torch.rand(30, generator=generator) * 0.01,
        "ties": torch.randint(0, 3, (50,), generator=generator) / 4,
        "head": torch.zeros(7),
        "none": torch.zeros(0),
    }


@pytest.mark.parametrize("k", [20, 60, 100, 127])
@pytest.mark.parametrize("always", [(), ("head",), ("head", "a")])
@pytest.mark.parametrize("minimum", [None, {"weak": 5, "ties": 3, "none": 2}, {"weak": 99, "head": 2}])
def test_agrees_with_sorting(tensors, k, always, minimum) -> None:
    kept = sum(tensors[name].numel() for name in always)
    forced = sum(min(c, tensors[n].numel()) for n, c in (minimum or {}).items() if n not in always)
    if kept + forced > k:
        with pytest.raises(SquisherError, match=f"{k} entries.* {kept} "):
            choose(sources_of(tensors), k, sizes_of(tensors), always=always, minimum=minimum)
        return
    choice = choose(sources_of(tensors), k, sizes_of(tensors), always=always, minimum=minimum)
    found = marks(choice, tensors)
    assert sum(map(sum, found.values())) == k
    assert found == by_sorting(tensors, k, always, minimum)
    assert marks(choice, tensors) == found  # again, and in any order
    assert torch.cat(list(choice.chunks("ties"))).tolist() == found["ties"]


def test_each_source_by_itself(tensors) -> None:
    ks = {"a": 4, "weak": 0, "ties": 11, "head": 3, "none": 0}
    found = marks(per_source(sources_of(tensors), ks), tensors)
    for name, k in ks.items():
        assert found[name] == by_sorting({name: tensors[name]}, k)[name]


def test_progress_reaches_no_further_than_its_end(tensors) -> None:
    seen: list[tuple[int, int]] = []
    choice = choose(sources_of(tensors), 50, sizes_of(tensors), progress=lambda *at: seen.append(at))
    assert seen == sorted(seen)
    assert all(done <= total == 254 for done, total in seen)
    count = len(seen)
    marks(choice, tensors)
    assert len(seen) == count
    seen.clear()
    per_source(sources_of(tensors), dict.fromkeys(tensors, 0), sizes_of(tensors), lambda *at: seen.append(at))
    assert seen[-1] == (127, 254)


def _process(rank: int, tensors) -> dict:
    names = list(tensors)
    mine = {name: tensors[name] for name in (names[:2] if rank == 0 else names[2:])}
    found = {}
    for k in (20, 64, 127):
        choice = choose(sources_of(mine), k, sizes_of(mine), always=("head",), minimum={"weak": 3}, sharded=True)
        found[k] = marks(choice, mine)
    try:
        choose(sources_of(mine), 3, sizes_of(mine), always=("head",), sharded=True)
    except SquisherError as error:
        found["error"] = str(error)
    return found


def test_two_processes_choose_what_one_would(tensors, tmp_path) -> None:
    first, second = run_together(_process, tmp_path, tensors)
    for k in (20, 64, 127):
        assert {**first[k], **second[k]} == by_sorting(tensors, k, ("head",), {"weak": 3})
    assert first["error"] == second["error"]
    assert "7 are always kept" in first["error"]


@pytest.mark.parametrize(("ties", "passes"), [(False, 2), (True, 3)])
def test_ties_are_counted_only_where_some_of_them_are_not_chosen(ties: bool, passes: int) -> None:
    calls = 0
    scores = torch.arange(20.0)
    scores[8:12] = 8.0

    def chunks() -> Iterator[Tensor]:
        nonlocal calls
        calls += 1
        return iter(scores.split(7))

    k = 10 if ties else 12
    choice = choose({"x": chunks}, k, {"x": 20})
    assert calls == passes
    assert torch.cat(list(choice.chunks("x"))).nonzero().flatten().tolist() == sorted([*range(12, 20), *range(8, k)])
