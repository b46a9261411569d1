"""The fast engine against the loop, on every model of the zoo."""

from __future__ import annotations

import pytest
import torch

from squisher.measure import fisher
from tests.measure.zoo import MODELS, PARTLY, build, split

TOKENS = {"decoder", "untied decoder", "checkpointed", "re-entrant checkpointed"}


def _likelihood(name):
    return "tokens" if name in TOKENS else "categorical"


def assert_equal(found, expected, tolerance):
    assert list(found) == list(expected)
    for name in expected:
        scale = float(expected[name].max())
        error = float((found[name] - expected[name]).abs().max())
        # Key biases have no gradient at all: what is left of it is rounding, in both.
        floor = 1e-12 * max(float(t.max()) for t in expected.values())
        assert error <= tolerance * scale + floor, (name, error / max(scale, 1e-300))


SAME = pytest.mark.filterwarnings("ignore:Using padding=.same.")  # torch's own, for even kernels


@SAME
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_equals_the_loop(name, dtype, tolerance):
    model, batch = build(name, dtype)
    batches = split(batch, 4)  # four and two
    settings = {"likelihood": _likelihood(name), "dtype": dtype}
    expected = fisher(model, batches, method="loop", **settings)
    found = fisher(model, batches, method="fast", **settings)
    assert found.provenance.coverage["loop"] == {}
    assert_equal(found, expected, tolerance)


@SAME
@pytest.mark.parametrize("name", [n for n in MODELS if n not in TOKENS])
@pytest.mark.parametrize("labels", ["sampled", "exact"])
def test_equals_the_loop_with_labels_of_the_model(name, labels):
    model, batch = build(name, torch.float64)
    settings = {"labels": labels, "dtype": torch.float64, "draws": 2 if labels == "sampled" else 1, "seed": 7}
    expected = fisher(model, split(batch, 6), method="loop", **settings)
    assert_equal(fisher(model, split(batch, 4), method="fast", **settings), expected, 1e-10)


@pytest.mark.parametrize("name", sorted(TOKENS))
@pytest.mark.parametrize("unit", ["sequence", "token"])
@pytest.mark.parametrize("labels", ["data", "sampled"])
def test_equals_the_loop_on_tokens(name, unit, labels):
    model, batch = build(name, torch.float64)
    settings = {"likelihood": "tokens", "labels": labels, "unit": unit, "dtype": torch.float64}
    expected = fisher(model, split(batch, 6), method="loop", **settings)
    assert_equal(fisher(model, split(batch, 4), **settings), expected, 1e-10)


@pytest.mark.parametrize("labels", ["data", "sampled"])
def test_signed_tokens_equal_the_loop(labels):
    model, batch = build(sorted(TOKENS)[0], torch.float64)
    settings = {
        "likelihood": "tokens",
        "labels": labels,
        "unit": "token",
        "signs": 2,
        "dtype": torch.float64,
        "seed": 3,
    }
    expected = fisher(model, split(batch, 6), method="loop", **settings)
    found = fisher(model, split(batch, 4), method="fast", **settings)
    assert_equal(found, expected, 1e-10)
    assert found.provenance.estimator["signs"] == 2
    assert found.provenance.seed == 3
    other = fisher(model, split(batch, 6), **{**settings, "seed": 4})
    assert any(not torch.allclose(found[n], other[n]) for n in found)


@pytest.mark.parametrize("name", PARTLY)
def test_what_has_no_rule_is_left_to_the_loop_and_named(name):
    model, batch = build(name, torch.float64)
    expected = fisher(model, split(batch, 6), method="loop", dtype=torch.float64)
    found = fisher(model, split(batch, 4), dtype=torch.float64)
    assert_equal(found, expected, 1e-10)
    left = found.provenance.coverage["loop"]
    assert left
    assert all(reason for reason in left.values())


@SAME
@pytest.mark.parametrize("name", sorted({*MODELS, *PARTLY}))
@pytest.mark.parametrize("labels", ["data", "sampled"])
def test_a_whole_batch_is_squared(name, labels):
    model, batch = build(name, torch.float64)
    settings = {"likelihood": _likelihood(name), "labels": labels, "per": "batch", "dtype": torch.float64}
    expected = fisher(model, split(batch, 4), method="loop", **settings)
    assert_equal(fisher(model, split(batch, 4), **settings), expected, 1e-10)
