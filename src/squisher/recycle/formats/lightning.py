"""Lightning checkpoints: `optimizer_states`, and a `state_dict` whose names begin with the attribute of the LightningModule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...errors import FileError
from ...importance import RunFacts
from ...storage.torch_files import read
from ..naming.hf_rules import trainer_rules
from ..naming.solver import RULES, exact
from ..states import Candidate, Found, OptimizerState, Options
from .model_source import with_model
from .torch_file import candidates_of, find_optimizers, optimizer_state, read_torch_file

__all__ = ["is_lightning_file", "read_lightning"]


def is_lightning_file(path: Path) -> bool:
    """Whether a file is named like a Lightning checkpoint; the reader looks inside."""
    return path.is_file() and path.suffix == ".ckpt"


def read_lightning(path: Path, options: Options) -> Found:
    """Read the optimizers of a Lightning checkpoint, and its weights in module order.

    How parameters were grouped is the user's code. An optimizer of a whole submodule (the generator of a GAN) is tried
    before one of any other choice of parameters; two submodules that fit leave the question open.

    Raises:
        FileError: It cannot be read safely, or holds no optimizer state.
    """
    tree = read(path)
    content = tree if isinstance(tree, dict) else {}
    states, weights = content.get("optimizer_states"), content.get("state_dict")
    if not isinstance(states, list) or not isinstance(weights, dict):
        return read_torch_file(path)  # `.ckpt` is a popular ending
    optimizers = [optimizer_state(state, f"optimizer_states.{place}") for place, state in find_optimizers(states)]
    if not optimizers:
        raise FileError(
            f"{path} holds weights but no optimizer state: it was saved with save_weights_only=True, or after training."
        )
    tensors = {
        name: tensor for name, tensor in weights.items() if isinstance(name, str) and hasattr(tensor, "read_flat")
    }
    candidates, tied = candidates_of(tensors)
    label = "the weights under 'state_dict'"
    if options.model is not None:
        return with_model(Found(optimizers), options)
    if options.trainable is None:
        optimizers = [replace(one, models=_own_models(one, label, candidates)) for one in optimizers]
    return Found(optimizers, [(label, candidates)], RunFacts(tied=tied))


def _own_models(
    optimizer: OptimizerState, label: str, candidates: Sequence[Candidate]
) -> list[tuple[str, Sequence[Candidate]]]:
    """Where an optimizer's names may come from: all weights, or the submodules that have as many parameters and fit."""
    whole: list[tuple[str, Sequence[Candidate]]] = [(label, candidates)]
    rules = [*RULES, *trainer_rules(candidates)]
    parts = [(f"{label}, submodule {prefix!r}", part) for prefix, part in _submodules(candidates).items()]
    return exact(optimizer, whole, rules) or exact(optimizer, parts, rules) or whole


def _submodules(candidates: Sequence[Candidate]) -> dict[str, list[Candidate]]:
    parts: dict[str, list[Candidate]] = {}
    for c in candidates:
        path = c.name.split(".")
        for depth in range(1, len(path)):
            parts.setdefault(".".join(path[:depth]), []).append(c)
    return parts
