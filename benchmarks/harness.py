"""What every benchmark shares: cases in processes of their own, interleaved; time, anonymous memory, environment, JSON."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import runpy
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[1]
BEFORE = "f42dcd8"
"""The last commit before the package was arranged in rooms."""


@contextlib.contextmanager
def older(commit: str) -> Iterator[Path]:
    """Unpack the sources of a commit into a temporary folder; yield it."""
    with tempfile.TemporaryDirectory() as scratch:
        archive = subprocess.run(["git", "archive", commit, "src"], cwd=ROOT, capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", scratch], input=archive.stdout, check=True)
        yield Path(scratch)


def alone(source: Path, module: str, *arguments: str) -> Any:
    """Run a benchmark's module with the sources of one tree in a process of its own; return the JSON of its last line."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source / "src"), str(ROOT)])}
    run = [sys.executable, "-m", f"benchmarks.{module}", "--alone", *arguments]
    done = subprocess.run(run, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(run)}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def environment() -> dict[str, Any]:
    """Return the environment that numbers depend on, without host, path or date."""
    import numpy
    import safetensors
    import torch

    import squisher

    model = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), ""
    )
    return {
        "squisher": squisher.__version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "safetensors": safetensors.__version__,
        "python": platform.python_version(),
        "processor": model or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def command(arguments: Sequence[str]) -> None:
    """Run a command of squisher in this process, as `python -m squisher` does."""
    before, sys.argv = sys.argv, ["squisher", *arguments]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            runpy.run_module("squisher", run_name="__main__")
    except SystemExit as stopped:
        if stopped.code:
            raise
    finally:
        sys.argv = before


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process, without mapped files and the page cache."""
    for line in _lines("/proc/self/status"):
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


class PeakMemory:
    """The largest growth of anonymous memory inside a `with` block, sampled every two milliseconds."""

    def __enter__(self) -> PeakMemory:
        self.before = self.peak = anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(0.002):
            self.peak = max(self.peak, anonymous_bytes())

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, anonymous_bytes())

    @property
    def extra_mb(self) -> float:
        """Growth in megabytes."""
        return (self.peak - self.before) / 1e6


def run_case(work: Callable[[], object]) -> None:
    """Run one case in this process, and print its time and memory as JSON for `interleaved`."""
    with PeakMemory() as memory:
        start = time.perf_counter()
        work()
        seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "extra_mb": memory.extra_mb}))


def interleaved(module: str, cases: Sequence[str], arguments: Sequence[str], rounds: int) -> dict[str, dict[str, Any]]:
    """Run every case once a round, each in a process of its own; return medians, and all values behind them."""
    seen: dict[str, list[dict[str, float]]] = {case: [] for case in cases}
    for number in range(rounds):
        for case in cases:
            command = [sys.executable, "-m", module, "--case", case, *arguments]
            start = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{case} failed:\n{done.stderr}")
            values = json.loads(done.stdout.splitlines()[-1])
            values["process_seconds"] = time.perf_counter() - start
            seen[case].append(values)
            print(f"round {number + 1}: {case}: {values['seconds']:.2f} s, +{values['extra_mb']:.0f} MB", flush=True)
    return {
        case: {
            "seconds": statistics.median(r["seconds"] for r in runs),
            "process_seconds": statistics.median(r["process_seconds"] for r in runs),
            "extra_mb": max(r["extra_mb"] for r in runs),
            "all_seconds": [round(r["seconds"], 4) for r in runs],
        }
        for case, runs in seen.items()
    }


def compare_files(
    name: str,
    works: Mapping[str, Callable[[Path, Path], object]],
    make: Callable[[Path, int], None],
    source: str,
    **size: float,
) -> None:
    """Time ways to make one file of another, each in processes of its own, and write the result relative to the first way.

    Args:
        name: The benchmark's module and its result.
        works: The ways by name: functions of the source and the target.
        make: Writes a source of a given size.
        source: The file name of the source.
        **size: The unit of the size and its default.
    """
    ((unit, default),) = size.items()
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--case")
    parser.add_argument("--folder", type=Path)
    parser.add_argument(f"--{unit}", type=float, default=default)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.case:
        target = options.folder / "out.safetensors"
        target.unlink(missing_ok=True)
        run_case(lambda: works[options.case](options.folder / source, target))
        return
    count = int(getattr(options, unit))
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder) / source, count)
        cases = interleaved(f"benchmarks.{name}", list(works), ["--folder", folder], options.rounds)
    base = next(iter(cases.values()))["seconds"]
    for case in cases.values():
        case["relative_to_copy"] = round(case["seconds"] / base, 3)
    write(name, {unit: count, "rounds": options.rounds, "cases": cases})


def write(name: str, document: dict[str, Any]) -> Path:
    """Write a result with its environment into `benchmarks/results`."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({**document, "environment": environment()}, indent=2) + "\n")
    print(f"wrote {path.relative_to(RESULTS.parents[1])}")
    return path
