"""The engine for sharded models: every process has batches of its own, and all take each step together.

A pass gathers layers from all processes, so all processes must make the same passes: whatever decides about a pass is exchanged first. A
process that has no batch left repeats one that it has seen, with weight 0.
"""

from __future__ import annotations

import dataclasses
import hashlib
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import ranks
from ...errors import SquisherError
from ...ranks import is_sharded, local_of
from ..batches import Batch, digest_of
from ..capture import Obstacle
from ..fast import PROVEN_ANEW, left_to_the_loop
from ..likelihood import Objective, Outputs, compared_with_own
from ..loop import requiring
from ..proof import (
    Difference,
    Probe,
    compare,
    difference_of,
    differing,
    doubts_of,
    interaction,
    tolerance_of,
    total_of,
    two_of,
)
from ..rules import Gradients
from ..squaring import Pass
from ..sums import Sums, add_square
from .meshes import Replicas
from .parallel import conversions, local_gradient
from .shards import Group, Shards, WholeSums

__all__ = ["Together"]


_SAME = 1e-3
"""How far numbers that are equal but for rounding may differ between processes, relative to their size."""


class _Told(NamedTuple):
    """What a process sends to the others about its forward pass."""

    obstacle: dict[str, str] | None
    guessed: bool
    program: str
    known: bool
    proven: set[str]
    captured: set[str]
    used_again: set[str]
    outputs: tuple[Any, ...]
    doubted: list[int]


class Together:
    """Both engines, fast and loop, for a model that is sharded over processes.

    Args:
        model: in the mode and on the device that are wanted.
        objective: which Fisher.
        parameters: with respect to what, by name.
        per: "example" squares the gradient of each example, "batch" that of each whole batch.
        method: "auto", "fast" or "loop".
        shift: of the labels, as the user gave it.
        replicas: the processes that share examples.
        totals: whether to keep the sum over all entries of what each batch adds.

    Attributes:
        noted: what to write down about the model's own loss.
        totals: what this process's last batch added to each parameter, if wanted.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        parameters: Mapping[str, Tensor],
        per: str,
        method: str,
        shift: int | None,
        replicas: Replicas,
        totals: bool = False,
    ):
        self.model, self.objective, self.parameters, self.per, self.shift = model, objective, parameters, per, shift
        self.strict, self.replicas = method == "fast", replicas
        self.left: dict[str, str] = {}
        self.quick = per == "example" and method != "loop"
        self.shards = Shards(model, parameters)
        self.noted: dict[str, Any] = {}
        self.totals: dict[str, Tensor] | None = {} if totals else None
        self.reached: set[str] = set()
        self.proven: dict[str, set[str]] = {}
        self.number = self.failures = self.waiting = self.at_once = 0
        self._method = "batch" if per == "batch" and method != "loop" else "loop"
        self._one: Pass | None = None
        self._whole: WholeSums | None = None
        self._tally: dict[str, Tensor] | None = None
        self._calls: dict[int, tuple[int, int]] = {}
        self._through: dict[int, int] = {}
        self._squared: set[int] = set()
        self._waiting: set[int] = set()
        self._order: list[int] = []
        self._sending = False
        self._over = self._checking = self._in_pass = False

    @property
    def coverage(self) -> dict[str, Any]:
        """What was computed how."""
        if not self.quick and not self.left:
            return {"method": self._method}
        unused = [name for name in self.parameters if name not in self.reached]
        return {
            "method": "fast" if self.at_once or not self.left else "loop",
            "loop": dict(self.left),
            "unused": dict.fromkeys(unused, "nothing depends on it"),
        }

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Watch the groups of the model inside; an error in one process is raised in all of them."""
        run = ranks.gather(uuid.uuid4().hex)[0]
        try:
            with self.shards.watched(self._gathering, self._entered, self._backward_through):
                yield
        except (Exception, KeyboardInterrupt) as error:
            # An error inside a pass leaves the other processes waiting in it. A SquisherError is raised between two passes.
            if self._in_pass and not isinstance(error, SquisherError):
                raise ranks.break_off(error, run) from error
            if not self._over:
                self._exchange(None, error)
            raise

    def add(self, sums: Sums, batch: Batch, index: Tensor) -> int:
        """Add the squares of a batch of this process; returns how many units it had."""
        units = self._step(sums, batch, index, True)
        self._in_pass = False
        if self.number == 1:
            self.check_copies(sums)
        return units or 0

    def finish(self, sums: Sums, batch: Batch | None, index: Tensor | None) -> None:
        """Make the passes of the other processes until none of them has a batch.

        Args:
            sums: what the others' squares are added to.
            batch: one that this process has seen, if any.
            index: of its examples.
        """
        while self._step(sums, batch, index, False) is not None:
            pass

    # -- one step of all processes -----------------------------------------------------------------------------------------

    def _step(self, sums: Sums, batch: Batch | None, index: Tensor | None, mine: bool) -> int | None:
        self._in_pass = False
        digest = digest_of(batch) if mine and batch is not None and self.replicas.parallel else ""
        here = self._exchange((mine, batch is not None, digest))
        owners = [k for k, (m, *_) in enumerate(self.replicas.agreed(here)) if m]
        self._in_pass = True
        if not owners:
            return None
        if batch is None or index is None or not all(has for _, has, _ in here):
            without = [k for k, (_, has, _) in enumerate(here) if not has]
            raise SquisherError(
                f"Processes {without} were given no batch at all, so they cannot keep step with the others. Give each at least one."
            )
        if not self.number:
            objective, noted = compared_with_own(self.model, self.objective, batch, self.shift)
            shift, self.noted = self._exchange((objective.shift, noted))[0]
            self.objective = dataclasses.replace(self.objective, shift=shift)
            self.shards.reshard()
        self.number += 1
        if self.totals is not None:
            self.totals.clear()
        self._tally = self.totals
        if not self.quick or self.waiting:
            self.waiting -= bool(self.waiting)
            return self._loop(sums, batch, index, float(mine))
        try:
            units = self._fast(sums, batch, index, mine, owners[self.number % len(owners)])
            self.failures, self.at_once = 0, self.at_once + 1
            return units
        except Obstacle as obstacle:  # on all processes alike
            self._leave(obstacle.reasons)
            if self.totals is not None:
                self.totals.clear()
            self._tally = self.totals
            self.failures += 1
            self.waiting = 2 ** min(self.failures, 10) - 1
            return self._loop(sums, batch, index, float(mine))

    def _fast(self, sums: Sums, batch: Batch, index: Tensor, mine: bool, owner: int) -> int:
        size, weight = batch.size, float(mine)
        if size == 1:  # two copies of one example, half of each
            batch, index, weight = batch.select([0, 0]), index[[0, 0]], weight / 2
        if self.number == 1:
            self._run_once(batch)
        alone = self._prove(sums, batch, index, owner) if self.number in PROVEN_ANEW else {}
        one, outputs, told = self._forward(self.objective, batch, alone)
        if not all(t.known for t in told):
            for k in (k for k, t in enumerate(self._leaders(told)) if not t.known):
                alone |= self._prove(sums, batch, index, k)
            one, outputs, told = self._forward(self.objective, batch, alone)
        if any(t.doubted for t in told):
            # The first process of a group decides for all: they run the same examples, but may doubt others, as each rounds differently.
            doubted = self._leaders(told)[self.replicas.mine].doubted
            alone |= self._alone(batch, doubted, max(len(t.doubted) for t in told))
            one, outputs, told = self._forward(self.objective, batch, alone)
        units = self.objective.units(outputs) if mine else 0
        self.reached |= set().union(*(t.captured for t in told))
        doubtful = set().union(*(t.captured - t.proven for t in told))
        if doubtful:
            self._believe(sums, one, outputs, index, weight, doubtful, told)
        else:
            self._backward(sums, one, outputs, index, weight, told)
        return min(units, 1) if size == 1 else units

    def _believe(
        self,
        sums: Sums,
        one: Pass,
        outputs: Outputs,
        index: Tensor,
        weight: float,
        doubtful: set[str],
        told: list[_Told],
    ) -> None:
        """Add the squares that the rules give. Parameters not yet proven for these sequences of operations are proven on these batches first."""
        batch, types = one.batch, one.types
        found = Sums(sums.parameters, sums.dtype)
        self._backward(found, one, outputs, index, weight, told)
        with torch.no_grad():
            here = {name for name in doubtful if bool(found[name].any())}
        evident = set().union(*self._exchange(here))
        if evident:
            expected = Sums(sums.parameters, sums.dtype)
            self._tally = None
            self._loop(expected, batch, index, weight)
            theirs = {name: expected[name] for name in evident}
            wrong = self._joined(compare(found, theirs, {}, types))
            if wrong:
                raise Obstacle(wrong)
        with torch.no_grad():
            for name, total in found.items():
                sums[name] += total
        for t in told:
            self.proven.setdefault(t.program, set()).update(evident & t.captured)

    def _leave(self, reasons: Mapping[str, str]) -> None:
        self.left.update(left_to_the_loop(reasons, self.parameters, self.strict))

    # -- the proof ---------------------------------------------------------------------------------------------------------

    def _prove(self, sums: Sums, batch: Batch, index: Tensor, owner: int) -> dict[int, Tensor]:
        """Compare with the loop on two examples of one process; returns the outputs of each alone, on that process.

        Raises:
            Obstacle: on all processes, if something differs.
        """
        here = owner == self.replicas.mine
        chosen = two_of(batch)
        if not self._leaders(self._exchange(chosen is not None and len(chosen) == 2))[owner]:
            return {}
        tally, self._tally = self._tally, None
        chosen = chosen if chosen is not None and len(chosen) == 2 else [0, batch.size - 1]
        two, index = batch.select(chosen), index[chosen]
        objective = self.objective if callable(self.objective.likelihood) else Probe.of(self.objective)
        local = {name: local_of(p) for name, p in self.parameters.items()}
        # Later proofs have sums of their own, in host memory: a device that holds a shard may have no room for a second one.
        scratch = sums if not sums else Sums(local, torch.float32, torch.device("cpu"))
        try:
            alone = self._proven(scratch, objective, two, index, owner)
        finally:
            with torch.no_grad():
                for total in scratch.values():  # in place: its memory is used again at once
                    total.zero_()
        self._tally = tally
        return dict(zip(chosen, alone, strict=True)) if here else {}

    def _proven(self, scratch: Sums, objective: Objective, two: Batch, index: Tensor, owner: int) -> list[Tensor]:
        """Subtract the loop's squares from ours and check that the rest is small; returns the outputs of each example alone."""
        here = owner == self.replicas.mine
        bounds: dict[str, list[Gradients]] = {}
        one, outputs, told = self._forward(objective, two)
        one.bounds = bounds
        self._backward(scratch, one, outputs, index, float(here), told)
        theirs, types = self._leaders(told)[owner], self._leaders(self._exchange(one.types))[owner]
        captured = theirs.captured
        differences = {name: Difference(scratch[name]) for name in captured}
        alone: list[Tensor] = []
        self._loop(scratch, two, index, -float(here), objective, alone)
        tolerance = tolerance_of(types)
        suspects = {name for name, difference in differences.items() if not difference.error() <= tolerance}
        totals = self._bounds(scratch, bounds, set().union(*self._exchange(suspects)), here)
        errors = {name: differences[name].error(totals[name]) for name in suspects}
        wrong = {name: differing(error, tolerance) for name, error in errors.items() if not error <= tolerance}
        with torch.no_grad():
            unseen = {name for name, total in scratch.items() if name not in captured and bool(total.any())}
        wrong |= dict.fromkeys(unseen, "it is used in an operation without a rule")
        wrong = self._joined(wrong)
        if wrong:
            raise Obstacle(wrong)
        evident = {name for name, difference in differences.items() if difference.largest}
        self.proven.setdefault(theirs.program, set()).update(*self._exchange(evident))
        return alone

    def _bounds(
        self, found: Sums, bounds: dict[str, list[Gradients]], names: set[str], here: bool
    ) -> dict[str, Tensor]:
        """Reduce the bounds of rounding errors into shards, one parameter at a time."""
        totals = Sums(found.parameters, torch.float32, found.device)
        whole = WholeSums(self.shards, totals, float(here))
        for group in self.shards.groups:
            for name in (n for n in group.members if n in names):
                for summand in bounds.pop(name, []) if here else ():
                    whole[name].add_(total_of([summand], whole[name]))
                whole.flush(group, [name])
        for name in self.shards.plain:
            if here and name in names:
                total = total_of(bounds.pop(name, []), local_of(self.shards.plain[name]).detach().float())
                totals[name].add_(total.to(totals[name].device))
        return totals

    def _alone(self, batch: Batch, doubted: list[int], passes: int) -> dict[int, Tensor]:
        """Return the outputs of single examples; every process makes the same number of passes."""
        self.shards.reshard()
        alone: dict[int, Tensor] = {}
        chosen = list(dict.fromkeys([*doubted, *range(batch.size)]))
        for n in range(passes):
            with torch.no_grad():
                place = chosen[n % len(chosen)]
                alone[place] = self.objective.outputs(self.model, batch.take(place, place + 1)).values[0]
            self._exchange(None)
            self.shards.reshard()
        return alone

    def _run_once(self, batch: Batch) -> None:
        """Run the model, so that every layer has been gathered and its parameters are known.

        Raises:
            SquisherError: the processes gather different layers. Here that is noticed before each of them, later only afterwards,
                if they have the same size: otherwise the processes fail or wait for each other, as in training.
        """
        self._checking = True
        with torch.no_grad():
            self.objective.raw(self.model, batch.select([0, 1]).copy())
        self._checking = False
        self._exchange(None)
        self.shards.reshard()

    # -- passes ------------------------------------------------------------------------------------------------------------

    def _forward(
        self,
        objective: Objective,
        batch: Batch,
        alone: Mapping[int, Tensor] | None = None,
    ) -> tuple[Pass, Outputs, list[_Told]]:
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
            here = _Told(
                obstacle,
                one.guessed,
                program,
                proven is not None,
                proven or set(),
                one.captured,
                one.used_again,
                self._form(outputs),
                [n for n in doubts_of(one) if n not in (alone or {})],
            )
            told = self._exchange(here, failure)
            self._same([t.outputs for t in told])
            reasons = {k: v for t in told for k, v in (t.obstacle or {}).items()}
            if not reasons and outputs is not None:
                return one, outputs, told
            self.shards.reshard()
            if not any(t.guessed for t in told):
                break
        raise Obstacle(reasons)

    def _backward(
        self, sums: Sums, one: Pass, outputs: Outputs, index: Tensor, weight: float, told: list[_Told]
    ) -> None:
        late = set().union(*(t.used_again for t in told))
        whole = self._whole = WholeSums(self.shards, sums, weight, late, self._tally)
        self._one = one
        if one.objective.unit == "token":  # a column for every position that counts
            one.at_least = max(self._exchange(sum(1 for _ in one.objective.columns(outputs, index))))
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
        whole.flush_rest(self._exchange)

    def _loop(
        self,
        sums: Sums,
        batch: Batch,
        index: Tensor,
        weight: float,
        objective: Objective | None = None,
        seen: list[Tensor] | None = None,
    ) -> int:
        """Add the squares of gradients, one example (or one whole batch) after the other; returns how many units there were."""
        objective = objective or self.objective
        step = 1 if self.per == "example" else batch.size
        mine = -(-batch.size // step) if weight else 0
        units = 0
        for n in range(max(self._exchange(mine))):
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
                told = self._exchange((len(terms), any(ready), all(ready), self._form(outputs)), failure)
                self._same([form for *_, form in told])
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

    def _gradient(self, sums: Sums, scalar: Tensor, weight: float) -> None:
        """Send one scalar back and add the squares of the gradients."""
        whole = self._whole = WholeSums(self.shards, sums, weight, (), self._tally)
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
        whole.flush_rest(self._exchange)

    @torch.no_grad()
    def _square(self, gradients: Mapping[str, Tensor]) -> None:
        whole = self._whole
        if whole is None:
            return
        for name, gradient in gradients.items():
            self.reached.add(name)
            add_square(whole[name], gradient)

    # -- called by the model's groups ----------------------------------------------------------------------------------------

    def _gathering(self, group: Group) -> None:
        self._order.append(self.shards.groups.index(group))
        if self._checking:
            self._exchange(None)

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

    # -- tensor parallelism --------------------------------------------------------------------------------------------------

    def _leaders(self, told: list[Any]) -> list[Any]:
        """Return the values of the first process of each group that shares examples."""
        return [told[group[0]] for group in self.replicas.groups]

    def _following(self, one: Pass) -> AbstractContextManager[None]:
        return conversions(one.convert) if self.replicas.parallel else nullcontext()

    def _form(self, outputs: Outputs | None) -> tuple[Any, ...]:
        """Return the shape and the size of outputs, where they are compared."""
        if outputs is None or not self.replicas.parallel:
            return ()
        return (*outputs.values.shape, float(outputs.values.detach().double().abs().sum()))

    def _same(self, forms: list[tuple[Any, ...]]) -> None:
        """Compare the outputs of the processes that share examples.

        Raises:
            SquisherError: they differ, so that each has a shard of them.
        """
        for group in self.replicas.groups:
            there = [forms[k] for k in group if forms[k]]
            if any(f[:-1] != there[0][:-1] or not abs(f[-1] - there[0][-1]) <= _SAME * abs(f[-1]) for f in there):
                raise SquisherError(
                    "The processes of a tensor-parallel group have different outputs: a shard each, or other examples. Have the last "
                    "layer return whole outputs (ColwiseParallel(output_layouts=Replicate())), or DTensors."
                )

    def check_copies(self, sums: Mapping[str, Tensor]) -> None:
        """Check that the processes of a tensor-parallel group have the same sums for parameters that each of them holds whole.

        Raises:
            SquisherError: they differ: every process has a part of the gradient, and nobody adds them up before they are squared.
        """
        if not self.replicas.parallel:
            return
        names = [
            name
            for name, p in self.shards.gathered().items()
            if not is_sharded(p) or not any(placement.is_shard() for placement in p.placements)  # type: ignore[attr-defined]
        ]
        with torch.no_grad():
            found = [
                (float(sums[n].sum(dtype=torch.float64)), float(sums[n].max()) if sums[n].numel() else 0.0)
                for n in names
            ]
        told = self._exchange(found)
        for group in self.replicas.groups:
            for n, name in enumerate(names):
                values = torch.tensor([told[k][n] for k in group])
                if bool((values.amax(0) - values.amin(0) > _SAME * values.amax(0)).any()):
                    raise SquisherError(
                        f"The processes of a tensor-parallel group find different values for {name!r}, which each of them holds whole: "
                        "each has only a part of its gradient, which would have to be summed first. Make it a DTensor "
                        "(SequenceParallel does), as training needs too, or leave it out with parameters=..."
                    )

    # -- agreement -----------------------------------------------------------------------------------------------------------

    def _exchange(self, value: Any, failure: BaseException | None = None) -> list[Any]:
        """Return the values of all processes, or raise on all of them if one failed since the last exchange."""
        message = None if failure is None else f"{type(failure).__name__}: {failure}"
        told = ranks.gather((value, message, hash(tuple(self._order))))
        self._order.clear()
        self._over = any(m is not None for _, m, _ in told)
        if failure is not None:
            raise failure
        for where, (_, elsewhere, _) in enumerate(told):
            if elsewhere is not None:
                raise SquisherError(f"Process {where} of {len(told)} failed, so this one stops too. There: {elsewhere}")
        if len({order for _, _, order in told}) > 1:
            raise SquisherError(
                "The processes used different sharded modules for their batches (experts that get no token?). Every pass gathers "
                "modules from all processes, so all must use the same ones, as in training: give fully_shard a module around them "
                "that every batch uses."
            )
        return [v for v, _, _ in told]

    def _joined(self, reasons: dict[str, str]) -> dict[str, str]:
        return {name: reason for found in self._exchange(reasons) for name, reason in found.items()}
