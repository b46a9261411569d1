"""The paper's settings, one command.

python -m experiments SETTING|all --scale quick|cpu|paper|… [--seeds N] [--data DIR] [--out DIR] [--jobs N] [--only REGEX] [--again REGEX]

What is done is kept, unit by unit, in `--out`; units of the committed documents (`--known`) are not run again, so a run that was
begun on one machine goes on on another. `--again` runs single units once more, into a fresh `--out`.
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
    "ota",
    "pruning",
    "pruning_weights",
    "fish",
    "embedding",
    "embedding_text",
    "ewc",
    "quality",
    "runtime",
    "examples",
    "strengths",
    "quantization",
    "unlearning",
)


def main() -> None:
    """Run the missing units of one setting or of all."""
    parser = argparse.ArgumentParser(prog="python -m experiments", description="Reproduces the paper's settings.")
    parser.add_argument("setting", choices=[*SETTINGS, "all"])
    parser.add_argument("--scale", default="quick", help="quick, cpu, paper, or one of the setting's own")
    parser.add_argument("--seeds", type=int, help="how many (default: the scale's own number)")
    parser.add_argument("--data", type=Path, help="the folder of the data sets: mnist/, text/, cifar-100-binary/, …")
    parser.add_argument("--out", type=Path, default=Path("runs/experiments"), help="results and caches; runs go on")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="runs at a time, a thread each")
    parser.add_argument("--only", metavar="REGEX", help="of what is missing, only units whose key it finds")
    parser.add_argument("--again", metavar="REGEX", help="only units whose key it finds, even if they are known")
    parser.add_argument(
        "--known", type=Path, default=Path(__file__).parent / "results", help="documents whose units are taken over"
    )
    options = parser.parse_args()
    for setting in SETTINGS if options.setting == "all" else (options.setting,):
        module = importlib.import_module(f"experiments.{setting}")
        parts = getattr(module, "GROUPS", {}).get(options.scale, [(options.scale, None)])
        if options.setting == "all" and parts[0][0] not in module.CONFIGS:
            print(f"{setting}: no runs at scale {options.scale}; its recipe is in docs/results-tables.md.")
            continue
        for scale, stages in parts:
            path = execute(
                setting,
                scale,
                seeds=options.seeds,
                data=options.data,
                out=options.out,
                jobs=options.jobs,
                say=lambda line: print(line, flush=True),
                known=options.known,
                stages=stages,
                only=options.only,
                again=options.again,
            )
            print(f"{setting}: {path}", flush=True)


if __name__ == "__main__":
    main()
