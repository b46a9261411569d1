"""The k-th largest score, and the marks of exactly k scores that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from .keys import Source, checked, keys_of

__all__ = ["Selection", "Threshold", "equal_in"]


@dataclass(frozen=True)
class Threshold:
    """The k-th largest score, and what is needed to choose exactly k.

    Attributes:
        value: The k-th largest score; infinity for k = 0.
        above: How many scores are larger.
        ties: How many of the scores equal to `value` belong to the k: `above + ties == k`.
        equal: How many scores equal to `value` there are among these sources (in this process).
        total: How many scores there are in all (over all processes).
        key: The bits of `value` as an integer of `width` bits.
        width: 32, or 64 where a source holds float64.
        equal_in: How many scores equal to `value` each source holds, where that was found on the way.
    """

    value: float
    above: int
    ties: int
    equal: int
    total: int
    key: int
    width: int
    equal_in: Mapping[str, int] | None = field(default=None, compare=False, repr=False)


class Selection:
    """Marks the k chosen scores, chunk by chunk.

    Call it once with every chunk of every source, in the order in which `threshold` saw and checked them (the chunks may
    be cut differently). It counts the ties that it has taken.

    Args:
        kth: What `threshold` returned for the same scores.
        before: How many scores equal to the threshold come before these sources, because other processes hold them.
    """

    def __init__(self, kth: Threshold, before: int = 0) -> None:
        self._kth = kth
        self._left = max(0, kth.ties - before)

    def __call__(self, scores: Tensor) -> Tensor:
        """Return a boolean tensor of the shape of `scores`: True where a score is among the k."""
        keys = keys_of(scores, self._kth.width)
        if self._kth.key == 0:  # only then does it matter that -0.0 counts as 0 ...
            keys = checked(keys, self._kth.width, "a source")
        keys = keys.view(f"i{keys.itemsize}")  # ... and otherwise it is below everything
        chosen = keys > self._kth.key
        if self._left:
            taken = np.flatnonzero(keys == self._kth.key)[: self._left]
            chosen[taken] = True
            self._left -= taken.size
        return torch.from_numpy(chosen).view(scores.shape).to(scores.device)


def equal_in(sources: Mapping[str, Source], kth: Threshold) -> dict[str, int]:
    """How many scores equal to the threshold each source holds; one more pass where this is not known yet."""
    if kth.equal_in is not None:
        return dict(kth.equal_in)
    if not kth.ties:
        return dict.fromkeys(sources, 0)
    return {
        name: sum(
            int(np.count_nonzero(checked(keys_of(chunk, kth.width), kth.width, name) == kth.key)) for chunk in chunks()
        )
        for name, chunks in sources.items()
    }
