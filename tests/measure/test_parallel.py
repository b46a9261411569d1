"""Tensor-parallel models, alone and beside fully_shard, measure what one process measures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import squisher
from squisher.errors import SquisherError
from squisher.measure import fisher
from tests.processes import run_together

torch.manual_seed(0)
X, Y = torch.randn(7, 5, dtype=torch.float64), torch.randint(0, 4, (7,))
IDS, NEXT = torch.randint(0, 11, (7, 8)), torch.randint(0, 11, (7, 8))
WORLD = 4


class Block(nn.Module):
    """A block like Llama's; with `inner`, a norm on every head, whose gradient is a sum over the heads of all processes."""

    def __init__(self, width: int, way: str):
        super().__init__()
        self.head, self.way = width // 4, way
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.o = nn.Linear(width, width)
        self.gate, self.up, self.down = nn.Linear(width, 24), nn.Linear(width, 24), nn.Linear(24, width)
        self.inner = nn.RMSNorm(self.head) if way == "inner" else nn.Identity()

    def inside(self, x):
        h = self.norm1(x)
        q, k, v = (m(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for m in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(self.inner(q), k, v, is_causal=True)
        x = x + self.o(h.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def forward(self, x):
        return checkpoint(self.inside, x, use_reentrant=False) if self.way == "checkpointed" else self.inside(x)


class Decoder(nn.Module):
    def __init__(self, way: str = ""):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(11, 16, padding_idx=3), nn.RMSNorm(16), nn.Linear(16, 11)
        self.blocks = nn.ModuleList([Block(16, way), Block(16, way)])

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _mlp():
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 4))


MODELS = {
    "mlp": _mlp,
    "decoder": Decoder,
    "sequence": Decoder,  # norms on shards of the sequence, whose gradients are sums over processes
    "outputs": Decoder,  # a DTensor as output
    "columns": Decoder,  # of the embedding
    "checkpointed": lambda: Decoder("checkpointed"),
}


FORMS = {
    (1, 4): list(MODELS),
    (2, 2): ["decoder", "sequence", "checkpointed"],
}


def _model(case, dtype=torch.float64):
    torch.manual_seed(1)
    return MODELS[case]().to(dtype)


def _batches(case, dtype=torch.float64):
    inputs, labels = (X.to(dtype), Y) if case == "mlp" else (IDS, NEXT)
    return list(zip(inputs.split(2), labels.split(2), strict=True))


def _plan(case):
    if case == "mlp":
        return {"0": ColwiseParallel(), "2": RowwiseParallel()}
    whole, rows = Replicate(), Shard(1)
    between = rows if case == "sequence" else whole
    plan = {
        "embed": RowwiseParallel(input_layouts=whole, output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=whole),
    }
    if case == "columns":
        plan["embed"] = ColwiseParallel(output_layouts=whole)
    if case == "outputs":
        plan["head"] = ColwiseParallel(use_local_output=False)
    if case == "sequence":
        plan |= dict.fromkeys(["norm", *(f"blocks.{n}.norm{k}" for n in (0, 1) for k in (1, 2))], SequenceParallel())
    for n in (0, 1):
        plan |= {f"blocks.{n}.{name}": ColwiseParallel(input_layouts=between) for name in ("q", "k", "v", "gate", "up")}
        plan |= {f"blocks.{n}.{name}": RowwiseParallel(output_layouts=between) for name in ("o", "down")}
    return plan


def _settings(case):
    return {} if case == "mlp" else {"likelihood": "tokens"}


def _spread(case, mesh, dtype=torch.float64):
    model = parallelize_module(_model(case, dtype), mesh["parallel"], _plan(case))
    if mesh["data"].size() > 1:
        for child in getattr(model, "blocks", []):
            fully_shard(child, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    return model


def _whole(found):
    return {name: v.full_tensor() if hasattr(v, "full_tensor") else v for name, v in found.items()}


def _message(action):
    try:
        action()
    except SquisherError as error:
        return str(error)
    return "nothing was raised"


def _worker(rank: int, folder: str) -> dict:
    torch._logging.set_logs(all=40)  # torch warns about two gathers in a row
    results = {}
    for form, cases in FORMS.items():
        mesh = init_device_mesh("cpu", form, mesh_dim_names=("data", "parallel"))
        for case in cases:
            found = fisher(_spread(case, mesh), _batches(case), dtype=torch.float64, **_settings(case))
            results[form, case] = _whole(found), found.provenance
        found.save(f"{folder}/{form[0]}.safetensors")
    for method in ("loop", "auto"):
        model = _spread("sequence", mesh, torch.float32)
        found = fisher(model, _batches("sequence"), likelihood="tokens", method=method)
        results[method] = _whole(found), found.provenance
    sampled = {"labels": "sampled", "draws": 2, "per": "batch", "max_examples": 5}
    results["batch"] = _whole(fisher(_spread("mlp", mesh), _batches("mlp"), dtype=torch.float64, **sampled)), None
    own = _batches("mlp")[rank // 2 :: 2]
    found = fisher(_spread("mlp", mesh), own, dtype=torch.float64, divided=True)
    results["divided"] = _whole(found), found.provenance
    results["messages"] = _messages(rank, mesh)
    return results


def _messages(rank, mesh):
    mlp, batches = _spread("mlp", mesh), _batches("mlp")
    copied = parallelize_module(_model("mlp"), mesh["parallel"], _plan("mlp"))
    line = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("data", "parallel"))
    shards = parallelize_module(_model("mlp"), line["parallel"], {"4": ColwiseParallel()})
    torch.manual_seed(1)
    inner = parallelize_module(Decoder("inner").double(), line["parallel"], _plan("decoder"))
    return {
        "group": _message(lambda: fisher(mlp, batches[rank % 2 :])),
        "fewer": _message(lambda: fisher(mlp, batches[: 3 + rank % 2])),
        "same": _message(lambda: fisher(mlp, batches, divided=True)),
        "error": _message(lambda: fisher(mlp, batches, standard_error=True)),
        "copies": _message(lambda: fisher(copied, batches)),
        "shards": _message(lambda: fisher(shards, [(X, Y * 0)])),
        "inner": _message(lambda: fisher(inner, _batches("decoder"), likelihood="tokens")),
        "tracked": _message(lambda: squisher.Tracker(mlp, per="example").step().__enter__()),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("parallel")


@pytest.fixture(scope="module")
def results(folder):
    return run_together(_worker, folder, str(folder), count=WORLD)


def _same(found, expected, tolerance):
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) <= tolerance * float(value.max()), name


@pytest.mark.parametrize("case", MODELS)
def test_every_way_of_sharding_gives_the_result_of_one_process(folder, results, case):
    expected = fisher(_model(case), _batches(case), dtype=torch.float64, method="loop", **_settings(case))
    for form in (f for f, cases in FORMS.items() if case in cases):
        for found, provenance in (r[form, case] for r in results):
            _same(found, expected, 1e-10)
            assert provenance.coverage["method"] == "fast"
            assert not provenance.coverage["loop"]
            assert provenance.examples == len(X)
        if case == list(MODELS)[-1]:
            saved = squisher.load(folder / f"{form[0]}.safetensors")
            _same({name: saved[name] for name in saved}, expected, 1e-10)


@pytest.mark.parametrize("method", ["loop", "auto"])
def test_single_precision(results, method):
    expected = fisher(_model("sequence", torch.float32), _batches("sequence"), likelihood="tokens", method="loop")
    for result in results:
        found, provenance = result[method]
        _same(found, expected, 1e-5)
        assert provenance.coverage["method"] == {"loop": "loop", "auto": "fast"}[method]


def test_whole_batches_with_sampled_labels(results):
    settings = {"labels": "sampled", "draws": 2, "per": "batch", "max_examples": 5}
    expected = fisher(_model("mlp"), _batches("mlp"), dtype=torch.float64, **settings)
    for result in results:
        _same(result["batch"][0], expected, 1e-10)


def test_groups_with_examples_of_their_own(results):
    expected = fisher(_model("mlp"), _batches("mlp"), dtype=torch.float64, method="loop")
    for found, provenance in (r["divided"] for r in results):
        _same(found, expected, 1e-10)
        assert provenance.examples == len(X)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("group", "tensor-parallel group have different batches"),
        ("fewer", "tensor-parallel group have different batches"),
        ("same", "divided=True says"),
        ("error", "standard_error"),
        ("copies", "fully_shard over the groups"),
        ("shards", "different outputs"),
        ("inner", "inner.weight'"),
        ("tracked", "tensor parallelism"),
    ],
)
def test_what_is_refused(results, case, words):
    for result in results:
        assert words in result["messages"][case]
