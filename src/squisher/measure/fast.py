"""The fast engine: all examples at once where that is proven, one at a time where it is not.

In every batch, before anything is added:

- the rows of each output belong to examples by structure (`examples`), never because a size happens to be divisible;
- no path of the graph leads to a parameter past the rules (`capture`);
- the sequence of operations is one that was proven against the loop (`proof`), for every parameter whose gradient is not zero; while it
  is zero, a plain gradient of the batch must be zero too, or what arrived was lost on its way;
- every number or decision that Python took from the batch is what it would have taken from each example alone; where it is not, where
  a scripted function or an array hides it, or where the batch has another size or its operations get other numbers than in earlier
  batches, the outputs of some examples alone are compared with those of the batch;
- backward functions written in Python, which may mix examples, give the same squares for the two halves of the batch one after the other.

A batch that fails one of these checks is left to the loop, and the coverage says why. What was proven is remembered for later calls on
the same model while its weights, its modes and the form of the batches stay the same. Each proof also compares the outputs of two
examples alone with those of the batch: examples that influence each other have no gradients of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SquisherError
from ..guard import only_requiring
from .batches import Batch
from .capture import Obstacle
from .likelihood import Objective, Outputs
from .loop import Loop
from .proof import Known, Proof, check_alone, check_repeats, compare, doubts_of, prove, recall
from .rules import Gradients
from .squaring import Pass, forward_pass
from .sums import Sums

__all__ = ["PROVEN_ANEW", "Fast", "left_to_the_loop", "refuse_lost"]

PROVEN_ANEW = {16**k for k in range(12)}
"""The batches that are proven whatever they do, counted over all calls on an unchanged model."""


class Fast:
    """The fast engine, with the loop for what it cannot do.

    Args:
        model: in the mode and on the device that are wanted.
        objective: which Fisher.
        parameters: with respect to what, by name.
        strict: raise where something would be left to the loop.
    """

    def __init__(self, model: nn.Module, objective: Objective, parameters: Mapping[str, Tensor], strict: bool = False):
        self.model, self.objective, self.parameters, self.strict = model, objective, parameters, strict
        self.left: dict[str, str] = {}
        self.loop = Loop(model, objective, parameters)
        self.reached = self.loop.reached
        self.known: Known | None = None
        self.failures = self.waiting = self.at_once = 0
        self.repeats = False

    @property
    def coverage(self) -> dict[str, Any]:
        """What was computed how: parameters that the loop did, with the reason, and parameters that nothing depends on."""
        unused = [name for name in self.parameters if name not in self.reached]
        return {
            "method": "fast" if self.at_once or not self.left else "loop",
            "loop": dict(self.left),
            "unused": dict.fromkeys(unused, "nothing depends on it"),
        }

    def add(self, sums: Sums, batch: Batch, index: Tensor) -> int:
        """Add the squares of a batch; returns how many units it had."""
        if batch.size == 1 or self.waiting:
            self.waiting = max(self.waiting - (batch.size > 1), 0)
            return self._add_by_loop(sums, batch, index)
        if self.known is None:
            self.known = recall(self.model, self.objective, batch, self.parameters)
        self.known.begin(self.model)
        try:
            units = self._add(sums, batch, index, self.known)
            self.failures, self.at_once = 0, self.at_once + 1
            self.known.remember(self.model)
            return units
        except (RuntimeError, IndexError):
            if not self.at_once:  # perhaps an example alone cannot be run, because an input that all share was cut
                check_alone(
                    self.model, self.objective, batch, self.objective.outputs(self.model, batch).values.detach()
                )
            raise
        except Obstacle as obstacle:
            if not self.failures and not obstacle.random:
                check_alone(
                    self.model, self.objective, batch, self.objective.outputs(self.model, batch).values.detach()
                )
            self._leave(obstacle.reasons)
            # What fails once often fails again: wait longer every time before trying.
            self.failures += 1
            self.waiting = 2 ** min(self.failures, 10) - 1
            return self._add_by_loop(sums, batch, index)

    def _add_by_loop(self, sums: Sums, batch: Batch, index: Tensor) -> int:
        if not self.repeats and batch.size:
            check_repeats(self.model, self.objective, batch.take(0, 1))
            self.repeats = True
        return self.loop.add(sums, batch, index)

    def _add(self, sums: Sums, batch: Batch, index: Tensor, known: Known) -> int:
        # Batches 1, 16, 256, ... are proven whatever they do; others when they do something new.
        proof = self._prove(sums, batch, index, known) if known.batches in PROVEN_ANEW else None
        with only_requiring(self.model, self.parameters.values()):
            one, outputs = forward_pass(self.model, self.objective, batch, self.parameters)
            if one.escaped:
                known.state = None  # only the proof sees that examples influence each other through Python
            if one.program not in known.programs and proof is None:
                proof = self._prove(sums, batch, index, known)
            also = doubts_of(one, known.numbers)
            if proof is not None or also:
                alone = {} if proof is None else proof.alone
                check_alone(self.model, self.objective, batch, outputs.values.detach(), alone, also)
            if not outputs.values.requires_grad:
                if one.captured:
                    raise Obstacle({"": "the outputs have no gradient, although parameters are used"})
                return self.objective.units(outputs)
            self._believe(sums, one, outputs, index, known)
            self.reached |= one.captured
        return self.objective.units(outputs)

    def _prove(self, sums: Sums, batch: Batch, index: Tensor, known: Known) -> Proof | None:
        proof = prove(sums, self.model, self.objective, batch, index, self.parameters)
        if proof is not None:
            known.programs.setdefault(proof.program, set()).update(proof.evident)
        return proof

    def _believe(self, sums: Sums, one: Pass, outputs: Outputs, index: Tensor, known: Known) -> None:
        """Add the squares that the rules give. Parameters not yet proven for this sequence of operations are proven on this batch first."""
        doubtful = one.captured - known.programs.get(one.program, set())
        if not doubtful and not one.custom:
            try:
                one.backward(outputs, index, sums)
            except Obstacle as obstacle:  # too late for the loop: some squares are in the sums
                raise SquisherError(
                    f"Checkpointing uses parameters in its second pass in another way than before ({obstacle}). Use method='loop'."
                ) from obstacle
            return
        scratch = Sums(sums.parameters, sums.dtype)
        bounds: dict[str, list[Gradients]] = {}
        one.bounds = bounds if doubtful else None
        one.backward(outputs, index, scratch, again=one.custom)
        if one.custom:
            self._refuse_mixing(scratch, one, outputs, index)
        with torch.no_grad():
            found = {name: scratch[name] for name in doubtful if bool(scratch[name].any())}
        if found:
            wrong = compare(found, self._expected(one.batch, index, found), bounds, one.types)
            if wrong:
                raise Obstacle(wrong)
        self._refuse_lost(doubtful - found.keys(), one.batch, index)
        with torch.no_grad():
            for name, total in scratch.items():
                sums[name] += total
        known.programs.setdefault(one.program, set()).update(found)

    def _refuse_mixing(self, found: Sums, one: Pass, outputs: Outputs, index: Tensor) -> None:
        """Compare with two backward passes, for one half of the examples and the other.

        Raises:
            Obstacle: they differ.
        """
        halves = Sums(found.parameters, found.dtype)
        one.bounds = None
        one.backward(outputs, index, halves, halves=True)
        wrong = compare(found, {name: halves[name] for name in one.captured}, {}, one.types)
        if wrong:
            why = "its gradient goes through a backward function in Python that mixes examples"
            raise Obstacle(dict.fromkeys(wrong, why))

    def _refuse_lost(self, zero: set[str], batch: Batch, index: Tensor) -> None:
        """Check that parameters whose squares are zero have no gradient in the batch as a whole.

        Raises:
            Obstacle: one has.
        """
        plain = self._expected(batch, index, zero, replace(self.objective, per="batch")) if zero else {}
        refuse_lost(name for name, total in plain.items() if bool(total.any()))

    def _expected(self, batch: Batch, index: Tensor, names: Iterable[str], objective: Objective | None = None) -> Sums:
        expected = Sums({name: self.parameters[name] for name in names}, torch.float32)
        Loop(self.model, objective or self.objective, expected.parameters).add(expected, batch, index)
        return expected

    def _leave(self, reasons: Mapping[str, str]) -> None:
        self.left.update(left_to_the_loop(reasons, self.parameters, self.strict))


def refuse_lost(names: Iterable[str]) -> None:
    """Leave a batch to the loop in which these parameters have a gradient, although squares of zero came from the rules.

    Raises:
        Obstacle: there is one.
    """
    lost = dict.fromkeys(names, "its gradient is not zero, but none arrived where it is used")
    if lost:
        raise Obstacle(lost)


def left_to_the_loop(reasons: Mapping[str, str], parameters: Iterable[str], strict: bool) -> dict[str, str]:
    """Return why each parameter is left to the loop.

    Args:
        reasons: by parameter, or under "" for all of them.
        parameters: their names.
        strict: whether none may be.

    Raises:
        SquisherError: if one is and none may be.
    """
    names = list(parameters)
    every = dict.fromkeys(names, reasons[""]) if "" in reasons else dict(reasons)
    if strict:
        listed = "; ".join(f"{name}: {reason}" for name, reason in list(every.items())[:5])
        raise SquisherError(
            f"method='fast' cannot do {len(every)} of {len(names)} parameters ({listed}). Use method='auto', "
            "which leaves such batches to the loop, or choose other parameters with parameters=..."
        )
    return every
