"""How many examples: the moving average against its definition, what counts as enough, and one small run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from experiments import examples
from experiments.data import Labelled
from experiments.runs import Run


def test_where_nothing_moves_the_moving_average_is_the_fisher_of_all_examples():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    train = Labelled(torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))
    recipe = {"rate": 0.0, "decay": 0.0, "batch": 4, "beta2": 0.9}
    found = examples.learn(model, train, recipe, steps=3, seed=1)["fisher (moving average)"]["weight"]
    squares = torch.zeros(2, 3)
    for x, y in zip(*train, strict=True):
        loss = nn.functional.cross_entropy(model(x[None]), y[None])
        squares += torch.autograd.grad(loss, model.weight)[0] ** 2 / 4
    torch.testing.assert_close(found, squares)


def test_with_one_example_a_batch_the_moving_average_is_the_squisher():
    torch.manual_seed(0)
    train = Labelled(torch.randn(6, 3), torch.tensor([0, 1, 1, 0, 1, 0]))
    recipe = {"rate": 1e-2, "decay": 0.0, "batch": 1}
    found = examples.learn(nn.Linear(3, 2), train, recipe, steps=9, seed=1)
    for name, value in found["squisher"].items():
        torch.testing.assert_close(value, found["fisher (moving average)"][name])
    recipe = {**recipe, "batch": 3}  # squared sums are something else
    found = examples.learn(nn.Linear(3, 2), train, recipe, steps=9, seed=1)
    assert not torch.allclose(found["squisher"]["weight"], found["fisher (moving average)"]["weight"], rtol=0.01)


def test_fishers_are_of_the_first_rows_of_one_order_and_end_with_all():
    torch.manual_seed(0)
    train = Labelled(torch.randn(20, 3), torch.randint(0, 2, (20,)))
    model = nn.Linear(3, 2)
    found = examples.fishers(model, train, [8, 64], seed=3)
    assert list(found) == [f"fisher ({labels}), {n}" for labels in ("exact", "empirical") for n in (8, 20)]
    order = torch.randperm(20, generator=torch.Generator().manual_seed(3))[:8]
    squares = torch.zeros(2, 3)
    for x, y in zip(*train[order], strict=True):
        squares += torch.autograd.grad(nn.functional.cross_entropy(model(x[None]), y[None]), model.weight)[0] ** 2 / 8
    torch.testing.assert_close(found["fisher (empirical), 8"]["weight"], squares)


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        ({8: 50, 32: 70, 128: 80}, "32"),
        ({8: 50, 32: 60, 128: 65}, "more than 128"),
        ({8: 71, 32: 60, 128: 75}, "128"),  # by luck with 8: it must stay so
        ({8: 90, 32: 91, 128: 92}, "8"),
        ({8: 50, 32: 69.9, 128: 71}, "32 to 128"),  # behind, and not clearly
        ({8: 50, 32: 69.9, 128: 69.9}, "32 to more than 128"),
    ],
)
def test_worth_is_the_number_from_which_on_the_fisher_is_not_behind(curve, expected):
    noise = (-0.5, 0.5, -0.5, 0.5)  # of the difference
    values = {f"fisher (exact), {n}": {s: value + noise[s] for s in range(4)} for n, value in curve.items()}
    assert examples.worth({**values, "squisher": dict.fromkeys(range(4), 70.0)}, "exact") == expected


def test_a_small_run_has_every_method_once_a_seed_and_importances_beat_chance(tmp_path):
    config = dict(examples.CONFIGS["quick"])
    config["merging"] = {**config["merging"], "tasks": {"-30°": 20, "60°": 20}}
    run = Run("examples", "quick", config, None, tmp_path)
    results = {f"seed-1/{use}": getattr(examples, use)(run, 1) for use in ("prune", "merge")}
    scores = examples.scores(results)
    assert len({(s.case, s.method, s.seed) for s in scores}) == len(scores)
    by = {(s.case, s.method): s.value for s in scores}
    assert by["pruning, 75%", "fisher (exact), 500"] > by["pruning, 75%", "without"] + 10
    assert results["seed-1/prune"]["spearman"]["fisher (exact), 500"] == pytest.approx(1, abs=1e-4)
    assert by["merging", "squisher"] > 20
