"""How much each weight matters: ½θ²F, and what it is compared with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import SquisherError, near
from ..importance import checked
from ..names import align
from ..storage.tensors import (
    CHUNK,
    Computed,
    chunks_of,
    dtype_of,
    numel_of,
)

__all__ = ["SCORES", "Scores", "check_score", "scores"]

SCORES = ("fisher", "magnitude", "importance", "random")


def scores(
    weights: Mapping[str, Tensor],
    importance: Mapping[str, Tensor] | None = None,
    score: str = "fisher",
    *,
    seed: int = 0,
) -> Scores:
    """Return what is lost by setting each weight to zero, to second order: ½θ²F; a lazy mapping.

    Args:
        weights: Any mapping, in memory or in files; read in pieces.
        importance: Of the same names and shapes, for the scores fisher and importance.
        score: `"fisher"` is ½θ²F, `"magnitude"` |θ|, `"importance"` F alone, `"random"` uniform noise.
        seed: Of random scores, which depend on it and on the parameter's name alone.

    Returns:
        A score for each entry of each tensor that has an importance (of each tensor, without one).

    Raises:
        NamingError: The importance has a name or a shape that the weights have not.
        SquisherError: The score does not exist or needs an importance.
    """
    check_score(score, importance)
    if importance is None:
        return Scores(weights, None, score, seed, list(weights))
    align(importance, weights, ("the importance", "the model"))
    return Scores(weights, checked(importance), score, seed, list(importance))


def check_score(score: str, importance: object, more: tuple[str, ...] = ()) -> None:
    """Refuses a score that does not exist, or one that needs an importance where there is none."""
    known = (*SCORES, *more)
    if score not in known:
        raise SquisherError(f"score is {', '.join(known[:-1])} or {known[-1]}, not {score!r}.{near(str(score), known)}")
    if importance is None and score not in ("magnitude", "random", "orthoreg"):
        raise SquisherError(f"The score {score} needs an importance; only magnitude and random do without one.")


class Scores(Computed):
    """Scores by name, computed when asked for: one piece of weights and importance in memory at a time."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        importance: Mapping[str, Tensor] | None,
        score: str,
        seed: int,
        names: list[str],
    ) -> None:
        super().__init__(weights, {name: name for name in names})
        self._weights = weights
        self._importance = importance
        self._score = score
        self._seed = seed

    def dtype(self, name: str) -> torch.dtype:
        """float32, or float64 where weights or importance are."""
        read = [self._weights] if self._importance is None else [self._weights, self._importance]
        wide = self._score != "random" and any(dtype_of(r, self._name_there(name)) == torch.float64 for r in read)
        return torch.float64 if wide else torch.float32

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[Tensor]:
        """One tensor's scores in flat pieces, in order."""
        if self._score == "random":
            yield from self._noise(name, size)
            return
        kind = self.dtype(name)
        if self._score == "magnitude":
            for piece in chunks_of(self._weights, self._name_there(name), size):
                yield torch.from_numpy(np.abs(_array(piece, kind)))
            return
        importance = self._importance
        if importance is None:
            raise SquisherError(f"The score {self._score} needs an importance.")
        if self._score == "importance":
            for piece in chunks_of(importance, self._name_there(name), size):
                yield torch.from_numpy(_array(piece, kind))
            return
        pairs = zip(
            chunks_of(self._weights, self._name_there(name), size), chunks_of(importance, name, size), strict=True
        )
        for weight, fisher in pairs:
            theta = _array(weight, kind)
            loss = theta * theta
            loss *= _array(fisher, kind)
            loss *= 0.5
            yield torch.from_numpy(loss)

    def _noise(self, name: str, size: int) -> Iterator[Tensor]:
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        random = np.random.default_rng(int.from_bytes(digest[:16], "big"))
        numel = numel_of(self._weights, self._name_there(name))
        for start in range(0, numel, size):
            yield torch.from_numpy(random.random(min(size, numel - start), dtype=np.float32))


def _array(piece: Tensor, kind: torch.dtype) -> np.ndarray[Any, np.dtype[Any]]:
    return piece.detach().to(kind).numpy()
