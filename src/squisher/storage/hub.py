"""Checkpoints on the Hugging Face Hub: `hf://owner/name[@revision][/folder]`, fetched without the weights."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import FileError, SquisherError

__all__ = ["fetch", "is_hub_id"]

PREFIX = "hf://"
_ID = re.compile(r"hf://(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+))?(?:/(?P<folder>[\w./-]+))?/?")
# The state is wanted, not the weights: they are as large, and names are proven from the config.
_WEIGHTS = re.compile(
    r"(^|/)(model|pytorch_model|tf_model|flax_model|diffusion_pytorch_model|consolidated)[\w.-]*\.(safetensors|bin|h5|msgpack|pth)$"
    r"|\.(gguf|onnx|ot|mlmodel)$"
)
_ALWAYS = re.compile(r"\.json$|(^|/)(training_args\.bin|latest|\.metadata)$")


def is_hub_id(source: object) -> bool:
    """Whether a source is an address on the Hub rather than a path."""
    return isinstance(source, str) and source.startswith(PREFIX)


def fetch(source: str) -> Path:
    """Downloads what is needed of a checkpoint, into the Hub's own cache, and says where it is.

    Raises:
        SquisherError: huggingface_hub is not installed, or the address is not one.
        FileError: The repository cannot be reached, or holds no optimizer state.
    """
    match = _ID.fullmatch(source)
    if match is None or ".." in source:
        raise SquisherError(f"{source} is not an address on the Hub: expected hf://owner/name[@revision][/folder].")
    try:
        import huggingface_hub
    except ImportError as error:
        raise SquisherError(f"Fetching {source} takes huggingface_hub: pip install 'torch-squisher[hf]'.") from error
    repo, revision, folder = match["repo"], match["revision"], match["folder"] or ""
    try:
        files = huggingface_hub.HfApi().list_repo_files(repo, revision=revision)
        wanted = _wanted(files, folder)
        if not wanted:
            raise FileError(
                f"{source} holds no optimizer state, as most published models do: its files are {_some(files)}. Ask its authors for "
                "a checkpoint with the optimizer, or for its squisher.safetensors."
            )
        local = huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=wanted)
    except SquisherError:
        raise
    except Exception as error:  # whatever the network and the Hub's client come up with
        raise FileError(f"{source} cannot be fetched: {_first_line(error)}") from error
    return Path(local, *PurePosixPath(folder).parts)


def _wanted(files: list[str], folder: str) -> list[str]:
    """What to fetch: everything below the folder but the weights; nothing if only descriptions would be left."""
    prefix = f"{folder.strip('/')}/" if folder else ""
    below = [file for file in files if file.startswith(prefix) and not _WEIGHTS.search(file)]
    named = [file for file in files if file == folder.strip("/")]
    if named:
        return named
    states = [file for file in below if _is_state(file)]
    return states + [file for file in below if _ALWAYS.search(file)] if states else []


def _is_state(file: str) -> bool:
    name = PurePosixPath(file).name
    return (
        bool(
            re.search(
                r"optim|exp_avg_sq|distcp$|mp_rank_\d+_model_states\.pt$|global_step|rng_state|\.ckpt$|\.keras$", file
            )
        )
        or name in ("checkpoint.pt", "ckpt.pt", "squisher.safetensors")
        or bool(re.fullmatch(r"(checkpoint|ckpt)[\w.-]*\.(pt|pth|tar)", name))
    )


def _some(files: list[str]) -> str:
    return ", ".join(files[:5]) + (" …" if len(files) > 5 else "")


def _first_line(error: Any) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
