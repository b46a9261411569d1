"""The blocks of docs/training.md that need a framework, run one section after the other on small random models."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import squisher

pytestmark = [pytest.mark.formats, pytest.mark.filterwarnings("default")]
PAGE = (Path(__file__).parents[1] / "docs" / "training.md").read_text()


def blocks():
    """Section title to the framework blocks in it, subsections included."""
    found = {}
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        title = section.partition("\n")[0]
        found[title] = re.findall(r"^```py\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    return {title: code for title, code in found.items() if code}


def run(title, names):
    for code in blocks()[title]:
        exec(compile(code, f"docs/training.md: {title}", "exec"), names)
    return names


def test_every_block_belongs_to_a_section_that_is_run():
    assert {title: len(code) for title, code in blocks().items()} == {
        "transformers": 3, "TRL": 1, "Lightning": 3, "Accelerate": 1,
    }  # fmt: skip


def test_transformers(tmp_path, monkeypatch):
    from tests.integrations.trainers import Tokens, llama, trainer

    monkeypatch.chdir(tmp_path)
    model = llama()
    names = {"model": model, "args": trainer(model, tmp_path / "runs").args, "dataset": Tokens()}
    fisher = squisher.Importance({n: torch.rand_like(p) for n, p in model.named_parameters()})
    names = run("transformers", {**names, "next_dataset": Tokens(size=16), "importance": fisher})
    assert (tmp_path / "runs" / "checkpoint-4" / "squisher.safetensors").exists()
    assert names["ewc"].tasks == 2
    assert squisher.load("squisher.safetensors").provenance.batch_tokens > 4
    assert names["mask"].kept == int(0.005 * names["mask"].total)


def test_trl(tmp_path):
    from datasets import Dataset
    from peft import LoraConfig

    from tests.integrations.test_trl import TEXTS, word_tokenizer
    from tests.integrations.trainers import llama

    settings = {"output_dir": str(tmp_path), "report_to": [], "use_cpu": True, "max_steps": 2, "bf16": False}
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    texts = Dataset.from_dict({"text": TEXTS})
    names = {"model": llama(), "settings": settings, "texts": texts, "tokenizer": word_tokenizer(), "lora": lora}
    assert run("TRL", names)["callback"].importance().provenance.batch_tokens > 8


def test_lightning(tmp_path, monkeypatch):
    from lightning.pytorch import LightningModule

    monkeypatch.chdir(tmp_path)

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = nn.Linear(4, 3)

        def training_step(self, batch, index):
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randint(0, 3, (16,)))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    names = {
        "module": Module(), "loader": loader, "next_loader": loader,
        "settings": {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False},
    }  # fmt: skip
    names = run("Lightning", names)
    assert list(tmp_path.rglob("epoch=1-step=8.squisher.safetensors"))
    assert names["ewc"].tasks == 2
    assert squisher.load("ewc.safetensors").provenance.batch_size == 4


def test_accelerate(tmp_path, monkeypatch):
    from tests.integrations.trainers import Tokens, llama

    monkeypatch.chdir(tmp_path)
    model = llama()
    names = {
        "model": model, "optimizer": torch.optim.AdamW(model.parameters()), "torch": torch,
        "loader": torch.utils.data.DataLoader(Tokens(size=16), batch_size=2),
    }  # fmt: skip
    run("Accelerate", names)
    p = squisher.load("squisher.safetensors").provenance
    assert (p.batch_size, p.steps) == (4, {"min": 4, "max": 4})
