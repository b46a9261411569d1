"""Watch what a transformers Trainer does not pass to its callbacks: batches, a new optimizer, gradients before clipping.

The Trainer clips before the first event after the backward pass. So six methods of the object (not of its class) are wrapped: each
does what it did, and reports it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import SquisherError
from .recording import examples_in, over_processes, tokens_in

__all__ = ["TrainerWatch", "clips"]

_PLAIN_LOSSES = ("transformers.trainer", "transformers.trainer_seq2seq", "trl.trainer.sft_trainer")


class TrainerWatch:
    """Watches one Trainer for one callback.

    Attributes:
        trainer: The Trainer.
        pending: Examples, and tokens with a loss or None, of the current step on all processes.
        checkpoint: The last checkpoint that was saved: a search over hyperparameters has a folder for each trial.
        divides: Whether the loss was divided by the items of the whole step; None if that is not known yet.
        counts_items: Whether the Trainer passed the number of those items to the loss.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        on_optimizer: Callable[[Any, Any], None],
        on_gradients: Callable[[], None],
        extra_logs: Callable[[], Mapping[str, float]],
        on_saved: Callable[[Path], None] = lambda _: None,
    ) -> None:
        """Wrap the Trainer's methods.

        Args:
            trainer: A `transformers.Trainer` or a subclass.
            on_optimizer: Called with a new optimizer and the model, before a checkpoint is loaded into the optimizer.
            on_gradients: Called once per step with gradients complete: accumulated, reduced, unscaled, not clipped.
            extra_logs: Called when the loss is logged; returns more to log.
            on_saved: Called with the folder when the model has been saved outside of a checkpoint.

        Raises:
            SquisherError: The object is no Trainer.
        """
        expected = ("create_optimizer", "compute_loss", "log", "accelerator", "add_callback")
        missing = [name for name in expected if not hasattr(trainer, name)]
        if missing:
            raise SquisherError(
                f"attach expects a transformers.Trainer, but {type(trainer).__name__} has no {', '.join(missing)}."
            )
        self.trainer = trainer
        self.pending: tuple[int, int | None] | None = None
        self.checkpoint: Path | None = None
        self.divides: bool | None = None
        self.counts_items = False
        self._on_optimizer, self._on_gradients, self._extra_logs = on_optimizer, on_gradients, extra_logs
        self._on_saved = on_saved
        self._accelerator: Any = None
        self._seen = False
        self._shifted = False
        for name in ("create_optimizer", "get_batch_samples", "compute_loss", "log", "save_model"):
            if hasattr(trainer, name):
                _wrap(trainer, name, getattr(self, f"_{name}"))

    def begin(self) -> None:
        """Reset everything for a new run."""
        self.pending, self.divides, self.counts_items, self._seen = None, None, False, False
        self._shifted = _shifts_labels(self.trainer)
        if self._accelerator is not self.trainer.accelerator:  # a search over hyperparameters makes a new one
            self._accelerator = self.trainer.accelerator
            _wrap(self._accelerator, "unscale_gradients", self._unscale_gradients)

    def gradients_were_seen(self) -> bool:
        """Return, once before every step, whether `on_gradients` was called before clipping; call it if it was not called.

        Without clipping, some versions of the Trainer do not compute the norm; then this is the time to call it.
        """
        in_time = self._seen or not clips(self.trainer.args)
        if not self._seen:
            self._accelerator.unscale_gradients()
        self._seen = False
        return in_time

    @property
    def loss_is_known(self) -> bool:
        """Whether the loss is that of the models of transformers, and not a user's own."""
        trainer = self.trainer
        module = getattr(type(trainer).compute_loss, "__module__", "")
        own = getattr(trainer, "compute_loss_func", None) is not None
        return module in _PLAIN_LOSSES and not own and getattr(trainer.args, "loss_type", "nll") == "nll"

    @property
    def factors(self) -> tuple[int, int]:
        """Micro-batches and processes over which a loss that gets the number of items must average, not the Trainer."""
        args = self.trainer.args
        divided = getattr(self.trainer, "loss_is_scaled_for_ga", None) is False
        averaged = getattr(args, "average_tokens_across_devices", False)
        return 1 if divided else args.gradient_accumulation_steps, args.world_size if averaged else 1

    # -- the wrappers --------------------------------------------------------------------------------------------------

    def _create_optimizer(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        optimizer = original(*args, **kwargs)
        self._on_optimizer(self.trainer.optimizer if optimizer is None else optimizer, self.trainer.model)
        return optimizer

    def _get_batch_samples(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        batches, items = original(*args, **kwargs)
        self.counts_items = items is not None
        # The tokens that the Trainer divides by: transformers 4 includes the first of a row, which has no loss.
        shifted = self._shifted and (items is None or hasattr(self.trainer, "_loss_shifts_labels"))
        examples, tokens = [examples_in(b) for b in batches], [tokens_in(b, shifted) for b in batches]
        self.pending = over_processes(examples, tokens, self.trainer.args.device)
        return batches, items

    def _compute_loss(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        items = kwargs.get("num_items_in_batch")
        compiled = getattr(self.trainer.args, "torch_compile", False)
        if self.divides is not None or not isinstance(items, Tensor) or compiled or not self.trainer.model.training:
            return original(*args, **kwargs)
        watched = items.as_subclass(_Watched)
        watched.used = [False]
        out = original(*args, **{**kwargs, "num_items_in_batch": watched})
        self.divides = watched.used[0]
        return out

    def _log(self, original: Callable[..., Any], logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        return original({**logs, **self._extra_logs()} if "loss" in logs else logs, *args, **kwargs)

    def _save_model(
        self,
        original: Callable[..., Any],
        output_dir: Any = None,
        _internal_call: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        out = original(output_dir, _internal_call, *args, **kwargs)
        folder = Path(output_dir or self.trainer.args.output_dir)
        if _internal_call and output_dir is not None:
            self.checkpoint = folder  # there is an event for it
        else:
            self._on_saved(folder)
        return out

    def _unscale_gradients(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Accelerate calls this right before it clips, with and without a loss scaler.
        out = original(*args, **kwargs)
        if not self._seen:
            self._seen = True
            self._on_gradients()
        return out


class _Watched(Tensor):
    """A number that records whether a computation used it; values and results are unchanged."""

    used: list[bool]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mine = next(a for a in tree_leaves((args, kwargs)) if isinstance(a, _Watched))
        args, kwargs = tree_map_only(_Watched, lambda a: a.as_subclass(Tensor), (args, kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _MOVES and isinstance(out, Tensor):
            out = out.as_subclass(_Watched)
            out.used = mine.used
        elif name not in _LOOKS:
            mine.used[0] = True
        return out


_MOVES = ("to", "cuda", "cpu", "clone", "detach", "contiguous", "unsqueeze", "expand", "view", "reshape")
_LOOKS = (
    "__get__", "dim", "size", "numel", "get_device", "is_floating_point", "record_stream", "__repr__", "__format__",
)  # fmt: skip


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(functools.partial(wrapper, original)))


def _shifts_labels(trainer: Any) -> bool:
    """Return whether the model predicts each token from the tokens before it."""
    known = getattr(trainer, "_loss_shifts_labels", None)
    if known is not None:
        return bool(known)
    model = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
    name = type(model).__name__
    return name.endswith(("ForCausalLM", "LMHeadModel")) and not getattr(model.config, "is_encoder_decoder", False)


def clips(args: Any) -> bool:
    """Return whether a Trainer with these `TrainingArguments` clips gradients: not for 0, None and negative numbers."""
    return args.max_grad_norm is not None and args.max_grad_norm > 0
