"""nanotron checkpoints (SmolLM2): a torch file of each rank in `optimizer/`, with the parameters' names in it.

Without ZeRO every parameter is whole in one file. With ZeRO-1 each data-parallel rank holds a shard of its flat elements;
`optimizer_config.json` says from where to where, and the shape of the whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import FileError
from ...storage.json_files import read_object
from ...storage.tensors import Joined, Slice
from ...storage.torch_files import StoredTensor, Verified, is_optimizer, read
from ..optimizers import step_of
from ..states import Entry, Found, OptimizerState, Options
from .torch_file import optimizer_state

__all__ = ["is_nanotron", "read_nanotron"]

_FILE = re.compile(
    r"optimizer_pp-(?P<pp>\d+)-of-(?P<pps>\d+)(?:_dp-(?P<dp>\d+)-of-(?P<dps>\d+))?_tp-(?P<tp>\d+)-of-(?P<tps>\d+)"
    r"(?:_exp-(?P<exp>\d+)-of-(?P<exps>\d+))?\.pt"
)
_CONFIG = "optimizer_config.json"


def is_nanotron(path: Path) -> bool:
    """Whether a folder is a nanotron checkpoint, or the folder of its optimizer."""
    return path.is_dir() and ((path / _CONFIG).is_file() or (path / "optimizer" / _CONFIG).is_file())


def read_nanotron(path: Path, options: Options) -> Found:
    """Read the optimizer state of a nanotron checkpoint, joined from the files of all ranks.

    Raises:
        FileError: Files are missing or do not belong together, or parameters were cut by tensor or expert parallelism.
    """
    folder = path if (path / _CONFIG).is_file() else path / "optimizer"
    ranks = _ranks(folder)
    sharding = _Sharding.of(folder) if any(rank is not None for _, rank in ranks) else None
    shards: dict[str, dict[int | None, Entry]] = {}
    for (stage, rank), entries in ranks.items():
        for entry in entries:
            if entry.name is None:
                raise FileError(
                    f"{folder} holds a state of stage {stage} without names: it is damaged, or not nanotron's."
                )
            if rank in shards.setdefault(entry.name, {}):
                raise FileError(
                    f"{folder} holds {entry.name!r} in two pipeline stages (a tied parameter), and nothing says which counts."
                )
            shards[entry.name][rank] = entry
    entries = [_whole(folder, name, by_rank, sharding) for name, by_rank in shards.items()]
    if options.model is not None and not options.named:
        entries = _with_rotary_halves(folder.parent / "model_config.json", entries)
    return Found([OptimizerState(entries, None, folder.name)])


def _ranks(folder: Path) -> dict[tuple[int, int | None], list[Entry]]:
    """Return the entries of every pipeline stage and data-parallel rank (None without ZeRO)."""
    found: dict[tuple[int, int | None], list[Entry]] = {}
    sizes: set[tuple[int, int]] = set()
    for file in sorted(folder.iterdir()):
        match = _FILE.fullmatch(file.name)
        if match is None:
            continue
        if int(match["tps"]) > 1 or int(match["exps"] or 1) > 1:
            raise FileError(
                f"{file} is the shard of one of {match['tps']} tensor-parallel and {match['exps'] or 1} expert-parallel ranks, which "
                "cut parameters; only pipeline stages and data-parallel ZeRO-1 are put together. Load and save it with one rank of each."
            )
        sizes.add((int(match["pps"]), int(match["dps"] or 1)))
        tree = read(file)
        if not is_optimizer(tree):
            raise FileError(
                f"{file} holds no optimizer state: it is damaged, or not what nanotron writes. Get it again."
            )
        rank = None if match["dp"] is None else int(match["dp"])
        found[int(match["pp"]), rank] = list(optimizer_state(tree, file.name).entries)
    if len(sizes) != 1:
        raise FileError(f"{folder} holds {'no optimizer files' if not sizes else 'files of runs of different sizes'}.")
    stages, world = sizes.pop()
    for stage in range(stages):
        there = {rank for s, rank in found if s == stage}
        missing = [] if there == {None} else [rank for rank in range(world) if rank not in there]
        if missing or not there:
            raise FileError(
                f"{folder} lacks the optimizer states of {len(missing) or 'all'} of {world} data-parallel ranks in stage {stage} of "
                f"{stages}. Get all of its files."
            )
    return found


class _Sharding(NamedTuple):
    """What `optimizer_config.json` says of ZeRO-1: where the shard of each rank begins and ends in a parameter, and shapes."""

    offsets: Mapping[str, Mapping[int, tuple[int, int]]]
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, folder: Path) -> _Sharding:
        try:
            configs = read_object(folder / _CONFIG)["configs"]
            offsets = {
                name: {int(rank): (int(a), int(b)) for rank, (a, b) in ranges.items()}
                for name, ranges in configs["param_name_to_dp_rank_offsets"].items()
            }
            shapes = {name: tuple(int(n) for n in shape) for name, shape in configs["orig_param_shapes"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FileError(
                f"{folder / _CONFIG} does not say how ZeRO-1 cut the parameters (param_name_to_dp_rank_offsets and "
                "orig_param_shapes): it is damaged, or of an older version of nanotron."
            ) from error
        return cls(offsets, shapes)


def _whole(folder: Path, name: str, shards: Mapping[int | None, Entry], sharding: _Sharding | None) -> Entry:
    """Return the entry of one parameter, joined from the shards of all ranks."""
    if sharding is None:
        return shards[None]
    offsets, shape = sharding.offsets.get(name), sharding.shapes.get(name)
    first = next(iter(shards.values()))
    if offsets is None or shape is None:
        raise FileError(
            f"{folder / _CONFIG} lists nothing for {name!r}, so nobody can tell which elements a rank holds."
        )
    if set(offsets) != set(shards) or len({step_of(entry.state, entry.group) for entry in shards.values()}) > 1:
        raise FileError(
            f"The files in {folder} do not belong together: {name!r} is held by the ranks {sorted(map(str, shards))} and should be by "
            f"{sorted(offsets)}, all at one step."
        )
    ordered = sorted(offsets.items(), key=lambda item: item[1])
    places = [place for _, run in ordered for place in run]
    if places[0] or places[-1] != math.prod(shape) or places[1:-1:2] != places[2::2]:
        raise FileError(f"{folder / _CONFIG} does not cut {name!r} of shape {shape} into runs that follow one another.")
    state: dict[str, Any] = dict(first.state)
    for key, value in first.state.items():
        if not isinstance(value, StoredTensor) or value.shape == ():
            continue
        runs = []
        for rank, (start, end) in ordered:
            shard = shards[rank].state.get(key)
            if not isinstance(shard, StoredTensor) or shard.dtype != value.dtype or shard.shape != (end - start,):
                raise FileError(
                    f"Rank {rank} in {folder} does not hold the {end - start} elements of {name!r} that it should."
                )
            runs.append(Slice(Verified(shard), 0, end - start))
        state[key] = Joined(shape, value.dtype, runs)
    return Entry(state, first.group, first.group_number, name)


def _with_rotary_halves(file: Path, entries: list[Entry]) -> list[Entry]:
    """Return the states with the rows of queries and keys in the order of Hugging Face's weights.

    Rotary embeddings turn pairs of channels. Where nanotron was told `rope_interleaved` (once the only way, now recorded), a pair are
    neighbours; in the published weights they are half a head apart.

    Raises:
        FileError: The file that says so is missing or damaged.
    """
    fused = [".attn.qkv_proj." in (entry.name or "") for entry in entries]
    if not any(fused):
        return entries
    try:
        config = read_object(file)
        heads = int(config["num_attention_heads"])
        half = int(config["hidden_size"]) // heads // 2
        rotated = heads + int(config.get("num_key_value_heads") or heads)
    except (FileError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise FileError(
            f"{file} does not say how nanotron pairs the channels of a head (rope_interleaved, num_attention_heads, hidden_size), so "
            "queries and keys cannot be put into the order of Hugging Face's weights. Get it, or leave --model out."
        ) from error
    if not config.get("rope_interleaved", True):
        return entries
    order = [2 * half * head + 2 * i + j for head in range(rotated) for j in range(2) for i in range(half)]
    return [
        replace(entry, state={key: _rows(value, order) for key, value in entry.state.items()}) if is_fused else entry
        for entry, is_fused in zip(entries, fused, strict=True)
    ]


def _rows(value: Any, order: Sequence[int]) -> Any:
    """Return a tensor with its first rows in another order, and the rest as they are."""
    shape = getattr(value, "shape", ())
    if not shape or len(order) > shape[0]:
        return value
    source, width = (Verified(value) if isinstance(value, StoredTensor) else value), math.prod(shape[1:])
    rows = [Slice(source, row * width, (row + 1) * width) for row in order]
    return Joined(shape, value.dtype, [*rows, Slice(source, len(order) * width, math.prod(shape))])
