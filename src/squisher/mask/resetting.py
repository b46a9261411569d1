"""A fine-tuned model with everything outside a mask put back to where it started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..names import align
from ..storage.tensors import CHUNK, Computed, chunks_of

__all__ = ["reset_outside"]


def reset_outside(
    tuned: Mapping[str, Tensor], base: Mapping[str, Tensor], mask: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Return the tuned weights inside the mask, the base's outside; a lazy mapping, exact to the bit.

    Args:
        tuned: The fine-tuned weights.
        base: The weights that training started from, with every tensor of `tuned`.
        mask: True where the tuned value stays; tensors missing from it are the base's.

    Raises:
        NamingError: The three do not fit one another.
    """
    align(tuned, base, ("the tuned model", "the base"), dtypes=True)
    if mask:
        align(mask, tuned, ("the mask", "the tuned model"))
    return _Reset(tuned, base, mask)


class _Reset(Computed):
    def __init__(self, tuned: Mapping[str, Tensor], base: Mapping[str, Tensor], mask: Mapping[str, Tensor]) -> None:
        super().__init__(tuned)
        self._tuned, self._base, self._mask = tuned, base, mask

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._mask:
            return self._base[name]
        tuned = self._tuned[name]
        return torch.where(self._mask[name].to(tuned.device), tuned, self._base[name].to(tuned.device))

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[Tensor]:
        if name not in self._mask:
            yield from chunks_of(self._base, name, size)
            return
        parts = (chunks_of(part, name, size) for part in (self._mask, self._tuned, self._base))
        for marked, tuned, base in zip(*parts, strict=True):
            yield torch.where(marked, tuned, base)
