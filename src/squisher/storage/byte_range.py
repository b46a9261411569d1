"""A byte range of a file (or of memory), read only when asked for, and never from a file that has changed since.

A torch file may be a file, an entry of a zip archive, or bytes at some offset of a shard: a `ByteRange` makes
them all the same to the readers.
"""

from __future__ import annotations

import gc
import hashlib
import io
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import BinaryIO, cast
from weakref import WeakSet

from ..errors import FileError

__all__ = ["ByteRange", "FileStamp", "is_being_read", "shown"]

_YOUNG = 2_000_000_000  # nanoseconds: coarser than the clock of any file system in use
_HEAD = 1 << 16


class FileStamp:
    """The identity of a file when it was opened: device and inode, size, time of the last write, and how it begins.

    A file that is rewritten within one tick of the file system's clock keeps its time. So, as in git, the beginning of a file
    that was young when it was opened is compared as well, until the clock has moved on.
    """

    __slots__ = ("__weakref__", "_head", "_key", "path")

    def __init__(self, path: str, file: io.FileIO, info: os.stat_result) -> None:
        self.path = path
        self._key = (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)
        self._head: bytes | None = None
        if time.time_ns() - info.st_mtime_ns < _YOUNG:
            file.seek(0)
            self._head = hashlib.sha256(file.read(_HEAD)).digest()
        _stamps.add(self)

    def check(self, file: io.FileIO) -> None:
        """Compare an open file with what it was when it was stamped.

        Raises:
            FileError: It is another file, or was written to.
        """
        info = os.fstat(file.fileno())
        same = (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns) == self._key
        if same and self._head is not None:
            file.seek(0)
            same = hashlib.sha256(file.read(_HEAD)).digest() == self._head
            if time.time_ns() - info.st_mtime_ns >= _YOUNG:
                self._head = None
        if not same:
            size = f", and has {info.st_size} bytes instead of {self._key[2]}" if info.st_size != self._key[2] else ""
            raise FileError(
                f"{self.path} has changed since it was opened{size}: what is left to read may not belong to what was read. "
                "Open it again when no other process writes to it."
            )

    def is_of(self, info: os.stat_result) -> bool:
        """Return whether this is the stamp of the file, changed or not."""
        return self._key[:2] == (info.st_dev, info.st_ino)


_stamps: WeakSet[FileStamp] = WeakSet()


def is_being_read(path: str | os.PathLike[str]) -> bool:
    """Return whether something in this process still refers to tensors that would be read from this file."""
    try:
        info = os.stat(path)
    except (OSError, ValueError):
        return False
    if not any(stamp.is_of(info) for stamp in list(_stamps)):
        return False
    gc.collect()  # objects that only a reference cycle keeps are not in use
    return any(stamp.is_of(info) for stamp in list(_stamps))


@dataclass(frozen=True, slots=True)
class ByteRange:
    """`length` bytes from `offset` on, in the file at `path` or in `buffer`.

    Attributes:
        path: The file, or what to call the bytes in messages where they are in memory.
        offset: The first byte, counted from the start of the file.
        length: The number of bytes.
        inner: The name of the range inside the file (a zip entry, say), for messages.
        buffer: The bytes themselves where they are not in a file; `offset` then counts from its start.
        stamp: The identity of the file when it was opened; each read compares.
    """

    path: str
    offset: int
    length: int
    inner: str = ""
    buffer: bytes | None = field(default=None, repr=False, compare=False)
    stamp: FileStamp | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> ByteRange:
        """Return the whole of a regular file.

        Raises:
            FileError: It cannot be read, or is a folder, a pipe or a device.
        """
        name = os.fspath(path)
        try:
            kind = os.stat(name).st_mode  # before opening: opening a pipe would wait for its writer
            if stat.S_ISDIR(kind):
                raise FileError(f"{name} is a folder; a file was expected.")
            if not stat.S_ISREG(kind):
                raise FileError(f"{name} is not a regular file (a pipe or a device?); copy it to a file first.")
            with open(name, "rb", buffering=0) as file:
                info = os.fstat(file.fileno())
                return cls(name, 0, info.st_size, stamp=FileStamp(name, file, info))
        except (OSError, ValueError) as error:
            raise FileError(f"{shown(name)} cannot be read: {_reason(error)}.") from error

    @classmethod
    def of_bytes(cls, data: bytes, name: str = "bytes in memory") -> ByteRange:
        """Return a byte range over bytes in memory."""
        return cls(name, 0, len(data), buffer=data)

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"{self.path} ({self.inner})" if self.inner else self.path

    def part(self, offset: int, length: int, inner: str = "") -> ByteRange:
        """Return a byte range inside this one; `offset` counts from the start of this one."""
        if offset < 0 or length < 0 or offset + length > self.length:
            raise FileError(
                f"{self.label} is {self.length} bytes long, but bytes {offset} to {offset + length} are asked for: "
                "it is cut short or damaged. Get it again."
            )
        return ByteRange(self.path, self.offset + offset, length, inner or self.inner, self.buffer, self.stamp)

    def read(self, offset: int = 0, length: int | None = None) -> bytes:
        """Return bytes from `offset` (counted from the start of the range) on; to its end without a `length`."""
        part = self.part(offset, self.length - offset if length is None else length)
        if part.buffer is not None:
            return part.buffer[part.offset : part.offset + part.length]
        data = bytearray(part.length)
        part.read_into(memoryview(data))
        return bytes(data)

    def read_into(self, target: memoryview, offset: int = 0) -> None:
        """Fill `target` with the bytes from `offset` on, with plain `read` calls so that no page stays mapped.

        Raises:
            FileError: The file cannot be read, or is not what it was when it was opened.
        """
        if offset < 0 or offset + target.nbytes > self.length:
            self.part(offset, target.nbytes)  # says what is wrong
        if self.buffer is not None:
            start = self.offset + offset
            target[:] = memoryview(self.buffer)[start : start + target.nbytes]
            return
        done = 0
        with self.raw(offset) as file:
            while done < target.nbytes:
                got = file.readinto(target[done:])
                if not got:
                    raise FileError(f"{self.label} has become shorter while it was read. Is it still being written?")
                done += got

    def open(self) -> BinaryIO:
        """Return a seekable file object over the range alone, as `zipfile` and `h5py` want one."""
        if self.buffer is not None:
            return io.BytesIO(self.buffer[self.offset : self.offset + self.length])
        return cast(BinaryIO, io.BufferedReader(_RangeFile(self)))

    @contextmanager
    def raw(self, offset: int = 0) -> Iterator[io.FileIO]:
        """Open the unbuffered file, checked to be the same and standing at `offset`; its errors become messages."""
        try:
            with open(self.path, "rb", buffering=0) as file:
                if self.stamp is not None:
                    self.stamp.check(file)
                file.seek(self.offset + offset)
                yield file
        except OSError as error:
            raise FileError(f"{self.label} cannot be read: {_reason(error)}.") from error


class _RangeFile(io.RawIOBase):
    """The raw file below `ByteRange.open`: it cannot leave its range."""

    def __init__(self, place: ByteRange) -> None:
        super().__init__()
        self._place = place
        self._position = 0
        with place.raw() as file:
            self._file = open(os.dup(file.fileno()), "rb", buffering=0)  # noqa: SIM115 (closed by close)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = max(0, offset + (0, self._position, self._place.length)[whence])
        return self._position

    def readinto(self, target: memoryview) -> int:  # type: ignore[override]
        count = max(0, min(len(target), self._place.length - self._position))
        self._file.seek(self._place.offset + self._position)
        got = self._file.readinto(memoryview(target)[:count]) or 0
        self._position += got
        return got

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def shown(name: str) -> str:
    """Return a path for use in a message: one line, printable, and not long."""
    text = name.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 300 else text[:150] + "…" + text[-150:]


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).lower()
