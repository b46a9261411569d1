"""Named tensors: in memory or in files, read when asked for, piece by piece.

A lazy mapping, a `state_dict()` and a test dict are the same to every caller: `shape_of`, `dtype_of` and `chunks_of`
work on all of them, and read nothing that was not asked for.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from .errors import FileError, NamingError, near
from .shards import local_of, whole

__all__ = [
    "CHUNK",
    "LazyTensors",
    "TensorSource",
    "adapter_file_name",
    "chunks_of",
    "dtype_of",
    "live_parameters",
    "name_pattern",
    "numel_of",
    "one_thread",
    "room_for",
    "shape_of",
    "tied_names",
]

CHUNK = 1 << 18
"""Elements per piece: 1 MB of float32, so that a piece and what is computed from it stay in the cache."""


@runtime_checkable
class TensorSource(Protocol):
    """One tensor that is not in memory: its shape and dtype are known, its values are read when asked for."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the stored values."""

    def load(self) -> Tensor:
        """The whole tensor."""

    def read_flat(self, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` in flat order."""


class FileTensor(NamedTuple):
    """A tensor that lies in one stretch of bytes of a file."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    def load(self) -> Tensor:
        """The whole tensor."""
        return self.read_flat(0, _numel(self.shape)).view(self.shape)

    def read_flat(self, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` in flat order, read with plain `read` calls so that no page stays mapped."""
        out = room_for(stop - start, self.dtype)
        if stop > start:
            read_into(self.path, self.offset + start * self.dtype.itemsize, out)
        return out


_ROOM = 8 * CHUNK  # bytes
_ROOMS = 32
_rooms: list[np.ndarray] = []
_rooms_lock = Lock()


def room_for(numel: int, dtype: torch.dtype) -> Tensor:
    """Memory for a piece: that of an earlier piece which nobody holds any more, if there is one; its content is arbitrary.

    The system takes pieces of this size back when they are freed, and a page fault for every 4 kB of a new one costs as much as
    the work on it. The first free one is taken, so that few are in use and those are in the cache.
    """
    size = numel * dtype.itemsize
    if not _ROOM // 16 <= size <= _ROOM:
        return torch.empty(numel, dtype=dtype)
    with _rooms_lock:
        place = next((k for k in range(len(_rooms)) if _holders(_rooms, k) == _NOBODY), None)
        if place is None:
            if len(_rooms) == _ROOMS:
                return torch.empty(numel, dtype=dtype)
            _rooms.append(np.empty(_ROOM, np.uint8))
            place = -1
        return torch.from_numpy(_rooms[place][:size]).view(dtype)


def _holders(rooms: list[np.ndarray], place: int) -> int:
    return sys.getrefcount(rooms[place])


_NOBODY = _holders([np.empty(0, np.uint8)], 0)  # as this interpreter counts: nothing but the list, and what counts


def read_into(path: str, offset: int, out: Tensor) -> None:
    """Fills a contiguous tensor with the bytes of a file from `offset` on.

    Raises:
        FileError: The file cannot be read or ends too early.
    """
    view = out.view(-1).view(torch.uint8).numpy().data
    done = 0
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            while done < len(view):
                got = file.readinto(view[done:])
                if not got:
                    break
                done += got
    except OSError as error:
        raise FileError(f"Cannot read {path}: {error.strerror or error}.") from error
    if done < len(view):
        raise FileError(
            f"{path} ends at byte {offset + done}, but a tensor should reach to byte {offset + len(view)}: "
            "the file is truncated; copy or download it again."
        )


class LazyTensors(Mapping[str, Tensor]):
    """Named tensors that are read when asked for; opening it costs no more than reading the headers."""

    def __init__(self, sources: Mapping[str, TensorSource], metadata: Mapping[str, str] | None = None):
        self._sources = dict(sources)
        self.metadata = dict(metadata or {})

    def __getitem__(self, name: str) -> Tensor:
        return self._source(name).load()

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def __repr__(self) -> str:
        return f"LazyTensors({len(self)} tensors)"

    def shape(self, name: str) -> torch.Size:
        """The shape of one tensor, without reading it."""
        return torch.Size(self._source(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        """The data type of one tensor, without reading it."""
        return self._source(name).dtype

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[Tensor]:
        """The tensor in flat pieces of at most `size` elements, in order."""
        source = self._source(name)
        numel = _numel(source.shape)
        for start in range(0, numel, size):
            yield source.read_flat(start, min(start + size, numel))

    def source(self, name: str) -> TensorSource:
        """Where one tensor lies."""
        return self._source(name)

    def _source(self, name: str) -> TensorSource:
        try:
            return self._sources[name]
        except KeyError:
            raise KeyError(f"no tensor named {name!r}.{near(name, self._sources)}") from None


def shape_of(tensors: Mapping[str, Tensor], name: str) -> torch.Size:
    """The shape of one tensor of any mapping; reads no data from a lazy one."""
    shape = getattr(tensors, "shape", None)
    return torch.Size(shape(name)) if callable(shape) else tensors[name].shape


def numel_of(tensors: Mapping[str, Tensor], name: str) -> int:
    """The number of elements of one tensor of any mapping; reads no data from a lazy one."""
    return _numel(shape_of(tensors, name))


def dtype_of(tensors: Mapping[str, Tensor], name: str) -> torch.dtype:
    """The data type of one tensor of any mapping; reads no data from a lazy one."""
    dtype = getattr(tensors, "dtype", None)
    return cast(torch.dtype, dtype(name)) if callable(dtype) else tensors[name].dtype


def chunks_of(tensors: Mapping[str, Tensor], name: str, size: int = CHUNK) -> Iterator[Tensor]:
    """One tensor of any mapping in flat pieces on the CPU, in order; memory is bounded by a piece for a lazy one.

    A tensor that is spread over processes is gathered first: all of them must ask for it at the same time.
    """
    chunks = getattr(tensors, "chunks", None)
    if callable(chunks):
        yield from chunks(name, size)
        return
    flat = whole(tensors[name].detach()).reshape(-1)
    for start in range(0, flat.numel(), size):
        yield flat[start : start + size].cpu()


def name_pattern(pattern: str | None) -> re.Pattern[str] | None:
    """A user's regular expression over parameter names.

    Raises:
        NamingError: It is not a regular expression.
    """
    try:
        return None if pattern is None else re.compile(pattern)
    except re.error as error:
        raise NamingError(f"{pattern!r} is not a regular expression: {error}.") from error


@contextmanager
def one_thread() -> Iterator[None]:
    """Keeps torch from sharing small pieces among threads, for work that streams over many of them.

    A piece fits a cache, and its threads would wait for one another at every operation: on a machine that has other work to
    do, that is ten times slower than one thread alone.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def tied_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Names that are another name's very tensor: `{alias: first name}`.

    In memory, tensors that share address and shape; in files, those that share their bytes. A mapping that computes its tensors
    knows it itself, in its attribute `tied`.
    """
    if not isinstance(tensors, LazyTensors) and callable(getattr(tensors, "chunks", None)):
        return dict(getattr(tensors, "tied", {}))  # each tensor is new when asked for, and an address may come twice
    first: dict[Any, str] = {}
    tied = {}
    alive = []  # as long as it is, no other tensor can get its address
    for name in tensors:
        if not numel_of(tensors, name):
            continue
        if isinstance(tensors, LazyTensors):
            key = _place(tensors.source(name))
        else:
            alive.append(tensors[name])
            key = _address(alive[-1])
        if key is not None and first.setdefault(key, name) != name:
            tied[name] = first[key]
    return tied


def _place(source: Any) -> Any:
    if isinstance(source, FileTensor):
        return (source.path, source.offset, source.shape)
    return (source.span, source.storage_offset, source.shape) if hasattr(source, "span") else None


def _address(tensor: Tensor) -> Any:
    tensor = local_of(tensor)
    return (
        None
        if tensor.is_meta or not tensor.numel()
        else (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
    )


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for length in shape:
        numel *= length
    return numel


# ---------------------------------------------------------------------------------------------------------------------
# The parameters of a live module, under the names that its weight file has.

_WRAPPERS = {  # class name: the attribute that holds what it wraps
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "AveragedModel": "module",
    "DeepSpeedEngine": "module",
    "_FabricModule": "_forward_module",
    "OptimizedModule": "_orig_mod",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}


class LiveParameter(NamedTuple):
    """One parameter of a module: once, however many names it has."""

    name: str
    """Its name in a weight file: without wrappers."""
    live_name: str
    """Its first name in `module.named_parameters()`."""
    aliases: tuple[str, ...]
    """Its other names, if it is tied."""
    parameter: Tensor


def live_parameters(model: torch.nn.Module) -> list[LiveParameter]:
    """The parameters of a module in registration order, each once, named as its weight file names them.

    Wrappers (DDP, DataParallel, compiled, FSDP, checkpointed, averaged) are recognised by their type, so that a user's own
    submodule called `module` keeps its name.

    Raises:
        NamingError: Two parameters would get the same name.
    """
    names: dict[int, list[str]] = {}
    parameters: dict[int, Tensor] = {}
    for live_name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(live_name)
        parameters[id(parameter)] = parameter
    out = []
    seen: dict[str, str] = {}
    for key, live in names.items():
        clean = list(dict.fromkeys(_without_wrappers(model, name) for name in live))
        if clean[0] in seen:
            raise NamingError(
                f"{live[0]!r} and {seen[clean[0]]!r} are different parameters with one name, {clean[0]!r}."
            )
        seen[clean[0]] = live[0]
        out.append(LiveParameter(clean[0], live[0], tuple(clean[1:]), parameters[key]))
    return out


def _without_wrappers(model: torch.nn.Module, live_name: str) -> str:
    module: Any = model
    kept = []
    for part in live_name.split("."):
        if _WRAPPERS.get(type(module).__name__) != part:
            kept.append(part)
        module = getattr(module, part, None)
    return (
        adapter_file_name(".".join(kept)) if "lora_" in live_name or "modules_to_save" in live_name else ".".join(kept)
    )


_ADAPTER = (
    r"(?P<kind>lora_(?:A|B|embedding_A|embedding_B|magnitude_vector|bias)|modules_to_save)\.(?P<adapter>[^.]+)(?=\.|$)"
)


def adapter_file_name(live_name: str) -> str:
    """The name that PEFT writes for a live adapter parameter: without the adapter's own name (`.default`)."""
    name = re.sub(_ADAPTER, _file_part, live_name).replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector")
    return name.replace("..", ".")


def _file_part(match: re.Match[str]) -> str:
    # `modules_to_save.default.weight` is written as `weight`; `lora_A.default.weight` as `lora_A.weight`.
    return match["kind"] if match["kind"] != "modules_to_save" else ""
