"""Files that `torch.save` wrote: an optimizer's state, bare or inside whatever dictionary a training script made."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ...errors import FileError, NamingError
from ...storage.byte_range import ByteRange
from ...storage.tensors import LazyTensors, TensorSource, tied_names
from ...storage.torch_files import Record, find_weights, is_optimizer, read, walk
from ..naming.solver import clean_names
from ..optimizers.quantized import decoded
from ..states import Candidate, Entry, Found, OptimizerState

__all__ = ["candidates_of", "find_optimizers", "mesh_size", "read_torch_file", "without_shards"]


def read_torch_file(path: str | os.PathLike[str] | ByteRange) -> Found:
    """The optimizer states in a torch file, and the weights beside them, which keep the module's order.

    Raises:
        FileError: It cannot be read safely, or holds no optimizer state.
    """
    tree = read(path)
    optimizers = [optimizer_state(value, place) for place, value in find_optimizers(tree)]
    if not optimizers:
        weights = any(True for _ in find_weights(tree))
        shown = path.path if isinstance(path, ByteRange) else os.fspath(path)
        what = "holds weights but no optimizer state: give the file or folder that was saved with the optimizer" if weights else (
            "holds no optimizer state (a dictionary with 'state' and 'param_groups')"
        )  # fmt: skip
        raise FileError(f"{shown} {what}.")
    models, tied = [], {}
    for place, weights_dict in find_weights(tree):
        candidates, aliases = candidates_of(weights_dict)
        models.append((f"the weights under {place!r}" if place else "the weights", candidates))
        tied.update(aliases)
    return Found(optimizers, models, {"tied": tied} if tied else {})


def find_optimizers(tree: Any) -> list[tuple[str, Any]]:
    """Every optimizer state in what a file holds, with the place where it was: dictionaries or pickled optimizers."""
    return [(place, value) for place, value in walk(tree) if is_optimizer(value)]


def candidates_of(weights: Mapping[str, TensorSource]) -> tuple[list[Candidate], dict[str, str]]:
    """The parameters among saved weights, in module order, without what is surely a buffer, and the tied names.

    A buffer that looks like a parameter stays; fitting the shapes to the optimizer's then decides.
    """
    tied = tied_names(LazyTensors(weights))
    names = [name for name in weights if name not in tied and not _is_buffer(name, weights[name])]
    try:
        clean = clean_names(names)
    except NamingError:  # two wrappings of one model in one dictionary: the names as they are tell them apart
        clean = names
    cleaned = dict(zip(names, clean, strict=True))
    candidates = [Candidate(cleaned[n], tuple(weights[n].shape), live_name=n, weight=weights[n]) for n in names]
    aliases = {clean_names([a])[0]: cleaned[n] for a, n in tied.items() if n in cleaned}
    return candidates, aliases


def optimizer_state(value: Any, place: str = "") -> OptimizerState:
    """What a reader delivers, from an optimizer's `state_dict()` or from a pickled optimizer object.

    Raises:
        FileError: The groups are not what an optimizer writes.
    """
    class_name = value.name.rsplit(".", 1)[-1] if isinstance(value, Record) else None
    content = value.attributes if isinstance(value, Record) else value
    state, groups = content["state"], content["param_groups"]
    entries = []
    for number, group in enumerate(groups):
        members = group.get("params") if isinstance(group, dict) else None
        if not isinstance(members, (list, tuple)):
            raise FileError(f"The optimizer state{_at(place)} is damaged: group {number} lists no parameters.")
        settings = {key: v for key, v in group.items() if key not in ("params", "param_names")}
        recorded = group.get("param_names") or [None] * len(members)
        if len(recorded) != len(members):
            raise FileError(
                f"The optimizer state{_at(place)} is damaged: group {number} has {len(members)} parameters and "
                f"{len(recorded)} names."
            )
        for member, name in zip(members, recorded, strict=True):
            own = state.get(member)
            own = own if isinstance(own, dict) else {}
            entries.append(Entry(own, settings, number, name or (member if isinstance(member, str) else None)))
    return OptimizerState(decoded(without_shards(entries), class_name), class_name, place)


def _is_buffer(name: str, tensor: TensorSource) -> bool:
    known = ("running_mean", "running_var", "num_batches_tracked")
    return not tensor.dtype.is_floating_point or name.rsplit(".", 1)[-1] in known


def _at(place: str) -> str:
    return f" at {place!r}" if place else ""


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
