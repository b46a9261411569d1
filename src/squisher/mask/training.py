"""Training under a mask: frozen entries do not move by a single bit, whatever the optimizer does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SquisherError
from .matching import Kept, match

__all__ = ["Handle", "mask_gradient", "masking_hook", "train_only"]

_SPARSE = 0.05  # below this share, kept entries are moved by index; above it, by one comparison an entry


class Handle:
    """What `train_only` installed; `remove` takes it away."""

    def __init__(self, removers: list[Callable[[], None]]) -> None:
        self._removers = removers

    def remove(self) -> None:
        """Remove every hook; from then on all entries train."""
        while self._removers:
            self._removers.pop()()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def train_only(model: nn.Module, optimizer: torch.optim.Optimizer, mask: Mapping[str, Tensor]) -> Handle:
    """Lets training move only the entries that the mask keeps.

    Gradients are masked as soon as they arrive, in the backward pass: clipping sees the kept entries alone, in whatever
    order it is called afterwards. After every step frozen entries are put back to what they were before it, bit by bit,
    so that weight decay and momentum do not reach them either.

    Args:
        model: The module; parameters that the mask does not name are frozen.
        optimizer: A `torch.optim.Optimizer` over the model's own parameters.
        mask: True where training may move an entry.

    Returns:
        A handle; `handle.remove()` ends it. It may be used in a `with` statement.

    Raises:
        NamingError: The mask does not fit the model.
        SquisherError: The optimizer does not hold the parameters that the mask keeps.
    """
    kept = match(model, mask)
    inner = _innermost(optimizer)
    held = {id(parameter) for group in inner.param_groups for parameter in group["params"]}
    for part in kept:
        if part.indices.numel() and id(part.parameter) not in held:
            raise SquisherError(
                f"The mask keeps entries of {part.name!r}, but the optimizer does not hold this parameter. Make the "
                "optimizer from model.parameters(), after moving the model to its device."
            )
    frozen = [part for part in kept if not part.whole]
    removers: list[Callable[[], None]] = []
    for part in frozen:
        if part.parameter.grad is not None:  # it came before the hook
            mask_gradient(part, part.parameter.grad)
        hook = part.parameter.register_post_accumulate_grad_hook(masking_hook(part))
        removers.append(hook.remove)
    steps = _Restoring([part for part in frozen if id(part.parameter) in held])
    removers.append(inner.register_step_pre_hook(steps.before).remove)
    removers.append(inner.register_step_post_hook(steps.after).remove)
    return Handle(removers)


def mask_gradient(part: Kept, gradient: Tensor) -> None:
    """Set the gradient of frozen entries to zero, in place; infinities and NaN too, which a product would keep."""
    flat = gradient.view(-1)
    values = flat[part.indices]
    flat.zero_()
    flat[part.indices] = values


def masking_hook(part: Kept) -> Callable[[Tensor], None]:
    """For `register_post_accumulate_grad_hook`: masks the gradient as soon as it has been accumulated."""

    def mask(parameter: Tensor) -> None:
        if parameter.grad is not None:
            if parameter.grad.is_sparse or not parameter.grad.is_contiguous():
                parameter.grad = parameter.grad.to_dense().contiguous()
            mask_gradient(part, parameter.grad)

    return mask


class _Restoring:
    """Remembers frozen entries before a step and puts them back after it."""

    def __init__(self, parts: list[Kept]) -> None:
        self._parts = parts
        self._saved: list[Tensor] = []
        self._dense = {
            id(part.parameter): _as_mask(part)
            for part in parts
            if part.indices.numel() > _SPARSE * part.parameter.numel()
        }

    @torch.no_grad()
    def before(self, *_: Any) -> None:
        self._saved = [part.parameter.detach().clone() for part in self._parts]

    @torch.no_grad()
    def after(self, *_: Any) -> None:
        for part, saved in zip(self._parts, self._saved, strict=True):
            parameter = part.parameter.detach()
            kept = self._dense.get(id(part.parameter))
            if kept is not None:
                torch.where(kept, parameter, saved, out=parameter)
                continue
            flat = parameter.view(-1)
            values = flat[part.indices]
            parameter.copy_(saved)
            flat[part.indices] = values
        self._saved = []


def _as_mask(part: Kept) -> Tensor:
    out = torch.zeros(part.parameter.numel(), dtype=torch.bool, device=part.parameter.device)
    out[part.indices] = True
    return out.view(part.parameter.shape)


def _innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside wrappers such as Accelerate's, which call its step."""
    while isinstance(inside := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inside
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise SquisherError(f"train_only needs a torch.optim.Optimizer, but got a {type(optimizer).__name__}.")
    return optimizer
