"""Laws of a model's gradients, derived on a small copy of it, and what they prove."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import squisher
from squisher.errors import NamingError
from squisher.recycle.naming.laws import Heads, Reading, derived_laws

HEADS = Heads(queries=4, keys=2, channels=6)


def test_channels_that_are_summed():
    assert Reading(0).channels(5, HEADS).tolist() == [[0], [1], [2], [3], [4]]
    pairs = Reading(0, "pairs").channels(12, HEADS)
    assert pairs.tolist() == [[0, 3], [1, 4], [2, 5], [6, 9], [7, 10], [8, 11]]
    shared = Reading(0, "plain", grouped=True).channels(24, HEADS)
    assert shared[:2].tolist() == [[0, 6], [1, 7]]
    both = Reading(0, "pairs", grouped=True).channels(24, HEADS)
    assert sorted(both[0].tolist()) == [0, 3, 6, 9]
    assert Reading(0, "heads").channels(12, HEADS).tolist() == [list(range(6)), list(range(6, 12))]
    assert Reading(1, third=2).channels(72, HEADS)[0].tolist() == [48]
    assert Reading(1, third=5).channels(72, HEADS)[0].tolist() == [12]
    for reading in (Reading(0, "pairs"), Reading(0, "heads", grouped=True), Reading(0, third=0)):
        assert reading.channels(7, HEADS) is None
    for reading in (Reading(0, "pairs"), Reading(0, "pairs", grouped=True), Reading(0, "plain", grouped=True)):
        assert np.array_equal(np.sort(reading.channels(24, HEADS).reshape(-1)), np.arange(24))


def llama(folder, **sizes):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
        vocab_size=50, **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model


@pytest.mark.formats
@pytest.mark.filterwarnings("default")
def test_laws_of_a_llama(tmp_path):
    """Every tensor but the embedding is tied: value to output, query to key in rotary pairs, norms to their readers."""
    model = llama(tmp_path)
    laws = [{name.removeprefix("model.layers.1.") for name, _, _ in law.terms} for law in derived_laws(tmp_path)]
    assert {"self_attn.v_proj.weight", "self_attn.o_proj.weight"} in laws
    assert {"self_attn.q_proj.weight", "self_attn.k_proj.weight"} in laws
    assert {"mlp.up_proj.weight", "mlp.down_proj.weight"} in laws
    assert {"mlp.gate_proj.weight", "mlp.up_proj.weight", "post_attention_layernorm.weight"} in laws
    tied = {name for law in derived_laws(tmp_path) for name, _, _ in law.terms}
    assert {name for name, _ in model.named_parameters()} - tied == {"model.embed_tokens.weight"}
    (tmp_path / "config.json").write_text("{}")
    assert derived_laws(tmp_path) == []


@pytest.mark.formats
@pytest.mark.filterwarnings("default")
def test_laws_prove_the_names_of_a_llama_and_refuse_others(tmp_path):
    model = llama(tmp_path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(8):
        tokens = torch.randint(50, (8, 12))
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    model.save_pretrained(tmp_path)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    imp = squisher.extract(tmp_path, bias_correction=False)
    own = dict(model.named_parameters())
    assert all(torch.equal(imp[name], optimizer.state[own[name]]["exp_avg_sq"]) for name in imp)
    proven = [name for name in imp if imp.provenance.naming.of(name).level == "proven"]
    assert len(proven) > len(imp) / 2
    saved = optimizer.state_dict()
    swapped = [list(own).index(f"model.layers.{k}.mlp.gate_proj.weight") for k in (0, 1)]
    for a, b in (swapped, swapped[::-1]):
        saved["state"][a] = optimizer.state[list(own.values())[b]]
    torch.save(saved, tmp_path / "optimizer.pt")
    with pytest.raises(NamingError, match="values contradict"):
        squisher.extract(tmp_path)
