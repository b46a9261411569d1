"""Keras: `.keras` archives, `.weights.h5` and legacy `.h5` files (of tf.keras 2 too).

Names are the variables' paths as Keras shows them, joined with "/" (`dense/kernel`). A legacy file records them. In the others
the optimizer's variables are only numbered: config.json gives the order of the layers, each layer's variables have a fixed order,
and the shapes must fit. A `.weights.h5` alone has no config.json, so its names must be given, and β₂ too.

Three generations of tf.keras 2 name an optimizer's weights: `Adam/v/conv2d/kernel:0` (TensorFlow 2.11 and later),
`Adam/conv2d/kernel/v:0` (before) and `training/Adam/v_3:0` (Keras up to 2.3, in the order of the trainable variables, so that
only the layers can name them).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from ...errors import FileError, NoAccumulatorError
from ...importance.facts import Pollution, RunFacts, Spoiler
from ...storage.byte_range import ByteRange
from ...storage.json_files import parse_json
from ...storage.torch_files import zip_entries
from ..optimizers.table import FACTORED
from ..states import Candidate, Entry, Found, OptimizerState, Options
from .hdf5 import attribute, is_hdf5, open_hdf5, tensor_at

__all__ = ["is_keras", "read_keras"]

# For each variable of the model, in turn: the optimizer's variables; then whole blocks, each under the option that adds it.
_LAYOUTS: dict[str, tuple[tuple[str, ...], tuple[tuple[str, str], ...]]] = {
    "Adam": (("momentum", "velocity"), (("amsgrad", "velocity_hat"),)),
    "AdamW": (("momentum", "velocity"), (("amsgrad", "velocity_hat"),)),
    "Nadam": (("momentum", "velocity"), ()),
    "Lamb": (("momentum", "velocity"), ()),
    "RMSprop": (("velocity",), (("momentum", "momentum"), ("centered", "average_gradient"))),
    "Adagrad": (("accumulator",), ()),
    "Adadelta": (("accumulated_grad", "accumulated_delta_var"), ()),
    "Adafactor": (("r", "c", "velocity"), ()),
}
_BEFORE = (("use_ema", "average"), ("gradient_accumulation_steps", "gradient_accumulator"))
_KEPT = {"Adagrad": "accumulator", "Adadelta": "accumulated_grad"}  # the others call it velocity
_REFUSED = {
    "SGD": "keeps at most a moving average of the gradient",
    "Lion": "keeps a moving average of the gradient",
    "Muon": "keeps a moving average of the gradient for most weights",
    "Adamax": "keeps a decayed maximum of |g|",
    "Ftrl": "keeps a sum that its own steps changed",
    "ScheduleFreeAdamW": "is not verified",
    "LossScaleOptimizer": "is not verified; extract from the inner optimizer",
}

_SLOTS = {"Adagrad": ("accumulator",), "RMSprop": ("velocity", "rms"), "Adadelta": ("accumulated_grad", "accum_grad")}
_NEVER_TRAINED = ("moving_mean", "moving_variance")

_HINT = (
    "Give the names in the optimizer's order with --names FILE (names=[...]), or the whole model as Keras saves it "
    "(model.save('model.keras')), whose config lists the layers."
)


def is_keras(path: Path) -> bool:
    """Return whether a file is a Keras archive or an HDF5 file."""
    return path.is_file() and (path.suffix == ".keras" or is_hdf5(path))


def read_keras(path: Path, options: Options) -> Found:
    """Read the optimizer of a Keras file.

    Raises:
        FileError: It is damaged, or holds no optimizer.
        NoAccumulatorError: Its optimizer keeps no average of the squared gradient.
    """
    if is_hdf5(path):
        span, config = ByteRange.of(path), {}
    else:
        entries = zip_entries(path)
        if "model.weights.h5" not in entries or "config.json" not in entries:
            raise FileError(f"{path} is no Keras archive: it must hold config.json and model.weights.h5, uncompressed.")
        span, config = entries["model.weights.h5"], _json(entries["config.json"].read(), f"config.json in {path}")
    with open_hdf5(span) as file:
        if "optimizer_weights" in file:
            return _legacy(span, file)
        if "optimizer" not in file or "vars" not in file["optimizer"]:
            raise FileError(f"{path} holds no optimizer state. Save the whole model: model.save('model.keras').")
        return _numbered(span, file, config)


def _json(text: bytes | str, what: str) -> dict[str, Any]:
    value = parse_json(text, what)
    return value if isinstance(value, dict) else {}


# -- numbered variables ------------------------------------------------------------------------------------------------


def _numbered(span: ByteRange, file: Any, config: Mapping[str, Any]) -> Found:
    group = file["optimizer"]["vars"]
    numbers = sorted((key for key in group if key.isdecimal()), key=int)
    if [int(number) for number in numbers] != list(range(len(numbers))):
        raise FileError(f"{span.label} lacks some of the optimizer's variables: it has {', '.join(numbers[:8])}, …")
    tensors = [tensor_at(span, file, f"optimizer/vars/{number}") for number in numbers]
    saved = (config.get("compile_config") or {}).get("optimizer") or {}
    known = saved.get("config") if isinstance(saved, dict) else None
    settings = known if isinstance(known, dict) else {}
    name = saved.get("class_name") if settings else _class_by_name(str(attribute(group, "name", "")))
    _refuse(name, span)
    iteration, chosen = _layout(str(name), tensors, settings, span)
    steps = _steps(int(iteration.load()), settings)
    entries = [Entry(_state(str(name), source, steps), _group(str(name), settings)) for source in chosen]
    models = [("the layers in config.json", candidates)] if (candidates := _candidates_of_config(config, file)) else []
    return Found([OptimizerState(entries, str(name), "optimizer")], models, _facts(settings), hint=_HINT, vouched=True)


def _class_by_name(name: str) -> str:
    """Return the class for the name that Keras gives to the first optimizer of a class, unless the user chose one."""
    plain = re.sub(r"_\d+$", "", name)
    for known in (*_LAYOUTS, *_REFUSED):
        if _snake_case(known) == plain:
            return known
    return name


def _refuse(name: Any, span: ByteRange) -> None:
    if name in _REFUSED:
        raise NoAccumulatorError(
            f"{span.label} was trained with Keras's {name}, which {_REFUSED[name]}, so it holds no usable average of the "
            "squared gradient. Train with Adam or AdamW."
        )
    if name not in _LAYOUTS:
        raise NoAccumulatorError(
            f"{span.label} has the optimizer {str(name)!r}, which is not one that is known: {', '.join(_LAYOUTS)}. Give the "
            ".keras file, which records the class."
        )


def _layout(name: str, tensors: Sequence[Any], settings: Mapping[str, Any], span: ByteRange) -> tuple[Any, list[Any]]:
    """Return the iteration, and the squared-gradient variables in the model's order; shapes must prove the layout."""
    each, blocks = _LAYOUTS[name]
    header = 2 if len(tensors) > 1 and tensors[1].shape == () else 1  # a learning-rate schedule is no variable
    rest = list(tensors[header:])
    if name == "Nadam" and rest:
        rest.pop()  # the product of its momentum factors
    flags = [key for key, _ in (*_BEFORE, *blocks)]
    switches = [[bool(settings.get(key))] if settings else [False, True] for key in flags]
    found: dict[tuple[int, ...], list[Any]] = {}
    for states in product(*switches):
        on = dict(zip(flags, states, strict=True))
        before = sum(on[key] for key, _ in _BEFORE)
        after = sum(on[key] for key, _ in blocks)
        count, left = divmod(len(rest), len(each) + before + after)
        if left or not count:
            continue
        start, end = before * count, (before + len(each)) * count
        main = rest[start:end]
        place = each.index(_KEPT.get(name, "velocity"))
        chosen = main[place :: len(each)]
        shapes = [tensor.shape for tensor in chosen]
        beside = (*range(0, start, count), *range(end, len(rest), count))
        fits = all(rest[k + j].shape == shapes[j] for k in beside for j in range(count))
        if name != "Adafactor":
            fits = fits and all(tensor.shape == shapes[k // len(each)] for k, tensor in enumerate(main))
        if fits:
            found.setdefault(tuple(id(tensor) for tensor in chosen), chosen)
    if len(found) != 1 or not tensors or tensors[0].shape != ():
        how = "do not fit" if not found else "fit in several ways"
        raise FileError(
            f"{span.label}: the {len(tensors)} variables of the Keras optimizer {name} {how} to what is known of it. "
            "Give the .keras file, or one of a version that is known (Keras 3)."
        )
    return tensors[0], next(iter(found.values()))


# -- legacy ------------------------------------------------------------------------------------------------------------


def _legacy(span: ByteRange, file: Any) -> Found:
    training = _json(attribute(file, "training_config", "{}"), f"training_config in {span.label}")
    saved = training.get("optimizer_config") or {}
    name, settings = str(saved.get("class_name")).rpartition(">")[2], saved.get("config") or {}
    _refuse(name, span)
    recorded = [_text(n) for n in attribute(file["optimizer_weights"], "weight_names", ())]
    older = bool(recorded) and all(one.endswith(":0") for one in recorded)  # tf.keras 2
    slots = _slots_2(span, recorded, name) if older else _slots_3(span, file, recorded, name)
    counts = [one for one in recorded if re.fullmatch(r"(?:.*/)?iter(?:ations?)?(?::0)?", one)]
    steps, group = _steps(_one_count(span, file, counts), settings), _group(name, settings)
    entries = []
    for path, full in slots:
        source = tensor_at(span, file, f"optimizer_weights/{full}")
        entries.append(Entry(_state(name, source, steps), group, 0, path))
    candidates = _trained_variables(file) if older else []
    models = [("the layers of the file", candidates)] if candidates else []
    state = OptimizerState(entries, name, "optimizer_weights")
    return Found([state], models, _facts(settings), hint=_HINT, vouched=older)


def _slots_3(span: ByteRange, file: Any, recorded: Sequence[str], class_name: str) -> list[tuple[str | None, str]]:
    """Return the squared-gradient weights that Keras 3 names: the path of each one's variable, and its own.

    Raises:
        FileError: There are none, or names are not distinct.
    """
    weights = file.get("model_weights", {})
    paths = [_text(path) for layer in weights for path in attribute(weights[layer], "weight_names", ())]
    by_stem = {path.replace("/", "_"): path for path in paths}
    kept = _KEPT.get(class_name, "velocity")
    found: dict[str | None, str] = {}
    for full in recorded:
        stem = full.partition("/")[2] or full
        if stem.endswith(f"_{kept}"):
            stem = stem.removesuffix(f"_{kept}")
            found[by_stem.get(stem, stem)] = full
    if not found or len(by_stem) != len(paths):
        raise FileError(f"{span.label} records no {kept} of {class_name}, or its names are not distinct.")
    return list(found.items())


def _slots_2(span: ByteRange, recorded: Sequence[str], class_name: str) -> list[tuple[str | None, str]]:
    """Return the squared-gradient weights that tf.keras 2 names, in the optimizer's order; without a path where they are numbered.

    Raises:
        FileError: There are none, or a name appears twice.
    """
    slots = "|".join(_SLOTS.get(class_name, ("v",)))
    found: dict[str, tuple[str | None, str]] = {}
    for full in recorded:
        name = full.removesuffix(":0")
        newer = re.fullmatch(rf"\w+/(?:{slots})/(?P<path>.+)", name)
        older = re.fullmatch(rf"\w+/(?P<path>.+)/(?:{slots})", name)
        numbered = re.fullmatch(rf"(?:\w+/)*(?:{slots})_(?P<number>\d+)", name)
        if match := newer or older or numbered:
            path = None if match is numbered else match["path"]
            key = match["number"] if path is None else path
            if key in found:
                raise FileError(f"{span.label} is damaged: the squared gradient of {key!r} is there twice.")
            found[key] = (path, full)
    if not found:
        raise FileError(f"{span.label} records no squared gradient of the tf.keras optimizer {class_name}.")
    if all(path is None for path, _ in found.values()):
        return [found[number] for number in sorted(found, key=int)]
    return list(found.values())


def _one_count(span: ByteRange, file: Any, names: Sequence[str]) -> int | None:
    """Return the step count that a file records; an optimizer that wraps another may record its own beside it.

    Raises:
        FileError: There are several, and they differ.
    """
    counts = {name: int(tensor_at(span, file, f"optimizer_weights/{name}").load()) for name in names}
    if len(set(counts.values())) > 1:
        raise FileError(
            f"{span.label} records several step counts ({', '.join(f'{name}: {count}' for name, count in counts.items())}), and "
            "nothing says which of them the squared gradients have seen. Compile the model with the optimizer that is inside, and save it again."
        )
    return next(iter(counts.values()), None)


def _trained_variables(file: Any) -> list[Candidate]:
    """Return the variables that the layers of a tf.keras 2 file train, in their order."""
    weights = file.get("model_weights", {})
    layers = [_text(layer) for layer in attribute(weights, "layer_names", ())] if weights else []
    out = []
    for layer in layers:
        for full in attribute(weights[layer], "weight_names", ()):
            name = _text(full).removesuffix(":0")
            if name.rpartition("/")[2] not in _NEVER_TRAINED:
                out.append(Candidate(name, tuple(weights[layer][_text(full)].shape)))
    return out


def _steps(iteration: int | None, settings: Mapping[str, Any]) -> int | None:
    """Return the optimizer steps: the iteration counts every batch, also those whose gradients are only accumulated."""
    every = settings.get("gradient_accumulation_steps")
    return iteration // every if iteration is not None and isinstance(every, int) and every > 0 else iteration


# -- what it means -----------------------------------------------------------------------------------------------------


def _state(name: str, source: Any, steps: int | None) -> dict[str, Any]:
    """Return the state under the keys that the table of accumulators knows."""
    key = {"RMSprop": "square_avg", "Adadelta": "square_avg", "Adagrad": "sum"}.get(name, "exp_avg_sq")
    return {key: source, "step": steps, **({"acc_delta": None} if name == "Adadelta" else {})}


def _group(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings under the names that the table of accumulators knows; decay is decoupled in every Keras optimizer."""
    group: dict[str, Any] = {"weight_decay": settings.get("weight_decay"), "eps": settings.get("epsilon")}
    group["decoupled_weight_decay"] = True
    if name == "Adagrad":
        if "initial_accumulator_value" not in settings:
            raise NoAccumulatorError(
                "This Keras file does not record Adagrad's initial_accumulator_value, so the sum cannot be turned into a mean. "
                "Give the .keras file."
            )
        group["initial_accumulator_value"] = settings["initial_accumulator_value"]
    elif name == "Adafactor":
        group["decay_rate"] = settings.get("beta_2_decay")
    elif name in ("RMSprop", "Adadelta"):
        group["alpha" if name == "RMSprop" else "rho"] = settings.get("rho")
    else:
        group["betas"] = (settings.get("beta_1"), settings.get("beta_2"))
        group["amsgrad"] = bool(settings.get("amsgrad"))
    return group


def _facts(settings: Mapping[str, Any]) -> RunFacts:
    if not settings:
        return RunFacts()
    limits = {key: settings.get(key) for key in ("clipnorm", "global_clipnorm", "clipvalue")}
    said = [Pollution.clipping(limit, key) for key, limit in limits.items() if isinstance(limit, (int, float))]
    clipped = bool(said)
    every = settings.get("gradient_accumulation_steps")
    if isinstance(every, int) and every > 1:
        note = f"Each step squares the mean gradient of {every} batches (gradient_accumulation_steps)."
        said.append(Pollution(Spoiler.ACCUMULATED, {"batches": every}, note))
    if "beta_2_decay" in settings:  # Adafactor
        said.append(FACTORED)
    return RunFacts(pollution=tuple(said), after_clipping=clipped)


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
_INSIDE = {  # layers made of layers: where they are in the file, in the order of their variables
    "MultiHeadAttention": ("query_dense", "key_dense", "value_dense", "output_dense"),
    "Bidirectional": ("forward_layer/cell", "backward_layer/cell"),
    "LSTM": ("cell",), "GRU": ("cell",), "SimpleRNN": ("cell",), "TimeDistributed": ("layer",),
}  # fmt: skip


def _candidates_of_config(config: Mapping[str, Any], file: Any) -> list[Candidate]:
    """Return the trainable variables in the order of config.json; nothing where some layer's order is not known."""
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
        file_name = _snake_case(layer["class_name"])
        if layer["class_name"] == "InputLayer" and file_name not in group["layers"]:
            continue
        count = used[file_name] = used.get(file_name, -1) + 1
        inner = group["layers"].get(f"{file_name}_{count}" if count else file_name)
        if inner is None or _name(inner) not in (None, (layer.get("config") or {}).get("name")):
            raise _Unknown  # the file's layer is another one than config.json's
        if "layers" in inner:
            yield from _of_model(layer, inner, prefix, depth + 1)
        else:
            yield from _of_layer(layer, inner, prefix)


def _of_layer(layer: Mapping[str, Any], group: Any, prefix: str) -> Iterator[Candidate]:
    config, kind = layer.get("config") or {}, layer["class_name"]
    places = [place for place in _vars(group) if len(group[place])]
    if not config.get("trainable", True):
        return
    known = [place for place in _INSIDE.get(kind, ("",)) if f"{place}/vars".lstrip("/") in places]
    if len(known) != len(places) and len(places) > 1:
        raise _Unknown
    for place in [p.removesuffix("vars").removesuffix("/") for p in places] if len(places) == 1 else known:
        names, inner = [prefix + str(config.get("name"))], group
        for key in place.split("/") if place else ():
            inner = inner[key]
            names.append(_name(inner) or key)
        for number in sorted(inner["vars"], key=int):
            data = inner["vars"][number]
            words = _variables(layer, place)
            if data.dtype.kind != "f" or (kind == "BatchNormalization" and int(number) >= len(words)):
                continue  # the state of a random generator; the moving mean and variance
            word = words[int(number)] if int(number) < len(words) else f"vars/{number}"
            yield Candidate("/".join([*names, word]), tuple(data.shape))


def _variables(layer: Mapping[str, Any], place: str) -> Sequence[str]:
    """Return the names of a layer's variables, or of a layer inside it, in their order."""
    kind, config = layer["class_name"], layer.get("config") or {}
    if kind in ("TimeDistributed", "Bidirectional") and isinstance(config.get("layer"), dict):
        return _variables(config["layer"], place)
    if kind == "MultiHeadAttention":
        return _VARIABLES["EinsumDense"]
    return [word for word in _VARIABLES.get(kind, ()) if config.get(_SWITCH.get(word, ""), True)]


def _name(group: Any) -> str | None:
    """Return the name of a layer, as recent versions write it down beside its variables."""
    name = attribute(group["vars"], "name") if "vars" in group else None
    return None if name is None else _text(name)


def _vars(group: Any) -> list[str]:
    """Return the place of every group of variables inside a layer."""
    found: list[str] = []
    group.visit(lambda path: found.append(path) if path.rpartition("/")[2] == "vars" else None)
    return found


def _snake_case(name: str) -> str:
    """Return a class name as Keras writes it in files: `LayerNormalization` becomes `layer_normalization`."""
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


def _text(value: Any) -> str:
    """Return a string attribute of an HDF5 file, which may come as bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
