"""Continual learning: contexts are disjoint, the search sees no test data, and the protocol is the paper's."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from experiments import continual, ewc, ewc_page, ewc_permuted
from experiments.continual import METHODS, Network, hold_out, learn_all, permuted, split
from experiments.data import Labelled
from experiments.runs import Run, execute

TINY = {
    "seeds": 2,
    "case": "split blobs",
    "contexts": 3,
    "widths": [6, 12, 6],
    "iterations": 40,
    "batch": 8,
    "lr": 1e-2,
    "fisher_examples": 1000,
    "held_out": 0.1,
    "methods": list(METHODS),
    "exponents": {method: [0, 2] for method in METHODS if METHODS[method].rule == "search"},
}


def blobs(count, seed, inputs=6, classes=6):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    centres = 2 * torch.eye(classes, inputs)
    return Labelled(centres[labels] + 0.3 * torch.randn(count, inputs, generator=generator), labels)


def test_the_networks_have_the_papers_size():
    sizes = {
        "split": sum(p.numel() for p in Network(ewc.CONFIGS["cpu"]["widths"]).parameters()),
        "permuted": sum(p.numel() for p in Network(ewc_permuted.CONFIGS["cpu"]["widths"]).parameters()),
    }
    assert sizes == {"split": 478_410, "permuted": 2_126_100}


def test_the_protocol_is_the_papers():
    config = ewc.CONFIGS["cpu"]
    assert [config[k] for k in ("contexts", "iterations", "batch", "lr")] == [5, 2000, 128, 1e-3]
    assert config["seeds"] >= 5
    assert config["fisher_examples"] > 60_000  # the whole context


@pytest.mark.parametrize(("module", "scale"), [(ewc, "quick"), (ewc, "cpu"), (ewc_permuted, "cpu")])
def test_every_method_has_the_same_budget_and_a_search_or_a_rule(module, scale):
    config = module.CONFIGS[scale]
    searched = {method for method in config["methods"] if METHODS[method].rule == "search"}
    if "strengths" in config:  # λ is given, the same for all
        assert searched == set(config["strengths"])
        assert len(set(config["strengths"].values())) == 1
    else:
        assert searched <= set(config["exponents"])  # a curve alone is fine
    assert len({high - low for low, high in config["exponents"].values()}) == 1
    assert {"fisher", "squisher", module.BASELINE} <= set(config["methods"])


def test_split_deals_every_class_once_and_by_the_seed():
    train, test = blobs(60, 0), blobs(30, 1)
    contexts = split(train, test, 3, seed=1)
    assert sum(len(c.train) for c in contexts) == 60
    assert [c.head for c in contexts] == [slice(0, 2), slice(2, 4), slice(4, 6)]
    classes = []
    for context in contexts:
        assert set(context.train.labels.tolist()) == set(context.test.labels.tolist()) == {0, 1}
        rows = [int((train.inputs == x).all(1).nonzero()) for x in context.train.inputs]
        assert len(rows) == len(set(rows))
        originals = train.labels[rows]
        for local in (0, 1):
            assert len(set(originals[context.train.labels == local].tolist())) == 1
        classes.append(frozenset(originals.tolist()))
    assert frozenset().union(*classes) == set(range(6))
    orders = {tuple(split(train, test, 3, seed)[0].train.inputs.flatten().tolist()) for seed in range(6)}
    assert len(orders) > 1


def test_permuted_pads_and_permutes_all_contexts_differently():
    images = torch.arange(1, 785).float().view(1, 784)
    one = Labelled(torch.cat([images, images]), torch.tensor([0, 3]))
    contexts = permuted(one, one, 3, seed=2)
    shown = [c.seen(c.train).inputs[0] for c in contexts]
    for x in shown:
        assert x.shape == (1024,)
        assert sorted(x.tolist()) == sorted([0.0] * 240 + images[0].tolist())
        assert not torch.equal(x, contexts[0].train.inputs[0])
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(shown, 2))
    assert [c.head for c in contexts] == [slice(0, 4), slice(4, 8), slice(8, 12)]


def test_held_out_examples_are_not_trained_on():
    whole = blobs(100, 3)
    kept, held = hold_out(whole, 0.1, seed=0)
    assert (len(kept), len(held)) == (90, 10)
    rows = {tuple(x.tolist()) for x in kept.inputs} | {tuple(x.tolist()) for x in held.inputs}
    assert len(rows) == 100


def test_batches_are_epochs_without_the_small_last_one():
    rows = list(itertools.islice(continual._shuffled(10, 4, torch.Generator().manual_seed(0)), 4))
    assert [len(r) for r in rows] == [4, 4, 4, 4]
    assert len(set(torch.cat(rows[:2]).tolist())) == 8


def test_the_search_never_reads_the_test_set(monkeypatch, tmp_path):
    class Untouchable:
        def __getattr__(self, name):
            raise AssertionError("the search looked at the test set")

    monkeypatch.setattr(ewc, "_data", lambda run: (blobs(120, 0), Untouchable()))
    run = Run("ewc", "tiny", TINY, None, tmp_path)
    assert 0 <= ewc.search(run, "fisher", 1)["accuracy"] <= 100


def test_the_chosen_strength_is_the_best_and_the_smaller_of_equals(monkeypatch, tmp_path):
    run = Run("ewc", "tiny", {"exponents": {"fisher": [0, 4], "squisher": [0, 4]}}, None, tmp_path)
    found = {"fisher": [90.0, 95.0, 95.0, 80.0], "squisher": [1.0, 2.0, 3.0, 4.0]}
    results = {f"search/{m}/1e{e}": {"accuracy": a} for m, values in found.items() for e, a in enumerate(values)}
    monkeypatch.setattr(Run, "result", lambda self, key: results[key])
    assert ewc.chosen(run, "fisher") == 10.0
    assert ewc.chosen(run, "squisher") == 1000.0
    assert ewc.chosen(run, "squisher (without rescaling)") == 10.0
    assert ewc.chosen(run, "none") == 0.0


def test_a_run_is_determined_by_its_seed_and_the_context_selects_the_head():
    contexts = split(blobs(120, 0), blobs(60, 1), 3, seed=4)
    first, second = (learn_all(contexts, METHODS["fisher"], 10.0, TINY, seed=4) for _ in range(2))
    for result in (first, second):
        assert result["times"].keys() == {"fisher", "squisher"}
        del result["times"], result["fisher_seconds"]
    assert first == second
    assert first["accuracy"] == pytest.approx(sum(first["contexts"]) / 3)
    assert len(first["traces"]) == 2
    assert first["spearman"] == pytest.approx([1.0, 1.0])  # all examples of a context are in the reference


def test_rules_convert_the_fishers_strength():
    contexts = split(blobs(120, 0), blobs(60, 1), 3, seed=4)
    used = {m: learn_all(contexts, METHODS[m], 10.0, TINY, seed=4) for m in METHODS}
    raw, unscaled = used["squisher"], used["squisher (without rescaling)"]
    assert raw["traces"][0] == pytest.approx(TINY["batch"] * unscaled["traces"][0], rel=1e-4)
    assert (unscaled["strength"], used["squisher (N·λ)"]["strength"]) == (10.0, 400.0)
    once, each = (used[f"squisher (tracked, strength_like {how})"] for how in ("once", "each"))
    assert once["strength"] * once["traces"][0] == pytest.approx(10.0 * once["reference_traces"][0], rel=1e-4)
    assert each["traces"] == pytest.approx(each["reference_traces"], rel=1e-4)
    assert used["none"]["traces"] == []


def test_numbers_that_are_no_longer_finite_end_the_run_and_are_reported(monkeypatch):
    contexts = split(blobs(120, 0), blobs(60, 1), 3, seed=4)
    result = learn_all(contexts, METHODS["squisher"], 1e30, TINY, seed=4)
    assert result["diverged"] == 2
    assert len(result["contexts"]) == 3


def test_a_miniature_run_from_end_to_end(monkeypatch, tmp_path):
    config = {**TINY, "methods": ["none", "fisher", "squisher (tracked)"]}
    config["exponents"] = {"fisher": [1, 3], "squisher (tracked)": [1, 3]}
    monkeypatch.setitem(ewc.CONFIGS, "tiny", config)
    monkeypatch.setattr(ewc, "_data", lambda run: (blobs(120, 0), blobs(60, 1)))
    path = execute("ewc", "tiny", seeds=None, data=None, out=tmp_path, jobs=1, say=lambda line: None)
    document = json.loads(path.read_text())
    whole = [s for s in document["scores"] if s["case"] == "split blobs"]
    assert {(s["method"], s["seed"]) for s in whole} == set(itertools.product(config["methods"], (1, 2)))
    assert len(document["scores"]) == len(whole) * (1 + config["contexts"])
    assert all(0 <= s["value"] <= 100 for s in document["scores"])
    page = tmp_path / "page.md"
    page.write_text(ewc_page.PAGE.read_text())
    ewc_page.write(document, page)
    lines = page.read_text().splitlines()
    assert (tmp_path / ewc_page.PICTURE).stat().st_size > 1000
    fisher = [json.loads(path.read_text())["units"][f"seed-{seed}/fisher"]["result"] for seed in (1, 2)]
    expected = sum(result["accuracy"] for result in fisher) / 2
    assert any(line.startswith("| fisher |") and f"{expected:.2f} ± " in line for line in lines)
    once = page.read_text()
    ewc_page.write(document, page)
    assert page.read_text() == once


@pytest.mark.parametrize("setting", ["ewc", "ewc_permuted"])
def test_the_page_is_what_the_committed_results_make(setting, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(ewc_page.PAGE.read_text())
    ewc_page.write(json.loads((ewc_page.RESULTS / f"{setting}-cpu.json").read_text()), page)
    assert page.read_text() == ewc_page.PAGE.read_text()


def test_fixed_strengths_need_no_search(tmp_path):
    run = Run("ewc_permuted", "paper", {"strengths": {"fisher": 100.0, "squisher": 3.0}}, None, tmp_path)
    assert ewc_permuted.evaluate is ewc.evaluate
    assert ewc.chosen(run, "squisher") == 3.0
    assert ewc.stages({"exponents": {}, "methods": ["none"]}, [1])[0] == []
