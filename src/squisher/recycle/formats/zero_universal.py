"""DeepSpeed's universal checkpoints: a folder for every parameter, with a file for every kind of state."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import FileError
from ...storage.torch_files import Record, StoredTensor, Verified, read
from ..optimizers import step_of
from ..states import Entry, Found, OptimizerState
from .zero_run import Run

__all__ = ["is_universal", "read_universal"]


def is_universal(folder: Path) -> bool:
    """Whether a folder is a universal checkpoint: it has `zero/<parameter>/fp32.pt`."""
    inside = folder / "zero"
    return inside.is_dir() and any((parameter / "fp32.pt").is_file() for parameter in inside.iterdir())


def read_universal(folder: Path, source: Path) -> Found:
    """Read the optimizer state of a universal checkpoint.

    Args:
        folder: The one that holds `zero/`.
        source: The one above it, for what lies there about the run.

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
    if not run.config and _stage(content) != 3 and not run.in_registration_order:
        raise FileError(
            f"The files in {folder} do not say how it was trained, and their order of parameters is one that round_robin_gradients "
            "would make, for which DeepSpeed's converter is wrong. Give the checkpoint that it was converted from."
        )
    if not run.shapes:
        raise FileError(
            f"The model states in {folder} list no parameters (param_shapes), so the universal files cannot be checked."
        )
    strangers = {p.name for p in (folder / "zero").iterdir() if (p / "exp_avg_sq.pt").is_file()} - set(run.trained)
    if strangers:
        raise FileError(
            f"{folder}/zero holds a state for {sorted(strangers)[0]!r}, which the model states do not list: mixed files?"
        )
    saved = _optimizer_in(content)
    entries = []
    for name, number, settings, step in _members(run, saved):
        state = _state(folder / "zero", name, run.trained[name])
        if step is not None:
            state.setdefault("step", step)
        entries.append(Entry(state, run.group(settings), number, run.names[name]))
    facts = run.facts(source, next((step_of(entry.state, entry.group) for entry in entries), None))
    return Found([OptimizerState(entries, run.class_name, folder.name)], run.models(), facts, assume_mean=False)


def _stage(saved: Any) -> int | None:
    stage = saved.get("zero_stage") if isinstance(saved, dict) else None
    stage = stage.args[0] if isinstance(stage, Record) and stage.args else stage
    return stage if isinstance(stage, int) else None


def _optimizer_in(saved: Any) -> Mapping[str, Any]:
    """Return the part of `optimizer_state.pt` that has the groups; the stages keep it in different places."""
    if isinstance(saved, dict):
        for value in (saved.get("optimizer_state_dict"), saved.get("base_optimizer_state"), saved):
            if isinstance(value, dict) and isinstance(value.get("param_groups"), list):
                return value
    return {}


def _members(run: Run, saved: Mapping[str, Any]) -> Iterator[tuple[str, int, Mapping[str, Any] | None, Any]]:
    """Every parameter with its group, the group's settings and a step, where the common file has them."""
    groups = saved.get("param_groups") or []
    flat = [(number, member) for number, group in enumerate(groups) for member in _list(group)]
    states = saved.get("state")
    for k, shapes in enumerate(run.shapes):
        number, settings, step = 0, None, None
        if len(flat) == len(run.shapes):
            number, member = flat[k]
            settings = groups[number]
            state = states.get(member) if isinstance(states, dict) else None
            step = state.get("step") if isinstance(state, dict) else None
        elif groups:
            raise FileError(
                f"{run.folder} lists {len(run.shapes)} groups of parameters, but its optimizer has {len(flat)}."
            )
        for name in shapes:
            yield name, number, settings, step


def _list(group: Any) -> list[Any]:
    members = group.get("params") if isinstance(group, dict) else None
    return members if isinstance(members, list) else []


def _state(folder: Path, name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    inside = folder / name
    if "/" in name or "\\" in name or name in (".", "..") or not inside.is_dir():
        raise FileError(
            f"The universal checkpoint {folder} lacks the folder of {name!r}: it was not converted to the end, or not copied whole."
        )
    state: dict[str, Any] = {}
    for file in sorted(inside.glob("*.pt")):
        if file.stem == "step":
            state["step"] = _unwrapped(read(file))
        elif file.stem != "fp32":
            state[file.stem] = _File(file, shape)
    if not state:
        raise FileError(
            f"{inside} holds weights but no optimizer state: it was not converted to the end, or not copied whole."
        )
    return state


def _unwrapped(value: Any) -> Any:
    return value.get("param") if isinstance(value, dict) else value


class _File:
    """One state of one parameter, in a file of its own: flat from stage 3, shaped from the others."""

    def __init__(self, path: Path, shape: tuple[int, ...]) -> None:
        self.path, self.shape = path, shape

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the stored values."""
        return self._stored.dtype

    def load(self) -> Tensor:
        """Read the whole tensor."""
        return self._stored.load().reshape(self.shape)

    def read_flat(self, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` in flat order."""
        return self._stored.read_flat(start, stop)

    @cached_property
    def _stored(self) -> Verified:
        value = _unwrapped(read(self.path))
        if not isinstance(value, StoredTensor) or value.shape not in (self.shape, (math.prod(self.shape),)):
            found = f"a tensor of {value.shape}" if isinstance(value, StoredTensor) else f"a {type(value).__name__}"
            raise FileError(
                f"{self.path} holds {found}, but the parameter has the shape {self.shape}: mixed files, or damaged."
            )
        return Verified(value)
