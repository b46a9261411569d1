"""Tensor parallelism: the shard of a per-example gradient, from what its process has already.

The output of a column-parallel layer is sharded by columns, and so is its gradient; its input is whole: with both, the rule of a linear
layer gives the process's rows of the weight's gradient. The input of a row-parallel layer is sharded and its output's gradient whole. What
comes otherwise (a norm on a shard of the sequence, whose gradient is a sum over processes) is summed or gathered *before* it is squared.

torch does not show the functions that turn tensors into DTensors and back to a function mode, so they are replaced for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...ranks import is_sharded, local_of
from ..rules import Broadcast, Dense, Gradients, Linear, Lookup, Rule

__all__ = ["can_localise", "conversions", "local_gradient", "shard_of_gradients"]


def local_gradient(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return the shard of a gradient that belongs to this process's shard of the parameter; summed over processes, if each has a summand."""
    if not is_sharded(gradient):
        return gradient
    found: Any = gradient
    wanted = parameter.placements  # type: ignore[attr-defined]
    return local_of(found if found.placements == wanted else found.redistribute(placements=wanted))


def can_localise(source: Tensor, rule: Rule) -> bool:
    """Return whether `shard_of_gradients` can do this use of a DTensor."""
    if not isinstance(rule, (Linear, Lookup, Broadcast)):
        return False
    dim = _sharded_dim(source)
    return not isinstance(rule, Broadcast) or not dim or rule.aligned == tuple(rule.shape)


def shard_of_gradients(source: Tensor, rule: Any, g: Any, dim: int, examples: int, squared: bool = False) -> Gradients:
    """Return this process's shard of the gradients of one use; all processes of the mesh must call it together.

    Args:
        source: what was used: a DTensor, or whole on every process.
        rule: of its use, with DTensors.
        g: gradient with respect to the output, a DTensor.
        dim: as in `Rule.gradients`, like those that follow.
        examples: how many there are.
        squared: whether squares are wanted.
    """
    from torch.distributed.tensor import Replicate, Shard

    whole, last = Replicate(), Shard(g.dim() - 1)
    sharded = _sharded_dim(source)
    if isinstance(rule, Linear):
        by_output = sharded is not None and sharded == int(rule.transposed)
        by_input = sharded is not None and not by_output
        local = Linear(_placed(rule.a, Shard(rule.a.dim() - 1) if by_input else whole, g), rule.transposed)
        return local.gradients(_placed(g, last if by_output else whole, g), dim, examples, squared)
    if isinstance(rule, Lookup):
        ids = _placed(rule.ids, whole, g)
        if rule.padding is not None:
            ids = ids.masked_fill(ids == rule.padding, -1)
        if sharded == 0:
            ids = _own_rows(ids, source)
        return Lookup(ids).gradients(_placed(g, last if sharded == 1 else whole, g), dim, examples, squared)
    return _broadcast_gradients(source, rule, g, dim, examples, squared)


def _broadcast_gradients(source: Tensor, rule: Broadcast, g: Any, dim: int, examples: int, squared: bool) -> Gradients:
    from torch.distributed.tensor import Replicate, Shard

    sharded, missing = _sharded_dim(source), g.dim() - len(rule.aligned)
    (here,) = g.placements
    # Shards of positions, over which the gradient is summed: each process sums its own, then all do.
    partial = sharded is None and here.is_shard() and here.dim != dim
    partial = partial and (here.dim < missing or rule.aligned[here.dim - missing] == 1)
    placement = here if partial else Replicate() if sharded is None else Shard(missing + sharded)
    factor = rule.factor() if callable(rule.factor) else rule.factor
    if factor is not None:
        factor = _placed(factor.expand(g.shape), placement, g)
    local = _placed(g, placement, g)
    shape = local_of(source).shape
    aligned = rule.aligned if sharded is None else (*shape, *rule.aligned[len(shape) :])
    summand = replace(rule, shape=shape, aligned=tuple(aligned), factor=factor, held=()).gradients(
        local, dim, examples, squared
    )
    if partial and isinstance(summand, Dense):
        summand = Dense(summand.values.clone())
        dist.all_reduce(summand.values, group=g.device_mesh.get_group())
    return summand


def _sharded_dim(source: Any) -> int | None:
    if not is_sharded(source):
        return None
    (placement,) = source.placements
    return int(placement.dim) % source.dim() if placement.is_shard() else None


def _placed(t: Any, placement: Any, like: Any) -> Tensor:
    """Return this process's shard of a tensor under another placement; a plain tensor is whole on every process."""
    from torch.distributed.tensor import DTensor

    if not is_sharded(t):
        t = DTensor.from_local(t, like.device_mesh, run_check=False)
    found = local_of(t if t.placements == (placement,) else t.redistribute(placements=(placement,)))
    return found.wait() if hasattr(found, "wait") else found


def _own_rows(ids: Tensor, table: Any) -> Tensor:
    """Count ids from the first row of this process's shard of a table; -1 for the rows of others."""
    mesh = table.device_mesh
    rows = -(-table.shape[0] // mesh.size())
    ids = ids - rows * mesh.get_local_rank()
    return ids.masked_fill((ids < 0) | (ids >= local_of(table).shape[0]), -1)


@contextmanager
def conversions(made: Callable[[Tensor, Tensor, Any], None]) -> Iterator[None]:
    """Call `made` whenever a tensor becomes a DTensor inside, or a DTensor becomes local or whole or changes its placements.

    Args:
        made: called with what was there, what was made of it, and the placements under which the one is a shard of the other.
    """
    from torch.distributed.tensor import DTensor

    names = ("from_local", "to_local", "redistribute", "full_tensor")
    originals = {name: DTensor.__dict__[name] for name in names}

    def telling(name: str) -> Any:
        method = getattr(DTensor, name)

        def run(t: Any, *args: Any, **kwargs: Any) -> Any:
            with torch._C.DisableTorchFunction():
                found = method(t, *args, **kwargs)
            dtensor = {"from_local": found, "to_local": t}.get(name)
            made(t, found, () if dtensor is None else dtensor.placements)
            return found

        return staticmethod(run) if name == "from_local" else run

    replacements = {name: telling(name) for name in names}
    try:
        for name, replacement in replacements.items():
            setattr(DTensor, name, replacement)
        yield
    finally:
        for name, original in originals.items():
            setattr(DTensor, name, original)
