"""Optimizer states in safetensors files, all of which record names.

`optim.safetensors` (OLMo): a state dict, flattened; each key is a pickled path in base64, and what is no tensor is a pickle in bytes.
`optimizer.safetensors` (MLX): `<parameter>.m`, `<parameter>.v` and one `step`; neither the class nor β₂ is recorded.
`exp_avg_sq.safetensors` (OTA merging): Adam's second moment under the parameter's name, and nothing else.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...errors import FileError, NoAccumulatorError
from ...storage.safetensors import open_safetensors
from ...storage.tensors import CHUNK, TensorSource
from ...storage.torch_files import unpickle
from ..states import Entry, Found, OptimizerState, Options
from .torch_file import optimizer_state

__all__ = ["is_safetensors_state", "read_safetensors_state"]

Tensors = Mapping[str, TensorSource]

_IN_FOLDER = ("optim.safetensors", "exp_avg_sq.safetensors", "optimizer.safetensors")
_LARGEST = 1 << 26  # bytes of a pickled setting
_MLX = {  # what MLX's optimizers keep for a parameter, under the keys that the table of accumulators knows
    "Adam": {"v": "exp_avg_sq", "m": "exp_avg"},
    "AdamW": {"v": "exp_avg_sq", "m": "exp_avg"},
    "RMSprop": {"v": "square_avg"},
    "Adagrad": {"v": "sum"},
    "AdaDelta": {"v": "square_avg", "u": "acc_delta"},
}
_MLX_KEYS = ("m", "v", "u", "exp_avg", "exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col")


def is_safetensors_state(path: Path) -> bool:
    """Return whether a path is a safetensors file, or a folder with an optimizer state in one."""
    if path.is_dir():
        return any((path / name).is_file() for name in _IN_FOLDER)
    return path.is_file() and path.suffix == ".safetensors"


def read_safetensors_state(path: Path, options: Options) -> Found:
    """Read the optimizer state in a safetensors file.

    Raises:
        FileError: It is damaged, or holds no optimizer state.
        NoAccumulatorError: MLX's file leaves open whether it holds an average of the squared gradient.
    """
    files = [path / name for name in _IN_FOLDER if (path / name).is_file()] if path.is_dir() else [path]
    if len(files) > 1:
        raise FileError(f"{path} holds {' and '.join(one.name for one in files)}: give the one that is meant.")
    file = files[0]
    lazy = open_safetensors(file)
    tensors = {name: lazy.source(name) for name in lazy}
    tree = _olmo(tensors, file)
    if tree is not None:
        return Found([optimizer_state(tree, file.name)])
    if file.name == "exp_avg_sq.safetensors":
        group = {"betas": (None, None), "decoupled_weight_decay": True}
        entries = [Entry({"exp_avg_sq": tensor}, group, 0, name) for name, tensor in tensors.items()]
        return Found([OptimizerState(entries, None, file.name)])
    states = list(_mlx(tensors, options.optimizer_class))
    if not states:
        raise FileError(
            f"{file} holds tensors but no optimizer state (OLMo's optim.safetensors, MLX's optimizer.safetensors or "
            "exp_avg_sq.safetensors). Give the file or folder that was saved with the optimizer; an importance that is "
            "already extracted needs no extracting."
        )
    return Found(states)


# -- OLMo --------------------------------------------------------------------------------------------------------------


def _olmo(tensors: Tensors, file: Path) -> dict[str, Any] | None:
    """Return the nested state dict, or None where the names are no pickled paths."""
    tree: dict[str, Any] = {}
    for name, tensor in tensors.items():
        path, pickled = _path(name, file)
        if not path:
            if tree:
                raise FileError(f"{file} is damaged: the key {name[:40]!r} is no path as the others are. Get it again.")
            return None
        value: Any = tensor
        if pickled:
            if tensor.shape[0] > _LARGEST:
                raise FileError(f"{file} claims {tensor.shape[0]} bytes of settings under {path}: it is damaged.")
            value = unpickle(tensor.load().numpy().tobytes(), name=f"{file}, {'.'.join(map(str, path))}")
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise FileError(f"{file} is damaged: {path} is inside something that is no dictionary.")
        node[path[-1]] = value
    groups = tree.get("param_groups")
    listed = isinstance(groups, list) and all(isinstance(group, dict) for group in groups)
    if not listed or not isinstance(tree.get("state"), dict):
        raise FileError(f"{file} has no 'state' and 'param_groups'. Give optim.safetensors, not the weights.")
    return tree


def _path(name: str, file: Path) -> tuple[tuple[Any, ...], bool]:
    try:
        data = base64.b64decode(name, altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return (), False
    if not data.startswith(b"\x80"):  # as every pickle since protocol 2
        return (), False
    match unpickle(data, name=f"a key of {file}"):
        case (tuple(path), bool(pickled)) if all(isinstance(key, (str, int)) for key in path):
            return path, pickled
    return (), False


# -- MLX ---------------------------------------------------------------------------------------------------------------


def _mlx(tensors: Tensors, class_name: str | None) -> Iterator[OptimizerState]:
    """Yield the state of each optimizer: or, of a MultiOptimizer, of each under `states.N`."""
    for step_name, step in tensors.items():
        prefix, _, last = step_name.rpartition("step")
        if last or step.shape != () or (prefix and not prefix.startswith("states.")):
            continue
        states: dict[str, dict[str, Any]] = {}
        for name, tensor in tensors.items():
            parameter, _, key = name.removeprefix(prefix).rpartition(".")
            if name.startswith(prefix) and parameter and key in _MLX_KEYS:
                states.setdefault(parameter, {})[key] = tensor
        if states:
            steps, kind = int(step.load()), class_name or _mlx_class(states)
            entries = [_mlx_entry(name, state, steps, kind) for name, state in states.items()]
            yield OptimizerState(entries, kind, prefix.removesuffix("."))


def _mlx_entry(name: str, state: dict[str, Any], steps: int, kind: str) -> Entry:
    group: dict[str, Any] = {"decoupled_weight_decay": True, "eps": None}
    if kind == "Adafactor":  # with the keys of transformers' Adafactor
        return Entry({**state, "step": steps}, {**group, "relative_step": None}, 0, name)
    if kind not in _MLX:
        raise NoAccumulatorError(f"MLX's {kind} keeps no average of the squared gradient. Train with Adam or AdamW.")
    group |= {"initial_accumulator_value": 0.0} if kind == "Adagrad" else dict.fromkeys(("betas", "alpha", "rho"))
    return Entry({**{_MLX[kind].get(key, key): value for key, value in state.items()}, "step": steps}, group, 0, name)


def _mlx_class(states: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what the keys and values prove of the optimizer's class.

    A negative entry is a momentum's. Adamax's v is a running maximum of |g|, so it bounds |m| but for the decay; where |m|
    is more than twice v anywhere, v is Adam's.

    Raises:
        NoAccumulatorError: Nothing proves it.
    """
    keys = {key for state in states.values() for key in state}
    if keys & {"exp_avg_sq", "exp_avg_sq_row"}:
        return "Adafactor"
    if "u" in keys or "v" not in keys:
        return "AdaDelta" if "u" in keys else "Lion"
    for state in states.values():
        v, m = state.get("v"), state.get("m")
        if v is None or (m is not None and tuple(m.shape) != tuple(v.shape)):
            continue  # damaged: the importance will say so
        numel = math.prod(v.shape)
        for start in range(0, numel, CHUNK):
            stop = min(start + CHUNK, numel)
            values = v.read_flat(start, stop).float()
            if (values < 0).any():
                return "SGD"
            if m is not None and (m.read_flat(start, stop).float().abs() > 2 * values).any():
                return "Adam"
    alike = "Adam and Adamax" if "m" in keys else "RMSprop, Adagrad and SGD with momentum"
    raise NoAccumulatorError(
        f"MLX writes the same keys for {alike}, and the values in this file do not tell which it was. Say it with --optimizer-class "
        f"{alike.split()[0].strip(',')} (optimizer_class=...)."
    )
