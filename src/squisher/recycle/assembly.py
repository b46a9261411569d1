"""Named optimizer states to an Importance: read when asked for, or copied now."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import NoAccumulatorError
from ..importance import Absence, Importance, Pollution, Reason, RunFacts, structure_hash
from ..storage.tensors import CHUNK
from .optimizers import Reading, is_tensor, loaded, optimizer_name, reading, stored
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
    recipes: dict[str, Recipe] = {}
    absent = dict(facts.absent)
    first_refusal: NoAccumulatorError | None = None
    for name, entry, class_name in named:
        if not entry.state:
            absent[name] = Absence(Reason.NO_GRADIENT, "no gradient ever reached it")
            continue
        try:
            how = reading(entry.state, entry.group, class_name, bias_correction=bias_correction)
            source = stored(how.key, entry.state, entry.group)
            _check_shape(tuple(source.shape), entry, (shapes or {}).get(name), how)
        except NoAccumulatorError as error:
            first_refusal = first_refusal or error
            absent[name] = Absence(Reason.NO_ACCUMULATOR, error.what)
            continue
        recipes[name] = Recipe(how, source, entry.slice, entry.group, class_name)
    if not recipes:
        raise first_refusal or NoAccumulatorError(EMPTY)
    tensors: Mapping[str, Tensor] = Recycled(recipes)
    if not lazy:
        tensors = {name: values(recipe.how, recipe.source) for name, recipe in recipes.items()}
    known = replace(
        facts,
        absent=absent,
        pollution=(*_pollution(recipes), *facts.pollution),
        tied={alias: name for alias, name in facts.tied.items() if name in recipes},
        live_names={name: live for name, live in facts.live_names.items() if name in recipes and live != name},
    )
    # A quantised source says how it was stored; its dtype is that of the decoded values.
    kinds = {str(getattr(r.source, "stored_as", None) or r.source.dtype) for r in recipes.values()}
    structure = structure_hash(shapes or {name: recipe.shape for name, recipe in recipes.items()})
    return Importance(
        tensors,
        kind="squisher",
        **known.keywords(),
        optimizer=_optimizer_record(recipes),
        steps=_steps({name: recipe.how.step for name, recipe in recipes.items()}),
        bias_corrected=bias_correction,
        dtype_of_source=", ".join(sorted(kind.removeprefix("torch.") for kind in kinds)),
        model={"structure": structure, **({"content": dict(content)} if content else {})},
    )


def _check_shape(shape: tuple[int, ...], entry: Entry, expected: Sequence[int] | None, how: Reading) -> None:
    """Refuse an accumulator that has not one value per weight.

    Raises:
        NoAccumulatorError: Its shape differs from the parameter's (or from its first moment's), or is too small for the slice.
    """
    what = "the parameter"
    if entry.slice is not None or expected is None:
        first: Any = entry.state.get("exp_avg")
        expected, what = tuple(first.shape) if is_tensor(first) else None, "its exp_avg"
    if expected is not None and shape != tuple(expected):
        raise NoAccumulatorError(
            f"Its {how.key[0]} has the shape {shape}, {what} {(*expected,)}: not a value per weight"
        )
    if entry.slice is not None and entry.slice.start + math.prod(entry.slice.shape) > math.prod(shape):
        raise NoAccumulatorError(f"Its {how.key[0]} has the shape {shape}, too small for one value per weight")


def values(how: Reading, source: Any) -> Tensor:
    """Return the importance of one parameter as a new tensor in float32 or better, on the device where its state is."""
    tensor = loaded(source)
    return _corrected_(tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True), how)


def _corrected_(tensor: Tensor, how: Reading) -> Tensor:
    """Correct an accumulator in place for its start, and divide it by what its weights add up to."""
    if how.offset:
        tensor.sub_(how.offset).clamp_(min=0)  # a sum that never grew may round to just below its start
    if how.factor == 1.0:
        return tensor
    if tensor.device.type != "cpu" or tensor.numel() > CHUNK:
        return tensor.mul_(how.factor)
    # The same product by numpy: torch shares even a chunk among threads, which stalls on a machine that has other work.
    array = tensor.numpy()
    np.multiply(array, array.dtype.type(how.factor), out=array)
    return tensor


class Recipe(NamedTuple):
    """What the importance of one parameter is made of.

    Attributes:
        how: The correction of its accumulator.
        source: The accumulator, in memory or lazy.
        slice: The slice of it that is meant, where a weight file stores it in several.
        group: The hyperparameters of its group.
        class_name: The class of its optimizer, where it is known.
    """

    how: Reading
    source: Any
    slice: FusedSlice | None
    group: Mapping[str, Any]
    class_name: str | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the importance."""
        return self.slice.shape if self.slice else tuple(self.source.shape)


class Recycled(Mapping[str, Tensor]):
    """Importances computed from stored optimizer states when they are asked for."""

    def __init__(self, recipes: Mapping[str, Recipe]):
        self._recipes = dict(recipes)

    def __getitem__(self, name: str) -> Tensor:
        recipe = self._recipes[name]
        if recipe.slice:
            return torch.cat(list(self.chunks(name))).reshape(recipe.shape)
        return values(recipe.how, recipe.source).reshape(recipe.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._recipes)

    def __len__(self) -> int:
        return len(self._recipes)

    def __contains__(self, name: object) -> bool:
        return name in self._recipes  # the inherited one would read the tensor to find out

    def shape(self, name: str) -> torch.Size:
        """Return the shape of one tensor, without reading it."""
        return torch.Size(self._recipes[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return the data type of the values that come out."""
        return torch.promote_types(self._recipes[name].source.dtype, torch.float32)

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[Tensor]:
        """Yield one tensor in flat chunks, in order."""
        recipe = self._recipes[name]
        for chunk in self._stored_chunks(recipe, size):
            yield _corrected_(chunk.to(torch.promote_types(chunk.dtype, torch.float32)), recipe.how)

    def _stored_chunks(self, recipe: Recipe, size: int) -> Iterator[Tensor]:
        """Yield the accumulator in flat chunks which may be overwritten."""
        source = recipe.source
        first = recipe.slice.start if recipe.slice else 0
        end = first + math.prod(recipe.shape)
        in_file = not isinstance(source, Tensor) and getattr(source, "is_contiguous", True)
        if in_file and hasattr(source, "chunks") and (first, end) == (0, math.prod(source.shape)):
            yield from source.chunks(size)  # a whole stored tensor: its checksum is compared on the way
            return
        # A convolution in channels-last order is saved so: its elements stand in the file in another order.
        flat = None if in_file else loaded(source).reshape(-1)
        if in_file and hasattr(source, "storage"):
            source.storage.verify()  # the checksum is of more than is read here
        for start in range(first, end, size):
            stop = min(start + size, end)
            yield source.read_flat(start, stop) if flat is None else flat[start:stop].cpu().clone()


# -- provenance --------------------------------------------------------------------------------------------------------


def _pollution(recipes: Mapping[str, Recipe]) -> list[Pollution]:
    """Return what pollutes the averages, each with the parameters concerned where these are not all."""
    found: dict[Pollution, list[str]] = {}
    for name, recipe in recipes.items():
        for one in recipe.how.pollution:
            found.setdefault(one, []).append(name)
    partly = {one: tuple(names) for one, names in found.items() if len(names) < len(recipes)}
    return [replace(one, parameters=partly[one]) if one in partly else one for one in found]


def _optimizer_record(recipes: Mapping[str, Recipe]) -> dict[str, Any]:
    """Return what is known of the optimizer: what all parameters have in common, and the groups that differ."""
    distinct: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for name, (how, _, _, group, class_name) in recipes.items():
        said = {
            "class": optimizer_name(how.accumulator, group, class_name),
            "key": " ".join(how.key),
            "meaning": how.accumulator.meaning,
            "beta2": how.beta2,
            "eps": _number(group.get("eps")),
            "weight_decay": _number(group.get("weight_decay")),
            "amsgrad": bool(group["amsgrad"]) if "amsgrad" in group else None,
        }
        record = {key: value for key, value in said.items() if value is not None}
        distinct.setdefault(repr(record), (record, []))[1].append(name)
    records = list(distinct.values())
    common = {k: v for k, v in records[0][0].items() if all(r.get(k) == v for r, _ in records)}
    if len(records) > 1:
        own = [({k: v for k, v in record.items() if k not in common}, names) for record, names in records]
        common["groups"] = [{**record, "parameters": names} for record, names in own]
    return common


def _number(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_number(v) for v in value]
    return value if isinstance(value, (int, float)) else None


def _steps(steps: Mapping[str, int | None]) -> dict[str, Any] | None:
    known = [step for step in steps.values() if step is not None]
    if not known:
        return None
    out: dict[str, Any] = {"min": min(known), "max": max(known)}
    if len(set(steps.values())) > 1:
        out["per_parameter"] = dict(steps)
    return out
