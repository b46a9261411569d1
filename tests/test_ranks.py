"""Two gloo processes give what one gives."""

from __future__ import annotations

import math
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from squisher import Importance, ranks
from squisher.errors import SquisherError
from squisher.importance.checks import Checked
from squisher.measure import fisher
from tests.processes import run_together


def _worker(rank):
    assert (ranks.rank(), ranks.world(), ranks.is_alone()) == (rank, 2, False)

    tensors = [torch.full((3,), rank + 1.0), torch.ones(2, 2).double(), torch.ones(4, 2).T]
    ranks.sum_in_place(tensors)
    assert [t.flatten()[0].item() for t in tensors] == [3.0, 2.0, 2.0]
    assert ranks.gather(rank) == [0, 1]

    model, batches = _case()
    model = torch.nn.parallel.DistributedDataParallel(model)
    out = {}
    for labels in ("data", "sampled", "exact"):
        for per in ("example", "batch"):
            if (labels, per) != ("exact", "batch"):
                found = fisher(model, batches, labels=labels, per=per, standard_error=True, max_examples=13)
                out[labels, per] = (dict(found), found.provenance.examples, found.provenance.standard_error)

    def broken(model, batch):
        if rank == 1:
            raise ValueError("only here")
        return model(batch[0]).sum(1)

    if rank == 1:
        with pytest.raises(ValueError, match="only here"):
            fisher(model, batches, likelihood=broken)
    else:
        with pytest.raises(SquisherError, match="Process 1 of 2 failed.*only here"):
            fisher(model, batches, likelihood=broken)
    out["infinite"] = _refused(rank)
    return out


def _refused(rank):
    """Return what each process says of sharded importances whose second shard has an entry that is infinite, or becomes so."""
    mesh = init_device_mesh("cpu", (2,))
    shard = DTensor.from_local(torch.full((2,), math.inf if rank else 1.0), mesh, [Shard(0)])
    found = []
    large = DTensor.from_local(torch.full((2,), 1e38 if rank else 1.0), mesh, [Shard(0)])
    infinite = MappingProxyType({"w": shard})
    for mapping in (Importance(infinite), Checked(infinite), Importance({"w": large}) * 1e3):
        try:
            mapping["w"]
        except SquisherError as error:
            found.append(str(error))
    return found


def _case():
    torch.manual_seed(0)
    x, y = torch.randn(14, 5), torch.randint(0, 4, (14,))
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 4))
    return model, list(zip(x.split(4), y.split(4), strict=True))


def test_alone_nothing_happens():
    tensor = torch.ones(3)
    ranks.sum_in_place([tensor])
    ranks.agree(None)
    assert tensor.tolist() == [1, 1, 1]
    assert (ranks.rank(), ranks.world(), ranks.is_alone(), ranks.gather("x")) == (0, 1, True, ["x"])


def test_two_processes_give_the_result_of_one(tmp_path: Path):
    first, second = run_together(_worker, tmp_path)
    for said in (first.pop("infinite"), second.pop("infinite")):
        assert len(said) == 3
        assert all("infinite values" in sentence for sentence in said[:2])
        assert "more than float32 holds" in said[2]
    model, batches = _case()
    for labels, per in first:
        alone = fisher(model, batches, labels=labels, per=per, standard_error=True, max_examples=13)
        for values, examples, errors_found in (first[labels, per], second[labels, per]):
            assert examples == 13
            assert values.keys() == alone.keys()
            for name in alone:
                assert torch.allclose(values[name], alone[name], rtol=1e-5, atol=1e-12), (labels, per, name)
                assert abs(errors_found[name] - alone.provenance.standard_error[name]) < 1e-3


def test_sharded_tensors_are_known_under_their_place_before_torch_2_5(monkeypatch):
    import sys
    from types import SimpleNamespace

    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torch.distributed._tensor", SimpleNamespace(DTensor=dict))
    assert ranks._kind() is dict
