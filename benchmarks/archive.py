"""Round trip of an importance file (load lazily, save as a stream) beside a plain copy of the same file.

python -m benchmarks.archive [--bytes 1e9] [--rounds 5]
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

import squisher
from benchmarks import harness


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


WORKS = {
    "copy the file": synced_copy,
    "safetensors: load_file, save_file": with_the_library,
    "squisher: load, save": lambda source, target: squisher.load(source).save(target),
}

if __name__ == "__main__":
    harness.compare_files("archive", WORKS, make, "source.safetensors", bytes=1e9)
