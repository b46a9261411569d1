"""The order in which transformers 4 registered the parameters of models that version 5 registers in another.

Found by building every class of 4.57.6 and of 5.22.2 from its default config on the meta device. Of 988 classes, 817 have one
order (38 of them under other names), 136 have the same names in the weight file in another order and are listed here, and 35 differ
in more than that. The order is that of version 5 but for the modules whose children are listed, and experts that version 5 keeps
in one tensor are apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...storage.tensors import TensorSource
from ..states import Candidate

__all__ = ["in_file_order", "in_order_of_version_4"]

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
