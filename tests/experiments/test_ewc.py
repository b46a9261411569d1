"""Continual learning: contexts are disjoint, the search sees no test data, and the protocol is the paper's."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch

from experiments import continual, ewc, ewc_tables
from experiments.continual import METHODS, hold_out, learn_all, permuted, split
from experiments.data import Labelled
from experiments.networks import perceptron
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
    "scenario": "task",
    "exponents": {method: [0, 1] for method in METHODS if METHODS[method].rule == "search"},
}


def blobs(count, seed, inputs=6, classes=6):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    centres = 2 * torch.eye(classes, inputs)
    return Labelled(centres[labels] + 0.3 * torch.randn(count, inputs, generator=generator), labels)


def test_the_networks_have_the_papers_size():
    sizes = {
        scale: sum(p.numel() for p in perceptron(config["widths"]).parameters())
        for scale, config in ewc.CONFIGS.items()
        if scale != "quick"
    }
    assert sizes["split-task"] == sizes["split-class"] == 478_410
    assert sizes["split-domain"] == 475_202
    assert sizes["permuted-task"] == sizes["permuted-class"] == sizes["permuted-reduced"] == 2_126_100
    assert sizes["permuted-domain"] == 2_036_010
    assert sizes["cifar-task"] == sizes["cifar-class"] == 6_252_100


@pytest.mark.parametrize(
    ("benchmark", "protocol", "examples"),
    [
        ("split", [5, 2000, 128, 1e-3], 12_000),
        ("permuted", [10, 5000, 128, 1e-4], 60_000),
        ("cifar", [10, 2000, 256, 1e-4], 2_000),
    ],
)
def test_the_protocol_is_the_papers(benchmark, protocol, examples):
    for scenario in ("task", "domain", "class"):
        config = ewc.CONFIGS[f"{benchmark}-{scenario}"]
        assert [config[k] for k in ("contexts", "iterations", "batch", "lr")] == protocol
        assert config["scenario"] == scenario
        assert config["fisher_examples"] >= examples  # the whole context
        assert config["seeds"] >= (3 if benchmark == "cifar" and scenario != "task" else 5)
        assert ewc.case(config) in ewc.PAPER
    assert set(ewc.CONFIGS[f"{benchmark}-task"].get("ablations", ewc._ABLATIONS)) == set(ewc._ABLATIONS)


@pytest.mark.parametrize("scale", list(ewc.CONFIGS))
def test_every_method_has_the_same_budget_and_a_search_or_a_rule(scale):
    config = ewc.CONFIGS[scale]
    methods = [*config["methods"], *config.get("ablations", [])]
    searched = {method for method in methods if METHODS[method].rule == "search"}
    if "strengths" in config:  # λ is given, the same for all; the Fisher's where none is named
        assert {"fisher"} <= set(config["strengths"]) <= searched
        assert len(set(config["strengths"].values())) == 1
    else:
        assert searched == set(config["exponents"])
    assert len({len(exponents) for exponents in config["exponents"].values()}) <= 1
    assert {"fisher", "squisher", ewc.BASELINE} <= set(config["methods"])
    keys = [unit.key for stage in ewc.stages(config, range(1, config["seeds"] + 1)) for unit in stage]
    assert len(keys) == len(set(keys))


def test_the_whole_table_is_run_in_the_order_of_its_worth():
    order = [scale for scale, _ in ewc.GROUPS["cpu"]]
    assert set(order) == {f"{b}-{s}" for b in ("split", "permuted", "cifar") for s in ("task", "domain", "class")}
    assert order[:4] == ["split-task", "split-domain", "split-class", "permuted-task"]
    assert all((scale, None) in ewc.GROUPS["cpu"] for scale in order)  # in the end all of each


@pytest.mark.parametrize("deal", [split, permuted])
def test_scenarios_differ_in_heads_and_labels(deal):
    train, test = blobs(60, 0, inputs=784), blobs(30, 1, inputs=784)
    by_scenario = {scenario: deal(train, test, 3, 1, scenario) for scenario in ("task", "domain", "class")}
    each = 2 if deal is split else 6
    for number in range(3):
        task, domain, classes = (by_scenario[s][number] for s in ("task", "domain", "class"))
        assert torch.equal(task.seen(task.train).inputs, classes.seen(classes.train).inputs)
        assert (task.head, domain.head, classes.head) == (
            slice(number * each, (number + 1) * each), slice(0, each), slice(None),
        )  # fmt: skip
        assert torch.equal(task.train.labels, domain.train.labels)
        assert torch.equal(task.train.labels + number * each, classes.train.labels)
        assert int(domain.test.labels.max()) == each - 1


@pytest.mark.parametrize("scenario", ["domain", "class"])
def test_shared_outputs_are_learnt_and_forgotten(scenario):
    contexts = split(blobs(240, 0), blobs(60, 1), 3, 4, scenario)
    config = {**TINY, "widths": [6, 12, 2 if scenario == "domain" else 6], "iterations": 150}
    free, held = (learn_all(contexts, METHODS[m], s, config, seed=4) for m, s in (("none", 0.0), ("identity", 1e3)))
    assert free["learnt"][0] > 90
    assert free["contexts"][-1] > 90
    assert free["contexts"][0] < 90  # overwritten
    assert held["contexts"][0] > free["contexts"][0]
    assert held["spearman"] == []  # a constant has no ranks


def test_decoupled_the_penalty_is_in_no_gradient_and_no_strength_is_too_large():
    contexts = split(blobs(240, 0), blobs(60, 1), 3, 4, "domain")
    config = {**TINY, "widths": [6, 12, 2], "iterations": 150}
    results = {
        (name, strength): learn_all(contexts, METHODS[name], strength, config, seed=4)
        for name in ("squisher", "squisher (decoupled)")
        for strength in (0.0, 1e12)
    }
    free, held = (results["squisher (decoupled)", strength] for strength in (0.0, 1e12))
    assert held["contexts"][0] == held["learnt"][0]  # nothing moves that the first context needs
    assert free["contexts"][0] < held["contexts"][0]
    assert held["traces"][1] < 10 * free["traces"][1]  # what is recycled next is the data's
    assert results["squisher", 1e12]["traces"][1] > 10 * free["traces"][1]


def test_the_identity_holds_every_parameter_alike():
    contexts = split(blobs(120, 0), blobs(60, 1), 3, seed=4)
    result = learn_all(contexts, METHODS["identity"], 0.5, TINY, seed=4)
    count = sum(p.numel() for p in perceptron(TINY["widths"]).parameters())
    assert result["traces"] == [count, count]
    assert (result["given"], result["strength"]) == (0.5, 0.5)


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
    rows = list(itertools.islice(continual._epochs(10, 4, torch.Generator().manual_seed(0)), 4))
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
    run = Run("ewc", "tiny", {"exponents": {"fisher": [0, 1, 2, 3], "squisher": [0, 1, 2, 3]}}, None, tmp_path)
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
    assert (unscaled["strength"], used["squisher (N·v)"]["strength"]) == (10.0, 400.0)
    once = used["squisher (tracked, strength_like)"]
    assert once["strength"] * once["traces"][0] == pytest.approx(10.0 * once["reference_traces"][0], rel=1e-4)
    assert used["none"]["traces"] == []


def test_the_moving_average_is_of_single_examples_and_does_not_see_the_penalty():
    contexts = split(blobs(120, 0), blobs(60, 1), 3, seed=4)
    one = TINY | {"batch": 1}
    moving, tracked = (
        learn_all(contexts, METHODS[m], 10.0, one, seed=4) for m in ("fisher (moving average)", "squisher (tracked)")
    )
    assert moving["traces"] == pytest.approx(tracked["traces"], rel=1e-3)  # with one example a batch they are the same
    moving, tracked = (
        learn_all(contexts, METHODS[m], 10.0, TINY, seed=4) for m in ("fisher (moving average)", "squisher (tracked)")
    )
    assert moving["traces"][0] < 0.8 * tracked["traces"][0]  # squared sums also have the mean gradient in them


def test_a_fisher_of_few_examples_is_of_the_first_ones():
    contexts = split(blobs(120, 0), blobs(60, 1), 3, seed=4)
    few, all_ = (learn_all(contexts, replace(METHODS["fisher"], examples=n), 10.0, TINY, seed=4) for n in (8, None))
    again = learn_all(contexts, METHODS["fisher"], 10.0, TINY | {"fisher_examples": 8}, seed=4)
    assert few["traces"] == again["traces"] != all_["traces"]
    assert few["reference_traces"][0] == all_["reference_traces"][0]  # the reference keeps its size


def test_numbers_that_are_no_longer_finite_end_the_run_and_are_reported(monkeypatch):
    contexts = split(blobs(120, 0), blobs(60, 1), 3, seed=4)
    result = learn_all(contexts, METHODS["squisher"], 1e30, TINY, seed=4)
    assert result["diverged"] == 2
    assert len(result["contexts"]) == 3


def test_a_miniature_run_from_end_to_end(monkeypatch, tmp_path):
    config = {**TINY, "methods": ["none", "fisher", "squisher (tracked)"], "ablations": ["joint"], "ablation_seeds": 1}
    config["exponents"] = {"fisher": [1, 2], "squisher (tracked)": [1, 2], "joint": [5, 6]}
    monkeypatch.setitem(ewc.CONFIGS, "tiny", config)
    monkeypatch.setitem(ewc.PAPER, "split blobs, task", {"fisher": 12.5})
    monkeypatch.setattr(ewc, "_data", lambda run: (blobs(120, 0), blobs(60, 1)))
    path = execute("ewc", "tiny", seeds=None, data=None, out=tmp_path, jobs=1, say=lambda line: None)
    document = json.loads(path.read_text())
    assert "missing" not in document
    whole = [s for s in document["scores"] if s["case"] == "split blobs, task"]
    assert {(s["method"], s["seed"]) for s in whole} == {*itertools.product(config["methods"], (1, 2)), ("joint", 1)}
    assert len(document["scores"]) == len(whole) * (1 + config["contexts"])
    runs = ewc_tables.Runs(document)
    fisher = [document["units"][f"seed-{seed}/fisher"]["result"] for seed in (1, 2)]
    expected = sum(result["accuracy"] for result in fisher) / 2
    line = next(line for line in ewc_tables.comparison(runs).splitlines() if line.startswith("| fisher |"))
    assert f"{expected:.2f} ± " in line
    assert line.endswith("| 12.50 |")
    assert "(one seed)" in ewc_tables.comparison(runs)
    for part in (ewc_tables.curves, ewc_tables.contexts, ewc_tables.totals, ewc_tables.times):
        assert part(runs)


def test_a_wider_search_makes_results_at_another_strength_stale(monkeypatch, tmp_path):
    run = Run("ewc", "tiny", {"exponents": {"fisher": [0, 1]}}, None, tmp_path)
    results = {"search/fisher/1e0": {"accuracy": 1.0}, "search/fisher/1e1": {"accuracy": 2.0}}
    monkeypatch.setattr(Run, "result", lambda self, key: results[key])
    unit = ewc.stages({"exponents": {}, "methods": ["fisher"]}, [1])[1][0]
    assert not ewc.stale(run, unit, {"given": 10.0})
    assert ewc.stale(run, unit, {"given": 1.0})


def test_what_was_not_run_is_said(tmp_path):
    assert ewc_tables.beside(tmp_path).count("not run") == 9 * 4
    assert ewc_tables.ablations(tmp_path).count("not run") == 3 * 5
    assert ewc_tables.ours(tmp_path).count("not run") == 9 * 7


def test_fixed_strengths_need_no_search(tmp_path):
    run = Run("ewc", "permuted-check", {"strengths": {"fisher": 100.0, "squisher": 3.0}}, None, tmp_path)
    assert ewc.chosen(run, "squisher") == 3.0
    assert ewc.stages({"exponents": {}, "methods": ["none"]}, [1])[0] == []
