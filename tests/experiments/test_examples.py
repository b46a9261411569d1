"""How many examples: the moving average against its definition, what counts as enough, and one small run."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from experiments import examples
from experiments.data import Labelled
from experiments.runs import Run, execute


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
        ({8: {0: 50.0, 1: 51.0}, 128: 75}, "too few seeds"),
    ],
)
def test_worth_is_the_number_from_which_on_the_fisher_is_not_behind(curve, expected):
    noise = (-0.5, 0.5, -0.5, 0.5)  # of the difference
    values = {
        f"fisher (exact), {n}": value if isinstance(value, dict) else {s: value + noise[s] for s in range(4)}
        for n, value in curve.items()
    }
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


def test_memory_and_squared_sums_are_told_apart_and_tracked_where_there_is_a_penalty():
    noise = dict(enumerate((0.1, -0.1, 0.2)))
    by = {
        "fisher (empirical), 8": dict.fromkeys(noise, 1.0), "fisher (empirical), 32": dict.fromkeys(noise, 50.0),
        "fisher (moving average)": {s: 60 + x for s, x in noise.items()}, "squisher": {s: 57 + 2 * x for s, x in noise.items()},
    }  # fmt: skip
    tracked = by | {"squisher (tracked)": {s: 61 + 3 * x for s, x in noise.items()}}
    found = examples.memory({"pruning": by, "EWC": tracked})
    values = {key: round(gap.value, 1) for key, (gap, _) in found.items()}
    assert values == {
        ("pruning", "memory"): 10.1, ("pruning", "squaring sums"): -2.9, ("EWC", "memory"): 10.1, ("EWC", "squaring sums"): 1.1,
    }  # fmt: skip
    words = examples._words({}, found)
    assert (
        words["squaring sums/reach"]
        == f"{max(-found['pruning', 'squaring sums'][0].low, found['EWC', 'squaring sums'][0].high):.1f}"
    )
    assert words["memory/clear"] == "2 of 2"
    raw = sorted(gap.p() for gap, _ in found.values())
    assert min(p for _, p in found.values()) == pytest.approx(4 * raw[0])


def test_ewc_with_every_number_of_examples_from_end_to_end(tmp_path, monkeypatch):
    def blobs(count, seed):
        generator = torch.Generator().manual_seed(seed)
        labels = torch.arange(count) % 6
        return Labelled(2 * torch.eye(6)[labels] + 0.3 * torch.randn(count, 6, generator=generator), labels)

    small = examples.CONFIGS["ewc"] | {
        "contexts": 3,
        "widths": [6, 12, 6],
        "iterations": 20,
        "batch": 8,
        "lr": 1e-2,
        "examples": [8],
    }
    small |= {"fisher_examples": 30, "exponents": {method: [1, 2] for method in small["exponents"]}}
    monkeypatch.setitem(examples.CONFIGS, "tiny", small)
    monkeypatch.setattr(examples, "mnist", lambda folder: (blobs(120, 0), blobs(60, 1)))
    path = execute("examples", "tiny", seeds=2, data=tmp_path, out=tmp_path, jobs=1, say=lambda line: None)
    made = json.loads(path.read_text())
    assert {len(exponents) for exponents in small["exponents"].values()} == {2}
    assert len(made["units"]) == 5 * 2 + 2 * (1 + 3 + 2 * 2)
    assert len(made["scores"]) == 2 * 8
    found = {
        kind: {e: made["units"][f"search/{kind}/1e{e}"]["result"]["accuracy"] for e in (1, 2)}
        for kind in small["exponents"]
    }
    for method in ("fisher (exact), 8", "fisher (exact), 30", "fisher (moving average)"):
        curve = found[method.partition(", ")[0]]
        assert made["units"][f"seed-1/{method}"]["result"]["given"] == (100.0 if curve[2] > curve[1] else 10.0)
