"""DeepSpeed ZeRO checkpoints, stages 1 to 3, without DeepSpeed: every rank holds its part of flat buffers.

The order of the parameters in a buffer is that of `param_shapes` in the model states. The slice tables that DeepSpeed saves
as well are wrong under round-robin gradients; they are compared and never followed.
"""

from __future__ import annotations

import re
from pathlib import Path

from ...errors import FileError
from ..optimizers.accumulators import step_of
from ..states import Found, OptimizerState, Options
from .model_source import with_model
from .torch_file import read_torch_file
from .zero_partitions import OPTIMIZER_FILE, parameters, rank_files
from .zero_run import MODEL_FILE, Run
from .zero_universal import is_universal, read_universal

__all__ = ["is_zero", "read_zero"]

_TAG = re.compile(r"global_step\d+(?:_universal)?")


def is_zero(path: Path) -> bool:
    """Whether a folder is a DeepSpeed checkpoint or one of its tags, or a file is one rank's part of it."""
    if path.is_file():
        return OPTIMIZER_FILE.fullmatch(path.name) is not None
    return path.is_dir() and (_is_tag(path) or bool(_tags(path)) or _TAG.fullmatch(_latest(path) or "") is not None)


def read_zero(path: Path, options: Options) -> Found:
    """The optimizer state of a DeepSpeed checkpoint, put together from the parts of all ranks.

    Raises:
        FileError: Parts are missing, do not belong together, or were written in a way that is not read.
    """
    if path.is_file():
        raise FileError(f"{path} is one rank's part of a DeepSpeed checkpoint; give the folder that it is in.")
    folder = _tag_folder(path)
    source = path if folder != path else path.absolute().parent
    if is_universal(folder):
        return with_model(read_universal(folder, source), options)
    run = Run(folder)
    files = rank_files(folder)
    if not files:
        return with_model(_without_zero(run, folder), options)
    if not run.shapes:
        raise FileError(
            f"The model states in {folder} list no parameters (param_shapes): a version of DeepSpeed too old to be read."
        )
    _refuse_other_places(run)
    entries, notes = parameters(run, files)
    facts = run.facts(source, next((step_of(e.state, e.group) for e in entries if e.state), None))
    if notes:
        facts["pollution"] = [*facts.get("pollution", ()), *notes]
    found = Found([OptimizerState(entries, run.class_name, folder.name)], run.models(), facts)
    return with_model(found, options)


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
    return Found(found.optimizers, models, {**run.facts(folder.parent, None), **found.facts})


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
