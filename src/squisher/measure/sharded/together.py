"""The engine for sharded models: every process has batches of its own, and all take each step together.

A pass gathers layers from all processes, so all processes must make the same passes: whatever decides about a pass is exchanged first. A
process that has no batch left repeats one that it has seen, with weight 0.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ... import ranks
from ...errors import SquisherError
from ...ranks import is_sharded, local_of
from ..batches import Batch, digest_of
from ..capture import Obstacle
from ..fast import PROVEN_ANEW, left_to_the_loop, refuse_lost
from ..likelihood import Objective, Outputs, compared_with_own
from ..proof import Difference, Probe, compare, differing, tolerance_of, total_of, two_of
from ..rules import Gradients
from ..squaring import Pass
from ..sums import Sums
from .meshes import SAME, Exchange, Replicas
from .passes import Passes, Told
from .shards import Shards, WholeSums

__all__ = ["Together"]


class Together:
    """Both engines, fast and loop, for a model that is sharded over processes.

    Args:
        model: in the mode and on the device that are wanted.
        objective: which Fisher.
        parameters: with respect to what, by name.
        method: "auto", "fast" or "loop".
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
        method: str,
        replicas: Replicas,
        totals: bool = False,
    ):
        self.model, self.objective, self.parameters = model, objective, parameters
        self.strict, self.replicas = method == "fast", replicas
        self.left: dict[str, str] = {}
        self.quick = objective.per == "example" and method != "loop"
        self.shards = Shards(model, parameters)
        self.exchange = Exchange(replicas)
        self.passes = Passes(model, parameters, self.shards, self.exchange)
        self.noted: dict[str, Any] = {}
        self.totals: dict[str, Tensor] | None = {} if totals else None
        self.number = self.failures = self.waiting = self.at_once = 0
        self._method = "batch" if objective.per == "batch" and method != "loop" else "loop"
        self._in_pass = False

    @property
    def reached(self) -> set[str]:
        """The parameters that a gradient has reached."""
        return self.passes.reached

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
            with self.passes.watched():
                yield
        except (Exception, KeyboardInterrupt) as error:
            # An error inside a pass leaves the other processes waiting in it. A SquisherError is raised between two passes.
            if self._in_pass and not isinstance(error, SquisherError):
                raise ranks.break_off(error, run) from error
            if not self.exchange.failed:
                self.exchange(None, error)
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
        here = self.exchange((mine, batch is not None, digest))
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
            objective, noted = compared_with_own(self.model, self.objective, batch)
            shift, self.noted = self.exchange((objective.shift, noted))[0]
            self.objective = dataclasses.replace(self.objective, shift=shift)
            self.shards.reshard()
        self.number += 1
        if self.totals is not None:
            self.totals.clear()
        self.passes.tally = self.totals
        if not self.quick or self.waiting:
            self.waiting -= bool(self.waiting)
            return self.passes.loop(sums, batch, index, float(mine), self.objective)
        try:
            units = self._fast(sums, batch, index, mine, owners[self.number % len(owners)])
            self.failures, self.at_once = 0, self.at_once + 1
            return units
        except Obstacle as obstacle:  # on all processes alike
            self.left.update(left_to_the_loop(obstacle.reasons, self.parameters, self.strict))
            if self.totals is not None:
                self.totals.clear()
            self.passes.tally = self.totals
            self.failures += 1
            self.waiting = 2 ** min(self.failures, 10) - 1
            return self.passes.loop(sums, batch, index, float(mine), self.objective)

    def _fast(self, sums: Sums, batch: Batch, index: Tensor, mine: bool, owner: int) -> int:
        size, weight = batch.size, float(mine)
        if size == 1:  # two copies of one example, half of each
            batch, index, weight = batch.select([0, 0]), index[[0, 0]], weight / 2
        if self.number == 1:
            self.passes.run_once(self.objective, batch)
        alone = self._prove(sums, batch, index, owner) if self.number in PROVEN_ANEW else {}
        one, outputs, told = self.passes.forward(self.objective, batch, alone)
        if not all(t.known for t in told):
            for k in (k for k, t in enumerate(self.exchange.leaders(told)) if not t.known):
                alone |= self._prove(sums, batch, index, k)
            one, outputs, told = self.passes.forward(self.objective, batch, alone)
        if any(t.doubted for t in told):
            # The first process of a group decides for all: they run the same examples, but may doubt others, as each rounds differently.
            doubted = self.exchange.leaders(told)[self.replicas.mine].doubted
            alone |= self.passes.alone(self.objective, batch, doubted, max(len(t.doubted) for t in told))
            one, outputs, told = self.passes.forward(self.objective, batch, alone)
        units = self.objective.units(outputs) if mine else 0
        self.reached.update(*(t.captured for t in told))
        doubtful = set().union(*(t.captured - t.proven for t in told))
        if doubtful:
            self._believe(sums, one, outputs, index, weight, doubtful, told)
        else:
            self.passes.backward(sums, one, outputs, index, weight, told)
        return units // 2 if size == 1 else units

    def _believe(
        self,
        sums: Sums,
        one: Pass,
        outputs: Outputs,
        index: Tensor,
        weight: float,
        doubtful: set[str],
        told: list[Told],
    ) -> None:
        """Add the squares that the rules give. Parameters not yet proven for these sequences of operations are proven on these batches first."""
        batch, types = one.batch, one.types
        found = Sums(sums.parameters, sums.dtype)
        self.passes.backward(found, one, outputs, index, weight, told)
        with torch.no_grad():
            here = {name for name in doubtful if bool(found[name].any())}
        evident = set().union(*self.exchange(here))
        if evident:
            expected = Sums(sums.parameters, sums.dtype)
            self.passes.tally = None
            self.passes.loop(expected, batch, index, weight, self.objective)
            theirs = {name: expected[name] for name in evident}
            wrong = self.exchange.joined(compare(found, theirs, {}, types))
            if wrong:
                raise Obstacle(wrong)
        if doubtful - evident:
            plain = Sums(sums.parameters, sums.dtype)
            self.passes.tally = None
            self.passes.loop(plain, batch, index, weight, dataclasses.replace(self.objective, per="batch"))
            lost = {name for name in doubtful - evident if bool(plain[name].any())}
            refuse_lost(set().union(*self.exchange(lost)))
        with torch.no_grad():
            for name, total in found.items():
                sums[name] += total
        for t in told:
            self.passes.proven.setdefault(t.program, set()).update(evident & t.captured)

    # -- the proof ---------------------------------------------------------------------------------------------------------

    def _prove(self, sums: Sums, batch: Batch, index: Tensor, owner: int) -> dict[int, Tensor]:
        """Compare with the loop on two examples of one process; returns the outputs of each alone, on that process.

        Raises:
            Obstacle: on all processes, if something differs.
        """
        here = owner == self.replicas.mine
        chosen = two_of(batch)
        if not self.exchange.leaders(self.exchange(chosen is not None and len(chosen) == 2))[owner]:
            return {}
        tally, self.passes.tally = self.passes.tally, None
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
        self.passes.tally = tally
        return dict(zip(chosen, alone, strict=True)) if here else {}

    def _proven(self, scratch: Sums, objective: Objective, two: Batch, index: Tensor, owner: int) -> list[Tensor]:
        """Subtract the loop's squares from ours and check that the rest is small; returns the outputs of each example alone."""
        here = owner == self.replicas.mine
        bounds: dict[str, list[Gradients]] = {}
        one, outputs, told = self.passes.forward(objective, two)
        one.bounds = bounds
        self.passes.backward(scratch, one, outputs, index, float(here), told)
        theirs, types = self.exchange.leaders(told)[owner], self.exchange.leaders(self.exchange(one.types))[owner]
        captured = theirs.captured
        differences = {name: Difference(scratch[name]) for name in captured}
        alone: list[Tensor] = []
        self.passes.loop(scratch, two, index, -float(here), objective, alone)
        tolerance = tolerance_of(types)
        suspects = {name for name, difference in differences.items() if not difference.error() <= tolerance}
        totals = self._bounds(scratch, bounds, set().union(*self.exchange(suspects)), here)
        errors = {name: differences[name].error(totals[name]) for name in suspects}
        wrong = {name: differing(error, tolerance) for name, error in errors.items() if not error <= tolerance}
        with torch.no_grad():
            unseen = {name for name, total in scratch.items() if name not in captured and bool(total.any())}
        wrong |= dict.fromkeys(unseen, "it is used in an operation without a rule")
        wrong = self.exchange.joined(wrong)
        if wrong:
            raise Obstacle(wrong)
        evident = {name for name, difference in differences.items() if difference.largest}
        self.passes.proven.setdefault(theirs.program, set()).update(*self.exchange(evident))
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

    def check_copies(self, sums: Mapping[str, Tensor]) -> None:
        """Check that the processes of a tensor-parallel group have the same sums for parameters that each of them holds whole.

        Raises:
            SquisherError: they differ: every process has a summand of the gradient, and they are not added up before they are squared.
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
        told = self.exchange(found)
        for group in self.replicas.groups:
            for n, name in enumerate(names):
                values = torch.tensor([told[k][n] for k in group])
                if bool((values.amax(0) - values.amin(0) > SAME * values.amax(0)).any()):
                    raise SquisherError(
                        f"The processes of a tensor-parallel group find different values for {name!r}, which each of them holds whole: "
                        "each has only a part of its gradient, which would have to be summed first. Make it a DTensor "
                        "(SequenceParallel does), as training needs too, or leave it out with parameters=..."
                    )
