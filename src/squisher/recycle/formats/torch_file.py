"""Files that `torch.save` wrote: an optimizer's state, bare or inside whatever dictionary a training script or Lightning made."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import FileError, SquisherWarning
from ...importance.facts import RunFacts
from ...storage.byte_range import ByteRange
from ...storage.tensors import LazyTensors, TensorSource, tied_names
from ...storage.torch_files import (
    Record,
    StoredTensor,
    Verified,
    find_weights,
    is_in_backward,
    is_optimizer,
    read,
    walk,
)
from ..naming.candidates import clean_names, distinct_names, is_buffer
from ..optimizers import is_tensor
from ..optimizers.encoded import decoded
from ..states import Candidate, Entry, Found, OptimizerState, Options, Source

__all__ = [
    "Unopened", "candidates_of", "find_optimizers", "inside", "mesh_size", "optimizer_state", "read_lightning", "read_torch_file", "read_torch_folder",
    "torch_files",
]  # fmt: skip

_MOST = 12  # torch files of one folder that are looked into
_NETWORKS = 6  # of which one optimizer may step several


def read_torch_file(path: Path, options: Options | None = None) -> Found:
    """Read the optimizer states in a torch file, and the weights beside them, which keep the module's order.

    Raises:
        FileError: It cannot be read safely, or holds no optimizer state.
    """
    tree = read(path)
    states = find_optimizers(tree)
    optimizers = [optimizer_state(value, place) for place, value in states]
    weights = list(find_weights(tree))
    if not optimizers:
        what = "weights but no optimizer state" if weights else "no optimizer state ('state', 'param_groups')"
        raise FileError(f"{path} holds {what}: give the file or folder that was saved with the optimizer.")
    models: list[Source] = []
    tied: dict[str, str] = {}
    for place, weights_dict in weights:
        candidates, aliases = candidates_of(weights_dict)
        models.append((f"the weights under {place!r}" if place else "the weights", candidates))
        tied.update(aliases)
    parts = list(find_weights(tree, least=1)) if options is not None and options.named else []
    if len(parts) > 1:  # the names that are at hand may be those of the model whose parts these are
        models.append(("the weights", candidates_of(_in_one(parts))[0]))
    models += _beside(tree, weights, optimizers)
    optimizers = [_with_network_names(one, tree) for one in optimizers]
    optimizers = [_with_shared_names(one, value, weights) for one, (_, value) in zip(optimizers, states, strict=True)]
    optimizers = [_with_group_names(one, models) for one in optimizers]
    return Found(optimizers, models, RunFacts(tied=tied), later=_together(weights, optimizers))


def _beside(tree: Any, weights: Sequence[tuple[str, Any]], optimizers: Sequence[OptimizerState]) -> list[Source]:
    """Return the tensors that stand in no dictionary of weights, if they may be all that an optimizer steps: `log_alpha`, a prompt."""
    loose: dict[str, TensorSource] = {}
    for place, value in walk(tree):
        if isinstance(value, dict) and not is_optimizer(value) and place not in dict(weights):
            own = {k: v for k, v in value.items() if isinstance(k, str) and isinstance(v, StoredTensor)}
            loose.update({f"{place}.{name}" if place else name: tensor for name, tensor in own.items()})
    shapes = {tuple(tensor.shape) for tensor in loose.values()}
    if not any(one.entries and all(entry.shape in shapes for entry in one.entries) for one in optimizers):
        return []
    return [("the tensors beside the weights", candidates_of(loose)[0])]


def _in_one(networks: Iterable[tuple[str, Mapping[str, TensorSource]]]) -> dict[str, TensorSource]:
    return {f"{place}.{name}": tensor for place, tensors in networks for name, tensor in tensors.items()}


def _together(
    weights: Sequence[tuple[str, Mapping[str, TensorSource]]], optimizers: Sequence[OptimizerState]
) -> list[list[Source]]:
    """Return networks as the one model that an optimizer steps (two generators, an actor and its critic), in an order that fits.

    Where several choices of networks fit an optimizer (a moving average beside them), all orders of each are returned.
    """
    sizes = {place: len(candidates_of(network)[0]) for place, network in weights}
    sources: list[Source] = []
    for one in optimizers:
        shapes = [entry.shape for entry in one.entries]
        chosen = [
            networks
            for count in (range(2, 5) if len(weights) <= _NETWORKS else ())
            for networks in itertools.combinations(weights, count)
            if sum(sizes[place] for place, _ in networks) == len(shapes)
        ]
        fitting = [orders for networks in chosen if (orders := list(_orders_that_fit(networks, shapes)))]
        for orders in fitting:
            sources += orders if len(fitting) > 1 else orders[:1]
    return [sources] if sources else []


def _orders_that_fit(
    networks: Sequence[tuple[str, Mapping[str, TensorSource]]], shapes: Sequence[tuple[int, ...] | None]
) -> Iterator[Source]:
    for order in itertools.permutations(networks):
        candidates, _ = candidates_of(_in_one(order))
        if len(candidates) == len(shapes) and all(
            s in (None, c.shape) for s, c in zip(shapes, candidates, strict=True)
        ):
            yield f"the weights under {' and '.join(repr(place) for place, _ in order)}", candidates


def read_lightning(path: Path, options: Options) -> Found:
    """Read the optimizers of a Lightning checkpoint, and its weights in module order.

    How parameters were grouped is the user's code, and an optimizer may have any of them (the generator of a GAN, a student
    beside its frozen teacher): shapes and values must decide.

    Raises:
        FileError: It cannot be read safely, or holds no optimizer state.
    """
    tree = read(path)
    content = tree if isinstance(tree, dict) else {}
    states, weights = content.get("optimizer_states"), content.get("state_dict")
    if not isinstance(states, list) or not isinstance(weights, dict):
        return read_torch_file(path, options)  # `.ckpt` is a popular ending
    optimizers = [optimizer_state(state, f"optimizer_states.{place}") for place, state in find_optimizers(states)]
    if not optimizers:
        raise FileError(f"{path} holds weights but no optimizer state: was it saved with save_weights_only=True?")
    if options.model is not None:
        return Found(optimizers)
    candidates, tied = candidates_of({n: t for n, t in weights.items() if isinstance(n, str) and is_tensor(t)})
    return Found(optimizers, [("the weights under 'state_dict'", candidates)], RunFacts(tied=tied))


def torch_files(folder: Path) -> list[Path]:
    """Return the checkpoints that a training script leaves in a folder."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.suffix in (".pt", ".pth", ".ckpt", ".tar") and p.is_file())


def read_torch_folder(folder: Path, options: Options) -> Found:
    """Read a folder with one optimizer state among its torch files; the others may hold the weights.

    Raises:
        FileError: There is no optimizer state, or several.
    """
    files = [*torch_files(folder), *sorted(folder.glob("*.bin"))]
    usual = [file for file in files if file.stem in ("optimizer", "optim")]
    if len(files) > _MOST and not usual:
        raise FileError(
            f"The folder {folder} holds {len(files)} torch files: give the one with the optimizer state that is meant, and the file with the "
            "weights, if that is another one, with --model FILE."
        )
    broken: dict[Path, FileError] = {}
    states: dict[Path, Found] = {}
    models: list[Source] = []
    tied: dict[str, str] = {}
    for file in dict.fromkeys([*usual, *files[:_MOST]]):
        try:
            tree = read(file)
        except FileError as error:
            broken[file] = error  # another file may be all that is needed
            continue
        if find_optimizers(tree):
            states[file] = read_torch_file(file, options)
            continue
        for _, weights in find_weights(tree):
            candidates, aliases = candidates_of(weights)
            if all(candidates != known for _, known in models):  # the last and the best weights name the same
                models.append((f"the order of {file.name}", candidates))
                tied.update(aliases)
    chosen = [file for file in states if file in usual] or list(states)
    unread = "".join(f" {file.name} cannot be read: {error}" for file, error in broken.items())
    if len(chosen) == 1 and not broken.keys() & {*usual}:
        if broken:
            warnings.warn(f"The state is {chosen[0].name}'s.{unread}", SquisherWarning, stacklevel=2)
        found = states[chosen[0]]
        facts = replace(found.facts, tied={**tied, **found.facts.tied})
        return replace(found, models=[*found.models, *models], facts=facts)
    what = f"The folder {folder} holds {len(files)} torch files ({', '.join(file.name for file in files[:6])})"
    if not chosen:
        raise FileError(f"{what}, none of which has an optimizer state. Give what was saved with it.{unread}")
    raise FileError(
        f"{what}; {', '.join(file.name for file in chosen)} {'holds' if len(chosen) == 1 else 'hold'} an optimizer state: give the one "
        f"that is meant, and the file with the weights, if that is another one, with --model FILE.{unread}"
    )


def find_optimizers(tree: Any) -> list[tuple[str, Any]]:
    """Return every optimizer state in what a file holds, with its place: dictionaries or pickled optimizers."""
    return [(place, value) for place, value in walk(tree) if is_optimizer(value)]


def candidates_of(weights: Mapping[str, TensorSource]) -> tuple[list[Candidate], dict[str, str]]:
    """Return the parameters among saved weights, in module order, without what is surely a buffer, and the tied names.

    A buffer that looks like a parameter stays; fitting the shapes to the optimizer's then decides.
    """
    tied = tied_names(LazyTensors(weights))
    numbers = [n for n, t in weights.items() if t.dtype.is_floating_point or t.dtype.is_complex]
    names = [name for name in numbers if name not in tied and not is_buffer(name, weights)]
    cleaned = dict(zip(names, distinct_names(names), strict=True))
    candidates = [Candidate(cleaned[n], tuple(weights[n].shape), live_name=n, weight=weights[n]) for n in names]
    aliases = {clean_names([a])[0]: cleaned[n] for a, n in tied.items() if n in cleaned}
    return candidates, aliases


def optimizer_state(value: Any, place: str = "") -> OptimizerState:
    """Return what a reader delivers, from an optimizer's `state_dict()` or from a pickled optimizer object.

    Names are taken from where writers record them: keys that are names themselves, torch's `param_names`, nanotron's
    `names` by index, bergson's `param_name` in each state.

    Raises:
        FileError: The groups are not what an optimizer writes.
    """
    class_name = value.name.rsplit(".", 1)[-1] if isinstance(value, Record) else None
    content = value.attributes if isinstance(value, Record) else value
    if is_in_backward(content):
        return _in_backward(content, place)
    state: Any = content.get("state", content.get("opt_state"))
    groups = content["param_groups"]
    at = f" at {place!r}" if place else ""
    by_index = content["names"] if isinstance(content.get("names"), dict) else {}
    entries: list[Entry] = []
    listed: set[Any] = set()
    for number, group in enumerate(groups):
        members = group.get("params") if isinstance(group, dict) else None
        if not isinstance(members, (list, tuple)):
            raise FileError(f"The optimizer state{at} is damaged: group {number} lists no parameters.")
        settings = {key: v for key, v in group.items() if key not in ("params", "param_names")}
        recorded = group.get("param_names") or [None] * len(members)
        if len(recorded) != len(members):
            raise FileError(
                f"The optimizer state{at} is damaged: group {number} has {len(members)} parameters and "
                f"{len(recorded)} names."
            )
        for member, name in zip(members, recorded, strict=True):
            kept = state.get(member)
            kept = kept if isinstance(kept, dict) else {}
            names = (member, name, by_index.get(member), kept.get("param_name"))
            said = next((n for n in names if isinstance(n, str)), None)
            entries.append(Entry(_without_shards(kept), settings, number, said))
            listed.add(member)
    # A pickled optimizer keeps the states of groups that were taken from it; a state dict has one place for each.
    unlisted = {} if class_name else {k: v for k, v in state.items() if k not in listed}
    strangers = [k for k, v in unlisted.items() if isinstance(v, dict) and any(map(is_tensor, v.values()))]
    if strangers or len(listed) < len(entries):
        what = f"has a state for {strangers[0]!r}, which no group lists" if strangers else "lists a parameter twice"
        raise FileError(f"The optimizer state{at} {what}: it is damaged, or mixed from several. Get it again.")
    return OptimizerState(decoded(entries, class_name), class_name, place, groups=len(groups))


def _with_network_names(optimizer: OptimizerState, tree: Any) -> OptimizerState:
    """Name the parameters by the networks that AgileRL lists for each optimizer, one group a network."""
    info = tree.get("network_info") if isinstance(tree, dict) else None
    key = optimizer.place.removeprefix("network_info.optimizers.")
    if not isinstance(info, dict) or key == optimizer.place:
        return optimizer
    modules, optimizers = info.get("modules"), info.get("optimizers")
    networks = optimizers.get(key.removesuffix("_state_dict") + "_networks") if isinstance(optimizers, dict) else None
    if not isinstance(modules, dict) or not isinstance(networks, (list, tuple)):
        return optimizer
    names: list[tuple[int, str, tuple[int, ...]]] = []
    for number, network in enumerate(networks):
        weights = modules.get(f"{network}_state_dict")
        if not isinstance(weights, dict) or not all(isinstance(w, StoredTensor) for w in weights.values()):
            return optimizer
        names += [(number, f"{network}.{c.name}", c.shape) for c in candidates_of(weights)[0]]
    pairs = list(zip(names, optimizer.entries, strict=False))
    fits = all(n == entry.group_number and shape == (entry.shape or shape) for (n, _, shape), entry in pairs)
    if not fits or len(names) != len(optimizer.entries):
        return optimizer
    return _named(optimizer, [name for _, name, _ in names])


def _with_shared_names(
    optimizer: OptimizerState, value: Any, weights: Sequence[tuple[str, Mapping[str, StoredTensor]]]
) -> OptimizerState:
    """Name the parameters of a pickled optimizer that are, by their bytes, weights of the same file."""
    groups = value.attributes.get("param_groups") if isinstance(value, Record) else None
    if not isinstance(groups, list):
        return optimizer
    names: dict[Any, str] = {}
    for _, tensors in weights:
        for name, tensor in tensors.items():
            names.setdefault(tensor.place, name)  # the first of tied names
    members = [member for group in groups for member in group["params"]]
    found = [names.get(m.place) if isinstance(m, StoredTensor) and m.numel else None for m in members]
    if len(found) != len(optimizer.entries) or None in found or len(set(found)) != len(found):
        return optimizer
    return _named(optimizer, found)


def _with_group_names(optimizer: OptimizerState, models: Sequence[Source]) -> OptimizerState:
    """Take the names of the groups where each group is one parameter and has a name (Adam-mini).

    With weights beside the state the names must be theirs: a group may be called anything.
    """
    names = [entry.group.get("name") for entry in optimizer.entries]
    alone = optimizer.group_sizes == [1] * len(names) and all(isinstance(name, str) for name in names)
    if not alone or len(set(names)) != len(names) or any(entry.name is not None for entry in optimizer.entries):
        return optimizer
    known = [{name for c in candidates for name in (c.name, c.live_name)} for _, candidates in models]
    if known and not any(set(names) <= one for one in known):
        return optimizer
    return _named(optimizer, names)


def _named(optimizer: OptimizerState, names: Sequence[Any]) -> OptimizerState:
    entries = [replace(entry, name=name) for entry, name in zip(optimizer.entries, names, strict=True)]
    return replace(optimizer, entries=entries)


def _in_backward(content: dict[str, Any], place: str) -> OptimizerState:
    """Return the state of optimizers that step in the backward pass, one for each named parameter, as one optimizer."""
    entries = []
    for number, (name, one) in enumerate(content.items()):
        inner = optimizer_state(one, f"{place}.{name}")
        entries += [replace(entry, name=name, group_number=number) for entry in inner.entries]
    return OptimizerState(entries, None, place)


def _without_shards(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with sharded tensors replaced by the tensors themselves, where a rank has all of them.

    Raises:
        FileError: A rank has only its shard.
    """
    sharded = ("DTensor", "ShardedTensor")
    return {key: _local(v) if isinstance(v, Record) and v.name.endswith(sharded) else v for key, v in state.items()}


def _local(value: Record) -> Any:
    placements, local = inside(value, "_spec", "placements"), value.get("_local_tensor")
    world = mesh_size(inside(value, "_spec", "mesh"))
    listed = list(placements) if isinstance(placements, (tuple, list)) else []
    replicated = bool(listed) and all(isinstance(p, Record) and p.name.endswith(".Replicate") for p in listed)
    if (replicated or world == 1) and getattr(local, "shape", None) == value.get("shape"):
        return local
    ranks = f"one of {world} ranks" if world else "one rank"
    raise FileError(
        f"The file holds the shard of {ranks} of an optimizer state that FSDP sharded ({value.name.rpartition('.')[2]}), not "
        "the whole. Give the folder with the files of all ranks, or save it with torch.distributed.checkpoint, or in full: get_optimizer_state_dict(model, optimizer, "
        "options=StateDictOptions(full_state_dict=True, cpu_offload=True))."
    )


def inside(value: Any, *names: str) -> Any:
    """Return what stands under names, each in the record before it; None where one is missing."""
    for name in names:
        value = value.get(name) if isinstance(value, Record) else None
    return value


def mesh_size(mesh: Any) -> int | None:
    """Return how many ranks a device mesh has, as the versions of torch wrote it down."""
    ranks = inside(mesh, "_flatten_rank_map")
    if isinstance(ranks, (tuple, list)):
        return len(ranks)
    sizes = [getattr(inside(mesh, name), "numel", None) for name in ("mesh", "_mesh", "_rank_map")]
    return next((size for size in sizes if isinstance(size, int)), None)


class Unopened:
    """A torch file, or a byte range that is one, with a single tensor in it: opened when something is asked for.

    Args:
        place: The file.
        shape: The tensor's; it may be stored flat, and (by DeepSpeed) in a dictionary.
        dtype: The tensor's, where it is known.
    """

    def __init__(self, place: Path | ByteRange, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
        self.place, self.shape, self._said = place, shape, dtype

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the stored values."""
        return self._said or self._stored.dtype

    def load(self) -> Tensor:
        """Read the whole tensor."""
        return self._stored.load().reshape(self.shape)

    def read_flat(self, start: int, stop: int) -> Tensor:
        """Read elements `start` to `stop` in flat order."""
        return self._stored.read_flat(start, stop)

    @cached_property
    def _stored(self) -> Verified:
        value = read(self.place)
        value = value.get("param") if isinstance(value, dict) else value
        flat = (self.shape, (math.prod(self.shape),))
        if not isinstance(value, StoredTensor) or value.shape not in flat or self._said not in (None, value.dtype):
            found = f"{value.shape}, {value.dtype}" if isinstance(value, StoredTensor) else type(value).__name__
            said = f"{self.shape}, {self._said}" if self._said else f"{self.shape}"
            where = self.place.label if isinstance(self.place, ByteRange) else self.place
            raise FileError(f"{where} holds {found}, but should hold a tensor of {said}: mixed files, or damaged.")
        return Verified(value)
