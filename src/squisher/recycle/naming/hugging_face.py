"""The parameters of a Hugging Face model in the order in which it registers them, without its weights.

Three sources tell that order: the model itself, built from its config.json on the meta device; a table of what transformers 4
registered in another order than version 5; and, for an adapter whose base model is not at hand, the names in its file.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...errors import NamingError, SquisherError
from ...storage.folders import Weights
from ...storage.json_files import read_object
from ...storage.tensors import TensorSource
from ..states import Candidate

__all__ = [
    "MissingPackage",
    "adapted_model",
    "adapter_orders",
    "built_by",
    "in_file_order",
    "in_order_of_version_4",
    "meta_model",
    "small_model",
]

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


# -- transformers 4 ---------------------------------------------------------------------------------------------------------
#
# The order in which transformers 4 registered the parameters of models that version 5 registers in another.
#
# Found by building every class of 4.57.6 and of 5.22.2 from its default config on the meta device. Of 988 classes, 817 have one
# order (38 of them under other names), 136 have the same names in the weight file in another order and are listed here, and 35 differ
# in more than that. The order is that of version 5 but for the modules whose children are listed, and experts that version 5 keeps
# in one tensor are apart.

_HEADS = {
    "AST": "ForAudioClassification Model",
    "Beit": "Backbone ForImageClassification Model",
    "BridgeTower": "Model",
    "Camembert": "ForCausalLM ForMaskedLM ForMultipleChoice ForQuestionAnswering ForSequenceClassification ForTokenClassification Model",
    "Clap": "Model",
    "Data2VecText": "ForCausalLM ForMaskedLM ForMultipleChoice ForQuestionAnswering ForSequenceClassification ForTokenClassification Model",
    "DeepseekV2": "ForCausalLM ForSequenceClassification Model",
    "DeiT": "ForImageClassification ForImageClassificationWithTeacher ForMaskedImageModeling Model",
    "Dinov2WithRegisters": "Backbone ForImageClassification Model",
    "Ernie4_5_Moe": "ForCausalLM Model",
    "FlexOlmo": "ForCausalLM Model",
    "Glm4Moe": "ForCausalLM Model",
    "Glm4vMoe": "ForConditionalGeneration Model",
    "GraniteMoe": "ForCausalLM Model",
    "GraniteMoeShared": "ForCausalLM Model",
    "IJepa": "ForImageClassification Model",
    "Jamba": "ForCausalLM ForSequenceClassification Model",
    "JetMoe": "ForCausalLM ForSequenceClassification Model",
    "MiniMax": "ForCausalLM ForQuestionAnswering ForSequenceClassification ForTokenClassification Model",
    "Mixtral": "ForCausalLM ForQuestionAnswering ForSequenceClassification ForTokenClassification Model",
    "Olmoe": "ForCausalLM Model",
    "Phimoe": "ForCausalLM ForSequenceClassification Model",
    "Qwen2Moe": "ForCausalLM ForQuestionAnswering ForSequenceClassification ForTokenClassification Model",
    "Qwen3Moe": "ForCausalLM ForQuestionAnswering ForSequenceClassification ForTokenClassification Model",
    "Qwen3Next": "ForCausalLM ForQuestionAnswering ForSequenceClassification ForTokenClassification Model",
    "Roberta": "ForCausalLM ForMaskedLM ForMultipleChoice ForQuestionAnswering ForSequenceClassification ForTokenClassification Model",
    "RobertaPreLayerNorm": "ForCausalLM ForMaskedLM ForMultipleChoice ForQuestionAnswering ForSequenceClassification ForTokenClassification Model",
    "Segformer": "ForImageClassification ForSemanticSegmentation Model",
    "Swin": "ForImageClassification ForMaskedImageModeling Model",
    "ViT": "ForImageClassification ForMaskedImageModeling Model",
    "ViTMAE": "Model",
    "ViTMSN": "Model",
    "VideoMAE": "ForPreTraining ForVideoClassification Model",
    "Vivit": "ForVideoClassification Model",
    "XCLIP": "Model",
    "XLMRoberta": "ForCausalLM ForMaskedLM ForMultipleChoice ForQuestionAnswering ForSequenceClassification ForTokenClassification Model",
    "XLMRobertaXL": "ForCausalLM ForMaskedLM ForMultipleChoice ForQuestionAnswering ForSequenceClassification ForTokenClassification Model",
    "Xmod": "ForCausalLM ForMaskedLM ForMultipleChoice ForQuestionAnswering ForSequenceClassification ForTokenClassification Model",
    "Yolos": "ForObjectDetection Model",
    "ZoeDepth": "ForDepthEstimation",
}  # fmt: skip
_CLASSES = {family + head for family, heads in _HEADS.items() for head in heads.split()}
_CHILDREN = (  # the last name of a module, and its children as version 4 registered them
    ("", "roberta classifier"),
    ("", "roberta lm_head"),
    ("", "roberta qa_outputs"),
    ("attention", "q_bias v_bias query key value"),
    ("attention", "self_attn_layer_norm self output"),
    ("block_sparse_moe", "input_linear output_linear router"),
    ("blocks", "layernorm_before attention layernorm_after intermediate output"),
    ("cross_attn", "q_proj k_proj v_proj proj"),
    ("embeddings", "cls_token distillation_token mask_token position_embeddings patch_embeddings"),
    ("embeddings", "cls_token distillation_token position_embeddings patch_embeddings"),
    ("embeddings", "cls_token mask_token register_tokens position_embeddings patch_embeddings"),
    ("embeddings", "word_embeddings position_embeddings token_type_embeddings"),
    ("embeddings", "word_embeddings position_embeddings token_type_embeddings LayerNorm"),
    ("encoder", "mid_position_embeddings layer"),
    ("experts", "w1 w2 w3"),
    ("layer", "attention intermediate output layernorm_before layernorm_after"),
    ("layer", "lambda_1 lambda_2 attention intermediate output layernorm_before layernorm_after"),
    ("layers", "input_layernorm self_attention post_attention_layernorm mlp"),
    ("layers", "message_fc message_ln message_attn self_attn layer_norm1 mlp layer_norm2"),
    ("layers", "self_attn block_sparse_moe input_layernorm post_attention_layernorm"),
    ("mlp", "gate experts"),
    ("mlp", "moe_statics gate experts shared_experts"),
    ("self", "relative_position_bias_table query key value"),
    ("vision_model", "embeddings pre_layernorm encoder post_layernorm"),
)  # fmt: skip
_ORDERS = {(parent, frozenset(children.split())): children.split() for parent, children in _CHILDREN}


def in_order_of_version_4(
    class_name: str, candidates: Sequence[Candidate], weights: Mapping[str, TensorSource]
) -> list[Candidate] | None:
    """Return a model's parameters as transformers 4 registered them; None for a class whose order did not change.

    Args:
        class_name: The model's class.
        candidates: Its parameters as version 5 registers them, under their names in the weight file.
        weights: The weight file, where it is at hand, for the values of what version 5 fuses.
    """
    if class_name not in _CLASSES:
        return None
    apart = _apart(candidates, weights)
    children: dict[tuple[str, ...], list[str]] = {}
    for c in apart:
        path = c.name.split(".")
        for depth, child in enumerate(path):
            known = children.setdefault(tuple(path[:depth]), [])
            if not child.isdecimal() and child not in known:
                known.append(child)
    for parent, known in children.items():
        named = [part for part in parent if not part.isdecimal()]
        children[parent] = _ORDERS.get((named[-1] if named else "", frozenset(known)), known)

    def place(c: Candidate) -> list[int]:
        path = c.name.split(".")
        return [
            int(child) if child.isdecimal() else children[tuple(path[:depth])].index(child)
            for depth, child in enumerate(path)
        ]

    return sorted(apart, key=place)


def in_file_order(
    candidates: Sequence[Candidate], weights: Mapping[str, TensorSource], tied: Mapping[str, str]
) -> list[Candidate] | None:
    """Return a model's parameters in the order of a weight file that keeps it; None where the file lacks one of them.

    A tied parameter (alias to name in `tied`) stands where the first of its names does.
    """
    places: dict[str, int] = {}
    for place, name in enumerate(weights):
        places.setdefault(tied.get(name, name), place)
    apart = _apart(candidates, weights)
    return None if any(c.name not in places for c in apart) else sorted(apart, key=lambda c: places[c.name])


def _apart(candidates: Sequence[Candidate], weights: Mapping[str, TensorSource]) -> list[Candidate]:
    """Return the same parameters with those that version 5 fuses as version 4 had them: one for each tensor of the file."""
    out: list[Candidate] = []
    for c in candidates:
        slices = [Candidate(p.name, p.shape, c.module, p.name, weight=weights.get(p.name)) for p in c.slices]
        out += slices or [c]
    return out


# -- adapters ---------------------------------------------------------------------------------------------------------------
#
# The order of an adapter's parameters from the names in its file alone, where the base model is not at hand.
#
# A file sorts its names, but a module cannot have its parameters in any order: those of one submodule stay together, numbered
# submodules count up, and a LoRA layer keeps A, B and its magnitude in this order. What is left open is the order of
# submodules beside each other (q_proj before v_proj?), which is the same in every layer. Each such order is one proposal.

_MOST = 5000
_LORA = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")

Tree = dict[str, Any]


def adapter_orders(weights: Weights) -> list[list[Candidate]]:
    """Return every order that an adapter's parameters may have; none if there are too many to try.

    Args:
        weights: The adapter's file.
    """
    tree: Tree = {}
    for name in weights.tensors:
        node = tree
        *path, last = name.split(".")
        for part in path:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                return []
        node[last] = name
    open_sets = sorted(set(_unordered(tree, "")))
    if math.prod(math.factorial(len(children)) for _, children in open_sets) > _MOST:
        return []
    orders = []
    for choice in itertools.product(*(itertools.permutations(children) for _, children in open_sets)):
        chosen = dict(zip(open_sets, choice, strict=True))
        orders.append([_candidate(name, weights) for name in _walk(tree, "", chosen)])
    return orders


def _candidate(name: str, weights: Weights) -> Candidate:
    return Candidate(name, tuple(weights.tensors[name].shape), weight=weights.tensors[name])


def _key(node: Tree, path: str) -> tuple[str, tuple[str, ...]]:
    """Return what makes two modules the same: their place, whatever the layer's number, and the children whose order is open."""
    children = {"#" if name.isdigit() else name for name in node if name not in _LORA}
    return re.sub(r"\d+", "#", path), tuple(sorted(children))


def _unordered(node: Tree, path: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    key = _key(node, path)
    if len(key[1]) > 1:
        yield key
    for name, child in node.items():
        if isinstance(child, dict):
            yield from _unordered(child, f"{path}.{name}")


def _walk(node: Tree, path: str, chosen: dict[tuple[str, tuple[str, ...]], tuple[str, ...]]) -> Iterator[str]:
    key = _key(node, path)
    numbered = sorted((name for name in node if name.isdigit()), key=int)
    named = [name for child in chosen.get(key, key[1]) for name in (numbered if child == "#" else [child])]
    lora = [name for name in _LORA if name in node]
    # A module's own parameters come before its submodules'; the magnitude is a submodule that its file names like a parameter.
    own = [name for name in named if not isinstance(node[name], dict)]
    below = [name for name in named if isinstance(node[name], dict)]
    for name in (*own, *below, *lora):
        child = node[name]
        if isinstance(child, dict):
            yield from _walk(child, f"{path}.{name}", chosen)
        else:
            yield child
