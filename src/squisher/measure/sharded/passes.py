"""The passes over a sharded model, which all processes make at the same time.

A pass gathers layers from all processes. Whatever a process learns in its forward pass is exchanged before the backward pass, so that all of
them either make it or leave it out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...errors import SquisherError
from ..batches import Batch
from ..capture import Obstacle
from ..likelihood import Objective, Outputs
from ..loop import requiring
from ..proof import difference_of, doubts_of, interaction
from ..squaring import Pass
from ..sums import Sums, add_square
from .meshes import Exchange
from .parallel import conversions, local_gradient
from .shards import Group, Shards, WholeSums

__all__ = ["Passes", "Told"]


class Told(NamedTuple):
    """What a process tells the others about its forward pass."""

    obstacle: dict[str, str] | None
    guessed: bool
    program: str
    known: bool
    proven: set[str]
    captured: set[str]
    used_again: set[str]
    outputs: tuple[Any, ...]
    doubted: list[int]


class Passes:
    """Forward and backward passes of all processes.

    Args:
        model: in the mode and on the device that are wanted.
        parameters: with respect to what, by name.
        shards: the groups of parameters that are gathered at the same time.
        exchange: how the processes tell one another what they found.

    Attributes:
        proven: by the hash of a sequence of operations, the parameters whose rules were proven for it.
        reached: the parameters that a gradient has reached.
        tally: what a pass adds to each parameter, summed over its entries, if wanted.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, Tensor], shards: Shards, exchange: Exchange) -> None:
        self.model, self.parameters, self.shards, self.exchange = model, parameters, shards, exchange
        self.proven: dict[str, set[str]] = {}
        self.reached: set[str] = set()
        self.tally: dict[str, Tensor] | None = None
        self._one: Pass | None = None
        self._whole: WholeSums | None = None
        self._calls: dict[int, tuple[int, int]] = {}
        self._through: dict[int, int] = {}
        self._squared: set[int] = set()
        self._waiting: set[int] = set()
        self._numbers: set[int] = set()
        self._sending = self._checking = False

    def watched(self) -> AbstractContextManager[None]:
        """Watch the groups of the model inside; every pass needs it."""
        return self.shards.watched(self._gathering, self._entered, self._backward_through)

    def run_once(self, objective: Objective, batch: Batch) -> None:
        """Run the model, so that every layer has been gathered and its parameters are known.

        Raises:
            SquisherError: the processes gather different layers. Here that is noticed before each of them, later only afterwards,
                if they have the same size: otherwise the processes fail or wait for each other, as in training.
        """
        self._checking = True
        with torch.no_grad():
            objective.raw(self.model, batch.select([0, 1]).copy())
        self._checking = False
        self.exchange(None)
        self.shards.reshard()

    def forward(
        self, objective: Objective, batch: Batch, alone: Mapping[int, Tensor] | None = None
    ) -> tuple[Pass, Outputs, list[Told]]:
        """Run a forward pass in which every use of a parameter is seen, if need be a second time without guesses.

        Args:
            objective: which Fisher, or a probe of it.
            batch: two examples or more.
            alone: the outputs of some of them on their own, to compare with.

        Raises:
            Obstacle: on all processes, if it cannot be done at once on one of them.
        """
        reasons: dict[str, str] = {}
        for guess in (True, False):
            one = Pass(self.model, objective, batch, self.shards.gathered(), guess, self.shards.everything())
            outputs, failure, obstacle = None, None, None
            self._calls.clear()
            self._one = one
            try:
                with self.shards.requiring(), self._following(one):
                    outputs = one.forward()
                if one.reentrant or not outputs.values.requires_grad:
                    what = "re-entrant checkpointing" if one.reentrant else "outputs without a gradient"
                    obstacle = {"": f"{what} in a sharded model"}
                elif one.custom:
                    obstacle = {"": "a backward function in Python, in a sharded model"}
                for n, own in (alone or {}).items():
                    found = difference_of(self.model, own, outputs.values.detach(), n)
                    failure = interaction(n, found, batch.size) if found else failure
            except Obstacle as found_obstacle:
                obstacle = found_obstacle.reasons
            except SquisherError as error:
                failure = error
            self._one = None
            program = hashlib.sha256(repr(one.program).encode()).hexdigest()
            proven = self.proven.get(program)
            here = Told(
                obstacle,
                one.guessed,
                program,
                proven is not None,
                proven or set(),
                one.captured,
                one.used_again,
                self.exchange.form(None if outputs is None else outputs.values),
                [n for n in doubts_of(one, self._numbers) if n not in (alone or {})],
            )
            told = self.exchange(here, failure)
            self.exchange.check_outputs([t.outputs for t in told])
            reasons = {k: v for t in told for k, v in (t.obstacle or {}).items()}
            if not reasons and outputs is not None:
                return one, outputs, told
            self.shards.reshard()
            if not any(t.guessed for t in told):
                break
        raise Obstacle(reasons)

    def backward(self, sums: Sums, one: Pass, outputs: Outputs, index: Tensor, weight: float, told: list[Told]) -> None:
        """Make the backward pass of a forward pass, and add the squares that the rules give."""
        late = set().union(*(t.used_again for t in told))
        whole = self._whole = WholeSums(self.shards, sums, weight, late, self.tally)
        self._one = one
        if one.objective.each_position:  # a column for every position that counts
            one.at_least = max(self.exchange(sum(1 for _ in one.objective.columns(outputs, index))))
        try:
            with self.shards.requiring(), self._following(one):
                one.backward(outputs, index, whole)
            if any(group.gradients() for group in self.shards.groups):
                raise Obstacle({"": "a gradient arrived past the rules"})
        except Obstacle as obstacle:  # too late for the loop: some squares are in the sums
            raise SquisherError(
                f"Checkpointing uses parameters in its second pass in another way than before ({obstacle}). Use method='loop'."
            ) from obstacle
        finally:
            self._one = self._whole = None
        whole.flush_rest(self.exchange)

    def loop(
        self,
        sums: Sums,
        batch: Batch,
        index: Tensor,
        weight: float,
        objective: Objective,
        seen: list[Tensor] | None = None,
    ) -> int:
        """Add the squares of gradients, one example (or one whole batch) after the other; returns how many units there were."""
        step = 1 if objective.per == "example" else batch.size
        mine = -(-batch.size // step) if weight else 0
        units = 0
        for n in range(max(self.exchange(mine))):
            first = n * step if n < mine else 0
            example, place = batch.take(first, first + step), index[first : first + step]
            failure: SquisherError | None = None
            outputs: Any = None
            terms: list[Tensor] = []
            self._calls.clear()
            with requiring(self.model, self.parameters) as everything:
                try:
                    outputs = objective.outputs(self.model, example)
                    terms = [term.sum() for term in objective.terms(outputs, place)]
                except SquisherError as error:
                    failure = error
                ready = [t.requires_grad for t in terms]
                told = self.exchange(
                    (
                        len(terms),
                        any(ready),
                        all(ready),
                        self.exchange.form(None if outputs is None else outputs.values),
                    ),
                    failure,
                )
                self.exchange.check_outputs([form for *_, form in told])
                units += objective.units(outputs) if n < mine else 0
                if seen is not None:
                    seen.append(outputs.values[0].detach())
                if any(some for _, some, *_ in told) and not all(every for _, _, every, _ in told):
                    raise SquisherError("The outputs have a gradient on some processes and not on others.")
                for k in range(max(count for count, *_ in told) if told[0][1] else 0):
                    counts = n < mine and k < len(terms)
                    self._gradient(sums, terms[min(k, len(terms) - 1)], weight if counts else 0.0)
                    for parameter in everything:
                        parameter.grad = None
            self.shards.reshard()
        return units

    def alone(self, objective: Objective, batch: Batch, doubted: list[int], passes: int) -> dict[int, Tensor]:
        """Return the outputs of single examples; every process makes the same number of passes."""
        self.shards.reshard()
        alone: dict[int, Tensor] = {}
        chosen = list(dict.fromkeys([*doubted, *range(batch.size)]))
        for n in range(passes):
            with torch.no_grad():
                place = chosen[n % len(chosen)]
                alone[place] = objective.outputs(self.model, batch.take(place, place + 1)).values[0]
            self.exchange(None)
            self.shards.reshard()
        return alone

    def _gradient(self, sums: Sums, scalar: Tensor, weight: float) -> None:
        """Send one scalar back and add the squares of the gradients."""
        whole = self._whole = WholeSums(self.shards, sums, weight, (), self.tally)
        for known in (self._through, self._squared, self._waiting):
            known.clear()
        self._sending = True
        try:
            scalar.backward(retain_graph=True)
            for group in self.shards.groups:
                late = group.gradients()
                if late and id(group) in self._squared:
                    raise SquisherError(
                        f"A gradient of {next(iter(late))!r} arrives after its layer's backward pass. Use a parameter only inside "
                        "the module that fully_shard was given, or measure the model before it is sharded."
                    )
                self._square(late)
            with torch.no_grad():
                plain = {n: (p, p.grad) for n, p in self.shards.plain.items() if p.grad is not None}
                self._square({n: local_gradient(gradient, p) for n, (p, gradient) in plain.items()})
        finally:
            self._whole, self._sending = None, False
        whole.flush_rest(self.exchange)

    @torch.no_grad()
    def _square(self, gradients: Mapping[str, Tensor]) -> None:
        whole = self._whole
        if whole is None:
            return
        for name, gradient in gradients.items():
            self.reached.add(name)
            add_square(whole[name], gradient)

    def _following(self, one: Pass) -> AbstractContextManager[None]:
        return conversions(one.convert) if self.exchange.replicas.parallel else nullcontext()

    # -- called by the model's groups ----------------------------------------------------------------------------------------

    def _gathering(self, group: Group) -> None:
        self.exchange.gathered.append(self.shards.groups.index(group))
        if self._checking:
            self.exchange(None)

    def _entered(self, group: Group, inputs: list[tuple[Tensor, Tensor]]) -> None:
        calls, ends = self._calls.get(id(group), (0, 0))
        self._calls[id(group)] = (calls + 1, ends + bool(inputs))
        if self._sending:
            self._waiting.add(id(group))  # checkpointing: its gradient may come in several parts
        if self._one is not None:
            for before, after in inputs:
                self._one.carry(before, after)

    def _backward_through(self, group: Group) -> None:
        if self._whole is None or id(group) not in self._calls:
            group.gradients()
            return
        if self._one is not None:
            self._whole.flush(group)
            return
        self._through[id(group)] = self._through.get(id(group), 0) + 1
        # A module that is called several times is through as often, if all its inputs need gradients; otherwise its gradients are
        # squared at the end, and so are those of checkpointing. What comes after they were squared is refused there.
        calls, ends = self._calls[id(group)]
        complete = ends == 0 and calls == 1 if calls > ends else self._through[id(group)] == ends
        if complete and id(group) not in self._waiting | self._squared:
            self._square(group.gradients())
            self._whole.flush(group)
            self._squared.add(id(group))
