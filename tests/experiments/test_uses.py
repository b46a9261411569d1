"""The settings of the uses that are not the paper's: quantisation, unlearning, OTA; small and from end to end."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from experiments import ota, quantization, unlearning
from experiments.data import Labelled
from experiments.runs import execute


def run(setting, tmp_path):
    path = execute(setting, "quick", seeds=1, data=None, out=tmp_path, jobs=1, say=lambda _: None)
    return json.loads(path.read_text())


def test_unlearning_forgets_the_class_and_keeps_the_rest(tmp_path):
    (unit,) = run("unlearning", tmp_path)["units"].values()
    found = unit["result"]["measures"]
    assert set(found) == set(unlearning.METHODS)
    assert found["retrained"]["forget"] == 0  # it never saw the class
    for method in ("fisher", "squisher"):
        assert found[method]["forget"] < found["original"]["forget"] / 2
        assert found[method]["retain"] > 60
        assert 0 < unit["result"]["dampened"][method] < 1


def test_the_membership_attack_tells_what_is_certain_from_what_is_not():
    sure, unsure = (Labelled(torch.eye(4).repeat(25, 1) * s, torch.arange(4).repeat(25)) for s in (20.0, 0.1))
    model = nn.Identity()
    assert unlearning._taken_for_members(model, sure, sure, unsure) == 1
    assert unlearning._taken_for_members(model, sure, unsure, unsure) == 0


def test_quantisation_measures_every_method_within_its_budget(tmp_path):
    (unit,) = run("quantization", tmp_path)["units"].values()
    rows = unit["result"]["rows"]
    assert {row["method"] for row in rows} == set(quantization.METHODS)
    assert all(row["bits_per_weight"] <= row["budget"] + 1e-9 for row in rows)
    assert all(row["value"] > 1 for row in rows)


def test_ota_takes_the_fraction_that_is_best_on_held_out_rows(tmp_path):
    made = ota.scores(
        {
            "3": {
                "accuracy": {m: {"a": v, "b": v + 2} for m, v in {"ota, fisher, keep 1": 50.0, "ota, fisher, keep 0.5": 60.0, "ota, squisher, keep 1": 1.0}.items()},
                "validation": {"ota, fisher, keep 1": 9.0, "ota, fisher, keep 0.5": 8.0, "ota, squisher, keep 1": 1.0},
                "individual": {"a": 90.0, "b": 90.0},
            }
        }
    )  # fmt: skip
    values = {score.method: score.value for score in made}
    assert values["ota, fisher"] == 51.0
    assert values["individual"] == 90.0
    document = run("ota", tmp_path)
    methods = {score["method"] for score in document["scores"]}
    assert {"linear", "fisher merging, squisher", "ubgm, fisher", "ota, squisher, keep 0.5"} <= methods


@pytest.mark.parametrize("module", [ota, quantization, unlearning])
def test_every_setting_has_both_scales(module):
    assert set(module.CONFIGS) == {"quick", "cpu"}
