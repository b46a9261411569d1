"""Widths by loss: against the ten-line definition in float64, and against brute force."""

import itertools

import numpy as np
import pytest
import torch

import squisher
from squisher.quantize import Sensitivity, allocate, sensitivity, simulate
from squisher.storage import safetensors

BLOCKS = {  # bits: values in a block of ggml, its bytes, values that share a scale, affine
    2: (256, 84, 16, True),
    3: (256, 110, 16, False),
    4: (256, 144, 32, True),
    5: (256, 176, 32, True),
    6: (256, 210, 16, False),
    8: (32, 34, 32, False),
}


def rounded(w, bits, group, affine):
    """One tensor, group by group: the definition."""
    rows = w.double().reshape(len(w), -1).numpy().copy()
    for row in rows:
        for start in range(0, len(row), group):
            part = row[start : start + group]
            low = part.min() if affine else 0.0
            levels = 2**bits - 1 if affine else 2 ** (bits - 1) - 1
            step = (part.max() - low if affine else np.abs(part).max()) / levels
            part[:] = low + step * np.round((part - low) / step) if step else part
    return torch.from_numpy(rows).reshape(w.shape)


def loss(w, f, bits, group, affine):
    return float(0.5 * (f.double() * (w.double() - rounded(w, bits, group, affine)) ** 2).sum())


@pytest.fixture
def model():
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "even.weight": (6, 64),
        "odd.weight": (5, 37),
        "conv.weight": (4, 3, 3, 3),
        "one.weight": (1, 200),
        "bias": (9,),
    }
    weights = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}
    weights["odd.weight"][2] = 0.25  # a constant row has no step
    importance = {n: torch.rand(s, generator=generator, dtype=torch.float64) ** 4 for n, s in shapes.items()}
    return weights, importance


@pytest.mark.parametrize("chunk", [1, 7, None])
@pytest.mark.parametrize(("scheme", "affine", "overhead"), [("affine", True, 32), ("symmetric", False, 16)])
def test_sensitivity_is_its_definition(model, monkeypatch, chunk, scheme, affine, overhead):
    weights, importance = model
    if chunk is not None:
        monkeypatch.setattr(squisher.quantize, "CHUNK", chunk)
    found = sensitivity(weights, importance, (2, 4, 8), 16, scheme=scheme)
    assert list(found.losses) == ["even.weight", "odd.weight", "conv.weight", "one.weight"]
    for name, own in found.losses.items():
        w, f = weights[name], importance[name]
        for bits, value in own.items():
            assert value == pytest.approx(loss(w, f, bits, 16, affine), rel=1e-12)
            groups = len(w) * -(-w[0].numel() // 16)
            assert found.sizes[name][bits] == w.numel() * bits + groups * overhead


def test_llama_types_take_the_bytes_of_their_blocks(model):
    weights, importance = model
    weights["blocks"] = torch.randn(3, 512, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    importance["blocks"] = torch.ones(3, 512, dtype=torch.float64)
    found = sensitivity(weights, importance, list(BLOCKS), scheme="llama.cpp")
    for bits, (values, size, group, affine) in BLOCKS.items():
        assert found.sizes["blocks"][bits] == 3 * 512 // values * size * 8
        w, f = weights["odd.weight"], importance["odd.weight"]
        assert found.losses["odd.weight"][bits] == pytest.approx(loss(w, f, bits, group, affine), rel=1e-12)


@pytest.mark.parametrize("shape", [(3, 200_000), (2, 300_001), (600_000, 1)])
def test_tensors_above_the_chunk_size(shape):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    f = torch.rand(shape, generator=torch.Generator().manual_seed(1))
    found = sensitivity({"w": w}, {"w": f}, (4,), 64)
    rows = torch.nn.functional.pad(w.double(), (0, -shape[1] % 64), mode="replicate").unflatten(1, (-1, 64))
    low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    step = torch.where(high > low, (high - low) / 15, 1.0)
    back = (low + step * ((rows - low) / step).round()).flatten(1)[:, : shape[1]]
    expected = float(0.5 * (f.double() * (w.double() - back) ** 2).sum())
    assert found.losses["w"][4] == pytest.approx(expected, rel=1e-5, abs=1e-12)  # float32 rounds once before
    again = simulate({"w": w}, {"w": 4}, 64)["w"]
    torch.testing.assert_close(again.double(), back, rtol=0, atol=float(step.max()) * 1e-5)


@pytest.mark.parametrize("chunk", [1, 7, None])
def test_simulated_weights_are_the_rounded_ones(model, monkeypatch, chunk):
    weights, _ = model
    if chunk is not None:
        monkeypatch.setattr(squisher.quantize, "CHUNK", chunk)
    bits = {"even.weight": 3, "odd.weight": 8, "conv.weight": 2}
    out = simulate(weights, bits, 16)
    for name, b in bits.items():
        torch.testing.assert_close(out[name], rounded(weights[name], b, 16, True), rtol=0, atol=1e-14)
        pieces = list(out.chunks(name, 7))
        assert [len(piece) for piece in pieces[:-1]] == [7] * (len(pieces) - 1)
        assert torch.equal(torch.cat(pieces), out[name].flatten())
    assert torch.equal(out["one.weight"], weights["one.weight"])
    assert torch.equal(simulate(out, bits, 16)["even.weight"], out["even.weight"]) or torch.allclose(
        simulate(out, bits, 16)["even.weight"], out["even.weight"], rtol=0, atol=1e-12
    )


def table(rng, count, widths=(2, 3, 4, 8)):
    numel = {f"t{k}": 64 * int(rng.integers(1, 6)) for k in range(count)}
    sizes = {name: {b: n * b + n // 64 * 32 for b in widths} for name, n in numel.items()}
    if rng.random() < 0.3:  # ties, and losses that do not fall with the width
        losses = {name: {b: float(rng.integers(0, 4)) for b in widths} for name in numel}
    else:
        losses = {
            name: {b: float(rng.random() * 4.0**-b * 10.0 ** rng.integers(-9, 3)) for b in widths} for name in numel
        }
    return Sensitivity(losses, sizes, numel)


def test_allocation_is_the_best_of_all():
    rng = np.random.default_rng(0)
    for _ in range(120):
        found = table(rng, int(rng.integers(1, 7)))
        budget = float(rng.uniform(2.5, 9))
        plan = allocate(found, budget)
        total = sum(found.numel.values())
        fitting = (
            sum(found.losses[n][b] for n, b in zip(found.numel, choice, strict=True))
            for choice in itertools.product((2, 3, 4, 8), repeat=len(found.numel))
            if sum(found.sizes[n][b] for n, b in zip(found.numel, choice, strict=True)) <= budget * total + 1e-6
        )
        assert plan.loss == pytest.approx(min(fitting), rel=1e-12, abs=1e-300)
        assert plan.bits_per_weight <= budget + 1e-9
        assert plan.gap == 0


def test_a_cut_search_says_how_good_it_is_at_least(monkeypatch):
    rng = np.random.default_rng(1)
    numel = {f"t{k}": int(rng.integers(1000, 100_000)) for k in range(60)}
    found = Sensitivity(
        {n: {b: float(np.exp(3 * rng.normal()) * m * 4.0**-b) for b in (2, 3, 4, 8)} for n, m in numel.items()},
        {n: {b: m * b + 32 * -(-m // 64) for b in (2, 3, 4, 8)} for n, m in numel.items()},
        numel,
    )
    best = allocate(found, 4.1)
    assert best.gap == 0
    monkeypatch.setattr(squisher.quantize, "_STATES", 2)
    cut = allocate(found, 4.1)
    monkeypatch.undo()
    assert cut.loss >= best.loss >= cut.loss * (1 - cut.gap) * (1 - 1e-12)
    assert cut.gap > 0


def test_a_common_factor_and_the_uniform_plan(model):
    weights, importance = model
    found = sensitivity(weights, importance, (2, 3, 4, 8), 16)
    scaled = sensitivity(weights, squisher.Importance(importance) * 1e-9, (2, 3, 4, 8), 16)
    plan = allocate(found, 6.0)
    assert allocate(scaled, 6.0).bits == plan.bits
    uniform = found.uniform(3)
    assert plan.bits_per_weight <= 6.0
    assert uniform.loss == pytest.approx(sum(own[3] for own in found.losses.values()))
    assert allocate(found, uniform.bits_per_weight).loss <= uniform.loss
    assert set(allocate(found, 100.0).bits.values()) == {8}


def test_what_matters_gets_the_bits(model):
    weights, importance = model
    found = sensitivity(weights, {**importance, "even.weight": importance["even.weight"] * 1e6}, (2, 4, 8), 16)
    plan = allocate(found, 7.5)
    assert plan.bits["even.weight"] == 8
    assert min(plan.bits.values()) == 2


def test_what_is_kept_is_listed(model):
    weights, importance = model
    del importance["conv.weight"]
    found = sensitivity(weights, importance, (4,), 16, exclude="^one")
    assert found.kept == {"conv.weight": "no importance", "one.weight": "excluded"}
    assert list(found.losses) == ["even.weight", "odd.weight"]
    document = allocate(found, 8).to_dict()
    assert document["tensors"]["odd.weight"]["bits"] == 4
    assert document["kept"] == found.kept


def test_tied_names_are_found():
    w = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    importance = squisher.Importance({"embed": torch.ones(8, 64)}, tied={"head": "embed"})
    assert list(sensitivity({"head": w}, importance, (4,)).losses) == ["head"]


def test_lazy_files_give_the_same(model, tmp_path):
    weights, importance = model
    safetensors.save(tmp_path / "w.safetensors", weights, None)
    squisher.Importance(importance).save(tmp_path / "f.safetensors")
    lazy = safetensors.open_archive(tmp_path / "w.safetensors")[0]
    assert (
        sensitivity(lazy, squisher.load(tmp_path / "f.safetensors")).losses == sensitivity(weights, importance).losses
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bits": (1, 4)}, "some of 2, 3, 4, 5, 6, 7, 8"),
        ({"bits": (7,), "scheme": "llama.cpp"}, "some of 2, 3, 4, 5, 6, 8"),
        ({"bits": ()}, "bits for affine"),
        ({"bits": (2, None)}, "bits for affine"),
        ({"bits": (2.0, 4.0)}, "bits for affine"),
        ({"group": 0}, "share a scale"),
        ({"scheme": "afine"}, "Did you mean 'affine'"),
        ({"importance": {"even.wieght": torch.ones(6, 64)}}, "Did you mean 'even.weight'"),
        ({"importance": {"even.weight": torch.ones(6, 63)}}, "shape"),
        ({"importance": {"even.weight": -torch.ones(6, 64)}}, "negative"),
        ({"weights": {"even.weight": torch.full((6, 64), float("nan"))}, "importance": {"even.weight": torch.ones(6, 64)}}, "NaN"),
    ],
)  # fmt: skip
def test_what_is_refused(model, change, words):
    arguments = {"weights": model[0], "importance": model[1], **change}
    with pytest.raises(squisher.SquisherError, match=words):
        sensitivity(**arguments)


def test_what_cannot_be_simulated_and_widths_that_were_not_measured(model):
    weights, importance = model
    for bits, words in ((4, "plan.bits"), ({"vector": 4}, "two dimensions")):
        with pytest.raises(squisher.SquisherError, match=words):
            simulate({**weights, "vector": torch.ones(5)}, bits)
    with pytest.raises(squisher.SquisherError, match="5 was not"):
        sensitivity(weights, importance, (4, 8)).uniform(5)


def test_the_loss_is_of_what_is_simulated_whatever_the_type_of_the_importance():
    weights = {"w": torch.tensor([[0.0, 0.5, 1.5, 2.5, 3.0 + 2**-22]])}
    for kind in (torch.float32, torch.float64):
        found = sensitivity(weights, {"w": torch.ones(1, 5, dtype=kind)}, (2,), 5)
        error = (simulate(weights, {"w": 2}, 5)["w"] - weights["w"]).double()
        assert found.losses["w"][2] == pytest.approx(0.5 * float(error.square().sum()), rel=1e-12)


def test_budgets_that_nothing_fits(model):
    found = sensitivity(*model, (2, 4), 16)
    with pytest.raises(squisher.SquisherError, match="smallest widths"):
        allocate(found, 2.0)
    with pytest.raises(squisher.SquisherError, match="no tensor to quantise"):
        allocate(sensitivity({"b": torch.ones(3)}, {"b": torch.ones(3)}), 4)
    with pytest.raises(squisher.SquisherError, match="the model"):
        simulate(model[0], {"even": 4})


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(dtype):
    with pytest.raises(squisher.SquisherError, match="'w'.*quantised"):
        squisher.quantize.sensitivity({"w": torch.ones(4, 64).to(dtype)}, {"w": torch.ones(4, 64)})
    with pytest.raises(squisher.SquisherError, match="'w'.*quantised"):
        simulate({"w": torch.ones(4, 64).to(dtype)}, {"w": 4})


def test_what_is_printed_fits_on_a_line():
    weights = {f"layer.{k}.weight": torch.randn(8, 64) for k in range(50)}
    found = sensitivity(weights, {name: torch.ones_like(w) for name, w in weights.items()})
    assert "50 tensors" in repr(found)
    assert "bits per weight" in repr(allocate(found, 4.5))
    assert max(len(repr(found)), len(repr(allocate(found, 4.5)))) < 150
