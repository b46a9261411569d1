"""The squares of per-example gradients, taken inside an ordinary training step.

The step is the user's own: its forward pass, its loss, its backward pass, and gradients that are the same to the bit as without us.
Every operation is watched as in `capture`, but no parameter is detached; hooks on the outputs of operations with a rule receive the
gradients that are on their way anyway. What differs from a measurement:

- The loss is the user's, so its factors are read off (`step_pass`).
- There is no second try. What is not known makes the step unusable, and `Step.problem` says why.
- Nothing can be run again one example at a time, so the proof is another one: the backward pass is made a second time with the loss of
  each example multiplied by a random number r_n. What arrives at a parameter then is Σ r_n g_n, and so must be what the rules say.
  Dropout, and whatever else is in the pass, is proven with it. Every new sequence of operations is.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...guard import eager_original, eagerly, refuse_batch_statistics
from ..batches import Batch, leaves_of
from ..following import hooks, looks_only, name_of
from .step_pass import StepPass

__all__ = ["Proven", "Step"]

# What torch calls inside is seen only if it does not ask first whether a mode is active.
_attention = F.multi_head_attention_forward
_open_attention = FunctionType(
    _attention.__code__,
    {**_attention.__globals__, "has_torch_function": lambda *_: False},
    argdefs=_attention.__defaults__,
)


_SPARE = 1 << 28


class Proven(dict[Any, set[str]]):
    """For every sequence of operations, the parameters for which the rules were seen to be right; `guess` as of `Pass`."""

    guess = True

    def __init__(self) -> None:
        super().__init__()
        self.spare: dict[str, Tensor] = {}

    def keep(self, sums: Mapping[str, Tensor]) -> None:
        """Keep the memory of small sums for the next step: allocating it anew takes longer than filling it."""
        self.spare = dict(sums) if sum(s.nbytes for s in sums.values()) <= _SPARE else {}


class Step:
    """One optimizer step under observation: forward and backward passes inside, as often as gradients are accumulated.

    Args:
        model: In training; called as a whole (`model(...)`).
        parameters: Those to observe, by name.
        proven: What was proven in earlier steps; gets what is proven in this one.
        anew: Prove again, whatever was proven.
        dtype: At least of the sums.
        factor: What the sum of the examples' losses was multiplied by, where the parts of a loss have different factors.

    Attributes:
        sums: Σ_n g_n² over the examples of the step, by name; g_n is the gradient of the loss of example n before it was reduced.
        examples: How many there were with a label that counts.
        positions: Whether the loss of an example is a sum over positions.
        refused: Parameters that no rule can do, and why.
        problem: Why nothing can be said about this step; "" if something can.
        finite: Whether all gradients were.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, Tensor],
        proven: Proven,
        anew: bool = False,
        dtype: torch.dtype = torch.float32,
        factor: float | None = None,
    ):
        self.model, self.parameters, self.proven, self.anew, self.dtype = model, parameters, proven, anew, dtype
        self.factor = factor
        self.sums: dict[str, Tensor] = {}
        self.examples, self.positions = 0, False
        self.refused: dict[str, str] = {}
        self.problem, self.finite = "", True
        self.passes = 0
        self.current: StepPass | None = None
        self.last: StepPass | None = None
        self._made: list[StepPass] = []
        self._stack = ExitStack()

    def __enter__(self) -> Step:
        refuse_batch_statistics(self.model, "Put it into evaluation mode, or use per='batch'.")
        self._original = eager_original(self.model)
        self._stack.callback(self._original.register_forward_pre_hook(self._called, with_kwargs=True).remove)
        self._stack.enter_context(eagerly(self.model))
        self._stack.enter_context(_StepWatch(self))
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()
        self.current = self.last = None
        for one in self._made:
            one.release()
        self._made.clear()
        if exception[0] is None and not self.passes and not self.problem:
            self.problem = "no backward pass of the model was made: call model(...) and loss.backward() inside"

    def __deepcopy__(self, memo: Any) -> Step:
        return self  # of a model that is copied inside, with our hook

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (
            module is not self._original
            or not torch.is_grad_enabled()
            or torch._C._functorch.maybe_current_level() is not None
        ):
            return
        if self.current is not None:
            self.problem = "the model was called twice before the backward pass, so that examples cannot be told apart"
        shapes = [t.shape for t in leaves_of([args, kwargs]) if t.dim()]
        if not shapes:
            self.problem = "the model was called without a tensor that has a row for each example"
            return
        batch = Batch(None, args, kwargs, None, shapes[0][0])
        with torch._C.DisableTorchFunction():
            self.current = self._new_pass(batch)
            self._made.append(self.current)

    def _new_pass(self, batch: Batch) -> StepPass:
        return StepPass(self.model, batch, self.parameters, self.proven.guess)

    def backward(self, loss: Tensor, gradient: Tensor | None, **settings: Any) -> None:
        """Make the user's backward pass and take its squares on the way."""
        one, self.current = self.current, None
        if one is None:
            if self.last is not None and self.last.is_reduced(loss):
                self.problem = "two backward passes were made after one forward pass: add the losses up"
            loss.backward(gradient, **settings)
            return
        self.last = one
        self.problem = self.problem or one.hindrance(loss, settings)
        if self.problem:
            self._forget_guess(one)
            loss.backward(gradient, **settings)
            return
        known = self.proven.get(one.program, set())
        prove = self.anew or one.program not in self.proven or one.runs_python(loss)
        try:
            expected = one.weighted(loss, gradient) if prove else None
        except RuntimeError as error:
            self.problem, expected = f"a second backward pass is not possible here ({error})", None
        one.start(self.dtype, expected, self.proven.spare)
        loss.backward(gradient, **settings)
        one.finish()
        self.problem = self.problem or one.spoiled
        if self.problem:
            self._forget_guess(one)
            return
        self.finite = self.finite and one.finite
        if not self.finite:
            self.passes += 1
            return
        if prove:
            known = known | one.evident
            self.proven[one.program] = known
        self._take(one, known)

    @torch.no_grad()
    def _take(self, one: StepPass, known: set[str]) -> None:
        factor = one.factor() if self.factor is None else self.factor
        if factor is None:
            self.problem = one.DIFFERENT_FACTORS
            return
        self.refused.update(one.refused)
        self.passes += 1
        self.examples += one.counted
        self.positions = self.positions or one.positions
        for name, total in one.sums.items():
            if name not in known and bool(total.any()):  # zero so far, and so never proven: in the next step
                self.proven.pop(one.program, None)
                self.problem = f"{name} has its first gradient, which is proven in the next step"
                return
            if not factor:
                total.zero_()
            elif name in self.sums:
                self.sums[name].add_(total, alpha=factor**-2)
            else:
                self.sums[name] = total.mul_(factor**-2)

    def _forget_guess(self, one: StepPass) -> None:
        if one.guessed:
            self.proven.guess = False


class _StepWatch(TorchFunctionMode):
    """A function mode that hands every operation between the model's call and the backward pass to the pass."""

    def __init__(self, step: Step):
        super().__init__()
        self.step = step

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        one = self.step.current
        if func in (Tensor.backward, torch.autograd.backward):
            return self._backward(func, args, kwargs)
        if func is F.l1_loss:  # which forgets its weight where a mode is active (torch 2.13): take it from its frame
            weight = sys._getframe(2).f_locals.get("weight")
            kwargs = kwargs if weight is None else {**kwargs, "weight": weight}
        if one is None:
            return func(*args, **kwargs)
        name = name_of(func)
        one.hooked = one.hooked or hooks(name, args, kwargs)
        if looks_only(name) or torch._C._functorch.maybe_current_level() is not None:
            return func(*args, **kwargs)
        if func is _attention:
            with self:  # inside a mode's own handler it is off
                return _open_attention(*args, **kwargs)
        if not torch.is_grad_enabled():
            one.without_gradient(args, kwargs)
            return func(*args, **kwargs)
        return one.call(func, name, args, kwargs)

    def _backward(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        names = ("tensors", "gradient", "retain_graph", "create_graph", "inputs")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        losses, gradient = given.pop("tensors"), given.pop("gradient", given.pop("grad_tensors", None))
        losses = list(losses) if isinstance(losses, (tuple, list)) else [losses]
        if len(losses) > 1:
            self.step.problem = "backward was called with several losses at once: add them up"
            func(*args, **kwargs)
            return
        gradient = gradient[0] if isinstance(gradient, (tuple, list)) else gradient
        self.step.backward(losses[0], gradient, **given)
