"""The upper layers of an encoder on what the lower ones say: as the whole encoder, and trained alone."""

from __future__ import annotations

import json

import pytest
import torch

from experiments import embedding_text, text, upper
from experiments.runs import Run, execute
from tests.experiments.tiny_text import write_model, write_questions, write_task

CONFIG = {
    "pooling": "mean", "frozen": None, "layers": 1, "length": 16, "validation": 20, "test": 10, "train": None,
    "steps": 60, "batch": 8, "rate": 3e-3, "schedule": "constant", "warmup": 0, "beta2": 0.999, "eps": 1e-8,
    "decay": 0.0, "clip": None, "every": 20, "keep": [5], "track": False,
}  # fmt: skip

pytestmark = pytest.mark.formats


@pytest.fixture
def folder(tmp_path):
    write_task(tmp_path / "data" / "text", "single", 1)
    write_task(tmp_path / "data" / "text", "number", 2, pairs=True, numbers=True)
    write_task(tmp_path / "data" / "text", "pair", 3, pairs=True)
    write_questions(tmp_path / "data" / "text", "asked")
    return tmp_path


@pytest.mark.parametrize("task", ["single", "asked"])
def test_the_upper_layers_give_what_the_whole_encoder_gives(folder, task):
    run = Run("merging", "cpu", {}, folder / "data", folder / "out")
    config = {**CONFIG, "model": write_model(folder / "bert", "bert"), "validation": 4}
    whole = text.load(config, 3, 1)
    part = upper.load(config, 3, 1)
    part.head.load_state_dict(whole.head.state_dict())
    if task == "asked":
        whole.head, part.head = (torch.nn.Linear(16, 1) for _ in range(2))
        part.head.load_state_dict(whole.head.state_dict())
    batches = [module.splits(run, task, config).test.batch(slice(0, 6)) for module in (text, upper)]
    assert torch.equal(batches[0].pop("labels"), batches[1].pop("labels"))
    # Half precision in between.
    assert torch.allclose(whole(**batches[0]), part(**batches[1]), atol=5e-3)


def test_only_the_upper_layers_are_trained_and_they_learn(folder):
    run = Run("merging", "cpu", {}, folder / "data", folder / "out")
    config = {**CONFIG, "model": write_model(folder / "bert", "bert")}
    kept = upper.fine_tune(run, "single", 1, config)["snapshots"]["final"]
    assert {name.partition(".")[0] for name in kept["weights"]} == {"body", "head"}
    assert all(name.startswith(("body.0.", "head.")) for name in kept["weights"])
    data = upper.splits(run, "single", config)
    model = upper.load(config, data.classes, 1)
    model.load_state_dict(kept["weights"])
    assert text.accuracy(model, data.test) >= 90


def test_task_embedding_stops_by_its_rule_and_scores_within_and_over_classes(folder, monkeypatch):
    config = {
        **CONFIG, "model": write_model(folder / "bert", "bert"), "seeds": 1, "share": 1, "validation": 8, "steps": 40, "every": 5,
        "patience": 1, "groups": {"classification": ["single", "number"], "questions": ["asked", "pair"]}, "target_rows": 16,
        "target_steps": 3, "fisher_examples": 16, "clip": 1.0, "rate": 3e-2,
    }  # fmt: skip
    monkeypatch.setitem(embedding_text.CONFIGS, "quick", config)
    path = execute(
        "embedding_text", "quick", seeds=1, data=folder / "data", out=folder / "out", jobs=1, say=lambda line: None
    )
    document = json.loads(path.read_text())
    for task in ("single", "number", "asked", "pair"):
        found = document["units"][f"seed-1/source/{task}"]["result"]
        history = found["history"]
        assert found["steps"] == 5 * len(history)
        assert found["steps"] == 40 or history[-1] > min(history)
        assert all(history[k] < min(history[:k]) for k in range(1, len(history) - 1))
    cases = {(s["case"], s["method"]) for s in document["scores"]}
    assert ("row, classification all-class: NDCG", "squisher (cosine)") in cases
    assert ("tensor, classification in-class: rho", "random order") in cases
    one = {s["method"]: s["value"] for s in document["scores"] if s["case"] == "row, classification in-class: rho"}
    assert set(one.values()) == {1.0}  # one source only
