import json

import pytest
import torch

from experiments import runtime
from experiments.runs import execute

PLAN = {
    "network": {"kind": "mlp", "widths": [6, 5, 4], "active": 2},
    "labels": "exact", "examples": 1000, "times": 3, "batch": 4, "steps": 10, "measured": {"loop": 2, "engine": 8},
}  # fmt: skip
SECONDS = {
    "loop": [9.0, 2.0, 1.0], "engine": [4.0, 4.0, 4.0], "first batch": [3.0, 3.0, 3.0], "joint": [0.8, 0.8, 0.8],
    "live": [0.1, 0.1, 0.1], "file": [0.2, 0.2, 0.2], "step": [0.5, 0.5, 0.5],
}  # fmt: skip


def test_what_was_measured_on_few_examples_is_scaled_to_all_examples_and_tasks():
    found = runtime.summary(PLAN, SECONDS, 123)
    assert found["setting_seconds"]["loop"] == pytest.approx(2.0 / 2 * 1000 * 3)  # the median, not the mean
    engine = 3.0 + (4.0 - 3.0) / (8 - 4) * (1000 - 4)  # the first batch of 4 once, with its proof; the rest linearly
    assert found["setting_seconds"]["engine"] == pytest.approx(engine * 3)
    assert found["setting_seconds"]["live"] == pytest.approx(0.1 * 3)  # reading a state costs the same for any data
    assert found["engine_speedup"] == pytest.approx(1000 / engine)
    assert found["training_seconds"] == pytest.approx(0.5 * 10 * 3)
    assert found["engine_of_training"] == pytest.approx(engine * 3 / 15)


@pytest.mark.parametrize(
    ("case", "parameters"),
    [
        ("EWC, split MNIST", 478_410),
        ("EWC, permuted MNIST", 2_126_100),
        ("EWC, split CIFAR-100", 6_252_100),
        ("Fisher pruning", 603_060),
    ],
)
def test_networks_have_the_parameters_of_their_settings(case, parameters):
    model = runtime.build(runtime.CASES[case]["network"])
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_only_the_active_classes_count():
    model = runtime.build({"kind": "mlp", "widths": [6, 5, 4], "active": 2})
    assert model(torch.zeros(3, 6)).shape == (3, 2)


def test_batches_add_up_to_the_examples():
    batches = runtime.examples(PLAN, 10, torch.Generator().manual_seed(0))
    assert [len(labels) for _, labels in batches] == [4, 4, 2]
    assert all(int(labels.max()) < 2 for _, labels in batches)


def test_more_than_one_batch_is_timed_so_that_the_first_can_be_told_apart():
    cases = [case for config in runtime.CONFIGS.values() for case in config["cases"].values()]
    assert all(case["measured"]["engine"] > case["batch"] for case in cases)


def test_paper_names_a_case_for_each_of_ours():
    assert set(runtime.CASES) == set(runtime.PAPER)
    assert set(runtime.MAIN_CASES) <= set(runtime.CASES)


def test_a_small_run_times_every_way(tmp_path, monkeypatch):
    vgg = {**PLAN, "labels": "data", "network": {"kind": "vgg", "plan": [2, 0, 3, 0], "classes": 3}}
    monkeypatch.setitem(
        runtime.CONFIGS, "quick", {"seeds": 1, "rounds": 1, "cases": {"an mlp": PLAN, "a vgg": vgg}}
    )  # fmt: skip
    path = execute("runtime", "quick", seeds=None, data=None, out=tmp_path, jobs=1, say=lambda line: None)
    assert path.exists()
    document = json.loads(path.read_text())
    assert {(s["case"], s["method"]) for s in document["scores"]} == {
        (case, method)
        for case in ("an mlp", "a vgg")
        for method in ("fisher (loop)", "fisher", "joint", "squisher", "squisher (file)")
    }
    assert all(s["value"] > 0 for s in document["scores"])
    assert not list(tmp_path.glob("**/*.pt"))  # the checkpoint is gone


@pytest.mark.formats
def test_the_encoder_has_the_size_of_minilm_and_its_batches_fit(tmp_path):
    network = {**runtime.MINILM}
    model = runtime.build(network)
    assert 22_000_000 < sum(p.numel() for p in model.parameters()) < 23_500_000
    small = runtime.build({**network, "hidden": 8, "layers": 1, "heads": 2, "intermediate": 8, "vocabulary": 30})
    plan = {**PLAN, "network": {**network, "vocabulary": 30}, "length": 5}
    batch = runtime.examples(plan, 4, torch.Generator().manual_seed(0))[0]
    assert runtime.loss_of(small, batch).item() > 0
