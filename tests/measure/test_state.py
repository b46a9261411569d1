"""What a model keeps from pass to pass: brought back before each, or noticed and refused; and what a forward pass does on the side."""

from __future__ import annotations

import random
from collections import deque
from itertools import count

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from squisher.errors import SquisherError
from squisher.measure import fisher
from tests.measure.zoo import Apply

torch.manual_seed(0)
BATCHES = [(torch.randn(n, 5).double(), torch.randint(0, 4, (n,))) for n in (4, 3)]
WAYS = [{}, {"method": "loop"}, {"per": "batch"}]


def _model(forward, **kept):
    torch.manual_seed(1)
    model = Apply(forward, out=nn.Linear(5, 4)).double()
    for name, value in kept.items():
        setattr(model, name, value)
    return model


def _assert_as_plain(model, plain=None, **settings):
    plain = plain or _model(lambda s, x: s.out(x))
    found, expected = (fisher(m, BATCHES, dtype=torch.float64, **settings) for m in (model, plain))
    assert all(torch.allclose(found[name], expected[name], rtol=1e-9) for name in expected)


def _new_number(s, x):
    s.seen = getattr(s, "seen", 0) + 1
    return s.out(x) * s.seen


def _new_tensor(s, x):
    if not hasattr(s, "last"):
        s.last = torch.ones_like(x[:1])
    out, s.last = s.out(x * s.last), 2 * s.last
    return out


def _filled(s, x):
    out = s.out(x) if s.last is None else 2 * s.out(x)
    s.last = s.out(x)  # its graph, too
    return out


def _list(s, x):
    s.kept.append(1)
    return s.out(x) * len(s.kept)


def _nested(s, x):
    s.kept["a"][0].add_(1)
    s.kept["b"] = x
    return s.out(x) * s.kept["a"][0] * (len(s.kept) - 1)


def _set(s, x):
    s.kept.add(len(s.kept))
    return s.out(x) * len(s.kept)


def _modes(s, x):
    out = s.out(x) * (2 if s.training else 1)
    s.train()
    return out


@pytest.mark.parametrize("settings", WAYS)
@pytest.mark.parametrize(
    ("forward", "kept"),
    [
        (_new_number, {}),
        (_new_tensor, {}),
        (_filled, {"last": None}),
        (_list, {"kept": []}),
        (_list, {"kept": deque(maxlen=9)}),
        (_nested, {"kept": {"a": [torch.zeros(()).double()]}}),
        (_set, {"kept": set()}),
        (_modes, {}),
    ],
)
def test_what_modules_keep_begins_anew_in_every_pass_and_is_brought_back(forward, kept, settings):
    model = _model(forward, **kept)
    before = set(vars(model))
    _assert_as_plain(model, **settings)
    assert set(vars(model)) == before
    assert not kept.get("kept") or (list(model.kept) == ["a"] and not model.kept["a"][0])


@pytest.mark.parametrize("settings", WAYS[:2])
@pytest.mark.parametrize("source", [count(1), iter(range(1, 1000)), random.Random(0), [0]])
def test_what_is_kept_where_nobody_looks_is_refused(source, settings):
    def number():
        if isinstance(source, list):
            source[0] += 1
            return source[0]
        return source.random() if isinstance(source, random.Random) else next(source)

    with pytest.raises(SquisherError, match="Two passes over the same example"):
        fisher(_model(lambda s, x: s.out(x) * number()), BATCHES, **settings)


def _states():
    return random.getstate(), np.random.get_state()[1:3], torch.get_rng_state()


@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize("own", [True, False])
def test_random_numbers_of_every_kind_are_noticed_and_their_generators_brought_back(own, fail):
    def forward(s, x):
        if fail and bool((x == BATCHES[1][0][2]).all(1).any()):
            raise RuntimeError("as told")
        numpy, python, torch_ = (s.numpy, s.python, s.torch) if own else (np.random, random, None)
        noise = torch.rand(x.shape, generator=torch_).to(x)
        return s.out(x) * (1 + numpy.uniform()) * (1 + python.random()) + s.out(noise)

    generators = {"numpy": np.random.default_rng(0), "python": random.Random(0), "torch": torch.Generator()}
    model = _model(forward, **generators)
    before, expected = _states(), (np.random.default_rng(0).random(), random.Random(0).random())
    if fail:
        with pytest.raises(RuntimeError, match="as told"):
            fisher(model, BATCHES)
    else:
        assert fisher(model, BATCHES).provenance.coverage["loop"]["out.weight"].startswith("random numbers")
    after = _states()
    assert before[0] == after[0]
    assert (before[1][0] == after[1][0]).all()
    assert before[1][1] == after[1][1]
    assert torch.equal(before[2], after[2])
    assert (model.numpy.random(), model.python.random()) == expected
    assert torch.equal(model.torch.get_state(), torch.Generator().get_state())


def test_hooks_and_submodules_that_a_pass_changes_come_back():
    model = _model(lambda s, x: s.out(x))

    def once(module, args, output):
        handle.remove()
        model.other = nn.Linear(2, 2)
        model.register_forward_hook(lambda *_: None)
        return 3 * output

    handle = model.out.register_forward_hook(once)
    thrice = _model(lambda s, x: 3 * s.out(x))
    _assert_as_plain(model, thrice)
    assert len(model.out._forward_hooks) == 1
    assert not model._forward_hooks
    assert set(model._modules) == {"out"}


@pytest.mark.parametrize("settings", WAYS)
def test_gradients_that_the_forward_pass_itself_leaves_are_not_counted(settings):
    def forward(s, x):
        s.out(x.detach()).square().sum().backward()
        return s.out(x)

    _assert_as_plain(_model(forward), **settings)


def test_other_values_in_a_parameter_are_noticed():
    def forward(s, x):
        s.out.bias.data = x.mean(0)[:4].clone()
        return s.out(x)

    with pytest.raises(SquisherError, match="changes its parameter 'out.bias'"):
        fisher(_model(forward), [(BATCHES[0][0][:1], BATCHES[0][1][:1])])


def test_what_fails_when_it_is_followed_is_left_to_the_loop():
    def inner(s, x):
        return checkpoint(lambda y: s.a(y).tanh(), s.b(x), use_reentrant=False)

    torch.manual_seed(1)
    layers = {"a": nn.Linear(5, 6), "b": nn.Linear(5, 5), "out": nn.Linear(6, 4)}
    nested = Apply(lambda s, x: s.out(checkpoint(inner, s, x, use_reentrant=False)), **layers).double()
    plain = Apply(lambda s, x: s.out(inner(s, x)), **layers)
    _assert_as_plain(nested, plain)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):  # the model's own error stays what it is
        fisher(_model(lambda s, x: s.out(x[:, :3])), BATCHES)


def test_layers_without_rows_have_empty_results():
    model = Apply(lambda s, x: s.out(x) + s.none(x).sum(1, keepdim=True), out=nn.Linear(5, 4)).double()
    with pytest.warns(UserWarning, match="zero-element"):
        model.none = nn.Linear(5, 0).double()
    found = fisher(model, BATCHES, method="fast")
    assert found["none.weight"].shape == (0, 5)
    assert found["out.weight"].all()


@pytest.mark.filterwarnings("ignore")
def test_an_exported_program_has_no_evaluation_mode():
    model = _model(lambda s, x: s.out(x)).eval()
    shapes = ((({0: torch.export.Dim.DYNAMIC},)),)
    exported = torch.export.export(model, (BATCHES[0][0],), dynamic_shapes=shapes).module()
    with pytest.raises(SquisherError, match="eval_mode=False"):
        fisher(exported, BATCHES)
    _assert_as_plain(exported, model, eval_mode=False)
