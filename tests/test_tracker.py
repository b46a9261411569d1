from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from squisher.errors import NamingError, SquisherError, SquisherWarning
from squisher.tracker import Tracker
from tests.processes import run_together


def reasons(tracker: Tracker) -> dict[str, str]:
    return {name: str(why.reason) for name, why in tracker.absent().items()}


class Lion(torch.optim.Optimizer):
    """Sign of an average of gradients: keeps no squares."""

    def __init__(self, parameters: Iterable[Tensor], lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    p.sub_((0.9 * average + 0.1 * p.grad).sign(), alpha=group["lr"])
                    average.lerp_(p.grad, 0.01)


class Naive:
    """The definition: one parameter at a time, in float64."""

    def __init__(self, model: nn.Module, beta2: float) -> None:
        self.model, self.beta2 = model, beta2
        self.values: dict[str, Tensor] = {}
        self.steps: dict[str, int] = {}

    def observe(self) -> None:
        for name, p in self.model.named_parameters():
            if p.grad is not None:
                old = self.values.get(name, torch.zeros(p.shape, dtype=torch.float64))
                self.values[name] = self.beta2 * old + (1 - self.beta2) * p.grad.to_dense().double() ** 2
                self.steps[name] = self.steps.get(name, 0) + 1


def network(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias=bias), nn.Tanh(), nn.Linear(8, 3, bias=bias))


def batch(step: int, size: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def backward(model: nn.Module, step: int) -> None:
    model.zero_grad()
    x, y = batch(step)
    dtype = next(model.parameters()).dtype
    nn.functional.cross_entropy(model(x.to(dtype)).float(), y).backward()


def assert_same(tracker: Tracker, naive: Naive, rtol: float = 1e-5) -> None:
    found = {name: (value, step) for name, _, value, step in tracker.items()}
    assert found.keys() == naive.values.keys()
    for name, (value, step) in found.items():
        assert step == naive.steps[name]
        torch.testing.assert_close(value.double(), naive.values[name], rtol=rtol, atol=1e-30, msg=name)


def values(tracker: Tracker) -> dict[str, Tensor]:
    return {name: value.clone() for name, _, value, _ in tracker.items()}


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "lion": Lion,
    "muon": lambda p: torch.optim.Muon(p, lr=0.01),
    "adam with L2": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
}


NO_MUON = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")


@pytest.mark.parametrize(
    "make", [pytest.param(make, id=name, marks=NO_MUON if name == "muon" else ()) for name, make in OPTIMIZERS.items()]
)
@pytest.mark.parametrize("known", [True, False])
def test_equals_the_naive_loop(make: Callable[[Iterable[Tensor]], torch.optim.Optimizer], known: bool) -> None:
    model = network(bias=False)
    optimizer = make(model.parameters())
    tracker, naive = Tracker(model, optimizer if known else None, beta2=0.9), Naive(model, 0.9)
    for step in range(20):
        backward(model, step)
        assert tracker.observe() is True
        naive.observe()
        optimizer.step()
    assert_same(tracker, naive)
    assert {step for *_, step in tracker.items()} == {20}


@pytest.mark.parametrize("foreach", [True, False])
def test_equals_what_plain_adam_keeps(foreach: bool) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=foreach)
    tracker = Tracker(model, optimizer)
    for step in range(50):
        backward(model, step)
        tracker.observe()
        optimizer.step()
    items = list(tracker.items())
    assert len(items) == 4
    for _, parameter, value, step in items:
        state = optimizer.state[parameter]
        assert step == int(state["step"])
        torch.testing.assert_close(value, state["exp_avg_sq"], rtol=1e-6, atol=0)


def test_a_constant_gradient_gives_its_square_after_bias_correction() -> None:
    model = nn.Linear(2, 1, bias=False)
    tracker = Tracker(model)
    for step in range(1, 3001):
        model.weight.grad = torch.tensor([[3.0, 1e-4]])
        tracker.observe()
        if step in (1, 10, 1000, 3000):
            ((_, _, value, count),) = tracker.items()
            corrected = value / (1 - tracker.beta2**count)
            torch.testing.assert_close(corrected, torch.tensor([[9.0, 1e-8]]), rtol=1e-4, atol=0)


def test_does_not_see_clipping_nor_a_penalty_but_the_optimizer_does() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    tracker, naive = Tracker(model, optimizer, beta2=0.999), Naive(model, 0.999)
    assert tracker.after_clipping is False
    for step in range(10):
        backward(model, step)
        naive.observe()
        tracker.observe()
        for p in model.parameters():
            p.grad.add_(p.detach(), alpha=100.0)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
    assert_same(tracker, naive)
    for _, parameter, value, _ in tracker.items():
        assert not torch.allclose(value, optimizer.state[parameter]["exp_avg_sq"], rtol=0.5, atol=0)


def test_accumulated_micro_batches_are_one_observation() -> None:
    whole, parts = network(), network()
    one, many = Tracker(whole), Tracker(parts)
    for step in range(5):
        backward(whole, step)
        one.observe()
        parts.zero_grad()
        for x, y in zip(*(t.split(4) for t in batch(step)), strict=True):
            (nn.functional.cross_entropy(parts(x), y) / 4).backward()
        many.observe()
    for (_, _, a, n), (_, _, b, m) in zip(one.items(), many.items(), strict=True):
        assert n == m == 5
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("automatic", [True, False])
def test_with_a_scaler_the_unscaled_gradient_is_seen_and_its_skipped_steps_are_skipped(
    automatic: bool, fused: bool
) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler(device="cpu", init_scale=2.0**12)
    tracker = Tracker(model, optimizer, automatic=automatic, scaler=scaler)
    for step in range(8):
        optimizer.zero_grad()
        x, y = batch(step)
        scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
        if step == 3:
            model[2].weight.grad[1, 1] = float("inf")
        if not automatic:
            scaler.unscale_(optimizer)
            assert tracker.observe() is (step != 3)
        scaler.step(optimizer)
        scaler.update()
    # A scaler does not even call the step of an optimizer that is not fused.
    assert tracker.skipped == (0 if automatic and not fused else 1)
    for _, parameter, value, step in tracker.items():
        assert step == 7 == int(optimizer.state[parameter]["step"])
        torch.testing.assert_close(value, optimizer.state[parameter]["exp_avg_sq"], rtol=1e-5, atol=0)


def test_scaled_gradients_are_refused_where_the_scaler_is_known() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(device="cpu")
    tracker = Tracker(model, optimizer, scaler=scaler)
    x, y = batch(0)
    with pytest.raises(SquisherError, match="scaler cannot unscale"):
        tracker.observe()
    scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
    with pytest.raises(SquisherError, match=r"scaler.unscale_\(optimizer\)"):
        tracker.observe()
    assert not list(tracker.items())
    scaler.step(optimizer)
    with pytest.raises(SquisherError, match=r"called after scaler.step\(\)"):
        tracker.observe()


def test_a_disabled_scaler_changes_nothing() -> None:
    model = network()
    scaler = torch.amp.GradScaler(device="cpu", enabled=False)
    tracker, naive = Tracker(model, torch.optim.SGD(model.parameters()), scaler=scaler), Naive(model, 0.999)
    backward(model, 0)
    tracker.observe()
    naive.observe()
    assert_same(tracker, naive)


def test_a_step_that_is_not_finite_leaves_everything_as_it_was() -> None:
    model = network()
    tracker = Tracker(model)
    backward(model, 0)
    tracker.observe()
    before = values(tracker)
    model[0].bias.grad[0] = float("nan")
    assert tracker.observe() is False
    assert tracker.skipped == 1
    assert_equal(values(tracker), before)
    assert {step for *_, step in tracker.items()} == {1}


def test_automatic_observes_before_each_step_and_says_so() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with Tracker(model, optimizer, automatic=True) as tracker:
        assert tracker.after_clipping is True
        for step in range(10):
            backward(model, step)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        optimizer.zero_grad()
        optimizer.step()  # nothing to see is not an error here
    for _, parameter, value, step in tracker.items():
        assert step == 10
        torch.testing.assert_close(value, optimizer.state[parameter]["exp_avg_sq"], rtol=1e-6, atol=0)
    backward(model, 11)
    optimizer.step()
    assert {step for *_, step in tracker.items()} == {10}, "closed, so it no longer sees"
    assert not optimizer._optimizer_step_pre_hooks


def test_automatic_refuses_closures_and_calls() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters())
    tracker = Tracker(model, optimizer, automatic=True)
    backward(model, 0)
    for step in (lambda: optimizer.step(lambda: 0.0), lambda: optimizer.step(closure=lambda: 0.0)):
        with pytest.raises(SquisherError, match=r"closure.*observe\(\)"):
            step()
    with pytest.raises(SquisherError, match="automatic=True"):
        tracker.observe()
    optimizer.step(None)
    assert {step for *_, step in tracker.items()} == {1}


def test_none_leaves_alone_and_zeros_decay() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    a, b = model["a"].weight, model["b"].weight
    tracker = Tracker(model, beta2=0.5)
    a.grad = b.grad = torch.full((2, 2), 2.0)
    tracker.observe()
    a.grad, b.grad = None, torch.zeros(2, 2)
    tracker.observe()
    found = {name: (value, step) for name, _, value, step in tracker.items()}
    assert found["a.weight"][1] == 1
    assert found["b.weight"][1] == 2
    assert torch.equal(found["a.weight"][0], torch.full((2, 2), 2.0))
    assert torch.equal(found["b.weight"][0], torch.full((2, 2), 1.0))


def test_frozen_unfrozen_and_added_parameters() -> None:
    model = network()
    model[0].requires_grad_(False)
    tracker, naive = Tracker(model, beta2=0.9), Naive(model, 0.9)

    def run(start: int) -> None:
        for step in range(start, start + 3):
            backward(model, step)
            tracker.observe()
            naive.observe()

    run(0)
    assert reasons(tracker) == {"0.weight": "frozen", "0.bias": "frozen"}
    model[0].requires_grad_(True)
    model[2].requires_grad_(False)  # and the gradient of the last step stays where it was until zero_grad
    assert model[2].weight.grad is not None
    with pytest.raises(SquisherError, match="found no gradient"):
        tracker.observe()
    run(3)
    model.append(nn.Linear(3, 3))
    run(6)
    assert_same(tracker, naive)
    steps = {name: step for name, _, _, step in tracker.items()}
    assert steps == {"0.weight": 6, "0.bias": 6, "2.weight": 3, "2.bias": 3, "3.weight": 3, "3.bias": 3}
    assert tracker.absent() == {}


def test_the_gradient_that_a_frozen_parameter_still_holds_is_not_observed() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = Tracker(model, optimizer)
    backward(model, 0)
    tracker.observe()
    optimizer.step()
    model[2].requires_grad_(False)
    assert model[2].weight.grad is not None
    tracker.observe()
    assert [step for *_, step in tracker.items()] == [2, 2, 1, 1]


def test_only_the_optimizers_parameters_are_observed() -> None:
    model = network()
    outside = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*model[2].parameters(), outside], lr=0.1)
    tracker = Tracker(model, optimizer)
    backward(model, 0)
    tracker.observe()
    assert [name for name, *_ in tracker.items()] == ["2.weight", "2.bias"]
    assert reasons(tracker) == {"0.weight": "not_in_optimizer", "0.bias": "not_in_optimizer"}


def test_an_unused_parameter_is_absent() -> None:
    model = network()
    model.register_parameter("spare", nn.Parameter(torch.zeros(2)))
    tracker = Tracker(model, torch.optim.SGD(model.parameters()))
    backward(model, 0)
    tracker.observe()
    assert reasons(tracker) == {"spare": "no_gradient"}


def test_tied_weights_are_observed_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    tracker = Tracker(model, torch.optim.SGD(model.parameters()))
    model(torch.ones(2, 3)).sum().backward()
    tracker.observe()
    ((name, parameter, value, _),) = tracker.items()
    assert name == "0.weight"
    torch.testing.assert_close(value, 0.001 * parameter.grad**2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_average_is_float32_whatever_the_parameters_are(dtype: torch.dtype) -> None:
    model = network().to(dtype)
    tracker, naive = Tracker(model), Naive(model, 0.999)
    for step in range(5):
        backward(model, step)
        tracker.observe()
        naive.observe()
    assert_same(tracker, naive)
    assert {value.dtype for _, _, value, _ in tracker.items()} == {torch.float32}


def test_a_bfloat16_gradient_does_not_stall() -> None:
    model = nn.Linear(1, 1, bias=False).bfloat16()
    tracker = Tracker(model)
    model.weight.grad = torch.ones(1, 1, dtype=torch.bfloat16)
    for _ in range(3000):
        tracker.observe()
    ((_, _, value, step),) = tracker.items()
    assert value.item() / (1 - 0.999**step) == pytest.approx(1.0, rel=1e-4)


def test_float64_averages() -> None:
    model = network().double()
    tracker, naive = Tracker(model, dtype=torch.float64), Naive(model, 0.999)
    for step in range(5):
        backward(model, step)
        tracker.observe()
        naive.observe()
    assert_same(tracker, naive, rtol=1e-12)


def test_sparse_gradients_with_repeated_rows() -> None:
    sparse, dense = (nn.Embedding(10, 4, sparse=kind) for kind in (True, False))
    dense.load_state_dict(sparse.state_dict())
    one, other = Tracker(sparse, beta2=0.9), Tracker(dense, beta2=0.9)
    for indices in ([1, 1, 3], [3, 5, 5, 5], [0]):
        for model, tracker in ((sparse, one), (dense, other)):
            model.zero_grad()
            (model(torch.tensor(indices)) ** 3).sum().backward()
            tracker.observe()
    assert sparse.weight.grad.is_sparse
    for (_, _, a, n), (_, _, b, m) in zip(one.items(), other.items(), strict=True):
        assert n == m == 3
        torch.testing.assert_close(a, b, rtol=1e-5, atol=0)


def test_repeated_rows_of_a_short_dtype_are_summed_in_float32() -> None:
    model = nn.Embedding(2, 1, sparse=True, dtype=torch.bfloat16)
    tracker = Tracker(model, beta2=0.0)
    model(torch.zeros(301, dtype=torch.int64)).sum().backward()
    tracker.observe()
    ((_, _, value, _),) = tracker.items()
    assert value.tolist() == [[301.0**2], [0.0]]  # bfloat16 would have said 300 or 302


def test_the_average_follows_a_model_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2, bias=False)
    tracker = Tracker(model)
    model.weight.grad = torch.ones(2, 2)
    tracker.observe()
    model.to("meta")
    model.weight.grad = torch.ones(2, 2, device="meta")
    monkeypatch.setattr("squisher.tracker.all_finite", lambda *_: True)  # meta tensors have no values
    tracker.observe()
    ((_, _, value, step),) = tracker.items()
    assert value.device.type == "meta"
    assert step == 2


def test_compiled_and_wrapped_models_keep_their_own_names() -> None:
    model = network()
    compiled = torch.compile(model, backend="eager")
    tracker = Tracker(compiled, torch.optim.SGD(model.parameters(), lr=0.1))
    backward(compiled, 0)
    tracker.observe()
    assert [name for name, *_ in tracker.items()] == [f"_orig_mod.{name}" for name, _ in model.named_parameters()]


def test_two_observations_without_a_step_are_noticed() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = Tracker(model, optimizer)
    for step in range(3):
        backward(model, step)
        tracker.observe()
        optimizer.step()
    backward(model, 4)
    tracker.observe()
    with pytest.warns(SquisherWarning, match="twice") as caught:
        tracker.observe()
    assert caught[0].filename == __file__
    assert {step for *_, step in tracker.items()} == {5}
    tracker.remove()
    tracker.observe()  # without hooks it cannot know
    assert not optimizer._optimizer_step_post_hooks


def test_a_skipped_step_is_not_an_observation_to_be_doubled() -> None:
    model = network()
    tracker = Tracker(model, torch.optim.SGD(model.parameters(), lr=0.1))
    backward(model, 0)
    model[0].bias.grad[0] = float("inf")
    assert tracker.observe() is False
    backward(model, 1)
    assert tracker.observe() is True


def test_the_optimizer_inside_a_wrapper_is_found() -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert Tracker(model, Wrapper(Wrapper(optimizer))).optimizer is optimizer


def test_an_optimizer_without_hooks_is_observed_by_calls_only() -> None:
    class Bare:
        def __init__(self, parameters: Iterable[Tensor]) -> None:
            self.param_groups = [{"params": list(parameters)}]

    model = network()
    tracker = Tracker(model, Bare(model[0].parameters()))
    backward(model, 0)
    tracker.observe()
    assert [name for name, *_ in tracker.items()] == ["0.weight", "0.bias"]
    with pytest.raises(SquisherError, match="Bare.*automatic=False"):
        Tracker(model, Bare(model.parameters()), automatic=True)


def test_resuming_gives_the_same_bits() -> None:
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, tracker: Tracker, numbers: range) -> None:
        for step in numbers:
            backward(model, step)
            if step == 2:
                model[0].bias.grad = None
            tracker.observe()
            optimizer.step()

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = Tracker(model, optimizer, beta2=0.99)
    steps(model, optimizer, tracker, range(5))
    model[0].bias.grad[0] = float("nan")
    tracker.observe()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "tracker": tracker.state_dict()}, file)
    model[0].bias.grad[0] = 0
    steps(model, optimizer, tracker, range(5, 12))

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = network()
    again.load_state_dict(saved["model"])
    optimizer = torch.optim.SGD(again.parameters(), lr=0.1)
    resumed = Tracker(again, optimizer, beta2=0.99)
    resumed.load_state_dict(saved["tracker"])
    steps(again, optimizer, resumed, range(5, 12))
    assert_equal(values(resumed), values(tracker))
    assert {n: s for n, _, _, s in resumed.items()} == {n: s for n, _, _, s in tracker.items()}
    assert resumed.skipped == tracker.skipped == 1
    assert resumed.state_dict()["steps"]["0.bias"] == 11


def test_loading_copies_and_keeps_that_gradients_were_clipped() -> None:
    model = network()
    source = Tracker(model, torch.optim.SGD(model.parameters()), automatic=True)
    backward(model, 0)
    source.optimizer.step()
    target = Tracker(model)
    target.load_state_dict(source.state_dict())
    assert target.after_clipping is True
    before = values(source)
    target.observe()
    assert_equal(values(source), before)


def test_reset_forgets() -> None:
    model = network()
    tracker, fresh = Tracker(model), Tracker(model)
    backward(model, 0)
    tracker.observe()
    tracker.reset()
    assert not list(tracker.items())
    backward(model, 1)
    tracker.observe()
    fresh.observe()
    assert_equal(values(tracker), values(fresh))


def test_states_that_do_not_fit_are_refused_and_nothing_is_loaded() -> None:
    model = network()
    source = Tracker(model)
    backward(model, 0)
    source.observe()
    good = source.state_dict()
    tracker = Tracker(model)

    renamed = copy.deepcopy(good)
    for part in ("values", "steps"):
        renamed[part]["0.wieght"] = renamed[part].pop("0.weight")
    with pytest.raises(NamingError, match="'0.wieght'.*'0.weight'"):
        tracker.load_state_dict(renamed)

    reshaped = copy.deepcopy(good)
    reshaped["values"]["2.weight"] = torch.zeros(4, 8)
    with pytest.raises(SquisherError, match=r"'2.weight'.*\(4, 8\).*\(3, 8\)"):
        tracker.load_state_dict(reshaped)

    with pytest.raises(SquisherError, match="beta2=0.999.*beta2=0.9"):
        Tracker(model, beta2=0.9).load_state_dict(good)
    with pytest.raises(SquisherError, match="state_dict.*beta2, after_clipping, skipped"):
        tracker.load_state_dict({"steps": {}, "values": {}})
    with pytest.raises(SquisherError, match="steps and values"):
        tracker.load_state_dict({**good, "steps": {}})
    assert not list(tracker.items())


def test_wrong_arguments_are_refused() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(SquisherError, match="Module.*SGD"):
        Tracker(optimizer)
    with pytest.raises(SquisherError, match="Optimizer.*list"):
        Tracker(model, [1])
    for beta2 in (1.0, -0.1, float("nan"), "0.9", True):
        with pytest.raises(SquisherError, match="0 <= beta2 < 1"):
            Tracker(model, beta2=beta2)
    with pytest.raises(SquisherError, match="float32 or float64.*bfloat16"):
        Tracker(model, dtype=torch.bfloat16)
    with pytest.raises(SquisherError, match="automatic=True.*optimizer"):
        Tracker(model, automatic=True)
    with pytest.raises(SquisherError, match="scaler=.*optimizer"):
        Tracker(model, scaler=torch.amp.GradScaler(device="cpu"))
    with pytest.raises(SquisherError, match="optimizer's parameters"):
        Tracker(copy.deepcopy(model), optimizer)


def test_observing_at_the_wrong_moment_is_refused() -> None:
    model = network()
    with pytest.raises(SquisherError, match=r"no gradient.*backward\(\)"):
        Tracker(model).observe()


def test_complex_and_resized_parameters_are_refused_by_name() -> None:
    model = nn.Linear(2, 2, dtype=torch.complex64)
    model.weight.grad = torch.ones_like(model.weight)
    with pytest.raises(SquisherError, match="'weight' is complex"):
        Tracker(model).observe()
    model = nn.Embedding(4, 2)
    tracker = Tracker(model)
    model.weight.grad = torch.ones(4, 2)
    tracker.observe()
    model.weight = nn.Parameter(torch.zeros(5, 2))
    model.weight.grad = torch.ones(5, 2)
    with pytest.raises(SquisherError, match=r"'weight'.*\(4, 2\).*\(5, 2\)"):
        tracker.observe()


def _worker(rank: int, case: dict[str, Any]) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def loaded() -> nn.Module:
        model = network()
        model.load_state_dict(case["weights"])
        return model

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tracker:
        tracker = Tracker(model, optimizer, beta2=0.9)
        for step, (x, y) in enumerate(case["batches"]):
            optimizer.zero_grad()
            half = slice(8 * rank, 8 * rank + 8)
            nn.functional.cross_entropy(model(x[half]), y[half]).backward()
            tracker.observe()
            if step + 1 < len(case["batches"]):
                optimizer.step()
        return tracker

    model = loaded()
    local: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: local.__setitem__(name, gradient.clone()))
    wrapped = nn.parallel.DistributedDataParallel(model)
    ddp = run(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))
    averaged = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    model = loaded()
    fully_shard(model[2], mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard")))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    sharded = run(model, optimizer)
    whole = {name: value.full_tensor() for name, _, value, _ in sharded.items()}
    optimizer.step()
    # Only one process holds the entry that is not finite; all must leave the step out.
    next(model.parameters()).grad.to_local()[:1].fill_(float("inf") if rank == 0 else 1.0)
    counted = sharded.observe()
    return {
        "ddp": ddp.state_dict(),
        "hook": local,
        "averaged": averaged,
        "sharded": whole,
        "sharded_shapes": {name: tuple(value.to_local().shape) for name, _, value, _ in sharded.items()},
        "counted": counted,
    }


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6), reason="torch has fully_shard in public from 2.6 on"
)
def test_two_processes_see_the_gradient_of_the_joined_batch(tmp_path: Path) -> None:
    model = network()
    batches = [batch(step) for step in range(4)]
    ranks = run_together(_worker, tmp_path, {"weights": model.state_dict(), "batches": batches})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alone = Tracker(model, optimizer, beta2=0.9)
    for step in range(4):
        backward(model, step)
        alone.observe()
        optimizer.step()
    expected = values(alone)
    assert_equal(ranks[0]["ddp"]["values"], ranks[1]["ddp"]["values"])
    for name, right in expected.items():
        torch.testing.assert_close(ranks[0]["ddp"]["values"][f"module.{name}"], right, rtol=1e-4, atol=1e-12)
        torch.testing.assert_close(ranks[0]["sharded"][name], right, rtol=1e-4, atol=1e-12)
        assert ranks[0]["ddp"]["steps"][f"module.{name}"] == 4

        # A gradient hook sees each process's own gradient, which the observation does not.
        first, second, averaged = ranks[0]["hook"][name], ranks[1]["hook"][name], ranks[0]["averaged"][name]
        assert not torch.allclose(first, second, rtol=0.01)
        assert not torch.allclose(first, averaged, rtol=0.01)
        torch.testing.assert_close((first + second) / 2, averaged, rtol=1e-4, atol=1e-7)
    assert ranks[0]["sharded_shapes"]["0.weight"] == (4, 6)
    assert [rank["counted"] for rank in ranks] == [False, False]


def test_it_is_shown_in_one_line():
    model = nn.Linear(2, 1)
    tracker = Tracker(model)
    model(torch.ones(3, 2)).sum().backward()
    tracker.observe()
    assert repr(tracker) == "Tracker(beta2 0.999: 2 tensors, 1 steps observed, 0 skipped)"
