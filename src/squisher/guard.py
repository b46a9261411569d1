"""Run a model and leave it as it was: modes, flags, gradients, hooks, buffers, compiled calls and random state are restored."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .errors import SquisherError

__all__ = ["as_it_was", "begin_pass", "eager_original", "eagerly", "only_requiring", "refuse_batch_statistics"]

_WRAPPERS = {"DistributedDataParallel": "module", "DataParallel": "module", "OptimizedModule": "_orig_mod"}
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def eager_original(model: nn.Module) -> nn.Module:
    """Return the module inside the outer wrappers (compiled, data parallel): what runs eagerly and on this process alone."""
    while type(model).__name__ in _WRAPPERS:
        model = getattr(model, _WRAPPERS[type(model).__name__])
    return model


@contextmanager
def eagerly(model: nn.Module) -> Iterator[None]:
    """Run the compiled modules of a model, and the compiled functions that they call, eagerly inside."""
    stance = hasattr(torch.compiler, "set_stance")  # since torch 2.6
    with ExitStack() as stack:
        if stance and "torch._dynamo" in sys.modules:  # without it nothing is compiled, and it takes long to import
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module in model.modules():
            if not stance and type(module).__name__ == "OptimizedModule":
                stack.callback(vars(module).__setitem__, "forward", module.forward)
                vars(module)["forward"] = cast(nn.Module, module._orig_mod).__call__
            if getattr(module, "_compiled_call_impl", None) is not None:
                stack.callback(setattr, module, "_compiled_call_impl", module._compiled_call_impl)
                module._compiled_call_impl = None
        yield


def refuse_batch_statistics(model: nn.Module, instead: str) -> None:
    """Refuse a model in training mode with batch normalisation: its examples have no gradients of their own.

    Args:
        model: In the mode in which it will run.
        instead: What to do instead.

    Raises:
        SquisherError: It names the layer.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise SquisherError(
                f"{name!r} normalises with the statistics of the batch in training mode, so an example has no gradient of its "
                f"own. {instead}"
            )


@contextmanager
def as_it_was(model: nn.Module, eval_mode: bool = True) -> Iterator[None]:
    """Put the model into evaluation mode inside (unless `eval_mode` is False); restore everything, also after an error.

    Inside, hooks on parameters are off (an optimizer may live in them), compiled calls run eagerly, and what serves inference
    alone is off: the fused attention path, which has no gradients, and the caches of Hugging Face models. `begin_pass` restores
    what a forward pass changes.

    Raises:
        SquisherError: A parameter was changed inside.
    """
    modules = list(model.modules())
    parameters = list(model.parameters())
    training = [(m, m.training) for m in modules]
    flags = [(p, p.requires_grad, p.grad) for p in parameters]
    tables = [table for p in parameters for name in _HOOKS if (table := getattr(p, name, None))]
    hooks = [(table, dict(table)) for table in tables]
    versions = [(name, p, p._version) for name, p in model.named_parameters()]
    kept = _Kept(modules)
    fast_path = torch.backends.mha.get_fastpath_enabled()
    devices = sorted({p.device.index or 0 for p in parameters if p.device.type == "cuda"})
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(eagerly(model))
        stack.enter_context(_without_caches(modules))
        try:
            torch.backends.mha.set_fastpath_enabled(False)
            for parameter, _, _ in flags:
                parameter.grad = None
            for table in tables:
                table.clear()
            if eval_mode:
                model.eval()
            _KEPT[model] = kept
            yield
        finally:
            _KEPT.pop(model, None)
            torch.backends.mha.set_fastpath_enabled(fast_path)
            for module, mode in training:
                module.training = mode
            for parameter, required, grad in flags:
                parameter.requires_grad_(required)
                parameter.grad = grad
            for table, before in hooks:
                table.update(before)
            kept.restore()
    changed = [name for name, p, version in versions if p._version != version]
    if changed:
        raise SquisherError(
            f"The model changes its parameter {changed[0]!r} while it runs (a renormalised embedding, an optimizer in a hook): what "
            "was measured belongs to no one set of weights. Freeze it, or switch off what changes it."
        )


@contextmanager
def _without_caches(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Keep models from filling a cache of past positions: some write into it in place, and break the backward pass."""
    configs: list[Any] = [m.config for m in modules if getattr(getattr(m, "config", None), "use_cache", None) is True]
    try:
        for config in configs:
            config.use_cache = False
        yield
    finally:
        for config in configs:
            config.use_cache = True


@contextmanager
def only_requiring(model: nn.Module, parameters: Iterable[Tensor]) -> Iterator[None]:
    """Make these parameters require a gradient inside, and no others."""
    wanted = {id(p) for p in parameters}
    flags = [(p, p.requires_grad) for p in model.parameters()]
    for p, _ in flags:
        p.requires_grad_(id(p) in wanted)
    try:
        yield
    finally:
        for p, flag in flags:
            p.requires_grad_(flag)


class _Kept:
    """What modules hold beside their parameters: buffers, unregistered tensors, numbers.

    Tensors that require a gradient are left out: every pass makes them anew.
    """

    def __init__(self, modules: Iterable[nn.Module]):
        self.tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for module in modules:
            for table in (module._buffers, vars(module)):
                named = {n: v for n, v in table.items() if n != "training" and _is_kept(v)}
                if named:
                    self.tables.append((table, named))
        tensors = [v for _, named in self.tables for v in named.values() if isinstance(v, Tensor)]
        self.copies = {id(t): (t, t.clone()) for t in tensors}
        self.given = [{n: (v, _version(v)) for n, v in named.items()} for _, named in self.tables]

    @torch.no_grad()
    def begin(self) -> None:
        """Restore the first values for the next pass, in new tensors: the graph of the last pass may need the changed ones."""
        new: dict[int, Tensor] = {}
        for (table, named), given in zip(self.tables, self.given, strict=True):
            now = _plain(table)
            for name, (value, version) in given.items():
                if now.get(name) is value and _version(value) == version:
                    continue
                first = named[name]
                if isinstance(first, Tensor):
                    key = id(first)
                    if key not in new:
                        new[key] = self.copies[key][1].clone()
                    first = new[key]
                table[name] = first
                given[name] = (first, _version(first))

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything."""
        for table, named in self.tables:
            now = _plain(table)
            for name in [name for name, value in named.items() if now.get(name) is not value]:
                table[name] = named[name]
        for tensor, copy in self.copies.values():
            # Its version says nothing: batch normalisation changes its statistics without counting it.
            if not _equal(tensor, copy):
                (tensor if tensor.shape == copy.shape else tensor.resize_(copy.shape)).copy_(copy)


_KEPT: WeakKeyDictionary[nn.Module, _Kept] = WeakKeyDictionary()


def begin_pass(model: nn.Module) -> None:
    """Undo what the last forward pass inside `as_it_was` changed (a counter, a queue), so that all passes begin alike.

    The statistics of batch normalisation stay as they are: a pass that changes them does not use them.
    """
    if model in _KEPT:
        _KEPT[model].begin()


def _is_kept(value: Any) -> bool:
    return type(value) in (int, float, bool) or (isinstance(value, Tensor) and not value.requires_grad)


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _plain(table: Any) -> dict[str, Any]:
    return table if isinstance(table, dict) else dict(table.items())  # a scripted module has another type


def _equal(one: Any, other: Any) -> bool:
    one, other = (t.to_local() if hasattr(t, "to_local") else t for t in (one, other))
    return one.layout is torch.strided and bool(torch.equal(one, other))
