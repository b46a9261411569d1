"""Rotated digits: tasks that are cheap, alike and at odds, from one small pretrained network. Fully controlled.

A configuration is a dict with

    source            "digits" (scikit-learn's, 8×8) or "mnist"
    widths            of the hidden layers; the last hidden layer feeds the head
    pretraining       the recipe of the network that all tasks start from; it sees upright digits
    train, validation, test    rows at most: those of a task are disjoint from each other and from pretraining's
    parity            whether a task is "odd or even?" (two classes for all tasks) instead of ten digits

and a recipe as in `experiments.tuning`. A task is named by its angle: "30°".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from experiments.data import Labelled, digits, mnist
from experiments.networks import Headed
from experiments.runs import Run
from experiments.tuning import Splits, fingerprint, train, tuned, weights_of

__all__ = ["Images", "fine_tune", "network", "pretrained", "rotated", "splits"]


class Images(Labelled):
    """Images and labels in batches as `experiments.tuning` takes them."""

    def take(self, rows: Any) -> Images:
        """Return the rows asked for."""
        return Images(self.inputs[rows], self.labels[rows])

    def batch(self, rows: Any) -> dict[str, Tensor]:
        """Return a batch of the network's inputs with "labels"."""
        return {"inputs": self.inputs[rows], "labels": self.labels[rows]}

    def batches(self, size: int) -> list[dict[str, Tensor]]:  # type: ignore[override]
        """Return all rows in order."""
        return [self.batch(rows) for rows in torch.arange(len(self)).split(size)]


def rotated(images: Tensor, angle: float) -> Tensor:
    """Square images, one a row, turned clockwise by an angle in degrees; the corners that come in are black."""
    side = math.isqrt(images.shape[1])
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    turn = torch.tensor([[cos, sin, 0.0], [-sin, cos, 0.0]]).expand(len(images), 2, 3)
    grid = nn.functional.affine_grid(turn, [len(images), 1, side, side], align_corners=False)
    return nn.functional.grid_sample(images.view(-1, 1, side, side), grid, align_corners=False).flatten(1)


def splits(run: Run, task: str, config: Mapping[str, Any]) -> Splits:
    """Return the images of one task; its parts have no image in common with each other or with pretraining."""
    whole, test = _images(run, config)
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))
    order = order[_pretraining_rows(whole, config) :]
    held, kept = order[: config["validation"]], order[config["validation"] :][: config["train"]]
    parts = [_turned(part, task, config) for part in (whole[kept], whole[held], test[slice(0, config["test"])])]
    return Splits(*parts, classes=2 if config["parity"] else 10)


def network(config: Mapping[str, Any], seed: int) -> Headed:
    """Return a new network."""
    torch.manual_seed(seed)
    inputs = 64 if config["source"] == "digits" else 784
    return Headed([inputs, *config["widths"]], 2 if config["parity"] else 10).eval()


def fine_tune(
    run: Run, task: str, seed: int, config: Mapping[str, Any], start: Mapping[str, Tensor] | None = None, name: str = ""
) -> dict[str, Any]:
    """Fine-tune on one task from the pretrained network or from `start`, once; see `tuning.tuned`."""

    def make() -> dict[str, Any]:
        model = network(config, seed)
        model.load_state_dict(pretrained(run, seed, config) if start is None else start)
        return tuned(model, splits(run, task, config), config, seed)

    return run.cached(f"{run.setting}/{task}-{seed}{name}-{fingerprint(config)}", make)


def pretrained(run: Run, seed: int, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the network that all tasks of a seed start from, trained once."""

    def make() -> dict[str, Tensor]:
        whole, _ = _images(run, config)
        order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))
        upright = _turned(whole[order[: _pretraining_rows(whole, config)]], "0°", config)
        model = network(config, seed)
        train(model, upright, config["pretraining"], seed)
        return weights_of(model)

    own = {key: config[key] for key in ("source", "widths", "pretraining", "train", "parity")}
    return run.cached(f"{run.setting}/upright-{seed}-{fingerprint(own)}", make)


def _images(run: Run, config: Mapping[str, Any]) -> tuple[Labelled, Labelled]:
    return digits() if config["source"] == "digits" else mnist(run.data_folder("mnist"))


def _pretraining_rows(whole: Labelled, config: Mapping[str, Any]) -> int:
    return min(len(whole) // 3, config["train"])


def _turned(data: Labelled, task: str, config: Mapping[str, Any]) -> Images:
    labels = data.labels % 2 if config["parity"] else data.labels
    return Images(rotated(data.inputs, float(task.removesuffix("°"))), labels)
