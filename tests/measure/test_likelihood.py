"""The closed forms against the definition, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from squisher.errors import SquisherError
from squisher.measure.batches import parse
from squisher.measure.likelihood import Objective

CPU = torch.device("cpu")
INDEX = torch.arange(5)


def _case(likelihood):
    torch.manual_seed(0)
    if likelihood == "categorical":
        return torch.randn(5, 4).double() * 3, torch.randint(0, 4, (5,))
    if likelihood == "tokens":
        labels = torch.randint(0, 6, (5, 3))
        labels[1, 2] = -100
        labels[4] = -100
        return torch.randn(5, 3, 6).double(), labels
    if likelihood == "bernoulli":
        labels = torch.randint(0, 2, (5, 3)).double()
        labels[2, 1] = -100
        return torch.randn(5, 3).double(), labels
    return torch.randn(5, 3).double(), torch.randn(5, 3).double()


CASES = [
    (kind, labels, unit)
    for kind in ("categorical", "tokens", "bernoulli", "gaussian")
    for labels in ("data", "sampled", "exact")
    for unit in (("sequence", "token") if kind == "tokens" else ("example",))
    if not (kind == "tokens" and labels == "exact" and unit == "token")
]


@pytest.mark.parametrize(("kind", "labels", "unit"), CASES)
def test_columns_equal_terms(kind, labels, unit):
    """Σ over terms of (∇ term)², with respect to the outputs, equals Σ over columns of column²."""
    logits, targets = _case(kind)
    logits.requires_grad_()
    objective = Objective(kind, labels, unit, draws=3 if labels == "sampled" else 1, seed=5)
    outputs = objective.outputs(lambda x: x, parse((logits, targets), nn.Identity(), CPU))
    outputs.values.retain_grad() if not outputs.values.is_leaf else outputs.values.requires_grad_()
    expected = torch.zeros_like(outputs.values)
    for term in objective.terms(outputs, INDEX):
        outputs.values.grad = None
        term.sum().backward(retain_graph=True)
        expected += outputs.values.grad**2
    found = sum(column.clone() ** 2 for column in objective.columns(outputs, INDEX))
    assert expected.sum() > 0
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-14)


def test_cholesky_columns_give_the_covariance_also_when_saturated():
    logits = torch.tensor([[0.0, 1.0, -2.0, 0.5], [40.0, 0.0, 1.0, -3.0], [0.0, 0.0, 800.0, 0.0]]).double()
    objective = Objective("categorical", "exact")
    outputs = objective.outputs(lambda x: x, parse((logits, torch.zeros(3).long()), nn.Identity(), CPU))
    columns = torch.stack([c[:, 0].clone() for c in objective.columns(outputs, INDEX[:3])], 2)
    p = logits.softmax(1)
    covariance = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    assert columns.shape[2] == 3
    assert torch.allclose(columns @ columns.mT, covariance, rtol=1e-12, atol=1e-15)


def test_segmentation_layout_and_ignored_positions():
    logits = torch.randn(2, 5, 3, 4)
    labels = torch.randint(0, 5, (2, 3, 4))
    labels[0, 1] = -100
    objective = Objective("categorical")
    losses = next(objective.terms(objective.outputs(lambda x: x, parse((logits, labels), nn.Identity(), CPU)), INDEX))
    expected = nn.functional.cross_entropy(logits, labels, reduction="none").sum((1, 2))
    assert torch.allclose(losses, expected)


@pytest.mark.parametrize(
    ("objective", "logits", "labels"),
    [
        (Objective("categorical"), (2, 4, 4), (2, 4)),  # classes second or last: labels fit both
        (Objective("categorical", classes_last=True), (2, 4, 4, 4), (2, 4, 4)),
        (Objective("categorical", "sampled"), (2, 4, 3), None),
        (Objective("categorical", "exact", classes_last=True), (2, 4, 3, 5), None),
    ],
)
def test_where_the_classes_are_is_never_guessed(objective, logits, labels):
    batch = torch.randn(logits) if labels is None else (torch.randn(logits), torch.randint(0, 4, labels))
    with pytest.raises(SquisherError, match="second.*or last"):
        objective.outputs(lambda x: x, parse(batch, nn.Identity(), CPU))


@pytest.mark.parametrize(
    "objective", [Objective("categorical", classes_last=True), Objective("tokens", unit="sequence")]
)
def test_the_classes_of_text_are_last(objective):
    logits, labels = torch.randn(2, 4, 4), torch.randint(0, 4, (2, 4))
    outputs = objective.outputs(lambda x: x, parse((logits, labels), nn.Identity(), CPU))
    assert torch.equal(outputs.values, logits)


@pytest.mark.parametrize("kind", ["gaussian", "bernoulli"])
def test_labels_in_another_order_of_dimensions_are_refused(kind):
    """As many numbers are not enough: reshaped, each label would meet another output."""
    with pytest.raises(SquisherError, match="order of dimensions"):
        Objective(kind).outputs(lambda x: x, parse((torch.rand(2, 3, 6), torch.rand(2, 6, 3)), nn.Identity(), CPU))
    fits = parse((torch.rand(2, 1, 6), torch.rand(2, 6, 1)), nn.Identity(), CPU)
    assert Objective(kind).outputs(lambda x: x, fits).values.shape == (2, 6)


def test_shift_moves_labels_not_outputs():
    logits, labels = torch.randn(2, 4, 6), torch.randint(0, 6, (2, 4))
    objective = Objective("tokens", unit="sequence", shift=1)
    outputs = objective.outputs(lambda x: x, parse((logits, labels), nn.Identity(), CPU))
    expected = nn.functional.cross_entropy(logits[:, :-1].mT, labels[:, 1:], reduction="none").sum(1)
    assert torch.allclose(next(objective.terms(outputs, INDEX)), expected)
    assert objective.units(outputs) == 2
    assert Objective("tokens", unit="token", shift=1).units(outputs) == 6


def test_without_labels_tokens_count_where_attention_does():
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    objective = Objective("tokens", "sampled", "token", shift=1)
    batch = parse({"x": torch.randn(2, 4, 6), "attention_mask": mask}, nn.Identity(), CPU)
    outputs = objective.outputs(lambda x, attention_mask: x, batch)
    assert outputs.mask.tolist() == [[True, True, False, False], [True, False, False, False]]


def test_the_mask_of_an_encoder_is_not_the_decoders():
    ids, mask = torch.zeros(2, 4), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    objective = Objective("tokens", "sampled", "token")
    batch = parse({"attention_mask": mask, "decoder_input_ids": ids}, nn.Identity(), CPU)
    assert objective.outputs(lambda **_: torch.randn(2, 4, 6), batch).mask.all()
    batch = parse(
        {"attention_mask": mask, "decoder_input_ids": ids, "decoder_attention_mask": 1 - mask}, nn.Identity(), CPU
    )
    assert torch.equal(objective.outputs(lambda **_: torch.randn(2, 4, 6), batch).mask, mask == 0)


def test_labels_equal_to_input_ids_need_a_shift():
    ids = torch.randint(0, 6, (2, 4))
    batch = parse({"input_ids": ids, "labels": ids}, nn.Identity(), CPU)
    objective = Objective("tokens", unit="sequence", shift=None)
    with pytest.raises(SquisherError, match="shift=1"):
        objective.outputs(lambda input_ids: torch.randn(2, 4, 6), batch)


@pytest.mark.parametrize(
    ("objective", "batch", "message"),
    [
        (Objective("categorical"), (torch.randn(3, 4), torch.tensor([0, 1, 4])), "between 0 and 4"),
        (Objective("categorical"), (torch.randn(3, 4), torch.randn(3)), "class indices"),
        (Objective("categorical"), (torch.randn(3, 4), torch.tensor([[0, 1]] * 3)), "do not fit"),
        (Objective("categorical"), (torch.randn(3), torch.tensor([0, 1, 1])), "one output per class"),
        (Objective("categorical"), torch.randn(3, 4), "needs labels"),
        (Objective("categorical", "exact"), torch.randn(3, 2000), "Use labels='sampled'"),
        (Objective("bernoulli"), (torch.randn(3, 2), torch.full((3, 2), 2.0)), "between 0 and 1"),
        (Objective("gaussian"), (torch.randn(3, 2), torch.randn(3)), "each output"),
        (Objective(lambda model, b: b[0].sum()), (torch.randn(3, 2), torch.zeros(3)), "one loss per example"),
    ],
)
def test_refused_outputs(objective, batch, message):
    with pytest.raises(SquisherError, match=message):
        list(objective.columns(objective.outputs(lambda x: x, parse(batch, nn.Identity(), CPU)), INDEX[:3]))


def test_outputs_without_logits_are_refused():
    with pytest.raises(SquisherError, match=r"without logits.*function"):
        Objective("categorical").outputs(
            lambda x: {"loss": x}, parse((torch.randn(3, 4), torch.zeros(3).long()), nn.Identity(), CPU)
        )
