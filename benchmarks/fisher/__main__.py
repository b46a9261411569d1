"""Cost of the Fisher diagonal relative to a plain training step, beside the loop, vmap and the peers.

    python -m benchmarks.fisher                                  ours, the loop, vmap
    python -m benchmarks.fisher --peers-python PEERS/bin/python  the peers too, in an environment of their own:
                                                                 pip install torch==<the same> numpy backpack-for-pytorch
                                                                 curvlinops-for-pytorch nngeometry laplace-torch opacus asdfghjkl
    python -m benchmarks.fisher --small --seconds 2              a quick look at whether everything runs

Every method runs in a process of its own, in turns with a plain forward and backward pass over the same batches; what is compared
is the median of the ratios of the turns. Slow methods get fewer turns and batches (`--seconds`), the plain pass the same ones.
Every result is checked against the definition. A run that was stopped goes on where it was (`results/fisher.part.json`); `--fresh`
starts again. Run it alone on the machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..harness import RESULTS, write
from .figure import draw
from .methods import OURS, PEERS
from .models import CASES

GROWTH = {
    "examples, MLP": ("mlp", "squisher data", [{"examples": n} for n in (512, 2048, 8192)]),
    "examples": ("encoder", "squisher data", [{"examples": n} for n in (16, 64, 256)]),
    "batch size": ("encoder", "squisher data", [{"examples": 64, "batch": n} for n in (4, 16, 64)]),
    "sequence length": ("encoder", "squisher data", [{"examples": 64, "length": n} for n in (16, 64, 128)]),
    "width": ("encoder", "squisher data", [{"examples": 64, "width": n} for n in (192, 384, 768)]),
    "classes": ("encoder", "squisher exact", [{"examples": 32, "classes": n} for n in (2, 10, 30)]),
}
"""How the cost grows."""
WHAT = (
    "time of a call relative to a plain forward and backward pass over the same batches (median of turns); steady_ratio is without "
    "the first batch, once_seconds what a call costs once; extra_mb is the peak of a first call with one batch"
)


class Work:
    """Finished cases, kept in a file from one start to the next."""

    def __init__(self, path: Path, fresh: bool):
        self.path = path
        self.done: dict[str, Any] = json.loads(path.read_text()) if path.exists() and not fresh else {}

    def result(self, python: str, model: str, method: str, options: list[str]) -> dict[str, Any]:
        """Measure one method on one model in a process of its own, or return the known result."""
        key = " ".join([model, method, *options])
        if key not in self.done:
            self.done[key] = _worker(python, model, method, options)
            self.path.parent.mkdir(exist_ok=True)
            self.path.write_text(json.dumps(self.done, indent=1) + "\n")
        return self.done[key]


def _worker(python: str, model: str, method: str, options: list[str]) -> dict[str, Any]:
    command = [python, "-m", "benchmarks.fisher.worker", "--method", method, "--model", model, *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    except subprocess.TimeoutExpired:
        return {"method": method, "model": model, "failed": "took longer than 15 minutes"}
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return {"method": method, "model": model, "failed": last[0][:300]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def show(result: dict[str, Any]) -> None:
    """Print one line on the terminal."""
    name = f"{result['model']:8} {result['method']:24}"
    if "failed" in result:
        print(f"{name} fails: {result['failed'][:90]}", flush=True)
        return
    error = result.get("max_error")
    print(
        f"{name} {result['ratio']:7.2f}× ({result['lowest']:.2f} to {result['highest']:.2f}; steady "
        f"{result.get('steady_ratio', float('nan')):.2f})  +{result['extra_mb']:6.0f} MB"
        + ("" if error is None else f"  error {error:.0e}"),
        flush=True,
    )


def main() -> None:
    """Run everything and write `benchmarks/results/fisher.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--methods", default=None, help="comma-separated; by default all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=40.0, help="about how long a case may take")
    parser.add_argument(
        "--peer-seconds", type=float, default=10.0, help="the same for all but the empirical Fisher, and for growth"
    )
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--peers-python", default=None)
    parser.add_argument("--no-growth", action="store_true")
    parser.add_argument("--fresh", action="store_true", help="forget what a stopped run has found")
    parser.add_argument("--out", default="fisher")
    arguments = parser.parse_args()
    chosen = arguments.methods.split(",") if arguments.methods else ["plain", "loop", "vmap", *OURS, *PEERS]
    work = Work(RESULTS / f"{arguments.out}.part.json", arguments.fresh)
    shared = ["--rounds", str(arguments.rounds), *(["--small"] if arguments.small else [])]
    options, brief = ([*shared, "--seconds", str(s)] for s in (arguments.seconds, arguments.peer_seconds))
    results = []
    for model in arguments.models.split(","):
        for method in chosen:
            if (method in PEERS and arguments.peers_python is None) or (
                method == "squisher exact" and model == "decoder"
            ):
                continue
            python = arguments.peers_python if method in PEERS else sys.executable
            results.append(work.result(python, model, method, options if method.startswith("squisher data") else brief))
            show(results[-1])
    growth = []
    for what, (model, method, steps) in ({} if arguments.no_growth else GROWTH).items():
        for settings in steps:
            more = ["--skip-check", "--settings", json.dumps(settings)]
            found = work.result(sys.executable, model, method, brief + more)
            growth.append({"with": what, "settings": settings, **found})
            print(f"{what} {settings}: ", end="")
            show(found)
    _relate(results)
    spent = {"what": WHAT, "seconds": arguments.seconds, "peer_seconds": arguments.peer_seconds}
    draw(write(arguments.out, {**spent, "results": results}))
    if growth:
        write(f"{arguments.out}_growth", {**spent, "growth": growth})
    work.path.unlink(missing_ok=True)


def _relate(results: list[dict[str, Any]]) -> None:
    """Say memory relative to plain training's, and what exact costs relative to the empirical Fisher of the same model."""
    found = {(r["model"], r["method"]): r for r in results if "ratio" in r}
    for (model, method), result in found.items():
        plain, data = found.get((model, "plain")), found.get((model, "squisher data"))
        if plain is not None and plain["extra_mb"]:
            result["memory_ratio"] = result["extra_mb"] / plain["extra_mb"]
        if method == "squisher exact" and data is not None:
            result["ratio_to_data"] = result["ratio"] / data["ratio"]


if __name__ == "__main__":
    main()
