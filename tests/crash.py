"""Every command that writes, killed, without room, and twice at a time: `python -m tests.crash --rounds 20`.

A round runs a command in a process of its own and ends it with SIGKILL after a random time, or lets no file grow beyond a random
size, or starts it twice. Afterwards every source must be what it was, the output whole or not there, and the next run must
succeed, give the same bytes as a run that nobody disturbed, and leave nothing else behind.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import squisher
from squisher import patch
from squisher.storage import safetensors
from squisher.storage.folders import write_model
from tests.commands import run

COMMANDS: dict[str, list[str]] = {
    "extract": ["extract", "state.pt", "--names", "names.txt", "--out", "out.safetensors"],
    "mask": ["mask", "imp.safetensors", "--keep", "0.5", "--out", "out.safetensors"],
    "embed": ["embed", "imp.safetensors", "--by", "full", "--out", "out.safetensors"],
    "patch make": ["patch", "make", "base", "tuned", "--out", "out.safetensors"],
    "patch apply": ["patch", "apply", "base", "patch.safetensors", "--out", "out"],
    "merge": ["merge", "average", "base", "tuned", "--out", "out"],
    "merge to a file": ["merge", "fisher", "base", "tuned", "--importance", "imp.safetensors", "--importance", "imp.safetensors",
                        "--out", "out.safetensors"],
    "prune": ["prune", "base", "--importance", "imp.safetensors", "--sparsity", "0.5", "--out", "out"],
    "unlearn": ["unlearn", "base", "--importance", "imp.safetensors", "--forget", "forget.safetensors", "--out", "out"],
    "quantize": ["quantize", "base", "--importance", "imp.safetensors", "--bits-per-weight", "5", "--out", "plan.json"],
    "export": ["export", "imp.safetensors", "--format", "ota", "--out", "out.safetensors"],
    "compress": ["compress", "imp.safetensors", "--codec", "log8", "--out", "out.safetensors"],
    "report": ["report", "imp.safetensors", "--out", "out.html"],
    "shards": [],  # a set of files, written from Python
    "fisher": [],  # what the command does, with a model that needs no library; it goes on where it was
}  # fmt: skip
OUTPUTS = ("out", "out.safetensors", "out.html", "plan.json", "out.safetensors.index.json")


def make_sources(folder: Path, size: int) -> None:
    """Write what the commands read: two models, their importances, a mask, a patch and an optimizer state."""
    generator = torch.Generator().manual_seed(0)
    base = {f"layer.{k}": torch.randn(size, size, generator=generator) for k in range(6)}
    tuned = {name: tensor + (torch.rand(tensor.shape, generator=generator) < 0.1) for name, tensor in base.items()}
    write_model(folder / "base", base)
    write_model(folder / "tuned", tuned)
    for name, seed in (("imp", 1), ("forget", 2)):
        generator.manual_seed(seed)
        values = {key: torch.rand(size, size, generator=generator) for key in base}
        squisher.Importance(values, "fisher").save(folder / f"{name}.safetensors")
    patch.make(base, tuned, folder / "patch.safetensors")
    parameters = [torch.nn.Parameter(tensor) for tensor in base.values()]
    optimizer = torch.optim.Adam(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.save(optimizer.state_dict(), folder / "state.pt")
    (folder / "names.txt").write_text("\n".join(base))


def command(name: str, folder: Path, overwrite: bool) -> int:
    """Run one command in this process; its exit status."""
    if name == "shards":
        opened = safetensors.open_safetensors(folder / "base" / "model.safetensors")
        safetensors.save(folder / "out.safetensors", opened, {}, shard_bytes=1)
        return 0
    if name == "fisher":
        return fisher(folder)
    return run(*COMMANDS[name], *(["--overwrite"] if overwrite else []), cwd=folder).returncode


def fisher(folder: Path) -> int:
    """Measure a Fisher, keeping what is done after every batch; a later run goes on there."""
    from squisher.measure import unfinished

    unfinished.SECONDS = 0.0
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3))
    batches = [(torch.randn(4, 64), torch.randint(0, 3, (4,))) for _ in range(12)]
    kept = folder / "out.unfinished.safetensors"
    squisher.fisher(model, batches, unfinished=kept).save(folder / "out.safetensors")
    kept.unlink(missing_ok=True)
    return 0


def started(name: str, folder: Path, largest: int | None = None) -> int:
    """Start a command in a process of its own; its id."""
    overwrite = bool(COMMANDS[name]) and (folder / COMMANDS[name][-1]).is_file()
    child = os.fork()
    if child == 0:
        status = 3
        try:
            if largest is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
            status = command(name, folder, overwrite)
        except squisher.SquisherError:
            status = 1
        finally:
            os._exit(status)
    return child


def state(folder: Path, outputs: bool) -> dict[str, str]:
    """Every file below a folder with a hash of its bytes: of the outputs, or of all others."""
    files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
    named = {str(p.relative_to(folder)): p for p in files}
    return {
        name: hashlib.sha256(p.read_bytes()).hexdigest() for name, p in named.items() if _is_output(name) == outputs
    }


def _is_output(name: str) -> bool:
    first = name.split("/")[0]
    return first in OUTPUTS or first.startswith("out-0")


def clear(folder: Path) -> None:
    """Remove the outputs."""
    for place in list(folder.iterdir()):
        if _is_output(place.name):
            shutil.rmtree(place) if place.is_dir() else place.unlink()


def killed(name: str, folder: Path, chance: random.Random, seconds: float) -> str:
    """End the command with SIGKILL after a random time."""
    child = started(name, folder)
    time.sleep(chance.random() * seconds)
    os.kill(child, signal.SIGKILL)
    return "killed" if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) < 0 else "finished"


def without_room(name: str, folder: Path, chance: random.Random, seconds: float) -> str:
    """Let no file grow beyond a random size."""
    largest = int(2 ** chance.uniform(6, 23))
    status = os.waitstatus_to_exitcode(os.waitpid(started(name, folder, largest), 0)[1])
    assert status in (0, 1), f"status {status} where files may have {largest} bytes"
    assert status == 0 or not [p for p in folder.rglob(".*partial*")], (
        "a partial file was left by a writer that could tidy up"
    )
    return "refused" if status else "finished"


def twice(name: str, folder: Path, chance: random.Random, seconds: float) -> str:
    """Start the command twice at once; of two that may not replace anything, one is refused."""
    new = not state(folder, outputs=True)
    children = [started(name, folder), started(name, folder)]
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert 0 in statuses, f"statuses {statuses}"
    assert set(statuses) <= {0, 1}, f"statuses {statuses}"
    assert not (new and COMMANDS[name]) or 1 in statuses, "two commands wrote the same new output"
    return "both" if statuses == [0, 0] else "one"


ACCIDENTS: dict[str, Callable[[str, Path, random.Random, float], str]] = {
    "kill -9": killed,
    "no room": without_room,
    "two writers": twice,
}


def check(folder: Path, names: list[str], rounds: int, seed: int) -> collections.Counter[str]:
    """Run the rounds of some commands; the outcomes.

    Raises:
        AssertionError: A source has changed, an output is not whole, or something is left behind.
    """
    chance = random.Random(seed)
    outcomes: collections.Counter[str] = collections.Counter()
    sources = state(folder, outputs=False)
    for name in names:
        clear(folder)
        began = time.monotonic()
        assert os.waitstatus_to_exitcode(os.waitpid(started(name, folder), 0)[1]) == 0, name
        seconds = time.monotonic() - began
        expected = state(folder, outputs=True)
        for number in range(rounds):
            accident = list(ACCIDENTS)[number % len(ACCIDENTS)]
            if chance.random() < 0.7 or any((folder / "out").glob("*")):  # else an earlier output is in the way
                clear(folder)
            where = f"{name}, round {number}, {accident}, seed {seed}"
            outcome = ACCIDENTS[accident](name, folder, chance, seconds)
            outcomes[f"{accident}: {outcome}"] += 1
            found = state(folder, outputs=True)
            if name != "shards" or "out.safetensors.index.json" in found:
                assert found in ({}, expected), f"{where}: the output is neither whole nor absent"
            if (folder / "out").is_dir():
                clear(folder)
            assert os.waitstatus_to_exitcode(os.waitpid(started(name, folder), 0)[1]) == 0, (
                f"{where}: the next run failed"
            )
            assert state(folder, outputs=True) == expected, f"{where}: the next run gave something else"
            assert state(folder, outputs=False) == sources, f"{where}: something changed or was left behind"
    return outcomes


def main() -> int:
    """Run all commands; exit status 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="of each command")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=512, help="rows and columns of each of six tensors")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_sources(Path(folder), options.size)
        for name in COMMANDS:
            print(name, dict(check(Path(folder), [name], options.rounds, options.seed)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
