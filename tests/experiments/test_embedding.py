import itertools
import json

import numpy as np
import pytest
import torch

import squisher
from experiments import embedding, rankings
from experiments.data import Labelled
from experiments.runs import Run, execute

MINIATURE = {
    **embedding.CONFIGS["quick"],
    "seeds": 2, "tasks": ["upright/parity", "upright/high", "rotated/parity", "inverted/digits"], "widths": [64, 8, 8], "sizes": [20, 200],
    "target_examples": 20, "test_examples": 50, "body_steps": 5, "source_steps": 10, "target_steps": 5, "batch": 8,
    "fisher_examples": 20,
}  # fmt: skip


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    out = tmp_path_factory.mktemp("embedding")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(embedding.CONFIGS, "quick", MINIATURE)
        path = execute("embedding", "quick", seeds=None, data=None, out=out, jobs=1, say=lambda line: None)
    return json.loads(path.read_text())


def run_of(tmp_path, **changes):
    return Run("embedding", "quick", {**MINIATURE, **changes}, None, tmp_path)


def test_source_target_and_test_images_are_disjoint(tmp_path):
    source, target, test = embedding.pools(run_of(tmp_path), 1)
    rows = [{tuple(row) for row in part.inputs.tolist()} for part in (source, target, test)]
    assert len(source) == 1000
    assert not rows[0] & rows[1]
    assert not rows[0] & rows[2]
    assert not rows[1] & rows[2]


def test_views_and_labels_of_tasks():
    image = torch.zeros(1, 9)
    image[0, 2] = 1.0  # upper right
    assert embedding.shown(image, "rotated")[0].argmax() == 0  # a quarter turn to the left: upper left
    assert torch.equal(embedding.shown(image, "inverted"), -image)
    images = Labelled(torch.arange(10).float()[:, None].repeat(1, 9), torch.arange(10))
    high = embedding.task_examples("upright/5-9", images)
    assert high.inputs[:, 0].tolist() == [5, 6, 7, 8, 9]
    assert high.labels.tolist() == [0, 1, 2, 3, 4]
    assert embedding.task_examples("upright/parity", images, 3).labels.tolist() == [0, 1, 0]


def test_every_seed_deals_the_same_sizes_to_other_tasks():
    config = {"tasks": embedding.TASKS, "sizes": [250, 16000]}
    dealt = [[embedding.size_of(config, task, seed) for task in embedding.TASKS] for seed in (1, 2)]
    assert sorted(dealt[0]) == sorted(dealt[1])
    assert dealt[0] != dealt[1]
    assert min(dealt[0]) == 250
    assert max(dealt[0]) == 16000


def test_nearest_and_families():
    tasks = ["upright/a", "upright/b", "rotated/a", "rotated/b"]
    matrix = np.array([[0, 1, 2, 3], [1, 0, 3, 2], [2, 3, 0, 1], [3, 2, 1, 0]], dtype=float)
    assert rankings.nearest(tasks, matrix)["rotated/a"] == ["rotated/b", "upright/a", "upright/b"]
    assert embedding.family_share(tasks, matrix) == 1.0
    assert embedding.family_share(tasks, -matrix) == 0.0


def test_rank_correlation():
    assert rankings.rank_correlation(np.array([1.0, 2.0, 3.0]), np.array([1.0, 4.0, 9.0])) == pytest.approx(1)
    assert rankings.rank_correlation(np.array([1.0, 2.0, 3.0]), np.array([9.0, 4.0, 1.0])) == pytest.approx(-1)


def test_intervals_are_of_targets():
    values = np.array([[1.0, 0.5, 0.2], [3.0, 0.5, 0.4]])
    draws = np.array([[0, 0], [1, 1], [0, 1]])
    found = embedding._interval(values, draws)
    assert found["rho"][0] == 2.0
    assert found["rho"][1] < 2.0 < found["rho"][2]
    assert found["MRR"] == [0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    "gains", [[1.0, 2.0, 3.0, 4.0, 5.0], [5.0, 5.0, 1.0, 2.0], [3.0, 3.0, 3.0], [0.1, 9.0, 4.0, 9.0]]
)
def test_chance_is_the_mean_over_all_orders(gains):
    known = {"target": {str(k): gain for k, gain in enumerate(gains)}}
    found = [squisher.embed.evaluate({"target": order}, known) for order in itertools.permutations(known["target"])]
    expected = {name: np.mean([one[key] for one in found]) for name, key in rankings.METRICS.items()}
    expected["NDCG"] *= 100
    assert rankings.by_chance(known) == pytest.approx(expected)


def test_the_run_scores_every_method_at_every_granularity(document):
    found = {(s["case"], s["method"], s["seed"]) for s in document["scores"]}
    variants = [f"{m} ({how})" for m in ("fisher", "squisher") for how in ("equal traces", "cosine")]
    methods = [*embedding.ESTIMATORS, *variants, "data size", "random order"]
    assert found == {
        (f"{by}: {metric}", method, seed)
        for by in embedding.GRANULARITIES for metric in rankings.METRICS for method in methods for seed in (1, 2)
    }  # fmt: skip
    assert set(embedding.MAIN_CASES) <= {case for case, _, _ in found}
    assert all(1 <= s["value"] <= 3 for s in document["scores"] if s["metric"] == "rho")


def test_the_baseline_ranks_by_size(document):
    units = document["units"]
    for seed in (1, 2):
        sizes = {t: units[f"seed-{seed}/source/{t}"]["result"]["size"] for t in MINIATURE["tasks"]}
        for target, order in units[f"seed-{seed}/ranking"]["result"]["orders"]["data size"].items():
            assert target not in order
            assert [sizes[t] for t in order] == sorted((sizes[t] for t in order), reverse=True)


def test_transfers_leave_out_the_target_itself(document):
    for key, unit in document["units"].items():
        if "/target/" in key:
            task = key.split("/target/")[1]
            assert set(unit["result"]["gains"]) == set(MINIATURE["tasks"]) - {task}


def test_squisher_and_fisher_times_are_recorded(document):
    times = document["units"]["seed-1/source/upright/parity"]["result"]["times"]
    assert times["fisher"] > 0
    assert times["squisher"] > 0
