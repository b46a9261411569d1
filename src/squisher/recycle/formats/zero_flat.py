"""Flat buffers of DeepSpeed ZeRO, of which every rank holds a shard, to parameters: stages 1 to 3, and GPT-NeoX's older layout.

The parameters in a buffer have the order of `param_shapes` in the model states. The slice tables that DeepSpeed saves
as well are wrong under round-robin gradients; they are compared and never followed.

ZeRO-1 as GPT-NeoX wrote it for Pythia (DeeperSpeed 1, DeepSpeed 0.3) cuts a flat group once more, by communication intervals:
each rank's file has, for each group, a list with one state for every interval. Interval by interval and rank by rank they make
the flat buffer of the group, without padding. The file lists all parameters in module order, not by group: matrices are in the
first group and the rest in the second, as GPT-NeoX and Megatron divide them, which the lengths must confirm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from ...errors import FileError
from ...importance.facts import Pollution, Spoiler
from ...storage.tensors import Joined, Slice
from ...storage.torch_files import Record, StoredTensor, Verified, read
from ..naming.candidates import clean_names
from ..optimizers import step_of
from ..states import Entry
from .zero_run import Run

__all__ = ["neox_parameters", "parameters"]

Intervals = Sequence[Mapping[str, Any]]


def parameters(run: Run, files: Mapping[int, Path]) -> tuple[list[Entry], list[Pollution]]:
    """Return every parameter, joined from the shards of all ranks, and what else is to be said about them.

    Args:
        run: What the model states say.
        files: The optimizer states by rank.

    Raises:
        FileError: Ranks are missing or do not belong together.
    """
    ranks = _ranks(run.folder, files)
    return (_stage_3 if ranks[0].stage == 3 else _stages_1_and_2)(run, ranks)


@dataclass(frozen=True)
class _Rank:
    """The shard of one rank: a flat state per group (or sub-group), and the group of each.

    `settings` is None where the file has none; `paddings` counts the entries at the end of each state that belong to no parameter.
    """

    stage: int
    states: Sequence[Mapping[str, Any]]
    groups: Sequence[int]
    settings: Sequence[Mapping[str, Any]] | None
    paddings: Sequence[int]
    saved: Mapping[str, Any]
    verified: dict[tuple[int, str], Verified] = field(default_factory=dict)

    def shard(self, k: int, key: str) -> Verified:
        """Return a flat state; the same object for all parameters in it, so that it is verified once."""
        return self.verified.setdefault((k, key), Verified(self.states[k][key]))


def _length(state: Mapping[str, Any]) -> int:
    """Return the number of elements of the flat tensors of a state, as stored."""
    lengths = {v.shape[0] for v in state.values() if isinstance(v, StoredTensor) and len(v.shape) == 1}
    if len(lengths) > 1:
        raise FileError(f"The flat states of a group differ in length ({lengths}): the checkpoint is damaged.")
    return lengths.pop() if lengths else 0


def _ranks(folder: Path, files: Mapping[int, Path]) -> list[_Rank]:
    """Read the shards of all ranks; refuse ranks that are missing or do not belong together."""
    ranks = []
    versions = set()
    world = max(files) + 1
    for file in files.values():
        content = read(file)
        saved = content.get("optimizer_state_dict") if isinstance(content, dict) else None
        if not isinstance(saved, dict):
            raise FileError(f"{file} holds no optimizer_state_dict: it is damaged, or not DeepSpeed's. Get it again.")
        versions.add(str(content.get("ds_version", saved.get("ds_version"))))
        if saved.get("ds_zero_partition_groups"):
            raise FileError(f"{file} holds experts, partitioned over other ranks than the rest: not read.")
        said = saved.get("partition_count")
        counts = {n for n in (said if isinstance(said, (list, tuple)) else [said]) if isinstance(n, int)}
        if len(counts) > 1:
            raise FileError(f"{file} has groups of {said} partitions (experts?); only equal ones are read.")
        world = max([world, *counts])
        ranks.append(_rank(saved, file))
    missing = [rank for rank in range(world) if rank not in files]
    if missing:
        raise FileError(
            f"The DeepSpeed checkpoint {folder} lacks the optimizer states of {len(missing)} of its {world} ranks (the first is "
            f"rank {missing[0]}). Every node saves its own: copy all of them into one folder."
        )
    if len(versions) > 1:
        raise FileError(f"{folder} mixes files of several versions of DeepSpeed ({', '.join(sorted(versions))}).")
    _check_alike(folder, ranks)
    return ranks


def _rank(saved: Mapping[str, Any], file: Path) -> _Rank:
    """Return the shard in one file, from wherever the versions and stages keep it."""
    inner, base = saved.get("optimizer_state_dict"), saved.get("base_optimizer_state")
    source = inner if isinstance(inner, dict) else base
    paddings = saved.get("group_paddings")
    if isinstance(base, list) and inner is None:  # elastic: padding already cut, no settings
        step = saved.get("base_optimizer_state_step")
        states = [{**({} if step is None else {"step": step}), **state} for state in base if isinstance(state, dict)]
        return _Rank(2, states, range(len(states)), None, [0] * len(states), saved)
    groups = source.get("param_groups") if isinstance(source, dict) else None
    content = source.get("state") if isinstance(source, dict) else None
    if not isinstance(groups, list) or not isinstance(content, dict):
        raise FileError(f"{file} holds no state of an optimizer: it is damaged, or of a layout that is not known.")
    states, numbers = [], []
    for number, group in enumerate(groups):
        for member in group.get("params") or () if isinstance(group, dict) else ():
            state = content.get(member) if isinstance(member, (int, str)) else None
            states.append(state if isinstance(state, dict) else {})
            numbers.append(number)
    listed = list(paddings) if isinstance(paddings, (list, tuple)) else []
    known = len(listed) == len(states) and all(isinstance(n, int) for n in listed)
    return _Rank(3 if source is inner else 2, states, numbers, groups, listed if known else [], saved)


def _check_alike(folder: Path, ranks: Sequence[_Rank]) -> None:
    """Refuse ranks with other groups or other step counts than the first."""
    first = ranks[0]
    for number, rank in enumerate(ranks):
        kept = [(one.stage, list(one.groups), [set(state) for state in one.states]) for one in (rank, first)]
        if kept[0] != kept[1]:
            raise FileError(f"{folder} mixes the files of several runs: ranks 0 and {number} have different groups.")
        for k, group in enumerate(first.groups):
            steps = [step_of(one.states[k], one.settings[group] if one.settings else {}) for one in (rank, first)]
            if steps[0] != steps[1]:
                raise FileError(
                    f"{folder} mixes steps: rank {number} is at step {steps[0]}, rank 0 at step {steps[1]}."
                )


# -- from flat buffers to parameters -----------------------------------------------------------------------------------


def _entry(
    run: Run, ranks: Sequence[_Rank], k: int, name: str, shape: Sequence[int], cuts: Sequence[tuple[int, int]]
) -> Entry:
    """Return a parameter: on each rank the elements between two places of the flat state `k`."""
    state: dict[str, Any] = {}
    for key, value in ranks[0].states[k].items():
        shards = [rank.states[k][key] for rank in ranks]
        if not isinstance(value, StoredTensor) or len(value.shape) != 1:
            state[key] = value
        elif all(isinstance(p, StoredTensor) and p.is_contiguous and p.dtype == value.dtype for p in shards):
            slices = [Slice(rank.shard(k, key), *cut) for rank, cut in zip(ranks, cuts, strict=True)]
            state[key] = Joined(shape, value.dtype, slices)
        else:
            raise FileError(f"The ranks in {run.folder} do not agree about {key} of group {k}: it is damaged.")
    number = ranks[0].groups[k]
    settings = ranks[0].settings
    return Entry(state, run.group(settings[number] if settings else None), number, run.names[name])


def _stages_1_and_2(run: Run, ranks: Sequence[_Rank]) -> tuple[list[Entry], list[Pollution]]:
    """Return the parameters of stages 1 and 2: a group is one buffer in equal shards; alignment leaves gaps after parameters."""
    if len(run.shapes) != len(ranks[0].states):
        raise FileError(f"{run.folder} lists {len(run.shapes)} groups, but ranks hold {len(ranks[0].states)} states.")
    entries = []
    agree = True
    for k, shapes in enumerate(run.shapes):
        ends = list(accumulate(_length(rank.states[k]) for rank in ranks))
        starts = [0, *ends[:-1]]
        gaps = _gaps(ranks[0].saved.get("param_alignment_paddings"), k, len(shapes))
        used = sum(math.prod(shape) for shape in shapes.values()) + sum(gaps)
        if ranks[0].states[k]:
            _check_total(run, ranks, k, ends[-1], used)
        place = 0
        for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
            end = place + math.prod(shape)
            cuts = [(min(max(place, a), b) - a, min(max(end, a), b) - a) for a, b in zip(starts, ends, strict=True)]
            entries.append(_entry(run, ranks, k, name, shape, cuts))
            agree = agree and all(_slice_agrees(rank, k, name, cut) for rank, cut in zip(ranks, cuts, strict=True))
            place = end + gap
    if not agree and run.config and not run.round_robin:
        raise FileError(
            f"DeepSpeed's table of slices in {run.folder} contradicts its list of parameters, which only round-robin gradients would explain: "
            "files of ranks were exchanged, or are of several runs. Get all of its files again."
        )
    note = "DeepSpeed's table of slices says otherwise than its list of parameters, which was followed: round-robin gradients make such tables wrong."
    return entries, [] if agree else [Pollution(Spoiler.UNCERTAIN, note=note)]


def _gaps(saved: Any, k: int, count: int) -> list[int]:
    """Return how many elements are left empty after each parameter."""
    gaps = saved[k] if isinstance(saved, (list, tuple)) and k < len(saved) else [0] * count
    known = isinstance(gaps, (list, tuple)) and all(isinstance(n, int) and n >= 0 for n in gaps)
    if not known or len(gaps) != count:
        raise FileError(f"DeepSpeed's alignment of group {k} does not fit its {count} parameters: it is damaged.")
    return list(gaps)


def _check_total(run: Run, ranks: Sequence[_Rank], k: int, found: int, used: int) -> None:
    if all(rank.paddings for rank in ranks):
        fits = found == used + sum(rank.paddings[k] for rank in ranks)
    else:  # older versions do not write the padding down; buffers are aligned to two elements a rank
        fits = 0 <= found - used < 2 * len(ranks)
    if not fits:
        raise FileError(
            f"The shards of group {k} in {run.folder} hold {found} elements, but its parameters need {used}: the files do not "
            "belong together, or one is damaged."
        )


def _slice_agrees(rank: _Rank, k: int, name: str, cut: tuple[int, int]) -> bool:
    """Return whether DeepSpeed's table of slices says the same about a parameter, where there is one."""
    tables = rank.saved.get("param_slice_mappings")
    table = tables[k] if isinstance(tables, (list, tuple)) and k < len(tables) else None
    if not isinstance(table, dict):
        return True
    said = table.get(name)
    if cut[0] == cut[1]:
        return said is None
    return isinstance(said, Record) and (said.get("start"), said.get("numel")) == (cut[0], cut[1] - cut[0])


def _stage_3(run: Run, ranks: Sequence[_Rank]) -> tuple[list[Entry], list[Pollution]]:
    """Return the parameters of stage 3: each is cut into equal shards, which follow one another on a rank, in sub-groups."""
    world = len(ranks)
    entries = []
    k, place = 0, 0
    lengths = [_length(state) for state in ranks[0].states]
    if any([_length(state) for state in rank.states] != lengths for rank in ranks):
        raise FileError(f"The ranks in {run.folder} hold states of different length: the files do not belong together.")
    for name, shape in run.trained.items():
        numel = math.prod(shape)
        share = -(-numel // world)
        if k < len(lengths) and place == lengths[k] and ranks[0].states[k]:
            k, place = k + 1, 0
        if k >= len(lengths) or (ranks[0].states[k] and place + share > lengths[k]):
            raise FileError(f"The flat states in {run.folder} end inside {name!r}: damaged, or mixed files.")
        taken = [max(0, min(share, numel - rank * share)) for rank in range(world)]
        entries.append(_entry(run, ranks, k, name, shape, [(place, place + n) for n in taken]))
        place += share
    if ranks[0].states[k] and (k, place) != (len(lengths) - 1, lengths[k]):
        raise FileError(f"The flat states in {run.folder} hold more than its parameters: mixed files?")
    return entries, []


# -- GPT-NeoX ----------------------------------------------------------------------------------------------------------


def neox_parameters(folder: Path, files: Mapping[int, Path], model_states: Mapping[str, Any]) -> list[Entry] | None:
    """Return every parameter of a checkpoint by GPT-NeoX, joined from the files of all ranks; None where they have another layout.

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
        other = shapes and {n: tuple(s) for n, s in listed.items()} != shapes
        if other or (ranks and len(groups) != len(ranks[0])):
            raise FileError(f"{folder} mixes the files of several runs: rank {rank} lists other parameters or groups.")
        shapes = {name: tuple(shape) for name, shape in listed.items()}
        ranks.append(groups)
    names = dict(zip(shapes, clean_names(list(shapes)), strict=True))
    taken, skipped = model_states.get("global_steps"), model_states.get("skipped_steps")
    # Steps that were skipped for an overflow did not change the average.
    steps = {"step": taken - skipped} if isinstance(taken, int) and isinstance(skipped, int) else {}
    entries = []
    for number, members in enumerate(_neox_groups(folder, ranks, shapes)):
        buffers = _neox_buffers(folder, [rank[number] for rank in ranks])
        ends = list(accumulate(math.prod(shapes[name]) for name in members))
        for name, start, end in zip(members, [0, *ends], ends, strict=False):
            state = {key: Joined(shapes[name], flat.dtype, [Slice(flat, start, end)]) for key, flat in buffers.items()}
            entries.append(Entry({**steps, **state}, {"betas": (None, None)}, number, names[name]))
    return entries


def _neox_groups(
    folder: Path, ranks: Sequence[Sequence[Intervals]], shapes: Mapping[str, tuple[int, ...]]
) -> list[list[str]]:
    """Return the parameters of each group, in the order of its flat buffer."""
    found = [sum(_length(one) for rank in ranks for one in rank[k]) for k in range(len(ranks[0]))]
    matrices = [name for name, shape in shapes.items() if len(shape) > 1]
    rest = [name for name, shape in shapes.items() if len(shape) < 2]
    division = {1: [list(shapes)], 2: [matrices, rest]}.get(len(found), [])
    needed = [sum(math.prod(shapes[name]) for name in members) for members in division]
    if found != needed:
        raise FileError(
            f"The groups in {folder} hold {found} elements, but matrices and the rest, as GPT-NeoX divides them, are {needed}: the files "
            "do not belong together, or the parameters were grouped in another way, which is not written down."
        )
    return division


def _neox_buffers(folder: Path, ranks: Sequence[Intervals]) -> dict[str, Joined]:
    """Return the flat buffer of a group by key: interval by interval, and rank by rank."""
    states = [rank[k] for k in range(len(ranks[0])) for rank in ranks if len(rank) == len(ranks[0])]
    keys = [{k for k, v in state.items() if isinstance(v, StoredTensor) and v.shape} for state in states]
    if len(states) != len(ranks) * len(ranks[0]) or any(own != keys[0] for own in keys):
        raise FileError(f"The ranks in {folder} do not keep the same states: they do not belong together.")
    lengths = [_length(state) for state in states]
    buffers = {}
    for key in [key for key in states[0] if key in keys[0]] if keys else ():
        slices = [Slice(Verified(state[key]), 0, length) for state, length in zip(states, lengths, strict=True)]
        buffers[key] = Joined((sum(lengths),), states[0][key].dtype, slices)
    return buffers
