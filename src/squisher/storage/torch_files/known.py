"""The closed list of globals that are built; every other one stays a name (`Global`) or a `Record`.

No builder calls anything that a pickle names. Each gets the machine and the pickle's arguments, of any number and type; the
machine turns the errors of wrong ones into a message.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...errors import FileError
from ..byte_range import ByteRange
from .values import Array, Global, Record, Storage, StoredTensor, shortened

if TYPE_CHECKING:
    from .machine import Machine

__all__ = ["BUILDERS", "VALUES", "StorageType"]

PARAMETER = "torch.nn.parameter.Parameter"
NUMBERS = re.compile(r"[<|=]?(b1|i[1248]|u[1248]|f[248]|c8|c16)")


class StorageType:
    """One of torch's storage classes: an element type."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"<StorageType of {self.dtype}>"


# Containers


def _mapping(m: Machine, items: Any = ()) -> dict[Any, Any]:
    result: dict[Any, Any] = {}
    m.charge(len(items))
    for key, value in items.items() if type(items) is dict else items:
        m.check_key(key)
        result[key] = value
    return result


def _set(m: Machine, items: Any = ()) -> set[Any]:
    m.charge(len(items))
    for item in items:
        m.check_key(item)
    return set(items)


def _frozenset(m: Machine, items: Any = ()) -> frozenset[Any]:
    return frozenset(_set(m, items))


# Bytes and numbers


def _encode(m: Machine, text: str, encoding: str = "latin1") -> bytes:
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        m.fail(f"text in the encoding {shortened(encoding)}")
    m.charge(len(text))
    return text.encode("latin1")


def _bytes(m: Machine, data: Any = b"", encoding: str = "latin1") -> bytes:
    if type(data) is str:
        return _encode(m, data, encoding)
    if type(data) is not bytes:  # a number would ask for that many bytes
        m.fail("bytes made from something else")
    return data


def _bytearray(m: Machine, data: Any = b"", encoding: str = "latin1") -> bytearray:
    m.charge(len(data))
    return bytearray(_bytes(m, data, encoding))


def _complex(m: Machine, real: float, imaginary: float) -> complex:
    if type(real) not in (int, float) or type(imaginary) not in (int, float):
        m.fail("a complex number of parts that are no numbers")
    return complex(real, imaginary)


# Objects as protocols 0 to 2 write them


def _reconstructor(m: Machine, kind: Any, base: Any, state: Any) -> Any:
    return m.call(kind, () if state is None else (state,))


def _newobj(m: Machine, kind: Any, *args: Any) -> Any:
    if type(kind) is not Global or kind.name in BUILDERS:
        m.fail("an object of something that is no class")
    m.charge(len(args))
    return Record(kind.name, args)


# numpy


def _numpy_dtype(m: Machine, code: Any, *flags: Any) -> Any:
    if type(code) is str and NUMBERS.fullmatch(code):
        return np.dtype(code)
    return Record("numpy.dtype", (code, *flags[:2]))


def _numpy_scalar(m: Machine, dtype: Any, data: Any = b"") -> Any:
    if not isinstance(dtype, np.dtype):
        return Record("numpy.scalar", (dtype, data))
    if type(data) is str:
        data = _encode(m, data)
    if type(data) is not bytes or len(data) != dtype.itemsize:
        m.fail("a numpy number of the wrong size")
    return np.frombuffer(data, dtype=dtype)[0].item()


def _numpy_frombuffer(m: Machine, data: Any, dtype: Any, shape: Any, order: Any = "C", axes: Any = None) -> Record:
    if order not in ("C", "F"):
        return Record("numpy.ndarray", (data, dtype, shape, order, axes))
    array = Array("numpy.ndarray")
    array.state = (1, shape, dtype, order == "F", data)
    return array


# torch


def _size(m: Machine, sizes: Any = ()) -> tuple[int, ...]:
    m.charge(len(sizes))
    result = tuple(sizes)
    if not all(type(size) is int for size in result):
        m.fail("a torch.Size that does not hold numbers")
    m.weights.pop(id(result), None)
    return result


def _device(m: Machine, kind: str, index: int | None = None) -> str:
    if type(kind) is not str or type(index) not in (int, type(None)):
        m.fail("a device that has no name")
    return kind if index is None else f"{kind}:{index:d}"


def _layout(m: Machine, name: str) -> str:
    if type(name) is not str:
        m.fail("a layout that has no name")
    return name


def _tensor(m: Machine, storage: Any, offset: Any, shape: Any, stride: Any) -> StoredTensor:
    return _stored(m, storage, None, offset, shape, stride, False)


def _tensor_v2(
    m: Machine, storage: Any, offset: Any, shape: Any, stride: Any, requires_grad: Any, hooks: Any, metadata: Any = None
) -> Any:
    if metadata:  # conjugated or negated views: the bytes are not the values
        return Record(
            "torch._utils._rebuild_tensor_v2", (storage, offset, shape, stride, requires_grad, hooks, metadata)
        )
    return _stored(m, storage, None, offset, shape, stride, requires_grad)


def _tensor_v3(
    m: Machine,
    storage: Any,
    offset: Any,
    shape: Any,
    stride: Any,
    requires_grad: Any,
    hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> Any:
    if metadata:
        return Record("torch._utils._rebuild_tensor_v3", (storage, offset, shape, stride, requires_grad, hooks, dtype))
    if not isinstance(dtype, torch.dtype):
        m.fail("a tensor without a dtype")
    return _stored(m, storage, dtype, offset, shape, stride, requires_grad)


def _stored(
    m: Machine, storage: Any, dtype: torch.dtype | None, offset: Any, shape: Any, stride: Any, requires_grad: Any
) -> StoredTensor:
    if type(storage) is not Storage or type(shape) not in (tuple, list) or type(stride) not in (tuple, list):
        m.fail("a tensor without a storage or a shape")
    m.charge(len(shape) + len(stride))
    return StoredTensor(storage, dtype or storage.dtype, tuple(shape), tuple(stride), offset, bool(requires_grad))


def _parameter(m: Machine, data: Any, requires_grad: Any = True, hooks: Any = None, state: Any = None) -> Any:
    if type(data) is not StoredTensor:
        return data  # a subclass that stays a record, as it would outside a parameter
    return replace(data, requires_grad=bool(requires_grad), subclass=PARAMETER, attributes=_attributes(m, state))


def _from_type(m: Machine, function: Any, kind: Any, args: Any, state: Any = None) -> Any:
    if type(function) is Global and BUILDERS.get(function.name) is _from_type:
        m.fail("a tensor inside itself")
    value = m.call(function, args)
    if type(value) is StoredTensor:
        name = kind.name if type(kind) is Global and kind.name != "torch.Tensor" else value.subclass
        return replace(value, subclass=name, attributes={**value.attributes, **_attributes(m, state)})
    if isinstance(value, Record):
        m.build(value, state)
    return value


def _wrapper_subclass(
    m: Machine,
    kind: Any,
    dtype: Any = None,
    shape: Any = None,
    stride: Any = None,
    offset: Any = 0,
    layout: Any = None,
    device: Any = None,
    requires_grad: Any = False,
) -> Record:
    if type(kind) is not Global:
        m.fail("a tensor subclass without a name")
    keywords = {"dtype": dtype, "shape": shape, "stride": stride, "device": device, "requires_grad": requires_grad}
    return Record(kind.name, (), keywords)


def _from_numpy(m: Machine, data: Any, dtype: Any, device: Any, requires_grad: Any = False) -> Any:
    if type(data) is not Array or not isinstance(dtype, torch.dtype):
        m.fail("a tensor made from something that is no array")
    m.charge(len(data.state[4]) if type(data.state) is tuple and len(data.state) == 5 else 0)
    try:
        array = data.numpy()
        if np.iscomplexobj(array) != dtype.is_complex:
            m.fail("a tensor made from an array of another kind")
        values = torch.from_numpy(array.copy(order="C")).to(dtype)
    except (FileError, RuntimeError) as error:  # a dtype that torch cannot convert to
        m.fail(str(error), error)
    content = values.reshape(-1).view(torch.uint8).numpy().tobytes()
    storage = Storage(dtype, len(content), byte_range=ByteRange.of_bytes(content, m.label))
    return StoredTensor(storage, dtype, tuple(values.shape), values.stride(), 0, bool(requires_grad))


def _from_cpu(m: Machine, data: Any, dtype: Any, device: Any, requires_grad: Any = False) -> Any:
    if type(data) is not StoredTensor or data.dtype is not dtype:
        return Record("torch._utils._rebuild_device_tensor_from_cpu_tensor", (data, dtype, device, requires_grad))
    return replace(data, requires_grad=bool(requires_grad))


def _nested_file(m: Machine, data: Any) -> Any:
    if type(data) is not bytes or m.nested_load is None:
        m.fail("a torch file inside itself")
    m.charge(len(data))
    return m.nested_load(data)


def _attributes(m: Machine, state: Any) -> dict[Any, Any]:
    parts = state if type(state) is tuple and len(state) == 2 else (state,)
    result: dict[Any, Any] = {}
    for part in parts:
        if type(part) is dict:
            m.charge(len(part))
            result.update(part)
    return result


_BUILTINS: dict[str, Callable[..., Any]] = {
    "set": _set,
    "frozenset": _frozenset,
    "dict": _mapping,
    "bytes": _bytes,
    "bytearray": _bytearray,
    "complex": _complex,
}
_NUMPY: dict[str, Callable[..., Any]] = {
    "multiarray.scalar": _numpy_scalar,
    "multiarray._reconstruct": lambda m, kind, shape, code: Array("numpy.ndarray"),
    "numeric._frombuffer": _numpy_frombuffer,
}
BUILDERS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _mapping,
    "collections.Counter": _mapping,
    "collections.defaultdict": lambda m, factory=None, items=(): _mapping(m, items),
    "_codecs.encode": _encode,
    "numpy.dtype": _numpy_dtype,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": _layout,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_wrapper_subclass": _wrapper_subclass,
    "torch._utils._rebuild_device_tensor_from_numpy": _from_numpy,
    "torch._utils._rebuild_xla_tensor": _from_numpy,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _from_cpu,
    "torch._utils._rebuild_meta_tensor_no_storage": lambda m, *args: m.fail(
        "a tensor on the meta device, without values"
    ),
    "torch.storage._load_from_bytes": _nested_file,
    **{
        f"{module}._rebuild_from_type{v}": _from_type
        for module in ("torch._tensor", "torch.tensor")
        for v in ("", "_v2")
    },
    **{f"{module}.{name}": made for module in ("builtins", "__builtin__") for name, made in _BUILTINS.items()},
    **{f"{module}.{name}": made for module in ("numpy.core", "numpy._core") for name, made in _NUMPY.items()},
    **{f"{module}._reconstructor": _reconstructor for module in ("copyreg", "copy_reg")},
    **{f"{module}.__newobj__": _newobj for module in ("copyreg", "copy_reg")},
}

_STORAGES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexDouble": torch.complex128,
    "ComplexFloat": torch.complex64,
    "QUInt8": torch.quint8,
    "QInt8": torch.qint8,
    "QInt32": torch.qint32,
    "QUInt4x2": torch.quint4x2,
    "QUInt2x4": torch.quint2x4,
    "Untyped": torch.uint8,
    "_Untyped": torch.uint8,
}
VALUES: dict[str, Any] = {
    **{f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    **{
        f"{module}.{name}Storage": StorageType(dtype)
        for module in ("torch", "torch.cuda", "torch.storage")
        for name, dtype in _STORAGES.items()
    },
}
