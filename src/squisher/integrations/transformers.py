"""Callbacks for the Trainer of transformers and its subclasses (TRL's): record the importance, EWC, training under a mask.

    SquisherCallback().attach(trainer)
    EWCCallback(ewc).attach(trainer)
    MaskCallback(mask).attach(trainer)

The Trainer calls events by name, so callbacks need no base class, and this module does not import transformers. It also reads from
a Trainer's arguments what they prove about the run: batch size, loss, clipping.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import FileError, SquisherError
from ..importance import FILE_NAME, Importance, Pollution, RunFacts, Spoiler, load
from ..recycle.formats.trainer import reduction_of
from .recording import Consolidator, Recorder, Restrainer, inner_optimizers
from .trainer_watch import TrainerWatch, clips

__all__ = [
    "EWCCallback", "MaskCallback", "SquisherCallback", "batch_size", "loss_of", "pollution", "precision", "refuse_sharding",
]  # fmt: skip

STATE = "squisher"
"""The key of counts in trainer_state.json, and of a tracker's average in optimizer.pt."""

_READ_LATER = (
    "Leave it out, let the Trainer save the optimizer's state (save_only_model=False), and run: squisher extract "
    "checkpoint-N --out squisher.safetensors"
)


class SquisherCallback(Recorder):
    """Writes `squisher.safetensors` into every checkpoint, also with `save_only_model`.

    The file records batch size, tokens, loss reduction, clipping and precision. `trainer.add_callback(SquisherCallback())` works as
    well, but such a callback sees neither batches nor the loss, and records neither tokens nor the reduction.

    If `max_grad_norm` is above 0, which is the Trainer's default, the optimizer squares clipped gradients; that is recorded.
    `track=True` keeps an average of the gradient before clipping beside the optimizer, which then needs no average of its own. It
    takes 4 bytes per trained parameter and is saved in `optimizer.pt`.

    Only the first process writes. DeepSpeed and FSDP spread the state over processes and are refused; `squisher extract` reads
    their checkpoints.

    With `load_best_model_at_end`, `importance()` after training is that of the best checkpoint, from its own file. An attached
    callback also writes into the folder of `trainer.save_model(...)`, and so into the upload of `trainer.push_to_hub()`.

    Args:
        at_end_only: Whether to write only once, into `output_dir`, when training ends.
        track: Whether to record the gradient before clipping, instead of the optimizer's average.
        loss_reduction: `mean`, `sum` or `token_mean`, if the loss is your own; by default that of the model's class.
        codec: How files keep the values: `exact`, `log8` or `rank1`; see `Importance.save`.
    """

    _first = "train()"

    def __init__(
        self, *, at_end_only: bool = False, track: bool = False, loss_reduction: str | None = None, codec: str = "exact"
    ) -> None:
        super().__init__(track=track, loss_reduction=loss_reduction, codec=codec)
        self.at_end_only = at_end_only
        self._watch: TrainerWatch | None = None
        self._args: Any = None
        self._local_batch: int | None = None
        self._best: Path | None = None

    def attach(self: Any, trainer: Any) -> Any:
        """Add the callback to a Trainer, before `trainer.train()`, and watch what the Trainer does not pass to callbacks.

        Raises:
            SquisherError: The object is no Trainer, or has such a callback already.
        """
        if self._watch is not None:
            raise SquisherError(f"This {type(self).__name__} is attached to a Trainer already: make another one.")
        handler = getattr(trainer, "callback_handler", None)
        if any(isinstance(c, SquisherCallback) for c in getattr(handler, "callbacks", ())):
            raise SquisherError(
                "This Trainer has a SquisherCallback or an EWCCallback already. One is enough: EWCCallback writes "
                "squisher.safetensors too."
            )
        self._watch = TrainerWatch(
            trainer,
            on_optimizer=self._take_optimizer,
            on_gradients=self._observe,
            extra_logs=self._logs,
            on_saved=self._write_beside,
        )
        trainer.add_callback(self)
        return self

    def importance(self) -> Importance:
        """Return the importance so far, under the names of the model's weight file.

        Once the Trainer has loaded its best model, return the importance of that checkpoint, not of the optimizer's last state.

        Raises:
            SquisherError: Training has not begun, or the best checkpoint's file is gone.
            NoAccumulatorError: No step has been taken, or the optimizer keeps no squared gradient.
        """
        return super().importance() if self._best is None else self._of_best(self._best)

    def live_importance(self) -> Importance:
        """Return the importance so far under the names of the running model, for `EWC.consolidate` and `mask.train_only`."""
        if self._best is None:
            return super().live_importance()
        found = self._of_best(self._best)
        names = found.provenance.live_names
        live = [names.get(name, name) for name in found]
        if len(set(live)) < len(live):
            raise SquisherError(
                "The file of the best checkpoint has fused parameters in slices, as the weight file does: use importance()."
            )
        tensors = {new: found[name] for new, name in zip(live, found, strict=True)}
        return Importance(tensors, **{**found.provenance.to_dict(), "sum": {}, "sum_of_squares": {}, "live_names": {}})

    # -- events --------------------------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        """Refuse what would fail after hours of training, and continue a checkpoint's counts."""
        refuse_sharding(args, optimizer, type(self).__name__, _READ_LATER)
        if self.at_end_only and args.load_best_model_at_end:
            raise SquisherError(
                "at_end_only does not go with load_best_model_at_end: the optimizer's last state is not the state of the best "
                "model. Leave at_end_only out; every checkpoint then has its own squisher.safetensors."
            )
        if self._watch is None and state.is_hyper_param_search:
            raise SquisherError(
                f"A search over hyperparameters has a folder for each trial, which a Trainer does not show its callbacks: use "
                f"{type(self).__name__}(...).attach(trainer) instead of trainer.add_callback(...)."
            )
        if self._needs_attaching and self._watch is None:
            raise SquisherError(
                f"A Trainer does not show its callbacks the gradients of a step in time: use {type(self).__name__}(...).attach(trainer) "
                "instead of trainer.add_callback(...)."
            )
        self._args, self._best = args, None
        self._local_batch = state.train_batch_size or args.train_batch_size
        self._begin(model, optimizer, (state.stateful_callbacks or {}).get(STATE) if state.global_step else None)
        if self._watch is not None:
            self._watch.begin()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Observe gradients now if they were not observed before clipping."""
        if self._watch is not None and not self._watch.gradients_were_seen() and self.tracker is not None:
            self.tracker.after_clipping = True

    def on_step_end(self, args: Any, state: Any, control: Any, *, optimizer: Any = None, **_: Any) -> None:
        """Count the step in the Trainer's state, which every checkpoint has."""
        pending = self._watch.pending if self._watch is not None else None
        skipped = getattr(optimizer, "step_was_skipped", False)
        if pending is not None and not skipped:
            self.counts.add(*pending, full=batch_size(args, self._local_batch))
        state.stateful_callbacks[STATE] = self.counts.state()
        if not skipped:
            self._check_once()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write into the checkpoint that the Trainer has just saved."""
        if not self.at_end_only:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            seen = None if self._watch is None else self._watch.checkpoint
            self._save(folder if seen is None or seen.name != folder.name else seen, args.should_save)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Remember the best checkpoint, if the Trainer has loaded it; with `at_end_only`, write into `output_dir`."""
        if args.load_best_model_at_end and state.best_model_checkpoint:
            self._best = Path(state.best_model_checkpoint)
        if self.at_end_only:
            self._save(Path(args.output_dir), args.should_save)

    # -- inside --------------------------------------------------------------------------------------------------------

    @property
    def _needs_attaching(self) -> bool:
        return self.track

    def _take_optimizer(self, optimizer: Any, model: nn.Module) -> None:
        """Make a tracker for a new optimizer, and save and load it with the optimizer's state."""
        (inner,) = inner_optimizers(optimizer)
        if not self.track or (self.tracker is not None and self.tracker.optimizer is inner):
            return
        tracker = self._new_tracker(model, inner)

        def save(_: Any, state: dict[str, Any]) -> None:
            state[STATE] = tracker.state_dict()

        def load(_: Any, state: dict[str, Any]) -> None:
            if STATE in state:
                tracker.load_state_dict(state[STATE])

        inner.register_state_dict_post_hook(save)
        inner.register_load_state_dict_pre_hook(load)

    def _logs(self) -> Mapping[str, float]:
        return {}

    def _pollution(self) -> list[Pollution]:
        return pollution(self._args, before_clipping=self.tracker is not None)

    def _facts(self) -> tuple[RunFacts, float]:
        args, counts = self._args, self.counts
        reduction, unit, factor = self.loss_reduction, None, 1.0
        if reduction is not None:
            unit = "token" if reduction == "token_mean" else "example"
        elif self._watch is not None:
            reduction, unit, factor = loss_of(self._watch, self._model)
        training: dict[str, Any] = {
            "trainer": "transformers",
            "per_device_batch_size": self._local_batch,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "processes": args.world_size,
            "precision": precision(args),
            "counted": counts.state(),
        }
        if factor != 1:
            training["gradients_were_times"] = factor
        if self.tracker is not None and self.tracker.skipped:
            training["steps_not_finite"] = self.tracker.skipped
        facts = RunFacts(
            batch_size=batch_size(args, self._local_batch),
            batch_tokens=counts.mean_tokens if reduction == "token_mean" else None,
            loss_reduction=reduction,
            unit=unit,
            after_clipping=clips(args),
            pollution=tuple(self._pollution()),
            training=training,
        )
        return facts, factor

    def _write_beside(self, folder: Path) -> None:
        """Write beside a model that `save_model` has saved, if there is an importance."""
        same = self._best is not None and folder.resolve() == self._best.resolve()
        if self._model is not None and self.counts.steps and not same:
            self._save(folder, self._args.should_save)

    def _of_best(self, checkpoint: Path) -> Importance:
        try:
            return load(checkpoint)
        except FileError as error:
            raise SquisherError(
                f"The Trainer has loaded its best model, {checkpoint.name}, but the {FILE_NAME} of that checkpoint is not there "
                f"({error}). The optimizer's last state belongs to other weights."
            ) from error


class EWCCallback(Consolidator, SquisherCallback):
    """Elastic weight consolidation in a Trainer, with or without PEFT.

    At every step, once gradients are accumulated, reduced and unscaled, the tracker observes them, then the penalty's gradient is
    added, then the Trainer clips the sum. So the importance of the current task, in each checkpoint's `squisher.safetensors`, is of
    its data alone. The penalty is logged beside the loss as `ewc_penalty`. With `pull` the gradient is left alone, and the
    parameters are pulled after every step of the optimizer, before the scheduler's.

    With PEFT the penalty is on the adapter's factors A and B, not on their product. Make the EWC of `trainer.model`, since a trainer
    may add the adapter itself.

    Args:
        ewc: The EWC with earlier tasks consolidated.
        pull: `"plain"` or `"adam"`: use `ewc.pull_` in this metric instead of the penalty's gradient.
        track: Whether to keep a tracker; by default only without `pull`. False without `pull` records the optimizer's state, which
            includes the square of the penalty's gradient: from task to task such importances may grow without bound.
        **more: `at_end_only`, `loss_reduction` and `codec`, as for `SquisherCallback`.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any = None, **more: Any) -> None:
        """Check that the EWC protects this model."""
        super().on_train_begin(args, state, control, model=model, **more)
        self._follow(
            model, "Make it after the Trainer, of the model that the Trainer has: squisher.EWC(trainer.model, ...)."
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Stop pulling, and write into `output_dir` if asked to."""
        self._let_go()
        super().on_train_end(args, state, control, **more)

    @property
    def _needs_attaching(self) -> bool:
        return self.pull is None or self.track

    def _logs(self) -> Mapping[str, float]:
        return {"ewc_penalty": self._penalty()}


class MaskCallback(Restrainer):
    """Let a Trainer move only the entries that a mask keeps; all others stay as they are to the bit, weight decay or not.

    Args:
        mask: As `squisher.mask.top_k` makes it: True where training may move an entry.
    """

    def attach(self, trainer: Any) -> MaskCallback:
        """Add the callback to a Trainer, before `trainer.train()`."""
        trainer.add_callback(self)
        return self

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        """Mask gradients and steps, before the first one."""
        refuse_sharding(args, optimizer, "MaskCallback", "Train with one process, or with DDP.")
        self._restrain(model, optimizer)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Remove the mask's hooks."""
        self.remove()


def batch_size(args: Any, local_batch: int | None) -> int | None:
    """Return the examples per full optimizer step; None if a factor is not known.

    Args:
        args: `TrainingArguments`.
        local_batch: Examples per micro-batch of one process, over all its devices.
    """
    config = getattr(args, "accelerator_config", None)
    if getattr(args, "parallelism_config", None) is not None or getattr(config, "split_batches", False):
        return None  # several processes work on one batch
    return local_batch * args.gradient_accumulation_steps * args.world_size if local_batch else None


def loss_of(watch: Any, model: Any) -> tuple[str | None, str | None, float]:
    """Return the reduction of the loss, its unit, and the factor by which gradients are larger than these imply.

    The Trainer passes the model the number of items in all micro-batches of all processes, to divide by it, and undoes the averages
    over both. A model that ignores the number (many heads take any argument) divides by its own micro-batch alone, and its
    gradients are too large by this factor.

    Args:
        watch: A `TrainerWatch` that has seen a step.
        model: The model, or an adapter on it.

    Returns:
        None, None and 1 for a custom loss, or if it is not known whether the number of items was used.
    """
    unknown = None, None, 1.0
    if not watch.loss_is_known or watch.trainer.args.n_gpu > 1:
        return unknown
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    known = reduction_of(type(base).__name__)
    undone = math.prod(watch.factors)
    divides = not watch.counts_items or watch.divides
    if known is None or (divides is None and undone > 1):
        return unknown
    return *known, undone if divides is False else 1


def pollution(args: Any, *, before_clipping: bool) -> list[Pollution]:
    """Return what is squared beside the gradient of the data.

    Args:
        args: `TrainingArguments`.
        before_clipping: Whether gradients are observed before the Trainer clips them.
    """
    found = []
    if clips(args) and not before_clipping:
        found.append(Pollution.clipping(args.max_grad_norm))
    if args.label_smoothing_factor:
        note = f"The loss smooths its labels by {args.label_smoothing_factor:g}."
        found.append(Pollution(Spoiler.LABEL_SMOOTHING, {"smoothing": args.label_smoothing_factor}, note))
    return found


def precision(args: Any) -> str:
    """Return the type of mixed precision training."""
    return "fp16" if args.fp16 else "bf16" if args.bf16 else "as the model"


def refuse_sharding(args: Any, optimizer: Any, who: str, instead: str) -> None:
    """Refuse DeepSpeed and FSDP, which shard parameters and states over processes, in their own formats.

    Args:
        args: `TrainingArguments`.
        optimizer: The optimizer that Accelerate prepared.
        who: The callback that does not work with them.
        instead: A sentence on what to do instead.

    Raises:
        SquisherError: One of them is in use.
    """
    kind = str(getattr(getattr(optimizer, "accelerator_state", None), "distributed_type", "")).rpartition(".")[2]
    for name, setting in (("DeepSpeed", getattr(args, "deepspeed", None)), ("FSDP", getattr(args, "fsdp", None))):
        if kind == name.upper() or setting:
            raise SquisherError(
                f"{who} does not work under {name}, which spreads parameters and states over processes. {instead}"
            )
