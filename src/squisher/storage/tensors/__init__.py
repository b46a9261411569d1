"""Named tensors: in memory or in files, read when asked for, piece by piece.

A lazy mapping, a `state_dict()` and a test dict are the same to every caller: `shape_of`, `dtype_of` and `chunks_of`
work on all of them, and read nothing that was not asked for.
"""

from .live import LiveParameter, adapter_file_name, live_parameters
from .named import (
    CHUNK,
    Computed,
    chunks_of,
    dtype_of,
    name_pattern,
    numel_of,
    one_thread,
    shape_of,
)
from .room import room_for
from .stored import FileTensor, LazyTensors, TensorSource, read_into
from .tied import tied_names

__all__ = [
    "CHUNK",
    "Computed",
    "FileTensor",
    "LazyTensors",
    "LiveParameter",
    "TensorSource",
    "adapter_file_name",
    "chunks_of",
    "dtype_of",
    "live_parameters",
    "name_pattern",
    "numel_of",
    "one_thread",
    "read_into",
    "room_for",
    "shape_of",
    "tied_names",
]
