"""Names that the writers of public checkpoints record, under the names of the Hugging Face weights of the same model.

GPT-NeoX (Pythia), Megatron-DeepSpeed (BLOOM), OLMo, OLMo-core and nanotron (SmolLM2) name their modules in their own way, and some
keep projections fused that the published weights have apart. Each has a table of patterns; what is fused gives several names, in the
order of its rows, and `|` stands between names of which the weights have one. A table counts only if it names every parameter, and every name is in the weights with its shape.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ...errors import NamingError
from ..naming.candidates import clean_names
from ..states import Candidate, Entry, Found, FusedSlice

__all__ = ["in_hugging_face_names"]

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
_WRAPPED = re.compile(
    r"^(?:sequential\.|model\.(?=transformer\.))"
)  # GPT-NeoX without a pipeline; OLMo under its trainer


def in_hugging_face_names(found: Found, weights: Mapping[str, tuple[int, ...]]) -> Found | None:
    """Return the states under the names of published weights, or None where their names are of no writer that is known.

    Args:
        found: Every entry has a name.
        weights: Names and shapes of the published weights.

    Raises:
        NamingError: The names are known, but the weights are those of another model.
    """
    recorded = clean_names([entry.name or "" for one in found.optimizers for entry in one.entries])
    answers = {
        writer: {name: _translated(_WRAPPED.sub("", name), table) for name in recorded}
        for writer, table in TABLES.items()
    }
    writer = next((writer for writer, names in answers.items() if all(names.values())), None)
    if writer is None:
        return None
    optimizers, parameters = [], []
    for one in found.optimizers:
        names = clean_names([entry.name or "" for entry in one.entries])
        candidates = [
            _candidate(name, entry, answers[writer][name], weights, writer)
            for name, entry in zip(names, one.entries, strict=True)
        ]
        entries = [replace(entry, name=c.name) for entry, c in zip(one.entries, candidates, strict=True)]
        optimizers.append(replace(one, entries=entries))
        parameters += candidates
    return replace(found, optimizers=optimizers, models=[(f"{writer}'s names", parameters)], parameters=parameters)


def _translated(name: str, table: Table) -> list[str]:
    matches = ((re.fullmatch(pattern, name), fill) for pattern, fill in table.items())
    return next((fill(match).split() for match, fill in matches if match), [])


def _candidate(
    recorded: str, entry: Entry, names: Sequence[str], weights: Mapping[str, tuple[int, ...]], writer: str
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
    slices, start = [], 0
    for name, own in zip(names, shapes, strict=True):
        slices.append(FusedSlice(name, start, own))
        start += math.prod(own)
    return Candidate(recorded, shape, live_name=recorded, slices=tuple(slices))
