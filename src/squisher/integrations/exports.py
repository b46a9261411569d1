"""Write other tools' files: importances for bergson, SqueezeLLM and OTA merging; plans for llama.cpp and mlx-lm."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, FileError, NamingError, check_choice
from ..importance import Importance
from ..names import align, check_like, find
from ..quantize import Plan, Sensitivity
from ..storage import safetensors
from ..storage.atomic import check_free, new_folder, write_file
from ..storage.folders import open_model, write_model
from ..storage.tensors import CHUNK, Computed, chunks_of, dtype_of, numel_of, tied_names

__all__ = ["FORMATS", "PLAN_FORMATS", "export", "gguf_name", "mlx_sensitivities", "stacked", "tensor_types"]

FORMATS = ("bergson", "squeezellm", "ota")
PLAN_FORMATS = ("json", "llama.cpp", "mlx")


def export(importance: Importance, to: str, out: Path, model: Path | None = None) -> str:
    """Write an importance in another tool's format, whole or not at all.

    Args:
        importance: The importance. Values are written as they are stored: bias-corrected, not brought to the scale of a Fisher.
        to: `"bergson"`: a folder with an `optimizer.pt` whose states have their parameters' names, for its normalisers.
            `"squeezellm"`: a model folder whose weights are the importances, its "gradient checkpoint".
            `"ota"`: a plain safetensors file with the names of the model, as OTA merging's `exp_avg_sq.safetensors`.
        out: The folder or file to make.
        model: For squeezellm: the model folder, for its config and the names of all weights.

    Returns:
        One line on what was written.

    Raises:
        SquisherError: The format does not exist, or something that it needs is missing.
    """
    check_choice("format", to, FORMATS)
    if to != "squeezellm" and model is not None:
        raise ArgumentError(f"--model has no meaning for {to}; only squeezellm writes a model folder.")
    if to == "ota":
        if out.suffix != ".safetensors":
            raise ArgumentError(f"--out {out}: OTA's file is a .safetensors file, such as exp_avg_sq.safetensors.")
        safetensors.save(out, importance, None)
        return f"{len(importance)} tensors; give it as preconditioner_path"
    if to == "bergson":
        check_free(out.parent, sum(numel_of(importance, n) * dtype_of(importance, n).itemsize for n in importance))
        with new_folder(out) as folder:
            try:
                torch.save(_optimizer_state(importance), folder / "optimizer.pt")
            except RuntimeError as error:  # what torch says when the system did not write all of it
                raise FileError(f"Cannot write {out}: {error}. Is the disk full? Nothing was left behind.") from error
        return f"{len(importance)} states; give it as optimizer_state"
    if model is None:
        raise ArgumentError("squeezellm needs --model: the folder whose config and names the written one is to have.")
    squares = _Squares(importance, open_model(model).weights)
    write_model(out, squares, model, dtype=torch.float32)
    missing = f"; {len(squares.without)} tensors have no importance and are 0" if squares.without else ""
    return f"{len(squares)} tensors{missing}; chunk it as the gradient checkpoint"


def _optimizer_state(importance: Importance) -> dict[str, Any]:
    """Return Adam's state dict, with the parameter's name in every state: bergson prefers it to its own count."""
    p = importance.provenance
    names = [p.live_names.get(name, name) for name in importance]
    group: dict[str, Any] = {"params": list(range(len(names)))}
    facts = p.optimizer or {}
    if facts.get("beta2") is not None:
        group["betas"] = (0.9, facts["beta2"])
    if facts.get("eps") is not None:
        group["eps"] = facts["eps"]
    state = {k: {"exp_avg_sq": importance[name], "param_name": names[k]} for k, name in enumerate(importance)}
    return {"state": state, "param_groups": [group]}


class _Squares(Computed):
    """The importance under all names of a model; 0 where a weight has none."""

    def __init__(self, importance: Importance, weights: Any) -> None:
        super().__init__(weights)
        self._importance = importance
        tied = {**importance.provenance.tied, **tied_names(weights)}
        align(importance, weights, ("the importance", "the model"), tied=tied)
        found = {name: find(name, importance, tied) for name in weights}
        self._matches = {name: match for name, match in found.items() if match is not None}
        for name, match in self._matches.items():
            check_like(weights, name, importance, match, ("the model", "the importance"))
        self.without = [name for name in weights if name not in self._matches]

    def dtype(self, name: str) -> torch.dtype:
        """Return float32: squared gradients underflow in float16."""
        return torch.float32

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[Tensor]:
        """Yield one tensor in flat chunks, in order."""
        if name in self._matches:
            for chunk in chunks_of(self._importance, self._matches[name], size):
                yield chunk.to(torch.float32)
            return
        numel = numel_of(self, name)
        for start in range(0, numel, size):
            yield torch.zeros(min(size, numel - start))


# -- plans -------------------------------------------------------------------------------------------------------------

# The names that llama.cpp's converter gives to tensors of Hugging Face models; it stacks experts into one tensor.
_BLOCK = r"(?:model\.(?:language_model\.)?layers|transformer\.h|model\.decoder\.layers)\.(\d+)\."
_PARTS = {
    r"self_attn\.q_proj": "attn_q",
    r"self_attn\.k_proj": "attn_k",
    r"self_attn\.v_proj": "attn_v",
    r"self_attn\.(?:o_proj|out_proj)|attn\.c_proj": "attn_output",
    r"self_attn\.qkv_proj|attn\.c_attn": "attn_qkv",
    r"mlp\.gate_proj": "ffn_gate",
    r"mlp\.up_proj|mlp\.gate_up_proj|mlp\.c_fc|fc1": "ffn_up",
    r"mlp\.down_proj|mlp\.c_proj|fc2": "ffn_down",
    r"(?:mlp|block_sparse_moe)\.gate": "ffn_gate_inp",
    r"mlp\.experts\.\d+\.gate_proj|block_sparse_moe\.experts\.\d+\.w1": "ffn_gate_exps",
    r"mlp\.experts\.\d+\.down_proj|block_sparse_moe\.experts\.\d+\.w2": "ffn_down_exps",
    r"mlp\.experts\.\d+\.up_proj|block_sparse_moe\.experts\.\d+\.w3": "ffn_up_exps",
    r"mlp\.shared_experts?\.gate_proj": "ffn_gate_shexp",
    r"mlp\.shared_experts?\.up_proj": "ffn_up_shexp",
    r"mlp\.shared_experts?\.down_proj": "ffn_down_shexp",
}
_OUTSIDE = {
    r"model\.(?:language_model\.|decoder\.)?embed_tokens|transformer\.wte": "token_embd",
    r"transformer\.wpe|model\.decoder\.embed_positions": "position_embd",
    r"lm_head": "output",
}


def gguf_name(name: str) -> str:
    """Return llama.cpp's name for a tensor of a Hugging Face model.

    Raises:
        NamingError: It is not known; the architectures are those of Llama, Mistral, Qwen, Gemma, Phi-3, Mixtral, OPT and GPT-2.
    """
    if re.fullmatch(r"(blk\.\d+\.\w+|token_embd|position_embd|output)\.weight", name):
        return name
    block = re.match(_BLOCK, name)
    rest, table = (name[block.end() :], _PARTS) if block else (name, _OUTSIDE)
    for pattern, part in table.items():
        if re.fullmatch(rf"(?:{pattern})\.weight", rest):
            return f"blk.{block[1]}.{part}.weight" if block else f"{part}.weight"
    raise NamingError(
        f"What llama.cpp calls {name!r} is not known. Leave it out with --exclude, or write --format json and rename it there."
    )


def stacked(found: Sensitivity) -> Sensitivity:
    """Return a sensitivity in which experts that llama.cpp stacks are one tensor, with its name and one width.

    Raises:
        NamingError: llama.cpp's name for a tensor is not known.
    """
    groups: dict[str, list[str]] = {}
    for name in found.losses:
        groups.setdefault(gguf_name(name), []).append(name)
    names = {theirs if len(ours) > 1 else ours[0]: ours for theirs, ours in groups.items()}

    def summed(by_width: Mapping[str, Mapping[int, Any]]) -> dict[str, dict[int, Any]]:
        return {
            name: {b: sum(by_width[one][b] for one in ours) for b in by_width[ours[0]]} for name, ours in names.items()
        }

    numel = {name: sum(found.numel[one] for one in ours) for name, ours in names.items()}
    return replace(found, losses=summed(found.losses), sizes=summed(found.sizes), numel=numel)


def tensor_types(plan: Plan) -> str:
    """Return the lines that `llama-quantize --tensor-type-file` reads: a pattern for each tensor, and its type.

    Experts that llama.cpp stacks into one tensor get the widest of their widths; plans for `stacked` sensitivities have one.

    Raises:
        SquisherError: The plan is not for llama.cpp's types, or a name is not known.
    """
    quantizers = plan.sensitivity.quantizers
    types = {b: q.name for b, q in quantizers.items()}
    if not all(re.fullmatch(r"q\d_[K0]", name) for name in types.values()):
        raise ArgumentError(
            "This plan is not for llama.cpp's types: measure with scheme='llama.cpp' (--scheme llama.cpp)."
        )
    widest: dict[str, int] = {}
    for name, bits in plan.bits.items():
        theirs = gguf_name(name)
        widest[theirs] = max(bits, widest.get(theirs, 0))
    return "".join(f"^{re.escape(name)}$={types[bits].lower()}\n" for name, bits in widest.items())


def mlx_sensitivities(found: Sensitivity, low: int, high: int) -> list[list[Any]]:
    """Return the rows that `mlx_lm.dynamic_quant --sensitivities` reads: [module, loss saved by the wider width per million weights].

    Raises:
        SquisherError: A width was not measured.
    """
    for bits in (low, high):
        if bits not in found.quantizers:
            raise ArgumentError(f"mlx-lm chooses between {low} and {high} bits, but {bits} were not measured.")
    return [
        [name.removesuffix(".weight"), (losses[low] - losses[high]) / (found.numel[name] / 1e6)]
        for name, losses in found.losses.items()
    ]


def write_plan(plan: Plan, to: str, out: Path) -> None:
    """Write a plan as JSON or in another tool's format, whole or not at all.

    Raises:
        SquisherError: The format does not exist, or the plan cannot be written in it.
    """
    check_choice("format", to, PLAN_FORMATS)
    if to == "llama.cpp":
        text = tensor_types(plan)
    elif to == "mlx":
        low, high = sorted(plan.sensitivity.quantizers)[:2]
        text = json.dumps(mlx_sensitivities(plan.sensitivity, low, high)) + "\n"
    else:
        text = json.dumps(plan.to_dict(), indent=2, ensure_ascii=False) + "\n"
    write_file(out, text.encode())
