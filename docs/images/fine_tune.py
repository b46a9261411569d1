"""Fine-tune a small encoder on text tasks and keep the Squisher of each, for the pictures of docs/report.md.

    python docs/images/fine_tune.py --model FOLDER --data FOLDER --out FOLDER sst2 trec6

Needs transformers. The folder of data holds `TASK/train.jsonl.gz` with rows {"text_a", "label"}.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import squisher

BATCH, LENGTH = 16, 32


def main() -> None:
    """Train each task for a few steps and write its model and its importance into a folder of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="+")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for task in arguments.tasks:
        fine_tune(arguments.model, arguments.data / task / "train.jsonl.gz", arguments.out / task, arguments.steps)


def fine_tune(model_folder: Path, data: Path, out: Path, steps: int) -> None:
    """Train with AdamW on the first examples, and write the model and its Squisher into `out`."""
    with gzip.open(data, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    torch.manual_seed(0)
    labels = 1 + max(row["label"] for row in rows)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=labels).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    order = torch.randperm(len(rows))[: steps * BATCH].split(BATCH)
    for batch in order:
        chosen = [rows[k] for k in batch.tolist()]
        inputs = tokenizer(
            [row["text_a"] for row in chosen], padding=True, truncation=True, max_length=LENGTH, return_tensors="pt"
        )
        optimizer.zero_grad()
        model(**inputs, labels=torch.tensor([row["label"] for row in chosen])).loss.backward()
        optimizer.step()
    model.save_pretrained(out)
    squisher.extract(optimizer, model, batch_size=BATCH, loss_reduction="mean").save(out)


if __name__ == "__main__":
    main()
