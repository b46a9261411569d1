"""Run a model and leave it as it was: modes, flags, gradients, hooks, buffers, compiled calls and random state are restored."""

from __future__ import annotations

import operator
import pickle
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from .errors import SquisherError

__all__ = [
    "as_it_was",
    "begin_pass",
    "eager_original",
    "eagerly",
    "only_requiring",
    "random_states",
    "refuse_batch_statistics",
    "same_random_numbers",
]

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
        SquisherError: A parameter was changed inside, or the model has no evaluation mode.
    """
    modules = list(model.modules())
    parameters = list(model.parameters())
    training = [(m, m.training) for m in modules]
    flags = [(p, p.requires_grad, p.grad) for p in parameters]
    tables = [table for p in parameters for name in _HOOKS if (table := getattr(p, name, None))]
    hooks = [(table, dict(table)) for table in tables]
    versions = [(name, p, _place(p)) for name, p in model.named_parameters()]
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
                _evaluate(model)
            _KEPT[model] = _Kept(modules)
            yield
        finally:
            kept = _KEPT.pop(model, None)
            if kept is not None:
                kept.restore()
            torch.backends.mha.set_fastpath_enabled(fast_path)
            for module, mode in training:
                module.training = mode
            for parameter, required, grad in flags:
                parameter.requires_grad_(required)
                parameter.grad = grad
            for table, before in hooks:
                table.update(before)
    changed = [name for name, p, place in versions if _place(p) != place]
    if changed:
        raise SquisherError(
            f"The model changes its parameter {changed[0]!r} while it runs (a renormalised embedding, an optimizer in a hook): what "
            "was measured belongs to no one set of weights. Freeze it, or switch off what changes it."
        )


def _evaluate(model: nn.Module) -> None:
    try:
        model.eval()
    except NotImplementedError as error:
        raise SquisherError(
            f"The model cannot be put into evaluation mode ({error}), as one from torch.export cannot: its mode is part of its program. "
            "Use eval_mode=False, if it was exported in evaluation mode, or the module that it was exported from."
        ) from error


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
    """What the modules keep beside their parameters: buffers, attributes, hooks, submodules, and what is in their lists and dictionaries.

    Generators of random numbers go on from pass to pass, and are brought back at the end.
    """

    def __init__(self, modules: Iterable[nn.Module]):
        self.tables: list[tuple[Any, Any]] = []  # containers, and what was in them
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}
        self.given: dict[int, tuple[Tensor, int]] = {}
        self.generators = [*_GLOBAL]
        seen: set[int] = set()
        for module in modules:
            seen.add(id(module._parameters))  # sharded ones are gathered and given back in every pass
            for table in (module._buffers, vars(module)):
                self._add(table, seen)
        self.states = [_state_of(g) for g in self.generators]

    def _add(self, value: Any, seen: set[int]) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, _GENERATORS):
            self.generators.append(value)
        elif isinstance(value, Tensor):
            if not value.requires_grad:  # what does is made anew in every pass
                self.copies[id(value)] = (value, value.clone())
                self.given[id(value)] = (value, _version(value))
        elif len(value) <= _MOST_KEPT:
            contents = dict(value.items()) if hasattr(value, "items") else type(value)(value)
            self.tables.append((value, contents))
            for item in contents.values() if isinstance(contents, dict) else contents:
                if type(item) in _CONTAINERS or isinstance(item, (Tensor, *_GENERATORS)):
                    self._add(item, seen)

    @torch.no_grad()
    def begin(self) -> None:
        """Give the next pass what the modules kept at first; in new tensors, as the graph of the last pass may need the changed ones."""
        for key, (tensor, version) in self.given.items():
            if _version(tensor) != version:
                fresh = self.copies[key][1].clone()
                self.given[key] = (fresh, _version(fresh))
        self._put_back({key: new for key, (new, _) in self.given.items() if new is not self.copies[key][0]})

    @torch.no_grad()
    def restore(self) -> None:
        """Bring everything back."""
        self._put_back({})
        for tensor, copy in self.copies.values():
            # Its version says nothing: batch normalisation changes its statistics without counting it.
            if not _equal(tensor, copy):
                (tensor if tensor.shape == copy.shape else tensor.resize_(copy.shape)).copy_(copy)
        for generator, state in zip(self.generators, self.states, strict=True):
            _set_state(generator, state)

    def _put_back(self, instead: Mapping[int, Tensor]) -> None:
        """Fill the containers with what was in them, with these tensors in place of those with these ids."""
        for table, contents in self.tables:
            if not contents and not table:  # most are tables of hooks without any
                continue
            if isinstance(contents, dict):
                now = table if isinstance(table, dict) else dict(table.items())  # that of a scripted module is none
                if (
                    not instead
                    and now.keys() == contents.keys()
                    and all(map(operator.is_, now.values(), contents.values()))
                ):
                    continue  # nearly always
                for name in [name for name in now if name not in contents]:
                    del table[name]
                for name, value in contents.items():
                    value = instead.get(id(value), value)
                    if name not in now or now[name] is not value:
                        table[name] = value
            elif isinstance(contents, set):
                if table != contents:
                    table.clear()
                    table.update(contents)
            else:
                wanted = [instead.get(id(value), value) for value in contents]
                if len(table) != len(wanted) or not all(map(operator.is_, table, wanted)):
                    table.clear()
                    table.extend(wanted)


_KEPT: WeakKeyDictionary[nn.Module, _Kept] = WeakKeyDictionary()
_CONTAINERS = (dict, OrderedDict, defaultdict, list, deque, set)
_MOST_KEPT = 1 << 14
"""Entries of a list or dictionary that is looked at before every pass; larger ones hold data."""
_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator, torch.Generator)
_GLOBAL: list[Any] = [random._inst, np.random.mtrand._rand, torch.default_generator]


def begin_pass(model: nn.Module) -> None:
    """Undo what the last forward pass inside `as_it_was` changed (a counter, a queue), so that all passes begin alike.

    The statistics of batch normalisation stay as they are: a pass that changes them does not use them.
    """
    if model in _KEPT:
        _KEPT[model].begin()


def random_states(model: nn.Module) -> list[Any]:
    """Return the states of the generators of random numbers that a forward pass may draw from: the global ones and the model's own."""
    return [_state_of(g) for g in _generators_of(model)]


@contextmanager
def same_random_numbers(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Yield a function after which the numbers that were drawn inside come again; they come once more afterwards."""
    states = random_states(model)

    def begin_again() -> None:
        for generator, state in zip(_generators_of(model), states, strict=True):
            _set_state(generator, state)

    try:
        yield begin_again
    finally:
        begin_again()


def _generators_of(model: nn.Module) -> list[Any]:
    kept = _KEPT.get(model)
    return _GLOBAL if kept is None else kept.generators


def _state_of(generator: Any) -> Any:
    """Return the state of a generator; states can be compared."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return pickle.dumps(generator.get_state(legacy=False))
    return pickle.dumps(generator.bit_generator.state)


def _set_state(generator: Any, state: Any) -> None:
    """Set a state of `_state_of`; what is unpickled was pickled there and never left the process."""
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(pickle.loads(state))
    else:
        generator.bit_generator.state = pickle.loads(state)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _place(parameter: Tensor) -> tuple[int, int]:
    """Return what is another one after a parameter was changed in place, or got other `data`."""
    return _version(parameter), getattr(parameter, "_local_tensor", parameter).data_ptr()


def _equal(one: Any, other: Any) -> bool:
    one, other = (t.to_local() if hasattr(t, "to_local") else t for t in (one, other))
    return one.layout is torch.strided and bool(torch.equal(one, other))
