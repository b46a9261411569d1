"""How long extract, merge and top-k take beside an older commit: the same files, in turn, each in a process of its own.

python -m benchmarks.before_after [--before COMMIT] [--size 3e7] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from .harness import BEFORE, ROOT, alone, older, write

CASES = ("extract, names recorded", "extract", "merge fisher", "mask top-k", "prune")


def make(folder: Path, size: int) -> None:
    """Write two models of `size` weights with their importances, and a checkpoint of one."""
    import torch
    from safetensors.torch import save_file

    rows = 1 << 10
    names = [f"layers.{k}.weight" for k in range(12)]
    shape = (rows, size // (12 * rows))
    for seed, name in enumerate(("a", "b")):
        generator = torch.Generator().manual_seed(seed)
        (folder / name).mkdir()
        weights = {n: torch.randn(shape, generator=generator) for n in names}
        values = {n: torch.randn(shape, generator=generator).square() * 1e-9 for n in names}
        save_file(weights, folder / name / "model.safetensors", {"format": "pt"})
        save_file(values, folder / name / "values.safetensors")
    model = torch.nn.ModuleDict(
        {"layers": torch.nn.ModuleList(torch.nn.Linear(*shape[::-1], bias=False) for _ in names)}
    )
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-4
    for listed, name in ((model.parameters(), "extract.pt"), (model.named_parameters(), "extract, names recorded.pt")):
        optimizer = torch.optim.AdamW(listed)
        optimizer.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / name)


def prepared(case: str, folder: Path) -> Callable[[], object]:
    """Return the call that is timed; everything is imported before."""
    import squisher

    out = folder / "out.safetensors"
    if case.startswith("extract"):
        return lambda: squisher.extract(folder / f"{case}.pt").save(out)
    from safetensors.torch import load_file

    measured = [load_file(folder / name / "values.safetensors") for name in ("a", "b")]
    a, b = (squisher.Importance(values, kind="fisher", unit="example", examples=100) for values in measured)
    weights = [load_file(folder / name / "model.safetensors") for name in ("a", "b")]
    if case == "merge fisher":
        return lambda: dict(squisher.merge.fisher(weights, [a, b]))
    if case == "mask top-k":
        return lambda: squisher.mask.top_k(a, keep=0.01).save(out)
    return lambda: dict(squisher.prune.weights(weights[0], a, sparsity=0.75))


def timed(case: str, folder: Path) -> float:
    """Return the seconds of one call, after one that is not counted."""
    call = prepared(case, folder)
    call()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


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
        seconds: dict[str, dict[str, list[float]]] = {case: {tree: [] for tree in trees} for case in CASES}
        for _ in range(options.rounds):
            for case in CASES:
                for tree, path in trees.items():
                    seconds[case][tree].append(alone(path, "before_after", case, "--folder", scratch))
    found = {
        case: {
            **{tree: {"seconds": statistics.median(times), "all": times} for tree, times in both.items()},
            "ratio": statistics.median(a / b for a, b in zip(both["after"], both["before"], strict=True)),
        }
        for case, both in seconds.items()
    }
    write(
        "before_after",
        {"before": options.before, "weights": int(options.size), "rounds": options.rounds, "cases": found},
    )
    for case, both in found.items():
        print(
            f"{case}: {both['before']['seconds']:.2f} s -> {both['after']['seconds']:.2f} s, ratio {both['ratio']:.2f}"
        )


if __name__ == "__main__":
    main()
