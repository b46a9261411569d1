"""Decoupled consolidation: the pull is the minimiser of its proximal objective, and the optimizer never sees it."""

import contextlib
import copy
import pickle

import pytest
import torch
from torch import nn

import squisher

LARGE = 70_001  # above the block that is pulled at once


def make(size=5, *, kind=torch.float32, **options):
    """A model of two parameters away from the centre of a consolidated task."""
    torch.manual_seed(0)
    model = nn.ParameterDict({"a": nn.Parameter(torch.randn(size)), "b": nn.Parameter(torch.randn(3, 4))}).to(kind)
    ewc = squisher.EWC(model, strength=3.0, **options)
    importance = {n: torch.rand(p.shape) * 10.0 ** torch.randint(-6, 6, p.shape) for n, p in model.items()}
    importance["b"][0] = 0
    ewc.consolidate(importance)
    centre = {n: p.detach().clone() for n, p in model.items()}
    return model, ewc, importance, centre


def one_step(model, optimizer, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    optimizer.step()


def minimiser(theta, centre, importance, rate, below=1.0):
    """argmin over x of ½ below·(x − θ)² + ½ rate·A(x − θ̄)², entry by entry."""
    theta, centre, importance = theta.double(), centre.double(), importance.double()
    x = (below * theta + rate * importance * centre) / (below + rate * importance)
    slope = below * (x - theta) + rate * importance * (x - centre)
    assert slope.abs().max() <= 1e-9 * (below * theta.abs() + rate * importance * centre.abs()).max()
    return x


@pytest.mark.parametrize("size", [1, 7, LARGE])
@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}, {"dtype": torch.float64}])
def test_it_is_the_minimiser_of_the_proximal_objective(size, options):
    model, ewc, importance, centre = make(size=size, **options)
    optimizer = torch.optim.SGD([{"params": [model["a"]], "lr": 0.5}, {"params": [model["b"]], "lr": 0.01}])
    one_step(model, optimizer)
    before = {n: p.detach().clone() for n, p in model.items()}
    assert ewc.pull_(optimizer)
    for (name, p), lr in zip(model.items(), (0.5, 0.01), strict=True):
        kept = importance[name].to(options.get("dtype", torch.float32))
        expected = minimiser(before[name], centre[name], kept, 3.0 * lr)
        torch.testing.assert_close(p.detach().double(), expected, rtol=3e-7, atol=3e-7)
        untouched = importance[name] == 0
        assert torch.equal(p.detach()[untouched], before[name][untouched])


@pytest.mark.parametrize("size", [5, LARGE])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_the_metric_of_adam(size, kind, amsgrad):
    model, ewc, importance, centre = make(size=size)
    optimizer = kind(model.parameters(), lr=0.1, amsgrad=amsgrad)
    for seed in range(3):
        one_step(model, optimizer, seed)
    before = {n: p.detach().clone() for n, p in model.items()}
    ewc.pull_(optimizer, "adam")
    for name, p in model.items():
        state = optimizer.state[p]
        average = state["max_exp_avg_sq" if amsgrad else "exp_avg_sq"].double()
        below = (average / (1 - 0.999**3)).sqrt() + 1e-8
        expected = minimiser(before[name], centre[name], importance[name], 3.0 * 0.1, below)
        torch.testing.assert_close(p.detach().double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("metric", ["plain", "adam"])
def test_parameters_of_lower_precision_and_of_any_layout(metric):
    model, _, importance, _ = make(kind=torch.bfloat16)
    model["b"] = nn.Parameter(torch.randn(4, 3).T.bfloat16())  # not contiguous
    ewc = squisher.EWC(model, strength=3.0)
    ewc.consolidate(importance)
    centre = {n: p.detach().clone() for n, p in model.items()}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    one_step(model, optimizer)
    before = {n: p.detach().clone() for n, p in model.items()}
    ewc.pull_(optimizer, metric)
    for name, p in model.items():
        below = 1.0
        if metric == "adam":
            below = (optimizer.state[p]["exp_avg_sq"].double() / (1 - 0.999)).sqrt() + 1e-8
        expected = minimiser(before[name], centre[name], importance[name], 0.3, below)
        torch.testing.assert_close(p.detach().double(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("metric", ["plain", "adam"])
def test_parameters_of_double_precision_keep_it(metric):
    model, ewc, importance, _ = make(kind=torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    one_step(model, optimizer)
    before = {n: p.detach().clone() for n, p in model.items()}
    ewc.pull_(optimizer, metric)
    for name, p in model.items():
        below = 1.0
        if metric == "adam":
            below = (optimizer.state[p]["exp_avg_sq"] / (1 - 0.999)).sqrt() + 1e-8
        centre = ewc.state_dict()["centre"][name]
        expected = minimiser(before[name], centre, importance[name], 0.3, below)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-12, atol=1e-12)
        assert torch.equal(p.detach()[importance[name] == 0], before[name][importance[name] == 0])


def test_the_optimizer_never_sees_it():
    model, ewc, _, _ = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    one_step(model, optimizer)
    gradients = {n: p.grad.clone() for n, p in model.items()}
    state = copy.deepcopy(optimizer.state_dict())
    ewc.pull_(optimizer)
    assert all(torch.equal(p.grad, gradients[n]) for n, p in model.items())
    for k, own in optimizer.state_dict()["state"].items():
        assert all(torch.equal(own[key], state["state"][k][key]) for key in own)


def test_fifty_tasks_of_wildly_different_scales():
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    ewc = squisher.EWC(model, strength=1e10)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for task in range(50):
        scale = 10.0 ** ((task * 17) % 45 - 30)  # 1e-30 to 1e14
        one_step(model, optimizer, task)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        ewc.pull_(optimizer)
        for name, p in model.named_parameters():
            assert p.isfinite().all()
            if task:
                low = torch.minimum(before[name], ewc.state_dict()["centre"][name])
                high = torch.maximum(before[name], ewc.state_dict()["centre"][name])
                assert ((p >= low - 1e-6) & (p <= high + 1e-6)).all()  # never beyond the centre
        with pytest.warns(squisher.SquisherWarning) if _grows(ewc, scale) else contextlib.nullcontext():
            ewc.consolidate({n: torch.rand(p.shape) * scale for n, p in model.named_parameters()})


def _grows(ewc, scale):
    return bool(ewc.totals) and scale * 14 > 1000 * ewc.totals[-1] * 1.5


@pytest.mark.parametrize("options", [{}, {"fused": True}])
def test_steps_that_a_scaler_skips_are_not_followed(options):
    model, ewc, _, _ = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    followed = []
    for step in range(5):
        optimizer.zero_grad()
        loss = sum((p * (step + 1)).sum() for p in model.parameters())
        scaler.scale(loss).backward()
        if step in (0, 2):
            model["a"].grad[0] = torch.inf
        before = {n: p.detach().clone() for n, p in model.items()}
        scaler.step(optimizer)
        scaler.update()
        followed.append(ewc.pull_(optimizer))
        if not followed[-1]:
            assert all(torch.equal(p.detach(), before[n]) for n, p in model.items())
    assert followed == [False, True, False, True, True]


def test_following_every_step_is_calling_it_after_every_step():
    runs = []
    for by_hand in (True, False):
        model, ewc, _, _ = make()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        handle = None if by_hand else ewc.pull_after_steps(optimizer, "adam")
        for seed in range(4):
            one_step(model, optimizer, seed)
            if by_hand:
                assert ewc.pull_(optimizer, "adam")
            schedule.step()
        runs.append({n: p.detach().clone() for n, p in model.items()})
        if handle is not None:
            handle.remove()
            before = {n: p.detach().clone() for n, p in model.items()}
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            for group in optimizer.param_groups:
                group["lr"] = 0.0
            optimizer.step()
            assert all(torch.equal(p.detach(), before[n]) for n, p in model.items())
    assert all(torch.equal(runs[0][n], runs[1][n]) for n in runs[0])


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_called_from_a_hook_of_ones_own_no_step_is_lost(kind):
    model, ewc, _, _ = make()
    optimizer = kind(model.parameters(), lr=0.1)
    taken = []
    optimizer.register_step_post_hook(lambda *_: taken.append(ewc.pull_(optimizer)))
    for seed in range(4):
        one_step(model, optimizer, seed)
    assert taken == [True] * 4


def test_strength_like_translates():
    model, ewc, importance, _ = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    one_step(model, optimizer)
    above = total = 0.0
    for name, p in model.items():
        below = (optimizer.state[p]["exp_avg_sq"].double() / (1 - 0.999)).sqrt() + 1e-8
        above += float((importance[name].double() / below).sum())
        total += float(importance[name].double().sum())
    found = ewc.strength_like(None, 2.0, optimizer)
    assert found == pytest.approx(2.0 * above / total, rel=1e-6)
    fisher = {n: f * 5 for n, f in importance.items()}
    assert ewc.strength_like(fisher, 2.0, optimizer) == pytest.approx(5 * found, rel=1e-5)


def test_what_is_refused():
    model, ewc, _, _ = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    one_step(model, optimizer)
    with pytest.raises(squisher.SquisherError, match="plain or adam"):
        ewc.pull_(optimizer, "fisher")
    ewc.pull_(optimizer)
    with pytest.raises(squisher.SquisherError, match="plain or adam"):
        ewc.pull_(optimizer, "fisher")  # where there is no step to follow, too
    with pytest.raises(squisher.SquisherError, match="plain or adam"):
        ewc.pull_after_steps(optimizer, "fisher")
    one_step(model, optimizer)
    with pytest.raises(squisher.SquisherError, match="SGD"):
        ewc.pull_(optimizer, "adam")
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(squisher.SquisherError, match="none of the parameters"):
        ewc.pull_(other)
    with pytest.raises(squisher.SquisherError, match="not a str"):
        ewc.pull_("adam")


def test_the_metric_of_adam_is_refused_where_no_optimizer_state_ever_comes():
    model, ewc, _, _ = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # keeps no state without momentum
    one_step(model, optimizer)
    with pytest.raises(squisher.SquisherError, match="plain"):
        ewc.pull_(optimizer, metric="adam")


@pytest.mark.parametrize("again", [copy.deepcopy, lambda ewc: pickle.loads(pickle.dumps(ewc))])
def test_copies_after_a_pull(again):
    model, ewc, _, _ = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    one_step(model, optimizer)
    assert ewc.pull_(optimizer)
    assert torch.equal(again(ewc).penalty(), ewc.penalty())
