"""Each number of a report is the API's own."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import save_file

import squisher
from squisher.analysis.agreement import compare
from squisher.analysis.distribution import LOG10_EDGES
from squisher.analysis.health import examine
from squisher.embed import distances, embedding
from squisher.errors import SquisherError
from squisher.order import spearman
from squisher.report import Subject, collect
from squisher.report.data import FRACTIONS, SHARES, SPARSITIES, joint_counts

from . import examples


@pytest.fixture(scope="module")
def weights():
    generator = torch.Generator().manual_seed(9)
    return {name: torch.randn(t.shape, generator=generator) for name, t in examples.tensors().items()}


@pytest.fixture(scope="module")
def pair():
    return examples.squisher(), examples.squisher(seed=1, classes=4)


@pytest.fixture(scope="module")
def data(pair, weights):
    return collect([Subject("a", pair[0], weights), Subject("b", pair[1])])


def test_it_is_plain_json(data):
    assert json.loads(json.dumps(data, allow_nan=False)) == data


def test_health_and_parameters_are_those_of_examine(data, pair):
    health = examine(pair[0]).to_dict()
    item = data["importances"][0]
    assert item["totals"] == {key: health[key] for key in item["totals"]}
    assert item["diagnoses"] == health["diagnoses"]
    assert item["tensors"] == len(pair[0])
    rows = item["parameters"]
    assert rows["name"] == list(pair[0])
    assert rows["numel"] == [row["numel"] for row in health["rows"]]
    for key in ("mean", "median", "p90", "max"):
        assert rows[key] == [row[key] for row in health["rows"]]
    assert rows["share"] == [row["total"] / health["total"] for row in health["rows"]]
    assert rows["zeros"] == [row["zeros"] / row["numel"] for row in health["rows"]]
    assert rows["shape"][:2] == ["20×6", "6×6"]


def test_atlas_and_depth_are_means_over_the_tensors(data, pair):
    item, tensors = data["importances"][0], examples.tensors()
    atlas = item["atlas"]
    assert atlas["layers"] == ["embeddings.word", "encoder.layer.0", "encoder.layer.1", "encoder.layer.2", "classifier"]
    assert atlas["labels"] == ["embeddings.word", "layer.0", "layer.1", "layer.2", "classifier"]
    for kind, row in zip(atlas["kinds"], atlas["mean"], strict=True):
        for layer, mean in zip(atlas["layers"], row, strict=True):
            tensor = tensors.get(f"{layer}.{kind}")
            assert mean == (None if tensor is None else pytest.approx(float(tensor.double().mean()), rel=1e-12))
    total = sum(float(t.double().sum()) for t in tensors.values())
    numel = sum(t.numel() for t in tensors.values())
    for k, layer in enumerate(item["depth"]["layer"]):
        own = torch.cat([t.double().reshape(-1) for name, t in tensors.items() if name.startswith(f"{layer}.")])
        assert item["depth"]["numel"][k] == own.numel()
        assert item["depth"]["entries"][k] == own.numel() / numel
        assert item["depth"]["mean"][k] == pytest.approx(float(own.mean()), rel=1e-12)
        assert item["depth"]["share"][k] == pytest.approx(float(own.sum()) / total, rel=1e-12)
    assert sum(item["depth"]["share"]) == pytest.approx(1)


def test_budgets_are_those_of_a_mask(data, pair):
    budget = data["importances"][0]["budget"]
    flat = torch.cat([t.double().reshape(-1) for t in pair[0].values()]).sort(descending=True).values
    assert budget["kept"]["fraction"] == list(FRACTIONS)
    for fraction, k, share in zip(*budget["kept"].values(), strict=True):
        assert k == math.floor(fraction * len(flat))
        if k:
            mask = squisher.mask.top_k(pair[0], keep=fraction)
            assert mask.kept == k
            kept = sum(float(pair[0][name].double()[mask[name]].sum()) for name in mask)
            assert share == pytest.approx(kept / float(flat.sum()), rel=1e-9)
    for share, k, fraction, sparsity in zip(
        SHARES, *(budget["needed"][key] for key in ("k", "fraction", "sparsity")), strict=True
    ):
        assert float(flat[:k].sum()) >= share * float(flat.sum()) > float(flat[: k - 1].sum())
        assert (fraction, sparsity) == (k / len(flat), 1 - k / len(flat))


def test_pruning_costs_what_the_scores_of_the_removed_entries_sum_to(data, pair, weights):
    model = data["importances"][0]["model"]
    assert (model["covered_tensors"], model["tensors"]) == (len(weights), len(weights))
    assert model["unit"] == "example"
    scores = squisher.prune.scores(weights, pair[0].as_fisher())
    flat = torch.cat([t.double().reshape(-1) for t in scores.values()]).sort().values
    for sparsity, removed, share, loss in zip(*model["pruning"].values(), strict=True):
        assert removed == math.floor(sparsity * len(flat))
        assert loss == pytest.approx(float(flat[:removed].sum()), rel=1e-9)
        assert share == pytest.approx(float(flat[:removed].sum() / flat.sum()), rel=1e-9)
    assert model["pruning"]["sparsity"] == list(SPARSITIES)


def test_agreement_is_that_of_compare_without_the_heads(data, pair):
    shared = [imp.restrict("^(?!classifier)") for imp in pair]
    expected = compare(*shared).to_dict()
    found = data["agreements"][0]
    assert found["left_out"] == ["classifier.weight"]
    for key in ("numel", "parameters", "exact", "spearman", "scale", "median_ratio", "total_a", "total_b"):
        assert found[key] == expected[key]
    for key in ("fraction", "k", "overlap", "chance"):
        assert found["overlaps"][key] == [overlap[key] for overlap in expected["overlaps"]]
    for key in ("name", "numel", "spearman", "scale", "median_ratio", "overlap"):
        assert found["rows"][key] == [row[key] for row in expected["rows"]]
    for layer, value in zip(found["layers"]["layer"], found["layers"]["spearman"], strict=True):
        x, y = (torch.cat([t.reshape(-1) for n, t in imp.items() if n.startswith(f"{layer}.")]) for imp in shared)
        assert value == pytest.approx(spearman(x, y), abs=5e-3)  # of values rounded to 16 bits
    by_name = {row["name"]: row["spearman"] for row in expected["rows"]}
    atlas = found["atlas"]
    for kind, row in zip(atlas["kinds"], atlas["spearman"], strict=True):
        assert row == [by_name.get(f"{layer}.{kind}") for layer in atlas["layers"]]


def test_density_counts_every_pair_of_positive_values(data, pair):
    shared = [imp.restrict("^(?!classifier)") for imp in pair]
    counts = joint_counts(compare(*shared), *shared)
    density = data["agreements"][0]["density"]
    assert density["shown"] == int(counts.sum())
    assert sum(count for _, _, count in density["cells"]) == int(counts.sum())
    for column, row, count in density["cells"]:
        places = [
            [
                k
                for k, edge in enumerate(LOG10_EDGES[:-1])
                if 0 <= edge + 0.05 - (density["first_edge"] + at * density["step"]) < density["step"]
            ]
            for at in (column, row)
        ]
        assert count == int(counts[places[0]][:, places[1]].sum())


def test_distances_are_those_of_embed(data, pair):
    names, matrix = distances({n: embedding(i.restrict("^(?!classifier)")) for n, i in zip("ab", pair, strict=True)})
    assert data["tasks"] == {
        "tasks": names, "similarity": (1 - matrix).tolist(), "distance": matrix.tolist(), "left_out": ["classifier.weight"],
    }  # fmt: skip


def test_the_overview_repeats_the_totals(data):
    for k, item in enumerate(data["importances"]):
        row = {key: values[k] for key, values in data["overview"].items()}
        assert row["name"] == item["name"]
        assert [row[key] for key in ("numel", "mean", "median", "max")] == [
            item["totals"][key] for key in ("numel", "mean", "median", "max")
        ]
        assert row["for_90_percent"] == item["budget"]["needed"]["fraction"][SHARES.index(0.9)]
        assert row["findings"] == "none"


def test_the_summary_says_what_the_data_say(data):
    assert data["summary"].startswith(
        "2 importances; the first has 546 entries in 20 parameters. Their ranks agree at "
    )
    one = collect([Subject("x", examples.squisher())])
    item = one["importances"][0]
    top = max(range(len(item["depth"]["share"])), key=item["depth"]["share"].__getitem__)
    assert one["summary"].startswith(f"{item['depth']['label'][top]} holds ")
    assert item["answer"][-1].startswith("90% of the importance lies in ")
    assert one["summary"].endswith("Nothing speaks against using it.")
    assert one["agreements"] == []
    assert one["tasks"] is None
    foreign = collect([Subject("x", examples.squisher(), {"other": torch.ones(2)})])
    assert foreign["summary"].endswith("x: no weight of the model that was given has this importance, see below.")


def test_what_it_is_in_words():
    words = " ".join(collect([Subject("x", examples.squisher())])["importances"][0]["in_words"])
    for part in (
        "that AdamW kept",
        "after 300 steps",
        "about 1,000 steps long (β₂ = 0.999)",
        "corrected for its start",
        "32 examples per step",
        "averaged over examples",
    ):
        assert part in words
    fisher = squisher.Importance({"w": torch.ones(2)}, examples=500, estimator={"labels": "sampled", "per": "batch"})
    words = " ".join(collect([Subject("x", fisher)])["importances"][0]["in_words"])
    for part in ("labels drawn from the model", "500 examples", "once per batch"):
        assert part in words
    unknown = " ".join(
        collect([Subject("x", examples.squisher(batch_size=None, loss_reduction=None, bias_corrected=False))])[
            "importances"
        ][0]["in_words"]
    )
    assert "batch size is not known" in unknown
    assert "not corrected" in unknown


def test_a_broken_file_has_a_report(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"bad": torch.tensor([float("nan")]), "fine": torch.ones(2)}, path, {"squisher": '{"kind": "fisher"}'})
    data = collect([Subject("broken", squisher.load(path)), Subject("fine", examples.squisher())])
    item = data["importances"][0]
    assert item["diagnoses"][0]["code"] == "invalid"
    assert "NaN" in item["budget"]["error"]
    assert "no name is in both" in data["agreements"][0]["error"]
    assert "No parameter is in all" in data["tasks"]["error"]
    assert "1 problem found" in data["summary"]


def test_scales_that_differ_and_models_that_do_not_fit_are_sentences(weights):
    a, b = examples.squisher(), examples.squisher(batch_size=None)
    data = collect([Subject("a", a, {"other": torch.ones(2)}), Subject("b", b, weights)])
    assert "cannot" in data["tasks"]["error"]
    assert "does not belong to this model" in data["importances"][0]["model"]["error"]
    unscaled = data["importances"][1]["model"]
    assert unscaled["unit"] is None
    assert set(unscaled["pruning"]["loss"]) == {None}
    assert unscaled["pruning"]["share"][-1] > 0


def test_zeros_everywhere_and_empty_tensors():
    data = collect([Subject("x", squisher.Importance({"z": torch.zeros(4), "e": torch.zeros(0)}))])
    item = data["importances"][0]
    assert "All entries are 0" in data["summary"]
    assert "All values are 0" in item["budget"]["error"]
    assert item["depth"]["share"] == [None, None]


def test_of_many_each_is_compared_with_the_first():
    many = [Subject(str(k), examples.squisher(layers=1, seed=k)) for k in range(5)]
    assert [(p["a"], p["b"]) for p in collect(many)["agreements"]] == [("0", str(k)) for k in range(1, 5)]
    assert len(collect(many[:4])["agreements"]) == 6


def test_progress_tells_what_is_done():
    calls = []
    collect(
        [Subject("a", examples.squisher(layers=1)), Subject("b", examples.squisher(layers=1, seed=1))],
        lambda *call: calls.append(call),
    )
    assert {what for what, _, _ in calls} == {"reading a", "reading b", "comparing a and b"}
    assert all(0 < done <= total for _, done, total in calls)


def test_errors():
    with pytest.raises(SquisherError, match="at least one importance"):
        collect([])
    with pytest.raises(SquisherError, match="name of its own"):
        collect([Subject("a", examples.squisher()), Subject("a", examples.squisher())])
