"""A run of bytes in a file (or in memory), read only when asked for.

A torch file may be a file of its own, an entry of another zip archive, or a blob at some offset of a shard: a `Span` makes
them all the same to the readers.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import BinaryIO, cast

from ...errors import FileError

__all__ = ["Span"]


@dataclass(frozen=True)
class Span:
    """`length` bytes from `offset` on, in the file at `path` or in `buffer`.

    Attributes:
        path: The file, or what to call the bytes in messages where they are in memory.
        offset: The first byte, counted from the start of the file.
        length: The number of bytes.
        inner: The name of the part inside the file (a zip entry, say), for messages.
        buffer: The bytes themselves where they are not in a file; `offset` then counts from its start.
    """

    path: str
    offset: int
    length: int
    inner: str = ""
    buffer: bytes | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Span:
        """The whole of a regular file."""
        name = os.fspath(path)
        try:
            info = os.stat(name)
        except (OSError, ValueError) as error:
            raise FileError(f"{name} cannot be read: {_reason(error)}.") from error
        if stat.S_ISDIR(info.st_mode):
            raise FileError(f"{name} is a folder; a file was expected.")
        if not stat.S_ISREG(info.st_mode):
            raise FileError(f"{name} is not a regular file (a pipe or a device?); copy it to a file first.")
        return cls(name, 0, info.st_size)

    @classmethod
    def of_bytes(cls, data: bytes, name: str = "bytes in memory") -> Span:
        """Bytes that are in memory already."""
        return cls(name, 0, len(data), buffer=data)

    @property
    def label(self) -> str:
        """How messages call it."""
        return f"{self.path} ({self.inner})" if self.inner else self.path

    def part(self, offset: int, length: int, inner: str = "") -> Span:
        """A run of bytes inside this one; `offset` counts from the start of this one."""
        if offset < 0 or length < 0 or offset + length > self.length:
            raise FileError(
                f"{self.label} is {self.length} bytes long, but bytes {offset} to {offset + length} are asked for: "
                "it is cut short or damaged. Get it again."
            )
        return Span(self.path, self.offset + offset, length, inner or self.inner, self.buffer)

    def read(self, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes from `offset` (counted from the start of the span) on; to its end without a `length`."""
        part = self.part(offset, self.length - offset if length is None else length)
        if part.buffer is not None:
            return part.buffer[part.offset : part.offset + part.length]
        with part.raw() as file:
            data = file.read(part.length)
            while len(data) < part.length:
                more = file.read(part.length - len(data))
                if not more:
                    raise part.shorter()
                data += more
        return data

    def read_into(self, target: memoryview, offset: int = 0) -> None:
        """Fill `target` with the bytes from `offset` on."""
        part = self.part(offset, target.nbytes)
        if part.buffer is not None:
            target[:] = memoryview(part.buffer)[part.offset : part.offset + part.length]
            return
        done = 0
        with part.raw() as file:
            while done < part.length:
                got = file.readinto(target[done:])
                if not got:
                    raise part.shorter()
                done += got

    def open(self) -> BinaryIO:
        """A seekable file object over the span alone, as `zipfile` and `h5py` want one."""
        if self.buffer is not None:
            return io.BytesIO(self.buffer[self.offset : self.offset + self.length])
        return cast(BinaryIO, io.BufferedReader(_SpanFile(self)))

    @contextmanager
    def raw(self) -> Iterator[io.FileIO]:
        """The unbuffered file, standing at the first byte; its errors become messages."""
        try:
            with open(self.path, "rb", buffering=0) as file:
                file.seek(self.offset)
                yield file
        except OSError as error:
            raise FileError(f"{self.label} cannot be read: {_reason(error)}.") from error

    def shorter(self) -> FileError:
        """The error for a file that ends before this span does, though it once did not."""
        return FileError(f"{self.label} has become shorter while it was read. Is it still being written?")


class _SpanFile(io.RawIOBase):
    """The raw file below `Span.open`: it cannot leave its span."""

    def __init__(self, span: Span) -> None:
        super().__init__()
        self._span = span
        self._position = 0
        try:
            self._file = open(span.path, "rb", buffering=0)  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise FileError(f"{span.label} cannot be read: {_reason(error)}.") from error

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = max(0, offset + (0, self._position, self._span.length)[whence])
        return self._position

    def readinto(self, target: memoryview) -> int:  # type: ignore[override]
        count = max(0, min(len(target), self._span.length - self._position))
        self._file.seek(self._span.offset + self._position)
        got = self._file.readinto(memoryview(target)[:count]) or 0
        self._position += got
        return got

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).lower()
