"""Weights and importances that are not finite: refused by all that calculates with them, kept to the bit by all that copies."""

import pytest
import torch
from torch import nn

import squisher

BAD = [float("nan"), float("inf"), float("-inf")]
DTYPES = [torch.float32, torch.bfloat16]


def weights(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(8, 64, generator=generator).to(dtype) for name in ("a", "b")}


def importance(seed=0):
    return {name: values.square() for name, values in weights(seed).items()}


def spoilt(tensors, value):
    tensors["b"][3, 5] = value
    return tensors


def read(mapping):
    return {name: mapping[name] for name in mapping}


CALCULATE = {
    "merge.average": lambda w: squisher.merge.average([weights(1), w]),
    "merge.fisher": lambda w: squisher.merge.fisher([weights(1), w], [importance(), importance(1)]),
    "merge.ubgm": lambda w: squisher.merge.ubgm(weights(1), [w], importance(), [importance(1)]),
    "merge.ota": lambda w: squisher.merge.ota(weights(1), [w], [importance(1)]),
    "merge.task_arithmetic": lambda w: squisher.merge.task_arithmetic(weights(1), [w]),
    "a base of merge": lambda w: squisher.merge.task_arithmetic(w, [weights(1)]),
    **{f"prune by {score}": lambda w, s=score: squisher.prune.weights(w, importance(), 0.5, score=s)
       for score in ("fisher", "magnitude", "importance", "random")},
    "prune by pattern": lambda w: squisher.prune.weights(w, importance(), nm="2:4"),
    "quantize": lambda w: squisher.quantize.sensitivity(w, importance()).losses,
    "simulate": lambda w: squisher.quantize.simulate(w, {"b": 4}),
    "unlearn": lambda w: squisher.unlearn.dampen(w, importance(), importance(1)),
}  # fmt: skip

USE = {
    "merge.fisher": lambda i: squisher.merge.fisher([weights(), weights(1)], [importance(), i]),
    "prune": lambda i: squisher.prune.weights(weights(), i, 0.5),
    "mask": lambda i: squisher.mask.top_k(i, 0.1),
    "embed": lambda i: squisher.embed.embedding(i),
    "quantize": lambda i: squisher.quantize.sensitivity(weights(), i).losses,
    "unlearn": lambda i: squisher.unlearn.dampen(weights(), i, importance()),
    "what unlearn forgets": lambda i: squisher.unlearn.dampen(weights(), importance(), i),
}


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", CALCULATE)
def test_weights_are_refused_by_what_calculates_with_them(how, dtype, value):
    with pytest.raises(squisher.SquisherError, match="'b'.*NaN"):
        read(CALCULATE[how](spoilt(weights(dtype=dtype), value)))


@pytest.mark.parametrize("value", [*BAD, -1.0])
@pytest.mark.parametrize("how", USE)
def test_importances_are_refused(how, value):
    with pytest.raises(squisher.SquisherError, match="importance of 'b'"):
        read(USE[how](spoilt(importance(), value)))


@pytest.mark.parametrize("value", BAD)
def test_a_module_is_refused_and_stays_as_it_was(value):
    model = nn.Linear(6, 4)
    model.weight.data[1, 1] = value
    for options in ({"score": "magnitude"}, {"score": "random"}):
        with pytest.raises(squisher.SquisherError, match="'weight'.*NaN"):
            squisher.prune.weights(model, None, 0.5, **options)
    assert not hasattr(model, "weight_mask")


@pytest.mark.parametrize("value", BAD)
def test_ewc_keeps_no_centre_that_is_not_finite(value):
    model = nn.Linear(6, 4)
    ewc = squisher.EWC(model)
    ewc.consolidate({"weight": torch.ones(4, 6)})
    model.weight.data[1, 1] = value
    with pytest.raises(squisher.SquisherError, match="'weight'.*NaN"):
        ewc.consolidate({"weight": torch.ones(4, 6)})
    assert ewc.tasks == 1


@pytest.mark.parametrize("value", BAD)
def test_what_copies_keeps_every_bit(tmp_path, value):
    base, tuned = spoilt(weights(), value), spoilt(weights(1), value)
    squisher.patch.make(base, tuned, tmp_path / "patch.safetensors")
    patched = squisher.patch.apply(base, tmp_path / "patch.safetensors")
    assert all(torch.equal(patched[name].view(torch.int32), tuned[name].view(torch.int32)) for name in tuned)
    kept = squisher.mask.reset_outside(tuned, base, squisher.mask.top_k(importance(), 0.1))
    assert not torch.isfinite(kept["b"][3, 5])
    left = read(squisher.prune.weights(spoilt(weights(), value), importance(), 0.5, exclude="b"))
    assert torch.equal(left["b"].view(torch.int32), spoilt(weights(), value)["b"].view(torch.int32))
