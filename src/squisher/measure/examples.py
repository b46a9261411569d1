"""Which rows of a tensor belong to which example, followed through the operations of a forward pass.

A per-example gradient read off a batch is right only if the rows that are taken for example n influence the loss of example n and no
other. That cannot be seen from shapes (a total that happens to be divisible says nothing), so it is followed structurally, in every
batch: the inputs are `Examples(0)`, and each operation that is known to keep examples apart says where they are in its output
(`placements`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

__all__ = [
    "SHARED",
    "UNKNOWN",
    "Call",
    "Examples",
    "Look",
    "Other",
    "Routed",
    "State",
    "argument",
    "replaced",
    "tensors_in",
]


class Examples(NamedTuple):
    """Dimension `dim` has `inner` neighbouring rows for each example, in the order of the batch."""

    dim: int
    inner: int = 1


class Routed(NamedTuple):
    """Dimension `dim` has rows of examples in any order and number; which ones, `indexing.Routes` knows by this number."""

    dim: int
    owner: int


class Other(NamedTuple):
    """A state without rows of examples."""

    kind: str


SHARED = Other("shared")
"""No row belongs to an example: parameters, buffers, constants, and what is made of them alone."""
UNKNOWN = Other("unknown")

State = Examples | Routed | Other


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors in nested lists, tuples and mappings, in order."""
    found: list[Tensor] = []
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            left += item[::-1]
        elif isinstance(item, dict):
            left += reversed(item.values())
    return found


def replaced(value: Any, instead: Mapping[int, Tensor]) -> Any:
    """Return arguments with some tensors replaced; `instead` has the new ones by the `id` of the old ones."""
    if not instead:
        return value
    if isinstance(value, Tensor):
        return instead.get(id(value), value)
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(replaced(v, instead) for v in value)
    if isinstance(value, dict):
        return {k: replaced(v, instead) for k, v in value.items()}
    return value


class Look:
    """The states of the tensors of one call."""

    def __init__(self, states: dict[int, State], examples: int):
        self.states, self.examples = states, examples

    def __call__(self, value: Any) -> State:
        """Return where the examples are in an argument; anything but a tensor is shared."""
        return self.states.get(id(value), SHARED) if isinstance(value, Tensor) else SHARED

    def fits(self, shape: Sequence[int], state: State) -> State:
        """Return the state if the shape has room for it, otherwise UNKNOWN."""
        if not isinstance(state, Examples):
            return state
        right = 0 <= state.dim < len(shape) and shape[state.dim] == self.examples * state.inner
        return state if right else UNKNOWN


@dataclass
class Call:
    """One operation: its name (of `name_of`), its arguments, the tensors among them with their states, and one of the tensors it returned.

    Attributes:
        first: the tensor that comes first; None if something else does.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Tensor]
    look: Look
    output: Tensor
    first: Any = field(init=False)

    def __post_init__(self) -> None:
        names = ("input", "tensor", "query")
        found = self.args[0] if self.args else next((self.kwargs[n] for n in names if n in self.kwargs), None)
        self.first = found if isinstance(found, Tensor) else None

    @property
    def state(self) -> State:
        """Where the examples are in the first tensor."""
        return UNKNOWN if self.first is None else self.look.states.get(id(self.first), SHARED)

    @property
    def alone(self) -> bool:
        """Whether no tensor but the first has rows of examples."""
        for t in self.tensors:
            if t is not self.first and isinstance(self.look.states.get(id(t)), Examples):
                return False
        return True

    def argument(self, place: int, names: str | tuple[str, ...], default: Any) -> Any:
        """Return an argument, by its names or its place."""
        return argument(self.args, self.kwargs, place, names, default)


def argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], place: int, names: str | tuple[str, ...], default: Any
) -> Any:
    """Return an argument of a call, by its names or its place."""
    for name in (names,) if isinstance(names, str) else names:
        if name in kwargs:
            return kwargs[name]
    return args[place] if len(args) > place else default
