"""`Tracker(per="example")` of a model that is sharded over four processes, against one example at a time."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import squisher
from squisher import Tracker
from squisher.ranks import whole
from tests.measure.test_together import Block
from tests.processes import run_together
from tests.test_tracker_examples import BETA, ByHand, squares_of, sum_of

WORLD, STEPS = 4, 3
CASES = ["blocks", "hybrid", "kept", "checkpointed", "tied", "shared", "accumulated", "no rule"]


class Decoder(nn.Module):
    """The head is the embedding, and positions are looked up once."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places, self.block = nn.Embedding(11, 6), nn.Embedding(4, 6), Block(6)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.block(self.embedding(ids) + self.places(torch.arange(4))), self.embedding.weight)


class Twice(nn.Module):
    """One block that is used twice; a scale that has no rule."""

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(5, 6), Block(6), nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.ones(6)) if scaled else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.block(self.block(self.first(x)))
        return self.last(h if self.scale is None else torch.lerp(h, torch.zeros_like(h), self.scale.cumprod(0) / 2))


def make(case: str) -> nn.Module:
    torch.manual_seed(3)
    if case == "tied":
        return Decoder().double()
    if case in ("shared", "no rule"):
        return Twice(case == "no rule").double()
    way = "checkpointed" if case == "checkpointed" else "plain"
    return nn.Sequential(nn.Linear(5, 6), Block(6, way), Block(6), nn.Linear(6, 4)).double()


def batch(case: str, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    if case == "tied":
        return torch.randint(0, 11, (10, 4), generator=generator), torch.randint(0, 11, (10, 4), generator=generator)
    return torch.randn(10, 5, generator=generator, dtype=torch.float64), torch.randint(0, 4, (10,), generator=generator)


def parts(rank: int) -> slice:
    return [slice(0, 3), slice(3, 5), slice(5, 6), slice(6, 10)][rank]  # uneven, and one has a single example


def sharded(case: str) -> nn.Module:
    model = make(case)
    settings: dict[str, Any] = {"reshard_after_forward": case != "kept"}
    if case == "hybrid":
        settings["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    for child in model.modules():
        if isinstance(child, Block):
            fully_shard(child, **settings)
    fully_shard(model, **settings)
    return model


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def train(model: Any, case: str, tracker: Tracker | None, rank: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        x, y = (t[parts(rank)] for t in batch(case, step))
        optimizer.zero_grad()
        with nullcontext() if tracker is None else tracker.step():
            if case == "accumulated":
                model.set_requires_gradient_sync(False)
                (loss_of(model, x, y) * 3).backward()
                model.set_requires_gradient_sync(True)
            loss_of(model, x, y).backward()
        optimizer.step()


def worker(rank: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for case in CASES:
        model, plain = sharded(case), sharded(case)
        tracker = Tracker(model, beta2=BETA, per="example", dtype=torch.float64)
        train(model, case, tracker, rank)
        train(plain, case, None, rank)
        found = squisher.extract(tracker, model)
        results[case] = {
            "values": {name: value.full_tensor() for name, _, value, steps in tracker.items() if steps == STEPS},
            "examples": tracker.examples,
            "absent": sorted(found.provenance.absent),
            "fisher": {name: whole(value) for name, value in found.items()},
            "same": [
                torch.equal(a.full_tensor(), b.full_tensor())
                for a, b in zip(model.parameters(), plain.parameters(), strict=True)
            ],
        }
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_together(worker, tmp_path_factory.mktemp("sharded"), count=WORLD)


def by_hand(case: str) -> tuple[dict[str, Tensor], int]:
    """Train one process as FSDP2 does (the mean of the processes' gradients), and average the squares of single examples."""
    model, averages, seen = make(case), ByHand(), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        x, y = batch(case, step)
        sums = squares_of(copy.deepcopy(model), x, sum_of(y))
        times = 2 if case == "accumulated" else 1
        averages.add({name: s * times for name, s in sums.items()}, len(x) * times)
        seen += len(x) * times
        optimizer.zero_grad()
        factor = 4 if case == "accumulated" else 1
        for rank in range(WORLD):
            (loss_of(model, x[parts(rank)], y[parts(rank)]) * factor / WORLD).backward()
        optimizer.step()
    return averages.values, seen


@pytest.mark.parametrize("case", CASES)
def test_each_process_squares_its_own_examples(results: list[dict[str, Any]], case: str) -> None:
    expected, seen = by_hand(case)
    absent = ["scale"] if case == "no rule" else []
    for result in (r[case] for r in results):
        assert result["examples"] == seen
        assert result["absent"] == absent
        assert all(result["same"])  # the gradients of training, to the bit
        assert result["values"].keys() == expected.keys() - set(absent)
        for name, value in result["values"].items():
            floor = 1e-12 * float(expected[name].max())
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=floor, msg=lambda m, n=name: f"{n}: {m}")
            corrected = value / (1 - BETA**STEPS)
            torch.testing.assert_close(result["fisher"][name].double(), corrected, rtol=1e-5, atol=0.0)
