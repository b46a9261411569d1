"""Hugging Face Trainer folders: `checkpoint-N/` with optimizer.pt, the weights or an adapter, and what proves facts of the run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import FileError, NamingError
from ...importance.facts import Pollution, RunFacts, Spoiler
from ...storage.folders import Weights, has_weights, open_weights
from ...storage.json_files import read_json, read_object
from ...storage.torch_files import Record, read
from ..naming.candidates import Candidates, by_evidence, candidates_of_module, loose, with_earlier
from ..naming.conventions import galore_convention
from ..naming.hugging_face import MissingPackage, adapted_model, adapter_orders, built_by, meta_model
from ..optimizers import step_of
from ..states import Candidate, Found, OptimizerState, Options, Source
from .model_source import laws_of, model_candidates, pinned, sorted_by_name, with_model
from .torch_file import candidates_of, inside, read_torch_file

__all__ = [
    "facts_of",
    "is_trainer_folder",
    "optimizer_file",
    "read_trainer",
    "reduction_of",
    "target_modules",
    "training_args",
]

_ELSEWHERE = (
    "optimizer_*",
    "pytorch_model_fsdp_*",
    "global_step*",
)  # folders in which FSDP and DeepSpeed keep the state
_ADAPTED = (
    "The adapter's file sorts its names, and the order of its parameters cannot be told from them alone. Give the "
    "folder of the model that was adapted with --base-model DIR (base_model=...; its config.json is enough), or the "
    "names in the optimizer's order with --names."
)
_TRAINED = (
    "Give the names in the optimizer's order with --names FILE (names=[...]), the model that was trained with --model, or, if parameters "
    "were frozen, the weights that it started from with --base-model. The Trainer makes its optimizer itself: next time train with "
    "squisher.integrations.transformers.SquisherCallback, which knows the names."
)


def is_trainer_folder(path: Path) -> bool:
    """Return whether a folder is like a checkpoint of the Hugging Face Trainer: its optimizer state is one torch file, optimizer.pt.

    With FSDP it may be an optimizer.bin, as Accelerate's are; then what else is there decides.
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
    if file.name == "optimizer.pt" and (folder / "optimizer.bin").is_file():
        raise FileError(f"{folder} holds optimizer.pt and optimizer.bin: remove the one of an earlier run.")
    state = read_torch_file(file)
    if len(state.optimizers) != 1 or state.models:  # a script's file, with weights or several optimizers in it
        return with_model(state, options)
    optimizer = state.optimizers[0]
    trained = [entry for entry in optimizer.entries if entry.state]
    args = training_args(folder)
    facts, assume_mean = facts_of(folder, args, step_of(trained[0].state, trained[0].group) if trained else None)
    weights = open_weights(folder)
    if weights is not None and _is_adapter(folder) and len(trained) == len(weights.tensors):
        # Before 0.6, PEFT gave the optimizer a classifier beside the copy of it that is trained and saved.
        optimizer = replace(optimizer, entries=trained)
    targets = target_modules(args)
    found = Found(
        [optimizer],
        facts=facts,
        conventions=[galore_convention(targets)] if targets else [],
        assume_mean=assume_mean,
        laws=laws_of(options.model or folder),
        vouched=_makes_its_own(folder, optimizer),
    )
    if options.named or all(entry.name is not None for entry in optimizer.entries):
        # The names are known; weights of another shape, or that moved otherwise, contradict them.
        return found if weights is None else replace(found, models=[(weights.label, candidates_of(weights.tensors)[0])])
    tiers = _tiers(optimizer, folder, options, weights)
    sources, model = next(tiers, ([], Candidates([], {})))
    alone = _is_adapter(folder) and not (options.base_model or options.model)
    return replace(
        found,
        models=sources,
        later=(others for others, _ in tiers),
        parameters=model.parameters,
        facts=replace(facts, tied=model.tied),
        hint=_ADAPTED if alone else _TRAINED if found.vouched else "",
    )


def _makes_its_own(folder: Path, optimizer: OptimizerState) -> bool:
    """Return whether the Trainer may have made the optimizer.

    It puts biases and norms in a second group, which stays empty if there are none to train, or none that it knows (DoRA's vectors). A
    single group of vectors and matrices is an optimizer that the user's code made.
    """
    files = ("trainer_state.json", "training_args.bin")
    wrote = any((folder / name).is_file() for name in files) or re.fullmatch(r"checkpoint-\d+", folder.absolute().name)
    ranks = {len(entry.shape) for entry in optimizer.entries if entry.shape}
    single = len(optimizer.group_sizes) == 1 and optimizer.groups != 2
    return bool(wrote) and not (single and 1 in ranks and len(ranks) > 1)


def _is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file()


Tier = tuple[list[Source], Candidates]
"""Where names may come from, and the whole model."""


def _tiers(optimizer: OptimizerState, folder: Path, options: Options, weights: Weights | None) -> Iterator[Tier]:
    """Yield where names may come from: plain assumptions before those that need evidence of what was frozen."""
    if _is_adapter(folder):
        _, before = _other_weights(
            folder, replace(options, base_model=None), farthest=False
        )  # a base has no adapter's weights
        for sources, every in _adapter_proposals(folder, options, weights):
            yield [(label, with_earlier(one, before)) for label, one in sources] if before else sources, every
        return
    missing: MissingPackage | None = None
    model = options.model or (folder if (folder / "config.json").is_file() else None)
    if model is not None:
        try:
            label, trained, every = model_candidates(model, weights, weights if model == folder else None)
        except MissingPackage as error:
            if options.model is not None:
                raise
            missing = error  # transformers is not installed, but the weights may keep the order
        else:
            modules, (_, before) = _sentence_modules(folder), _other_weights(folder, options, farthest=False)
            lists = [[*one.parameters, *modules] for one in (trained, every)]
            lists = [with_earlier(one, before) for one in lists] if before else lists
            trained, every = trained._replace(parameters=lists[0]), every._replace(parameters=lists[1])
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


def _evidence(label: str, model: Candidates, folder: Path, options: Options, weights: Weights | None) -> Iterator[Tier]:
    """Yield the parameters that differ from the base model, or from the checkpoint of the run that is farthest away."""
    name, before = _other_weights(folder, options, farthest=True)
    for candidates in by_evidence(model.parameters, weights, before) if weights and before else ():
        yield [(f"{label}, trained where the weights differ from {name}", candidates)], model


def _sentence_modules(folder: Path) -> list[Candidate]:
    """Return the parameters of the Dense layers that sentence-transformers puts behind the model, each in its folder."""
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


def _other_weights(folder: Path, options: Options, farthest: bool) -> tuple[str, Weights | None]:
    """Return the weights of another moment of the run, and their name: those that training started from, if they were given.

    Args:
        folder: The checkpoint.
        options: What the user said.
        farthest: Take the checkpoint beside it that is farthest away; otherwise the last one before it.
    """
    if options.base_model is not None:
        given = open_weights(options.base_model)
        if given is None:
            raise FileError(f"{options.base_model} holds no weights to compare with.")
        return "the base model", given
    folder = folder.absolute()
    beside = [path for path in folder.parent.glob("checkpoint-*") if path.is_dir() and not path.is_symlink()]
    numbers = {p: int(match[1]) for p in [folder, *beside] if (match := re.fullmatch(r"checkpoint-(\d+)", p.name))}
    away = {path: numbers[folder] - number for path, number in sorted(numbers.items())} if folder in numbers else {}
    earlier = {path: distance for path, distance in away.items() if distance > 0}
    if not any(away.values() if farthest else earlier.values()):
        return "", None
    by_distance = max(away, key=lambda path: (abs(away[path]), path.name))
    other = by_distance if farthest else min(earlier, key=lambda path: earlier[path])
    try:
        return other.name, open_weights(other)
    except FileError:  # half written: no evidence
        return "", None


def _adapter_proposals(folder: Path, options: Options, weights: Weights | None) -> Iterator[Tier]:
    """Yield the parameters of the adapted base model, or, where that is not at hand, the orders that the adapter's file allows."""
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


# -- facts of the run ---------------------------------------------------------------------------------------------------

# The losses of these heads are means over the tokens that carry a label, and over examples.
_TOKEN_MEAN = re.compile(r"For(CausalLM|ConditionalGeneration|MaskedLM|TokenClassification|Seq2SeqLM)$|LMHeadModel$")
_EXAMPLE_MEAN = re.compile(
    r"For((Sequence|Image|Video|Audio)Classification|MultipleChoice|QuestionAnswering|NextSentencePrediction)$"
)
_TASKS = {
    "CAUSAL_LM": ("token_mean", "token"),
    "SEQ_2_SEQ_LM": ("token_mean", "token"),
    "TOKEN_CLS": ("token_mean", "token"),
    "SEQ_CLS": ("mean", "example"),
    "QUESTION_ANS": ("mean", "example"),
}
# These divide a step's loss by all its tokens, however many batches it is made of. The Trainer (from 4.46 on) leaves that division
# to every class that takes keyword arguments, and many of the others ignore it: their gradients are sums over the batches.
_DIVIDES_BY_ALL = re.compile(r"ForCausalLM$|LMHeadModel$")
_LEAVES_DIVISION = (4, 46)
_PLAIN_TRAINERS = ("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig")


def training_args(folder: Path) -> Record | None:
    """Return the pickled training arguments of a folder, as an inert record; None where there are none."""
    file = folder / "training_args.bin"
    content = read(file) if file.is_file() else None
    return content if isinstance(content, Record) else None


def target_modules(args: Record | None) -> str | list[str] | None:
    """Return `optim_target_modules` of the training arguments: what GaLore and Apollo projected."""
    targets = None if args is None else args.get("optim_target_modules")
    if isinstance(targets, (list, tuple, set)) and all(isinstance(t, str) for t in targets):
        return list(targets)
    return targets if isinstance(targets, str) else None


def facts_of(folder: Path, args: Record | None, steps: int | None) -> tuple[RunFacts, bool]:
    """Return what a Trainer folder proves about its run, and whether an unknown loss may be taken as a mean.

    Args:
        folder: The checkpoint.
        args: Its training arguments.
        steps: How many steps the optimizer counts.
    """
    state = read_object(folder / "trainer_state.json") if (folder / "trainer_state.json").is_file() else {}
    batch_size = loss_reduction = unit = clipped = None
    assume_mean = True
    pollution = []
    if args is not None:
        batch_size = _batch_size(folder, args, state)
        norm = args.get("max_grad_norm")
        if isinstance(norm, (int, float)):
            clipped = norm > 0
            if norm > 0:
                pollution.append(Pollution.clipping(norm))
        smoothing = args.get("label_smoothing_factor")
        if isinstance(smoothing, (int, float)) and smoothing > 0:
            note = f"The loss smooths its labels by {smoothing:g}."
            pollution.append(Pollution(Spoiler.LABEL_SMOOTHING, {"smoothing": smoothing}, note))
        reduction = _reduction(folder, args)
        accumulation = args.get("gradient_accumulation_steps")
        batches = max(1, accumulation if isinstance(accumulation, int) else 1) * (_processes(folder, args) or 1)
        if reduction is not None and batches > 1 and not _averages(folder):
            assume_mean = False  # neither a mean nor a sum over examples, as far as the folder shows
            note = (
                f"A step is made of {batches} batches, whose losses this class of models may add up instead of averaging: "
                f"gradients may be {batches} times as large as a mean's."
            )
            pollution.append(Pollution(Spoiler.ADDED_BATCHES, {"batches": batches}, note))
        elif reduction is not None:
            loss_reduction, unit = reduction
    total = state.get("global_step")
    # The loss scaler may have skipped some: the Trainer counts such steps, the optimizer does not.
    skipped = (folder / "scaler.pt").is_file()
    if isinstance(total, int) and steps is not None and steps != total and not (skipped and steps < total):
        note = f"The optimizer counts {steps} steps, but trainer_state.json says {total}: the files may be of two checkpoints."
        pollution.append(Pollution(Spoiler.STEPS_DISAGREE, {"optimizer": steps, "trainer": total}, note))
    facts = RunFacts(
        batch_size=batch_size,
        loss_reduction=loss_reduction,
        unit=unit,
        after_clipping=clipped,
        pollution=tuple(pollution),
    )
    return facts, assume_mean


def _batch_size(folder: Path, args: Record, state: dict[str, Any]) -> int | None:
    """Return the examples per optimizer step, if every factor is on record."""
    processes = _processes(folder, args)
    accumulation = args.get("gradient_accumulation_steps")
    per_device = args.get("per_device_train_batch_size")
    devices = args.get("_n_gpu", args.get("n_gpu"))
    configured = per_device * max(1, devices) if isinstance(per_device, int) and isinstance(devices, int) else None
    used = state.get("train_batch_size")
    if isinstance(used, int) and not args.get("auto_find_batch_size") and configured not in (None, used):
        return None
    local = used if isinstance(used, int) else configured if not args.get("auto_find_batch_size") else None
    # Processes that share a batch: parts of one that is split, or tensor parallelism (first as tp_size).
    shared = inside(args, "accelerator_config", "split_batches") or args.get("parallelism_config")
    if (
        shared
        or args.get("tp_size", 0) not in (0, 1)
        or not isinstance(accumulation, int)
        or not local
        or not processes
    ):
        return None
    size = local * accumulation * processes
    return size if size > 0 else None


def _averages(folder: Path) -> bool:
    """Return whether the loss of a step of several batches is certainly their mean."""
    if _is_adapter(folder):
        return read_object(folder / "adapter_config.json").get("task_type") == "CAUSAL_LM"
    config = read_object(folder / "config.json")
    version = re.match(r"(\d+)\.(\d+)", str(config.get("transformers_version", "")))
    if version and (int(version[1]), int(version[2])) < _LEAVES_DIVISION:
        return True
    return bool(_DIVIDES_BY_ALL.search(str((config.get("architectures") or [""])[0])))


def _processes(folder: Path, args: Record) -> int | None:
    """Return how many processes trained, if the folder proves it: each saves the state of its random numbers."""
    matches = [re.fullmatch(r"rng_state_(\d+)\.pth", p.name) for p in folder.glob("rng_state_*.pth")]
    numbers = sorted(int(match[1]) for match in matches if match)
    alone = (folder / "rng_state.pth").is_file()
    if alone == bool(numbers) or numbers != list(range(len(numbers))):
        return None
    count = 1 if alone else len(numbers)
    return count if inside(args, "distributed_state", "num_processes") in (None, count) else None


def _reduction(folder: Path, args: Record) -> tuple[str, str] | None:
    """Return how the loss was reduced and over what, for the losses that the models of transformers compute themselves."""
    if args.name.rpartition(".")[2] not in _PLAIN_TRAINERS:  # preference and reward training have other losses
        return None
    try:
        if _is_adapter(folder):
            return _TASKS.get(str(read_object(folder / "adapter_config.json").get("task_type")))
        names = read_object(folder / "config.json").get("architectures") if (folder / "config.json").is_file() else None
    except FileError:
        return None
    return reduction_of(str(names[0]) if isinstance(names, list) and names else "")


def reduction_of(architecture: str) -> tuple[str, str] | None:
    """Return how the loss of a transformers class is reduced, and over what; None for an unknown head."""
    if _TOKEN_MEAN.search(architecture):
        return "token_mean", "token"
    return ("mean", "example") if _EXAMPLE_MEAN.search(architecture) else None
