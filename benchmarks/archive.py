"""Round trip of an importance file (load lazily, save as a stream) beside a plain copy of the same file.

python -m benchmarks.archive [--size 1e9] [--rounds 5]
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path

import torch

import squisher
from benchmarks import harness

CASES = ("copy the file", "safetensors: load_file, save_file", "squisher: load, save")


def make(path: Path, size: int) -> None:
    torch.manual_seed(0)
    layer = 4 * 1024 * 1024
    tensors = {f"layer.{k}.weight": torch.rand(2048, 2048) * 1e-8 for k in range(max(1, size // 4 // layer))}
    squisher.Importance(tensors, kind="fisher").save(path)


def synced_copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    with open(target, "rb") as file:
        os.fsync(file.fileno())


def with_the_library(source: Path, target: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_file(load_file(source), target)
    with open(target, "rb") as file:
        os.fsync(file.fileno())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--size", type=float, default=1e9)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.case:
        source, target = options.folder / "source.safetensors", options.folder / "target.safetensors"
        target.unlink(missing_ok=True)
        work = (synced_copy, with_the_library, lambda a, b: squisher.load(a).save(b))[CASES.index(options.case)]
        harness.run_case(lambda: work(source, target))
        return
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder) / "source.safetensors", int(options.size))
        cases = harness.interleaved("benchmarks.archive", CASES, ["--folder", folder], options.rounds)
    base = cases[CASES[0]]["seconds"]
    for case in cases.values():
        case["relative_to_copy"] = round(case["seconds"] / base, 3)
    harness.write("archive", {"bytes": int(options.size), "rounds": options.rounds, "cases": cases})


if __name__ == "__main__":
    main()
