"""An optimizer over the kept entries alone: half a percent of the parameters needs half a percent of Adam's state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import SquisherError
from .matching import Kept, match
from .training import mask_gradient, masking_hook

__all__ = ["compact"]


def compact(
    model: nn.Module, mask: Mapping[str, Tensor], optimizer_class: type[torch.optim.Optimizer], **options: Any
) -> torch.optim.Optimizer:
    """Return an optimizer that holds and moves the kept entries alone.

    It is an instance of a subclass of `optimizer_class`, so that schedulers and everything else take it for one. Its
    parameters are one vector of kept entries per tensor; a step gathers them and their gradients from the model and
    writes them back, and nothing else in the model is touched. As with `train_only`, gradients are masked in the backward
    pass, so that `clip_grad_norm_(model.parameters(), …)` sees the kept entries alone.

    Right for optimizers that treat every entry by itself (SGD, Adam, AdamW, Adagrad, RMSprop, Lion, …). One that looks at
    rows or whole tensors (Adafactor, LAMB, Muon) would see other tensors than in full training. LBFGS is refused, and
    `torch.amp.GradScaler` does not find its gradients: use `train_only` with those.

    Args:
        model: The module; parameters that the mask does not name are frozen.
        mask: True where training may move an entry.
        optimizer_class: For example `torch.optim.AdamW`.
        **options: Passed on to it (`lr=1e-3`, `weight_decay=0.01`).

    Returns:
        The optimizer. `optimizer.release()` removes its hooks from the model.

    Raises:
        NamingError: The mask does not fit the model.
        SquisherError: The mask keeps nothing.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise SquisherError(f"compact needs an optimizer class such as torch.optim.AdamW, but got {optimizer_class!r}.")
    if issubclass(optimizer_class, torch.optim.LBFGS):
        raise SquisherError("LBFGS evaluates the loss inside its step, which compact cannot follow; use train_only.")
    kept = match(model, mask)
    moving = [part for part in kept if part.indices.numel()]
    if not moving:
        raise SquisherError("The mask keeps no entry of this model, so there is nothing to train.")
    made = type(f"Compact{optimizer_class.__name__}", (_Compact, optimizer_class), {})
    vectors = [nn.Parameter(part.parameter.detach().view(-1)[part.indices].clone()) for part in moving]
    optimizer: Any = made(vectors, **options)
    optimizer._attach(kept, list(zip(moving, vectors, strict=True)))
    return cast(torch.optim.Optimizer, optimizer)


class _Compact:
    """Gathers before the step of the class that it is mixed with, and scatters after it."""

    _all: list[Kept]
    _moving: list[tuple[Kept, nn.Parameter]]
    _hooks: list[Any]

    def _attach(self, every: list[Kept], moving: list[tuple[Kept, nn.Parameter]]) -> None:
        self._all, self._moving = every, moving
        self._hooks = []
        for part in every:
            if part.parameter.grad is not None:
                mask_gradient(part, part.parameter.grad)
            if not part.whole:
                self._hooks.append(part.parameter.register_post_accumulate_grad_hook(masking_hook(part)))

    def release(self) -> None:
        """Remove the hooks from the model; all gradients are whole again."""
        while self._hooks:
            self._hooks.pop().remove()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the kept entries, written back into the model."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for part, vector in self._moving:
                gradient = part.parameter.grad
                vector.grad = None if gradient is None else gradient.view(-1)[part.indices]
                vector.copy_(part.parameter.view(-1)[part.indices])  # weights may have been loaded meanwhile
        self._inner_step()
        with torch.no_grad():
            for part, vector in self._moving:
                part.parameter.view(-1)[part.indices] = vector
                vector.grad = None
        return loss

    def _inner_step(self) -> None:
        inner: Any = next(cls.__dict__["step"] for cls in type(self).__mro__[2:] if "step" in cls.__dict__)
        # torch wraps the step of every class that was ever used so that it calls the instance's hooks; ours is wrapped too,
        # and they are to be called once.
        (inner.__wrapped__ if getattr(inner, "hooked", False) else inner)(self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the whole model."""
        for part in self._all:
            gradient = part.parameter.grad
            if gradient is not None and not set_to_none:
                gradient.detach_().zero_()
            elif gradient is not None:
                part.parameter.grad = None
