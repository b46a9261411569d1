"""What a batch is: how the model is called with it, what its labels are, and how to take some of its examples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SquisherError

__all__ = ["Batch", "batches_of", "leaves_of", "parse"]


@dataclass(frozen=True)
class Batch:
    """One batch, taken apart.

    Attributes:
        raw: as the user gave it, on the model's device (a function as likelihood gets this).
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.
        labels: the labels, or None.
        size: number of examples.
    """

    raw: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: Tensor | None
    size: int

    def tensors(self) -> Iterator[tuple[Tensor, bool]]:
        """All tensors that the model or the likelihood gets, and whether each has a row for every example."""
        for t in leaves_of([self.raw, list(self.args), self.kwargs, self.labels]):
            yield t, t.dim() > 0 and t.shape[0] == self.size

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that the model gets, by argument."""
        named = {f"number {n}": value for n, value in enumerate(self.args, 1)} | {
            repr(k): v for k, v in self.kwargs.items()
        }
        for name, value in named.items():
            for t in leaves_of(value):
                yield name, t

    def take(self, start: int, stop: int) -> Batch:
        """Return the examples start, ..., stop - 1."""
        if (start, stop) == (0, self.size):
            return self
        return self._map(lambda t: t[start:stop], stop - start)

    def several_inputs(self) -> bool:
        """Whether more than one input has as many rows as there are examples, so that one of them may be shared by all."""
        return self.size > 1 and sum(t.dim() > 0 and t.shape[0] == self.size for _, t in self.named_tensors()) > 1

    def with_whole(self, name: str, taken: Batch) -> Batch:
        """Examples that were taken from this batch, but with one argument (as `named_tensors` calls it) as it was."""
        args = tuple(self.args[n] if name == f"number {n + 1}" else a for n, a in enumerate(taken.args))
        kwargs = {k: self.kwargs[k] if name == repr(k) else v for k, v in taken.kwargs.items()}
        return dataclasses.replace(taken, args=args, kwargs=kwargs)

    def select(self, indices: list[int]) -> Batch:
        """Return these examples, in this order."""
        return self._map(lambda t: t[torch.tensor(indices, device=t.device)], len(indices))

    def _map(self, change: Callable[[Tensor], Tensor], size: int) -> Batch:
        def one(t: Tensor) -> Tensor:
            # Tensors without the batch dimension (position ids of shape (1, T), scalars) belong to every example.
            return change(t) if t.dim() > 0 and t.shape[0] == self.size else t

        return Batch(
            _tree(self.raw, one),
            tuple(_tree(a, one) for a in self.args),
            {k: _tree(v, one) for k, v in self.kwargs.items()},
            None if self.labels is None else one(self.labels),
            size,
        )


def parse(raw: Any, model: nn.Module, device: torch.device) -> Batch:
    """Take a batch apart.

    Args:
        raw: a mapping (`model(**batch)`, labels under "labels"), a pair (inputs, labels), or inputs alone.
        model: asked how it makes decoder inputs from labels, where it does.
        device: where the tensors go.

    Returns:
        The batch.

    Raises:
        SquisherError: if it is none of these.
    """
    # Detached, so that a batch which requires gradients gets none.
    raw = _tree(raw, lambda t: t.detach().to(device))
    labels: Any = None
    if isinstance(raw, Mapping):
        kwargs = {str(k): v for k, v in raw.items()}
        labels = kwargs.pop("labels", None)
        if labels is not None:
            kwargs.update(_decoder_inputs(model, kwargs, labels))
        return Batch(raw, (), kwargs, _labels(labels), _size(labels, kwargs.values()))
    if isinstance(raw, (tuple, list)):
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
    """All tensors of a batch, in order."""
    found: list[Tensor] = []

    def look(t: Tensor) -> Tensor:
        found.append(t)
        return t

    _tree(raw, look)
    return found


def _decoder_inputs(model: nn.Module, kwargs: dict[str, Any], labels: Any) -> dict[str, Any]:
    """Encoder-decoder models make the decoder's inputs from the labels; without labels they cannot be called."""
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
            "A batch holds no tensor with a batch dimension, so its number of examples is not known. Expected tensors "
            "whose first dimension is the example."
        )
    return found[0]


def _tree(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to every tensor of a nested container; everything else stays as it is."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {k: _tree(v, change) for k, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_tree(v, change) for v in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_tree(v, change) for v in value)
    return value
