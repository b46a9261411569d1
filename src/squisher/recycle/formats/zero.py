"""DeepSpeed ZeRO checkpoints, stages 1 to 3, without DeepSpeed: every rank holds its part of flat buffers.

The order of the parameters in a buffer is that of `param_shapes` in the model states. The slice tables that DeepSpeed saves
as well are wrong under round-robin gradients; they are compared and never followed.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from ...errors import FileError
from ...importance import Pollution, Spoiler
from ...storage.tensors import Joined, Slice
from ...storage.torch_files import Record, StoredTensor, Verified, read
from ..optimizers import step_of
from ..states import Entry, Found, OptimizerState, Options
from .torch_file import read_torch_file
from .zero_neox import neox_parameters
from .zero_run import MODEL_FILE, Run
from .zero_universal import is_universal, read_universal

__all__ = ["OPTIMIZER_FILE", "is_zero", "parameters", "read_zero", "stage_files"]

_COMPARED = 4096  # elements of a state that two stages hold
_TAG = re.compile(r"global_step\d+(?:_universal)?")


def is_zero(path: Path) -> bool:
    """Whether a folder is a DeepSpeed checkpoint or one of its tags, or a file is one rank's part of it."""
    if path.is_file():
        return OPTIMIZER_FILE.fullmatch(path.name) is not None
    return path.is_dir() and (_is_tag(path) or bool(_tags(path)) or _TAG.fullmatch(_latest(path) or "") is not None)


def read_zero(path: Path, options: Options) -> Found:
    """Read the optimizer state of a DeepSpeed checkpoint, put together from the parts of all ranks.

    Raises:
        FileError: Parts are missing, do not belong together, or were written in a way that is not read.
    """
    if path.is_file():
        raise FileError(f"{path} is one rank's part of a DeepSpeed checkpoint; give the folder that it is in.")
    folder = _tag_folder(path)
    source = path if folder != path else path.absolute().parent
    if is_universal(folder):
        return read_universal(folder, source)
    stages = stage_files(folder)
    if not stages:
        return _without_zero(Run(folder), folder)
    read_stages = [_stage(folder, number, files, len(stages)) for number, files in stages.items()]
    run = read_stages[0][0]
    entries = _one_model(folder, [own for _, own, _ in read_stages])
    if not run.shapes:
        return Found([OptimizerState(entries, None, folder.name)])
    facts = run.facts(source, next((step_of(e.state, e.group) for e in entries if e.state), None))
    of_stages = [run.facts(source, None) for run, _, _ in read_stages]
    notes = dict.fromkeys(note for *_, own in read_stages for note in own)
    facts = replace(
        facts,
        pollution=(*facts.pollution, *notes),
        absent={name: why for own in of_stages for name, why in own.absent.items()},
        tied={alias: name for own in of_stages for alias, name in own.tied.items()},
    )
    listed = {c.name: c for run, _, _ in read_stages for _, own in run.models() for c in own}
    models = [(run.models()[0][0], list(listed.values()))]
    found = Found([OptimizerState(entries, run.class_name, folder.name)], models, facts, assume_mean=False)
    return found


def _stage(
    folder: Path, number: int, files: Mapping[int, Path], stages: int
) -> tuple[Run, list[Entry], list[Pollution]]:
    """Return what one stage of a pipeline holds; without one, there is one stage."""
    run = Run(folder, number, stages)
    if run.shapes:
        _refuse_other_places(run)
        return run, *parameters(run, files)
    older = neox_parameters(folder, files, run.content)
    if older is None:
        raise FileError(
            f"The model states in {folder} list no parameters (param_shapes): a version of DeepSpeed too old to be read."
        )
    return run, older, []


def _one_model(folder: Path, stages: Sequence[Sequence[Entry]]) -> list[Entry]:
    """Return the entries of all stages; a layer that two stages share must have the same state in both.

    Raises:
        FileError: Stages hold different states under one name, as tensor parallelism writes them.
    """
    known: dict[str | None, Entry] = {}
    for entry in itertools.chain(*stages):
        other = known.setdefault(entry.name, entry)
        if other is not entry and not _same_state(other, entry):
            raise FileError(
                f"{folder} holds {entry.name!r} in two model-parallel ranks with different states: tensor parallelism cuts "
                "parameters in ways that the files do not say; only data-parallel ZeRO is read, and the stages of a pipeline."
            )
    return list(known.values())


def _same_state(one: Entry, other: Entry) -> bool:
    """Whether two stages hold the same state, by its shape and the beginning of its values."""
    tensors = [{key: v for key, v in e.state.items() if isinstance(v, Joined)} for e in (one, other)]
    if one.shape != other.shape or tensors[0].keys() != tensors[1].keys():
        return False
    count = min(math.prod(one.shape or ()), _COMPARED)
    return all(torch.equal(v.read_flat(0, count), tensors[1][key].read_flat(0, count)) for key, v in tensors[0].items())


# -- which folder ------------------------------------------------------------------------------------------------------


def _is_tag(folder: Path) -> bool:
    return is_universal(folder) or any(
        OPTIMIZER_FILE.fullmatch(file.name) or MODEL_FILE.fullmatch(file.name) for file in folder.iterdir()
    )


def _tags(folder: Path) -> list[Path]:
    return sorted(tag for tag in folder.iterdir() if tag.is_dir() and _TAG.fullmatch(tag.name) and _is_tag(tag))


def _latest(folder: Path) -> str | None:
    for name in ("latest", "latest_universal"):
        file = folder / name
        if file.is_file() and file.stat().st_size <= 255:
            return file.read_bytes().decode("utf-8", "replace").strip()
    return None


def _tag_folder(path: Path) -> Path:
    if _is_tag(path):
        return path
    tag, tags = _latest(path), _tags(path)
    if tag is not None:
        if tag in ("", ".", "..") or "/" in tag or "\\" in tag or not (path / tag).is_dir():
            raise FileError(
                f"The file `latest` in {path} names the checkpoint {tag!r}, which is not there. Give its folder itself."
            )
        if not _is_tag(path / tag):
            raise FileError(
                f"{path / tag} holds no DeepSpeed optimizer states: saving was interrupted, or they were deleted."
            )
        return path / tag
    plain = [tag for tag in tags if not is_universal(tag)] or tags
    if len(plain) != 1:
        raise FileError(
            f"{path} holds several checkpoints ({', '.join(t.name for t in plain[:6])}) and no file `latest`: give one."
        )
    return plain[0]


def _without_zero(run: Run, folder: Path) -> Found:
    """Stage 0: an ordinary optimizer state beside the weights."""
    if not isinstance(run.content.get("optimizer"), dict):
        raise FileError(
            f"The DeepSpeed checkpoint {folder} lacks the optimizer states of its ranks (zero_pp_rank_*_optim_states.pt); only "
            "the weights are there. Get all of its files."
        )
    if "state" not in run.content["optimizer"]:
        raise FileError(
            f"{folder} was written by DeepSpeed's FP16 or BF16 optimizer without ZeRO, whose flat buffers have no list of "
            "parameters. Train with ZeRO stage 1 or higher, or use squisher.Tracker."
        )
    file = next(file for file in sorted(folder.iterdir()) if MODEL_FILE.fullmatch(file.name))
    found = read_torch_file(file)
    frozen = set(run.frozen)
    models = [(label, [c for c in listed if c.live_name not in frozen]) for label, listed in found.models]
    facts = run.facts(folder.parent, None)
    facts = replace(facts, tied=found.facts.tied or facts.tied)
    return Found(found.optimizers, models, facts, assume_mean=False)


def _refuse_other_places(run: Run) -> None:
    offload = run.zero.get("offload_optimizer")
    if isinstance(offload, dict) and offload.get("device") == "nvme":
        raise FileError(
            f"{run.folder} was trained with its optimizer swapped to disk (ZeRO-Infinity, offload_optimizer to nvme): the states "
            "are in the swap files of that machine. Save with offload to cpu."
        )
    shard = run.zero.get("mics_shard_size")
    if isinstance(shard, int) and shard > 0:
        raise FileError(
            f"{run.folder} was trained with MiCS, which partitions parameters over {shard} ranks and repeats them on others; only "
            "ZeRO over all ranks is read."
        )


OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_?optim_states\.pt")


def parameters(run: Run, files: Mapping[int, Path]) -> tuple[list[Entry], list[Pollution]]:
    """Every parameter, put together from the ranks' files; and what there is to say about them.

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
    """One rank's part: a flat state per group (or sub-group), and the group that each belongs to.

    `settings` is None where the file has none, `paddings` says how much at the end of each state is none of a parameter's.
    """

    stage: int
    states: Sequence[Mapping[str, Any]]
    groups: Sequence[int]
    settings: Sequence[Mapping[str, Any]] | None
    paddings: Sequence[int]
    saved: Mapping[str, Any]
    parts: dict[tuple[int, str], Verified] = field(default_factory=dict)

    def part(self, k: int, key: str) -> Verified:
        """One flat state; the same object for all parameters in it, so that it is verified once."""
        return self.parts.setdefault((k, key), Verified(self.states[k][key]))

    def length(self, k: int) -> int:
        """Return the number of elements of a flat state, as stored."""
        lengths = {v.shape[0] for v in self.states[k].values() if isinstance(v, StoredTensor) and len(v.shape) == 1}
        if len(lengths) > 1:
            raise FileError(f"The flat states of group {k} differ in length ({lengths}): the checkpoint is damaged.")
        return lengths.pop() if lengths else 0


def stage_files(folder: Path) -> dict[int, dict[int, Path]]:
    """Return the optimizer states in a folder, by stage of the pipeline and rank.

    Raises:
        FileError: Two are of the same rank.
    """
    stages: dict[int, dict[int, Path]] = {}
    for file in sorted(folder.iterdir()):
        match = OPTIMIZER_FILE.fullmatch(file.name)
        if match is None:
            continue
        files, rank = stages.setdefault(int(match["mp"]), {}), int(match["dp"])
        if rank in files:
            raise FileError(f"{folder} holds two files of rank {rank}: {files[rank].name} and {file.name}.")
        files[rank] = file
    return {number: dict(sorted(files.items())) for number, files in sorted(stages.items())}


def _ranks(folder: Path, files: Mapping[int, Path]) -> list[_Rank]:
    ranks = []
    versions = set()
    world = max(files) + 1
    for file in files.values():
        content = read(file)
        saved = content.get("optimizer_state_dict") if isinstance(content, dict) else None
        if not isinstance(saved, dict):
            raise FileError(
                f"{file} holds no optimizer_state_dict: it is damaged, or not what DeepSpeed writes. Get it again."
            )
        versions.add(str(content.get("ds_version", saved.get("ds_version"))))
        if saved.get("ds_zero_partition_groups"):
            raise FileError(
                f"{file} holds experts that are partitioned over other ranks than the rest, which is not read."
            )
        counts = saved.get("partition_count")
        world = max(
            [world, *(n for n in (counts if isinstance(counts, (list, tuple)) else [counts]) if isinstance(n, int))]
        )
        ranks.append(_rank(saved, file))
        different = counts if isinstance(counts, (list, tuple)) else []
        if len(set(different)) > 1:
            raise FileError(f"{file} has groups of {different} partitions (experts?); only equal ones are read.")
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
    inner, base = saved.get("optimizer_state_dict"), saved.get("base_optimizer_state")
    source = inner if isinstance(inner, dict) else base
    paddings = saved.get("group_paddings")
    if isinstance(base, list) and inner is None:  # elastic: padding already cut, no settings
        step = saved.get("base_optimizer_state_step")
        states = [{**({} if step is None else {"step": step}), **state} for state in base if isinstance(state, dict)]
        return _Rank(2, states, range(len(states)), None, [0] * len(states), saved)
    groups = source.get("param_groups") if isinstance(source, dict) else None
    held = source.get("state") if isinstance(source, dict) else None
    if not isinstance(groups, list) or not isinstance(held, dict):
        raise FileError(f"{file} holds no state of an optimizer: it is damaged, or of a layout that is not known.")
    states, numbers = [], []
    for number, group in enumerate(groups):
        for member in group.get("params") or () if isinstance(group, dict) else ():
            state = held.get(member) if isinstance(member, (int, str)) else None
            states.append(state if isinstance(state, dict) else {})
            numbers.append(number)
    listed = list(paddings) if isinstance(paddings, (list, tuple)) else []
    known = len(listed) == len(states) and all(isinstance(n, int) for n in listed)
    return _Rank(3 if source is inner else 2, states, numbers, groups, listed if known else [], saved)


def _check_alike(folder: Path, ranks: Sequence[_Rank]) -> None:
    first = ranks[0]
    for number, rank in enumerate(ranks):
        same = (
            len(rank.states) == len(first.states)
            and rank.stage == first.stage
            and list(rank.groups) == list(first.groups)
        )
        if not same or any(set(a) != set(b) for a, b in zip(rank.states, first.states, strict=True)):
            raise FileError(
                f"{folder} mixes the files of several runs: ranks 0 and {number} do not have the same groups."
            )
        for k, (ours, theirs) in enumerate(zip(rank.states, first.states, strict=True)):
            steps = [
                step_of(state, one.settings[one.groups[k]] if one.settings else {})
                for state, one in ((ours, rank), (theirs, first))
            ]
            if steps[0] != steps[1]:
                raise FileError(
                    f"{folder} mixes the files of several steps: rank {number} is at step {steps[0]}, rank 0 at step {steps[1]}."
                )


# -- from flat buffers to parameters -----------------------------------------------------------------------------------


def _entry(
    run: Run, ranks: Sequence[_Rank], k: int, name: str, shape: Sequence[int], cuts: Sequence[tuple[int, int]]
) -> Entry:
    """Return a parameter: on each rank the elements between two places of the flat state `k`."""
    state: dict[str, Any] = {}
    for key, value in ranks[0].states[k].items():
        parts = [rank.states[k][key] for rank in ranks]
        if not isinstance(value, StoredTensor) or len(value.shape) != 1:
            state[key] = value
        elif all(isinstance(p, StoredTensor) and p.is_contiguous and p.dtype == value.dtype for p in parts):
            slices = [Slice(rank.part(k, key), *cut) for rank, cut in zip(ranks, cuts, strict=True)]
            state[key] = Joined(shape, value.dtype, slices)
        else:
            raise FileError(f"The ranks in {run.folder} do not agree about {key} of group {k}: it is damaged.")
    number = ranks[0].groups[k]
    settings = ranks[0].settings
    return Entry(state, run.group(settings[number] if settings else None), number, run.names[name])


def _stages_1_and_2(run: Run, ranks: Sequence[_Rank]) -> tuple[list[Entry], list[Pollution]]:
    """Each group is one buffer, cut into equal parts; alignment may leave gaps after parameters and at the end."""
    if len(run.shapes) != len(ranks[0].states):
        raise FileError(
            f"{run.folder} lists {len(run.shapes)} groups of parameters, but its ranks hold {len(ranks[0].states)} states."
        )
    entries = []
    agree = True
    for k, shapes in enumerate(run.shapes):
        ends = list(accumulate(rank.length(k) for rank in ranks))
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
    why = "round-robin gradients make it wrong" if run.round_robin else "nobody knows why"
    note = f"DeepSpeed's table of slices says otherwise than its list of parameters, which was followed ({why})."
    return entries, [] if agree else [Pollution(Spoiler.UNCERTAIN, note=note)]


def _gaps(saved: Any, k: int, count: int) -> list[int]:
    """Elements left empty after each parameter."""
    gaps = saved[k] if isinstance(saved, (list, tuple)) and k < len(saved) else [0] * count
    if (
        not isinstance(gaps, (list, tuple))
        or len(gaps) != count
        or not all(isinstance(n, int) and n >= 0 for n in gaps)
    ):
        raise FileError(
            f"DeepSpeed's alignment of group {k} does not fit its {count} parameters: the checkpoint is damaged."
        )
    return list(gaps)


def _check_total(run: Run, ranks: Sequence[_Rank], k: int, found: int, used: int) -> None:
    if all(rank.paddings for rank in ranks):
        fits = found == used + sum(rank.paddings[k] for rank in ranks)
    else:  # older versions do not write the padding down; buffers are aligned to two elements a rank
        fits = 0 <= found - used < 2 * len(ranks)
    if not fits:
        raise FileError(
            f"The parts of group {k} in {run.folder} hold {found} elements, but its parameters need {used}: the files do not "
            "belong together, or one is damaged."
        )


def _slice_agrees(rank: _Rank, k: int, name: str, cut: tuple[int, int]) -> bool:
    tables = rank.saved.get("param_slice_mappings")
    table = tables[k] if isinstance(tables, (list, tuple)) and k < len(tables) else None
    if not isinstance(table, dict):
        return True
    said = table.get(name)
    if cut[0] == cut[1]:
        return said is None
    return isinstance(said, Record) and (said.get("start"), said.get("numel")) == (cut[0], cut[1] - cut[0])


def _stage_3(run: Run, ranks: Sequence[_Rank]) -> tuple[list[Entry], list[Pollution]]:
    """Each parameter is cut into equal parts, one a rank; each rank's parts follow one another, in sub-groups."""
    world = len(ranks)
    entries = []
    k, place = 0, 0
    lengths = [ranks[0].length(number) for number in range(len(ranks[0].states))]
    if any(rank.length(number) != lengths[number] for rank in ranks for number in range(len(lengths))):
        raise FileError(f"The ranks in {run.folder} hold states of different length: the files do not belong together.")
    for name, shape in run.trained.items():
        numel = math.prod(shape)
        share = -(-numel // world)
        if k < len(lengths) and place == lengths[k] and ranks[0].states[k]:
            k, place = k + 1, 0
        if k >= len(lengths) or (ranks[0].states[k] and place + share > lengths[k]):
            raise FileError(
                f"The flat states in {run.folder} end inside {name!r}: the files do not belong together, or one is damaged."
            )
        taken = [max(0, min(share, numel - rank * share)) for rank in range(world)]
        entries.append(_entry(run, ranks, k, name, shape, [(place, place + n) for n in taken]))
        place += share
    if ranks[0].states[k] and (k, place) != (len(lengths) - 1, lengths[k]):
        raise FileError(
            f"The flat states in {run.folder} hold more than its parameters: the files do not belong together."
        )
    return entries, []
