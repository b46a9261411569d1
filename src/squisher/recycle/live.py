"""A running optimizer, or a Tracker, and its model: names by identity."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import NamingError, NoAccumulatorError, SquisherWarning
from ..importance import Importance
from ..storage.tensors import LiveParameter, live_parameters
from .assembly import assemble
from .optimizers.quantized import check_precision, decoded
from .states import Entry, Facts
from .tracker import Tracker

__all__ = ["from_optimizers", "from_tracker", "unwrapped"]


def from_optimizers(
    optimizers: Sequence[torch.optim.Optimizer],
    model: nn.Module,
    *,
    bias_correction: bool,
    allow_coarse: bool = False,
    **known: Any,
) -> Importance:
    """The accumulators of one or several optimizers of a model, copied.

    Args:
        optimizers: Already unwrapped.
        model: The module whose parameters they train.
        bias_correction: False leaves the accumulators as they are stored.
        allow_coarse: Accept states of four bits.
        **known: Fields of `Facts` that the caller knows.

    Raises:
        NamingError: The optimizer's parameters are not the model's.
        NoAccumulatorError: Nothing usable is in the state.
    """
    parameters = live_parameters(model)
    by_identity = {id(p.parameter): p for p in parameters}
    named: list[tuple[str, Entry, str | None]] = []
    strangers = 0
    for optimizer in optimizers:
        own: list[Entry] = []
        for number, group in enumerate(optimizer.param_groups):
            settings = {key: value for key, value in group.items() if key != "params"}
            for parameter in group["params"]:
                known_as = by_identity.get(id(parameter))
                if known_as is None:
                    strangers += 1
                    continue
                own.append(Entry(optimizer.state.get(parameter, {}), settings, number, known_as.name))
        class_name = type(optimizer).__name__
        own = decoded(own, class_name)
        check_precision(own, allow_coarse)
        named += [(entry.name or "", entry, class_name) for entry in own]
    _refuse_strangers(strangers, len(named))
    names = [name for name, _, _ in named]
    if len(set(names)) < len(names):
        raise NamingError(
            f"{next(n for n in names if names.count(n) > 1)!r} is in two optimizers; extract them one by one."
        )
    facts = _facts(parameters, set(names), {}, **known)
    return assemble(named, facts, bias_correction=bias_correction, lazy=False)


def from_tracker(tracker: Tracker, model: nn.Module | None, *, bias_correction: bool, **known: Any) -> Importance:
    """What a Tracker has gathered, copied.

    Args:
        tracker: It has observed at least one step.
        model: By default the tracker's own.
        bias_correction: False leaves the average as it is.
        **known: Fields of `Facts` that the caller knows.

    Raises:
        NoAccumulatorError: It has observed nothing yet.
    """
    parameters = live_parameters(tracker.model if model is None else model)
    by_identity = {id(p.parameter): p.name for p in parameters}
    group = {"betas": (0.0, tracker.beta2), "weight_decay": 0.0}
    named: list[tuple[str, Entry, str | None]] = []
    strangers = 0
    for _, parameter, value, step in tracker.items():
        name = by_identity.get(id(parameter))
        if name is None:
            strangers += 1
        else:
            named.append((name, Entry({"exp_avg_sq": value, "step": step}, group), "Tracker"))
    _refuse_strangers(strangers, len(named))
    if not named:
        raise NoAccumulatorError(
            "The tracker has observed no step yet: call tracker.observe() before every optimizer step."
        )
    names = {name for name, _, _ in named}
    reasons = {p.name: reason for p in parameters if (reason := tracker.absent().get(p.live_name))}
    facts = _facts(parameters, names, reasons, after_clipping=tracker.after_clipping, **known)
    return assemble(named, facts, bias_correction=bias_correction, lazy=False)


def unwrapped(source: Any) -> torch.optim.Optimizer | None:
    """The torch optimizer inside the wrappers of Accelerate, Lightning and others; None if there is none."""
    for _ in range(5):
        if isinstance(source, torch.optim.Optimizer) and not isinstance(
            getattr(source, "optimizer", None), torch.optim.Optimizer
        ):
            return source
        inner = getattr(source, "optimizer", None)
        if inner is None:
            return None
        source = inner
    return None


def _facts(parameters: Sequence[LiveParameter], held: set[str], reasons: Mapping[str, str], **known: Any) -> Facts:
    absent = {p.name: reasons.get(p.name) or _why_absent(p.parameter) for p in parameters if p.name not in held}
    return Facts(
        naming="recorded",
        absent=absent,
        tied={alias: p.name for p in parameters for alias in p.aliases},
        live_names={p.name: p.live_name for p in parameters},
        shapes={p.name: tuple(p.parameter.shape) for p in parameters},
        # Of what is in the optimizer alone: hashing the frozen base of an adapter would take longer than all the rest.
        content={
            p.name: _content(p.parameter)
            for p in parameters
            if p.name in held and not hasattr(p.parameter, "full_tensor")
        },
        **known,
    )


def _why_absent(parameter: Tensor) -> str:
    return "not in the optimizer" if parameter.requires_grad else "frozen (requires_grad is False)"


def _content(parameter: Tensor) -> str:
    plain = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(plain.numpy().data).hexdigest()[:32]


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
