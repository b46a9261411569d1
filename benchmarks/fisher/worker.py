"""One method on one model, in a process of its own: checked against the definition, timed beside a plain training step.

Prints one JSON document. Started by `python -m benchmarks.fisher`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch

from ..harness import PeakMemory
from .methods import METHODS, Batches, Run, plain, reference
from .models import cases

CHECKED = 6  # examples that every method is checked on
FEWEST_ROUNDS = 3


def check(method: str, model_name: str, small: bool) -> dict[str, Any]:
    """Return the error relative to the largest entry of each parameter, against the definition in double precision."""
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


def measure(
    method: str, model_name: str, small: bool, rounds: int, seconds: float, settings: dict[str, int]
) -> dict[str, Any]:
    """Return the seconds of the method and of a plain step over the same batches, in turns, and the peak memory over one batch.

    What would take longer than `seconds` gets three rounds, then fewer batches; the plain step gets the same ones.
    """
    case = cases(small, **{k: v for k, v in settings.items() if k in ("length", "width", "classes")})[model_name]
    batches = case.batches(settings.get("examples"), settings.get("batch"))
    step, run = plain(case, case.model()), METHODS[method](case, case.model())
    with PeakMemory() as peak:  # first of all: later, freed memory would be used again and not be seen
        run(batches[:1])
    step(batches[:1])
    one, two = clock(run, batches[:1]), clock(run, batches[:2])
    each = max(two - one, one / 10) + clock(
        step, batches[:1]
    )  # a call also costs something once, however many batches there are
    if rounds * (one + each * len(batches)) > seconds:
        rounds = min(rounds, FEWEST_ROUNDS)
        batches = batches[: max(1, int((seconds / rounds - one) / each))]
    first, whole = [], []
    for number in range(rounds):
        turns = [("plain", step), (method, run)]
        turns = turns if number % 2 == 0 else turns[::-1]
        times = {name: (clock(work, batches[:1]), clock(work, batches)) for name, work in turns}
        first.append((times["plain"][0], times[method][0]))
        whole.append((times["plain"][1], times[method][1]))
    ratios = [taken / base for base, taken in whole]
    found = {
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "seconds": statistics.median(taken for _, taken in whole),
        "plain_seconds": statistics.median(base for base, _ in whole),
        "extra_mb": peak.extra_mb,
        "all_seconds": [round(taken, 4) for _, taken in whole],
        "all_plain_seconds": [round(base, 4) for base, _ in whole],
        "rounds": rounds,
        "batches": len(batches),
        "examples": sum(x.shape[0] for x, _ in batches),
    }
    if len(batches) > 1:
        # All batches but the first: what a call costs once (the proof) is not in it.
        rest = [(b - b1, t - t1) for (b, t), (b1, t1) in zip(whole, first, strict=True)]
        found["steady_ratio"] = statistics.median(t / b for b, t in rest)
        found["once_seconds"] = statistics.median(
            t1 - t / (len(batches) - 1) for (_, t), (_, t1) in zip(rest, first, strict=True)
        )
    return found


def clock(work: Run, batches: Batches) -> float:
    """Return the seconds that a function takes."""
    start = time.perf_counter()
    work(batches)
    return time.perf_counter() - start


def main() -> None:
    """Read the arguments, print the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", required=True, choices=list(METHODS))
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--settings", type=json.loads, default={})
    parser.add_argument("--skip-check", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    document: dict[str, Any] = {"method": arguments.method, "model": arguments.model}
    try:
        document |= measure(
            arguments.method,
            arguments.model,
            arguments.small,
            arguments.rounds,
            arguments.seconds,
            arguments.settings,
        )
        if not arguments.skip_check:
            document |= check(arguments.method, arguments.model, arguments.small)
    except Exception as error:  # a peer that does not run is a result
        document["failed"] = f"{type(error).__name__}: {str(error).strip()[:300]}"
    print(json.dumps(document))


if __name__ == "__main__":
    main()
