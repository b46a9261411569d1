"""Load a Hugging Face model (whole or sharded) and batches from a JSONL file of text, for `squisher.fisher`."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import ranks
from ..errors import ArgumentError, FileError, SquisherError, check_positive, require
from ..recycle.naming.candidates import candidates_of_module
from ..recycle.states import Candidate
from ..storage.folders import Weights, open_weights
from ..storage.json_files import parse_json, read_object
from ..storage.tensors import CHUNK
from .peft import CONFIG, is_adapter

__all__ = ["TextModel", "count_rows", "load_shards", "load_text_model", "text_batches"]


class TextModel(NamedTuple):
    """A model with its tokenizer."""

    model: nn.Module
    tokenizer: Any
    task: str
    """`classification` or `language modelling`."""


def load_text_model(
    folder: str | os.PathLike[str], device: str = "cpu", base: str | os.PathLike[str] | None = None, shard: bool = False
) -> TextModel:
    """Load a sequence classifier or a causal language model with its tokenizer; no code of the folder is run.

    A folder with a PEFT adapter is loaded onto its base, with the adapter's parameters trainable and all others frozen.

    Args:
        folder: A model, or an adapter.
        device: The device to load it on.
        base: For an adapter: the model that it adapts; by default the one that it names.
        shard: Whether each process of the job loads only its shard (FSDP2).

    Raises:
        FileError: The folder is not a Hugging Face model or lacks some of its weights, or an adapter's base is not found.
        SquisherError: transformers or peft is missing, or the model is of another kind.
    """
    transformers = require("transformers", "hf", "Reading a Hugging Face model")
    path = Path(folder)
    adapter = is_adapter(path)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # depending on how torch was built
        raise ArgumentError(
            f"torch cannot use the device {device!r}: {str(error).split('. ')[0].rstrip('.')}. Take another one, such as cpu."
        ) from error
    if base is not None and not adapter:
        raise SquisherError(f"{path} is no adapter ({CONFIG} is missing), so there is no base for it.")
    if adapter and shard:
        raise SquisherError(f"{path} is an adapter, and adapters are not loaded into shards. Leave --shard out.")
    place = _base_of(path, base) if adapter else path
    if not (place / "config.json").is_file():
        raise FileError(f"{place} is not the folder of a Hugging Face model: it holds no config.json.")
    try:
        config = transformers.AutoConfig.from_pretrained(place)
        task, loader = _task(path, config, adapter, transformers)
        tokens = path if adapter and (path / "tokenizer_config.json").is_file() else place
        tokenizer = transformers.AutoTokenizer.from_pretrained(tokens)
        if shard:
            model: Any = load_shards(place, config, loader.from_config, device)
        else:
            model, found = loader.from_pretrained(place, torch_dtype="auto", output_loading_info=True)
            _refuse_missing(place, found["missing_keys"], path if adapter else None)
        if adapter:
            peft = require("peft", "hf", "Reading an adapter")
            model = peft.PeftModel.from_pretrained(model, path, is_trainable=True)
    except (OSError, ValueError, KeyError) as error:
        raise FileError(f"{path} cannot be loaded with transformers: {str(error).splitlines()[0]}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # any token: it is masked everywhere
    if tokenizer.pad_token is None:
        raise SquisherError(f"The tokenizer of {path} has no token to pad with; set its pad_token.")
    if task == "language modelling":
        # With padding on the left, absolute positions would depend on the longest example of the batch.
        tokenizer.padding_side = "right"
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return TextModel((model if shard else model.to(device)).eval(), tokenizer, task)


def _task(path: Path, config: Any, adapter: bool, transformers: Any) -> tuple[str, Any]:
    """Return the task and the class that loads it; an adapter's task may turn a bare encoder into a classifier."""
    given = read_object(path / CONFIG).get("task_type") if adapter else None
    name = "" if given else (list(config.architectures or []) or [""])[0]
    if given == "SEQ_CLS" or name.endswith("ForSequenceClassification"):
        return "classification", transformers.AutoModelForSequenceClassification
    if given == "CAUSAL_LM" or name.endswith(("ForCausalLM", "LMHeadModel")):
        return "language modelling", transformers.AutoModelForCausalLM
    what = f"an adapter for {given}" if given else f"a {name or 'model of no named architecture'}"
    raise SquisherError(
        f"{path} is {what}; squisher fisher measures sequence classifiers (SEQ_CLS) and causal language models (CAUSAL_LM). Use "
        "squisher.fisher(model, batches) in Python for others."
    )


def _base_of(path: Path, given: str | os.PathLike[str] | None) -> Path:
    if given is not None:
        return Path(given)
    named = str(read_object(path / CONFIG).get("base_model_name_or_path") or "")
    for place in (Path(named), path / named):
        if named and place.is_dir():
            return place
    raise FileError(
        f"{path} adapts {named or 'a model that it does not name'}, which is no folder here: give the base with --base DIR."
    )


def _refuse_missing(place: Path, missing: Iterable[str], adapter: Path | None) -> None:
    """Refuse a model with weights that are in no file: transformers draws them at random.

    Raises:
        FileError: There are such weights, and the adapter does not have them.
    """
    stored = None if adapter is None else open_weights(adapter)
    brought = {name.removeprefix("base_model.model.") for name in (stored.tensors if stored is not None else ())}
    random = sorted(set(missing) - brought)
    if random:
        raise FileError(
            f"{place} has no weights for {len(random)} parameters that its config.json asks for, {random[0]!r} for example: they would "
            "be random, and the Fisher with them. Give the folder of the model as it was trained, or correct its 'architectures'."
        )


def count_rows(file: str | os.PathLike[str]) -> int:
    """Return the number of non-blank lines of a JSONL file.

    Raises:
        FileError: It cannot be read.
    """
    with _lines_of(file) as lines:
        return sum(bool(line.strip()) for line in lines)


@contextmanager
def _lines_of(file: str | os.PathLike[str]) -> Iterator[Iterable[bytes]]:
    """Open a file of lines, compressed by gzip or not.

    Raises:
        FileError: It cannot be read.
    """
    try:
        with open(file, "rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            yield io.BufferedReader(gzip.GzipFile(fileobj=raw)) if packed else raw
    except OSError as error:
        raise FileError(f"Cannot read {file}: {error.strerror or error}.") from error
    except (EOFError, zlib.error) as error:
        raise FileError(f"Cannot read {file}: what gzip compressed is cut off or damaged ({error}).") from error


def text_batches(
    file: str | os.PathLike[str],
    text_model: TextModel,
    *,
    batch_size: int = 8,
    max_length: int | None = None,
    max_examples: int | None = None,
    labelled: bool = True,
) -> Iterator[dict[str, Tensor]]:
    """Yield batches from lines of JSON with `text`, optionally `text_pair`, and `label` for a classifier.

    Args:
        file: One JSON object a line, compressed by gzip or not. A label is the number of a class, its name in the model's
            configuration, or true or false if there are two.
        text_model: The model and its tokenizer.
        batch_size: Examples per batch.
        max_length: The most tokens per example, the rest is cut; by default as many as the model takes.
        max_examples: The most examples.
        labelled: Whether a classifier's labels are needed.

    Yields:
        The arguments of `model(**batch)`; padding is masked, and ignored in the labels of a language model.

    Raises:
        FileError: A line is invalid (the message names it), or there is none.
        SquisherError: A number is not positive.
    """
    for what, number in (("batch_size", batch_size), ("max_length", max_length)):
        if number is not None:
            check_positive(what, number)
    limit = max_length or _longest(text_model.model, text_model.tokenizer)
    rows: list[Mapping[str, Any]] = []
    if not count_rows(file):
        raise FileError(f"{file} has no lines: one JSON object a line is expected, such as {{'text': …, 'label': 0}}.")
    for count, row in enumerate(_rows(Path(file), text_model.task == "classification" and labelled)):
        if max_examples is not None and count >= max_examples:
            break
        rows.append(row)
        if len(rows) == batch_size:
            yield _batch(rows, text_model, limit, labelled)
            rows = []
    if rows:
        yield _batch(rows, text_model, limit, labelled)


def _batch(rows: list[Mapping[str, Any]], text_model: TextModel, limit: int, labelled: bool) -> dict[str, Tensor]:
    model, tokenizer, task = text_model
    pairs = [row.get("text_pair") for row in rows]
    given = [pairs] if pairs[0] is not None else []
    for row, pair in zip(rows, pairs, strict=True):
        if bool(given) != isinstance(pair, str):
            raise FileError(
                f"{row['line']}: 'text_pair' is {pair!r}; expected text in every line of a file, or in none of them."
            )
    encoded = tokenizer(
        [row["text"] for row in rows], *given, padding=True, truncation=True, max_length=limit, return_tensors="pt"
    )
    batch: dict[str, Tensor] = dict(encoded)
    if task == "language modelling":
        # Tokenizers without a class of their own make them, and GPT-2 would add their embeddings.
        batch.pop("token_type_ids", None)
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    elif labelled:
        batch["labels"] = torch.tensor([_label(row, model.config) for row in rows])
    device = next(model.parameters()).device
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _label(row: Mapping[str, Any], config: Any) -> int | float:
    label, line = row["label"], row["line"]
    if config.num_labels == 1:
        if isinstance(label, bool) or not isinstance(label, (int, float)):
            raise FileError(f"{line}: the label {label!r} is not a number, which the model predicts.")
        return float(label)
    known = {str(name): int(k) for k, name in (config.id2label or {}).items()}
    if isinstance(label, bool):
        if config.num_labels != 2:
            raise FileError(
                f"{line}: the label {label!r} is one of two classes, and the model has {config.num_labels}."
            )
        classes = {name.lower(): k for name, k in known.items()}
        return classes[str(label).lower()] if {"true", "false"} == set(classes) else int(label)
    if isinstance(label, str):
        if label not in known:
            raise FileError(f"{line}: the label {label!r} is not one of the model's ({', '.join(list(known)[:6])}).")
        return known[label]
    if not isinstance(label, int) or not 0 <= label < config.num_labels:
        raise FileError(f"{line}: the label {label!r} is not a class of the model, which has {config.num_labels}.")
    return label


def _rows(file: Path, needs_label: bool) -> Iterator[Mapping[str, Any]]:
    with _lines_of(file) as lines:
        for number, line in enumerate(lines, 1):
            where = f"{file}, line {number}"
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise FileError(f"{where} is not text in UTF-8.") from error
            if text.strip():
                yield {**_row(text, where, needs_label), "line": where}


def _row(text: str, line: str, needs_label: bool) -> dict[str, Any]:
    try:
        row = parse_json(text, line)
    except FileError as error:
        raise FileError(
            f"{line} is not JSON; expected one object a line, such as {{'text': …, 'label': 0}}."
        ) from error
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise FileError(f"{line} has no 'text'; expected an object such as {{'text': …, 'label': 0}}.")
    if needs_label and "label" not in row:
        raise FileError(f"{line} has no 'label', which data labels need; use --labels sampled or exact to do without.")
    return row


def _longest(model: Any, tokenizer: Any) -> int:
    """Return the longest input that model and tokenizer take; ignore the absurdly large number of some tokenizers."""
    limits = [getattr(model.config, "max_position_embeddings", None), tokenizer.model_max_length]
    return min((limit for limit in limits if isinstance(limit, int) and 0 < limit < 1_000_000), default=512)


def load_shards(folder: Path, config: Any, build: Callable[..., nn.Module], device: str) -> nn.Module:
    """Return a model whose parameters are sharded over all processes, with the weights of a folder.

    Args:
        folder: The folder of a Hugging Face model.
        config: Its configuration.
        build: Makes the model without weights: `build(config, dtype=...)`.
        device: The device of this process.

    Raises:
        FileError: The folder has no weights, or lacks one.
        NamingError: The weights are not this model's.
        SquisherError: There is only one process, or the model cannot be loaded this way.
    """
    if ranks.is_alone():
        raise ArgumentError(
            "Shards need several processes: start them with torchrun --nproc-per-node N -m squisher fisher … --shard, or leave "
            "--shard out."
        )
    if getattr(config, "quantization_config", None) is not None:
        raise SquisherError(f"The weights of {folder} are quantised, and quantised weights are not sharded.")
    weights = open_weights(folder)
    if weights is None:
        raise FileError(f"The folder {folder} holds no weights.")
    with _parameters_on_meta():
        model = build(config, dtype=_dtype(config, weights))
    plan: Any = getattr(model, "_get_dtype_plan", None)
    apart = {} if plan is None else plan(next(model.parameters()).dtype)
    if apart:
        raise SquisherError(
            f"{type(model).__name__} keeps {', '.join(map(repr, apart))} in another precision than its other weights, and shards of "
            "several precisions are not done. Save it in float32, or leave --shard out."
        )
    stored = candidates_of_module(model, weights, frozen_too=True).parameters
    cut = next((c for c in stored if c.slices), None)
    if cut is not None:
        raise SquisherError(
            f"{cut.live_name!r} is one parameter here and {len(cut.slices)} tensors in {weights.label} (experts), and shards are not "
            "written in such slices. Leave --shard out, or use squisher.fisher and torch.distributed.checkpoint in Python."
        )
    same: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        same.setdefault(id(parameter), []).append(name)
    _shard(model)
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    for first, *others in same.values():  # each name got a tensor of its own
        for name in others:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, model.get_parameter(first))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for candidate in stored:
            _fill(parameters[str(candidate.live_name)], candidate, weights)
        for name, buffer in model.named_buffers():
            if name in weights.tensors and tuple(weights.tensors[name].shape) == tuple(buffer.shape):
                buffer.copy_(weights.tensors[name].load())
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move parameters to the meta device as soon as a module has them; buffers stay."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = type(parameter)(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _dtype(config: Any, weights: Weights) -> torch.dtype:
    """Return the type of `from_pretrained(dtype="auto")`: the configuration's, or that of the file's first weight."""
    dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    if isinstance(dtype, torch.dtype):
        return dtype
    found = [t.dtype for t in weights.tensors.values() if t.dtype.is_floating_point]
    return found[0] if found else torch.get_default_dtype()


def _shard(model: nn.Module) -> None:
    """Shard every element of the outermost lists of modules (the layers) on its own, and the rest together."""
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError as error:
        raise SquisherError(f"--shard needs torch 2.6 or newer, but this is torch {torch.__version__}.") from error
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and id(module) not in inside:
            inside.update(map(id, module.modules()))
            for block in module:
                if next(block.parameters(), None) is not None:
                    fully_shard(block)
    fully_shard(model)


def _fill(parameter: Any, candidate: Candidate, weights: Weights) -> None:
    """Read the rows of this process's shard of a parameter."""
    source = weights.tensors.get(candidate.name)
    if source is None:
        raise FileError(
            f"{weights.label} has no tensor {candidate.name!r}, which the model needs. Load it without --shard."
        )
    local, shape = parameter.to_local(), parameter.shape
    rows = -(-shape[0] // parameter.device_mesh.size())
    first = min(shape[0], parameter.device_mesh.get_local_rank() * rows) * shape[1:].numel()
    for low in range(0, local.numel(), CHUNK):
        high = min(local.numel(), low + CHUNK)
        local.view(-1)[low:high].copy_(source.read_flat(first + low, first + high))
