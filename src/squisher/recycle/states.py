"""The state of an optimizer as every reader delivers it, and the evidence that comes with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import NoAccumulatorError
from ..importance.facts import RunFacts
from ..storage.tensors import TensorSource
from .optimizers import TABLE, Accumulator, identify, is_tensor, rows_of_class, stored

if TYPE_CHECKING:
    from .naming.laws import Law

__all__ = ["Candidate", "Entry", "Found", "FusedSlice", "Named", "OptimizerState", "Options", "Source", "check_usable"]


EMPTY = (
    "The optimizer has no state: it has taken no step yet, or it keeps none (SGD without momentum). Extract after training "
    "with Adam or AdamW, or use squisher.Tracker."
)


@dataclass(frozen=True)
class FusedSlice:
    """A tensor of the weight file that is a flat slice of a fused parameter (one expert of several).

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
        slice: The slice of the parameter that is meant, where a weight file stores it in several.
    """

    state: Mapping[str, Any]
    group: Mapping[str, Any]
    group_number: int = 0
    name: str | None = None
    slice: FusedSlice | None = None

    @cached_property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of the parameter, if its state has it."""
        if "projector" in self.state:  # GaLore: what it keeps has the shape of the projection, not of the parameter
            return None
        for key in ("exp_avg_sq", "exp_avg", "square_avg", "sum", "variance", "exp_inf", "momentum_buffer"):
            if is_tensor(self.state.get(key)):
                return tuple(self.state[key].shape)
        try:
            how = identify(self.state, self.group)
            return tuple(stored(how.key, self.state, self.group).shape)
        except NoAccumulatorError:
            return None


Named = tuple[str, Entry, str | None]
"""A parameter's name, its state, and the class of its optimizer where that is known."""


@dataclass(frozen=True)
class OptimizerState:
    """One optimizer: its parameters in the order of its groups.

    Attributes:
        entries: One per parameter, in the order of the groups.
        class_name: The optimizer's class, where it is known.
        place: Where in the source it is, for messages.
        models: The models that may name its parameters, if not all of the source.
        groups: How many groups the source lists, those without a parameter too, where it is known.
    """

    entries: Sequence[Entry]
    class_name: str | None = None
    place: str = ""
    models: Sequence[Source] | None = None
    groups: int | None = None

    @property
    def group_sizes(self) -> list[int]:
        """How many parameters each group has."""
        sizes: dict[int, int] = {}
        for entry in self.entries:
            sizes[entry.group_number] = sizes.get(entry.group_number, 0) + 1
        return [sizes.get(k, 0) for k in range(max(sizes, default=-1) + 1)]


@dataclass(frozen=True)
class Candidate:
    """One parameter of a model, in registration order: it may be the one that a number in the optimizer stands for.

    Attributes:
        name: Its name in the weight file.
        shape: Its shape.
        module: Full class names of the module that owns it, its bases included; empty where only a state dict is at hand.
        live_name: Its name in the running model, where it differs.
        required: Whether it was surely trained, so that the optimizer must have it.
        slices: What the weight file stores instead of it, where that is several tensors.
        weight: Its value when the state was saved, unread: evidence for names. None where it is not at hand.
        before: Its value at an earlier moment of the same run (an earlier checkpoint, the base model), unread.
    """

    name: str
    shape: tuple[int, ...]
    module: tuple[str, ...] = ()
    live_name: str | None = None
    required: bool = False
    slices: tuple[FusedSlice, ...] = ()
    weight: TensorSource | None = field(default=None, compare=False, repr=False)
    before: TensorSource | None = field(default=None, compare=False, repr=False)


Source = tuple[str, Sequence[Candidate]]
"""Where names may come from: a label for messages, and the parameters of a model in registration order."""


@dataclass(frozen=True)
class Found:
    """The evidence that a reader returns; it decides nothing.

    Attributes:
        optimizers: Every optimizer state, in order.
        models: What may name the parameters.
        facts: What the source proves about the run (batch size, clipping, …).
        conventions: Grouping conventions of the framework that wrote it, each with a label, beside the general ones.
        parameters: All parameters of the model, frozen ones too, where they are known and the models leave some out.
        assume_mean: Whether a loss whose reduction is not recorded may be taken as a mean over examples, torch's default.
        later: Other models, to be tried one after the other where the first leave names open.
        hint: What would settle the names in this format, where they stay open.
        laws: Returns the laws of the model's structure, evidence for names; called once they are needed.
        vouched: Whether the framework that wrote it makes the optimizer itself, with the order of the model in each group.
        distant: Whether the weights may be of another moment than the state: they contradict beyond doubt only.
    """

    optimizers: Sequence[OptimizerState]
    models: Sequence[Source] = ()
    facts: RunFacts = field(default_factory=RunFacts)
    conventions: Sequence[tuple[str, Callable[[Candidate], int | None]]] = ()
    parameters: Sequence[Candidate] = ()
    assume_mean: bool = True
    later: Iterable[Sequence[Source]] = ()
    hint: str = ""
    laws: Callable[[], Sequence[Law]] = tuple
    vouched: bool = False
    distant: bool = False


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
        optimizer: Which optimizer is meant, counted from 0.
        optimizer_class: The optimizer's class, for sources that do not record it.
        in_order: Whether the user vouches that each group keeps the order of the model.
    """

    model: Path | None = None
    base_model: Path | None = None
    trainable: str | None = None
    allow_coarse: bool = False
    named: bool = False
    beta2: float | None = None
    optimizer: int | None = None
    optimizer_class: str | None = None
    in_order: bool = False


def check_usable(optimizer: OptimizerState) -> Accumulator:
    """Return what an optimizer keeps for the first parameter that has a squared gradient, before anybody asks for names.

    Raises:
        NoAccumulatorError: No parameter has a usable accumulator.
    """
    refusal: NoAccumulatorError | None = None
    for entry in optimizer.entries:
        try:
            row = identify(entry.state, entry.group, optimizer.class_name)
        except NoAccumulatorError as error:
            # Without a state, only a class or a group can say which optimizer keeps none (plain SGD).
            named = any(row.meaning == "none" for row in rows_of_class(optimizer.class_name))
            known = named or any(row.matches((), entry.group) for row in TABLE if row.group)
            refusal = refusal or (error if entry.state or known else None)
        else:
            if entry.state:
                return row
    raise refusal or NoAccumulatorError(EMPTY)
