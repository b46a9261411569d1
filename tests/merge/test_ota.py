"""OTA with fast Fisher grafting: against its definition in float64, and against what it must be in special cases."""

import json

import pytest
import torch

import squisher
from squisher.merge import average, fisher, ota
from squisher.storage import safetensors

SHAPES = {"body.weight": (13, 5), "body.bias": (7,), "scalar": ()}


def make(count=3, shapes=SHAPES, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(spread):
        return {
            n: torch.randn(s, generator=generator, dtype=torch.float64).mul(spread).to(dtype) for n, s in shapes.items()
        }

    base = draw(1.0)
    models = [{n: base[n] + d for n, d in draw(0.1).items()} for _ in range(count)]
    importances = [{n: f.double() ** 4 for n, f in draw(1.0).items()} for _ in range(count)]
    return base, models, importances


def definition(base, models, importances, keep):
    """θ₀ + Σ √v·m·τ / Σ √v with m the ⌊keep·total⌋ largest v·τ² of a model."""
    above = {n: torch.zeros_like(w) for n, w in base.items()}
    total = {n: torch.zeros_like(w) for n, w in base.items()}
    for model, v in zip(models, importances, strict=True):
        scores = torch.cat([(v[n] * (model[n] - base[n]) ** 2).flatten() for n in base])
        k = int(keep * len(scores) + 1e-9)
        least = scores.sort(descending=True).values[k - 1] if k else torch.inf
        for n in base:
            tau = model[n] - base[n]
            above[n] += v[n].sqrt() * (v[n] * tau**2 >= least) * tau
            total[n] += v[n].sqrt()
    return {n: base[n] + above[n] / total[n] for n in base}


@pytest.mark.parametrize("size", [1, 7, None])
@pytest.mark.parametrize("keep", [0.0, 0.1, 0.5, 1.0])
def test_it_is_its_definition(size, keep):
    base, models, importances = make()
    merged = ota(base, models, importances, keep, floor=0, precision="float64")
    expected = definition(base, models, importances, keep)
    for name in base:
        got = merged[name] if size is None else torch.cat(list(merged.chunks(name, size))).view(base[name].shape)
        torch.testing.assert_close(got, expected[name], rtol=1e-12, atol=1e-14)


def test_above_the_chunk_size():
    base, models, importances = make(2, {"big": (3, 200_001)}, torch.float32)
    expected = definition(
        *(
            {n: t.double() for n, t in base.items()},
            [{n: t.double() for n, t in m.items()} for m in models],
            importances,
        ),
        0.3,
    )
    got = ota(base, models, importances, 0.3, floor=0)["big"].double()
    wrong = (got - expected["big"]).abs() > 1e-5
    assert wrong.sum() <= 4  # float32 may order entries at the threshold otherwise


def test_special_cases():
    base, models, importances = make()
    roots = [{n: v.sqrt() for n, v in imp.items()} for imp in importances]
    same = fisher(models, roots, floor=0, precision="float64")
    got = ota(base, models, importances, floor=0, precision="float64")
    for name in base:
        torch.testing.assert_close(got[name], same[name], rtol=1e-12, atol=1e-14)  # all kept: the mean weighted with √v
        torch.testing.assert_close(ota(base, models[:1], importances[:1])[name], models[0][name], rtol=1e-6, atol=1e-7)
        assert torch.equal(ota(base, models, importances, 0.0, precision="float64")[name], base[name])
        equal = ota(base, models, [importances[0]] * 3, precision="float64")
        torch.testing.assert_close(equal[name], average(models, precision="float64")[name], rtol=1e-12, atol=1e-14)
    factor = ota(base, models, [{n: v * 1e-9 for n, v in imp.items()} for imp in importances], 0.5, precision="float64")
    plain = ota(base, models, importances, 0.5, precision="float64")
    assert all(torch.allclose(factor[n], plain[n], rtol=1e-6) for n in base)


def test_each_model_has_its_own_fraction_and_zero_importance_gives_the_mean():
    base, models, importances = make(2)
    own = ota(base, models, importances, [1.0, 0.0], floor=0, precision="float64")
    for name in base:
        a, b = (imp[name].sqrt() for imp in importances)
        torch.testing.assert_close(
            own[name], base[name] + a / (a + b) * (models[0][name] - base[name]), rtol=1e-12, atol=1e-14
        )
    nothing = [{n: torch.zeros_like(v) for n, v in imp.items()} for imp in importances]
    for floor in ("relative", 0):
        mean = ota(base, models, nothing, floor=floor, precision="float64")
        for name in base:
            torch.testing.assert_close(mean[name], (models[0][name] + models[1][name]) / 2, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"keep": 1.5}, "keep is the fraction"),
        ({"keep": [0.5]}, "3 models"),
        ({"importances": [{"body.weight": torch.ones(13, 5)}] * 3}, "no importance"),
        ({"scale": "fisher"}, "auto"),
    ],
)
def test_what_is_refused(change, words):
    base, models, importances = make()
    with pytest.raises(squisher.SquisherError, match=words):
        ota(**{"base": base, "models": models, "importances": importances, **change})


def test_the_command_and_the_file_of_the_paper(tmp_path, monkeypatch, capsys):
    from squisher.cli import main

    base, models, importances = make(2, dtype=torch.float32)
    for name, weights in (("base", base), ("one", models[0]), ("two", models[1])):
        (tmp_path / name).mkdir()
        safetensors.save(tmp_path / name / "model.safetensors", weights, None)
    for name, imp in zip(("one", "two"), importances, strict=True):
        safetensors.save(tmp_path / name / "exp_avg_sq.safetensors", {n: v.float() for n, v in imp.items()}, None)
    monkeypatch.chdir(tmp_path)
    files = [f"{name}/exp_avg_sq.safetensors" for name in ("one", "two")]
    monkeypatch.setattr(
        "sys.argv",
        ["squisher", "merge", "ota", "one", "two", "--base", "base", "--keep", "0.5", "--out", "out", "--json",
         "--importance", files[0], "--importance", files[1]],
    )  # fmt: skip
    with pytest.raises(SystemExit, match="0"):
        main()
    report = json.loads(capsys.readouterr().out)
    assert report["options"] == {"keep": "0.5"}
    expected = ota(base, models, importances, 0.5)
    out = safetensors.open_archive(tmp_path / "out" / "model.safetensors")[0]
    for name in base:
        torch.testing.assert_close(out[name], expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("floor", ["relative", 1e-8, 0])
def test_weights_beyond_float32_are_merged_in_float64(floor):
    models = [{"w": torch.tensor([1.0, 2.0, 3.0])}, {"w": torch.tensor([5.0, 6.0, 7.0])}]
    facts = {"kind": "squisher", "loss_reduction": "mean", "unit": "example"}
    importances = [squisher.Importance({"w": torch.full((3,), 3e38)}, batch_size=b, **facts) for b in (1, 10_000)]
    for merged, share in (
        (ota({"w": torch.zeros(3)}, models, importances, floor=floor), 100 / 101),
        (fisher(models, importances, floor=floor), 10_000 / 10_001),
    ):
        torch.testing.assert_close(merged["w"], models[0]["w"] + 4 * share)
