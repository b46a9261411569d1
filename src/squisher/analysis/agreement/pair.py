"""Two importances side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from ...importance import Importance
from ...names import align
from ...order import Source

__all__ = ["Pair", "Progress", "joined"]

Progress = Callable[[int, int], None]
"""Called with the entries done and the entries in all, over every pass."""


class Pair:
    """Two importances side by side: what they have in common, read in pieces."""

    def __init__(self, a: Mapping[str, Tensor], b: Mapping[str, Tensor], progress: Progress | None = None) -> None:
        self.sides = tuple(side if isinstance(side, Importance) else Importance(side) for side in (a, b))
        called = ("one importance", "the other")
        self.names = list(align(a, b, called, partial=True, advice="They must be of the same model."))
        self.only_a = [name for name in a if name not in b]
        self.only_b = [name for name in b if name not in a]
        self.numels = {name: math.prod(self.sides[0].shape(name)) for name in self.names}
        self.numel = sum(self.numels.values())
        self.passes = 1  # that will be made over both, for the progress
        self._done = 0
        self._progress = progress

    def pieces(self, side: int, name: str) -> Iterator[Tensor]:
        """One tensor of one side, piece by piece."""
        for piece in self.sides[side].chunks(name):
            yield piece
            work = 2 * self.numel * self.passes
            self._done = min(self._done + piece.numel(), work)
            if self._progress:
                self._progress(self._done, work)

    def sources(self, side: int, names: Sequence[str] | None = None) -> dict[str, Source]:
        """One side, or some names of it, to be read again and again."""
        return {name: partial(self.pieces, side, name) for name in names or self.names}

    def both(self, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the same pieces of both sides."""
        return zip(self.pieces(0, name), self.pieces(1, name), strict=True)

    def in_memory(self) -> Pair:
        """Return the same, read once."""
        a, b = ({name: joined(self.pieces(side, name)) for name in self.names} for side in (0, 1))
        return Pair(a, b)

    def joined(self) -> Pair:
        """Return the same as one tensor, in memory."""
        a, b = (joined(piece for name in self.names for piece in self.pieces(side, name)) for side in (0, 1))
        return Pair({"all": a}, {"all": b})

    def finish(self) -> None:
        """Says that all is done."""
        work = 2 * self.numel * self.passes
        if self._progress and self._done < work:
            self._progress(work, work)
        self._progress = None


def joined(pieces: Iterable[Tensor]) -> Tensor:
    """Pieces as one tensor."""
    held = list(pieces)
    return torch.cat(held) if held else torch.zeros(0)
