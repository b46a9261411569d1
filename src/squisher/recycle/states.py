"""An optimizer's state as every reader delivers it, and what is made of it: an Importance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import NoAccumulatorError
from ..importance import Importance, structure_hash
from ..tensors import CHUNK, TensorSource
from .accumulators import TABLE, Reading, identify, optimizer_name, reading
from .factored import join

__all__ = [
    "Candidate",
    "Entry",
    "Facts",
    "Found",
    "OptimizerState",
    "Options",
    "Piece",
    "assemble",
    "check_usable",
    "stored",
    "values",
]


_EMPTY = (
    "The optimizer has no state: it has taken no step yet, or it keeps none (SGD without momentum). Extract after training "
    "with Adam or AdamW, or use squisher.Tracker."
)


@dataclass(frozen=True)
class Piece:
    """A tensor of the weight file that is one flat stretch of a parameter (one expert of several that are kept together).

    Attributes:
        name: Its name in the weight file.
        start: Where it begins in the parameter, counted in elements.
        shape: Its shape.
    """

    name: str
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """What an optimizer keeps for one parameter.

    Attributes:
        state: Accumulators and step; tensors in memory, lazy tensors, numbers. Empty if it never had a gradient.
        group: The hyperparameters of its group.
        group_number: Which group it is in.
        name: Its name, where the source records it.
        piece: Which flat stretch of the parameter is meant, where a weight file stores it in several pieces.
    """

    state: Mapping[str, Any]
    group: Mapping[str, Any]
    group_number: int = 0
    name: str | None = None
    piece: Piece | None = None

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of the parameter, as far as its state tells."""
        if "projector" in self.state:  # GaLore: what it keeps has the shape of the projection, not of the parameter
            return None
        for key in ("exp_avg_sq", "exp_avg", "square_avg", "sum", "variance", "exp_inf", "momentum_buffer"):
            if _is_tensor(self.state.get(key)):
                return tuple(self.state[key].shape)
        try:
            how = identify(self.state, self.group)
            return tuple(stored(how.key, self.state, self.group).shape)
        except NoAccumulatorError:
            return None


@dataclass(frozen=True)
class OptimizerState:
    """One optimizer: its parameters in its own order.

    Attributes:
        entries: One per parameter, in the order of the groups.
        class_name: The optimizer's class, where it is known.
        place: Where in the source it was found, for messages.
        models: Where its own names may come from, if not from all models of the source.
    """

    entries: Sequence[Entry]
    class_name: str | None = None
    place: str = ""
    models: Sequence[tuple[str, Sequence[Candidate]]] | None = None

    @property
    def group_sizes(self) -> list[int]:
        """How many parameters each group has."""
        sizes: dict[int, int] = {}
        for entry in self.entries:
            sizes[entry.group_number] = sizes.get(entry.group_number, 0) + 1
        return [sizes.get(k, 0) for k in range(max(sizes, default=-1) + 1)]


@dataclass(frozen=True)
class Candidate:
    """One parameter of a model, in registration order: what may stand behind a number in the optimizer.

    Attributes:
        name: Its name in the weight file.
        shape: Its shape.
        module: Full class names of the module that owns it, its bases included; empty where only a state dict is at hand.
        live_name: Its name in the running model, where it differs.
        required: Whether it was surely trained, so that it must be one of the optimizer's.
        pieces: What the weight file stores instead of it, where that is several tensors.
    """

    name: str
    shape: tuple[int, ...]
    module: tuple[str, ...] = ()
    live_name: str | None = None
    required: bool = False
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class Found:
    """What a reader found in a source.

    Attributes:
        optimizers: Every optimizer state, in order.
        models: Where names may come from: a label for messages, and the parameters in registration order.
        facts: Fields of `Facts` that the source proves (batch size, clipping, …).
        rules: Grouping conventions of the framework that wrote it, as `naming.Rule` with a label, beside the general ones.
        parameters: All parameters of the model, frozen ones too, where they are known and the models leave some out.
    """

    optimizers: Sequence[OptimizerState]
    models: Sequence[tuple[str, Sequence[Candidate]]] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    rules: Sequence[tuple[str, Callable[[Candidate], int | None]]] = ()
    parameters: Sequence[Candidate] = ()


@dataclass(frozen=True)
class Options:
    """What the user said that a reader may need.

    Attributes:
        model: Folder or file of the model, where the source is not enough.
        base_model: Folder of the weights that training started from: what is bit-equal to them was frozen.
        trainable: A regular expression for the names that were trained.
        allow_coarse: Whether states of four bits are accepted.
        named: Whether names are at hand, so that a reader need not look for them.
        beta2: Decay of the squared-gradient average, for sources that do not record it.
    """

    model: Path | None = None
    base_model: Path | None = None
    trainable: str | None = None
    allow_coarse: bool = False
    named: bool = False
    beta2: float | None = None


@dataclass(frozen=True)
class Facts:
    """What is known about the training run, beside the state: fields of the provenance.

    Attributes:
        naming: How names were found.
        batch_size: Examples per optimizer step, if proven.
        batch_tokens: Loss-bearing tokens per optimizer step, if known.
        loss_reduction: How the loss was reduced, if known.
        unit: What the loss is a mean of, if known.
        absent: Parameters without a state, and why.
        tied: Other names of parameters: alias to name.
        live_names: Name in the running model, where it differs.
        shapes: Shapes of the model's parameters, where they are known.
        content: Hash of each weight, where the weights were at hand.
        pollution: What else is in the squared gradient (clipping, a penalty), in sentences.
        after_clipping: Whether gradients were clipped before they were squared, if known.
    """

    naming: str
    batch_size: float | None = None
    batch_tokens: float | None = None
    loss_reduction: str | None = None
    unit: str | None = None
    absent: Mapping[str, str] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    live_names: Mapping[str, str] = field(default_factory=dict)
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    content: Mapping[str, str] = field(default_factory=dict)
    pollution: Sequence[str] = ()
    after_clipping: bool | None = None


def assemble(
    named: Iterable[tuple[str, Entry, str | None]], facts: Facts, *, bias_correction: bool = True, lazy: bool = True
) -> Importance:
    """Turns named optimizer states into an importance of kind squisher.

    Args:
        named: Name, state, and the optimizer's class name where it is known.
        facts: What else is known.
        bias_correction: False leaves the accumulators as they are stored.
        lazy: Read when asked for (files); otherwise a copy is made now (live states, which training overwrites).

    Raises:
        NoAccumulatorError: No parameter has a usable accumulator.
        SquisherError: Values that no mean of squares can have.
    """
    parts: dict[str, Part] = {}
    absent = dict(facts.absent)
    groups: dict[str, dict[str, Any]] = {}
    first_refusal: NoAccumulatorError | None = None
    for name, entry, class_name in named:
        if not entry.state:
            absent[name] = "no gradient ever reached it"
            continue
        try:
            how = reading(entry.state, entry.group, class_name, bias_correction=bias_correction)
            source = stored(how.key, entry.state, entry.group)
            shape = _checked_shape(source, entry, None if entry.piece else facts.shapes.get(name), how)
            if entry.piece and entry.piece.start + math.prod(entry.piece.shape) > math.prod(shape):
                raise NoAccumulatorError(f"Its {how.key[0]} has the shape {shape}, too small for one value per weight")
        except NoAccumulatorError as error:
            first_refusal = first_refusal or error
            absent[name] = str(error).split(". ")[0]
            continue
        parts[name] = Part(how, source, shape, entry.piece)
        groups[name] = _group_record(how, entry.group, class_name)
    if not parts:
        raise first_refusal or NoAccumulatorError(_EMPTY)
    tensors: Mapping[str, Tensor] = Recycled(parts)
    if not lazy:
        tensors = {name: values(part.how, part.source) for name, part in parts.items()}
    return Importance(
        tensors,
        kind="squisher",
        optimizer=_optimizer_record(groups, parts, facts),
        steps=_steps({name: part.how.step for name, part in parts.items()}),
        unit=facts.unit,
        loss_reduction=facts.loss_reduction,
        batch_size=facts.batch_size,
        batch_tokens=facts.batch_tokens,
        bias_corrected=bias_correction,
        dtype_of_source=_dtype_of_source(parts),
        absent=absent,
        tied={alias: name for alias, name in facts.tied.items() if name in parts},
        naming=facts.naming,
        live_names={name: live for name, live in facts.live_names.items() if name in parts and live != name},
        model=_model_record(parts, facts),
    )


def check_usable(optimizer: OptimizerState) -> None:
    """Refuses an optimizer that keeps no squared gradient before anybody asks for the names of its parameters.

    Raises:
        NoAccumulatorError: No parameter has a usable accumulator.
    """
    refusal: NoAccumulatorError | None = None
    for entry in optimizer.entries:
        try:
            identify(entry.state, entry.group, optimizer.class_name)
        except NoAccumulatorError as error:
            refusal = refusal or (error if entry.state or _names_itself(entry, optimizer) else None)
        else:
            if entry.state:
                return
    raise refusal or NoAccumulatorError(_EMPTY)


def _names_itself(entry: Entry, optimizer: OptimizerState) -> bool:
    """Whether a parameter without state still tells by its group which optimizer it belongs to (plain SGD)."""
    return optimizer.class_name is not None or any(row.matches((), entry.group) for row in TABLE if row.group)


def values(how: Reading, source: Any) -> Tensor:
    """The importance of one parameter as a new tensor in float32 or better, on the device where its state is."""
    tensor = _plain(source.detach()) if isinstance(source, Tensor) else source.load()
    return _corrected_(tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True), how)


def _corrected_(tensor: Tensor, how: Reading) -> Tensor:
    if how.offset:
        tensor.sub_(how.offset).clamp_(min=0)  # a sum that never grew may round to just below its start
    if how.factor == 1.0:
        return tensor
    if tensor.device.type != "cpu" or tensor.numel() > CHUNK:
        return tensor.mul_(how.factor)
    # The same product by numpy: torch shares even a piece among threads, which stalls on a machine that has other work.
    values_here = tensor.numpy()
    np.multiply(values_here, values_here.dtype.type(how.factor), out=values_here)
    return tensor


class Part(NamedTuple):
    """What one importance is made of: how, from which stored tensor, its shape, and the piece that is meant."""

    how: Reading
    source: Any
    whole: tuple[int, ...]
    piece: Piece | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the importance."""
        return self.piece.shape if self.piece else self.whole


class Recycled(Mapping[str, Tensor]):
    """Importances computed from stored optimizer states when they are asked for."""

    def __init__(self, parts: Mapping[str, Part]):
        self._parts = dict(parts)

    def __getitem__(self, name: str) -> Tensor:
        part = self._parts[name]
        if part.piece:
            return torch.cat(list(self.chunks(name))).reshape(part.shape)
        return values(part.how, part.source).reshape(part.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __contains__(self, name: object) -> bool:
        return name in self._parts  # the inherited one would read the tensor to find out

    def shape(self, name: str) -> torch.Size:
        """The shape of one tensor, without reading it."""
        return torch.Size(self._parts[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """The data type of the values that come out."""
        return torch.promote_types(self._parts[name].source.dtype, torch.float32)

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[Tensor]:
        """One tensor in flat pieces, in order."""
        part = self._parts[name]
        first = part.piece.start if part.piece else 0
        end = first + math.prod(part.shape)
        for piece in _pieces(part.source, first, end, size):
            yield _corrected_(piece.to(torch.promote_types(piece.dtype, torch.float32)), part.how)


def _pieces(source: Any, first: int, end: int, size: int) -> Iterator[Tensor]:
    """Elements `first` to `end` in flat pieces which may be overwritten."""
    if hasattr(source, "pieces") and source.is_contiguous and (first, end) == (0, math.prod(source.shape)):
        yield from source.pieces(size)  # a whole stored tensor: its checksum is compared on the way
        return
    flat = _flat_reader(source)
    for start in range(first, end, size):
        yield flat(start, min(start + size, end))


def _flat_reader(source: Any) -> Callable[[int, int], Tensor]:
    """A function of (start, stop) that gives that flat range as a tensor which may be overwritten."""
    if not isinstance(source, Tensor) and getattr(source, "is_contiguous", True):
        return source.read_flat
    # A convolution in channels-last order is saved so: its elements stand in the file in another order.
    whole = (_plain(source.detach()) if isinstance(source, Tensor) else source.load()).reshape(-1)
    return lambda start, stop: whole[start:stop].cpu().clone()


def stored(keys: Sequence[str], state: Mapping[str, Any], group: Mapping[str, Any]) -> Any:
    """The accumulator as it is stored: a tensor, lazy or not, or the product of two factors.

    Raises:
        NoAccumulatorError: What is there is no tensor, or the factors do not fit together.
    """
    for key in keys:
        if not _is_tensor(state[key]):
            raise NoAccumulatorError(f"Its {key} is a {type(state[key]).__name__}, not a tensor")
    return state[keys[0]] if len(keys) == 1 else join(keys, state, group)


def _checked_shape(source: Any, entry: Entry, expected: Sequence[int] | None, how: Reading) -> tuple[int, ...]:
    shape, what = tuple(source.shape), "the parameter"
    if expected is None and _is_tensor(entry.state.get("exp_avg")):
        expected, what = tuple(entry.state["exp_avg"].shape), "its exp_avg"
    if expected is not None and shape != tuple(expected):
        raise NoAccumulatorError(
            f"Its {how.key[0]} has the shape {shape}, but {what} has {tuple(expected)}: not a value per weight"
        )
    return shape


def _plain(tensor: Any) -> Tensor:
    """A tensor of its own, whatever it was sharded over (every process must take part)."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (Tensor, TensorSource))


# -- provenance --------------------------------------------------------------------------------------------------------


def _group_record(how: Reading, group: Mapping[str, Any], class_name: str | None) -> dict[str, Any]:
    record = {
        "class": optimizer_name(how.accumulator, group, class_name),
        "key": " ".join(how.key),
        "meaning": how.accumulator.meaning,
        "beta2": how.beta2,
        "eps": _number(group.get("eps")),
        "weight_decay": _number(group.get("weight_decay")),
        "amsgrad": bool(group["amsgrad"]) if "amsgrad" in group else None,
        "pollution": list(how.pollution),
    }
    return {key: value for key, value in record.items() if value is not None}


def _optimizer_record(groups: Mapping[str, dict[str, Any]], parts: Mapping[str, Any], facts: Facts) -> dict[str, Any]:
    distinct: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for name, record in groups.items():
        distinct.setdefault(repr(record), (record, []))[1].append(name)
    records = list(distinct.values())
    first = records[0][0]
    common = {k: v for k, v in first.items() if all(r.get(k) == v for r, _ in records)}
    sentences = [s for record, _ in records for s in record["pollution"]] + list(facts.pollution)
    common["pollution"] = list(dict.fromkeys(sentences))
    if facts.after_clipping is not None:
        common["after_clipping"] = facts.after_clipping
    if len(records) > 1:
        common["groups"] = [
            {**{k: v for k, v in record.items() if k not in common or k == "pollution"}, "parameters": names}
            for record, names in records
        ]
    return common


def _steps(steps: Mapping[str, int | None]) -> dict[str, Any] | None:
    known = [step for step in steps.values() if step is not None]
    if not known:
        return None
    out: dict[str, Any] = {"min": min(known), "max": max(known)}
    if len(set(steps.values())) > 1:
        out["per_parameter"] = dict(steps)
    return out


def _dtype_of_source(parts: Mapping[str, Part]) -> str:
    # A quantised source says how it was stored; its own dtype is what it gives out.
    kinds = [getattr(part.source, "stored_as", None) or part.source.dtype for part in parts.values()]
    names = {str(kind).removeprefix("torch.") for kind in kinds}
    return ", ".join(sorted(names))


def _model_record(parts: Mapping[str, Part], facts: Facts) -> dict[str, Any]:
    shapes = facts.shapes or {name: part.shape for name, part in parts.items()}
    record: dict[str, Any] = {"structure": structure_hash(shapes)}
    if facts.content:
        record["content"] = dict(facts.content)
    return record


def _number(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_number(v) for v in value]
    return value if isinstance(value, (int, float)) else None
