"""How long extract, fisher, merge and top-k take beside an older commit: the same files, in turn, each in a process of its own.

Beside the seconds of the clock are those of the processor, which other work on the machine spoils less; ratios are of both.

python -m benchmarks.before_after [--before COMMIT] [--size 3e7] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from .harness import BEFORE, ROOT, alone, older, write

CASES = ("extract, names recorded", "extract", "fisher", "merge fisher", "mask top-k", "prune")


def make(folder: Path, size: int) -> None:
    """Write two models of `size` weights with their importances, and a checkpoint of one."""
    import torch
    from safetensors.torch import save_file

    narrow = 1 << 10
    wide = size // (12 * narrow)
    names = [f"layers.{k}.weight" for k in range(12)]
    torch.manual_seed(0)
    layers = [torch.nn.Linear(*pair, bias=False) for pair in [(narrow, wide), (wide, narrow)] * 6]
    for seed, name in enumerate(("a", "b")):
        generator = torch.Generator().manual_seed(seed)
        (folder / name).mkdir()
        shapes = {n: layer.weight.shape for n, layer in zip(names, layers, strict=True)}
        weights = {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}
        values = {n: torch.randn(shape, generator=generator).square() * 1e-9 for n, shape in shapes.items()}
        save_file(weights, folder / name / "model.safetensors", {"format": "pt"})
        save_file(values, folder / name / "values.safetensors")
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)})
    outputs = torch.randn(32, narrow)
    for layer in layers:
        outputs = torch.relu(layer(outputs))
    (
        outputs.square().sum() * 1e6
    ).backward()  # real gradients: without them the values prove no name, and extract refuses
    for listed, name in ((model.parameters(), "extract.pt"), (model.named_parameters(), "extract, names recorded.pt")):
        optimizer = torch.optim.AdamW(listed, lr=1e-6)
        optimizer.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / name)


def prepared(case: str, folder: Path) -> Callable[[], object]:
    """Return the call that is timed; everything is imported before."""
    import squisher

    out = folder / "out.safetensors"
    if case.startswith("extract"):
        return lambda: squisher.extract(folder / f"{case}.pt").save(out)
    if case == "fisher":
        import torch

        torch.manual_seed(0)
        sizes = [256, 1024, 1024, 1024, 10]
        model = torch.nn.Sequential(*(torch.nn.Linear(*pair) for pair in pairwise(sizes)))
        batches = [(torch.randn(32, 256), torch.randint(0, 10, (32,))) for _ in range(8)]
        return lambda: squisher.fisher(model, batches)
    from safetensors.torch import load_file

    measured = [load_file(folder / name / "values.safetensors") for name in ("a", "b")]
    a, b = (squisher.Importance(values, kind="fisher", unit="example", examples=100) for values in measured)
    weights = [load_file(folder / name / "model.safetensors") for name in ("a", "b")]
    if case == "merge fisher":
        return lambda: dict(squisher.merge.fisher(weights, [a, b]))
    if case == "mask top-k":
        return lambda: squisher.mask.top_k(a, keep=0.01).save(out)
    return lambda: dict(squisher.prune.weights(weights[0], a, sparsity=0.75))


def timed(case: str, folder: Path) -> dict[str, float]:
    """Return the seconds of one call, after one that is not counted."""
    call = prepared(case, folder)
    call()
    start, worked = time.perf_counter(), time.process_time()
    call()
    return {"seconds": time.perf_counter() - start, "processor_seconds": time.process_time() - worked}


def main() -> None:
    """Time both in turn, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", default=BEFORE)
    parser.add_argument("--size", type=float, default=3e7)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(timed(options.alone, options.folder)))
        return
    with older(options.before) as source, tempfile.TemporaryDirectory() as scratch:
        trees = {"before": source, "after": ROOT}
        make(Path(scratch), int(options.size))
        runs: dict[str, dict[str, list[dict[str, float]]]] = {case: {tree: [] for tree in trees} for case in CASES}
        for _ in range(options.rounds):
            for case in CASES:
                for tree, path in trees.items():
                    runs[case][tree].append(alone(path, "before_after", case, "--folder", scratch))
    found = {
        case: {kind: _compared(both, kind) for kind in ("seconds", "processor_seconds")} for case, both in runs.items()
    }
    write(
        "before_after",
        {"before": options.before, "weights": int(options.size), "rounds": options.rounds, "cases": found},
    )
    for case, kinds in found.items():
        for kind, both in kinds.items():
            print(f"{case}, {kind}: {both['before']:.2f} -> {both['after']:.2f}, ratio {both['ratio']:.2f}")


def _compared(both: dict[str, list[dict[str, float]]], kind: str) -> dict[str, Any]:
    """Return the medians, the median of the ratios within a round, and all the values behind them."""
    values = {tree: [run[kind] for run in runs] for tree, runs in both.items()}
    ratios = [after / before for after, before in zip(values["after"], values["before"], strict=True)]
    medians = {tree: statistics.median(v) for tree, v in values.items()}
    return {**medians, "ratio": statistics.median(ratios), "all": values}


if __name__ == "__main__":
    main()
