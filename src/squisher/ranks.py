"""How many processes there are, which one this is, and sums over all of them; does nothing when alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import SquisherError

__all__ = ["agree", "gather", "is_alone", "rank", "sum_in_place", "world"]

_BUCKET = 1 << 24  # elements sent in one message: small tensors travel together


def is_alone() -> bool:
    """Whether this is the only process of the job."""
    return world() == 1


def world() -> int:
    """The number of processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which of them this is, from 0."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def gather(value: Any, group: Any = None) -> list[Any]:
    """One (picklable, small) value of every process (of a group, or of all), in the order of ranks."""
    if is_alone():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def agree(error: BaseException | None, group: Any = None) -> None:
    """Raise on every process if one of them failed: a process that leaves alone would make the others wait for ever.

    Args:
        error: what happened here, or None.
        group: the processes that this is about; all of them if there is none.

    Raises:
        SquisherError: on the processes where nothing happened, if something happened elsewhere.
        BaseException: the error itself, where it happened.
    """
    messages = gather(None if error is None else f"{type(error).__name__}: {error}", group)
    if error is not None:
        raise error
    for where, message in enumerate(messages):
        if message is not None:
            raise SquisherError(f"Process {where} of {len(messages)} failed, so this one stops too. There: {message}")


def sum_in_place(tensors: Iterable[Tensor]) -> None:
    """Replace every tensor by its sum over all processes; every process must bring the same shapes in the same order."""
    if is_alone():
        return
    bucket: list[Tensor] = []
    held = 0
    for tensor in tensors:
        if bucket and (held + tensor.numel() > _BUCKET or tensor.dtype != bucket[0].dtype):
            _sum(bucket)
            bucket, held = [], 0
        bucket.append(tensor)
        held += tensor.numel()
    if bucket:
        _sum(bucket)


def _sum(bucket: list[Tensor]) -> None:
    if len(bucket) == 1 and bucket[0].is_contiguous():
        dist.all_reduce(bucket[0])
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
    dist.all_reduce(flat)
    for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
        tensor.copy_(part.view_as(tensor))
