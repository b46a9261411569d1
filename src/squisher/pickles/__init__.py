"""torch zip and legacy files without executing anything: a pickle machine of our own, storages as byte ranges."""

from __future__ import annotations

from squisher.pickles.containers import read as read
from squisher.pickles.containers import unpickle as unpickle
from squisher.pickles.containers import zip_entries as zip_entries
from squisher.pickles.records import Array as Array
from squisher.pickles.records import Global as Global
from squisher.pickles.records import Record as Record
from squisher.pickles.spans import Span as Span
from squisher.pickles.stored import Storage as Storage
from squisher.pickles.stored import StoredTensor as StoredTensor

__all__ = ["Array", "Global", "Record", "Span", "Storage", "StoredTensor", "read", "unpickle", "zip_entries"]
