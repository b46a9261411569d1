"""Orbax checkpoints: the tree in `_METADATA`, the arrays through tensorstore when they are asked for."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import FileError, SquisherError
from ...storage.json_files import read_object

__all__ = ["StoreTensor", "is_orbax", "read_orbax"]

_SIZE = 1 << 28  # bytes of metadata: millions of arrays


@dataclass(frozen=True, eq=False)
class StoreTensor:
    """One array of a checkpoint; opened when its shape is asked for, read in whole rows.

    Attributes:
        folder: The checkpoint.
        name: The array's name in it.
        ocdbt: Whether all arrays share one store; otherwise each has a folder.
        zarr3: Whether arrays are of the third version of zarr.
    """

    folder: Path
    name: str
    ocdbt: bool
    zarr3: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return tuple(int(n) for n in self._array.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the array."""
        name = str(self._array.dtype.name)
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise FileError(f"{self.folder}: {self.name} has the type {name}, which is not read.")
        return dtype

    def load(self) -> Tensor:
        """Read the whole array."""
        return self._tensor(self._array)

    def read_flat(self, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` in flat order; whole rows are read for it."""
        if not self.shape:
            return self.load().reshape(-1)[start:stop]
        row = math.prod(self.shape[1:]) or 1
        first = start // row
        rows = self._tensor(self._array[first : -(-stop // row)])
        return rows.reshape(-1)[start - first * row : stop - first * row]

    def _tensor(self, array: Any) -> Tensor:
        try:
            values = array.read().result()
        except Exception as error:  # tensorstore raises ValueError, OSError and RuntimeError alike
            raise FileError(f"{self.folder}: {self.name} cannot be read: {_first_line(error)}") from error
        if values.dtype.name == "bfloat16":
            return torch.from_numpy(values.view("int16").copy()).view(torch.bfloat16)
        return torch.from_numpy(values.copy())

    @cached_property
    def _array(self) -> Any:
        tensorstore = _tensorstore()
        base = f"file://{self.folder.resolve()}/"
        store = {"driver": "ocdbt", "base": base, "path": f"{self.name}/"} if self.ocdbt else f"{base}{self.name}/"
        spec = {"driver": "zarr3" if self.zarr3 else "zarr", "kvstore": store}
        try:
            return tensorstore.open(spec, open=True, read=True).result()
        except Exception as error:  # as above
            raise FileError(f"{self.folder} lacks {self.name}, or it is damaged: {_first_line(error)}") from error


def is_orbax(path: Path) -> bool:
    """Whether a folder is an Orbax checkpoint, or one step or all steps of a CheckpointManager."""
    return path.is_dir() and bool(_items(path) or _steps(path))


def read_orbax(path: Path) -> dict[str, Any]:
    """Read the tree of a checkpoint; of several items, one below the other's name.

    Raises:
        FileError: It is damaged, unfinished, or holds several steps.
        SquisherError: tensorstore is not installed.
    """
    _tensorstore()
    items = _items(path)
    if not items:
        steps = _steps(path)
        if len(steps) != 1:
            raise FileError(
                f"{path} holds {len(steps)} steps ({', '.join(s.name for s in steps[:5])}): give the folder of one."
            )
        items = _items(steps[0])
    tree: dict[str, Any] = {}
    for item in items:
        if ".orbax-checkpoint-tmp" in str(item):
            raise FileError(f"{item} is a checkpoint that was not finished. Give a finished one.")
        own = _tree(item)
        tree.update(own if item == path or len(items) == 1 else {item.name: own})
    return tree


def _items(path: Path) -> list[Path]:
    """Return the folders with arrays: the path itself, or the items below it."""
    if (path / "_METADATA").is_file():
        return [path]
    return sorted(child for child in path.iterdir() if child.is_dir() and (child / "_METADATA").is_file())


def _steps(path: Path) -> list[Path]:
    children = [child for child in path.iterdir() if child.is_dir() and child.name.rpartition("_")[2].isdecimal()]
    return sorted(child for child in children if _items(child))


def _tree(folder: Path) -> dict[str, Any]:
    file = folder / "_METADATA"
    try:
        if file.stat().st_size > _SIZE:
            raise FileError(f"{file} is too long to be read.")
        metadata = read_object(file)
        leaves = metadata["tree_metadata"].values()
        ocdbt = metadata.get("use_ocdbt", (folder / "manifest.ocdbt").is_file())
        zarr3 = bool(metadata.get("use_zarr3"))
        tree: dict[str, Any] = {}
        for leaf in leaves:
            keys = [str(part["key"]) for part in leaf["key_metadata"]]
            if any("/" in key or "\\" in key or key == ".." for key in keys) and not ocdbt:
                raise FileError(f"{file} names an array outside of its folder.")
            if leaf["value_metadata"].get("value_type") in ("None", "Dict", "List", "Tuple", "Empty", "NamedTuple"):
                continue
            at = tree
            for key in keys[:-1]:
                at = at.setdefault(key, {})
            at[keys[-1]] = StoreTensor(folder, ".".join(keys), bool(ocdbt), zarr3)
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise FileError(f"{file} cannot be read: {_first_line(error)}") from error
    return tree


def _tensorstore() -> Any:
    try:
        return importlib.import_module("tensorstore")
    except ImportError as error:
        raise SquisherError(
            "Orbax checkpoints need tensorstore to be read: pip install 'torch-squisher[jax]'."
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
