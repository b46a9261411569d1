"""A pickle machine that executes nothing: a stack and a memo, a closed list of globals, bounded work.

The machine of the standard library is not used, even with a restricted `find_class`: it recurses on hostile keys until the
process dies, and its list of opcodes is not ours to close.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch

from ...errors import FileError
from .known import BUILDERS, VALUES, StorageType
from .opcodes import TABLE
from .values import Array, Global, Record, Storage, StoredTensor

__all__ = ["Machine"]

MAX_OPCODES = 20_000_000  # a state of 400,000 tensors
# Memory is bounded by the length of the pickle: what torch writes has 2.5 bytes and more for each instruction, while an empty
# dict takes one byte in the file and 64 in memory.
FREE_OPCODES = 1_000_000
BYTES_PER_OPCODE = 2
MAX_MEMO = 5_000_000
MAX_MARKS = 100_000
_CHECKED = 1 << 15  # instructions between two looks at the memory in use
MAX_LONG_BYTES = 4096
MAX_LINE = 4096
MAX_KEY_LENGTH = 1 << 16
# The hashes of strings are salted, the hashes of numbers are not. Keys whose hashes can be chosen are counted, because a dict of
# keys with equal hashes takes quadratic time.
MAX_CHOSEN_KEYS = 4_000
MAX_PLAIN_INT = 1 << 60  # below it no two numbers have the same hash
MAX_TUPLE_DEPTH = 64
MAX_TUPLE_WEIGHT = 1 << 23
MAX_KEY_WEIGHT = 64
PLAIN_KEYS = frozenset(
    {bool, type(None), float, Record, Array, StoredTensor, Storage, StorageType, Global, torch.dtype}
)


class Machine:
    """Reads one pickle.

    Args:
        data: The bytes; the pickle may be followed by others.
        label: The file, for messages.
        position: Where the pickle begins.
        persistent_load: Returns the object for a reference to something outside of the pickle (torch: a storage).
        nested_load: Reads the bytes of a torch file inside the pickle.
    """

    def __init__(
        self,
        data: bytes,
        label: str,
        position: int = 0,
        persistent_load: Callable[[Any], Any] | None = None,
        nested_load: Callable[[bytes], Any] | None = None,
    ) -> None:
        self.data = data
        self.label = label
        self.position = position
        self.persistent_load: Callable[[Any], Any] = persistent_load or self._refuse_outside
        self.nested_load = nested_load
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks under each mark
        self.memo: dict[int, Any] = {}
        self.globals: dict[str, Any] = {}
        self.weights: dict[int, tuple[int, int]] = {}  # id of a tuple of tuples: its size with all inside it, its depth
        self.chosen_keys = 0
        # Some opcodes do work on an object of any size (copy it, say) in a few bytes: it is paid from here.
        self.budget = 2 * len(data) + (1 << 16)

    def run(self) -> Any:
        """Return the object; `position` is then the end of its pickle."""
        data, table = self.data, TABLE
        allowed = min(MAX_OPCODES, FREE_OPCODES + len(data) // BYTES_PER_OPCODE)
        try:
            for _ in range(0, allowed, _CHECKED):
                for _ in range(_CHECKED):
                    opcode = data[self.position]
                    self.position += 1
                    if opcode == 0x2E:  # STOP
                        if self.below:
                            self.fail("a mark is left open at its end")
                        return self.stack.pop()
                    table[opcode](self)
                if len(self.memo) > MAX_MEMO or len(self.below) > MAX_MARKS:
                    self.fail("it keeps more than any state has")
        except FileError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error) as error:
            # A damaged pickle ends in one of these errors; all get the same message.
            what = str(error) if type(error) is ValueError else "its parts do not fit together"
            if self.position >= len(data):
                what = "it ends too early"
            self.fail(what, error)
        self.fail(f"it has more than {allowed} instructions")

    def fail(self, what: str, cause: Exception | None = None) -> NoReturn:
        """Refuse the file."""
        raise FileError(
            f"{self.label}: the pickle in it is damaged, or not one that torch writes ({what[:200]}; at byte "
            f"{self.position}). Get the file again, or save it anew."
        ) from cause

    def charge(self, amount: int) -> None:
        """Pay for work that is not bounded by the bytes read."""
        self.budget -= amount
        if self.budget < 0:
            self.fail("it repeats itself beyond measure")

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        start, end = self.position, self.position + count
        if end > len(self.data):
            self.position = len(self.data)
            self.fail("it ends too early")
        self.position = end
        return self.data[start:end]

    def line(self) -> str:
        """Return the rest of a line; only the oldest opcodes and GLOBAL use lines."""
        end = self.data.find(b"\n", self.position, self.position + MAX_LINE)
        if end < 0:
            if self.position + MAX_LINE > len(self.data):
                self.position = len(self.data)
            self.fail("a name in it has no end")
        text = self.data[self.position : end].decode()
        self.position = end + 1
        return text

    def items(self) -> list[Any]:
        """Return the items above the last mark."""
        items = self.stack
        self.stack = self.below.pop()
        return items

    def push_tuple(self, items: list[Any]) -> None:
        """Push a tuple that can be hashed safely: neither deep nor, through sharing, endless."""
        value = tuple(items)
        weight, depth = len(value), 1
        for item in value:
            if type(item) is tuple:
                inner_weight, inner_depth = self.weights.get(id(item)) or (len(item), 1)
                weight, depth = weight + inner_weight, max(depth, inner_depth + 1)
        if depth > 1:
            if depth > MAX_TUPLE_DEPTH or weight > MAX_TUPLE_WEIGHT:
                self.fail("tuples are nested too deeply")
            self.weights[id(value)] = (weight, depth)
        else:
            self.weights.pop(id(value), None)  # of a tuple that is gone and had the same address
        self.stack.append(value)

    def check_key(self, key: Any) -> None:
        """Refuse keys that are unhashable, or take long to hash or compare."""
        kind = type(key)
        if kind is str or kind is bytes:
            if len(key) > MAX_KEY_LENGTH:
                self.fail(f"a key of {len(key)} characters")
        elif kind is int:
            if not -MAX_PLAIN_INT < key < MAX_PLAIN_INT:
                self.count_chosen_key()
        elif kind is tuple:
            if (self.weights.get(id(key)) or (len(key), 1))[0] > MAX_KEY_WEIGHT:
                self.fail("a tuple that is too large for a key")
            if not all(type(item) in (str, bytes, bool, type(None)) for item in key):
                self.count_chosen_key()
            for item in key:
                self.check_key(item)
        elif kind not in PLAIN_KEYS:
            self.fail(f"a key of the type {kind.__name__}")

    def count_chosen_key(self) -> None:
        """Allow some keys whose hashes are not salted."""
        self.chosen_keys += 1
        if self.chosen_keys > MAX_CHOSEN_KEYS:
            self.fail("too many keys are large numbers or tuples of numbers")

    def find(self, module: str, name: str) -> None:
        """Push a global: the value from the closed list, or its name alone."""
        full = f"{module}.{name}"
        found = self.globals.get(full)
        if found is None:
            found = self.globals[full] = VALUES.get(full) or Global(full)
        self.stack.append(found)

    def call(self, function: Any, args: Any, kwargs: dict[str, Any] | None = None) -> Any:
        """Return the result of a known function of the closed list; a record of the call for any other."""
        if type(args) is not tuple:
            self.fail("arguments that are not a tuple")
        if type(function) is Global:
            builder = BUILDERS.get(function.name)
            if builder is not None and not kwargs:
                return builder(self, *args)
            return Record(function.name, args, kwargs)
        if isinstance(function, (Record, StorageType)):  # calling a record gives another record
            return Record("(call)", (function, args), kwargs)
        self.fail(f"a call of something of the type {type(function).__name__}")

    def build(self, target: Any, state: Any) -> None:
        """Give an object its state."""
        if isinstance(target, Record):
            for part in state if type(state) is tuple and len(state) == 2 else (state,):
                self.charge(len(part) if type(part) is dict else 1)
            target.set_state(state)
        elif isinstance(target, np.dtype):
            if type(state) is not tuple or len(state) < 2 or state[1] not in ("<", "|", "=", b"<", b"|", b"="):
                self.fail("numpy numbers that are not little-endian")
        elif type(target) not in (dict, set, StoredTensor):  # attributes of these are not needed
            self.fail(f"a state for something of the type {type(target).__name__}")

    def set_items(self, target: Any, items: list[Any]) -> None:
        """Set keys (at even places) to values (at odd places)."""
        mapping = target.mapping if isinstance(target, Record) else target
        if type(mapping) is not dict or len(items) % 2:
            self.fail("keys are set in something that has none")
        keys = items[::2]
        for key in keys:
            if type(key) is not str or len(key) > MAX_KEY_LENGTH:
                self.check_key(key)
        mapping.update(zip(keys, items[1::2], strict=True))

    def extend(self, target: Any, items: list[Any]) -> None:
        """Append to a list."""
        sequence = target.sequence if isinstance(target, Record) else target
        if type(sequence) is not list:
            self.fail("something is appended to what is no list")
        sequence.extend(items)

    def add(self, target: Any, items: list[Any]) -> None:
        """Add to a set."""
        if isinstance(target, Record):
            target.sequence.extend(items)
            return
        if type(target) is not set:
            self.fail("something is added to what is no set")
        for item in items:
            self.check_key(item)
        target.update(items)

    def text(self, count: int) -> str:
        """Return the next bytes as text."""
        return self.take(count).decode("utf-8", "surrogatepass")

    def old_text(self, count: int) -> str | bytes:
        """Return the next bytes as Python 2 wrote both text and bytes."""
        data = self.take(count)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data

    def long(self, count: int) -> int:
        """Return the next bytes as a number."""
        if not 0 <= count <= MAX_LONG_BYTES:
            self.fail(f"a number of {count} bytes")
        return int.from_bytes(self.take(count), "little", signed=True)

    def _refuse_outside(self, identifier: Any) -> NoReturn:
        self.fail("it refers to objects outside itself")

    def size(self, read: Callable[[bytes, int], tuple[int]], width: int) -> int:
        """Return the next bytes as a length or an index."""
        (value,) = read(self.data, self.position)
        self.position += width
        return value
