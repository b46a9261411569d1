"""The table, against the optimizers themselves."""

import math

import pytest
import torch

import squisher
from squisher.errors import NoAccumulatorError
from squisher.recycle.assembly import values
from squisher.recycle.optimizers import TABLE, identify, optimizer_name, reading, step_of, stored
from squisher.recycle.optimizers.encoded import decoded
from squisher.recycle.states import Entry

SHAPE = (4, 3)


def trained(name, gradients, **settings):
    """State and group of one parameter after steps with the given gradients, as `state_dict` has them."""
    parameter = torch.nn.Parameter(torch.full(SHAPE, 0.5))
    optimizer = getattr(torch.optim, name)([parameter], lr=1e-9 if name in ("Rprop", "SparseAdam") else 0.0, **settings)
    for gradient in gradients:
        parameter.grad = gradient.to_sparse() if name == "SparseAdam" else gradient.clone()
        optimizer.step()
    saved = optimizer.state_dict()
    return saved["state"].get(0, {}), saved["param_groups"][0]


def recycled(name, gradients, class_name=None, **settings):
    state, group = trained(name, gradients, **settings)
    how = reading(state, group, class_name)
    return values(how, stored(how.key, state, group))


AVERAGING = ["Adam", "AdamW", "NAdam", "RAdam", "SparseAdam", "RMSprop", "Adadelta", "Adagrad", "Adafactor"]


@pytest.mark.parametrize("steps", [1, 2, 10, 700, 5000])
@pytest.mark.parametrize("name", AVERAGING)
def test_a_constant_gradient_gives_its_square_at_any_step(name, steps):
    if steps > 1000 and name == "SparseAdam":
        steps = 1000  # sparse steps are slow, and the arithmetic is Adam's
    c = 0.37
    result = recycled(name, [torch.full(SHAPE, c)] * steps)
    assert torch.allclose(result, torch.full(SHAPE, c * c), rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "settings", "decay"),
    [
        ("Adam", {"betas": (0.9, 0.95)}, 0.95),
        ("AdamW", {"amsgrad": True}, 0.999),
        ("AdamW", {"foreach": True}, 0.999),
        ("AdamW", {"fused": True}, 0.999),
        (
            "AdamW",
            {"betas": (torch.tensor(0.9), torch.tensor(0.95)), "weight_decay": torch.tensor(0.1), "foreach": False},
            0.95,
        ),
        ("NAdam", {}, 0.999),
        ("RMSprop", {"alpha": 0.9, "centered": True, "momentum": 0.5}, 0.9),
        ("Adadelta", {"rho": 0.8}, 0.8),
    ],
)
def test_the_average_is_the_weighted_mean_of_squares(name, settings, decay):
    torch.manual_seed(1)
    gradients = [torch.randn(SHAPE) for _ in range(17)]
    weights = torch.tensor([decay ** (16 - k) for k in range(17)], dtype=torch.float64)
    expected = sum(w * g.double() ** 2 for w, g in zip(weights, gradients, strict=True)) / weights.sum()
    assert torch.allclose(recycled(name, gradients, **settings).double(), expected, rtol=1e-5)


def test_adagrad_is_the_plain_mean_less_its_start():
    torch.manual_seed(1)
    gradients = [torch.randn(SHAPE) for _ in range(9)]
    expected = torch.stack(gradients).square().mean(0)
    assert torch.allclose(recycled("Adagrad", gradients, initial_accumulator_value=0.1), expected, rtol=1e-5)
    zero = recycled("Adagrad", [torch.zeros(SHAPE)] * 3, initial_accumulator_value=0.1)
    assert (zero == 0).all()


def test_adafactor_is_the_product_of_its_row_and_column_means():
    torch.manual_seed(1)
    gradient = torch.randn(SHAPE)
    square = gradient.square()
    expected = square.mean(1, keepdim=True) * square.mean(0, keepdim=True) / square.mean()
    assert torch.allclose(recycled("Adafactor", [gradient]), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("SGD", "keeps nothing of the gradient"),
        ("Adamax", "decayed maximum"),
        ("ASGD", "average of the weights"),
        ("Rprop", "sign of the gradient"),
        ("Muon", "moving average of the gradient"),
    ],
)
@pytest.mark.parametrize("live", [True, False])
def test_what_keeps_no_squared_gradient_is_refused_by_name_with_what_to_do(name, words, live):
    state, group = trained(name, [torch.ones(SHAPE)] * 2)
    with pytest.raises(NoAccumulatorError, match=rf"^{name} .*{words}.*squisher\.Tracker"):
        reading(state, group, name if live else None)


def test_sgd_with_momentum_and_lbfgs():
    state, group = trained("SGD", [torch.ones(SHAPE)] * 2, momentum=0.9)
    for class_name in ("SGD", None):
        with pytest.raises(NoAccumulatorError, match="SGD.*average of the gradient"):
            reading(state, group, class_name)
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.LBFGS([parameter])

    def closure():
        parameter.grad = parameter.detach().clone()
        return parameter.square().sum()

    optimizer.step(closure)
    saved = optimizer.state_dict()
    with pytest.raises(NoAccumulatorError, match="LBFGS.*directions"):
        reading(saved["state"][0], saved["param_groups"][0])


def test_every_torch_optimizer_is_in_the_table():
    known = {name for row in TABLE for name in row.classes} | {row.optimizer for row in TABLE}
    own = {n for n, o in vars(torch.optim).items() if isinstance(o, type) and issubclass(o, torch.optim.Optimizer)}
    assert own - {"Optimizer"} <= known


def test_an_unknown_optimizer_is_refused_with_its_keys():
    with pytest.raises(NoAccumulatorError, match="Mystery.*alpha_state, step"):
        identify({"alpha_state", "step"}, {"lr"}, "Mystery")


@pytest.mark.parametrize(
    ("keys", "group", "words"),
    [
        ("exp_avg exp_avg_sq Q GG", "betas", "SOAP.*rotated basis"),
        ("exp_avg exp_avg_sq exp_avg_diff", "betas", "Adan averages"),
        ("exp_avg exp_avg_var", "betas", "AdaBelief averages"),
        ("exp_avg exp_avg_sq", "betas initial_accumulator", "Yogi changes"),
        ("exp_avg", "betas", "Lion.*moving average"),
    ],
)
def test_what_only_looks_like_adam_is_refused(keys, group, words):
    with pytest.raises(NoAccumulatorError, match=words):
        identify(keys.split(), group.split())


@pytest.mark.parametrize(
    ("name", "settings", "inside"),
    [
        ("Adam", {"weight_decay": 0.1}, True),
        ("Adam", {"weight_decay": 0.1, "decoupled_weight_decay": True}, False),
        ("AdamW", {"weight_decay": 0.1}, False),
        ("NAdam", {"weight_decay": 0.1}, True),
        ("RAdam", {"weight_decay": 0.1}, True),
        ("RMSprop", {"weight_decay": 0.1}, True),
        ("Adagrad", {"weight_decay": 0.1}, True),
        ("Adadelta", {"weight_decay": 0.1}, True),
        ("Adam", {}, False),
    ],
)
@pytest.mark.parametrize("live", [True, False])
def test_l2_decay_inside_the_square_is_measured_and_said(name, settings, inside, live):
    state, group = trained(name, [torch.zeros(SHAPE)] * 3, **settings)
    how = reading(state, group, name if live else None)
    # With no gradient at all, what is left in the accumulator is the decay's: (0.1 · 0.5)².
    left = values(how, stored(how.key, state, group))
    expected = (0.1 * 0.5) ** 2 if inside else 0.0
    assert torch.allclose(left, torch.full(SHAPE, expected), rtol=1e-4)
    assert [one.numbers for one in how.pollution if one.code == "l2"] == ([{"weight_decay": 0.1}] if inside else [])


def test_old_files_cannot_tell_adam_from_adamw_and_say_so():
    state, group = trained("AdamW", [torch.ones(SHAPE)], weight_decay=0.1)
    del group["decoupled_weight_decay"]
    how = reading(state, group)
    assert optimizer_name(how.accumulator, group) == "Adam or AdamW"
    assert how.pollution[0].code == "l2"
    assert "cannot be told apart" in how.pollution[0].note
    assert reading(state, group, "AdamW").pollution == ()


@pytest.mark.parametrize("step", [7, 7.0, torch.tensor(7.0), torch.tensor(7), torch.tensor([7.0])])
def test_steps_of_every_kind(step):
    assert step_of({"step": step}, {}) == 7


def test_steps_in_the_group_and_no_steps_at_all():
    state, group = trained("AdamW", [torch.ones(SHAPE)] * 3)
    del state["step"]
    assert step_of(state, {**group, "step": 3}) == 3
    assert step_of(state, {**group, "k": 4}) == 4
    with pytest.raises(NoAccumulatorError, match="no step count"):
        reading(state, group)
    assert reading(state, group, bias_correction=False).factor == 1.0
    with pytest.raises(NoAccumulatorError, match="count is 0"):
        reading({**state, "step": 0}, group)


@pytest.mark.parametrize("betas", [None, (0.9,), (0.9, 1.0), (0.9, 1.5), (0.9, math.nan), "no"])
def test_a_decay_that_cannot_be_is_refused(betas):
    state, group = trained("AdamW", [torch.ones(SHAPE)])
    with pytest.raises(NoAccumulatorError, match="decay β₂ of Adam"):
        reading(state, {**group, "betas": betas})


def test_hyperparameters_that_are_tensors_in_a_file(tmp_path):
    network = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=torch.tensor(1e-3), betas=(torch.tensor(0.9), torch.tensor(0.5)), foreach=False
    )
    for _ in range(2):
        optimizer.zero_grad()
        network(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
    torch.save({"model": network.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    expected = optimizer.state[network.weight]["exp_avg_sq"] / (1 - 0.5**2)
    assert torch.allclose(squisher.extract(tmp_path / "c.pt")["weight"], expected)


ONES = torch.ones(SHAPE)
OPTIMI = {"beta1": 0.9, "beta2": 0.99, "kahan_sum": None, "decouple_lr": False, "step": 8, "weight_decay": 0.1}


@pytest.mark.parametrize(
    ("state", "group", "name", "polluted"),
    [
        ({}, {**OPTIMI, "decouple_wd": True}, "optimi", False),
        ({}, {**OPTIMI, "decouple_wd": False}, "optimi", True),
        ({"eps_sq": torch.tensor(1e-12)}, OPTIMI, "StableAdamW", False),
        ({"la_param": ONES}, {**OPTIMI, "decouple_wd": True}, "Ranger", False),
    ],
)
def test_optimi_corrects_its_decay_so_that_nothing_is_left_to_correct(state, group, name, polluted):
    how = reading({"exp_avg": ONES, "exp_avg_sq": ONES, "kahan_comp": None, **state}, group)
    assert name in optimizer_name(how.accumulator, group)
    assert (how.factor, how.step, bool(how.pollution)) == (1.0, 8, polluted)


@pytest.mark.parametrize("class_name", [None, "AdamW"])
def test_heavyball_keeps_a_state_for_each_view(class_name):
    group = {"betas": (0.9, 0.99), "weight_decay": 0.0}
    view = {
        "step": torch.tensor(9),
        "update_by_adam_exp_avg_0": ONES,
        "update_by_adam_exp_avg_sq_0": 2 * ONES,
        "is_initialized": {0},
    }
    (entry,) = decoded([Entry({0: view}, group)], class_name)
    how = reading(entry.state, group, class_name)
    assert torch.equal(values(how, stored(how.key, entry.state, group)), 2 * ONES)
    for key in ("update_by_soap_exp_avg_sq_0", "update_by_adam_exp_avg_sq_1"):  # another basis; not the gradient itself
        (entry,) = decoded([Entry({0: {key: ONES}}, group)], class_name)
        with pytest.raises(NoAccumulatorError, match=key):
            reading(entry.state, group, class_name)


def test_optimizers_are_called_what_they_are():
    state, group = trained("RAdam", [ONES])
    assert optimizer_name(identify(state, group), group) == "RAdam"
    came = identify({"step", "exp_avg", "exp_avg_sq", "RMS"}, {"betas", "eps", "clip_threshold"})  # of a bias
    assert came.optimizer == "CAME"
    with pytest.raises(NoAccumulatorError, match="Shampoo"):
        identify({"step", "momentum_buffer", "precond_0", "inv_precond_0"}, {"momentum"})


@pytest.mark.parametrize("class_name", [None, "AdamW", "Adam", "RAdam"])
def test_a_class_of_another_library_with_the_same_name_is_told_by_its_keys(class_name):
    optimi = {"betas": (0.9, 0.99), "kahan_sum": True, "decouple_wd": True, "step": 5}
    assert identify({"exp_avg", "exp_avg_sq"}, optimi, class_name).meaning == "average"
    projected = {"step", "exp_avg", "exp_avg_sq", "projector"}  # galore_torch's class is called AdamW
    with pytest.raises(NoAccumulatorError, match="projected"):
        identify(projected, {"betas": (0.9, 0.99), "rank": 8}, class_name)


def test_sparse_adam_is_known_by_its_group():
    state, group = trained("SparseAdam", [torch.ones(SHAPE)] * 3)
    assert [one.code for one in reading(state, group).pollution] == ["sparse"]


@pytest.mark.parametrize("step", [2.5, float("nan"), float("inf")])
def test_a_count_that_is_no_whole_number_is_none(step):
    assert step_of({"step": step}, {}) is None


def test_a_state_with_both_moments_is_not_called_lion():
    with pytest.raises(NoAccumulatorError, match="not one that is known: its state has the keys exp_avg, exp_avg_sq"):
        identify(["exp_avg", "exp_avg_sq"], ["lr"])
