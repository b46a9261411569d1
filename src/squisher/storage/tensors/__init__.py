"""Named tensors: in memory or in files, read when asked for, chunk by chunk.

A lazy mapping, a `state_dict()` and a test dict are the same to every caller: `shape_of`, `dtype_of` and `chunks_of`
work on all of them, and read nothing that was not asked for.
"""

from .ahead import Ahead
from .lazy import FileTensor, LazyTensors, TensorSource, room_for, tied_names
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
from .shards import Block, Blocks, Joined, Slice

__all__ = [
    "CHUNK",
    "Ahead",
    "Block",
    "Blocks",
    "Computed",
    "FileTensor",
    "Joined",
    "LazyTensors",
    "LiveParameter",
    "Slice",
    "TensorSource",
    "adapter_file_name",
    "chunks_of",
    "dtype_of",
    "live_parameters",
    "name_pattern",
    "numel_of",
    "one_thread",
    "room_for",
    "shape_of",
    "tied_names",
]
