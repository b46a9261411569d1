"""Two gloo processes give what one gives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from squisher import ranks

WORKER = """
import sys
import torch, torch.distributed as dist
from squisher import ranks
from squisher.errors import SquisherError
from squisher.measure import fisher

torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
assert (ranks.rank(), ranks.world(), ranks.is_alone()) == (int(sys.argv[2]), 2, False)

tensors = [torch.full((3,), ranks.rank() + 1.0), torch.ones(2, 2).double(), torch.ones(4, 2).T]
ranks.sum_in_place(tensors)
assert [t.flatten()[0].item() for t in tensors] == [3.0, 2.0, 2.0]
assert ranks.gather(ranks.rank()) == [0, 1]

torch.manual_seed(0)
x, y = torch.randn(14, 5), torch.randint(0, 4, (14,))
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 4))
model = torch.nn.parallel.DistributedDataParallel(model)
batches = list(zip(x.split(4), y.split(4)))
out = {}
for labels in ("data", "sampled", "exact"):
    for per in ("example", "batch"):
        if (labels, per) != ("exact", "batch"):
            found = fisher(model, batches, labels=labels, per=per, standard_error=True, max_examples=13)
            out[labels, per] = (dict(found), found.provenance.examples, found.provenance.standard_error)
torch.save(out, sys.argv[3])


def broken(model, batch):
    if ranks.rank() == 1:
        raise ValueError("only here")
    return model(batch[0]).sum(1)


try:
    fisher(model, batches, likelihood=broken)
except SquisherError as error:
    assert ranks.rank() == 0 and "Process 1 of 2 failed" in str(error) and "only here" in str(error), error
except ValueError:
    assert ranks.rank() == 1
else:
    raise AssertionError("nothing was raised")
dist.destroy_process_group()
"""


def test_alone_nothing_happens():
    tensor = torch.ones(3)
    ranks.sum_in_place([tensor])
    ranks.agree(None)
    assert tensor.tolist() == [1, 1, 1]
    assert (ranks.rank(), ranks.world(), ranks.is_alone(), ranks.gather("x")) == (0, 1, True, ["x"])


def test_two_processes_give_the_result_of_one(tmp_path: Path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, script, tmp_path / "rendezvous", str(rank), tmp_path / f"{rank}.pt"],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [p.communicate(timeout=120)[1] for p in processes]
    assert [p.returncode for p in processes] == [0, 0], errors
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))

    from squisher.measure import fisher

    torch.manual_seed(0)
    x, y = torch.randn(14, 5), torch.randint(0, 4, (14,))
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 4))
    batches = list(zip(x.split(4), y.split(4), strict=True))
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
