"""Folders of `torch.distributed.checkpoint`: FSDP1 and FSDP2, DDP, torchtitan, Accelerate's FSDP.

`.metadata` says which tensors there are, into which blocks they were cut, and where each block lies in the shard files; it is
read by our pickle machine. Names come from the paths that the planner wrote down, never from splitting keys at dots.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from ...errors import FileError
from ...importance.facts import RunFacts
from ...names import equal
from ...storage.byte_range import ByteRange
from ...storage.tensors import Block, Blocks, LazyTensors, TensorSource
from ...storage.torch_files import Record, read, unpickle
from ..naming.candidates import distinct_names, is_buffer, recorded_name
from ..optimizers import step_of
from ..states import Candidate, Entry, Found, OptimizerState, Options, Source
from .torch_file import Unopened, inside
from .trainer import facts_of, training_args

__all__ = ["Checkpoint", "is_dcp", "read_dcp"]

_NUMBERED = re.compile(r"(?:step|iter|epoch|checkpoint|global_step)[-_]?\d+")
_PER_RANK = "optimizer_*_rank*.bin"  # Accelerate's name for LOCAL_STATE_DICT


def is_dcp(path: Path) -> bool:
    """Return whether a folder is a distributed checkpoint, or holds one or several in its folders; or a file is a shard of one."""
    if path.is_file():
        return path.name == ".metadata" or path.suffix == ".distcp"
    return path.is_dir() and (bool(_folders(path)) or any(path.glob("*.distcp")) or any(path.glob(_PER_RANK)))


def read_dcp(path: Path, options: Options) -> Found:
    """Read the optimizer states in a distributed checkpoint, and its weights as evidence for names.

    Raises:
        FileError: It is incomplete, damaged, written in a way that is not read, or holds no optimizer state.
    """
    if path.is_file():
        raise FileError(f"{path} is one file of a distributed checkpoint; give the folder that it is in.")
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
    found: list[tuple[Source, bool]] = []
    for folder in folders:
        checkpoint = Checkpoint(folder)
        optimizers += _optimizers(checkpoint, folder.name if len(folders) > 1 else "")
        found += [(model, checkpoint.in_order) for model in _models(checkpoint)]
    if not optimizers:
        raise FileError(
            f"{path} is a distributed checkpoint without an optimizer state: it holds weights only. Give the one that was "
            "saved with the optimizer (under FSDP often a folder of its own, optimizer_0)."
        )
    recorded = {entry.name for optimizer in optimizers for entry in optimizer.entries}
    models: list[Source] = []
    tied: dict[str, str] = {}
    for (label, candidates), in_order in found:
        names = {name for c in candidates for name in (c.name, c.live_name)}
        # What is no model of these parameters (a scheduler, say) explains nothing, and a shuffled one names nothing.
        if recorded & names or (None in recorded and in_order):
            tied |= _tied(candidates, recorded)
            models.append((label, [c for c in candidates if c.name not in tied]))
    facts, assume_mean = RunFacts(), True
    if (path / "training_args.bin").is_file():  # FSDP under the Hugging Face Trainer
        steps = (step_of(e.state, e.group) for optimizer in optimizers for e in optimizer.entries if e.state)
        facts, assume_mean = facts_of(path, training_args(path), next(steps, None))
    return Found(optimizers, models, replace(facts, tied=tied), assume_mean=assume_mean)


def _folders(path: Path) -> list[Path]:
    """Return the distributed checkpoints at a path: itself, or its folders."""
    if (path / ".metadata").is_file():
        return [path]
    if not path.is_dir():
        return []
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
    out = []
    for prefix, saved in _saved(checkpoint).items():
        place = ".".join([label] * bool(label) + [str(key) for key in prefix])
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
    """Return the optimizer an entry belongs to, `state` or `param_groups`, whose it is (parameter or group), and its name."""
    for k, key in enumerate(path):
        rest = path[k + 1 :]
        if key == "param_groups" and len(rest) <= 1:  # one pickle for all groups, or for one
            return path[:k], key, rest[0] if rest else None, None
        if key in ("state", "param_groups") and len(rest) >= 2:
            return path[:k], key, rest[0], ".".join(map(str, rest[1:]))
        if isinstance(key, str) and not rest:  # flattened: one key, `state.<name of the parameter>.exp_avg_sq`
            kind, _, after = key.partition(".")
            owner, _, name = after.rpartition(".")
            if kind in ("state", "param_groups") and owner:
                return path[:k], kind, owner, name
    return None


def _entries(checkpoint: Checkpoint, saved: _Saved, place: str) -> list[Entry]:
    entries: list[Entry] = []
    listed: set[str] = set()
    for number, (members, names, group) in enumerate(_groups(checkpoint, saved)):
        for member, name in zip(members, names, strict=True):
            key = str(member)  # the planner writes numbers as text
            if key in listed:
                raise FileError(f"{checkpoint.folder} is damaged: its groups list {member!r} twice.")
            listed.add(key)
            state = {what: checkpoint.value(entry) for what, entry in saved.state.get(key, {}).items()}
            entries.append(Entry(state, group, number, recorded_name(name) if isinstance(name, str) else None))
    strangers = [member for member in saved.state if member not in listed]
    if strangers:
        raise FileError(
            f"{checkpoint.folder} has a state for {strangers[0]!r}, but no group of {place or 'the optimizer'} lists it: the "
            "checkpoint is incomplete, or files of several were mixed."
        )
    return entries


def _groups(checkpoint: Checkpoint, saved: _Saved) -> list[tuple[Sequence[Any], Sequence[Any], Mapping[str, Any]]]:
    """Return the parameters of each group, their names (or what stands in their place), and its hyperparameters."""
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
    """Return the place of a group among the groups; groups of single parameters keep their order."""
    return int(owner) if isinstance(owner, int) or (isinstance(owner, str) and owner.isdecimal()) else -1


def _tied(candidates: Sequence[Candidate], trained: set[str | None]) -> dict[str, str]:
    """Return the matrices that the optimizer does not have and that equal, bit by bit, one that it has: `{alias: name}`."""
    weights = LazyTensors({c.name: c.weight for c in candidates if c.weight is not None})
    out = {}
    for alias in candidates:
        if alias.name in trained or len(alias.shape) < 2:
            continue
        for other in candidates:
            if other.name in trained and equal(weights, alias.name, other.name):
                out[alias.name] = other.name
                break
    return out


def _models(checkpoint: Checkpoint) -> list[Source]:
    """Return the weights, without what is surely a buffer."""
    optimizers = set(_saved(checkpoint))
    found: dict[tuple[Any, ...], dict[str, str]] = {}
    names_of = {str(path[-1]) for path in checkpoint.paths.values()}
    for key, path in checkpoint.paths.items():
        place = _optimizer_place(path)
        name = str(path[-1])
        if (place and place[0] in optimizers) or not checkpoint.is_tensor(key) or ".optimizer." in f".{key}":
            continue
        if checkpoint.dtype(key).is_floating_point and not is_buffer(name, names_of):
            found.setdefault(path[:-1], {})[name] = key
    models: list[Source] = []
    for prefix, keys in found.items():
        names = distinct_names([recorded_name(name) for name in keys], list(keys))
        label = f"the weights under {'.'.join(map(str, prefix))!r}" if prefix else "the weights"
        tensors = [checkpoint.tensor(key) for key in keys.values()]
        lists = zip(names, keys, tensors, strict=True)
        models.append((label, [Candidate(name, one.shape, live_name=live, weight=one) for name, live, one in lists]))
    return models


_COMMON = "Save it with torch.distributed.checkpoint's FileSystemWriter as it is by default."


class Checkpoint:
    """What `.metadata` says: the entries in the order in which they were saved, and where their bytes are.

    Attributes:
        folder: Where it is.
        paths: The path of each entry in the saved dictionary, by key.
        in_order: Whether they are in the order in which they were saved: the planner's order is, the order of the entries is not.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        record = unpickle(ByteRange.of(folder / ".metadata").read(), name=str(folder / ".metadata"))
        entries = _attribute(record, "state_dict_metadata", dict).items()
        self._entries = {k: v for k, v in entries if isinstance(k, str) and isinstance(v, Record)}
        self._places: dict[tuple[str, tuple[int, ...] | None], Record] = {}
        for index, info in _attribute(record, "storage_data", dict).items():
            if isinstance(index, Record) and isinstance(info, Record):
                name, offset = index.get("fqn"), index.get("offset")
                if isinstance(name, str) and (offset is None or _is_tuple_of(offset, int)):
                    self._places[name, offset] = info
        self._files: dict[str, ByteRange] = {}
        planned = record.get("planner_data")
        known = planned.items() if isinstance(planned, dict) else ()
        self.paths = {k: v for k, v in known if k in self._entries and _is_tuple_of(v, (int, str))}
        self.in_order = len(self.paths) == len(self._entries)
        for key in self._entries:
            self.paths.setdefault(key, _path_of(key, self._entries))

    def is_tensor(self, key: str) -> bool:
        """Return whether an entry is a tensor; the others are pickled objects."""
        return self._entries[key].name.endswith("TensorStorageMetadata")

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._sizes(self._entries[key].get("size"), key)

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        properties = self._entries[key].get("properties")
        state = properties.state if isinstance(properties, Record) else None
        said = (state[0] if isinstance(state, tuple) and state else None) or inside(properties, "dtype")
        if not isinstance(said, torch.dtype):
            raise self._damaged(f"{key!r} has no dtype")
        return said

    def tensor(self, key: str) -> Blocks:
        """Return a tensor, read when asked for; its blocks are checked to be there and to cover it."""
        shape, dtype = self.shape(key), self.dtype(key)
        blocks: dict[tuple[int, ...], Block] = {}
        for chunk in self._entries[key].get("chunks") or ():
            offsets, sizes = (self._sizes(inside(chunk, name), key) for name in ("offsets", "sizes"))
            if not len(offsets) == len(sizes) == len(shape):
                raise self._damaged(f"{key!r} has {len(shape)} dimensions, one of its blocks {len(sizes)}")
            if 0 not in sizes:  # a rank that got nothing
                blocks[offsets] = Block(shape, offsets, sizes, Unopened(self._span(key, offsets), sizes, dtype))
        tensor = Blocks(shape, dtype, list(blocks.values()))
        if tensor.gap:
            raise self._damaged(f"{key!r} cannot be put together: {tensor.gap}")
        return tensor

    def value(self, key: str) -> Any:
        """Return an entry of any kind: a lazy tensor, or the object itself."""
        return self.tensor(key) if self.is_tensor(key) else read(self._span(key, None))

    def _span(self, key: str, offset: tuple[int, ...] | None) -> ByteRange:
        info = self._places.get((key, offset))
        if info is None:
            raise self._damaged(f"nothing says where the block of {key!r} at {offset} is")
        if info.get("transform_descriptors"):
            names = ", ".join(map(str, info.get("transform_descriptors")))
            raise FileError(f"The shards in {self.folder} are compressed ({names}), which is not read. {_COMMON}")
        name, start, length = info.get("relative_path"), info.get("offset"), info.get("length")
        if not isinstance(name, str) or not isinstance(start, int) or not isinstance(length, int):
            raise self._damaged(f"the place of {key!r} is no file and range")
        if name.endswith(".safetensors"):
            raise FileError(f"The safetensors files in {self.folder} are not read as shards. {_COMMON}")
        if name not in self._files:
            inside = PurePosixPath(name)
            if inside.is_absolute() or ".." in inside.parts or "\\" in name:
                raise FileError(f"{self.folder}/.metadata points to a file outside of its folder: {name!r}.")
            if not (self.folder / inside).is_file():
                raise FileError(
                    f"The distributed checkpoint {self.folder} lacks the file {name}, which holds a block of {key!r}. Every "
                    "rank writes its own: copy all of them into the folder."
                )
            self._files[name] = ByteRange.of(self.folder / inside)
        return self._files[name].part(start, length, key)

    def _sizes(self, value: Any, key: str) -> tuple[int, ...]:
        if not _is_tuple_of(value, int) or min(value, default=0) < 0:
            raise self._damaged(f"{key!r} has no sizes")
        return value

    def _damaged(self, what: str) -> FileError:
        return FileError(f"The distributed checkpoint {self.folder} is incomplete or damaged: {what}. Get it again.")


def _is_tuple_of(value: Any, kinds: type | tuple[type, ...]) -> bool:
    return isinstance(value, tuple) and all(isinstance(one, kinds) for one in value)


def _attribute(record: Any, name: str, kind: type) -> Any:
    value = inside(record, name)
    if not isinstance(value, kind):
        raise FileError(f"A .metadata file is damaged, or not torch's: it has no {name}. Get it again.")
    return value


def _path_of(key: str, keys: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a path for an entry without one: its key, behind the prefix of an optimizer that has groups."""
    for prefix in ("", "optimizer.", "optim.", "app.optim.", "app.optimizer."):
        belongs = key.startswith((f"{prefix}state.", f"{prefix}param_groups"))
        if belongs and any(other.startswith(f"{prefix}param_groups") for other in keys):
            return (*prefix.split(".")[:-1], key[len(prefix) :])
    return tuple(key.split(".", 1))
