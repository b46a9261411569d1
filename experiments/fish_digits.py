"""FISH masks on digits: the quick scale of `experiments.fish`."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import squisher
from experiments import data
from experiments.data import Labelled
from experiments.runs import Run
from experiments.text import HEAD

METHODS = ("fisher", "squisher", "random")


def chosen(importance: Mapping[str, Tensor], keep: float) -> Any:
    """Return a mask of the head and the highest of the other entries, within the budget."""
    return squisher.mask.top_k(importance, keep, always=HEAD)


def overlap_of(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """Return the share of the first mask's entries that are in the second, too, without the head, which is in all."""
    names = [name for name in first if not re.search(HEAD, name)]
    both = sum(int((first[name] & second[name]).sum()) for name in names)
    return round(both / max(1, sum(int(first[name].sum()) for name in names)), 4)


def search_digits(run: Run, kind: str) -> dict[str, Any]:
    """Return the validation accuracy of every method and learning rate on seed 0, and the best rate of each."""
    task = Adaptation(run.config, kind, 0)
    found = {m: {r: task.adapted(m, r, task.validation) for r in run.config["rates"]} for m in METHODS}
    best = {method: max(by_rate, key=lambda rate: (by_rate[rate], -rate)) for method, by_rate in found.items()}
    return {"validation": {m: {f"{r:g}": v for r, v in by_rate.items()} for m, by_rate in found.items()}, "rates": best}


def digits(run: Run, kind: str, seed: int) -> dict[str, Any]:
    """Run all methods on one seed."""
    task = Adaptation(run.config, kind, seed)
    rates = run.result(f"search/{kind}")["rates"]
    rows = [{"case": kind, "method": m, "score": task.adapted(m, rates[m], task.test)} for m in METHODS]
    return {
        "seed": seed,
        "rows": rows,
        "times": task.times,
        "overlap": {m: overlap_of(task.mask("fisher"), task.mask(m)) for m in ("squisher", "random")},
    }


class Adaptation:
    """A perceptron that knows the digits 0 to 4 wherever they are on a canvas, and is given 5 to 9 in one place.

    As in a pretrained language model, much of what it can do is not needed for the new task.
    """

    def __init__(self, config: dict[str, Any], kind: str, seed: int) -> None:
        self.config, self.seed, self.times = config | config["stand_ins"][kind], seed, {}
        train, test = data.digits()
        torch.manual_seed(seed)
        widths = self.config["widths"]
        layers = [nn.Linear(*widths[:2]), nn.ReLU(), nn.Linear(*widths[1:]), nn.ReLU()]
        self.model = nn.ModuleDict({"body": nn.Sequential(*layers), "head": nn.Linear(widths[-1], 5)})
        self.model.forward = lambda inputs: self.model["head"](self.model["body"](inputs))
        old = train[train.labels < 5]
        everywhere = [self._at(old, place) for place in range(self.config["places"])]
        old = Labelled(torch.cat([rows.inputs for rows in everywhere]), torch.cat([rows.labels for rows in everywhere]))
        self._fit(old, self.config["pretrain_steps"], self.config["dense_rate"])
        self.model["head"].reset_parameters()
        self.start = {name: value.clone() for name, value in self.model.state_dict().items()}
        rest, test = (self._at(rows[rows.labels >= 5], self.config["places"] // 2) for rows in (train, test))
        rest, self.test = (Labelled(rows.inputs, rows.labels - 5) for rows in (rest, test))
        self.train, self.validation = rest[150:], rest[:150]
        self._masks: dict[str, Any] = {}

    def _at(self, rows: Labelled, place: int) -> Labelled:
        """Return the digits on a canvas that is empty elsewhere."""
        canvas = torch.zeros(len(rows), self.config["places"], rows.inputs.shape[1])
        canvas[:, place] = rows.inputs
        return Labelled(canvas.flatten(1), rows.labels)

    def mask(self, method: str) -> Any:
        """Return the mask of one method."""
        if method not in self._masks:
            self.model.load_state_dict(self.start)
            examples = self.config["examples"]
            begin = time.perf_counter()
            if method == "fisher":
                importance = dict(squisher.fisher(self.model, self.train[:examples].batches(64)))
            elif method == "squisher":
                optimizer = self._fit(self.train, examples // self.config["batch"], self.config["dense_rate"])
                begin = time.perf_counter()
                importance = dict(squisher.extract(optimizer, self.model, batch_size=self.config["batch"]))
            else:
                generator = torch.Generator().manual_seed(self.seed)
                importance = {name: torch.rand(v.shape, generator=generator) for name, v in self.start.items()}
            self.times[method] = time.perf_counter() - begin
            self._masks[method] = chosen(importance, self.config["keep"])
        return self._masks[method]

    def adapted(self, method: str, rate: float, rows: Labelled) -> float:
        """Return accuracy on some rows after training under a mask, in percent."""
        mask = self.mask(method)
        self.model.load_state_dict(self.start)
        optimizer = squisher.mask.compact(self.model, mask, torch.optim.AdamW, lr=rate, weight_decay=0.0)
        self._fit(self.train, self.config["steps"], rate, optimizer)
        optimizer.release()
        with torch.no_grad():
            return round(100.0 * (self.model(rows.inputs).argmax(-1) == rows.labels).float().mean().item(), 4)

    def _fit(
        self, rows: Labelled, steps: int, rate: float, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.Optimizer:
        optimizer = optimizer or torch.optim.AdamW(self.model.parameters(), lr=rate, weight_decay=0.0)
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(steps):
            which = torch.randint(0, len(rows), (self.config["batch"],), generator=generator)
            optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(rows.inputs[which]), rows.labels[which]).backward()
            optimizer.step()
        return optimizer
