"""Model folders and weight files: opened lazily, written whole or not at all.

A folder is what `save_pretrained` writes; nothing here needs transformers.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import FileError, SquisherError
from ..merge.ahead import Ahead
from ..recycle.weights import open_weights
from ..storage import archive
from ..storage.safetensors import sync_folder
from ..storage.tensors import LazyTensors, dtype_of, numel_of

__all__ = ["Model", "check_free", "new_folder", "open_model", "write_model"]

_WEIGHTS = "model.safetensors"
_COPIED = (
    "config.json", "generation_config.json", "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json",
    "added_tokens.json", "*.model", "chat_template*", "preprocessor_config.json", "processor_config.json",
    "configuration_*.py", "modeling_*.py", "tokenization_*.py", "LICENSE*",
)  # fmt: skip


class Model(NamedTuple):
    """Weights on disk."""

    path: Path
    """The folder or file."""
    weights: LazyTensors
    config: dict[str, Any]
    """Its config.json; empty for a file."""

    @property
    def name(self) -> str:
        """What it is called in a report: its last part, no path."""
        return self.path.resolve().name


def open_model(path: str | os.PathLike[str]) -> Model:
    """Opens a model folder (safetensors or torch files, sharded or not), a safetensors file or a torch file, lazily.

    No file is executed.

    Raises:
        FileError: Nothing is there, it holds no weights, or it is damaged.
        SquisherError: The weights are quantised.
    """
    path = Path(path)
    if not path.exists():
        raise FileError(f"There is no model {path}.")
    found = open_weights(path)
    if found is None:
        raise FileError(
            f"The folder {path} holds no weights: neither {_WEIGHTS} nor pytorch_model.bin, nor an index of shards."
        )
    config = _json(path / "config.json") if path.is_dir() and (path / "config.json").is_file() else {}
    if config.get("quantization_config"):
        method = (config["quantization_config"] or {}).get("quant_method", "an unknown method")
        raise SquisherError(f"The weights of {path} are quantised ({method}): take those from before quantisation.")
    return Model(path, LazyTensors(found.tensors), config)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise FileError(f"Cannot read {path}: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is not JSON; it is damaged or half-written: copy the folder again.") from error
    if not isinstance(value, dict):
        raise FileError(f"{path} is not a JSON object, as a configuration must be.")
    return value


def write_model(
    out: str | os.PathLike[str],
    weights: Mapping[str, Tensor],
    like: Path | None = None,
    *,
    card: str | None = None,
    dtype: torch.dtype | None = None,
    leave_out: Mapping[str, str] | None = None,
    file_name: str = _WEIGHTS,
    extra_files: tuple[str, ...] = (),
    shard_bytes: int = archive.SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Writes weights as a folder that `from_pretrained` loads, or as one `.safetensors` file if `out` is called so.

    The folder is made under another name and renamed at the end: a killed run leaves nothing that loads.

    Args:
        out: A folder that does not exist yet (or is empty), or a `.safetensors` file.
        weights: Any mapping; a lazy one is read piece by piece.
        like: A model folder whose config and tokenizer files are copied.
        card: The text of the README.md.
        dtype: The type that the config should say, if it is to be changed.
        leave_out: Other names of tied tensors, which are written once: alias to name.
        file_name: What the weight file is called in the folder.
        extra_files: Names of further files of `like` to copy.
        shard_bytes: Larger ones become shards with an index.
        progress: Called with the bytes written so far and in all.

    Raises:
        FileError: The output exists, or the disk is full.
    """
    out = Path(out)
    with Ahead(weights, [name for name in weights if name not in (leave_out or {})]) as written:
        check_free(out.parent, sum(numel_of(written, name) * dtype_of(written, name).itemsize for name in written))
        if out.suffix == ".safetensors":
            archive.save(out, written, None, shard_bytes=shard_bytes, progress=progress)
            return
        with new_folder(out) as folder:
            for source in _side_files(like, extra_files):
                if source.name == "config.json":
                    (folder / source.name).write_text(_config(_json(source), dtype), "utf-8")
                else:
                    shutil.copyfile(source, folder / source.name)
            if card is not None:
                (folder / "README.md").write_text(card, "utf-8")
            archive.save(folder / file_name, written, None, shard_bytes=shard_bytes, progress=progress)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to write into, which gets its name when all is done and is removed when something fails.

    Raises:
        FileError: There is something of this name already, or it cannot be made.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileError(f"{out} exists already: choose a new folder, or remove it.")
    if not out.resolve().parent.is_dir():
        raise FileError(f"There is no folder {out.parent} to write {out.name} into.")
    partial = out.resolve().with_name(f".{out.resolve().name}.{os.getpid()}.partial")
    try:
        partial.mkdir()
        yield partial
        sync_folder(partial)
        os.replace(partial, out)
        sync_folder(out.resolve().parent)
    except FileError as error:  # who reads it looks for the folder that was asked for
        raise FileError(str(error).replace(str(partial), str(out))) from error
    except OSError as error:
        raise FileError(f"Cannot write {out}: {error.strerror or error}. Nothing was left behind.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_free(folder: Path, needed: int) -> None:
    """Refuses before hours of work what would not fit afterwards.

    Raises:
        FileError: The disk has less room.
    """
    if folder.is_dir() and (free := shutil.disk_usage(folder).free) < needed:
        raise FileError(
            f"The output needs {needed:,} bytes, but only {free:,} are free in {folder}. Nothing was written."
        )


def _side_files(like: Path | None, extra: tuple[str, ...]) -> list[Path]:
    if like is None or not like.is_dir():
        return []
    found = {path for pattern in (*_COPIED, *extra) for path in like.glob(pattern) if path.is_file()}
    return sorted(found)


def _config(config: dict[str, Any], dtype: torch.dtype | None) -> str:
    if str(config.get("_name_or_path", "")).startswith(("/", "~", ".", "\\")):
        del config["_name_or_path"]  # a place on somebody's disk
    if dtype is not None:
        key = "dtype" if "dtype" in config else "torch_dtype"
        config[key] = str(dtype).removeprefix("torch.")
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"
