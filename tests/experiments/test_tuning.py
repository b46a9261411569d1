"""Fine-tuning keeps what belongs together: weights, accumulator and step; the best is chosen on validation data alone."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import squisher
from experiments import tuning
from experiments.tuning import Splits

RECIPE = {
    "steps": 12, "batch": 8, "rate": 1e-2, "schedule": "constant", "warmup": 0, "beta2": 0.999, "eps": 1e-8,
    "decay": 0.0, "clip": None, "every": 3, "keep": [4], "track": True,
}  # fmt: skip


class Points(NamedTuple):
    inputs: Tensor
    labels: Tensor

    def __len__(self):
        return len(self.labels)

    def batch(self, rows):
        return {"input": self.inputs[rows], "labels": self.labels[rows]}

    def batches(self, size):
        return [self.batch(rows) for rows in torch.arange(len(self.labels)).split(size)]


def points(seed, count=40):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator)
    return Points(inputs, (inputs[:, 0] > 0).long())


def tuned(recipe=RECIPE, seed=1, test=3):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return model, tuning.tuned(model, Splits(points(1), points(2), points(test), 2), recipe, seed)


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 0, [1, 1, 1, 1]),
        ("linear", 0, [1, 0.75, 0.5, 0.25]),
        ("cosine", 2, [0.5, 1, 1, 0.5]),
    ],
)
def test_schedules(schedule, warmup, expected):
    config = {"schedule": schedule, "warmup": warmup, "steps": 4}
    assert [tuning._rate(config, step) for step in range(4)] == pytest.approx(expected)


def test_an_epoch_takes_no_row_twice_and_leaves_out_the_rest():
    rows = list(tuning._rows(10, 4, 5, seed=1))
    assert [len(r) for r in rows] == [4] * 5
    assert len(set(torch.cat(rows[:2]).tolist())) == 8
    assert not torch.equal(torch.cat(rows[:2]), torch.cat(rows[2:4]))


def test_a_snapshot_is_what_plain_training_of_that_length_gives():
    _, kept = tuned()
    model, short = tuned({**RECIPE, "steps": 4})
    at, end = kept["snapshots"]["4"], short["snapshots"]["final"]
    assert at["step"] == 4
    assert torch.equal(at["weights"]["weight"], model.weight)
    assert torch.equal(at["squares"]["weight"], end["squares"]["weight"])
    assert at["provenance"]["steps"] == {"min": 4, "max": 4}


def test_the_squisher_of_a_snapshot_is_that_of_the_optimizer():
    seen = {}
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = tuning.train(model, points(1), RECIPE, 1)
    seen = squisher.extract(optimizer, model, batch_size=8)
    _, kept = tuned()
    again = tuning.importance(kept["snapshots"]["final"])
    assert again.provenance.batch_size == 8
    assert torch.equal(again.as_fisher()["weight"], seen.as_fisher()["weight"])
    assert list(tuning.importance(kept["snapshots"]["final"], "bias")) == ["bias"]


def test_the_tracker_averages_the_same_gradients_with_a_shorter_memory():
    _, kept = tuned({**RECIPE, "steps": 1, "keep": []})
    final = kept["snapshots"]["final"]
    assert torch.allclose(final["tracked"]["weight"], final["squares"]["weight"], rtol=1e-4)
    _, kept = tuned()
    final = kept["snapshots"]["final"]
    assert not torch.allclose(final["tracked"]["weight"], final["squares"]["weight"], rtol=1e-2)
    assert tuning.importance(final, what="tracked").provenance.optimizer["beta2"] == 0.95


def test_the_best_step_is_the_first_of_the_highest_on_validation_data_and_never_looks_at_test_data():
    _, kept = tuned()
    history = kept["history"]
    assert [h["step"] for h in history] == [3, 6, 9, 12]
    highest = max(h["validation"] for h in history)
    assert kept["best_step"] == next(h["step"] for h in history if h["validation"] == highest)
    _, other = tuned(test=99)
    assert other["history"] == history


def test_looking_does_not_change_the_training():
    model, _ = tuned()
    other, _ = tuned({**RECIPE, "every": None, "keep": [], "track": False})
    assert torch.equal(model.weight, other.weight)


def test_clipping_bounds_what_the_optimizer_sees():
    _, free = tuned()
    _, clipped = tuned({**RECIPE, "clip": 1e-3})
    assert clipped["snapshots"]["final"]["squares"]["weight"].sum().sqrt() <= 1e-3 * 1.01
    assert free["snapshots"]["final"]["squares"]["weight"].sum().sqrt() > 1e-2
