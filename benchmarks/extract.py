"""Reading the squared-gradient average out of a large AdamW state and writing it as an importance.

Beside what people do today (torch.load, with and without mapping) and beside the limit: reading the needed bytes and
writing them, with nothing in between.

python -m benchmarks.extract [--parameters 300e6] [--rounds 5]
"""

from __future__ import annotations

import os
import struct
import zipfile
from functools import partial
from pathlib import Path

import torch

import squisher
from benchmarks import harness


def make(path: Path, parameters: int) -> None:
    torch.manual_seed(0)
    shapes = [(2048, 2048)] * max(1, parameters // 2048**2)
    state = {
        k: {"step": torch.tensor(1000.0), "exp_avg": torch.randn(shape) * 1e-4, "exp_avg_sq": torch.rand(shape) * 1e-8}
        for k, shape in enumerate(shapes)
    }
    group = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).state_dict()["param_groups"][0]
    names = [f"layers.{k}.weight" for k in range(len(shapes))]
    torch.save({"state": state, "param_groups": [{**group, "params": list(state), "param_names": names}]}, path)


def where_they_are(source: Path) -> list[tuple[int, int]]:
    """Return offset and length of each exp_avg_sq: the third tensor of every state, uncompressed in a zip archive."""
    found = []
    with zipfile.ZipFile(source) as archive, open(source, "rb") as file:
        entries = {int(e.filename.rpartition("/")[2]): e for e in archive.infolist() if "/data/" in e.filename}
        for number in range(2, len(entries), 3):
            file.seek(entries[number].header_offset + 26)
            name, extra = struct.unpack("<HH", file.read(4))
            found.append((entries[number].header_offset + 30 + name + extra, entries[number].file_size))
    return found


def copy_needed_bytes(source: Path, target: Path) -> None:
    """Copy the bytes from their known places through one buffer: the limit."""
    ranges = where_they_are(source)
    buffer = memoryview(bytearray(1 << 20))
    with open(source, "rb", buffering=0) as file, open(target, "wb", buffering=0) as out:
        for offset, length in ranges:
            file.seek(offset)
            left = length
            while left:
                count = file.readinto(buffer[: min(left, len(buffer))])
                out.write(buffer[:count])
                left -= count
        os.fsync(out.fileno())


def with_torch_load(source: Path, target: Path, mapped: bool) -> None:
    from safetensors.torch import save_file

    state = torch.load(source, mmap=mapped, weights_only=True)
    names = state["param_groups"][0]["param_names"]
    save_file({names[k]: entry["exp_avg_sq"] for k, entry in state["state"].items()}, target)
    with open(target, "rb") as file:
        os.fsync(file.fileno())


extract = squisher.extract  # imported here, because importing is not measured
WORKS = {
    "copy the needed bytes": copy_needed_bytes,
    "torch.load, then safetensors": partial(with_torch_load, mapped=False),
    "torch.load(mmap=True), then safetensors": partial(with_torch_load, mapped=True),
    "squisher.extract, as stored": lambda source, target: extract(source, bias_correction=False).save(target),
    "squisher.extract": lambda source, target: extract(source).save(target),
}

if __name__ == "__main__":
    harness.compare_files("extract", WORKS, make, "optimizer.pt", parameters=300e6)
