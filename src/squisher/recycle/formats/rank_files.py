"""Folders with a torch file from every rank: the DTensors of FSDP2 joined again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import FileError
from ...storage.tensors import Block, Blocks
from ...storage.torch_files import Record, StoredTensor, Verified, read
from ..naming.candidates import distinct_names
from ..optimizers import step_of
from ..states import Candidate, Found, Options, Source
from .torch_file import find_optimizers, inside, mesh_size, optimizer_state

__all__ = ["is_rank_folder", "read_ranks"]

_RANK = re.compile(r"(?P<before>.*rank[-_]?)(?P<rank>\d+)(?P<after>.*\.(?:pt|pth|bin|ckpt))")


def is_rank_folder(path: Path) -> bool:
    """Return whether a folder holds torch files that are named by rank, two or more of one kind."""
    return path.is_dir() and any(len(files) > 1 for files in _sets(path))


def read_ranks(path: Path, options: Options) -> Found:
    """Read the optimizer states of all ranks, joined.

    Raises:
        FileError: Ranks are missing or do not belong together, or nothing says which shard of what they hold.
    """
    found: list[tuple[list[Any], dict[int, Path]]] = []
    models: list[Source] = []
    for files in _sets(path):
        trees = [read(file) for file in files.values()]
        models += _models(trees[0])
        if find_optimizers(trees[0]):
            found.append((trees, files))
    if len(found) != 1:
        raise FileError(f"{path} holds {len(found) or 'no'} optimizer states of several ranks: give one.")
    trees, files = found[0]
    states = [find_optimizers(tree) for tree in trees]
    if len({len(state) for state in states}) > 1:
        raise FileError(f"The ranks in {path} do not hold the same optimizers: they do not belong together.")
    optimizers = []
    for same in zip(*states, strict=True):
        joined = _joined([value for _, value in same], list(files), path)
        optimizers.append(optimizer_state(joined, same[0][0]))
    return Found(optimizers, models)


def _sets(path: Path) -> list[dict[int, Path]]:
    """Return the files by rank, for each way of naming them."""
    found: dict[tuple[str, str], dict[int, Path]] = {}
    for file in sorted(path.iterdir()):
        match = _RANK.fullmatch(file.name)
        if match and file.is_file():
            found.setdefault((match["before"], match["after"]), {})[int(match["rank"])] = file
    return [dict(sorted(files.items())) for files in found.values()]


def _joined(values: Sequence[Any], ranks: Sequence[int], path: Path) -> dict[str, Any]:
    """Return the state dict of one optimizer, with a tensor for what the ranks have shards of."""
    if not all(isinstance(value, dict) for value in values):
        raise FileError(f"The ranks in {path} hold pickled optimizers, which cannot be joined. Save state dicts.")
    first = values[0]
    state = {}
    for member, tensors in first["state"].items():
        others = [value["state"].get(member) for value in values]
        if not all(isinstance(other, dict) and set(other) == set(tensors) for other in others):
            raise _strangers(path)
        if len({step_of(other, {}) for other in others}) > 1:
            raise FileError(f"{path} mixes the files of several steps: the ranks count parameter {member} differently.")
        state[member] = {key: _tensor([other[key] for other in others], ranks, path) for key in tensors}
    if any(set(value["state"]) != set(state) for value in values):
        raise _strangers(path)
    return {"state": state, "param_groups": first["param_groups"]}


def _strangers(path: Path) -> FileError:
    return FileError(
        f"The ranks in {path} do not hold a shard of the same parameters each: flat shards of FSDP1, whose parameters cannot be "
        "told, or files that do not belong together. Save FSDP.optim_state_dict(model, optimizer) or with torch.distributed.checkpoint."
    )


def _tensor(shards: Sequence[Any], ranks: Sequence[int], path: Path) -> Any:
    """Return a tensor joined from the shards of all ranks, or what is the same on all of them."""
    first = shards[0]
    if not isinstance(first, Record) or not first.name.endswith("DTensor"):
        if isinstance(first, StoredTensor) and len(first.shape):
            raise _strangers(path)
        return first
    shape, placements = first.get("shape"), inside(first, "_spec", "placements")
    world = mesh_size(inside(first, "_spec", "mesh"))
    if world is not None and list(ranks) != list(range(world)):
        raise FileError(f"{path} has the ranks {', '.join(map(str, ranks))}, but the state was sharded over {world}.")
    split = placements[0] if isinstance(placements, (tuple, list)) and len(placements) == 1 else None
    if not isinstance(split, Record) or not split.name.endswith(".Shard") or not isinstance(shape, tuple):
        raise FileError(
            f"The state in {path} is sharded over more than one dimension of ranks, which is read from torch.distributed.checkpoint only."
        )
    dimension = split.get("dim")
    blocks: list[Block] = []
    place = 0
    for rank, shard in zip(ranks, shards, strict=True):
        local, written_by = inside(shard, "_local_tensor"), inside(shard, "_spec", "mesh", "_rank")
        if isinstance(written_by, int) and written_by != rank:
            raise FileError(f"{path} is mixed up: the file of rank {rank} was written by rank {written_by}.")
        fits = isinstance(local, StoredTensor) and local.dtype == first.get("dtype") and len(local.shape) == len(shape)
        if local is None or not fits or not isinstance(dimension, int) or not 0 <= dimension < len(shape):
            raise FileError(f"The ranks in {path} do not belong together: a state differs in shape or type.")
        offsets = [place if d == dimension else 0 for d in range(len(shape))]
        blocks.append(Block(shape, offsets, local.shape, Verified(local)))
        place += local.shape[dimension]
    whole = Blocks(shape, first.get("dtype"), blocks)
    if whole.gap:
        raise FileError(f"The shards of the ranks in {path} do not make the whole: {whole.gap}.")
    return whole


def _models(tree: Any) -> list[Source]:
    """Return the dictionaries of named weights, sharded or whole, in module order."""
    models: list[Source] = []
    named = [("", tree), *tree.items()] if isinstance(tree, dict) else []
    for place, value in named:
        if not isinstance(value, dict) or len(value) < 2 or not all(isinstance(name, str) for name in value):
            continue
        shapes: list[Any] = [inside(w, "shape") or getattr(w, "shape", None) for w in value.values()]
        if all(isinstance(shape, tuple) for shape in shapes):
            lists = zip(distinct_names(list(value)), shapes, value, strict=True)
            listed = [Candidate(name, shape, live_name=live) for name, shape, live in lists]
            models.append((f"the weights under {place!r}" if place else "the weights", listed))
    return models
