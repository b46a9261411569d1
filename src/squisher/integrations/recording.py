"""The importance that a running training holds, with everything that its trainer knows, under the names of the weight file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import SquisherError
from ..importance import Importance, Pollution, RunFacts, Spoiler, structure_hash
from ..ranks import agree
from ..recycle import Tracker
from ..recycle.live import from_optimizers, from_tracker, unwrapped
from ..recycle.naming.candidates import candidates_of_module
from ..recycle.states import Candidate, Entry, OptimizerState, Piece, check_usable
from ..storage.tensors import live_parameters

__all__ = [
    "PENALTY",
    "beta2_of",
    "check_accumulator",
    "inner_optimizers",
    "recorded",
    "stored_candidates",
    "under_file_names",
    "written_by_one",
]


PENALTY = Pollution(Spoiler.PENALTY, note="The gradient of an EWC penalty was squared with the data's.")
"""What an optimizer's own average has in it where EWC adds its gradient."""


def recorded(
    source: Tracker | Sequence[torch.optim.Optimizer],
    model: nn.Module,
    facts: RunFacts,
    candidates: Sequence[Candidate] | None = None,
    factor: float = 1.0,
) -> Importance:
    """What a tracker or the optimizers hold now, copied.

    Args:
        source: A tracker, or unwrapped optimizers.
        model: The live model.
        facts: What is known about the run.
        candidates: The model's parameters under the names of its weight file; None leaves the names of the running model.
        factor: By how much gradients were larger than those of the loss that the facts describe.

    Raises:
        NoAccumulatorError: Nothing usable has been accumulated.
        NamingError: The optimizers' parameters are not the model's.
    """
    if isinstance(source, Tracker):
        found = from_tracker(source, model, facts, bias_correction=True, hash_weights=True)
    else:
        found = from_optimizers(source, model, facts, bias_correction=True, hash_weights=True)
    if factor != 1.0:
        found = found / factor**2
    return found if candidates is None else _as_stored(found, model, candidates)


def inner_optimizers(optimizers: Any) -> list[torch.optim.Optimizer]:
    """The torch optimizers inside whatever a trainer holds.

    Raises:
        SquisherError: One of them is no torch optimizer.
    """
    several = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    inner = [unwrapped(one) for one in several]
    if not inner or any(one is None for one in inner):
        raise SquisherError(f"Expected torch optimizers, but the trainer has {several!r}.")
    return [one for one in inner if one is not None]


def check_accumulator(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuses optimizers that keep no squared gradient, after their first step and not at the first checkpoint.

    Raises:
        NoAccumulatorError: None of them keeps one.
    """
    for optimizer in optimizers:
        entries = [
            Entry(optimizer.state.get(p, {}), {key: value for key, value in group.items() if key != "params"})
            for group in optimizer.param_groups
            for p in group["params"]
        ]
        check_usable(OptimizerState(entries, type(optimizer).__name__))


def beta2_of(optimizer: torch.optim.Optimizer) -> float:
    """The decay of the optimizer's own average, so that a tracker's is the like of it; 0.999 if it has none."""
    betas = optimizer.param_groups[0].get("betas")
    beta2 = betas[1] if isinstance(betas, (list, tuple)) and len(betas) > 1 else None
    return float(beta2) if isinstance(beta2, (int, float)) and 0 < beta2 < 1 else 0.999


def stored_candidates(model: nn.Module) -> list[Candidate]:
    """Every parameter of a model under the name, or in the pieces, that its weight file will have.

    Raises:
        NamingError: The library that saves the model cannot tell.
    """
    return candidates_of_module(model, frozen_too=True).parameters


def under_file_names(found: Importance, model: nn.Module) -> Importance:
    """Return an importance of a live model under the names that the model's weight file has.

    Raises:
        NamingError: The library that saves the model cannot tell.
    """
    return _as_stored(found, model, stored_candidates(model))


def _as_stored(found: Importance, model: nn.Module, candidates: Sequence[Candidate]) -> Importance:
    """The same importance under the names of the weight file, in the pieces that the file has."""
    names = {p.live_name: p.name for p in live_parameters(model)}
    pieces: dict[str, list[Piece]] = {}
    live: dict[str, str] = {}
    for c in candidates:
        ours = names[str(c.live_name)]
        pieces[ours] = list(c.pieces) or [Piece(c.name, 0, c.shape)]
        live.update({piece.name: str(c.live_name) for piece in pieces[ours]})
    if all([piece.name for piece in cut] == [ours] for ours, cut in pieces.items()):
        return found
    tensors = {
        piece.name: found[ours].reshape(-1)[piece.start : piece.start + math.prod(piece.shape)].view(piece.shape)
        for ours in found
        for piece in pieces[ours]
    }
    p = found.provenance
    shapes = {piece.name: piece.shape for cut in pieces.values() for piece in cut}
    changes: dict[str, Any] = {
        "absent": _renamed(p.absent, pieces),
        "live_names": {name: live[name] for name in tensors if live[name] != name},
        "tied": {alias: pieces[name][0].name for alias, name in p.tied.items() if len(pieces[name]) == 1},
        "model": {"structure": structure_hash(shapes)},
    }
    content = (p.model or {}).get("content", {})
    changes["model"]["content"] = {pieces[n][0].name: h for n, h in content.items() if len(pieces[n]) == 1}
    if "per_parameter" in (p.steps or {}):
        changes["steps"] = {**p.steps, "per_parameter": _renamed(p.steps["per_parameter"], pieces)}  # type: ignore[dict-item, index]
    changes["pollution"] = [
        replace(one, parameters=tuple(_renamed(dict.fromkeys(one.parameters), pieces))) for one in p.pollution
    ]
    groups = [
        {**group, "parameters": list(_renamed(dict.fromkeys(group["parameters"]), pieces))}
        for group in (p.optimizer or {}).get("groups", [])
    ]
    if groups:
        changes["optimizer"] = {**p.optimizer, "groups": groups}  # type: ignore[dict-item]
    values = {f.name: getattr(p, f.name) for f in fields(p) if f.name not in ("kind", "sum", "sum_of_squares")}
    return Importance(tensors, p.kind, **{**values, **changes})


def _renamed(values: Mapping[str, Any], pieces: Mapping[str, Sequence[Piece]]) -> dict[str, Any]:
    return {piece.name: value for name, value in values.items() for piece in pieces[name]}


def written_by_one(importance: Callable[[], Importance], file: Path, here: bool, codec: str = "exact") -> None:
    """Saves an importance in the process that writes; if it fails there, all of them stop.

    Args:
        importance: Makes it.
        file: Where to; its folder is made if need be.
        here: Whether this is the process that writes.
        codec: How the file keeps the values.
    """
    error: BaseException | None = None
    if here:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            importance().save(file, codec=codec)
        except Exception as problem:
            error = problem
    agree(error)
