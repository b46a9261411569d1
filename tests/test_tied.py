"""A tied tensor has one value under all its names, whichever of them an importance or a mask uses, in every application."""

import pytest
import torch
from torch import nn

import squisher
from squisher.errors import NamingError
from tests.commands import run

BUDGET = 7.0


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"table": nn.Embedding(40, 8), "middle": nn.Linear(8, 8), "head": nn.Linear(8, 40, bias=False)}
    )
    model["head"].weight = model["table"].weight
    return model.state_dict()


def random(seed: int, name: str, scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: (40, 8), "middle.weight": (8, 8), "middle.bias": (8,)}
    return {key: scale * torch.rand(*shape, generator=generator) for key, shape in shapes.items()}


def moved(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    new = {name: tensor + 1 for name, tensor in weights.items()}
    return {**new, "head.weight": new["table.weight"]}


def quantized(weights, name):
    found = squisher.quantize.sensitivity(weights, random(1, name))
    return squisher.quantize.simulate(weights, squisher.quantize.allocate(found, BUDGET).bits)


def reset(weights, name):
    return squisher.mask.reset_outside(moved(weights), weights, squisher.mask.top_k(random(1, name), keep=0.5))


APPLICATIONS = {
    "unlearn": lambda w, n: squisher.unlearn.dampen(w, random(1, n), random(2, n, 20.0), select=5.0),
    "quantize": quantized,
    "prune": lambda w, n: squisher.prune.weights(w, random(1, n), sparsity=0.5),
    "reset_outside": reset,
    "merge": lambda w, n: squisher.merge.fisher([w, moved(w)], [random(1, n), random(2, n)]),
}


@pytest.mark.parametrize("name", ["table.weight", "head.weight"])
@pytest.mark.parametrize("application", APPLICATIONS)
def test_both_names_have_the_value_that_an_untied_table_gets(application, name):
    weights = state()
    result = APPLICATIONS[application](weights, name)
    alone = {key: tensor for key, tensor in weights.items() if key != "head.weight"}
    if application in ("reset_outside", "merge"):
        expected = APPLICATIONS[application](weights, "table.weight")["table.weight"]
    else:
        expected = APPLICATIONS[application](alone, "table.weight")["table.weight"]
    assert not torch.equal(expected, weights["table.weight"])
    for key in ("table.weight", "head.weight"):
        assert torch.equal(result[key], expected)


@pytest.mark.parametrize("exclude", ["^table", "^head"])
def test_a_tied_tensor_is_left_alone_by_any_of_its_names(exclude):
    weights, one, two = state(), random(1, "table.weight"), random(2, "table.weight", 20.0)
    results = [
        squisher.unlearn.dampen(weights, one, two, select=5.0, exclude=exclude),
        squisher.prune.weights(weights, one, sparsity=0.5, exclude=exclude),
        squisher.merge.fisher([weights, moved(weights)], [one, two], exclude=exclude),
    ]
    for result in results:
        assert torch.equal(result["table.weight"], weights["table.weight"])
        assert torch.equal(result["head.weight"], weights["table.weight"])
    assert "table.weight" in squisher.quantize.sensitivity(weights, one, exclude=exclude).kept


def test_two_importances_of_one_tensor_are_refused_unless_they_are_equal():
    weights, importance = state(), random(1, "table.weight")
    twice = {**importance, "head.weight": importance["table.weight"].clone()}
    once = squisher.prune.weights(weights, importance, sparsity=0.5)
    assert torch.equal(squisher.prune.weights(weights, twice, sparsity=0.5)["head.weight"], once["head.weight"])
    twice["head.weight"] += 1
    with pytest.raises(NamingError, match="one tensor"):
        squisher.prune.weights(weights, twice, sparsity=0.5)


def test_a_patch_of_tied_weights_keeps_to_a_mask_that_has_one_name(tmp_path):
    weights = state()
    mask = squisher.mask.top_k(random(1, "table.weight"), keep=0.5)
    tuned = dict(squisher.mask.reset_outside(moved(weights), weights, mask))
    tuned["head.weight"] = tuned["table.weight"]
    squisher.patch.make(weights, tuned, tmp_path / "patch.safetensors", mask=mask)
    applied = squisher.patch.apply(weights, tmp_path / "patch.safetensors")
    assert all(torch.equal(applied[name], tuned[name]) for name in tuned)


@pytest.mark.parametrize("name", ["table.weight", "head.weight"])
def test_the_command_writes_what_was_dampened_under_the_name_that_the_file_keeps(tmp_path, name):
    weights = state()
    torch.save(weights, tmp_path / "model.pt")
    one, two = random(1, name), random(2, name, 20.0)
    for file, values in (("all", one), ("forget", two)):
        squisher.Importance(values, kind="fisher", unit="example").save(tmp_path / f"{file}.safetensors")
    options = (
        "--importance",
        tmp_path / "all.safetensors",
        "--forget",
        tmp_path / "forget.safetensors",
        "--select",
        "5",
    )
    said = run("unlearn", tmp_path / "model.pt", *options, "--out", tmp_path / "out.safetensors")
    assert "--select" in said.stderr  # nearly all of it was dampened
    from safetensors.torch import load_file

    expected = squisher.unlearn.dampen(weights, one, two, select=5.0)["table.weight"]
    assert torch.equal(load_file(tmp_path / "out.safetensors")["table.weight"], expected)
