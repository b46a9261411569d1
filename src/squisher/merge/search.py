"""Which coefficients to merge with: the best of a grid for two models, of random draws for more."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..errors import SquisherError

__all__ = ["Candidate", "search"]


class Candidate(NamedTuple):
    """Coefficients that were tried, and how good the merged model was."""

    coefficients: tuple[float, ...]
    score: float


def search(
    evaluate: Callable[[Sequence[float]], float], count: int, *, draws: int = 51, seed: int = 0
) -> tuple[Candidate, list[Candidate]]:
    """Try coefficients that add up to 1 and return the best ones, and all that were tried.

    Two models: an even grid from (0, 1) to (1, 0). More: the even mixture, then draws that are uniform over all mixtures.

    Args:
        evaluate: Merges with these coefficients and returns a validation score; larger is better.
        count: Number of models.
        draws: Number of coefficients to try.
        seed: For the draws.

    Raises:
        SquisherError: Nothing can be searched, or no score is a number.
    """
    if count < 2 or draws < 2:
        raise SquisherError(f"A search needs two models and two draws or more, not {count} and {draws}.")
    tried: list[tuple[float, ...]]
    if count == 2:
        tried = [(k / (draws - 1), 1 - k / (draws - 1)) for k in range(draws)]
    else:
        generator = torch.Generator().manual_seed(seed)
        # Exponential numbers over their sum are uniform over all mixtures: Dirichlet(1).
        raw = -torch.rand(draws - 1, count, generator=generator, dtype=torch.float64).clamp_min(1e-300).log()
        tried = [(1 / count,) * count, *(tuple(row) for row in (raw / raw.sum(1, keepdim=True)).tolist())]
    scores = [Candidate(tuple(c), float(evaluate(c))) for c in tried]
    usable = [candidate for candidate in scores if not math.isnan(candidate.score)]
    if not usable:
        raise SquisherError("No coefficients gave a score that is a number.")
    return max(usable, key=lambda candidate: candidate.score), scores
