"""The k-th largest of many scores beside torch and numpy; and its growth, streamed from disk.

python -m benchmarks.topk [--size 3e8] [--rounds 3] [--growth 1e7 1e8 3e8 1e9]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks import harness
from squisher.order import Selection, threshold
from squisher.storage.safetensors import open_archive, save
from squisher.storage.tensors import CHUNK, chunks_of

PEERS = ("torch.topk", "torch.kthvalue", "torch.sort", "numpy.partition")
OURS = ("squisher: threshold", "squisher: threshold and marks")
SHARE = 0.1
LAYER = 1 << 24


def make(path: Path, size: int) -> None:
    """Scores as squared gradients have them: many orders of magnitude."""
    generator = np.random.default_rng(0)
    data = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(size,))
    for start in range(0, size, LAYER):
        stop = min(start + LAYER, size)
        noise = generator.standard_normal(stop - start, dtype=np.float32)
        data[start:stop] = noise * noise * 1e-9
    data.flush()


def kth(case: str, scores: torch.Tensor, k: int) -> float:
    """The k-th largest, each in its usual way."""
    if case == "torch.topk":
        return float(torch.topk(scores, k, sorted=False).values.min())
    if case == "torch.kthvalue":
        return float(torch.kthvalue(scores, scores.numel() - k + 1).values)
    if case == "torch.sort":
        return float(torch.sort(scores, descending=True).values[k - 1])
    if case == "numpy.partition":
        return float(np.partition(scores.numpy(), scores.numel() - k)[scores.numel() - k])
    sources = {"scores": lambda: iter(scores.split(CHUNK))}
    found = threshold(sources, k)
    if case == OURS[1]:
        chosen = Selection(found)
        marked = sum(int(chosen(piece).numpy().sum()) for piece in scores.split(CHUNK))
        if marked != k:
            raise SystemExit(f"{marked} marks instead of {k}")
    return found.value


class Random:
    """Layers of scores that are made while they are written, so that no file has to fit into memory."""

    def __init__(self, size: int) -> None:
        self.sizes = [min(LAYER, size - start) for start in range(0, size, LAYER)]

    def __iter__(self) -> Iterator[str]:
        return (f"layer.{number}.weight" for number in range(len(self.sizes)))

    def shape(self, name: str) -> torch.Size:
        """Of one layer."""
        return torch.Size([self.sizes[int(name.split(".")[1])]])

    def dtype(self, name: str) -> torch.dtype:
        """Of one layer."""
        return torch.float32

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[torch.Tensor]:
        """One layer in pieces."""
        number = int(name.split(".")[1])
        generator = np.random.default_rng(number)
        for start in range(0, self.sizes[number], size):
            count = min(size, self.sizes[number] - start)
            yield torch.from_numpy(generator.standard_normal(count, dtype=np.float32)).square_().mul_(1e-9)


def stream(path: Path) -> None:
    """Threshold and marks of a file, read piece by piece."""
    tensors, _ = open_archive(path)
    total = sum(tensors.shape(name).numel() for name in tensors)
    sources = {name: (lambda n=name: chunks_of(tensors, n)) for name in tensors}
    found = threshold(sources, int(SHARE * total))
    chosen = Selection(found)
    marked = sum(int(chosen(piece).numpy().sum()) for chunks in sources.values() for piece in chunks())
    if marked != int(SHARE * total):
        raise SystemExit(f"{marked} marks instead of {int(SHARE * total)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case")
    parser.add_argument("--file", type=Path)
    parser.add_argument("--size", type=float, default=3e8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--growth", type=float, nargs="*", default=[1e7, 3e7, 1e8, 3e8, 1e9])
    options = parser.parse_args()
    if options.case == "stream":
        harness.run_case(lambda: stream(options.file))
        return
    if options.case:
        # In memory before the clock starts, for everyone: this part is about selecting, not about reading.
        scores = torch.from_numpy(np.load(options.file))
        answer = []
        harness.run_case(lambda: answer.append(kth(options.case, scores, int(SHARE * scores.numel()))))
        print(answer[0], file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scores.npy"
        make(file, int(options.size))
        cases = harness.interleaved("benchmarks.topk", (*PEERS, *OURS), ["--file", str(file)], options.rounds)
        answers = {}
        for case in (*PEERS, *OURS):
            command = [sys.executable, "-m", "benchmarks.topk", "--case", case, "--file", str(file)]
            answers[case] = subprocess.run(command, capture_output=True, text=True, check=True).stderr.strip()
        file.unlink()
        growth = []
        for size in options.growth:
            path = Path(folder) / "scores.safetensors"
            save(path, Random(int(size)), {})
            found = harness.interleaved("benchmarks.topk", ("stream",), ["--file", str(path)], options.rounds)["stream"]
            growth.append({"scores": int(size), "nanoseconds_per_score": 1e9 * found["seconds"] / size, **found})
            path.unlink()
    best = min(PEERS, key=lambda case: cases[case]["seconds"])
    ours = cases[OURS[0]]
    document = {
        "scores": int(options.size), "share": SHARE, "rounds": options.rounds, "cases": cases, "all_agree": len(set(answers.values())) == 1,
        "best_peer": best, "times_faster_than_best": round(cases[best]["seconds"] / ours["seconds"], 2),
        "memory_of_best": round(ours["extra_mb"] / max(cases[best]["extra_mb"], 1e-9), 4),
        "growth_streamed": growth,
    }  # fmt: skip
    print(json.dumps({key: document[key] for key in ("all_agree", "times_faster_than_best", "memory_of_best")}))
    harness.write("topk", document)


if __name__ == "__main__":
    main()
