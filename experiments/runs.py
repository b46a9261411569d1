"""How an experiment runs: small units of work, each kept as JSON when done, so that a killed run goes on where it was.

A setting is a module with

    CONFIGS: dict[str, dict]                        one a scale; JSON values only; `seeds` is the default number of seeds
    stages(config, seeds) -> list[list[Unit]]       what is to be done; units of a stage may run side by side,
                                                    later stages may read the results of earlier ones
    <functions>(run: Run, **arguments) -> dict      the work; what a unit's `call` names
    scores(results) -> list[Score]                  the comparison, from all units' results by key
    right(results) -> Right                         if all seeds share few test rows: which of them were right

and nothing else is asked of it. Everything that costs minutes and is used twice goes through `Run.cached`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import json
import multiprocessing
import os
import pickle
import platform
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import squisher

__all__ = ["Right", "Run", "Score", "Unit", "execute", "seed_of"]

Right = dict[tuple[str, str, int], list[str]]
"""By case, method and seed: for every task of a case, a 1 or a 0 for each test row; the same rows for every seed."""


@dataclass(frozen=True)
class Unit:
    """One piece of work.

    Attributes:
        key: Names its result, and says what it is: "search/fisher/1e5", "seed-3/squisher".
        call: The function of the setting's module that does it.
        arguments: Its arguments; JSON values only.
    """

    key: str
    call: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Score:
    """One measured value of one method on one case by one seed.

    Attributes:
        case: The task, level or benchmark: a row of a table.
        method: "fisher", "squisher", the baseline's name, or a variant of these: a column.
        seed: The seed; differences between methods are taken within a seed.
        value: The value.
        metric: What it is.
    """

    case: str
    method: str
    seed: int
    value: float
    metric: str = "accuracy"


@dataclass(frozen=True)
class Run:
    """Where a setting finds its configuration, its data and what was done before."""

    setting: str
    scale: str
    config: dict[str, Any]
    data: Path | None
    out: Path

    def result(self, key: str) -> dict[str, Any]:
        """Return the result of a unit of an earlier stage."""
        return _read(self._file(key))["result"]

    def data_folder(self, name: str) -> Path:
        """Return a folder of data; exit with a message if there is none."""
        if self.data is None:
            raise SystemExit(f"{self.setting} at scale {self.scale} needs --data, the folder that holds {name}/.")
        return self.data / name

    def cached(self, name: str, make: Callable[[], Any]) -> Any:
        """Return the result of `make` (tensors, state dicts, lists, numbers), which is kept in the output folder."""
        path = self.out / "cache" / f"{name}.pt"
        kept = _kept(path)
        if kept:
            return kept[0]
        with _only_one(path):
            kept = _kept(path)  # made by another process meanwhile
            if kept:
                return kept[0]
            value = make()
            temporary = path.with_name(f"{path.name}.{os.getpid()}")
            torch.save(value, temporary)
            temporary.replace(path)
        return value

    def _file(self, key: str) -> Path:
        return self.out / "units" / f"{self.setting}-{self.scale}" / f"{key}.json"


def seed_of(key: str) -> int:
    """Return the seed of a unit whose key begins with "seed-N"."""
    return int(key.partition("/")[0].removeprefix("seed-"))


def environment() -> dict[str, Any]:
    """Return the environment that numbers depend on, without host, path or date."""
    return {
        "squisher": squisher.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads_per_run": 1,
    }


def execute(
    setting: str,
    scale: str,
    *,
    seeds: int | None,
    data: Path | None,
    out: Path,
    jobs: int,
    say: Callable[[str], None],
    known: Path | None = None,
    stages: int | None = None,
    only: str | None = None,
    again: str | None = None,
) -> Path:
    """Run the missing units of a setting, and write its document after every unit.

    Args:
        setting: The module's name.
        scale: One of the module's `CONFIGS`.
        seeds: How many; None for the configuration's own number.
        data: The folder of the data sets.
        out: Where units, caches and the document go.
        jobs: How many units at a time, each on one thread.
        say: Takes a line of progress.
        known: A folder of documents, whole or partial, whose units are taken over where `out` has none.
        stages: How many stages; None for all.
        only: A regular expression: of the units that are missing, only those whose key it finds.
        again: A regular expression: run only these units, and do not take them over.

    Returns:
        The path of the document.
    """
    module = importlib.import_module(f"experiments.{setting}")
    if scale not in module.CONFIGS:
        raise SystemExit(f"{setting} has no scale {scale!r}; it has {', '.join(module.CONFIGS)}.")
    config = dict(module.CONFIGS[scale])
    count = config.pop("seeds") if seeds is None else seeds
    config.pop("seeds", None)
    run = Run(setting, scale, config, data, out)
    planned = module.stages(config, range(1, count + 1))
    keys = [unit.key for stage in planned for unit in stage]
    path = out / f"{setting}-{scale}.json"
    if known is not None and (known / path.name).exists():
        _take_over(run, module, _read(known / path.name), planned, again)

    def write() -> None:
        results = {key: _read(run._file(key)) for key in keys if run._file(key).exists()}
        _write(path, _document(run, module, count, results, [key for key in keys if key not in results]))

    clock = _Clock(len(keys), sum(run._file(key).exists() for key in keys), f"{setting} ({scale})", say)
    for stage in planned[:stages]:
        _stage(run, module, stage, jobs, clock, write, again or only)
    write()
    return path


def _document(
    run: Run, module: Any, seeds: int, results: dict[str, dict[str, Any]], missing: list[str]
) -> dict[str, Any]:
    """Return the document of a setting: its protocol, scores and units, and the keys of units that were not run."""
    return {
        "setting": run.setting,
        "scale": run.scale,
        "config": run.config,
        "seeds": seeds,
        "environment": environment(),
        "seconds": round(sum(entry["seconds"] for entry in results.values()), 1),
        **({"missing": missing} if missing else {}),
        "scores": [asdict(score) for score in module.scores({key: entry["result"] for key, entry in results.items()})],
        "units": {
            key: {"seconds": entry["seconds"], "result": entry["result"]} for key, entry in sorted(results.items())
        },
    }


def _take_over(run: Run, module: Any, document: dict[str, Any], stages: list[list[Unit]], again: str | None) -> None:
    """Keep the units of a document as if they had been run here, if it was made by the same protocol."""
    if _protocol(module, document["config"]) != _protocol(module, run.config):
        return
    for unit in (unit for stage in stages for unit in stage):
        path = run._file(unit.key)
        if again is not None and re.search(again, unit.key):
            continue
        if unit.key in document["units"] and not path.exists():
            entry = {"key": unit.key, "arguments": unit.arguments, "config": document["config"]}
            _write(path, {**entry, "environment": document["environment"], **document["units"][unit.key]})


def _protocol(module: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a configuration that a unit's result depends on."""
    what = getattr(module, "WHAT", ())

    def how(part: Any) -> Any:
        return {key: how(value) for key, value in part.items() if key not in what} if isinstance(part, dict) else part

    return json.loads(json.dumps(how(config)))


class _Clock:
    """Says what was done and how long the rest will take."""

    def __init__(self, total: int, kept: int, title: str, say: Callable[[str], None]) -> None:
        self.total, self.kept, self.title, self.say = total, kept, title, say
        self.fresh, self.start = 0, time.perf_counter()

    def count(self, key: str) -> None:
        self.fresh += 1
        done = self.kept + self.fresh
        left = (time.perf_counter() - self.start) / self.fresh * (self.total - done)
        self.say(f"{self.title}: {done}/{self.total} {key}; about {_duration(left)} left")


def _stage(
    run: Run, module: Any, units: list[Unit], jobs: int, clock: _Clock, write: Callable[[], None], only: str | None
) -> None:
    waiting = []
    for unit in units:
        path = run._file(unit.key)
        kept = _read(path) if path.exists() else None
        if kept is not None:
            same = _protocol(module, kept["config"]) == _protocol(module, run.config)
            if not same or kept["arguments"] != unit.arguments:
                raise SystemExit(
                    f"{path} was made with another configuration; remove {path.parents[1]} to start again."
                )
            if hasattr(module, "stale") and module.stale(run, unit, kept["result"]):
                kept = None
        if kept is None and (only is None or re.search(only, unit.key)):
            waiting.append(unit)
    if jobs == 1 or len(waiting) < 2:
        for unit in waiting:
            _do(run, unit)
            write()
            clock.count(unit.key)
        return
    # Fresh processes: torch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        futures = {pool.submit(_do, run, unit): unit for unit in waiting}
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
                write()
                clock.count(futures[future].key)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _do(run: Run, unit: Unit) -> None:
    torch.set_num_threads(1)
    module = importlib.import_module(f"experiments.{run.setting}")
    start = time.perf_counter()
    torch.set_flush_denormal(True)  # squared gradients of a converged network are slow otherwise
    try:
        result = getattr(module, unit.call)(run, **unit.arguments)
    finally:
        torch.set_flush_denormal(False)
    entry = {
        "key": unit.key,
        "arguments": unit.arguments,
        "config": run.config,
        "environment": environment(),
        "seconds": round(time.perf_counter() - start, 3),
        "result": result,
    }
    _write(run._file(unit.key), entry)


def _kept(path: Path) -> list[Any]:
    """Return the file's content in a list; an empty list if it is missing or truncated."""
    with contextlib.suppress(FileNotFoundError, EOFError, RuntimeError, pickle.UnpicklingError):
        return [torch.load(path, weights_only=True)]
    return []


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def _write(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(document, indent=1) + "\n")
    temporary.replace(path)  # whole or not at all


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Let one process at a time make a cached file; the lock of a killed one is taken over."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f"{path.name}.lock")
    while True:
        try:
            lock.touch(exist_ok=False)
            lock.write_text(str(os.getpid()))
            break
        except FileExistsError:
            if not _alive(lock):
                lock.unlink(missing_ok=True)
            time.sleep(0.2)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)


def _alive(lock: Path) -> bool:
    try:
        text = lock.read_text()
        os.kill(int(text), 0)
    except ValueError:
        return True  # just made, not yet written
    except (FileNotFoundError, ProcessLookupError):
        return False
    return True


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
