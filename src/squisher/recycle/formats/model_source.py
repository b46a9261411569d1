"""The model that names a state's parameters: what `--model` says (a config.json, a torch file in module order), or a file beside the state.

Names that the writers of public checkpoints record become those of the Hugging Face weights of the same model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch import nn

from ...errors import FileError, NamingError
from ...storage.folders import Weights, open_weights
from ...storage.json_files import read_object
from ..naming.candidates import Candidates, candidates_of_module, clean_names, surplus
from ..naming.conventions import by_shape, sorted_as_text
from ..naming.hugging_face import MissingPackage, built_by, in_file_order, in_order_of_version_4, meta_model
from ..naming.laws import Law, derived_laws
from ..states import Candidate, Entry, Found, FusedSlice, OptimizerState, Options, Source
from .torch_file import candidates_of

__all__ = ["in_hugging_face_names", "laws_of", "model_candidates", "pinned", "sorted_by_name", "with_model"]


def with_model(found: Found, options: Options) -> Found:
    """Return the evidence with the model that the user gave, if one was given, as what names the parameters."""
    if options.model is None or options.named:
        return found
    translated = _translated(found, options.model)
    if translated is not None:
        return translated
    label, trained, every = model_candidates(options.model)
    facts = replace(found.facts, tied=every.tied)
    models = [(label, trained.parameters)]
    return replace(found, models=models, facts=facts, parameters=every.parameters, laws=laws_of(options.model))


def _translated(found: Found, path: Path) -> Found | None:
    """Return states that record the names of their writer under those of the model's weights, where these are others."""
    recorded = [entry.name for one in found.optimizers for entry in one.entries]
    if not recorded or None in recorded or not path.exists():
        return None
    weights = open_weights(path)
    if weights is not None:
        known = {name: tuple(tensor.shape) for name, tensor in weights.tensors.items()}
    else:
        known = {c.name: c.shape for c in model_candidates(path)[2].parameters}
    return None if known.keys() & set(recorded) else in_hugging_face_names(found, known)


def laws_of(folder: Path) -> Callable[[], Sequence[Law]]:
    """Return a function that derives the laws of the model in a folder, once; nothing is built before it is called."""
    return cache(partial(derived_laws, folder)) if (folder / "config.json").is_file() else tuple


def model_candidates(
    path: Path, weights: Weights | None = None, beside: Weights | None = None
) -> tuple[str, Candidates, Candidates]:
    """Return the parameters of a model from a folder with a config.json, or in the order of a torch weight file.

    Args:
        path: The folder or file.
        weights: Checked against; by default the weights at the path.
        beside: The weights at the path, where they are open already.

    Returns:
        A label, the parameters that a new model of this kind would train, and all of them.

    Raises:
        NamingError: Its order cannot be known.
        MissingPackage: transformers is needed and not installed.
    """
    if not path.exists():
        raise FileError(f"There is no model {path}.")
    beside = beside or open_weights(path)
    in_order = beside is not None and beside.in_module_order
    described = (path / "config.json").is_file()
    if not described and not in_order:
        what = "is sorted by name, so its order says nothing" if beside else "has neither config.json nor weights"
        raise NamingError(f"{path} cannot name parameters: it {what}. Give a folder with config.json, or a torch file.")
    model: Any = None
    try:
        model = meta_model(path) if described else None
    except MissingPackage:
        if not in_order:
            raise
    if model is None and beside is not None:
        candidates = Candidates(*candidates_of(beside.tensors))
        return f"the order of {beside.label}", candidates, candidates
    weights = weights or beside
    every = candidates_of_module(model, weights, frozen_too=True)
    trained = candidates_of_module(model, weights)
    note = f" ({every.note})" if every.note else ""
    by = built_by(path)
    label = f"the model of config.json{by}{note}"
    if beside is not None and beside.in_module_order and sorted_as_text(list(beside.tensors)):
        beside = None
    in_order = beside is not None and beside.in_module_order
    older = _registered_before(path, model, [every, trained], beside) if by or in_order else None
    if older is not None:
        how, (every, trained) = older
        label = f"the model of config.json, {how}"
    others = surplus(model, every, weights)
    trained, every = (one._replace(parameters=[*one.parameters, *others]) for one in (trained, every))
    return label, trained, every


def _registered_before(
    path: Path, model: nn.Module, found: Sequence[Candidates], beside: Weights | None
) -> tuple[str, list[Candidates]] | None:
    """Return the parameters in the order of the version of transformers that saved them, where that is known."""
    saved = str(read_object(path / "config.json").get("transformers_version"))
    tensors = {} if beside is None else beside.tensors
    if beside is not None and beside.in_module_order:
        how = f"in the order of {beside.label}"
        orders = [in_file_order(one.parameters, tensors, one.tied) for one in found]
    elif saved.startswith("4."):
        how = f"in the order of transformers 4 (saved by {saved})"
        orders = [in_order_of_version_4(type(model).__name__, one.parameters, tensors) for one in found]
    else:
        return None
    pairs = [(order, one) for order, one in zip(orders, found, strict=True) if order is not None]
    return (how, [one._replace(parameters=order) for order, one in pairs]) if len(pairs) == len(found) else None


def pinned(optimizer: OptimizerState, weights: Sequence[Weights]) -> list[Source]:
    """Return the tensors of each file whose shapes alone say which tensor an entry is, in the optimizer's order.

    Args:
        optimizer: Its entries in the order of its groups.
        weights: Files whose order says nothing.
    """
    sources: list[Source] = []
    for one in weights:
        tensors = [Candidate(name, tuple(tensor.shape), weight=tensor) for name, tensor in one.tensors.items()]
        order = by_shape(optimizer, tensors)
        if order:
            sources.append((f"{one.label}, in which every shape occurs once", order))
    return sources


def sorted_by_name(weights: Weights, state: str) -> NamingError:
    """Return the error for a state beside which there is only a file that sorts its names."""
    return NamingError(
        f"{weights.label} sorts its tensors by name, and several have the same shape, so it cannot tell which is which in "
        f"{state}. Give the model with --model: a folder with its config.json, or its state_dict() saved with torch.save, "
        "which keeps the order; or the names in the optimizer's order with --names."
    )


# -- names of other writers ----------------------------------------------------------------------------------------------
#
# GPT-NeoX (Pythia), Megatron-DeepSpeed (BLOOM), OLMo, OLMo-core and nanotron (SmolLM2) name their modules in their own way, and some
# keep projections fused that the published weights have apart. Each has a table of patterns; what is fused gives several names, in the
# order of its rows, and `|` stands between names of which the weights have one. A table counts only if it names every parameter, and
# every name is in the weights with its shape.

Table = Mapping[str, Callable[[re.Match[str]], str]]


def _to(template: str, first_layer: int = 0) -> Callable[[re.Match[str]], str]:
    """Return what fills in a template: `{n}` is the layer, counted from `first_layer`, the rest are groups of the pattern."""

    def filled(match: re.Match[str]) -> str:
        groups = match.groupdict()
        return template.format(**{**groups, "n": int(groups.get("n") or 0) - first_layer})

    return filled


_NEOX_LAYER = r"(?P<n>\d+)\.(?P<rest>(?:input_layernorm|post_attention_layernorm|attention|mlp\.dense_\w+)\..+)"
_LLAMA = "model.layers.{n}."
_OLMO = r"transformer\.blocks\.(?P<n>\d+)\."
_CORE = r"blocks\.(?P<n>\d+)\."
_NANOTRON = r"model\.decoder\.(?P<n>\d+)\.pp_block\."
_QKV = " ".join(_LLAMA + f"self_attn.{part}_proj.{{kind}}" for part in "qkv")

TABLES: Mapping[str, Table] = {
    "GPT-NeoX": {
        r"0\.word_embeddings\.weight": _to("gpt_neox.embed_in.weight"),
        _NEOX_LAYER: _to("gpt_neox.layers.{n}.{rest}", 2),
        r"(?P<n>\d+)\.mlp\.linear1\.(?P<kind>\w+)": _to("gpt_neox.layers.{n}.mlp.dense_h_to_4h.{kind}", 2),
        r"(?P<n>\d+)\.mlp\.linear2\.(?P<kind>\w+)": _to("gpt_neox.layers.{n}.mlp.dense_4h_to_h.{kind}", 2),
        r"\d+\.norm\.(?P<kind>\w+)": _to("gpt_neox.final_layer_norm.{kind}"),
        r"\d+\.final_linear\.weight": _to("embed_out.weight|lm_head.weight"),
    },
    "Megatron-DeepSpeed (BLOOM)": {
        r"tied_modules\.embed\.word_embeddings\.weight": _to("transformer.word_embeddings.weight|word_embeddings.weight"),
        r"tied_modules\.embed\.word_embeddings\.norm\.(?P<kind>\w+)": _to("transformer.word_embeddings_layernorm.{kind}|word_embeddings_layernorm.{kind}"),
        r"(?P<n>\d+)\.(?P<rest>(?:input_layernorm|post_attention_layernorm|self_attention|mlp)\..+)": _to("transformer.h.{n}.{rest}|h.{n}.{rest}", 3),
        r"\d+\.(?P<kind>weight|bias)": _to("transformer.ln_f.{kind}|ln_f.{kind}"),
    },
    "OLMo": {
        r"transformer\.wte\.weight": _to("model.embed_tokens.weight"),
        r"transformer\.ln_f\.(?P<kind>\w+)": _to("model.norm.{kind}"),
        r"transformer\.ff_out\.weight": _to("lm_head.weight"),
        _OLMO + r"att_proj\.(?P<kind>\w+)": _to(_QKV),
        _OLMO + r"attn_out\.(?P<kind>\w+)": _to(_LLAMA + "self_attn.o_proj.{kind}"),
        _OLMO + r"(?P<part>[qk]_norm)\.(?P<kind>\w+)": _to(_LLAMA + "self_attn.{part}.{kind}"),
        _OLMO + r"ff_proj\.(?P<kind>\w+)": _to(_LLAMA + "mlp.up_proj.{kind} " + _LLAMA + "mlp.gate_proj.{kind}"),
        _OLMO + r"ff_out\.(?P<kind>\w+)": _to(_LLAMA + "mlp.down_proj.{kind}"),
        _OLMO + r"attn_norm\.(?P<kind>\w+)": _to(_LLAMA + "post_attention_layernorm.{kind}"),
        _OLMO + r"ff_norm\.(?P<kind>\w+)": _to(_LLAMA + "post_feedforward_layernorm.{kind}"),
    },
    "OLMo-core": {
        r"embeddings\.weight": _to("model.embed_tokens.weight"),
        r"lm_head\.norm\.weight": _to("model.norm.weight"),
        r"lm_head\.w_out\.weight": _to("lm_head.weight"),
        _CORE + r"attention\.w_(?P<part>[qkv])\.weight": _to(_LLAMA + "self_attn.{part}_proj.weight"),
        _CORE + r"attention\.w_out\.weight": _to(_LLAMA + "self_attn.o_proj.weight"),
        _CORE + r"attention\.(?P<part>[qk]_norm)\.weight": _to(_LLAMA + "self_attn.{part}.weight"),
        _CORE + r"feed_forward\.w1\.weight": _to(_LLAMA + "mlp.gate_proj.weight"),
        _CORE + r"feed_forward\.w2\.weight": _to(_LLAMA + "mlp.down_proj.weight"),
        _CORE + r"feed_forward\.w3\.weight": _to(_LLAMA + "mlp.up_proj.weight"),
        _CORE + r"attention_norm\.weight": _to(_LLAMA + "post_attention_layernorm.weight"),
        _CORE + r"feed_forward_norm\.weight": _to(_LLAMA + "post_feedforward_layernorm.weight"),
    },
    "nanotron": {
        r"model\.token_position_embeddings\.pp_block\.token_embedding\.weight": _to("model.embed_tokens.weight"),
        r"model\.final_layer_norm\.pp_block\.weight": _to("model.norm.weight"),
        r"model\.lm_head\.pp_block\.weight": _to("lm_head.weight"),
        _NANOTRON + r"attn\.qkv_proj\.(?P<kind>\w+)": _to(_QKV),
        _NANOTRON + r"attn\.o_proj\.(?P<kind>\w+)": _to(_LLAMA + "self_attn.o_proj.{kind}"),
        _NANOTRON + r"mlp\.gate_up_proj\.(?P<kind>\w+)": _to(_LLAMA + "mlp.gate_proj.{kind} " + _LLAMA + "mlp.up_proj.{kind}"),
        _NANOTRON + r"(?P<rest>mlp\.down_proj|input_layernorm|post_attention_layernorm)\.(?P<kind>\w+)": _to(_LLAMA + "{rest}.{kind}"),
    },
}  # fmt: skip
_WRAPPED = re.compile(r"^(?:sequential\.|model\.(?=transformer\.))")  # GPT-NeoX without a pipeline; OLMo's trainer


def in_hugging_face_names(found: Found, weights: Mapping[str, tuple[int, ...]]) -> Found | None:
    """Return the states under the names of published weights, or None where their names are of no writer that is known.

    Args:
        found: Every entry has a name.
        weights: Names and shapes of the published weights.

    Raises:
        NamingError: The names are known, but the weights are those of another model.
    """
    recorded = clean_names([entry.name or "" for one in found.optimizers for entry in one.entries])
    bare = [_WRAPPED.sub("", name) for name in recorded]
    tables = ((writer, [_filled(name, table) for name in bare]) for writer, table in TABLES.items())
    writer, answers = next(((writer, answers) for writer, answers in tables if all(answers)), ("", []))
    if not writer:
        return None
    optimizers, parameters = [], []
    published = iter(zip(recorded, answers, strict=True))
    for one in found.optimizers:
        candidates = [_candidate(*next(published), entry, weights, writer) for entry in one.entries]
        entries = [replace(entry, name=c.name) for entry, c in zip(one.entries, candidates, strict=True)]
        optimizers.append(replace(one, entries=entries))
        parameters += candidates
    return replace(found, optimizers=optimizers, models=[(f"{writer}'s names", parameters)], parameters=parameters)


def _filled(name: str, table: Table) -> list[str]:
    matches = ((re.fullmatch(pattern, name), fill) for pattern, fill in table.items())
    return next((fill(match).split() for match, fill in matches if match), [])


def _candidate(
    recorded: str, names: Sequence[str], entry: Entry, weights: Mapping[str, tuple[int, ...]], writer: str
) -> Candidate:
    """Return the parameter under its published name, or with the published tensors that are its slices."""
    alternatives = [one.split("|") for one in names]
    names = [next((name for name in some if name in weights), some[0]) for some in alternatives]
    missing = next((name for name in names if name not in weights), None)
    if missing is not None:
        raise NamingError(
            f"{writer}'s parameter {recorded!r} is {missing!r} in Hugging Face's weights, which the model that was given lacks: "
            "another model, or another class of it. Give the folder with all of the weights, or leave --model out to keep the names as recorded."
        )
    shapes = [weights[name] for name in names]
    shape = (sum(s[0] for s in shapes), *shapes[0][1:]) if len(names) > 1 else shapes[0]
    if entry.shape not in (None, shape) or any(s[1:] != shapes[0][1:] for s in shapes):
        raise NamingError(
            f"{writer}'s parameter {recorded!r} has the shape {entry.shape}, but {' + '.join(names)} of the model that was given "
            f"{'has' if len(names) == 1 else 'have together'} {shape}: it is another model. Give the one that was trained."
        )
    if len(names) == 1:
        return Candidate(names[0], shape, live_name=recorded)
    starts = accumulate((math.prod(own) for own in shapes), initial=0)
    slices = tuple(FusedSlice(*one) for one in zip(names, starts, shapes, strict=False))
    return Candidate(recorded, shape, live_name=recorded, slices=slices)
