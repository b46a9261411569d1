"""What a batch is (how the model is called with it, its labels, some of its examples), and which process takes which batches."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sized
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .. import ranks
from ..errors import SquisherError
from .sharded.meshes import Replicas

__all__ = ["Batch", "Stream", "batches_of", "digest_of", "filled", "leaves_of", "parse", "same_model"]


@dataclass(frozen=True)
class Batch:
    """One batch, taken apart.

    Attributes:
        raw: as the user gave it, on the model's device (a function as likelihood gets this).
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.
        labels: the labels, or None.
        size: number of examples.
        cut: for every tensor, array and list of values in it, whether it has a row for each example. Decided once: a shared table with
            two rows has none in a batch of five, nor in two of its examples.
    """

    raw: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: Tensor | None
    size: int
    cut: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        if not self.cut:
            object.__setattr__(self, "cut", tuple(_rows_of(value) == self.size for value in self._leaves()))

    def _leaves(self) -> list[Any]:
        return _leaves((self.raw, *self.args, *self.kwargs.values(), self.labels))

    def tensors(self) -> Iterator[tuple[Tensor, bool]]:
        """Return all tensors that the model or the likelihood gets, and whether each has a row for every example."""
        for value, cut in zip(self._leaves(), self.cut, strict=True):
            if isinstance(value, Tensor):
                yield value, cut

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that the model gets, by argument."""
        for name, value in self._arguments().items():
            for t in leaves_of(value):
                yield name, t

    def _arguments(self) -> dict[str, Any]:
        return {f"number {n}": v for n, v in enumerate(self.args, 1)} | {repr(k): v for k, v in self.kwargs.items()}

    def cut_inputs(self) -> list[str]:
        """Return the arguments that are cut into rows, one name (as in `named_tensors`) for each tensor, array or list."""
        cut = {id(value) for value, cut in zip(self._leaves(), self.cut, strict=True) if cut}
        return [name for name, value in self._arguments().items() for leaf in _leaves(value) if id(leaf) in cut]

    def take(self, start: int, stop: int) -> Batch:
        """Return the examples start, ..., stop - 1."""
        if (start, stop) == (0, self.size):
            return self
        return self._map(lambda v: _some_rows(v, range(start, stop)), stop - start)

    def several_inputs(self) -> bool:
        """Return whether more than one input has as many rows as there are examples: one of them may in truth be shared by all."""
        return self.size > 1 and len(self.cut_inputs()) > 1

    def with_whole(self, name: str, taken: Batch) -> Batch:
        """Return examples taken from this batch, with one argument (named as in `named_tensors`) as it was."""
        args = tuple(self.args[n] if name == f"number {n + 1}" else a for n, a in enumerate(taken.args))
        kwargs = {k: self.kwargs[k] if name == repr(k) else v for k, v in taken.kwargs.items()}
        raw = taken.raw  # what a function as likelihood gets
        if isinstance(raw, MutableMapping):
            raw = copy(raw)
            for k in [k for k in raw if name == repr(str(k))]:
                raw[k] = self.raw[k]
        elif isinstance(raw, (tuple, list)) and len(raw) > 2:
            raw = args
        return dataclasses.replace(taken, raw=raw, args=args, kwargs=kwargs)

    def select(self, indices: list[int]) -> Batch:
        """Return these examples, in this order."""
        return self._map(lambda v: _some_rows(v, indices), len(indices))

    def copy(self) -> Batch:
        """Return the same examples in tensors of their own."""
        return self._map(lambda v: v.clone() if isinstance(v, Tensor) else copy(v), self.size, every=True)

    def _map(self, change: Callable[[Any], Any], size: int, every: bool = False) -> Batch:
        changed: dict[int, Any] = {}
        cut = iter(self.cut)

        def one(value: Any) -> Any:
            if not (next(cut) or every):
                return value
            if id(value) not in changed:  # the same tensor twice stays one tensor
                changed[id(value)] = change(value)
            return changed[id(value)]

        return Batch(
            _tree(self.raw, one),
            tuple(_tree(a, one) for a in self.args),
            {k: _tree(v, one) for k, v in self.kwargs.items()},
            None if self.labels is None else one(self.labels),
            size,
            self.cut,
        )


def parse(raw: Any, model: nn.Module, device: torch.device, whole: bool = False) -> Batch:
    """Take a batch apart.

    Args:
        raw: a mapping (`model(**batch)`, labels under "labels"), a pair (inputs, labels), or inputs alone.
        model: asked how it makes decoder inputs from labels, where it does.
        device: where the tensors go.
        whole: for a function as likelihood, which takes the batch as it is: a list or tuple may be of any length.

    Returns:
        The batch.

    Raises:
        SquisherError: if it has another form.
    """

    def plain(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.detach().to(device)
        return value.clone() if value.is_inference() else value  # autograd may not save a tensor of inference mode

    raw = _tree(raw, plain)
    labels: Any = None
    if isinstance(raw, Mapping):
        kwargs = {str(k): v for k, v in raw.items()}
        labels = kwargs.pop("labels", None)
        if labels is not None:
            kwargs.update(_decoder_inputs(model, kwargs, labels))
        return Batch(raw, (), kwargs, _labels(labels), _size(labels, kwargs.values()))
    if isinstance(raw, (tuple, list)):
        if whole and len(raw) > 2:
            return Batch(raw, tuple(raw), {}, None, _size(None, raw))
        if len(raw) not in (1, 2):
            raise SquisherError(
                f"A batch is a list or tuple of {len(raw)}. Expected (inputs, labels), inputs alone, or a mapping of the "
                "model's arguments; use a mapping, or a function as likelihood."
            )
        inputs, labels = raw[0], raw[1] if len(raw) == 2 else None
    else:
        inputs = raw
    if isinstance(inputs, Mapping):
        kwargs = {str(k): v for k, v in inputs.items()}
        return Batch(raw, (), kwargs, _labels(labels), _size(labels, kwargs.values()))
    args = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    return Batch(raw, args, {}, _labels(labels), _size(labels, args))


def batches_of(source: Any) -> Iterator[Any]:
    """Iterate over the user's batches, with a clear message where that is not possible."""
    if isinstance(source, (Tensor, Mapping)) or not isinstance(source, Iterable):
        raise SquisherError(
            f"`batches` is a {type(source).__name__}. Expected an iterable of batches, such as a DataLoader or a list; "
            "for one batch, put it into a list."
        )
    return iter(source)


def leaves_of(raw: Any) -> list[Tensor]:
    """Return all tensors of a batch, in order."""
    return [value for value in _leaves(raw) if isinstance(value, Tensor)]


def _decoder_inputs(model: nn.Module, kwargs: dict[str, Any], labels: Any) -> dict[str, Any]:
    """Return the decoder's inputs, which an encoder-decoder model makes from the labels and cannot be called without."""
    config = getattr(model, "config", None)
    if not getattr(config, "is_encoder_decoder", False) or "decoder_input_ids" in kwargs:
        return {}
    for name in ("prepare_decoder_input_ids_from_labels", "_shift_right"):
        make = getattr(model, name, None)
        if make is not None:
            return {"decoder_input_ids": make(labels)}
    return {"labels": labels}


def _labels(labels: Any) -> Tensor | None:
    if labels is None or isinstance(labels, Tensor):
        return labels
    try:
        return torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SquisherError(f"The labels of a batch are a {type(labels).__name__}; expected a tensor.") from error


def _size(labels: Any, values: Iterable[Any]) -> int:
    values = list(values)
    found = [n for t in leaves_of([labels, *values]) for n in t.shape[:1]]
    inputs = [n for t in leaves_of(values) for n in t.shape[:1]]
    if isinstance(labels, Tensor) and labels.dim() and inputs and labels.shape[0] not in inputs:
        raise SquisherError(
            f"A batch has {labels.shape[0]} labels and inputs for {inputs[0]} examples: expected one label, or row of labels, for "
            "each example."
        )
    if not found:
        raise SquisherError(
            "A batch holds no tensor with a batch dimension, so its number of examples is not known. Expected tensors whose first "
            "dimension is the example, alone or in mappings, lists, tuples and dataclasses; not lists of lists of numbers."
        )
    return found[0]


def _tree(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a function to every leaf of a nested container; everything else stays as it is."""
    if _is_leaf(value):
        return change(value)
    if isinstance(value, Mapping):
        changed = {k: _tree(v, change) for k, v in value.items()}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return changed
        same = copy(value)  # of its own type, which a function as likelihood may rely on
        for k, v in changed.items():
            same[k] = v
        return same
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_tree(v, change) for v in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_tree(v, change) for v in value)
    if _is_record(value):
        same = copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(same, field.name, _tree(getattr(value, field.name), change))
        return same
    return value


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _leaves(value: Any) -> list[Any]:
    """Return every leaf of a nested container, in order."""
    found, left = [], [value]
    while left:
        item = left.pop()
        if _is_leaf(item):
            found.append(item)
        elif isinstance(item, (Mapping, tuple, list)):
            left.extend(reversed(list(item.values() if isinstance(item, Mapping) else item)))
        elif _is_record(item):
            left.extend(getattr(item, field.name) for field in reversed(dataclasses.fields(item)))
    return found


def _is_leaf(value: Any) -> bool:
    """Return whether this is a tensor, an array, or a list of plain values: lengths, names."""
    if isinstance(value, PackedSequence) or (isinstance(value, Tensor) and value.is_nested):
        raise SquisherError(
            f"A batch holds a {type(value).__name__} with sequences of several lengths, which cannot be cut into examples. Give padded "
            "sequences and their lengths, and pack or nest them inside the model."
        )
    if isinstance(value, list):
        return all(v is None or isinstance(v, (str, bytes, bool, int, float, complex, np.generic)) for v in value)
    return isinstance(value, (Tensor, np.ndarray))


def _some_rows(value: Any, rows: range | list[int]) -> Any:
    """Return these rows of a tensor, an array or a list; a range of rows of a dense tensor is a view."""
    if isinstance(value, list):
        return [value[n] for n in rows]
    if not isinstance(value, Tensor):
        return value[list(rows)]
    if value.layout is not torch.strided:
        return _coordinates(value).index_select(0, torch.tensor(list(rows), device=value.device)).coalesce()
    return value[rows.start : rows.stop] if isinstance(rows, range) else value[torch.tensor(rows, device=value.device)]


def _coordinates(t: Tensor) -> Tensor:
    return t.coalesce() if t.is_sparse else t.to_sparse_coo().coalesce()


def filled(t: Tensor) -> Tensor:
    """Return how many entries of each row are not zero, on the CPU."""
    if t.layout is torch.strided:
        return t.reshape(t.shape[0], -1).count_nonzero(1).cpu()
    return torch.bincount(_coordinates(t).indices()[0], minlength=t.shape[0]).cpu()


def _rows_of(value: Any) -> int | None:
    """Return the size of the first dimension; None of a scalar."""
    shape: tuple[int, ...] = (len(value),) if isinstance(value, list) else tuple(value.shape)
    return shape[0] if shape else None


_SAMPLED = 4096


class Stream:
    """Batches with the position of their examples in the stream, and whether this process takes them.

    Args:
        batches: the user's.
        model: what they are for.
        max_examples: stop after this many, of all processes together.
        divided: whether each process has batches of its own.
        replicas: the processes that share examples.
        whole: whether a function as likelihood takes them as they are.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        model: nn.Module,
        max_examples: int | None,
        divided: bool,
        replicas: Replicas,
        whole: bool = False,
    ):
        self.batches, self.model, self.divided, self.replicas, self.whole = batches, model, divided, replicas, whole
        self.count, self.mine = len(replicas.groups), replicas.mine
        self.most = max_examples
        if divided and max_examples is not None:
            self.most = max_examples // self.count + (self.mine < max_examples % self.count)
        self.digest = hashlib.sha256()
        self._shared: set[tuple[int, int]] = set()

    @property
    def total(self) -> int | None:
        """How many examples there will be, where that is known: a DataLoader knows, a list of batches does not."""
        sampler = getattr(self.batches, "sampler", None)
        if not isinstance(sampler, Sized) or not isinstance(getattr(self.batches, "batch_size", None), int):
            return self.most
        size = self.batches.batch_size  # type: ignore[attr-defined]
        found = len(sampler) - (len(sampler) % size if getattr(self.batches, "drop_last", False) else 0)
        return found if self.most is None else min(found, self.most)

    def __iter__(self) -> Iterator[tuple[Batch, Tensor, bool]]:
        # What a device_map offloads is on the meta device between uses.
        device = next((p.device for p in self.model.parameters() if not p.is_meta), torch.device("cpu"))
        seen = 0
        if self.most == 0:
            return
        for number, raw in enumerate(batches_of(self.batches)):
            if not ranks.is_alone():
                _mark(self.digest, leaves_of(raw))
            batch = self._as_before(parse(raw, self.model, device, self.whole))
            if batch.size == 0:
                continue
            if self.most is not None:
                batch = batch.take(0, min(batch.size, self.most - seen))
            index = torch.arange(seen, seen + batch.size)
            if self.divided:  # a place of its own for every example of all processes
                index = index * self.count + self.mine
            yield batch, index, self.divided or number % self.count == self.mine
            seen += batch.size
            if self.most is not None and seen >= self.most:
                return  # without asking for the next batch

    def _as_before(self, batch: Batch) -> Batch:
        """Return the batch with inputs shared by all examples that were so in an earlier one, however many examples this one has."""
        places = [(len(batch.cut), n) for n in range(len(batch.cut))]
        self._shared |= {place for place, cut in zip(places, batch.cut, strict=True) if not cut}
        return dataclasses.replace(batch, cut=tuple(place not in self._shared for place in places))

    def check(self) -> None:
        """Compare what the processes were given.

        Raises:
            SquisherError: on all processes, if they have different batches and should not, or the same and should not.
        """
        if ranks.is_alone():
            return
        marks = self.replicas.agreed(ranks.gather(self.digest.hexdigest()))
        if not self.divided and len(set(marks)) > 1:
            raise SquisherError(
                "The processes have different batches (a DistributedSampler?), and each took only every "
                f"{self.count}-th of its own: most were left out. Give divided=True, or the same batches to every process."
            )
        if self.divided and len(set(marks)) < len(marks):
            raise SquisherError(
                "divided=True says that each process has examples of its own, but some have the same batches, which would count "
                "several times. Use a DistributedSampler, or divided=False."
            )


def same_model(parameters: Mapping[str, Tensor]) -> None:
    """Refuse to average over processes whose models differ; of a sharded model, compare the processes with copies of one shard.

    Raises:
        SquisherError: on all processes.
    """
    if ranks.is_alone():
        return
    digest = hashlib.sha256()
    places: dict[Any, None] = {}
    for name, parameter in parameters.items():
        digest.update(name.encode())
        _mark(digest, [ranks.local_of(parameter)])
        places[_place(parameter)] = None
    # Processes with the same shards have the same places.
    marks = ranks.gather((tuple(places), digest.hexdigest()))
    first = {place: k for k, (place, _) in reversed(list(enumerate(marks)))}
    for other, (place, mark) in enumerate(marks):
        if mark != marks[first[place]][1]:
            raise SquisherError(
                f"Processes {first[place]} and {other} have different models: names, shapes or values of the parameters differ. Load "
                "the same weights everywhere."
            )


def _place(parameter: Any) -> tuple[int, ...]:
    """Return which shard of a parameter this process holds: its position along the dimensions of the mesh that shard it."""
    if not ranks.is_sharded(parameter):
        return ()
    where = zip(parameter.device_mesh.get_coordinate(), parameter.placements, strict=True)
    return tuple(at for at, placement in where if hasattr(placement, "dim"))


def digest_of(batch: Batch) -> str:
    """Return a digest that differs between batches."""
    digest = hashlib.sha256()
    _mark(digest, (t for t, _ in batch.tensors()))
    return digest.hexdigest()


def _mark(digest: Any, tensors: Iterable[Tensor]) -> None:
    """Add the shapes of tensors, and some thousand of their entries, to a hash."""
    for t in tensors:
        t = t.detach()
        digest.update(f"{tuple(t.shape)} {t.dtype};".encode())
        if t.layout is not torch.strided:
            t = _coordinates(t).values()
        flat = t.reshape(-1)[:: max(1, t.numel() // _SAMPLED)].cpu().contiguous()
        digest.update(flat.view(torch.uint8).numpy().tobytes())
