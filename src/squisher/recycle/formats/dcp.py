"""Folders of `torch.distributed.checkpoint`: FSDP1 and FSDP2, DDP, torchtitan, Accelerate's FSDP, Megatron.

`.metadata` says which tensors there are, into which blocks they were cut, and where each block lies in the shard files; it is
read by our own pickle machine. Names come from the paths that the planner wrote down, never from splitting keys at dots.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...errors import FileError, NamingError
from ...storage.tensors import CHUNK, TensorSource
from ..naming.solver import clean_names, recorded_name
from ..optimizers.accumulators import step_of
from ..states import Candidate, Entry, Found, OptimizerState, Options
from .dcp_metadata import Checkpoint
from .megatron import megatron_optimizer, refuse_buckets
from .model_source import with_model
from .training_args import facts_of, training_args

__all__ = ["is_dcp", "read_dcp"]

_NUMBERED = re.compile(r"(?:step|iter|epoch|checkpoint|global_step)[-_]?\d+")
_PER_RANK = "optimizer_*_rank*.bin"  # Accelerate's name for LOCAL_STATE_DICT
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def is_dcp(path: Path) -> bool:
    """Whether a folder is a distributed checkpoint, or holds one or several in its folders; or a file is a part of one."""
    if path.is_file():
        return path.name == ".metadata" or path.suffix == ".distcp"
    return path.is_dir() and (bool(_folders(path)) or any(path.glob("*.distcp")) or any(path.glob(_PER_RANK)))


def read_dcp(path: Path, options: Options) -> Found:
    """The optimizer states in a distributed checkpoint, and its weights as evidence for names.

    Raises:
        FileError: It is incomplete, damaged, written in a way that is not read, or holds no optimizer state.
    """
    if path.is_file():
        raise FileError(f"{path} is one part of a distributed checkpoint; give the folder that it is in.")
    if any(path.glob(_PER_RANK)):
        raise FileError(
            f"{path} holds the local state of every FSDP rank ({_PER_RANK}): flat shards, whose parameters cannot be told. Save "
            "with the state dict type SHARDED_STATE_DICT or FULL_STATE_DICT."
        )
    folders = _folders(path)
    if not folders:
        raise FileError(
            f"{path} holds shards (.distcp) but no .metadata, which is written last: saving was interrupted, or every rank "
            "wrote a .metadata of its own, which is not read."
        )
    several = [folder.name for folder in folders if _NUMBERED.fullmatch(folder.name)]
    if len(several) > 1:
        raise FileError(f"{path} holds several checkpoints ({', '.join(several[:6])}): give one of them.")
    optimizers: list[OptimizerState] = []
    found: list[_Model] = []
    for folder in folders:
        checkpoint = Checkpoint(folder)
        refuse_buckets(checkpoint)
        optimizers += _optimizers(checkpoint, folder.name if len(folders) > 1 else "")
        found += _models(checkpoint)
    if not optimizers:
        raise FileError(
            f"{path} is a distributed checkpoint without an optimizer state: it holds weights only. Give the one that was "
            "saved with the optimizer (under FSDP often a folder of its own, optimizer_0)."
        )
    recorded = {entry.name for optimizer in optimizers for entry in optimizer.entries}
    models = []
    tied: dict[str, str] = {}
    for model in found:
        names = {name for c in model.candidates for name in (c.name, c.live_name)}
        # What is no model of these parameters (a scheduler, say) explains nothing, and a shuffled one names nothing.
        if recorded & names or (None in recorded and model.checkpoint.in_order):
            tied |= model.tied(recorded)
            models.append((model.label, [c for c in model.candidates if c.name not in tied]))
    facts: dict[str, Any] = {"tied": tied} if tied else {}
    if (path / "training_args.bin").is_file():  # FSDP under the Hugging Face Trainer
        steps = (step_of(e.state, e.group) for optimizer in optimizers for e in optimizer.entries if e.state)
        facts |= facts_of(path, training_args(path), next(steps, None))
    return with_model(Found(optimizers, models, facts), options)


def _folders(path: Path) -> list[Path]:
    """The distributed checkpoints at a path: itself, or its folders."""
    if (path / ".metadata").is_file():
        return [path]
    if not path.is_dir():
        return []
    latest = path / "latest_checkpointed_iteration.txt"  # Megatron's
    if latest.is_file() and latest.stat().st_size < 32:
        text = latest.read_bytes().decode("ascii", "replace").strip()
        named = path / f"iter_{int(text):07d}" if text.isdecimal() else path
        if (named / ".metadata").is_file():
            return [named]
    return sorted(folder for folder in path.iterdir() if (folder / ".metadata").is_file())


# -- optimizers in it --------------------------------------------------------------------------------------------------


@dataclass
class _Saved:
    """The entries of one optimizer: state keys by parameter, hyperparameters by group, as found on the paths."""

    state: dict[str, dict[str, str]] = field(default_factory=dict)
    groups: dict[Any, dict[str, str]] = field(default_factory=dict)
    whole: dict[Any, str] = field(default_factory=dict)


class _Group(Mapping[str, Any]):
    """Hyperparameters, each a little file: read when asked for, so that a thousand parameters cost no ten thousand reads."""

    def __init__(self, checkpoint: Checkpoint, keys: Mapping[str, str]) -> None:
        self._checkpoint, self._keys = checkpoint, keys
        self._values: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            value = self._checkpoint.value(self._keys[name])
            self._values[name] = value.load() if isinstance(value, TensorSource) else value
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def _optimizers(checkpoint: Checkpoint, label: str) -> list[OptimizerState]:
    megatron = megatron_optimizer(checkpoint)
    if megatron is not None:
        return [megatron]
    out = []
    for prefix, saved in _saved(checkpoint).items():
        place = ".".join([label] * bool(label) + [str(part) for part in prefix])
        out.append(OptimizerState(_entries(checkpoint, saved, place), place=place))
    return out


def _saved(checkpoint: Checkpoint) -> dict[tuple[Any, ...], _Saved]:
    found: dict[tuple[Any, ...], _Saved] = {}
    for key, path in checkpoint.paths.items():
        place = _optimizer_place(path)
        if place is None:
            continue
        prefix, kind, owner, name = place
        saved = found.setdefault(prefix, _Saved())
        if name is None:
            saved.whole[owner] = key
        else:
            owned = saved.state.setdefault(str(owner), {}) if kind == "state" else saved.groups.setdefault(owner, {})
            owned[name] = key
    # A module may be called `state`; only an optimizer has groups as well.
    return {prefix: saved for prefix, saved in found.items() if saved.groups or saved.whole}


def _optimizer_place(path: tuple[Any, ...]) -> tuple[tuple[Any, ...], str, Any, str | None] | None:
    """The optimizer an entry belongs to, `state` or `param_groups`, whose it is (parameter or group), and its name."""
    for k, part in enumerate(path):
        rest = path[k + 1 :]
        if part == "param_groups" and len(rest) <= 1:  # one pickle for all groups, or for one
            return path[:k], part, rest[0] if rest else None, None
        if part in ("state", "param_groups") and len(rest) >= 2:
            return path[:k], part, rest[0], ".".join(map(str, rest[1:]))
        if isinstance(part, str) and not rest:  # flattened: one part, `state.<name of the parameter>.exp_avg_sq`
            kind, _, after = part.partition(".")
            owner, _, name = after.rpartition(".")
            if kind in ("state", "param_groups") and owner:
                return path[:k], kind, owner, name
    return None


def _entries(checkpoint: Checkpoint, saved: _Saved, place: str) -> list[Entry]:
    entries: list[Entry] = []
    held: set[str] = set()
    for number, (members, names, group) in enumerate(_groups(checkpoint, saved)):
        for member, name in zip(members, names, strict=True):
            key = str(member)  # the planner writes numbers as text
            if key in held:
                raise FileError(
                    f"{checkpoint.folder} is damaged: {member!r} is twice in the groups of {place or 'the optimizer'}."
                )
            held.add(key)
            state = {what: checkpoint.value(entry) for what, entry in saved.state.get(key, {}).items()}
            entries.append(Entry(state, group, number, recorded_name(name) if isinstance(name, str) else None))
    strangers = [member for member in saved.state if member not in held]
    if strangers:
        raise FileError(
            f"{checkpoint.folder} has a state for {strangers[0]!r}, but no group of {place or 'the optimizer'} lists it: the "
            "checkpoint is incomplete, or parts of several were mixed."
        )
    return entries


def _groups(checkpoint: Checkpoint, saved: _Saved) -> list[tuple[Sequence[Any], Sequence[Any], Mapping[str, Any]]]:
    """The parameters of each group, their names (or what stands in their place), and its hyperparameters."""
    listed = sorted(saved.groups.items(), key=lambda item: _number(item[0]))
    found: list[tuple[Any, Any]] = [(owner, _Group(checkpoint, keys)) for owner, keys in listed]
    for _, key in sorted(saved.whole.items(), key=lambda item: _number(item[0])):
        value = checkpoint.value(key)
        found += [(None, group) for group in (value if isinstance(value, list) else [value])]
    out: list[tuple[Sequence[Any], Sequence[Any], Mapping[str, Any]]] = []
    for owner, group in found:
        if isinstance(owner, str) and "params" not in group:  # flattened: a group for every parameter
            out.append(([owner], [owner], group))
            continue
        members = group.get("params") if isinstance(group, Mapping) else None
        names = (group.get("param_names") or members) if isinstance(group, Mapping) else None
        if not isinstance(members, (list, tuple)) or not isinstance(names, (list, tuple)) or len(names) != len(members):
            raise FileError(f"{checkpoint.folder} is damaged: a parameter group does not list its parameters.")
        out.append((members, names, group))
    return out


def _number(owner: Any) -> int:
    """The place of a group among the groups; those of single parameters keep their order."""
    return int(owner) if isinstance(owner, int) or (isinstance(owner, str) and owner.isdecimal()) else -1


@dataclass(frozen=True)
class _Model:
    """Weights in a checkpoint: where names may come from, in the order in which the model listed them."""

    label: str
    checkpoint: Checkpoint
    candidates: list[Candidate]
    keys: list[str]

    def tied(self, held: set[str | None]) -> dict[str, str]:
        """Matrices that the optimizer does not have and that equal, bit by bit, one that it has: `{alias: name}`."""
        pairs = list(zip(self.candidates, self.keys, strict=True))
        out = {}
        for alias, its_key in pairs:
            if alias.name in held or len(alias.shape) < 2:
                continue
            for other, key in pairs:
                if other.name in held and other.shape == alias.shape and self._equal(its_key, key):
                    out[alias.name] = other.name
                    break
        return out

    def _equal(self, one: str, other: str) -> bool:
        if self.checkpoint.dtype(one) != self.checkpoint.dtype(other):
            return False
        first, second = self.checkpoint.tensor(one), self.checkpoint.tensor(other)
        numel = math.prod(first.shape)
        pieces = ((start, min(start + CHUNK, numel)) for start in range(0, numel, CHUNK))
        return all(torch.equal(first.read_flat(*piece), second.read_flat(*piece)) for piece in pieces)


def _models(checkpoint: Checkpoint) -> list[_Model]:
    """The weights, without what is surely a buffer."""
    optimizers = set(_saved(checkpoint))
    found: dict[tuple[Any, ...], dict[str, str]] = {}
    for key, path in checkpoint.paths.items():
        place = _optimizer_place(path)
        name = str(path[-1])
        if (place and place[0] in optimizers) or not checkpoint.is_tensor(key) or ".optimizer." in f".{key}":
            continue
        if checkpoint.dtype(key).is_floating_point and name.rpartition(".")[2] not in _BUFFERS:
            found.setdefault(path[:-1], {})[name] = key
    models = []
    for prefix, keys in found.items():
        try:
            names = clean_names([recorded_name(name) for name in keys])
        except NamingError:  # two wrappings of one model: the names as they are tell them apart
            names = list(keys)
        label = f"the weights under {'.'.join(map(str, prefix))!r}" if prefix else "the weights"
        pairs = zip(names, keys.items(), strict=True)
        listed = [
            Candidate(name, checkpoint.shape(key), live_name=live, weight=checkpoint.tensor(key))
            for name, (live, key) in pairs
        ]
        models.append(_Model(label, checkpoint, listed, list(keys.values())))
    return models
