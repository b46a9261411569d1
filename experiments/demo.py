"""All six settings in small, on digits that ship with scikit-learn: one table, one figure, one report. Never evidence.

python -m experiments.demo [--out DIR] [--jobs N]
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import squisher
from experiments import findings
from experiments.comparison import SETTINGS, comparisons
from experiments.data import Labelled, digits, shuffled
from experiments.runs import execute
from experiments.spread import mean

BATCH, EPOCHS, HIDDEN = 32, 40, 64


def train(model: nn.Module, data: Labelled) -> torch.optim.Optimizer:
    """Train with AdamW over shuffled epochs."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(EPOCHS):
        for rows in shuffled(len(data), BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data.inputs[rows]), data.labels[rows]).backward()
            optimizer.step()
    return optimizer


def command(*arguments: str | Path) -> None:
    """Run a command as a user would type it."""
    print(f"\n$ squisher {' '.join(a.name if isinstance(a, Path) else a for a in arguments)}", flush=True)
    subprocess.run([Path(sys.executable).with_name("squisher"), *arguments], check=True)


def recycle(out: Path) -> None:
    """Train one network, recycle its optimizer, compare with the real Fisher, write the report."""
    torch.manual_seed(0)
    train_set, test_set = digits()
    model = nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))
    print(f"Training a small network on {len(train_set)} digits with AdamW …")
    optimizer = train(model, train_set)
    accuracy = (model(test_set.inputs).argmax(-1) == test_set.labels).float().mean().item()
    print(f"Test accuracy {accuracy:.1%}. The optimizer already holds the Squisher; it only needs to be saved.")
    checkpoint, recycled, real = out / "checkpoint.pt", out / "squisher.safetensors", out / "fisher.safetensors"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)
    command("extract", checkpoint, "--out", recycled, "--batch-size", str(BATCH), "--overwrite")
    print(
        f"\nThe real thing, for comparison: the Fisher of all {len(train_set)} examples, labels as the network sees them."
    )
    squisher.fisher(model, train_set.batches(128), labels="exact").save(real)
    command("compare", recycled, real)
    command("report", recycled, real, "--out", out / "report.html", "--overwrite")


def small_settings() -> list[str]:
    """Return the settings that run on what ships with the project; the others need data."""
    return [name for name in SETTINGS if "quick" in importlib.import_module(f"experiments.{name}").CONFIGS]


def six_settings(out: Path, jobs: int) -> None:
    """Run the settings that are not done yet, and show them side by side."""
    start = time.perf_counter()
    for setting in small_settings():
        execute(setting, "quick", seeds=None, data=None, out=out, jobs=jobs, say=lambda line: None)
        print(f"{setting}: done after {time.perf_counter() - start:.0f} s", flush=True)
    found = comparisons(out, "quick")
    table = Table(title="\nWhat the Squisher does in place of the Fisher", title_justify="left")
    for title in ("setting", "measure", "Fisher", "Squisher", "baseline"):
        table.add_column(title, justify="left" if title in ("setting", "measure") else "right")
    for c in found:
        values = [mean(list(c.main(method).values())) for method in ("fisher", "squisher", c.baseline)]
        table.add_row(c.title, c.metric, *map(str, values))
    Console().print(table)
    print("Small networks and 8×8 digits: this shows how it goes, and proves nothing. docs/results.md has real data.")
    findings.draw(found, out / "figure.png")


def main() -> None:
    """Run both parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="where the files go")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="runs at a time, a thread each")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    recycle(options.out)
    print("\nThe paper's six settings, in small:")
    six_settings(options.out, options.jobs)
    print(f"\nFigure: {options.out / 'figure.png'}\nReport: {options.out / 'report.html'}")


if __name__ == "__main__":
    main()
