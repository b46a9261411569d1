"""Model folders as the commands use them: open, find the importance, merge, prune, write.

    model = open_model("my-model")                            # lazy: tensors are read when asked for
    importance = open_importance("my-model")                  # squisher.safetensors beside it, or its optimizer's
    merged = squisher.merge.fisher([model.weights, other.weights], [importance, other_importance])
    write_model("merged", merged, like=model.path)            # whole or not at all, with config and tokenizer

`merge_folders` and `prune_folder` do what `squisher merge` and `squisher prune` do, with weight files and LoRA adapters too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from .. import __version__
from ..errors import ArgumentError, FileError, NamingError, NoAccumulatorError, SquisherError, check_choice
from ..importance import FILE_NAME, Importance, load
from ..importance.weights import check_weights
from ..merge import Merged, average, fisher, ota, task_arithmetic, ubgm
from ..names import FLOATS, excluded
from ..prune import weights as prune_weights
from ..recycle import extract
from ..storage import hub, safetensors
from ..storage.folders import Model, open_model, write_model
from ..storage.tensors import dtype_of, tied_names
from . import peft
from .publishing import described, pruning_card, short_paths

__all__ = [
    "METHODS", "Model", "Pruning", "Report", "merge_folders", "open_importance", "open_model", "prune_folder", "write_model",
]  # fmt: skip


@dataclass(frozen=True)
class Pruning:
    """What `prune_folder` did.

    Attributes:
        counts: For each pruned tensor, how many entries stay and how many there are.
        settings: The settings that were not None.
        unranked: Matrices without an importance, which stay as they are.
    """

    counts: dict[str, tuple[int, int]]
    settings: dict[str, Any] = field(default_factory=dict)
    unranked: list[str] = field(default_factory=list)

    @property
    def zeros(self) -> int:
        """The number of entries that are zero now."""
        return self.total - sum(stays for stays, _ in self.counts.values())

    @property
    def total(self) -> int:
        """The number of entries of all pruned tensors."""
        return sum(size for _, size in self.counts.values())


def prune_folder(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    importance: Importance | str | os.PathLike[str] | None = None,
    *,
    sparsity: float | None = None,
    nm: str | None = None,
    scope: str = "global",
    score: str = "fisher",
    exclude: str | None = None,
    seed: int = 0,
    any_weights: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> Pruning:
    """Set the least important weights of a model on disk to zero, and write it with a card; it may be larger than memory.

    Args:
        model: A model folder or weight file.
        out: The folder to make, or a `.safetensors` file.
        importance: An importance or its path; by default the one beside the model.
        sparsity: The fraction of weights to set to zero.
        nm: A pattern such as `"2:4"` instead of a sparsity.
        scope: `global` or `tensor`.
        score: `fisher`, `magnitude`, `importance` or `random`.
        exclude: A regular expression: tensors to leave as they are.
        seed: The seed of random scores.
        any_weights: Whether to accept an importance that was made with other weights.
        progress: Called with the current work, how much of it is done, and how much there is.

    Raises:
        SquisherError: The message says what is wrong; nothing is then left behind.
    """

    def reporting(what: str) -> Callable[[int, int], None] | None:
        return None if progress is None else lambda done, of: progress(what, done, of)

    opened = open_model(model)
    beside = opened.path.is_dir() and safetensors.exists(opened.path / FILE_NAME)
    if importance is None and (beside or score in ("fisher", "importance")):
        importance = model if hub.is_hub_id(model) else importance_of(opened.path, "--importance")
    if importance is not None and not isinstance(importance, Importance):
        importance = open_importance(Path(importance))
    label = hub.Address.read(model).repo if hub.is_hub_id(model) else opened.name
    check_weights([importance], [opened.weights], [label], any_weights)
    options: dict[str, Any] = {"sparsity": sparsity, "nm": nm, "scope": scope, "score": score, "exclude": exclude}
    pruned = prune_weights(opened.weights, importance, **options, seed=seed, progress=reporting("ranking"))
    settings = {key: value for key, value in options.items() if value is not None}
    settings |= {"seed": seed} if score == "random" else {}
    counts, tied = pruned.counts(reporting("counting")), tied_names(opened.weights)
    known = {*counts, *tied, *excluded(exclude, opened.weights, tied)}
    matrices = [name for name in opened.weights if dtype_of(opened.weights, name) in FLOATS and name not in known]
    done = Pruning(counts, settings, [name for name in matrices if len(opened.weights.shape(name)) > 1])
    card = pruning_card(label, settings, None if importance is None else described(importance), done.counts)
    write_model(out, pruned, opened.path, card=card, leave_out=tied, progress=reporting("writing"))
    return done


METHODS = ("average", "fisher", "ubgm", "task-arithmetic", "ota")
_WEIGHTED = ("fisher", "ubgm", "ota")
_FROM_BASE = ("ubgm", "task-arithmetic", "ota")
_MEANT_FOR = {  # the methods that take an option, and its default
    "importance": (_WEIGHTED, ()),
    "scale": (_WEIGHTED, "auto"),
    "floor": (_WEIGHTED, "relative"),
    "missing": (_WEIGHTED, "error"),
    "normalize": (("fisher",), None),
    "base_importance": (("ubgm",), None),
    "sizes": (("ubgm",), None),
    "base_size": (("ubgm",), None),
    "coefficients": (("average", "fisher", "ubgm", "task-arithmetic"), None),
    "keep": (("ota",), None),
}


@dataclass(frozen=True)
class Report:
    """What a merge did, for the card and for `--json`."""

    method: str
    models: list[str]
    coefficients: list[float]
    importances: list[str] = field(default_factory=list)
    base: str | None = None
    base_importance: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    merged: int = 0
    kept: dict[str, str] = field(default_factory=dict)
    averaged: dict[str, str] = field(default_factory=dict)
    copied: list[str] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    adapters: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are not empty."""
        return {key: value for key, value in vars(self).items() if value not in (None, [], {})}

    def card(self) -> str:
        """Return a model card: method, inputs, importances, coefficients; no path, host or date."""
        lines = ["---", "tags:", "- merge", "- squisher", "---", "", "# Merged model", ""]
        lines += [f"Merged with torch-squisher {__version__}, method `{self.method}`.", ""]
        lines += [self.adapters, ""] if self.adapters else []
        lines += ["| model | coefficient | importance |", "|---|---|---|"]
        for k, name in enumerate(self.models):
            used = self.importances[k] if self.importances else "–"
            lines.append(f"| {name} | {self.coefficients[k]:g} | {used} |")
        if self.base:
            lines.append(f"| {self.base} (base) | – | {self.base_importance or '–'} |")
        if self.options:
            lines += ["", "Options: " + ", ".join(f"{key} {value}" for key, value in self.options.items()) + "."]
        lines += ["", f"{self.merged} tensors were merged."]
        for what, names in (
            ("kept as in the first model", self.kept),
            ("without an importance, weighted by the coefficients alone", self.averaged),
        ):
            if names:
                shown = ", ".join(f"`{name}` ({why})" for name, why in list(names.items())[:20])
                lines += ["", f"{len(names)} tensors {what}: {shown}{', …' if len(names) > 20 else ''}."]
        if self.copied:
            lines += ["", f"{len(self.copied)} buffers were copied from the first model."]
        return "\n".join(lines) + "\n"


def merge_folders(
    method: str,
    models: Sequence[Path],
    out: Path,
    *,
    importances: Sequence[Path] = (),
    base: Path | None = None,
    base_importance: Path | None = None,
    coefficients: Sequence[float] | None = None,
    sizes: Sequence[float] | None = None,
    base_size: float | None = None,
    keep: Sequence[float] | None = None,
    scale: str = "auto",
    normalize: str | None = None,
    floor: str = "relative",
    missing: str = "error",
    exclude: str | None = None,
    dtype: str | None = None,
    any_weights: bool = False,
    shard_bytes: int = safetensors.SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Merge models on disk into a new folder (or a `.safetensors` file) that appears whole or not at all.

    Args:
        method: `average`, `fisher`, `ubgm`, `task-arithmetic` or `ota`.
        models: Folders of models or of LoRA adapters, or weight files; also on the Hub (`hf://owner/name[@revision]`).
        out: The folder to make.
        importances: One per model, in their order: importance files, or checkpoints to extract from. Without any,
            `squisher.safetensors` beside each model is looked for, then an optimizer state.
        base: The model that the others started from, or that adapters adapt.
        base_importance: The importance of the base.
        coefficients: One per model.
        sizes: For ubgm: the number of training examples of each model.
        base_size: For ubgm: the number of training examples of the base.
        keep: For ota: the fraction of its changes that a model keeps, one for all or one per model.
        scale: `auto`, `as_fisher` or `stored`.
        normalize: `mean` or `l2`.
        floor: `relative`, a number, or `+` and a number; for ubgm it is δ.
        missing: `error` or `average`.
        exclude: A regular expression: names that are not merged.
        dtype: The type to write; by default the first model's.
        any_weights: Whether to accept importances that were made with other weights.
        shard_bytes: Larger weights become shards with an index.
        progress: Called with the bytes written so far and in all.

    Raises:
        SquisherError: The message says what is wrong; nothing is then left behind.
    """
    check_choice("method", method, METHODS)
    options: dict[str, Any] = {
        "importance": tuple(importances),
        "scale": scale,
        "normalize": normalize,
        "floor": floor,
        "missing": missing,
        "exclude": exclude,
        "base_importance": base_importance,
        "coefficients": coefficients or None,
        "sizes": list(sizes) if sizes else None,
        "base_size": base_size,
        "keep": list(keep) if keep else None,
        "dtype": dtype,
    }
    for option, (methods, default) in _MEANT_FOR.items():
        if options[option] != default and method not in methods:
            spelled = option.removesuffix("s").replace("_", "-")  # --size and --coefficient are given once per model
            raise ArgumentError(f"--{spelled} has no meaning for {method}.")
    if importances and len(importances) != len(models):
        raise ArgumentError(
            f"There are {len(models)} models and {len(importances)} importances: give --importance once per model."
        )
    given = list(coefficients) if coefficients else [1.0] * len(models)
    if len(given) != len(models):
        raise ArgumentError(
            f"There are {len(models)} models and {len(given)} coefficients: give --coefficient once per model."
        )
    labels = [_label(path, name) for path, name in zip(models, short_paths(models), strict=True)]
    base_label = None if base is None else _label(base, base.resolve().name)
    models = [hub.fetch_model(path) if hub.is_hub_id(path) else path for path in models]
    base = hub.fetch_model(base) if base is not None and hub.is_hub_id(base) else base
    opened, first, base_weights, space = _open(method, models, base, coefficients=given)
    of_base, imps = None, [open_importance(path) for path in importances]
    if method == "ubgm" and base_importance is not None:
        of_base = open_importance(base_importance)
    elif method == "ubgm" and base is not None and base_size != 0:
        of_base = importance_of(base, "--base-importance, or do without it: --base-size 0")
    if method in _WEIGHTED and not imps:
        imps = [importance_of(path, "--importance, once per model") for path in models]
    if imps:
        check_weights(imps, opened, labels, any_weights)
    if of_base is not None and base_weights is not None:
        check_weights([of_base], [base_weights], [base_label or "the base"], any_weights)
    merged = _merged(method, opened, imps, given, base_weights, of_base, options)
    report = Report(
        method=method,
        models=labels,
        coefficients=given,
        importances=[described(imp) for imp in imps],
        base=base_label,
        base_importance=None if of_base is None else described(of_base),
        options={
            name.replace("_", " "): ", ".join(f"{one:g}" for one in value) if isinstance(value, list) else value
            for name in _TOLD
            if (value := options[name]) != _MEANT_FOR.get(name, ((), None))[1]
        },
        merged=len(merged.merged),
        kept=merged.kept,
        averaged=merged.averaged,
        copied=list(merged.copied),
        tied=merged.tied,
        adapters=space,
    )
    write_model(
        out,
        merged,
        first.path,
        card=report.card(),
        dtype=None if dtype is None else dtype_of(merged, merged.merged[0]),
        leave_out=merged.tied,
        shard_bytes=shard_bytes,
        progress=progress,
    )
    return report


_TOLD = ("scale", "normalize", "floor", "exclude", "sizes", "base_size", "keep", "dtype")
"""The options that a report lists if they are not the default."""


def _merged(
    method: str,
    models: Sequence[Mapping[str, Tensor]],
    importances: Sequence[Importance],
    coefficients: Sequence[float],
    base: Mapping[str, Tensor] | None,
    base_importance: Importance | None,
    options: Mapping[str, Any],
) -> Merged:
    """Return the merged weights, lazily."""
    common: dict[str, Any] = {key: options[key] for key in ("exclude", "dtype")}
    weighting = {**common, **{key: options[key] for key in ("scale", "missing")}}
    floor = options["floor"]
    if method == "average":
        return average(models, coefficients, **common)
    if method == "fisher":
        return fisher(models, importances, coefficients, normalize=options["normalize"], floor=floor, **weighting)
    if base is None:
        raise ArgumentError(f"{method} needs --base: the model that the others started from.")
    if method == "ubgm":
        sizes = options["sizes"], 1.0 if options["base_size"] is None else options["base_size"]
        return ubgm(base, models, base_importance, importances, coefficients, *sizes, delta=floor, **weighting)
    if method == "ota":
        keep = options["keep"] or [1.0]
        return ota(base, models, importances, keep[0] if len(keep) == 1 else keep, floor=floor, **weighting)
    return task_arithmetic(base, models, coefficients, **common)


def _open(
    method: str, models: Sequence[Path], base: Path | None, coefficients: Sequence[float]
) -> tuple[list[Mapping[str, Tensor]], Model | peft.Adapter, Mapping[str, Tensor] | None, str | None]:
    """Return the weights to merge, the model whose files the result copies, the base, and how adapters were merged."""
    adapted = [peft.is_adapter(path) for path in models]
    first = next((k for k, c in enumerate(coefficients) if c), 0)
    if not any(adapted):
        opened = [open_model(path) for path in models]
        if base is not None and method not in _FROM_BASE:
            raise ArgumentError(f"--base has no meaning for {method} of whole models.")
        start = None if base is None else open_model(base).weights
        return [m.weights for m in opened], opened[first], start, None
    if not all(adapted):
        odd = models[adapted.index(False)]
        raise SquisherError(
            f"{odd} is no LoRA adapter, but others are: fold those into their base first, or merge only adapters."
        )
    adapters = [peft.open_adapter(path) for path in models]
    apart = peft.why_not_together(adapters) if method not in _FROM_BASE else f"{method} starts from the base's weights"
    if apart is None:
        words = "LoRA adapters, merged factor by factor: they share one start."
        return [a.weights for a in adapters], adapters[first], None, words
    if method in _WEIGHTED:
        raise SquisherError(
            f"These adapters cannot be merged factor by factor ({apart}), and folded into the base their importances, which are "
            "those of the factors, have no meaning. Use average or task-arithmetic; or fold each adapter into its base "
            "(squisher merge task-arithmetic ADAPTER --base BASE --out FOLDED), measure an importance of each folded model (squisher "
            "fisher FOLDED --data FILE.jsonl --out FOLDED) and merge those."
        )
    named = str(adapters[0].config.get("base_model_name_or_path") or "")
    place = base or (Path(named) if named and Path(named).is_dir() else None)
    if place is None:
        raise SquisherError(
            f"These adapters are to be folded into their base ({apart}): give the folder of {named or 'the base model'} with --base."
        )
    whole = open_model(place)
    folded: list[Mapping[str, Tensor]] = [peft.Folded(whole.weights, a) for a in adapters]
    return folded, whole, whole.weights, f"LoRA adapters, folded into their base: {apart}."


def importance_of(model: Path, option: str) -> Importance:
    """Return the importance beside a model, or extract it from its optimizer's state.

    Args:
        model: A folder or weight file.
        option: The option that gives another importance, for messages.

    Raises:
        FileError: There is neither.
        NamingError: The names in the optimizer's state are not known.
    """
    if model.is_dir() and safetensors.exists(model / FILE_NAME):
        return load(model)
    try:
        return extract(model)
    except (FileError, NoAccumulatorError) as error:
        raise FileError(
            f"There is no importance for {model}: no {FILE_NAME} beside it, and no optimizer state to extract one from. Give one "
            f"with {option}."
        ) from error
    except NamingError as error:
        raise NamingError(f"The optimizer state of {model} cannot be used as it is: {error}") from error


def open_importance(path: str | os.PathLike[str]) -> Importance:
    """Open an importance file, here or on the Hub, or extract the importance of a checkpoint.

    Args:
        path: An importance file, a folder with one beside the model, or a checkpoint with an optimizer state.

    Raises:
        SquisherError: The path is something else.
    """
    path = Path(path)
    if hub.is_hub_id(path):
        found = hub.fetch_file(path, FILE_NAME)
        return extract(path) if found is None else load(found)
    if path.suffix in (".safetensors", ".json") or (path.is_dir() and safetensors.exists(path / FILE_NAME)):
        return load(path)
    return extract(path)


def _label(path: Path, name: str) -> str:
    """Return the name of a model for a report, without a path."""
    return hub.Address.read(path).repo if hub.is_hub_id(path) else name
