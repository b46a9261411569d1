"""Which parameters were trained, by the evidence of other weights: what differs was trained, what is bit-equal was frozen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ...storage.folders import Weights
from ...storage.tensors import CHUNK, TensorSource
from ..states import Candidate

__all__ = ["by_evidence", "with_earlier"]


def with_earlier(candidates: Sequence[Candidate], before: Weights) -> list[Candidate]:
    """Return the candidates with their values at an earlier moment, unread.

    Args:
        candidates: The model's parameters in registration order.
        before: Weights of the same model from that moment.
    """
    bare = _without_prefix(before.tensors)
    known = [c.slices or c.before is not None for c in candidates]
    return [
        c if there else replace(c, before=_earlier(c.name, c.shape, before, bare))
        for c, there in zip(candidates, known, strict=True)
    ]


def by_evidence(candidates: Sequence[Candidate], after: Weights, before: Weights) -> list[list[Candidate]]:
    """Candidates for a model of which some parameters were frozen: first the likely ones, then all.

    What differs between the two sets of weights is required. What is bit-equal is left out at first; it comes back in the
    second list, since a trained parameter stays as it was if no gradient reached it or its steps were too small to count.

    Args:
        candidates: The model's parameters in registration order.
        after: The checkpoint's own weights.
        before: Weights of the same model from another moment.
    """
    bare = _without_prefix(before.tensors)
    marked = []
    for c in candidates:
        names = [fused.name for fused in c.slices] or [c.name]
        verdicts = [_changed(name, after, before, bare) for name in names]
        changed = True if True in verdicts else None if None in verdicts else False
        earlier = None if c.slices else _earlier(c.name, c.shape, before, bare)
        marked.append((replace(c, required=changed is True, before=c.before or earlier), changed))
    likely = [c for c, changed in marked if changed is not False]
    return [likely, [c for c, _ in marked]]


def _without_prefix(tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """Return the tensors under their names without the first part, where that leaves every name its own."""
    known = {name.partition(".")[2]: tensor for name, tensor in tensors.items() if "." in name}
    return known if len(known) == sum("." in name for name in tensors) else {}


def _earlier(
    name: str, shape: tuple[int, ...], before: Weights, bare: Mapping[str, TensorSource]
) -> TensorSource | None:
    """Return the tensor of the other weights; a bare encoder's names lack the prefix that a model with a head gives them."""
    old = before.tensors.get(name) or before.tensors.get(name.partition(".")[2]) or bare.get(name)
    return old if old is not None and tuple(old.shape) == shape else None


def _changed(name: str, after: Weights, before: Weights, bare: Mapping[str, TensorSource]) -> bool | None:
    """Whether a tensor differs; None where it is not in both with the same shape."""
    new = after.tensors.get(name)
    old = None if new is None else _earlier(name, tuple(new.shape), before, bare)
    if new is None or old is None:
        return None
    numel = math.prod(new.shape)
    for start in range(0, numel, CHUNK):
        stop = min(start + CHUNK, numel)
        if not torch.equal(new.read_flat(start, stop), old.read_flat(start, stop).to(new.dtype)):
            return True
    return False
