"""The instructions of the pickle machine, one small function each, and the closed table of them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .values import shortened

if TYPE_CHECKING:
    from .machine import Machine

__all__ = ["TABLE"]

HIGHEST_PROTOCOL = 5
MAX_NAME = 4096

_u16 = struct.Struct("<H").unpack_from
_i32 = struct.Struct("<i").unpack_from
_u32 = struct.Struct("<I").unpack_from
_u64 = struct.Struct("<Q").unpack_from
_f64 = struct.Struct(">d").unpack_from


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
    if type(name) is not str or type(module) is not str or len(name) + len(module) > MAX_NAME:
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
OPCODES: dict[bytes, Callable[[Machine], object]] = {
    b"\x80": _proto,
    b"\x95": _frame,
    b"(": _mark,
    b"0": _pop,
    b"1": lambda m: m.items(),
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
    b"P": lambda m: m.stack.append(m.persistent_load(m.line())),
    b"Q": lambda m: m.stack.append(m.persistent_load(m.stack.pop())),
}
TABLE = [OPCODES.get(bytes([code]), _refuse) for code in range(256)]
