"""What the callbacks of all trainers share: they record importances during training, under the names of the weight file.

`Recorder` records, `Consolidator` adds EWC, `Restrainer` trains under a mask, and `BatchCounts` counts the examples and tokens of
the steps. `lightning` and `transformers` connect them to the events of their trainers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..consolidate import EWC
from ..errors import SquisherError, check_choice
from ..importance import FILE_NAME, Importance, Pollution, RunFacts, Spoiler, structure_hash
from ..importance.facts import LOSS_REDUCTIONS
from ..mask import train_only
from ..mask.training import frozen_by_masks
from ..names import live_parameters
from ..ranks import agree, sum_in_place, world
from ..recycle.live import from_optimizers, from_tracker, unwrapped
from ..recycle.naming.candidates import candidates_of_module
from ..recycle.states import Candidate, Entry, FusedSlice, OptimizerState, check_usable
from ..storage.codecs import CODECS
from ..tracker import Tracker

__all__ = [
    "BatchCounts", "Consolidator", "Events", "Recorder", "Restrainer", "examples_in", "inner_optimizers", "over_processes", "tokens_in",
    "under_file_names",
]  # fmt: skip


PENALTY = Pollution(Spoiler.PENALTY, note="The gradient of an EWC penalty was squared with the data's.")
"""The pollution of an optimizer's average if EWC adds its gradient."""


class Events:
    """Ignore every event of a trainer that a class does not define.

    Trainers call events by name, so that neither a base class nor an import of the framework is needed.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_") or name in ("setup", "teardown"):
            return lambda *_, **__: None
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class Recorder(Events):
    """The part of a recording callback that does not depend on the trainer.

    A trainer's callback calls `_begin` when training begins, `_observe` when gradients are complete and not yet clipped, and
    `_check_once` after a step; it defines `_facts` and `_pollution`.

    Args:
        track: Whether to keep an average of the gradient beside the optimizer, instead of recording the optimizer's.
        loss_reduction: `mean`, `sum` or `token_mean`; None if it is another one or not known yet.
        codec: How files keep the values: `exact`, `log8` or `rank1`.

    Attributes:
        tracker: The tracker that keeps the average, or None.
        counts: Examples, tokens and steps so far.
    """

    _first = "train"
    """The trainer's method to call before there is an importance, for messages."""

    def __init__(self, *, track: bool, loss_reduction: str | None, codec: str = "exact") -> None:
        check_choice("codec", codec, CODECS)
        self.codec = codec
        if loss_reduction is not None:
            check_choice("loss_reduction", loss_reduction, LOSS_REDUCTIONS)
        self.track, self.loss_reduction = track, loss_reduction
        self.tracker: Tracker | None = None
        self.counts = BatchCounts()
        self._model: nn.Module | None = None
        self._optimizers: list[torch.optim.Optimizer] = []
        self._candidates: Sequence[Candidate] = ()
        self._checked, self._frozen = False, 0

    def importance(self) -> Importance:
        """Return the importance so far, under the names of the model's weight file.

        Raises:
            SquisherError: Training has not begun.
            NoAccumulatorError: No step has been taken, or the optimizer keeps no squared gradient.
        """
        return self._recorded(self._candidates)

    def live_importance(self) -> Importance:
        """Return the importance so far under the names of the running model, for `EWC.consolidate` and `mask.train_only`."""
        return self._recorded(None)

    def _begin(self, model: nn.Module, optimizers: Any, counted: Any) -> None:
        """Set the model and its optimizers, and continue a checkpoint's counts."""
        self._model, self._optimizers = model, inner_optimizers(optimizers)
        self._candidates, self._checked = candidates_of_module(model, frozen_too=True).parameters, False
        self.counts = BatchCounts.from_state(counted)

    def _new_tracker(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Tracker:
        """Make a tracker with the decay of the optimizer's average, or 0.999 without one."""
        betas = optimizer.param_groups[0].get("betas")
        beta2 = betas[1] if isinstance(betas, (list, tuple)) and len(betas) > 1 else None
        beta2 = float(beta2) if isinstance(beta2, (int, float)) and 0 < beta2 < 1 else 0.999
        self.tracker = Tracker(model, optimizer, beta2=beta2)
        return self.tracker

    def _observe(self) -> None:
        if self.tracker is not None:
            self.tracker.observe()

    def _check_once(self) -> None:
        """Refuse an optimizer that keeps no squared gradient right after its first step; look for a mask."""
        if self._checked:
            return
        self._frozen = 0 if self._model is None else frozen_by_masks(self._model)
        self._checked = self.tracker is not None
        if self._checked:
            return
        for optimizer in self._optimizers:
            entries = [
                Entry(optimizer.state.get(p, {}), {key: value for key, value in group.items() if key != "params"})
                for group in optimizer.param_groups
                for p in group["params"]
            ]
            check_usable(OptimizerState(entries, type(optimizer).__name__))
        self._checked = True

    def _facts(self) -> tuple[RunFacts, float]:
        """Return the facts of the run, and the factor by which gradients were larger than the loss reduction implies."""
        raise NotImplementedError

    def _pollution(self) -> list[Pollution]:
        """Return what is squared beside the gradient of the data."""
        raise NotImplementedError

    def _recorded(self, candidates: Sequence[Candidate] | None) -> Importance:
        """Return a copy of the tracker's or optimizers' average; without candidates under the names of the running model."""
        if self._model is None:
            raise SquisherError(f"There is no importance yet: call trainer.{self._first} first.")
        facts, factor = self._facts()
        if self._frozen:
            note = (
                f"A mask kept {self._frozen:,} entries still: their gradients were set to 0 before they were squared."
            )
            masked = Pollution(Spoiler.MASK, {"entries": self._frozen}, note)
            facts = replace(facts, pollution=(*facts.pollution, masked))
        if self.tracker is not None:
            found = from_tracker(self.tracker, self._model, facts, bias_correction=True, hash_weights=True)
        else:
            found = from_optimizers(self._optimizers, self._model, facts, bias_correction=True, hash_weights=True)
        if factor != 1.0:
            found = found / factor**2
        return found if candidates is None else _as_stored(found, self._model, candidates)

    def _save(self, path: Path, here: bool) -> None:
        """Write to a file or folder in one process; if that fails, raise in all processes."""
        file = path if path.suffix == ".safetensors" else path / FILE_NAME
        error: BaseException | None = None
        if here:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                self.importance().save(file, codec=self.codec)
            except Exception as problem:
                error = problem
        agree(error)


class Consolidator(Recorder):
    """The part of an EWC callback that does not depend on the trainer: the tracker observes, then the penalty acts.

    Mix it in before the trainer's recording callback; call `_follow` when training begins and `_let_go` when it ends.

    Args:
        ewc: The EWC with earlier tasks consolidated.
        *args: Arguments of the recording callback.
        pull: `"plain"` or `"adam"`: use `ewc.pull_` in this metric instead of the penalty's gradient.
        track: Whether to keep a tracker; by default if the penalty's gradient is added.
        **more: Arguments of the recording callback.
    """

    def __init__(self, ewc: EWC, *args: Any, pull: str | None = None, track: bool | None = None, **more: Any) -> None:
        if not isinstance(ewc, EWC):
            raise SquisherError(f"{type(self).__name__} expects a squisher.EWC, but got a {type(ewc).__name__}.")
        super().__init__(*args, track=pull is None if track is None else track, **more)
        self.ewc, self.pull = ewc, pull
        self._handle: Any = None

    def _follow(self, model: nn.Module | None, make: str) -> None:
        """Check that the EWC protects this model, and pull after each step if asked to."""
        if model is None or not self.ewc.is_of(model):
            raise SquisherError(f"The EWC protects parameters of another model than the one that is trained. {make}")
        self._let_go()
        if self.pull is not None:
            self._handle = self.ewc.pull_after_steps(self._optimizers[0], self.pull)

    def _let_go(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _observe(self) -> None:
        super()._observe()
        if self.pull is None:
            self.ewc.add_gradient_()

    def _penalty(self) -> float:
        with torch.no_grad():
            return float(self.ewc.penalty())

    def _pollution(self) -> list[Pollution]:
        in_gradient = self.tracker is None and self.pull is None
        return [*([PENALTY] if in_gradient else []), *super()._pollution()]


class Restrainer(Events):
    """The part of a mask callback that does not depend on the trainer.

    Args:
        mask: As `squisher.mask.top_k` makes it: True where training may move an entry.
    """

    def __init__(self, mask: Mapping[str, Tensor]) -> None:
        self.mask = mask
        self._handle: Any = None

    def _restrain(self, model: nn.Module, optimizer: Any) -> None:
        self.remove()
        self._handle = train_only(model, optimizer, self.mask)

    def remove(self) -> None:
        """Remove the mask's hooks now."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def inner_optimizers(optimizers: Any) -> list[torch.optim.Optimizer]:
    """Return the torch optimizers inside a trainer's wrappers.

    Raises:
        SquisherError: One of them is not a torch optimizer.
    """
    several = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    inner = [unwrapped(one) for one in several]
    if not inner or any(one is None for one in inner):
        raise SquisherError(f"Expected torch optimizers, but the trainer has {several!r}.")
    return [one for one in inner if one is not None]


def under_file_names(found: Importance, model: nn.Module) -> Importance:
    """Return an importance of a live model under the names of the model's weight file.

    Raises:
        NamingError: The library that saves the model does not give them.
    """
    return _as_stored(found, model, candidates_of_module(model, frozen_too=True).parameters)


def _as_stored(found: Importance, model: nn.Module, candidates: Sequence[Candidate]) -> Importance:
    """Return an importance under the names of the weight file, cut into the slices that the file has."""
    names = {p.live_name: p.name for p in live_parameters(model)}
    slices: dict[str, list[FusedSlice]] = {}
    live: dict[str, str] = {}
    for c in candidates:
        ours = names[str(c.live_name)]
        slices[ours] = list(c.slices) or [FusedSlice(c.name, 0, c.shape)]
        live.update({fused.name: str(c.live_name) for fused in slices[ours]})
    if all([fused.name for fused in cut] == [ours] for ours, cut in slices.items()):
        return found
    tensors = {
        fused.name: found[ours].reshape(-1)[fused.start : fused.start + math.prod(fused.shape)].view(fused.shape)
        for ours in found
        for fused in slices[ours]
    }
    p = found.provenance
    shapes = {fused.name: fused.shape for cut in slices.values() for fused in cut}
    changes: dict[str, Any] = {
        "absent": _renamed(p.absent, slices),
        "live_names": {name: live[name] for name in tensors if live[name] != name},
        "tied": {alias: slices[name][0].name for alias, name in p.tied.items() if len(slices[name]) == 1},
        "model": {"structure": structure_hash(shapes)},
    }
    content = (p.model or {}).get("content", {})
    changes["model"]["content"] = {slices[n][0].name: h for n, h in content.items() if len(slices[n]) == 1}
    steps, optimizer = p.steps or {}, p.optimizer or {}
    if "per_parameter" in steps:
        changes["steps"] = {**steps, "per_parameter": _renamed(steps["per_parameter"], slices)}
    changes["pollution"] = [
        replace(one, parameters=tuple(_renamed(dict.fromkeys(one.parameters), slices))) for one in p.pollution
    ]
    groups = [
        {**group, "parameters": list(_renamed(dict.fromkeys(group["parameters"]), slices))}
        for group in optimizer.get("groups", [])
    ]
    if groups:
        changes["optimizer"] = {**optimizer, "groups": groups}
    values = {f.name: getattr(p, f.name) for f in fields(p) if f.name not in ("kind", "sum", "sum_of_squares")}
    return Importance(tensors, p.kind, **{**values, **changes})


def _renamed(values: Mapping[str, Any], slices: Mapping[str, Sequence[FusedSlice]]) -> dict[str, Any]:
    return {fused.name: value for name, value in values.items() for fused in slices[name]}


IGNORED = -100
"""The label that carries no loss, in torch and everything built on it."""


@dataclass
class BatchCounts:
    """Sums over optimizer steps and over all processes.

    Attributes:
        steps: Optimizer steps.
        examples: Examples in them.
        tokens: Tokens with a loss; None if a batch had no labels.
        short_steps: Steps with fewer examples than a full one: the last accumulation of an epoch.
        largest: Examples in the largest step.
    """

    steps: int = 0
    examples: int = 0
    tokens: int | None = 0
    short_steps: int = 0
    largest: int = 0

    def add(self, examples: int, tokens: int | None, full: int | None) -> None:
        """Count one optimizer step.

        Args:
            examples: Examples in all its micro-batches, on all processes.
            tokens: Tokens with a loss, or None.
            full: Examples of a full step; None for those of the largest step so far.
        """
        self.largest = max(self.largest, examples)
        self.steps += 1
        self.examples += examples
        self.tokens = None if tokens is None or self.tokens is None else self.tokens + tokens
        self.short_steps += examples < (self.largest if full is None else full)

    @property
    def mean_tokens(self) -> float | None:
        """Tokens with a loss per step; None if they are not known."""
        return self.tokens / self.steps if self.tokens and self.steps else None

    def state(self) -> dict[str, Any]:
        """Return plain types, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Any) -> BatchCounts:
        """Return counts from what `state` returned; fresh counts from anything else."""
        fresh = cls()
        if not isinstance(state, Mapping) or set(state) != set(fresh.state()):
            return fresh
        return cls(**state)


def examples_in(batch: Any) -> int | None:
    """Return the number of examples in a batch: the length of `labels`, `input_ids` or its first tensor; None if unknown."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else None
    if isinstance(batch, Mapping):
        named = [batch[name] for name in ("labels", "input_ids") if name in batch]
        parts: Sequence[Any] = [*named, *batch.values()]
    else:
        parts = batch if isinstance(batch, (list, tuple)) else ()
    sizes = (examples_in(part) for part in parts)
    return next((size for size in sizes if size is not None), None)


def tokens_in(batch: Any, shifted: bool) -> Tensor | None:
    """Return how many labels of a batch have a loss, as a tensor on their device; None if it has no labels.

    Args:
        batch: A mapping with `shift_labels` or `labels`.
        shifted: Whether the model predicts each token from those before it, so that the first of `labels` in a row has no loss.
    """
    if not isinstance(batch, Mapping):
        return None
    labels = batch.get("shift_labels")
    if labels is None:
        labels = batch.get("labels")
        if isinstance(labels, Tensor) and shifted and labels.dim() > 1:
            labels = labels[..., 1:]
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return None
    return torch.count_nonzero(labels != IGNORED)


def over_processes(
    examples: Sequence[int | None], tokens: Sequence[Tensor | int | None], device: Any = "cpu"
) -> tuple[int, int | None] | None:
    """Return the examples and tokens of a step, summed over its micro-batches and all processes.

    Args:
        examples: Examples of every micro-batch of this process; None for unknown.
        tokens: Tokens with a loss of every micro-batch of this process; None for unknown.
        device: The device on which processes exchange numbers.

    Returns:
        Both sums, the second None if it has an unknown part; None if the first has an unknown part.
    """
    parts = [
        (sum(int(n) for n in counts if n is not None), sum(n is None for n in counts)) for counts in (examples, tokens)
    ]
    sums = torch.tensor(parts, dtype=torch.int64)
    if world() > 1:
        sums = sums.to(device)
        sum_in_place([sums])
    (total, unknown), (with_loss, without) = sums.tolist()
    return None if unknown or not total else (total, None if without else with_loss)
