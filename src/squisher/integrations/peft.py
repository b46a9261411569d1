"""LoRA adapters as weights to merge, and PEFT's SHiRA with an importance.

Adapters are merged factor by factor if they started from the same A and B, which is checked: only then the product of the mean
factors is close to the mean of the products. Otherwise they are folded into the base.

SHiRA's adapters train the entries of each layer that matter most:

    config = peft.ShiraConfig(r=8, mask_type="squisher")
    config.mask_fn = shira_mask_fn(importance, model)
    model = peft.get_peft_model(model, config)

SHiRA's budget is r · (inputs + outputs) entries of each linear layer; `squisher.mask` has one budget for all parameters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import FileError, NamingError, SquisherError, near
from ..names import check_like, live_parameters
from ..order import per_source
from ..storage.folders import Model, open_weights
from ..storage.json_files import read_object
from ..storage.tensors import CHUNK, Computed, LazyTensors, chunks_of, tied_names
from .publishing import short_paths

__all__ = ["CONFIG", "WEIGHTS", "Adapter", "Folded", "is_adapter", "open_adapter", "shira_mask_fn", "why_not_together"]

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

_PREFIX = "base_model.model."
_REFUSED = {  # settings that change what the factors mean; each is off by default
    "lora_bias": "a bias in lora_B",
    "use_qalora": "QA-LoRA",
    "layer_replication": "replicated layers",
    "target_parameters": "LoRA on bare parameters",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow routing",
    "megatron_config": "Megatron layers",
}
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "mica")  # these initialisations change the base weights themselves
_SHARED = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "bias")
_ALIKE = 0.5  # cosine; independent starts have 0 within a few hundredths


class Adapter(Model):
    """A LoRA adapter on disk; `config` is its adapter_config.json."""


def is_adapter(path: Path) -> bool:
    """Return whether a folder holds an adapter."""
    return (path / CONFIG).is_file()


def open_adapter(path: Path) -> Adapter:
    """Open an adapter folder, lazily.

    Raises:
        FileError: It is damaged or holds no weights.
        SquisherError: It is of a kind that is not merged; the message names it.
    """
    config = read_object(path / CONFIG)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise SquisherError(
            f"{path} is a {kind} adapter; only LoRA adapters (with rsLoRA, DoRA and biases) are merged."
        )
    for key, what in _REFUSED.items():
        if config.get(key):
            raise SquisherError(
                f"{path} uses {what} ({key}), which is not merged: fold it into its base with PEFT first."
            )
    start = str(config.get("init_lora_weights"))
    if start.lower().startswith(_CHANGED_BASE):
        raise SquisherError(
            f"{path} was initialised with {start}, which changes the base weights too: convert it to a plain LoRA adapter first "
            "(save_pretrained(path_initial_model_for_weight_conversion=...))."
        )
    found = open_weights(path)
    if found is None or not any(".lora_" in name for name in found.tensors):
        raise FileError(f"{path} holds no LoRA weights ({WEIGHTS}).")
    return Adapter(path, LazyTensors(found.tensors), config)


def why_not_together(adapters: Sequence[Adapter]) -> str | None:
    """Return why adapters cannot be merged factor by factor; None if they can be.

    They can be if they adapt the same modules of the same base in the same way, and their As are alike, as after training from
    one start and practically never after training from two.
    """
    first, names = adapters[0], short_paths([adapter.path for adapter in adapters])
    for other, name_of_other in zip(adapters[1:], names[1:], strict=True):
        for key in _SHARED:
            if (first.config.get(key) or None) != (other.config.get(key) or None):
                return (
                    f"{names[0]} and {name_of_other} differ in {key} ({first.config.get(key)}, {other.config.get(key)})"
                )
        bases = [str(a.config.get("base_model_name_or_path")).rstrip("/\\").split("/")[-1] for a in (first, other)]
        if bases[0] != bases[1]:
            return f"{names[0]} and {name_of_other} adapt different bases ({bases[0]}, {bases[1]})"
        if set(first.weights) != set(other.weights):
            return f"{names[0]} and {name_of_other} adapt different modules"
        for name in first.weights:
            if first.weights.shape(name) != other.weights.shape(name):
                return f"{name!r} has another shape in {name_of_other} than in {names[0]}"
            if "lora_A" in name or "lora_embedding_A" in name:
                a, b = (adapter.weights[name].double().flatten() for adapter in (first, other))
                cosine = float(torch.cosine_similarity(a, b, dim=0))
                if cosine < _ALIKE:
                    return (
                        f"{names[0]} and {name_of_other} did not start from the same A ({name!r}: cosine {cosine:.2f})"
                    )
    return None


class Folded(Computed):
    """The base's weights with an adapter folded in, under the base's names; computed when asked for.

    Weights that the adapter changes are float32; `dtype` gives the type to write them in.
    """

    def __init__(self, base: LazyTensors, adapter: Adapter):
        super().__init__(base)
        self._adapter = adapter
        self.tied = tied_names(base)
        self._roles: dict[str, dict[str, str]] = {}  # name in the base: role to name in the adapter
        for name in adapter.weights:
            module, role = _split(name)
            self._roles.setdefault(_base_name(module, base, adapter), {})[role] = name
        pairs = ({"lora_A", "lora_B"}, {"lora_embedding_A", "lora_embedding_B"})
        for name, roles in self._roles.items():
            if set(roles) != {"whole"} and set(roles) - {"lora_magnitude_vector"} not in pairs:
                raise NamingError(f"The adapter {adapter.path} has only {', '.join(sorted(roles))} for {name!r}.")

    def __getitem__(self, name: str) -> Tensor:
        roles = self._roles.get(name)
        if roles is None:
            return self._like[name]
        if "whole" in roles:
            return self._adapter.weights[roles["whole"]]
        return self._folded(name, roles)

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[Tensor]:
        """Yield one tensor in flat chunks: straight from the base where the adapter does not change it."""
        return chunks_of(self._like if name not in self._roles else {name: self[name]}, name, size)

    def _folded(self, name: str, roles: Mapping[str, str]) -> Tensor:
        weights, config = self._adapter.weights, self._adapter.config
        embedding = "lora_embedding_A" in roles
        a = weights[roles["lora_embedding_A" if embedding else "lora_A"]].float()
        b = weights[roles["lora_embedding_B" if embedding else "lora_B"]].float()
        base = self._like[name].float()
        delta = b.flatten(1) @ a.flatten(1) * _scaling(roles, config, a.shape[0])
        turned = embedding or (
            tuple(delta.shape) != tuple(base.shape)
            if delta.shape[0] != delta.shape[1]
            else bool(config.get("fan_in_fan_out"))
        )
        turned = turned and base.ndim == 2
        delta = (delta.T if turned else delta).reshape(base.shape)
        if "lora_magnitude_vector" not in roles:
            return base + delta
        if base.ndim != 2 or embedding:
            raise SquisherError(
                f"{self._adapter.path} uses DoRA on {name!r}, which is not a linear layer: fold it with PEFT."
            )
        magnitude = weights[roles["lora_magnitude_vector"]].float().flatten()
        whole = base + delta
        norm = torch.linalg.norm(whole.T if turned else whole, dim=1)
        factor = (magnitude / norm).view(-1, 1)
        return whole * (factor.T if turned else factor)


_ROLE = re.compile(r"\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(\.weight)?$")


def _split(name: str) -> tuple[str, str]:
    """Return the name in the model, and the role of the tensor: a factor, or `whole` if it replaces the base's."""
    bare = name.removeprefix(_PREFIX).replace(".base_layer.", ".")
    match = _ROLE.search(bare)
    return (bare[: match.start()] + ".weight", match[1]) if match else (bare, "whole")


def _base_name(name: str, base: LazyTensors, adapter: Adapter) -> str:
    if name in base:
        return name
    # A weight file may leave out or add the outermost module: `h.0.…` for `transformer.h.0.…`.
    close = [other for other in base if other.endswith("." + name) or name.endswith("." + other)]
    if len(close) != 1:
        what = "has no weight" if not close else "has several weights"
        raise NamingError(f"The base {what} that fits {name!r} of the adapter {adapter.path}.{near(name, base)}")
    return close[0]


def _scaling(roles: Mapping[str, str], config: Mapping[str, Any], rank: int) -> float:
    module = _split(next(iter(roles.values())))[0].removesuffix(".weight")
    alpha = config.get("lora_alpha", 8)
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = value
            break
    return float(alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank)


def shira_mask_fn(importance: Mapping[str, Tensor], model: nn.Module) -> Callable[..., Tensor]:
    """Return a `mask_fn` for `peft.ShiraConfig`: the r · (inputs + outputs) most important entries of each layer.

    Args:
        importance: Importance by parameter name; only the layers that SHiRA asks for are read.
        model: The model that `get_peft_model` is called with, before that call; the function looks up the names of layers in it.

    Returns:
        A function of a linear layer and r. It cannot be saved with the adapter; the indices that it chooses are.
    """
    names = {id(p.parameter): (p.name, p.live_name, *p.aliases) for p in live_parameters(model)}

    def mask_fn(base_layer: nn.Module, r: int, **_: Any) -> Tensor:
        weight = base_layer.weight
        if not isinstance(weight, Tensor) or id(weight) not in names:
            raise NamingError(
                "SHiRA asks for a layer that is not in the model that shira_mask_fn was made with; make it with the very "
                "model that get_peft_model is called with."
            )
        name = next((n for n in names[id(weight)] if n in importance), None)
        if name is None:
            wanted = names[id(weight)][0]
            raise NamingError(
                f"There is no importance for {wanted!r}, which SHiRA is to train.{near(wanted, importance)}"
            )
        check_like({name: weight}, name, importance, name, ("the model", "the importance"))
        budget = r * sum(weight.shape)
        if budget > weight.numel():
            raise SquisherError(
                f"r={r} asks for {budget:,} entries of {name!r}, which has {weight.numel():,}. Choose a smaller r."
            )
        choice = per_source({name: lambda: chunks_of(importance, name)}, {name: budget})
        return torch.cat(list(choice.chunks(name))).view(weight.shape).to(weight)

    return mask_fn
