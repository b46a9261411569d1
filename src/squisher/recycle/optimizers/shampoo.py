"""Distributed Shampoo's grafting: the average of squared gradients that Adam, RMSprop or Adagrad would keep, in blocks.

Shampoo views a parameter with small neighbouring dimensions merged, and cuts that view along every dimension into blocks of at most
`max_preconditioner_dim`; each block has a state. Which shape the parameter has is not in them (four blocks of 16 × 16 may be
32 × 32 or 16 × 64), so it must be known; every block must then have the size that it implies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...errors import FileError
from ...storage.tensors import Block, Blocks, Joined, Slice
from ...storage.torch_files import Record, StoredTensor, Verified

if TYPE_CHECKING:
    from ..states import Entry

__all__ = ["unblocked"]

_GRAFTED = {  # of the class of its settings: the key of the table
    "AdamPreconditionerConfig": "grafted_average",
    "RMSpropPreconditionerConfig": "grafted_average",
    "AdaGradPreconditionerConfig": "grafted_sum",
}


def unblocked(entry: Entry, shape: Sequence[int] | None) -> Entry:
    """Return the state of a parameter with its grafting accumulator whole; as it is where there is none, or its shape is not known.

    Args:
        entry: Live or from a file.
        shape: Of the parameter.

    Raises:
        FileError: The blocks are not those of a parameter of this shape.
    """
    config = entry.group.get("grafting_config")
    key = _GRAFTED.get(_class_name(config))
    state: Mapping[str, Any] = entry.state
    if shape is None or key is None or "block_0" not in state or _setting(config, "drop_weighting_factor_on_gsquare"):
        return entry
    blocks: dict[str, Any] = {
        name: one.get("adagrad") for name, one in state.items() if name.startswith("block_") and isinstance(one, dict)
    }
    limit: Any = entry.group.get("max_preconditioner_dim")
    target = _setting(entry.group.get("distributed_config"), "target_parameter_dimensionality")
    known = isinstance(limit, (int, float)) and isinstance(target, (int, float))
    if not known or not all(isinstance(one, (Tensor, StoredTensor)) for one in blocks.values()):
        return entry  # of another version, or spread over ranks
    view = _merged(tuple(shape), limit, target)
    starts = [range(0, n, n if limit == math.inf else int(limit)) for n in view]
    wanted = {}
    for number, offsets in enumerate(product(*starts)):
        wanted[f"block_{number}"] = (
            offsets,
            tuple(min(one.step, n - o) for one, n, o in zip(starts, view, offsets, strict=True)),
        )
    found = {name: tuple(one.shape) for name, one in blocks.items()}
    if found != {name: sizes for name, (_, sizes) in wanted.items()}:
        raise FileError(
            f"The blocks of {entry.name!r} in Distributed Shampoo's state ({found}) are not those of a parameter of the shape "
            f"{tuple(shape)}: the weights are of another model. Give those that were trained."
        )
    dtype = next(iter(blocks.values())).dtype
    parts = [Block(view, offsets, sizes, _source(blocks[name])) for name, (offsets, sizes) in wanted.items()]
    whole = Joined(shape, dtype, [Slice(Blocks(view, dtype, parts), 0, math.prod(shape))])
    decay = entry.group.get("weight_decay_type")
    group = {
        **entry.group,
        "grafting_beta2": _setting(config, "beta2"),
        "decoupled": "L2" not in str(decay.args if isinstance(decay, Record) else decay),
    }
    return replace(entry, state={key: whole, "step": state.get("step")}, group=group)


def _merged(shape: tuple[int, ...], limit: float, target: float) -> tuple[int, ...]:
    """Return the shape of Shampoo's view: from the last on, dimensions are merged while there are too many and they stay small."""
    if target == math.inf:
        return shape
    sizes = [n for n in reversed(shape) if n != 1] or [1]
    view = sizes[:1]
    for seen, size in enumerate(sizes[1:], start=1):
        if len(view) + len(sizes) - seen > target and view[-1] * size <= limit:
            view[-1] *= size
        else:
            view.append(size)
    return tuple(reversed(view))


def _class_name(config: Any) -> str:
    return (config.name if isinstance(config, Record) else type(config).__name__).rpartition(".")[2]


def _setting(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Record) else getattr(config, name, None)


class _InMemory:
    """A block of a live state."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype, self._tensor = tuple(tensor.shape), tensor.dtype, tensor

    def load(self) -> Tensor:
        """Return the whole tensor."""
        return self._tensor.detach()

    def read_flat(self, start: int, stop: int) -> Tensor:
        """Return elements `start` to `stop` in flat order."""
        return self._tensor.detach().reshape(-1)[start:stop].cpu()


def _source(block: Any) -> Any:
    return _InMemory(block) if isinstance(block, Tensor) else Verified(block)
