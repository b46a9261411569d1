"""Callbacks for Lightning, `lightning` and `pytorch_lightning` alike: record the importance, EWC, training under a mask.

    Trainer(callbacks=[SquisherCallback(), ...])

Lightning calls them by name and asks for no base class, so this module does not import it and serves both packages.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import SquisherError
from ..importance import Pollution, RunFacts
from .recording import (
    Consolidator,
    Events,
    Recorder,
    Restrainer,
    examples_in,
    inner_optimizers,
    over_processes,
    tokens_in,
)

__all__ = ["EWCCallback", "MaskCallback", "SquisherCallback"]

_SHARDED = ("DeepSpeedStrategy", "FSDPStrategy", "ModelParallelStrategy")


class _Hooks(Events):
    """The methods that Lightning calls on every callback."""

    @property
    def state_key(self) -> str:
        """The key of the callback's state in Lightning's checkpoints."""
        return f"squisher.{type(self).__name__}"

    _legacy_state_key = state_key

    def state_dict(self) -> dict[str, Any]:
        """Return no state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load no state."""


class SquisherCallback(_Hooks, Recorder):
    """Writes an importance beside every checkpoint: `step=100.squisher.safetensors` beside `step=100.ckpt`.

    Examples per step are counted over micro-batches and processes. Lightning does not know the loss: it is taken for a mean over
    examples, like torch's losses, unless `loss_reduction` says otherwise. With `gradient_clip_val` the optimizer squares clipped
    gradients; that is recorded. Files are removed with their checkpoints.

    Only the first process writes. DeepSpeed and FSDP spread the state over processes and are refused; `squisher extract` reads
    their checkpoints.

    Args:
        path: A file or folder to write once, when training ends, instead of files beside checkpoints.
        track: Whether to record the gradient before clipping, by a tracker whose state is in the checkpoints, instead of the
            optimizer's average. The optimizer then needs no average (SGD).
        loss_reduction: `mean`, `sum` or `token_mean`; None if it is none of them.
        tokens: For `token_mean`: a function that returns the number of tokens of a batch with a loss. By default labels that are
            not -100, without the first of each row, as in causal language models.
        submodule: The part of the module to record, such as `"model"`; names are then relative to this part.
        codec: How files keep the values: `exact`, `log8` or `rank1`; see `Importance.save`.
    """

    _first = "fit(...)"

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        track: bool = False,
        loss_reduction: str | None = "mean",
        tokens: Callable[[Any], int] | None = None,
        submodule: str | None = None,
        codec: str = "exact",
    ) -> None:
        super().__init__(track=track, loss_reduction=loss_reduction, codec=codec)
        self.path = None if path is None else Path(path)
        self.submodule = submodule
        self._tokens = tokens
        self._trainer: Any = None
        self._pending: list[tuple[int | None, Tensor | int | None]] = []
        self._resumed: Mapping[str, Any] = {}
        self._step = 0
        self._written: dict[Path, Path] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the counts and, with a tracker, its average."""
        state: dict[str, Any] = {"counts": self.counts.state()}
        if self.tracker is not None:
            state["tracker"] = self.tracker.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep a checkpoint's state until training begins."""
        self._resumed = dict(state)

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Wrap `trainer.save_checkpoint`, to write beside each checkpoint."""
        _refuse_sharding(trainer, type(self).__name__)
        if stage == "fit" and self.path is None and trainer is not self._trainer:
            original = trainer.save_checkpoint
            trainer.save_checkpoint = functools.wraps(original)(functools.partial(self._save_beside, original))
        self._trainer = trainer

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Begin to count, or continue a checkpoint's counts."""
        model = module.get_submodule(self.submodule) if self.submodule else module
        self._begin(model, list(trainer.optimizers), self._resumed.get("counts"))
        self._pending, self._step = [], trainer.global_step
        if self.track:
            (optimizer,) = _only(self._optimizers, type(self).__name__)
            tracker = self._new_tracker(model, optimizer)
            if "tracker" in self._resumed:
                tracker.load_state_dict(self._resumed["tracker"])
        self._resumed = {}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Count a micro-batch."""
        tokens: Tensor | int | None = None
        if self.loss_reduction == "token_mean":
            tokens = tokens_in(batch, shifted=True) if self._tokens is None else self._tokens(batch)
        self._pending.append((examples_in(batch), tokens))

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """Observe gradients that are accumulated, reduced and unscaled, and not yet clipped."""
        self._observe()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the step, if this batch completed one."""
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        step = over_processes([n for n, _ in self._pending], [n for _, n in self._pending], module.device)
        if step is not None:
            self.counts.add(*step, full=None)
        self._pending = []
        self._check_once()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Write to `path`, if it was given."""
        if self.path is not None:
            self._save(self.path, trainer.is_global_zero)

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        """Remove files whose checkpoints are gone."""
        self._tidy()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _save_beside(self, original: Callable[..., Any], filepath: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(filepath, *args, **kwargs)
        if self._model is not None and self.counts.steps:  # a checkpoint may be saved before training
            checkpoint = Path(filepath)
            beside = checkpoint.with_name(checkpoint.name.removesuffix(".ckpt") + ".squisher.safetensors")
            self._save(beside, self._trainer.is_global_zero)
            self._written[beside] = checkpoint
            self._tidy()
        return out

    def _tidy(self) -> None:
        """Remove files whose checkpoints Lightning has removed, which it does after it has saved the next one."""
        for old in [f for f, owner in self._written.items() if not owner.exists()]:
            del self._written[old]
            if self._trainer.is_global_zero:
                old.unlink(missing_ok=True)

    def _pollution(self) -> list[Pollution]:
        clip = self._trainer.gradient_clip_val
        if self.tracker is not None or not clip:
            return []
        how = str(self._trainer.gradient_clip_algorithm or "norm").rpartition(".")[2].lower()
        return [Pollution.clipping(clip, how)]

    def _facts(self) -> tuple[RunFacts, float]:
        trainer, counts, reduction = self._trainer, self.counts, self.loss_reduction
        training = {
            "trainer": "lightning",
            "gradient_accumulation_steps": trainer.accumulate_grad_batches,
            "processes": trainer.world_size,
            "precision": str(trainer.precision),
            "counted": counts.state(),
        }
        facts = RunFacts(
            batch_size=counts.largest or None,
            batch_tokens=counts.mean_tokens if reduction == "token_mean" else None,
            loss_reduction=reduction,
            unit=None if reduction is None else "token" if reduction == "token_mean" else "example",
            after_clipping=bool(trainer.gradient_clip_val),
            pollution=tuple(self._pollution()),
            training=training,
        )
        return facts, 1.0


class EWCCallback(Consolidator, SquisherCallback):
    """Elastic weight consolidation in Lightning.

    Before every step and before clipping, the tracker observes the data's gradients, then the penalty's gradient is added. So the
    importance of the current task, in the file beside each checkpoint, is of its data alone. The penalty is logged as
    `ewc_penalty`, every `log_every_n_steps`. With `pull` the gradient is left alone, and the parameters are pulled after every step
    of the optimizer, before the scheduler's.

    Args:
        ewc: The EWC with earlier tasks consolidated, made of this very module or of a part of it.
        pull: `"plain"` or `"adam"`: use `ewc.pull_` in this metric instead of the penalty's gradient.
        track: Whether to keep a tracker; by default only without `pull`. False without `pull` records the optimizer's state, which
            includes the square of the penalty's gradient: from task to task such importances may grow without bound.
        **more: As for `SquisherCallback`, `path` among them.
    """

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Check that the EWC protects this module."""
        super().on_train_start(trainer, module)
        _only(self._optimizers, type(self).__name__)
        part = f"module.{self.submodule}" if self.submodule else "module"
        self._follow(
            self._model,
            f"Make it with squisher.EWC({part}), of the module that trainer.fit(module, ...) is called with.",
        )

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Stop pulling, and write to `path`, if it was given."""
        self._let_go()
        super().on_train_end(trainer, module)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """Observe the data's gradients, then add the penalty's."""
        super().on_before_optimizer_step(trainer, module, optimizer)
        if (trainer.global_step + 1) % trainer.log_every_n_steps == 0:
            module.log("ewc_penalty", self._penalty(), batch_size=1)


class MaskCallback(_Hooks, Restrainer):
    """Let training move only the entries that a mask keeps; all others stay as they are to the bit, weight decay or not.

    Args:
        mask: As `squisher.mask.top_k` makes it: True where training may move an entry.
        submodule: The part of the module to which the mask's names are relative.
    """

    def __init__(self, mask: Mapping[str, Tensor], submodule: str | None = None) -> None:
        super().__init__(mask)
        self.submodule = submodule

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Mask gradients and steps, before the first one."""
        _refuse_sharding(trainer, type(self).__name__)
        (optimizer,) = _only(inner_optimizers(list(trainer.optimizers)), type(self).__name__)
        self._restrain(module.get_submodule(self.submodule) if self.submodule else module, optimizer)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Remove the mask's hooks."""
        self.remove()


def _only(optimizers: list[torch.optim.Optimizer], who: str) -> list[torch.optim.Optimizer]:
    if len(optimizers) != 1:
        raise SquisherError(f"{who} expects a module with one optimizer, and this one has {len(optimizers)}.")
    return optimizers


def _refuse_sharding(trainer: Any, who: str) -> None:
    name = type(trainer.strategy).__name__
    if name in _SHARDED:
        raise SquisherError(
            f"{who} does not work under {name}, which spreads parameters and states over processes. Leave it out and read "
            "the checkpoints afterwards: squisher extract CHECKPOINT --out squisher.safetensors"
        )
