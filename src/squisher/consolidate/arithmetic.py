"""The arithmetic of the penalty and of the pull; on a CPU it goes block by block, so that a block stays in the cache.

The pull is the exact proximal step towards the centre, after the optimizer's step:

    θ ← (θ + κAθ̄) / (1 + κA)

minimises ½‖x − θ‖² + ½κ·Σ A(x − θ̄)² over x. It never overshoots, however large κA is, and no optimizer state sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..errors import SquisherError

__all__ = [
    "METRICS", "Denominator", "Energy", "Pull", "StepsTaken", "add_force_", "denominator", "pull_together_", "unwrapped", "was_taken",
]  # fmt: skip

BLOCK = 1 << 16
"""Elements at a time on a CPU: few enough for the cache, enough to outweigh the cost of a call."""


class Energy(torch.autograd.Function):
    """Σ weight·(parameter − centre)², whose backward pass needs no tensors beyond these three."""

    @staticmethod
    def forward(parameter: Tensor, weight: Tensor, centre: Tensor) -> Tensor:
        """Return the value."""
        three = (parameter, weight, centre)
        if not in_blocks(*three):
            gap = parameter.to(device=centre.device, dtype=torch.float32) - centre
            return (gap * gap * weight).sum()
        gap, force = parameter.new_empty(2, min(BLOCK, parameter.numel()))
        total = parameter.new_zeros(())
        for p, w, c in zip(*(t.view(-1).split(BLOCK) for t in three), strict=True):
            apart = torch.sub(p, c, out=gap[: len(p)])
            total += torch.mul(w, apart, out=force[: len(p)]).mul_(apart).sum()
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        """Keep references, not copies."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradients, by operations that can be differentiated again."""
        parameter, weight, centre = ctx.saved_tensors
        force = (parameter.to(device=centre.device, dtype=torch.float32) - centre) * weight * (2 * upstream)
        return force.to(device=parameter.device, dtype=parameter.dtype), None, None


def add_force_(gradient: Tensor, parameter: Tensor, weight: Tensor, centre: Tensor, strength: float) -> None:
    """Add strength · weight · (parameter − centre) in place."""
    four = (gradient, parameter, weight, centre)
    if in_blocks(*four):
        buffer = gradient.new_empty(min(BLOCK, gradient.numel()))
        for g, p, w, c in zip(*(t.view(-1).split(BLOCK) for t in four), strict=True):
            g.addcmul_(w, torch.sub(p, c, out=buffer[: len(p)]), value=strength)
        return
    gap = parameter.to(device=centre.device, dtype=torch.float32) - centre
    if weight.dtype == gradient.dtype == gap.dtype and weight.device == gradient.device:
        gradient.addcmul_(weight, gap, value=strength)
    else:
        gradient.add_(gap.mul_(weight).mul_(strength).to(device=gradient.device, dtype=gradient.dtype))


def in_blocks(*tensors: Tensor) -> bool:
    """Return whether the arithmetic can go block by block: plain contiguous float32 tensors on the CPU."""
    return all(
        type(t) in (Tensor, nn.Parameter) and t.dtype == torch.float32 and t.is_cpu and t.is_contiguous()
        for t in tensors
    )


METRICS = ("plain", "adam")
_PULLED = 1 << 15  # elements at a time on a CPU, so that intermediate results stay in the cache
_TOGETHER = 1 << 25  # elements of one multi-tensor call: bounds what it allocates


class Pull(NamedTuple):
    """One parameter and how it is pulled.

    Attributes:
        parameter: θ, changed in place.
        weight: A.
        centre: θ̄.
        rate: κ, the strength times the learning rate of the parameter's group.
        metric: Adam's √v̂ + ε, by which κ is divided entry by entry; None for the plain metric.
    """

    parameter: Tensor
    weight: Tensor
    centre: Tensor
    rate: float
    metric: Denominator | None


class Denominator(NamedTuple):
    """Adam's denominator, √v̂ + ε = sqrt(average) / root + eps."""

    average: Tensor
    root: float
    eps: float


def denominator(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> Denominator | None:
    """Return the denominator of Adam's step for a parameter; None before its first step.

    Raises:
        SquisherError: The optimizer is not Adam or one with its state.
    """
    state = optimizer.state.get(parameter, {})
    if "betas" not in group or (state and not {"exp_avg_sq", "step"} <= state.keys()):  # SGD may have no state at all
        raise SquisherError(
            f"metric='adam' needs the state of Adam (exp_avg_sq, step, betas), which {type(optimizer).__name__} does not keep: "
            "use metric='plain'."
        )
    if not state:
        return None
    average = state["max_exp_avg_sq"] if group.get("amsgrad") else state["exp_avg_sq"]
    correction = 1 - float(group["betas"][1]) ** float(state["step"])
    return Denominator(average, correction**0.5, float(group.get("eps", 0.0)))


def pull_together_(pulls: Sequence[Pull]) -> None:
    """Pull many parameters: block by block on a CPU, by multi-tensor operations elsewhere."""
    rest = []
    for pull in pulls:
        tensors = [pull.parameter, pull.weight, pull.centre, *([] if pull.metric is None else [pull.metric.average])]
        if in_blocks(*tensors):
            _pull_blocks_(pull)
        else:
            rest.append(pull)
    for several in _batches(rest):
        _pull_foreach_(several)


def _pull_blocks_(pull: Pull) -> None:
    # θ ← θ̄ + r·(θ − θ̄) with r = 1 / (1 + κA): exactly θ for A = 0, and θ̄ where κA is beyond float32.
    size = min(_PULLED, pull.parameter.numel())
    one, room, more = pull.parameter.new_ones(()), pull.parameter.new_empty(size), pull.parameter.new_empty(size)
    blocks = [t.detach().view(-1).split(_PULLED) for t in (pull.parameter, pull.weight, pull.centre)]
    averages = () if pull.metric is None else pull.metric.average.view(-1).split(_PULLED)
    for k, (p, a, c) in enumerate(zip(*blocks, strict=True)):
        rest = room[: len(p)]
        if pull.metric is None:
            torch.add(one, a, alpha=pull.rate, out=rest).reciprocal_()
        else:  # r = (√v + ε') / (√v + ε' + κ'A), with the root of the bias correction in ε' and κ'
            torch.sqrt(averages[k], out=rest).add_(pull.metric.eps * pull.metric.root)
            rest.div_(torch.add(rest, a, alpha=pull.rate * pull.metric.root, out=more[: len(p)]))
        torch.lerp(c, p, rest, out=p)


def _pull_foreach_(pulls: Sequence[Pull]) -> None:
    # In float64 if a parameter is: entries that nothing pulls keep their bits.
    device, kind = pulls[0].centre.device, torch.promote_types(pulls[0].parameter.dtype, torch.float32)
    weights = [pull.weight.to(kind) for pull in pulls]
    metrics = [pull.metric for pull in pulls if pull.metric is not None]
    if metrics:
        rest = torch._foreach_sqrt([m.average.to(device, kind) for m in metrics])
        torch._foreach_add_(rest, [m.eps * m.root for m in metrics])
        whole = torch._foreach_mul(weights, [p.rate * m.root for p, m in zip(pulls, metrics, strict=True)])
        torch._foreach_add_(whole, rest)
        torch._foreach_div_(rest, whole)
    else:
        rest = torch._foreach_mul(weights, [pull.rate for pull in pulls])
        torch._foreach_add_(rest, 1.0)
        torch._foreach_reciprocal_(rest)
    parameters = [pull.parameter.detach() for pull in pulls]
    pulled = torch._foreach_lerp([p.centre.to(kind) for p in pulls], [p.to(device, kind) for p in parameters], rest)
    torch._foreach_copy_(parameters, pulled)


def _batches(pulls: Sequence[Pull]) -> list[list[Pull]]:
    """Group by device and type, with a bounded number of elements in each group."""
    out: list[list[Pull]] = []
    open_groups: dict[Any, tuple[list[Pull], int]] = {}
    for pull in pulls:
        key = (pull.parameter.device, pull.parameter.dtype, pull.centre.device, pull.metric is None)
        several, count = open_groups.get(key, ([], 0))
        if not several or count + pull.parameter.numel() > _TOGETHER:
            several, count = [], 0
            out.append(several)
        several.append(pull)
        open_groups[key] = (several, count + pull.parameter.numel())
    return out


class StepsTaken:
    """Whether optimizers have taken a step since the last question: a `GradScaler` skips it if gradients are infinite."""

    def __init__(self) -> None:
        self._taken: WeakKeyDictionary[torch.optim.Optimizer, bool] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[type[StepsTaken], tuple[()]]:
        return StepsTaken, ()  # a copy watches no optimizer yet

    def since_asked(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a step was taken; at the first question, judge by the optimizer's state."""
        if optimizer not in self._taken:
            optimizer.register_step_pre_hook(
                self._note
            )  # before the step: the question may come from the user's post hook
            # SGD without momentum keeps no state; a step is assumed, since this is called after one.
            states = optimizer.state.values()
            counted = any(float(state.get("step", 1)) > 0 for state in states)
            self._taken[optimizer] = counted or (not states and isinstance(optimizer, torch.optim.SGD))
        taken, self._taken[optimizer] = self._taken[optimizer], False
        return taken

    def _note(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if was_taken(optimizer):
            self._taken[optimizer] = True


def was_taken(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step that is called changes anything: fused optimizers are called and skip it themselves."""
    found = getattr(optimizer, "found_inf", None)
    return found is None or not bool(found)


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer inside the wrappers of Accelerate, Lightning and others.

    Raises:
        SquisherError: There is none.
    """
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise SquisherError(
            f"pull_ expects the optimizer that has just taken a step, not a {type(optimizer).__name__}."
        )
    return optimizer
