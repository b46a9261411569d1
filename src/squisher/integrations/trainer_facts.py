"""What the arguments of a transformers Trainer prove about its run: batch size, loss, clipping; and what it cannot do."""

from __future__ import annotations

from typing import Any

from ..errors import SquisherError
from ..importance import Pollution, Spoiler
from ..recycle.formats.training_args import reduction_of
from .batch_counts import loss_factor

__all__ = ["batch_size", "loss_of", "pollution", "precision", "refuse_sharding"]


def batch_size(args: Any, local_batch: int | None) -> int | None:
    """Examples per full optimizer step, if every factor is known.

    Args:
        args: `TrainingArguments`.
        local_batch: Examples per micro-batch of one process, over all its devices.
    """
    config = getattr(args, "accelerator_config", None)
    if getattr(args, "parallelism_config", None) is not None or getattr(config, "split_batches", False):
        return None  # several processes then work on one batch
    return local_batch * args.gradient_accumulation_steps * args.world_size if local_batch else None


def loss_of(watch: Any, model: Any) -> tuple[str | None, str | None, float]:
    """How the loss is reduced, what it is a mean of, and by how much gradients are larger than that says.

    Args:
        watch: A `TrainerWatch` that has seen a step.
        model: The model, or an adapter on it.

    Returns:
        None, None and 1 where the loss is somebody's own, or nobody saw what was done with the number of items.
    """
    unknown = None, None, 1.0
    if not watch.loss_is_known or watch.trainer.args.n_gpu > 1:
        return unknown
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    known = reduction_of(type(base).__name__)
    accumulation, processes = watch.factors
    divides = not watch.counts_items or watch.divides
    if known is None or (divides is None and accumulation * processes > 1):
        return unknown
    return *known, loss_factor(divides=divides is not False, accumulation=accumulation, processes=processes)


def pollution(args: Any, *, before_clipping: bool) -> list[Pollution]:
    """Return what else than the data's gradient is squared.

    Args:
        args: `TrainingArguments`.
        before_clipping: Whether gradients were taken before the Trainer clipped them.
    """
    found = []
    if args.max_grad_norm and not before_clipping:
        found.append(Pollution.clipping(args.max_grad_norm))
    if args.label_smoothing_factor:
        note = f"The loss smooths its labels by {args.label_smoothing_factor:g}."
        found.append(Pollution(Spoiler.LABEL_SMOOTHING, {"smoothing": args.label_smoothing_factor}, note))
    return found


def precision(args: Any) -> str:
    """Of mixed precision training."""
    return "fp16" if args.fp16 else "bf16" if args.bf16 else "as the model"


def refuse_sharding(args: Any, optimizer: Any, who: str, instead: str) -> None:
    """DeepSpeed and FSDP keep pieces of parameters and states on every process, in forms of their own.

    Args:
        args: `TrainingArguments`.
        optimizer: The one that Accelerate prepared.
        who: What does not work.
        instead: What to do, as a sentence.

    Raises:
        SquisherError: One of them is at work.
    """
    kind = str(getattr(getattr(optimizer, "accelerator_state", None), "distributed_type", "")).rpartition(".")[2]
    for name, said in (("DeepSpeed", getattr(args, "deepspeed", None)), ("FSDP", getattr(args, "fsdp", None))):
        if kind == name.upper() or said:
            raise SquisherError(
                f"{who} does not work under {name}, which spreads parameters and states over processes. {instead}"
            )
