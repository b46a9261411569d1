"""Write files and folders whole or not at all: they get their names when they are complete, and leave nothing behind otherwise.

An unfinished file has a partial name that no other writer uses, and its writer locks it. The system drops the lock however
the writer ends, so that the next writer in the folder can tell leftovers from files in progress.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from ..errors import FileError
from .byte_range import is_being_read, shown

try:
    import fcntl
except ImportError:  # a system without such locks: nothing is removed as a leftover there
    fcntl = None  # type: ignore[assignment]

__all__ = ["PartialFile", "check_free", "check_target", "claim", "exclusive", "new_folder", "write_file"]

_PARTIAL = re.compile(r"\.(?P<name>.+)\.(?P<machine>[0-9a-f]{8})-[0-9a-f]{16}\.partial", re.DOTALL)
_LONGEST_NAME = 200  # bytes; with what a partial name adds, below the 255 that file systems allow
_OTHER_MACHINE = 24 * 3600  # seconds after which a partial of another machine, whose locks are not seen, is left over
_PATIENCE = 120  # seconds; to publish takes milliseconds


class PartialFile:
    """A file that is written under a partial name and then renamed, in one step.

    Leaving the `with` block without `publish` removes it. Of two writers of one file the last one wins, whole.

    Args:
        path: Its final name.

    Attributes:
        file: The open file, unbuffered, from `__enter__` until it is published or discarded.
    """

    file: io.FileIO

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._pending = False

    def __enter__(self) -> PartialFile:
        with as_file_error(self.path):
            _check_name(self.path)
            check_not_read(self.path)
            _remove_left_over(self.path.parent)
            while not self._pending:
                self._partial = _partial_name(self.path)
                handle = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
                self.file = io.FileIO(handle, "r+")
                self._pending = _lock_new(handle, self._partial)
                if not self._pending:
                    self.file.close()
        return self

    def write(self, data: bytes | memoryview) -> None:
        """Write all of the bytes; a single call of the system may write fewer, and the next call then raises the reason."""
        view = memoryview(data)
        done = 0
        while done < len(view):
            done += self.file.write(view[done:])

    def publish(self) -> None:
        """Give it its final name, durably, replacing what was there.

        Raises:
            FileError: It cannot have the name: a folder has it, or something still reads the file that has it.
        """
        with as_file_error(self.path):
            check_not_read(self.path)
            os.fsync(self.file.fileno())
            if fcntl is None:  # systems without these locks (Windows) do not rename open files
                self.file.close()
            os.replace(self._partial, self.path)
            self._pending = False
            self.file.close()
        _sync_folder(self.path.parent)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()

    def discard(self) -> None:
        """Remove it, unless it has been published."""
        if self._pending:
            self._pending = False
            self._partial.unlink(missing_ok=True)
            self.file.close()


def write_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a small file, whole or not at all.

    Raises:
        FileError: The disk is full or the folder cannot be written.
    """
    with PartialFile(path) as partial:
        with as_file_error(partial.path):
            partial.write(data)
        partial.publish()


@contextmanager
def new_folder(out: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a folder to write into; it gets its name when all is done, and is removed when something fails.

    It has its final name, inside a partial folder beside the final place.

    Raises:
        FileError: There is something of this name already, another process is making it, or it cannot be made.
    """
    out = Path(out)
    check_target(out)
    target = out.resolve()
    with as_file_error(out), exclusive(target.parent):
        _refuse_writers(target, [path for path in _remove_left_over(target.parent) if path.is_dir()])
        check_target(out)  # another process may have made it before the lock was ours
        outer, handle = _new_partial_folder(target)
    inner = outer / target.name
    try:
        with as_file_error(out):
            inner.mkdir()
            yield inner
            _sync_folder(inner)
            with exclusive(target.parent):
                os.replace(inner, target)
            _sync_folder(target.parent)
    except FileError as error:  # the message should name the folder that was asked for
        raise FileError(str(error).replace(str(inner), str(out))) from error
    finally:
        shutil.rmtree(outer, ignore_errors=True)
        if handle >= 0:
            os.close(handle)


@contextmanager
def claim(
    out: str | os.PathLike[str], *, overwrite: bool = False, sources: Iterable[str | os.PathLike[str]] = ()
) -> Iterator[None]:
    """Check an output as `check_target` does, and keep other processes that claim it away until the block ends.

    Raises:
        FileError: It cannot or should not be written, or another process is writing it.
    """
    check_target(out, overwrite=overwrite, sources=sources)
    target = Path(os.path.abspath(out))
    with contextlib.ExitStack() as stack:
        with as_file_error(Path(out)), exclusive(target.parent):
            _refuse_writers(target, _remove_left_over(target.parent))
            check_target(out, overwrite=overwrite, sources=sources)  # it may have been written before the lock was ours
            stack.enter_context(PartialFile(target))
        yield


def check_target(
    out: str | os.PathLike[str], *, overwrite: bool = False, sources: Iterable[str | os.PathLike[str]] = ()
) -> None:
    """Refuse an output that cannot or should not be written, before hours of work instead of after them.

    Args:
        out: A file or a folder to make.
        overwrite: Whether a file of this name may be replaced. A folder that is not empty never is.
        sources: Files and folders that the output is made from. None of them is replaced, whatever `overwrite` says.

    Raises:
        FileError: It is there already, it is a source, or there is no folder to put it into.
    """
    out = Path(out)
    name = shown(str(out))
    if not os.path.isdir(os.path.dirname(os.path.abspath(out))):
        raise FileError(f"There is no folder {shown(str(out.parent))} to write {out.name} into.")
    for source in sources:
        if os.path.exists(out) and os.path.exists(source) and os.path.samefile(out, source):
            raise FileError(f"{name} is what the output is made from: choose another name.")
    check_not_read(out)
    if os.path.isdir(out):
        if os.listdir(out):
            raise FileError(f"{name} exists already: choose a new folder, or remove it.")
    elif os.path.lexists(out) and not overwrite:
        raise FileError(f"{name} exists already: choose another name, or replace it with --overwrite.")


def check_not_read(path: Path) -> None:
    """Refuse to replace a file whose tensors would still be read.

    Raises:
        FileError: Something in this process refers to them.
    """
    if is_being_read(path):
        raise FileError(
            f"{shown(str(path))} is still being read (tensors are read when asked for), so it is not replaced: write to another "
            "name, or load what you need of it into memory first."
        )


def check_free(folder: Path, needed: int) -> None:
    """Refuse an output that would not fit on the disk, before hours of work instead of after them.

    Raises:
        FileError: The disk has less room.
    """
    if folder.is_dir() and (free := shutil.disk_usage(folder).free) < needed:
        raise FileError(
            f"The output needs {needed:,} bytes, but only {free:,} are free in {folder}. Nothing was written."
        )


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Make other writers of several files in this folder wait; without effect where the system cannot lock folders.

    Raises:
        FileError: Another process holds the lock for too long.
    """
    handle = os.open(folder, os.O_RDONLY) if fcntl is not None else -1
    try:
        deadline = time.monotonic() + _PATIENCE
        while handle >= 0 and _lock(handle) is False:
            if time.monotonic() > deadline:
                raise FileError(f"Another process has been writing into {folder} for {_PATIENCE} seconds; try again.")
            time.sleep(0.01)
        yield
    finally:
        if handle >= 0:
            os.close(handle)


@contextmanager
def as_file_error(path: Path) -> Iterator[None]:
    """Turn an error of the system about a file that cannot be written into one message."""
    try:
        yield
    except (OSError, UnicodeEncodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        if getattr(error, "errno", None) == errno.ENOSPC:
            reason = "the disk is full"
        raise FileError(f"Cannot write {shown(str(path))}: {reason}. Nothing was left behind.") from error


def _new_partial_folder(target: Path) -> tuple[Path, int]:
    while True:
        outer = _partial_name(target)
        outer.mkdir()
        if fcntl is None:
            return outer, -1
        with contextlib.suppress(FileNotFoundError):
            handle = os.open(outer, os.O_RDONLY)
            if _lock_new(handle, outer):
                return outer, handle
            os.close(handle)


def _check_name(path: Path) -> None:
    """Refuse, before the work and not after it, a name that the system does not accept."""
    with contextlib.suppress(FileNotFoundError):
        if "\0" in str(path):
            raise OSError(errno.EINVAL, "a name cannot hold a zero byte")
        os.lstat(path)


def _partial_name(path: Path) -> Path:
    return path.with_name(f".{_short(path.name)}.{_machine()}-{secrets.token_hex(8)}.partial")


def _short(name: str) -> str:
    encoded = os.fsencode(name)
    return name if len(encoded) <= _LONGEST_NAME else f"{name[:30]}~{hashlib.sha256(encoded).hexdigest()[:16]}"


def _machine() -> str:
    """Return eight digits for this machine until it restarts: the same in all processes, also in containers, that share its locks."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()[:8]
    return hashlib.sha256(os.fsencode(getattr(os, "uname", lambda: ("", "?"))()[1])).hexdigest()[:8]


def _lock(handle: int) -> bool | None:
    """Lock an open file or folder: True; False where another process has locked it; None where the system cannot."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _lock_new(handle: int, path: Path) -> bool:
    """Lock a new partial file; False if another process took it for a leftover before it could be locked."""
    while _lock(handle) is False:
        time.sleep(0.001)
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False


def _remove_left_over(folder: Path) -> list[Path]:
    """Remove what dead writers left in a folder (not below it); return the partial files and folders of living ones."""
    with os.scandir(folder) as entries:
        found = [(Path(entry.path), match) for entry in entries if (match := _PARTIAL.fullmatch(entry.name))]
    return [path for path, match in found if not _is_left_over(path, match["machine"] == _machine())]


def _refuse_writers(target: Path, partials: Iterable[Path]) -> None:
    """Refuse to write what another process is writing.

    Raises:
        FileError: One of the partial files or folders is to become the target.
    """
    for path in partials:
        match = _PARTIAL.fullmatch(path.name)
        if match is not None and match["name"] == _short(target.name):
            wait = "wait for it, or choose another name."
            if match["machine"] == _machine():
                raise FileError(
                    f"{shown(str(target))} is being written by another process (its unfinished output is {path.name}): {wait}"
                )
            with contextlib.suppress(FileNotFoundError):  # it has ended since
                minutes = max(0, time.time() - path.lstat().st_mtime) / 60
                raise FileError(
                    f"{shown(str(target))} is being written by another machine, or was by this one before it was restarted (the unfinished "
                    f"output {path.name} was begun or last written {minutes:.0f} minutes ago): {wait} If its writer is dead, remove "
                    f"{shown(str(path))}; after a day it is removed by itself."
                )


def _is_left_over(path: Path, same_machine: bool) -> bool:
    """Remove a partial file or folder if its writer is dead; return whether it was."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError:  # gone, not ours, or a link
        return not os.path.lexists(path)
    try:
        info = os.fstat(handle)
        old = same_machine or time.time() - info.st_mtime > _OTHER_MACHINE
        if not old or _lock(handle) is not True:
            return False
        if stat.S_ISDIR(info.st_mode):
            shutil.rmtree(path, ignore_errors=True)
        elif stat.S_ISREG(info.st_mode):
            path.unlink(missing_ok=True)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def _sync_folder(folder: Path) -> None:
    """Make a rename durable, where the system knows how to."""
    with contextlib.suppress(OSError):  # a folder cannot be opened on every system
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
