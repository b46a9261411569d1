"""Models that transformers 4 registered in another order than version 5 does."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import squisher
from squisher.recycle.naming.hugging_face import in_file_order, in_order_of_version_4
from squisher.recycle.states import Candidate, FusedSlice

FIXTURES = Path(__file__).parent.parent / "fixtures" / "transformers4"


def named(text):
    return [Candidate(name, (2,)) for name in text.split()]


def test_children_of_a_module_come_as_version_4_had_them():
    by_version_5 = named(
        "vit.embeddings.cls_token vit.encoder.layer.0.attention.output.dense.weight vit.encoder.layer.0.layernorm_before.weight "
        "vit.encoder.layer.0.layernorm_after.weight vit.encoder.layer.0.intermediate.dense.weight vit.encoder.layer.0.output.dense.weight "
        "vit.encoder.layer.10.attention.output.dense.weight vit.encoder.layer.10.layernorm_before.weight "
        "vit.encoder.layer.10.layernorm_after.weight vit.encoder.layer.10.intermediate.dense.weight "
        "vit.encoder.layer.10.output.dense.weight classifier.weight"
    )
    found = in_order_of_version_4("ViTForImageClassification", by_version_5, {})
    layer = ["attention.output.dense", "intermediate.dense", "output.dense", "layernorm_before", "layernorm_after"]
    expected = [f"vit.encoder.layer.{k}.{name}.weight" for k in (0, 10) for name in layer]
    assert [c.name for c in found] == ["vit.embeddings.cls_token", *expected, "classifier.weight"]
    assert in_order_of_version_4("BertModel", by_version_5, {}) is None


def test_fused_experts_come_apart():
    experts = "model.layers.0.block_sparse_moe.experts"
    slices = tuple(FusedSlice(f"{experts}.{k}.{w}.weight", 0, (3, 4)) for k in (0, 1) for w in ("w1", "w3"))
    fused = [
        Candidate(f"{experts}.gate_up_proj", (2, 6, 4), slices=slices),
        Candidate(f"{experts}.down_proj", (2, 4, 3), slices=tuple(FusedSlice(f"{experts}.{k}.w2.weight", 0, (4, 3)) for k in (0, 1))),
    ]  # fmt: skip
    found = in_order_of_version_4("MixtralForCausalLM", fused, {})
    assert [c.name.removeprefix(f"{experts}.") for c in found] == [
        f"{k}.{w}.weight" for k in (0, 1) for w in ("w1", "w2", "w3")
    ]
    assert [c.shape for c in found] == [(3, 4), (4, 3), (3, 4)] * 2


def test_the_order_of_a_file_that_keeps_it():
    model = named("a b c")
    assert [c.name for c in in_file_order(model, dict.fromkeys("cxab"), {})] == ["c", "a", "b"]
    assert in_file_order(model, dict.fromkeys("ca"), {}) is None
    assert [c.name for c in in_file_order(model, dict.fromkeys("dabc"), {"d": "c"})] == [
        "c",
        "a",
        "b",
    ]  # tied: where its first name is


@pytest.mark.formats
@pytest.mark.parametrize("name", ["vit", "mixtral", "swin", "xlmr"])
def test_a_checkpoint_of_version_4(name):
    transformers = pytest.importorskip("transformers")
    importance = squisher.extract(FIXTURES / name, bias_correction=False)
    expected = load_file(FIXTURES / name / "reference.safetensors")
    assert set(importance) == set(expected)
    for key, value in expected.items():
        assert torch.equal(importance[key], value), key
    if not transformers.__version__.startswith("4."):  # whose models have that order anyway
        assert "transformers 4" in str(importance.provenance.naming)
