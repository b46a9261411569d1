"""A fine-tune as base + sparse difference: exact bits, streamed, and tied to the base it was made from.

A patch holds, for every tensor that changed, the flat indices of the entries that differ and their new values; whole
tensors where that is smaller or where the base has none. Entries differ if their bits do.

    squisher.patch.make(base, tuned, "patch.safetensors", mask=mask)
    tuned = squisher.patch.apply(base, "patch.safetensors")
"""

from __future__ import annotations

from .applying import apply
from .making import Summary, make

__all__ = ["Summary", "apply", "make"]
