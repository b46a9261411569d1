"""Models that are spread over processes (FSDP2, `fully_shard`): sharding is for memory, so all walk the same batches together.

Every forward and backward pass is a collective operation, and the gradient that each process gets is its part of the mean over
processes: of equal gradients, that is the gradient itself. Each squares its part, and nothing is summed at the end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .. import ranks
from ..errors import SquisherError
from ..ranks import is_sharded
from .batches import batches_of, leaves_of

__all__ = ["in_step", "is_spread", "whole_gradients"]

_END = object()


def is_spread(model: nn.Module) -> bool:
    """Whether the parameters are spread over all processes by `fully_shard`.

    Raises:
        SquisherError: they are spread in another way.
    """
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise SquisherError(
                "The model is wrapped in FullyShardedDataParallel (FSDP1), whose flat parameters have no shapes of their own. "
                "Use torch.distributed.fsdp.fully_shard (FSDP2)."
            )
    groups = list(_groups(model))
    _reshard(model)
    ours = {id(p.sharded_param) for group in groups for p in group.fsdp_params}
    found = False
    for name, parameter in model.named_parameters():
        if not is_sharded(parameter):
            continue
        found = True
        mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
        if id(parameter) not in ours:
            raise SquisherError(
                f"{name!r} is a DTensor that fully_shard did not make (tensor parallelism?). Only parameters sharded by "
                "fully_shard over all processes are measured; gather the model, or shard it with fully_shard alone."
            )
        if mesh.ndim != 1 or mesh.size() != ranks.world():
            raise SquisherError(
                f"{name!r} is sharded over a mesh of shape {tuple(mesh.shape)} in a job of {ranks.world()} processes. Only one "
                "dimension over all of them is measured (no hybrid sharding, no tensor parallelism beside it)."
            )
    for group in groups:
        for p in group.fsdp_params:
            unsharded = getattr(p, "_unsharded_param", None)
            if p.unsharded_accumulated_grad is not None or getattr(unsharded, "grad", None) is not None:
                raise SquisherError(
                    "The model holds gradients that were not reduced yet (set_requires_gradient_sync(False)), which would be "
                    "added to those measured. Measure after the optimizer's step."
                )
    return found


@contextmanager
def whole_gradients(model: nn.Module, spread_out: bool = True) -> Iterator[None]:
    """Inside, gradients of a spread model are reduced to their mean, and all processes have the same random state."""
    if not spread_out:
        yield
        return
    wanted = {"gradient_divide_factor": None, "reduce_grads": True, "all_reduce_grads": True}
    before = [(group, {name: getattr(group, name) for name in wanted}) for group in _groups(model)]
    # Dropout that is left on must drop the same everywhere. Whoever calls this has saved the random state.
    torch.manual_seed(ranks.gather(int(torch.randint(2**62, ())))[0])
    try:
        for group, _ in before:
            _set(group, wanted)
        yield
    finally:
        for group, values in before:
            _set(group, values)
        _reshard(model)


def in_step(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the user's batches, as long as all processes have the same one.

    A process with other data would spoil the gradients of all, and one without would leave the others waiting.

    Raises:
        SquisherError: on all processes, if they differ or one failed.
    """
    iterator = batches_of(batches)
    while True:
        raw, mark, failure = _END, "none", None
        try:
            raw = next(iterator, _END)
            mark = _fingerprint(raw)
        except Exception as error:
            failure = error
        ranks.agree(failure)
        marks = ranks.gather(mark)
        if len(set(marks)) > 1:
            other = next(k for k, m in enumerate(marks) if m != marks[0])
            raise SquisherError(
                f"Processes 0 and {other} have different batches. The model is sharded (FSDP2), so all processes must walk the "
                "same batches in the same order: give every one the whole data, without a distributed sampler."
            )
        if raw is _END:
            return
        yield raw


def _fingerprint(raw: Any) -> str:
    if raw is _END:
        return "end"
    digest = hashlib.sha256()
    for tensor in leaves_of(raw):
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype};".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _sharded_modules(model: nn.Module) -> Iterator[Any]:
    # By what they can do: the class is where it is only since torch 2.6.
    return (m for m in model.modules() if hasattr(m, "_get_fsdp_state") and hasattr(m, "reshard"))


def _groups(model: nn.Module) -> Iterator[Any]:
    """Yield the groups of parameters that fully_shard keeps; its settings can be changed in public, but not read."""
    for module in _sharded_modules(model):
        state = module._get_fsdp_state()
        several = getattr(state, "_fsdp_param_groups", None)
        yield from (several if several is not None else filter(None, [state._fsdp_param_group]))


def _reshard(model: nn.Module) -> None:
    # After a forward pass without a backward pass the outermost parameters are still whole.
    for module in _sharded_modules(model):
        module.reshard()


def _set(group: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(group, name, value)
