"""The fast engine: all examples at once, from the inputs and output gradients of each operation.

Parameters are frozen for the pass, so autograd forms no weight gradient at all. A function mode sees every operation that uses a
parameter; a hook on its output receives the gradient, and `layers` squares what follows from it for each example. Nothing of the
model is touched: no module hook, no attribute.

Nothing is believed without proof. On two examples of the first batch every parameter's result is compared with the loop
(`proof`). What differs, what is used in an operation without a rule, or what is used in another way in a later batch is
computed by the loop, and named in the coverage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..errors import SquisherError
from .batches import Batch
from .likelihood import Objective
from .loop import add_squares as loop_squares
from .passes import Pass, run
from .proof import Proven, frozen, prove
from .sums import Sums

__all__ = ["Capture"]


class Capture:
    """The fast engine, with the loop for what it cannot do.

    Args:
        model: in the mode and on the device that are wanted.
        objective: which Fisher.
        parameters: with respect to what, by name.
        strict: raise where something would be left to the loop.
    """

    def __init__(self, model: nn.Module, objective: Objective, parameters: Mapping[str, Tensor], strict: bool = False):
        self.model, self.objective, self.parameters, self.strict = model, objective, parameters, strict
        self.everything = list(model.parameters())
        self.proven: Proven | None = None
        self.left: dict[str, str] = {}

    @property
    def coverage(self) -> dict[str, Any]:
        """What was computed how: parameters that the loop did, with the reason, and parameters that nothing depends on."""
        unused = sorted(self.proven.unused - set(self.left)) if self.proven is not None else []
        return {
            "method": "capture",
            "loop": dict(self.left),
            "unused": {name: "nothing depends on it" for name in unused},
        }

    def add(self, sums: Sums, batch: Batch, index: Tensor) -> int:
        """Add the squares of a batch; returns how many units it had."""
        if self.proven is None:
            self.proven = prove(sums, self.model, self.objective, batch, index, self.parameters)
            if self.proven is None:  # nothing counts in this batch, so there was nothing to prove with
                return loop_squares(sums, self.model, batch, index, self.objective, self.parameters)
            self._leave(self.proven.failed)
        many = self.objective.labels == "exact" or self.objective.draws > 1 or self.objective.unit == "token"
        one = Pass(sums, self.proven.layouts, batch.size, many)
        with frozen(self.everything):
            # What nothing depended on so far is not frozen: a gradient would show that something does now.
            unused = {name: self.parameters[name].requires_grad_() for name in self.proven.unused}
            units = run(one, self.model, self.objective, batch, index, self.parameters)
            for name, parameter in unused.items():
                if parameter.grad is not None:
                    parameter.grad = None
                    one.spoiled[name] = "it is used in some batches only"
        self._leave(one.spoiled)
        rest = {name: self.parameters[name] for name in {**self.proven.failed, **one.spoiled}}
        if rest:
            loop_squares(sums, self.model, batch, index, self.objective, rest)
        return units

    def _leave(self, reasons: Mapping[str, str]) -> None:
        if reasons and self.strict:
            listed = "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:5])
            raise SquisherError(
                f"method='hooks' cannot do {len(reasons)} of {len(self.parameters)} parameters ({listed}). Use method='auto', "
                "which leaves them to the loop, or choose others with parameters=..."
            )
        self.left.update(reasons)
