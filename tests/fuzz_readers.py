"""Damaged checkpoints against every reader: `python -m tests.fuzz_readers --count 20000 SOURCES...`.

Each input is a copy of a checkpoint (a file or folder) with bytes changed, cut, doubled or swapped in one of its files, a file
missing, emptied or taken from another checkpoint. It must be read, or refused with a SquisherError; anything else, an input
that takes seconds, or memory that grows is a failure. The seed of every failure is printed, and `--seed` runs it again alone.
"""

from __future__ import annotations

import argparse
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import squisher
from squisher.errors import NamingError, SquisherError
from tests.fuzz_pickles import add_counts

SECONDS = 10
MEMORY = 200 << 20


class TooSlow(BaseException):
    """Nothing under test may swallow it."""


def damage(data: bytes, chance: random.Random) -> bytes:
    """Bytes with something wrong: the few kinds of damage that files suffer, and that attackers make."""
    if not data:
        return b"\0" * chance.randrange(64)
    kind = chance.randrange(6)
    at = chance.randrange(len(data))
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + bytes(chance.randrange(256) for _ in range(chance.randrange(1, 9))) + data[at:]
    if kind == 2:
        end = min(len(data), at + chance.randrange(1, 64))
        return data[:at] + data[end:]
    if kind == 3:
        value = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
        return data[:at] + bytes([value]) * chance.choice((1, 2, 4, 8)) + data[at + 1 :]
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8, 64))):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def damaged_copy(source: Path, others: list[Path], folder: Path, chance: random.Random) -> Path:
    """A copy of a checkpoint inside `folder` in which one file is not as it should be."""
    target = folder / source.name
    if source.is_file():
        target.write_bytes(damage(source.read_bytes(), chance))
        return target
    shutil.copytree(source, target)
    files = sorted(p for p in target.rglob("*") if p.is_file())
    file = chance.choice(files)
    kind = chance.randrange(10)
    if kind == 0:
        file.unlink()
    elif kind == 1:
        file.write_bytes(b"")
    elif kind == 2:
        other = chance.choice(others)
        donors = [p for p in ([other] if other.is_file() else other.rglob("*")) if p.is_file()]
        file.write_bytes(chance.choice(donors).read_bytes())
    else:
        file.write_bytes(damage(file.read_bytes(), chance))
    return target


def try_one(path: Path) -> str:
    """Reads everything that an importance holds; the outcome in a word."""
    try:
        try:
            importance = squisher.extract(path, batch_size=8)
        except NamingError as error:  # a bare state: with names, whatever they are, its values are read too
            groups = re.search(r"groups of ([\d, ]+)", str(error))
            count = sum(map(int, groups[1].split(","))) if groups else 0
            importance = squisher.extract(path, batch_size=8, names=[f"p{k}" for k in range(min(count, 10_000))])
        for name in importance:
            for _ in importance.chunks(name):
                pass
    except SquisherError as error:
        if not str(error).strip():
            raise AssertionError("an error without words") from error
        return "refused"
    return "read"


def main() -> int:
    """Fuzzes; exit status 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="+", type=Path)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, help="run this one input alone")
    parser.add_argument("--first", type=int, default=0, help="the first of the seeds, one for each input")
    parser.add_argument("--counts", type=Path, help="a JSON file to add the counts to")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGPROF, lambda *_: (_ for _ in ()).throw(TooSlow()))
    outcomes: dict[str, int] = {}
    failures = 0
    before = 0
    start = time.perf_counter()
    seeds = [options.seed] if options.seed is not None else range(options.first, options.first + options.count)
    for number, seed in enumerate(seeds):
        chance = random.Random(seed)
        source = chance.choice(options.sources)
        with tempfile.TemporaryDirectory() as folder:
            path = damaged_copy(source, options.sources, Path(folder), chance)
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                outcome = try_one(path)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                outcome = f"FAILED with {type(error).__name__}"
                failures += 1
                print(f"--seed {seed} ({source}): {outcome}", flush=True)
                if failures <= 5 or options.seed is not None:
                    traceback.print_exc()
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        if number == min(500, len(seeds) // 2):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if number % 2000 == 1999:
            print(
                f"{number + 1} inputs, {(number + 1) / (time.perf_counter() - start):.0f} a second: {outcomes}",
                flush=True,
            )
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    if grown > MEMORY:
        failures += 1
        print(f"memory grew by {grown >> 20} MiB")
    print(f"{len(seeds)} inputs, {failures} failures: {outcomes}")
    if options.counts is not None:
        whole = {key: n for key, n in outcomes.items() if not key.startswith("FAILED")}
        add_counts(options.counts, "every reader", options.first, {**whole, "failures": failures})
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
