"""Megatron's distributed checkpoints. Experimental: written from its public source; no real file has been read yet.

The folder is one of `torch.distributed.checkpoint` with a `common.pt` beside it. The kind of state stands before the
parameter's name in a key, and the groups are in `common.pt`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import FileError
from ...importance.facts import Pollution, RunFacts, Spoiler
from ...storage.torch_files import read
from ..states import Entry, Found, OptimizerState, Options
from .dcp import Checkpoint

__all__ = ["is_megatron", "read_megatron"]

_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<key>exp_avg|exp_avg_sq)\.(?P<name>.+)")
_BUCKETS = re.compile(r"optimizer\.distributed\.dp_group_idx_\d+\.gbuf_idx_\d+")
_KEPT = ("betas", "step", "eps", "weight_decay")
_EXPERIMENTAL = Pollution(
    Spoiler.UNCERTAIN,
    note="The reader of Megatron checkpoints is experimental: compare the names and values with a checkpoint you know.",
)


def is_megatron(path: Path) -> bool:
    """Return whether a folder is a Megatron checkpoint, or names the latest of several."""
    folder = _latest(path)
    return (folder / ".metadata").is_file() and (folder / "common.pt").is_file()


def read_megatron(path: Path, options: Options) -> Found:
    """Read the optimizer state of a Megatron checkpoint.

    Raises:
        FileError: It was saved as flat buckets, holds no optimizer state, or its groups differ, and nothing says which
            parameter is in which.
    """
    checkpoint = Checkpoint(_latest(path))
    if any(_BUCKETS.search(key) for key in checkpoint.paths):
        raise FileError(
            f"{checkpoint.folder} is a Megatron checkpoint whose distributed optimizer was saved by buckets, which have no "
            "parameter names. Save it with --dist-ckpt-optim-fully-reshardable (sharding type fully_reshardable)."
        )
    state: dict[str, dict[str, Any]] = {}
    for key in checkpoint.paths:
        match = _STATE.fullmatch(key)
        if match and checkpoint.is_tensor(key):
            if match["key"] in state.setdefault(match["name"], {}):
                raise FileError(f"{checkpoint.folder} holds a state of {match['name']!r} in two chained optimizers.")
            state[match["name"]][match["key"]] = checkpoint.tensor(key)
    if not state:
        raise FileError(
            f"{checkpoint.folder} is a Megatron checkpoint without an optimizer state under its parameters' names. Save it "
            "without --no-save-optim, in the format torch_dist."
        )
    groups = list(_groups_in(read(checkpoint.folder / "common.pt")))
    distinct = {repr([group.get(name) for name in _KEPT[:2]]): group for group in groups}
    if len(distinct) != 1:
        raise FileError(
            f"{checkpoint.folder}/common.pt holds {len(distinct)} different settings of the optimizer's betas and step, so "
            "nobody can tell which belongs to which parameter."
        )
    group = {name: value for name, value in next(iter(distinct.values())).items() if name in _KEPT}
    entries = [Entry(moments, group, name=name) for name, moments in state.items()]
    return Found([OptimizerState(entries, place="optimizer")], facts=RunFacts(pollution=(_EXPERIMENTAL,)))


def _latest(path: Path) -> Path:
    """Return the folder of the iteration that Megatron's text file names; the path itself where there is no such file."""
    file = path / "latest_checkpointed_iteration.txt"
    if not file.is_file() or file.stat().st_size >= 32:
        return path
    text = file.read_bytes().decode("ascii", "replace").strip()
    return path / f"iter_{int(text):07d}" if text.isdecimal() else path


def _groups_in(tree: Any, depth: int = 6) -> Iterator[dict[str, Any]]:
    if isinstance(tree, dict):
        if "betas" in tree:
            yield tree
        elif depth:
            for value in tree.values():
                yield from _groups_in(value, depth - 1)
    elif isinstance(tree, list) and depth:
        for value in tree[:1000]:
            yield from _groups_in(value, depth - 1)
