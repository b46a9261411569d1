"""FISH masks: budgets, the head's place in them, scores and averages, and whole runs in miniature."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch

from experiments import fish, fish_digits, glue
from experiments.runs import execute
from tests.experiments.tiny_text import write_model, write_task

SMALL = {
    "stand_ins": {"average": {"places": 2, "widths": [128, 16, 16], "keep": 0.1}},
    "examples": 32,
    "steps": 5,
    "pretrain_steps": 5,
}


def test_a_mask_holds_the_head_inside_its_budget_and_the_highest_of_the_rest():
    importance = {"body.weight": torch.arange(95.0).flip(0), "classifier.weight": torch.zeros(5)}
    mask = fish.chosen(importance, 0.1)
    assert bool(mask["classifier.weight"].all())
    assert mask["body.weight"].nonzero().flatten().tolist() == [0, 1, 2, 3, 4]


def test_the_overlap_leaves_the_head_out():
    first = {"body.weight": torch.tensor([True, True, False, False]), "head.bias": torch.ones(3, dtype=torch.bool)}
    second = {"body.weight": torch.tensor([True, False, True, False]), "head.bias": torch.ones(3, dtype=torch.bool)}
    assert fish.overlap_of(first, second) == 0.5


def test_matthews_is_a_correlation():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randint(0, 2, (2, 200), generator=generator)
    assert glue.matthews(a, b) == pytest.approx(float(torch.corrcoef(torch.stack([a, b]).double())[0, 1]))
    assert glue.matthews(a, torch.ones(200)) == 0.0


def test_where_labels_are_numbers_the_score_is_a_correlation():
    class Rows:
        def batches(self, size):
            return [{"x": torch.tensor([[1.0], [2.0], [4.0]]), "labels": torch.tensor([[2.0], [3.0], [3.5]])}]

    model = torch.nn.Linear(1, 1)
    model.forward = lambda x: -x
    expected = -100 * float(torch.corrcoef(torch.tensor([[1.0, 2.0, 4.0], [2.0, 3.0, 3.5]]))[0, 1])
    assert glue.measured(model, Rows(), "stsb") == pytest.approx(expected, abs=1e-3)


def test_scores_average_over_tasks_and_leave_the_search_out():
    def entry(task, seed, case, score):
        return {"task": task, "seed": seed, "rows": [{"case": case, "method": "fisher", "score": score}]}

    results = {
        "a/seed-0/masks": {"task": "a", "seed": 0},
        "search/fisher/0.1": {"validation": 99.0},
        "a/seed-1/fisher": entry("a", 1, "a", 60.0),
        "b/seed-1/fisher": entry("b", 1, "b", 80.0),
        "a/seed-1/reset": entry("a", 1, "a, reset outside 2 %", 50.0),
        "b/seed-1/reset": entry("b", 1, "b, reset outside 2 %", 55.0),
        "a/seed-2/fisher": entry("a", 2, "a", 61.0),
    }
    found = {(s.case, s.seed): s.value for s in fish.scores(results)}
    assert found["average", 1] == 70.0
    assert found["average, reset outside 2 %", 1] == 52.5
    assert ("average", 2) not in found  # one of its tasks is missing
    assert all(seed > 0 for _, seed in found)


def test_the_search_is_on_a_seed_and_a_unit_of_its_own_with_as_many_rates_for_each_method():
    search = fish.stages(fish.CONFIGS["cpu"], range(1, 4))[1]
    rates = {
        method: [u.arguments["rate"] for u in search if u.arguments["method"] == method] for method in fish.METHODS
    }
    assert list(rates.values()) == [fish.CONFIGS["cpu"]["rates"]] * 3
    last = fish.stages(fish.CONFIGS["cpu"], range(1, 4))[-1]
    assert {unit.arguments["seed"] for unit in last} == {1, 2, 3}


def test_the_glue_scales_have_every_column_of_the_papers_table():
    columns = set(fish.PAPER) - {"average"}
    assert len(columns) == 9
    for scale in ("glue", "paper"):
        tasks = fish.CONFIGS[scale]["tasks"]
        assert {*tasks, *(f"{task} {second}" for task, second in glue.SECOND.items())} == columns
        assert set(tasks) == set(glue.GLUE)
    mean = {m: sum(fish.PAPER[c][m] for c in columns) / 9 for m in ("fisher", "random")}
    assert mean == pytest.approx({m: fish.PAPER["average"][m] for m in mean}, abs=0.1)


def test_digits_from_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setitem(fish.CONFIGS, "quick", {**fish.CONFIGS["quick"], **SMALL})
    path = execute("fish", "quick", seeds=1, data=None, out=tmp_path, jobs=1, say=lambda line: None)
    document = json.loads(path.read_text())
    assert [(s["case"], s["method"]) for s in document["scores"]] == [("average", method) for method in fish.METHODS]
    assert document["units"]["search/average"]["result"]["rates"].keys() == set(fish.METHODS)


def test_digits_to_choose_by_are_not_trained_or_tested_on():
    task = fish_digits.Adaptation(fish.CONFIGS["quick"] | SMALL, "average", 0)
    rows = [{tuple(row) for row in part.inputs.tolist()} for part in (task.train, task.validation, task.test)]
    assert not rows[0] & rows[1]
    assert not rows[0] & rows[2]
    assert not rows[1] & rows[2]
    empty = task.train.inputs.view(len(task.train), 2, 64)[:, 0]
    assert float(empty.abs().sum()) == 0.0  # everything in one place


@pytest.mark.formats
@pytest.mark.parametrize(
    ("scale", "second"), [("cpu", "rte"), ("paper", "rte"), ("paper", "stsb"), ("glue", "stsb"), ("glue", "mnli")]
)
def test_a_tiny_bert_from_end_to_end(tmp_path, monkeypatch, scale, second):
    folder = tmp_path / "data" / "text"
    for seed, task in enumerate(("cola", second)):
        pair = task == second
        write_task(folder, task, seed, train=80, test=24, pairs=pair, numbers=task == "stsb")
    if second == "mnli":  # its second test file is a column of its own
        write_task(tmp_path, "other", 7, test=16, pairs=True)
        shutil.copy(tmp_path / "other" / "eval.jsonl.gz", folder / "mnli" / "mismatched.jsonl.gz")
    whole = fish.CONFIGS[scale]
    words = {**whole["text"], "model": write_model(tmp_path / "bert", "bert"), "length": 16, "validation": 16}
    small = {**whole, "tasks": ["cola", second], "keep": 0.1, "reset_keeps": [0.1, 0.5], "examples": 32}
    if scale == "paper":
        small["epochs"] = 1
    else:
        words |= {"steps": 4, "keep": [2]}
        small["rates"] = small["rates"][::4]
    monkeypatch.setitem(fish.CONFIGS, scale, {**small, "text": words})
    path = execute("fish", scale, seeds=1, data=tmp_path / "data", out=tmp_path / "out", jobs=1, say=lambda line: None)
    document = json.loads(path.read_text())
    cases = {(s["case"], s["method"]) for s in document["scores"]}
    assert {("average", m) for m in (*fish.METHODS, "dense")} <= cases
    assert ("average, reset outside 50 %", "squisher") in cases
    assert all(math.isfinite(s["value"]) for s in document["scores"])
    scored = {(s["case"], s["method"]): s["value"] for s in document["scores"]}
    columns = ["cola", second, *(["mnli mismatched"] if second == "mnli" else [])]
    for ending, method in (("", "dense"), ("", "fisher"), (", reset outside 10 %", "random")):
        mean = sum(scored[f"{column}{ending}", method] for column in columns) / len(columns)
        assert scored[f"average{ending}", method] == pytest.approx(mean)
    kept = document["units"][f"{second}/seed-1/masks"]["result"]
    assert 0 < kept["overlap"]["0.1"]["squisher"] <= 1
    assert kept["times"]["squisher"] > 0
    if scale == "paper":  # no search where there is one rate; batch 8 on RTE
        assert not [key for key in document["units"] if key.startswith("search/")]
    else:
        assert {("average, one rate", m) for m in fish.METHODS} <= cases
        results = {key: unit["result"] for key, unit in document["units"].items()}
        own = {m: results[f"{second}/seed-1/{m}"] for m in fish.METHODS}
        same = {m: results[f"{second}/seed-1/{m}, one rate"] for m in fish.METHODS}
        assert {result["rate"] for result in same.values()} == {own["fisher"]["rate"]}
        assert same["fisher"]["rows"][0]["score"] == own["fisher"]["rows"][0]["score"]
    if scale == "glue":  # dense training at the rate that was best on a seed of its own
        rates = {r["rate"]: r["validation"] for k, r in results.items() if k.startswith("search/dense/")}
        assert set(rates) == set(whole["dense_rates"])
        assert rates[fish.chosen_rate(fish.Run("fish", scale, small, None, tmp_path / "out"), "dense")] == max(
            rates.values()
        )
    monkeypatch.setattr("experiments.text.load", None)  # all is there: nothing is made again
    execute("fish", scale, seeds=1, data=tmp_path / "data", out=tmp_path / "out", jobs=1, say=lambda line: None)


@pytest.mark.formats
def test_under_a_mask_nothing_else_moves(tmp_path, monkeypatch):
    write_task(tmp_path / "data" / "text", "sst2", 0, train=80)
    whole = fish.CONFIGS["cpu"]
    words = {**whole["text"], "model": write_model(tmp_path / "bert", "bert"), "length": 16, "validation": 16}
    config = {**whole, "tasks": ["sst2"], "keep": 0.1, "examples": 32, "text": {**words, "steps": 6, "keep": [2]}}
    run = fish.Run("fish", "cpu", config, tmp_path / "data", tmp_path / "out")
    before = fish.text.weights_of(fish.text.load(config["text"], 2, 3))
    after = fish.text.weights_of(fish._trained(run, "sst2", 3, "squisher", 1e-2))
    mask = fish.chosen(fish.importances(run, "sst2", 3)["squisher"], 0.1)
    moved = {name: before[name] != after[name] for name in before}
    assert all(bool((moved[name] <= mask[name]).all()) for name in before)
    assert sum(int(m.sum()) for m in moved.values()) > 0.5 * mask.kept
