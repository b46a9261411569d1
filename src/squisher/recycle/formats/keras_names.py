"""The variables of a Keras model in the order of its config.json, as its optimizer numbers them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..states import Candidate
from .hdf5 import attribute

__all__ = ["candidates_of_config", "snake_case", "text"]

_VARIABLES = {  # the variables of a layer in their order; what config switches off is left out
    "Dense": ("kernel", "bias"), "EinsumDense": ("kernel", "bias"), "Embedding": ("embeddings",),
    "Conv1D": ("kernel", "bias"), "Conv2D": ("kernel", "bias"), "Conv3D": ("kernel", "bias"),
    "Conv1DTranspose": ("kernel", "bias"), "Conv2DTranspose": ("kernel", "bias"), "Conv3DTranspose": ("kernel", "bias"),
    "DepthwiseConv1D": ("kernel", "bias"), "DepthwiseConv2D": ("kernel", "bias"),
    "SeparableConv1D": ("depthwise_kernel", "pointwise_kernel", "bias"),
    "SeparableConv2D": ("depthwise_kernel", "pointwise_kernel", "bias"),
    "LayerNormalization": ("gamma", "beta"), "GroupNormalization": ("gamma", "beta"), "BatchNormalization": ("gamma", "beta"),
    "RMSNormalization": ("scale",), "PReLU": ("alpha",),
    "LSTM": ("kernel", "recurrent_kernel", "bias"), "GRU": ("kernel", "recurrent_kernel", "bias"),
    "SimpleRNN": ("kernel", "recurrent_kernel", "bias"),
}  # fmt: skip
_SWITCH = {"bias": "use_bias", "gamma": "scale", "beta": "center"}
_PARTS = {  # layers made of layers: where they are in the file, in the order of their variables
    "MultiHeadAttention": ("query_dense", "key_dense", "value_dense", "output_dense"),
    "Bidirectional": ("forward_layer/cell", "backward_layer/cell"),
    "LSTM": ("cell",), "GRU": ("cell",), "SimpleRNN": ("cell",), "TimeDistributed": ("layer",),
}  # fmt: skip


def candidates_of_config(config: Mapping[str, Any], file: Any) -> list[Candidate]:
    """The trainable variables in the order of config.json; nothing where some layer's order is not known."""
    try:
        return list(_of_model(config, file, ""))
    except _Unknown:
        return []


class _Unknown(Exception):  # noqa: N818 (never leaves this module)
    """A layer whose variables have no order that is known."""


def _of_model(config: Mapping[str, Any], group: Any, prefix: str, depth: int = 0) -> Iterator[Candidate]:
    settings = config.get("config") or {}
    layers = settings.get("layers")
    if not isinstance(layers, list) or "layers" not in group or depth > 8:
        raise _Unknown
    if config.get("class_name") == "Sequential":
        prefix = f"{prefix}{settings.get('name')}/"  # it builds its layers itself, so their paths begin with its name
    used: dict[str, int] = {}
    for layer in layers:
        file_name = snake_case(layer["class_name"])
        if layer["class_name"] == "InputLayer" and file_name not in group["layers"]:
            continue
        count = used[file_name] = used.get(file_name, -1) + 1
        own = group["layers"].get(f"{file_name}_{count}" if count else file_name)
        if own is None or _name(own) not in (None, (layer.get("config") or {}).get("name")):
            raise _Unknown  # the file's layer is another one than config.json's
        if "layers" in own:
            yield from _of_model(layer, own, prefix, depth + 1)
        else:
            yield from _of_layer(layer, own, prefix)


def _of_layer(layer: Mapping[str, Any], group: Any, prefix: str) -> Iterator[Candidate]:
    config, kind = layer.get("config") or {}, layer["class_name"]
    places = [place for place in _vars(group) if len(group[place])]
    if not config.get("trainable", True):
        return
    known = [place for place in _PARTS.get(kind, ("",)) if f"{place}/vars".lstrip("/") in places]
    if len(known) != len(places) and len(places) > 1:
        raise _Unknown
    for place in [p.removesuffix("vars").removesuffix("/") for p in places] if len(places) == 1 else known:
        names, inner = [prefix + str(config.get("name"))], group
        for part in place.split("/") if place else ():
            inner = inner[part]
            names.append(_name(inner) or part)
        for number in sorted(inner["vars"], key=int):
            data = inner["vars"][number]
            words = _variables(layer, place)
            if data.dtype.kind != "f" or (kind == "BatchNormalization" and int(number) >= len(words)):
                continue  # the state of a random generator; the moving mean and variance
            word = words[int(number)] if int(number) < len(words) else f"vars/{number}"
            yield Candidate("/".join([*names, word]), tuple(data.shape))


def _variables(layer: Mapping[str, Any], place: str) -> Sequence[str]:
    """The names of a layer's variables, or of those of a layer inside it, in their order."""
    kind, config = layer["class_name"], layer.get("config") or {}
    if kind in ("TimeDistributed", "Bidirectional") and isinstance(config.get("layer"), dict):
        return _variables(config["layer"], place)
    if kind == "MultiHeadAttention":
        return _VARIABLES["EinsumDense"]
    return [word for word in _VARIABLES.get(kind, ()) if config.get(_SWITCH.get(word, ""), True)]


def _name(group: Any) -> str | None:
    """The name of a layer, as recent versions write it down beside its variables."""
    name = attribute(group["vars"], "name") if "vars" in group else None
    return None if name is None else text(name)


def _vars(group: Any) -> list[str]:
    """Every group of variables inside a layer's."""
    found: list[str] = []
    group.visit(lambda path: found.append(path) if path.rpartition("/")[2] == "vars" else None)
    return found


def snake_case(name: str) -> str:
    """A class name as Keras writes it in files: `LayerNormalization` becomes `layer_normalization`."""
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


def text(value: Any) -> str:
    """A string attribute of an HDF5 file, which may come as bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
