"""Fisher merging inside mergekit: the method `squisher_fisher`, with the importance of each model beside it or as a parameter.

    merge_method: squisher_fisher
    models:
      - model: first
        parameters: {weight: 1.0}
      - model: second
        parameters: {weight: 0.5, importance: second-importance.safetensors}
    parameters: {floor: relative, normalize: none, scale: auto, missing: error}
    dtype: bfloat16

`floor`, `normalize`, `scale` and `missing` are those of `squisher.merge.fisher`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import ArgumentError, FileError, SquisherError
from ..importance import FILE_NAME, Importance, load, tied_in
from ..importance.weights import check_weights
from ..merge import average, fisher
from ..merge.inputs import graded, matched
from ..names import check_known
from ..storage.atomic import new_folder
from ..storage.byte_range import ByteRange
from ..storage.folders import open_model
from .publishing import short_paths

__all__ = ["METHOD", "register", "run"]

METHOD = "squisher_fisher"
_LONGEST = 1_000_000  # characters of a configuration
_LARGEST = 100_000  # values in it, with every alias written out


_PARAMETERS = ("importance", "weight", "floor", "normalize", "scale", "missing")


class _Settings(NamedTuple):
    models: tuple[str, ...]
    importances: tuple[str, ...]
    floor: str
    normalize: str
    scale: str
    missing: str


class _Ready(NamedTuple):
    """The importances of a merge, on one scale and normalized; floor and coefficients are still to be applied."""

    importances: list[Importance]
    names: list[dict[str, str]]
    averaged: dict[str, str]
    floor: str | list[float]


def run(config: str | os.PathLike[str], out: str | os.PathLike[str], options: Sequence[str] = ()) -> None:
    """Run a mergekit configuration with `squisher_fisher` registered; the output appears whole or not at all.

    Args:
        config: The configuration. Relative names of models and importances are looked for here, then beside this file.
        out: The folder to make.
        options: Options of the command `mergekit-yaml`, such as `--cuda` or `--lazy-unpickle`.

    Raises:
        SquisherError: mergekit is missing, a model cannot be found, or importances would not fit the merge.
    """
    config, out = Path(config), Path(out)
    try:
        import mergekit.card
        import yaml
        from mergekit.config import MergeConfiguration
        from mergekit.merge import run_merge
    except ImportError as error:
        raise SquisherError("squisher mergekit takes mergekit: pip install 'torch-squisher[mergekit]'.") from error
    register()
    try:
        source = ByteRange.of(config).read().decode("utf-8")
        _check_yaml(source, yaml)
        merge_config = MergeConfiguration.model_validate(_beside(yaml.safe_load(source), config.parent))
    except (ValueError, RecursionError, yaml.YAMLError) as error:  # a ValidationError of pydantic is a ValueError
        raise FileError(f"{config} is not a mergekit configuration: {' '.join(str(error).split())}") from error
    if merge_config.merge_method == METHOD:
        _check(merge_config)
    merge_options = _options(options)
    _find(merge_config, merge_options.transformers_cache)
    asks_hub = mergekit.card.is_hf
    mergekit.card.is_hf = lambda path: (
        not os.path.exists(path) and asks_hub(path)
    )  # it would also ask for a folder here
    with new_folder(out) as folder:  # it has its final name, because mergekit names the model after the folder
        try:
            run_merge(merge_config, str(folder), merge_options, config_source=source)
        except ArgumentError as error:
            raise SquisherError(f"{config}: {error}") from error
        except SquisherError:
            raise
        except Exception as error:  # errors of several libraries
            cause = error.__cause__ if isinstance(error.__cause__, SquisherError) else error
            raise SquisherError(f"mergekit could not merge: {' '.join(str(cause).split())}") from error
        finally:
            mergekit.card.is_hf = asks_hub


def _check_yaml(source: str, yaml: Any) -> None:
    """Refuse a configuration whose aliases expand into an unreasonable size.

    Raises:
        ValueError: It is too long, or too large with its aliases written out.
    """
    if len(source) > _LONGEST:
        raise ValueError(f"it is {len(source):,} characters long; more than {_LONGEST:,} are not read")
    sizes: dict[int, int] = {}

    def size(node: Any) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = _LARGEST  # the size of a node that contains itself
            children = node.value if isinstance(node.value, list) else []
            flat = [part for child in children for part in (child if isinstance(child, tuple) else (child,))]
            sizes[id(node)] = 1 + sum(map(size, flat))
        return sizes[id(node)]

    root = yaml.compose(source, yaml.SafeLoader)
    if root is not None and size(root) >= _LARGEST:
        raise ValueError(f"with its aliases it stands for more than {_LARGEST:,} values")


def _options(given: Sequence[str]) -> Any:
    """Return mergekit's options, parsed by mergekit itself."""
    import click
    from mergekit.options import add_merge_options

    @click.command()
    @add_merge_options
    def read(merge_options: Any) -> Any:
        return merge_options

    try:
        return read.main(["--quiet", *given], prog_name="mergekit-yaml", standalone_mode=False)
    except click.ClickException as error:
        raise ArgumentError(f"mergekit does not take these options: {error.format_message()}") from error


def _beside(value: Any, folder: Path, key: str = "") -> Any:
    """Return a configuration in which names of models and importances in its folder are paths."""
    if isinstance(value, dict):
        return {name: _beside(inner, folder, str(name)) for name, inner in value.items()}
    if isinstance(value, list):
        return [_beside(inner, folder, key) for inner in value]
    if key in ("model", "path", "base_model", "importance") and isinstance(value, str) and not Path(value).exists():
        return str(folder / value) if value and (folder / value).exists() else value
    return value


def _find(config: Any, cache: str | None) -> None:
    """Refuse a model that is neither here nor on the Hub, before mergekit begins.

    Raises:
        FileError: There is no such model, or the Hub cannot be reached.
    """
    for reference in config.referenced_models():
        name = reference.model.path
        if not Path(name).exists() and (name.count("/") != 1 or name.startswith(".")):
            raise FileError(f"There is no folder {name}, neither here nor beside the configuration.")
        try:
            reference.local_path(cache, ignore_lora=True)
        except Exception as error:  # the Hub's client raises errors of several libraries
            why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise FileError(
                f"There is no folder {name}, neither here nor beside the configuration, and it cannot be fetched from the Hub: {why}"
            ) from error


def _check(config: Any) -> None:
    for key, why in (
        ("slices", "the result has other layers than the importances"),
        ("modules", "importances are matched by the names of one whole model"),
        ("tokenizer", "the rows of the embeddings would move, but not the rows of the importances"),
        ("tokenizer_source", "the rows of the embeddings would move, but not the rows of the importances"),
    ):
        if getattr(config, key, None):
            raise SquisherError(f"{METHOD} does not take {key} in a mergekit configuration: {why}.")
    given = [config.parameters, *(model.parameters for model in config.models or ())]
    check_known(
        [name for parameters in given for name in parameters or {}],
        _PARAMETERS,
        ("the configuration", METHOD),
        "mergekit would leave such a parameter out without a word.",
    )


def register() -> None:
    """Make `squisher_fisher` known to mergekit; harmless when repeated.

    Raises:
        SquisherError: mergekit is missing, or is a release without `register`.
    """
    try:
        from mergekit.merge_methods import PerInput, TensorGroup, merge_method, registered_methods
        from mergekit.merge_methods import register as add
    except ImportError as error:
        raise SquisherError("This takes mergekit 0.1.5 or later: pip install 'torch-squisher[mergekit]'.") from error
    if any(method.spec.name == METHOD for method in registered_methods()):
        return

    def squisher_fisher(
        group: Any,
        importance: Any = "",
        weight: Any = 1.0,
        floor: float | str = "relative",
        normalize: str = "none",
        scale: str = "auto",
        missing: str = "error",
    ) -> Tensor:
        entries = sorted(group.entries, key=lambda entry: str(entry.id))  # the same bytes in any order
        settings = _Settings(
            tuple(_folder(entry.id) for entry in entries),
            tuple(str(importance[entry.id]) for entry in entries),
            str(floor),
            normalize,
            scale,
            missing,
        )
        return _merged(group.metadata.name, [entry.tensor for entry in entries], weight.values_for(entries), settings)

    # mergekit reads the annotations, which name its own types and so exist only once it is imported.
    squisher_fisher.__annotations__ |= {
        "group": TensorGroup,
        "importance": PerInput[str],
        "weight": PerInput[float],
        "floor": float | str,
        "normalize": str,
        "scale": str,
        "missing": str,
        "return": Tensor,
    }
    options = {"pretty_name": "Fisher (squisher)", "reference_url": "https://arxiv.org/abs/2111.09832"}
    add(merge_method(name=METHOD, uses_accelerator=False, **options)(squisher_fisher))


def _folder(reference: Any) -> str:
    if getattr(reference, "lora", None):
        raise SquisherError(f"{METHOD} does not take models with a LoRA adapter: fold it into its base first.")
    return str(reference.local_path() if hasattr(reference, "local_path") else reference)


def _merged(name: str, tensors: Sequence[Tensor], weights: Sequence[float], settings: _Settings) -> Tensor:
    ready = _prepared(settings)
    models = [{name: tensor.cpu()} for tensor in tensors]
    if not tensors[0].dtype.is_floating_point:
        return tensors[0]
    if name in ready.averaged or len(models) == 1:
        return average(models, weights)[name].to(tensors[0].device)
    values: list[Mapping[str, Tensor]] = []
    for imp, names in zip(ready.importances, ready.names, strict=True):
        stored = names.get(name, name)
        values.append({name: imp[stored]} if stored in imp else {})
    return fisher(models, values, weights, scale="stored", floor=ready.floor)[name].to(tensors[0].device)


@lru_cache(maxsize=4)
def _prepared(settings: _Settings) -> _Ready:
    """Check names and scale of the whole models once, reading headers alone."""
    models = [open_model(path).weights for path in settings.models]
    given = zip(settings.models, settings.importances, strict=True)
    importances = [_load(model, importance) for model, importance in given]
    floating = [name for name in models[0] if models[0].dtype(name).is_floating_point]
    labels = short_paths([Path(path) for path in settings.models])
    check_weights(importances, models, labels)
    who = [f"the importance of {label}" for label in labels]
    names, averaged = matched(models[0], floating, tied_in(importances), importances, settings.missing, who)
    ready = graded(importances, names, settings.scale, who)
    norms = [1.0 for _ in ready]
    if settings.normalize in ("mean", "l2"):
        norms = [g.norm(list(g), settings.normalize) for g in ready]
    elif settings.normalize not in ("none", ""):
        raise SquisherError(f"normalize is mean, l2 or none, not {settings.normalize!r}.")
    scaled = [imp * (g.factor / norm) for imp, g, norm in zip(importances, ready, norms, strict=True)]
    if settings.floor == "relative":
        return _Ready(scaled, names, averaged, "relative")
    try:
        if settings.floor.startswith("+"):  # squisher merge adds it; here it would be a floor like any other
            raise ValueError
        floors = [float(settings.floor) / norm for norm in norms]
    except ValueError:
        raise SquisherError(f"floor is relative or a number, not {settings.floor!r}.") from None
    return _Ready(scaled, names, averaged, floors)


def _load(model: str, importance: str) -> Importance:
    try:
        return load(importance or model)
    except FileError as error:
        if importance:
            raise
        raise FileError(
            f"There is no importance for {model}: put {FILE_NAME} beside it, or name one with the parameter importance of this model."
        ) from error
