"""Describe how a model is spread over processes, who has which examples, and what the processes tell one another.

A model is sharded by `fully_shard`, by tensor parallelism, or by both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from ... import ranks
from ...errors import SquisherError
from ...ranks import is_sharded
from .shards import groups_of, reshard

__all__ = ["SAME", "Exchange", "Replicas", "copies_of", "is_spread"]

SAME = 1e-3
"""How far numbers that are equal but for rounding may differ between processes, relative to their size."""


class Replicas(NamedTuple):
    """The groups of processes that have examples of their own: one process each, or the several of a tensor-parallel group.

    Attributes:
        groups: the processes of each, in their order in the mesh.
        parallel: whether the processes of a group share one model.
    """

    groups: tuple[tuple[int, ...], ...]
    parallel: bool = False

    @classmethod
    def of(cls, model: nn.Module) -> Replicas:
        """Return which processes share examples. All processes must call it together if the model is tensor parallel."""
        own = next((tuple(mesh.mesh.flatten().tolist()) for _, mesh in _tensor_meshes(model)), None)
        if own is None:
            return cls(tuple((k,) for k in range(ranks.world())))
        return cls(tuple(sorted(set(ranks.gather(own)))), True)

    @property
    def mine(self) -> int:
        """Return the number of this process's group."""
        return next(k for k, group in enumerate(self.groups) if ranks.rank() in group)

    @property
    def leads(self) -> bool:
        """Whether this process is the first of its group."""
        return ranks.rank() == self.groups[self.mine][0]

    def agreed(self, told: list[Any]) -> list[Any]:
        """Return one value for each group, and check that its processes have the same one.

        Args:
            told: the values of all processes.

        Raises:
            SquisherError: the processes of a group differ.
        """
        if any(told[k] != told[group[0]] for group in self.groups for k in group):
            raise SquisherError(
                "The processes of a tensor-parallel group have different batches. They compute one model together: give all of a "
                "group the same batches (a DistributedSampler gets the number and the rank of the group)."
            )
        return [told[group[0]] for group in self.groups]

    def total(self, number: int) -> int:
        """Return the sum of a number over the groups; all processes must call it together."""
        return sum(ranks.gather(number if self.leads else 0))


class Exchange:
    """What the processes tell one another between two passes, with a check that they are at the same place.

    Args:
        replicas: the processes that share examples.

    Attributes:
        gathered: the numbers of the sharded modules that this process has gathered since the last exchange.
        failed: whether a process told of an error in the last exchange.
    """

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        self.gathered: list[int] = []
        self.failed = False

    def __call__(self, value: Any, failure: BaseException | None = None) -> list[Any]:
        """Return the values of all processes, or raise on all of them if one failed since the last exchange."""
        message = None if failure is None else f"{type(failure).__name__}: {failure}"
        told = ranks.gather((value, message, hash(tuple(self.gathered))))
        self.gathered.clear()
        self.failed = any(m is not None for _, m, _ in told)
        if failure is not None:
            raise failure
        for where, (_, elsewhere, _) in enumerate(told):
            if elsewhere is not None:
                raise SquisherError(f"Process {where} of {len(told)} failed, so this one stops too. There: {elsewhere}")
        if len({order for _, _, order in told}) > 1:
            raise SquisherError(
                "The processes used different sharded modules for their batches (experts that get no token?). Every pass gathers "
                "modules from all processes, so all must use the same ones, as in training: give fully_shard a module around them "
                "that every batch uses."
            )
        return [v for v, _, _ in told]

    def joined(self, reasons: dict[str, str]) -> dict[str, str]:
        """Return the reasons of all processes, by parameter."""
        return {name: reason for found in self(reasons) for name, reason in found.items()}

    def leaders(self, told: list[Any]) -> list[Any]:
        """Return the values of the first process of each group that shares examples."""
        return [told[group[0]] for group in self.replicas.groups]

    def form(self, values: Tensor | None) -> tuple[Any, ...]:
        """Return what is compared of the outputs of a tensor-parallel group: their shape and the sum of their sizes."""
        if values is None or not self.replicas.parallel:
            return ()
        return (*values.shape, float(values.detach().double().abs().sum()))

    def check_outputs(self, forms: list[tuple[Any, ...]]) -> None:
        """Compare the outputs of the processes that share examples.

        Raises:
            SquisherError: they differ, so that each has a shard of them.
        """
        for group in self.replicas.groups:
            there = [forms[k] for k in group if forms[k]]
            if any(f[:-1] != there[0][:-1] or not abs(f[-1] - there[0][-1]) <= SAME * abs(f[-1]) for f in there):
                raise SquisherError(
                    "The processes of a tensor-parallel group have different outputs: a shard each, or other examples. Have the last "
                    "layer return whole outputs (ColwiseParallel(output_layouts=Replicate())), or DTensors."
                )


def is_spread(model: nn.Module, tensor_parallel: bool = True) -> bool:
    """Return whether the parameters are sharded over all processes.

    Args:
        model: resharded, if a forward pass left something gathered.
        tensor_parallel: whether that is allowed.

    Raises:
        SquisherError: they are sharded in a way that is not done.
    """
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise SquisherError(
                "The model is wrapped in FullyShardedDataParallel (FSDP1), whose flat parameters have no shapes of their own. "
                "Use torch.distributed.fsdp.fully_shard (FSDP2)."
            )
    reshard(model)
    members = _members(model)
    width = _width(model, tensor_parallel)
    found = False
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            found = True
            _check(name, parameter, members.get(id(parameter)), width)
    for member in members.values():
        unsharded = getattr(member, "_unsharded_param", None)
        if member.unsharded_accumulated_grad is not None or getattr(unsharded, "grad", None) is not None:
            raise SquisherError(
                "The model holds gradients that were not reduced yet (set_requires_gradient_sync(False)), which would be "
                "added to those measured. Measure after the optimizer's step."
            )
    return found


def copies_of(parameter: Any) -> int:
    """Return how many processes hold each shard of a DTensor."""
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_shard())


def _width(model: nn.Module, allowed: bool) -> int:
    """Return how many processes a tensor-parallel group has; 1 if there is none."""
    meshes = list(_tensor_meshes(model))
    if not meshes:
        return 1
    name, first = meshes[0]
    if not allowed:
        raise SquisherError(
            f"{name!r} is a DTensor that fully_shard did not make (tensor parallelism?). Steps are tracked per example in models that "
            "are sharded by fully_shard alone; use per='batch', or measure the model with squisher.fisher."
        )
    for other, mesh in meshes:
        if mesh.ndim != 1 or mesh.mesh.tolist() != first.mesh.tolist():
            raise SquisherError(
                f"{other!r} is a DTensor on the mesh {mesh}, and {name!r} on {first}. Measured are models that are tensor parallel over "
                "one mesh of one dimension, with or without fully_shard over another one."
            )
    return int(first.size())


def _check(name: str, parameter: Any, member: Any, width: int) -> None:
    info = None if member is None else member.mesh_info
    copies = 1 if info is None else info.mesh.size()
    sharded = info is None or (hasattr(info, "shard_process_group") and not getattr(info, "is_spmd_mesh", False))
    placements = _tensor_spec(parameter, member).placements if member is None or member.is_dtensor else ()
    known = all(type(p).__name__ in ("Shard", "Replicate") for p in placements)
    if not sharded or not known or copies * width != ranks.world():
        raise SquisherError(
            f"{name!r} is sharded as {parameter.placements} over a mesh of shape {tuple(parameter.device_mesh.shape)} in a job of "
            f"{ranks.world()} processes. Measured are models that fully_shard spreads over all processes, or over some with copies of "
            "the shards on the others (hybrid sharding); tensor parallelism over all processes; and tensor parallelism over the "
            "processes of a group with fully_shard over the groups."
        )


def _members(model: nn.Module) -> dict[int, Any]:
    return {id(p.sharded_param): p for group in groups_of(model) for p in group.fsdp_params}


def _tensor_meshes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the parameters that are DTensors beside fully_shard, with their mesh."""
    members = _members(model)
    for name, parameter in model.named_parameters():
        member = members.get(id(parameter))
        if is_sharded(parameter) and (member is None or member.is_dtensor):
            yield name, _tensor_spec(parameter, member).mesh


def _tensor_spec(parameter: Any, member: Any) -> Any:
    if member is None:
        return parameter._spec
    # The second is its name before torch 2.9.
    return getattr(member, "_unsharded_dtensor_spec", None) or member._tp_spec
