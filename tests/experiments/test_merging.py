"""Fisher merging: who is merged with what, what the scores say, and one run from end to end."""

from __future__ import annotations

import copy
import json

import pytest
import torch

import squisher
from experiments import merging
from experiments.runs import execute
from tests.experiments.tiny_text import write_model, write_questions, write_task


def snapshot(seed, step=10, **more):
    generator = torch.Generator().manual_seed(seed)
    weights = {"body.w": torch.randn(3, 4, generator=generator), "head.w": torch.randn(seed, 4, generator=generator)}
    squares = {name: torch.rand(w.shape, generator=generator) for name, w in weights.items()}
    facts = {"kind": "squisher", "batch_size": 16, "loss_reduction": "mean", "unit": "example"}
    tracked = {"tracked": squares, "tracked_provenance": facts}
    return {"step": step, "weights": weights, "squares": squares, "provenance": facts, **tracked, **more}


def merged(snapshots, fishers=None):
    fishers = fishers or [{"fisher": {"body.w": torch.rand(3, 4)}} for _ in snapshots]
    return {name: dict(w) for name, w in merging.merged(snapshots, fishers, beta2=0.999).items()}


def test_bodies_are_merged_by_the_formula_and_heads_are_not():
    a, b = snapshot(1), snapshot(2)
    found = merged([a, b])
    assert all(list(weights) == ["body.w"] for weights in found.values())
    (v, w), (x, y) = ((s["squares"]["body.w"], s["weights"]["body.w"]) for s in (a, b))
    assert torch.allclose(found["squisher"]["body.w"], (v * w + x * y) / (v + x))
    assert torch.allclose(found["linear"]["body.w"], (w + y) / 2)


def test_without_rescaling_differs_only_where_the_numbers_of_steps_do():
    found = merged([snapshot(1, 50), snapshot(2, 50)])
    assert torch.allclose(found["squisher"]["body.w"], found["squisher (without bias correction)"]["body.w"], atol=1e-6)
    a, b = snapshot(1, 50), snapshot(2, 200)
    found = merged([a, b])["squisher (without bias correction)"]["body.w"]
    c, d = (s["squares"]["body.w"] * (1 - 0.999 ** s["step"]) for s in (a, b))
    assert torch.allclose(found, (c * a["weights"]["body.w"] + d * b["weights"]["body.w"]) / (c + d), atol=1e-6)


def test_norms_make_a_model_that_shouts_count_no_more():
    a, b = snapshot(1), snapshot(2)
    quiet = merged([a, b])
    shouted = merged([a, b | {"squares": {name: 50 * v for name, v in b["squares"].items()}}])
    assert torch.allclose(quiet["squisher (l2)"]["body.w"], shouted["squisher (l2)"]["body.w"], atol=1e-6)
    assert not torch.allclose(quiet["squisher"]["body.w"], shouted["squisher"]["body.w"], atol=1e-2)


def test_variants_are_of_the_last_checkpoints_only():
    early = [{k: v for k, v in snapshot(n).items() if not k.startswith("tracked")} for n in (1, 2)]
    assert merged(early).keys() == {"linear", "squisher", "fisher"}


def test_rows_are_so_many_that_the_steps_are_the_epochs():
    config = merging.CONFIGS["eight-upper"]["benchmarks"]["text"]
    rows = {task: merging._recipe(config, task)["train"] for task in config["tasks"]}
    assert all(rows[task] * config["epochs"] == config["tasks"][task] * config["batch"] for task in rows)


def test_every_model_comes_before_every_merge_and_text_has_its_own_number_of_seeds():
    config = copy.deepcopy(merging.CONFIGS["cpu"])
    config["benchmarks"]["text"]["seeds"] = 3
    fits, merges = merging.stages(config, range(1, 6))
    assert len({u.key for u in fits + merges}) == len(fits) + len(merges)
    assert sum(u.arguments["benchmark"] == "text" for u in fits) == 3 * 4
    assert sum(u.arguments["benchmark"] == "MNIST rotations" for u in fits) == 5 * 5
    assert {u.arguments["checkpoint"] for u in merges} == {"final", "best", "short"}


def test_tasks_of_the_text_benchmark_are_not_the_encoders_own():
    assert not set(merging.CONFIGS["cpu"]["benchmarks"]["text"]["tasks"]) & {"snli", "mnli", "qqp", "qnli"}


def test_the_papers_eight_tasks_have_a_fisher_of_a_thousand_and_the_same_number_of_epochs():
    for scale in ("eight", "eight-generative"):
        config = merging.CONFIGS[scale]["benchmarks"]["text"]
        assert set(config["tasks"]) == set(merging.PAPER) - {"average", "average, best checkpoint"}
        assert config["fisher_examples"] >= 1000
        assert config["test"] is None
        assert merging.CONFIGS[scale]["seeds"] >= 3
    found = merging.chance({"benchmarks": {"text": config}})
    assert found["average"] == pytest.approx((25 + 50 + 12.5 + 25 + 50 + 50 + 100 / 3 + 50) / 8)


def test_scores_average_tasks_and_normalise_by_each_tasks_own_model():
    result = {"accuracy": {"linear": {"a": 40.0, "b": 45.0}}, "individual": {"a": 80.0, "b": 50.0}}
    results = {
        "x/1/a": {},
        "x/1/merged-final": result,
        "x/1/merged-best": result,
        "y/1/merged-final": result,
    }
    found = {(s.case, s.method, s.metric): s.value for s in merging.scores(results)}
    assert found["average", "linear", "accuracy"] == 42.5
    assert found["average", "linear", "normalised accuracy"] == pytest.approx(70)
    assert found["average", "individual", "normalised accuracy"] == pytest.approx(100)
    assert found["average, best checkpoint", "linear", "accuracy"] == 42.5
    assert found["y: average", "linear", "accuracy"] == 42.5
    assert found["b", "linear", "accuracy"] == 45
    assert ("b", "linear", "normalised accuracy") not in found


def test_from_end_to_end(tmp_path, monkeypatch):
    whole = merging.CONFIGS["quick"]["benchmarks"]["rotated digits"]
    small = {
        **whole, "tasks": {"30°": 9, "60°": 12}, "every": 3, "fisher_examples": 20, "seeds": 2, "widths": [8],
        "pretraining": {**whole["pretraining"], "steps": 5},
    }  # fmt: skip
    monkeypatch.setitem(merging.CONFIGS, "quick", {"seeds": 2, "benchmarks": {"rotated digits": small}})
    path = execute("merging", "quick", seeds=None, data=None, out=tmp_path, jobs=1, say=lambda line: None)
    document = json.loads(path.read_text())
    methods = {s["method"] for s in document["scores"] if s["case"] == "average"}
    assert methods == {
        "linear", "fisher", "fisher (exact)", "fisher (l2)", "fisher (trace)", "squisher (trace)", "fisher (floor 1e-8)", "squisher (floor 1e-8)", "joint", "individual", "squisher",
        "squisher (without bias correction)", "squisher (l2)", "squisher (β₂ = 0.95)",
    }  # fmt: skip
    assert {s["case"] for s in document["scores"]} >= {"average", "average, best checkpoint", "average, short training"}
    times = document["units"]["rotated digits/1/30°"]["result"]["times"]
    assert times.keys() >= {"fisher", "squisher", "training"}
    assert document["units"]["rotated digits/1/60°"]["result"]["steps"]["short"] == 4


def test_every_checkpoint_has_its_fishers_and_the_last_one_the_joint_too(tmp_path, monkeypatch):
    asked = []
    real = squisher.fisher
    monkeypatch.setattr(squisher, "fisher", lambda *a, **k: asked.append(k) or real(*a, **k))
    whole = merging.CONFIGS["quick"]["benchmarks"]["rotated digits"]
    small = {**whole, "tasks": {"30°": 3}, "fisher_examples": 5, "widths": [4]}
    run = merging.Run("merging", "quick", {"benchmarks": {"x": small}}, None, tmp_path)
    merging.fit(run, "x", "30°", 1)
    # Two checkpoints: the best one is the last, and is not measured again.
    assert sorted(k["labels"] for k in asked) == ["data"] * 3 + ["exact"] * 2
    assert [k.get("per") for k in asked].count("batch") == 1
    assert all(k["parameters"] == r"^body\." for k in asked)


@pytest.mark.formats
def test_the_text_benchmark_from_end_to_end_on_a_small_random_bert(tmp_path, monkeypatch):
    write_task(tmp_path / "data" / "text", "single", 1)
    write_task(tmp_path / "data" / "text", "pair", 2, pairs=True, classes=3)
    write_questions(tmp_path / "data" / "text", "asked")
    whole = merging.CONFIGS["cpu"]["benchmarks"]["text"]
    small = {
        **whole, "model": write_model(tmp_path / "bert", "bert"), "tasks": {"single": 9, "pair": 6, "asked": 3}, "every": 3,
        "length": 16, "fisher_examples": 20, "validation": 10, "seeds": 1,
    }  # fmt: skip
    monkeypatch.setitem(merging.CONFIGS, "cpu", {"seeds": 1, "benchmarks": {"text": small}})
    path = execute("merging", "cpu", seeds=None, data=tmp_path / "data", out=tmp_path, jobs=1, say=lambda line: None)
    document = json.loads(path.read_text())
    result = document["units"]["text/1/merged-final"]["result"]
    assert result["accuracy"]["squisher"].keys() == {"single", "pair", "asked"}  # heads of different sizes
    assert len(result["accuracy"]) == 13
    rows = merging.right({"text/1/merged-final": result})["average", "squisher", 1]
    assert [100 * task.count("1") / len(task) for task in rows] == list(result["accuracy"]["squisher"].values())
    assert document["units"]["text/1/pair"]["result"]["steps"]["short"] == 2
