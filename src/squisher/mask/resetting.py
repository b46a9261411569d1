"""A fine-tuned model with everything outside a mask put back to where it started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..errors import NamingError, near
from ..storage.tensors import CHUNK, Computed, chunks_of, dtype_of, shape_of

__all__ = ["reset_outside"]


def reset_outside(
    tuned: Mapping[str, Tensor], base: Mapping[str, Tensor], mask: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """The tuned weights inside the mask, the base's outside; a lazy mapping, exact to the bit.

    Args:
        tuned: The fine-tuned weights.
        base: The weights that training started from, with every tensor of `tuned`.
        mask: True where the tuned value stays; tensors missing from it are the base's.

    Raises:
        NamingError: The three do not fit one another.
    """
    for name in tuned:
        if name not in base:
            raise NamingError(f"{name!r} is not in the base, so it cannot be reset to it.{near(name, base)}")
        if shape_of(tuned, name) != shape_of(base, name) or dtype_of(tuned, name) != dtype_of(base, name):
            raise NamingError(
                f"{name!r} is {_what(tuned, name)} in the tuned model and {_what(base, name)} in the base; they must agree."
            )
    for name in mask:
        if name not in tuned:
            raise NamingError(f"The mask has {name!r}, which the tuned model has not.{near(name, tuned)}")
        if shape_of(mask, name) != shape_of(tuned, name):
            raise NamingError(
                f"The mask of {name!r} has the shape {tuple(shape_of(mask, name))}, the weight "
                f"{tuple(shape_of(tuned, name))}."
            )
    return _Reset(tuned, base, mask)


def _what(tensors: Mapping[str, Tensor], name: str) -> str:
    return f"{str(dtype_of(tensors, name)).removeprefix('torch.')} of the shape {tuple(shape_of(tensors, name))}"


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
