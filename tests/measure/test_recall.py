"""What was proven once is remembered while nothing changes, and forgotten as soon as something does."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import squisher
from squisher.errors import SquisherError
from squisher.measure import fast


@pytest.fixture
def proofs(monkeypatch):
    """The models that were proven."""
    seen = []
    true = fast.prove

    def counted(sums, model, *args):
        seen.append(model)
        return true(sums, model, *args)

    monkeypatch.setattr(fast, "prove", counted)
    return seen


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3)).eval()


def _data(batches=2, size=4, features=5):
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(size, features, generator=g), torch.arange(size) % 3) for _ in range(batches)]


def test_a_second_call_proves_nothing_again_and_finds_the_same(proofs):
    model = _model()
    first, second = squisher.fisher(model, _data()), squisher.fisher(model, _data())
    assert len(proofs) == 1
    for name in first:
        assert torch.equal(first[name], second[name])


def _step(model):
    with torch.no_grad():
        model[0].weight.mul_(1.01)
    return {}


def _load(model):
    model.load_state_dict(_model().state_dict())
    return {}


def _replace(model):
    model[1] = nn.Sigmoid()
    return {}


def _flag(model):
    model.train()
    model[2].p = 0.0
    return {"eval_mode": False}


@pytest.mark.parametrize(
    "change", [_step, _load, _replace, _flag, lambda _: {"labels": "exact"}, lambda _: {"parameters": "0.weight"}]
)
def test_what_changes_is_proven_again(proofs, change):
    model = _model()
    squisher.fisher(model, _data())
    squisher.fisher(model, _data(), **change(model))
    assert len(proofs) == 2


def test_batches_are_counted_over_all_calls(proofs):
    model = _model()
    for _ in range(4):
        squisher.fisher(model, _data(batches=5))
    assert len(proofs) == 2  # the first and the sixteenth


class _Mixing(nn.Module):
    """Mixes the examples of a batch where nothing sees it, if it is told to."""

    def __init__(self):
        super().__init__()
        self.layer, self.mixes = nn.Linear(5, 3), False

    def forward(self, x):
        scale = 1.0 + abs(float(x.detach().numpy().mean()))
        return self.layer(x) * (scale if self.mixes else 1.0)


def test_a_call_that_failed_leaves_nothing_to_believe():
    model = _Mixing()
    model.mixes = True
    for _ in range(2):
        with pytest.raises(SquisherError, match="influence each other"):
            squisher.fisher(model, _data())


def test_what_goes_through_python_is_proven_in_every_call(proofs):
    model = _Mixing()
    squisher.fisher(model, _data())
    model.mixes = True
    with pytest.raises(SquisherError, match="influence each other"):
        squisher.fisher(model, _data())
    assert len(proofs) == 2


def test_a_model_is_not_kept_alive():
    model = _model()
    squisher.fisher(model, _data())
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
