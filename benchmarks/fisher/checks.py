"""What the check of every batch costs: `python -m benchmarks.fisher.checks`.

A call is run under Python's profiler. What counts is the time spent in the functions that follow the examples and look through the
graph (their own lines, not the operations of the model that they call), relative to the whole call. The profiler slows down
Python and not the kernels, so the true share is smaller.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
from typing import Any

import torch

import squisher

from ..harness import write
from .models import cases

ROUNDS, BATCHES = 3, 4
FILES = ("measure/examples.py", "measure/placements.py", "measure/indexing.py", "measure/capture.py")


def share(name: str) -> dict[str, Any]:
    """Return the share of the time that the check takes in one case, later batches included."""
    case = cases()[name]
    model, batches = case.model(), case.batches()[:BATCHES]
    found = []
    squisher.fisher(model, batches[:2], likelihood=case.likelihood)
    for _ in range(ROUNDS):
        profiler = cProfile.Profile()
        profiler.runcall(squisher.fisher, model, batches, likelihood=case.likelihood)
        stats = pstats.Stats(profiler)
        own = sum(row[2] for key, row in stats.stats.items() if key[0].endswith(FILES))  # type: ignore[attr-defined]
        found.append(own / stats.total_tt)  # type: ignore[attr-defined]
    return {"model": name, "batches": len(batches), "share": statistics.median(found), "all": found}


def main() -> None:
    """Measure every case and write the results."""
    torch.manual_seed(0)
    results = [share(name) for name in ("mlp", "cnn", "encoder", "decoder")]
    for result in results:
        print(f"{result['model']}: {100 * result['share']:.2f}% of a call of {result['batches']} batches")
    write(
        "fisher_checks",
        {"what": "share of a call that the check of every batch takes, under the profiler", "results": results},
    )


if __name__ == "__main__":
    main()
