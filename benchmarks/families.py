"""Which Hugging Face models are measured at once, or inside a training step, and whether what comes out is the Fisher diagonal.

A tiny random model of every family against one plain backward pass for each example, written here and sharing nothing with the package
but the definition.

python -m benchmarks.families [--only NAME ...]    # needs the experiments extra; writes benchmarks/results/families.json
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import squisher

from .harness import RESULTS, environment

_TEXT = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_TEXT |= {"max_position_embeddings": 64, "pad_token_id": 0}
_LLAMA = {**_TEXT, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
_HEADS = {**_LLAMA, "head_dim": 8}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT = {**_LLAMA, **_EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
_LATENT |= {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
_LATENT |= {"first_k_dense_replace": 1}
_GPT = {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_STATE = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
_T5 = {"vocab_size": 60, "d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8}
_T5 |= {"decoder_start_token_id": 0}
_BART = {"vocab_size": 60, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
_BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64}
_PATCHES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_PATCHES |= {"image_size": 32, "patch_size": 8}
_STAGES = {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}
_SHIFTED = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
_PAIR = {"vision_config": _PATCHES, "text_config": {k: v for k, v in _TEXT.items() if k != "pad_token_id"}}
_SOUND = {k: v for k, v in _PATCHES.items() if k not in ("image_size", "patch_size")}
_SOUND |= {"conv_dim": [16, 16], "conv_stride": [4, 2], "conv_kernel": [8, 3], "num_feat_extract_layers": 2}
_SOUND |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 16}
_HEAR = {**_BART, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16, "pad_token_id": 0}
_HEAR |= {"decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2}
_DISENTANGLED = {**_TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    # name: (what it does, its class in transformers, its configuration)
    "Llama": ("causal", "LlamaForCausalLM", _LLAMA),
    "Mistral": ("causal", "MistralForCausalLM", {**_LLAMA, "sliding_window": 4}),
    "Mixtral": ("causal", "MixtralForCausalLM", {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen2": ("causal", "Qwen2ForCausalLM", _LLAMA),
    "Qwen2-MoE": (
        "causal", "Qwen2MoeForCausalLM", {**_LLAMA, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}
    ),
    "Qwen3": ("causal", "Qwen3ForCausalLM", _HEADS),
    "Qwen3-MoE": ("causal", "Qwen3MoeForCausalLM", {**_HEADS, **_EXPERTS, "num_experts": 4}),
    "Qwen3-Next": (
        "causal", "Qwen3NextForCausalLM",
        {**_HEADS, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2,
         "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    ),
    "Gemma": ("causal", "GemmaForCausalLM", _HEADS),
    "Gemma 2": ("causal", "Gemma2ForCausalLM", {**_HEADS, "sliding_window": 4}),
    "Gemma 3": ("causal", "Gemma3ForCausalLM", {**_HEADS, "sliding_window": 4}),
    "Phi": ("causal", "PhiForCausalLM", _LLAMA),
    "Phi-3": ("causal", "Phi3ForCausalLM", _LLAMA),
    "OLMo": ("causal", "OlmoForCausalLM", _LLAMA),
    "OLMo 2": ("causal", "Olmo2ForCausalLM", _LLAMA),
    "OLMo 3": ("causal", "Olmo3ForCausalLM", _LLAMA),
    "OLMoE": ("causal", "OlmoeForCausalLM", {**_LLAMA, "num_experts": 4, "num_experts_per_tok": 2}),
    "Granite": ("causal", "GraniteForCausalLM", _LLAMA),
    "Granite-MoE": ("causal", "GraniteMoeForCausalLM", {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Cohere": ("causal", "CohereForCausalLM", _LLAMA),
    "Cohere 2": ("causal", "Cohere2ForCausalLM", _LLAMA),
    "StarCoder 2": ("causal", "Starcoder2ForCausalLM", _LLAMA),
    "StableLM": ("causal", "StableLmForCausalLM", _LLAMA),
    "SmolLM 3": ("causal", "SmolLM3ForCausalLM", _LLAMA),
    "GLM-4": ("causal", "Glm4ForCausalLM", _HEADS),
    "Nemotron": ("causal", "NemotronForCausalLM", _LLAMA),
    "Persimmon": ("causal", "PersimmonForCausalLM", _LLAMA),
    "DeepSeek-V2": ("causal", "DeepseekV2ForCausalLM", _LATENT),
    "DeepSeek-V3": ("causal", "DeepseekV3ForCausalLM", _LATENT),
    "gpt-oss": (
        "causal", "GptOssForCausalLM", {**_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}
    ),
    "Llama 4": (
        "causal", "Llama4ForCausalLM",
        {**_HEADS, "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 48},
    ),
    "Falcon": ("causal", "FalconForCausalLM", {k: _TEXT[k] for k in list(_TEXT)[:4]}),
    "BLOOM": ("causal", "BloomForCausalLM", {"vocab_size": 60, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "GPT-NeoX (Pythia)": ("causal", "GPTNeoXForCausalLM", _TEXT),
    "GPT-J": ("causal", "GPTJForCausalLM", {**_GPT, "rotary_dim": 4}),
    "GPT-Neo": (
        "causal", "GPTNeoForCausalLM",
        {"vocab_size": 60, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64,
         "attention_types": [[["global", "local"], 1]], "window_size": 4},
    ),
    "GPT-2": ("causal", "GPT2LMHeadModel", _GPT),
    "OPT": (
        "causal", "OPTForCausalLM", {**{k: v for k, v in _TEXT.items() if k != "intermediate_size"}, "ffn_dim": 48}
    ),
    "CodeGen": ("causal", "CodeGenForCausalLM", {**_GPT, "rotary_dim": 4}),
    "CTRL": ("causal", "CTRLLMHeadModel", {**_GPT, "dff": 48}),
    "MPT": (
        "causal", "MptForCausalLM", {"vocab_size": 60, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}
    ),
    "BioGPT": ("causal", "BioGptForCausalLM", _TEXT),
    "Mamba": ("causal", "MambaForCausalLM", _STATE),
    "Mamba 2": (
        "causal", "Mamba2ForCausalLM", {**_STATE, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4}
    ),
    "FalconMamba": ("causal", "FalconMambaForCausalLM", _STATE),
    "Jamba": (
        "causal", "JambaForCausalLM",
        {**_LLAMA, "num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1,
         "expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False, "mamba_d_state": 4},
    ),
    "Bamba": (
        "causal", "BambaForCausalLM",
        {**_LLAMA, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 4,
         "attn_layer_indices": [1], "mamba_chunk_size": 4},
    ),
    "LFM2": ("causal", "Lfm2ForCausalLM", _LLAMA),
    "RWKV": (
        "causal", "RwkvForCausalLM",
        {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32},
    ),
    "RecurrentGemma": ("causal", "RecurrentGemmaForCausalLM", {**_LLAMA, "lru_width": 32, "attention_window_size": 8}),
    "BERT": ("classes", "BertForSequenceClassification", _TEXT),
    "BERT (masked)": ("masked", "BertForMaskedLM", _TEXT),
    "BERT (tokens)": ("tokens", "BertForTokenClassification", _TEXT),
    "RoBERTa": ("classes", "RobertaForSequenceClassification", _TEXT),
    "RoBERTa (masked)": ("masked", "RobertaForMaskedLM", _TEXT),
    "DistilBERT": (
        "classes", "DistilBertForSequenceClassification",
        {"vocab_size": 60, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 64},
    ),
    "ALBERT": ("classes", "AlbertForSequenceClassification", {**_TEXT, "embedding_size": 16}),
    "ELECTRA": ("classes", "ElectraForSequenceClassification", {**_TEXT, "embedding_size": 16}),
    "DeBERTa": ("classes", "DebertaForSequenceClassification", _DISENTANGLED),
    "DeBERTa-v2": ("classes", "DebertaV2ForSequenceClassification", {**_DISENTANGLED, "conv_kernel_size": 3}),
    "MPNet": ("classes", "MPNetForSequenceClassification", _TEXT),
    "ModernBERT": (
        "classes", "ModernBertForSequenceClassification",
        {**_TEXT, "local_attention": 4, "global_attn_every_n_layers": 2, "attn_implementation": "sdpa"},
    ),
    "Longformer": ("classes", "LongformerForSequenceClassification", {**_TEXT, "attention_window": 4}),
    "BigBird": ("classes", "BigBirdForSequenceClassification", {**_TEXT, "attention_type": "original_full"}),
    "Funnel": (
        "classes", "FunnelForSequenceClassification",
        {"vocab_size": 60, "d_model": 32, "block_sizes": [1, 1], "n_head": 4, "d_head": 8, "d_inner": 48},
    ),
    "FNet": ("classes", "FNetForSequenceClassification", _TEXT),
    "SqueezeBERT": ("classes", "SqueezeBertForSequenceClassification", {**_TEXT, "embedding_size": 32}),
    "MobileBERT": (
        "classes", "MobileBertForSequenceClassification",
        {**_TEXT, "embedding_size": 32, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    ),
    "ConvBERT": (
        "classes", "ConvBertForSequenceClassification",
        {**_TEXT, "embedding_size": 32, "conv_kernel_size": 3, "head_ratio": 2},
    ),
    "RemBERT": ("classes", "RemBertForSequenceClassification", _TEXT),
    "XLM": (
        "classes", "XLMForSequenceClassification",
        {"vocab_size": 60, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64},
    ),
    "XLNet": (
        "classes", "XLNetForSequenceClassification",
        {"vocab_size": 60, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
    ),
    "Llama (classes)": ("classes", "LlamaForSequenceClassification", _LLAMA),
    "GPT-2 (classes)": ("classes", "GPT2ForSequenceClassification", {**_GPT, "pad_token_id": 0}),
    "BART (classes)": ("classes", "BartForSequenceClassification", {**_BART, "eos_token_id": 2}),
    "ESM": ("masked", "EsmForMaskedLM", {**_TEXT, "position_embedding_type": "rotary"}),
    "T5": ("sequences", "T5ForConditionalGeneration", _T5),
    "mT5": ("sequences", "MT5ForConditionalGeneration", _T5),
    "Switch": (
        "sequences", "SwitchTransformersForConditionalGeneration",
        {**_T5, "num_decoder_layers": 2, "num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    ),
    "BART": ("sequences", "BartForConditionalGeneration", _BART),
    "Pegasus": ("sequences", "PegasusForConditionalGeneration", {**_BART, "decoder_start_token_id": 0}),
    "Whisper": ("speech to text", "WhisperForConditionalGeneration", _HEAR),
    "wav2vec 2.0": ("sound", "Wav2Vec2ForSequenceClassification", _SOUND),
    "HuBERT": ("sound", "HubertForSequenceClassification", _SOUND),
    "WavLM": ("sound", "WavLMForSequenceClassification", _SOUND),
    "ViT": ("images", "ViTForImageClassification", _PATCHES),
    "DeiT": ("images", "DeiTForImageClassification", _PATCHES),
    "BEiT": ("images", "BeitForImageClassification", {**_PATCHES, "use_relative_position_bias": True}),
    "DINOv2": ("images", "Dinov2ForImageClassification", _PATCHES),
    "DINOv2 with registers": ("images", "Dinov2WithRegistersForImageClassification", _PATCHES),
    "Swin": ("images", "SwinForImageClassification", _SHIFTED),
    "Swin v2": ("images", "Swinv2ForImageClassification", _SHIFTED),
    "ConvNeXt": ("images", "ConvNextForImageClassification", _STAGES),
    "ConvNeXt v2": ("images", "ConvNextV2ForImageClassification", _STAGES),
    "ResNet": (
        "images", "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    ),
    "RegNet": (
        "images", "RegNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4},
    ),
    "BiT": (
        "images", "BitForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_groups": 4},
    ),
    "MobileNet v2": ("images", "MobileNetV2ForImageClassification", {"image_size": 32}),
    "PVT": ("images", "PvtForImageClassification", {**_STAGES, "num_attention_heads": [1, 2, 2, 2], "image_size": 32}),
    "PoolFormer": ("images", "PoolFormerForImageClassification", _STAGES),
    "FocalNet": ("images", "FocalNetForImageClassification", {"embed_dim": 8, "depths": [1, 1, 1, 1], "image_size": 32}),
    "CLIP": ("images", "CLIPForImageClassification", _PAIR),
    "SigLIP": ("images", "SiglipForImageClassification", _PAIR),
}  # fmt: skip

SINGLE = {"Mixtral", "Qwen2-MoE", "Qwen3-MoE", "Qwen3-Next", "OLMoE", "Granite-MoE", "Jamba", "DeepSeek-V2"}
SINGLE |= {"DeepSeek-V3", "gpt-oss", "Gemma 2"}
"""In single precision: the grouped product of experts has no other. Others compute a part of themselves, or the loss, in it."""
LENGTH = 10


def build(name: str) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """Make the model of a family in evaluation mode, and two batches of different size with padding.

    Raises:
        AttributeError: This version of transformers does not have it.
    """
    import transformers

    does, class_name, settings = FAMILIES[name]
    if does in ("classes", "tokens", "images", "sound"):
        settings = {**settings, "num_labels": 3}
    torch.manual_seed(0)
    kind = getattr(transformers, class_name)
    dtype = torch.float32 if name in SINGLE else torch.float64
    model = kind(kind.config_class(**settings)).to(dtype).eval()
    draw = torch.Generator().manual_seed(1)
    batches = [_batch(does, size, draw) for size in (4, 3)]
    return model, [{k: v.to(dtype) if v.is_floating_point() else v for k, v in b.items()} for b in batches]


def _batch(does: str, size: int, draw: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(3, 60, (size, LENGTH), generator=draw)
    lengths = torch.randint(4, LENGTH + 1, (size,), generator=draw)
    mask = torch.arange(LENGTH)[None] < lengths[:, None]
    ids = ids * mask
    classes = torch.randint(0, 3, (size,), generator=draw)
    sequence = torch.randint(3, 60, (size, 6), generator=draw)
    sequence[1:, 4:] = -100
    text = {"input_ids": ids, "attention_mask": mask.long()}
    if does == "causal":
        return {**text, "labels": ids.masked_fill(~mask, -100)}
    if does == "masked":
        chosen = torch.rand(ids.shape, generator=draw) < 0.4
        chosen[:, 1] = True
        return {**text, "labels": ids.masked_fill(~(mask & chosen), -100)}
    if does == "tokens":
        return {**text, "labels": torch.randint(0, 3, ids.shape, generator=draw).masked_fill(~mask, -100)}
    if does == "sequences":
        return {**text, "labels": sequence}
    if does == "speech to text":
        return {"input_features": torch.randn(size, 8, 16, generator=draw), "labels": sequence}
    if does == "sound":
        return {"input_values": torch.randn(size, 400, generator=draw), "labels": classes}
    if does == "images":
        return {"pixel_values": torch.randn(size, 3, 32, 32, generator=draw), "labels": classes}
    ids[torch.arange(size), lengths - 1] = 2  # some look for the end
    return {**text, "labels": classes}


def definition(name: str, model: nn.Module, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the textbook empirical Fisher diagonal: the squared gradient of every example's summed loss."""
    parameters = {key: p for key, p in model.named_parameters() if p.requires_grad}
    totals = {key: torch.zeros_like(p) for key, p in parameters.items()}
    causal = FAMILIES[name][0] == "causal"
    examples = 0
    for batch in batches:
        for n in range(len(batch["labels"])):
            one = {key: value[n : n + 1] for key, value in batch.items()}
            logits, labels = model(**one, **({"use_cache": False} if causal else {})).logits, one["labels"]
            if causal:
                logits, labels = logits[:, :-1], labels[:, 1:]
            loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")
            found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
            for total, gradient in zip(totals.values(), found, strict=True):
                if gradient is not None:
                    total += gradient.square()
            examples += 1
    return {key: total / examples for key, total in totals.items()}


def measure(name: str) -> dict[str, Any]:
    """Measure one family; returns how, the largest error relative to a parameter's largest entry, and why the loop was needed."""
    model, batches = build(name)
    expected = definition(name, model, batches)
    found = squisher.fisher(model, batches, dtype=next(model.parameters()).dtype)
    coverage = found.provenance.coverage
    why = next(iter(coverage["loop"].values()), "")
    return {"does": FAMILIES[name][0], "method": coverage["method"], "error": _error(found, expected), "why": why}


def track(name: str) -> dict[str, Any]:
    """Measure one family inside a training step; returns the largest error, and why a parameter or all of it was left out."""
    model, batches = build(name)
    expected = definition(name, model, batches[:1])
    settings = {"use_cache": False} if FAMILIES[name][0] == "causal" else {}
    tracker = squisher.Tracker(model, per="example")
    try:
        with tracker.step():
            model(**batches[0], **settings).loss.backward()
        found = squisher.extract(tracker, model)
    except squisher.SquisherError as error:
        return {"method": "refused", "why": str(error)}
    left = {key: a.note for key, a in found.provenance.absent.items() if a.reason == "no_rule"}
    return {"method": "partly" if left else "all", "error": _error(found, expected), "left": left}


def _error(found: squisher.Importance, expected: dict[str, Tensor]) -> float:
    """Return the largest difference relative to the largest entry of its parameter, without gradients that are rounding alone."""
    nothing = 1e-12 * max(float(value.max()) for value in expected.values())
    return max(
        float((found[key].to(value.dtype) - value).abs().max() / value.max())
        for key, value in expected.items()
        if key in found and value.max() > nothing
    )


def main(names: list[str], say: Callable[[str], None] = print) -> None:
    """Measure families and write the document."""
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    for name in names:
        rows[name] = {**measure(name), "step": track(name)}
        say(f"{name}: {rows[name]}")
    if list(rows) == list(FAMILIES):
        document = {"environment": {**environment(), "transformers": transformers.__version__}, "families": rows}
        (RESULTS / "families.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="NAME")
    main(parser.parse_args().only)
