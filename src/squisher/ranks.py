"""Several processes: rank, world, sums over all of them, sharded tensors (DTensor). Everything works when alone, too.

`torch.distributed.tensor` is never imported here: where nobody imported it, no tensor is sharded.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import SquisherError

__all__ = [
    "Gathered", "agree", "agree_on", "break_off", "gather", "is_alone", "is_sharded", "local_of", "rank", "sharded_like", "sum_in_place",
    "whole", "world", "write_once",
]  # fmt: skip

_BUCKET = 1 << 24  # elements sent in one message: small tensors travel together
_PATIENCE = 5.0  # seconds to wait for the errors of other processes


def is_alone() -> bool:
    """Return whether this is the only process of the job."""
    return world() == 1


def world() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this process, from 0."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def gather(value: Any, group: Any = None) -> list[Any]:
    """Return one (picklable, small) value of every process (of a group, or of all), in the order of ranks."""
    if is_alone():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def agree(error: BaseException | None, group: Any = None) -> None:
    """Raise on every process if one of them failed: a process that leaves alone would make the others wait for ever.

    Args:
        error: What happened here, or None.
        group: The processes that take part; all of them without one.

    Raises:
        SquisherError: On the processes that did not fail.
        BaseException: The error itself, on a process that failed.
    """
    messages = gather(None if error is None else f"{type(error).__name__}: {error}", group)
    if error is not None:
        raise error
    for where, message in enumerate(messages):
        if message is not None:
            raise SquisherError(f"Process {where} of {len(messages)} failed, so this one stops too. There: {message}")


def break_off(error: BaseException, run: str) -> BaseException:
    """Leave a collective operation that other processes may still be in, and write the reason into the process group's store.

    The others notice when the connection breaks, at the latest when this process ends. Unless all fail alike, the process group
    is destroyed: its processes are out of step, and would misread what they send each other from here on.

    Args:
        error: What happened here. If it says that another process is gone, that one's error is looked up.
        run: A name for this operation: the same on all processes, and used once.

    Returns:
        What to raise.
    """
    store = dist.distributed_c10d._get_default_store()
    lost = any(word in str(error).lower() for word in ("gloo", "nccl", "connection"))
    keys = [f"{run}/{k}" for k in range(world())]
    if not lost:
        store.set(keys[rank()], f"{type(error).__name__}: {error}")
    failed: list[int] = []
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until and not (failed and lost) and len(failed) < len(keys):
        failed = [k for k, key in enumerate(keys) if store.check([key])]
        time.sleep(0.05)
    if len(failed) < len(keys):
        dist.destroy_process_group()
    if lost and failed:
        message = store.get(keys[failed[0]]).decode()
        return SquisherError(f"Process {failed[0]} of {len(keys)} failed, so this one stops too. There: {message}")
    return error


def sum_in_place(tensors: Iterable[Tensor]) -> None:
    """Replace every tensor by its sum over all processes; each must give the same shapes in the same order."""
    if is_alone():
        return
    bucket: list[Tensor] = []
    elements = 0
    for tensor in tensors:
        if bucket and (elements + tensor.numel() > _BUCKET or tensor.dtype != bucket[0].dtype):
            _sum(bucket)
            bucket, elements = [], 0
        bucket.append(tensor)
        elements += tensor.numel()
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


def is_sharded(tensor: object) -> bool:
    """Return whether this is a DTensor."""
    kind = _kind()
    return kind is not None and isinstance(tensor, kind)


def local_of(tensor: Tensor) -> Tensor:
    """Return the shard of this process; a tensor that is not sharded is returned as it is."""
    return _dtensor(tensor).to_local() if is_sharded(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor; all processes with a shard of it must call this at the same time."""
    return _dtensor(tensor).full_tensor() if is_sharded(tensor) else tensor


def sharded_like(local: Tensor, like: Tensor) -> Tensor:
    """Return this shard and the shards of the other processes as one tensor, distributed as `like` is."""
    if not is_sharded(like):
        return local
    d = _dtensor(like)
    stride = torch.empty(d.shape, device="meta").stride()  # our shards are contiguous, whatever those of `like` are
    return _kind().from_local(local, d.device_mesh, d.placements, run_check=False, shape=d.shape, stride=stride)


def agree_on(error: BaseException | None, tensors: Iterable[Tensor]) -> None:
    """Raise on every process with a shard of these tensors if one of them failed; see `agree`."""
    meshes = {d.device_mesh: None for d in map(_dtensor, filter(is_sharded, tensors))}
    groups = [mesh.get_group(k) for mesh in meshes for k in range(mesh.ndim)]
    for number, group in enumerate(groups):
        try:
            agree(error, group)
        except Exception as raised:
            if number == len(groups) - 1:
                raise
            error = raised  # pass it on to the other groups before raising it
    if error is not None:
        raise error


class Gathered(Mapping[str, Tensor]):
    """Sharded named tensors, gathered one by one for the process that writes them.

    All processes must ask for a tensor at the same time. One that does not write, or failed to, asks for the rest in `finish`,
    so that no process waits for ever.

    Args:
        tensors: A mapping with the methods `shape`, `dtype` and `chunks`, which gathers what it is asked for.
        parts: What is gathered, in the same order.
    """

    def __init__(self, tensors: Any, parts: Mapping[str, Tensor]):
        self.parts = parts
        self._tensors = tensors
        self._left = list(parts)

    def __getitem__(self, name: str) -> Tensor:
        return whole(self._tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def shape(self, name: str) -> torch.Size:
        """Return the shape of one whole tensor."""
        return torch.Size(self._tensors.shape(name))

    def dtype(self, name: str) -> torch.dtype:
        """Return the data type of one tensor."""
        return cast(torch.dtype, self._tensors.dtype(name))

    def chunks(self, name: str, size: int) -> Iterator[Tensor]:
        """Yield one tensor in flat chunks, in order."""
        self._left.remove(name)
        yield from self._tensors.chunks(name, size)

    def finish(self) -> None:
        """Gather the tensors that were not asked for, for the sake of the other processes."""
        for name in self._left:
            whole(self.parts[name])
        self._left = []


def write_once(tensors: Gathered, write: Callable[[Mapping[str, Tensor]], None]) -> None:
    """Let the first process write these tensors while the others help to gather them; all must call this.

    Raises:
        SquisherError: On every process, if writing failed.
    """
    failure: BaseException | None = None
    try:
        # Under tensor parallelism beside fully_shard, a process may be the first of one mesh and not of another.
        meshes = {_dtensor(t).device_mesh for t in tensors.parts.values() if is_sharded(t)}
        if not any(any(mesh.get_coordinate()) for mesh in meshes):
            write(tensors)
    except (Exception, KeyboardInterrupt) as error:
        failure = error
    tensors.finish()
    agree_on(failure, tensors.parts.values())


def _kind() -> Any:
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind or getattr(sys.modules.get("torch.distributed._tensor"), "DTensor", None)  # before torch 2.5


def _dtensor(tensor: Tensor) -> Any:
    return tensor
