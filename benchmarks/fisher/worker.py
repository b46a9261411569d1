"""One method on one model, in a process of its own: checked against the definition, timed beside a plain training step.

Prints one JSON document. Started by `python -m benchmarks.fisher`.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch

from ..harness import PeakMemory
from .methods import METHODS, plain, reference
from .models import cases

CHECKED = 6  # examples that every method is checked on


def check(method: str, model_name: str, small: bool) -> dict[str, Any]:
    """Error relative to the largest entry of each parameter, against the definition in double precision."""
    case = cases(small)[model_name]
    batches = case.batches(CHECKED, CHECKED - 2)
    found = METHODS[method](case, case.model())(batches)
    if found is None or "sampled" in method or "batch" in method:
        return {"max_error": None}
    expected = reference(case, case.model(), batches, exact="exact" in method)
    absent = [name for name in expected if name not in found]
    errors = {}
    for name, value in expected.items():
        if name in found and float(value.max()) > 1e-12 * max(float(v.max()) for v in expected.values()):
            difference = (found[name].detach().double() - value).abs().max()
            errors[name] = float(difference / value.max())
    worst = max(errors, key=lambda n: errors[n]) if errors else None
    return {"max_error": None if worst is None else errors[worst], "worst": worst, "absent": absent}


def measure(method: str, model_name: str, small: bool, rounds: int, settings: dict[str, int]) -> dict[str, Any]:
    """Seconds of the method and of a plain step over the same batches, in turns; peak memory over one batch."""
    case = cases(small, **{k: v for k, v in settings.items() if k in ("length", "width", "classes")})[model_name]
    batches = case.batches(settings.get("examples"), settings.get("batch"))
    step, run = plain(case, case.model()), METHODS[method](case, case.model())
    with PeakMemory() as peak:  # first of all: later, freed memory would be used again and not be seen
        run(batches[:1])
    step(batches[:1])
    times: dict[str, list[float]] = {"plain": [], method: []}
    for _ in range(rounds):
        for name, work in (("plain", step), (method, run)):
            start = time.perf_counter()
            work(batches)
            times[name].append(time.perf_counter() - start)
    middle = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
    return {
        "seconds": middle[method],
        "plain_seconds": middle["plain"],
        "ratio": middle[method] / middle["plain"],
        "extra_mb": peak.extra_mb,
        "all_seconds": [round(t, 4) for t in times[method]],
        "all_plain_seconds": [round(t, 4) for t in times["plain"]],
        "examples": sum(x.shape[0] for x, _ in batches),
    }


def main() -> None:
    """Read the arguments, print the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", required=True, choices=list(METHODS))
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--settings", type=json.loads, default={})
    parser.add_argument("--skip-check", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    document: dict[str, Any] = {"method": arguments.method, "model": arguments.model}
    try:
        if not arguments.skip_check:
            document |= check(arguments.method, arguments.model, arguments.small)
        document |= measure(arguments.method, arguments.model, arguments.small, arguments.rounds, arguments.settings)
    except Exception as error:  # a peer that does not run is a result
        document["failed"] = f"{type(error).__name__}: {str(error).strip()[:300]}"
    print(json.dumps(document))


if __name__ == "__main__":
    main()
