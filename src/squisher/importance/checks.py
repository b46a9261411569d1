"""Check names, types and values of an importance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import ranks
from ..errors import ArgumentError, NamingError, SquisherError, near
from ..storage.tensors import CHUNK, Computed

__all__ = ["Checked", "check_all", "check_values", "checked_dtype", "short", "tensors_only"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
_READABLE = (*_DTYPES.values(), torch.float16)


def check_all(tensors: Mapping[str, Tensor]) -> None:
    """Check the values of all tensors; of sharded ones each process checks its shard, and all refuse together."""
    failure = None
    try:
        for name, tensor in tensors.items():
            check_values(name, tensor)
    except SquisherError as error:
        failure = error
    ranks.agree_on(failure, tensors.values())


class Checked(Computed):
    """A plain mapping whose values are checked when they are read, as an importance's are."""

    def __getitem__(self, name: str) -> Tensor:
        values = self._like[name]
        check_all({name: values})
        return values

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[Tensor]:
        """Return one tensor in flat chunks, in order, each checked."""
        for chunk in super().chunks(name, size):
            check_values(name, chunk)
            yield chunk


def check_values(name: str, values: Tensor) -> None:
    """Refuse values that no mean of squares can have; of a sharded tensor, in the shard of this process.

    Raises:
        SquisherError: A value is NaN, infinite or negative; the message names the parameter.
    """
    values = ranks.local_of(values)
    if values.dtype not in _READABLE:
        raise SquisherError(
            f"The importance of {name!r} has the type {values.dtype}; it must be a floating-point tensor of 16 bits or more."
        )
    if values.is_meta or values.layout != torch.strided:
        what = (
            "is on the meta device, so it has no values" if values.is_meta else "is sparse: make it dense (to_dense())"
        )
        raise SquisherError(f"The importance of {name!r} {what}.")
    if not values.numel() or _surely_valid(values):
        return
    low, high = (float(x) for x in torch.aminmax(values.detach()))
    if low >= 0 and high < math.inf:
        return
    what = (
        "NaN" if math.isnan(low) or math.isnan(high) else "infinite values" if math.isinf(high) else "negative values"
    )
    raise SquisherError(
        f"The importance of {name!r} has {what}, which no mean of squared gradients can have. The run that made it may have "
        "diverged, or the file is damaged; take an earlier checkpoint."
    )


_INFINITY_BITS = {
    torch.float64: (torch.int64, np.uint64, 0x7FF0 << 48),
    torch.float32: (torch.int32, np.uint32, 0x7F80 << 16),
    torch.bfloat16: (torch.int16, np.uint16, 0x7F80),
}


def _surely_valid(values: Tensor) -> bool:
    """Return whether all are finite and not negative, in one pass: as unsigned integers, the bits of others are larger."""
    if values.dtype not in _INFINITY_BITS or values.device.type != "cpu" or not values.is_contiguous():
        return False
    signed, unsigned, infinity = _INFINITY_BITS[values.dtype]
    return bool(values.detach().view(signed).numpy().view(unsigned).max() < infinity)


def tensors_only(tensors: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the items of a mapping; refuse keys that are no names, and values that are no tensors."""
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not name:
            raise NamingError(f"An importance has parameter names as keys, not {name!r}.")
        if not isinstance(tensor, Tensor):
            raise SquisherError(f"The importance of {name!r} is {short(tensor)}, not a tensor.")
        yield name, tensor


def checked_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return a type that importances can be written in, given the type or its name."""
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name == "float16":
        raise ArgumentError("float16 underflows below 6e-8, where most squared gradients are: use bfloat16 or float32.")
    if name not in _DTYPES:
        raise ArgumentError(f"An importance is written as {', '.join(_DTYPES)}, not {name}.{near(name, _DTYPES)}")
    return _DTYPES[name]


def short(value: object) -> str:
    """Describe what was given instead of tensors, in two words."""
    return "nothing" if isinstance(value, Mapping) and not value else f"a {type(value).__name__}"
