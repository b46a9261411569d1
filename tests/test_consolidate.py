"""EWC: the consolidate of all tasks is their sum, exactly, at a cost that does not grow."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import squisher
from squisher.consolidate import EWC, arithmetic, strength_like
from squisher.errors import NamingError, ScaleError, SquisherError, SquisherWarning
from squisher.importance import Importance


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def wander(model):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))


def importance_of(model, seed, **provenance):
    generator = torch.Generator().manual_seed(seed)
    tensors = {n: torch.rand(p.shape, generator=generator) ** 3 for n, p in model.named_parameters()}
    tensors["0.weight"][0] = 0.0
    return Importance(tensors, **provenance)


def tasks(model, ewc, count=3):
    """Consolidates several tasks and returns what the slow definition needs: centres and importances."""
    seen = []
    for k in range(count):
        wander(model)
        imp = importance_of(model, k)
        ewc.consolidate(imp)
        seen.append(({n: p.detach().clone().double() for n, p in model.named_parameters()}, imp))
    wander(model)
    return seen


def by_definition(model, seen, strength):
    total = torch.zeros((), dtype=torch.float64)
    for centre, imp in seen:
        for n, p in model.named_parameters():
            total = total + 0.5 * strength * (imp[n].double() * (p.double() - centre[n]) ** 2).sum()
    return total


def test_the_penalty_is_the_sum_over_tasks_in_value_and_gradient():
    model = network()
    ewc = EWC(model, strength=7.0)
    assert ewc.penalty() == 0
    seen = tasks(model, ewc)
    expected = by_definition(model, seen, 7.0)
    assert ewc.penalty().item() == pytest.approx(expected.item(), rel=1e-5)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    found = torch.autograd.grad(ewc.penalty(), list(model.parameters()))
    assert all(torch.allclose(a.float(), b, rtol=1e-4, atol=1e-5) for a, b in zip(wanted, found, strict=True))


@pytest.mark.parametrize("piece", [arithmetic.BLOCK, 7])
@pytest.mark.parametrize("settings", [{}, {"dtype": torch.float64}, {"device": "cpu"}])
def test_add_gradient_adds_what_autograd_would(settings, piece, monkeypatch):
    monkeypatch.setattr(arithmetic, "BLOCK", piece)
    model = network()
    ewc = EWC(model, strength=3.0, **settings)
    tasks(model, ewc)
    x = torch.randn(6, 4)
    model(x).square().sum().backward()
    data = [p.grad.clone() for p in model.parameters()]
    ewc.add_gradient_()
    with torch.no_grad():
        value = ewc.penalty()
    added = [p.grad - g for p, g in zip(model.parameters(), data, strict=True)]
    wanted = torch.autograd.grad(ewc.penalty(), list(model.parameters()))
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(added, wanted, strict=True))
    assert value.item() == pytest.approx(ewc.penalty().item(), rel=1e-6)
    assert ewc.add_gradient_() is None


def test_the_penalty_can_be_differentiated_twice():
    model = network()
    ewc = EWC(model, strength=3.0)
    seen = tasks(model, ewc, 2)
    parameters = list(model.parameters())
    first = torch.autograd.grad(ewc.penalty(), parameters, create_graph=True)
    second = torch.autograd.grad(sum(g.sum() for g in first), parameters)
    for (name, _), found in zip(model.named_parameters(), second, strict=True):
        assert torch.allclose(found, 3.0 * (seen[0][1][name] + seen[1][1][name]), rtol=1e-5)


def test_parameters_of_any_layout_and_type_are_pulled_alike():
    """Transposed memory, half precision and a scalar take the way without pieces."""
    model = nn.ParameterDict(
        {
            "plain": nn.Parameter(torch.randn(6, 5)),
            "turned": nn.Parameter(torch.randn(5, 6).t()),
            "short": nn.Parameter(torch.randn(6, 5).bfloat16()),
            "one": nn.Parameter(torch.randn(())),
            "none": nn.Parameter(torch.randn(0, 3)),
        }
    )
    ewc = EWC(model, strength=2.0)
    ewc.consolidate({name: torch.full(p.shape, 0.5) for name, p in model.named_parameters()})
    centres = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    wander(model)
    value = ewc.penalty()
    ewc.add_gradient_()
    expected = sum(0.5 * (p.detach().float() - centres[name]).square().sum() for name, p in model.named_parameters())
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, p in model.named_parameters():
        assert p.grad.dtype == p.dtype
        assert torch.allclose(p.grad.float(), p.detach().float() - centres[name], rtol=1e-2, atol=1e-6)


def test_without_gradients_they_are_made():
    model = network()
    ewc = EWC(model)
    tasks(model, ewc, 1)
    ewc.add_gradient_()
    wanted = torch.autograd.grad(ewc.penalty(), list(model.parameters()))
    assert all(torch.allclose(p.grad, w, atol=1e-6) for p, w in zip(model.parameters(), wanted, strict=True))


def test_zero_importance_has_no_force():
    model = network()
    ewc = EWC(model, strength=1e9)
    tasks(model, ewc)
    ewc.add_gradient_()
    assert (model[0].weight.grad[0] == 0).all()
    assert torch.isfinite(ewc.penalty())


def test_strength_and_scale_are_one_thing():
    values = []
    for factor, strength in ((1.0, 50.0), (50.0, 1.0)):
        model = network()
        ewc = EWC(model, strength=strength)
        for k in range(3):
            torch.manual_seed(k)
            wander(model)
            ewc.consolidate(importance_of(model, k) * factor)
        values.append(ewc.penalty().item())
    assert values[0] == pytest.approx(values[1], rel=1e-5)


def test_memory_does_not_grow_with_tasks():
    model = network()
    ewc = EWC(model)
    sizes = []
    for k in range(5):
        wander(model)
        ewc.consolidate(importance_of(model, k))
        sizes.append(sum(t.numel() for part in ("weight", "centre") for t in ewc.state_dict()[part].values()))
    assert len(set(sizes)) == 1
    assert ewc.tasks == 5


def test_online_keeps_the_last_centre_and_lets_the_past_fade_once():
    model = network()
    ewc = EWC(model, strength=2.0, online=0.5)
    seen = tasks(model, ewc)
    faded = {n: 0.25 * seen[0][1][n] + 0.5 * seen[1][1][n] + seen[2][1][n] for n, _ in model.named_parameters()}
    expected = by_definition(model, [(seen[2][0], faded)], 2.0)
    assert ewc.penalty().item() == pytest.approx(expected.item(), rel=1e-5)


def test_heads_that_a_task_does_not_know_are_not_held_by_it():
    model = network()
    ewc = EWC(model)
    first = importance_of(model, 0)
    ewc.consolidate(first.restrict("^0"))
    wander(model)
    ewc.add_gradient_()
    assert model[2].weight.grad is None
    ewc.consolidate(importance_of(model, 1))
    wander(model)
    model.zero_grad()
    ewc.add_gradient_()
    assert model[2].weight.grad is not None
    held = EWC(model, exclude="^2")
    held.consolidate(first)
    assert set(held.state_dict()["weight"]) == {"0.weight", "0.bias"}


def test_a_stopped_run_goes_on():
    model = network()
    ewc = EWC(model, strength=4.0)
    tasks(model, ewc)
    twin = copy.deepcopy(model)
    resumed = EWC(twin)
    resumed.load_state_dict(torch.load(_saved(ewc.state_dict()), weights_only=True))
    assert resumed.penalty().item() == ewc.penalty().item()
    for one, net in ((ewc, model), (resumed, twin)):
        torch.manual_seed(5)
        wander(net)
        one.consolidate(importance_of(net, 9))
        wander(net)
    assert resumed.penalty().item() == ewc.penalty().item()
    with pytest.raises(SquisherError, match="state of an EWC"):
        resumed.load_state_dict({"strength": 1.0})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"centre": {"0.weight": torch.zeros(1)}}, r"0\.weight.*shape"),
        ({"strength": -1.0}, "strength"),
        ({"online": 5}, "online"),
        ({"scale": {"x": 1}}, "scale"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change, words):
    """A centre of one entry was spread over the whole tensor, and a negative strength pushed weights away."""
    model = network()
    ewc = EWC(model)
    tasks(model, ewc)
    state = ewc.state_dict()
    changed = {**state, **{key: {**state[key], **new} if key == "centre" else new for key, new in change.items()}}
    fresh = EWC(model)
    with pytest.raises(SquisherError, match=words):
        fresh.load_state_dict(changed)
    assert fresh.tasks == 0
    assert fresh.penalty().item() == 0


def test_a_state_goes_to_a_model_that_calls_a_tied_weight_by_its_other_name():
    def tied(order):
        model = nn.Module()
        weight = nn.Parameter(torch.ones(3, 2))
        for name in order:
            model.add_module(name, nn.Embedding(3, 2) if name == "embedding" else nn.Linear(2, 3, bias=False))
            model.get_submodule(name).weight = weight
        return model

    one, other = tied(["embedding", "head"]), tied(["head", "embedding"])
    ewc = EWC(one)
    ewc.consolidate({"embedding.weight": torch.ones(3, 2)})
    resumed = EWC(other)
    resumed.load_state_dict(ewc.state_dict())
    assert list(resumed.state_dict()["weight"]) == ["head.weight"]


def _saved(state):
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def test_bfloat16_importances_keep_the_centre_exact():
    model = network()
    ewc = EWC(model, dtype=torch.bfloat16)
    ewc.consolidate(importance_of(model, 0))
    assert ewc.penalty() == 0
    assert ewc.state_dict()["weight"]["0.bias"].dtype == torch.bfloat16
    assert ewc.state_dict()["centre"]["0.bias"].dtype == torch.float32


def test_the_scale_of_the_first_task_binds_the_others():
    model = network()
    known = {"kind": "squisher", "bias_corrected": True, "loss_reduction": "mean"}
    ewc = EWC(model)
    ewc.consolidate(importance_of(model, 0, **known, batch_size=8))
    assert ewc.totals[0] == pytest.approx(8 * sum(t.sum().item() for t in importance_of(model, 0).values()), rel=1e-5)
    with pytest.raises(ScaleError, match="batch_size"):
        ewc.consolidate(importance_of(model, 1, **known))
    assert ewc.tasks == 1
    ewc.consolidate(importance_of(model, 1))  # a Fisher is on that scale
    loose = EWC(model)
    loose.consolidate(importance_of(model, 0, **known))
    with pytest.raises(ScaleError, match="differ in|can be brought"):
        loose.consolidate(importance_of(model, 1, **known, batch_size=8))
    loose.consolidate(importance_of(model, 1, **known, batch_size=8), scale="stored")


def test_the_importance_itself_is_not_kept():
    model = network()
    for settings in ({}, {"kind": "squisher", "loss_reduction": "mean", "bias_corrected": True}):
        ewc = EWC(model)
        importance = importance_of(model, 0, **settings) * 2.0
        watched = weakref.ref(importance._tensors["0.weight"])
        ewc.consolidate(importance)
        del importance
        gc.collect()  # errors that were caught hold frames for a while
        assert watched() is None


def test_growth_between_tasks_is_warned_of():
    model = network()
    ewc = EWC(model)
    ewc.consolidate(dict(importance_of(model, 0)))
    with pytest.warns(SquisherWarning, match="Tracker"):
        ewc.consolidate({n: 1e4 * t for n, t in importance_of(model, 1).items()})


def test_the_feedback_trap_and_the_tracker_that_avoids_it():
    """Adam's own state, used as it is with a large factor, holds the square of the penalty's gradient; data alone does not."""

    def run(tracked):
        torch.manual_seed(0)
        model = nn.Linear(8, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        tracker = squisher.Tracker(model)
        ewc = EWC(model, strength=1e6)
        for _ in range(4):
            teacher = torch.randn(8)
            for _ in range(60):
                x = torch.randn(32, 8)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), (x @ teacher > 0).long()).backward()
                tracker.observe()
                ewc.add_gradient_()
                optimizer.step()
            ewc.consolidate(dict(squisher.extract(tracker if tracked else optimizer, model)))
            tracker.reset()
        return ewc.totals

    with pytest.warns(SquisherWarning, match="times the last one's"):
        raw = run(tracked=False)
    clean = run(tracked=True)
    assert max(clean) / min(clean) < 10
    assert raw[-1] / raw[0] > 1e6


def test_strength_like():
    model = network()
    small, large = importance_of(model, 0), importance_of(model, 0) * 40.0
    assert strength_like(small, large, 3.0) == pytest.approx(120.0)
    ewc = EWC(model)
    with pytest.raises(SquisherError, match="consolidate one first"):
        ewc.strength_like(large, 3.0)
    ewc.consolidate(small)
    assert ewc.strength_like(large, 3.0) == pytest.approx(120.0, rel=1e-5)
    with pytest.raises(SquisherError, match="0 everywhere"):
        strength_like({"a": torch.zeros(2)}, {"a": torch.ones(2)}, 1.0)
    with pytest.raises(NamingError, match="share no parameter"):
        strength_like({"a": torch.ones(2)}, {"b": torch.ones(2)}, 1.0)


def test_errors():
    model = network()
    for arguments in (
        {"strength": -1},
        {"strength": float("nan")},
        {"online": 0.0},
        {"online": 2},
        {"online": "0.9"},
        {"dtype": torch.float16},
    ):
        with pytest.raises(SquisherError, match=next(iter(arguments)).replace("dtype", "float32")):
            EWC(model, **arguments)
    ewc = EWC(model)
    with pytest.raises(NamingError, match=r"'0\.wieght'.*'0\.weight'"):
        ewc.consolidate({"0.wieght": torch.ones(5, 4)})
    with pytest.raises(NamingError, match=r"\(2, 4\).*\(5, 4\)"):
        ewc.consolidate({"0.weight": torch.ones(2, 4)})
    assert ewc.tasks == 0


def test_it_is_shown_in_one_line():
    ewc = EWC(nn.Linear(2, 3), strength=10.0)
    ewc.consolidate({"weight": torch.ones(3, 2)})
    assert repr(ewc) == "EWC(strength 10: 1 tasks, 1 tensors, 6 values held)"


def test_a_run_that_stopped_in_its_first_task_goes_on():
    resumed = EWC(network())
    resumed.load_state_dict(EWC(network(), strength=3.0).state_dict())
    assert (resumed.strength, resumed.tasks, resumed.penalty().item()) == (3.0, 0, 0.0)


def test_a_resumed_run_still_refuses_another_scale():
    model = network()
    ewc = EWC(model)
    ewc.consolidate(importance_of(model, 0, kind="squisher"))  # no batch size: on no scale of its own
    resumed = EWC(model)
    resumed.load_state_dict(torch.load(_saved(ewc.state_dict()), weights_only=True))
    for one in (ewc, resumed):
        with pytest.raises(ScaleError):
            one.consolidate(importance_of(model, 1, kind="fisher", unit="example"))
        one.consolidate(importance_of(model, 1, kind="squisher"))


def test_frozen_parameters_stay_where_they_are():
    model = network()
    ewc = EWC(model, strength=3.0)
    tasks(model, ewc, 1)
    model[0].weight.requires_grad_(False)
    before = model[0].weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    ewc.add_gradient_()
    assert model[0].weight.grad is None
    optimizer.step()
    ewc.pull_(optimizer)
    assert torch.equal(model[0].weight, before)
    assert model[0].bias.grad is not None


def test_a_replaced_parameter_is_protected_by_its_name():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    ones = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    ewc = squisher.EWC(model, 2.0)
    ewc.consolidate(ones)
    old = model[1]
    model[1] = nn.Linear(4, 2)
    with torch.no_grad():
        both = zip(model[1].parameters(), old.parameters(), strict=True)
        expected = sum(float((a - b).square().sum()) for a, b in both)
    assert ewc.penalty().item() == pytest.approx(expected, rel=1e-5)
    ewc.add_gradient_()
    assert model[1].weight.grad is not None
    assert ewc.is_of(model)
    other = squisher.EWC(model, 2.0)
    other.consolidate(ones)
    model[1].weight = nn.Parameter(model[1].weight.detach() + 3)
    assert other.penalty().item() == pytest.approx(9 * 8, rel=1e-5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[1].weight.grad = torch.zeros(2, 4)
    optimizer.step()
    other.pull_(optimizer)
    assert other.penalty().item() < 9 * 8 * 0.8


@pytest.mark.parametrize("replaced", [nn.Linear(4, 3), nn.Identity()])
def test_a_protected_parameter_that_is_gone_is_said_to_be(replaced):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    ewc = squisher.EWC(model)
    ewc.consolidate({name: torch.ones_like(p) for name, p in model.named_parameters()})
    model[1] = replaced
    now = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    for use in (ewc.penalty, ewc.add_gradient_, lambda: ewc.consolidate(now)):
        with pytest.raises(NamingError, match=r"EWC protects '1\.weight' with the shape \(2, 4\)"):
            use()
    without = squisher.EWC(model, exclude=r"^1\.")
    without.load_state_dict(ewc.state_dict())
    assert without.penalty().item() == 0
    assert set(without.state_dict()["weight"]) == {"0.weight", "0.bias"}


def test_importances_that_add_up_beyond_float32_are_refused():
    """They would be infinite, and infinite times no distance is NaN in every gradient."""
    model = network()
    ewc = EWC(model)
    with pytest.raises(SquisherError, match="float32"):
        ewc.consolidate({n: torch.full(p.shape, 1e40, dtype=torch.float64) for n, p in model.named_parameters()})
    ewc.consolidate({n: torch.full(p.shape, 3e38) for n, p in model.named_parameters()})
    with pytest.raises(SquisherError, match="float32"):
        ewc.consolidate({n: torch.full(p.shape, 3e38) for n, p in model.named_parameters()})
    assert ewc.tasks == 1
    assert ewc.penalty() == 0


def test_a_sparse_gradient_gets_the_force_of_every_row():
    model = nn.Embedding(4, 2, sparse=True)
    ewc = EWC(model)
    ewc.consolidate({"weight": torch.ones(4, 2)})
    with torch.no_grad():
        model.weight.add_(1.0)
    model(torch.tensor([1])).sum().backward()
    ewc.add_gradient_()
    assert torch.allclose(model.weight.grad, torch.tensor([[1.0, 1.0], [2.0, 2.0], [1.0, 1.0], [1.0, 1.0]]))


def test_a_plain_mapping_first_does_not_make_every_scale_alike():
    model = network()
    ewc, stored = EWC(model), EWC(model)
    plain = dict(importance_of(model, 0))
    ewc.consolidate(plain)
    stored.consolidate(plain, scale="stored")
    known = importance_of(model, 1, kind="squisher", batch_size=32, loss_reduction="mean", unit="example")
    with pytest.raises(ScaleError):
        ewc.consolidate(known)
    stored.consolidate(known)
    ewc.consolidate(plain)
    ewc.consolidate(known, scale="stored")
    assert (ewc.tasks, stored.tasks) == (3, 2)


def test_memory_of_an_importance_may_be_used_again():
    model = network()
    importance = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    ewc = EWC(model)
    ewc.consolidate(importance)
    wander(model)
    before = ewc.penalty().detach()
    for tensor in importance.values():
        tensor.zero_()
    assert before > 0
    assert torch.equal(ewc.penalty().detach(), before)


@pytest.mark.parametrize("first", ["auto", "stored"])
def test_the_scale_of_every_task_is_checked(first):
    model = network()
    ewc = EWC(model)
    ewc.consolidate(importance_of(model, 0), scale=first)
    with pytest.raises(SquisherError, match="scale"):
        ewc.consolidate(importance_of(model, 1), scale="as_fischer")
    if first == "stored":
        with pytest.raises(ScaleError, match="as they are stored"):
            ewc.consolidate(importance_of(model, 1), scale="as_fisher")
    assert ewc.tasks == 1
    with pytest.raises(SquisherError, match="not the state of an EWC"):
        ewc.load_state_dict(None)
