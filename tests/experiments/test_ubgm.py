"""Gradient matching: the formula with its sizes and weights, the scores, and runs from end to end at two scales."""

from __future__ import annotations

import json

import pytest
import torch

from experiments import ubgm
from experiments.runs import execute
from tests.experiments.tiny_text import write_model, write_task

SIZES = {"zero": 100, "one": 50, "two": 300}


def made(steps=(10, 10, 10)):
    generator = torch.Generator().manual_seed(1)
    snapshots, fishers = {}, {}
    for task, step in zip(SIZES, steps, strict=True):
        w, v, f = (torch.rand(2, 3, generator=generator) for _ in range(3))
        facts = {"kind": "squisher", "batch_size": 16, "loss_reduction": "mean", "unit": "example"}
        snapshots[task] = {"step": step, "weights": {"w": w}, "squares": {"w": v}, "provenance": facts}
        fishers[task] = {kind: {"w": f} for kind in ("fisher", "fisher (exact)", "joint")}
    return snapshots, fishers


def merged(steps=(10, 10, 10), delta=0.0):
    found = ubgm.merged("zero", *made(steps), SIZES, 0.999, delta)
    return {method: dict(weights)["w"] for method, weights in found.items()}


def formula(importances, sizes, alpha=1.0):
    """The slow definition."""
    snapshots, _ = made()
    h = {task: sizes[task] * value for task, value in importances.items()}
    theta = {task: snapshot["weights"]["w"] for task, snapshot in snapshots.items()}
    bottom = alpha * (h["one"] + h["two"]) + h["zero"]
    moved = sum(alpha * (h[t] + h["zero"]) * (theta[t] - theta["zero"]) for t in ("one", "two"))
    return theta["zero"] + moved / bottom


def test_matching_is_the_formula_with_sizes_without_them_and_with_half_the_weight():
    snapshots, fishers = made()
    v = {task: snapshot["squares"]["w"] for task, snapshot in snapshots.items()}
    f = {task: found["fisher"]["w"] for task, found in fishers.items()}
    one = dict.fromkeys(SIZES, 1)
    found = merged()
    assert torch.allclose(found["squisher"], formula(v, SIZES), atol=1e-5)
    assert torch.allclose(found["fisher"], formula(f, SIZES), atol=1e-5)
    assert torch.allclose(found["squisher (without sizes)"], formula(v, one), atol=1e-5)
    assert torch.allclose(found["fisher (α = 0.5)"], formula(f, SIZES, 0.5), atol=1e-5)


def test_baselines():
    snapshots, _ = made()
    zero, one, two = (snapshot["weights"]["w"] for snapshot in snapshots.values())
    found = merged()
    assert torch.allclose(found["linear"], (zero + one + two) / 3)
    assert torch.allclose(found["linear (without the base)"], (one + two) / 2)
    assert torch.allclose(found["task arithmetic"], one + two - zero)
    assert torch.allclose(merged(delta=1e9)["fisher"], found["task arithmetic"], atol=1e-4)


def test_without_rescaling_differs_only_where_the_numbers_of_steps_do():
    found = merged()
    assert torch.allclose(found["squisher"], found["squisher (without bias correction)"], atol=1e-6)
    found = merged(steps=(10, 300, 40))
    assert not torch.allclose(found["squisher"], found["squisher (without bias correction)"], atol=1e-3)


def test_bases_come_first_and_merges_last():
    bases, fits, merges = ubgm.stages(ubgm.CONFIGS["paper"], range(1, 4))
    assert [u.key for u in bases] == ["1/imdb", "2/imdb", "3/imdb"]
    assert len(fits) == 3 * 4
    assert [u.key for u in merges] == ["1/merged", "2/merged", "3/merged"]


def test_the_true_average_weighs_tasks_by_their_test_examples():
    tasks = {"a": 50.0, "b": 90.0}
    result = {"accuracy": {"linear": tasks, "individual": {"a": 100.0, "b": 90.0}}, "rows": {"a": 300, "b": 100}}
    found = {(s.case, s.method, s.metric): s.value for s in ubgm.scores({"1/a": {}, "1/merged": result})}
    assert found["average", "linear", "accuracy"] == 70
    assert found["true average", "linear", "accuracy"] == 60
    assert found["average", "linear", "normalised accuracy"] == 75
    assert found["b", "linear", "accuracy"] == 90


def document(tmp_path, scale, data=None):
    path = execute("ubgm", scale, seeds=1, data=data, out=tmp_path, jobs=1, say=lambda line: None)
    return json.loads(path.read_text())


METHODS = {
    "linear", "linear (without the base)", "task arithmetic", "task arithmetic (α = 0.5)", "fisher", "fisher (exact)",
    "fisher (without sizes)", "fisher (α = 0.5)", "joint", "squisher", "squisher (without sizes)", "squisher (α = 0.5)",
    "squisher (without bias correction)", "individual",
}  # fmt: skip


def test_from_end_to_end(tmp_path, monkeypatch):
    whole = ubgm.CONFIGS["quick"]
    small = {**whole, "steps": {"0°": 4, "30°": 3, "60°": 2}, "train": 40, "widths": [8]}
    monkeypatch.setitem(ubgm.CONFIGS, "quick", small)
    found = document(tmp_path, "quick")
    assert {s["method"] for s in found["scores"]} == METHODS
    assert {s["case"] for s in found["scores"]} == {"average", "true average", "0°", "30°", "60°"}
    assert found["units"]["1/30°"]["result"]["times"].keys() >= {"fisher", "squisher", "training"}


def test_fine_tunes_start_from_the_base(tmp_path, monkeypatch):
    small = {**ubgm.CONFIGS["quick"], "steps": {"0°": 4, "30°": 3}, "train": 40, "widths": [8], "rate": 0.0}
    run = ubgm.Run("ubgm", "quick", small, None, tmp_path)
    base, task = ubgm._tuned(run, "0°", 1), ubgm._tuned(run, "30°", 1)
    assert all(torch.equal(base["weights"][name], task["weights"][name]) for name in base["weights"])
    assert task["step"] == 3


@pytest.mark.formats
def test_the_papers_recipe_from_end_to_end_on_a_small_random_roberta(tmp_path, monkeypatch):
    for seed, task in enumerate(ubgm.CONFIGS["paper"]["steps"]):
        write_task(tmp_path / "data" / "text", task, seed, train=32 + 16 * seed, test=12 + seed)
    model = write_model(tmp_path / "roberta", "roberta")
    small = {**ubgm.CONFIGS["paper"], "model": model, "length": 16, "fisher_examples": {"yelp": 20}, "warmup": 1}
    monkeypatch.setitem(ubgm.CONFIGS, "paper", small)
    found = document(tmp_path, "paper", tmp_path / "data")
    assert {s["method"] for s in found["scores"]} == METHODS
    # One epoch in batches of 16, and the merge is of everything, the shared head too.
    assert [found["units"][f"1/{task}"]["result"]["steps"] for task in small["steps"]] == [2, 3, 4, 5, 6]
    kept = ubgm._tuned(ubgm.Run("ubgm", "paper", found["config"], tmp_path / "data", tmp_path), "yelp", 1)
    assert {
        "classifier.dense.weight",
        "classifier.out_proj.weight",
        "roberta.embeddings.word_embeddings.weight",
    } <= kept["squares"].keys()
    assert kept["provenance"]["batch_size"] == 16
