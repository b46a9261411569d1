"""What unpickling yields in place of foreign objects: names and what was said about them, nothing that runs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...errors import FileError

__all__ = ["Array", "Global", "Record"]


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
        kwargs: Its keyword arguments. A tensor subclass without data of its own has dtype, shape, stride, device and
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
        """An attribute, or a keyword argument of that name, or the default."""
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
    """A pickled numpy array: kept as it stands, made only when asked for."""

    __slots__ = ()

    def numpy(self) -> np.ndarray[Any, Any]:
        """The array, if it holds plain numbers and its size is what its shape says."""
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


def shortened(text: object, length: int = 80) -> str:
    """The text for use in a message: quoted, without control characters, and not long."""
    shown = str(text)
    return repr(shown if len(shown) <= length else shown[: length - 3] + "...")
