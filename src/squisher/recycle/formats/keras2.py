"""Legacy `.h5` files of tf.keras 2: which of the optimizer's weights is the squared gradient of which variable.

Three generations name them: `Adam/v/conv2d/kernel:0` (TensorFlow 2.11 and later), `Adam/conv2d/kernel/v:0` (before) and
`training/Adam/v_3:0` (Keras up to 2.3, in the order of the trainable variables, so that only the layers can name them).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...errors import FileError
from ...storage.byte_range import ByteRange
from ..states import Candidate
from .hdf5 import attribute, tensor_at

__all__ = ["Slots", "is_keras2", "slots_of"]

_SLOTS = {"Adagrad": ("accumulator",), "RMSprop": ("velocity", "rms"), "Adadelta": ("accumulated_grad", "accum_grad")}
_NEVER_TRAINED = ("moving_mean", "moving_variance")


class Slots(NamedTuple):
    """The squared-gradient weights of an optimizer.

    Attributes:
        tensors: One for each trained variable, in the optimizer's order.
        names: Their variables' paths; None where the file only numbers them.
        steps: The iteration.
        candidates: The variables that the layers train, in their order.
    """

    tensors: list[Any]
    names: list[str | None]
    steps: int | None
    candidates: list[Candidate]


def is_keras2(recorded: Sequence[str]) -> bool:
    """Whether the names of an optimizer's weights are TensorFlow's, which end in the number of an output."""
    return bool(recorded) and all(name.endswith(":0") for name in recorded)


def slots_of(span: ByteRange, file: Any, recorded: Sequence[str], class_name: str) -> Slots:
    """Find the squared-gradient weights of an optimizer.

    Raises:
        FileError: There are none, or a name appears twice.
    """
    slots = "|".join(_SLOTS.get(class_name, ("v",)))
    found: dict[str, tuple[str | None, str]] = {}
    steps: int | None = None
    for full in recorded:
        name = full.removesuffix(":0")
        newer = re.fullmatch(rf"\w+/(?:{slots})/(?P<path>.+)", name)
        older = re.fullmatch(rf"\w+/(?P<path>.+)/(?:{slots})", name)
        numbered = re.fullmatch(rf"(?:\w+/)*(?:{slots})_(?P<number>\d+)", name)
        if name.rpartition("/")[2] in ("iteration", "iterations", "iter"):
            steps = int(tensor_at(span, file, f"optimizer_weights/{full}").load())
        elif match := newer or older or numbered:
            path = None if match is numbered else match["path"]
            key = match["number"] if path is None else path
            if key in found:
                raise FileError(
                    f"{span.label} records the squared gradient of {key!r} twice: it is damaged. Get it again."
                )
            found[key] = (path, full)
    if not found:
        raise FileError(f"{span.label} records no squared gradient of the tf.keras optimizer {class_name}.")
    ordered = list(found.values())
    if all(path is None for path, _ in ordered):
        ordered = [found[str(k)] for k in range(len(found)) if str(k) in found]
    tensors = [tensor_at(span, file, f"optimizer_weights/{full}") for _, full in ordered]
    return Slots(tensors, [path for path, _ in ordered], steps, list(_candidates(file)))


def _candidates(file: Any) -> list[Candidate]:
    weights = file.get("model_weights", {})
    layers = [_text(layer) for layer in attribute(weights, "layer_names", ())] if weights else []
    out = []
    for layer in layers:
        for full in attribute(weights[layer], "weight_names", ()):
            name = _text(full).removesuffix(":0")
            if name.rpartition("/")[2] not in _NEVER_TRAINED:
                out.append(Candidate(name, tuple(weights[layer][_text(full)].shape)))
    return out


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
