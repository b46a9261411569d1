"""Tensors that are plain bytes in a file, in one stretch or in several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .torch_files import Span

__all__ = ["JoinedTensor", "SpanTensor"]


@dataclass(frozen=True)
class SpanTensor:
    """A tensor that is one stretch of bytes."""

    span: Span
    dtype: torch.dtype
    shape: tuple[int, ...]

    def load(self) -> Tensor:
        """The whole tensor."""
        return self.read_flat(0, math.prod(self.shape)).reshape(self.shape)

    def read_flat(self, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` in flat order."""
        out = torch.empty(stop - start, dtype=self.dtype)
        if stop > start:
            self.span.read_into(out.view(torch.uint8).numpy().data, start * self.dtype.itemsize)
        return out


@dataclass(frozen=True)
class JoinedTensor:
    """A tensor whose flat elements lie in several stretches, one after the other."""

    parts: Sequence[SpanTensor]
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the elements."""
        return self.parts[0].dtype

    def load(self) -> Tensor:
        """The whole tensor."""
        return self.read_flat(0, math.prod(self.shape)).reshape(self.shape)

    def read_flat(self, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` in flat order."""
        pieces, begin = [], 0
        for part in self.parts:
            end = begin + math.prod(part.shape)
            if begin < stop and start < end:
                pieces.append(part.read_flat(max(start, begin) - begin, min(stop, end) - begin))
            begin = end
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=self.dtype)
