"""GLUE: how its tasks are scored, and its files from the Hub."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.tuning import outputs

__all__ = ["download", "matthews", "measured"]

GLUE = {  # columns of a pair, and the split that stands in for the test server
    "cola": (("sentence",), "validation"),
    "mnli": (("premise", "hypothesis"), "validation_matched"),
    "mrpc": (("sentence1", "sentence2"), "validation"),
    "qnli": (("question", "sentence"), "validation"),
    "qqp": (("question1", "question2"), "validation"),
    "rte": (("sentence1", "sentence2"), "validation"),
    "sst2": (("sentence",), "validation"),
}


def measured(model: nn.Module, rows: Any, task: str) -> float:
    """Matthews' correlation on CoLA, Pearson's where labels are numbers, accuracy elsewhere; in percent."""
    found, labels = outputs(model, rows)
    if labels.is_floating_point():
        pairs = torch.stack([found.flatten(), labels.flatten()]).double()
        value = float(torch.corrcoef(pairs)[0, 1].nan_to_num())
    else:
        predicted = found.argmax(-1)
        value = matthews(predicted, labels) if task == "cola" else float((predicted == labels).double().mean())
    return round(100 * value, 4)


def matthews(predicted: Tensor, true: Tensor) -> float:
    """The correlation of two binary labels; 0 where one of them is constant."""
    table = [int(((predicted == p) & (true == t)).sum()) for p in (0, 1) for t in (0, 1)]
    product = (table[0] + table[1]) * (table[2] + table[3]) * (table[0] + table[2]) * (table[1] + table[3])
    return (table[0] * table[3] - table[1] * table[2]) / math.sqrt(product) if product else 0.0


def download(task: str, folder: Path) -> None:
    """Write a task down in the layout of the data folder."""
    from datasets import load_dataset

    columns, evaluation = GLUE[task]
    folder.mkdir(parents=True, exist_ok=True)
    for part, split in (("train", "train"), ("eval", evaluation)):
        rows = load_dataset("nyu-mll/glue", task, split=split)
        lines = (
            json.dumps(
                dict(zip(("text_a", "text_b"), (row[c] for c in columns), strict=False)) | {"label": row["label"]}
            )
            for row in rows
        )
        temporary = folder / f"{part}.part"
        temporary.write_bytes(gzip.compress("\n".join(lines).encode()))
        temporary.replace(folder / f"{part}.jsonl.gz")
