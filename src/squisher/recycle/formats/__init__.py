"""The formats that optimizer states are read from: one module each, and one row here."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ...errors import FileError
from ...importance import FILE_NAME
from ...storage.byte_range import ByteRange, shown
from ..states import Found, Options
from .accelerate import is_accelerate_folder, read_accelerate
from .dcp import is_dcp, read_dcp
from .keras import is_keras, read_keras
from .megatron import is_megatron, read_megatron
from .model_source import with_model
from .nanotron import is_nanotron, read_nanotron
from .optax import is_optax, read_optax
from .rank_files import is_rank_folder, read_ranks
from .safetensors_state import is_safetensors_state, read_safetensors_state
from .sb3 import is_sb3, read_sb3
from .torch_file import read_lightning, read_torch_file, read_torch_folder, torch_files
from .trainer import is_trainer_folder, read_trainer
from .zero import is_zero, read_zero

__all__ = ["READERS", "Reader", "read_source"]


class Reader(NamedTuple):
    """One format.

    Attributes:
        name: What it is called.
        accepts: How it is recognised, without reading more than a few bytes.
        read: What reads it.
        names_itself: Whether the reader itself does what there is to do with the model that the user gave.
    """

    name: str
    accepts: Callable[[Path], bool]
    read: Callable[[Path, Options], Found]
    names_itself: bool = False


READERS = [
    # The most frequent first. Folders are recognised by what lies in them, and no Trainer folder has what the others need.
    Reader("Hugging Face Trainer folder", is_trainer_folder, read_trainer, names_itself=True),
    Reader("Megatron checkpoint (experimental)", is_megatron, read_megatron),
    Reader("torch.distributed.checkpoint folder", is_dcp, read_dcp),
    Reader("nanotron checkpoint", is_nanotron, read_nanotron),
    Reader("DeepSpeed ZeRO checkpoint", is_zero, read_zero),
    Reader("Accelerate save_state folder", is_accelerate_folder, read_accelerate),
    Reader("a folder with a torch file of every rank", is_rank_folder, read_ranks),
    Reader("optimizer state in a safetensors file", is_safetensors_state, read_safetensors_state),
    Reader("Lightning checkpoint", lambda path: path.suffix == ".ckpt" and path.is_file(), read_lightning),
    Reader("Keras file", is_keras, read_keras, names_itself=True),
    Reader("stable-baselines3 archive", is_sb3, read_sb3, names_itself=True),
    Reader("optax state (flax msgpack, Orbax)", is_optax, read_optax, names_itself=True),
    Reader("a folder with torch files", lambda path: bool(torch_files(path)), read_torch_folder),
    # Last: whatever is a file and nothing else is tried as a torch file, whose reader says what is wrong with it.
    Reader("torch.save file", Path.is_file, read_torch_file),
]


def read_source(path: Path, options: Options) -> Found:
    """Find the format of a source and read it; a model that the user gave names its parameters.

    Raises:
        FileError: Nothing is there, or it is of no format that is read.
    """
    if not os.path.exists(path):
        raise FileError(f"There is no file or folder {shown(str(path))}.")
    if not os.path.isdir(path):
        ByteRange.of(path)  # refuses a pipe or a device, which could block for ever
        if options.model is None and not options.named and _is_only_state(path):
            path = path.parent
    for reader in READERS:
        if reader.accepts(path):
            found = reader.read(path, options)
            return found if reader.names_itself else with_model(found, options)
    if (path / FILE_NAME).exists():
        raise FileError(
            f"The folder {path} holds no optimizer state, and needs none: its importance was written while it was trained. Use "
            f"{path / FILE_NAME} as it is (squisher.load, squisher inspect)."
        )
    checkpoints = [p for p in path.iterdir() if p.is_dir() and any(reader.accepts(p) for reader in READERS)]
    if checkpoints:
        last = max(checkpoints, key=lambda p: (p.stat().st_mtime, p.name))
        raise FileError(
            f"The folder {path} itself holds no optimizer state, but {len(checkpoints)} of the folders in it may: give the one that is "
            f"meant, such as {last}, the one last written."
        )
    inside = sorted(p.name for p in path.iterdir())[:6]
    raise FileError(
        f"The folder {path} holds no optimizer state of a known format; it has {', '.join(inside) or 'nothing'}. Give the "
        "folder or file that training saved with the optimizer (a checkpoint, not only the weights)."
    )


def _is_only_state(path: Path) -> bool:
    """Return whether a file is the optimizer's of a Trainer's or Accelerate's folder, whose other files say more about it."""
    folder = path.parent
    if path.name == "optimizer.pt":
        return any((folder / name).is_file() for name in ("trainer_state.json", "training_args.bin"))
    return path.name == "optimizer.bin" and is_accelerate_folder(folder) and not (folder / "optimizer_1.bin").exists()
