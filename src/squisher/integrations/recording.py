"""What the callbacks of all trainers share: the importance of a running training, under the names of the weight file.

How much data went into the steps (examples, tokens that carry a loss, steps that had less) is counted here too.
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
from ..storage.codecs import check_codec
from ..tracker import Tracker

__all__ = [
    "BatchCounts", "Consolidator", "Events", "Recorder", "Restrainer", "examples_in", "inner_optimizers", "over_processes", "tokens_in",
    "under_file_names",
]  # fmt: skip


PENALTY = Pollution(Spoiler.PENALTY, note="The gradient of an EWC penalty was squared with the data's.")
"""What an optimizer's average contains where EWC adds its gradient."""


class Events:
    """Answer every event of a trainer; those that a class does not define do nothing.

    Trainers call by name, so that neither a base class nor an import of the framework is needed.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_") or name in ("setup", "teardown"):
            return _nothing
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _nothing(*_: Any, **__: Any) -> None:
    return None


class Recorder(Events):
    """The part of a recording callback that does not depend on the trainer.

    A trainer's callback says when training begins (`_begin`), when gradients are complete and not yet clipped (`_observe`) and when
    a step has been taken (`_check_once`), and what it knows about the run (`_facts`).

    Args:
        track: Keep an average of the gradient beside the optimizer, instead of recording what the optimizer has.
        loss_reduction: `mean`, `sum` or `token_mean`; None if the loss is reduced in another way, or to find it out.
        codec: How files keep the values: `exact`, `log8` or `rank1`.

    Attributes:
        tracker: The tracker that keeps the average, or None.
        counts: Examples, tokens and steps up to now.
    """

    _first = "train"
    """What to call before there is an importance."""

    def __init__(self, *, track: bool, loss_reduction: str | None, codec: str = "exact") -> None:
        self.codec = check_codec(codec)
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
        """Return what has been accumulated up to now, under the names that the model's weight file has.

        Raises:
            SquisherError: Training has not begun.
            NoAccumulatorError: No step has been taken, or the optimizer keeps no squared gradient.
        """
        return self._recorded(self._candidates)

    def live_importance(self) -> Importance:
        """Return the same under the names of the running model, which is what `EWC.consolidate` and `mask.train_only` know."""
        return self._recorded(None)

    def _begin(self, model: nn.Module, optimizers: Any, counted: Any) -> None:
        """Take the model and its optimizers, and go on counting where a checkpoint stopped."""
        self._model, self._optimizers = model, inner_optimizers(optimizers)
        self._candidates, self._checked = candidates_of_module(model, frozen_too=True).parameters, False
        self.counts = BatchCounts.from_state(counted)

    def _new_tracker(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Tracker:
        """Make a tracker with the decay of the optimizer's average; 0.999 if it has none."""
        betas = optimizer.param_groups[0].get("betas")
        beta2 = betas[1] if isinstance(betas, (list, tuple)) and len(betas) > 1 else None
        beta2 = float(beta2) if isinstance(beta2, (int, float)) and 0 < beta2 < 1 else 0.999
        self.tracker = Tracker(model, optimizer, beta2=beta2)
        return self.tracker

    def _observe(self) -> None:
        if self.tracker is not None:
            self.tracker.observe()

    def _check_once(self) -> None:
        """Refuse an optimizer that keeps no squared gradient, after its first step and not at the first checkpoint; look for a mask."""
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
        """Return what is known about the run, and how many times larger gradients were than its loss reduction says."""
        raise NotImplementedError

    def _pollution(self) -> list[Pollution]:
        """Return what is squared besides the gradient of the data."""
        raise NotImplementedError

    def _recorded(self, candidates: Sequence[Candidate] | None) -> Importance:
        """Return what the tracker or the optimizers hold now, copied; without candidates under the names of the running model."""
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
        """Write to a file or folder in one process; if it fails there, all processes stop."""
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
    """The part of a callback with an EWC that does not depend on the trainer: the tracker observes, then the penalty acts.

    Mix it in before the trainer's recording callback; call `_follow` when training begins and `_let_go` when it ends.

    Args:
        ewc: With the tasks before consolidated.
        pull: `"plain"` or `"adam"`: use `ewc.pull_` in this metric instead of the penalty's gradient.
        track: Whether to keep a tracker; by default where the penalty's gradient is added.
        **more: Of the recording callback.
    """

    def __init__(self, ewc: EWC, *args: Any, pull: str | None = None, track: bool | None = None, **more: Any) -> None:
        if not isinstance(ewc, EWC):
            raise SquisherError(f"{type(self).__name__} expects a squisher.EWC, but got a {type(ewc).__name__}.")
        super().__init__(*args, track=pull is None if track is None else track, **more)
        self.ewc, self.pull = ewc, pull
        self._handle: Any = None

    def _follow(self, model: nn.Module | None, make: str) -> None:
        """Check that this is the model whose parameters are protected, and pull after each step if asked to."""
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
    """The part of a callback that trains under a mask that does not depend on the trainer.

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
        """Take the mask away now."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def inner_optimizers(optimizers: Any) -> list[torch.optim.Optimizer]:
    """Return the torch optimizers inside a trainer's wrappers.

    Raises:
        SquisherError: One of them is no torch optimizer.
    """
    several = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    inner = [unwrapped(one) for one in several]
    if not inner or any(one is None for one in inner):
        raise SquisherError(f"Expected torch optimizers, but the trainer has {several!r}.")
    return [one for one in inner if one is not None]


def under_file_names(found: Importance, model: nn.Module) -> Importance:
    """Return an importance of a live model under the names that the model's weight file has.

    Raises:
        NamingError: The library that saves the model does not say.
    """
    return _as_stored(found, model, candidates_of_module(model, frozen_too=True).parameters)


def _as_stored(found: Importance, model: nn.Module, candidates: Sequence[Candidate]) -> Importance:
    """Return the same importance under the names of the weight file, in the slices that the file has."""
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
        steps: Optimizer steps that were counted.
        examples: Examples in them.
        tokens: Tokens that carried a loss; None if a batch did not say.
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
            examples: In all its micro-batches, on all processes.
            tokens: Tokens that carried a loss, if that is known.
            full: Examples of a full step; if that is not known, of the largest one up to now.
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
        """Return what `state` returned; a fresh count if it is something else."""
        fresh = cls()
        if not isinstance(state, Mapping) or set(state) != set(fresh.state()):
            return fresh
        return cls(**state)


def examples_in(batch: Any) -> int | None:
    """Count the examples in a batch: the length of its first tensor; of `labels` or `input_ids` where it has names."""
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
    """Return how many labels of a batch carry a loss, as a tensor where the labels are; None if it has no labels.

    Args:
        batch: A mapping; `shift_labels` count as they are, `labels` otherwise.
        shifted: The model predicts each token from those before it, so that the first label of a row is never used.
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
    """Return the examples and tokens of a step, from its micro-batches here and on all other processes.

    Args:
        examples: Of every micro-batch of this process; None where they are not known.
        tokens: The same for tokens with a loss.
        device: Where processes exchange numbers.

    Returns:
        Both sums, the second None if one of its parts is; None if the first has such a part.
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
