"""Models that are sharded over processes (FSDP2, `fully_shard`): what is gathered when, and sums that are sharded as parameters are.

A process holds a shard of every parameter; a layer is gathered while it is at work. The squares of its per-example gradients are whole
then, too: as soon as the layer's backward pass is through they are summed over processes, each process keeps its shard of the sums, and
the rest is freed. So a batch costs the traffic of a training step, and a process holds its shard and a layer or two.

What is needed of fully_shard is not public: its groups of parameters, when one is gathered, and when its backward pass is through. It
is all in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...ranks import local_of
from ..examples import tensors_in
from ..sums import Sums
from .parallel import local_gradient

__all__ = ["Group", "Shards", "WholeSums", "groups_of", "reshard"]


class Group:
    """Parameters that fully_shard gathers and frees together.

    Args:
        group: its own object.
        names: of the parameters that are measured, by the identity of their shards.
    """

    def __init__(self, group: Any, names: Mapping[int, str]):
        self.group = group
        self.members = {names[id(p.sharded_param)]: p for p in group.fsdp_params if id(p.sharded_param) in names}

    def gathered(self) -> dict[str, Tensor]:
        """Return the gathered parameters, by name; empty if the group was never gathered."""
        return {name: p._unsharded_param for name, p in self.members.items() if hasattr(p, "_unsharded_param")}

    def gradients(self) -> dict[str, Tensor]:
        """Remove the gradients that were accumulated and not reduced, and return those of the members, by name."""
        names = {id(p): name for name, p in self.members.items()}
        found = {}
        for p in self.group.fsdp_params:
            unsharded = getattr(p, "_unsharded_param", None)
            if unsharded is None:
                continue
            parts = [g for g in (p.unsharded_accumulated_grad, unsharded.grad) if g is not None]
            p.unsharded_accumulated_grad = unsharded.grad = None
            if parts and id(p) in names:
                found[names[id(p)]] = local_gradient(parts[0] if len(parts) == 1 else parts[0] + parts[1], unsharded)
        return found

    @torch.no_grad()
    def reduce(self, values: Mapping[str, Tensor | None], dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        """Sum tensors of the parameters' shapes over the processes that hold shards, and return this process's shard of each sum.

        Args:
            values: what this process has, by name; None for zeros. Every process must ask for the same names.
            dtypes: of the sums.
        """
        found: dict[str, Tensor] = {}
        for dtype in dict.fromkeys(dtypes[name] for name in values):
            found |= self._reduced({name: v for name, v in values.items() if dtypes[name] == dtype}, dtype)
        return found

    def _reduced(self, values: Mapping[str, Tensor | None], dtype: torch.dtype) -> dict[str, Tensor]:
        process_group = self.group.fsdp_params[0].mesh_info.shard_process_group
        world = dist.get_world_size(process_group)
        forms = {}
        for name in values:
            shape = list(self.members[name]._orig_size)  # of the shard, under tensor parallelism
            rows = shape.pop(self._dim(name))
            forms[name] = (rows, -(-rows // world), shape)
        sizes = [chunk * torch.Size(rest).numel() for _, chunk, rest in forms.values()]
        buffer = torch.zeros(world, sum(sizes), dtype=dtype, device=self.group.device)
        for (name, value), part in zip(values.items(), buffer.split(sizes, 1), strict=True):
            rows, chunk, rest = forms[name]
            if value is not None and rows:
                value = value.movedim(self._dim(name), 0).to(dtype)
                for k, mine in enumerate(value.split(chunk)):
                    part[k, : mine.numel()] = mine.reshape(-1)
        output = buffer.new_empty(sum(sizes))
        # The second is its name before torch 2.13.
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        scatter(output, buffer.view(-1), group=process_group)
        here = dist.get_rank(process_group)
        found = {}
        for name, part in zip(values, output.split(sizes), strict=True):
            rows, chunk, rest = forms[name]
            mine = max(0, min(chunk, rows - here * chunk))
            found[name] = part.view(chunk, *rest)[:mine].movedim(0, self._dim(name))
        return found

    def _dim(self, name: str) -> int:
        placement = getattr(self.members[name], "fsdp_placement", None)  # since torch 2.6; before, rows always
        return 0 if placement is None else int(placement.dim)


class Shards:
    """The groups of a sharded model, and callbacks for when they are gathered and used.

    Args:
        model: sharded by `fully_shard`.
        parameters: those that are measured, by name.

    Attributes:
        groups: all of them.
        plain: parameters that fully_shard did not shard: every process holds them whole, or its shard of tensor parallelism.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, Tensor]):
        self.model, self.parameters = model, parameters
        names = {id(p): name for name, p in parameters.items()}
        self.groups = [Group(group, names) for group in groups_of(model)]
        sharded = {name for group in self.groups for name in group.members}
        self.plain = {name: p for name, p in parameters.items() if name not in sharded}

    def gathered(self) -> dict[str, Tensor]:
        """Return the gathered parameters and the plain ones, by name: what the model computes with."""
        return {**self.plain, **{name: p for group in self.groups for name, p in group.gathered().items()}}

    def everything(self) -> list[Tensor]:
        """Return all gathered parameters, also those that are not measured."""
        found = (getattr(p, "_unsharded_param", None) for group in self.groups for p in group.group.fsdp_params)
        return [p for p in found if p is not None]

    @contextmanager
    def requiring(self) -> Iterator[None]:
        """Have the measured parameters require a gradient inside, and no others, gathered or not."""
        wanted = {id(p) for p in self.parameters.values()}
        known = [p for group in self.groups for p in group.group.fsdp_params]
        ours = {id(t) for p in known for t in (p.sharded_param, getattr(p, "_unsharded_param", None))}
        others = [p for p in self.model.parameters() if id(p) not in ours]
        flags = [p.sharded_param.requires_grad for p in known], [p.requires_grad for p in others]
        _require(known, [id(p.sharded_param) in wanted for p in known])
        for p in others:
            p.requires_grad_(id(p) in wanted)
        try:
            yield
        finally:
            _require(known, flags[0])
            for p, flag in zip(others, flags[1], strict=True):
                p.requires_grad_(flag)

    def sum_copies(self, sums: Mapping[str, Tensor]) -> None:
        """Sum over the processes that hold copies of the same shards (hybrid sharding)."""
        for group in self.groups:
            for name, member in group.members.items():
                copies = getattr(member.mesh_info, "replicate_process_group", None)
                if copies is not None:
                    dist.all_reduce(sums[name], group=copies)

    def gather_once(self) -> None:
        """Gather every group that was never gathered, so that its parameters exist, and shard it again; all processes together."""
        if all(hasattr(p, "_unsharded_param") for g in self.groups for p in g.group.fsdp_params):
            return
        with torch._C.DisableTorchFunction():
            for module in _sharded_modules(self.model):
                module.unshard()
                module.reshard()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, gradients are not reduced, and earlier ones are put aside; used inside `watched`."""
        members = [p for g in self.groups for p in g.group.fsdp_params]
        before = [(p, p.unsharded_accumulated_grad, p._unsharded_param.grad) for p in members]
        flags = [g.group.reduce_grads for g in self.groups]
        for g in self.groups:
            g.group.reduce_grads = False
        for p in members:
            p.unsharded_accumulated_grad = p._unsharded_param.grad = None
        try:
            yield
        finally:
            for g, flag in zip(self.groups, flags, strict=True):
                g.group.reduce_grads = flag
            for p, accumulated, gradient in before:
                p.unsharded_accumulated_grad, p._unsharded_param.grad = accumulated, gradient

    def reshard(self) -> None:
        """Shard what a forward pass without a backward pass left gathered."""
        reshard(self.model)

    @contextmanager
    def watched(
        self,
        gathering: Callable[[Group], None],
        entered: Callable[[Group, list[tuple[Tensor, Tensor]]], None],
        through: Callable[[Group], None],
        reduced: bool = False,
    ) -> Iterator[None]:
        """Inside, gradients are not reduced (unless `reduced`), and callbacks say when a group is gathered, entered and through.

        Args:
            gathering: called before a group is gathered from all processes.
            entered: called when a group's forward pass begins, with the inputs and the tensors that stand for them, so that
                the end of the backward pass is noticed.
            through: called when a group's backward pass is through, while its parameters are still gathered.
            reduced: whether gradients are reduced as usual, and parameters stay gathered as usual.
        """
        before = [(g.group, g.group.reduce_grads) for g in self.groups]
        try:
            for g in self.groups:
                g.group.reduce_grads = g.group.reduce_grads and reduced
                for name in ("wait_for_unshard", "reshard"):
                    setattr(g.group, name, _unseen(getattr(g.group, name)))
                g.group.unshard = _unseen(_telling(g, gathering, g.group.unshard))
                g.group._register_post_backward_hook = _marking(g, entered)
                g.group.post_backward = _unseen(_telling(g, through, g.group.post_backward))
            yield
        finally:
            for group, flag in before:
                group.reduce_grads = group.reduce_grads if reduced else flag
                for name in ("unshard", "wait_for_unshard", "reshard", "_register_post_backward_hook", "post_backward"):
                    group.__dict__.pop(name, None)
            if not reduced:
                reshard(self.model)


class WholeSums(dict[str, Tensor]):
    """Sums of squares of whole parameters, zeros when first asked for, that are reduced into shards group by group.

    Args:
        shards: of the model.
        target: what the shards are added to.
        weight: the factor of this process's squares; 0 if its batch does not count.
        late: parameters that are complete only at the end.
        totals: gets the sum over all entries of what is added here, by name, if wanted.
    """

    def __init__(
        self,
        shards: Shards,
        target: Sums,
        weight: float,
        late: Iterable[str] = (),
        totals: dict[str, Tensor] | None = None,
    ):
        super().__init__()
        self.shards, self.target, self.weight, self.late, self.totals = shards, target, weight, set(late), totals
        self.dtypes = {name: target.dtype_of(name) for name in shards.parameters}

    def __missing__(self, name: str) -> Tensor:
        group = next((g for g in self.shards.groups if name in g.members), None)
        own = local_of(self.shards.parameters[name])
        shape, device = (
            (own.shape, own.device) if group is None else (group.members[name]._orig_size, group.group.device)
        )
        self[name] = torch.zeros(shape, dtype=self.dtypes[name], device=device)
        return self[name]

    def flush(self, group: Group, names: Iterable[str] | None = None) -> None:
        """Reduce what belongs to a group; all processes together."""
        names = [n for n in group.members if n not in self.late] if names is None else names
        values = {name: self._weighted(name) for name in names}
        if not values:
            return
        for name, part in group.reduce(values, self.dtypes).items():
            self.target[name].add_(part.to(self.target[name].device))

    def flush_rest(self, exchange: Callable[[Any], list[Any]]) -> None:
        """Reduce the rest, after the processes have told one another what is left; all processes together."""
        left = set().union(*exchange(set(self) | self.late))
        for group in self.shards.groups:
            names = [name for name in group.members if name in left]
            if names:
                self.flush(group, names)
        for name in self.shards.plain:
            value = self._weighted(name)
            if value is not None:
                self.target[name].add_(value.to(self.target[name].device))

    @torch.no_grad()
    def _weighted(self, name: str) -> Tensor | None:
        value = self.pop(name, None)
        if value is None or not self.weight:
            return None
        if self.weight != 1:
            value.mul_(self.weight)
        if self.totals is not None:
            self.totals[name] = self.totals.get(name, 0) + value.sum(dtype=torch.float64)
        return value


def _require(members: list[Any], flags: list[bool]) -> None:
    for p, flag in zip(members, flags, strict=True):
        p.sharded_param.requires_grad_(flag)
        if hasattr(p, "_unsharded_param"):
            p._unsharded_param.requires_grad_(flag)


def _unseen(method: Any) -> Any:
    """Hide what fully_shard does from the function mode."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return method(*args, **kwargs)

    return run


def _marking(group: Group, entered: Callable[[Group, list[tuple[Tensor, Tensor]]], None]) -> Any:
    method = _unseen(group.group._register_post_backward_hook)

    def run(args: Any, kwargs: Any) -> Any:
        found = method(args, kwargs)
        pairs = zip(tensors_in((args, kwargs)), tensors_in(found), strict=True)
        entered(group, [(a, b) for a, b in pairs if a is not b])
        return found

    return run


def _telling(group: Group, tell: Callable[[Group], None], method: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> None:
        tell(group)
        method(*args, **kwargs)

    return run


def _sharded_modules(model: nn.Module) -> Iterator[Any]:
    # By what they can do: the class is where it is only since torch 2.6.
    return (m for m in model.modules() if hasattr(m, "_get_fsdp_state") and hasattr(m, "reshard"))


def groups_of(model: nn.Module) -> list[Any]:
    """Return the groups of parameters that fully_shard keeps; several modules may share one."""
    found: dict[int, Any] = {}
    for module in _sharded_modules(model):
        state = module._get_fsdp_state()
        several = getattr(state, "_fsdp_param_groups", None)
        for group in several if several is not None else filter(None, [state._fsdp_param_group]):
            found[id(group)] = group
    return list(found.values())


def reshard(model: nn.Module) -> None:
    """Shard what is gathered: after a forward pass without a backward pass, the outermost parameters."""
    for module in _sharded_modules(model):
        module.reshard()
