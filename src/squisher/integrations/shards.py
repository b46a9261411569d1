"""A Hugging Face folder loaded straight into shards (FSDP2): no process ever holds the whole model.

The model is built on the meta device and given to `fully_shard`, block by block; then every process reads the byte ranges of its own
rows from the weight file. Buffers (rotary frequencies, positions) are computed as usual: they are small, and every process has them whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import ranks
from ..errors import FileError, SquisherError
from ..recycle.naming.candidates import candidates_of_module
from ..recycle.states import Candidate
from ..storage.folders import Weights, open_weights
from ..storage.tensors import CHUNK, TensorSource

__all__ = ["load_shards"]


def load_shards(folder: Path, config: Any, build: Callable[..., nn.Module], device: str) -> nn.Module:
    """Return a model whose parameters are sharded over all processes, with the weights of a folder.

    Args:
        folder: Of a Hugging Face model.
        config: Its configuration.
        build: Makes the model of it, without weights: `build(config, dtype=...)`.
        device: Of this process.

    Raises:
        FileError: The folder has no weights, or lacks one.
        NamingError: The weights are not this model's.
        SquisherError: There is one process only, or the model cannot be loaded this way.
    """
    if ranks.is_alone():
        raise SquisherError(
            "Shards need several processes: start them with torchrun --nproc-per-node N -m squisher fisher … --shard, or leave "
            "--shard out."
        )
    if getattr(config, "quantization_config", None) is not None:
        raise SquisherError(f"The weights of {folder} are quantised, and quantised weights are not sharded.")
    weights = open_weights(folder)
    if weights is None:
        raise FileError(f"The folder {folder} holds no weights.")
    with _parameters_on_meta():
        model = build(config, dtype=_dtype(config, weights))
    plan: Any = getattr(model, "_get_dtype_plan", None)
    apart = {} if plan is None else plan(next(model.parameters()).dtype)
    if apart:
        raise SquisherError(
            f"{type(model).__name__} keeps {', '.join(map(repr, apart))} in another precision than its other weights, and shards of "
            "several precisions are not done. Save it in float32, or leave --shard out."
        )
    stored = candidates_of_module(model, weights, frozen_too=True).parameters
    cut = next((c for c in stored if c.pieces), None)
    if cut is not None:
        raise SquisherError(
            f"{cut.live_name!r} is one parameter here and {len(cut.pieces)} tensors in {weights.label} (experts), and shards are not "
            "written in such pieces. Leave --shard out, or use squisher.fisher and torch.distributed.checkpoint in Python."
        )
    same = [names for names in _names(model).values() if len(names) > 1]
    _shard(model)
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    for first, *others in same:  # each name was given a tensor of its own
        for name in others:
            _set(model, name, model.get_parameter(first))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for candidate in stored:
            _fill(parameters[str(candidate.live_name)], candidate, weights)
        for name, buffer in model.named_buffers():
            if name in weights.tensors and tuple(weights.tensors[name].shape) == tuple(buffer.shape):
                buffer.copy_(weights.tensors[name].load())
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move parameters to the meta device as soon as a module has them; buffers stay."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = type(parameter)(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _dtype(config: Any, weights: Weights) -> torch.dtype:
    """Return what `from_pretrained(dtype="auto")` takes: what the configuration says, otherwise the file's first."""
    said = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    if isinstance(said, torch.dtype):
        return said
    found = [t.dtype for t in weights.tensors.values() if t.dtype.is_floating_point]
    return found[0] if found else torch.get_default_dtype()


def _names(model: nn.Module) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def _shard(model: nn.Module) -> None:
    """Shard every element of the outermost lists of modules (the layers) on its own, and the rest together."""
    from torch.distributed.fsdp import fully_shard

    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and id(module) not in inside:
            inside.update(map(id, module.modules()))
            for block in module:
                if next(block.parameters(), None) is not None:
                    fully_shard(block)
    fully_shard(model)


def _set(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, last = name.rpartition(".")
    setattr(model.get_submodule(owner), last, parameter)


def _fill(parameter: Any, candidate: Candidate, weights: Weights) -> None:
    """Read this process's rows of a parameter."""
    source = weights.tensors.get(candidate.name)
    if source is None:
        raise FileError(
            f"{weights.label} has no tensor {candidate.name!r}, which the model needs. Load it without --shard."
        )
    local, shape = parameter.to_local(), parameter.shape
    rows = -(-shape[0] // parameter.device_mesh.size())
    first = min(shape[0], parameter.device_mesh.get_local_rank() * rows) * shape[1:].numel()
    _read(source, first, first + local.numel(), local.view(-1))


def _read(source: TensorSource, start: int, stop: int, out: Tensor) -> None:
    for low in range(start, stop, CHUNK):
        high = min(stop, low + CHUNK)
        out[low - start : high - start].copy_(source.read_flat(low, high))
