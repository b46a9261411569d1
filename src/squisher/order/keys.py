"""Non-negative floats as unsigned integers: their bits, read as a number, are in the order of the values.

Everything happens on integers: denormals are ordered exactly, whatever the processor is told to do with them. numpy does
the work, because torch would share even a chunk of a megabyte among threads, which stalls on a machine that has other
work to do.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import SquisherError

__all__ = [
    "BINS",
    "CHANGED",
    "INFINITY",
    "Keys",
    "Source",
    "bins_of",
    "bits_of",
    "checked",
    "keys_of",
    "middles",
    "reverse",
    "value_of",
]

Source = Callable[[], Iterable[Tensor]]
"""Gives the scores of one tensor as chunks in order; called once a pass, and each time from the start."""

Keys = np.ndarray[Any, np.dtype[Any]]
"""Unsigned integers of 32 or 64 bits, in the order of the scores."""

INFINITY = {32: 0x7F800000, 64: 0x7FF0000000000000}
CHANGED = "The scores changed while they were being ranked; every pass over them must give the same ones."
_SIGNLESS = {32: np.uint32(0x7FFFFFFF), 64: np.uint64(0x7FFFFFFFFFFFFFFF)}
_NEEDS = {torch.bfloat16: 16, torch.float16: 32, torch.float32: 32, torch.float64: 64}


def bits_of(chunk: Tensor, name: str) -> int:
    """How many upper bits of a float32 (or float64) tell all values of this dtype apart.

    Raises:
        SquisherError: The scores are not floats that can be ranked.
    """
    if chunk.dtype not in _NEEDS:
        raise SquisherError(
            f"The scores of {name!r} are {chunk.dtype}, which are not ranked; expected float64, float32, bfloat16 or "
            "float16. Convert them first."
        )
    return _NEEDS[chunk.dtype]


def keys_of(chunk: Tensor, width: int) -> Keys:
    """Return the bits of the scores as float32 or float64, flat; `checked` must have seen them once.

    A chunk of the wanted width is not copied.
    """
    flat = chunk.detach().reshape(-1).cpu()
    if flat.dtype == torch.bfloat16 and width == 32:
        # Not through a conversion: one that flushes denormals would lose the order of the smallest.
        return flat.view(torch.int16).numpy().view(np.uint16).astype(np.uint32) << np.uint32(16)
    if width == 64:
        return flat.to(torch.float64).numpy().view(np.uint64)
    return flat.to(torch.float32).numpy().view(np.uint32)


def checked(keys: Keys, width: int, name: str) -> Keys:
    """Return the same keys with -0.0 as 0; refuse what has no rank.

    Raises:
        SquisherError: NaN or negative scores; the message names the source.
    """
    if not keys.size or int(keys.max()) <= INFINITY[width]:
        return keys
    magnitude = keys & _SIGNLESS[width]
    if int(magnitude.max()) > INFINITY[width]:
        raise SquisherError(f"The scores of {name!r} hold NaN, which has no rank. Remove it where the scores are made.")
    if bool(((keys != magnitude) & (magnitude > 0)).any()):
        raise SquisherError(
            f"The scores of {name!r} hold negative values; importances and scores are 0 or more. "
            "Take the absolute value first if that is what should be ranked."
        )
    return magnitude


def reverse(chunk: Tensor) -> Tensor:
    """Return scores of the opposite order, from scores that are 0 or more: what was k-th largest is k-th smallest."""
    wide = chunk.dtype == torch.float64
    bits = chunk.abs() if wide else chunk.float().abs()  # -0.0 is 0
    top = INFINITY[64 if wide else 32]
    return (top - bits.view(torch.int64 if wide else torch.int32)).view(bits.dtype)


BINS = 1 << 15
"""How many values the upper 16 bits of a non-negative float32 can have."""


def bins_of(values: Tensor) -> Tensor:
    """Return the upper 16 bits of each value as float32, without the sign: integers in the order of the values."""
    return (values.to(torch.float32).view(torch.int32) >> 16) & (BINS - 1)


@cache
def middles() -> Tensor:
    """Return the value in the middle of each of these bins."""
    return ((torch.arange(BINS, dtype=torch.int32) << 16) | 0x8000).view(torch.float32)


def value_of(key: int, width: int) -> float:
    """Return the score that a key stands for."""
    if width == 64:
        return float(struct.unpack("<d", struct.pack("<Q", key))[0])
    return float(struct.unpack("<f", struct.pack("<I", key))[0])
