"""Memory for pieces, used again and again."""

from __future__ import annotations

import sys
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from .named import CHUNK

__all__ = ["room_for"]

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
