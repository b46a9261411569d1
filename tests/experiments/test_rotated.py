"""Rotated digits: turned as said, and no image in two parts."""

from __future__ import annotations

import torch

from experiments import rotated
from experiments.data import digits
from experiments.merging import CONFIGS
from experiments.runs import Run

CONFIG = {**CONFIGS["quick"]["benchmarks"]["rotated digits"], "steps": 2, "keep": [1], "every": None, "train": 50}


def test_a_quarter_turn_is_exact_and_a_turn_back_is_the_identity():
    image = torch.arange(16.0).view(1, 16)
    turned = rotated.rotated(image, 90)
    assert torch.allclose(turned.view(4, 4), image.view(4, 4).rot90(-1), atol=1e-4)
    assert torch.allclose(rotated.rotated(turned, -90), image, atol=1e-4)


def test_no_image_is_in_two_parts_or_was_pretrained_on(tmp_path):
    run = Run("merging", "quick", {}, None, tmp_path)
    parts = rotated.splits(run, "0°", CONFIG)
    whole, _ = digits()
    count = rotated._pretraining_rows(whole, CONFIG)
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))
    seen = [{tuple(row.tolist()) for row in part.inputs} for part in (parts.train, parts.validation, parts.test)]
    seen.append({tuple(row.tolist()) for row in rotated._turned(whole[order[:count]], "0°", CONFIG).inputs})
    distinct = {tuple(row.tolist()) for row in rotated.rotated(whole.inputs, 0.0)}
    assert len(distinct) == len(whole)  # images tell rows apart
    assert [len(s) for s in seen] == [50, 150, 360, 50]
    assert len(set.union(*seen)) == sum(map(len, seen))


def test_parity_has_two_classes(tmp_path):
    parts = rotated.splits(Run("ubgm", "quick", {}, None, tmp_path), "30°", {**CONFIG, "parity": True})
    assert parts.classes == 2
    assert set(parts.train.labels.tolist()) == {0, 1}


def test_tasks_start_from_one_pretrained_network(tmp_path):
    run = Run("merging", "quick", {}, None, tmp_path)
    start = rotated.pretrained(run, 1, CONFIG)
    kept = rotated.fine_tune(run, "30°", 1, {**CONFIG, "rate": 0.0, "track": False})
    assert all(torch.equal(kept["snapshots"]["final"]["weights"][name], start[name]) for name in start)
    other = rotated.pretrained(run, 2, CONFIG)
    assert not torch.equal(start["head.weight"], other["head.weight"])
