"""Two processes with the same or with different batches, and with different models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from squisher import SquisherError, fisher
from tests.processes import run_together

torch.manual_seed(0)
X, Y = torch.randn(12, 5), torch.randint(0, 4, (12,))
BATCHES = list(zip(X.split(3), Y.split(3), strict=True))


def _model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))


def _message(action):
    try:
        action()
    except SquisherError as error:
        return str(error)
    return "nothing was raised"


def _worker(rank):
    own = BATCHES[rank::2]
    return {
        "divided": dict(fisher(_model(), own, divided=True)),
        "sampled": dict(fisher(_model(), own, divided=True, labels="sampled", draws=300)),
        "same": dict(fisher(_model(), BATCHES)),
        "examples": fisher(_model(), own, divided=True, max_examples=7).provenance.examples,
        "different data": _message(lambda: fisher(_model(), own)),
        "not divided": _message(lambda: fisher(_model(), BATCHES, divided=True)),
        "different models": _message(lambda: fisher(_model(rank), BATCHES)),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_together(_worker, tmp_path_factory.mktemp("stream"))


def test_divided_data_gives_what_one_process_gives(found):
    expected = fisher(_model(), BATCHES)
    for result in found:
        for case in ("divided", "same"):
            assert all(torch.allclose(result[case][n], expected[n], rtol=1e-5) for n in expected)
        assert result["examples"] == 7


def test_every_example_of_divided_data_draws_its_own_labels(found):
    exact = fisher(_model(), BATCHES, labels="exact")
    assert torch.allclose(found[0]["sampled"]["2.weight"], exact["2.weight"], rtol=0.5, atol=1e-3)


@pytest.mark.parametrize(
    ("case", "words"),
    [("different data", "divided=True"), ("not divided", "same batches"), ("different models", "different models")],
)
def test_what_fits_neither_is_refused_on_all(found, case, words):
    assert all(words in result[case] for result in found)


@pytest.mark.parametrize(("settings", "total"), [({}, 12), ({"drop_last": True}, 10), ({"max_examples": 7}, 7)])
def test_progress_knows_the_length_of_a_dataloader(settings, total):
    data = torch.utils.data.TensorDataset(X, Y)
    most = settings.pop("max_examples", None)
    calls = []
    loader = torch.utils.data.DataLoader(data, batch_size=5, **settings)
    fisher(_model(), loader, max_examples=most, progress=lambda *args: calls.append(args))
    assert calls[-1] == (total, total)
    assert all(call[1] == total for call in calls)
