"""The user's batches among processes: who takes which, and whether they have what they should."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor, nn

from .. import ranks
from ..errors import SquisherError
from .batches import Batch, batches_of, leaves_of, parse

__all__ = ["Stream", "same_model"]

_SAMPLED = 4096


class Stream:
    """Batches with the position of their examples in the stream, and whether this process takes them.

    Args:
        batches: the user's.
        model: what they are for.
        max_examples: stop after this many, of all processes together.
        divided: whether each process has batches of its own.
    """

    def __init__(self, batches: Iterable[Any], model: nn.Module, max_examples: int | None, divided: bool):
        self.batches, self.model, self.divided = batches, model, divided
        self.most = max_examples
        if divided and max_examples is not None:
            self.most = max_examples // ranks.world() + (ranks.rank() < max_examples % ranks.world())
        self.digest = hashlib.sha256()

    @property
    def total(self) -> int | None:
        """How many examples there will be, where that is known: a DataLoader knows, a list of batches does not."""
        sampler = getattr(self.batches, "sampler", None)
        if not isinstance(sampler, Sized) or not isinstance(getattr(self.batches, "batch_size", None), int):
            return self.most
        size = self.batches.batch_size  # type: ignore[attr-defined]
        found = len(sampler) - (len(sampler) % size if getattr(self.batches, "drop_last", False) else 0)
        return found if self.most is None else min(found, self.most)

    def __iter__(self) -> Iterator[tuple[Batch, Tensor, bool]]:
        # What a device_map offloads is on the meta device between uses.
        device = next((p.device for p in self.model.parameters() if not p.is_meta), torch.device("cpu"))
        seen = 0
        if self.most == 0:
            return
        for number, raw in enumerate(batches_of(self.batches)):
            if not ranks.is_alone():
                _mark(self.digest, leaves_of(raw))
            batch = parse(raw, self.model, device)
            if batch.size == 0:
                continue
            if self.most is not None:
                batch = batch.take(0, min(batch.size, self.most - seen))
            index = torch.arange(seen, seen + batch.size)
            if self.divided:  # a place of its own for every example of all processes
                index = index * ranks.world() + ranks.rank()
            yield batch, index, self.divided or number % ranks.world() == ranks.rank()
            seen += batch.size
            if self.most is not None and seen >= self.most:
                return  # without asking for the next batch

    def check(self) -> None:
        """Compare what the processes were given.

        Raises:
            SquisherError: on all processes, if they have different batches and should not, or the same and should not.
        """
        if ranks.is_alone():
            return
        marks = ranks.gather(self.digest.hexdigest())
        if not self.divided and len(set(marks)) > 1:
            raise SquisherError(
                "The processes have different batches (a DistributedSampler?), and each took only every "
                f"{ranks.world()}-th of its own: most were left out. Give divided=True, or the same batches to every process."
            )
        if self.divided and len(set(marks)) < len(marks):
            raise SquisherError(
                "divided=True says that each process has examples of its own, but some have the same batches, which would count "
                "several times. Use a DistributedSampler, or divided=False."
            )


def same_model(parameters: Mapping[str, Tensor]) -> None:
    """Refuse processes that have different models, whose Fishers would be averaged; of sharded ones, those with copies of a shard.

    Raises:
        SquisherError: on all processes.
    """
    if ranks.is_alone():
        return
    digest = hashlib.sha256()
    places: dict[Any, None] = {}
    for name, parameter in parameters.items():
        digest.update(name.encode())
        _mark(digest, [ranks.local_of(parameter)])
        places[_place(parameter)] = None
    # Who holds the same shards has the same places.
    marks = ranks.gather((tuple(places), digest.hexdigest()))
    first = {place: k for k, (place, _) in reversed(list(enumerate(marks)))}
    for other, (place, mark) in enumerate(marks):
        if mark != marks[first[place]][1]:
            raise SquisherError(
                f"Processes {first[place]} and {other} have different models: names, shapes or values of the parameters differ. Load "
                "the same weights everywhere."
            )


def _place(parameter: Any) -> tuple[int, ...]:
    """Return which shard of a parameter this process holds: its position along the dimensions of the mesh that shard it."""
    if not ranks.is_sharded(parameter):
        return ()
    where = zip(parameter.device_mesh.get_coordinate(), parameter.placements, strict=True)
    return tuple(at for at, placement in where if placement.is_shard())


def _mark(digest: Any, tensors: Iterable[Tensor]) -> None:
    """Add the form of tensors and some thousand of their entries."""
    for t in tensors:
        t = t.detach()
        digest.update(f"{tuple(t.shape)} {t.dtype};".encode())
        flat = t.reshape(-1)[:: max(1, t.numel() // _SAMPLED)].cpu().contiguous()
        digest.update(flat.view(torch.uint8).numpy().tobytes())
