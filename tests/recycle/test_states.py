"""Slices of a fused parameter: what a weight file stores apart comes out apart, and lazily."""

from __future__ import annotations

import pytest
import torch

from squisher.errors import NoAccumulatorError
from squisher.importance import RunFacts
from squisher.recycle.assembly import assemble
from squisher.recycle.states import Entry, FusedSlice
from squisher.storage.tensors import chunks_of

GROUP = {"betas": (0.9, 0.999), "weight_decay": 0.0}


def extracted(value, state):
    slices = [
        FusedSlice(f"expert.{k}.{part}", (6 * k + 3 * j) * 5, (3, 5)) for k in range(2) for j, part in enumerate("ab")
    ]
    named = [(fused.name, Entry(state, GROUP, slice=fused), "AdamW") for fused in slices]
    return assemble(named, RunFacts(), {p.name: p.shape for p in slices}, bias_correction=False)


def expected(value):
    return {f"expert.{k}.{part}": value[k, 3 * j : 3 * j + 3] for k in range(2) for j, part in enumerate("ab")}


def test_slices_are_where_they_begin():
    value = torch.rand(2, 6, 5)
    imp = extracted(value, {"exp_avg_sq": value, "step": torch.tensor(3.0)})
    for name, truth in expected(value).items():
        assert torch.equal(imp[name], truth)
        assert torch.equal(torch.cat(list(chunks_of(imp, name, 4))), truth.flatten())
        assert imp.provenance.steps == {"min": 3, "max": 3}


def test_slices_of_a_factored_state():
    row, column = torch.rand(2, 6), torch.rand(2, 5)
    whole = (row / row.mean(-1, keepdim=True))[:, :, None] * column[:, None, :]
    state = {"exp_avg_sq_row": row, "exp_avg_sq_col": column, "step": 2}
    named = [("a", Entry(state, {"decay_rate": -0.8}, slice=FusedSlice("a", 30, (3, 5))), None)]
    imp = assemble(named, RunFacts())
    assert torch.allclose(imp["a"], whole[1, :3])


def test_a_slice_outside_the_state_is_refused():
    state = {"exp_avg_sq": torch.rand(2, 2), "step": 1}
    named = [("a", Entry(state, GROUP, slice=FusedSlice("a", 2, (3,))), "AdamW")]
    with pytest.raises(NoAccumulatorError, match="too small"):
        assemble(named, RunFacts())
