"""Save and load pruned Hugging Face models, whose layers no longer have the widths that their config gives.

`save` writes the sizes that differ under the key "squisher" of `config.json`; `load` builds the model of the config, gives its
modules these sizes and fills in the weights.
"""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import FileError, NamingError, SquisherError, require
from ..names import check_known
from ..storage import safetensors
from ..storage.atomic import new_folder, write_file
from ..storage.folders import open_model
from ..storage.json_files import read_object
from ..storage.tensors import tied_names

__all__ = ["example_input", "heads_of", "load", "save"]

_KEY = "squisher"
_HEADED = ("query", "key", "value", "q_proj", "k_proj", "v_proj", "q_lin", "k_lin", "v_lin")


def save(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write a pruned Hugging Face model as a folder that `squisher.prune.load` reads.

    Args:
        model: What `squisher.prune.channels` returned for a `PreTrainedModel`.
        folder: The folder to make.

    Raises:
        SquisherError: The model is not one of transformers.
    """
    if not hasattr(model, "save_pretrained") or not hasattr(model, "config"):
        raise SquisherError(
            f"prune.save writes models of transformers, and this is a {type(model).__name__}. Keep another one with "
            "torch.save(model.state_dict(), file) beside the code that makes it."
        )
    described: Any = model.config
    with torch.device("meta"):
        whole: nn.Module = type(model)(described)
    modules = dict(whole.named_modules())
    sizes = {}
    for name, module in model.named_modules():
        before = _sizes(modules[name]) if name in modules else {}
        changed = {key: value for key, value in _sizes(module).items() if key in before and before[key] != value}
        if changed:
            sizes[name] = changed
    # Under the names of the running model: save_pretrained may write others, which only from_pretrained understands.
    weights = model.state_dict()
    kept = {name: tensor for name, tensor in weights.items() if name not in tied_names(weights)}
    config = {**described.to_dict(), "architectures": [type(model).__name__], _KEY: {"sizes": sizes}}
    with new_folder(folder) as made:
        safetensors.save(made / "model.safetensors", kept, None)
        write_file(made / "config.json", (json.dumps(config, indent=2, default=str) + "\n").encode())


def load(folder: str | os.PathLike[str]) -> nn.Module:
    """Open a folder that `squisher.prune.save` wrote; other folders are opened by `from_pretrained`.

    Args:
        folder: The folder with `config.json` and the weights.

    Returns:
        The model, in evaluation mode.

    Raises:
        FileError: The folder holds no such model.
        NamingError: Its weights do not belong to the model.
    """
    transformers = require("transformers", "hf", "prune.load")
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileError(f"{folder} has no config.json: it is not a folder that squisher.prune.save wrote.")
    raw = read_object(path)
    kind: Any = getattr(transformers, str((raw.get("architectures") or [""])[0]), None)
    is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    if not is_model:
        raise FileError(
            f"{path} names no model class of transformers under architectures, so the model cannot be made."
        )
    if _KEY not in raw:
        opened: nn.Module = kind.from_pretrained(folder, local_files_only=True)
        return opened
    sizes = raw[_KEY].get("sizes") if isinstance(raw[_KEY], dict) else None
    if not isinstance(sizes, dict):
        raise FileError(f"{path}: the sizes of the pruned model are damaged.")
    made: nn.Module = kind(transformers.AutoConfig.from_pretrained(folder, local_files_only=True))
    modules = dict(made.named_modules())
    check_known(sizes, modules, (str(path), f"a {kind.__name__}"))
    for name, changed in sizes.items():
        known = _sizes(modules[name])
        for key, value in changed.items() if isinstance(changed, dict) else ():
            if key in known:
                setattr(modules[name], key, tuple(value) if isinstance(known[key], tuple) else int(value))
    _fill(made, open_model(folder).weights, modules)
    return made.eval()


def heads_of(model: nn.Module) -> dict[str, int]:
    """Return the number of heads of each query, key and value layer, from the model's config; empty without attention.

    Grouped keys and values have as many heads as `num_key_value_heads` says.
    """
    config = getattr(model, "config", None)
    heads = next((n for key in ("num_attention_heads", "n_heads") if (n := getattr(config, key, None))), None)
    if not isinstance(heads, int):
        return {}
    grouped = getattr(config, "num_key_value_heads", None) or heads
    last = {name: name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    return {name: heads if kind[0] == "q" else grouped for name, kind in last.items() if kind in _HEADED}


def example_input(model: nn.Module) -> dict[str, Any]:
    """Return the smallest input for a Hugging Face model: a few tokens, or one image.

    Raises:
        SquisherError: It takes neither.
    """
    config: Any = getattr(model, "config", None)
    what = getattr(model, "main_input_name", None)
    if what == "input_ids":
        tokens = {what: torch.arange(8).remainder(int(config.vocab_size)).view(1, 8)}
        taken = inspect.signature(model.forward).parameters.values()
        cached = any(p.name == "use_cache" or p.kind is p.VAR_KEYWORD for p in taken)
        return {**tokens, "use_cache": False} if cached and getattr(config, "use_cache", False) else tokens
    if what == "pixel_values":
        size = config.image_size if isinstance(config.image_size, (tuple, list)) else (config.image_size,) * 2
        return {what: torch.zeros(1, getattr(config, "num_channels", 3), *size)}
    raise SquisherError(
        f"What a {type(model).__name__} takes is not known ({what}): call squisher.prune.channels with it."
    )


def _sizes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that are sizes: integers and tuples of integers."""

    def is_size(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

    found = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    return {k: v for k, v in found.items() if is_size(v) or (isinstance(v, tuple) and v and all(map(is_size, v)))}


def _fill(model: nn.Module, weights: Any, modules: dict[str, nn.Module]) -> None:
    """Put weights of any shape into the parameters and buffers of a model.

    Pruning may have cut two tied parameters differently: only those that the file has once are tied again.
    """
    tie: Any = getattr(model, "tie_weights", lambda: None)
    tie()
    tied = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    check_known(weights, {*tied, *(name for name, _ in model.named_buffers())}, ("the folder", type(model).__name__))
    filled = {}
    for name in weights:
        owner, _, attribute = name.rpartition(".")
        if name in tied:
            filled[tied[name]] = parameter = nn.Parameter(weights[name])
            setattr(modules[owner], attribute, parameter)
        else:
            setattr(modules[owner], attribute, weights[name])
    for name, old in tied.items():
        if name in weights:
            continue
        if old not in filled:
            raise NamingError(f"The folder has no weight {name!r}, which a {type(model).__name__} needs.")
        owner, _, attribute = name.rpartition(".")
        setattr(modules[owner], attribute, filled[old])
