"""The model as it was: modes, flags, gradients, buffers, compiled calls and random state come back, whatever happens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["eager_original", "preserved"]

_WRAPPERS = {"DistributedDataParallel": "module", "DataParallel": "module", "OptimizedModule": "_orig_mod"}


def eager_original(model: nn.Module) -> nn.Module:
    """The module inside the outer wrappers (compiled, data parallel): what runs eagerly and on this process alone."""
    while type(model).__name__ in _WRAPPERS:
        model = getattr(model, _WRAPPERS[type(model).__name__])
    return model


@contextmanager
def preserved(model: nn.Module, eval_mode: bool = True) -> Iterator[None]:
    """Evaluation mode (unless told otherwise) inside; everything as it was outside, also after an error.

    Inside, compiled calls run eagerly, and the fused attention path of inference, which has no gradients, is off.
    """
    modules = list(model.modules())
    training = [(m, m.training) for m in modules]
    flags = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    buffers = [(m, dict(m._buffers)) for m in modules if m._buffers]
    copies = [
        (b, b._version, b.clone())
        for b in {id(b): b for _, bs in buffers for b in bs.values() if b is not None}.values()
    ]
    compiled = [(m, m._compiled_call_impl) for m in modules if getattr(m, "_compiled_call_impl", None) is not None]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(torch.enable_grad())
        if any(type(m).__name__ == "OptimizedModule" for m in modules) and hasattr(torch.compiler, "set_stance"):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            torch.backends.mha.set_fastpath_enabled(False)
            for module, _ in compiled:
                module._compiled_call_impl = None
            for parameter, _, _ in flags:
                parameter.grad = None
            if eval_mode:
                model.eval()
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
            for module, implementation in compiled:
                module._compiled_call_impl = implementation
            for module, mode in training:
                module.training = mode
            for parameter, required, grad in flags:
                parameter.requires_grad_(required)
                parameter.grad = grad
            _restore(buffers, copies)


@torch.no_grad()
def _restore(buffers: list[tuple[nn.Module, dict[str, Any]]], copies: list[tuple[Tensor, int, Tensor]]) -> None:
    for module, held in buffers:
        for name, buffer in held.items():
            if module._buffers.get(name) is not buffer:
                module._buffers[name] = buffer
    for buffer, version, copy in copies:
        if buffer._version != version:
            buffer.copy_(copy)
