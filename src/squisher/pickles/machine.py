"""A pickle machine that executes nothing: opcodes over bytes, with a closed list of globals and bounded work.

The machine of the standard library is not used, even with a restricted `find_class`: it recurses on hostile keys until the
process dies, and its list of opcodes is not ours to close.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch

from squisher.errors import FileError
from squisher.pickles.known import BUILDERS, VALUES, StorageType
from squisher.pickles.records import Array, Global, Record, shortened
from squisher.pickles.stored import Storage, StoredTensor

__all__ = ["Machine"]

MAX_OPCODES = 20_000_000  # a state of 400,000 tensors
MAX_LONG_BYTES = 4096
MAX_LINE = 4096
MAX_KEY_LENGTH = 1 << 16
# The hashes of strings are salted, those of numbers are not. Keys whose hashes can be chosen are counted, because a dict of
# keys with equal hashes takes quadratic time.
MAX_CHOSEN_KEYS = 10_000
MAX_PLAIN_INT = 1 << 60  # below it no two numbers have the same hash
MAX_TUPLE_DEPTH = 64
MAX_TUPLE_WEIGHT = 1 << 23
MAX_KEY_WEIGHT = 64
PLAIN_KEYS = frozenset(
    {bool, type(None), float, Record, Array, StoredTensor, Storage, StorageType, Global, torch.dtype, torch.layout}
)
HIGHEST_PROTOCOL = 5

_u16 = struct.Struct("<H").unpack_from
_i32 = struct.Struct("<i").unpack_from
_u32 = struct.Struct("<I").unpack_from
_u64 = struct.Struct("<Q").unpack_from
_f64 = struct.Struct(">d").unpack_from


class Machine:
    """Reads one pickle.

    Args:
        data: The bytes; the pickle may be followed by others.
        label: The file, for messages.
        position: Where the pickle begins.
        persistent_load: Gets what the pickle calls objects outside itself (torch: storages), returns the object.
        nested_load: Reads the bytes of a torch file that stands inside the pickle.
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
        self.persistent_load = persistent_load
        self.nested_load = nested_load
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks under each mark
        self.memo: dict[int, Any] = {}
        self.globals: dict[str, Any] = {}
        self.weights: dict[int, tuple[int, int]] = {}  # id of a tuple of tuples: its size with all inside it, its depth
        self.chosen_keys = 0
        # Some opcodes do work on an object of any size (copy it, say) in a few bytes: it is paid from here.
        self.budget = 4 * len(data) + (1 << 20)

    def run(self) -> Any:
        """The object; `position` then stands behind its pickle."""
        data, table = self.data, _TABLE
        try:
            for _ in range(MAX_OPCODES):
                opcode = data[self.position]
                self.position += 1
                if opcode == 0x2E:  # STOP
                    if self.below:
                        self.fail("a mark is left open at its end")
                    return self.stack.pop()
                table[opcode](self)
        except FileError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error) as error:
            # Whatever does not fit together in a damaged pickle ends in one of these; none of them is worth more words.
            what = str(error) if type(error) is ValueError else "its parts do not fit together"
            if self.position >= len(data):
                what = "it ends too early"
            self.fail(what, error)
        self.fail(f"it has more than {MAX_OPCODES} instructions")

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
        """The next bytes."""
        start, end = self.position, self.position + count
        if end > len(self.data):
            self.position = len(self.data)
            self.fail("it ends too early")
        self.position = end
        return self.data[start:end]

    def line(self) -> str:
        """The rest of a line; only the oldest opcodes and GLOBAL use lines."""
        end = self.data.find(b"\n", self.position, self.position + MAX_LINE)
        if end < 0:
            if self.position + MAX_LINE > len(self.data):
                self.position = len(self.data)
            self.fail("a name in it has no end")
        text = self.data[self.position : end].decode()
        self.position = end + 1
        return text

    def items(self) -> list[Any]:
        """What stands above the last mark."""
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
        """Refuse what is unhashable, or whose hashing or comparing could take long."""
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
        """Push what stands for a global: one of the closed list, or its mere name."""
        full = f"{module}.{name}"
        found = self.globals.get(full)
        if found is None:
            found = self.globals[full] = VALUES.get(full) or Global(full)
        self.stack.append(found)

    def call(self, function: Any, args: Any, kwargs: dict[str, Any] | None = None) -> Any:
        """The result of a known function of the closed list; a record of the call for any other."""
        if type(args) is not tuple:
            self.fail("arguments that are not a tuple")
        if type(function) is Global:
            builder = BUILDERS.get(function.name)
            if builder is not None and not kwargs:
                return builder(self, *args)
            return Record(function.name, args, kwargs)
        if isinstance(function, (Record, StorageType)):  # a result that is called in turn stays as inert as it was
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
        elif type(target) not in (dict, set, StoredTensor):  # what is attached to those is of no use here
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
        """The next bytes as text."""
        return self.take(count).decode("utf-8", "surrogatepass")

    def old_text(self, count: int) -> str | bytes:
        """The next bytes as Python 2 wrote both text and bytes."""
        data = self.take(count)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data

    def long(self, count: int) -> int:
        """The next bytes as a number."""
        if not 0 <= count <= MAX_LONG_BYTES:
            self.fail(f"a number of {count} bytes")
        return int.from_bytes(self.take(count), "little", signed=True)

    def persistent(self, identifier: Any) -> None:
        """Push an object outside the pickle."""
        if self.persistent_load is None:
            self.fail("it refers to objects outside itself")
        self.stack.append(self.persistent_load(identifier))

    def size(self, read: Callable[[bytes, int], tuple[int]], width: int) -> int:
        """The next bytes as a length or an index."""
        (value,) = read(self.data, self.position)
        self.position += width
        return value


def _push(value: Any) -> Callable[[Machine], None]:
    return lambda m: m.stack.append(value)


def _proto(m: Machine) -> None:
    protocol = m.take(1)[0]
    if protocol > HIGHEST_PROTOCOL:
        m.fail(f"pickle protocol {protocol}")


def _frame(m: Machine) -> None:
    if m.size(_u64, 8) > len(m.data) - m.position:
        m.position = len(m.data)
        m.fail("it ends too early")


def _pop(m: Machine) -> None:
    if m.stack:
        m.stack.pop()
    else:
        m.items()


def _pop_mark(m: Machine) -> None:
    m.items()


def _int_line(m: Machine) -> None:
    text = m.line().rstrip("L")
    if len(text) > 64:
        m.fail(f"a number of {len(text)} digits")
    m.stack.append({"00": False, "01": True}[text] if text in ("00", "01") else int(text))


def _string_line(m: Machine) -> None:
    text = m.line()
    if len(text) < 2 or text[0] not in "'\"" or text[-1] != text[0] or "\\" in text:
        m.fail(f"the text {shortened(text)}")
    m.stack.append(text[1:-1])


def _binunicode(m: Machine) -> None:
    (count,) = _u32(m.data, m.position)
    start = m.position + 4
    end = m.position = start + count
    if end > len(m.data):
        m.fail("it ends too early")
    m.stack.append(m.data[start:end].decode("utf-8", "surrogatepass"))


def _binint1(m: Machine) -> None:
    m.stack.append(m.data[m.position])
    m.position += 1


def _binput(m: Machine) -> None:
    m.memo[m.data[m.position]] = m.stack[-1]
    m.position += 1


def _binget(m: Machine) -> None:
    m.stack.append(m.memo[m.data[m.position]])
    m.position += 1


def _long_binput(m: Machine) -> None:
    m.memo[_u32(m.data, m.position)[0]] = m.stack[-1]
    m.position += 4


def _long_binget(m: Machine) -> None:
    m.stack.append(m.memo[_u32(m.data, m.position)[0]])
    m.position += 4


def _put(m: Machine) -> None:
    m.memo[int(m.line())] = m.stack[-1]


def _memoize(m: Machine) -> None:
    m.memo[len(m.memo)] = m.stack[-1]


def _mark(m: Machine) -> None:
    m.below.append(m.stack)
    m.stack = []


def _short_tuple(count: int) -> Callable[[Machine], None]:
    def push(m: Machine) -> None:
        if len(m.stack) < count:
            m.fail("its parts do not fit together")
        items = m.stack[-count:]
        del m.stack[-count:]
        m.push_tuple(items)

    return push


def _list(m: Machine) -> None:
    items = m.items()  # first: it changes the stack
    m.stack.append(items)


def _dict(m: Machine) -> None:
    items = m.items()
    m.stack.append({})
    m.set_items(m.stack[-1], items)


def _frozenset(m: Machine) -> None:
    items = m.items()
    for item in items:
        m.check_key(item)
    m.stack.append(frozenset(items))


def _append(m: Machine) -> None:
    item = m.stack.pop()
    m.extend(m.stack[-1], [item])


def _appends(m: Machine) -> None:
    items = m.items()
    m.extend(m.stack[-1], items)


def _setitem(m: Machine) -> None:
    value = m.stack.pop()
    key = m.stack.pop()
    m.set_items(m.stack[-1], [key, value])


def _setitems(m: Machine) -> None:
    items = m.items()
    m.set_items(m.stack[-1], items)


def _additems(m: Machine) -> None:
    items = m.items()
    m.add(m.stack[-1], items)


def _global(m: Machine) -> None:
    module = m.line()
    m.find(module, m.line())


def _stack_global(m: Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    if type(name) is not str or type(module) is not str or len(name) + len(module) > MAX_LINE:
        m.fail("a name that is no text")
    m.find(module, name)


def _reduce(m: Machine) -> None:
    args = m.stack.pop()
    m.stack[-1] = m.call(m.stack[-1], args)


def _newobj_ex(m: Machine) -> None:
    kwargs, args = m.stack.pop(), m.stack.pop()
    if type(kwargs) is not dict:
        m.fail("keyword arguments that are not a dict")
    m.stack[-1] = m.call(m.stack[-1], args, kwargs)


def _inst(m: Machine) -> None:
    _global(m)
    function = m.stack.pop()
    items = m.items()
    m.push_tuple(items)
    m.stack[-1] = m.call(function, m.stack[-1])


def _obj(m: Machine) -> None:
    function, *items = m.items()
    m.push_tuple(items)
    m.stack[-1] = m.call(function, m.stack[-1])


def _build(m: Machine) -> None:
    state = m.stack.pop()
    m.build(m.stack[-1], state)


def _refuse(m: Machine) -> None:
    m.fail(f"the instruction {m.data[m.position - 1]:#04x}, which is not read")


# Left out on purpose: EXT1, EXT2, EXT4 (a registry of classes), NEXT_BUFFER and READONLY_BUFFER (memory outside the file).
OPCODES: dict[bytes, Callable[[Machine], None]] = {
    b"\x80": _proto,
    b"\x95": _frame,
    b"(": _mark,
    b"0": _pop,
    b"1": _pop_mark,
    b"2": lambda m: m.stack.append(m.stack[-1]),
    # numbers and constants
    b"N": _push(None),
    b"\x88": _push(True),
    b"\x89": _push(False),
    b"I": _int_line,
    b"L": _int_line,
    b"J": lambda m: m.stack.append(m.size(_i32, 4)),
    b"K": _binint1,
    b"M": lambda m: m.stack.append(m.size(_u16, 2)),
    b"\x8a": lambda m: m.stack.append(m.long(m.take(1)[0])),
    b"\x8b": lambda m: m.stack.append(m.long(m.size(_i32, 4))),
    b"F": lambda m: m.stack.append(float(m.line())),
    b"G": lambda m: m.stack.append(_f64(m.take(8))[0]),
    # text and bytes
    b"X": _binunicode,
    b"\x8c": lambda m: m.stack.append(m.text(m.take(1)[0])),
    b"\x8d": lambda m: m.stack.append(m.text(m.size(_u64, 8))),
    b"V": lambda m: m.stack.append(m.line().encode("latin1").decode("raw-unicode-escape")),
    b"S": _string_line,
    b"T": lambda m: m.stack.append(m.old_text(m.size(_u32, 4))),
    b"U": lambda m: m.stack.append(m.old_text(m.take(1)[0])),
    b"B": lambda m: m.stack.append(m.take(m.size(_u32, 4))),
    b"C": lambda m: m.stack.append(m.take(m.take(1)[0])),
    b"\x8e": lambda m: m.stack.append(m.take(m.size(_u64, 8))),
    b"\x96": lambda m: m.stack.append(bytearray(m.take(m.size(_u64, 8)))),
    # containers
    b")": _push(()),
    b"t": lambda m: m.push_tuple(m.items()),
    b"\x85": _short_tuple(1),
    b"\x86": _short_tuple(2),
    b"\x87": _short_tuple(3),
    b"]": lambda m: m.stack.append([]),
    b"l": _list,
    b"a": _append,
    b"e": _appends,
    b"}": lambda m: m.stack.append({}),
    b"d": _dict,
    b"s": _setitem,
    b"u": _setitems,
    b"\x8f": lambda m: m.stack.append(set()),
    b"\x90": _additems,
    b"\x91": _frozenset,
    # the memo
    b"q": _binput,
    b"r": _long_binput,
    b"p": _put,
    b"\x94": _memoize,
    b"h": _binget,
    b"j": _long_binget,
    b"g": lambda m: m.stack.append(m.memo[int(m.line())]),
    # globals and objects
    b"c": _global,
    b"\x93": _stack_global,
    b"R": _reduce,
    b"\x81": _reduce,  # NEWOBJ: making and calling are the same where nothing runs
    b"\x92": _newobj_ex,
    b"i": _inst,
    b"o": _obj,
    b"b": _build,
    b"P": lambda m: m.persistent(m.line()),
    b"Q": lambda m: m.persistent(m.stack.pop()),
}
_TABLE = [OPCODES.get(bytes([code]), _refuse) for code in range(256)]
