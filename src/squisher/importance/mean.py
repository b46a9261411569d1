"""The weighted mean of several importances."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import SquisherError
from ..storage.tensors import CHUNK, Computed

if TYPE_CHECKING:
    from .core import Importance

__all__ = ["Mean", "Spread", "weights_of"]


class Mean(Computed):
    """The weighted mean of several importances, computed when asked for."""

    def __init__(self, parts: Sequence[tuple[Importance, float]]):
        super().__init__(parts[0][0])
        self._parts = list(parts)

    def __getitem__(self, name: str) -> Tensor:
        return torch.stack([weight * imp[name].float() for imp, weight in self._parts]).sum(0)

    def dtype(self, name: str) -> torch.dtype:
        """Single precision, whatever the parts have."""
        return torch.float32

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[Tensor]:
        """One tensor in flat pieces, in order."""
        for pieces in zip(*(imp.chunks(name, size) for imp, _ in self._parts), strict=True):
            weighted = [w * piece.float() for (_, w), piece in zip(self._parts, pieces, strict=True)]
            yield torch.stack(weighted).sum(0)


class Spread(Mean):
    """The standard error of each entry of such a mean, from how far its parts lie apart."""

    def __getitem__(self, name: str) -> Tensor:
        return self._spread([imp[name] for imp, _ in self._parts])

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[Tensor]:
        """Return one tensor in flat chunks, in order."""
        for chunks in zip(*(imp.chunks(name, size) for imp, _ in self._parts), strict=True):
            yield self._spread(chunks)

    def _spread(self, values: Sequence[Tensor]) -> Tensor:
        weights = [weight for _, weight in self._parts]
        stacked = torch.stack([value.double() for value in values])
        shares = torch.tensor(weights, dtype=torch.float64, device=stacked.device).view(-1, *[1] * (stacked.dim() - 1))
        mean = (shares * stacked).sum(0)
        count = len(weights)
        return (count / (count - 1) * (shares * (stacked - mean)).square().sum(0)).sqrt().float()


def weights_of(importances: Sequence[Importance], weights: str | Sequence[float]) -> list[float]:
    """One positive number each; see `Importance.combine`."""
    if weights == "equal":
        return [1.0] * len(importances)
    if weights == "examples":
        by_token = [imp.provenance.kind == "fisher" and imp.provenance.unit == "token" for imp in importances]
        counts = [
            imp.provenance.tokens or 0 if tokens else imp.provenance.examples or 0
            for imp, tokens in zip(importances, by_token, strict=True)
        ]
        for k, (count, tokens) in enumerate(zip(counts, by_token, strict=True)):
            if not count:
                raise SquisherError(
                    f"Importance {k + 1} does not say how many {'tokens' if tokens else 'examples'} it saw; pass "
                    "weights='equal' or one number each."
                )
        return [float(count) for count in counts]
    if isinstance(weights, str):
        raise SquisherError(f"weights is 'examples', 'equal' or one number each, not {weights!r}.")
    if len(weights) != len(importances) or not all(math.isfinite(w) and w > 0 for w in weights):
        raise SquisherError(f"combine needs {len(importances)} positive weights, but got {list(weights)}.")
    return [float(w) for w in weights]
