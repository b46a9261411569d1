"""Masks: train only the entries that matter.

    mask = squisher.mask.top_k(importance, keep=0.005, always=r"classifier")
    handle = squisher.mask.train_only(model, optimizer, mask)                 # any optimizer; handle.remove()
    optimizer = squisher.mask.compact(model, mask, torch.optim.AdamW, lr=1e-3)  # or one over the kept entries alone

A mask is a mapping from parameter name to a boolean tensor: True where training may move an entry. `choosing` makes and stores
masks, `training` trains with them.
"""

from __future__ import annotations

from .choosing import Mask, load, top_k
from .training import Handle, compact, reset_outside, train_only

__all__ = ["Handle", "Mask", "compact", "load", "reset_outside", "top_k", "train_only"]
