"""Batches that do something else than the first one: none may be believed on the strength of an earlier proof."""

from __future__ import annotations

import warnings
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.rnn import pack_sequence

from squisher import SquisherError, fisher
from squisher.measure.squaring import Pass
from tests.measure.zoo import Apply

CLASSES = 4


def _labels(n):
    return torch.randint(0, CLASSES, (n,))


def _module(forward, **parts):
    model = Apply(forward)
    for name, part in parts.items():
        setattr(model, name, part)
    return model.double()


def _batches(*inputs):
    return [(x.double() if x.is_floating_point() else x, _labels(len(x))) for x in inputs]


def _later_operation(seed):
    """From the second batch on a parameter is used in an operation without a rule."""

    def forward(s, x):
        y = s.first(x).tanh()
        if x.mean() > 3:
            y = y + torch.cumsum(s.first.weight, 0).sum(1) * y
        return s.out(y)

    model = _module(forward, first=nn.Linear(5, 6), out=nn.Linear(6, CLASSES))
    return model, _batches(torch.randn(4, 5), torch.randn(4, 5) + 6, torch.randn(4, 5) + 6)


def _later_example(seed):
    """An example of the first batch that is not one of the two proven uses a parameter in another way."""

    def forward(s, x):
        y = s.first(x).tanh()
        return s.out(torch.where(x[:, :1] > 5, F.linear(y, s.first.weight[:, :1].expand(6, 6) ** 2), y))

    x = torch.randn(6, 5)
    x[4] += 9
    return _module(forward, first=nn.Linear(5, 6), out=nn.Linear(6, CLASSES)), _batches(x, torch.randn(4, 5))


class Routed(nn.Module):
    """Experts in the style of Mixtral: tokens are gathered for each of them."""

    def __init__(self, width=6, experts=3):
        super().__init__()
        self.router, self.out = nn.Linear(width, experts), nn.Linear(width, CLASSES)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        chances = self.router(flat).softmax(-1)
        weights, chosen = chances.topk(2, -1)
        y = torch.zeros_like(flat)
        mask = F.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            place, row = torch.where(mask[number])
            y.index_add_(0, row, expert(flat[row]).tanh() * weights[row, place, None])
        return self.out(y.view_as(x).mean(1))


def _routed(seed):
    return Routed().double(), _batches(*(torch.randn(4, 4, 6) for _ in range(4)))


def _packed(seed):
    """Padding is taken out before a layer and put back after it."""

    def forward(s, x):
        mask = x[..., 0] > -1
        y = torch.zeros(*x.shape[:2], 6, dtype=x.dtype)
        y[mask] = s.inside(x[mask]).tanh()
        return s.out(y.sum(1))

    return _module(forward, inside=nn.Linear(5, 6), out=nn.Linear(6, CLASSES)), _batches(
        *(torch.randn(4, 4, 5) for _ in range(4))
    )


def _blank(seed):
    """The first examples are all zero, so nothing can be seen in them; a use without a rule comes through a view."""

    def forward(s, x):
        return s.out(F.relu(s.first(x)) + torch.cumsum(x * s.scale[None, :5], 1).sum(1, keepdim=True))

    model = _module(
        forward, first=nn.Linear(5, 6, bias=False), out=nn.Linear(6, CLASSES), scale=nn.Parameter(torch.randn(5))
    )
    return model, _batches(torch.zeros(4, 5), torch.randn(4, 5), torch.randn(4, 5))


def _short(seed):
    """Positions without a batch dimension, and a later batch of sequences of length 1."""

    def forward(s, ids):
        x = s.tokens(ids) + s.positions(torch.arange(ids.shape[1]))
        return s.out(s.mix(x).tanh().sum(1))

    model = _module(
        forward, tokens=nn.Embedding(9, 6), positions=nn.Embedding(4, 6), mix=nn.Linear(6, 6), out=nn.Linear(6, CLASSES)
    )
    return model, _batches(*(torch.randint(0, 9, (4, t)) for t in (4, 1, 4, 1)))


def _sorted(seed):
    """A sort over the examples between two uses of one weight."""

    def forward(s, x):
        y = s.inside(x).tanh()
        order = y[:, 0].argsort()
        back = order.argsort()
        return s.out(s.inside(y[order]).tanh()[back])

    return _module(forward, inside=nn.Linear(5, 5), out=nn.Linear(5, CLASSES)), _batches(
        torch.randn(4, 5).sort(0).values, torch.randn(4, 5)
    )


def _first_of_one(seed):
    """A first batch of one example; packed rows after it."""
    model, batches = _packed(seed)
    return model, [tuple(t[:1] for t in batches[0]), *batches[1:]]


def _swapped(seed):
    """Rows that change places with their neighbour's, in later batches only."""

    def forward(s, x):
        y = s.inside(x).tanh()
        if x.mean() > 3:
            y = s.inside(y.flip(0)).flip(0).tanh()
        return s.out(y)

    return _module(forward, inside=nn.Linear(5, 5), out=nn.Linear(5, CLASSES)), _batches(
        torch.randn(4, 5), torch.randn(6, 5)
    )


def _by_function(seed):
    """A parameter inside an autograd function that brings its own gradient."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return g * w, (g * x).sum(0)

    def forward(s, x):
        y = s.inside(x)
        return s.out(Scale.apply(y, s.scale) if x.mean() > 3 else y * s.scale)

    model = _module(forward, inside=nn.Linear(5, 6), out=nn.Linear(6, CLASSES), scale=nn.Parameter(torch.randn(6)))
    return model, _batches(torch.randn(4, 5), torch.randn(4, 5) + 6)


def _transformed(seed):
    """A weight that is normalised first, another one in a later batch only."""

    def forward(s, x):
        w = F.normalize(s.first.weight, dim=1)
        y = F.linear(x, w, s.first.bias).tanh()
        if x.mean() > 3:
            y = y @ (s.mix.t() @ s.mix)
        return s.out(y)

    model = _module(forward, first=nn.Linear(5, 6), out=nn.Linear(6, CLASSES), mix=nn.Parameter(torch.randn(6, 6)))
    return model, _batches(torch.randn(4, 5), torch.randn(4, 5) + 6)


def _as_many_heads_as_examples(seed):
    """A shared bias whose first size is the batch size, for another reason."""

    def forward(s, x):
        q = s.q(x).unflatten(-1, (4, 3)).transpose(1, 2)
        bias = s.bias[:, None, None].expand(4, 5, 5) * torch.linspace(0, 1, 25, dtype=x.dtype).view(5, 5)
        return s.out(((q @ q.mT + bias).softmax(-1) @ q).transpose(1, 2).flatten(2).mean(1))

    model = _module(forward, q=nn.Linear(6, 12), bias=nn.Parameter(torch.randn(4)), out=nn.Linear(12, CLASSES))
    return model, _batches(torch.randn(4, 5, 6), torch.randn(4, 5, 6))


LIARS = {f.__name__.strip("_"): f for f in (
    _later_operation, _later_example, _routed, _packed, _blank, _short, _sorted, _first_of_one, _swapped, _by_function,
    _transformed, _as_many_heads_as_examples,
)}  # fmt: skip


@pytest.mark.parametrize("name", LIARS)
@pytest.mark.parametrize("seed", range(3))
def test_a_batch_that_differs_from_the_first_is_not_believed(name, seed):
    torch.manual_seed(seed)
    model, batches = LIARS[name](seed)
    alone = [(x[n : n + 1], y[n : n + 1]) for x, y in batches for n in range(len(x))]
    if name in (
        "later_operation",
        "by_function",
        "transformed",
    ):  # which way is taken is a property of the batch: of each example too
        alone = alone if all(bool((x.mean() > 3) == (xb.mean() > 3)) for xb, _ in batches for x in xb) else None
    found = fisher(model, batches, dtype=torch.float64)
    expected = fisher(model, alone or batches, method="loop", dtype=torch.float64)
    for key in expected:
        scale = float(expected[key].max().sqrt())
        assert scale > 0
        assert float((found[key].sqrt() - expected[key].sqrt()).abs().max()) <= 1e-7 * scale, key


def _batch_mean(s, x):
    y = s.inside(x)
    return s.out(y - y.mean(0))


def _largest(s, x):
    return s.out(s.inside(x) / x.abs().max().item())


@pytest.mark.parametrize("forward", [_batch_mean, _largest])
def test_examples_that_interact_are_refused(forward):
    torch.manual_seed(0)
    model = _module(forward, inside=nn.Linear(5, 6), out=nn.Linear(6, CLASSES))
    with pytest.raises(SquisherError, match="influence each other"):
        fisher(model, _batches(torch.randn(4, 5)))
    assert fisher(model, _batches(torch.randn(4, 5)), method="loop")["out.bias"].sum() > 0


def test_a_contrastive_loss_is_refused():
    torch.manual_seed(0)
    model = nn.Linear(5, 6).double()

    def loss(model, batch):
        z = F.normalize(model(batch), dim=1)
        return F.cross_entropy(z @ z.T * 5, torch.arange(len(z)), reduction="none")

    with pytest.raises(SquisherError, match="influence each other"):
        fisher(model, [torch.randn(4, 5).double()], likelihood=loss)


@pytest.mark.parametrize("method", ["auto", "loop"])
def test_a_forward_pass_without_gradients_is_refused(method):
    model = _module(torch.no_grad()(lambda s, x: s.out(x)), out=nn.Linear(5, CLASSES))
    with pytest.raises(SquisherError, match="(?i)no gradient"):
        fisher(model, _batches(torch.randn(4, 5)), method=method)


def test_users_hooks_do_not_run_and_come_back():
    torch.manual_seed(0)
    model = nn.Linear(5, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    called = []

    def step(p):
        called.append(p)
        optimizer.step()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
        p.register_hook(lambda g: g * 100)
    before = [p.detach().clone() for p in model.parameters()]
    data = [(torch.randn(4, 5), _labels(4))]
    for method in ("auto", "loop"):
        found = fisher(model, data, method=method)
        plain = nn.Linear(5, CLASSES)
        plain.load_state_dict(model.state_dict())
        assert torch.allclose(found["weight"], fisher(plain, data, method="loop")["weight"])
    assert not called
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    model(data[0][0]).sum().backward()
    assert len(called) == 2


def test_a_model_that_changes_its_weights_is_refused():
    model = nn.Sequential(nn.Embedding(9, 5, max_norm=0.1), Apply(lambda s, x: x.sum(1)), nn.Linear(5, CLASSES))
    with pytest.raises(SquisherError, match=r"changes its parameter '0.weight'"):
        fisher(model, [(torch.randint(0, 9, (4, 3)), _labels(4))])


def test_vmap_and_checkpointing_on_inputs_without_gradient_fall_back():
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    mapped = _module(
        lambda s, x: s.out(torch.vmap(s.inside)(x).tanh()), inside=nn.Linear(5, 6), out=nn.Linear(6, CLASSES)
    )
    again = _module(
        lambda s, x: s.out(checkpoint(lambda x: s.inside(x).tanh(), x, use_reentrant=False)),
        inside=nn.Linear(5, 6),
        out=nn.Linear(6, CLASSES),
    )
    for model in (mapped, again):
        batches = _batches(torch.randn(4, 5), torch.randn(4, 5))
        found = fisher(model, batches, dtype=torch.float64)
        expected = fisher(model, batches, method="loop", dtype=torch.float64)
        assert all(torch.allclose(found[n], expected[n], rtol=1e-9) for n in expected)


def test_an_unseen_second_use_in_half_precision():
    """Long sequences: the sum over positions shrinks against what is added up in it, but a second use is still seen."""

    def forward(s, x):
        y = s.inside(x)
        if x.shape[1] > 100:
            y = y + F.linear(x, torch.flip(s.inside.weight, (0,)))
        return s.out(y.tanh().mean(1))

    torch.manual_seed(0)
    model = Apply(forward, inside=nn.Linear(8, 8), out=nn.Linear(8, CLASSES)).to(torch.bfloat16)
    batches = [(torch.randn(4, 512, 8).bfloat16(), _labels(4))]
    found, expected = fisher(model, batches), fisher(model, batches, method="loop")
    for name in expected:
        error = float((found[name].sqrt() - expected[name].sqrt()).abs().max() / expected[name].max().sqrt())
        assert error < 2e-2, (name, error)


# -- what cannot be measured is said in one sentence ---------------------------------------------------------------------


def _nested(*sequences):
    return torch.nested.nested_tensor(list(sequences), layout=torch.jagged)


@pytest.mark.parametrize(
    ("batch", "settings", "words"),
    [
        ((torch.randn(4, 5), _labels(3)), {}, "3 labels.* 4 examples"),
        ((torch.full((4, 5), float("nan")), _labels(4)), {}, "NaN"),
        ((torch.randn(4, 5), _labels(4)), {"likelihood": nn.MSELoss()}, "likelihood='gaussian'"),
        ((torch.randn(4, 5), _labels(4)), {"likelihood": nn.TripletMarginLoss()}, "named likelihoods"),
        ((torch.randn(4, 5), torch.full((4, 4), float("nan"))), {"likelihood": "gaussian"}, "labels .* not finite"),
        ((torch.randn(4, 5), torch.full((4, 4), float("nan"))), {"likelihood": "bernoulli"}, "labels .* not finite"),
        ((torch.randn(4, 5), _labels(4)), {"shift": 1}, "shift.*'tokens'.*'categorical'"),
        ((torch.randn(4, 2, 5), torch.zeros(4, 2).long()), {"likelihood": "tokens", "shift": -1}, "shift"),
        ((torch.randn(4, 2, 5), torch.zeros(4, 2).long()), {"likelihood": "tokens", "shift": 1.5}, "shift"),
        ((torch.randn(4, 2, 5), torch.zeros(4, 2).long()), {"likelihood": "tokens", "shift": 5}, "No position counts"),
        ((pack_sequence([torch.randn(3, 5), torch.randn(2, 5)]), _labels(2)), {}, "PackedSequence.*cut into examples"),
        ((_nested(torch.randn(3, 5), torch.randn(2, 5)), _labels(2)), {}, "NestedTensor.*cut into examples"),
    ],
)
def test_bad_input_gets_a_clear_sentence(batch, settings, words):
    with pytest.raises(SquisherError, match=words):
        fisher(nn.Linear(5, CLASSES), [batch], **settings)


def test_a_model_that_is_none_is_refused():
    with pytest.raises(SquisherError, match="expected a torch.nn.Module"):
        fisher(lambda x: x, [torch.randn(4, 5)])


class _Own(nn.Module):
    """Looks like a language model of Hugging Face, and computes its own loss."""

    class config:  # noqa: N801
        @staticmethod
        def to_dict():
            return {}

    def __init__(self, shift, extra=0.0):
        super().__init__()
        self.tokens, self.head, self.shift, self.extra = nn.Embedding(9, 6), nn.Linear(6, 9), shift, extra

    def forward(self, input_ids, labels=None):
        from types import SimpleNamespace

        logits = self.head(self.tokens(input_ids).cumsum(1).tanh())
        loss = None
        if labels is not None:
            at, about = logits[:, : logits.shape[1] - self.shift], labels[:, self.shift :]
            loss = F.cross_entropy(at.flatten(0, 1), about.flatten()) + self.extra
        return SimpleNamespace(logits=logits, loss=loss)


class OwnForCausalLM(_Own):
    pass


@pytest.mark.parametrize("shift", [0, 1])
def test_labels_are_shifted_as_the_model_itself_does(shift):
    torch.manual_seed(0)
    ids = torch.randint(0, 9, (4, 6))
    data = [{"input_ids": ids, "labels": ids}]
    model = OwnForCausalLM(shift)
    if shift == 0:
        with pytest.warns(UserWarning, match="shift=0 is used"):
            found = fisher(model, data)
        assert found.provenance.estimator["shift"] == 0
    else:
        found = fisher(model, data)
    expected = fisher(model, data, shift=shift, method="loop")
    assert torch.allclose(found["head.weight"], expected["head.weight"], rtol=1e-4)


@pytest.mark.parametrize("extra", [2.0, float("inf")])
def test_another_loss_of_the_model_is_named(extra, tmp_path):
    torch.manual_seed(0)
    ids = torch.randint(0, 9, (4, 6))
    with pytest.warns(UserWarning, match="auxiliary losses"):
        found = fisher(OwnForCausalLM(1, extra=extra), [{"input_ids": ids, "labels": ids}])
    assert found.provenance.estimator["own_loss"] == (pytest.approx(extra, abs=3) if extra < 3 else None)
    found.save(tmp_path / "f.safetensors")


@pytest.mark.parametrize("name", ["gain", "mix"])
def test_a_shared_input_as_long_as_the_batch_is_named(name):
    """Four weights for four features, or a matrix for four positions, in a batch of four."""

    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside, self.out = nn.Linear(4, 4), nn.Linear(4, CLASSES)

        def forward(self, x, gain=None, mix=None):
            y = self.inside(x)
            return self.out(y * gain if gain is not None else y @ mix)

    torch.manual_seed(0)
    shared = {"gain": torch.randn(4), "mix": torch.randn(4, 4)}[name]
    for method in ("auto", "fast", "loop"):
        with pytest.raises(SquisherError, match=f"input '{name}'.*rows"):
            fisher(Weighted(), [{"x": torch.randn(4, 4), name: shared, "labels": _labels(4)}], method=method)


@pytest.mark.parametrize(
    "labels", [[0, 3, 2, 1], [0, 0, 3, 3]]
)  # the second: weights that are right by chance where one looks first
@pytest.mark.parametrize("named", [True, False])
def test_class_weights_as_many_as_examples_are_named(labels, named):
    """A function as likelihood gets its class weights with the batch, and there are four classes and four examples."""

    def by_hand(model, batch):
        x, y, weights = batch.values() if named else batch
        return -(F.one_hot(y, 4) * weights * model(x).log_softmax(-1)).sum(-1)

    def by_torch(model, batch):
        x, y, weights = batch.values() if named else batch
        return F.cross_entropy(model(x), y, weight=weights, reduction="none")

    torch.manual_seed(0)
    batch = [torch.randn(4, 5), torch.tensor(labels), torch.tensor([0.1, 0.5, 1.0, 2.0])]
    for likelihood in (by_hand, by_torch):
        with pytest.raises(SquisherError, match=f"input {repr('w') if named else 'number 3'}.*rows"):
            given = dict(zip("xyw", batch, strict=True)) if named else tuple(batch)
            fisher(nn.Linear(5, 4), [given], likelihood=likelihood, method="loop")


def test_tuples_of_any_length_for_a_function():
    torch.manual_seed(0)
    model, x, y, weight = nn.Linear(5, 4).double(), torch.randn(7, 5).double(), torch.arange(7) % 4, torch.rand(7)

    def weighted(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none") * batch[2]

    expected = sum(
        torch.autograd.grad(weight[n] * F.cross_entropy(model(x[n]), y[n]), model.weight)[0] ** 2 / 7 for n in range(7)
    )
    for method in ("auto", "loop"):
        found = fisher(
            model, [(x[:4], y[:4], weight[:4]), [x[4:], y[4:], weight[4:]]], likelihood=weighted, method=method
        )
        assert torch.allclose(found["weight"].double(), expected)


def _same_as_the_loop(model, batches, **settings):
    found, expected = (fisher(model, batches, method=m, dtype=torch.float64, **settings) for m in ("auto", "loop"))
    for name in expected:
        assert torch.allclose(found[name], expected[name], rtol=1e-8, atol=1e-14), name
    return found


def _two_layers(forward):
    torch.manual_seed(0)
    return _module(forward, first=nn.Linear(5, 6), out=nn.Linear(6, CLASSES))


def _scaled(s, x):
    return s.out(s.first(x).tanh() / max(1.0, x.abs().max().item()))


def _through_numpy(s, x):
    return s.out(s.first(x).tanh() / max(1.0, float(x.detach().numpy().max())))


def _decided(s, x):
    y = s.first(x).tanh()
    return s.out(y * 2 if (x.abs() > 4).any() else y)


@pytest.mark.parametrize("forward", [_scaled, _through_numpy, _decided])
def test_what_python_makes_of_a_later_batch_is_compared_with_each_example(forward):
    model = _two_layers(forward)
    small, large = torch.randn(4, 5) * 0.1, torch.randn(4, 5) * 0.1
    large[2] += 9  # decides about the others, too
    _same_as_the_loop(model, _batches(small, small))
    with pytest.raises(SquisherError, match="influence each other"):
        fisher(model, _batches(small, large))
    _same_as_the_loop(_two_layers(_decided), _batches(small + 9, small + 9, small))  # all of them agree


@pytest.mark.parametrize("end", [lambda t: t, int])
def test_a_slice_up_to_the_longest_example_is_compared(end):
    def forward(s, x, lengths):
        return s.out(s.first(x)[:, : end(lengths.max())].tanh().mean(1))

    def batch(*lengths):
        return {
            "x": torch.randn(len(lengths), 3, 5).double(),
            "lengths": torch.tensor(lengths),
            "labels": _labels(len(lengths)),
        }

    model = _two_layers(forward)
    _same_as_the_loop(model, [batch(3, 3, 3), batch(2, 2)])
    with pytest.raises(SquisherError, match="influence each other"):
        fisher(model, [batch(3, 3, 3), batch(3, 1, 2)])


def test_columns_that_are_renormalised_over_the_batch_are_left_to_the_loop():
    model = _two_layers(lambda s, x: s.out(s.first(x.renorm(2, 1, 1.0)).tanh()))
    _same_as_the_loop(model, _batches(torch.randn(4, 5) * 1e-2, torch.randn(4, 5) * 5))
    rows = _two_layers(lambda s, x: s.out(s.first(x.renorm(2, 0, 1.0)).tanh()))
    assert _same_as_the_loop(rows, _batches(torch.randn(4, 5))).provenance.coverage["loop"] == {}


class Clipped(torch.autograd.Function):
    """A backward function that clips the gradient of the whole batch, if it is large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * (20 / g.norm()).clamp(max=1.0)


def _clipped(s, x):
    return s.out(Clipped.apply(s.first(x))) * (1 + 1e3 * (x.abs().amax(1, keepdim=True) > 5))


def _hooked(s, x):
    y = s.first(x)
    if y.requires_grad:
        y.register_hook(lambda g: g * (20 / g.norm()).clamp(max=1.0))
    return s.out(y) * (1 + 1e3 * (x.abs().amax(1, keepdim=True) > 5))


def test_a_backward_function_that_mixes_examples_now_and_then():
    batches = _batches(torch.randn(5, 5) * 0.1, torch.randn(5, 5) + 9)
    coverage = _same_as_the_loop(_two_layers(_clipped), batches).provenance.coverage
    assert coverage["method"] == "fast"  # the first batch
    assert set(coverage["loop"]) == {"first.weight", "first.bias"}


def test_hooks_of_the_model_on_its_gradients_are_left_to_the_loop():
    batches = _batches(torch.randn(5, 5) * 0.1, torch.randn(5, 5) + 9)
    assert "hooks" in _same_as_the_loop(_two_layers(_hooked), batches).provenance.coverage["loop"]["out.weight"]


def test_a_model_that_changes_its_inputs_gets_them_as_they_were():
    def forward(s, x):
        x -= 0.5
        return s.out(s.first(x.mul_(2.0)).tanh())

    batches = _batches(torch.randn(4, 5), torch.randn(1, 5), torch.randn(3, 5))
    before = [x.clone() for x, _ in batches]
    found = _same_as_the_loop(_two_layers(forward), batches)
    assert all(torch.equal(x, b) for (x, _), b in zip(batches, before, strict=True))
    apart = _two_layers(lambda s, x: s.out(s.first((x - 0.5) * 2).tanh()))
    assert torch.allclose(found["first.weight"], fisher(apart, batches, dtype=torch.float64)["first.weight"])


def test_tensors_of_inference_mode():
    def forward(s, x):
        with torch.inference_mode():
            some = bool((x > 0).any())
        return s.out(s.first(x).tanh() if some else s.first(x))

    with torch.inference_mode():
        batches = _batches(torch.randn(4, 5), torch.randn(3, 5))
    _same_as_the_loop(_two_layers(forward), batches)


def test_complex_numbers_are_left_to_the_loop():
    model = _module(
        lambda s, x: s.out((x.to(torch.complex128) * (1 + 2j) * s.gain).abs()),
        gain=nn.Parameter(torch.rand(5) + 1),
        out=nn.Linear(5, CLASSES),
    )
    assert "complex" in _same_as_the_loop(model, _batches(torch.randn(4, 5))).provenance.coverage["loop"]["gain"]


@pytest.mark.parametrize("method", ["auto", "loop"])
def test_a_cache_of_past_positions_is_not_filled(method):
    """Hugging Face's recurrent models write into it in place: their backward pass fails."""

    def forward(s, x):
        y = s.inside(x)
        if s.config.use_cache:
            past = y.sigmoid()
            s.seen = past.mul_(2) * past.square_()
            y = y + s.seen
        return s.out(y)

    torch.manual_seed(0)
    model = _module(forward, inside=nn.Linear(5, 6), out=nn.Linear(6, CLASSES))
    model.config = SimpleNamespace(use_cache=True)
    assert fisher(model, _batches(torch.randn(4, 5)), method=method)["inside.bias"].sum() > 0
    assert model.config.use_cache


def test_doubles_that_go_through_single_precision_are_not_taken_for_examples_that_interact():
    def forward(s, x):
        y = s.inside(x).float()
        return s.out((y * y.new_ones(1, 64).expand(1, 64).mean()).double() * (1 + 1e-8 * len(x)))

    torch.manual_seed(0)
    model = _module(forward, inside=nn.Linear(5, 6), out=nn.Linear(6, CLASSES)).double()
    batches = [(x.double(), y) for x, y in _batches(torch.randn(4, 5))]
    expected = fisher(model, batches, method="loop", dtype=torch.float64)
    found = fisher(model, batches, dtype=torch.float64)
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-5), name


def test_rows_that_are_examples_are_not_broadcast_against_a_parameter():
    torch.manual_seed(0)
    model = _module(
        lambda s, x: s.out(torch.cdist(s.inside(x), s.point)), inside=nn.Linear(5, 6), out=nn.Linear(1, CLASSES)
    )
    model.point = nn.Parameter(torch.randn(1, 6).double())
    batches = _batches(torch.randn(4, 5))
    expected = fisher(model, batches, method="loop")
    found = fisher(model, batches)
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-4), name


def test_an_index_of_an_array_beside_a_tensor():
    torch.manual_seed(0)
    model = _module(
        lambda s, x: s.out(s.inside(x)[torch.arange(len(x)), np.zeros(len(x), int)]),
        inside=nn.Linear(5, 6),
        out=nn.Linear(6, CLASSES),
    )
    batches = _batches(torch.randn(4, 3, 5))
    expected, found = fisher(model, batches, method="loop"), fisher(model, batches)
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-4), name


def test_the_mask_of_a_pruned_convolution_is_not_taken_for_rows_of_examples(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 16, CLASSES)).double()
    prune.random_unstructured(model[0], "weight", 0.5)
    passes = []
    monkeypatch.setattr(Pass, "forward", lambda s, real=Pass.forward: passes.append(s.guessed) or real(s))
    found = fisher(model, _batches(torch.randn(4, 3, 6, 6)), method="fast")
    assert found["0.weight_orig"].sum() > 0
    assert len(passes) == 1 + len(_batches(torch.randn(4, 3, 6, 6)))  # the proof, and each batch once


def _above_a_mean(s, x):
    return s.out(s.first(x).tanh() * (2 if x.mean().item() > 0 else 1))


def _between(s, x):
    return s.out(s.first(x).tanh() * (2 if 0 < float(x.mean()) < 1.25 else 1))


def _doubled(x: torch.Tensor) -> torch.Tensor:
    if bool(x.mean() > 0):
        return x * 2
    return x


@cache
def _script():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(_doubled)


def _scripted(s, x):
    return s.out(s.first(x).tanh() * _script()(x)[:, :1])


def _mapped(s, x):
    above = torch.vmap(lambda column: (column.mean() > 0).double(), in_dims=1)(x)
    return s.out(s.first(x).tanh() * (1 + above.sum()))


@pytest.mark.parametrize("forward", [_above_a_mean, _between, _scripted, _mapped])
@pytest.mark.parametrize("outlier", [9.0, -9.0])
def test_extremes_of_every_batch_are_run_alone_where_numbers_are_read(forward, outlier):
    """The example that moves a number furthest may agree with the batch; so may every example of the first batch."""
    torch.manual_seed(0)
    model = _two_layers(forward)
    alike, mixed = torch.rand(6, 5) - 3, torch.rand(6, 5) * 0.2 - 1
    mixed[2:4] += 2
    mixed[1] += outlier
    _same_as_the_loop(model, _batches(alike, alike))
    with pytest.raises(SquisherError, match="influence each other"):
        fisher(model, _batches(alike, mixed))


def test_a_scripted_module_with_buffers_is_left_to_the_loop():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        part = torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).double())
    model = _two_layers(lambda s, x: s.out(s.part(s.first(x))))
    model.part = part.train()
    before = part.state_dict()["1.running_mean"].clone()
    assert _same_as_the_loop(model, _batches(torch.randn(4, 5)))["part.0.weight"].sum() > 0
    assert part.training
    assert torch.equal(part.state_dict()["1.running_mean"], before)


def test_scripted_functions_are_as_they_were():
    before = torch._C.ScriptFunction.__call__

    def forward(s, x):
        y = s.first(x).tanh()[:, None]
        return _scripted(s, x) + s.out(s.attention(y, y, y)[0][:, 0])

    model = _two_layers(forward)
    model.attention = nn.MultiheadAttention(6, 2, batch_first=True).double()
    _same_as_the_loop(model, _batches(torch.rand(4, 5) + 1, torch.rand(4, 5) + 1))
    assert torch._C.ScriptFunction.__call__ is before


def _added_to_a_view(s, x):
    y = s.first(x)
    y[:, :2].add_(s.bias)
    return s.out(y * (x[:, :1] > 0))


def test_a_parameter_added_to_a_view_has_a_gradient_also_where_the_proof_saw_none():
    """The hook on a view that is changed in place is never called; where the loop's gradient is zero too, no proof shows that."""
    torch.manual_seed(0)
    model = _two_layers(_added_to_a_view)
    model.bias = nn.Parameter(torch.randn(2).double())
    off, on = torch.rand(4, 5) - 1, torch.rand(4, 5)
    assert _same_as_the_loop(model, _batches(off, on, on))["bias"].sum() > 0


@pytest.mark.parametrize("shape", [(1, 6), (5, 6)])
def test_an_einsum_that_broadcasts(shape):
    torch.manual_seed(0)
    model = _two_layers(lambda s, x: s.out(torch.einsum("bd,de->be", x, s.weight)))
    model.weight = nn.Parameter(torch.randn(*shape).double())
    found = _same_as_the_loop(model, _batches(torch.randn(4, 5)))
    assert found.provenance.coverage["method"] == ("loop" if shape[0] == 1 else "fast")


def test_rows_of_examples_that_are_written_into_a_buffer_are_not_shared():
    def forward(s, x):
        order = x[:, :1].argsort(0).expand(-1, 6)
        s.kept.detach_()[: len(x)] = s.first(x).gather(0, order)
        return s.out(s.kept[: len(x)] + x[:, :1])

    torch.manual_seed(0)
    model = _two_layers(forward)
    model.register_buffer("kept", torch.zeros(9, 6).double())
    rising = torch.arange(4.0)[:, None] + torch.rand(4, 5) / 2
    _same_as_the_loop(model, _batches(rising, rising.flip(0)))


def test_a_linear_layer_on_sequences_whose_output_is_changed_in_place():
    """It returns a view, and the gradient of a view that is changed in place does not come through that view."""

    def forward(s, x):
        y = s.inner(s.first(x).tanh()).add_(s.bias).relu_()
        return s.out(y.mean(1) * (x[:, 0, :1] > 0))

    model = _two_layers(forward)
    model.inner, model.bias = nn.Linear(6, 6).double(), nn.Parameter(torch.randn(6).double())
    off, on = torch.rand(4, 3, 5) - 1, torch.rand(4, 3, 5)
    found = _same_as_the_loop(model, _batches(off, on, on))
    assert found["inner.weight"].sum() > 0
    assert found.provenance.coverage["loop"] == {}


@pytest.mark.parametrize("labels", ["data", "exact"])
def test_a_gradient_that_is_lost_on_its_way_is_not_taken_for_zero(labels, monkeypatch):
    def forward(s, x):
        return s.out(torch.where(x[:, :1] > 5, x * s.scale, x))

    model = _module(forward, scale=nn.Parameter(torch.rand(5)), out=nn.Linear(5, CLASSES))
    batches = _batches(torch.rand(4, 5), torch.rand(4, 5), torch.rand(4, 5) + 5, torch.rand(4, 5))
    arrived = Pass._arrived

    def losing(self, g, uses):
        arrived(self, g, [use for use in uses if use.source is not model.scale])

    monkeypatch.setattr(Pass, "_arrived", losing)
    measured = fisher(model, batches, labels=labels)
    expected = fisher(model, batches, labels=labels, method="loop")
    assert bool(expected["scale"].any())
    torch.testing.assert_close(measured["scale"], expected["scale"])
    assert "scale" in measured.provenance.coverage["loop"]
