"""Weights that may name a state: what `--model` says (a config.json, a torch file in module order), or a file beside the state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from torch import nn

from ...errors import FileError, NamingError
from ...storage.folders import Weights, open_weights
from ...storage.json_files import read_object
from ..naming.candidates import Candidates, candidates_of_module, surplus
from ..naming.hf_model import MissingPackage, built_by, meta_model
from ..naming.laws import Law, derived_laws
from ..naming.orders import in_file_order, in_order_of_version_4
from ..naming.partitions import sorted_as_text
from ..states import Candidate, Found, OptimizerState, Options
from .hugging_face_names import in_hugging_face_names
from .torch_file import candidates_of

__all__ = ["laws_of", "model_candidates", "pinned", "sorted_by_name", "with_model"]


def with_model(found: Found, options: Options) -> Found:
    """Return the evidence with the model that the user gave, if one was given, as what names the parameters."""
    if options.model is None or options.named:
        return found
    translated = _translated(found, options.model)
    if translated is not None:
        return translated
    label, trained, every = model_candidates(options.model)
    facts = replace(found.facts, tied=every.tied)
    models = [(label, trained.parameters)]
    return replace(found, models=models, facts=facts, parameters=every.parameters, laws=laws_of(options.model))


def _translated(found: Found, path: Path) -> Found | None:
    """Return states that record the names of their writer under those of the model's weights, where these are others."""
    recorded = [entry.name for one in found.optimizers for entry in one.entries]
    if not recorded or None in recorded or not path.exists():
        return None
    weights = open_weights(path)
    if weights is not None:
        known = {name: tuple(tensor.shape) for name, tensor in weights.tensors.items()}
    else:
        known = {c.name: c.shape for c in model_candidates(path)[2].parameters}
    return None if known.keys() & set(recorded) else in_hugging_face_names(found, known)


def laws_of(folder: Path) -> Callable[[], Sequence[Law]]:
    """Return a function that derives the laws of the model in a folder, once; nothing is built before it is called."""
    return cache(partial(derived_laws, folder)) if (folder / "config.json").is_file() else tuple


def model_candidates(path: Path, weights: Weights | None = None) -> tuple[str, Candidates, Candidates]:
    """Return the parameters of a model from a folder with a config.json, or in the order of a torch weight file.

    Args:
        path: The folder or file.
        weights: Checked against; by default the weights in the folder itself.

    Returns:
        A label, the parameters that a new model of this kind would train, and all of them.

    Raises:
        NamingError: Its order cannot be known.
        MissingPackage: transformers is needed and not installed.
    """
    if not path.exists():
        raise FileError(f"There is no model {path}.")
    ordered = open_weights(path) if path.is_file() or not (path / "config.json").is_file() else None
    if ordered is not None and ordered.in_module_order:
        candidates = Candidates(*candidates_of(ordered.tensors))
        return f"the order of {ordered.label}", candidates, candidates
    if not (path / "config.json").is_file():
        what = (
            "is sorted by name, so its order says nothing"
            if ordered is not None
            else "has neither config.json nor weights"
        )
        raise NamingError(
            f"{path} cannot name an optimizer's parameters: it {what}. Give a folder with config.json, or a torch weight file."
        )
    beside = open_weights(path)
    weights = weights or beside
    try:
        model = meta_model(path)
    except MissingPackage:
        if beside is None or not beside.in_module_order:
            raise
        candidates = Candidates(*candidates_of(beside.tensors))
        return f"the order of {beside.label}", candidates, candidates
    every = candidates_of_module(model, weights, frozen_too=True)
    trained = candidates_of_module(model, weights)
    note = f" ({every.note})" if every.note else ""
    by = built_by(path)
    label = f"the model of config.json{by}{note}"
    if beside is not None and beside.in_module_order and sorted_as_text(list(beside.tensors)):
        beside = None
    in_order = beside is not None and beside.in_module_order
    older = _registered_before(path, model, [every, trained], beside) if by or in_order else None
    if older is not None:
        how, (every, trained) = older
        label = f"the model of config.json, {how}"
    others = surplus(model, every, weights)
    trained, every = (one._replace(parameters=[*one.parameters, *others]) for one in (trained, every))
    return label, trained, every


def _registered_before(
    path: Path, model: nn.Module, found: Sequence[Candidates], beside: Weights | None
) -> tuple[str, list[Candidates]] | None:
    """Return the parameters in the order of the version of transformers that saved them, where that is known."""
    saved = str(read_object(path / "config.json").get("transformers_version"))
    tensors = {} if beside is None else beside.tensors
    if beside is not None and beside.in_module_order:
        how = f"in the order of {beside.label}"
        orders = [in_file_order(one.parameters, tensors, one.tied) for one in found]
    elif saved.startswith("4."):
        how = f"in the order of transformers 4 (saved by {saved})"
        orders = [in_order_of_version_4(type(model).__name__, one.parameters, tensors) for one in found]
    else:
        return None
    pairs = [(order, one) for order, one in zip(orders, found, strict=True) if order is not None]
    return (how, [one._replace(parameters=order) for order, one in pairs]) if len(pairs) == len(found) else None


def pinned(optimizer: OptimizerState, weights: Sequence[Weights]) -> list[tuple[str, Sequence[Candidate]]]:
    """Return the tensors of each file whose shapes alone say which tensor an entry is, in the optimizer's order.

    Args:
        optimizer: Its entries in the order of its groups.
        weights: Files whose order says nothing.
    """
    sources: list[tuple[str, Sequence[Candidate]]] = []
    shapes = [entry.shape for entry in optimizer.entries]
    for one in weights:
        count = Counter(tuple(tensor.shape) for tensor in one.tensors.values())
        names = {tuple(tensor.shape): name for name, tensor in one.tensors.items()}
        if len(set(shapes)) == len(shapes) and all(shape is not None and count[shape] == 1 for shape in shapes):
            order = [
                Candidate(names[shape], shape, weight=one.tensors[names[shape]])
                for shape in shapes
                if shape is not None
            ]
            sources.append((f"{one.label}, in which every shape occurs once", order))
    return sources


def sorted_by_name(weights: Weights, state: str) -> NamingError:
    """Return the error for a state beside which there is only a file that sorts its names."""
    return NamingError(
        f"{weights.label} sorts its tensors by name, and several have the same shape, so it cannot tell which is which in "
        f"{state}. Give the model with --model: a folder with its config.json, or its state_dict() saved with torch.save, "
        "which keeps the order; or the names in the optimizer's order with --names."
    )
