"""Train only the entries that a mask keeps, or reset the entries outside of it.

`train_only` works with any optimizer. `compact` gives the optimizer the kept entries alone: half a percent of the parameters
needs half a percent of Adam's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..errors import SquisherError
from ..names import align, align_mask, live_tensors
from ..storage.tensors import CHUNK, Computed, chunks_of
from .choosing import Mask

__all__ = ["Handle", "compact", "reset_outside", "train_only"]

_SPARSE = 0.05  # below this share, kept entries are moved by index; above it, by one comparison per entry


class Handle(ExitStack):
    """The hooks that `train_only` installed."""

    def remove(self) -> None:
        """Remove every hook; from then on all entries train."""
        self.close()


def train_only(model: nn.Module, optimizer: torch.optim.Optimizer, mask: Mapping[str, Tensor]) -> Handle:
    """Let training move only the entries that the mask keeps.

    Gradients are masked as soon as they arrive, in the backward pass: clipping sees the kept entries alone, in whatever
    order it is called afterwards. After every step frozen entries are put back to what they were before it, bit by bit,
    so that weight decay and momentum do not reach them either. The optimizer's average of frozen entries is 0, or fades to it:
    an importance that is recycled from such a run says nothing about them, and no second mask can be chosen by it.

    Args:
        model: The module; parameters that the mask does not name are frozen.
        optimizer: A `torch.optim.Optimizer` over the parameters of the model.
        mask: True where training may move an entry.

    Returns:
        A handle; `handle.remove()` ends it. It may be used in a `with` statement.

    Raises:
        NamingError: The mask does not fit the model.
        SquisherError: The optimizer does not hold the parameters that the mask keeps.
    """
    every = match(model, mask)
    inner = _innermost(optimizer)
    trained = {id(parameter) for group in inner.param_groups for parameter in group["params"]}
    for kept in every:
        if kept.indices.numel() and id(kept.parameter) not in trained:
            raise SquisherError(
                f"The mask keeps entries of {kept.name!r}, but the optimizer does not hold this parameter. Make the "
                "optimizer from model.parameters(), after moving the model to its device."
            )
    frozen = [kept for kept in every if not kept.whole]
    handle = Handle()
    for kept in frozen:
        handle.callback(_mask_gradient(kept).remove)
    steps = _Restoring([kept for kept in frozen if id(kept.parameter) in trained])
    handle.callback(inner.register_step_pre_hook(steps.before).remove)
    handle.callback(inner.register_step_post_hook(steps.after).remove)
    return handle


class MaskingHook(NamedTuple):
    """A hook for `register_post_accumulate_grad_hook` that sets the gradient of frozen entries to zero."""

    kept: Kept

    def __call__(self, parameter: Tensor) -> None:
        """Mask the gradient of the parameter."""
        if parameter.grad is not None:
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
            values = _taken(parameter.grad, self.kept.indices)  # not by a product, which would keep infinities and NaN
            _put_(parameter.grad.zero_(), self.kept.indices, values)


def _mask_gradient(kept: Kept) -> Any:
    """Set the gradient of frozen entries to zero, now and whenever one arrives; return the hook's handle."""
    mask = MaskingHook(kept)
    mask(kept.parameter)  # a gradient may have arrived before the hook was there
    return kept.parameter.register_post_accumulate_grad_hook(mask)


def frozen_by_masks(model: nn.Module) -> int:
    """Return how many entries of a model's parameters masks keep still now."""
    hooks = [
        hook for p in model.parameters() for hook in (getattr(p, "_post_accumulate_grad_hooks", None) or {}).values()
    ]
    return sum(h.kept.parameter.numel() - h.kept.indices.numel() for h in hooks if isinstance(h, MaskingHook))


class _Restoring:
    """Saves frozen entries before a step and restores them after it."""

    def __init__(self, every: list[Kept]) -> None:
        self._kept = every
        self._saved: list[Tensor] = []
        self._dense = {
            id(kept.parameter): _as_mask(kept)
            for kept in every
            if kept.indices.numel() > _SPARSE * kept.parameter.numel()
        }

    @torch.no_grad()
    def before(self, *_: Any) -> None:
        self._saved = [kept.parameter.detach().clone() for kept in self._kept]

    @torch.no_grad()
    def after(self, *_: Any) -> None:
        for kept, saved in zip(self._kept, self._saved, strict=True):
            parameter = kept.parameter.detach()
            mask = self._dense.get(id(kept.parameter))
            if mask is not None:
                torch.where(mask, parameter, saved, out=parameter)
                continue
            values = _taken(parameter, kept.indices)
            _put_(parameter.copy_(saved), kept.indices, values)
        self._saved = []


def _taken(tensor: Tensor, indices: Tensor) -> Tensor:
    """Return a copy of the entries at flat indices, whatever the order in memory (channels_last)."""
    return tensor.view(-1)[indices] if tensor.is_contiguous() else tensor.take(indices)


def _put_(tensor: Tensor, indices: Tensor, values: Tensor) -> None:
    """Set the entries at flat indices, whatever the order in memory."""
    if tensor.is_contiguous():
        tensor.view(-1)[indices] = values
    else:
        tensor.put_(indices, values)


def _as_mask(kept: Kept) -> Tensor:
    out = torch.zeros(kept.parameter.numel(), dtype=torch.bool, device=kept.parameter.device)
    out[kept.indices] = True
    return out.view(kept.parameter.shape)


def _innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside wrappers such as Accelerate's, which call its step."""
    while isinstance(inside := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inside
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise SquisherError(f"train_only needs a torch.optim.Optimizer, but got a {type(optimizer).__name__}.")
    return optimizer


def compact(
    model: nn.Module, mask: Mapping[str, Tensor], optimizer_class: type[torch.optim.Optimizer], **options: Any
) -> torch.optim.Optimizer:
    """Return an optimizer that holds and moves the kept entries alone.

    Its class is a subclass of `optimizer_class`, which schedulers and others accept. Its parameters are one vector of kept
    entries per tensor; a step gathers them and their gradients from the model and writes them back, and touches nothing else in
    the model. As with `train_only`, gradients are masked in the backward pass, so that
    `clip_grad_norm_(model.parameters(), …)` sees the kept entries alone.

    It suits optimizers that treat every entry by itself (SGD, Adam, AdamW, Adagrad, RMSprop, Lion, …). Those that look at rows or
    whole tensors (Adafactor, LAMB, Muon) would see other tensors than in full training. LBFGS is refused, and
    `torch.amp.GradScaler` does not find the gradients: use `train_only` with those.

    Args:
        model: The module; parameters that the mask does not name are frozen.
        mask: True where training may move an entry.
        optimizer_class: For example `torch.optim.AdamW`.
        **options: Its arguments (`lr=1e-3`, `weight_decay=0.01`).

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
    every = match(model, mask)
    moving = [kept for kept in every if kept.indices.numel()]
    if not moving:
        raise SquisherError("The mask keeps no entry of this model, so there is nothing to train.")
    made = type(f"Compact{optimizer_class.__name__}", (_Compact, optimizer_class), {})
    vectors = [nn.Parameter(_taken(kept.parameter.detach(), kept.indices)) for kept in moving]
    optimizer: Any = made(vectors, **options)
    optimizer._attach(every, list(zip(moving, vectors, strict=True)))
    return cast(torch.optim.Optimizer, optimizer)


class _Compact:
    """Mixed into an optimizer class: gathers kept entries before its step, and scatters them after it."""

    _all: list[Kept]
    _moving: list[tuple[Kept, nn.Parameter]]
    _hooks: list[Any]

    def _attach(self, every: list[Kept], moving: list[tuple[Kept, nn.Parameter]]) -> None:
        self._all, self._moving = every, moving
        self._hooks = [_mask_gradient(kept) for kept in every if not kept.whole]

    def release(self) -> None:
        """Remove the hooks from the model; all gradients are whole again."""
        while self._hooks:
            self._hooks.pop().remove()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step of the kept entries and write them back into the model."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for kept, vector in self._moving:
                gradient = kept.parameter.grad
                vector.grad = None if gradient is None else _taken(gradient.to_dense(), kept.indices)
                vector.copy_(_taken(kept.parameter, kept.indices))  # weights may have been loaded meanwhile
        self._inner_step()
        with torch.no_grad():
            for kept, vector in self._moving:
                _put_(kept.parameter, kept.indices, vector)
                vector.grad = None
        return loss

    def _inner_step(self) -> None:
        inner: Any = next(cls.__dict__["step"] for cls in type(self).__mro__[2:] if "step" in cls.__dict__)
        # torch wraps the step of every optimizer class, so that it calls the instance's hooks. Ours is wrapped, too, and hooks
        # are called once.
        (inner.__wrapped__ if getattr(inner, "hooked", False) else inner)(self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the whole model."""
        for kept in self._all:
            gradient = kept.parameter.grad
            if gradient is not None and not set_to_none:
                gradient.detach_().zero_()
            elif gradient is not None:
                kept.parameter.grad = None


def reset_outside(
    tuned: Mapping[str, Tensor], base: Mapping[str, Tensor], mask: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Return the tuned weights inside the mask and the base's outside; a lazy mapping, exact to the bit.

    Args:
        tuned: The fine-tuned weights.
        base: The weights that training started from, with every tensor of `tuned`.
        mask: True where the tuned value stays; tensors missing from it are the base's.

    Raises:
        NamingError: The three do not fit one another.
        SquisherError: The mask is not made of boolean tensors.
    """
    align(tuned, base, ("the tuned model", "the base"), dtypes=True)
    return _Reset(tuned, base, align_mask(mask, tuned, "the tuned model"))


class _Reset(Computed):
    def __init__(self, tuned: Mapping[str, Tensor], base: Mapping[str, Tensor], mask: Mapping[str, Tensor]) -> None:
        super().__init__(tuned)
        self._tuned, self._base, self._mask = tuned, base, mask

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._mask:
            return self._base[name]
        tuned = self._tuned[name]
        return torch.where(self._mask[name].to(tuned.device), tuned, self._base[name].to(tuned.device))

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[Tensor]:
        if name not in self._mask:
            yield from chunks_of(self._base, name, size)
            return
        sources = (chunks_of(tensors, name, size) for tensors in (self._mask, self._tuned, self._base))
        for marked, tuned, base in zip(*sources, strict=True):
            yield torch.where(marked, tuned, base)


class Kept(NamedTuple):
    """One parameter, and the entries of it that may move."""

    name: str
    parameter: Tensor
    indices: Tensor
    """Flat indices of the entries that may move, on the parameter's device."""

    @property
    def whole(self) -> bool:
        """Whether every entry may move."""
        return self.indices.numel() == self.parameter.numel()


def match(model: nn.Module, mask: Mapping[str, Tensor]) -> list[Kept]:
    """Return every trainable parameter with the indices that the mask keeps: none for names that are not in it.

    Raises:
        NamingError: The mask has a name or a shape that the model does not have.
        SquisherError: A parameter is kept that is not trainable.
    """
    if not isinstance(model, nn.Module) or not isinstance(mask, Mapping):
        raise SquisherError(
            f"A mask maps parameter names of a torch.nn.Module to boolean tensors; got a {type(mask).__name__} for a {type(model).__name__}."
        )
    parameters, tied = live_tensors(model)
    names = align(mask, parameters, ("the mask", "the model"), tied=tied) if mask else {}
    packed = mask if isinstance(mask, Mask) else Mask(mask)
    out = []
    for name, parameter in parameters.items():
        indices = packed.indices(names[name]) if name in names else torch.zeros(0, dtype=torch.int64)
        if not parameter.requires_grad:
            if indices.numel():
                raise SquisherError(
                    f"The mask keeps {indices.numel():,} entries of {name!r}, but requires_grad is False there."
                )
            continue
        out.append(Kept(name, parameter, indices.to(parameter.device)))
    return out
