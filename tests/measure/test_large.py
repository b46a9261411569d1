"""One process and a large model: a device_map with offloading, and adapters on frozen bases of four and eight bits; on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from squisher.errors import SquisherError
from squisher.measure import fisher

pytestmark = [
    pytest.mark.formats,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
HERE, AWAY = r"embed_tokens|layers\.0|model\.norm", {"model.layers.1": "disk", "lm_head": "cpu"}


def _model():
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def _batches():
    ids = torch.randint(0, 40, (6, 9), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": part, "labels": part} for part in ids.split(3)]


def _assert_same(found, expected):
    for name in found:
        largest = float(expected[name].max())
        assert torch.allclose(found[name] / largest, expected[name] / largest, atol=1e-5), name


@pytest.mark.parametrize("method", ["fast", "loop"])
def test_what_a_device_map_offloads_may_be_frozen(tmp_path, method):
    from accelerate import disk_offload, dispatch_model

    plain = _model()
    expected = fisher(plain, _batches(), method="loop")
    model = copy.deepcopy(plain)
    places = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb"), "cpu")
    dispatch_model(model, {**places, **AWAY}, main_device="cpu", offload_dir=tmp_path / "some", force_hooks=True)
    assert model.model.layers[1].mlp.up_proj.weight.is_meta
    found = fisher(model, _batches(), parameters=HERE, method=method)
    assert set(found) == {name for name, p in model.named_parameters() if not p.is_meta and not name.startswith("lm_")}
    _assert_same(found, expected)
    with pytest.raises(SquisherError, match=r"^9 .*'model\.layers\.1\.self_attn\.q_proj\.weight'"):
        fisher(model, _batches(), parameters=r"layers\.1|model\.norm")
    with pytest.raises(SquisherError, match="device_map"):
        fisher(disk_offload(copy.deepcopy(plain), tmp_path / "all", torch.device("cpu")), _batches())


def _quantised(kind: str) -> nn.Module:
    model = _model().requires_grad_(False)
    if kind == "torchao, 8 bits":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda m, name: isinstance(m, nn.Linear) and "proj" in name)
        return model
    import bitsandbytes as bnb

    for name, old in list(model.named_modules()):
        if isinstance(old, nn.Linear) and "proj" in name:
            if "4" in kind:
                new = bnb.nn.Linear4bit(old.in_features, old.out_features, bias=False, quant_type="nf4")
                new.weight = bnb.nn.Params4bit(old.weight.data, requires_grad=False, quant_type="nf4")
                # Newer processors get a kernel in eval mode through which bitsandbytes has no gradient.
                new.support_avx512bf16_for_cpu = False
            else:
                new = bnb.nn.Linear8bitLt(old.in_features, old.out_features, bias=False, has_fp16_weights=False)
                new.weight = bnb.nn.Int8Params(old.weight.data, requires_grad=False, has_fp16_weights=False)
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, new)
    return model.to("cpu")


@pytest.mark.parametrize("kind", ["bitsandbytes, 4 bits", "bitsandbytes, 8 bits", "torchao, 8 bits"])
def test_an_adapter_on_a_frozen_quantised_base(kind):
    import peft

    torch.manual_seed(1)
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(_quantised(kind), settings).eval()
    assert model.base_model.model.model.layers[0].mlp.up_proj.weight.element_size() != 4 or "torchao" in kind
    found, expected = fisher(model, _batches()), fisher(model, _batches(), method="loop")
    assert len(found) == 8
    # Eight bits of bitsandbytes round activations, too, by an operation that has no rule.
    assert found.provenance.coverage["method"] == ("loop" if kind == "bitsandbytes, 8 bits" else "fast")
    _assert_same(found, expected)
