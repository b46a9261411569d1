"""What is Megatron's own in a distributed checkpoint: its keys, and the groups in a file beside it.

Written from its public source; no file of it has been at hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ...errors import FileError
from ...storage.torch_files import read
from ..states import Entry, OptimizerState
from .dcp_metadata import Checkpoint

__all__ = ["megatron_optimizer", "refuse_buckets"]

_MODEL_SPACE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<key>exp_avg|exp_avg_sq)\.(?P<name>.+)")
_BUCKETS = re.compile(r"optimizer\.distributed\.dp_group_idx_\d+\.gbuf_idx_\d+")


def refuse_buckets(checkpoint: Checkpoint) -> None:
    """Refuses a distributed optimizer that was saved as flat buckets.

    Raises:
        FileError: It was.
    """
    if any(_BUCKETS.search(key) for key in checkpoint.paths):
        raise FileError(
            f"{checkpoint.folder} is a Megatron checkpoint whose distributed optimizer was saved by buckets, which have no "
            "parameter names. Save it with --dist-ckpt-optim-fully-reshardable (sharding type fully_reshardable)."
        )


def megatron_optimizer(checkpoint: Checkpoint) -> OptimizerState | None:
    """The optimizer of a Megatron checkpoint, or None if it is none: the kind of state stands before the parameter's name.

    Raises:
        FileError: The groups differ, and nothing says which parameter is in which.
    """
    if not (checkpoint.folder / "common.pt").is_file():
        return None
    state: dict[str, dict[str, Any]] = {}
    for key in checkpoint.paths:
        match = _MODEL_SPACE.fullmatch(key)
        if match and checkpoint.is_tensor(key):
            state.setdefault(match["name"], {})[match["key"]] = checkpoint.tensor(key)
    if not state:
        return None
    groups = list(_groups_in(read(checkpoint.folder / "common.pt")))
    kept = ("betas", "step", "eps", "weight_decay")
    distinct = {repr([group.get(name) for name in kept[:2]]): group for group in groups}
    if len(distinct) != 1:
        raise FileError(
            f"{checkpoint.folder}/common.pt holds {len(distinct)} different settings of the optimizer's betas and step, so "
            "nobody can tell which belongs to which parameter."
        )
    group = {name: value for name, value in next(iter(distinct.values())).items() if name in kept}
    return OptimizerState([Entry(own, group, name=name) for name, own in state.items()], place="optimizer")


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
