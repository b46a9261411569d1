"""The weights beside an optimizer state, unread: which names there are, of which shapes, and whether their order means something."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import FileError, NamingError
from ..storage.safetensors import open_safetensors
from ..storage.tensors import TensorSource
from ..storage.torch_files import read
from .formats.torch_file import find_weights
from .states import Candidate, OptimizerState

__all__ = ["Weights", "open_weights", "pinned", "sorted_by_name"]

_IN_FOLDER = (
    "adapter_model.safetensors",
    "adapter_model.bin",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "model.pt",
    "model.pth",
    "model.bin",
)


class Weights(NamedTuple):
    """Named tensors of a weight file.

    Attributes:
        label: The file's name, for messages.
        tensors: Every tensor, unread.
        in_module_order: Whether they come in the order of the module. A safetensors file is sorted by name: its order says
            nothing, and following it gives wrong names without any shape being wrong.
    """

    label: str
    tensors: Mapping[str, TensorSource]
    in_module_order: bool

    def has(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether there is a tensor of this name and this shape."""
        return name in self.tensors and tuple(self.tensors[name].shape) == tuple(shape)


def open_weights(path: Path) -> Weights | None:
    """The weights in a file or in a model's folder; None if the folder has none.

    Raises:
        FileError: The file is damaged, not a weight file, or a shard is missing.
    """
    if path.is_dir():
        file = next((path / name for name in _IN_FOLDER if (path / name).is_file()), None)
        return None if file is None else open_weights(file)
    if path.name.endswith((".safetensors", ".safetensors.index.json")):
        lazy = open_safetensors(path)
        return Weights(path.name, {name: lazy.source(name) for name in lazy}, False)
    if path.suffix == ".json":
        return _torch_shards(path)
    return Weights(path.name, _torch_weights(path), True)


def pinned(optimizer: OptimizerState, weights: Sequence[Weights]) -> list[tuple[str, Sequence[Candidate]]]:
    """For each file whose shapes alone say which tensor an entry is: its tensors in the optimizer's order.

    Args:
        optimizer: Its entries in its own order.
        weights: Files whose order says nothing.
    """
    sources: list[tuple[str, Sequence[Candidate]]] = []
    shapes = [entry.shape for entry in optimizer.entries]
    for one in weights:
        count = Counter(tuple(tensor.shape) for tensor in one.tensors.values())
        names = {tuple(tensor.shape): name for name, tensor in one.tensors.items()}
        if len(set(shapes)) == len(shapes) and all(shape is not None and count[shape] == 1 for shape in shapes):
            order = [Candidate(names[shape], shape) for shape in shapes if shape is not None]
            sources.append((f"{one.label}, in which every shape occurs once", order))
    return sources


def sorted_by_name(weights: Weights, state: str) -> NamingError:
    """What to say where only a file that sorts its names is beside an optimizer's state."""
    return NamingError(
        f"{weights.label} sorts its tensors by name, and several have the same shape, so it cannot tell which is which in "
        f"{state}. Give the model with --model: a folder with its config.json, or its state_dict() saved with torch.save, "
        "which keeps the order; or the names in the optimizer's order with --names."
    )


def _torch_weights(path: Path) -> Mapping[str, TensorSource]:
    found = [tensors for _, tensors in find_weights(read(path))]
    if not found:
        raise FileError(f"{path} holds no weights: no dictionary of named tensors is in it.")
    return max(found, key=len)


def _torch_shards(index: Path) -> Weights:
    try:
        weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
        shards = sorted(set(weight_map.values()))  # numbered, and each holds the next stretch of the module
    except OSError as error:
        raise FileError(f"Cannot read {index}: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FileError(f"{index} is not an index of weight shards: it has no weight_map.") from error
    tensors: dict[str, TensorSource] = {}
    for shard in shards:
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("..", "."):
            raise FileError(f"{index} names the shard {shard!r}, which is outside its own folder.")
        if not (index.parent / shard).is_file():
            raise FileError(f"{index} names the shard {shard!r}, which is missing; copy the whole set.")
        tensors.update(_torch_weights(index.parent / shard))
    return Weights(index.name, tensors, True)
