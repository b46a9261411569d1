"""The largest tenth of many scores, marked, beside torch and numpy, which only find the smallest of them; streamed from disk too.

python -m benchmarks.topk [--size 3e8] [--rounds 3] [--growth 1e7 1e8 3e8 1e9]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import squisher
from benchmarks import harness

PEERS = ("torch.topk", "torch.kthvalue", "torch.sort", "numpy.partition")
OURS = "squisher.mask.top_k"
SHARE = 0.1
LAYER = 1 << 24
top_k = squisher.mask.top_k  # imported here: that is not what is measured


def make(path: Path, size: int) -> None:
    """Write scores like squared gradients, over many orders of magnitude."""
    generator = np.random.default_rng(0)
    data = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(size,))
    for start in range(0, size, LAYER):
        stop = min(start + LAYER, size)
        noise = generator.standard_normal(stop - start, dtype=np.float32)
        data[start:stop] = noise * noise * 1e-9
    data.flush()


def kth(case: str, scores: torch.Tensor, k: int) -> float:
    """Return the k-th largest score, found as the case says."""
    if case == "torch.topk":
        return float(torch.topk(scores, k, sorted=False).values.min())
    if case == "torch.kthvalue":
        return float(torch.kthvalue(scores, scores.numel() - k + 1).values)
    if case == "torch.sort":
        return float(torch.sort(scores, descending=True).values[k - 1])
    if case == "numpy.partition":
        return float(np.partition(scores.numpy(), scores.numel() - k)[scores.numel() - k])
    raise SystemExit(f"There is no case {case}.")


def marked(scores: Mapping[str, torch.Tensor]) -> squisher.mask.Mask:
    """Return the marks of the largest tenth."""
    mask = top_k(scores, keep=SHARE)
    if mask.kept != int(SHARE * mask.total):
        raise SystemExit(f"{mask.kept} marks instead of {int(SHARE * mask.total)}")
    return mask


class Random(Mapping[str, torch.Tensor]):
    """Layers of scores that are made while they are written, so that no file has to fit into memory."""

    def __init__(self, size: int) -> None:
        self.sizes = [min(LAYER, size - start) for start in range(0, size, LAYER)]

    def __iter__(self) -> Iterator[str]:
        return (f"layer.{number}.weight" for number in range(len(self.sizes)))

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, name: str) -> torch.Tensor:
        return torch.cat(list(self.chunks(name)))

    def shape(self, name: str) -> torch.Size:
        """Return the scores of one layer."""
        return torch.Size([self.sizes[int(name.split(".")[1])]])

    def dtype(self, name: str) -> torch.dtype:
        """Return the scores of one layer."""
        return torch.float32

    def chunks(self, name: str, size: int = 1 << 18) -> Iterator[torch.Tensor]:
        """Yield one layer in chunks."""
        number = int(name.split(".")[1])
        generator = np.random.default_rng(number)
        for start in range(0, self.sizes[number], size):
            count = min(size, self.sizes[number] - start)
            yield torch.from_numpy(generator.standard_normal(count, dtype=np.float32)).square_().mul_(1e-9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case")
    parser.add_argument("--file", type=Path)
    parser.add_argument("--size", type=float, default=3e8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--growth", type=float, nargs="*", default=[1e7, 3e7, 1e8, 3e8, 1e9])
    options = parser.parse_args()
    if options.case == "stream":
        harness.run_case(lambda: marked(squisher.load(options.file)))
        return
    if options.case:
        # In memory before the clock starts, for everyone: this part is about selecting, not about reading.
        scores = torch.from_numpy(np.load(options.file))
        answer: list[Any] = []
        if options.case == OURS:
            harness.run_case(lambda: answer.append(marked({"scores": scores})["scores"]))
            print(float(scores[answer[0]].min()), file=sys.stderr)
        else:
            harness.run_case(lambda: answer.append(kth(options.case, scores, int(SHARE * scores.numel()))))
            print(answer[0], file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scores.npy"
        make(file, int(options.size))
        cases = harness.interleaved("benchmarks.topk", (*PEERS, OURS), ["--file", str(file)], options.rounds)
        answers = {}
        for case in (*PEERS, OURS):
            command = [sys.executable, "-m", "benchmarks.topk", "--case", case, "--file", str(file)]
            answers[case] = subprocess.run(command, capture_output=True, text=True, check=True).stderr.strip()
        file.unlink()
        growth = []
        for size in options.growth:
            path = Path(folder) / "scores.safetensors"
            squisher.Importance(Random(int(size))).save(path)
            found = harness.interleaved("benchmarks.topk", ("stream",), ["--file", str(path)], options.rounds)["stream"]
            growth.append({"scores": int(size), "nanoseconds_per_score": 1e9 * found["seconds"] / size, **found})
            path.unlink()
    best = min(PEERS, key=lambda case: cases[case]["seconds"])
    ours = cases[OURS]
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
