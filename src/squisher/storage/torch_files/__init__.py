"""Read `torch.save` files without executing anything: storages are byte ranges, and foreign objects become records.

This file has the containers: torch's zip archives, its older format, plain pickles, and files that are mistaken for them. No size
in a zip directory is trusted. Read on in `machine` (which runs a pickle), `opcodes` (its instructions), `known` (the closed
list of globals) and `values` (what comes out).
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

from ...errors import FileError
from ..byte_range import ByteRange
from .known import StorageType
from .machine import Machine
from .values import (
    Array,
    Global,
    Record,
    Storage,
    StoredTensor,
    Verified,
    find_weights,
    is_in_backward,
    is_optimizer,
    shortened,
    walk,
)

__all__ = [
    "Array", "Global", "Record", "Storage", "StoredTensor", "Verified", "find_weights", "is_in_backward", "is_optimizer", "read", "unpickle", "walk",
    "zip_entries",
]  # fmt: skip

MAX_PICKLE = 1 << 30
FIRST_WINDOW = 1 << 22
MAX_NESTING = 2  # a pickled storage is a torch file inside a pickle; deeper ones are nothing torch writes
MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001


def read(source: str | os.PathLike[str] | ByteRange, nesting: int = 0) -> Any:
    """Read a `torch.save` file (new or old format) or a plain pickle; nothing in it is executed.

    Args:
        source: A file, or a torch file inside another one.
        nesting: How many torch files this one is inside of.

    Returns:
        The saved object: dicts, lists, tuples, numbers and text as they are; `StoredTensor` for tensors, whose values stay
        in the file until they are asked for; `Record` for objects of other classes, `Global` for classes themselves.

    Raises:
        FileError: If the file is missing, damaged, hostile, or of another format.
    """
    byte_range = source if isinstance(source, ByteRange) else ByteRange.of(source)
    head = byte_range.read(0, min(byte_range.length, 512))
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return _read_zip(byte_range, nesting)
    if len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5:
        return _read_pickles(byte_range, nesting)
    raise FileError(f"{byte_range.label} {_mistaken(byte_range, head)}")


def unpickle(data: bytes, name: str = "the pickle") -> Any:
    """Read one plain pickle in memory; nothing in it is executed.

    Args:
        data: The pickle.
        name: What to call it in messages.
    """
    return Machine(data, name, nested_load=_nested(name, 0)).run()


def zip_entries(source: str | os.PathLike[str] | ByteRange) -> Mapping[str, ByteRange]:
    """Return where each entry of a zip archive is; nothing is unpacked, and compressed entries are left out."""
    byte_range = source if isinstance(source, ByteRange) else ByteRange.of(source)
    with byte_range.open() as file:
        return Places(Archive(byte_range, file))


def _nested(label: str, nesting: int) -> Callable[[bytes], Any]:
    def load(data: bytes) -> Any:
        if nesting >= MAX_NESTING:
            raise FileError(f"{label} holds torch files inside torch files, too deep to be read.")
        return read(ByteRange.of_bytes(data, label), nesting + 1)

    return load


def _read_zip(byte_range: ByteRange, nesting: int) -> Any:
    with byte_range.open() as file:
        archive = Archive(byte_range, file)
        pickles = [name for name in archive.entries if name.rpartition("/")[2] == "data.pkl"]
        if len(pickles) != 1:
            raise FileError(
                f"{byte_range.label} is a zip archive with {len(pickles) or 'no'} data.pkl in it, so not one that torch.save "
                "wrote. Give the file that holds the optimizer state."
            )
        folder = pickles[0][: -len("data.pkl")]
        if folder + "constants.pkl" in archive.entries:
            raise FileError(
                f"{byte_range.label} is a TorchScript program (torch.jit.save), which holds no optimizer state. "
                "Give the file that torch.save wrote during training."
            )
        if folder + "byteorder" in archive.entries:
            order = archive.read(folder + "byteorder", 64)
            if order != b"little":
                raise FileError(
                    f"{byte_range.label} has {shortened(order.decode('latin1'))}-endian numbers; only little-endian is read."
                )
        storages: dict[tuple[str, StorageType, int], Storage] = {}

        def storage(identifier: Any) -> Storage:
            kind, key, location, numel = _storage_identifier(identifier, 5)
            known = storages.get((key, kind, numel))
            if known is not None:
                return known
            entry = archive.entries.get(f"{folder}data/{key}")
            if entry is None:
                raise FileError(f"{byte_range.label} lacks the data of storage {shortened(key)}. Get the file again.")
            place = archive.place(entry)
            nbytes = numel * kind.dtype.itemsize
            if nbytes > place.length:
                raise FileError(
                    f"{place.label} holds {place.length} bytes, but its tensors need {nbytes}: the file is damaged. "
                    "Get it again."
                )
            checksum = (place, entry.crc32) if entry.crc32 else None
            new = Storage(kind.dtype, nbytes, location, place.part(0, nbytes), checksum)
            storages[key, kind, numel] = new
            return new

        data = archive.read(pickles[0], MAX_PICKLE)
        return Machine(
            data, byte_range.label, persistent_load=storage, nested_load=_nested(byte_range.label, nesting)
        ).run()


def _read_pickles(byte_range: ByteRange, nesting: int) -> Any:
    """Read the old format or a plain pickle: no more of the file than the pickles at its beginning."""
    window = FIRST_WINDOW
    while True:
        data = byte_range.read(0, min(byte_range.length, window, MAX_PICKLE))
        try:
            return _Legacy(byte_range, data, nesting).read()
        except FileError:
            if len(data) >= min(byte_range.length, MAX_PICKLE):
                raise
            window *= 8


class _Legacy:
    """A file of torch before 1.6: five pickles, then the storages one after another."""

    def __init__(self, byte_range: ByteRange, data: bytes, nesting: int) -> None:
        self.byte_range = byte_range
        self.data = data
        self.nesting = nesting
        self.position = 0
        self.storages: dict[str, Storage] = {}
        self.views: dict[str, tuple[Storage, Storage, int]] = {}

    def read(self) -> Any:
        first = self._next(None)
        if type(first) is not int or first != MAGIC:
            if self.position < self.byte_range.length:
                raise FileError(
                    f"{self.byte_range.label} is not a torch file: it is a pickle with {self.byte_range.length - self.position} bytes "
                    "of something else behind it."
                )
            return first
        if self._next(None) != PROTOCOL:
            raise FileError(
                f"{self.byte_range.label} is of a version of the old torch format that is not known. Save it anew."
            )
        system = self._next(None)
        if type(system) is not dict or system.get("little_endian") is not True:
            raise FileError(f"{self.byte_range.label} has big-endian numbers; only little-endian is read.")
        value = self._next(self._persistent)
        keys = self._next(None)
        if type(keys) is not list:
            raise FileError(f"{self.byte_range.label} has no list of storages: it is damaged. Get it again.")
        for key in keys:
            self._place(key)
        if self.storages:
            raise FileError(
                f"{self.byte_range.label} lacks the data of {len(self.storages)} storages: it is cut short. Get it again."
            )
        for view, whole, offset in self.views.values():
            view.place(whole.byte_range.part(offset, view.nbytes))
        return value

    def _next(self, persistent_load: Callable[[Any], Any] | None) -> Any:
        nested = _nested(self.byte_range.label, self.nesting)
        machine = Machine(self.data, self.byte_range.label, self.position, persistent_load, nested)
        value = machine.run()
        self.position = machine.position
        return value

    def _persistent(self, identifier: Any) -> Any:
        if type(identifier) is tuple and len(identifier) == 4 and identifier[0] in ("module", b"module"):
            return identifier[1]  # a module class together with its source code
        kind, key, location, numel = _storage_identifier(identifier, 6)
        nbytes = numel * kind.dtype.itemsize
        storage = self.storages.get(key)
        if storage is None:
            storage = self.storages[key] = Storage(kind.dtype, nbytes, location)
        elif storage.nbytes != nbytes:
            raise FileError(
                f"{self.byte_range.label} gives storage {shortened(key)} two sizes: it is damaged. Get it again."
            )
        if identifier[5] is None:
            return storage
        view_key, offset, count = identifier[5]
        if type(view_key) is not str or type(offset) is not int or type(count) is not int or min(offset, count) < 0:
            raise ValueError("a view of a storage that does not say of what")
        if view_key not in self.views:
            size = storage.dtype.itemsize
            if (offset + count) * size > storage.nbytes:
                raise ValueError("a view that is larger than its storage")
            self.views[view_key] = Storage(storage.dtype, count * size, location), storage, offset * size
        return self.views[view_key][0]

    def _place(self, key: Any) -> None:
        storage = self.storages.pop(key, None) if type(key) is str else None
        if storage is None:
            raise FileError(f"{self.byte_range.label} lists a storage that nothing uses: it is damaged. Get it again.")
        (count,) = struct.unpack("<q", self.byte_range.read(self.position, 8))
        if count * storage.dtype.itemsize != storage.nbytes:
            raise FileError(
                f"{self.byte_range.label} gives storage {shortened(key)} two sizes: it is damaged. Get it again."
            )
        storage.place(self.byte_range.part(self.position + 8, storage.nbytes, f"storage {key[:40]}"))
        self.position += 8 + storage.nbytes


def _storage_identifier(identifier: Any, length: int) -> tuple[StorageType, str, str, int]:
    if type(identifier) is not tuple or len(identifier) != length or identifier[0] not in ("storage", b"storage"):
        raise ValueError("an outside object that is no storage")
    kind, key, location, numel = identifier[1:5]
    if type(key) is bytes:
        key = key.decode("ascii")
    if type(kind) is not StorageType or type(key) is not str or not 0 < len(key) <= 64 or "/" in key or "\\" in key:
        raise ValueError("a storage without a type or a key")
    if type(numel) is not int or not 0 <= numel < 1 << 60:
        raise ValueError("a storage without a size")
    if location in ("meta", b"meta"):
        raise ValueError("a storage on the meta device, which has no values")
    return kind, key, location if type(location) is str else "cpu", numel


def _mistaken(byte_range: ByteRange, head: bytes) -> str:
    """Return what a file is if it is no torch file, and what to do."""
    text = head.lstrip().lower()
    if not head:
        return "is empty. The saving or the download was interrupted; get it again."
    if head.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the file itself. Run `git lfs pull` in its repository."
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "is a web page, not a torch file: the download went to the wrong address. Download the raw file."
    if len(head) > 9 and head[8:9] == b"{" and struct.unpack_from("<Q", head)[0] <= byte_range.length - 8:
        return (
            "is a safetensors file. It holds named tensors but no optimizer state; give the file that torch.save wrote."
        )
    if head[257:262] == b"ustar" or (head[:8] in (b"storages", b"tensors\0", b"sys_info") and len(head) == 512):
        return "is a tar archive (torch before 0.2 wrote such). Load it with an old torch and save it anew."
    if head.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"7z\xbc\xaf", b"\x28\xb5\x2f\xfd", b"Rar!")):
        return "is compressed. Unpack it first."
    if head.startswith(b"\x89HDF"):
        return "is an HDF5 file (Keras?), not a torch file."
    if head.startswith(b"GGUF"):
        return "is a GGUF file: it holds weights only. Give the file that torch.save wrote."
    if not any(head):
        return "begins with zeros: the download or the disk failed. Get it again."
    return "is not a torch file: it begins as neither the zip archive nor the pickle that torch.save writes."


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
MAX_ENTRIES = 500_000  # more than a state has that the pickle machine would still read; each takes some microseconds
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
        byte_range: Where it is.
        file: The same, open; it stays the caller's to close.
        entries: Its directory, if it has been read.
    """

    def __init__(self, byte_range: ByteRange, file: BinaryIO, entries: dict[str, Entry] | None = None) -> None:
        self.byte_range = byte_range
        self._file = file
        self.entries = self._directory() if entries is None else entries

    def read(self, name: str, limit: int) -> bytes:
        """Return the content of an entry, stored or (if small) deflated."""
        entry = self.entries[name]
        if entry.size > (limit if entry.method == STORED else min(limit, MAX_INFLATED)):
            raise FileError(
                f"{self.byte_range.label}: {shortened(name)} in it is {entry.size} bytes long, too long to be read."
            )
        data = self.place(entry, compressed=True).read()
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

    def place(self, entry: Entry, compressed: bool = False) -> ByteRange:
        """Return where the bytes of an entry are; a compressed one is refused unless asked for."""
        if entry.method != STORED and not compressed:
            raise FileError(
                f"{self.byte_range.label}: {shortened(entry.name)} in it is compressed, which torch never does. "
                "Unpack the archive and pack it again without compression."
            )
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
        return self.byte_range.part(start, entry.compressed, entry.name)

    def _directory(self) -> dict[str, Entry]:
        start, length, count = self._locate()
        if length > MAX_DIRECTORY or count > MAX_ENTRIES:
            raise FileError(f"{self.byte_range.label}: the directory of the zip archive is too long to be read.")
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
                f"{self.byte_range.label}: {shortened(name)} in it is encrypted. Unpack it with its password first."
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
        """Return offset, length and number of entries of the central directory."""
        tail_start = max(0, self.byte_range.length - MAX_COMMENT - _end.size - _locator64.size)
        self._file.seek(tail_start)
        tail = self._file.read(self.byte_range.length - tail_start)
        at = tail.rfind(END)
        if at < 0 or at + _end.size > len(tail):
            raise FileError(
                f"{self.byte_range.label} is cut short: it begins as a zip archive, but the end of one is missing. "
                "It was half written, or the download broke off; get it again."
            )
        _, disk, first_disk, _, count, length, start, _ = _end.unpack_from(tail, at)
        end = tail_start + at
        if at >= _locator64.size and tail[at - _locator64.size : at - _locator64.size + 4] == LOCATOR64:
            _, _, end, _ = _locator64.unpack_from(tail, at - _locator64.size)
            self._file.seek(min(end, self.byte_range.length))
            record = self._file.read(_end64.size)
            if len(record) < _end64.size or record[:4] != END64:
                raise self._damaged("its zip64 directory is not where it should be")
            *_, disk, first_disk, _, count, length, start = _end64.unpack(record)
        if disk or first_disk:
            raise FileError(f"{self.byte_range.label} is one part of a zip archive in several. Join them first.")
        if start + length > end:
            raise self._damaged("its directory is not where it should be")
        return start, length, count

    def _damaged(self, what: str) -> FileError:
        return FileError(f"{self.byte_range.label} is a damaged zip archive: {what}. Get it again.")


class Places(Mapping[str, ByteRange]):
    """Where the stored entries of an archive are; each is looked up when it is asked for, since there may be many."""

    def __init__(self, archive: Archive) -> None:
        self._byte_range = archive.byte_range
        self._entries = {name: entry for name, entry in archive.entries.items() if entry.method == STORED}

    def __getitem__(self, name: str) -> ByteRange:
        entry = self._entries[name]
        with self._byte_range.open() as file:
            return Archive(self._byte_range, file, self._entries).place(entry)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
