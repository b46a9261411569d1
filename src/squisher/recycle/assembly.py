"""Named optimizer states to an Importance: read when asked for, or copied now."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import NoAccumulatorError
from ..importance import Absence, Importance, Pollution, Reason, RunFacts, structure_hash
from ..storage.tensors import CHUNK
from .optimizers import Reading, is_tensor, optimizer_name, reading, stored
from .states import EMPTY, Entry, FusedSlice, Named

__all__ = ["Recycled", "assemble", "values"]


def assemble(
    named: Iterable[Named],
    facts: RunFacts,
    shapes: Mapping[str, Sequence[int]] | None = None,
    content: Mapping[str, str] | None = None,
    *,
    bias_correction: bool = True,
    lazy: bool = True,
) -> Importance:
    """Turn named optimizer states into an importance of kind squisher.

    Args:
        named: Name, state, and the optimizer's class name where it is known.
        facts: What is known about the run.
        shapes: Shapes of the model's parameters, where they are known.
        content: Hash of each weight, where the weights were at hand.
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
            absent[name] = Absence(Reason.NO_GRADIENT, "no gradient ever reached it")
            continue
        try:
            how = reading(entry.state, entry.group, class_name, bias_correction=bias_correction)
            source = stored(how.key, entry.state, entry.group)
            shape = _checked_shape(source, entry, None if entry.slice else (shapes or {}).get(name), how)
            if entry.slice and entry.slice.start + math.prod(entry.slice.shape) > math.prod(shape):
                raise NoAccumulatorError(f"Its {how.key[0]} has the shape {shape}, too small for one value per weight")
        except NoAccumulatorError as error:
            first_refusal = first_refusal or error
            absent[name] = Absence(Reason.NO_ACCUMULATOR, error.what)
            continue
        parts[name] = Part(how, source, shape, entry.slice)
        groups[name] = _group_record(how, entry.group, class_name)
    if not parts:
        raise first_refusal or NoAccumulatorError(EMPTY)
    tensors: Mapping[str, Tensor] = Recycled(parts)
    if not lazy:
        tensors = {name: values(part.how, part.source) for name, part in parts.items()}
    known = replace(
        facts,
        absent=absent,
        pollution=(*_pollution({name: part.how for name, part in parts.items()}), *facts.pollution),
        tied={alias: name for alias, name in facts.tied.items() if name in parts},
        live_names={name: live for name, live in facts.live_names.items() if name in parts and live != name},
    )
    structure = structure_hash(shapes or {name: part.shape for name, part in parts.items()})
    return Importance(
        tensors,
        kind="squisher",
        **known.keywords(),
        optimizer=_optimizer_record(groups),
        steps=_steps({name: part.how.step for name, part in parts.items()}),
        bias_corrected=bias_correction,
        dtype_of_source=_dtype_of_source(parts),
        model={"structure": structure, **({"content": dict(content)} if content else {})},
    )


def values(how: Reading, source: Any) -> Tensor:
    """Return the importance of one parameter as a new tensor in float32 or better, on the device where its state is."""
    tensor = _plain(source.detach()) if isinstance(source, Tensor) else source.load()
    return _corrected_(tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True), how)


def _corrected_(tensor: Tensor, how: Reading) -> Tensor:
    if how.offset:
        tensor.sub_(how.offset).clamp_(min=0)  # a sum that never grew may round to just below its start
    if how.factor == 1.0:
        return tensor
    if tensor.device.type != "cpu" or tensor.numel() > CHUNK:
        return tensor.mul_(how.factor)
    # The same product by numpy: torch shares even a chunk among threads, which stalls on a machine that has other work.
    values_here = tensor.numpy()
    np.multiply(values_here, values_here.dtype.type(how.factor), out=values_here)
    return tensor


class Part(NamedTuple):
    """What one importance is made of: how, from which stored tensor, its shape, and the slice that is meant."""

    how: Reading
    source: Any
    whole: tuple[int, ...]
    slice: FusedSlice | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the importance."""
        return self.slice.shape if self.slice else self.whole


class Recycled(Mapping[str, Tensor]):
    """Importances computed from stored optimizer states when they are asked for."""

    def __init__(self, parts: Mapping[str, Part]):
        self._parts = dict(parts)

    def __getitem__(self, name: str) -> Tensor:
        part = self._parts[name]
        if part.slice:
            return torch.cat(list(self.chunks(name))).reshape(part.shape)
        return values(part.how, part.source).reshape(part.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __contains__(self, name: object) -> bool:
        return name in self._parts  # the inherited one would read the tensor to find out

    def shape(self, name: str) -> torch.Size:
        """Return the shape of one tensor, without reading it."""
        return torch.Size(self._parts[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return the data type of the values that come out."""
        return torch.promote_types(self._parts[name].source.dtype, torch.float32)

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[Tensor]:
        """Yield one tensor in flat chunks, in order."""
        part = self._parts[name]
        first = part.slice.start if part.slice else 0
        end = first + math.prod(part.shape)
        for chunk in _chunks(part.source, first, end, size):
            yield _corrected_(chunk.to(torch.promote_types(chunk.dtype, torch.float32)), part.how)


def _chunks(source: Any, first: int, end: int, size: int) -> Iterator[Tensor]:
    """Yield elements `first` to `end` in flat chunks which may be overwritten."""
    if hasattr(source, "chunks") and source.is_contiguous and (first, end) == (0, math.prod(source.shape)):
        yield from source.chunks(size)  # a whole stored tensor: its checksum is compared on the way
        return
    flat = _flat_reader(source)
    for start in range(first, end, size):
        yield flat(start, min(start + size, end))


def _flat_reader(source: Any) -> Callable[[int, int], Tensor]:
    """Return a function of (start, stop) that gives that flat range as a tensor which may be overwritten."""
    if not isinstance(source, Tensor) and getattr(source, "is_contiguous", True):
        return source.read_flat
    # A convolution in channels-last order is saved so: its elements stand in the file in another order.
    whole = (_plain(source.detach()) if isinstance(source, Tensor) else source.load()).reshape(-1)
    return lambda start, stop: whole[start:stop].cpu().clone()


def _checked_shape(source: Any, entry: Entry, expected: Sequence[int] | None, how: Reading) -> tuple[int, ...]:
    shape, what = tuple(source.shape), "the parameter"
    if expected is None and is_tensor(entry.state.get("exp_avg")):
        expected, what = tuple(entry.state["exp_avg"].shape), "its exp_avg"
    if expected is not None and shape != tuple(expected):
        raise NoAccumulatorError(
            f"Its {how.key[0]} has the shape {shape}, but {what} has {tuple(expected)}: not a value per weight"
        )
    return shape


def _plain(tensor: Any) -> Tensor:
    """Return a tensor of its own, whatever it was sharded over (every process must take part)."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


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
    }
    return {key: value for key, value in record.items() if value is not None}


def _pollution(readings: Mapping[str, Reading]) -> list[Pollution]:
    """Return what pollutes the averages, each with the parameters concerned where these are not all."""
    found: dict[Pollution, list[str]] = {}
    for name, how in readings.items():
        for one in how.pollution:
            found.setdefault(one, []).append(name)
    return [
        one if len(names) == len(readings) else replace(one, parameters=tuple(names)) for one, names in found.items()
    ]


def _optimizer_record(groups: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    distinct: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for name, record in groups.items():
        distinct.setdefault(repr(record), (record, []))[1].append(name)
    records = list(distinct.values())
    first = records[0][0]
    common = {k: v for k, v in first.items() if all(r.get(k) == v for r, _ in records)}
    if len(records) > 1:
        common["groups"] = [
            {**{k: v for k, v in record.items() if k not in common}, "parameters": names} for record, names in records
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


def _number(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_number(v) for v in value]
    return value if isinstance(value, (int, float)) else None
