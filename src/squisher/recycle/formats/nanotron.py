"""nanotron checkpoints (SmolLM2): a torch file of each rank in `optimizer/`, with the parameters' names in it.

With ZeRO-1 each data-parallel rank holds a shard of a parameter's flat elements; `optimizer_config.json` says from where to where, and
its shape, for the first stage of a pipeline. Tensor parallelism cuts the parameter before; which slices a rank has is in the header
of its weights' file, in `model/`, as is the shape of what the later stages hold.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, product
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import FileError
from ...importance.facts import RunFacts
from ...storage.json_files import read_object
from ...storage.safetensors import read_header
from ...storage.tensors import Joined, Slice
from ...storage.torch_files import StoredTensor, Verified, is_optimizer, read
from ..optimizers import step_of
from ..states import Entry, Found, OptimizerState, Options
from .tensor_parallel import Copies, Part, put_together
from .torch_file import optimizer_state

__all__ = ["is_nanotron", "read_nanotron"]

_FILE = re.compile(
    r"optimizer_pp-(?P<pp>\d+)-of-(?P<pps>\d+)(?:_dp-(?P<dp>\d+)-of-(?P<dps>\d+))?_tp-(?P<tp>\d+)-of-(?P<tps>\d+)"
    r"(?:_exp-(?P<exp>\d+)-of-(?P<exps>\d+))?\.pt"
)
_CONFIG = "optimizer_config.json"


def is_nanotron(path: Path) -> bool:
    """Return whether a folder is a nanotron checkpoint, or the folder of its optimizer."""
    return path.is_dir() and ((path / _CONFIG).is_file() or (path / "optimizer" / _CONFIG).is_file())


def read_nanotron(path: Path, options: Options) -> Found:
    """Read the optimizer state of a nanotron checkpoint, joined from the files of all ranks.

    Raises:
        FileError: Files are missing or do not belong together, or parameters were cut by expert parallelism.
    """
    folder = path if (path / _CONFIG).is_file() else path / "optimizer"
    ranks, cut = _ranks(folder)
    weights = _Weights(folder.parent / "model")
    sharding = _Sharding.of(folder) if any(rank is not None for _, _, rank in ranks) else None
    copies = Copies(folder)
    held: dict[tuple[int, str], dict[int, dict[int | None, Entry]]] = {}
    for (stage, tensor, rank), entries in ranks.items():
        for entry in entries:
            if entry.name is None:
                raise FileError(f"{folder} holds a state without names: it is damaged, or not nanotron's.")
            held.setdefault((stage, entry.name), {}).setdefault(tensor, {})[rank] = entry
    known: dict[str, list[Entry]] = {}
    for (_, name), by_tensor in held.items():
        shards = {tensor: _whole(folder, name, one, sharding, weights, tensor) for tensor, one in by_tensor.items()}
        whole = _uncut(folder, name, shards, weights, copies) if cut > 1 else next(iter(shards.values()))
        known.setdefault(name, []).append(whole)
    # Tied embeddings are in the first and in the last stage, under one name.
    entries = [copies.one(name, states) for name, states in known.items()]
    if options.model is not None and not options.named:
        entries = _with_rotary_halves(folder.parent / "model_config.json", entries)
    return Found([OptimizerState(entries, None, folder.name)], facts=RunFacts(pollution=copies.notes))


def _ranks(folder: Path) -> tuple[dict[tuple[int, int, int | None], list[Entry]], int]:
    """Return the entries of every pipeline stage, tensor-parallel and data-parallel rank (None without ZeRO).

    The number of tensor-parallel ranks comes with them.
    """
    found: dict[tuple[int, int, int | None], list[Entry]] = {}
    sizes: set[tuple[int, int, int | None]] = set()
    for file in sorted(folder.iterdir()):
        match = _FILE.fullmatch(file.name)
        if match is None:
            continue
        if int(match["exps"] or 1) > 1:
            raise FileError(
                f"{file} is the shard of one of {match['exps']} expert-parallel ranks, which are not put together. Load and save it with one."
            )
        sizes.add((int(match["pps"]), int(match["tps"]), int(match["dps"]) if match["dps"] else None))
        tree = read(file)
        if not is_optimizer(tree):
            raise FileError(f"{file} holds no optimizer state: it is damaged, or not nanotron's. Get it again.")
        rank = None if match["dp"] is None else int(match["dp"])
        found[int(match["pp"]), int(match["tp"]), rank] = list(optimizer_state(tree, file.name).entries)
    if len(sizes) != 1:
        raise FileError(f"{folder} holds {'no optimizer files' if not sizes else 'files of runs of different sizes'}.")
    stages, cut, world = sizes.pop()
    needed = list(product(range(stages), range(cut), [None] if world is None else range(world)))
    missing = [place for place in needed if place not in found]
    if missing:
        stage, tensor, rank = missing[0]
        raise FileError(
            f"{folder} lacks the optimizer states of {len(missing)} of {len(needed)} ranks; the first is that of pipeline stage {stage}, "
            f"tensor-parallel rank {tensor}{'' if rank is None else f', data-parallel rank {rank}'}. Get all of its files."
        )
    return found, cut


class _Sharding(NamedTuple):
    """What `optimizer_config.json` says of ZeRO-1: where the shard of each rank begins and ends in a parameter, and shapes.

    The first process writes it, so it knows the parameters of the first stage alone, and the shapes that tensor parallelism left.
    """

    offsets: Mapping[str, Mapping[int, tuple[int, int]]]
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, folder: Path) -> _Sharding:
        try:
            configs = read_object(folder / _CONFIG)["configs"]
            said = configs["param_name_to_dp_rank_offsets"].items()
            offsets = {n: {int(rank): (int(a), int(b)) for rank, (a, b) in runs.items()} for n, runs in said}
            shapes = {name: tuple(int(n) for n in shape) for name, shape in configs["orig_param_shapes"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FileError(
                f"{folder / _CONFIG} does not say how ZeRO-1 cut the parameters (param_name_to_dp_rank_offsets and "
                "orig_param_shapes): it is damaged, or of an older version of nanotron."
            ) from error
        return cls(offsets, shapes)


class _Weights:
    """The weights' files in `model/`, of which only the headers are read: shapes, and what each tensor-parallel rank has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def header(self, name: str, tensor: int) -> tuple[tuple[int, ...], Mapping[str, str]]:
        """Return the shape of what a tensor-parallel rank holds of a parameter, and what is said of it; nothing if it is not cut.

        Raises:
            FileError: Its file is missing or damaged.
        """
        *modules, last = name.split(".")
        inside = self.folder.joinpath(*modules)
        own = re.compile(rf"model_{re.escape(last)}(?:_pp-rank-\d+-of-\d+_tp-rank-{tensor}-of-\d+)?\.safetensors")
        files = [f for f in sorted(inside.iterdir()) if own.fullmatch(f.name)] if inside.is_dir() else []
        if not files or any(part in ("", "..") or "/" in part for part in modules):
            raise FileError(
                f"{self.folder} lacks the weights {name!r} of the tensor-parallel rank {tensor}, whose file says how the parameter was cut: "
                "get the folder model/ of the checkpoint beside optimizer/, and give the folder that holds both."
            )
        tensors, metadata = read_header(files[0])
        if list(tensors) != ["data"]:
            raise FileError(f"{files[0]} was expected to hold one tensor, as nanotron writes it. Get it again.")
        return tensors["data"].shape, metadata

    def places(self, name: str, tensor: int) -> tuple[tuple[int, ...], list[Part]] | None:
        """Return the shape of a whole parameter and the parts of it that a rank has; None if it is not cut."""
        local, metadata = self.header(name, tensor)
        if not metadata:
            return None
        try:
            # numpy writes the number 16 as `np.int64(16)`
            shape = tuple(map(int, re.findall(r"\d+(?=[,)])", metadata["unsharded_shape"])))
            pairs = [pair.split("#") for pair in metadata["local_global_slices_pairs"].split(";")]
            return shape, [_part(local, shape, here, there) for here, there in pairs]
        except (KeyError, ValueError) as error:
            raise FileError(
                f"{self.folder} says of {name!r} that the rank {tensor} has {metadata} of it, which is not understood, or is no run of rows or columns."
            ) from error


def _part(local: tuple[int, ...], shape: tuple[int, ...], here: str, there: str) -> Part:
    """Return the part that two texts of slices mean: in a shard, and in the whole."""
    ranges = []
    for text, sizes in ((here, local), (there, shape)):
        slices = [[None if n == "None" else int(n) for n in one.split(",")] for one in text.split("|")]
        ranges.append([range(n)[slice(*one)] for one, n in zip(slices, sizes, strict=True)])
    mine, whole = ranges
    if any(r.step != 1 for r in (*mine, *whole)) or [len(r) for r in mine] != [len(r) for r in whole]:
        raise ValueError("slices of different sizes")
    if any(len(r) != n for r, n in zip(mine[1:], local[1:], strict=True)):
        raise ValueError("columns of a shard")
    return Part(tuple(r.start for r in whole), tuple(len(r) for r in mine), mine[0].start)


def _uncut(folder: Path, name: str, shards: Mapping[int, Entry], weights: _Weights, copies: Copies) -> Entry:
    """Return the entry of one parameter from those of the tensor-parallel ranks that have it."""
    places = {tensor: weights.places(name, tensor) for tensor in shards}
    cut = {tensor: place for tensor, place in places.items() if place is not None}
    if not cut:  # a bias of a row-parallel layer is on the first rank alone
        return copies.one(name, shards.values())
    shapes = {shape for shape, _ in cut.values()}
    if len(shapes) > 1 or len(cut) < len(shards):
        raise FileError(f"The weights in {weights.folder} do not agree about the shape of {name!r}: {sorted(shapes)}.")
    return put_together(folder, name, shapes.pop(), [(shards[tensor], parts) for tensor, (_, parts) in cut.items()])


def _whole(
    folder: Path, name: str, shards: dict[int | None, Entry], sharding: _Sharding | None, weights: _Weights, tensor: int
) -> Entry:
    """Return what one tensor-parallel rank has of a parameter, joined from the shards of all data-parallel ranks."""
    if sharding is None:
        return shards[None]
    first = next(iter(shards.values()))
    shape = sharding.shapes[name] if name in sharding.shapes else weights.header(name, tensor)[0]
    offsets = sharding.offsets.get(name) or _dealt_out(shards, math.prod(shape))
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
                raise FileError(f"Rank {rank} in {folder} does not hold its {end - start} elements of {name!r}.")
            runs.append(Slice(Verified(shard), 0, end - start))
        state[key] = Joined(shape, value.dtype, runs)
    return Entry(state, first.group, first.group_number, name)


def _dealt_out(ranks: Collection[int | None], numel: int) -> dict[int, tuple[int, int]]:
    """Return the runs into which ZeRO-1 cuts a parameter: as even as can be, the first ranks hold one element more."""
    world = len(ranks)
    ends = list(accumulate(numel // world + (rank < numel % world) for rank in range(world)))
    return {rank: (start, end) for rank, (start, end) in enumerate(zip([0, *ends], ends, strict=False))}


def _with_rotary_halves(file: Path, entries: list[Entry]) -> list[Entry]:
    """Return the states with the rows of queries and keys in the order of Hugging Face's weights.

    Rotary embeddings turn pairs of channels. Where nanotron was told `rope_interleaved` (once the only way, now recorded), a pair are
    neighbours; in the published weights they are half a head apart.

    Raises:
        FileError: The file that says so is missing or damaged.
    """
    fused = {entry.name: entry for entry in entries if ".attn.qkv_proj." in (entry.name or "")}
    if not fused:
        return entries
    try:
        config = read_object(file)
        heads = int(config["num_attention_heads"])
        half, keys = int(config["hidden_size"]) // heads // 2, int(config.get("num_key_value_heads") or heads)
    except (FileError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise FileError(
            f"{file} does not say how nanotron pairs the channels of a head (rope_interleaved, num_attention_heads, hidden_size), so "
            "queries and keys cannot be put into the order of Hugging Face's weights. Get it, or leave --model out."
        ) from error
    rows = 2 * half * (heads + 2 * keys)
    strange = next((name for name, entry in fused.items() if entry.shape and entry.shape[0] != rows), None)
    if strange is not None:
        raise FileError(f"{file} is of another model: by it {strange!r} would have {rows} rows.")
    if not config.get("rope_interleaved", True):
        return entries
    order = [2 * half * head + 2 * i + j for head in range(heads + keys) for j in range(2) for i in range(half)]
    states = [{k: _rows(v, order) if e.name in fused else v for k, v in e.state.items()} for e in entries]
    return [replace(entry, state=state) for entry, state in zip(entries, states, strict=True)]


def _rows(value: Any, order: Sequence[int]) -> Any:
    """Return a tensor with its first rows in another order, and the rest as they are."""
    shape = getattr(value, "shape", ())
    if not shape:
        return value
    source, width = (Verified(value) if isinstance(value, StoredTensor) else value), math.prod(shape[1:])
    rows = [Slice(source, row * width, (row + 1) * width) for row in order]
    return Joined(shape, value.dtype, [*rows, Slice(source, len(order) * width, math.prod(shape))])
