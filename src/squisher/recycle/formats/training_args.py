"""What a Trainer folder proves about its run beside the state: batch size, loss, clipping."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ...errors import FileError
from ...importance import Pollution, RunFacts, Spoiler
from ...storage.json_files import read_object
from ...storage.torch_files import Record, read

__all__ = ["facts_of", "reduction_of", "target_modules", "training_args"]

# The losses of these heads are means over the tokens that carry a label, and over examples.
_TOKEN_MEAN = re.compile(r"For(CausalLM|ConditionalGeneration|MaskedLM|TokenClassification|Seq2SeqLM)$|LMHeadModel$")
_EXAMPLE_MEAN = re.compile(
    r"For(Sequence|Image|Video|Audio)Classification$|For(MultipleChoice|QuestionAnswering|NextSentencePrediction)$"
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
    """`optim_target_modules` of the training arguments: what GaLore and Apollo projected."""
    targets = None if args is None else args.get("optim_target_modules")
    if isinstance(targets, (list, tuple, set)) and all(isinstance(t, str) for t in targets):
        return list(targets)
    return targets if isinstance(targets, str) else None


def facts_of(folder: Path, args: Record | None, steps: int | None) -> tuple[RunFacts, bool]:
    """Return what a Trainer folder proves about its run, and whether an unknown loss may be taken as a mean.

    Args:
        folder: The checkpoint.
        args: Its training arguments.
        steps: How many steps the optimizer's own count says.
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
        batches = _batches_a_step(folder, args)
        if reduction is not None and batches > 1 and not _averages(folder):
            assume_mean = False  # neither a mean nor a sum over examples, as far as the folder tells
            note = (
                f"A step is made of {batches} batches, whose losses this class of models may add up instead of averaging: "
                f"gradients may be {batches} times as large as a mean's."
            )
            pollution.append(Pollution(Spoiler.ADDED_BATCHES, {"batches": batches}, note))
        elif reduction is not None:
            loss_reduction, unit = reduction
    total = state.get("global_step")
    skipped = (
        folder / "scaler.pt"
    ).is_file()  # a loss scaler skips steps, which the Trainer counts and the optimizer does not
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
    """Examples per optimizer step, if every factor is on record."""
    processes = _processes(folder, args)
    accumulation = args.get("gradient_accumulation_steps")
    per_device = args.get("per_device_train_batch_size")
    devices = args.get("_n_gpu", args.get("n_gpu"))
    configured = per_device * max(1, devices) if isinstance(per_device, int) and isinstance(devices, int) else None
    used = state.get("train_batch_size")
    if isinstance(used, int) and not args.get("auto_find_batch_size") and configured not in (None, used):
        return None
    local = used if isinstance(used, int) else configured if not args.get("auto_find_batch_size") else None
    config = args.get("accelerator_config")
    split = isinstance(config, Record) and config.get("split_batches")  # one batch is then shared among the processes
    if (
        not isinstance(accumulation, int)
        or local is None
        or processes is None
        or args.get("parallelism_config")
        or split
    ):
        return None
    size = local * accumulation * processes
    return size if size > 0 else None


def _batches_a_step(folder: Path, args: Record) -> int:
    """Of how many batches a step's gradient is made, by accumulation and over processes; at least 1."""
    accumulation, processes = args.get("gradient_accumulation_steps"), _processes(folder, args)
    return max(1, accumulation if isinstance(accumulation, int) else 1) * max(1, processes or 1)


def _averages(folder: Path) -> bool:
    """Whether the loss of a step of several batches is certainly their mean."""
    if (folder / "adapter_config.json").is_file():
        return read_object(folder / "adapter_config.json").get("task_type") == "CAUSAL_LM"
    config = read_object(folder / "config.json")
    version = re.match(r"(\d+)\.(\d+)", str(config.get("transformers_version", "")))
    if version and (int(version[1]), int(version[2])) < _LEAVES_DIVISION:
        return True
    return bool(_DIVIDES_BY_ALL.search(str((config.get("architectures") or [""])[0])))


def _processes(folder: Path, args: Record) -> int | None:
    """How many processes trained, if the folder proves it: each saves the state of its random numbers."""
    numbers = sorted(
        int(m[1]) for p in folder.glob("rng_state_*.pth") if (m := re.fullmatch(r"rng_state_(\d+)\.pth", p.name))
    )
    alone = (folder / "rng_state.pth").is_file()
    if alone == bool(numbers) or numbers != list(range(len(numbers))):
        return None
    count = 1 if alone else len(numbers)
    recorded = args.get("distributed_state")
    said = recorded.get("num_processes") if isinstance(recorded, Record) else None
    return count if said in (None, count) else None


def _reduction(folder: Path, args: Record) -> tuple[str, str] | None:
    """How the loss was reduced and over what, for the losses that the models of transformers compute themselves."""
    if args.name.rpartition(".")[2] not in _PLAIN_TRAINERS:  # preference and reward training have losses of their own
        return None
    try:
        if (folder / "adapter_config.json").is_file():
            return _TASKS.get(str(read_object(folder / "adapter_config.json").get("task_type")))
        names = read_object(folder / "config.json").get("architectures") if (folder / "config.json").is_file() else None
    except FileError:
        return None
    return reduction_of(str(names[0]) if isinstance(names, list) and names else "")


def reduction_of(architecture: str) -> tuple[str, str] | None:
    """How the loss of a transformers class is reduced, and over what; None if it is none of the known heads."""
    if _TOKEN_MEAN.search(architecture):
        return "token_mean", "token"
    return ("mean", "example") if _EXAMPLE_MEAN.search(architecture) else None
