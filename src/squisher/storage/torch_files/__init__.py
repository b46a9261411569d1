"""torch zip and legacy files without executing anything: a pickle machine of our own, storages as byte ranges."""

from __future__ import annotations

from .containers import read as read
from .containers import unpickle as unpickle
from .containers import zip_entries as zip_entries
from .records import Array as Array
from .records import Global as Global
from .records import Record as Record
from .spans import Span as Span
from .stored import Storage as Storage
from .stored import StoredTensor as StoredTensor

__all__ = ["Array", "Global", "Record", "Span", "Storage", "StoredTensor", "read", "unpickle", "zip_entries"]
