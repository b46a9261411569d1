"""The four methods against ten lines of float64, and what must hold whatever the numbers are."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import squisher
from squisher import merge
from squisher.errors import ScaleError, SquisherError, SquisherWarning
from squisher.storage.tensors import CHUNK, chunks_of, dtype_of, shape_of

SHAPES = {"body.weight": (40, 30), "body.bias": (40,), "norm.scale": (), "none": (0, 3)}


def weights(seed, shapes=SHAPES, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def importances(seed, size=1e-14, shapes=SHAPES):
    generator = torch.Generator().manual_seed(100 + seed)
    return {name: torch.rand(shape, generator=generator) ** 4 * size for name, shape in shapes.items()}


def fisher_reference(models, fishers, coefficients, normalize=None, floor="relative"):
    """Ten lines on whole tensors in float64: scale is 1, then normalize, floor, coefficient."""
    fishers = [{n: t.double() for n, t in f.items()} for f in fishers]
    flat = [torch.cat([t.flatten() for t in f.values()]) for f in fishers]
    norms = [{None: 1.0, "mean": v.mean(), "l2": v.norm()}[normalize] for v in flat]
    out = {}
    for name in models[0]:
        parts = [f[name] / norm for f, norm in zip(fishers, norms, strict=True)]
        bound = 1e-6 * torch.stack(parts).mean() if floor == "relative" else None
        parts = [p.clamp_min(bound if bound is not None else floor / n) for p, n in zip(parts, norms, strict=True)]
        above = sum(c * p * m[name].double() for c, p, m in zip(coefficients, parts, models, strict=True))
        out[name] = above / sum(c * p for c, p in zip(coefficients, parts, strict=True))
    return out


def assert_close(merged, expected, rtol=2e-6, atol=2e-6):
    assert set(merged) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(merged[name].double(), value, rtol=rtol, atol=atol, msg=name)


@pytest.mark.parametrize("normalize", [None, "mean", "l2"])
@pytest.mark.parametrize("floor", ["relative", 1e-8, 1e-16])
@pytest.mark.parametrize("count", [2, 5])
def test_fisher_is_the_reference(normalize, floor, count):
    models, fishers = [weights(k) for k in range(count)], [importances(k) for k in range(count)]
    coefficients = [0.5 + k for k in range(count)]
    merged = merge.fisher(models, fishers, coefficients, normalize=normalize, floor=floor)
    assert_close(merged, fisher_reference(models, fishers, coefficients, normalize, floor))
    exact = merge.fisher(
        models, fishers, coefficients, normalize=normalize, floor=floor, precision="float64", dtype="float64"
    )
    assert_close(exact, fisher_reference(models, fishers, coefficients, normalize, floor), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_long_tensors_of_every_type_in_pieces(dtype):
    shapes = {"long": (CHUNK * 2 + 12345,), "short": (7,)}
    models, fishers = [weights(k, shapes, dtype) for k in range(2)], [importances(k, shapes=shapes) for k in range(2)]
    merged = merge.fisher(models, fishers)
    assert dtype_of(merged, "long") == dtype
    assert shape_of(merged, "long") == (CHUNK * 2 + 12345,)
    expected = fisher_reference(models, fishers, [1, 1])
    whole = merge.fisher(models, fishers, dtype="float32")
    assert_close(whole, expected)
    for name in merged:
        assert torch.equal(merged[name], whole[name].to(dtype))
        pieces = list(chunks_of(merged, name, 1000))
        assert max(len(p) for p in pieces) <= 1000
        assert torch.equal(torch.cat(pieces), merged[name].flatten())


def test_references_floors_and_norms_on_request():
    models, fishers = [weights(k) for k in range(3)], [importances(k, 1e-6) for k in range(3)]
    # The floor of the first implementation: absolute, on the target only, and the L2 norm of what was not floored.
    norms = [math.sqrt(sum(float(t.double().square().sum()) for t in f.values())) for f in fishers]
    name = "body.weight"
    parts = [f[name].double().clamp_min(1e-6 if k == 0 else 0) / norms[k] for k, f in enumerate(fishers)]
    expected = sum(p * m[name].double() for p, m in zip(parts, models, strict=True)) / sum(parts)
    merged = merge.fisher(models, fishers, normalize="l2", floor=[1e-6, 0, 0])
    torch.testing.assert_close(merged[name].double(), expected, rtol=1e-5, atol=1e-6)
    # One that adds instead.
    parts = [f[name].double() + 1e-6 for f in fishers]
    expected = sum(p * m[name].double() for p, m in zip(parts, models, strict=True)) / sum(parts)
    merged = merge.fisher(models, fishers, floor="+1e-6")
    torch.testing.assert_close(merged[name].double(), expected, rtol=1e-5, atol=1e-6)
    # An absolute floor above all importances is the plain average: what a fine-tuned transformer meets at 1e-8.
    small = [importances(k, 1e-12) for k in range(3)]
    assert_close(merge.fisher(models, small, floor=1e-8), {n: t.double() for n, t in merge.average(models).items()})


@pytest.mark.parametrize("method", ["average", "fisher"])
def test_one_model_comes_back_to_the_bit(method):
    model, other = weights(1, dtype=torch.bfloat16), weights(2, dtype=torch.bfloat16)
    arguments = {"average": lambda n: (), "fisher": lambda n: ([importances(k) for k in range(n)],)}[method]
    for models, coefficients in (([model], None), ([model, other], [0.7, 0]), ([other, model], [0, 3])):
        merged = getattr(merge, method)(models, *arguments(len(models)), coefficients=coefficients)
        assert all(torch.equal(merged[name], model[name]) for name in model)
        assert dtype_of(merged, "body.weight") == torch.bfloat16


def test_equal_weights_come_back_to_the_bit_and_equal_importances_give_the_average():
    model, f = weights(1), [importances(1), importances(2)]
    merged = merge.fisher([model, {k: v.clone() for k, v in model.items()}], f, [0.3, 0.4])
    assert all(torch.equal(merged[name], model[name]) for name in model)
    models = [weights(k) for k in range(3)]
    coefficients = [1, 2, 0.5]
    equal = merge.fisher(models, [f[0]] * 3, coefficients)
    assert_close(equal, {n: t.double() for n, t in merge.average(models, coefficients).items()})
    expected = {n: sum(c * m[n].double() for c, m in zip(coefficients, models, strict=True)) / 3.5 for n in models[0]}
    assert_close(merge.average(models, coefficients), expected)


@settings(max_examples=30, deadline=None)
@given(st.floats(-10, 20), st.sampled_from([None, "mean", "l2"]), st.integers(0, 1000))
def test_a_common_factor_changes_nothing(exponent, normalize, seed):
    models, fishers = [weights(seed), weights(seed + 1)], [importances(seed), importances(seed + 1)]
    scaled = [{n: t * 10**exponent for n, t in f.items()} for f in fishers]
    a, b = (merge.fisher(models, f, normalize=normalize) for f in (fishers, scaled))
    assert_close(a, {n: t.double() for n, t in b.items()}, rtol=1e-5, atol=1e-5)


def test_a_power_of_two_changes_nothing_to_the_bit():
    models, fishers = [weights(k) for k in range(3)], [importances(k) for k in range(3)]
    scaled = [{n: t * 2.0**-20 for n, t in f.items()} for f in fishers]
    a, b = merge.fisher(models, fishers), merge.fisher(models, scaled)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_zero_everywhere_is_the_average_never_nan():
    models, zero = [weights(1), weights(2)], {n: torch.zeros(s) for n, s in SHAPES.items()}
    average = {n: t.double() for n, t in merge.average(models, [1, 3]).items()}
    for floor in ("relative", 0, 1e-8, "+1e-6"):
        assert_close(merge.fisher(models, [zero, zero], [1, 3], floor=floor), average)
    # Zero in single entries, with no floor: the average in those alone. Denormals count as zero.
    half = {n: t.clone() for n, t in importances(1).items()}
    half["body.weight"][:20] = 1e-40
    merged = merge.fisher(models, [half, half], [1, 3], floor=0)
    assert_close(merged, average)
    other = importances(2)
    other["body.weight"][:20] = 0
    merged = merge.fisher(models, [half, other], [1, 3], floor=0)
    torch.testing.assert_close(merged["body.weight"][:20].double(), average["body.weight"][:20], rtol=1e-6, atol=1e-6)
    # Zero in one model only: the other one decides.
    merged = merge.fisher(models, [zero, importances(1)], floor=0)
    torch.testing.assert_close(merged["body.bias"], models[1]["body.bias"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [1e-35, 1e-30, 1e30])
def test_extreme_sizes_keep_their_digits(size):
    models, fishers = [weights(1), weights(2)], [{n: t + 0.1 for n, t in importances(k, 1.0).items()} for k in (1, 2)]
    scaled = [{n: t.double() * size for n, t in f.items()} for f in fishers]
    for floor in ("relative", 0):
        expected = merge.fisher(models, fishers, floor=floor, precision="float64", dtype="float64")
        merged = merge.fisher(models, [{n: t.float() for n, t in f.items()} for f in scaled], floor=floor)
        assert_close(merged, dict(expected), rtol=1e-5, atol=1e-5)


# -- gradient matching -------------------------------------------------------------------------------------------------


def ubgm_reference(base, models, h0, hs, alphas, sizes, s0, delta):
    out = {}
    for name in base:
        g = s0 * h0[name].double() + delta(name)
        below = g + sum(a * s * h[name].double() for a, s, h in zip(alphas, sizes, hs, strict=True))
        above = sum(
            a * (s * h[name].double() + g) * (m[name].double() - base[name].double())
            for a, s, h, m in zip(alphas, sizes, hs, models, strict=True)
        )
        out[name] = base[name].double() + above / below
    return out


def test_ubgm_is_the_reference():
    base, models = weights(0), [weights(k) for k in (1, 2, 3)]
    h0, hs = importances(0), [importances(k) for k in (1, 2, 3)]
    alphas, sizes, s0 = [1.0, 0.5, 2.0], [112e3, 8530, 67349], 25e3
    merged = merge.ubgm(base, models, h0, hs, alphas, sizes, s0, delta=1e-12)
    assert_close(merged, ubgm_reference(base, models, h0, hs, alphas, sizes, s0, lambda name: 1e-12), 1e-5, 1e-5)

    def relative(name):
        parts = [a * s * h[name].double() for a, s, h in zip(alphas, sizes, hs, strict=True)]
        return 1e-6 * (sum(parts) + s0 * h0[name].double()).mean()

    merged = merge.ubgm(base, models, h0, hs, alphas, sizes, s0)
    assert_close(merged, ubgm_reference(base, models, h0, hs, alphas, sizes, s0, relative), 1e-5, 1e-5)
    plain = merge.ubgm(base, models, h0, hs, delta=0)
    assert_close(plain, ubgm_reference(base, models, h0, hs, [1] * 3, [1] * 3, 1, lambda name: 0), 1e-5, 1e-5)


def test_ubgm_limits():
    base, models = weights(0), [weights(k) for k in (1, 2)]
    h0, hs = importances(0), [importances(k) for k in (1, 2)]
    arithmetic = {n: t.double() for n, t in merge.task_arithmetic(base, models, [0.5, 0.25]).items()}
    assert_close(merge.ubgm(base, models, h0, hs, [0.5, 0.25], delta=1e6), arithmetic)
    zero = {n: torch.zeros(s) for n, s in SHAPES.items()}
    for delta in ("relative", 0):
        assert_close(merge.ubgm(base, models, zero, [zero, zero], [0.5, 0.25], delta=delta), arithmetic)
    averaged = {n: t.double() for n, t in merge.fisher(models, hs, floor=0).items()}
    assert_close(merge.ubgm(base, models, None, hs, base_size=0, delta=0), averaged, 1e-5, 1e-5)
    assert_close(merge.ubgm(base, models, zero, hs, delta=0), averaged, 1e-5, 1e-5)


def test_ubgm_does_not_see_a_common_factor_and_gives_one_model_back():
    base, models = weights(0), [weights(k) for k in (1, 2)]
    h0, hs = importances(0), [importances(k) for k in (1, 2)]
    scaled = [{n: t * 1e-12 for n, t in h.items()} for h in (h0, *hs)]
    a, b = merge.ubgm(base, models, h0, hs), merge.ubgm(base, models, scaled[0], scaled[1:])
    assert_close(a, {n: t.double() for n, t in b.items()}, 1e-5, 1e-5)
    alone = merge.ubgm(base, models[:1], h0, hs[:1])
    assert_close(alone, {n: t.double() for n, t in models[0].items()}, 1e-5, 1e-5)


def test_task_arithmetic():
    base, models = weights(0), [weights(1), weights(2)]
    merged = merge.task_arithmetic(base, models, [0.5, -0.25])
    expected = {
        n: base[n].double() + 0.5 * (models[0][n] - base[n]).double() - 0.25 * (models[1][n] - base[n]).double()
        for n in base
    }
    assert_close(merged, expected)
    back = merge.task_arithmetic(base, [base], [3.0])
    assert all(torch.equal(back[name], base[name]) for name in base)


# -- scale -------------------------------------------------------------------------------------------------------------


def squishers(batch_sizes, **facts):
    return [
        squisher.Importance(importances(k), kind="squisher", loss_reduction="mean", batch_size=b, bias_corrected=True, **facts)
        for k, b in enumerate(batch_sizes)
    ]  # fmt: skip


def test_batch_sizes_are_brought_to_one_scale_and_never_mixed_silently(tmp_path):
    models = [weights(0), weights(1)]
    plain = [importances(0), importances(1)]
    sixteen, large = squishers([16, 1024])
    merged = merge.fisher(models, [sixteen, large])
    scaled = [{n: t * b for n, t in f.items()} for f, b in zip(plain, (16.0, 1024.0), strict=True)]
    assert_close(merged, fisher_reference(models, scaled, [1, 1]))
    stored = merge.fisher(models, [sixteen, large], scale="stored")
    assert_close(stored, fisher_reference(models, plain, [1, 1]))
    unknown = squisher.Importance(plain[1], kind="squisher")
    with pytest.raises(ScaleError, match="number 2 cannot"):
        merge.fisher(models, [sixteen, unknown])
    measured = squisher.Importance(plain[1], kind="fisher", unit="example")
    assert_close(merge.fisher(models, [sixteen, measured]), fisher_reference(models, [scaled[0], plain[1]], [1, 1]))
    # From files the sums in the provenance replace a pass over the tensors; the numbers do not change.
    for k, imp in enumerate((sixteen, large)):
        imp.save(tmp_path / f"{k}.safetensors")
    files = [squisher.load(tmp_path / f"{k}.safetensors") for k in range(2)]
    for normalize in (None, "mean", "l2"):
        a = merge.fisher(models, files, normalize=normalize)
        b = merge.fisher(models, [sixteen, large], normalize=normalize)
        assert_close(a, {n: t.double() for n, t in b.items()}, 1e-6, 1e-7)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m, f: merge.average(m[0]), "models is a list"),
        (lambda m, f: merge.average([]), "models is a list"),
        (lambda m, f: merge.average([m[0], torch.nn.Linear(2, 2)]), "Model 2.*Linear"),
        (lambda m, f: merge.average([m[0], {}]), "Model 2 is empty"),
        (lambda m, f: merge.task_arithmetic([m[0]], m), "base.*list"),
        (lambda m, f: merge.average(m, [1]), "2 models.*1 coefficients"),
        (lambda m, f: merge.average(m, [1, -1]), "not negative, not -1"),
        (lambda m, f: merge.fisher(m, f, [1, math.nan]), "finite number"),
        (lambda m, f: merge.task_arithmetic(m[0], m, [1, 1e39]), "finite number"),
        (lambda m, f: merge.average(m, [0, 0]), "Every coefficient is 0"),
        (lambda m, f: merge.fisher(m, f[0]), "2 models.*1 importances"),
        (lambda m, f: merge.fisher(m, f[:1]), "2 models.*1 importances"),
        (lambda m, f: merge.fisher(m, f, scale="both"), "scale is auto"),
        (lambda m, f: merge.fisher(m, f, normalize="l1"), "normalize.*mean or l2"),
        (lambda m, f: merge.fisher(m, f, floor="high"), "number.*'high'"),
        (lambda m, f: merge.fisher(m, f, floor=-1), "floor.*not negative"),
        (lambda m, f: merge.fisher(m, f, missing="skip"), "missing.*error or average"),
        (lambda m, f: merge.average(m, precision="float16"), "precision.*float32 or float64"),
        (lambda m, f: merge.average(m, dtype="int8"), "dtype is float32"),
        (lambda m, f: merge.average(m, exclude="("), "not a regular expression"),
        (lambda m, f: merge.ubgm(m[0], m, None, f), "base_size must be 0"),
        (lambda m, f: merge.ubgm(m[0], m, f[0], f, sizes=[1, -1]), "size.*finite"),
        (lambda m, f: merge.ubgm(m[0], m, f[0], f, [1, -1]), "not negative"),
        (lambda m, f: merge.average(m, 0.5), "one coefficient per model, not 0.5"),
        (lambda m, f: merge.ubgm(m[0], m, f[0], f, sizes=3), "one size per model, not 3"),
        (lambda m, f: merge.ubgm(m[0], m, f[0], f, delta=None), "delta is a finite number"),
        (lambda m, f: merge.ubgm(m[0], m, torch.ones(3), f), "maps names to tensors"),
        (lambda m, f: merge.fisher(m, f, floor=None), "floor is relative or a number"),
        (lambda m, f: merge.fisher(m, [f[0], torch.ones(3)]), "maps names to tensors"),
        (lambda m, f: merge.ota(m[0], m, f, None), "keep is the fraction"),
        (
            lambda m, f: merge.fisher(m, [f[0], {n: t * 1e-41 for n, t in f[1].items()}], normalize="l2")["body.bias"],
            "0 everywhere",
        ),
    ],
)
def test_wrong_arguments(call, words):
    with pytest.raises(SquisherError, match=words):
        call([weights(0), weights(1)], [importances(0), importances(1)])


def test_numbers_of_numpy_are_numbers():
    models, fishers = [weights(0), weights(1)], [importances(0), importances(1)]
    for a, b in (
        (merge.fisher(models, fishers, floor=np.float32(0.5)), merge.fisher(models, fishers, floor=0.5)),
        (merge.ota(models[0], models, fishers, np.float32(0.5)), merge.ota(models[0], models, fishers, 0.5)),
        (merge.average(models, np.array([1, 3])), merge.average(models, [1, 3])),
    ):
        assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_in_one_input_names_it(value):
    models = [weights(0), weights(1)]
    models[1]["body.weight"][3, 4] = value
    for merged in (merge.average(models), merge.fisher(models, [importances(0), importances(1)])):
        assert torch.isfinite(merged["body.bias"]).all()
        with pytest.raises(SquisherError, match=r"'body.weight'.*model 2.*NaN"):
            merged["body.weight"]
    with pytest.raises(SquisherError, match="the base.*NaN"):
        merge.task_arithmetic(models[1], models[:1])["body.weight"]


def test_bad_importances_and_overflow_are_named():
    models, fishers = [weights(0), weights(1)], [importances(0), importances(1)]
    fishers[0]["body.bias"][1] = -1
    with pytest.raises(SquisherError, match=r"model 1.*'body.bias'.*negative"):
        merge.fisher(models, fishers)["body.bias"]
    with pytest.raises(SquisherError, match="overflows"):
        merge.task_arithmetic(models[0], [{n: t * 1e20 for n, t in models[1].items()}], [1e20])["body.weight"]
    large = [{n: t * 1e5 for n, t in m.items()} for m in models]
    with pytest.raises(SquisherError, match="beyond 65504"):
        merge.average(large, dtype="float16")["body.weight"]


def test_most_weights_without_importance_warn_when_they_are_said_to_be_absent():
    shapes = {"frozen": (100, 10), "trained": (10,)}
    models = [weights(k, shapes) for k in range(2)]
    fishers = [
        squisher.Importance({"trained": torch.rand(10)}, kind="fisher", absent={"frozen": "frozen"}) for _ in range(2)
    ]
    with pytest.warns(SquisherWarning, match=r"1,000.*1,010"):
        merged = merge.fisher(models, fishers)
    assert merged.averaged == {"frozen": "frozen"}
    torch.testing.assert_close(merged["frozen"], (models[0]["frozen"] + models[1]["frozen"]) / 2)


# -- types and sizes of numbers ----------------------------------------------------------------------------------------


def _methods(base, models, fishers):
    return {
        "average": merge.average(models),
        "task_arithmetic": merge.task_arithmetic(base, models, [0.5, 0.5]),
        "fisher": merge.fisher(models, fishers),
        "ubgm": merge.ubgm(base, models, fishers[0], fishers),
        "ota": merge.ota(base, models, fishers, keep=0.5),
    }


@pytest.mark.parametrize("method", ["average", "task_arithmetic", "fisher", "ubgm", "ota"])
def test_float64_is_merged_in_float64(method):
    generator = torch.Generator().manual_seed(0)
    base, *models = ({"w": torch.rand(9, 5, generator=generator, dtype=torch.float64)} for _ in range(3))
    fishers = [{"w": torch.rand(9, 5, generator=generator)} for _ in range(2)]
    found = _methods(base, models, fishers)[method]["w"]
    wide = [{"w": f["w"].double()} for f in fishers]
    assert torch.equal(found, _methods(base, models, wide)[method]["w"])
    assert not torch.equal(found, found.float().double())


@pytest.mark.parametrize("method", ["fisher", "ubgm", "ota"])
@pytest.mark.parametrize("size", [3e38, 1e200])
def test_sums_of_importances_beyond_float32(method, size):
    """A few entries at the end of float32 (or beyond it, in float64) do not make a model's share 0."""
    generator = torch.Generator().manual_seed(0)
    base, *models = ({"w": torch.rand(4000, generator=generator)} for _ in range(3))
    fishers = [torch.full((4000,), 1e20, dtype=torch.float64) for _ in range(2)]
    for fisher in fishers:
        fisher[:2] = size
    kind = torch.float32 if size < 1e39 else torch.float64
    found = _methods(base, models, [{"w": fisher.to(kind)} for fisher in fishers])
    scaled = _methods(base, models, [{"w": (fisher / size).to(kind)} for fisher in fishers])
    torch.testing.assert_close(found[method]["w"][:2], scaled[method]["w"][:2])


def test_weights_that_no_number_holds_are_refused():
    models = [{"w": torch.rand(5)} for _ in range(2)]
    fishers = [{"w": torch.full((5,), 1e30)} for _ in range(2)]
    with pytest.raises(SquisherError, match="too far apart"):
        merge.fisher(models, fishers, [1e-310, 1.0], normalize="mean")["w"]
    with pytest.raises(SquisherError, match="importance of model 1 is too large"):
        merge.fisher(models, [{"w": f["w"].double() * 1e200} for f in fishers], normalize="l2")["w"]
