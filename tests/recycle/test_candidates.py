from __future__ import annotations

import pytest
import torch
from torch import nn

from squisher.errors import NamingError
from squisher.recycle.naming import candidates as module
from squisher.recycle.naming.candidates import candidates_of_module
from squisher.recycle.states import FusedSlice
from squisher.storage.folders import Weights


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def weights(**shapes):
    return Weights(
        "model.safetensors", {name.replace("__", "."): torch.zeros(shape) for name, shape in shapes.items()}, False
    )


def test_each_parameter_once_with_the_classes_of_its_owner():
    found = candidates_of_module(Tied())
    assert [c.name for c in found.parameters] == ["embed.weight", "norm.weight", "norm.bias"]
    assert found.parameters[1].module[0] == "torch.nn.modules.normalization.LayerNorm"
    assert found.tied == {"head.weight": "embed.weight"}


def test_a_tied_parameter_has_the_name_that_its_file_has():
    found = candidates_of_module(Tied(), weights(head__weight=(5, 4), norm__weight=(4,), norm__bias=(4,)))
    assert found.parameters[0].name == "head.weight"
    assert found.parameters[0].live_name == "embed.weight"
    assert found.tied == {"embed.weight": "head.weight"}


def test_frozen_parameters_only_when_asked_for():
    model = Tied()
    model.norm.requires_grad_(False)
    assert [c.name for c in candidates_of_module(model).parameters] == ["embed.weight"]
    assert len(candidates_of_module(model, frozen_too=True).parameters) == 3


def test_a_file_that_lacks_a_parameter_is_of_another_model():
    with pytest.raises(NamingError, match=r"'norm.weight'.*\(4,\).*model.safetensors"):
        candidates_of_module(Tied(), weights(embed__weight=(5, 4)))


def test_what_is_never_trained_may_be_missing():
    model = Tied()
    model.norm.requires_grad_(False)
    assert len(candidates_of_module(model, weights(embed__weight=(5, 4)), frozen_too=True).parameters) == 3


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.fused = nn.Parameter(torch.zeros(2, 6, 3))
        self.turned = nn.Parameter(torch.zeros(2, 3))


SLICES = tuple(FusedSlice(f"experts.{k // 2}.{'ab'[k % 2]}", 9 * k, (3, 3)) for k in range(4))


def test_what_the_file_keeps_in_slices(monkeypatch):
    monkeypatch.setattr(module, "_stored_slices", lambda model: {"fused": SLICES, "turned": ()})
    found = candidates_of_module(Experts())
    assert found.parameters[0].slices == SLICES
    assert found.parameters[1].name == "turned"
    assert found.note == "1 parameters under their running names, since the weight file stores them rearranged"
    names = {fused.name: torch.zeros(fused.shape) for fused in SLICES}
    assert candidates_of_module(Experts(), Weights("f", names, False)).parameters[0].slices == SLICES
    del names["experts.1.a"]
    with pytest.raises(NamingError, match="do not belong together"):
        candidates_of_module(Experts(), Weights("f", names, False))


def test_a_parameter_that_is_stored_under_another_name(monkeypatch):
    fused = FusedSlice("file.name", 0, (2, 6, 3))
    monkeypatch.setattr(module, "_stored_slices", lambda model: {"fused": (fused,)})
    first = candidates_of_module(Experts()).parameters[0]
    assert (first.name, first.live_name, first.slices) == ("file.name", "fused", ())


def test_slices_must_cover_the_parameter_exactly_once():
    assert module._complete(SLICES[::-1], 36) == SLICES
    assert module._complete(SLICES, 37) == ()
    assert module._complete(SLICES[1:], 27) == ()
    assert module._complete([*SLICES, SLICES[0]], 36) == ()


def test_copies_are_traced_to_what_they_were_cut_from():
    whole = torch.empty(2, 6, 3, device="meta")
    with module._ViewsOnly():
        first, second = (part.contiguous() for part in torch.chunk(whole, 2, dim=1))
        turned = whole.transpose(1, 2).contiguous()
        cut = torch.chunk(second, 2, dim=0)[1].squeeze()
    assert first.untyped_storage()._cdata == whole.untyped_storage()._cdata
    assert (cut.storage_offset(), tuple(cut.shape), cut.is_contiguous()) == (27, (3, 3), True)
    assert not turned.is_contiguous()


def test_parts_like_model_may_stand_elsewhere_in_the_file():
    """transformers 4 saved LLaVA as `language_model.model.layers`, and runs it as `model.language_model.layers`."""
    model = nn.ModuleDict({"model": nn.ModuleDict({"language_model": nn.Linear(2, 3), "tower": nn.Linear(3, 4)})})
    names = [
        "language_model.model.weight",
        "language_model.model.bias",
        "tower.vision_model.weight",
        "tower.vision_model.bias",
    ]
    tensors = {name: p.detach() for name, p in zip(names, model.parameters(), strict=True)}
    found = candidates_of_module(model, Weights("model.safetensors", tensors, False))
    assert [c.name for c in found.parameters] == names
    tensors["weight"] = tensors[names[0]]  # a second one that fits
    with pytest.raises(NamingError, match="no such tensor"):
        candidates_of_module(model, Weights("model.safetensors", tensors, False))
