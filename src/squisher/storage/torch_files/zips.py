"""The directory of a zip archive: where each entry's bytes are, checked so that no size in it has to be believed."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import BinaryIO, NamedTuple

from ...errors import FileError
from ..byte_range import ByteRange
from .values import shortened

__all__ = ["Archive", "Entry", "Places"]

LOCAL, CENTRAL, END, END64, LOCATOR64 = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_end = struct.Struct("<4s4H2LH")
_locator64 = struct.Struct("<4sLQL")
_end64 = struct.Struct("<4sQ2H2L4Q")
_central = struct.Struct("<4s6H3L5H2L")
_local = struct.Struct("<4s5H3L2H")
STORED, DEFLATED = 0, 8
ENCRYPTED = 1 | 1 << 6 | 1 << 13
UNKNOWN32 = 0xFFFFFFFF
MAX_COMMENT = 65535
MAX_DIRECTORY = 1 << 28  # bytes
MAX_ENTRIES = 500_000  # of a state that the pickle machine would still read; each takes some microseconds
MAX_INFLATED = 1 << 24


class Entry(NamedTuple):
    """One entry as the central directory describes it."""

    name: str
    method: int
    crc32: int
    compressed: int
    size: int
    header: int  # offset of its local header
    limit: int  # where the next thing in the file begins


class Archive:
    """An open zip archive.

    Args:
        span: Where it is.
        file: The same, open; it stays the caller's to close.
        entries: Its directory, if it has been read.
    """

    def __init__(self, span: ByteRange, file: BinaryIO, entries: dict[str, Entry] | None = None) -> None:
        self.span = span
        self._file = file
        self.entries = self._directory() if entries is None else entries

    def place(self, name: str) -> ByteRange:
        """Return the bytes of a stored entry."""
        entry = self.entries[name]
        if entry.method != STORED:
            raise FileError(
                f"{self.span.label}: {shortened(name)} in it is compressed, which torch never does. "
                "Unpack the archive and pack it again without compression."
            )
        return self._data(entry)

    def read(self, name: str, limit: int) -> bytes:
        """Return the content of an entry, stored or (if small) deflated."""
        entry = self.entries[name]
        if entry.size > (limit if entry.method == STORED else min(limit, MAX_INFLATED)):
            raise FileError(
                f"{self.span.label}: {shortened(name)} in it is {entry.size} bytes long, too long to be read."
            )
        data = self._data(entry).read()
        if entry.method == DEFLATED:
            inflater = zlib.decompressobj(-15)
            try:
                data = inflater.decompress(data, entry.size + 1)
            except zlib.error as error:
                raise self._damaged(f"{shortened(name)} cannot be unpacked") from error
        elif entry.method != STORED:
            raise self._damaged(f"{shortened(name)} is compressed in an unknown way")
        if len(data) != entry.size:
            raise self._damaged(f"{shortened(name)} does not have the size that it claims")
        if entry.crc32 and zlib.crc32(data) != entry.crc32:
            raise self._damaged(f"the checksum of {shortened(name)} does not fit its bytes")
        return data

    def _data(self, entry: Entry) -> ByteRange:
        self._file.seek(entry.header)
        header = self._file.read(_local.size)
        if len(header) < _local.size or header[:4] != LOCAL:
            raise self._damaged(f"{shortened(entry.name)} is not where it should be")
        *_, name_length, extra_length = _local.unpack(header)
        if self._file.read(name_length) != entry.name.encode("utf-8", "surrogateescape"):
            raise self._damaged(f"{shortened(entry.name)} has two names")
        start = entry.header + _local.size + name_length + extra_length
        if start + entry.compressed > entry.limit:
            raise self._damaged(f"{shortened(entry.name)} reaches into what follows it")
        return self.span.part(start, entry.compressed, entry.name)

    def _directory(self) -> dict[str, Entry]:
        start, length, count = self._locate()
        if length > MAX_DIRECTORY or count > MAX_ENTRIES:
            raise FileError(f"{self.span.label}: the directory of the zip archive is too long to be read.")
        self._file.seek(start)
        data = self._file.read(length)
        rows: list[tuple[str, int, int, int, int, int]] = []
        position = 0
        while position < len(data) and len(rows) < count:
            row, position = self._row(data, position)
            rows.append(row)
        if len(data) != length or len(rows) != count:
            raise self._damaged("its directory is incomplete")
        rows.sort(key=lambda row: row[-1])
        entries: dict[str, Entry] = {}
        limits = [*(row[-1] for row in rows), start][1:]
        for row, limit in zip(rows, limits, strict=True):
            entry = Entry(*row, limit)
            if entry.header + _local.size + entry.compressed > limit:
                raise self._damaged(f"{shortened(entry.name)} overlaps with what follows it")
            if entry.name in entries:
                raise self._damaged(f"{shortened(entry.name)} is in it twice")
            entries[entry.name] = entry
        return entries

    def _row(self, data: bytes, position: int) -> tuple[tuple[str, int, int, int, int, int], int]:
        if position + _central.size > len(data) or data[position : position + 4] != CENTRAL:
            raise self._damaged("its directory is damaged")
        fields = _central.unpack_from(data, position)
        flags, method, crc, compressed, size = fields[3], fields[4], fields[7], fields[8], fields[9]
        name_length, extra_length, comment_length, header = fields[10], fields[11], fields[12], fields[16]
        position += _central.size
        extra_start = position + name_length
        end = extra_start + extra_length + comment_length
        if end > len(data):
            raise self._damaged("its directory is cut short")
        name = data[position:extra_start].decode("utf-8", "surrogateescape")
        if flags & ENCRYPTED:
            raise FileError(
                f"{self.span.label}: {shortened(name)} in it is encrypted. Unpack it with its password first."
            )
        extra = data[extra_start : extra_start + extra_length]
        size, compressed, header = self._wide(extra, [size, compressed, header])
        if method == STORED and size != compressed:
            raise self._damaged(f"{shortened(name)} has two sizes")
        return (name, method, crc, compressed, size, header), end

    def _wide(self, extra: bytes, values: list[int]) -> list[int]:
        """Return the sizes and offset of an entry, from its zip64 field where 32 bits did not hold them."""
        if UNKNOWN32 not in values:
            return values
        position = 0
        while position + 4 <= len(extra):
            kind, length = struct.unpack_from("<2H", extra, position)
            position += 4
            if kind == 1:
                wide = iter(struct.unpack_from(f"<{min(length, len(extra) - position) // 8}Q", extra, position))
                found = [next(wide, None) if value == UNKNOWN32 else value for value in values]
                if None not in found:
                    return [value for value in found if value is not None]
                break
            position += length
        raise self._damaged("an entry of over 4 GB does not say its size")

    def _locate(self) -> tuple[int, int, int]:
        """Offset, length and number of entries of the central directory."""
        tail_start = max(0, self.span.length - MAX_COMMENT - _end.size - _locator64.size)
        self._file.seek(tail_start)
        tail = self._file.read(self.span.length - tail_start)
        at = tail.rfind(END)
        if at < 0 or at + _end.size > len(tail):
            raise FileError(
                f"{self.span.label} is cut short: it begins as a zip archive, but the end of one is missing. "
                "It was half written, or the download broke off; get it again."
            )
        _, disk, first_disk, _, count, length, start, _ = _end.unpack_from(tail, at)
        end = tail_start + at
        if at >= _locator64.size and tail[at - _locator64.size : at - _locator64.size + 4] == LOCATOR64:
            _, _, end, _ = _locator64.unpack_from(tail, at - _locator64.size)
            self._file.seek(min(end, self.span.length))
            record = self._file.read(_end64.size)
            if len(record) < _end64.size or record[:4] != END64:
                raise self._damaged("its zip64 directory is not where it should be")
            *_, disk, first_disk, _, count, length, start = _end64.unpack(record)
        if disk or first_disk:
            raise FileError(f"{self.span.label} is one part of a zip archive in several. Join them first.")
        if start + length > end:
            raise self._damaged("its directory is not where it should be")
        return start, length, count

    def _damaged(self, what: str) -> FileError:
        return FileError(f"{self.span.label} is a damaged zip archive: {what}. Get it again.")


class Places(Mapping[str, ByteRange]):
    """Where the stored entries of an archive are; each is looked up when it is asked for, since there may be many."""

    def __init__(self, archive: Archive) -> None:
        self._span = archive.span
        self._entries = {name: entry for name, entry in archive.entries.items() if entry.method == STORED}

    def __getitem__(self, name: str) -> ByteRange:
        self._entries[name]  # a KeyError for what is not there
        with self._span.open() as file:
            return Archive(self._span, file, self._entries).place(name)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
