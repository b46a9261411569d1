"""torch zip and legacy files without executing anything: a pickle machine of our own, storages as byte ranges."""

from __future__ import annotations

from .containers import read as read
from .containers import unpickle as unpickle
from .containers import zip_entries as zip_entries
from .values import Array as Array
from .values import Global as Global
from .values import Record as Record
from .values import Storage as Storage
from .values import StoredTensor as StoredTensor
from .values import Verified as Verified
from .values import find_weights as find_weights
from .values import is_in_backward as is_in_backward
from .values import is_optimizer as is_optimizer
from .values import walk as walk

__all__ = [
    "Array", "Global", "Record", "Storage", "StoredTensor", "Verified", "find_weights", "is_in_backward", "is_optimizer", "read", "unpickle", "walk",
    "zip_entries",
]  # fmt: skip
