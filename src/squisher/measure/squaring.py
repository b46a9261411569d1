"""The backward passes of a captured forward pass: what arrives at each use of a parameter is squared for each example."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from ..ranks import is_sharded
from .batches import Batch
from .capture import Capture, Obstacle, Use
from .likelihood import Objective, Outputs
from .rules import Dense, Gradients, Outer, add_outer, add_squares
from .sampling import normals
from .sharded.parallel import local_gradient, shard_of_gradients

__all__ = ["Pass", "forward_pass"]


def forward_pass(
    model: nn.Module, objective: Objective, batch: Batch, parameters: Mapping[str, Tensor]
) -> tuple[Pass, Outputs]:
    """Run a forward pass; if it fails and had guessed, run it again without guesses. Arguments are those of `Pass`.

    Raises:
        Obstacle: this batch cannot be done at once.
    """
    one = Pass(model, objective, batch, parameters)
    try:
        return one, one.forward()
    except Obstacle:
        if not one.guessed:
            raise
    one = Pass(model, objective, batch, parameters, guess=False)
    return one, one.forward()


class Pass(Capture):
    """One forward pass over the examples of a batch and its backward passes.

    It is made with the arguments of `Capture`.

    Attributes:
        many: whether several columns are sent back.
        at_least: columns to send back, with zeros after the last: processes that share a model need the same number.
        bounds: the squares of everything that is added up in each parameter's gradient, from which its rounding error is judged; None
            if they are not wanted.
    """

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **settings)
        objective = self.objective
        self.many = objective.several
        self.at_least = 0
        self.bounds: dict[str, list[Gradients]] | None = None
        self.sums: Mapping[str, Tensor] = {}
        self._done: set[str] = set()
        self._arrivals: dict[int, int] = {}
        self._pending: dict[int, list[Gradients]] = {}
        self._squares: dict[str, tuple[Outer, Tensor]] = {}

    def backward(
        self, outputs: Outputs, index: Tensor, sums: Mapping[str, Tensor], halves: bool = False, again: bool = False
    ) -> None:
        """Send every column back and add the squares of what arrives.

        Args:
            outputs: of `forward`.
            index: where each example is in the stream.
            sums: what to add to, by name.
            halves: send back the columns of one half of the examples after those of the other: the same, if they do not mix.
            again: whether it is called once more, so that the graph must stay.

        Raises:
            Obstacle: something arrived where it should not have (only under re-entrant checkpointing); the sums are spoiled.
        """
        self.sums = sums
        self._uses.clear()  # the hooks hold what is needed, and let go of it as soon as it is not
        if not outputs.values.requires_grad:
            return
        self._in_backward = True
        self.many = self.many or halves or again
        engine = torch.autograd.Variable._execution_engine
        with self._watch:  # checkpointing runs parts of the forward pass again
            for column in self._columns(outputs, index, halves):
                self._arrivals.clear()
                self._done.clear()
                # Not `backward`, which switches the mode off, nor `grad`, which re-entrant checkpointing refuses.
                engine.run_backward(
                    (outputs.values,), (column,), self.many, False, (), allow_unreachable=True, accumulate_grad=True
                )
                self._end_column()
        self._end()
        self.sums = {}  # hooks and this pass hold each other; the sums must not wait for the garbage collector
        leaked = [name for name, p in self.parameters.items() if p.grad is not None]
        for name in leaked:
            self.parameters[name].grad = None
        if leaked:
            raise Obstacle(dict.fromkeys(leaked, "it is used in an operation without a rule, under checkpointing"))

    def _columns(self, outputs: Outputs, index: Tensor, halves: bool = False) -> Iterator[Tensor]:
        columns = iter(self.objective.columns(outputs, index))
        if halves:
            columns = _in_halves(columns, index)
        for number in count():
            with torch._C.DisableTorchFunction():
                column = next(columns, None)
                if column is None and number < self.at_least:
                    column = torch.zeros_like(outputs.values)
            if column is None:
                return
            yield column

    @torch.no_grad()
    def _arrived(self, g: Tensor, uses: list[Use]) -> None:
        if not self._in_backward:  # the model itself takes gradients in its forward pass
            return
        self.types.add(g.dtype)
        with _full_precision(g.device.type), torch._C.DisableTorchFunction():
            for use in uses:
                gradients = partial(shard_of_gradients, use.source, use.rule) if is_sharded(g) else use.rule.gradients
                if self.bounds is not None:
                    for name in self._names_behind(use.source) if id(use.source) in self._names else ():
                        bound = gradients(g.square(), use.dim, self.examples, squared=True)
                        self.bounds.setdefault(name, []).append(bound)
                self._take(use.source, gradients(g, use.dim, self.examples))
        if not self.many:
            uses.clear()  # no other column comes: the inputs that the rules hold are free

    def _take(self, source: Tensor, summand: Gradients) -> None:
        key = id(source)
        name = self._names.get(key)
        self._arrivals[key] = self._arrivals.get(key, 0) + 1
        if name is None or name in self._parts or self._expected.get(key, 0) > 1:
            if name in self._done or any(n in self._done for n in self._names_behind(source)):
                raise Obstacle({n: "its uses come in several parts" for n in self._names_behind(source)})
            self._pending.setdefault(key, []).append(summand)
            if (
                name is not None
                and name not in self._parts
                and self._arrivals[key] == self._expected[key]
                and not self.reentrant
            ):
                add_squares(self.sums[name], self._pending.pop(key))
            return
        if name in self._done:
            raise Obstacle({name: "it is used more often in the backward pass than in the forward pass"})
        self._done.add(name)
        # The squares of a sharded layer do not wait for the last column: they would be whole in all layers.
        if self.many and not self._sharded and isinstance(summand, Outer) and summand.left.shape[1] == 1:
            self._aggregate(name, summand)
        else:
            summand.add_squares(self.sums[name])

    def _aggregate(self, name: str, summand: Outer) -> None:
        """Sum the squares over columns first: Σ_columns (g²)ᵀ(a²) = (Σ_columns g²)ᵀ(a²) takes one matrix product."""
        g = (summand.left if summand.gradient_on_left else summand.right)[:, 0].to(self.sums[name].dtype)
        if name in self._squares:
            self._squares[name][1].addcmul_(g, g)
        else:
            self._squares[name] = (summand, g.square())

    @torch.no_grad()
    def _end_column(self) -> None:
        """Finish a backward pass: add what still waits for a use whose output got no gradient."""
        with torch._C.DisableTorchFunction():
            waiting, self._pending = self._pending, {}
            behind: set[str] = set()
            sources = []
            for key, (source, names) in self._behind.items():
                if key in waiting:
                    sources.append((source, waiting.pop(key)))
                    behind |= names
            if sources:
                direct = {name: waiting.pop(id(self.parameters[name]), []) for name in behind}
                self._through(sources, direct)
            for key, summands in waiting.items():
                add_squares(self.sums[self._names[key]], summands)

    def _through(self, sources: list[tuple[Tensor, list[Gradients]]], direct: dict[str, list[Gradients]]) -> None:
        """Send each example's gradient of what was made of parameters on to the parameters, and square it with their own uses."""
        parameters = [self.parameters[name] for name in direct]
        tensors = [source for source, _ in sources]
        for n in range(self.examples):
            arriving = [sum(p.example(n, s.shape) for p in summands).to(s.dtype) for s, summands in sources]  # type: ignore[union-attr]
            if self.bounds is not None:
                self._bound_through(self.bounds, direct, arriving)
            found = torch.autograd.grad(tensors, parameters, arriving, retain_graph=True, allow_unused=True)
            for (name, summands), gradient in zip(direct.items(), found, strict=True):
                total = self.sums[name]
                own = None if gradient is None else local_gradient(gradient, self.parameters[name])
                whole = torch.zeros_like(total) if own is None else own.to(total.dtype)
                for summand in summands:
                    whole = whole + summand.example(n, total.shape).to(total.dtype)
                total.addcmul_(whole, whole)

    def _bound_through(self, bounds: dict[str, list[Gradients]], names: Iterable[str], arriving: list[Tensor]) -> None:
        """Note a bound on rounding errors for gradients that come through other tensors: all that arrives, spread evenly."""
        for name in names:
            total = sum(float(g.square().sum()) for g in arriving) / max(1, self.parameters[name].numel())
            value = torch.full((1,) * (self.parameters[name].dim() + 1), total, device=self.parameters[name].device)
            bounds.setdefault(name, []).append(Dense(value.expand(1, *self.parameters[name].shape)))

    @torch.no_grad()
    def _end(self) -> None:
        """Add what was summed over the columns, after the last one."""
        with torch._C.DisableTorchFunction():
            for name, (summand, squares) in self._squares.items():
                total = self.sums[name].view(summand.left.shape[2], -1)
                if summand.gradient_on_left:
                    add_outer(total, squares, summand.right[:, 0].to(total.dtype).square())
                else:
                    add_outer(total, summand.left[:, 0].to(total.dtype).square(), squares)
            self._squares.clear()


def _in_halves(columns: Iterator[Tensor], index: Tensor) -> Iterator[Tensor]:
    """Yield each column with zeros for a half of the examples that is drawn at random, and then for the others."""
    place = normals(0, index, 0, 1)[:, 0].argsort().argsort()
    for column in columns:
        for half in (place % 2 == 0, place % 2 == 1):
            rows = half.to(column.device, column.dtype)
            yield column * rows.view(-1, *(1,) * (column.dim() - 1))


def _full_precision(device: str) -> AbstractContextManager[Any]:
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
