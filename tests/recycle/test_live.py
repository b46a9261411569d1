"""A live optimizer and its model."""

import copy
import json

import pytest
import torch
from torch import nn

import squisher
from squisher.errors import NamingError, NoAccumulatorError, SquisherError, SquisherWarning


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.unused = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.norm(self.body(self.embed(x)).relu()))


def train(model, optimizer, steps=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randint(0, 7, (6,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x.roll(1)).backward()
        optimizer.step()


def adamw(model, **settings):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **settings)
    train(model, optimizer)
    return optimizer


def test_names_by_identity_tied_once_absent_listed():
    torch.manual_seed(0)
    model = Net()
    model.norm.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [model.body.weight, model.embed.weight, *model.unused.parameters(), model.norm.weight]
    )
    train(model, optimizer)
    imp = squisher.extract(optimizer, model, batch_size=6, hash_weights=True)
    assert set(imp) == {"body.weight", "embed.weight", "norm.weight"}
    for name, parameter in (("body.weight", model.body.weight), ("embed.weight", model.embed.weight)):
        state = optimizer.state[parameter]
        assert torch.allclose(imp[name], state["exp_avg_sq"] / (1 - 0.999**5), rtol=1e-5)
    p = imp.provenance
    assert p.kind == "squisher"
    assert p.tied == {"head.weight": "embed.weight"}
    assert {name: why.reason for name, why in p.absent.items()} == {
        "norm.bias": "frozen",
        "body.bias": "not_in_optimizer",
        "unused.weight": "no_gradient",
        "unused.bias": "no_gradient",
    }
    assert p.steps == {"min": 5, "max": 5}
    assert (p.batch_size, p.loss_reduction, p.unit, p.bias_corrected) == (6, "mean", "example", True)
    assert p.optimizer["class"] == "AdamW"
    assert p.optimizer["beta2"] == 0.999
    assert p.naming.level == "recorded"
    assert p.dtype_of_source == "float32"
    assert set(p.model["content"]) == {*imp, "unused.weight", "unused.bias"}  # what is in the optimizer
    assert torch.allclose(imp.as_fisher()["body.weight"], 6 * imp["body.weight"])


def test_it_is_a_copy_that_training_does_not_change():
    model = Net()
    optimizer = adamw(model)
    imp = squisher.extract(optimizer, model)
    before = {name: tensor.clone() for name, tensor in imp.items()}
    train(model, optimizer, seed=1)
    assert all(torch.equal(imp[name], before[name]) for name in imp)
    raw = squisher.extract(optimizer, model, bias_correction=False)
    before = raw["body.weight"].clone()
    train(model, optimizer, seed=2)
    assert torch.equal(raw["body.weight"], before)


def test_groups_with_their_own_beta2_and_parameters_with_their_own_steps():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    groups = [
        {"params": model[0].parameters(), "betas": (0.9, 0.9)},
        {"params": model[1].parameters(), "betas": (0.9, 0.99)},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0)
    gradients = {name: [] for name, _ in model.named_parameters()}
    for step in range(8):
        optimizer.zero_grad(set_to_none=True)
        model(torch.randn(5, 3)).square().sum().backward()
        if step % 2:  # a parameter without a gradient keeps its state and its count
            model[1].bias.grad = None
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients[name].append(parameter.grad.double().clone())
        optimizer.step()
    imp = squisher.extract(optimizer, model)
    for name, seen in gradients.items():
        beta = 0.9 if name.startswith("0") else 0.99
        weights = [beta ** (len(seen) - 1 - k) for k in range(len(seen))]
        expected = sum(w * g**2 for w, g in zip(weights, seen, strict=True)) / sum(weights)
        assert torch.allclose(imp[name].double(), expected, rtol=1e-5)
    p = imp.provenance
    assert p.steps == {"min": 4, "max": 8, "per_parameter": {"0.weight": 8, "0.bias": 8, "1.weight": 8, "1.bias": 4}}
    assert "beta2" not in p.optimizer
    assert [(g["beta2"], g["parameters"]) for g in p.optimizer["groups"]] == [
        (0.9, ["0.weight", "0.bias"]),
        (0.99, ["1.weight", "1.bias"]),
    ]
    assert json.loads(json.dumps(p.to_dict())) == p.to_dict()


@pytest.mark.parametrize(
    "settings", [{"foreach": True}, {"foreach": False}, {"fused": True}, {"lr": torch.tensor(1e-2)}]
)
def test_every_implementation_of_adam_gives_the_same(settings):
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    twin.head.weight = twin.embed.weight
    plain = adamw(model)
    other = torch.optim.AdamW(twin.parameters(), **{"lr": 1e-2, **settings})
    train(twin, other)
    a, b = squisher.extract(plain, model), squisher.extract(other, twin)
    assert all(torch.allclose(a[name], b[name], rtol=1e-4, atol=1e-12) for name in a)


def test_steps_as_numbers_as_old_checkpoints_have_them():
    model = Net()
    optimizer = adamw(model)
    expected = squisher.extract(optimizer, model)
    for state in optimizer.state.values():
        state["step"] = int(state["step"])
    assert torch.equal(squisher.extract(optimizer, model)["body.weight"], expected["body.weight"])


def test_wrapped_and_compiled_models_keep_their_file_names():
    model = Net()
    optimizer = adamw(model)
    expected = squisher.extract(optimizer, model)

    class OptimizedModule(nn.Module):  # what torch.compile returns, without compiling
        def __init__(self, inner):
            super().__init__()
            self._orig_mod = inner

    wrapped = nn.DataParallel(OptimizedModule(model))
    imp = squisher.extract(optimizer, wrapped)
    assert set(imp) == set(expected)
    assert imp.provenance.live_names["body.weight"] == "module._orig_mod.body.weight"
    assert imp.provenance.model["structure"] == expected.provenance.model["structure"]


def test_a_users_own_submodule_called_module_keeps_its_name():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 2)

    model = Own()
    optimizer = torch.optim.Adam(model.parameters())
    model.module(torch.rand(3, 2)).sum().backward()
    optimizer.step()
    assert set(squisher.extract(optimizer, model)) == {"module.weight", "module.bias"}


def test_several_optimizers_are_joined():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizers = [torch.optim.Adam(model[0].parameters()), torch.optim.RMSprop(model[1].parameters())]
    model(torch.rand(3, 2)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    imp = squisher.extract(optimizers, model)
    assert set(imp) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert [g["class"] for g in imp.provenance.optimizer["groups"]] == ["Adam", "RMSprop"]
    assert set(squisher.extract(optimizers, model, optimizer=1)) == {"1.weight", "1.bias"}
    with pytest.raises(NamingError, match="in two optimizers"):
        squisher.extract([optimizers[0], optimizers[0]], model)


def test_a_wrapper_around_the_optimizer_is_seen_through():
    class Wrapper:
        def __init__(self, optimizer):
            self.optimizer = optimizer

    model = Net()
    assert set(squisher.extract(Wrapper(adamw(model)), model)) >= {"body.weight"}


def test_a_tracker_gives_the_same_kind_of_thing():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    tracker = squisher.Tracker(model, beta2=0.9)
    with pytest.raises(NoAccumulatorError, match="observed no step"):
        squisher.extract(tracker, model)
    squares = []
    for _ in range(6):
        model.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        squares.append(model.weight.grad.double().square())
        tracker.observe()
    imp = squisher.extract(tracker, model, batch_size=4)
    weights = [0.9 ** (5 - k) for k in range(6)]
    expected = sum(w * s for w, s in zip(weights, squares, strict=True)) / sum(weights)
    assert torch.allclose(imp["weight"].double(), expected, rtol=1e-5)
    assert imp.provenance.optimizer["class"] == "Tracker"
    assert imp.provenance.after_clipping is False
    assert imp.provenance.absent["bias"].reason == "frozen"
    assert torch.equal(squisher.extract(tracker)["weight"], imp["weight"])


def test_live_low_precision_is_recorded():
    model = nn.Linear(3, 3).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(2, 3).bfloat16()).sum().backward()
    optimizer.step()
    imp = squisher.extract(optimizer, model, batch_size=2)
    assert imp["weight"].dtype == torch.float32
    assert imp.provenance.dtype_of_source == "bfloat16"
    with pytest.warns(SquisherWarning, match="bfloat16"):
        imp.as_fisher()


def test_errors():
    model = Net()
    with pytest.raises(NoAccumulatorError, match="has taken no step"):
        squisher.extract(torch.optim.AdamW(model.parameters()), model)
    optimizer = adamw(model)
    with pytest.raises(NamingError, match="pass the model too"):
        squisher.extract(optimizer)
    with pytest.raises(NamingError, match="optimizer's"):
        squisher.extract(optimizer, copy.deepcopy(model))
    with pytest.raises(SquisherError, match="Cannot extract from int"):
        squisher.extract(3, model)
    with pytest.raises(SquisherError, match="names is for files"):
        squisher.extract(optimizer, model, names=["a"])
    with pytest.raises(SquisherError, match="not a path"):
        squisher.extract(optimizer, "folder")
    optimizer.state[model.body.weight]["exp_avg_sq"][0, 0] = float("nan")
    with pytest.raises(SquisherError, match=r"'body\.weight' has NaN"):
        squisher.extract(optimizer, model)


def test_parameters_of_another_model_are_left_out_with_a_warning():
    model, extra = Net(), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([*model.parameters(), extra])
    train(model, optimizer)
    with pytest.warns(SquisherWarning, match="^1 .* 8 parameters"):
        squisher.extract(optimizer, model)


def test_frozen_weights_are_not_hashed():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam(model[1].parameters())
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    assert set(squisher.extract(optimizer, model).provenance.model["content"]) == {"1.weight", "1.bias"}
    found = squisher.extract(optimizer, model, hash_weights=True)
    assert set(found.provenance.model["content"]) == {"1.weight", "1.bias"}
    assert set(found.provenance.absent) == {"0.weight", "0.bias"}


def test_a_class_that_is_not_known_is_said():
    class Adamlike(torch.optim.Adam):
        pass

    model = nn.Linear(3, 2)
    for kind, said in ((torch.optim.Adam, []), (Adamlike, ["uncertain"])):
        optimizer = kind(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert [one.code for one in squisher.extract(optimizer, model).provenance.pollution] == said


def test_a_state_that_is_spread_over_ranks_is_refused_by_name():
    class ZeroRedundancyOptimizer(torch.optim.Optimizer):  # as torch's: its own state is empty
        pass

    model = nn.Linear(3, 2)
    with pytest.raises(NoAccumulatorError, match="one rank alone.*consolidate_state_dict"):
        squisher.extract(ZeroRedundancyOptimizer(model.parameters(), {}), model)
    with pytest.raises(NoAccumulatorError, match="no state: it has taken no step"):
        squisher.extract(torch.optim.Adam(model.parameters()), model)
