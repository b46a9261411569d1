"""What unpickling returns: names and records in place of foreign objects, tensors that are still in their file.

`walk` and `find_weights` find optimizers and named tensors in it, however deep a training script has put them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ...errors import FileError
from ..byte_range import ByteRange

__all__ = [
    "Array", "Global", "Record", "Storage", "StoredTensor", "Verified", "find_weights", "is_in_backward", "is_optimizer", "shortened",
    "walk",
]  # fmt: skip

MAX_DIMENSIONS = 64
# An expanded tensor (stride 0) holds more elements than its storage; beyond this it is refused as an attack.
MAX_EXPANDED_BYTES = 1 << 28
CHECKED_AT_ONCE = 1 << 24


class Global:
    """The name of a class or function that a pickle mentions; it was not looked up and cannot be called."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Global) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"Global({shortened(self.name)})"


class Record:
    """An object that was not built: its class name, and the arguments and state that it would have got.

    Two records are equal only if they are the same object, so that records can be keys as the originals were.

    Attributes:
        name: The class or function, `module.qualname`.
        args: The positional arguments of the constructor; the value of an enum member is `args[0]`.
        kwargs: Its keyword arguments. A tensor subclass without data has dtype, shape, stride, device and
            requires_grad here.
        attributes: Its instance dictionary and slots.
        state: The state as it stood, where it is neither of the two.
        sequence: What was appended or added to it (a list, deque or set of a foreign class).
        mapping: What was set in it by key (a dict of a foreign class).
    """

    __slots__ = ("args", "attributes", "kwargs", "mapping", "name", "sequence", "state")

    def __init__(self, name: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> None:
        self.name = name
        self.args = args
        self.kwargs: dict[str, Any] = {} if kwargs is None else kwargs
        self.attributes: dict[Any, Any] = {}
        self.state: Any = None
        self.sequence: list[Any] = []
        self.mapping: dict[Any, Any] = {}

    def get(self, attribute: str, default: Any = None) -> Any:
        """Return an attribute, or a keyword argument of that name, or the default."""
        if attribute in self.attributes:
            return self.attributes[attribute]
        return self.kwargs.get(attribute, default)

    def set_state(self, state: Any) -> None:
        """Take over what `__setstate__` would have been given."""
        parts = state if type(state) is tuple and len(state) == 2 else (state,)
        if all(part is None or type(part) is dict for part in parts):
            for part in parts:
                self.attributes.update(part or {})
        else:
            self.state = state

    def __repr__(self) -> str:
        return f"<Record of {shortened(self.name)}>"


class Array(Record):
    """A pickled numpy array, built when asked for."""

    __slots__ = ()

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return the array, if it holds plain numbers and its size is what its shape says."""
        state = self.state
        if type(state) is not tuple or len(state) != 5:
            raise FileError("A numpy array in the file is incomplete. Get the file again.")
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, np.dtype):
            raise FileError("A numpy array in the file does not hold plain numbers, so it is not read.")
        if type(data) is str:  # what Python 2 wrote
            data = data.encode("latin1", "replace")
        sizes_fit = type(shape) is tuple and all(type(n) is int and n >= 0 for n in shape) and len(shape) <= 32
        if not sizes_fit or not isinstance(data, (bytes, bytearray)) or math.prod(shape) * dtype.itemsize != len(data):
            raise FileError("A numpy array in the file has a shape that does not fit its data. Get the file again.")
        return np.frombuffer(bytes(data), dtype=dtype).reshape(shape, order="F" if fortran else "C")


class Storage:
    """A block of bytes that tensors look into; equal only to itself.

    Attributes:
        dtype: What its elements are, as the file says.
        nbytes: Its size as the file says; checked against the file.
        location: The device it was on.
        checksum: The bytes that the zip archive keeps a CRC-32 of, and the CRC-32, if it does.
    """

    __slots__ = ("_byte_range", "_verified", "checksum", "dtype", "location", "nbytes")

    def __init__(
        self,
        dtype: torch.dtype,
        nbytes: int,
        location: str = "cpu",
        byte_range: ByteRange | None = None,
        checksum: tuple[ByteRange, int] | None = None,
    ) -> None:
        self.dtype = dtype
        self.nbytes = nbytes
        self.location = location
        self.checksum = checksum
        self._byte_range = byte_range
        self._verified = False

    @property
    def byte_range(self) -> ByteRange:
        """Where its bytes are."""
        if self._byte_range is None:
            raise FileError("A storage has no data in the file. Get the file again.")
        return self._byte_range

    def place(self, byte_range: ByteRange) -> None:
        """Set where its bytes are, which the old format has at its end."""
        self._byte_range = byte_range

    def verify(self) -> None:
        """Compare the bytes with the checksum in the file, once; does nothing where the file keeps none."""
        if self.checksum is None or self._verified:
            return
        kept, expected = self.checksum
        found = 0
        for start in range(0, kept.length, CHECKED_AT_ONCE):
            found = zlib.crc32(kept.read(start, min(CHECKED_AT_ONCE, kept.length - start)), found)
        if found != expected:
            raise self.damaged()
        self._verified = True

    def damaged(self) -> FileError:
        """Return the error for bytes that have changed since they were written."""
        return FileError(
            f"{self.byte_range.label} is damaged: its checksum does not fit its bytes. Get the file again."
        )

    def __repr__(self) -> str:
        return f"<Storage of {self.nbytes} bytes, {self.dtype}>"


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class StoredTensor:
    """A tensor in a file; equal only to itself, so that a pickled optimizer can use it as a key.

    All of it has been checked against the size of its storage. Two tensors with the same `place` are tied.

    Attributes:
        storage: The block of bytes that it looks into.
        dtype: The element type.
        shape: The sizes.
        stride: The steps, in elements.
        storage_offset: The first element's place in the storage, in elements.
        requires_grad: As saved.
        subclass: The name of the tensor subclass it was, if any (`torch.nn.parameter.Parameter` for parameters).
        attributes: What was attached to it.
    """

    storage: Storage
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int = 0
    requires_grad: bool = False
    subclass: str | None = None
    attributes: Mapping[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = (*self.shape, *self.stride, self.storage_offset)
        if len(self.shape) != len(self.stride) or len(self.shape) > MAX_DIMENSIONS:
            raise ValueError(f"a tensor with {len(self.shape)} sizes and {len(self.stride)} strides")
        for size in sizes:
            if type(size) is not int or not 0 <= size < 1 << 62:
                raise ValueError(f"a tensor with the size, stride or offset {shortened(size)}")
        numel, room = math.prod(self.shape), self.storage.nbytes
        nbytes = numel * self.dtype.itemsize
        if nbytes >= 1 << 62:
            raise ValueError(f"a tensor of {numel} elements")
        if numel and self._end * self.dtype.itemsize > room:
            raise ValueError(
                f"a tensor of shape {self.shape} at element {self.storage_offset} reaches beyond its storage "
                f"of {room} bytes"
            )
        if nbytes > max(room, MAX_EXPANDED_BYTES):
            raise ValueError(f"an expanded tensor of {nbytes} bytes over a storage of {room}")

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the elements in bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are in the file in order and without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected and self.numel:
                return False
            expected *= size
        return True

    @property
    def place(self) -> Hashable:
        """Which bytes it is and in which order: a matrix and its transpose share their bytes and are not the same."""
        at = self.storage.byte_range
        steps = tuple(step for size, step in zip(self.shape, self.stride, strict=True) if size > 1)
        # Bytes in memory have no place but their own: those of another tensor begin at 0 as well.
        return at, id(at.buffer), self.dtype, self.storage_offset, self.shape, steps

    def byte_range(self) -> ByteRange:
        """Return where the elements of a contiguous tensor are.

        Raises:
            ValueError: If it is not contiguous.
        """
        if not self.is_contiguous:
            raise ValueError("only a contiguous tensor is one byte range; use load()")
        return self.storage.byte_range.part(self.storage_offset * self.dtype.itemsize, self.nbytes)

    def load(self) -> torch.Tensor:
        """Read it: a fresh contiguous CPU tensor."""
        if not self.is_contiguous:
            self.storage.verify()
            return self._read(self.storage_offset, self._end).as_strided(self.shape, self.stride).contiguous()
        flat = self._read(self.storage_offset, self.storage_offset + self.numel)
        self._compare(zlib.crc32(flat.view(torch.uint8).numpy().data))
        return flat.reshape(self.shape)

    def read_flat(self, start: int, stop: int) -> torch.Tensor:
        """Read the elements [start, stop) of a contiguous tensor, counted in its flat order; no checksum is compared.

        Raises:
            ValueError: If it is not contiguous, or the range is not inside the tensor.
        """
        if not self.is_contiguous:
            raise ValueError("only a contiguous tensor can be read in chunks; use load()")
        if not 0 <= start <= stop <= self.numel:
            raise ValueError(f"elements {start} to {stop} of a tensor of {self.numel}")
        return self._read(self.storage_offset + start, self.storage_offset + stop)

    def chunks(self, size: int) -> Iterator[torch.Tensor]:
        """Read it front to back in flat chunks of at most `size` elements; one that is not contiguous is loaded first.

        Where the file keeps a checksum of exactly these bytes, it is compared on the way, at no further read.

        Raises:
            FileError: If the checksum does not fit; raised before the last chunk, so that no caller gets all of them without it.
        """
        if not self.is_contiguous:
            yield from self.load().view(-1).split(size)
            return
        found = 0
        for start in range(0, self.numel, size):
            chunk = self.read_flat(start, min(start + size, self.numel))
            found = zlib.crc32(chunk.view(torch.uint8).numpy().data, found) if self.storage.checksum else 0
            if start + size >= self.numel:
                self._compare(found)
            yield chunk

    def _compare(self, found: int) -> None:
        """Compare the checksum of all bytes of a contiguous tensor with the file's, which may be of more bytes than these."""
        kept = self.storage.checksum
        if kept is None or self.nbytes != kept[0].length:
            self.storage.verify()
        elif found != kept[1]:
            raise self.storage.damaged()

    @property
    def _end(self) -> int:
        """Where the storage must reach, in elements."""
        return self.storage_offset + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True)) + 1

    def _read(self, start: int, stop: int) -> torch.Tensor:
        if start == stop:  # may stand beyond the end of an empty storage
            return torch.empty(0, dtype=self.dtype)
        size = self.dtype.itemsize
        data = torch.empty((stop - start) * size, dtype=torch.uint8)
        self.storage.byte_range.read_into(data.numpy().data, start * size)
        return data.view(self.dtype)

    def __repr__(self) -> str:
        return f"<StoredTensor {self.shape}, {self.dtype}>"


class Verified:
    """A tensor in a file whose checksum is compared before its first values are returned.

    Shards are read in any order, so the checksum cannot be computed on the way.
    """

    def __init__(self, stored: StoredTensor) -> None:
        self.shape, self.dtype = stored.shape, stored.dtype
        self._stored = stored

    def load(self) -> torch.Tensor:
        """Return the whole tensor."""
        return self._stored.load()

    def read_flat(self, start: int, stop: int) -> torch.Tensor:
        """Return elements `start` to `stop` in flat order."""
        stored = self._stored
        stored.storage.verify()
        return stored.read_flat(start, stop) if stored.is_contiguous else stored.load().reshape(-1)[start:stop]


def shortened(text: object, length: int = 80) -> str:
    """Return the text for use in a message: quoted, without control characters, and not long."""
    shown = str(text)
    return repr(shown if len(shown) <= length else shown[: length - 3] + "...")


_DEPTH = 8  # deeper than any training script nests; the walk stays short on hostile files


_EXTRA = "_extra_state"  # where a module's get_extra_state stands among its weights: anything at all


def find_weights(tree: Any, least: int = 2) -> Iterator[tuple[str, dict[str, StoredTensor]]]:
    """Yield every dictionary of named tensors outside what optimizers save, and every pickled module, with its place.

    A dictionary of fewer than `least` tensors does not count: a number that a training script saves is a named tensor as well.
    """
    for place, value in walk(tree):
        if _is_module(value):
            yield place, dict(_of_module(value))
        elif isinstance(value, dict) and not is_optimizer(value) and all(isinstance(name, str) for name in value):
            named = {name: v for name, v in value.items() if not name.endswith(_EXTRA)}
            if len(named) >= least and all(isinstance(v, StoredTensor) for v in named.values()):
                yield place, named


def is_optimizer(value: Any) -> bool:
    """Return whether a value is an optimizer's state dict, a pickled optimizer, or a dictionary of optimizers by parameter."""
    content = value.attributes if isinstance(value, Record) else value
    if not isinstance(content, dict):
        return False
    groups = content.get("param_groups")
    state = content.get("state", content.get("opt_state"))  # torchcontrib's SWA keeps the inner one's under this key
    return (isinstance(state, dict) and isinstance(groups, list) and bool(groups)) or is_in_backward(content)


def is_in_backward(content: dict[Any, Any]) -> bool:
    """Return whether a dictionary has an optimizer of one parameter under each parameter's name, as torchtune and Pyro write it.

    Several optimizers of small networks have names, too, but their own: one name at least must have a path (Pyro's have "$$$").
    """
    named = all(isinstance(name, str) and ("." in name or "opt" not in name.lower()) for name in content)
    if len(content) < 2 or not named or not any("." in name or "$$$" in name for name in content):
        return False
    return all(isinstance(one, dict) and _of_one_parameter(one) for one in content.values())


def _of_one_parameter(one: dict[Any, Any]) -> bool:
    groups = one.get("param_groups")
    if not isinstance(one.get("state"), dict) or not isinstance(groups, list) or len(groups) != 1:
        return False
    members = groups[0].get("params") if isinstance(groups[0], dict) else None
    return isinstance(members, list) and len(members) == 1


def walk(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield everything that may hold an optimizer or weights, breadth first, each object once."""
    seen: set[int] = set()
    level: list[tuple[str, Any]] = [("", tree)]
    for _ in range(_DEPTH):
        following: list[tuple[str, Any]] = []
        for place, value in level:
            if id(value) in seen:
                continue
            seen.add(id(value))
            yield place, value
            if not is_optimizer(value):
                following.extend(_inside(place, value))
        level = following


def _inside(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Record):
        whole = ("_parameters", "_modules", "_buffers") if _is_module(value) else ()  # these are read as one
        value = {**{k: v for k, v in value.attributes.items() if k not in whole}, **value.mapping}
    if isinstance(value, dict):
        items = [(str(key), item) for key, item in value.items() if not str(key).endswith(_EXTRA)]
    elif isinstance(value, (list, tuple)):
        items = [(str(k), item) for k, item in enumerate(value)]
    else:
        return
    for key, item in items:
        if isinstance(item, (dict, list, tuple, Record)):
            yield f"{place}.{key}" if place else key, item


def _is_module(value: Any) -> bool:
    """Return whether something is a pickled `nn.Module`."""
    if not isinstance(value, Record):
        return False
    return isinstance(value.get("_parameters"), dict) and isinstance(value.get("_modules"), dict)


def _of_module(module: Record, prefix: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the entries of the `state_dict()` of a pickled module, with full names and in order, each module once."""
    seen = set() if seen is None else seen
    seen.add(id(module))
    buffers, passing = module.get("_buffers"), module.get("_non_persistent_buffers_set")
    passing = passing if isinstance(passing, set) else ()
    for name, tensor in {**module.get("_parameters"), **(buffers if isinstance(buffers, dict) else {})}.items():
        if isinstance(tensor, StoredTensor) and name not in passing:
            yield f"{prefix}{name}", tensor
    for name, child in module.get("_modules").items():
        if _is_module(child) and id(child) not in seen and prefix.count(".") < 64:
            yield from _of_module(child, f"{prefix}{name}.", seen)
