"""Broken and hostile torch files by the hundred thousand: `python -m tests.fuzz_pickles --count 100000 FILES...`.

Each input is a mutated file (one of those given, or one of those made here), or a random sequence of pickle instructions
over the globals that mean something to the reader. Anything but an answer or a SquisherError, an input that takes seconds,
or memory that grows, is a failure: the input is kept and the exit status is 1.
"""

from __future__ import annotations

import argparse
import collections
import io
import json
import pickle
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from squisher.errors import SquisherError
from squisher.storage import torch_files as pickles
from squisher.storage.byte_range import ByteRange
from squisher.storage.torch_files import Array, StoredTensor
from squisher.storage.torch_files.known import BUILDERS, VALUES

SECONDS = 5.0
MEMORY = 100 << 20  # bytes that the inputs may add to the highest use of memory
WARM_UP = 500  # inputs in which whatever is allocated once is allocated
EDGES = [0, 1, 2, 127, 128, 255, 256, 32767, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1]
Maker = Callable[[random.Random], bytes]


class TooSlow(BaseException):
    """Not an Exception, nor TimeoutError, which is an OSError: nothing under test may swallow it."""


class Call:
    """Pickled as a call of a function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def packed(entries: dict[str, bytes]) -> tuple[Callable[[bytes], bytes], bytes]:
    """A function that puts a changed pickle back into a torch zip file, quickly and without checksum; and the pickle."""
    name = next(entry for entry in entries if entry.rpartition("/")[2] == "data.pkl")
    start, directory = b"", b""

    def row(entry: str, content: bytes, offset: int) -> tuple[bytes, bytes]:
        raw = entry.encode()
        sizes = struct.pack("<3L2H", 0, len(content), len(content), len(raw), 0)
        local = struct.pack("<4s5H", b"PK\x03\x04", 20, 0, 0, 0, 0) + sizes + raw
        central = struct.pack("<4s6H", b"PK\x01\x02", 20, 20, 0, 0, 0, 0) + sizes
        return local + content, central + struct.pack("<3H2L", 0, 0, 0, 0, offset) + raw

    for entry, content in entries.items():
        if entry != name:
            local, central = row(entry, content, len(start))
            start, directory = start + local, directory + central

    def put(pickled: bytes) -> bytes:
        local, central = row(name, pickled, len(start))
        place = len(start) + len(local)
        end = struct.pack(
            "<4s4H2LH", b"PK\x05\x06", 0, 0, len(entries), len(entries), len(directory + central), place, 0
        )
        return start + local + directory + central + end

    return put, entries[name]


def mutated(source: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """One to a few changes, small or large."""
    changed = bytearray(data)
    for _ in range(source.choice((1, 1, 1, 2, 4, 12))):
        size = len(changed) or 1
        at, kind = source.randrange(size), source.randrange(9)
        if kind <= 2:
            changed[at : at + 1] = bytes([source.randrange(256)])
        elif kind == 3:
            changed[at : at + 1] = bytes([(changed[at] if changed else 0) ^ (1 << source.randrange(8))])
        elif kind == 4:
            width = source.choice((1, 2, 4, 8))
            changed[at : at + width] = (source.choice(EDGES) % (1 << 8 * width)).to_bytes(width, "little")
        elif kind == 5:
            del changed[at : at + source.choice((1, 2, 7, 40, 400))]
        elif kind == 6:
            start = source.randrange(size)
            changed[at:at] = changed[start : start + source.choice((1, 3, 20, 200))]
        elif kind == 7:
            other = source.choice(others)
            start = source.randrange(len(other) or 1)
            changed[at:at] = other[start : start + source.choice((1, 3, 20, 200))]
        else:
            del changed[max(at, size - source.choice((1, 10, 100))) :]
    return bytes(changed)


def instructions(source: random.Random) -> bytes:
    """A random pickle that is mostly well formed: values, calls of known globals, states, keys, the memo."""
    names = [
        *BUILDERS,
        *source.sample(sorted(VALUES), 8),
        "os.system",
        "x.Y",
        "builtins.object",
        "torch.Tensor",
        "torch.Tensor",
    ]
    text = lambda value: b"X" + struct.pack("<I", len(value)) + value  # noqa: E731
    storage = b"(" + text(b"storage") + b"ctorch\nFloatStorage\n" + text(b"0") + text(b"cpu") + b"K\x04"

    def value() -> bytes:
        kind = source.randrange(20)
        if kind == 0:
            return b"K" + bytes([source.randrange(256)])
        if kind == 1:
            return b"J" + struct.pack("<I", source.choice(EDGES) % 2**32)
        if kind == 2:
            return b"\x8a\x09" + source.choice(EDGES).to_bytes(9, "little")
        if kind == 3:
            return text(source.choice((b"latin1", b"f8", b"0", b"a", b"cpu", b"<", b"", b"x" * 50)))
        if kind == 4:
            return b"G" + source.choice((bytes(8), b"\x7f\xf0" + bytes(6), b"\x7f\xf8" + bytes(6), b"?" * 8))
        if kind in (5, 6):
            return b"c%b\n%b\n" % tuple(part.encode() for part in source.choice(names).rsplit(".", 1))
        if kind == 7:
            return storage + source.choice((b"tQ", b"NtQ"))
        if kind == 8:
            return b"h" + bytes([source.randrange(4)])
        if kind == 9:
            return b"(" + value() * source.randrange(7) + b"t"
        if kind == 10:
            return b"(" + b"".join(value() for _ in range(source.randrange(9))) + b"t"
        if kind == 11:
            return b"C" + bytes([8]) + bytes(source.randrange(256) for _ in range(8))
        return source.choice(
            (b"N", b"\x88", b"\x89", b")", b"]", b"}", b"\x8f", b"K\x01\x85", b"K\x02K\x02\x86", b"(l", b"(\x91")
        )

    def call(name: str) -> bytes:
        module, _, short = name.rpartition(".")
        args = b"".join(value() for _ in range(source.choice((0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8))))
        return b"c%b\n%b\n(%bt%b" % (module.encode(), short.encode(), args, source.choice((b"R", b"R", b"\x81")))

    def tensor() -> bytes:
        pieces = [storage + b"tQ", b"K\x00", b"K\x02K\x02\x86", b"K\x02K\x01\x86", b"\x89", b"}"]
        if source.random() < 0.5:
            pieces[source.randrange(6)] = value()
        return b"ctorch._utils\n_rebuild_tensor_v2\n(" + b"".join(pieces) + b"tR"

    parts = [b"\x80\x02", b"Nq\x00q\x01q\x02q\x030"]
    for _ in range(source.randrange(1, 14)):
        part = source.choice((value, value, tensor, lambda: call(source.choice(names))))()
        tail = source.choice(
            (b"", b"q\x00", b"q\x01", b"q\x02", b"a", b"s", b"b", b"R", b"\x86", b"u", b"e", b"\x90", b"\x85", b"2")
        )
        parts.append(b"(" * (tail in (b"u", b"e", b"\x90")) + part + tail)
    return b"".join(parts) + b"."


def zip64(data: bytes) -> bytes:
    """The same archive with 64-bit sizes and offsets in its directory, as if it were huge."""
    end = data.rindex(b"PK\x05\x06")
    count, _, start = struct.unpack_from("<H2L", data, end + 10)
    position, rows = start, b""
    for _ in range(count):
        row = bytearray(data[position : position + 46])
        names, extra, comment = struct.unpack_from("<3H", row, 28)
        sizes = struct.unpack_from("<3L", row, 20)[:2] + struct.unpack_from("<L", row, 42)
        row[20:28] = b"\xff" * 8
        row[30:32], row[42:46] = struct.pack("<H", 28), b"\xff" * 4
        wide = struct.pack("<2H3Q", 1, 24, sizes[1], sizes[0], sizes[2])
        rows += bytes(row) + data[position + 46 : position + 46 + names] + wide
        position += 46 + names + extra + comment
    record = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, len(rows), start)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, start + len(rows), 1)
    last = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 65535, 65535, 2**32 - 1, 2**32 - 1, 0)
    return data[:start] + rows + record + locator + last


def made() -> dict[str, bytes]:
    """Small files of every kind that is read."""

    def saved(value: Any, **options: Any) -> bytes:
        buffer = io.BytesIO()
        torch.save(value, buffer, **options)
        return buffer.getvalue()

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    mixed = {
        "t": [torch.ones(2, 3).mT, torch.ones(1).expand(4), torch.ones(2, dtype=torch.float8_e5m2)],
        "o": collections.OrderedDict(a=argparse.Namespace(x=1)),
        "n": [np.float64(2), np.arange(3)],
        "d": torch.device("cpu"),
        "s": {1, (2, "b")},
        "b": b"\xff",
    }
    old = {"_use_new_zipfile_serialization": False}
    from_numpy = Call(
        torch._utils._rebuild_device_tensor_from_numpy, np.ones((2, 2), np.float32), torch.bfloat16, "cpu", True
    )
    tagged = torch.nn.Parameter(torch.ones(2))
    tagged.tag = 1
    source = zipfile.ZipFile(io.BytesIO(saved(optimizer.state_dict())))
    wide, deflated = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(wide, "w") as first, zipfile.ZipFile(deflated, "w") as second:
        for name in source.namelist():
            with first.open(zipfile.ZipInfo(name), "w", force_zip64=True) as entry:
                entry.write(source.read(name))
            kind = zipfile.ZIP_STORED if "/data/" in name else zipfile.ZIP_DEFLATED
            second.writestr(name, source.read(name), kind)
    return {
        "others": saved([from_numpy, tagged, torch.eye(2).to_sparse(), np.arange(3, dtype=">i4").astype("<i4"), 1j]),
        "wide": zip64(wide.getvalue()),
        "deflated": deflated.getvalue(),
        "state": saved(optimizer.state_dict()),
        "objects": saved([optimizer]),
        "mixed": saved(mixed),
        "protocol 5": saved(mixed, pickle_protocol=5),
        "old state": saved(optimizer.state_dict(), **old),
        "old mixed": saved(mixed, **old),
        "plain": pickle.dumps({"w": torch.ones(2), "a": np.ones(2)}, 4),
        "plain 0": pickle.dumps({"w": [1, "a", None]}, 0),
    }


def makers(samples: dict[str, bytes]) -> Iterator[Maker]:
    """Ways to make an input, each as often as the others."""
    content = list(samples.values())

    def whole(data: bytes) -> Maker:
        return lambda source: mutated(source, data, content)

    def inside(put: Callable[[bytes], bytes], pickled: bytes) -> Maker:
        return lambda source: put(mutated(source, pickled, content))

    put = None
    for data in content:
        yield whole(data)
        if data[:4] == b"PK\x03\x04":
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                entries = {name: archive.read(name) for name in archive.namelist()}
            if any(name.rpartition("/")[2] == "data.pkl" for name in entries):
                put, pickled = packed(entries)
                assert pickles.read(ByteRange.of_bytes(put(pickled))) is not None
                yield inside(put, pickled)
                yield inside(put, pickled)
    assert put is not None
    around, _ = packed({"a/data.pkl": b"", "a/data/0": bytes(16)})
    yield instructions
    for _ in range(2 * len(content)):
        yield lambda source: around(instructions(source))


def attempt(data: bytes) -> str:
    """Read an input and look at what came out of it; returns "read" or "refused"."""
    span = ByteRange.of_bytes(data)
    try:
        value = pickles.read(span) if data[:1] in (b"P", b"\x80") else pickles.unpickle(data)
    except SquisherError:
        return "refused"
    seen: set[int] = set()
    pending = [value]
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            pending += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            pending += value
        elif isinstance(value, (StoredTensor, Array)):
            try:
                hash(value), repr(value)
                value.numpy() if isinstance(value, Array) else (value.is_contiguous, value.load())
            except SquisherError:
                pass
        elif isinstance(value, pickles.Record):
            hash(value), repr(value)
            pending += [value.args, value.kwargs, value.attributes, value.state, value.sequence, value.mapping]
    return "read"


def add_counts(path: Path, what: str, seed: int, outcomes: dict[str, int]) -> None:
    """Add the outcomes of a run to the counts in a JSON file; a seed counts once."""
    counts = json.loads(path.read_text()) if path.exists() else {}
    runs = counts.setdefault(what, {"inputs": 0, "failures": 0, "seeds": {}})
    runs["seeds"][str(seed)] = dict(sorted(outcomes.items()))
    runs["failures"] = sum(run["failures"] for run in runs["seeds"].values())
    runs["inputs"] = (
        sum(n for run in runs["seeds"].values() for key, n in run.items() if key != "failures") + runs["failures"]
    )
    path.write_text(json.dumps(counts, indent=2, sort_keys=True) + "\n")


def fuzz(
    count: int,
    seed: int,
    samples: dict[str, bytes],
    keep: Path,
    report: Callable[[str], None],
    counts: Path | None = None,
) -> int:
    """Run; returns the number of failures."""
    source, ways = random.Random(seed), list(makers(samples))
    outcomes: collections.Counter[str] = collections.Counter()
    failures, slowest, memory, began = 0, 0.0, 0, time.perf_counter()

    def failed(number: int, data: bytes, what: str) -> None:
        path = keep / f"failure-{zlib.crc32(data):08x}.bin"
        path.write_bytes(data)
        report(f"input {number}, kept as {path}:\n{what}")

    def alarm(*_: object) -> None:
        raise TooSlow(f"an input took more than {SECONDS} seconds")

    signal.signal(signal.SIGPROF, alarm)
    for number in range(count):
        data = source.choice(ways)(source)
        started = time.process_time()  # a busy machine is not a slow reader
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            outcomes[attempt(data)] += 1
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            failures += 1
            failed(number, data, "".join(traceback.format_exception(error)[-6:]))
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        slowest = max(slowest, time.process_time() - started)
        highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if number <= WARM_UP:
            memory = highest
        elif highest - memory > MEMORY:
            failures += 1
            failed(
                number,
                data,
                f"memory has grown by {(highest - memory) >> 20} MB, with this input or by little and little",
            )
            memory = highest
    seconds = time.perf_counter() - began
    if counts is not None:
        add_counts(counts, "torch files", seed, {**outcomes, "failures": failures})
    report(
        f"{count} inputs in {seconds:.0f} s ({count / max(seconds, 1e-9):.0f} per second): {outcomes['refused']} refused, "
        f"{outcomes['read']} read, {failures} failures; slowest {slowest:.2f} s"
    )
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="sample files to mutate, besides those made here")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for inputs that fail (default: a new one)")
    parser.add_argument("--counts", type=Path, help="a JSON file to add the counts to")
    options = parser.parse_args()
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    keep = options.keep or Path(tempfile.mkdtemp(prefix="fuzz-pickles-"))
    keep.mkdir(parents=True, exist_ok=True)
    samples = made() | {str(path): path.read_bytes() for path in options.files}
    return int(fuzz(options.count, options.seed, samples, keep, print, options.counts) > 0)


if __name__ == "__main__":
    sys.exit(main())
