"""The main job, on data that ships with scikit-learn: train, save, recycle the optimizer, compare with the real Fisher.

python -m experiments.demo [--out DIR]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn

import squisher

SEED, HIDDEN, EPOCHS, BATCH = 0, 64, 40, 32


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Handwritten digits, 8×8: 1,437 to train on and 360 to test on."""
    data = load_digits()
    inputs, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED))
    train, test = order[:1437], order[1437:]
    return inputs[train], labels[train], inputs[test], labels[test]


def train(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.optim.Optimizer:
    """AdamW over shuffled epochs, as anybody would."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(labels)).split(BATCH):
            if len(batch) < BATCH:
                continue
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            optimizer.step()
    return optimizer


def run(*arguments: str | Path) -> float:
    """Runs a command as a user would type it, and says how long it took."""
    print(f"\n$ {' '.join(Path(a).name if isinstance(a, Path) else a for a in arguments)}", flush=True)
    start = time.perf_counter()
    subprocess.run([Path(sys.executable).with_name("squisher"), *arguments[1:]], check=True)
    return time.perf_counter() - start


def main() -> None:
    """Trains, saves, extracts, compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="where the files go")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    inputs, labels, test_inputs, test_labels = digits()
    model = nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))

    print(f"Training a small network on {len(labels)} digits with AdamW …")
    optimizer = train(model, inputs, labels)
    accuracy = (model(test_inputs).argmax(-1) == test_labels).float().mean().item()
    print(f"Test accuracy {accuracy:.1%}. The optimizer already holds the Squisher; it only needs to be saved.")
    checkpoint = out / "checkpoint.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)

    recycled = out / "squisher.safetensors"
    run("squisher", "extract", checkpoint, "--out", recycled, "--batch-size", str(BATCH))
    run("squisher", "inspect", recycled)

    print(f"\nThe real thing, for comparison: the empirical Fisher of all {len(labels)} examples.")
    times = {}
    for name, method in (("one example at a time", "loop"), ("this library's engine", "auto")):
        start = time.perf_counter()
        fisher = squisher.fisher(
            model, zip(inputs.split(128), labels.split(128), strict=True), labels="data", method=method
        )
        times[name] = time.perf_counter() - start
    fisher.save(out / "fisher.safetensors")
    start = time.perf_counter()
    squisher.extract(checkpoint, batch_size=BATCH).save(recycled)
    times["recycled from the checkpoint"] = time.perf_counter() - start

    run("squisher", "compare", recycled, out / "fisher.safetensors")
    agreement = squisher.compare(squisher.load(recycled).as_fisher(), fisher)
    table = Table(title="\nSquisher against Fisher", title_justify="left", show_header=False, box=None)
    table.add_row("rank correlation (Spearman)", f"{agreement.spearman:.3f}")
    table.add_row("scale of B·v̂ (1 = the Fisher's)", f"{agreement.scale:.2f}")
    table.add_row("shared among the largest 10%", f"{agreement.overlap(0.1):.0%} (chance: 10%)")
    for name, seconds in times.items():
        table.add_row(f"time: {name}", f"{seconds:.3f} s")
    Console().print(table)
    print(f"\nFiles: {out}")


if __name__ == "__main__":
    main()
