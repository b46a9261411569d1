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

__all__ = ["SECOND", "download", "matthews", "measured"]

GLUE = {  # the columns of a text or a pair
    "cola": ("sentence",),
    "mnli": ("premise", "hypothesis"),
    "mrpc": ("sentence1", "sentence2"),
    "qnli": ("question", "sentence"),
    "qqp": ("question1", "question2"),
    "rte": ("sentence1", "sentence2"),
    "sst2": ("sentence",),
    "stsb": ("sentence1", "sentence2"),
}
SECOND = {"mnli": "mismatched"}
"""Tasks with a second test file, which is a column of its own in the paper's table, and that file's name."""


def measured(model: nn.Module, rows: Any, task: str) -> float:
    """Return Matthews' correlation on CoLA, Pearson's where labels are numbers, accuracy elsewhere; in percent."""
    found, labels = outputs(model, rows)
    if labels.is_floating_point():
        pairs = torch.stack([found.flatten(), labels.flatten()]).double()
        value = float(torch.corrcoef(pairs)[0, 1].nan_to_num())
    else:
        predicted = found.argmax(-1)
        value = matthews(predicted, labels) if task == "cola" else float((predicted == labels).double().mean())
    return round(100 * value, 4)


def matthews(predicted: Tensor, true: Tensor) -> float:
    """Return the correlation of two binary labels; 0 where one of them is constant."""
    table = [int(((predicted == p) & (true == t)).sum()) for p in (0, 1) for t in (0, 1)]
    product = (table[0] + table[1]) * (table[2] + table[3]) * (table[0] + table[2]) * (table[1] + table[3])
    return (table[0] * table[3] - table[1] * table[2]) / math.sqrt(product) if product else 0.0


def download(task: str, folder: Path) -> None:
    """Write a task down in the layout of the data folder."""
    from datasets import load_dataset

    folder.mkdir(parents=True, exist_ok=True)
    splits = {"train": "train", "eval": "validation"}  # what stands in for the test server
    if task in SECOND:
        splits |= {"eval": "validation_matched", SECOND[task]: "validation_mismatched"}
    for part, split in splits.items():
        rows = load_dataset("nyu-mll/glue", task, split=split)
        lines = (
            json.dumps(
                dict(zip(("text_a", "text_b"), (row[c] for c in GLUE[task]), strict=False)) | {"label": row["label"]}
            )
            for row in rows
        )
        temporary = folder / f"{part}.part"
        temporary.write_bytes(gzip.compress("\n".join(lines).encode()))
        temporary.replace(folder / f"{part}.jsonl.gz")
