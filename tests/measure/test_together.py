"""Four processes that share one model, each with examples of its own, measure what one process measures on all of them."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from squisher.errors import SquisherError
from squisher.measure import fisher
from squisher.measure.sharded.shards import WholeSums
from squisher.measure.squaring import Pass
from tests.measure.zoo import build, split
from tests.processes import run_together

WORLD = 4
torch.manual_seed(0)
X, Y = torch.randn(13, 5, dtype=torch.float64), torch.randint(0, 4, (13,))
# Process k has these; the sizes differ, one batch has one example, and the last process has fewer.
PARTS = [[[0, 1, 2], [3]], [[4, 5], [6, 7]], [[8, 9], [10]], [[11, 12]]]


class Block(nn.Module):
    def __init__(self, width: int, way: str = "plain"):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.way = way

    def inside(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))

    def forward(self, x):
        return checkpoint(self.inside, x, use_reentrant=False) if self.way == "checkpointed" else self.inside(x)


class Outside(nn.Module):
    """Checkpointing around the modules that are sharded, as torch's wrapper does."""

    def __init__(self):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(5, 6), Block(6), nn.Linear(6, 4)

    def forward(self, x):
        return self.last(checkpoint(self.block, self.first(x), use_reentrant=False))


class Unseen(nn.Module):
    """A parameter that is used where no rule sees it, and only for some inputs."""

    def __init__(self):
        super().__init__()
        self.first, self.scale, self.last = nn.Linear(5, 6), nn.Parameter(torch.rand(6) + 1), nn.Linear(6, 4)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.last(h * torch.special.expit(self.scale)[None].cumprod(1) + torch.cdist(h, self.scale[None]))


class Decided(nn.Module):
    """Python chooses for a whole batch what it would not choose for each of its examples, which makes no difference."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.last(h * 1.0 if x.abs().max() > 2 else h)


class Mixing(nn.Module):
    """Python chooses for a whole batch what it would not choose for one of its examples."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.last(h * 2 if x.mean().item() > 0 else h)


def _blocks(way: str = "plain") -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 6), Block(6, way), Block(6, way), nn.Linear(6, 4))


MODELS = {
    "blocks": _blocks,
    "hybrid": _blocks,
    "kept": _blocks,
    "dim 1": _blocks,
    "checkpointed": lambda: _blocks("checkpointed"),
    "checkpointed outside": Outside,
    "unseen": Unseen,
    "decided": Decided,
    "half": _blocks,
}


def _model(case: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[case]().double() if case != "half" else MODELS[case]().float()


def _sharded(case: str) -> nn.Module:
    model = _model(case)
    settings = {}
    if case == "hybrid":
        settings["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    if case == "kept":
        settings["reshard_after_forward"] = False
    if case == "half":
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    if case == "dim 1":
        from torch.distributed.tensor import Shard

        settings["shard_placement_fn"] = lambda p: Shard(1) if p.dim() == 2 and p.shape[1] % WORLD == 0 else Shard(0)
    for child in model.children():
        fully_shard(child, **settings)
    fully_shard(model, **settings)
    return model


def _inputs(case: str) -> torch.Tensor:
    return X.float() if case == "half" else X


def _whole(found):
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in found.items()}, found.provenance.coverage


def _worker(rank: int) -> dict:
    results = {}
    for case in MODELS:
        x = _inputs(case)
        mine = [(x[part], Y[part]) for part in PARTS[rank]]
        results[case] = _whole(fisher(_sharded(case), mine, divided=True, dtype=torch.float64))
    results["one batch for four"] = _whole(fisher(_sharded("blocks"), [(X, Y)], dtype=torch.float64))
    results["standard error"] = fisher(
        _sharded("hybrid"), list(zip(X.split(3), Y.split(3), strict=True)), standard_error=True
    ).provenance.standard_error
    model, batch = build("encoder", torch.float64)
    fully_shard(model)
    results["encoder"] = _whole(fisher(model, split(batch, 2), dtype=torch.float64))
    try:
        fisher(_sharded("blocks"), [] if rank == 3 else [(X[:2] + rank, Y[:2])], divided=True)
    except SquisherError as error:
        results["none"] = str(error)
    apart = _sharded("hybrid")
    with torch.no_grad():
        apart[0].weight.to_local().add_(rank // 2)  # the copies of the second pair
    try:
        fisher(apart, [(X, Y)])
    except SquisherError as error:
        results["copies"] = str(error)
    bad = Y[:2] + 100 * (rank == 1)
    try:
        fisher(_sharded("blocks"), [(X[:2] + rank, bad)], divided=True)
    except SquisherError as error:
        results["bad labels"] = str(error)
    model = Mixing().double()
    fully_shard(model)
    # The proof runs the first and the last alone, and only the example between them shows that they mix, on one process.
    levels = torch.tensor([-4.0, -1, -1, 1 if rank == 1 else -1, -1, -1], dtype=torch.float64) - 0.01 * rank
    try:
        fisher(model, [(levels[:, None].expand(-1, 5).clone(), Y[:6])], divided=True)
    except SquisherError as error:
        results["mixing"] = str(error)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_together(_worker, tmp_path_factory.mktemp("together"), count=WORLD)


@functools.cache
def _alone(case: str):
    order = [n for parts in PARTS for part in parts for n in part]
    return fisher(_model(case), [(_inputs(case)[order], Y[order])], dtype=torch.float64, method="loop")


@pytest.mark.parametrize("case", MODELS)
def test_examples_of_four_processes(results, case):
    for found, coverage in (result[case] for result in results):
        expected = _alone(case)
        rtol = 0.2 if case == "half" else 1e-10
        for name in expected:
            floor = (1e-2 if case == "half" else 1e-12) * float(expected[name].max())
            assert torch.allclose(found[name], expected[name], rtol=rtol, atol=floor), name
        assert coverage["method"] == ("loop" if case == "unseen" else "fast")
        assert bool(coverage["loop"]) == (case == "unseen")


def test_the_example_that_mixes_is_the_one_that_is_run_alone(results):
    for result in results:
        assert "influence each other" in result["mixing"]
        assert "example 3" in result["mixing"]


def test_fewer_batches_than_processes(results):
    expected = fisher(_model("blocks"), [(X, Y)], dtype=torch.float64, method="loop")
    for found, _ in (result["one batch for four"] for result in results):
        assert all(torch.allclose(found[name], expected[name], rtol=1e-10) for name in expected)


def test_standard_errors_of_copied_shards(results):
    expected = fisher(_model("hybrid"), list(zip(X.split(3), Y.split(3), strict=True)), standard_error=True)
    for result in results:
        assert result["standard error"] == pytest.approx(expected.provenance.standard_error, rel=1e-3)


def test_positions_that_are_looked_up_once(results):
    model, batch = build("encoder", torch.float64)
    expected = fisher(model, [batch], dtype=torch.float64, method="loop")
    for found, coverage in (result["encoder"] for result in results):
        assert coverage["method"] == "fast"
        for name in expected:
            largest = max(float(expected[name].max()), 1e-20)  # keys' biases have no gradient but rounding
            assert torch.allclose(found[name] / largest, expected[name] / largest, atol=1e-9), name


def test_what_one_process_cannot_do_all_refuse(results):
    for rank, result in enumerate(results):
        assert "Processes 0 and 2 have different models" in result["copies"]
        assert "Processes [3] were given no batch" in result["none"]
        assert ("Labels lie between" if rank == 1 else "Process 1 of 4 failed") in result["bad labels"]


class Failing(nn.Tanh):
    """Run out of memory on one process, in the middle of a pass."""

    calls = 0

    def forward(self, x):
        Failing.calls += 1
        if dist.get_rank() == 1 and Failing.calls > 5:
            raise MemoryError("nothing left")
        return super().forward(x)


def _failing_worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = nn.Sequential(nn.Linear(5, 6), Failing(), nn.Linear(6, 4)).double()
    for child in (model[0], model[2], model):
        fully_shard(child)
    try:
        fisher(model, [(X[:4] + rank, Y[:4])] * 4, divided=True)
    except (SquisherError, MemoryError) as error:
        Path(folder, f"{rank}.txt").write_text(f"{type(error).__name__}: {error}")
    os._exit(0)  # as a script ends that does not catch it


def test_a_process_that_fails_inside_a_pass_tells_the_others(tmp_path):
    running = [mp.get_context("spawn").Process(target=_failing_worker, args=(k, str(tmp_path))) for k in range(2)]
    for process in running:
        process.start()
    for process in running:
        process.join(120)
    assert (tmp_path / "1.txt").read_text() == "MemoryError: nothing left"
    told = "SquisherError: Process 1 of 2 failed, so this one stops too. There: MemoryError: nothing left"
    assert (tmp_path / "0.txt").read_text() == told


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_is_whole_at_once_is_a_layer_or_two(alone, monkeypatch):
    """Counted in bytes that tensors hold, not in what the process has: the C library keeps some of what is freed."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 16), *(Block(16) for _ in range(6)), nn.Linear(16, 4))
    for child in model:
        fully_shard(child)
    fully_shard(model)
    largest = max(sum(p.numel() for p in child.parameters()) for child in model)
    held: list[tuple[int, int]] = []
    flush = WholeSums.flush

    def counted(self, group, names=None):
        members = [p for g in self.shards.groups for p in g.group.fsdp_params]
        gathered = sum(p._unsharded_param.untyped_storage().nbytes() for p in members)
        held.append((sum(t.nbytes for t in self.values()), gathered))
        return flush(self, group, names)

    monkeypatch.setattr(WholeSums, "flush", counted)
    found = fisher(model, [(X.float(), Y)], labels="exact")
    assert len(held) >= len(model)
    assert 0 < max(sums for sums, _ in held) <= 4 * largest  # float32, of one layer
    assert 0 < max(gathered for _, gathered in held) <= 3 * 4 * largest  # that layer, and those fetched ahead
    assert sum(v.to_local().numel() for v in found.values()) == sum(p.numel() for p in model.parameters())


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.out = nn.Parameter(torch.rand(5)), nn.Linear(5, 4)

    def forward(self, x):
        return self.out(torch.where(x[:, :1] > 5, x * self.scale, x))


def test_a_gradient_that_is_lost_on_its_way_is_not_taken_for_zero(alone, monkeypatch):
    model = Gated().double()
    off, on = X[:4].clamp(-1, 1), X[:4].clamp(-1, 1) + 7
    batches = [(off, Y[:4]), (off, Y[:4]), (on, Y[:4])]
    expected = fisher(model, batches, method="loop")
    fully_shard(model)
    arrived = Pass._arrived

    def losing(self, g, uses):
        arrived(self, g, [use for use in uses if use.source.shape != expected["scale"].shape])

    monkeypatch.setattr(Pass, "_arrived", losing)
    found = fisher(model, batches)
    assert bool(expected["scale"].any())
    torch.testing.assert_close(found["scale"].full_tensor(), expected["scale"])
    assert "scale" in found.provenance.coverage["loop"]
