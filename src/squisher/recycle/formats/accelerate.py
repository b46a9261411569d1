"""Folders of Accelerate's `save_state`: optimizer.bin, optimizer_1.bin, … and the models beside them, which nothing pairs up."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ...errors import FileError
from ...importance.facts import RunFacts
from ...storage.folders import Weights, open_weights
from ..naming.candidates import matching
from ..states import Found, OptimizerState, Options, Source
from .model_source import pinned, sorted_by_name
from .torch_file import candidates_of, read_torch_file
from .trainer import optimizer_file

__all__ = ["is_accelerate_folder", "read_accelerate"]


def is_accelerate_folder(path: Path) -> bool:
    """Return whether a folder has optimizer files as Accelerate writes them without FSDP or DeepSpeed."""
    file = optimizer_file(path)
    return file is not None and file.name == "optimizer.bin"


def read_accelerate(folder: Path, options: Options) -> Found:
    """Read the optimizers of a `save_state` folder, each with the models that fit it.

    Weights in safetensors are sorted by name: they name an optimizer's parameters only if every shape occurs once.

    Raises:
        FileError: A file is missing or damaged.
        NamingError: The model that was given cannot name them.
    """
    optimizers = []
    for file in _numbered(folder, r"optimizer(?:_(\d+))?\.bin"):
        held = read_torch_file(file).optimizers
        if len(held) != 1:
            raise FileError(f"{file} holds {len(held)} optimizers, but Accelerate writes one to a file.")
        optimizers.append(replace(held[0], place=file.name))
    if options.model is not None:
        return Found(optimizers)
    weights = [opened for file in _weight_files(folder) if (opened := open_weights(file)) is not None]
    ordered: list[Source] = []
    tied: dict[str, str] = {}
    for one in weights:
        if one.in_module_order:
            candidates, aliases = candidates_of(one.tensors)
            ordered.append((f"the order of {one.label}", candidates))
            tied.update(aliases)
    if not options.named:
        by_name = [one for one in weights if not one.in_module_order]
        pattern = options.trainable
        beside = [(label, matching(listed, pattern)) for label, listed in ordered] if pattern is not None else ordered
        optimizers = [replace(one, models=_models_beside(one, beside, by_name)) for one in optimizers]
    return Found(optimizers, ordered, RunFacts(tied=tied))


def _numbered(folder: Path, pattern: str) -> list[Path]:
    """Return the files of a folder that a pattern matches, by their number; the first has none."""
    found = {int(m[1] or 0): p for p in folder.iterdir() if p.is_file() and (m := re.fullmatch(pattern, p.name))}
    files = [path for _, path in sorted(found.items())]
    if sorted(found) != list(range(len(found))):
        raise FileError(f"The folder {folder} has {', '.join(p.name for p in files)}: one between them is missing.")
    return files


def _weight_files(folder: Path) -> Iterator[Path]:
    for kind in (r"model(?:_\d+)?\.safetensors", r"pytorch_model(?:_\d+)?\.bin"):
        for pattern in (kind, rf"{kind}\.index\.json"):
            yield from sorted(p for p in folder.iterdir() if p.is_file() and re.fullmatch(pattern, p.name))


def _models_beside(optimizer: OptimizerState, ordered: Sequence[Source], by_name: Sequence[Weights]) -> list[Source]:
    """Return every model beside an optimizer that may name its parameters."""
    models = [*ordered, *pinned(optimizer, by_name)]
    if not models and by_name and not all(entry.name is not None for entry in optimizer.entries):
        raise sorted_by_name(by_name[0], optimizer.place)
    return models
