"""Fine-tuning that keeps what a comparison needs: weights and accumulator at the end, at the best step and on the way.

A recipe is a dict with

    steps, batch, rate, schedule ("constant", "linear" or "cosine", to 0), warmup (steps), beta2, eps, decay, clip
                 AdamW; clip is the largest gradient norm, or None
    every        steps between evaluations on validation data, or None
    keep         steps after which weights and accumulator are kept too, besides the last ("final") and the best
                 ("best", by validation accuracy; only with `every`)
    track        whether an average with β₂ = 0.95 of the same gradients is kept beside the optimizer's own

Data have `len`, `batch(rows)` and `batches(size)`; a batch is a mapping of the model's arguments with "labels".
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import squisher
from experiments.data import shuffled

__all__ = [
    "Splits",
    "accuracy",
    "fingerprint",
    "importance",
    "loss",
    "outputs",
    "right_rows",
    "share",
    "train",
    "tuned",
    "weights_of",
]


class Splits(NamedTuple):
    """What is trained on, what choices are made on, and what is reported; no row is in two of them."""

    train: Any
    validation: Any
    test: Any
    classes: int


def train(
    model: nn.Module,
    data: Any,
    config: Mapping[str, Any],
    seed: int,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    before_step: Callable[[], None] | None = None,
    after_step: Callable[[int, torch.optim.Optimizer], bool | None] | None = None,
) -> torch.optim.Optimizer:
    """Fine-tune over shuffled epochs without their smaller last batch.

    Args:
        model: Changed in place; left in evaluation mode.
        data: The training rows.
        config: The recipe; see the module.
        seed: Of the order of rows and of dropout.
        optimizer: By default AdamW over what requires a gradient.
        before_step: Called with gradients in place, before clipping.
        after_step: Called with the number of steps done and the optimizer; it may evaluate, and by True end the training.

    Returns:
        The optimizer.
    """
    torch.manual_seed(seed)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if optimizer is None:
        optimizer = torch.optim.AdamW(
            parameters,
            lr=config["rate"],
            betas=(0.9, config["beta2"]),
            eps=config["eps"],
            weight_decay=config["decay"],
            fused=True,  # four times as fast on a CPU
        )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(config, step))
    model.train()
    for step, rows in enumerate(_rows(len(data), config["batch"], config["steps"], seed), 1):
        batch = _placed(data.batch(rows), model)
        labels = batch.pop("labels")
        loss(_logits(model(**batch)), labels).backward()
        if before_step is not None:
            before_step()
        if config["clip"]:
            nn.utils.clip_grad_norm_(parameters, config["clip"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if after_step is not None:
            if after_step(step, optimizer):
                break
            model.train()
    model.eval()
    return optimizer


def loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of classes, or half the squared error of labels that are numbers."""
    if labels.is_floating_point():
        return nn.functional.mse_loss(outputs, labels) / 2
    return nn.functional.cross_entropy(outputs, labels)


def accuracy(model: nn.Module, data: Any) -> float:
    """Return the accuracy in percent."""
    return share(right_rows(model, data))


def right_rows(model: nn.Module, data: Any) -> str:
    """Return a 1 for every row that is classified correctly, a 0 for the others."""
    found, labels = outputs(model, data)
    return "".join(map(str, (found.argmax(-1) == labels).int().tolist()))


@torch.no_grad()
def outputs(model: nn.Module, data: Any) -> tuple[Tensor, Tensor]:
    """Return the model's outputs for all rows, in evaluation mode, and their labels, in the order of `data.batches`."""
    was = model.training
    model.eval()
    found, labels = [], []
    for batch in (_placed(batch, model) for batch in data.batches(64)):
        labels.append(batch.pop("labels").cpu())
        found.append(_logits(model(**batch)).cpu())
    model.train(was)
    return torch.cat(found), torch.cat(labels)


def share(right: str) -> float:
    """Return the accuracy in percent."""
    return 100.0 * right.count("1") / len(right)


def importance(snapshot: Mapping[str, Any], part: str | None = None, *, what: str = "squares") -> squisher.Importance:
    """Return the Squisher of a snapshot, or of the parameters that `part` matches."""
    found = squisher.Importance(snapshot[what], **snapshot["provenance" if what == "squares" else f"{what}_provenance"])
    return found if part is None else found.restrict(part)


def fingerprint(config: Mapping[str, Any]) -> str:
    """Return a short hash of a configuration, for the names of cached files."""
    return hashlib.sha256(json.dumps(dict(config), sort_keys=True).encode()).hexdigest()[:10]


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the trained parameters by name."""
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters() if p.requires_grad}


def tuned(model: nn.Module, data: Splits, config: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Fine-tune a model, and say what came of it as plain values and tensors.

    Returns:
        `history` ({step, validation} each), `seconds` (training), `best_step`, and `snapshots`: by "final", "best"
        and the steps of `keep`, each with `step`, `weights` (what was trained), `squares` (v̂ by name), `provenance`
        and `seconds` (of extracting it); "final" also with `tracked`, what an average with β₂ = 0.95 held.
    """
    tracker = squisher.Tracker(model, beta2=0.95) if config.get("track") else None
    history: list[dict[str, float]] = []
    snapshots: dict[str, Any] = {}
    seconds = {"looking": 0.0}

    def look(step: int, optimizer: torch.optim.Optimizer) -> None:
        clock = time.perf_counter()
        if config["every"] and (step % config["every"] == 0 or step == config["steps"]):
            history.append({"step": step, "validation": accuracy(model, data.validation)})
            # The first of equals: the shorter training.
            if history[-1]["validation"] > max((h["validation"] for h in history[:-1]), default=-1.0):
                snapshots["best"] = _snapshot(model, optimizer, config, step)
        if step in config["keep"]:
            snapshots[str(step)] = _snapshot(model, optimizer, config, step)
        if step == config["steps"]:
            snapshots["final"] = _snapshot(model, optimizer, config, step)
        seconds["looking"] += time.perf_counter() - clock

    begin = time.perf_counter()
    train(model, data.train, config, seed, before_step=tracker.observe if tracker else None, after_step=look)
    if tracker is not None:
        found = squisher.extract(tracker, model, batch_size=config["batch"])
        snapshots["final"] |= {"tracked": dict(found), "tracked_provenance": _plain(found.provenance.to_dict())}
    return {
        "history": history,
        "seconds": time.perf_counter() - begin - seconds["looking"],
        "best_step": snapshots["best"]["step"] if "best" in snapshots else config["steps"],
        "snapshots": snapshots,
    }


def _snapshot(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: Mapping[str, Any], step: int
) -> dict[str, Any]:
    clock = time.perf_counter()
    found = squisher.extract(optimizer, model, batch_size=config["batch"])
    seconds = time.perf_counter() - clock
    return {
        "step": step,
        "weights": weights_of(model),
        "squares": {name: value.cpu() for name, value in found.items()},
        "provenance": _plain(found.provenance.to_dict()),
        "seconds": seconds,
    }


def _plain(provenance: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(provenance))


def _rows(count: int, size: int, steps: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    size = min(size, count)
    done = 0
    while done < steps:
        for rows in shuffled(count, size, generator):
            if done == steps:
                return
            done += 1
            yield rows


def _rate(config: Mapping[str, Any], step: int) -> float:
    """Return the factor of the learning rate for a step counted from 0."""
    if step < config["warmup"]:
        return (step + 1) / config["warmup"]
    if config["schedule"] == "constant":
        return 1.0
    share = (step - config["warmup"]) / max(1, config["steps"] - config["warmup"])
    return max(0.0, 1 - share) if config["schedule"] == "linear" else 0.5 * (1 + math.cos(math.pi * min(1.0, share)))


def _placed(batch: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    device = next(model.parameters()).device
    return {name: value.to(device) for name, value in batch.items()}


def _logits(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits
