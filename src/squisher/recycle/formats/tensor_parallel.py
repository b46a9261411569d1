"""Parameters that tensor parallelism cut: the shards of all ranks put together, copies that several ranks hold compared.

A shard of a state is cut as its parameter is, because Adam's moments have a value per weight. Megatron's layers (GPT-NeoX,
Megatron-DeepSpeed) cut a parameter along a dimension that its name says, and no file; nanotron records the slices.

A parameter that is not cut has a copy on every rank, each with the gradient of the whole: norms, and the biases of layers that are
cut by columns (of which GPT-NeoX's parallel residual adds up one per rank, so that each has the gradient of the sum). Nothing
keeps the copies equal but equal arithmetic, so they drift apart by rounding; the first is taken.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import FileError, NoAccumulatorError
from ...importance.facts import Pollution, Spoiler
from ...storage.tensors import Block, Blocks, Joined, Slice, TensorSource
from ...storage.torch_files import StoredTensor, Verified
from ..optimizers import identify, is_tensor, step_of
from ..states import Entry

__all__ = ["Copies", "Part", "cut_by_name", "one_of_each_rank", "put_together", "whole_shape"]

# Of the mean of two copies; they part by rounding, while parts of a cut tensor have nothing in common.
_MOST_APART = 0.25
_COMPARED, _RUNS = 4096, 16  # elements of two copies, in runs from beginning to end
_CUT = {  # dimension along which Megatron's layers cut a parameter; None for copies
    r"(?:.*\.)?(?:word_embeddings\.weight|final_linear\.weight|(?:query_key_value|dense_h_to_4h|linear1)\.(?:weight|bias))": 0,
    r"(?:.*\.)?(?:(?:self_)?attention\.dense|dense_4h_to_h|linear2)\.weight": 1,
    r"(?:.*\.)?(?:(?:self_)?attention\.dense|dense_4h_to_h|linear2)\.bias": None,
    r"(?:.*\.)?(?:input_layernorm|post_attention_layernorm|norm|\d+)\.(?:weight|bias|scale)": None,  # Megatron-DeepSpeed's last norm has only the number of its layer
    r"(?:.*\.)?position_embeddings\.weight": None,
}


class Part(NamedTuple):
    """What a rank holds of a parameter: rows `start` to `start + sizes[0]` of its shard are the block at `offsets` of the whole."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int = 0


class Copies:
    """Compares the copies of parameters, and remembers how far they are apart."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.apart: dict[str, float] = {}

    def one(self, name: str, entries: Iterable[Entry]) -> Entry:
        """Return the first of several copies of a state.

        Raises:
            FileError: They are no copies of one another.
        """
        first, *others = entries
        for other in others:
            distance = _distance(first, other)
            if distance > _MOST_APART or math.isnan(distance):
                raise FileError(
                    f"{self.folder} holds {name!r} in several ranks with different states (shapes, steps, or values that are "
                    f"{100 * distance:.0f}% apart), though each should hold a copy: they do not belong together, or were cut in a way that the files do not say."
                )
            self.apart[name] = max(distance, self.apart.get(name, 0.0))
        return first

    @property
    def notes(self) -> tuple[Pollution, ...]:
        """What is to be said of copies that differ."""
        apart = {name: distance for name, distance in self.apart.items() if distance > 0}
        if not apart:
            return ()
        most = max(apart.values())
        note = f"Several ranks hold a copy of {len(apart)} parameters, up to {100 * most:.2g}% apart; those of the first are taken."
        return (Pollution(Spoiler.UNCERTAIN, {"apart": most}, note, tuple(sorted(apart))),)


def _distance(one: Entry, other: Entry) -> float:
    """Return how far two accumulators are apart, as a fraction of their mean, in runs of values; infinite if they are no copies."""
    try:
        keys = [identify(entry.state, entry.group).key for entry in (one, other)]
    except NoAccumulatorError:
        return 0.0  # neither is used
    if keys[0] != keys[1] or one.shape != other.shape or len({step_of(e.state, e.group) for e in (one, other)}) > 1:
        return math.inf
    between, total = 0.0, 0.0
    for key in keys[0]:
        first, second = (_source(entry.state[key]) for entry in (one, other))
        if first.shape != second.shape:
            return math.inf
        numel = math.prod(first.shape)
        run = min(numel, _COMPARED // _RUNS)
        for begin in sorted({(numel - run) * k // (_RUNS - 1) for k in range(_RUNS)}):
            a, b = (source.read_flat(begin, begin + run).double() for source in (first, second))
            between, total = between + float((a - b).abs().sum()), total + float((a.abs() + b.abs()).sum()) / 2
    return between / total if total else 0.0


def _source(value: Any) -> TensorSource:
    return Verified(value) if isinstance(value, StoredTensor) else value


def put_together(
    folder: Path, name: str, shape: Sequence[int], shards: Sequence[tuple[Entry, Sequence[Part]]]
) -> Entry:
    """Return the state of a whole parameter from the shards of all ranks.

    Args:
        folder: Where they are, for messages.
        name: Of the parameter.
        shape: Of the whole.
        shards: What each rank holds, and where it belongs.

    Raises:
        FileError: They do not make the whole, or are of different steps.
    """
    first = shards[0][0]
    local = first.shape
    if local is None or len({(entry.shape, step_of(entry.state, entry.group)) for entry, _ in shards}) > 1:
        raise FileError(
            f"The tensor-parallel ranks in {folder} do not agree about {name!r}: they hold the shapes "
            f"{', '.join(str(entry.shape) for entry, _ in shards)} at the steps "
            f"{', '.join(str(step_of(entry.state, entry.group)) for entry, _ in shards)}. Get all files of one checkpoint."
        )
    state: dict[str, Any] = dict(first.state)
    for key, value in first.state.items():
        if not is_tensor(value) or not len(value.shape):
            continue
        held: list[Any] = [entry.state.get(key) for entry, _ in shards]
        if any(not is_tensor(one) or one.dtype != value.dtype or tuple(one.shape) != local for one in held):
            raise FileError(
                f"The tensor-parallel ranks in {folder} do not all hold {key} of {name!r} with the shape {local}: they do not belong together."
            )
        placed = [(_source(one), part) for one, (_, parts) in zip(held, shards, strict=True) for part in parts]
        blocks = [Block(shape, part.offsets, part.sizes, _rows(source, part)) for source, part in placed]
        whole = Blocks(shape, value.dtype, blocks)
        if whole.gap:
            raise FileError(f"The shards of {name!r} in {folder} do not make the whole, {tuple(shape)}: {whole.gap}.")
        state[key] = whole
    return Entry(state, first.group, first.group_number, name)


def _rows(source: TensorSource, part: Part) -> TensorSource:
    """Return the rows of a shard that a part is."""
    if part.sizes == tuple(source.shape):
        return source
    width = math.prod(part.sizes[1:])
    return Joined(part.sizes, source.dtype, [Slice(source, part.start * width, (part.start + part.sizes[0]) * width)])


# -- Megatron's layers -------------------------------------------------------------------------------------------------


def cut_by_name(folder: Path, name: str) -> int | None:
    """Return the dimension along which Megatron's layers cut a parameter; None if every rank has a copy.

    Raises:
        FileError: The name is none that is known.
    """
    for pattern, dimension in _CUT.items():
        if re.fullmatch(pattern, name):
            return dimension
    raise FileError(
        f"{folder} was written with tensor parallelism, and nothing says how {name!r} was cut: it is no parameter of GPT-NeoX or "
        "Megatron-DeepSpeed that is known. Load and save it with one rank, or use squisher.Tracker during training."
    )


def one_of_each_rank(folder: Path, ranks: Sequence[Sequence[Entry]], copies: Copies) -> tuple[list[Entry], int]:
    """Return the entries of a whole model, and the number of tensor-parallel ranks, from those of all model-parallel ranks.

    The ranks are numbered by the stages of the pipeline first; those of one stage hold the same names. A layer that two stages
    share is the same in both.

    Raises:
        FileError: Ranks are missing or do not belong together, or parameters were cut in a way that is not known.
    """
    stages = [list(group) for _, group in itertools.groupby(ranks, lambda entries: [entry.name for entry in entries])]
    sizes = {len(stage) for stage in stages}
    if len(sizes) > 1:
        raise FileError(
            f"{folder} holds the states of {sorted(len(stage) for stage in stages)} tensor-parallel ranks in the stages of its "
            "pipeline, where all should have as many. Get all of its files."
        )
    size = sizes.pop()
    known: dict[str, list[Entry]] = {}
    for stage in stages:
        whole = stage[0] if size == 1 else [_by_name(folder, shards, copies) for shards in zip(*stage, strict=True)]
        for entry in whole:
            known.setdefault(entry.name or "", []).append(entry)
    entries = [copies.one(name, held) for name, held in known.items()]
    if size > 1:
        _refuse_fused(folder, {entry.name or "": entry.shape or () for entry in entries})
    return entries, size


def _by_name(folder: Path, shards: Sequence[Entry], copies: Copies) -> Entry:
    """Return a parameter of Megatron's layers from the shards of all ranks."""
    name, local = shards[0].name or "", shards[0].shape
    dimension = cut_by_name(folder, name)
    if dimension is None or local is None or dimension >= len(local):
        return copies.one(name, shards)
    shape = whole_shape(local, dimension, len(shards))
    offsets = [tuple(rank * n if d == dimension else 0 for d, n in enumerate(local)) for rank in range(len(shards))]
    parts = [(entry, [Part(offset, local)]) for entry, offset in zip(shards, offsets, strict=True)]
    return put_together(folder, name, shape, parts)


def whole_shape(local: tuple[int, ...], dimension: int | None, size: int) -> tuple[int, ...]:
    """Return the shape of a parameter from that of a shard of one of `size` ranks."""
    return tuple(n * size if d == dimension else n for d, n in enumerate(local))


def _refuse_fused(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse layers of which every rank holds a part of several matrices, one after the other: their rows are not in one order."""
    for name, shape in shapes.items():
        partner = re.sub(r"dense_h_to_4h\.weight$", "dense_4h_to_h.weight", name)
        partner = re.sub(r"linear1\.weight$", "linear2.weight", partner)
        queries = name.endswith("query_key_value.weight") and shape[0] != 3 * shape[1]
        gated = partner != name and partner in shapes and shapes[partner][1] != shape[0]
        if queries or gated:
            what = "has key heads that queries share" if queries else "has a gate beside it"
            raise FileError(
                f"{folder} was written with tensor parallelism, and {name!r} of shape {shape} {what}: each rank holds its rows of "
                "both, in an order that the files do not say. Load and save it with one rank."
            )
