"""A training step under observation (`step`) of a model that is sharded over processes (`fully_shard`).

What the user's step gathers and reduces stays as it is. The squares of a layer are whole while the layer is gathered; when its backward
pass is through they are summed over processes, and each process keeps its shard of the sums (`sharded`). Whatever decides about a pass
is exchanged before it, so that all processes do the same. The proof is the one of `step`, made on shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ... import ranks
from ...ranks import local_of
from ..batches import Batch
from ..rules import Gradients, add_squares
from ..sharded.meshes import is_spread
from ..sharded.shards import Group, Shards, WholeSums
from ..sums import Sums
from .step import Step
from .step_pass import StepPass, weighted_rows

__all__ = ["ShardedStep"]


class ShardedStep(Step):
    """One optimizer step of a sharded model under observation; arguments and attributes as of `Step`.

    `sums` holds this process's shards, summed over the processes that hold the others.
    """

    def __enter__(self) -> ShardedStep:
        is_spread(self.model, tensor_parallel=False)
        self.shards = Shards(self.model, self.parameters)
        self._was_called = False
        self.shards.gather_once()
        self._stack.enter_context(self.shards.watched(lambda group: None, self._entered, self._through, reduced=True))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        if exception[0] is None:
            self.shards.sum_copies(self.sums)

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._was_called = self._was_called or torch.is_grad_enabled()
        super()._called(module, args, kwargs)

    def _new_pass(self, batch: Batch) -> _ShardedPass:
        return _ShardedPass(self.model, batch, self.shards, self.proven.guess)

    def _entered(self, group: Group, inputs: list[tuple[Tensor, Tensor]]) -> None:
        if self.current is not None:
            for before, after in inputs:
                self.current.carry(before, after)

    def _through(self, group: Group) -> None:
        one = self.last
        if isinstance(one, _ShardedPass):
            one.through(group)

    def backward(self, loss: Tensor, gradient: Tensor | None, **settings: Any) -> None:
        """Make the user's backward pass and take its squares on the way; all processes together."""
        if not self._was_called:
            super().backward(loss, gradient, **settings)
            return
        one, self.current, self._was_called = self.current, None, False
        prove = False
        if isinstance(one, _ShardedPass):
            self.problem = self.problem or one.hindrance(loss, settings) or one.measure(loss, gradient, self.factor)
            prove = self.anew or one.program not in self.proven
        told = ranks.gather((self.problem, prove, one.used_again if one is not None else set()))
        self.problem = next((problem for problem, *_ in told if problem), "")
        if self.problem or not isinstance(one, _ShardedPass):
            if one is not None:
                self._forget_guess(one)
            loss.backward(gradient, **settings)
            return
        self.last = one
        prove = any(p for _, p, _ in told)
        one.begin(self.dtype, set().union(*(late for *_, late in told)), prove)
        if prove:
            one.weigh(loss, gradient)
        one.start(self.dtype, None)
        loss.backward(gradient, **settings)
        one.finish()
        self._conclude(one, prove)

    @torch.no_grad()
    def _conclude(self, one: _ShardedPass, prove: bool) -> None:
        known = self.proven.get(one.program, set())
        if prove:
            known = known | (one.present - one.refused.keys())
        told = ranks.gather((one.spoiled, one.finite, one.present - known - one.refused.keys(), one.refused))
        self.problem = next((spoiled for spoiled, *_ in told if spoiled), "")
        if self.problem:
            self._forget_guess(one)
            return
        self.passes += 1
        self.finite = self.finite and all(finite for _, finite, *_ in told)
        if not self.finite:
            return
        for *_, refused in told:
            self.refused.update(refused)
        if prove:
            self.proven[one.program] = known - self.refused.keys()
        first = sorted(set().union(*(new for *_, new, _ in told)) - self.refused.keys())
        if first:
            self.proven.pop(one.program, None)
            self.problem = f"{first[0]} has its first gradient, which is proven in the next step"
            return
        self.examples += one.counted
        self.positions = self.positions or one.positions
        for name, total in one.target.items():
            if name in self.refused:
                self.sums.pop(name, None)
            elif name in self.sums:
                self.sums[name].add_(total)
            else:
                self.sums[name] = total


class _ShardedPass(StepPass):
    """The forward and the backward pass of a (micro-)batch; `present` are the parameters with a gradient here."""

    def __init__(self, model: nn.Module, batch: Batch, shards: Shards, guess: bool):
        super().__init__(model, batch, shards.gathered(), guess, shards.everything())
        self.shards = shards
        self.present: set[str] = set()
        self.scale = 0.0
        self._weighing = False
        self._proof: dict[str, WholeSums] = {}

    def measure(self, loss: Tensor, gradient: Tensor | None, given: float | None) -> str:
        """Find the factor of the loss before the backward pass: squares are divided by it as they come; returns what hinders."""
        outputs = [r.output for r in self.reductions if r.output is not None]
        found = torch.autograd.grad(loss, outputs, gradient, retain_graph=True, allow_unused=True)
        for reduction, g in zip(self.reductions, found, strict=True):
            reduction.arrived = [] if g is None else [g.detach()]
        factor = self.factor() if given is None else given
        for reduction in self.reductions:
            reduction.arrived.clear()
        self.scale = 1 / factor if factor else 0.0
        return self.DIFFERENT_FACTORS if factor is None else ""

    def begin(self, dtype: torch.dtype, late: set[str], prove: bool) -> None:
        """Make room for the sums of this pass, and, if they are to be proven, for those that are compared with them."""
        local = {name: local_of(p) for name, p in self.shards.parameters.items()}
        self.target = Sums(local, dtype)
        self.whole = WholeSums(self.shards, self.target, self.scale**2, late)
        weights = {"arrived": self.scale, "given": self.scale, "one by one": self.scale**2, "bound": self.scale**2}
        if prove:
            self._proof = {
                what: WholeSums(self.shards, Sums(local, dtype), weight, late if what != "arrived" else ())
                for what, weight in weights.items()
            }

    def weigh(self, loss: Tensor, gradient: Tensor | None) -> None:
        """Make a backward pass with the loss of example n multiplied by r_n, and keep Σ_n r_n g_n of the parameters, in shards."""
        outputs, columns = weighted_rows(self, loss, gradient)
        with self.shards.apart(), _without_gradients(self.shards.plain.values()):
            self._weighing = True
            torch.autograd.backward(outputs, columns, retain_graph=True)
            for group in self.shards.groups:
                self._keep(group.gradients())
            self._keep({name: p.grad for name, p in self.shards.plain.items() if p.grad is not None})
            self._weighing = False
        self._proof["arrived"].flush_rest(ranks.gather)

    def start(self, *args: Any) -> None:
        """Begin to take the squares of what arrives; arguments as of `StepPass.start`."""
        weights = self.weights
        super().start(*args)
        self.sums, self.weights = self.whole, weights
        self.bounds = {} if self._proof else None

    def through(self, group: Group) -> None:
        """Reduce the whole sums of a group, when its backward pass is through."""
        if self._weighing:
            self._keep(group.gradients())
            self._proof["arrived"].flush(group)
        elif self._in_backward:
            for sums in (self.whole, *(s for what, s in self._proof.items() if what != "arrived")):
                sums.flush(group)

    @torch.no_grad()
    def _keep(self, gradients: Mapping[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            total = self._proof["arrived"][name]
            total.add_(gradient.to_dense().to(total.dtype))

    def _add(self, name: str, summands: list[Gradients]) -> None:
        if name in self.refused:
            return
        total = self.whole[name]
        add_squares(total, summands)
        if name not in self.present and bool(total.any()):
            self.present.add(name)
        if not self._proof or self.weights is None:
            return
        given, one_by_one, bound = (self._proof[what][name] for what in ("given", "one by one", "bound"))
        bound.add_(self._one_by_one(name, summands, self.weights, given, one_by_one))

    @torch.no_grad()
    def finish(self) -> None:
        """Complete what waited, reduce it, and see whether the rules agree with what arrived."""
        self._complete()
        for sums in (self.whole, *(s for what, s in self._proof.items() if what != "arrived")):
            sums.flush_rest(ranks.gather)
        if not self._proof:
            return
        arrived, given, one_by_one, bound = (
            self._proof[what].target for what in ("arrived", "given", "one by one", "bound")
        )
        for name in self.parameters:
            self._judge(name, self.target[name], given[name], arrived[name], one_by_one[name], bound[name])


@contextmanager
def _without_gradients(parameters: Any) -> Iterator[None]:
    """Put the gradients of parameters aside inside."""
    before = [(p, p.grad) for p in parameters]
    for p, _ in before:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in before:
            p.grad = gradient
