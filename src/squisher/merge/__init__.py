"""Merging models into one: the average, Fisher merging, gradient matching, OTA and task arithmetic, larger than memory.

Weights and importances are any `Mapping[str, Tensor]`: a `state_dict()`, a lazy folder, a test dict. So is the result, whose
tensors are computed when they are asked for. Names and shapes decide what belongs together, never an architecture.
"""

from __future__ import annotations

from .lazy import Merged
from .methods import Candidate, average, fisher, ota, search, task_arithmetic, ubgm

__all__ = ["Candidate", "Merged", "average", "fisher", "ota", "search", "task_arithmetic", "ubgm"]
