from __future__ import annotations

import torch
from safetensors.torch import save_file

from squisher.recycle.naming.candidates import by_evidence
from squisher.recycle.states import Candidate, FusedSlice
from squisher.storage.folders import open_weights


def weights(path, tensors):
    save_file(tensors, path)
    return open_weights(path)


def test_what_differs_is_required_and_what_does_not_is_left_out_at_first(tmp_path):
    before = weights(tmp_path / "a.safetensors", {"x": torch.ones(3), "y": torch.ones(3), "w.z": torch.ones(2)})
    after = weights(
        tmp_path / "b.safetensors", {"x": torch.ones(3), "y": torch.tensor([1.0, 1.0, 2.0]), "head": torch.ones(2)}
    )
    likely, every = by_evidence([Candidate(n, (3,)) for n in ("x", "y", "head")], after, before)
    assert [(c.name, c.required) for c in likely] == [("y", True), ("head", False)]
    assert [(c.name, c.required) for c in every] == [("x", False), ("y", True), ("head", False)]


def test_precision_of_the_base_does_not_matter(tmp_path):
    values = torch.rand(5)
    before = weights(tmp_path / "a.safetensors", {"x": values})
    after = weights(tmp_path / "b.safetensors", {"x": values.bfloat16()})
    likely, _ = by_evidence([Candidate("x", (5,))], after, before)
    assert likely == []


def test_prefixes_of_a_model_with_a_head(tmp_path):
    full = weights(tmp_path / "a.safetensors", {"bert.x": torch.ones(2), "bert.y": torch.ones(2)})
    bare = weights(tmp_path / "b.safetensors", {"x": torch.ones(2), "y": torch.zeros(2)})
    for after, before, names in ((full, bare, ("bert.x", "bert.y")), (bare, full, ("x", "y"))):
        likely, _ = by_evidence([Candidate(n, (2,)) for n in names], after, before)
        assert [(c.name, c.required) for c in likely] == [(names[1], True)]


def test_prefixes_that_would_mix_two_parts_are_not_removed(tmp_path):
    before = weights(tmp_path / "a.safetensors", {"encoder.x": torch.ones(2), "decoder.x": torch.zeros(2)})
    after = weights(tmp_path / "b.safetensors", {"x": torch.zeros(2)})
    likely, _ = by_evidence([Candidate("x", (2,))], after, before)
    assert [(c.name, c.required) for c in likely] == [("x", False)]  # not known, rather than compared with either


def test_one_changed_slice_is_enough(tmp_path):
    slices = (FusedSlice("e.0", 0, (2,)), FusedSlice("e.1", 2, (2,)))
    before = weights(tmp_path / "a.safetensors", {"e.0": torch.ones(2), "e.1": torch.ones(2)})
    after = weights(tmp_path / "b.safetensors", {"e.0": torch.ones(2), "e.1": torch.zeros(2)})
    likely, _ = by_evidence([Candidate("fused", (2, 2), slices=slices)], after, before)
    assert likely[0].required
