"""Model folders and weight files: opened lazily, written whole or not at all.

A folder is what `save_pretrained` writes; nothing here needs transformers.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import FileError, SquisherError, SquisherWarning
from . import hub, safetensors
from .atomic import check_free, new_folder
from .byte_range import shown
from .json_files import read_object
from .tensors import CHUNK, Computed, LazyTensors, Progress, TensorSource, chunks_of, dtype_of, numel_of
from .torch_files import StoredTensor, find_weights, read

__all__ = ["Ahead", "Model", "Weights", "has_weights", "open_model", "open_weights", "write_model"]

_WEIGHTS = "model.safetensors"
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
_USUAL = ("state_dict", "model", "model_state_dict", "model_state", "module", "net", "network", "weights", "params")
"""Where training scripts keep the weights themselves, beside averages of them."""
_COPIED = (
    "config.json", "adapter_config.json", "generation_config.json", "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json",
    "added_tokens.json", "*.model", "chat_template*", "preprocessor_config.json", "processor_config.json",
    "configuration_*.py", "modeling_*.py", "tokenization_*.py", "LICENSE*",
    # sentence-transformers: how a sentence is made of its tokens (1_Pooling, 2_Dense, …)
    "modules.json", "config_sentence_transformers.json", "sentence_*_config.json", "[0-9]_*/*",
)  # fmt: skip


class Weights(NamedTuple):
    """Named tensors of a weight file.

    Attributes:
        label: The file's name, for messages.
        tensors: Every tensor, unread.
        in_module_order: Whether they come in the order of the module. A safetensors file is sorted by name; taking its order
            for the module's would give wrong names even where all shapes fit.
    """

    label: str
    tensors: Mapping[str, TensorSource]
    in_module_order: bool

    def has(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether there is a tensor of this name and this shape."""
        return name in self.tensors and tuple(self.tensors[name].shape) == tuple(shape)


def has_weights(folder: Path) -> bool:
    """Return whether a folder holds weights under one of the usual names."""
    return any((folder / name).is_file() for name in _IN_FOLDER)


def open_weights(path: Path) -> Weights | None:
    """Return the weights in a file or in a model's folder; None if the folder has none.

    Raises:
        FileError: The file is damaged, not a weight file, or a shard is missing.
    """
    if os.path.isdir(path):
        file = next((path / name for name in _IN_FOLDER if os.path.isfile(path / name)), None)
        if file is None:
            return None
        path = file
    if path.name.endswith((".safetensors", ".safetensors.index.json")):
        lazy, ours = safetensors.open_archive(path)
        if ours is not None and "kind" in ours:
            raise FileError(
                f"{path} was written by squisher and holds an importance, a mask or a patch, not the weights of a model: give the model's "
                "folder or weight file."
            )
        return Weights(path.name, {name: lazy.source(name) for name in lazy}, False)
    if path.suffix == ".json":
        weight_map, _ = safetensors.read_index(path)
        return Weights(path.name, safetensors.open_shards(path, weight_map, _torch_weights), True)
    return Weights(path.name, _torch_weights(path), True)


def _torch_weights(path: Path) -> Mapping[str, TensorSource]:
    tree = read(path)
    found = dict(find_weights(tree)) or dict(find_weights(tree, least=1))
    if isinstance(tree, StoredTensor):
        raise FileError(f"{path} holds a tensor without a name. Save it under one: torch.save({{name: tensor}}, file).")
    if not found:
        raise FileError(f"{path} holds no weights: no dictionary of named tensors is in it.")
    # A few tensors beside the weights are not a second model; a dictionary of half as many is.
    large = [place for place in found if 2 * len(found[place]) >= max(map(len, found.values()))]
    chosen = large if len(large) == 1 else [place for place in large if place.rpartition(".")[2] in _USUAL]
    if len(chosen) != 1:
        raise FileError(
            f"{path} holds several sets of weights: {', '.join(map(repr, large))}. Save the one that is meant alone: "
            f"torch.save(torch.load(file)[{large[0].split('.')[0]!r}], other)."
        )
    if len(large) > 1:
        others = ", ".join(repr(place) for place in large if place not in chosen)
        warnings.warn(
            f"{path} holds several sets of weights; {chosen[0]!r} is taken, {others} left out.",
            SquisherWarning,
            stacklevel=4,
        )
    return found[chosen[0]]


class Model(NamedTuple):
    """Weights on disk."""

    path: Path
    """The folder or file."""
    weights: LazyTensors
    config: dict[str, Any]
    """Its config.json; empty for a file."""

    @property
    def name(self) -> str:
        """Its name in a report: the last component of the path."""
        return self.path.resolve().name


def open_model(path: str | os.PathLike[str]) -> Model:
    """Open a model folder (safetensors or torch files, sharded or not), a safetensors file or a torch file, lazily.

    No file is executed. A model on the Hub (`hf://owner/name[@revision]`) is downloaded first.

    Raises:
        FileError: Nothing is there, it holds no weights, or it is damaged.
        SquisherError: The weights are quantised.
    """
    path = hub.fetch_model(path) if hub.is_hub_id(path) else Path(path)
    if not os.path.exists(path):
        raise FileError(f"There is no model {shown(str(path))}.")
    found = open_weights(path)
    if found is None:
        raise FileError(
            f"The folder {path} holds no weights: neither {_WEIGHTS} nor pytorch_model.bin, nor an index of shards."
        )
    config = read_object(path / "config.json") if os.path.isfile(path / "config.json") else {}
    quantized = config.get("quantization_config")
    if quantized:
        method = str(quantized.get("quant_method") or "")[:40] if isinstance(quantized, dict) else ""
        raise SquisherError(
            f"The weights of {path} are quantised ({method or 'an unknown method'}): take those from before quantisation."
        )
    return Model(path, LazyTensors(found.tensors), config)


def write_model(
    out: str | os.PathLike[str],
    weights: Mapping[str, Tensor],
    like: Path | None = None,
    *,
    card: str | None = None,
    dtype: torch.dtype | None = None,
    leave_out: Mapping[str, str] | None = None,
    shard_bytes: int = safetensors.SHARD_BYTES,
    progress: Progress | None = None,
) -> None:
    """Write weights as a folder that `from_pretrained` loads, or as one `.safetensors` file if `out` is called so.

    The folder is made under another name and renamed at the end: a killed run leaves nothing that loads.

    Args:
        out: A folder that does not exist yet (or is empty), or a `.safetensors` file.
        weights: Any mapping; a lazy one is read chunk by chunk.
        like: A model folder whose config and tokenizer files are copied; if it holds a LoRA adapter, so does the output.
        card: The text of the README.md.
        dtype: The type that the config should say, if it is to be changed.
        leave_out: Other names of tied tensors, which are written once: alias to name.
        shard_bytes: Larger ones become shards with an index.
        progress: Called with the bytes written so far and in all.

    Raises:
        FileError: The output exists, or the disk is full.
    """
    out = Path(out)
    with Ahead(weights, [name for name in weights if name not in (leave_out or {})]) as written:
        check_free(out.parent, sum(numel_of(written, name) * dtype_of(written, name).itemsize for name in written))
        if out.suffix == ".safetensors":
            safetensors.save(out, written, None, shard_bytes=shard_bytes, progress=progress)
            return
        with new_folder(out) as folder:
            for source, name in _side_files(like):
                if name == Path("config.json"):
                    (folder / name).write_text(_config(read_object(source), dtype), "utf-8")
                    continue
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(source, folder / name)
            if card is not None:
                (folder / "README.md").write_text(card, "utf-8")
            adapts = like is not None and any((like / adapter).is_file() for adapter in _IN_FOLDER[:2])
            file = folder / (_IN_FOLDER[0] if adapts else _WEIGHTS)
            safetensors.save(file, written, None, shard_bytes=shard_bytes, progress=progress)


def _side_files(like: Path | None) -> list[tuple[Path, Path]]:
    """Return the files to copy, and their paths inside the folder."""
    if like is None or not like.is_dir():
        return []
    found = {path for pattern in _COPIED for path in like.glob(pattern) if path.is_file()}
    return [(path, path.relative_to(like)) for path in sorted(found)]


def _config(config: dict[str, Any], dtype: torch.dtype | None) -> str:
    if str(config.get("_name_or_path", "")).startswith(("/", "~", ".", "\\")):
        del config["_name_or_path"]  # a path on the author's disk
    if dtype is not None:
        key = "dtype" if "dtype" in config else "torch_dtype"
        config[key] = str(dtype).removeprefix("torch.")
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


_IN_FLIGHT = 2  # chunks that are being computed, or wait to be written
_AT_ONCE = 2 * CHUNK  # handing a chunk to the other thread costs as much as merging a tenth of this


class Ahead(Computed):
    """Some tensors of a mapping, read ahead in the order given; any other order works, only slower.

    A second thread reads and computes while the caller's thread writes: both in long calls that release the interpreter. More
    threads would wait for one another. The bytes are the same as without threads; memory is bounded by a few chunks.

    Args:
        tensors: Any mapping. One that computes its tensors may have a method `short_chunks(name, size)`: `chunks` that may be
            shorter than `size`.
        names: The names, in the order in which they will be asked for.
    """

    def __init__(self, tensors: Mapping[str, Tensor], names: Sequence[str]):
        super().__init__(tensors, {name: name for name in names})
        self._expected = iter([name for name in names if numel_of(tensors, name)])
        self._next = next(self._expected, None)
        self._chunks = self._ahead()

    def __enter__(self) -> Ahead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._chunks.close()

    def __getitem__(self, name: str) -> Tensor:
        return self._like[self._name_there(name)]

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[Tensor]:
        """Yield one tensor in flat chunks, in order; they may be shorter than `size`."""
        if name != self._next or size != CHUNK:
            yield from chunks_of(self._like, name, size)
            return
        self._next = next(self._expected, None)
        left = numel_of(self._like, name)
        while left:
            chunk = next(self._chunks)
            left -= chunk.numel()
            yield from chunk.split(CHUNK)
        if self._next is None:
            next(self._chunks, None)  # raises what went wrong after the last chunk

    def _ahead(self) -> Generator[Tensor, None, None]:
        short = getattr(self._like, "short_chunks", None)
        read = short if callable(short) else partial(chunks_of, self._like)
        size = _AT_ONCE if callable(short) else CHUNK
        chunks = (chunk for name in self for chunk in read(name, size))
        with ThreadPoolExecutor(1) as other:
            waiting = deque(other.submit(next, chunks, None) for _ in range(_IN_FLIGHT))
            try:
                while (chunk := waiting.popleft().result()) is not None:
                    yield chunk
                    waiting.append(other.submit(next, chunks, None))
            finally:
                for future in waiting:
                    future.cancel()
