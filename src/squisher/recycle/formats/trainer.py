"""Hugging Face Trainer folders: `checkpoint-N/` with optimizer.pt, the weights or an adapter, and what is known of the run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ...errors import FileError, NamingError
from ...storage.folders import Weights, has_weights, open_weights
from ...storage.json_files import read_json, read_object
from ..naming.adapters import adapter_orders
from ..naming.candidates import Candidates, candidates_of_module, loose
from ..naming.frozen import by_evidence, with_earlier
from ..naming.hf_model import MissingPackage, adapted_model, built_by, meta_model
from ..naming.hf_rules import galore_rule
from ..optimizers import step_of
from ..states import Candidate, Found, OptimizerState, Options
from .model_source import laws_of, model_candidates, pinned, sorted_by_name, with_model
from .torch_file import candidates_of, read_torch_file
from .training_args import facts_of, target_modules, training_args

__all__ = ["is_trainer_folder", "optimizer_file", "read_trainer"]

Sources = list[tuple[str, Sequence[Candidate]]]

_ELSEWHERE = (
    "optimizer_*",
    "pytorch_model_fsdp_*",
    "global_step*",
)  # FSDP and DeepSpeed keep the state in folders inside


def is_trainer_folder(path: Path) -> bool:
    """Whether a folder is like a checkpoint of the Hugging Face Trainer: its optimizer state is one torch file, optimizer.pt.

    With FSDP it may be an optimizer.bin, as Accelerate's are; then what else is there tells them apart.
    """
    beside = ("trainer_state.json", "training_args.bin", "config.json", "adapter_config.json")
    if optimizer_file(path) is None:
        return False
    return any((path / name).is_file() for name in beside) or ((path / "optimizer.pt").is_file() and has_weights(path))


def optimizer_file(folder: Path) -> Path | None:
    """Return the torch file of an optimizer in a folder; None if there is none, or if FSDP or DeepSpeed keep the state elsewhere."""
    if not folder.is_dir() or any(p.is_dir() for pattern in _ELSEWHERE for p in folder.glob(pattern)):
        return None
    files = [folder / name for name in ("optimizer.pt", "optimizer.bin")]
    return next((file for file in files if file.is_file()), None)


def read_trainer(folder: Path, options: Options) -> Found:
    """Read the optimizer state of a Trainer folder, the model that it belongs to, and what is known about the run.

    Raises:
        FileError: A file is missing or damaged.
        NamingError: Model and weights do not belong together.
        MissingPackage: transformers or peft is needed and not installed.
    """
    file = optimizer_file(folder)
    if file is None:
        raise FileError(f"The folder {folder} holds no optimizer.pt.")
    state = read_torch_file(file)
    if len(state.optimizers) != 1 or state.models:  # a file of the user's own, with weights or several optimizers in it
        return with_model(state, options)
    optimizer = state.optimizers[0]
    args = training_args(folder)
    counts = (step_of(entry.state, entry.group) for entry in optimizer.entries if entry.state)
    facts, assume_mean = facts_of(folder, args, next(counts, None))
    targets = target_modules(args)
    special = [galore_rule(targets)] if targets else []
    if options.named or all(entry.name is not None for entry in optimizer.entries):
        laws = laws_of(options.model or folder)
        return Found([optimizer], _to_check_with(folder), facts, special, assume_mean=assume_mean, laws=laws)
    tiers = _tiers(optimizer, folder, options)
    sources, model = next(tiers, ([], Candidates([], {})))
    later = (others for others, _ in tiers)
    hint = _ADAPTED if (folder / "adapter_config.json").is_file() and not (options.base_model or options.model) else ""
    known = replace(facts, tied=model.tied)
    laws = laws_of(options.model or folder)
    return Found([optimizer], sources, known, special, model.parameters, assume_mean, later, hint, laws)


def _to_check_with(folder: Path) -> Sources:
    """Return the weights beside a state whose names are known: what has another shape there, or moved otherwise, contradicts them."""
    weights = open_weights(folder)
    return [] if weights is None else [(weights.label, candidates_of(weights.tensors)[0])]


_ADAPTED = (
    "The adapter's file sorts its names, and the order of its parameters cannot be told from them alone. Give the "
    "folder of the model that was adapted with --base-model DIR (base_model=...; its config.json is enough), or the "
    "names in the optimizer's order with --names."
)


def _tiers(optimizer: OptimizerState, folder: Path, options: Options) -> Iterator[tuple[Sources, Candidates]]:
    """Where names may come from: plain assumptions before those that need evidence of what was frozen."""
    weights = open_weights(folder)
    if (folder / "adapter_config.json").is_file():
        yield from _adapter_proposals(folder, options, weights)
        return
    missing: MissingPackage | None = None
    model = options.model or (folder if (folder / "config.json").is_file() else None)
    if model is not None:
        try:
            label, trained, every = model_candidates(model, weights)
        except MissingPackage as error:
            if options.model is not None:
                raise
            missing = error  # transformers is not installed, but the weights may keep the order
        else:
            modules = _sentence_modules(folder)
            before = _before(folder, options)
            trained, every = (
                c._replace(
                    parameters=with_earlier([*c.parameters, *modules], before) if before else [*c.parameters, *modules]
                )
                for c in (trained, every)
            )
            yield [(label, trained.parameters)], every
            if len(every.parameters) > len(trained.parameters):
                yield [(label, every.parameters)], every
            yield from _evidence(label, every, folder, options, weights)
            return
    if weights is not None and weights.in_module_order:
        plain = Candidates(*candidates_of(weights.tensors))
        label = f"the order of {weights.label}"
        yield [(label, plain.parameters)], plain
        yield from _evidence(label, plain, folder, options, weights)
    elif missing is not None:
        raise missing
    elif weights is not None:
        by_shape = pinned(optimizer, [weights])
        if not by_shape:
            raise sorted_by_name(weights, "the optimizer's state")
        yield by_shape, Candidates(list(by_shape[0][1]), {})


def _evidence(
    label: str, model: Candidates, folder: Path, options: Options, weights: Weights | None
) -> Iterator[tuple[Sources, Candidates]]:
    if weights is None:
        return
    others = (
        [("the base model", options.base_model)] if options.base_model else [(p.name, p) for p in _siblings(folder)]
    )
    for name, other in others:
        try:
            before = open_weights(other)
        except FileError:
            if options.base_model:
                raise
            continue  # another checkpoint may be half written
        if before is None:
            if options.base_model:
                raise FileError(f"{other} holds no weights to compare with.")
            continue
        for candidates in by_evidence(model.parameters, weights, before):
            yield [(f"{label}, trained where the weights differ from {name}", candidates)], model


def _sentence_modules(folder: Path) -> list[Candidate]:
    """Return the parameters of what sentence-transformers puts behind the model: its Dense layers, each in a folder of its own."""
    file = folder / "modules.json"
    try:
        listed = read_json(file) if file.is_file() else []
    except FileError:
        return []
    found: list[Candidate] = []
    for module in listed if isinstance(listed, list) else []:
        path, name = (module.get("path"), module.get("name")) if isinstance(module, dict) else (None, None)
        if isinstance(path, str) and path and Path(path).name == path and (folder / path).is_dir():
            weights = open_weights(folder / path)
            found += loose(weights.tensors if weights is not None else {}, f"{name}.")
    return found


def _before(folder: Path, options: Options) -> Weights | None:
    """Return the weights that training started from, or those of the last checkpoint before this one."""
    if options.base_model is not None:
        return open_weights(options.base_model)
    number = re.fullmatch(r"checkpoint-(\d+)", folder.absolute().name)
    numbers = [
        re.fullmatch(r"checkpoint-(\d+)", p.name) for p in folder.absolute().parent.glob("checkpoint-*") if p.is_dir()
    ]
    earlier = [int(m[1]) for m in numbers if m and number and int(m[1]) < int(number[1])]
    try:
        return open_weights(folder.absolute().parent / f"checkpoint-{max(earlier)}") if earlier else None
    except FileError:  # it may be half written
        return None


def _siblings(folder: Path) -> list[Path]:
    """Another checkpoint of the same run, the one farthest away."""
    own = re.fullmatch(r"checkpoint-(\d+)", folder.absolute().name)
    if own is None:
        return []
    others = []
    for other in folder.absolute().parent.glob("checkpoint-*"):
        number = re.fullmatch(r"checkpoint-(\d+)", other.name)
        if number and number[1] != own[1] and other.is_dir() and not other.is_symlink():
            others.append((abs(int(number[1]) - int(own[1])), other.name, other))
    return [max(others)[2]] if others else []


def _adapter_proposals(folder: Path, options: Options, weights: Weights | None) -> Iterator[tuple[Sources, Candidates]]:
    if weights is None:
        raise FileError(f"The folder {folder} has an adapter_config.json but no adapter_model.safetensors.")
    given = options.base_model or options.model
    base = given or _recorded_base(folder)
    orders = adapter_orders(weights)
    if base is not None:
        try:
            candidates = candidates_of_module(adapted_model(meta_model(base), folder), weights)
        except (MissingPackage, NamingError) as error:
            # The name that the adapter records may be another model's today; what the user gave must do.
            if not orders or (given is not None and not isinstance(error, MissingPackage)):
                raise
        else:
            yield [(f"the adapter on the base model of config.json{built_by(base)}", candidates.parameters)], candidates
            return
    label = f"the names in {weights.label}, each submodule's together"
    yield [(label, order) for order in orders], Candidates(orders[0] if orders else [], {})


def _recorded_base(folder: Path) -> Path | None:
    """Return the folder of the base model, where the adapter names one that is on this disk."""
    name = read_object(folder / "adapter_config.json").get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        return None
    places = [Path(name), folder / name, folder.parent / name]
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, "config.json")  # looks on the disk only
    except (ImportError, ValueError):
        cached = None
    if isinstance(cached, str):
        places.append(Path(cached).parent)
    return next((place for place in places if os.path.isfile(place / "config.json")), None)
