"""Optimizers of other libraries: what each accumulator is, recomputed from the gradients that made it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import squisher
from squisher.errors import NoAccumulatorError

FIXTURES = Path(__file__).parent.parent / "fixtures"
spec = importlib.util.spec_from_file_location("make_optimizer_zoo", FIXTURES / "make_optimizer_zoo.py")
zoo = importlib.util.module_from_spec(spec)
spec.loader.exec_module(zoo)
STEPS, DECAY = zoo.STEPS, zoo.DECAY


def squares(shape, l2=0.0):
    weight = zoo.weight(shape).float().double()
    return [(zoo.gradient(shape, step).float().double() + l2 * weight) ** 2 for step in range(STEPS)]


def average(values, betas):
    """The weighted mean with the given decay at each step, from zero, divided by the sum of its weights."""
    total, weights = torch.zeros_like(values[0]), 0.0
    for value, beta in zip(values, betas, strict=True):
        total, weights = beta * total + (1 - beta) * value, beta * weights + (1 - beta)
    return total / weights


def ema(beta, l2=0.0):
    return lambda shape: average(squares(shape, l2), [beta] * STEPS)


def from_the_first_square(beta, l2=0.0):
    return lambda shape: average(squares(shape, l2), [0.0] + [beta] * (STEPS - 1))


def mean(shape):
    return torch.stack(squares(shape)).mean(0)


def factored(axes_of, betas):
    """The product of the two means, over the axes that the optimizer chooses; the average itself where it factors nothing."""

    def expected(shape):
        v = average([s + 1e-30 for s in squares(shape)], betas)
        axes = axes_of(shape)
        if axes is None:
            return v
        row, column = v.mean(axes[1], keepdim=True), v.mean(axes[0], keepdim=True)
        return row * column / row.mean(axes[0], keepdim=True)

    return expected


def last_two(shape):
    return (len(shape) - 2, len(shape) - 1) if len(shape) > 1 else None


def first_two(shape):
    return (0, 1) if len(shape) > 1 else None


GROWING = [1 - (t + 1) ** -0.8 for t in range(STEPS)]

READ = {
    **dict.fromkeys(["po_adabound", "po_adamc", "po_adamp", "po_adams", "po_adapnm", "po_adatam", "po_diffgrad", "po_emonavi", "po_galore", "po_grams", "po_lamb", "po_laprop", "po_adamwsn", "po_schedulefreeadamw", "po_schedulefreeradam", "po_apollo", "timm_adamp", "timm_adamwlegacy", "timm_lamb", "timm_laprop", "timm_nadamw", "timm_radamlegacy", "schedulefree_adamw", "schedulefree_radam", "prodigyopt", "po_prodigy"], ema(0.999)),
    **dict.fromkeys(["po_ademamix", "po_dualadam", "po_padam", "dadaptation_adam", "po_dadaptadam", "po_adamg", "timm_nadamlegacy"], ema(0.999, DECAY)),
    **dict.fromkeys(["po_adamod", "po_adanorm", "po_stableadamw"], ema(0.99)),
    "po_adai": ema(0.99, DECAY),
    "po_qhadam": ema(0.999, DECAY),
    "po_fadam": ema(0.999),
    "po_simplifiedademamix": ema(0.95),
    "po_msvag": ema(0.9),
    "po_ftrl": mean,
    "timm_adopt": from_the_first_square(0.9999, DECAY),
    "timm_adoptw": from_the_first_square(0.9999),
    "timm_rmsproptf": ema(0.9, DECAY),
    "po_came": factored(last_two, [0.999] * STEPS),
    "came_pytorch": factored(last_two, [0.999] * STEPS),
    "po_adafactor": factored(last_two, GROWING),
    "transformers_adafactor": factored(last_two, GROWING),
    "timm_adafactor": factored(first_two, GROWING),
    "timm_adafactorbv": factored(lambda shape: {(20, 24, 2, 2): (0, 1), (18, 24): (0, 1)}.get(shape), GROWING),
}  # fmt: skip

REFUSED = {
    "po_adopt": "RAdam, EXAdam, ADOPT or Ano write the same keys",
    "po_ano": "RAdam, EXAdam, ADOPT or Ano write the same keys",
    "po_radam": "RAdam, EXAdam, ADOPT or Ano write the same keys",
    "po_exadam": "RAdam, EXAdam, ADOPT or Ano write the same keys",
    "po_adan": "Adan averages the square of g \\+",
    "timm_adan": "Adan averages the square of g \\+",
    "po_adabelief": "AdaBelief averages \\(g − its mean\\)²",
    "timm_adabelief": "AdaBelief averages \\(g − its mean\\)²",
    "po_aida": "averages \\(g − its mean\\)²",
    "po_yogi": "Yogi changes its accumulator by sign",
    "po_novograd": "NovoGrad keeps one value per tensor",
    "timm_novograd": "NovoGrad keeps one value per tensor",
    "po_amos": "Amos keeps one value per tensor",
    "po_nero": "Nero keeps one value per neuron",
    "po_adagc": "AdaGC squares the gradient after clipping each tensor",
    "po_adamax": "Adamax keeps a decayed maximum",
    "po_adasmooth": "AdaSmooth averages with a decay of its own",
    "po_adashift": "AdaShift squares the largest of several",
    "po_grokfastadamw": "GrokFastAdamW squares the gradient plus",
    "po_mars": "MARS squares a combination",
    "timm_mars": "MARS squares a combination",
    "po_madgrad": "MADGRAD weights every squared gradient",
    "timm_madgrad": "MADGRAD weights every squared gradient",
    "po_ranger": "Ranger squares the gradient of a matrix after",
    "po_soap": "SOAP keeps its squared gradient in a rotated basis",
    "po_shampoo": "Shampoo keeps matrices",
    "po_sm3": "SM3 keeps maxima",
    "po_stablespam": "StableSPAM squares a gradient",
    "po_swats": "SWATS has gone over to SGD",
    "po_sara": "SPAM or SaRA keeps values of a changing part",
    "po_lion": "Lion keeps a moving average of the gradient",
    "timm_lion": "Lion keeps a moving average of the gradient",
    "lion_pytorch": "Lion keeps a moving average of the gradient",
    "ivon": "IVON keeps a Hessian estimate",
}

PARTLY = {  # what is read of it, and why the rest is not
    "po_conda": ({"bias": ema(0.999)}, {"weight": "projected gradient"}),
    "po_spam": ({"bias": ema(0.999)}, {"weight": "a changing part of the weights"}),
    "galore_torch": ({"bias": ema(0.999)}, {"weight": "projected gradient"}),
    "adam_mini": ({"fc.bias": ema(0.99)}, {"fc.weight": "one value per block"}),
    "timm_muon": ({"bias": ema(0.95)}, {"weight": "moving average of the gradient"}),
    "timm_adamuon": ({"bias": ema(0.95)}, {"weight": "orthogonalised momentum"}),
}


def names(optimizer):
    """The names in the optimizer's order; GaLore puts what it does not project first."""
    shapes = zoo.OPTIMIZERS[optimizer][1]
    return sorted(shapes, key=lambda n: n == "weight") if optimizer == "galore_torch" else list(shapes)


def compare(importance, expected, shapes, tolerance=2e-5):
    for name, want in expected.items():
        got = importance[name].double()
        want = want(shapes[name])
        assert got.shape == want.shape
        assert torch.allclose(got, want, rtol=tolerance, atol=1e-3 * tolerance * float(want.max())), name


def test_every_fixture_has_a_verdict():
    assert {path.stem for path in (FIXTURES / "optimizer_zoo").iterdir()} == {*READ, *REFUSED, *PARTLY}
    assert set(zoo.OPTIMIZERS) == {*READ, *REFUSED, *PARTLY}


# timm's RMSprop starts at one: what is left of it after seven steps costs digits.
TOLERANCE = {"timm_rmsproptf": 2e-3}


@pytest.mark.parametrize("optimizer", READ)
def test_a_squared_gradient_average_is_the_recomputed_one(optimizer):
    importance = squisher.extract(FIXTURES / "optimizer_zoo" / f"{optimizer}.pt", names=names(optimizer))
    shapes = zoo.OPTIMIZERS[optimizer][1]
    compare(importance, dict.fromkeys(shapes, READ[optimizer]), shapes, TOLERANCE.get(optimizer, 2e-5))
    assert set(importance) == set(shapes)
    assert importance.provenance.steps == {"min": STEPS, "max": STEPS}


@pytest.mark.parametrize("optimizer", REFUSED)
def test_what_is_no_average_of_squares_is_refused_by_name(optimizer):
    with pytest.raises(NoAccumulatorError, match=REFUSED[optimizer]):
        squisher.extract(FIXTURES / "optimizer_zoo" / f"{optimizer}.pt", names=names(optimizer))


@pytest.mark.parametrize("optimizer", PARTLY)
def test_single_entries_that_are_no_average_are_absent_with_the_reason(optimizer):
    expected, absent = PARTLY[optimizer]
    importance = squisher.extract(FIXTURES / "optimizer_zoo" / f"{optimizer}.pt", names=names(optimizer))
    assert set(importance) == set(expected)
    compare(importance, expected, zoo.OPTIMIZERS[optimizer][1])
    assert importance.provenance.absent.keys() == absent.keys()
    for name, words in absent.items():
        assert words in importance.provenance.absent[name].note


@pytest.mark.parametrize("optimizer", ["timm_adamwlegacy", "po_ademamix", "po_padam", "timm_rmsproptf", "po_adamg"])
def test_whether_weight_decay_is_inside_is_said(optimizer):
    inside = optimizer != "timm_adamwlegacy"
    importance = squisher.extract(FIXTURES / "optimizer_zoo" / f"{optimizer}.pt", names=names(optimizer))
    said = [one.numbers for one in importance.provenance.pollution if one.code == "l2"]
    assert said == ([{"weight_decay": 0.05}] if inside else [])


@pytest.mark.parametrize(
    ("optimizer", "code"),
    [
        ("prodigyopt", "step_size"),
        ("timm_rmsproptf", "start"),
        ("timm_lamb", "clipping"),
        ("schedulefree_adamw", "other_weights"),
        ("came_pytorch", "factored"),
    ],
)
def test_what_else_is_inside_is_said(optimizer, code):
    importance = squisher.extract(FIXTURES / "optimizer_zoo" / f"{optimizer}.pt", names=names(optimizer))
    assert code in [one.code for one in importance.provenance.pollution]


# -- with the libraries --------------------------------------------------------------------------------------------------

LIVE = {
    **READ,
    "po_adopt": from_the_first_square(0.9999, DECAY),
    "po_radam": ema(0.999),
    "po_exadam": ema(0.999),
}


@pytest.mark.formats
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("optimizer", zoo.OPTIMIZERS)
def test_fresh_states_are_read_like_the_fixtures(optimizer, tmp_path):
    path = tmp_path / "fresh.pt"
    zoo.save(optimizer, path)
    shapes = zoo.OPTIMIZERS[optimizer][1]
    if optimizer in REFUSED:
        with pytest.raises(NoAccumulatorError, match=REFUSED[optimizer]):
            squisher.extract(path, names=names(optimizer))
        return
    expected = dict.fromkeys(shapes, READ[optimizer]) if optimizer in READ else PARTLY[optimizer][0]
    compare(squisher.extract(path, names=names(optimizer)), expected, shapes, TOLERANCE.get(optimizer, 2e-5))


@pytest.mark.formats
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("optimizer", LIVE)
def test_live_optimizers_are_read_by_their_class(optimizer):
    live, module = zoo.train(optimizer)
    importance = squisher.extract(live, module)
    shapes = zoo.OPTIMIZERS[optimizer][1]
    compare(importance, dict.fromkeys(shapes, LIVE[optimizer]), shapes, TOLERANCE.get(optimizer, 2e-5))


@pytest.mark.formats
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("optimizer", sorted({*REFUSED} - {*LIVE}))
def test_live_optimizers_without_an_average_are_refused(optimizer):
    live, module = zoo.train(optimizer)
    with pytest.raises(NoAccumulatorError):
        squisher.extract(live, module)
