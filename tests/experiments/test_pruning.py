"""Pruning: the network is the paper's, validation images are their own, scores come from the right rows, runs go from end to end."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

from experiments import data, pruning, pruning_weights
from experiments.comparison import RESULTS
from experiments.data import Labelled
from experiments.runs import Run, execute

TINY = {
    "divide_width": 16, "images": 96, "validation": 20, "batch": 32, "rates": [1e-3, 2e-3], "search_epochs": 1,
    "epochs": 2, "short_epochs": 1, "retrain_epochs": 1, "ratios": [0.25, 0.75], "fisher_examples": 32,
}  # fmt: skip


def write_cifar(folder):
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for name, count in (("train", 128), ("test", 40)):
        rows = generator.integers(0, 256, (count, 3074), dtype=np.uint8)
        rows[:, 1] = np.arange(count) % 10
        rows.tofile(folder / f"{name}.bin")


@pytest.mark.parametrize(("divide", "parameters"), [(1, 9_462_180), (4, 603_060), (8, 154_700)])
def test_the_network_has_as_many_parameters_as_the_papers(divide, parameters):
    with torch.device("meta"):
        model = pruning.vgg(divide, 100)
    assert sum(p.numel() for p in model.parameters()) == parameters
    filters = sum(layer.out_channels for layer in model if isinstance(layer, nn.Conv2d))
    assert filters == 2944 // divide
    kinds = [type(layer) for layer in model[:3]]
    assert kinds == [nn.Conv2d, nn.ReLU, nn.BatchNorm2d]


def test_images_to_choose_by_are_not_trained_or_tested_on(tmp_path):
    write_cifar(tmp_path / "cifar-100-binary")
    run = Run("pruning", "cpu", {"filters": TINY}, tmp_path, tmp_path)
    train, validation, test = pruning.parts(run)
    assert (len(train), len(validation), len(test)) == (96, 20, 40)
    rows = [{image.numpy().tobytes() for image in part.inputs} for part in (train, validation, test)]
    assert not rows[0] & rows[1]
    assert not (rows[0] | rows[1]) & rows[2]


def test_augmentation_shifts_and_mirrors_and_nothing_else():
    images = torch.rand(64, 3, 32, 32) + 1
    moved = data.augmented(images, torch.Generator().manual_seed(0))
    padded = nn.functional.pad(images, (4, 4, 4, 4))
    seen = set()
    for image, source in zip(moved, padded, strict=True):
        windows = source.unfold(1, 32, 1).unfold(2, 32, 1)
        found = [
            (flip, y, x)
            for flip in (False, True)
            for y in range(9)
            for x in range(9)
            if torch.equal(image, windows[:, y, x].flip(2) if flip else windows[:, y, x])
        ]
        assert len(found) == 1
        seen.add(found[0])
    assert {flip for flip, _, _ in seen} == {False, True}
    assert len({y for _, y, _ in seen}) > 5
    assert len({x for _, _, x in seen}) > 5


def test_the_mean_gradient_is_that_of_all_images_in_evaluation_mode():
    torch.manual_seed(0)
    model = pruning.vgg(16, 10)
    rows = Labelled(torch.randn(10, 3, 32, 32), torch.arange(10))
    found = pruning.mean_gradient(model, rows, 4)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    model.eval()
    nn.functional.cross_entropy(model(rows.inputs), rows.labels).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_the_rate_is_chosen_by_validation_accuracy(tmp_path, monkeypatch):
    run = Run("pruning", "cpu", {"filters": TINY}, None, tmp_path)
    found = {"search/0.001": {"rate": 1e-3, "validation": 9.0}, "search/0.002": {"rate": 2e-3, "validation": 12.0}}
    monkeypatch.setattr(Run, "result", lambda self, key: found[key])
    assert pruning.chosen_rate(run) == 2e-3


def test_filters_that_are_gone_are_found_by_their_biases():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    smaller = nn.Sequential(nn.Conv2d(3, 2, 1), nn.ReLU(), nn.Conv2d(2, 2, 1))
    smaller[0].bias = nn.Parameter(model[0].bias[[1, 3]])
    smaller[2].bias = model[2].bias
    assert pruning.gone(model, smaller) == {(0, 0), (0, 2)}


def test_scores_tell_the_two_lengths_of_training_apart():
    results = {
        "search/0.001": {"rate": 1e-3, "validation": 50.0},
        "seed-1/base": {
            "seed": 1,
            "unpruned": {"10": 30.0, "15": 40.0},
            "rows": [
                {"method": "fisher", "ratio": 0.75, "epochs": 10, "before": 1.0},
                {"method": "fisher", "ratio": 0.75, "epochs": 15, "before": 2.0},
            ],
        },
        "seed-1/fisher/0.75/15": {"seed": 1, "method": "fisher", "ratio": 0.75, "epochs": 15, "after": 4.0},
        "seed-1/fisher/0.75/10": {"seed": 1, "method": "fisher", "ratio": 0.75, "epochs": 10, "after": 3.0},
    }
    assert {(s.case, s.method): s.value for s in pruning.scores(results)} == {
        ("75% pruned", "fisher"): 4.0,
        ("75% pruned", "unpruned"): 40.0,
        ("75% pruned, base 10 epochs", "fisher"): 3.0,
        ("75% pruned, base 10 epochs", "unpruned"): 30.0,
        ("75% pruned, before retraining", "fisher"): 2.0,
    }


def test_digits_from_end_to_end(tmp_path, monkeypatch):
    whole = pruning.CONFIGS["quick"]
    small = {**whole["perceptron"], "train": 200, "epochs": 2, "retrain_epochs": 1}
    monkeypatch.setitem(pruning.CONFIGS, "quick", {**whole, "perceptron": small})
    path = execute("pruning", "quick", seeds=1, data=None, out=tmp_path, jobs=1, say=lambda line: None)
    document = json.loads(path.read_text())
    cases = {(s["case"], s["method"]) for s in document["scores"]}
    assert {(case, m) for case in pruning.MAIN_CASES for m in pruning_weights.METHODS} <= cases
    for row in document["units"]["seed-1"]["result"]["rows"]:
        assert row["zeros"] == int(row["sparsity"] * row["weights"])
        assert row["zeros_after"] >= row["zeros"]  # retraining leaves pruned weights where they are


@pytest.mark.formats
def test_filters_from_end_to_end(tmp_path, monkeypatch):
    write_cifar(tmp_path / "data" / "cifar-100-binary")
    whole = pruning.CONFIGS["cpu"]
    monkeypatch.setitem(pruning.CONFIGS, "cpu", {**whole, "filters": {**whole["filters"], **TINY}})
    arguments = {"seeds": 1, "data": tmp_path / "data", "out": tmp_path / "out", "jobs": 1, "say": lambda line: None}
    document = json.loads(execute("pruning", "cpu", **arguments).read_text())
    cases = {(s["case"], s["method"]) for s in document["scores"]}
    filters = pruning.CONFIGS["cpu"]["filters"]
    assert {(f"{r}% pruned", m) for r in (25, 75) for m in (*filters["methods"], "unpruned")} <= cases
    assert {("75% pruned", m) for m in filters["at_the_highest"]} <= cases
    assert ("75% pruned, base 1 epochs", "squisher") in cases
    base = document["units"]["seed-1/base"]["result"]
    filters = 2944 // 16
    for row in base["rows"]:
        assert sum(row["widths"]) == filters - int(row["ratio"] * filters)
    assert set(base["times"]) >= {"fisher", "squisher"}
    # The last step's state goes with the last step's weights.
    run = Run(
        "pruning",
        "cpu",
        {k: v for k, v in pruning.CONFIGS["cpu"].items() if k != "seeds"},
        tmp_path / "data",
        tmp_path / "out",
    )
    train = pruning.parts(run)[0]
    short, long = (pruning._trained(run, 1, epochs, train) for epochs in (1, 2))
    assert not torch.equal(short["model"]["0.weight"], long["model"]["0.weight"])
    assert not torch.equal(short["importances"]["squisher"]["0.weight"], long["importances"]["squisher"]["0.weight"])


def test_where_all_images_are_trained_on_the_search_leaves_some_out(tmp_path, monkeypatch):
    write_cifar(tmp_path / "cifar-100-binary")
    run = Run(
        "pruning",
        "quarter",
        {"filters": {**pruning.CONFIGS["quarter"]["filters"], **TINY, "images": 128}},
        tmp_path,
        tmp_path,
    )
    train, validation, _ = pruning.parts(run)
    assert (len(train), len(validation)) == (128, 20)
    seen = []
    monkeypatch.setattr(pruning, "_epochs", lambda run, model, train, *rest, **more: seen.append(train) or [])
    pruning.search(run, 1e-3)
    rows = [{image.numpy().tobytes() for image in part.inputs} for part in (seen[0], validation)]
    assert len(rows[0]) == 108
    assert not rows[0] & rows[1]


def test_of_cifar_10_the_right_rows_go_with_the_case_and_chance_is_a_tenth(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    rows = np.random.default_rng(0).integers(0, 256, (60, 3073), dtype=np.uint8)
    rows[:, 0] = np.arange(60) % 10
    rows[:48].tofile(folder / "data_batch_1.bin")
    rows[48:].tofile(folder / "test_batch.bin")
    config = {"filters": {**pruning.CONFIGS["cifar10"]["filters"], "images": 48, "validation": 8}}
    train, _, test = pruning.parts(Run("pruning", "cifar10", config, tmp_path, tmp_path))
    assert (len(train), len(test), int(train.labels.max())) == (48, 12, 9)
    assert pruning.chance(config) == {"": 10.0}
    assert pruning.chance({"filters": pruning.CONFIGS["cpu"]["filters"]}) == {"": 1.0}
    results = {
        f"seed-1/squisher/0.75/{epochs}": {
            "seed": 1, "method": "squisher", "ratio": 0.75, "epochs": epochs, "after": 50.0, "right": right,
        }
        for epochs, right in ((15, "10"), (10, "01"))
    }  # fmt: skip
    assert pruning.right(results) == {
        ("75% pruned", "squisher", 1): ["10"],
        ("75% pruned, base 10 epochs", "squisher", 1): ["01"],
    }


def test_at_a_quarter_of_the_width_every_aggregation_is_retrained_at_every_level():
    config = pruning.CONFIGS["quarter"]
    f = config["filters"]
    assert (f["divide_width"], f["images"], f["epochs"], f["short_epochs"]) == (4, 20_000, 15, 10)
    assert f["retrain_epochs"] >= 20
    assert config["seeds"] >= 5
    keys = {unit.key for unit in pruning.stages(config, range(1, 6))[2]}
    assert {
        f"seed-{s}/{m}/{r}/15" for s in range(1, 6) for m in ("fisher", "squisher", "random") for r in (0.25, 0.5, 0.75)
    } <= keys
    assert {f"seed-{s}/{m}/0.75/10" for s in range(1, 6) for m in ("fisher", "squisher")} <= keys


def test_the_committed_table_is_of_the_committed_configuration():
    document = json.loads((RESULTS / "pruning_weights-cpu.json").read_text())
    assert document["config"]["perceptron"] == json.loads(json.dumps(pruning_weights.PERCEPTRON))


def test_the_tables_differences_are_paired(tmp_path):
    def entry(seed, fisher, random):
        rows = [
            {"method": m, "scope": "global", "sparsity": 0.5, "before": v, "after": v}
            for m, v in (("fisher", fisher), ("squisher", fisher + 1), ("magnitude", fisher), ("random", random))
        ]
        return {"result": {"seed": seed, "unpruned": 99.0, "rows": rows}}

    config = {**pruning_weights.PERCEPTRON, "scopes": ["global"], "sparsities": [0.5]}
    units = {"seed-0": entry(0, 90.0, 40.0), "seed-1": entry(1, 80.0, 34.0)}
    (tmp_path / "pruning_weights-cpu.json").write_text(json.dumps({"units": units, "config": {"perceptron": config}}))
    table = pruning_weights.parts(tmp_path, tmp_path).blocks["weights"]
    assert "| global | 50% | after | 85.00 | 86.00 | 37.00 | 85.00 |" in table
    assert "| +1.00 [+1.00, +1.00] |" in table
    assert f"| +48.00 [{48 - 12.7062 * 2:+.2f}, {48 + 12.7062 * 2:+.2f}] |" in table
