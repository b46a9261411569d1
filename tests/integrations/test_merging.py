"""A real pair of fine-tuned transformers, end to end; needs transformers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import squisher
from squisher import merge


def fine_tuned(folder, start, parity, tied):
    """A few steps of AdamW on a task of its own: sums of tokens, odd or even, from one common start."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=32, n_embd=32, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0,
        tie_word_embeddings=tied, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.load_state_dict(start(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(parity)
    losses = []
    for _ in range(60):
        tokens = batch(parity, generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    model.save_pretrained(folder)
    squisher.extract(optimizer, model, batch_size=16, loss_reduction="token_mean", batch_tokens=16 * 15).save(folder)
    return model, losses


def batch(parity, generator):
    first = torch.randint(0, 16, (16, 1), generator=generator)
    return (2 * ((first + torch.arange(16)) % 16) + parity) % 32  # counts in odd or in even numbers


def loss_of(model, parity):
    tokens = batch(parity, torch.Generator().manual_seed(7))
    with torch.no_grad():
        return float(model(input_ids=tokens, labels=tokens).loss)


@pytest.mark.formats
@pytest.mark.parametrize("tied", [True, False])
def test_two_fine_tuned_models_end_to_end(tmp_path, tied):
    from transformers import AutoModelForCausalLM, GPT2LMHeadModel

    kept = {}

    def start(config):
        if not kept:
            torch.manual_seed(0)
            kept.update({n: t.clone() for n, t in GPT2LMHeadModel(config).state_dict().items()})
        return kept

    models = {}
    for name, parity in (("odd", 1), ("even", 0)):
        models[name], losses = fine_tuned(tmp_path / name, start, parity, tied)
        assert losses[-1] < losses[0] - 0.5
    command = [
        Path(sys.executable).with_name("squisher"),
        "merge",
        "fisher",
        "odd",
        "even",
        "--out",
        "merged",
        "--json",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["importances"][0].startswith("Squisher of AdamW, 60 steps")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    # It has not grown, and every tensor is what the library gives for the live models.
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("merged", "odd")]
    assert abs(sizes[0] - sizes[1]) < 4096
    imps = [squisher.load(tmp_path / name) for name in models]
    expected = merge.fisher([m.state_dict() for m in models.values()], imps)
    for name, parameter in merged.state_dict().items():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-6, atol=1e-7, msg=name)
    if tied:
        assert merged.lm_head.weight.data_ptr() == merged.transformer.wte.weight.data_ptr()
    # Merged, each task is better off than under the other task's model.
    for own, other, parity in (("odd", "even", 1), ("even", "odd", 0)):
        assert loss_of(merged, parity) < loss_of(models[other], parity)
        assert loss_of(merged, parity) > loss_of(models[own], parity)
