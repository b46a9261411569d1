"""Cost of the Fisher diagonal relative to a plain training step, beside the loop, vmap and the peers.

    python -m benchmarks.fisher                                  ours, the loop, vmap
    python -m benchmarks.fisher --peers-python PEERS/bin/python  the peers too, in an environment of their own:
                                                                 pip install torch==<the same> numpy backpack-for-pytorch
                                                                 curvlinops-for-pytorch nngeometry laplace-torch opacus asdfghjkl
    python -m benchmarks.fisher --small                          a quick look at whether everything runs

Every method runs in a process of its own, in turns with a plain forward and backward pass over the same batches; what is compared
is the ratio of the medians. Every result is checked against the definition first. Run it alone on the machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

from ..harness import write
from .figure import draw
from .methods import OURS, PEERS
from .models import CASES

# Examples per method where the case's own number would take too long.
SLOW = {
    "loop": {"mlp": 512, "cnn": 32, "encoder": 32, "decoder": 16},
    "vmap": {"mlp": 512, "cnn": 32, "encoder": 32, "decoder": 16},
}
GROWTH = {
    "examples": ("squisher data", [{"examples": n} for n in (16, 64, 256)]),
    "batch size": ("squisher data", [{"examples": 64, "batch": n} for n in (4, 16, 64)]),
    "sequence length": ("squisher data", [{"examples": 64, "length": n} for n in (16, 64, 128)]),
    "width": ("squisher data", [{"examples": 64, "width": n} for n in (192, 384, 768)]),
    "classes": ("squisher exact", [{"examples": 32, "classes": n} for n in (2, 10, 30)]),
}
"""How the cost of the encoder grows."""


def worker(
    python: str, method: str, model: str, rounds: int, small: bool, settings: dict[str, int], *more: str
) -> dict[str, Any]:
    """One method on one model in its own process."""
    command = [python, "-m", "benchmarks.fisher.worker", "--method", method, "--model", model, "--rounds", str(rounds)]
    command += ["--settings", json.dumps(settings), *(["--small"] if small else []), *more]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3600)
    except subprocess.TimeoutExpired:
        return {"method": method, "model": model, "failed": "took longer than an hour"}
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return {"method": method, "model": model, "failed": last[0][:300]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def show(result: dict[str, Any]) -> None:
    """One line on the terminal."""
    name = f"{result['model']:8} {result['method']:24}"
    if "failed" in result:
        print(f"{name} fails: {result['failed'][:90]}", flush=True)
        return
    error = result.get("max_error")
    print(
        f"{name} {result['ratio']:7.2f}×  +{result['extra_mb']:6.0f} MB"
        + ("" if error is None else f"  error {error:.0e}"),
        flush=True,
    )


def main() -> None:
    """Run everything and write `benchmarks/results/fisher.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--methods", default=None, help="comma-separated; by default all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--peers-python", default=None)
    parser.add_argument("--no-growth", action="store_true")
    parser.add_argument("--out", default="fisher")
    arguments = parser.parse_args()
    chosen = arguments.methods.split(",") if arguments.methods else ["plain", "loop", "vmap", *OURS, *PEERS]
    results = []
    for model in arguments.models.split(","):
        for method in chosen:
            if (method in PEERS and arguments.peers_python is None) or (
                method == "squisher exact" and model == "decoder"
            ):
                continue
            python = arguments.peers_python if method in PEERS else sys.executable
            examples = {} if arguments.small else {"examples": SLOW.get(method, {}).get(model)}
            settings = {k: v for k, v in examples.items() if v}
            results.append(worker(python, method, model, arguments.rounds, arguments.small, settings))
            show(results[-1])
    growth = []
    for what, (method, steps) in ({} if arguments.no_growth else GROWTH).items():
        for settings in steps:
            more = ("--skip-check",)
            found = worker(sys.executable, method, "encoder", arguments.rounds, arguments.small, settings, *more)
            growth.append({"with": what, "settings": settings, **found})
            print(f"{what} {settings}: ", end="")
            show(found)
    for result in results:
        # What exact costs is said relative to the empirical Fisher of the same model.
        data = [r for r in results if r["model"] == result["model"] and r["method"] == "squisher data" and "ratio" in r]
        if result["method"] == "squisher exact" and data and "ratio" in result:
            result["ratio_to_data"] = result["ratio"] / data[0]["ratio"]
    what = "time relative to a plain forward and backward pass over the same batches"
    draw(write(arguments.out, {"what": what, "results": results, "growth": growth}))


if __name__ == "__main__":
    main()
