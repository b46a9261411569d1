"""Every pass begins alike, and a batch is not believed where the model gets other numbers in it than one example alone."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from squisher import SquisherError, fisher


class Net(nn.Module):
    """A network whose forward pass is given; `a` and `out` are linear layers."""

    def __init__(self, forward, **modules):
        super().__init__()
        self.run = forward
        self.a, self.out = nn.Linear(6, 6), nn.Linear(6, 4)
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        return self.run(self, x)


def _batches(*sizes):
    return [(torch.rand(size, 6).double() * 2 - 1, torch.randint(0, 4, (size,))) for size in sizes]


def _definition(model, batches):
    """The mean squared gradient, every example in a copy of the model as it is now."""
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for x, y in batches:
        for n in range(len(x)):
            one = copy.deepcopy(model)
            nn.functional.cross_entropy(one(x[n : n + 1]), y[n : n + 1]).backward()
            for name, p in one.named_parameters():
                sums[name] += p.grad**2
    return {name: total / sum(len(x) for x, _ in batches) for name, total in sums.items()}


def _counting(s, x):
    s.count += 1
    return s.out(s.a(x)) * (1 + 1e-3 * s.count)


def _counting_where_the_graph_needs_it(s, x):
    s.count += 1
    return s.out(s.a(x)) * s.count


def _counting_in_python(s, x):
    s.number += 1
    return s.out(s.a(x)) / s.number


def _queue(s, x):
    keys = s.a(x)
    scores = s.out(keys) + (keys @ s.queue.T)[:, :4]
    s.queue = torch.cat([keys.detach(), s.queue])[:7]
    return scores


def _observed(s, x):
    with torch.no_grad():
        s.count.copy_(torch.maximum(s.count, x.abs().max()))
    return s.out(s.a(x)) / s.count.clamp(min=0.5)


@pytest.mark.parametrize("method", ["auto", "loop"])
@pytest.mark.parametrize(
    "forward", [_counting, _counting_where_the_graph_needs_it, _counting_in_python, _queue, "spectral norm"]
)
def test_what_a_pass_changes_is_brought_back_before_the_next(forward, method):
    torch.manual_seed(0)
    if forward == "spectral norm":
        model = nn.Sequential(spectral_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 4)).double()
    else:
        model = Net(forward).double()
        model.number = 0
        model.register_buffer("count", torch.zeros((), dtype=torch.float64))
        model.register_buffer("queue", torch.randn(7, 6).double())
    batches = _batches(5, 5, 3)
    before = copy.deepcopy(model.state_dict())
    found = fisher(model, batches, method=method, dtype=torch.float64, eval_mode=False)
    for name, expected in _definition(model, batches).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-14)
    assert getattr(model, "number", 0) == 0
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_the_loop_does_not_depend_on_the_order_of_batches():
    model = Net(_observed).double()
    model.register_buffer("count", torch.zeros((), dtype=torch.float64))
    batches = _batches(4, 4, 4)
    batches[0][0].mul_(5)
    one, other = (
        fisher(model, given, method="loop", dtype=torch.float64, max_examples=12) for given in (batches, batches[::-1])
    )
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-9, atol=1e-14)


NUMBERS = {
    "entries that are not zero": lambda s, x: s.out(s.a(x)) * (1 + (x[:, 0] > 2).nonzero().numel()),
    "where": lambda s, x: s.out(s.a(x)) * (1 + torch.where(x[:, 0] > 2)[0].size(0)),
    "selected": lambda s, x: s.out(s.a(x)) + x[:, 0].masked_select(x[:, 0] > 2).shape[0] * s.a(x)[:, :4],
    "in a weight": lambda s, x: nn.functional.linear(
        s.a(x), s.out.weight * (1 + (x[:, 0] > 2).nonzero().shape[0]), s.out.bias
    ),
    "in a tensor": lambda s, x: s.out(s.a(x)) * torch.full((4,), 1.0 + (x[:, 0] > 2).nonzero().shape[0]),
    "size": lambda s, x: s.out(s.a(x)) * (1 if len(x) < 6 else 2),
    "size, in a weight": lambda s, x: nn.functional.linear(s.a(x), s.out.weight * (1 if len(x) < 6 else 2)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_python_took_from_a_later_batch(name):
    torch.manual_seed(0)
    model = Net(NUMBERS[name]).double()
    batches = _batches(5, 5, 5, 7)
    batches[2][0][2, 0] = 9  # an outlier, which alone changes that number for itself only
    with pytest.raises(SquisherError, match="influence each other"):
        fisher(model, batches)


def test_numbers_that_are_sizes_of_an_example_are_its_own():
    model = Net(lambda s, x: s.out(s.a(x).sum(1) / x.shape[1])).double()
    batches = [(torch.randn(4, length, 6).double(), torch.randint(0, 4, (4,))) for length in (3, 5, 3, 2)]
    found = fisher(model, batches, method="fast", dtype=torch.float64)
    for name, expected in _definition(model, batches).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-14)


def _depth(draw):
    return lambda s, x: s.out(s.a(x).tanh() if draw() < 0.5 else x)


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_random_numbers_of_python_and_numpy_are_noticed(draw):
    torch.manual_seed(0)
    found = fisher(Net(_depth(draw)).double(), _batches(4, 4, 4))
    assert set(found.provenance.coverage["loop"].values()) == {"random numbers are drawn in the forward pass"}


def test_dropout_inside_a_recurrent_layer_is_random():
    lstm = nn.LSTM(6, 6, 2, batch_first=True, dropout=0.3)
    model = Net(lambda s, x: s.out(s.lstm(x)[0][:, -1]), lstm=lstm).double().train()
    batches = [(torch.randn(4, 3, 6).double(), torch.randint(0, 4, (4,)))]
    found = fisher(model, batches, eval_mode=False)
    assert set(found.provenance.coverage["loop"].values()) == {"random numbers are drawn in the forward pass"}


def test_a_bag_whose_gradient_is_scaled_by_frequency_is_left_to_the_loop():
    bag = nn.EmbeddingBag(20, 6, mode="sum", scale_grad_by_freq=True)
    model = Net(lambda s, x: s.out(s.bag(x)), bag=bag).double()
    once = torch.stack([torch.randperm(20)[:4] for _ in range(5)])  # no row twice: nothing to scale
    batches = [(ids, torch.randint(0, 4, (5,))) for ids in (once, torch.randint(0, 3, (5, 4)))]
    found = fisher(model, batches, dtype=torch.float64)
    expected = fisher(model, batches, dtype=torch.float64, method="loop")
    torch.testing.assert_close(found["bag.weight"], expected["bag.weight"], rtol=1e-9, atol=1e-14)


def test_a_compiled_function_runs_eagerly():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    function = torch.compile(lambda x, w: (x @ w.mT).tanh(), backend=backend)
    model = Net(lambda s, x: s.out(function(x, s.a.weight))).double()
    found = fisher(model, _batches(5, 5), method="fast")
    assert not compiled
    assert found.provenance.coverage["method"] == "fast"
