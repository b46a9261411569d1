"""Read through an HDF5 file in a separate process with limited memory and time.

The HDF5 library trusts its files: a damaged one makes it allocate gigabytes, run for ever or crash. So a reader first runs this
module as a process, and opens the file only if that succeeds.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

from ..errors import FileError
from .byte_range import ByteRange

__all__ = ["probe"]

MEMORY = 1 << 30  # bytes beyond what the libraries need
SECONDS = 60
_LARGEST_READ = 1 << 24


def probe(place: ByteRange, memory: int = MEMORY, seconds: int = SECONDS) -> None:
    """Refuse an HDF5 file that cannot be looked through within limits, or that leads out of itself.

    Raises:
        FileError: It is damaged, or has links to elsewhere.
    """
    command = [sys.executable, "-m", __name__, place.path, *map(str, (place.offset, place.length, memory, seconds))]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=10 * seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise FileError(f"{place.label} is a damaged HDF5 file: reading it does not come to an end.") from error
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        why = lines[-1][:200] if lines else f"the library crashed (status {done.returncode})"
        raise FileError(f"{place.label} is a damaged HDF5 file: {why}. Get it again.")


def _limit(memory: int, seconds: int) -> None:
    try:
        import resource
    except ImportError:  # only the time is limited there, by the waiting process
        return
    used = 0
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm", "rb") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))


def _look(group: Any, h5py: Any) -> None:
    """Visit a group and all below it once, in no deeper recursion than the file's own nesting."""
    waiting, seen = [group], set()
    while waiting:
        node = waiting.pop()
        key = h5py.h5o.get_info(node.id).addr
        if key in seen:
            continue
        seen.add(key)
        for name in node.attrs:
            place = node.attrs.get_id(name)
            if math.prod(place.shape or ()) * max(place.dtype.itemsize, 1) <= _LARGEST_READ:
                node.attrs.get(name)
        if isinstance(node, h5py.Dataset):
            if node.chunks is not None and node.size * node.dtype.itemsize <= 64 * max(
                node.id.get_storage_size(), 1 << 14
            ):
                node[()]
            continue
        for name in node:
            if not isinstance(node.get(name, getlink=True), h5py.HardLink):
                raise ValueError(f"{name!r} in it is a link to elsewhere, which is not followed")
            waiting.append(node[name])


def _main(path: str, offset: int, length: int, memory: int, seconds: int) -> None:
    import h5py

    _limit(memory, seconds)
    with ByteRange(path, offset, length).open() as raw, h5py.File(raw, "r") as file:
        _look(file, h5py)


if __name__ == "__main__":
    try:
        _main(sys.argv[1], *map(int, sys.argv[2:]))
    except Exception as error:  # whatever it is, it is one line for the process that reads it
        sys.exit(" ".join(f"{type(error).__name__}: {error}".split()))
