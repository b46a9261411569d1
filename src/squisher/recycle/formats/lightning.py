"""Lightning checkpoints: `optimizer_states`, and a `state_dict` whose names begin with the attribute of the LightningModule."""

from __future__ import annotations

from pathlib import Path

from ...errors import FileError
from ...importance import RunFacts
from ...storage.torch_files import read
from ..states import Found, Options
from .model_source import with_model
from .torch_file import candidates_of, find_optimizers, optimizer_state, read_torch_file

__all__ = ["is_lightning_file", "read_lightning"]


def is_lightning_file(path: Path) -> bool:
    """Whether a file is named like a Lightning checkpoint; the reader looks inside."""
    return path.is_file() and path.suffix == ".ckpt"


def read_lightning(path: Path, options: Options) -> Found:
    """Read the optimizers of a Lightning checkpoint, and its weights in module order.

    How parameters were grouped is the user's code, and an optimizer may have any of them (the generator of a GAN, a student
    beside its frozen teacher): shapes and values must tell.

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
    return Found(optimizers, [(label, candidates)], RunFacts(tied=tied))
