"""Reading the squared-gradient average out of a large AdamW state and writing it as an importance.

Beside what people do today (torch.load, with and without mapping) and beside the limit: reading the needed bytes and
writing them, with nothing in between.

python -m benchmarks.extract [--parameters 300e6] [--rounds 5]
"""

from __future__ import annotations

import argparse
import os
import struct
import tempfile
import zipfile
from pathlib import Path

import torch

import squisher
from benchmarks import harness

CASES = (
    "copy the needed bytes",
    "torch.load, then safetensors",
    "torch.load(mmap=True), then safetensors",
    "squisher.extract, as stored",
    "squisher.extract",
)


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
    """The limit: where the bytes are is taken as known, and one buffer carries them over."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--parameters", type=float, default=300e6)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.case:
        source, target = options.folder / "optimizer.pt", options.folder / "out.safetensors"
        target.unlink(missing_ok=True)
        extract = squisher.extract  # imported here: that is not what is measured
        works = {
            CASES[0]: lambda: copy_needed_bytes(source, target),
            CASES[1]: lambda: with_torch_load(source, target, mapped=False),
            CASES[2]: lambda: with_torch_load(source, target, mapped=True),
            CASES[3]: lambda: extract(source, bias_correction=False).save(target),
            CASES[4]: lambda: extract(source).save(target),
        }
        harness.run_case(works[options.case])
        return
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder) / "optimizer.pt", int(options.parameters))
        cases = harness.interleaved("benchmarks.extract", CASES, ["--folder", folder], options.rounds)
    base = cases[CASES[0]]["seconds"]
    for case in cases.values():
        case["relative_to_copy"] = round(case["seconds"] / base, 3)
    harness.write("extract", {"parameters": int(options.parameters), "rounds": options.rounds, "cases": cases})


if __name__ == "__main__":
    main()
