"""A running optimizer, or a Tracker, and its model: names by identity."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ..errors import NamingError, NoAccumulatorError, SquisherError, SquisherWarning
from ..importance import Absence, Importance, Level, Naming, Reason, RunFacts
from ..importance.weights import HASHED_BYTES, content_of
from ..names import LiveParameter, live_parameters
from .assembly import assemble
from .optimizers.encoded import check_precision, decoded, unblocked
from .states import Entry, Named, OptimizerState, check_usable

__all__ = ["Tracked", "from_optimizers", "from_tracker", "unwrapped"]


@runtime_checkable
class Tracked(Protocol):
    """What is needed of a tracker; `squisher.Tracker` has it, and so may another class.

    One that averages the squares of single examples also has `estimator`, `unit` and `examples`, as a Fisher's provenance has them.
    """

    model: nn.Module
    beta2: float
    after_clipping: bool

    def items(self) -> Iterable[tuple[str, nn.Parameter, Tensor, int]]:
        """Return name, parameter, uncorrected average and steps of what was observed."""

    def absent(self) -> Mapping[str, Absence]:
        """Return the parameters that were never observed, each with the reason."""


def from_optimizers(
    optimizers: Sequence[torch.optim.Optimizer],
    model: nn.Module,
    facts: RunFacts,
    *,
    bias_correction: bool,
    allow_coarse: bool = False,
    hash_weights: bool = False,
) -> Importance:
    """Return the accumulators of one or several optimizers of a model, copied.

    Args:
        optimizers: Already unwrapped.
        model: The module whose parameters they train.
        facts: What the caller knows about the run.
        bias_correction: False leaves the accumulators as they are stored.
        allow_coarse: Accept states of four bits.
        hash_weights: Record a hash of each weight in the optimizers, not only of the smallest; they are copied to the CPU for it.

    Raises:
        NamingError: The optimizer's parameters are not the model's.
        NoAccumulatorError: Nothing usable is in the state.
    """
    parameters = live_parameters(model)
    by_identity = {id(p.parameter): p for p in parameters}
    named: list[Named] = []
    strangers = 0
    for optimizer in optimizers:
        entries: list[Entry] = []
        for number, group in enumerate(optimizer.param_groups):
            settings = {key: value for key, value in group.items() if key != "params"}
            for parameter in group["params"]:
                known_as = by_identity.get(id(parameter))
                if known_as is None:
                    strangers += 1
                    continue
                entry = Entry(optimizer.state.get(parameter, {}), settings, number, known_as.name)
                entries.append(unblocked(entry, parameter.shape))
        class_name = type(optimizer).__name__
        entries = decoded(entries, class_name)
        check_precision(entries, allow_coarse)
        if not any(entry.state for entry in entries) and entries and len(optimizers) == 1:
            check_usable(OptimizerState(entries, class_name))
        named += [(entry.name or "", entry, class_name) for entry in entries]
    _refuse_strangers(strangers, len(named))
    names = [name for name, _, _ in named]
    if len(set(names)) < len(names):
        raise NamingError(f"{next(n for n in names if names.count(n) > 1)!r} is in two optimizers: extract each alone.")
    return _assembled(named, parameters, facts, {}, bias_correction=bias_correction, hash_weights=hash_weights)


def from_tracker(
    tracker: Tracked, model: nn.Module | None, facts: RunFacts, *, bias_correction: bool, hash_weights: bool = False
) -> Importance:
    """Return what a Tracker has gathered, copied.

    Args:
        tracker: It has observed at least one step.
        model: By default the model of the tracker.
        facts: What the caller knows about the run.
        bias_correction: False leaves the average as it is.
        hash_weights: Record a hash of each weight that was observed, not only of the smallest; they are copied to the CPU for it.

    Raises:
        NoAccumulatorError: It has observed nothing yet.
    """
    parameters = live_parameters(tracker.model if model is None else model)
    by_identity = {id(p.parameter): p.name for p in parameters}
    group = {"betas": (0.0, tracker.beta2), "weight_decay": 0.0}
    named: list[Named] = []
    strangers = 0
    for _, parameter, value, step in tracker.items():
        name = by_identity.get(id(parameter))
        if name is None:
            strangers += 1
        else:
            named.append((name, Entry({"exp_avg_sq": value, "step": step}, group), "Tracker"))
    _refuse_strangers(strangers, len(named))
    if not named:
        left = next(((n, a.note) for n, a in tracker.absent().items() if a.reason is Reason.NO_RULE), None)
        if left is not None:
            raise NoAccumulatorError(f"The tracker could observe no parameter; {left[0]!r}, for example: {left[1]}.")
        raise NoAccumulatorError(
            "The tracker has observed no step yet: call tracker.observe() before every optimizer step (with per='example', make the "
            "forward and backward passes inside `with tracker.step():`)."
        )
    facts = replace(facts, after_clipping=tracker.after_clipping)
    estimator = getattr(tracker, "estimator", None)
    if estimator is not None and not bias_correction:
        raise SquisherError("An average of squares per example is always corrected: use bias_correction=True.")
    found = _assembled(
        named, parameters, facts, tracker.absent(), bias_correction=bias_correction, hash_weights=hash_weights
    )
    if estimator is None:
        return found
    unit, examples = getattr(tracker, "unit", None), getattr(tracker, "examples", None)
    return found.with_provenance(kind="fisher", estimator=estimator, unit=unit, examples=examples)


def unwrapped(source: Any) -> torch.optim.Optimizer | None:
    """Return the torch optimizer inside the wrappers of Accelerate, Lightning and others; None if there is none."""
    for _ in range(5):
        inner = getattr(source, "optimizer", None)
        if isinstance(source, torch.optim.Optimizer) and not isinstance(inner, torch.optim.Optimizer):
            return source
        source = inner
    return None


def _assembled(
    named: Sequence[Named],
    parameters: Sequence[LiveParameter],
    facts: RunFacts,
    reasons: Mapping[str, Absence],
    *,
    bias_correction: bool,
    hash_weights: bool,
) -> Importance:
    """Return the importance of the named states of a live model; `reasons` say, by live name, why others have none."""
    names = {name for name, _, _ in named}
    untrained = Absence(Reason.NOT_IN_OPTIMIZER, "not in the optimizer")
    frozen = Absence(Reason.FROZEN, "frozen (requires_grad is False)")
    others = {p.name: p for p in parameters if p.name not in names}
    why = {name: untrained if p.parameter.requires_grad else frozen for name, p in others.items()}
    facts = replace(
        facts,
        naming=Naming(Level.RECORDED),
        absent={name: reasons.get(p.live_name) or why[name] for name, p in others.items()},
        tied={alias: p.name for p in parameters for alias in p.aliases},
        live_names={p.name: p.live_name for p in parameters},
    )
    # Only weights in the optimizer are hashed: the frozen base of an adapter would take longer than all the rest.
    weights = {p.name: p.parameter for p in parameters if p.name in names and not hasattr(p.parameter, "full_tensor")}
    content = content_of(weights, weights, None if hash_weights else HASHED_BYTES)
    shapes = {p.name: tuple(p.parameter.shape) for p in parameters}
    return assemble(named, facts, shapes, content, bias_correction=bias_correction, lazy=False)


def _refuse_strangers(strangers: int, matched: int) -> None:
    if strangers and not matched:
        raise NamingError(
            f"None of the optimizer's {strangers} parameters is a parameter of this model. Was the model copied, moved with "
            "a new set of parameters, or wrapped with master weights after the optimizer was made? Pass the very model."
        )
    if strangers:
        warnings.warn(
            f"{strangers} of the optimizer's {strangers + matched} parameters are not parameters of this model; they are left out.",
            SquisherWarning,
            stacklevel=4,
        )
