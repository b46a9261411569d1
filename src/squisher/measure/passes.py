"""One forward and backward pass in which every use of a parameter is seen and its gradients are squared for each example."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .attention import multi_head_attention, supports
from .batches import Batch
from .columns import send_back
from .layers import Rule
from .likelihood import Objective
from .operations import IN_PLACE, OPERATIONS
from .pieces import Outer, Piece, Squares, add_squares

__all__ = ["Layout", "Pass", "Watch", "anchored", "run"]


@dataclass(frozen=True)
class Layout:
    """Where the examples are in the output of one use of a parameter: at `dim`, or nowhere (None)."""

    dim: int | None
    rows: bool = False
    """Whether an example has several rows there."""


Seen = Callable[[list[tuple[str, Rule]], Tensor], Tensor]


class Watch(TorchFunctionMode):
    """Calls `seen` for every operation that uses one of the parameters; what it returns takes the output's place."""

    def __init__(self, parameters: Mapping[str, Tensor], seen: Seen):
        super().__init__()
        self.names = {id(p): name for name, p in parameters.items()}
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = OPERATIONS.get(func)
        if rule is None:
            if func is F.multi_head_attention_forward:
                return self._attention(args, kwargs)
            return func(*args, **kwargs)
        output = func(*args, **kwargs)
        names = self.names
        if not any(id(a) in names for a in args) and not any(id(a) in names for a in kwargs.values()):
            return output
        if func in IN_PLACE and not output.requires_grad:  # the output cannot be replaced by one that does
            return output
        try:
            uses = [(names[id(p)], r) for p, r in rule(output, *args, **kwargs) if id(p) in names]
        except TypeError:  # an overload that the table does not know: the parameter stays unseen
            return output
        return self.seen(uses, output) if uses else output

    def _attention(self, args: Any, kwargs: Any) -> Any:
        names = F.multi_head_attention_forward.__code__.co_varnames
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        if not supports(arguments):
            return F.multi_head_attention_forward(*args, **kwargs)
        with self:  # inside a mode's own handler it is off
            return multi_head_attention(**arguments)


def anchored(output: Tensor, leaf: Tensor) -> Tensor:
    """The output, or a copy of it that requires a gradient although nothing before it does."""
    return output if output.requires_grad else _Anchor.apply(output, leaf)


def _full_precision(device: str) -> AbstractContextManager[Any]:
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, leaf: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


@dataclass
class Pass:
    """One forward pass and its backward passes over some examples.

    Attributes:
        sums: where squares go, by name.
        layouts: for every parameter, the layouts of its uses in order.
        examples: how many there are.
        many: whether several columns go through the same graph.
        bounds: gets the pieces of absolute values of each parameter, if wanted.
        spoiled: what could not be captured, and why.
        types: of the gradients that arrived.
    """

    sums: Mapping[str, Tensor]
    layouts: Mapping[str, list[Layout]]
    examples: int
    many: bool = False
    bounds: dict[str, list[Piece]] | None = None
    spoiled: dict[str, str] = field(default_factory=dict)
    types: set[torch.dtype] = field(default_factory=set)
    _used: dict[str, int] = field(default_factory=dict)
    _unseen: dict[str, int] = field(default_factory=dict)
    _pending: dict[str, list[Piece]] = field(default_factory=dict)
    _squares: dict[str, tuple[Outer, Tensor]] = field(default_factory=dict)
    _to_come: dict[str, int] | None = None
    _leaf: Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))

    # -- forward -------------------------------------------------------------------------------------------------------

    def seen(self, uses: list[tuple[str, Rule]], output: Tensor) -> Tensor:
        """An operation used these parameters; returns what is to stand for its output."""
        if not torch.is_grad_enabled():
            # Re-entrant checkpointing: the forward pass comes again, with gradients, during the backward pass.
            for name, _ in uses:
                self._unseen[name] = self._unseen.get(name, 0) + 1
            return output
        if self._to_come is not None:
            # Checkpointing that is not re-entrant also computes again, but what it computes gets no gradient.
            uses = [(name, rule) for name, rule in uses if self._to_come.get(name, 0) > 0]
            for name, _ in uses:
                self._to_come[name] -= 1
        kept: list[tuple[str, Rule, Layout]] = []
        for name, rule in uses:
            layout = self._layout(name, tuple(output.shape))
            if layout is not None:
                kept.append((name, rule, layout))
        if not kept:
            return output
        output = anchored(output, self._leaf)
        if any(layout.dim is None for _, _, layout in kept):
            # Used by all examples alike (positions): one copy of the output for each, so that each has its own gradient.
            lead = output if output.dim() > 1 and output.shape[0] == 1 else output.unsqueeze(0)
            output = lead.expand(self.examples, *lead.shape[1:])
            kept = [(name, rule, Layout(0)) for name, rule, _ in kept]
        versions = [[(t, t._version) for t in rule.saved()] for _, rule, _ in kept]
        output.register_hook(lambda g: self._arrived(g, kept, versions))
        return output

    def _layout(self, name: str, shape: tuple[int, ...]) -> Layout | None:
        """Where the examples are in this use, None if it is not to be captured."""
        number = self._used.get(name, 0)
        self._used[name] = number + 1
        layouts = self.layouts.get(name)
        if layouts is None or name in self.spoiled:
            return None
        if number >= len(layouts):
            self.spoiled[name] = "it is used more often in a later batch"
            return None
        layout = layouts[number]
        if layout.dim is not None:
            size = shape[layout.dim] if layout.dim < len(shape) else 0
            if size % self.examples or size == 0 or (size != self.examples and not layout.rows):
                self.spoiled[name] = "it is used with another batch dimension in a later batch"
                return None
        return layout

    @property
    def computed_again(self) -> bool:
        """Whether something was run without gradients first, to be run again in the backward pass (re-entrant checkpointing)."""
        return bool(self._unseen)

    # -- backward ------------------------------------------------------------------------------------------------------

    def start_column(self) -> None:
        """A backward pass is about to start."""
        if self._to_come is None:
            for name, layouts in self.layouts.items():
                uses = self._used.get(name, 0) + self._unseen.get(name, 0)
                if uses not in (0, len(layouts)):
                    self.spoiled[name] = "it is used less often in a later batch"
        self._to_come = dict(self._unseen)
        for name, times in self._unseen.items():
            self._used[name] = len(self.layouts.get(name, ())) - times

    def backward(self, values: Tensor, column: Tensor) -> None:
        """Send a column back. Not by autograd.grad, which re-entrant checkpointing refuses."""
        if not self._unseen:
            send_back(values, column, self.many)
            return
        # Re-entrant checkpointing runs the forward pass again now, and a mode is off while `backward` is under way.
        engine = torch.autograd.Variable._execution_engine
        engine.run_backward((values,), (column,), self.many, False, (), allow_unreachable=True, accumulate_grad=True)

    @torch.no_grad()
    def _arrived(
        self, g: Tensor, uses: list[tuple[str, Rule, Layout]], versions: list[list[tuple[Tensor, int]]]
    ) -> None:
        self.types.add(g.dtype)
        with _full_precision(g.device.type), torch._C.DisableTorchFunction():
            # A bias and its weight need the same squares.
            squares = Squares(g)
            for (name, rule, layout), held in zip(uses, versions, strict=True):
                if name in self.spoiled:
                    continue
                if any(t._version != version for t, version in held):
                    self.spoiled[name] = "its input is changed in place after use"
                    continue
                try:
                    if self.bounds is not None:
                        bound = rule.piece(g, layout.dim or 0, self.examples, absolute=True)
                        self.bounds.setdefault(name, []).append(bound)
                    self._take(name, rule.piece(g, layout.dim or 0, self.examples), squares)
                except (ValueError, RuntimeError) as error:
                    self.spoiled[name] = f"its rule does not fit ({error})"
        if not self.many:
            # No other column comes: the inputs that the rules hold are free from here on, not only when the graph is.
            uses.clear()
            versions.clear()

    def _take(self, name: str, piece: Piece, squares: Squares) -> None:
        uses = len(self.layouts[name])
        if uses > 1:
            held = self._pending.setdefault(name, [])
            held.append(piece)
            if len(held) == uses:
                add_squares(self.sums[name], self._pending.pop(name))
        elif self.many and isinstance(piece, Outer) and piece.left.shape[1] == 1:
            self._aggregate(name, piece)
        else:
            piece.add_squares(self.sums[name], squares)

    def _aggregate(self, name: str, piece: Outer) -> None:
        """Σ_columns (g²)ᵀ(a²) = (Σ_columns g²)ᵀ(a²): one matrix product for all columns."""
        g = (piece.left if piece.gradient_on_left else piece.right)[:, 0].to(self.sums[name].dtype)
        if name in self._squares:
            self._squares[name][1].addcmul_(g, g)
        else:
            self._squares[name] = (piece, g.square())

    @torch.no_grad()
    def end_column(self) -> None:
        """The backward pass is over: what waits for a use whose output did not matter is complete."""
        for name in list(self._pending):
            pieces = self._pending.pop(name)
            if name not in self.spoiled:
                add_squares(self.sums[name], pieces)

    @torch.no_grad()
    def end(self) -> None:
        """All columns are through."""
        for name, (piece, squares) in self._squares.items():
            total = self.sums[name].view(self.sums[name].shape[0], -1)
            if piece.gradient_on_left:
                total.addmm_(squares.T, piece.right[:, 0].to(total.dtype).square())
            else:
                total.addmm_(piece.left[:, 0].to(total.dtype).square().T, squares)
        self._squares.clear()


def run(
    one: Pass, model: nn.Module, objective: Objective, batch: Batch, index: Tensor, parameters: Mapping[str, Tensor]
) -> int:
    """Send a batch through the model and its columns back, with every use of the parameters captured.

    Args:
        one: what receives the uses and their gradients.
        model: with frozen parameters.
        objective: which Fisher.
        batch: the examples.
        index: where each example is in the stream.
        parameters: those to watch.

    Returns:
        How many units (examples, or tokens) there were.
    """
    watch = Watch(parameters, one.seen)
    with watch:
        outputs = objective.outputs(model, batch)
    # Every call that a mode sees costs some microseconds, so it is on in the backward pass only where the forward pass comes again.
    with watch if one.computed_again else nullcontext():
        values = outputs.values
        if values.requires_grad:
            for column in objective.columns(outputs, index):
                one.start_column()
                one.backward(values, column)
                one.end_column()
        one.end()
    return objective.units(outputs)
