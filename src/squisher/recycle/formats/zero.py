"""DeepSpeed ZeRO checkpoints, without DeepSpeed.

Every rank holds its shard of flat buffers (`zero_flat`); a universal checkpoint has a folder for every parameter instead, with
a file for every kind of state.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import FileError
from ...importance.facts import Pollution, RunFacts
from ...storage.torch_files import Record, read
from ..optimizers import step_of
from ..states import Entry, Found, OptimizerState, Options
from .tensor_parallel import Copies, cut_by_name, one_of_each_rank, whole_shape
from .torch_file import Unopened, read_torch_file
from .trainer import facts_of, training_args
from .zero_flat import neox_parameters, parameters
from .zero_run import MODEL_FILE, Run

__all__ = ["is_zero", "read_zero"]

_TAG = re.compile(r"global_step\d+(?:_universal)?")
_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_?optim_states\.pt")


def is_zero(path: Path) -> bool:
    """Return whether a folder is a DeepSpeed checkpoint or one of its tags, or a file is the shard of one rank."""
    if path.is_file():
        return _OPTIMIZER_FILE.fullmatch(path.name) is not None
    return path.is_dir() and (_is_tag(path) or bool(_tags(path)) or _TAG.fullmatch(_latest(path) or "") is not None)


def read_zero(path: Path, options: Options) -> Found:
    """Read the optimizer state of a DeepSpeed checkpoint, joined from the shards of all ranks.

    Raises:
        FileError: Shards are missing, do not belong together, or were written in a way that is not read.
    """
    if path.is_file():
        raise FileError(f"{path} is the shard of one rank of a DeepSpeed checkpoint; give the folder that it is in.")
    folder = _tag_folder(path)
    source = path if folder != path else path.absolute().parent
    if _is_universal(folder):
        return _universal(folder, source)
    stages = _stage_files(folder)
    if not stages:
        return _without_zero(Run(folder), folder)
    read_stages = [_stage(folder, number, files, len(stages)) for number, files in stages.items()]
    run = read_stages[0][0]
    copies = Copies(folder)
    entries, cut = one_of_each_rank(folder, [listed for _, listed, _ in read_stages], copies)
    run.check_tensor_parallel(cut)
    if not run.shapes:
        return Found([OptimizerState(entries, None, folder.name)], facts=RunFacts(pollution=copies.notes))
    facts = run.facts(_trainer_facts(source, next((step_of(e.state, e.group) for e in entries if e.state), None)))
    of_stages = [run.facts(RunFacts()) for run, _, _ in read_stages]
    notes = dict.fromkeys([*(note for *_, said in read_stages for note in said), *copies.notes])
    facts = replace(
        facts,
        pollution=(*facts.pollution, *notes),
        absent={name: why for one in of_stages for name, why in one.absent.items()},
        tied={alias: name for one in of_stages for alias, name in one.tied.items()},
    )
    listed = {c.name: c for run, _, _ in read_stages for _, own in run.models() for c in own}
    if cut > 1:
        listed = {n: replace(c, shape=whole_shape(c.shape, cut_by_name(folder, n), cut)) for n, c in listed.items()}
    models = [(run.models()[0][0], list(listed.values()))]
    return Found([OptimizerState(entries, run.class_name, folder.name)], models, facts, assume_mean=False)


def _stage(
    folder: Path, number: int, files: Mapping[int, Path], stages: int
) -> tuple[Run, list[Entry], list[Pollution]]:
    """Return what one model-parallel rank holds: the share of a tensor-parallel rank in one stage of a pipeline."""
    run = Run(folder, number, stages)
    if run.shapes:
        _refuse_other_places(run)
        return run, *parameters(run, files)
    older = neox_parameters(folder, files, run.content)
    if older is None:
        raise FileError(f"The model states in {folder} list no parameters (param_shapes): DeepSpeed was too old.")
    return run, older, []


def _trainer_facts(source: Path, steps: int | None) -> RunFacts:
    """Return what a Trainer's files prove about the run, where they lie in the folder that was asked for or above the tag."""
    there = (source / "training_args.bin").is_file()
    return facts_of(source, training_args(source), steps)[0] if there else RunFacts()


# -- which folder ------------------------------------------------------------------------------------------------------


def _is_tag(folder: Path) -> bool:
    names = [file.name for file in folder.iterdir()]
    return _is_universal(folder) or any(_OPTIMIZER_FILE.fullmatch(n) or MODEL_FILE.fullmatch(n) for n in names)


def _tags(folder: Path) -> list[Path]:
    return sorted(tag for tag in folder.iterdir() if tag.is_dir() and _TAG.fullmatch(tag.name) and _is_tag(tag))


def _latest(folder: Path) -> str | None:
    for name in ("latest", "latest_universal"):
        file = folder / name
        if file.is_file() and file.stat().st_size <= 255:
            return file.read_bytes().decode("utf-8", "replace").strip()
    return None


def _tag_folder(path: Path) -> Path:
    """Return the folder of the checkpoint that is meant: the path itself, or the one that `latest` names, or the only one."""
    if _is_tag(path):
        return path
    tag, tags = _latest(path), _tags(path)
    if tag is not None:
        if tag in ("", ".", "..") or "/" in tag or "\\" in tag or not (path / tag).is_dir():
            raise FileError(f"`latest` in {path} names the checkpoint {tag!r}, which is not there. Give its folder.")
        if not _is_tag(path / tag):
            raise FileError(f"{path / tag} holds no DeepSpeed optimizer states: was saving interrupted?")
        return path / tag
    plain = [tag for tag in tags if not _is_universal(tag)] or tags
    if len(plain) != 1:
        raise FileError(f"{path} holds {', '.join(t.name for t in plain[:6])} and no file `latest`: give one.")
    return plain[0]


def _stage_files(folder: Path) -> dict[int, dict[int, Path]]:
    """Return the optimizer states in a folder, by stage of the pipeline and rank.

    Raises:
        FileError: Two are of the same rank, or one is missing.
    """
    stages: dict[int, dict[int, Path]] = {}
    for file in sorted(folder.iterdir()):
        match = _OPTIMIZER_FILE.fullmatch(file.name)
        if match is None:
            continue
        files, rank = stages.setdefault(int(match["mp"]), {}), int(match["dp"])
        if rank in files:
            raise FileError(f"{folder} holds two files of rank {rank}: {files[rank].name} and {file.name}.")
        files[rank] = file
    missing = next((number for number in range(len(stages)) if number not in stages), None)
    if missing is not None:
        raise FileError(f"{folder} lacks the states of the model-parallel rank {missing:02d}. Get all of its files.")
    return {number: dict(sorted(files.items())) for number, files in sorted(stages.items())}


def _without_zero(run: Run, folder: Path) -> Found:
    """Read stage 0: an ordinary optimizer state beside the weights."""
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
    facts = run.facts(_trainer_facts(folder.parent, None))
    facts = replace(facts, tied=found.facts.tied or facts.tied)
    return Found(found.optimizers, models, facts, assume_mean=False)


def _refuse_other_places(run: Run) -> None:
    """Refuse a run whose states are in no file (nvme), or on some ranks twice (MiCS)."""
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


# -- universal checkpoints ---------------------------------------------------------------------------------------------


def _is_universal(folder: Path) -> bool:
    """Return whether a folder is a universal checkpoint: it has `zero/<parameter>/fp32.pt`."""
    inside = folder / "zero"
    return inside.is_dir() and any((parameter / "fp32.pt").is_file() for parameter in inside.iterdir())


def _universal(folder: Path, source: Path) -> Found:
    """Read the optimizer state of a universal checkpoint.

    Args:
        folder: The folder that holds `zero/`.
        source: The folder above it, for what lies there about the run.

    Raises:
        FileError: It is incomplete or damaged, or was converted from a checkpoint for which the converter is wrong.
    """
    run = Run(folder)
    if run.round_robin:
        raise FileError(
            f"{folder} was converted from a checkpoint with round_robin_gradients, for which DeepSpeed's converter writes "
            "tensors under each other's names. Give the checkpoint that it was converted from."
        )
    common = folder / "zero" / "optimizer_state.pt"
    content = read(common) if common.is_file() else {}
    stage = content.get("zero_stage") if isinstance(content, dict) else None
    stage = stage.args[0] if isinstance(stage, Record) and stage.args else stage
    if not run.config and stage != 3 and not run.in_registration_order:
        raise FileError(
            f"The files in {folder} do not say how it was trained, and their order of parameters is one that round_robin_gradients "
            "would make, for which DeepSpeed's converter is wrong. Give the checkpoint that it was converted from."
        )
    if not run.shapes:
        raise FileError(f"The model states in {folder} list no parameters (param_shapes) to check with.")
    strangers = {p.name for p in (folder / "zero").iterdir() if (p / "exp_avg_sq.pt").is_file()} - set(run.trained)
    if strangers:
        raise FileError(f"{folder}/zero has a state for {min(strangers)!r}, which the model states do not list.")
    saved = _optimizer_in(content)
    entries = []
    for name, number, settings, step in _members(run, saved):
        state = _universal_state(folder / "zero", name, run.trained[name])
        if step is not None:
            state.setdefault("step", step)
        entries.append(Entry(state, run.group(settings), number, run.names[name]))
    facts = run.facts(_trainer_facts(source, next((step_of(entry.state, entry.group) for entry in entries), None)))
    return Found([OptimizerState(entries, run.class_name, folder.name)], run.models(), facts, assume_mean=False)


def _optimizer_in(saved: Any) -> Mapping[str, Any]:
    """Return the dictionary in `optimizer_state.pt` that has the groups; the stages keep it in different places."""
    if isinstance(saved, dict):
        for value in (saved.get("optimizer_state_dict"), saved.get("base_optimizer_state"), saved):
            if isinstance(value, dict) and isinstance(value.get("param_groups"), list):
                return value
    return {}


def _members(run: Run, saved: Mapping[str, Any]) -> Iterator[tuple[str, int, Mapping[str, Any] | None, Any]]:
    """Yield every parameter with its group, the group's settings and a step, where the common file has them."""
    groups = saved.get("param_groups") or []
    listed = [(group.get("params") if isinstance(group, dict) else None) or () for group in groups]
    flat = [(number, member) for number, members in enumerate(listed) for member in members]
    states = saved.get("state")
    for k, shapes in enumerate(run.shapes):
        number, settings, step = 0, None, None
        if len(flat) == len(run.shapes):
            number, member = flat[k]
            settings = groups[number]
            state = states.get(member) if isinstance(states, dict) else None
            step = state.get("step") if isinstance(state, dict) else None
        elif groups:
            raise FileError(f"{run.folder} lists {len(run.shapes)} groups, but its optimizer has {len(flat)}.")
        for name in shapes:
            yield name, number, settings, step


def _universal_state(folder: Path, name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    inside = folder / name
    if "/" in name or "\\" in name or name in (".", "..") or not inside.is_dir():
        raise FileError(f"{folder} lacks the folder of {name!r}: it was not converted to the end, or not copied whole.")
    state: dict[str, Any] = {}
    for file in sorted(inside.glob("*.pt")):
        if file.stem == "step":
            step = read(file)
            state["step"] = step.get("param") if isinstance(step, dict) else step
        elif file.stem != "fp32":
            state[file.stem] = Unopened(file, shape)
    if not state:
        raise FileError(f"{inside} holds no optimizer state: it was not converted to the end, or not copied whole.")
    return state
