"""What people do inside the frameworks they use, on MiniLM-sized models; `make test-stories` runs it (minutes)."""

import json

import pytest
import torch
from safetensors.torch import load_file

import squisher
from tests.commands import run
from tests.stories import shapes

pytestmark = [pytest.mark.stories, pytest.mark.filterwarnings("default")]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{k}" for k in range(200))]
SENTENCES = [{"text": " ".join(f"w{(7 * k + j) % 200}" for j in range(12)), "label": k % 2} for k in range(32)]


def ok(done):
    assert done.returncode == 0, done.stderr
    return done.stdout


def tokenizer():
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: k for k, w in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", eos_token="[SEP]")


def encoder(seed=0, classes=2):
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(seed)
    config = BertConfig(
        hidden_size=shapes.HIDDEN, num_hidden_layers=shapes.LAYERS, num_attention_heads=12, intermediate_size=4 * shapes.HIDDEN,
        vocab_size=shapes.VOCABULARY, num_labels=classes,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def decoder():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=shapes.HIDDEN, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=2,
        intermediate_size=4 * shapes.HIDDEN, vocab_size=8000, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Sentences(torch.utils.data.Dataset):
    def __init__(self, flip=0):
        ids = tokenizer()([row["text"] for row in SENTENCES])["input_ids"]
        self.rows = [{"input_ids": torch.tensor(i), "labels": torch.tensor((k + flip) % 2)} for k, i in enumerate(ids)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, k):
        return self.rows[k]


def trainer(model, folder, data=None, **more):
    from transformers import Trainer, TrainingArguments

    settings = {"max_steps": 4, "save_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-4}
    args = TrainingArguments(str(folder), report_to=[], use_cpu=True, disable_tqdm=True, **{**settings, **more})
    return Trainer(model=model, args=args, train_dataset=data or Sentences())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two fine-tunes of one base: one whose optimizer was saved, one with save_only_model and the callback."""
    from squisher.integrations.transformers import SquisherCallback

    root = tmp_path_factory.mktemp("runs")
    torch.save(encoder().state_dict(), root / "start.pt")
    (root / "data.jsonl").write_text("\n".join(map(json.dumps, SENTENCES)))
    for name, flip, only in (("plain", 0, False), ("recorded", 1, True)):
        model = encoder()
        one = trainer(model, root / name, Sentences(flip), save_only_model=only)
        if only:
            SquisherCallback().attach(one)
        one.train()
        tokenizer().save_pretrained(root / name / "checkpoint-4")
    return root


PLAIN, RECORDED = "plain/checkpoint-4", "recorded/checkpoint-4"


def test_a_trainer_checkpoint_is_extracted_with_proven_names(runs, tmp_path):
    ok(run("extract", PLAIN, "--out", tmp_path / "a.safetensors", cwd=runs))
    imp, weights = squisher.load(tmp_path / "a.safetensors"), load_file(runs / PLAIN / "model.safetensors")
    assert set(imp) <= set(weights)
    assert all(imp[name].shape == weights[name].shape for name in imp)
    assert imp.provenance.batch_size == 4
    done = run("extract", RECORDED, "--out", tmp_path / "b.safetensors", cwd=runs)
    assert "squisher.safetensors as it is" in done.stderr


def test_a_measured_fisher_beside_the_free_one(runs, tmp_path):
    out = tmp_path / "fisher.safetensors"
    ok(run("fisher", PLAIN, "--data", "data.jsonl", "--max-examples", "8", "--out", out, cwd=runs))
    found = json.loads(ok(run("compare", RECORDED, out, "--scale", "auto", "--json", cwd=runs)))
    assert found["numel"] > 20_000_000


def test_merging_folders_that_transformers_loads(runs, tmp_path):
    from transformers import AutoModelForSequenceClassification

    ok(run("merge", "fisher", PLAIN, RECORDED, "--out", tmp_path / "merged", cwd=runs))
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    a, b, m = (
        load_file(f / "model.safetensors")["bert.pooler.dense.weight"]
        for f in (runs / PLAIN, runs / RECORDED, tmp_path / "merged")
    )
    assert torch.equal(merged.bert.pooler.dense.weight.data, m)
    assert bool(((m >= torch.minimum(a, b) - 1e-6) & (m <= torch.maximum(a, b) + 1e-6)).all())
    assert "plain/checkpoint-4" in (tmp_path / "merged" / "README.md").read_text()


def test_pruning_a_folder_that_transformers_loads(runs, tmp_path):
    from transformers import AutoModelForSequenceClassification

    ok(run("prune", RECORDED, "--sparsity", "0.75", "--out", tmp_path / "pruned", cwd=runs))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "pruned")
    zeros = sum(int((p == 0).sum()) for p in model.parameters())
    assert zeros >= int(0.75 * sum(p.numel() for p in model.parameters())) - 1


def test_a_masked_fine_tune_becomes_a_patch(runs, tmp_path):
    from squisher.integrations.transformers import MaskCallback

    model = encoder()
    model.save_pretrained(tmp_path / "base")
    mask = squisher.mask.top_k(squisher.load(runs / RECORDED), keep=0.005)
    mask.save(tmp_path / "mask.safetensors")
    one = trainer(model, tmp_path / "run")
    MaskCallback(mask).attach(one)
    one.train()
    model.save_pretrained(tmp_path / "tuned")
    patch = tmp_path / "patch.safetensors"
    ok(
        run(
            "patch",
            "make",
            tmp_path / "base",
            tmp_path / "tuned",
            "--mask",
            tmp_path / "mask.safetensors",
            "--out",
            patch,
        )
    )
    assert patch.stat().st_size < 2_500_000
    ok(run("patch", "apply", tmp_path / "base", patch, "--out", tmp_path / "back"))
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("tuned", "back"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_two_tasks_without_forgetting_in_a_trainer(tmp_path):
    from squisher.integrations.transformers import EWCCallback, SquisherCallback

    model = encoder()
    first = trainer(model, tmp_path / "one", save_strategy="no")
    callback = SquisherCallback(track=True).attach(first)
    first.train()
    ewc = squisher.EWC(model, strength=1e3, exclude="classifier")
    ewc.consolidate(callback.live_importance())
    second = trainer(model, tmp_path / "two", Sentences(1), save_strategy="no", logging_steps=1)
    callback = EWCCallback(ewc).attach(second)
    second.train()
    ewc.consolidate(callback.live_importance())
    assert ewc.tasks == 2
    assert any("ewc_penalty" in entry for entry in second.state.log_history)


def test_two_tasks_in_lightning(tmp_path):
    import lightning

    from squisher.integrations.lightning import EWCCallback, SquisherCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = encoder()

        def training_step(self, batch, index):
            return self.model(**batch).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def fit(callback, flip):
        settings = {
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_progress_bar": False,
            "enable_checkpointing": False,
        }
        loader = torch.utils.data.DataLoader(Sentences(flip), batch_size=4)
        lightning.Trainer(max_steps=3, callbacks=[callback], default_root_dir=tmp_path, **settings).fit(module, loader)

    module = Module()
    first = SquisherCallback(tmp_path / "one.safetensors", submodule="model")
    fit(first, 0)
    ewc = squisher.EWC(module.model, strength=1e3)
    ewc.consolidate(first.live_importance())
    second = EWCCallback(ewc, tmp_path / "two.safetensors", submodule="model")
    fit(second, 1)
    assert squisher.load(tmp_path / "two.safetensors").provenance.batch_size == 4


def test_lora_adapters_of_trl_are_recorded_measured_and_merged(tmp_path):
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    from squisher.integrations.transformers import SquisherCallback

    model = decoder()
    model.save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    texts = Dataset.from_dict({"text": [row["text"] for row in SENTENCES]})
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.manual_seed(seed)
        settings = {
            "report_to": [],
            "use_cpu": True,
            "max_steps": 2,
            "save_steps": 2,
            "bf16": False,
            "seed": seed,
            "disable_tqdm": True,
        }
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        one = SFTTrainer(
            model=str(tmp_path / "base"), args=SFTConfig(output_dir=str(tmp_path / name), **settings), train_dataset=texts,
            processing_class=tokenizer(), peft_config=lora,
        )  # fmt: skip
        SquisherCallback(track=True).attach(one)
        one.train()
    a, b, c = (tmp_path / name / "checkpoint-2" for name in "abc")
    assert squisher.load(a).provenance.batch_tokens > 8
    ok(run("merge", "fisher", a, b, "--out", tmp_path / "merged"))
    assert set(load_file(tmp_path / "merged" / "adapter_model.safetensors")) == set(
        load_file(a / "adapter_model.safetensors")
    )
    refused = run("merge", "fisher", a, c, "--out", tmp_path / "no")
    assert "did not start from the same A" in refused.stderr
    assert "squisher merge task-arithmetic ADAPTER --base BASE" in refused.stderr
    # the way that works, as the refusal says it
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"text": row["text"]}) for row in SENTENCES[:4]))
    ok(
        run(
            "fisher",
            c,
            "--base",
            tmp_path / "base",
            "--data",
            tmp_path / "data.jsonl",
            "--out",
            tmp_path / "c.safetensors",
        )
    )
    assert set(squisher.load(tmp_path / "c.safetensors")) == set(load_file(c / "adapter_model.safetensors"))
    for name, adapter in (("A", a), ("C", c)):
        ok(run("merge", "task-arithmetic", adapter, "--base", tmp_path / "base", "--out", tmp_path / name))
        ok(run("fisher", tmp_path / name, "--data", tmp_path / "data.jsonl", "--out", tmp_path / name))
    ok(run("merge", "fisher", tmp_path / "A", tmp_path / "C", "--out", tmp_path / "folded"))


def test_mergekit_with_relative_names(tmp_path):
    for k, name in enumerate("ab"):
        torch.manual_seed(k)
        model = decoder()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1e-3 * torch.randn_like(p))
        model.save_pretrained(tmp_path / name)
        tokenizer().save_pretrained(tmp_path / name)
        values = {n: torch.rand_like(p) for n, p in load_file(tmp_path / name / "model.safetensors").items()}
        squisher.Importance(values, kind="fisher").save(tmp_path / name)
    (tmp_path / "config.yml").write_text(
        "merge_method: squisher_fisher\nmodels:\n  - model: a\n  - model: b\ndtype: float32\n"
    )
    (tmp_path / "elsewhere").mkdir()
    ok(run("mergekit", tmp_path / "config.yml", "--out", "merged", "--lazy-unpickle", cwd=tmp_path / "elsewhere"))
    assert (tmp_path / "elsewhere" / "merged" / "model.safetensors").exists()


def test_muon_and_adamw_with_a_tracker():
    model = encoder()
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "layer.5" in n]  # Muon is slow on a CPU
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "layer.5" not in n]
    optimizers = [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(others, lr=1e-4)]
    tracker = squisher.Tracker(model, beta2=0.9)
    batch = {key: torch.stack([row[key] for row in Sentences().rows[:4]]) for key in ("input_ids", "labels")}
    for _ in range(3):
        model(**batch).loss.backward()
        tracker.observe()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    importance = squisher.extract(tracker, model, batch_size=4)
    assert set(importance) == {name for name, _ in model.named_parameters()}


def test_a_report_in_a_browser(runs, tmp_path):
    from tests.browser.chromium import Browser

    ok(run("report", RECORDED, "--model", RECORDED, "--out", tmp_path / "report.html", cwd=runs))
    browser = Browser()
    try:
        browser.open(tmp_path / "report.html")
        assert browser.complaints == []
        assert " holds " in browser.run("document.querySelector('.lead').textContent")
        browser.resize(390, 844, mobile=True)
        assert browser.run("document.documentElement.scrollWidth") <= 390
    finally:
        browser.close()
