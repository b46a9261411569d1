"""The Fisher while you train: `Tracker(per="example")` against one example at a time, in float64, averaged by hand."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import squisher
from squisher import SquisherError, Tracker
from squisher.errors import SquisherWarning
from squisher.measure.training.step import StepPass
from tests.processes import run_together

BETA = 0.9


def squares_of(model: nn.Module, x: Tensor, loss_of: Callable[[nn.Module, Tensor, int], Tensor]) -> dict[str, Tensor]:
    """Return Σ_n (∇ loss of example n)², by the definition, in float64."""
    model = copy.deepcopy(model).double()
    x = x.double() if x.is_floating_point() else x
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for n in range(len(x)):
        model.zero_grad()
        loss_of(model, x[n : n + 1], n).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                sums[name] += p.grad.to_dense() ** 2
    return sums


class ByHand:
    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def add(self, sums: dict[str, Tensor], examples: int) -> None:
        for name, total in sums.items():
            old = self.values.get(name, torch.zeros_like(total))
            self.values[name] = BETA * old + (1 - BETA) * total / examples


def assert_same(tracker: Tracker, by_hand: ByHand, steps: int, rtol: float = 1e-4) -> None:
    found = {name: value for name, _, value, step in tracker.items() if step == steps}
    assert found.keys() == by_hand.values.keys()
    for name, value in found.items():
        expected = by_hand.values[name]
        limit = 1e-6 * float(expected.max())  # sums of many terms that cancel
        torch.testing.assert_close(value.double(), expected, rtol=rtol, atol=limit, msg=lambda m, n=name: f"{n}: {m}")


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Conv2d(4, 6, 3, stride=2),
        nn.BatchNorm2d(6).eval(), nn.Flatten(), nn.Linear(24, 3),
    )  # fmt: skip


class Tied(nn.Module):
    """A language model whose head is its embedding, with positions that are looked up once."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.places = nn.Embedding(5, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, dropout=dropout)
        self.norm, self.drop = nn.LayerNorm(8), nn.Dropout(dropout)

    def forward(self, ids: Tensor) -> Tensor:
        places = self.places(torch.arange(ids.shape[1])[None])
        hidden = self.drop(self.embedding(ids) + places)
        mixed, _ = self.attention(hidden, hidden, hidden, need_weights=False)
        return self.norm(hidden + mixed) @ self.embedding.weight.T


class Scaled(nn.Module):
    """A weight that is made of parameters (weight norm), and one used in an operation without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.parametrizations.weight_norm(nn.Linear(6, 5))
        self.power = nn.Parameter(torch.ones(5))
        self.outer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.sigmoid(self.inner(x)) ** self.power)


def inputs(kind: str, step: int, size: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    if kind == "tokens":
        ids = torch.randint(0, 11, (size, 5), generator=generator)
        labels = torch.randint(0, 11, (size, 5), generator=generator)
        return ids, labels.masked_fill(torch.rand(size, 5, generator=generator) < 0.3, -100)
    shape = (size, 2, 6, 6) if kind == "images" else (size, 6)
    return torch.randn(shape, generator=generator), torch.randint(0, 3, (size,), generator=generator)


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "mlp": (mlp, "vectors"),
    "cnn": (cnn, "images"),
    "tied": (Tied, "tokens"),
}


def mean_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    outputs = model(x)
    return F.cross_entropy(outputs.flatten(0, -2), y.flatten())


def sum_of(y: Tensor) -> Callable[[nn.Module, Tensor, int], Tensor]:
    return lambda m, x, n: F.cross_entropy(m(x).flatten(0, -2), y[n : n + 1].flatten(), reduction="sum")


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_definition_averaged_by_hand(name: str, every: int) -> None:
    torch.manual_seed(0)
    make, kind = MODELS[name]
    model, by_hand = make(), ByHand()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = Tracker(model, optimizer, beta2=BETA, per="example", every=every)
    for step in range(5):
        x, y = inputs(kind, step)
        if step % every == 0:
            by_hand.add(squares_of(model, x, sum_of(y)), len(x))
        optimizer.zero_grad()
        with tracker.step():
            mean_loss(model, x, y).backward()
        optimizer.step()
    assert_same(tracker, by_hand, steps=-(-5 // every))
    assert tracker.unit == ("sequence" if kind == "tokens" else "example")
    assert tracker.examples == 7 * -(-5 // every)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_an_example_without_a_label_is_not_counted_as_in_fisher(reduction: str) -> None:
    torch.manual_seed(0)
    model = Tied()
    x, y = inputs("tokens", 0)
    y[2:4] = -100
    tracker = Tracker(model, beta2=BETA, per="example")
    for labels in (y, torch.full_like(y, -100)):  # nothing counts in the second step
        with tracker.step():
            F.cross_entropy(model(x).flatten(0, 1), labels.flatten(), reduction=reduction).backward()
    expected = squisher.fisher(model, [(x, y)], likelihood="tokens", shift=0)
    assert tracker.examples == expected.provenance.examples == 5
    assert tracker.skipped == 1
    found = squisher.extract(tracker, model)
    for name in expected:
        assert torch.allclose(found[name], expected[name].to(found[name].dtype), rtol=1e-4, atol=1e-9), name


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": F.cross_entropy,
    "sum": lambda o, y: F.cross_entropy(o, y, reduction="sum"),
    "none, then mean": lambda o, y: F.cross_entropy(o, y, reduction="none").mean(),
    "label smoothing": lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1),
    "class weights": lambda o, y: F.cross_entropy(o, y, weight=torch.tensor([0.2, 1.0, 3.0]).to(o.dtype)),
    "squares": lambda o, y: F.mse_loss(o, F.one_hot(y, 3).to(o.dtype)),
    "own squares": lambda o, y: ((o - F.one_hot(y, 3)) ** 2).mean(),
    "masked": lambda o, y: (F.cross_entropy(o, y, reduction="none") * (y > 0)).sum() / (y > 0).sum(),
    "over examples first": lambda o, y: ((o - F.one_hot(y, 3)) ** 2).mean(0).sum(),
    "bernoulli": lambda o, y: F.binary_cross_entropy_with_logits(o, F.one_hot(y, 3).to(o.dtype)),
    "weighted distances": lambda o, y: F.l1_loss(o, F.one_hot(y, 3).to(o.dtype), weight=(1.0 + y)[:, None].expand(-1, 3), reduction="sum") / 3,
    "of log probabilities": lambda o, y: F.nll_loss(F.log_softmax(o, -1), y),
    "its exponential": lambda o, y: F.cross_entropy(o, y).exp(),
    "labels first": lambda o, y: F.mse_loss(F.one_hot(y, 3).to(o.dtype), o),
    "poisson": lambda o, y: F.poisson_nll_loss(o, F.one_hot(y, 3).to(o.dtype)),
    "variances": lambda o, y: F.gaussian_nll_loss(o, F.one_hot(y, 3).to(o.dtype), o.exp()),
}  # fmt: skip
UNREDUCED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "label smoothing": lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1, reduction="sum"),
    "class weights": lambda o, y: F.cross_entropy(o, y, weight=torch.tensor([0.2, 1.0, 3.0]).to(o.dtype), reduction="sum"),
    "squares": lambda o, y: ((o - F.one_hot(y, 3)) ** 2).sum(),
    "own squares": lambda o, y: ((o - F.one_hot(y, 3)) ** 2).sum(),
    "masked": lambda o, y: (F.cross_entropy(o, y, reduction="none") * (y > 0)).sum(),
    "over examples first": lambda o, y: ((o - F.one_hot(y, 3)) ** 2).sum(),
    "bernoulli": lambda o, y: F.binary_cross_entropy_with_logits(o, F.one_hot(y, 3).to(o.dtype), reduction="sum"),
    "weighted distances": lambda o, y: ((o - F.one_hot(y, 3)).abs() * (1.0 + y)).sum(),
    "labels first": lambda o, y: ((o - F.one_hot(y, 3)) ** 2).sum(),
    "poisson": lambda o, y: (o.exp() - F.one_hot(y, 3) * o).sum(),
    "variances": lambda o, y: 0.5 * (o + (o - F.one_hot(y, 3)) ** 2 / o.exp()).sum(),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_the_factors_of_the_loss_are_divided_out(name: str) -> None:
    torch.manual_seed(0)
    model, by_hand = mlp(), ByHand()
    tracker = Tracker(model, beta2=BETA, per="example")
    x, y = inputs("vectors", 0)
    entry = UNREDUCED.get(name, lambda o, y: F.cross_entropy(o, y, reduction="sum"))
    by_hand.add(squares_of(model, x, lambda m, x, n: entry(m(x), y[n : n + 1])), len(x))
    with tracker.step():
        LOSSES[name](model(x), y).backward()
    assert_same(tracker, by_hand, 1)


def test_accumulation_a_scaler_and_token_means_are_divided_out() -> None:
    torch.manual_seed(0)
    model, by_hand = Tied(), ByHand()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    tracker = Tracker(model, beta2=BETA, per="example")
    for step in range(3):
        total: dict[str, Tensor] = {}
        with tracker.step():
            for part, size in enumerate((4, 2, 5)):  # uneven, with other numbers of tokens
                x, y = inputs("tokens", 10 * step + part, size)
                for name, one in squares_of(model, x, sum_of(y)).items():
                    total[name] = total.get(name, torch.zeros(())) + one
                scaler.scale(mean_loss(model, x, y) / 3).backward()
        by_hand.add(total, 11)
    assert_same(tracker, by_hand, 3)


@pytest.mark.parametrize("name", ["mlp", "cnn", "tied", "dropout", "made of others"])
def test_the_gradients_of_training_are_the_same_to_the_bit(name: str) -> None:
    makes: dict[str, tuple[Callable[[], nn.Module], str]] = {
        **MODELS,
        "dropout": (lambda: Tied(0.3), "tokens"),
        "made of others": (Scaled, "vectors"),
    }
    make, kind = makes[name]

    def trained(observed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        tracker = Tracker(model, optimizer, per="example", every=2)
        gradients = []
        for step in range(4):
            x, y = inputs(kind, step)
            optimizer.zero_grad()
            with tracker.step() if observed else contextlib.nullcontext():
                mean_loss(model, x, y).backward()
            gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
        assert not observed or len(list(tracker.items()))
        return gradients

    for ours, plain in zip(trained(True), trained(False), strict=True):
        assert torch.equal(ours, plain)


def test_dropout_is_the_one_that_training_drew() -> None:
    torch.manual_seed(0)
    model, by_hand = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)), ByHand()
    tracker = Tracker(model, beta2=BETA, per="example")
    x, y = inputs("vectors", 0)
    state = torch.get_rng_state()
    with tracker.step():
        mean_loss(model, x, y).backward()
    torch.set_rng_state(state)
    mask = F.dropout(torch.ones(7, 8), 0.5)

    def masked(m: Any, x: Tensor, n: int) -> Tensor:
        return F.cross_entropy(m[2](m[0](x) * mask[n : n + 1]), y[n : n + 1])

    by_hand.add(squares_of(model, x, masked), 7)
    assert_same(tracker, by_hand, 1)


def test_what_is_made_of_parameters_and_what_has_no_rule() -> None:
    torch.manual_seed(0)
    model, by_hand = Scaled(), ByHand()
    tracker = Tracker(model, beta2=BETA, per="example")
    x, y = inputs("vectors", 0)
    sums = squares_of(model, x, sum_of(y))
    sums.pop("power")
    by_hand.add(sums, 7)
    with tracker.step():
        mean_loss(model, x, y).backward()
    assert_same(tracker, by_hand, 1)
    assert {name: str(why.reason) for name, why in tracker.absent().items()} == {"power": "no_rule"}
    assert squisher.extract(tracker, model).provenance.absent["power"].reason == "no_rule"


def test_frozen_parameters_and_those_of_another_optimizer_are_absent() -> None:
    torch.manual_seed(0)
    model, by_hand = mlp(), ByHand()
    model[0].weight.requires_grad_(False)
    tracker = Tracker(model, torch.optim.SGD(model[0].parameters(), lr=0.1), beta2=BETA, per="example")
    x, y = inputs("vectors", 0)
    by_hand.add({"0.bias": squares_of(model, x, sum_of(y))["0.bias"]}, 7)
    with tracker.step():
        mean_loss(model, x, y).backward()
    assert_same(tracker, by_hand, 1)
    reasons = {name: str(why.reason) for name, why in tracker.absent().items()}
    assert reasons == {"0.weight": "frozen", "2.weight": "not_in_optimizer", "2.bias": "not_in_optimizer"}


def test_a_penalty_on_the_weights_is_not_the_datas() -> None:
    torch.manual_seed(0)
    model, by_hand = mlp(), ByHand()
    tracker = Tracker(model, beta2=BETA, per="example")
    x, y = inputs("vectors", 0)
    by_hand.add(squares_of(model, x, sum_of(y)), 7)
    with tracker.step():
        (mean_loss(model, x, y) + 0.1 * sum(p.square().sum() for p in model.parameters())).backward()
    assert_same(tracker, by_hand, 1)


def test_parts_of_a_loss_with_different_factors_need_one_that_is_given() -> None:
    torch.manual_seed(0)
    model, by_hand = mlp(), ByHand()
    x, y = inputs("vectors", 0)

    def loss(outputs: Tensor) -> Tensor:
        return F.cross_entropy(outputs, y) + 0.5 * outputs.square().sum(1).mean()

    tracker = Tracker(model, beta2=BETA, per="example")
    with pytest.raises(SquisherError, match="different factors"), tracker.step():
        loss(model(x)).backward()
    with tracker.step(factor=1 / 7):
        loss(model(x)).backward()

    def both(m: nn.Module, x: Tensor, n: int) -> Tensor:
        return F.cross_entropy(m(x), y[n : n + 1]) + 0.5 * m(x).square().sum()

    by_hand.add(squares_of(model, x, both), 7)
    assert_same(tracker, by_hand, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_under_autocast_and_checkpointing_it_is_near(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, by_hand = mlp(), ByHand()
    x, y = inputs("vectors", 0)
    by_hand.add(squares_of(model, x, sum_of(y)), 7)
    tracker = Tracker(model, beta2=BETA, per="example", dtype=dtype)

    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            hidden = checkpoint(self.inner[:2], x, use_reentrant=False)
            return self.inner[2](hidden)

    whole = Held()
    tracker = Tracker(whole, beta2=BETA, per="example", dtype=dtype)
    with tracker.step():
        mean_loss(whole, x, y).backward()
    by_hand.values = {f"inner.{name}": value for name, value in by_hand.values.items()}
    assert_same(tracker, by_hand, 1)
    tracker = Tracker(whole, beta2=BETA, per="example", dtype=dtype)
    with tracker.step(), torch.autocast("cpu", torch.bfloat16):
        mean_loss(whole, x, y).backward()
    assert_same(tracker, by_hand, 1, rtol=0.1)


def mixing(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    outputs = F.normalize(model(x), dim=-1)
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(x)))


def reentrant(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x.requires_grad_()), y)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=True)


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor, Tensor], Tensor], str]] = {
    "batch statistics": (lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), mean_loss, "'1' normalises"),
    "a contrastive loss": (mlp, mixing, "matmul moves or mixes"),
    "re-entrant checkpointing": (Checkpointed, reentrant, "use_reentrant=False"),
    "two calls": (mlp, lambda m, x, y: mean_loss(m, x, y) + mean_loss(m, x, y), "called twice"),
    "a mean over weights": (mlp, lambda m, x, y: F.mse_loss(m(x), F.one_hot(y, 3).to(x.dtype), weight=torch.rand(len(x), 3)), "mse_loss"),
    "the function below": (mlp, lambda m, x, y: torch.kl_div(m(x).log_softmax(1), F.one_hot(y, 3).to(x.dtype), reduction=2), "kl_div"),
    "no call": (mlp, lambda m, x, y: m[2](m[0](x)).sum(), "no backward pass of the model"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_gradient_for_each_example_is_refused_by_name(name: str) -> None:
    torch.manual_seed(0)
    make, loss, message = REFUSED[name]
    model = make()
    tracker = Tracker(model, per="example")
    x, y = inputs("vectors", 0)
    with pytest.raises(SquisherError, match=message), tracker.step():
        loss(model, x, y).backward()
    assert not list(tracker.items())


def test_after_the_first_a_step_that_cannot_be_observed_is_left_out_with_a_warning() -> None:
    torch.manual_seed(0)
    model = mlp()
    tracker = Tracker(model, per="example")
    x, y = inputs("vectors", 0)
    with tracker.step():
        mean_loss(model, x, y).backward()
    before = {name: value.clone() for name, _, value, _ in tracker.items()}
    with pytest.warns(SquisherWarning, match="left out a step"), tracker.step():
        mixing(model, x, y).backward()
    with tracker.step():
        (mean_loss(model, x, y) * float("inf")).backward()
    assert tracker.skipped == 2
    assert all(torch.equal(value, before[name]) for name, _, value, _ in tracker.items())


def test_a_rule_that_is_wrong_is_found_by_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    from squisher.measure.rules import linear

    torch.manual_seed(0)
    model = mlp()
    right = linear.Linear.gradients

    def wrong(self: Any, g: Tensor, dim: int, examples: int, squared: bool = False) -> Any:
        return right(
            self, g.flip(0), dim, examples, squared
        )  # the rows of other examples: the same sum of squares of d

    monkeypatch.setattr(linear.Linear, "gradients", wrong)
    tracker = Tracker(model, per="example")
    x, y = inputs("vectors", 0)
    with tracker.step():
        mean_loss(model, x, y).backward()
    assert {name: str(why.reason) for name, why in tracker.absent().items()} == {
        "0.weight": "no_rule",
        "2.weight": "no_rule",
    }


def test_a_parameter_with_its_first_gradient_is_proven_before_it_counts() -> None:
    torch.manual_seed(0)
    model, by_hand = mlp(), ByHand()
    tracker = Tracker(model, beta2=BETA, per="example")
    x, y = inputs("vectors", 0)
    with tracker.step():
        F.cross_entropy(model(x) * 0.0, y).backward()
    with pytest.warns(SquisherWarning, match="first gradient"), tracker.step():
        F.cross_entropy(model(x) * 1.0, y).backward()
    zero = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    by_hand.add(zero, 7)
    by_hand.add(squares_of(model, x, sum_of(y)), 7)
    with tracker.step():
        F.cross_entropy(model(x) * 1.0, y).backward()
    assert_same(tracker, by_hand, 2)


def test_the_importance_is_a_fisher_and_says_how_it_was_averaged(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = mlp()
    tracker = Tracker(model, beta2=BETA, per="example")
    x, y = inputs("vectors", 0, size=32)
    for _ in range(4):
        with tracker.step():
            mean_loss(model, x, y).backward()
    imp = squisher.extract(tracker, model, batch_size=32)
    fisher = squisher.fisher(model, [(x, y)])
    for name in fisher:
        torch.testing.assert_close(imp[name], fisher[name], rtol=1e-4, atol=1e-8)
        assert torch.equal(imp.as_fisher()[name], imp[name])
    p = imp.provenance
    assert (p.kind, p.unit, p.examples, p.steps) == ("fisher", "example", 128, {"min": 4, "max": 4})
    assert p.estimator is not None
    assert (p.estimator["per"], p.estimator["average"], p.estimator["beta2"]) == ("example", "moving", BETA)
    imp.save(tmp_path / "f.safetensors")
    assert squisher.load(tmp_path / "f.safetensors").provenance.estimator == p.estimator
    with pytest.raises(SquisherError, match="bias_correction"):
        squisher.extract(tracker, model, bias_correction=False)


def test_resuming_goes_on_where_it_was() -> None:
    torch.manual_seed(0)
    model = mlp()

    def run(tracker: Tracker, steps: range) -> Iterator[Tensor]:
        for step in steps:
            x, y = inputs("vectors", step)
            with tracker.step():
                mean_loss(model, x, y).backward()
        return (value for _, _, value, _ in tracker.items())

    whole = list(run(Tracker(model, per="example", every=2), range(6)))
    first, second = Tracker(model, per="example", every=2), Tracker(model, per="example", every=2)
    run(first, range(3))
    second.load_state_dict(first.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(run(second, range(3, 6)), whole, strict=True))
    assert second.examples == 21
    with pytest.raises(SquisherError, match="per='example'"):
        Tracker(model).load_state_dict(first.state_dict())


@pytest.mark.parametrize("name", MODELS)
def test_a_step_that_is_over_is_forgotten(name: str) -> None:
    make, kind = MODELS[name]
    model = make()
    tracker = Tracker(model, per="example")
    for step in range(3):
        x, y = inputs(kind, step)
        with tracker.step():
            mean_loss(model, x, y).backward()
            mean_loss(model, x, y)  # no backward pass follows
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not [found for found in gc.get_objects() if type(found) is StepPass and found.model is model]


def test_wrong_uses_are_refused() -> None:
    model = mlp()
    for arguments, message in (
        ({"per": "token"}, "'batch' or 'example'"),
        ({"every": 0}, "every"),
        ({"every": True}, "every"),
    ):
        with pytest.raises(SquisherError, match=message):
            Tracker(model, **arguments)  # type: ignore[arg-type]
    with pytest.raises(SquisherError, match=r"step\(\)"):
        Tracker(model, torch.optim.SGD(model.parameters(), lr=0.1), per="example", automatic=True)
    with pytest.raises(SquisherError, match=r"tracker.step\(\)"):
        Tracker(model, per="example").observe()
    with pytest.raises(SquisherError, match="per='example'"), Tracker(model).step():
        pass


def test_per_batch_observes_each_kth_call() -> None:
    torch.manual_seed(0)
    model = mlp()
    tracker = Tracker(model, every=3)
    seen = []
    for step in range(7):
        x, y = inputs("vectors", step)
        model.zero_grad()
        mean_loss(model, x, y).backward()
        seen.append(tracker.observe())
    assert seen == [True, False, False, True, False, False, True]
    assert {step for *_, step in tracker.items()} == {3}


def test_a_compiled_model_runs_eagerly_while_it_is_observed() -> None:
    torch.manual_seed(0)
    model, by_hand = mlp(), ByHand()
    x, y = inputs("vectors", 0)
    by_hand.add({f"_orig_mod.{k}": v for k, v in squares_of(model, x, sum_of(y)).items()}, 7)
    compiled = torch.compile(model, backend="eager")
    tracker = Tracker(compiled, beta2=BETA, per="example")
    with tracker.step():
        mean_loss(compiled, x, y).backward()
    assert_same(tracker, by_hand, 1)


def _several(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = mlp()
    both = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(both.parameters(), lr=0.1)
    tracker = squisher.Tracker(both, optimizer, beta2=0.9, per="example", every=2)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)
        mine = slice(0, 5) if rank == 0 else slice(5, 8)  # uneven
        optimizer.zero_grad()
        with tracker.step():
            F.cross_entropy(both(x[mine]), y[mine]).backward()
        optimizer.step()
    return {"values": {n: v for n, _, v, _ in tracker.items()}, "examples": tracker.examples}


def test_two_processes_average_the_squares_of_all_their_examples(tmp_path: Any) -> None:
    first, second = run_together(_several, tmp_path)
    assert all(torch.equal(first["values"][name], second["values"][name]) for name in first["values"])
    assert first["examples"] == second["examples"] == 16

    torch.manual_seed(0)
    model, by_hand = mlp(), ByHand()
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)
        if step % 2 == 0:
            by_hand.add({f"module.{k}": v for k, v in squares_of(model, x, sum_of(y)).items()}, 8)
        model.zero_grad()
        for part in (slice(0, 5), slice(5, 8)):
            (F.cross_entropy(model(x[part]), y[part]) / 2).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    for name, value in by_hand.values.items():
        torch.testing.assert_close(first["values"][name].double(), value, rtol=1e-4, atol=1e-10)


def test_memory_that_is_used_again_holds_nothing_of_the_step_before():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
    tracker = squisher.Tracker(model, per="example", beta2=0.0)  # the last step alone
    for dtype in (torch.float32, torch.float64, torch.float64):
        model.to(dtype)
        for _ in range(3):
            x, y = torch.randn(7, 5, dtype=dtype), torch.randint(0, 4, (7,))
            with tracker.step():
                nn.functional.cross_entropy(model(x), y).backward()
            model.zero_grad()
        expected = squisher.fisher(model, [(x, y)], method="loop", dtype=dtype)
        found = squisher.extract(tracker, model)
        for name, value in expected.items():
            assert torch.allclose(found[name].to(dtype), value, rtol=1e-4, atol=1e-9), name


def test_a_loss_in_single_precision_of_a_model_in_double():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    x, y = torch.randn(8, 5).double(), torch.randint(0, 4, (8,))
    tracker = squisher.Tracker(model, per="example")
    with tracker.step():
        nn.functional.cross_entropy(model(x).float(), y).backward()
    found = squisher.extract(tracker, model)
    expected = squisher.fisher(model, [(x, y)], method="loop")
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert torch.allclose(found[name].double(), value.double(), rtol=1e-4), name


def test_a_model_of_which_nothing_could_be_observed_says_why():
    class Powers(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.rand(4) + 1)

        def forward(self, x):
            return x**self.w

    model = Powers()
    tracker = squisher.Tracker(model, per="example")
    with tracker.step():
        nn.functional.cross_entropy(model(torch.rand(8, 4)), torch.randint(0, 4, (8,))).backward()
    with pytest.raises(SquisherError, match="'w'.*pow"):
        squisher.extract(tracker, model)
