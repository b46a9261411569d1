"""Distributed Shampoo: the accumulator of the optimizer that it grafts from, out of its blocks."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import squisher
from squisher.errors import FileError, NoAccumulatorError
from squisher.storage.torch_files import read

SHAMPOO = Path(__file__).parents[1] / "fixtures" / "shampoo"


def truth(name):
    return {key: stored.load().float() for key, stored in read(SHAMPOO / f"{name}.pt")["truth"]}


@pytest.mark.parametrize("name", ["adam", "rmsprop", "adagrad"])
def test_blocks_are_put_together(name):
    """Parameters whose blocks look the same differ in shape, small dimensions were merged, and some were left out."""
    imp = squisher.extract(SHAMPOO / f"{name}.pt")
    expected = truth(name)
    assert {key: tuple(value.shape) for key, value in imp.items()} == {k: tuple(v.shape) for k, v in expected.items()}
    assert imp.provenance.naming.level == "recorded"
    for key, value in expected.items():
        torch.testing.assert_close(imp[key], value)
        for size in (1, 7, 1 << 20):
            assert torch.equal(torch.cat(list(imp.chunks(key, size))), imp[key].flatten())


def test_without_a_squared_gradient_it_is_refused():
    with pytest.raises(NoAccumulatorError, match="grafts"):
        squisher.extract(SHAMPOO / "sgd.pt")


class AdamPreconditionerConfig(SimpleNamespace):
    """Settings under the name that decides what the accumulator is."""


def state(beta2=0.95, **more):
    """What a state dictionary holds for one matrix of 8 × 8 in blocks of 4 × 4, with settings of no class."""
    blocks = {f"block_{k}": {"adagrad": torch.full((4, 4), k + 1.0)} for k in range(4)}
    config = AdamPreconditionerConfig(beta2=beta2, drop_weighting_factor_on_gsquare=False)
    group = {
        "grafting_config": config,
        "max_preconditioner_dim": 4,
        "distributed_config": SimpleNamespace(target_parameter_dimensionality=1),
        "weight_decay": 0.0,
        **more,
    }
    return {**blocks, "step": torch.tensor(2.0)}, group


class DistributedShampoo(torch.optim.Optimizer):
    """Holds a state, and takes no steps."""

    def __init__(self, model, kept, group):
        super().__init__(model.parameters(), group)
        self.state[model.weight] = kept


def test_live():
    model = nn.Linear(8, 8, bias=False)
    imp = squisher.extract(DistributedShampoo(model, *state()), model, bias_correction=False)
    expected = torch.arange(1.0, 5.0).reshape(2, 2).repeat_interleave(4, 0).repeat_interleave(4, 1)
    assert torch.equal(imp["weight"], expected)
    imp = squisher.extract(DistributedShampoo(model, *state()), model)
    torch.testing.assert_close(imp["weight"], expected / (1 - 0.95**2))
    decay = state(weight_decay=0.1, weight_decay_type="WeightDecayType.L2")
    imp = squisher.extract(DistributedShampoo(model, *decay), model)
    assert imp.provenance.pollution[0].code == "l2"
    unweighted = AdamPreconditionerConfig(beta2=0.95, drop_weighting_factor_on_gsquare=True)
    with pytest.raises(NoAccumulatorError, match="blocks"):
        squisher.extract(DistributedShampoo(model, *state(grafting_config=unweighted)), model)
    wide = nn.Linear(32, 2, bias=False)
    with pytest.raises(FileError, match=r"\(2, 32\)"):
        squisher.extract(DistributedShampoo(wide, *state()), wide)


def test_the_shape_of_a_parameter_must_be_known(tmp_path):
    """Four blocks of one size may be a square or a row of them."""
    kept, group = state()
    torch.save(
        {"state": {0: kept}, "param_groups": [{**group, "params": [0], "param_names": ["weight"]}]},
        tmp_path / "optimizer.pt",
    )
    with pytest.raises(NoAccumulatorError, match="--model"):
        squisher.extract(tmp_path / "optimizer.pt")
    for shape in ((8, 8), (4, 16)):
        torch.save({"weight": torch.zeros(shape)}, tmp_path / "model.pt")
        imp = squisher.extract(tmp_path / "optimizer.pt", model=tmp_path / "model.pt", bias_correction=False)
        assert torch.equal(imp["weight"][-1, -4:], torch.full((4,), 4.0))
        assert imp["weight"].shape == shape
    torch.save({"weight": torch.zeros(4, 12)}, tmp_path / "model.pt")
    with pytest.raises(FileError, match="another model"):
        squisher.extract(tmp_path / "optimizer.pt", model=tmp_path / "model.pt")
