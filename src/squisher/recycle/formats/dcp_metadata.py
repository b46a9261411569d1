"""What a `torch.distributed.checkpoint` folder holds: its `.metadata`, and the tensors whose blocks lie in the shards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from ...errors import FileError
from ...storage.pieces import Block, Blocks, Verified
from ...storage.torch_files import Record, Span, StoredTensor, read, unpickle

__all__ = ["Checkpoint"]

_COMMON = "Save it with torch.distributed.checkpoint's FileSystemWriter as it is by default."


class Checkpoint:
    """What `.metadata` says: the entries in the order in which they were saved, and where their bytes are.

    Attributes:
        folder: Where it is.
        paths: The path of each entry in the saved dictionary, by key.
        in_order: Whether they are in the order in which they were saved; the planner's order is, that of the entries is not.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        record = unpickle(Span.of(folder / ".metadata").read(), name=str(folder / ".metadata"))
        entries = _attribute(record, "state_dict_metadata", dict)
        self._entries: dict[str, Record] = {
            k: v for k, v in entries.items() if isinstance(k, str) and isinstance(v, Record)
        }
        self._places: dict[tuple[str, tuple[int, ...] | None], Record] = {}
        for index, info in _attribute(record, "storage_data", dict).items():
            if isinstance(index, Record) and isinstance(info, Record):
                name, offset = index.get("fqn"), index.get("offset")
                if isinstance(name, str) and (offset is None or _is_tuple_of(offset, int)):
                    self._places[name, offset] = info
        self._files: dict[str, Span] = {}
        planned = record.get("planner_data")
        known = planned if isinstance(planned, dict) else {}
        self.paths: dict[str, tuple[Any, ...]] = {
            k: v for k, v in known.items() if k in self._entries and _is_tuple_of(v, (int, str))
        }
        self.in_order = len(self.paths) == len(self._entries)
        for key in self._entries:
            self.paths.setdefault(key, _path_of(key, self._entries))

    def is_tensor(self, key: str) -> bool:
        """Whether an entry is a tensor; the others are pickled objects."""
        return self._entries[key].name.endswith("TensorStorageMetadata")

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._sizes(self._entries[key].get("size"), key)

    def dtype(self, key: str) -> torch.dtype:
        """The dtype of a tensor."""
        properties = self._entries[key].get("properties")
        if isinstance(properties, Record):
            said = properties.state[0] if isinstance(properties.state, tuple) and properties.state else None
            said = said or properties.get("dtype")
            if isinstance(said, torch.dtype):
                return said
        raise self._damaged(f"{key!r} has no dtype")

    def tensor(self, key: str) -> Blocks:
        """A tensor, to be read when asked for; its blocks have been checked to be there and to cover it."""
        shape, dtype = self.shape(key), self.dtype(key)
        blocks: dict[tuple[int, ...], Block] = {}
        for chunk in self._entries[key].get("chunks") or ():
            offsets = self._sizes(chunk.get("offsets") if isinstance(chunk, Record) else None, key)
            sizes = self._sizes(chunk.get("sizes") if isinstance(chunk, Record) else None, key)
            if not len(offsets) == len(sizes) == len(shape):
                raise self._damaged(f"{key!r} has {len(shape)} dimensions, one of its parts {len(sizes)}")
            if 0 not in sizes:  # a rank that got nothing
                blocks[offsets] = Block(shape, offsets, sizes, _Blob(self._span(key, offsets), sizes, dtype))
        tensor = Blocks(shape, dtype, list(blocks.values()))
        if tensor.gap:
            raise self._damaged(f"{key!r} cannot be put together: {tensor.gap}")
        return tensor

    def value(self, key: str) -> Any:
        """An entry of any kind: a tensor to be read when asked for, or the object itself."""
        return self.tensor(key) if self.is_tensor(key) else read(self._span(key, None))

    def _span(self, key: str, offset: tuple[int, ...] | None) -> Span:
        info = self._places.get((key, offset))
        if info is None:
            raise self._damaged(f"nothing says where the part of {key!r} at {offset} is")
        if info.get("transform_descriptors"):
            names = ", ".join(map(str, info.get("transform_descriptors")))
            raise FileError(
                f"The shards in {self.folder} are compressed or transformed ({names}), which is not read. {_COMMON}"
            )
        name, start, length = info.get("relative_path"), info.get("offset"), info.get("length")
        if not isinstance(name, str) or not isinstance(start, int) or not isinstance(length, int):
            raise self._damaged(f"the place of {key!r} is no file and range")
        if name.endswith(".safetensors"):
            raise FileError(
                f"The shards in {self.folder} are safetensors files, which are not read as shards. {_COMMON}"
            )
        if name not in self._files:
            inside = PurePosixPath(name)
            if inside.is_absolute() or ".." in inside.parts or "\\" in name:
                raise FileError(
                    f"{self.folder}/.metadata points to a file outside of its folder ({name!r}); it is not followed."
                )
            if not (self.folder / inside).is_file():
                raise FileError(
                    f"The distributed checkpoint {self.folder} lacks the file {name}, which holds a part of {key!r}. Every "
                    "rank writes its own: copy all of them into the folder."
                )
            self._files[name] = Span.of(self.folder / inside)
        return self._files[name].part(start, length, key)

    def _sizes(self, value: Any, key: str) -> tuple[int, ...]:
        if not _is_tuple_of(value, int) or min(value, default=0) < 0:
            raise self._damaged(f"{key!r} has no sizes")
        return value

    def _damaged(self, what: str) -> FileError:
        return FileError(f"The distributed checkpoint {self.folder} is incomplete or damaged: {what}. Get it again.")


class _Blob:
    """One block of a tensor: a torch file inside a shard, opened when its values are asked for."""

    def __init__(self, span: Span, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.span, self.shape, self.dtype = span, shape, dtype
        self._stored: Verified | None = None

    def load(self) -> Tensor:
        """The whole block."""
        return self._opened().load()

    def read_flat(self, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` in flat order."""
        return self._opened().read_flat(start, stop)

    def _opened(self) -> Verified:
        if self._stored is None:
            value = read(self.span)
            if not isinstance(value, StoredTensor) or value.shape != self.shape or value.dtype != self.dtype:
                found = f"{value.shape}, {value.dtype}" if isinstance(value, StoredTensor) else type(value).__name__
                raise FileError(
                    f"{self.span.label} should hold a tensor of {self.shape}, {self.dtype}, but holds {found}."
                )
            self._stored = Verified(value)
        return self._stored


def _is_tuple_of(value: Any, kinds: type | tuple[type, ...]) -> bool:
    return isinstance(value, tuple) and all(isinstance(part, kinds) for part in value)


def _attribute(record: Any, name: str, kind: type) -> Any:
    value = record.get(name) if isinstance(record, Record) else None
    if not isinstance(value, kind):
        raise FileError(
            f"A .metadata file was expected to be what torch.distributed.checkpoint writes, but it has no {name}. Get it again."
        )
    return value


def _path_of(key: str, keys: Mapping[str, Any]) -> tuple[str, ...]:
    """A path for an entry without one: its key, behind the prefix of an optimizer that has groups."""
    for prefix in ("", "optimizer.", "optim.", "app.optim.", "app.optimizer."):
        belongs = key.startswith((f"{prefix}state.", f"{prefix}param_groups"))
        if belongs and any(other.startswith(f"{prefix}param_groups") for other in keys):
            return (*prefix.split(".")[:-1], key[len(prefix) :])
    return tuple(key.split(".", 1))
