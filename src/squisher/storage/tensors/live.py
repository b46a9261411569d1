"""The parameters of a live module, under the names that its weight file has."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import NamingError

__all__ = ["LiveParameter", "adapter_file_name", "live_parameters"]

_WRAPPERS = {  # class name: the attribute that holds what it wraps
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "AveragedModel": "module",
    "DeepSpeedEngine": "module",
    "_FabricModule": "_forward_module",
    "OptimizedModule": "_orig_mod",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}


class LiveParameter(NamedTuple):
    """One parameter of a module: once, however many names it has."""

    name: str
    """Its name in a weight file: without wrappers."""
    live_name: str
    """Its first name in `module.named_parameters()`."""
    aliases: tuple[str, ...]
    """Its other names, if it is tied."""
    parameter: Tensor


def live_parameters(model: torch.nn.Module) -> list[LiveParameter]:
    """Return the parameters of a module in registration order, each once, named as its weight file names them.

    Wrappers (DDP, DataParallel, compiled, FSDP, checkpointed, averaged) are recognised by their type, so that a user's own
    submodule called `module` keeps its name.

    Raises:
        NamingError: Two parameters would get the same name.
    """
    names: dict[int, list[str]] = {}
    parameters: dict[int, Tensor] = {}
    for live_name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(live_name)
        parameters[id(parameter)] = parameter
    out = []
    seen: dict[str, str] = {}
    for key, live in names.items():
        clean = list(dict.fromkeys(_without_wrappers(model, name) for name in live))
        if clean[0] in seen:
            raise NamingError(
                f"{live[0]!r} and {seen[clean[0]]!r} are different parameters with one name, {clean[0]!r}."
            )
        seen[clean[0]] = live[0]
        out.append(LiveParameter(clean[0], live[0], tuple(clean[1:]), parameters[key]))
    return out


def _without_wrappers(model: torch.nn.Module, live_name: str) -> str:
    module: Any = model
    kept = []
    for part in live_name.split("."):
        if _WRAPPERS.get(type(module).__name__) != part:
            kept.append(part)
        module = getattr(module, part, None)
    return (
        adapter_file_name(".".join(kept)) if "lora_" in live_name or "modules_to_save" in live_name else ".".join(kept)
    )


_ADAPTER = (
    r"(?P<kind>lora_(?:A|B|embedding_A|embedding_B|magnitude_vector|bias)|modules_to_save)\.(?P<adapter>[^.]+)(?=\.|$)"
)


def adapter_file_name(live_name: str) -> str:
    """Return the name that PEFT writes for a live adapter parameter: without the adapter's own name (`.default`)."""
    name = re.sub(_ADAPTER, _file_part, live_name).replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector")
    return name.replace("..", ".")


def _file_part(match: re.Match[str]) -> str:
    # `modules_to_save.default.weight` is written as `weight`; `lora_A.default.weight` as `lora_A.weight`.
    return match["kind"] if match["kind"] != "modules_to_save" else ""
