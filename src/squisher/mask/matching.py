"""The entries of a live model that a mask keeps: the mask's names against the model's, shapes checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import SquisherError
from ..names import align, live_tensors
from ..storage.tensors import chunks_of
from .packed import Mask

__all__ = ["Kept", "match"]


class Kept(NamedTuple):
    """One parameter, and which of its entries may move."""

    name: str
    parameter: Tensor
    indices: Tensor
    """Flat indices of the entries that may move, on the parameter's device."""

    @property
    def whole(self) -> bool:
        """Whether all of them may."""
        return self.indices.numel() == self.parameter.numel()


def match(model: nn.Module, mask: Mapping[str, Tensor]) -> list[Kept]:
    """Every trainable parameter of a model with the indices that the mask keeps; none for those it does not name.

    Raises:
        NamingError: The mask has a name or a shape that the model has not.
        SquisherError: A parameter is kept that is not trainable.
    """
    parameters, tied = live_tensors(model)
    names = align(mask, parameters, ("the mask", "the model"), tied=tied) if mask else {}
    out = []
    for name, parameter in parameters.items():
        indices = _indices(mask, names[name]) if name in names else torch.zeros(0, dtype=torch.int64)
        if not parameter.requires_grad:
            if indices.numel():
                raise SquisherError(
                    f"The mask keeps {indices.numel():,} entries of {name!r}, but requires_grad is False there."
                )
            continue
        if not parameter.is_contiguous():
            raise SquisherError(f"{name!r} is not contiguous in memory; call .contiguous() on it first.")
        out.append(Kept(name, parameter, indices.to(parameter.device)))
    return out


def _indices(mask: Mapping[str, Tensor], name: str) -> Tensor:
    if isinstance(mask, Mask):
        return mask.indices(name)
    found, start = [torch.zeros(0, dtype=torch.int64)], 0
    for piece in chunks_of(mask, name):
        if piece.dtype != torch.bool:
            raise SquisherError(f"The mask of {name!r} has the type {piece.dtype}; a mask is made of boolean tensors.")
        found.append(torch.from_numpy(np.flatnonzero(piece.numpy())) + start)
        start += piece.numel()
    return torch.cat(found)
