"""ZeRO-1 as GPT-NeoX wrote it for Pythia (DeeperSpeed 1, DeepSpeed 0.3): flat groups, cut once more by communication intervals.

Each rank's file has, for each group, a list with one state for every interval; interval by interval and rank by rank they
make the flat buffer of the group, without padding. The file lists all parameters in module order, not by group: matrices
are in the first group and the rest in the second, as GPT-NeoX and Megatron divide them, which the lengths must confirm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import FileError
from ...storage.tensors import Joined, Slice
from ...storage.torch_files import StoredTensor, Verified, read
from ..naming.candidates import clean_names
from ..states import Entry

__all__ = ["neox_parameters"]

Intervals = Sequence[Mapping[str, Any]]


def neox_parameters(folder: Path, files: Mapping[int, Path], model_states: Mapping[str, Any]) -> list[Entry] | None:
    """Return every parameter, put together from the ranks' files; None where they are of another layout.

    Args:
        folder: Where the files are, for messages.
        files: The optimizer states by rank.
        model_states: What `mp_rank_00_model_states.pt` says.

    Raises:
        FileError: Ranks are missing or do not belong together, or the groups are not GPT-NeoX's.
    """
    ranks: list[Sequence[Intervals]] = []
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, file in files.items():
        content = read(file)
        saved: Any = content.get("optimizer_state_dict") if isinstance(content, dict) else None
        groups = saved.get("base_optimizer_state") if isinstance(saved, dict) else None
        listed = content.get("param_shapes") if isinstance(content, dict) else None
        if not isinstance(listed, dict) or not isinstance(groups, list) or not all(isinstance(g, list) for g in groups):
            return None
        if rank != len(ranks) or saved.get("partition_count", len(files)) != len(files):
            raise FileError(
                f"{folder} lacks optimizer states: it has those of {len(files)} ranks of {saved.get('partition_count')}. Get all of its files."
            )
        if shapes and {n: tuple(s) for n, s in listed.items()} != shapes:
            raise FileError(f"{folder} mixes the files of several runs: rank {rank} lists other parameters.")
        shapes = {name: tuple(shape) for name, shape in listed.items()}
        ranks.append(groups)
    names = dict(zip(shapes, clean_names(list(shapes)), strict=True))
    steps = _steps(model_states)
    entries = []
    for number, members in enumerate(_groups(folder, ranks, shapes)):
        parts = _parts(folder, ranks, number)
        entries += [
            Entry(_state(parts, place, shapes[name], steps), {"betas": (None, None)}, number, names[name])
            for name, place in members.items()
        ]
    return entries


def _steps(model_states: Mapping[str, Any]) -> int | None:
    """Return the steps that changed the average: those skipped for an overflow did not."""
    taken, skipped = model_states.get("global_steps"), model_states.get("skipped_steps")
    return taken - skipped if isinstance(taken, int) and isinstance(skipped, int) else None


def _groups(
    folder: Path, ranks: Sequence[Sequence[Intervals]], shapes: Mapping[str, tuple[int, ...]]
) -> list[dict[str, int]]:
    """Return, for each group, where each of its parameters begins in the flat buffer."""
    found = [sum(_numel(one) for rank in ranks for one in rank[k]) for k in range(len(ranks[0]))]
    divisions = {
        1: [list(shapes)],
        2: [[n for n in shapes if len(shapes[n]) > 1], [n for n in shapes if len(shapes[n]) < 2]],
    }
    division = divisions.get(len(found), [])
    needed = [sum(math.prod(shapes[name]) for name in members) for members in division]
    if found != needed:
        raise FileError(
            f"The groups in {folder} hold {found} elements, but matrices and the rest, as GPT-NeoX divides them, are {needed}: the files "
            "do not belong together, or the parameters were grouped in another way, which is not written down."
        )
    places = []
    for members in division:
        place, begins = 0, {}
        for name in members:
            begins[name] = place
            place += math.prod(shapes[name])
        places.append(begins)
    return places


def _numel(state: Mapping[str, Any]) -> int:
    lengths = {v.shape[0] for v in state.values() if isinstance(v, StoredTensor) and len(v.shape) == 1}
    if len(lengths) != 1:
        raise FileError(f"The flat states of an interval differ in length ({lengths}): the checkpoint is damaged.")
    return lengths.pop()


def _parts(folder: Path, ranks: Sequence[Sequence[Intervals]], number: int) -> dict[str, list[tuple[int, Verified]]]:
    """Return the flat buffer of a group by key: where each shard begins, and the shard."""
    counts = {len(rank[number]) for rank in ranks}
    if len(counts) != 1:
        raise FileError(
            f"The ranks in {folder} have different numbers of intervals ({counts}): they do not belong together."
        )
    parts: dict[str, list[tuple[int, Verified]]] = {}
    place = 0
    for interval in range(counts.pop()):
        for rank in ranks:
            state = rank[number][interval]
            if parts and set(parts) != {
                key for key, value in state.items() if isinstance(value, StoredTensor) and value.shape
            }:
                raise FileError(f"The ranks in {folder} do not keep the same states: they do not belong together.")
            for key, value in state.items():
                if isinstance(value, StoredTensor) and value.shape:
                    parts.setdefault(key, []).append((place, Verified(value)))
            place += _numel(state)
    return parts


def _state(
    parts: Mapping[str, list[tuple[int, Verified]]], place: int, shape: tuple[int, ...], steps: int | None
) -> dict[str, Any]:
    end = place + math.prod(shape)
    state: dict[str, Any] = {} if steps is None else {"step": steps}
    for key, shards in parts.items():
        runs = []
        for begin, shard in shards:
            start, stop = max(place, begin), min(end, begin + shard.shape[0])
            if start < stop:
                runs.append(Slice(shard, start - begin, stop - begin))
        state[key] = Joined(shape, shards[0][1].dtype, runs)
    return state
