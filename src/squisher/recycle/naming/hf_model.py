"""A Hugging Face model from its config.json alone, on the meta device: names and shapes in registration order, no weights."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...errors import NamingError, SquisherError
from ...storage.json_files import read_object

__all__ = ["MissingPackage", "adapted_model", "built_by", "meta_model", "small_model"]

_LAYERS = 10_000  # more than any model has; a hostile config may not keep us building for hours


class MissingPackage(SquisherError):  # noqa: N818
    """An extra that would name the parameters is not installed."""


def meta_model(folder: Path) -> nn.Module:
    """Return the model that a folder's config.json describes, without weights. No code of the folder is ever run.

    Raises:
        MissingPackage: transformers is not installed.
        NamingError: transformers does not know the model or cannot build it.
    """
    transformers = _imported("transformers")
    config_file = folder / "config.json"
    content = read_object(config_file)
    _check_size(content, config_file)
    names = content.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    cls = getattr(transformers, name, None) if name and name.isidentifier() else None
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        what = f"describes a {name}" if name else "does not say which class the model is (architectures)"
        raise NamingError(
            f"{config_file} {what}, which transformers {transformers.__version__} does not have; code beside a model is never "
            "run. Pass the model itself (squisher.extract(path, model)), or the names in the optimizer's order with --names."
        )
    try:
        with _quietly():
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
            with torch.device("meta"):
                return cls(config)
    except Exception as error:
        reason = str(error).split("\n")[0]
        raise NamingError(
            f"transformers {transformers.__version__} cannot build a {name} from {config_file}: {reason}. Install the version "
            f"that trained it ({content.get('transformers_version', 'not recorded')}), or give the names with --names."
        ) from error


def small_model(folder: Path, shrink: Callable[[Any], tuple[Any, Any]]) -> tuple[Any, Any] | None:
    """Return a running copy of a folder's model with another config, if its parameters have the same names.

    Args:
        folder: With a config.json.
        shrink: Config to the one to build, and whatever else is to be handed back, None if there is none to build.
    """
    try:
        real = meta_model(folder)
        with _quietly():
            config, extra = shrink(real.config)
            if extra is None:
                return None
            small = type(real)(config)
    except Exception:  # a config that cannot be shrunk so
        return None
    names = [[name for name, _ in model.named_parameters()] for model in (real, small)]
    return (small, extra) if names[0] == names[1] else None


def adapted_model(base: nn.Module, folder: Path) -> nn.Module:
    """Return a model on the meta device with the adapter that a folder's adapter_config.json describes.

    Raises:
        MissingPackage: peft is not installed.
        NamingError: peft cannot put this adapter on this model.
    """
    peft = _imported("peft")
    try:
        with _quietly():
            config = peft.PeftConfig.from_pretrained(str(folder))
            config.inference_mode = False
            if hasattr(config, "init_lora_weights"):
                config.init_lora_weights = True  # other ways to begin look at the weights, of which there are none here
            with torch.device("meta"):
                return peft.get_peft_model(base, config)
    except Exception as error:
        reason = str(error).split("\n")[0]
        raise NamingError(
            f"peft {peft.__version__} cannot put the adapter of {folder} on a {type(base).__name__}: {reason}. Give the model "
            "that was adapted with --base-model, or the names in the optimizer's order with --names."
        ) from error


def built_by(folder: Path) -> str:
    """Return a clause that says so where another major version of transformers trained the model: the order may have changed."""
    transformers = _imported("transformers")
    saved = str(read_object(folder / "config.json").get("transformers_version") or "")
    if not saved or saved.split(".")[0] == transformers.__version__.split(".")[0]:
        return ""
    return f" (built by transformers {transformers.__version__}, saved by {saved})"


def _check_size(content: dict[str, Any], file: Path) -> None:
    nested = [value for value in content.values() if isinstance(value, dict)]
    for part in (content, *nested):
        for key, value in part.items():
            if "layer" in str(key) and isinstance(value, int) and value > _LAYERS:
                raise NamingError(f"{file} says {key} = {value}: no model has that many.")


def _imported(package: str) -> Any:
    try:
        return __import__(package)
    except ImportError as error:
        raise MissingPackage(
            f"Naming this checkpoint's parameters takes {package}, which is not installed: pip install 'torch-squisher[hf]'."
        ) from error


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep transformers and peft from reporting what does not matter for names."""
    loggers = [logging.getLogger(name) for name in ("transformers", "peft")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
