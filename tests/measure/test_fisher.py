"""What `fisher` promises around the numbers: provenance, choices, limits, and a model that comes back as it was."""

from __future__ import annotations

import json
from collections import UserList

import pytest
import torch
from torch import nn

import squisher.measure
from squisher.errors import NamingError, SquisherError
from squisher.measure import fisher
from tests.measure.zoo import Apply, build, split

torch.manual_seed(0)
X, Y = torch.randn(12, 5), torch.randint(0, 4, (12,))
BATCHES = list(zip(X.split(4), Y.split(4), strict=True))


def _mlp():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(0.5), nn.Linear(7, 4))


def test_provenance():
    model = _mlp()
    model[0].bias.requires_grad_(False)
    p = fisher(model, BATCHES, labels="sampled", draws=2, seed=4).provenance
    assert p.kind == "fisher"
    assert p.estimator == {"labels": "sampled", "per": "example", "draws": 2, "likelihood": "categorical"}
    assert (p.examples, p.unit, p.dtype_of_source, p.scale) == (12, "example", "float32", 1.0)
    assert {name: why.reason for name, why in p.absent.items()} == {"0.bias": "frozen"}
    assert p.coverage == {"method": "fast", "loop": {}, "unused": {}}
    assert p.seed == 4
    json.dumps(p.to_dict())


def test_parts_of_the_data_combine_to_the_whole():
    whole = fisher(_mlp(), BATCHES)
    parts = [fisher(_mlp(), BATCHES[:1]), fisher(_mlp(), BATCHES[1:])]
    combined = squisher.importance.Importance.combine(parts)
    for name in whole:
        assert torch.allclose(combined[name], whole[name], rtol=1e-5)


def test_parts_of_unequal_length_combine_to_the_whole_per_token():
    model, (ids, labels) = build("decoder")
    labels[:4, 1:] = -100
    whole = fisher(model, [(ids, labels)], likelihood="tokens", unit="token")
    parts = [fisher(model, [(ids[s], labels[s])], likelihood="tokens", unit="token") for s in (slice(4), slice(4, 6))]
    combined = squisher.importance.Importance.combine(parts)
    assert combined.provenance.tokens == whole.provenance.tokens
    for name in whole:
        assert torch.allclose(combined[name], whole[name], rtol=1e-5, atol=1e-9), name


def test_tied_weights_are_here_once():
    model, batch = build("decoder")
    found = fisher(model, [batch], likelihood="tokens")
    assert "head.weight" not in found
    assert found.provenance.tied == {"head.weight": "tokens.weight"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile itself
def test_wrappers_are_looked_through():
    plain = fisher(_mlp(), BATCHES)
    wrapped = nn.DataParallel(torch.compile(_mlp()))
    found = fisher(wrapped, BATCHES)
    assert list(found) == list(plain)
    assert all(torch.equal(found[n], plain[n]) for n in plain)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_parts_run_eagerly_and_lose_their_prefix():
    inner = torch.compile(nn.Linear(5, 5), backend="eager")
    model = nn.Sequential(inner, nn.Linear(5, 4))
    found = fisher(model, BATCHES)
    assert list(found) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert found.provenance.coverage["loop"] == {}
    called = nn.Sequential(nn.Linear(5, 4))
    called.compile(backend="eager")
    implementation = called._compiled_call_impl
    fisher(called, BATCHES)
    assert called._compiled_call_impl is implementation


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        ("bias", ["0.bias", "3.bias"]),
        (["3.weight"], ["3.weight"]),
        (lambda name: name.startswith("0"), ["0.weight", "0.bias"]),
    ],
)
def test_some_parameters(chosen, names):
    whole, some = fisher(_mlp(), BATCHES), fisher(_mlp(), BATCHES, parameters=chosen)
    assert list(some) == names
    assert all(torch.allclose(some[n], whole[n], rtol=1e-6) for n in names)
    assert {why.reason for why in some.provenance.absent.values()} == {"not_requested"}


def test_chosen_parameters_may_be_frozen():
    model = _mlp().requires_grad_(False)
    assert torch.allclose(fisher(model, BATCHES, parameters="weight")["0.weight"], fisher(_mlp(), BATCHES)["0.weight"])
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("labels", ["data", "sampled"])
def test_max_examples_stops_early_and_asks_for_no_more(labels):
    asked = []

    def source():
        for number, batch in enumerate(BATCHES):
            asked.append(number)
            yield batch

    done = []
    found = fisher(_mlp(), source(), max_examples=6, labels=labels, progress=lambda n, total: done.append((n, total)))
    expected = fisher(_mlp(), [(X[:6], Y[:6])], labels=labels)
    assert asked == [0, 1]
    assert done == [(4, 6), (6, 6)]
    assert found.provenance.examples == 6
    assert all(torch.allclose(found[n], expected[n], rtol=1e-5) for n in expected)


def test_standard_error_is_that_of_batch_means():
    found = fisher(_mlp(), BATCHES, standard_error=True).provenance.standard_error
    means = torch.stack([fisher(_mlp(), [b])["0.weight"].sum() for b in BATCHES])
    assert found["0.weight"] == pytest.approx(float(means.std() / 3**0.5 / means.mean()), rel=1e-4)
    assert fisher(_mlp(), BATCHES[:1], standard_error=True).provenance.standard_error["0.weight"] is None


def test_standard_error_covers_the_truth():
    torch.manual_seed(0)
    x = torch.randn(4000, 5)
    truth = float(fisher(_mlp(), [x], labels="exact")["0.weight"].sum())
    inside = 0
    for part in x.split(400):
        found = fisher(_mlp(), part.split(20), labels="exact", standard_error=True)
        error = found.provenance.standard_error["0.weight"]
        inside += abs(float(found["0.weight"].sum()) / truth - 1) < 2 * error
    assert inside >= 8


def test_types_of_the_result():
    assert fisher(_mlp(), BATCHES)["0.weight"].dtype == torch.float32
    assert fisher(_mlp().double(), [(X.double(), Y)])["0.weight"].dtype == torch.float32
    assert fisher(_mlp(), BATCHES, dtype=torch.float64)["0.weight"].dtype == torch.float64
    assert fisher(_mlp(), BATCHES, dtype=torch.bfloat16)["0.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["mlp", "resnet", "encoder", "decoder"])
def test_half_precision_models_are_summed_in_single_precision(name):
    model, batch = build(name, torch.float32)
    likelihood = "tokens" if name == "decoder" else "categorical"
    expected = fisher(model, [batch], likelihood=likelihood)
    half, batch = build(name, torch.bfloat16)
    found = fisher(half, split(batch, 4), likelihood=likelihood)
    assert found.provenance.dtype_of_source == "bfloat16"
    assert found.provenance.coverage["loop"] == {}
    for key in expected:
        assert found[key].dtype == torch.float32
        assert float(found[key].sum()) == pytest.approx(float(expected[key].sum()), rel=0.25, abs=1e-6)


@pytest.mark.parametrize("name", ["mlp", "resnet", "encoder", "decoder"])
def test_autocast(name):
    model, batch = build(name)
    likelihood = "tokens" if name == "decoder" else "categorical"
    expected = fisher(model, [batch], likelihood=likelihood)
    with torch.autocast("cpu", torch.bfloat16):
        found = fisher(model, split(batch, 4), likelihood=likelihood)
    assert found.provenance.coverage["loop"] == {}
    for key in expected:
        assert float(found[key].sum()) == pytest.approx(float(expected[key].sum()), rel=0.2, abs=1e-6)


def test_a_function_as_likelihood():
    def losses(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    found, expected = fisher(_mlp(), BATCHES, likelihood=losses), fisher(_mlp(), BATCHES)
    assert found.provenance.estimator["likelihood"] == "function"
    assert all(torch.allclose(found[n], expected[n], rtol=1e-5) for n in expected)


# -- the model comes back as it was ------------------------------------------------------------------------------------


class _Counting(nn.Module):
    """Changes a buffer in every call, replaces another, draws random numbers, and fails when told."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(5, 4), nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(5))
        self.passes, self.fail_at = UserList(), None  # no list, which would begin anew in every pass, too

    def forward(self, x):
        self.calls += 1
        self.last = x[0].detach()
        self.passes.append(len(x))  # the buffers begin anew in every pass
        torch.rand(3)
        if self.fail_at is not None and len(self.passes) >= self.fail_at:
            raise RuntimeError("as told")
        return self.norm(self.layer(x))


def _state(model):
    return {
        "modes": [m.training for m in model.modules()],
        "flags": [p.requires_grad for p in model.parameters()],
        "grads": [p.grad for p in model.parameters()],
        "values": {k: v.clone() for k, v in model.state_dict().items()},
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()],
        "rng": torch.get_rng_state(),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
    }


def _assert_same(before, after):
    for key in ("modes", "flags", "hooks", "fast path"):
        assert before[key] == after[key], key
    assert all(a is b for a, b in zip(before["grads"], after["grads"], strict=True))
    assert torch.equal(before["rng"], after["rng"])
    assert all(torch.equal(before["values"][k], after["values"][k]) for k in before["values"])


@pytest.mark.parametrize(
    "settings", [{}, {"method": "loop"}, {"per": "batch"}, {"labels": "exact"}, {"parameters": "norm"}]
)
@pytest.mark.parametrize("fail_at", [None, 1, 3, 6])
def test_the_model_is_untouched_also_after_a_failure(settings, fail_at):
    model = _Counting().train()
    model.norm.eval()
    model.layer.bias.requires_grad_(False)
    model(X).sum().backward()
    gradient = model.layer.weight.grad.clone()
    model.passes.clear()
    before = _state(model)
    model.fail_at = fail_at
    if fail_at is None or (settings.get("per") == "batch" and fail_at > 3):
        fisher(model, BATCHES, **settings)
    else:
        with pytest.raises(RuntimeError, match="as told"):
            fisher(model, BATCHES, **settings)
    _assert_same(before, _state(model))
    assert torch.equal(model.layer.weight.grad, gradient)


class _Keeping(nn.Module):
    """Keeps a statistic that is no buffer, and lets a buffer grow, as observers of quantisation do."""

    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(4)
        self.register_buffer("last", torch.zeros(0))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        self.last.resize_(4).copy_(x[0].detach())
        return x


@pytest.mark.parametrize("method", ["auto", "loop"])
def test_statistics_of_training_mode_come_back(method):
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), _Keeping(), nn.Linear(4, 4)).train()
    before = _state(model)
    fisher(model, BATCHES, per="batch", eval_mode=False, method=method)
    _assert_same(before, _state(model))
    assert not model[2].mean.any()
    assert model[2].last.shape == (0,)


def test_inputs_get_no_gradient():
    x = X.clone().requires_grad_()
    fisher(_mlp(), [(x, Y)])
    assert x.grad is None


def test_evaluation_mode_is_the_default():
    a, b = fisher(_mlp().train(), BATCHES), fisher(_mlp().eval(), BATCHES)
    assert torch.equal(a["0.weight"], b["0.weight"])
    torch.manual_seed(0)
    dropped = fisher(_mlp().train(), BATCHES, eval_mode=False)
    assert not torch.allclose(dropped["0.weight"], a["0.weight"])
    # Dropout differs from pass to pass, so nothing could be proven in this mode.
    assert dropped.provenance.coverage["method"] == "loop"
    assert "random" in dropped.provenance.coverage["loop"]["0.weight"]


def test_inside_no_grad():
    with torch.no_grad():
        found = fisher(_mlp(), BATCHES)
    assert torch.equal(found["0.weight"], fisher(_mlp(), BATCHES)["0.weight"])


# -- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"method": "hook"}, SquisherError, "'auto', 'fast' or 'loop'"),
        ({"dtype": torch.float16}, SquisherError, "float16"),
        ({"max_examples": 0}, SquisherError, "max_examples .*not 0"),
        ({"parameters": "nothing"}, SquisherError, "no parameter to measure"),
        ({"parameters": ["0.wieght"]}, NamingError, "Did you mean '0.weight'"),
        ({"parameters": "("}, SquisherError, "not a regular expression"),
    ],
)
def test_refusals(settings, kind, message):
    with pytest.raises(kind, match=message):
        fisher(_mlp(), BATCHES, **settings)


def test_refused_data_and_models():
    with pytest.raises(SquisherError, match="no batches"):
        fisher(_mlp(), [])
    with pytest.raises(SquisherError, match="trainable"):
        fisher(_mlp().requires_grad_(False), BATCHES)
    with pytest.raises(SquisherError, match=r"'1' normalises.*eval_mode=True"):
        fisher(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).train(), BATCHES, eval_mode=False)
    model, (ids, targets) = build("decoder")
    with pytest.raises(SquisherError, match="No position counts"):
        fisher(model, [(ids, torch.full_like(targets, -100))], likelihood="tokens", unit="token")


# -- what the proof is for ---------------------------------------------------------------------------------------------


def test_fast_raises_where_auto_uses_the_loop():
    model, batch = build("bilinear")
    with pytest.raises(SquisherError, match="'fast'.* 2 of 2 .*b.weight: bilinear"):
        fisher(model, [batch], method="fast")


def test_a_batch_dimension_that_changes_later_is_noticed():
    """Rows of different examples are added up in the second batch only."""

    def forward(s, x):
        if x.shape[0] == 3:
            return s.out(s.inside(x.mT.reshape(-1, 5)).view(2, 3, 7).sum(0))
        return s.out(s.inside(x.mT).sum(1))

    model = Apply(forward, inside=nn.Linear(5, 7), out=nn.Linear(7, 4)).double()
    x, y = torch.randn(7, 5, 2).double(), torch.randint(0, 4, (7,))
    with pytest.raises(SquisherError, match="influence each other"):
        fisher(model, [(x[:4], y[:4]), (x[4:], y[4:])], dtype=torch.float64)


def test_a_parameter_that_is_used_in_a_later_batch_only():
    def forward(s, x):
        y = s.first(x)
        return y + s.second(x) if x.sum() > 0 else y

    model = Apply(forward, first=nn.Linear(5, 4), second=nn.Linear(5, 4), never=nn.Linear(5, 4)).double()
    x = X.double() - 10
    x[8:] += 30
    batches = list(zip(x.split(4), Y.split(4), strict=True))
    found = fisher(model, batches, dtype=torch.float64)
    expected = fisher(model, batches, method="loop", dtype=torch.float64)
    assert expected["second.weight"].sum() > 0
    for name in expected:
        assert torch.allclose(found[name], expected[name], rtol=1e-10), name
    coverage = found.provenance.coverage
    assert coverage["loop"] == {}
    assert coverage["unused"].keys() == {"never.weight", "never.bias"}


def test_a_first_batch_without_labels_that_count_proves_nothing():
    model, (ids, targets) = build("decoder", torch.float64)
    nothing = torch.full_like(targets, -100)
    batches = [(ids, nothing), (ids, targets)]
    found = fisher(model, batches, likelihood="tokens", dtype=torch.float64)
    expected = fisher(model, batches, likelihood="tokens", dtype=torch.float64, method="loop")
    assert all(torch.allclose(found[n], expected[n], rtol=1e-10, atol=1e-18) for n in expected)
    assert expected["tokens.weight"].sum() > 0


@pytest.mark.parametrize("method", ["auto", "loop"])
@pytest.mark.parametrize("per", ["example", "batch"])
def test_examples_without_a_label_do_not_count(method, per):
    """A label of -100 takes an example out of the mean, as it does out of a training loss."""
    (inputs, labels), *_ = BATCHES
    some = torch.arange(len(labels)) % 3 == 0
    found = fisher(_mlp(), [(inputs, labels.masked_fill(~some, -100))], method=method, per=per)
    expected = fisher(_mlp(), [(inputs[some], labels[some])], method=method, per=per)
    assert found.provenance.examples == expected.provenance.examples == int(some.sum())
    assert all(torch.allclose(found[n], expected[n], rtol=1e-5) for n in expected)
    with pytest.raises(SquisherError, match="every label is -100"):
        fisher(_mlp(), [(inputs, torch.full_like(labels, -100))], method=method, per=per)


def test_a_wrong_rule_is_found_out(monkeypatch):
    """The proof can fail: with a rule that is wrong by a factor, the loop takes over."""
    from squisher.measure.rules import linear as layers

    right = layers.Linear.gradients

    def wrong(self, g, dim, examples, squared=False):
        return right(self, g * 1.01, dim, examples, squared)

    monkeypatch.setattr(layers.Linear, "gradients", wrong)
    found = fisher(_mlp(), BATCHES)
    assert found.provenance.coverage["loop"].keys() == {"0.weight", "3.weight"}
    monkeypatch.undo()
    assert torch.allclose(found["0.weight"], fisher(_mlp(), BATCHES, method="loop")["0.weight"], rtol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_any_batch_size(size):
    model, batch = build("encoder", torch.float64)
    found = fisher(model, split(batch, size), dtype=torch.float64)
    expected = fisher(model, [batch], method="loop", dtype=torch.float64)
    assert found.provenance.coverage["loop"] == {}
    for name in expected:
        assert torch.allclose(found[name], expected[name], rtol=1e-9, atol=1e-20), name
