"""Fresh Trainer checkpoints by the real transformers and peft, compared with the optimizer that wrote them."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import Dataset

import squisher

pytestmark = [pytest.mark.formats, pytest.mark.filterwarnings("default")]


class Tokens(Dataset):
    def __init__(self, labels=None, images=False):
        g = torch.Generator().manual_seed(0)
        self.ids = torch.randint(4, 60, (64, 10), generator=g)
        self.pixels = torch.randn(64, 3, 8, 8, generator=g) if images else None
        self.labels = torch.randint(0, labels, (64,), generator=g) if labels else self.ids

    def __len__(self):
        return 64

    def __getitem__(self, k):
        if self.pixels is not None:
            return {"pixel_values": self.pixels[k], "labels": self.labels[k]}
        return {"input_ids": self.ids[k], "labels": self.labels[k]}


def train(model, folder, data=None, steps=4, **more):
    """Trains, saves checkpoint-2 and checkpoint-4, and gives the live second moments by live name."""
    from transformers import Trainer, TrainingArguments

    settings = {
        "max_steps": steps,
        "save_steps": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "weight_decay": 0.01,
    }
    args = TrainingArguments(
        str(folder), report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=100, **{**settings, **more}
    )
    trainer = Trainer(model=model, args=args, train_dataset=data or Tokens())
    trainer.train()
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    return {
        names[id(p)]: {k: v.clone() if torch.is_tensor(v) else v for k, v in state.items()}
        for p, state in optimizer.state.items()
    }


def small_llama(**more):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 64,
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "num_key_value_heads": 2, **more}))


def small_bert(labels=3):
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "vocab_size": 64,
    }
    return BertForSequenceClassification(BertConfig(num_labels=labels, **sizes))


def compare(imp, live, rename=lambda name: name):
    assert set(imp) == {rename(name) for name in live}
    for name, state in live.items():
        assert torch.equal(imp[rename(name)], state["exp_avg_sq"].float()), name


def test_full_fine_tuning(tmp_path):
    live = train(small_llama(), tmp_path, gradient_accumulation_steps=2)
    imp = squisher.extract(tmp_path / "checkpoint-4", bias_correction=False)
    compare(imp, live)
    assert "the model of config.json, registration order inside each of 2 groups" in str(imp.provenance.naming)
    assert imp.provenance.batch_size == 8
    assert imp.provenance.loss_reduction == "token_mean"
    assert imp.provenance.steps == {"min": 4, "max": 4}
    assert imp.provenance.optimizer["beta2"] == 0.999


def test_tied_embeddings_and_low_precision(tmp_path):
    live = train(small_llama(tie_word_embeddings=True).to(torch.bfloat16), tmp_path)
    imp = squisher.extract(tmp_path / "checkpoint-4", bias_correction=False)
    compare(imp, live)
    assert imp.provenance.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert imp.provenance.dtype_of_source == "bfloat16"


def test_sharded_weights(tmp_path):
    model = small_llama()
    live = train(model, tmp_path)
    folder = tmp_path / "checkpoint-4"
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="10KB")
    assert (folder / "model.safetensors.index.json").is_file()
    compare(squisher.extract(folder, bias_correction=False), live)


def test_fused_experts_are_split_as_in_the_file(tmp_path):
    from safetensors import safe_open
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        num_local_experts=4, vocab_size=64,
    )  # fmt: skip
    live = train(MixtralForCausalLM(config), tmp_path)
    imp = squisher.extract(tmp_path / "checkpoint-4", bias_correction=False)
    with safe_open(tmp_path / "checkpoint-4" / "model.safetensors", "pt") as file:
        assert set(imp) == set(file.keys())
        for name in imp:
            assert imp[name].shape == tuple(file.get_slice(name).get_shape())
    if set(live) == set(imp):  # transformers 4 keeps the experts apart
        assert all(torch.equal(imp[name], live[name]["exp_avg_sq"]) for name in imp)
        return
    fused = live["model.layers.1.mlp.experts.gate_up_proj"]["exp_avg_sq"]
    down = live["model.layers.1.mlp.experts.down_proj"]["exp_avg_sq"]
    stem = "model.layers.1.block_sparse_moe.experts"
    for k in range(4):
        assert torch.equal(imp[f"{stem}.{k}.w1.weight"], fused[k, :24])
        assert torch.equal(imp[f"{stem}.{k}.w3.weight"], fused[k, 24:])
        assert torch.equal(imp[f"{stem}.{k}.w2.weight"], down[k])
    assert imp.provenance.live_names[f"{stem}.0.w1.weight"] == "model.layers.1.mlp.experts.gate_up_proj"
    imp.save(tmp_path / "out.safetensors")
    again = squisher.load(tmp_path / "out.safetensors")
    assert all(torch.equal(again[name], imp[name]) for name in imp)


def test_names_that_transformers_changes_on_saving(tmp_path):
    from safetensors import safe_open
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=8,
        patch_size=4,
        num_labels=3,
    )
    model = ViTForImageClassification(config)
    live = train(model, tmp_path, Tokens(3, images=True))
    folder = tmp_path / "checkpoint-4"
    imp = squisher.extract(folder, bias_correction=False)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert set(imp) == set(file.keys())
        weights = {name: p for name, p in model.named_parameters()}
        for name in imp:  # a file tensor is the live parameter of the name that the provenance keeps
            running = imp.provenance.live_names.get(name, name)
            assert torch.equal(file.get_tensor(name), weights[running].detach())
            assert torch.equal(imp[name], live[running]["exp_avg_sq"])


def adapter(model, **more):
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return get_peft_model(model, LoraConfig(**{"r": 4, "target_modules": targets, "task_type": "CAUSAL_LM", **more}))


@pytest.mark.parametrize("more", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"bias": "all"}], ids=str)
def test_adapters(tmp_path, more):
    from squisher.names import adapter_file_name

    base = small_llama(attention_bias=more == {"bias": "all"})
    base.save_pretrained(tmp_path / "base")
    live = train(adapter(base, **more), tmp_path)
    folder = tmp_path / "checkpoint-4"
    with pytest.raises(squisher.SquisherError, match="--base-model"):
        squisher.extract(folder)
    imp = squisher.extract(folder, bias_correction=False, base_model=tmp_path / "base")
    compare(imp, live, adapter_file_name)


def test_a_classifier_that_old_versions_of_peft_gave_to_the_optimizer(tmp_path):
    """Before 0.6 the original stayed trainable beside its copy; no gradient ever reached it."""
    from squisher.names import adapter_file_name

    base = small_bert()
    base.save_pretrained(tmp_path / "base")
    model = adapter(base, target_modules=["query", "value"], task_type="SEQ_CLS")
    originals = [p.requires_grad_(True) for name, p in model.named_parameters() if "original_module" in name]
    assert originals
    live = train(model, tmp_path, Tokens(3))
    state = torch.load(tmp_path / "checkpoint-4" / "optimizer.pt")
    assert sum(len(group["params"]) for group in state["param_groups"]) == len(live) + len(originals)
    imp = squisher.extract(tmp_path / "checkpoint-4", bias_correction=False, base_model=tmp_path / "base")
    compare(imp, live, adapter_file_name)


@pytest.mark.parametrize("kind", ["IA3Config", "LoHaConfig", "VeraConfig"])
def test_other_adapters(tmp_path, kind):
    import peft
    from safetensors.torch import load_file

    base = small_llama()
    base.save_pretrained(tmp_path / "base")
    more = {"feedforward_modules": ["v_proj"]} if kind == "IA3Config" else {}
    config = getattr(peft, kind)(target_modules=["q_proj", "k_proj", "v_proj"], task_type="CAUSAL_LM", **more)
    model = peft.get_peft_model(base, config)
    live = train(model, tmp_path)
    imp = squisher.extract(tmp_path / "checkpoint-4", bias_correction=False, base_model=tmp_path / "base")
    stored = load_file(tmp_path / "checkpoint-4" / "adapter_model.safetensors")
    weights = dict(model.named_parameters())
    assert len(imp) == len(live)
    for name in imp:
        running = imp.provenance.live_names[name]
        assert torch.equal(stored[name], weights[running].detach())
        assert torch.equal(imp[name], live[running]["exp_avg_sq"])


def test_an_adapter_whose_shapes_tell_its_order_needs_no_base(tmp_path):
    from squisher.names import adapter_file_name

    live = train(adapter(small_llama(num_key_value_heads=1), target_modules=["q_proj", "v_proj"]), tmp_path)
    compare(squisher.extract(tmp_path / "checkpoint-4", bias_correction=False), live, adapter_file_name)


def frozen_bert(tmp_path):
    model = small_bert()
    model.save_pretrained(tmp_path / "base")
    for name, p in model.named_parameters():
        p.requires_grad_("layer.1." in name or "classifier" in name)
    return train(model, tmp_path / "run", Tokens(3))


def test_frozen_parameters_take_evidence(tmp_path):
    import shutil

    live = frozen_bert(tmp_path)
    alone = tmp_path / "alone"
    shutil.copytree(tmp_path / "run" / "checkpoint-4", alone)
    with pytest.raises(squisher.SquisherError, match=r"--trainable REGEX.*--base-model DIR"):
        squisher.extract(alone)
    by_base = squisher.extract(alone, bias_correction=False, base_model=tmp_path / "base")
    compare(by_base, live)
    assert "differ from the base model" in str(by_base.provenance.naming)
    compare(squisher.extract(alone, bias_correction=False, trainable=r"layer\.1\.|classifier"), live)
    by_sibling = squisher.extract(tmp_path / "run" / "checkpoint-4", bias_correction=False)
    compare(by_sibling, live)
    assert "differ from checkpoint-2" in str(by_sibling.provenance.naming)
    assert "bert.embeddings.word_embeddings.weight" in by_sibling.provenance.absent


def test_adafactor(tmp_path):
    live = train(small_llama(), tmp_path, optim="adafactor")
    imp = squisher.extract(tmp_path / "checkpoint-4")
    assert set(imp) == set(live)
    state = live["model.layers.0.mlp.up_proj.weight"]
    row, column = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
    expected = (row / row.mean())[:, None] * column
    assert torch.allclose(imp["model.layers.0.mlp.up_proj.weight"], expected)


def test_a_live_model_settles_it_too(tmp_path):
    live = frozen_bert(tmp_path)
    model = small_bert()
    for name, p in model.named_parameters():
        p.requires_grad_("layer.1." in name or "classifier" in name)
    compare(squisher.extract(tmp_path / "run" / "checkpoint-4", model, bias_correction=False), live)


def test_weights_of_another_model_are_refused(tmp_path):
    train(small_llama(), tmp_path / "a")
    small_llama(hidden_size=32).save_pretrained(tmp_path / "b")
    (tmp_path / "b" / "model.safetensors").replace(tmp_path / "a" / "checkpoint-4" / "model.safetensors")
    with pytest.raises(squisher.SquisherError, match="do not belong together"):
        squisher.extract(tmp_path / "a" / "checkpoint-4")
    small_llama(hidden_size=32).save_pretrained(
        tmp_path / "a" / "checkpoint-2"
    )  # config and weights of one, state of another
    with pytest.raises(squisher.SquisherError, match="no known convention"):
        squisher.extract(tmp_path / "a" / "checkpoint-2")


def test_galore_keeps_what_it_does_not_project(tmp_path):
    live = train(
        small_llama(), tmp_path, optim="galore_adamw", optim_target_modules=[r".*attn.*", "mlp"], optim_args="rank=4"
    )
    imp = squisher.extract(tmp_path / "checkpoint-4", bias_correction=False)
    projected = {name for name in live if "_proj" in name}
    compare(imp, {name: state for name, state in live.items() if name not in projected})
    assert projected <= set(imp.provenance.absent)
    assert "projected gradient" in imp.provenance.absent["model.layers.0.mlp.up_proj.weight"].note
    assert imp.provenance.naming.of("model.norm.weight").level in ("convention", "proven")
