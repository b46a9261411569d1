"""How much data went into the steps of a running training: examples, tokens that carry a loss, and steps that had less."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..ranks import sum_in_place, world

__all__ = ["BatchCounts", "examples_in", "loss_factor", "over_processes", "tokens_in"]

IGNORED = -100
"""The label that carries no loss, in torch and everything built on it."""


@dataclass
class BatchCounts:
    """Sums over optimizer steps and over all processes.

    Attributes:
        steps: Optimizer steps that were counted.
        examples: Examples in them.
        tokens: Tokens that carried a loss; None if a batch did not tell.
        short_steps: Steps with fewer examples than a full one: the last accumulation of an epoch.
        largest: Examples in the largest step.
    """

    steps: int = 0
    examples: int = 0
    tokens: int | None = 0
    short_steps: int = 0
    largest: int = 0

    def add(self, examples: int, tokens: int | None, full: int | None) -> None:
        """Count one optimizer step.

        Args:
            examples: In all its micro-batches, on all processes.
            tokens: Tokens that carried a loss, if that is known.
            full: Examples of a full step; if that is not known, of the largest one up to now.
        """
        self.largest = max(self.largest, examples)
        self.steps += 1
        self.examples += examples
        self.tokens = None if tokens is None or self.tokens is None else self.tokens + tokens
        self.short_steps += examples < (self.largest if full is None else full)

    @property
    def mean_tokens(self) -> float | None:
        """Tokens with a loss per step; None if they are not known."""
        return self.tokens / self.steps if self.tokens and self.steps else None

    def state(self) -> dict[str, Any]:
        """Plain types, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Any) -> BatchCounts:
        """Return what `state` returned; a fresh count if it is something else."""
        fresh = cls()
        if not isinstance(state, Mapping) or set(state) != set(fresh.state()):
            return fresh
        return cls(**state)


def examples_in(batch: Any) -> int | None:
    """Examples in a batch: the length of its first tensor; of `labels` or `input_ids` where it has names."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else None
    if isinstance(batch, Mapping):
        named = [batch[name] for name in ("labels", "input_ids") if name in batch]
        parts: Sequence[Any] = [*named, *batch.values()]
    else:
        parts = batch if isinstance(batch, (list, tuple)) else ()
    sizes = (examples_in(part) for part in parts)
    return next((size for size in sizes if size is not None), None)


def tokens_in(batch: Any, shifted: bool) -> Tensor | None:
    """How many labels of a batch carry a loss, as a tensor where the labels are; None if it has no labels.

    Args:
        batch: A mapping; `shift_labels` count as they are, `labels` otherwise.
        shifted: The model predicts each token from those before it, so that the first label of a row is never used.
    """
    if not isinstance(batch, Mapping):
        return None
    labels = batch.get("shift_labels")
    if labels is None:
        labels = batch.get("labels")
        if isinstance(labels, Tensor) and shifted and labels.dim() > 1:
            labels = labels[..., 1:]
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return None
    return torch.count_nonzero(labels != IGNORED)


def over_processes(
    examples: Sequence[int | None], tokens: Sequence[Tensor | int | None], device: Any = "cpu"
) -> tuple[int, int | None] | None:
    """Examples and tokens of a step, from those of its micro-batches here and on all other processes.

    Args:
        examples: Of every micro-batch of this process; None where they cannot be told.
        tokens: The same for tokens with a loss.
        device: Where processes exchange numbers.

    Returns:
        Both sums, the second None if one of its parts is; None if the first has such a part.
    """
    parts = [
        (sum(int(n) for n in counts if n is not None), int(None in counts)) for counts in (examples, _ints(tokens))
    ]
    sums = torch.tensor(parts, dtype=torch.int64)
    if world() > 1:
        sums = sums.to(device)
        sum_in_place([sums])
    (total, unknown), (with_loss, without) = sums.tolist()
    return None if unknown or not total else (total, None if without else with_loss)


def _ints(counts: Sequence[Tensor | int | None]) -> list[int | None]:
    return [None if n is None else int(n) for n in counts]


def loss_factor(*, divides: bool, accumulation: int, processes: int) -> int:
    """By how much a gradient is larger than that of the mean over a whole step.

    The Trainer of transformers leaves it to the model to divide by the number of items in all micro-batches of all processes,
    and undoes the averages over both. A model that takes that number and ignores it (many heads take any argument) divides by
    its own micro-batch alone, and its gradient is that many times too large.

    Args:
        divides: Whether the loss was divided by the items of the whole step.
        accumulation: Micro-batches over which nobody averaged.
        processes: Processes over which the average was undone.
    """
    return 1 if divides else accumulation * processes
