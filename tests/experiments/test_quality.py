import json
import math

import pytest
import torch
from torch import nn

import squisher
from experiments import quality
from experiments.data import Labelled
from experiments.runs import execute

RECIPE = {**quality.RECIPE, "batch": 8, "steps": 12}
MINIATURE = {
    **quality.CONFIGS["quick"],
    "seeds": 1, "recipe": RECIPE, "frozen_steps": 10, "along": [4, 12],
    "networks": {"mlp": {"widths": [64, 8, 6, 10], "fisher_examples": 40}},
    "variants": {"mlp": {k: quality.VARIANTS[k] for k in ("base", "cosine", "dropout 0.5", "clip 0.1", "L2 1e-2")}},
}  # fmt: skip


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    out = tmp_path_factory.mktemp("quality")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(quality.CONFIGS, "quick", MINIATURE)
        path = execute("quality", "quick", seeds=None, data=None, out=out, jobs=1, say=lambda line: None)
    return json.loads(path.read_text())


def unit(document, variant):
    return document["units"][f"seed-1/mlp/{variant}"]["result"]


@pytest.fixture
def data():
    torch.manual_seed(0)
    return Labelled(torch.randn(64, 5), torch.randint(3, (64,)))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def test_zero_rate_leaves_the_weights_alone_and_follows_the_theory(data):
    model = network()
    before = [p.clone() for p in model.parameters()]
    training = quality.Training(model, data, {**RECIPE, "steps": 1, "beta2": 0.999}, 0, 0.0)
    training.advance(3000)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    empirical = squisher.fisher(model, data.batches(64), labels="data")
    mean = quality.fit(model, data, 8, empirical)
    # Shuffled epochs: the variance carries (N − B)/(N − 1); the mean gradient here is known exactly, without noise.
    joint = squisher.fisher(model, [tuple(data)], labels="data", per="batch")
    total = sum(v.sum().item() for v in empirical.values())
    squared = sum(v.sum().item() for v in joint.values()) / 64
    expected = ((64 - 8) / 63 * (total - squared) + 8 * squared) / total
    scale = squisher.compare(training.squisher(), empirical).scale
    assert scale == pytest.approx(expected, rel=0.05)
    assert mean["predicted_scale"] > 1


def test_clipping_happens_and_the_tracker_does_not_see_it(data):
    model = network()
    training = quality.Training(model, data, {**RECIPE, "clip": 1e-3}, 0, 1e-6)
    training.advance(50)
    clipped = training.squisher()
    total = sum(v.sum().item() for v in clipped.values())
    assert total == pytest.approx(8 * 1e-6, rel=0.01)  # B·clip², whatever the model
    tracked = squisher.extract(training.tracker, model, batch_size=8).as_fisher()
    assert sum(v.sum().item() for v in tracked.values()) > 100 * total


def test_cosine_ends_near_zero(data):
    training = quality.Training(network(), data, {**RECIPE, "schedule": "cosine", "steps": 20}, 0, 1.0)
    training.advance(1)
    assert training.optimizer.param_groups[0]["lr"] == 1.0
    training.advance(19)
    assert training.optimizer.param_groups[0]["lr"] < 0.01


def test_epochs_are_shuffled_without_repeats(data):
    training = quality.Training(network(), Labelled(data.inputs[:20], data.labels[:20]), RECIPE, 0, 1e-3)
    training.advance(1)
    assert len(training.order) == 1  # 20 // 8 batches an epoch, one of them taken
    rows = torch.cat(training.order)
    assert len(set(rows.tolist())) == len(rows)


def test_the_mean_gradient_of_fitted_noise_is_small_and_of_one_example_is_all():
    model = network()
    one = Labelled(torch.ones(10, 5), torch.zeros(10, dtype=torch.long))  # equal examples: F = μ²
    empirical = squisher.fisher(model, [tuple(one)], labels="data")
    found = quality.fit(model, one, 8, empirical)
    assert found["mean_gradient"] == pytest.approx(1, rel=1e-3)
    assert found["predicted_scale"] == pytest.approx(8, rel=1e-3)


def test_conv_net_takes_vectors_of_784():
    model = quality.build({"channels": [2, 3], "hidden": 4}, 0.1)
    assert model(torch.zeros(2, 784)).shape == (2, 10)


def test_every_variant_changes_the_recipe_by_known_keys():
    assert all(set(change) <= set(quality.RECIPE) for change in quality.VARIANTS.values())
    assert quality.VARIANTS["base"] == {}


def test_run_reports_the_chain(document):
    base = unit(document, "base")
    assert set(base["links"]) == {f"{a} → {b}" for a, b in quality.LINKS}
    assert base["links"]["frozen → clean"]["spearman"] == 1.0  # nothing differs without dropout, clipping and L2
    assert "tracker" not in base["against_exact"]
    dropped = unit(document, "dropout 0.5")
    assert dropped["links"]["frozen → clean"]["spearman"] < 1.0
    for variant in ("clip 0.1", "L2 1e-2"):
        assert "tracker" in unit(document, variant)["against_exact"]


def test_run_looks_along_training(document):
    assert [s["step"] for s in unit(document, "cosine")["snapshots"]] == [4, 12]
    assert [s["step"] for s in unit(document, "base")["snapshots"]] == [12]
    assert all(math.isfinite(s["mean_gradient"]) for s in unit(document, "base")["snapshots"])


def test_scores_are_correlations_with_the_exact_fisher(document):
    found = {s["method"]: s["value"] for s in document["scores"] if s["case"] == "mlp: base"}
    exact = unit(document, "base")["against_exact"]
    assert found["squisher"] == exact["live"]["spearman"]
    assert found["initial"] == exact["initial"]["spearman"]
    assert {"squisher (tracker)", "fisher (empirical)", "fisher (other examples)"} <= {
        s["method"] for s in document["scores"]
    }
