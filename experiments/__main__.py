"""The paper's settings, one command.

python -m experiments SETTING|all --scale quick|cpu|paper [--seeds N] [--data DIR] [--out DIR] [--jobs N]
"""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path

from experiments.runs import execute

SETTINGS = (
    "merging",
    "ubgm",
    "pruning",
    "pruning_weights",
    "fish",
    "embedding",
    "ewc",
    "ewc_permuted",
    "quality",
    "runtime",
)


def main() -> None:
    """Runs what is missing of one setting or of all."""
    parser = argparse.ArgumentParser(prog="python -m experiments", description="Reproduces the paper's settings.")
    parser.add_argument("setting", choices=[*SETTINGS, "all"])
    parser.add_argument("--scale", choices=["quick", "cpu", "paper"], default="quick")
    parser.add_argument("--seeds", type=int, help="how many (default: the scale's own number)")
    parser.add_argument("--data", type=Path, help="the folder of the data sets: mnist/, text/, cifar-100-binary/, …")
    parser.add_argument("--out", type=Path, default=Path("runs/experiments"), help="results and caches; runs go on")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="runs at a time, a thread each")
    options = parser.parse_args()
    settings = SETTINGS if options.setting == "all" else (options.setting,)
    for setting in settings:
        if options.setting == "all" and options.scale not in importlib.import_module(f"experiments.{setting}").CONFIGS:
            print(f"{setting}: no runs at scale {options.scale}; its recipe is in docs/results.md.")
            continue
        path = execute(
            setting,
            options.scale,
            seeds=options.seeds,
            data=options.data,
            out=options.out,
            jobs=options.jobs,
            say=lambda line: print(line, flush=True),
        )
        print(f"{setting}: {path}", flush=True)


if __name__ == "__main__":
    main()
