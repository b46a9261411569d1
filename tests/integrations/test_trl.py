"""TRL's SFTTrainer with our callbacks, with and without an adapter."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open

import squisher
from squisher.integrations.transformers import EWCCallback, SquisherCallback

from .trainers import ewc_of, llama

pytestmark = [pytest.mark.formats, pytest.mark.filterwarnings("default")]

LENGTHS = [3 + k * 5 % 7 for k in range(24)]
TEXTS = [" ".join(f"w{(7 * k + 3 * n) % 60}" for n in range(length)) for k, length in enumerate(LENGTHS)]


def word_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{k}": k for k in range(60)} | {"<pad>": 60, "<eos>": 61, "<unk>": 62}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def sft(folder, adapter=False, accumulation=1, **more):
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    settings = {
        "report_to": [], "use_cpu": True, "disable_tqdm": True, "bf16": False, "gradient_checkpointing": False,
        "max_steps": 3, "save_steps": 3, "logging_steps": 1, "max_grad_norm": 0.0, "learning_rate": 0.0,
        "per_device_train_batch_size": 4 // accumulation, "gradient_accumulation_steps": accumulation,
    }  # fmt: skip
    torch.manual_seed(0)
    return SFTTrainer(
        model=llama(),
        args=SFTConfig(str(folder), **{**settings, **more}),
        train_dataset=Dataset.from_dict({"text": TEXTS}),
        processing_class=word_tokenizer(),
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM") if adapter else None,
    )


@pytest.mark.parametrize("adapter", [False, True])
def test_recorded_with_tokens_and_the_names_of_the_file(tmp_path, adapter):
    found = []
    for accumulation in (1, 2):
        trainer = sft(tmp_path / str(accumulation), adapter, accumulation)
        SquisherCallback().attach(trainer)
        trainer.train()
        found.append(squisher.load(tmp_path / str(accumulation) / "checkpoint-3" / "squisher.safetensors"))
    weights = "adapter_model.safetensors" if adapter else "model.safetensors"
    with safe_open(tmp_path / "1" / "checkpoint-3" / weights, "pt") as file:
        assert set(found[0]) == set(file.keys())
    for imp in found:
        p = imp.provenance
        assert (p.batch_size, p.loss_reduction, p.unit, p.scale) == (4, "token_mean", "token", 1.0)
        assert p.training["counted"]["examples"] == 12
        assert p.batch_tokens == found[0].provenance.batch_tokens
    for name in found[0]:
        assert torch.allclose(found[0][name], found[1][name], rtol=1e-3, atol=1e-12), name


@pytest.mark.parametrize("adapter", [False, True])
def test_ewc(tmp_path, adapter):
    plain = sft(tmp_path, adapter, max_steps=1)
    expected = SquisherCallback().attach(plain)
    plain.train()
    trainer = sft(tmp_path, adapter, max_steps=4, learning_rate=0.01, lr_scheduler_type="constant")
    ewc = ewc_of(trainer.model, 1e3)
    callback = EWCCallback(ewc).attach(trainer)
    seen = []
    observe = callback._observe

    def first_only():
        observe()
        if not seen:
            seen.append(callback.importance())

    callback._watch._on_gradients = first_only
    before = float(ewc.penalty())
    trainer.train()
    for name, value in expected.importance().items():  # the first step's gradients, without the penalty's
        assert torch.allclose(seen[0][name], value, rtol=1e-3, atol=1e-12), name
    logged = [line["ewc_penalty"] for line in trainer.state.log_history if "ewc_penalty" in line]
    assert len(logged) == 4
    assert logged[-1] < before
