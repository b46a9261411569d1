"""Files that every rank of a distributed run wrote for itself: what of them is whole, and a refusal of what is not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ...errors import FileError
from ...storage.torch_files import Record
from ..states import Entry

__all__ = ["mesh_size", "without_shards"]

_SHARDED = ("DTensor", "ShardedTensor")


def without_shards(entries: Iterable[Entry]) -> list[Entry]:
    """The entries with sharded tensors replaced by the tensors themselves, where a rank has all of them.

    Raises:
        FileError: A rank has only its share.
    """
    return [replace(entry, state=_whole(entry.state)) if _sharded(entry.state) else entry for entry in entries]


def _sharded(state: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Record) and value.name.endswith(_SHARDED) for value in state.values())


def _whole(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _local(value) if isinstance(value, Record) else value for key, value in state.items()}


def _local(value: Record) -> Any:
    if not value.name.endswith(_SHARDED):
        return value
    spec, local = value.get("_spec"), value.get("_local_tensor")
    placements = spec.get("placements") if isinstance(spec, Record) else None
    world = mesh_size(spec.get("mesh")) if isinstance(spec, Record) else None
    listed = list(placements) if isinstance(placements, (tuple, list)) else []
    replicated = bool(listed) and all(isinstance(p, Record) and p.name.endswith(".Replicate") for p in listed)
    if (replicated or world == 1) and getattr(local, "shape", None) == value.get("shape"):
        return local
    ranks = f"one of {world} ranks" if world else "one rank"
    raise FileError(
        f"The file holds the share of {ranks} of an optimizer state that FSDP sharded ({value.name.rpartition('.')[2]}), not "
        "the whole. Give the folder with the files of all ranks, or save it with torch.distributed.checkpoint, or in full: get_optimizer_state_dict(model, optimizer, "
        "options=StateDictOptions(full_state_dict=True, cpu_offload=True))."
    )


def mesh_size(mesh: Any) -> int | None:
    """How many ranks a device mesh has, as the versions of torch wrote it down."""
    if not isinstance(mesh, Record):
        return None
    ranks = mesh.get("_flatten_rank_map")
    if isinstance(ranks, (tuple, list)):
        return len(ranks)
    for name in ("mesh", "_mesh", "_rank_map"):
        numel = getattr(mesh.get(name), "numel", None)
        if isinstance(numel, int):
            return numel
    return None
