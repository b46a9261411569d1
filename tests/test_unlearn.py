"""Selective synaptic dampening: against its definition, entry by entry."""

import pytest
import torch

import squisher
from squisher.storage import safetensors
from squisher.unlearn import dampen


def definition(weight, whole, forget, select, strength):
    """One entry after the other, in Python's own floats."""
    out = []
    for w, f, g in zip(*(t.flatten().tolist() for t in (weight, whole, forget)), strict=True):
        out.append(w * min(strength * f / g, 1.0) if g > select * f else w)
    return torch.tensor(out, dtype=torch.float64).view(weight.shape)


def make(shapes, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weights = {n: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for n, s in shapes.items()}
    whole = {n: torch.rand(s, generator=generator, dtype=torch.float64) ** 3 for n, s in shapes.items()}
    forget = {n: torch.rand(s, generator=generator, dtype=torch.float64) ** 3 * 5 for n, s in shapes.items()}
    for values in (*whole.values(), *forget.values()):
        values[torch.rand(values.shape, generator=generator) < 0.2] = 0  # also both at once
    return weights, whole, forget


SHAPES = {"body.weight": (13, 5), "body.bias": (7,), "scalar": ()}


@pytest.mark.parametrize("size", [1, 7, None])
@pytest.mark.parametrize(("select", "strength"), [(10.0, 1.0), (1.0, 0.3), (0.5, 2.0)])
def test_it_is_its_definition(size, select, strength):
    weights, whole, forget = make(SHAPES)
    out = dampen(weights, whole, forget, select, strength)
    changed = 0
    for name, weight in weights.items():
        expected = definition(weight, whole[name], forget[name], select, strength)
        got = out[name] if size is None else torch.cat(list(out.chunks(name, size))).view(weight.shape)
        torch.testing.assert_close(got, expected, rtol=1e-14, atol=0)
        neither = (whole[name] == 0) & (forget[name] == 0)
        assert torch.equal(got[neither], weight[neither])
        assert got.abs().le(weight.abs()).all()
        changed += int((expected != weight).sum())
        assert out.counts()[name] == (int((expected != weight).sum()), weight.numel())
    assert changed


@pytest.mark.parametrize("scale", [1e45, 1e-10])
def test_importances_of_double_precision_are_not_rounded(scale):
    weights = {"w": torch.tensor([1.0, 1.0, 1.0])}
    whole = {"w": torch.tensor([1.0, 1.0, 0.5 - 1e-12], dtype=torch.float64) * scale}
    forget = {"w": torch.tensor([100.0, 1.0, 5.0], dtype=torch.float64) * scale}
    torch.testing.assert_close(dampen(weights, whole, forget)["w"], torch.tensor([0.01, 1.0, 0.1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_above_the_chunk_size_and_in_other_types(dtype):
    weights, whole, forget = make({"big": (3, 100_001)}, dtype)
    out = dampen(weights, whole, forget, 2.0)["big"]
    f, g = whole["big"], forget["big"]
    factor = torch.where(g > 2 * f, (f / g.clamp_min(1e-300)).clamp_max(1), 1)
    assert out.dtype == dtype
    torch.testing.assert_close(
        out.double(), weights["big"].double() * factor, rtol=2 * torch.finfo(dtype).eps, atol=1e-7
    )
    assert torch.equal(out[factor == 1], weights["big"][factor == 1])


def test_a_common_factor_changes_nothing_and_denormals_are_zero():
    weights, whole, forget = make(SHAPES)
    out = dampen(weights, whole, forget)
    for factor in (1e-6, 2.0):
        again = dampen(weights, *({n: v * factor for n, v in side.items()} for side in (whole, forget)))
        assert all(torch.allclose(out[n], again[n], rtol=1e-12) for n in weights)
    tiny = {n: torch.full(w.shape, 1e-39, dtype=torch.float64) for n, w in weights.items()}
    none = {n: torch.zeros_like(w) for n, w in weights.items()}
    assert all(torch.equal(dampen(weights, none, tiny)[n], weights[n]) for n in weights)


def test_the_scale_rule():
    weights, whole, forget = make(SHAPES)
    fisher = squisher.Importance(forget, unit="example", examples=10)
    recycled = squisher.Importance(whole, kind="squisher", batch_size=8, loss_reduction="mean", bias_corrected=True)
    expected = dampen(weights, {n: 8 * v for n, v in whole.items()}, forget)
    got = dampen(weights, recycled, fisher)
    assert all(torch.allclose(got[n], expected[n], rtol=1e-6) for n in weights)
    unknown = squisher.Importance(whole, kind="squisher")
    with pytest.raises(squisher.SquisherError, match="batch_size and loss_reduction"):
        dampen(weights, unknown, fisher)
    with pytest.warns(squisher.SquisherWarning, match="kind.*select"):
        as_stored = dampen(weights, unknown, fisher, scale="stored")
    assert all(torch.equal(as_stored[n], dampen(weights, whole, forget)[n]) for n in weights)


def test_what_has_no_forget_importance_stays_and_exclude_holds():
    weights, whole, forget = make(SHAPES)
    del forget["body.bias"]
    out = dampen(weights, whole, forget, 0.1, exclude="scalar")
    assert out.dampened == ("body.weight",)
    assert torch.equal(out["body.bias"], weights["body.bias"])
    assert torch.equal(out["scalar"], weights["scalar"])
    assert not torch.equal(out["body.weight"], weights["body.weight"])


def test_tied_names(tmp_path):
    w = {"head": torch.randn(4, 3, generator=torch.Generator().manual_seed(0))}
    whole = squisher.Importance({"embed": torch.ones(4, 3)}, tied={"head": "embed"})
    forget = squisher.Importance({"embed": torch.full((4, 3), 40.0)}, tied={"head": "embed"})
    torch.testing.assert_close(dampen(w, whole, forget)["head"], w["head"] / 40)


def test_files_give_the_same(tmp_path):
    weights, whole, forget = make(SHAPES)
    safetensors.save(tmp_path / "w.safetensors", weights, None)
    squisher.Importance(whole).save(tmp_path / "whole.safetensors")
    squisher.Importance(forget).save(tmp_path / "forget.safetensors")
    lazy = safetensors.open_archive(tmp_path / "w.safetensors")[0]
    out = dampen(lazy, squisher.load(tmp_path / "whole.safetensors"), squisher.load(tmp_path / "forget.safetensors"))
    assert all(torch.equal(out[n], dampen(weights, whole, forget)[n]) for n in weights)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"select": 0}, "select.*positive"),
        ({"strength": float("nan")}, "strength.*positive"),
        ({"forget_importance": {"body.wieght": torch.ones(13, 5)}}, "the model.*'body.weight'"),
        ({"importance": {"body.bias": torch.ones(7)}}, "importance of all data"),
        ({"forget_importance": {"body.weight": torch.ones(5, 13)}}, "shape"),
        ({"exclude": "."}, "excludes"),
        ({"scale": "fisher"}, "auto, stored or as_fisher"),
    ],
)
def test_what_is_refused(change, words):
    weights, whole, forget = make(SHAPES)
    arguments = {"weights": weights, "importance": whole, "forget_importance": forget, **change}
    with pytest.raises(squisher.SquisherError, match=words):
        dampen(**arguments)


def test_bad_values_are_found_when_they_are_read():
    weights, whole, forget = make(SHAPES)
    forget["body.bias"][0] = -1
    out = dampen(weights, whole, forget)
    with pytest.raises(squisher.SquisherError, match="negative"):
        out["body.bias"]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(dtype):
    weights = {"w": torch.ones(4, 4).to(dtype)}
    with pytest.raises(squisher.SquisherError, match="'w'.*quantised"):
        dampen(weights, {"w": torch.ones(4, 4)}, {"w": torch.ones(4, 4)})
