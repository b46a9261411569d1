"""Merged weights that are computed when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..errors import SquisherError, near
from ..storage.tensors import CHUNK, Computed, buffer_for, chunks_of, dtype_of, is_finite, not_finite, recut
from .inputs import Plan, also_tied

__all__ = ["Formula", "Merged"]

_TOGETHER = 8 * CHUNK  # elements of all models that are read for one merged chunk
_SHORTEST = 1 << 12
_BLOCK = 1 << 15  # torch shares longer tensors among threads


class Formula(Protocol):
    """How one method turns chunks of a tensor into a merged chunk."""

    def inputs(self, name: str) -> list[Mapping[str, Tensor]]:
        """Return the mappings that a chunk is read from, in the order that `fill` expects."""

    def fill(self, name: str, chunks: Sequence[Tensor], out: Tensor) -> None:
        """Fill `out` with the merged chunk."""


class Merged(Computed):
    """Named tensors under the names of the first model, each merged when it is asked for.

    Attributes:
        merged: Names that are merged.
        kept: Names that are taken from the first model unchanged, and why (heads that differ, excluded names). `for_model` takes
            them from another one.
        copied: Buffers, copied from the first model.
        averaged: Merged names without an importance, and why.
        tied: Other names of tied tensors: alias to name. Both return the same tensor.
    """

    def __init__(
        self,
        models: Sequence[Mapping[str, Tensor]],
        plan: Plan,
        formula: Formula,
        *,
        averaged: Mapping[str, str] | None = None,
        dtype: torch.dtype | None = None,
        source: Mapping[str, Tensor] | None = None,
    ):
        self._models = list(models)
        self._plan = plan
        self._formula = formula
        self._dtype = dtype
        super().__init__(models[0] if source is None else source)
        self._shared: WeakValueDictionary[str, Tensor] = WeakValueDictionary()
        self._in_plan = frozenset(plan.merged)
        self.merged = plan.merged
        self.kept = dict(plan.kept)
        self.copied = plan.copied
        self.averaged = dict(averaged or {})
        self.tied = dict(plan.tied)

    def __contains__(self, name: object) -> bool:
        return name in self._in_plan or name in self.tied or name in self._like

    def __repr__(self) -> str:
        models = f"{len(self._models)} model{'s' * (len(self._models) != 1)}"
        return f"Merged({len(self.merged)} of {len(self)} tensors merged, from {models})"

    def dtype(self, name: str) -> torch.dtype:
        """Return the data type of one tensor, without reading it."""
        name = self._name_there(name)
        stored = dtype_of(self._like, name)
        return stored if self._dtype is None or name in self.copied or not stored.is_floating_point else self._dtype

    def __getitem__(self, name: str) -> Tensor:
        name = self._name_there(name)
        if name in self._shared:
            return self._shared[name]
        tensor = super().__getitem__(name)
        if name in self.tied.values():  # while it is referenced, its other names return the same tensor
            self._shared[name] = tensor
        return tensor

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[Tensor]:
        """Return one tensor in flat chunks, in order; memory is bounded by a few chunks, however many models there are."""
        return recut(self.short_chunks(name, size), size)

    def short_chunks(self, name: str, size: int = CHUNK) -> Iterator[Tensor]:
        """Yield chunks that are shorter the more models there are, so that memory does not grow with their number."""
        name = self._name_there(name)
        inputs = self._formula.inputs(name) if name in self._in_plan else [self._like]
        merge = self._merged if name in self._in_plan else self._copied
        for chunks in zip(*(chunks_of(tensors, name, self._step(name, size)) for tensors in inputs), strict=True):
            yield merge(name, chunks)

    def _step(self, name: str, size: int) -> int:
        count = len(self._formula.inputs(name)) if name in self._in_plan else 1
        while size * count > _TOGETHER and size % 2 == 0 and size > _SHORTEST:
            size //= 2
        return size

    def _merged(self, name: str, chunks: Sequence[Tensor]) -> Tensor:
        out = buffer_for(chunks[0].numel(), self.dtype(name))
        self._formula.fill(name, chunks, out)
        if not is_finite(out):
            raise self._not_finite(name)
        return out

    def _copied(self, name: str, chunks: Sequence[Tensor]) -> Tensor:
        chunk, target = chunks[0], self.dtype(name)
        if chunk.dtype == target:
            return chunk
        out = buffer_for(chunk.numel(), target)
        for to, block in zip(out.split(_BLOCK), chunk.split(_BLOCK), strict=True):
            to.copy_(block)
        if target == torch.float16 and not is_finite(out):
            raise _beyond_float16(name)
        return out

    def for_model(self, number: int) -> Merged:
        """Return the merged weights with the kept tensors and buffers of model `number`, from 0: its head, for example.

        Raises:
            SquisherError: There is no such model, or its coefficient is 0.
        """
        numbers = self._plan.numbers
        if number not in numbers:
            known = ", ".join(map(str, numbers))
            raise SquisherError(f"There is no model {number}; those that take part are {known}, counted from 0.")
        source = self._models[numbers.index(number)]
        tied = self._plan.tied | also_tied(source, self._models[0], self._plan.merged)
        return Merged(
            self._models,
            replace(self._plan, tied=tied),
            self._formula,
            averaged=self.averaged,
            dtype=self._dtype,
            source=source,
        )

    def _name_there(self, name: str) -> str:
        name = self.tied.get(name, name)
        if name not in self:
            raise KeyError(f"no tensor named {name!r}.{near(name, self)}")
        return name

    def _not_finite(self, name: str) -> SquisherError:
        for k, model in enumerate(self._models):
            if not all(map(is_finite, chunks_of(model, name))):
                return not_finite(name, self._plan.who(k))
        if self.dtype(name) == torch.float16:
            return _beyond_float16(name)
        return SquisherError(f"{name!r} overflows when it is merged: the coefficients are too large.")


def _beyond_float16(name: str) -> SquisherError:
    return SquisherError(f"{name!r} has values beyond 65504, which float16 cannot hold: write bfloat16 or float32.")
