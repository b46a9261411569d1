"""Unmodified Hugging Face models, tiny and random, against the loop."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import families
from squisher.measure import fisher
from tests.processes import run_together

pytestmark = [
    pytest.mark.formats,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 40}


def _ids(n=5, length=9):
    torch.manual_seed(1)
    return torch.randint(3, 40, (n, length))


def _text(labels):
    ids = _ids()
    mask = torch.ones_like(ids)
    mask[::2, 6:] = 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100) if labels is None else labels,
    }


def _bert(t):
    return t.BertForSequenceClassification(t.BertConfig(**SIZES, num_labels=3)), _text(torch.arange(5) % 3), set()


def _masked(t):
    labels = _ids().clone()
    labels[:, ::2] = -100
    return t.BertForMaskedLM(t.BertConfig(**SIZES)), _text(labels), set()


def _gpt2(t):
    return (
        t.GPT2LMHeadModel(t.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=40, n_positions=16)),
        _text(None),
        set(),
    )


def _llama(t):
    return t.LlamaForCausalLM(t.LlamaConfig(**SIZES, num_key_value_heads=1)), _text(None), set()


def _t5(t):
    config = t.T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, vocab_size=40, decoder_start_token_id=0)
    return t.T5ForConditionalGeneration(config), _text(_ids(5, 6)), {"relative_attention_bias"}


def _vit(t):
    config = t.ViTConfig(
        **{k: v for k, v in SIZES.items() if k != "vocab_size"}, image_size=8, patch_size=4, num_labels=3
    )
    torch.manual_seed(1)
    return (
        t.ViTForImageClassification(config),
        {"pixel_values": torch.randn(5, 3, 8, 8), "labels": torch.arange(5) % 3},
        set(),
    )


def _mixtral(t):
    config = t.MixtralConfig(**SIZES, num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2)
    left = {"model.", "lm_head"} if t.__version__.startswith("4.") else set()  # there, Python loops over the experts
    return t.MixtralForCausalLM(config), _text(None), left


MODELS = {
    "bert": _bert,
    "masked": _masked,
    "gpt2": _gpt2,
    "llama": _llama,
    "t5": _t5,
    "vit": _vit,
    "mixtral": _mixtral,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("labels", ["data", "sampled"])
def test_equals_the_loop(name, labels):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, batch, left = MODELS[name](transformers)
    # The grouped matrix product of the experts exists in single precision only.
    dtype, tolerance = (torch.float32, 1e-5) if name == "mixtral" else (torch.float64, 1e-10)
    model = model.to(dtype)
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
    batches = [{k: v[:3] for k, v in batch.items()}, {k: v[3:] for k, v in batch.items()}]
    settings = {"labels": labels, "dtype": dtype}
    expected = fisher(model, batches, method="loop", **settings)
    found = fisher(model, batches, **settings)
    floor = 1e-12 * max(float(t.max()) for t in expected.values())
    for key in expected:
        error = float((found[key] - expected[key]).abs().max())
        assert error <= tolerance * float(expected[key].max()) + floor, (key, error)
    coverage = found.provenance.coverage["loop"]
    assert all(any(mark in key for mark in left) for key in coverage), coverage


@pytest.mark.parametrize("name", families.FAMILIES)
def test_families_equal_the_definition(name):
    """What the page says of a family still holds, in the installed version if that has it."""
    transformers = pytest.importorskip("transformers", "5", reason="the page is of transformers 5")
    expected = json.loads((families.RESULTS / "families.json").read_text())
    found, step = families.measure(name), families.track(name)
    assert found["error"] <= 1e-5
    assert step.get("error", 0.0) <= 1e-5
    if transformers.__version__ == expected["environment"]["transformers"]:
        assert found["method"] == expected["families"][name]["method"], found["why"]
        assert step["method"] == expected["families"][name]["step"]["method"], step


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5"])
def test_losses_are_those_of_the_model(name):
    """The summed log-likelihood that is squared is the model's own loss times what it was divided by."""
    transformers = pytest.importorskip("transformers")
    from squisher.measure import objective_for
    from squisher.measure.batches import parse

    torch.manual_seed(0)
    model, batch, _ = MODELS[name](transformers)
    model = model.double().eval()
    objective = objective_for(model)
    outputs = objective.outputs(model, parse(batch, model, torch.device("cpu")))
    ours = next(objective.terms(outputs, torch.arange(5))).sum()
    theirs = model(**batch).loss * outputs.mask.sum()
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-6)


def test_gradient_checkpointing_and_adapters():
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model, batch, _ = MODELS["llama"](transformers)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    model = model.double()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.normal_()
    settings = {"dtype": torch.float64}
    expected = fisher(model, [batch], method="loop", **settings)
    found = fisher(model, [batch], method="fast", **settings)
    assert len(expected) == 8
    assert all(".default" not in key for key in expected)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model.train()
    checkpointed = fisher(model, [batch], method="fast", **settings)
    for key in expected:
        assert torch.allclose(found[key], expected[key], rtol=1e-9)
        assert torch.allclose(checkpointed[key], expected[key], rtol=1e-9)


def _parallel(rank: int, folder: str) -> None:
    import os

    from torch.distributed.device_mesh import init_device_mesh
    from transformers import AutoModelForCausalLM

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for kind in ("llama", "qwen3"):
        model = AutoModelForCausalLM.from_pretrained(f"{folder}/{kind}", tp_plan="auto", device_mesh=mesh)
        found = fisher(model, [_plain()])
        found.save(f"{folder}/{kind}.safetensors")


def _plain():
    return {"input_ids": _ids(), "labels": _ids()}


def test_models_loaded_with_a_tensor_parallel_plan(tmp_path):
    import squisher

    transformers = pytest.importorskip("transformers", "5", reason="transformers 4 loads no such plan on a CPU")

    sizes = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    torch.manual_seed(3)
    models = {
        "llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)),
        "qwen3": transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes)),
    }
    for kind, model in models.items():
        model.save_pretrained(tmp_path / kind)
    run_together(_parallel, tmp_path, str(tmp_path))
    for kind, model in models.items():
        expected = fisher(model, [_plain()], method="loop")
        found = squisher.load(tmp_path / f"{kind}.safetensors")
        assert found.provenance.coverage["method"] == {"llama": "fast", "qwen3": "loop"}[kind]
        for name, value in expected.items():
            assert float((found[name] - value).abs().max()) <= 1e-5 * float(value.max()), name
