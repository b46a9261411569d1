"""Two processes that share one model (fully_shard) measure what one process measures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import squisher
from squisher.errors import SquisherError
from squisher.importance import Importance
from squisher.measure import fisher
from squisher.storage.tensors import tied_names
from tests.measure.zoo import build
from tests.processes import run_together

torch.manual_seed(0)
X, Y = torch.randn(11, 5), torch.randint(0, 4, (11,))
BATCHES = list(zip(X.split(4), Y.split(4), strict=True))

SETTINGS = {
    "data": {"labels": "data"},
    "sampled": {"labels": "sampled", "draws": 2, "seed": 3},
    "exact": {"labels": "exact"},
    "batch": {"labels": "data", "per": "batch", "method": "loop"},
    "batch-sampled": {"labels": "sampled", "per": "batch", "draws": 2},
    "some": {"parameters": "weight", "max_examples": 6},
    "frozen": {"parameters": ["0.bias", "2.weight"], "dtype": torch.float64},
    "plain": {"parameters": "^[24]"},
}


def _mlp():
    torch.manual_seed(1)
    # A layer with one output: the second process holds nothing of it.
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1), nn.Dropout(0.5), nn.Linear(1, 4))


def _decoder():
    torch.manual_seed(2)
    model, (ids, labels) = build("decoder")
    fewer = labels.clone()
    fewer[:, 3:] = -100  # fewer positions that count: fewer columns on the second process
    return model, [
        (ids, labels),
        (ids.flip(0), fewer),
        (ids[:1], labels[:1]),
    ]  # a batch of one is measured twice, by halves


def _prepared(case):
    """The model of a case as one process has it."""
    model = _mlp()
    if case == "frozen":
        model[0].requires_grad_(False)
    return model


def _sharded(case):
    model = _prepared(case)
    if case != "plain":  # all in the outermost group, which is not resharded after a forward pass
        fully_shard(model[0])
    fully_shard(model, ignored_params={model[4].weight} if case == "plain" else None)
    return model


def _message(action):
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def _worker(rank: int, folder: str) -> dict[str, object]:
    out: dict[str, object] = {}
    for case, settings in SETTINGS.items():
        model = _sharded(case)
        found = fisher(model, BATCHES, standard_error=True, **settings)
        for name, parameter in model.named_parameters():
            if name in found and isinstance(parameter, DTensor):
                assert found[name].placements == parameter.placements, name
                assert found[name].to_local().shape == parameter.to_local().shape
        assert isinstance(found["4.weight"], DTensor) == (case != "plain") if "4.weight" in found else True
        checkpoint.save({"fisher": dict(found)}, checkpoint_id=f"{folder}/{case}")
        out[case] = found.provenance.to_dict()
        found.save(f"{folder}/{case}.safetensors")
        (found * 2.0).save(f"{folder}/{case}-twice.safetensors", dtype=torch.float64, shard_bytes=100)

    model, batches = _decoder()
    for block in model.blocks:
        fully_shard(block["qkv"])
        fully_shard([block["up"], block["down"]])
    fully_shard(model)
    for unit in ("sequence", "token"):
        found = fisher(model, batches, likelihood="tokens", unit=unit, labels="sampled")
        found.save(f"{folder}/decoder-{unit}.safetensors")

    out["state"] = _state()
    out["parts"] = _parts(folder)
    out["messages"] = _messages(rank, folder)
    return out


def _state():
    """What a run leaves behind, and what it must not depend on."""
    first = fisher(_sharded("data"), BATCHES)
    model = _sharded("data")
    with torch.no_grad():
        model(X)
    assert not isinstance(next(model[4].parameters()), DTensor)  # the outermost parameters stay whole after this
    for module in (model, model[0]):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other way to divide by it
    model.set_requires_gradient_sync(False)
    group = model._get_fsdp_state()._fsdp_param_groups[0]
    random = torch.get_rng_state()
    second = fisher(model, BATCHES)
    with pytest.raises(SquisherError, match="Labels lie between"):
        fisher(model, [*BATCHES, (X, Y + 100)])
    third = fisher(model, BATCHES)
    assert torch.equal(random, torch.get_rng_state())
    assert (group.gradient_divide_factor, group.reduce_grads) == (1.0, False)
    assert model.training
    assert all(isinstance(p, DTensor) and p.grad is None for p in model.parameters())
    for name in first:
        for other in (second, third):
            assert torch.equal(first[name].to_local(), other[name].to_local()), name
    model.set_requires_gradient_sync(True)
    model(X).sum().backward()
    before = [p.grad.to_local().clone() for p in model.parameters()]
    fisher(model, BATCHES, likelihood=lambda model, batch: model(batch[0]).sum(1), eval_mode=False)
    assert all(torch.equal(p.grad.to_local(), b) for p, b in zip(model.parameters(), before, strict=True))

    half = _mlp()
    fully_shard(half, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    return {
        "half": {name: value.full_tensor() for name, value in fisher(half, BATCHES).items()},
    }


def _parts(folder):
    parts = [fisher(_sharded("data"), BATCHES[:1]), fisher(_sharded("data"), BATCHES[1:])]
    Importance.combine(parts).save(f"{folder}/combined.safetensors")
    return {name: Importance.combine(parts)[name].full_tensor() for name in parts[0]}


def _messages(rank, folder):
    model = _sharded("data")
    mine = BATCHES[rank:]
    mesh = init_device_mesh("cpu", (2,))
    values = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    broken = distribute_tensor(torch.tensor([1.0, 1.0, torch.nan, 1.0]), mesh, [Shard(0)])
    imp = Importance({"a": values, "b": values.clone()})
    hybrid = _mlp()
    fully_shard(hybrid, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards")))
    waiting = _sharded("data")
    waiting.set_requires_gradient_sync(False)
    waiting(X).sum().backward()

    def failing():
        yield BATCHES[0]
        if rank == 1:
            raise ValueError("only here")
        yield BATCHES[1]

    def stop(done, total):
        raise ValueError("the disk is full")

    shared = values.clone()
    assert tied_names({"a": values, "b": shared, "c": shared}) == {"c": "b"}
    return {
        "other data": _message(lambda: fisher(model, mine)),
        "less data": _message(lambda: fisher(model, BATCHES[: 2 + rank])),
        "failing data": _message(lambda: fisher(model, failing())),
        "waiting": _message(lambda: fisher(waiting, BATCHES)),
        "nan": _message(lambda: Importance({"a": values, "w": broken})),
        "no folder": _message(lambda: imp.save(f"{folder}/missing/x.safetensors")),
        "bad name": _message(lambda: imp.save(f"{folder}/broken.pt")),
        "full disk": _message(lambda: imp.save(f"{folder}/broken.safetensors", progress=stop)),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def results(folder):
    return run_together(_worker, folder, str(folder))


def _read(path, like):
    values = {"fisher": {name: torch.full_like(value, torch.nan) for name, value in like.items()}}
    checkpoint.load(values, checkpoint_id=path)
    return values["fisher"]


def _same(found, expected, rtol=1e-5):
    assert list(found) == list(expected)
    for name in expected:
        assert found[name].dtype == expected[name].dtype
        assert torch.allclose(found[name], expected[name], rtol=rtol, atol=1e-12), name


@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.checkpoint")  # that there is one process
@pytest.mark.parametrize("case", SETTINGS)
def test_two_processes_give_the_result_of_one(folder, results, case):
    alone = fisher(_prepared(case), BATCHES, standard_error=True, **SETTINGS[case])
    _same(_read(folder / case, alone), alone)
    _same(squisher.load(folder / f"{case}.safetensors"), alone)
    twice = squisher.load(folder / f"{case}-twice.safetensors")
    for name in alone:
        assert torch.allclose(twice[name], 2 * alone[name].double(), rtol=1e-5)
    expected = alone.provenance.to_dict()
    for provenance in (result[case] for result in results):
        errors, expected_errors = provenance.pop("standard_error"), alone.provenance.standard_error
        assert errors == pytest.approx(expected_errors, rel=1e-3)
        coverage = provenance.pop("coverage")
        left = {k: v for k, v in expected.items() if k not in ("standard_error", "coverage")}
        assert provenance == left
        if "batch" in case:
            assert coverage == {"method": SETTINGS[case].get("method", "batch")}
        else:
            assert coverage == {"method": "fast", "loop": {}, "unused": {}}


@pytest.mark.parametrize("unit", ["sequence", "token"])
def test_a_decoder_with_tied_weights(folder, results, unit):
    model, batches = _decoder()
    alone = fisher(model, batches, likelihood="tokens", unit=unit, labels="sampled")
    found = squisher.load(folder / f"decoder-{unit}.safetensors")
    _same(found, alone)
    assert found.provenance.coverage == {"method": "fast", "loop": {}, "unused": {}}
    assert found.provenance.tied == alone.provenance.tied == {"head.weight": "tokens.weight"}


def test_a_run_leaves_nothing_behind(results):
    first = results[0]["state"]
    exact = fisher(_mlp(), BATCHES)
    for name in exact:
        assert first["half"][name].dtype == torch.float32
        assert torch.allclose(first["half"][name], exact[name], rtol=0.1, atol=1e-3), name


def test_parts_of_the_data_combine_to_the_whole(folder, results):
    alone = fisher(_mlp(), BATCHES)
    for result in results:
        _same(result["parts"], alone)
    _same(squisher.load(folder / "combined.safetensors"), alone)


@pytest.mark.parametrize(
    ("case", "sentences"),
    [
        ("other data", ["The processes have different batches"] * 2),
        ("less data", ["The processes have different batches"] * 2),
        ("failing data", ["Process 1 of 2 failed, so this one stops too. There: ValueError: only here", "only here"]),
        ("waiting", ["gradients that were not reduced yet"] * 2),
        ("nan", ["Process 1 of 2 failed", "The importance of 'w' has NaN"]),
        ("no folder", ["missing", "Process 0 of 2 failed"]),
        ("bad name", ["ends in .safetensors", "Process 0 of 2 failed"]),
        ("full disk", ["the disk is full", "Process 0 of 2 failed"]),
    ],
)
def test_all_processes_stop_together_and_say_why(results, case, sentences):
    for result, sentence in zip(results, sentences, strict=True):
        assert sentence in result["messages"][case]


def test_a_failed_save_leaves_nothing(folder, results):
    assert not list(folder.glob("*broken*"))


def test_flat_parameters_are_refused():
    class FullyShardedDataParallel(nn.Sequential):
        pass

    with pytest.raises(SquisherError, match="FSDP1"):
        fisher(nn.Sequential(FullyShardedDataParallel(nn.Linear(5, 4))), BATCHES)
