"""Tensors spread over processes (DTensor, what FSDP2 makes of parameters): the part that is here, and the whole.

`torch.distributed.tensor` is never imported for this: where nobody has imported it, no tensor is spread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from . import ranks

__all__ = ["Gathered", "agree", "is_sharded", "local_of", "sharded_like", "whole", "write_once"]


def is_sharded(tensor: object) -> bool:
    """Whether this is a DTensor."""
    kind = _kind()
    return kind is not None and isinstance(tensor, kind)


def local_of(tensor: Tensor) -> Tensor:
    """The part that this process holds; a tensor of one process is its own part."""
    return _dtensor(tensor).to_local() if is_sharded(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor; for one that is spread, all processes that hold it must ask at the same time."""
    return _dtensor(tensor).full_tensor() if is_sharded(tensor) else tensor


def sharded_like(local: Tensor, like: Tensor) -> Tensor:
    """This part and those of the other processes as one tensor, spread as `like` is."""
    if not is_sharded(like):
        return local
    d = _dtensor(like)
    stride = torch.empty(d.shape, device="meta").stride()  # the parts are contiguous, whatever those of `like` are
    return _kind().from_local(local, d.device_mesh, d.placements, run_check=False, shape=d.shape, stride=stride)


def agree(error: BaseException | None, tensors: Iterable[Tensor]) -> None:
    """Raise on every process that holds a part of these tensors if one of them failed; see `ranks.agree`."""
    meshes = {d.device_mesh: None for d in map(_dtensor, filter(is_sharded, tensors))}
    groups = [mesh.get_group(k) for mesh in meshes for k in range(mesh.ndim)]
    for number, group in enumerate(groups):
        try:
            ranks.agree(error, group)
        except Exception as raised:
            if number == len(groups) - 1:
                raise
            error = raised  # told to the others, too, before it is raised
    if error is not None:
        raise error


class Gathered(Mapping[str, Tensor]):
    """Named tensors that are spread over processes, as the one that writes them sees them: one by one, each once.

    To gather a tensor all processes must ask for it. Whoever has not asked for all of them, because it does not write or
    failed to, does so in `finish`, so that nobody waits for ever.

    Args:
        tensors: a mapping with the methods `shape`, `dtype` and `chunks`, which gathers what it is asked for.
        parts: what is gathered, in the same order.
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
        """The shape of one whole tensor."""
        return torch.Size(self._tensors.shape(name))

    def dtype(self, name: str) -> torch.dtype:
        """The data type of one tensor."""
        return cast(torch.dtype, self._tensors.dtype(name))

    def chunks(self, name: str, size: int) -> Iterator[Tensor]:
        """One tensor in flat pieces, in order."""
        self._left.remove(name)
        yield from self._tensors.chunks(name, size)

    def finish(self) -> None:
        """Take part in gathering what was not asked for."""
        for name in self._left:
            whole(self.parts[name])
        self._left = []


def write_once(tensors: Gathered, write: Callable[[Mapping[str, Tensor]], None]) -> None:
    """Let the first process that holds these tensors write them while the others help to gather; all must call this.

    Raises:
        SquisherError: on every process, if writing failed.
    """
    failure: BaseException | None = None
    try:
        mesh = next(_dtensor(t) for t in tensors.parts.values() if is_sharded(t)).device_mesh
        if not any(mesh.get_coordinate()):
            write(tensors)
    except (Exception, KeyboardInterrupt) as error:
        failure = error
    tensors.finish()
    agree(failure, tensors.parts.values())


def _kind() -> Any:
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None)


def _dtensor(tensor: Tensor) -> Any:
    return tensor
