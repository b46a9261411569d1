"""Sums of squares by parameter, in memory from the first addition on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["Sums"]


class Sums(dict[str, Tensor]):
    """Zeros of each parameter's shape, made when first asked for.

    While the fast engine proves itself, this is what keeps the loop's gradients, its sums and ours from being there all at once.

    Args:
        parameters: by name.
        dtype: at least of the sums; never coarser than single precision or than the parameter.
    """

    def __init__(self, parameters: Mapping[str, Tensor], dtype: torch.dtype):
        super().__init__()
        self.parameters, self.dtype = parameters, dtype

    def __missing__(self, name: str) -> Tensor:
        self[name] = torch.zeros_like(
            self.parameters[name],
            dtype=self.dtype_of(name),
            requires_grad=False,
            memory_format=torch.contiguous_format,
        )
        return self[name]

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the type in which this parameter's squares are added up."""
        return torch.promote_types(torch.promote_types(self.parameters[name].dtype, torch.float32), self.dtype)

    def complete(self) -> dict[str, Tensor]:
        """All parameters in their order, also those to which nothing was added."""
        return {name: self[name] for name in self.parameters}
