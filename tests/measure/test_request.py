"""What a Hugging Face configuration says, and which settings are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from squisher.errors import ArgumentError, SquisherError
from squisher.measure import fisher, objective_for


class _Config:
    def __init__(self, **values):
        self.__dict__.update(values)

    def to_dict(self):
        return self.__dict__


@pytest.mark.parametrize(
    ("name", "config", "kind", "shift"),
    [
        ("BertForSequenceClassification", {"num_labels": 3}, "categorical", 0),
        ("BertForSequenceClassification", {"num_labels": 1}, "gaussian", 0),
        (
            "BertForSequenceClassification",
            {"num_labels": 3, "problem_type": "multi_label_classification"},
            "bernoulli",
            0,
        ),
        ("BertForSequenceClassification", {"num_labels": 3, "problem_type": "regression"}, "gaussian", 0),
        ("LlamaForCausalLM", {}, "tokens", 1),
        ("GPT2LMHeadModel", {}, "tokens", 1),
        ("BertForMaskedLM", {}, "tokens", 0),
        ("T5ForConditionalGeneration", {"is_encoder_decoder": True}, "tokens", 0),
        ("ViTForImageClassification", {"num_labels": 10}, "categorical", 0),
    ],
)
def test_auto_reads_a_hugging_face_configuration(name, config, kind, shift):
    model = type(name, (nn.Identity,), {})()
    model.config = _Config(**config)
    objective = objective_for(model)
    assert objective.likelihood == kind
    assert objective.shift == shift


def test_auto_is_categorical_for_any_other_model():
    assert objective_for(nn.Linear(2, 2)).likelihood == "categorical"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"likelihood": "tokens", "labels": "exact"}, "sampled"),
        ({"labels": "exact", "per": "batch"}, "no meaning"),
        ({"labels": "exakt"}, "Did you mean 'exact'"),
        ({"likelihood": "poisson"}, "likelihood is auto"),
        ({"unit": "token"}, "'example'"),
        ({"likelihood": "tokens", "unit": "example"}, "'sequence' or 'token'"),
        ({"likelihood": "tokens", "unit": "token", "per": "batch"}, "no meaning"),
        ({"likelihood": "tokens", "signs": 1}, "signs .*'sequence'"),
        ({"likelihood": "tokens", "unit": "token", "signs": 0}, "signs .*not 0"),
        ({"draws": 2}, "draws .*not 2"),
        ({"draws": 0, "labels": "sampled"}, "draws .*not 0"),
        ({"likelihood": lambda m, b: b, "labels": "sampled"}, "named one"),
    ],
)
def test_refused_settings(settings, message):
    with pytest.raises(SquisherError, match=message):
        objective_for(nn.Linear(2, 2), **settings)


@pytest.mark.parametrize("setting", [{"max_examples": 2.5}, {"max_examples": "3"}, {"max_examples": 0}, {"seed": "a"}])
def test_numbers_that_are_not_whole_are_refused(setting):
    with pytest.raises(ArgumentError, match="whole number"):
        fisher(nn.Linear(2, 2), [(torch.zeros(1, 2), torch.zeros(1).long())], **setting)


def test_parameters_without_a_shape_are_refused():
    with pytest.raises(SquisherError, match="no shape yet"):
        fisher(nn.LazyLinear(2), [(torch.zeros(1, 2), torch.zeros(1).long())])


def test_alignments_are_no_classes():
    model = type("Wav2Vec2ForCTC", (nn.Identity,), {})()
    model.config = _Config()
    with pytest.raises(ArgumentError, match="alignments"):
        objective_for(model)


def test_arguments_that_the_model_does_not_take_are_named():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x, scale=1.0):
            return self.layer(x) * scale

    labels = torch.zeros(5, dtype=torch.long)
    for method in ("auto", "loop"):
        with pytest.raises(SquisherError, match=r"Plain cannot be called .*'idx'. Its forward takes x, scale: give"):
            fisher(Plain(), [{"x": torch.randn(5, 4), "idx": torch.arange(5), "labels": labels}], method=method)

    class Broken(Plain):
        def forward(self, x, scale=1.0):
            return self.layer(x, scale)

    with pytest.raises(TypeError, match="positional arguments"):  # its own fault, which its own message says best
        fisher(Broken(), [(torch.randn(5, 4), labels)])


def test_inference_mode_around_the_call_changes_nothing_and_a_model_made_in_it_is_refused():
    torch.manual_seed(0)
    model, batch = nn.Linear(4, 3), (torch.randn(5, 4), torch.zeros(5, dtype=torch.long))
    expected = fisher(model, [batch])
    with torch.inference_mode():
        found = fisher(model, [(batch[0].clone(), batch[1])])
        made = nn.Linear(4, 3)
    assert torch.equal(found["weight"], expected["weight"])
    assert not found["weight"].is_inference()
    with pytest.raises(SquisherError, match=r"'weight' was made under torch.inference_mode"):
        fisher(made, [batch])
