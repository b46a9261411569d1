"""Everything that reads tensors in chunks, at chunk sizes 1, 7 and the default, against its definition on whole tensors."""

import hashlib
import math

import numpy as np
import pytest
import torch

import squisher
from squisher import embed, mask, merge, order, patch, prune, unlearn
from squisher.analysis import agreement
from squisher.importance import Importance
from squisher.importance.weights import content_of
from squisher.report.data import joint_counts
from squisher.storage import safetensors
from squisher.storage.tensors import CHUNK, Computed, chunks_of

SHAPES = {"a.weight": (13, 5), "a.bias": (7,), "scalar": (), "none": (0, 3)}


class Cut(Computed):
    """The same tensors, which come in chunks of one size, whatever is asked for."""

    def __init__(self, tensors, size):
        super().__init__(tensors)
        self.size = size

    def chunks(self, name, size=CHUNK):
        return chunks_of(self._like, name, min(size, self.size))


@pytest.fixture(params=[1, 7, CHUNK])
def size(request):
    return request.param


@pytest.fixture
def cut(size):
    return lambda tensors: Cut(tensors, size)


def draw(seed, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def squares(seed):
    """Return importances of which many are equal, and some 0."""
    return {name: (4 * values**4).round() / 4 for name, values in draw(100 + seed).items()}


def flat(tensors):
    return torch.cat([values.flatten() for values in tensors.values()])


def read(lazy, size):
    """Return all values of a lazy mapping, read in chunks of this size."""
    return torch.cat([chunk for name in lazy for chunk in chunks_of(lazy, name, size)])


BASE, MODELS, IMPORTANCES = draw(0), [draw(k) for k in (1, 2, 3)], [squares(k) for k in (1, 2, 3)]
THETA0, THETAS, FS = flat(BASE), [flat(m) for m in MODELS], [flat(f) for f in IMPORTANCES]


def weighted_mean(weights, values, otherwise):
    total = sum(weights)
    return torch.where(total > 0, sum(w * v for w, v in zip(weights, values, strict=True)) / total, otherwise)


def close(found, expected):
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=1e-6)


def test_average_and_task_arithmetic(cut, size):
    models = [cut(m) for m in MODELS]
    close(read(merge.average(models, [1, 2, 3]), size), sum(c * t for c, t in zip((1, 2, 3), THETAS, strict=True)) / 6)
    close(
        read(merge.task_arithmetic(cut(BASE), models, [1, -1, 0.5]), size),
        THETA0 + sum(c * (t - THETA0) for c, t in zip((1, -1, 0.5), THETAS, strict=True)),
    )


def test_merge_fisher(cut, size):
    found = merge.fisher([cut(m) for m in MODELS], [cut(f) for f in IMPORTANCES], floor=0)
    close(read(found, size), weighted_mean(FS, THETAS, sum(THETAS) / 3))


def test_ubgm(cut, size):
    found = merge.ubgm(cut(BASE), [cut(m) for m in MODELS], cut(squares(9)), [cut(f) for f in IMPORTANCES], delta=0.1)
    common = flat(squares(9)) + 0.1
    change = sum((f + common) * (t - THETA0) for f, t in zip(FS, THETAS, strict=True)) / (sum(FS) + common)
    close(read(found, size), THETA0 + change)


def test_ota(cut, size):
    found = merge.ota(cut(BASE), [cut(m) for m in MODELS], [cut(f) for f in IMPORTANCES], keep=0.5, floor=0)
    kept = []
    for theta, f in zip(THETAS, FS, strict=True):
        saliency = f.sqrt() * (theta - THETA0).abs()
        kept.append((saliency >= saliency.sort(descending=True).values[len(f) // 2 - 1]) * (theta - THETA0))
    close(read(found, size), THETA0 + weighted_mean([f.sqrt() for f in FS], kept, sum(kept) / 3))


def test_prune(cut, size):
    scores = 0.5 * THETA0**2 * FS[0]
    close(read(prune.scores(cut(BASE), cut(IMPORTANCES[0])), size), scores)
    pruned = read(prune.weights(cut(BASE), cut(IMPORTANCES[0]), 0.4), size)
    expected = THETA0.clone()
    kept = len(scores) - math.floor(0.4 * len(scores))
    expected[scores.argsort(descending=True, stable=True)[kept:]] = 0
    assert torch.equal(pruned, expected)


@pytest.mark.parametrize("largest", [True, False])
def test_top_k_and_reset_outside(cut, size, largest):
    found = mask.top_k(cut(IMPORTANCES[0]), 0.3, largest=largest)
    expected = torch.zeros(len(FS[0]), dtype=torch.bool)
    expected[FS[0].argsort(descending=largest, stable=True)[: math.floor(0.3 * len(FS[0]))]] = True
    assert torch.equal(read(found, size), expected)
    reset = mask.reset_outside(cut(MODELS[0]), cut(BASE), cut(dict(found)))
    assert torch.equal(read(reset, size), torch.where(expected, THETAS[0], THETA0))


def test_patch(cut, size, tmp_path):
    marked = {name: values > 0 for name, values in draw(5).items()}
    tuned = {name: torch.where(marked[name], MODELS[0][name], BASE[name]) for name in BASE}
    patch.make(cut(BASE), cut(tuned), tmp_path / "cut.safetensors", mask=cut(marked))
    patch.make(BASE, tuned, tmp_path / "whole.safetensors")
    assert (tmp_path / "cut.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    assert torch.equal(read(patch.apply(cut(BASE), tmp_path / "cut.safetensors"), size), flat(tuned))
    patch.make(cut(BASE), cut(MODELS[1]), tmp_path / "d.safetensors", mask=cut(marked), drop_outside=True)
    expected = torch.where(flat(marked), THETAS[1], THETA0)
    assert torch.equal(read(patch.apply(cut(BASE), tmp_path / "d.safetensors"), size), expected)


def test_embedding_and_distance(cut, size, monkeypatch):
    monkeypatch.setattr(embed, "CHUNK", size)
    values = IMPORTANCES[0]
    by_tensor = embed.embedding(cut(values))
    close(flat(by_tensor), torch.stack([values[name].double().mean() for name in by_tensor]))
    close(embed.embedding(values, by="row")["a.weight"], values["a.weight"].double().mean(1))
    x, y = (f.double().numpy() for f in FS[:2])
    both = x + y > 0
    u, w = x[both] / (x + y)[both], y[both] / (x + y)[both]
    expected = 1 - u @ w / (np.linalg.norm(u) * np.linalg.norm(w))
    assert embed.distance(cut(IMPORTANCES[0]), cut(IMPORTANCES[1])) == pytest.approx(expected, abs=1e-12)


def mid_ranks(values):
    return ((values[:, None] > values).sum(1) + ((values[:, None] == values).sum(1) - 1) / 2).double()


@pytest.mark.parametrize("limit", [agreement.EXACT_LIMIT, 10], ids=["exact", "rounded"])
def test_compare(cut, monkeypatch, limit):
    monkeypatch.setattr(agreement, "EXACT_LIMIT", limit)
    found = squisher.compare(cut(IMPORTANCES[0]), cut(IMPORTANCES[1]))
    within = 1e-9 if found.exact else 0.02
    x, y = (f.double() for f in FS[:2])
    expected = np.corrcoef(mid_ranks(x), mid_ranks(y))[0, 1]
    assert found.spearman == pytest.approx(expected, abs=within)
    assert found.scale == pytest.approx(float(x.sum() / y.sum()), rel=1e-9)
    ratios = (x / y)[(x > 0) & (y > 0)]
    assert found.median_ratio == pytest.approx(float(ratios.log().quantile(0.5).exp()), rel=max(within, 1e-6))
    top = [set(side.argsort(descending=True, stable=True)[:20].tolist()) for side in (x, y)]
    assert found.overlap(20) == len(top[0] & top[1]) / 20
    assert int(joint_counts(found, cut(IMPORTANCES[0]), cut(IMPORTANCES[1])).sum()) == int(((x > 0) & (y > 0)).sum())


def test_distribution(cut):
    totals = squisher.examine(cut(IMPORTANCES[0])).totals
    x = FS[0].double()
    assert (totals.numel, totals.zeros, totals.max) == (len(x), int((x == 0).sum()), float(x.max()))
    assert totals.total == pytest.approx(float(x.sum()), rel=1e-12)
    for share, found in ((0.1, totals.p10), (0.5, totals.median), (0.9, totals.p90)):
        assert found == pytest.approx(float(x.sort().values[math.ceil(share * len(x)) - 1]), rel=2**-7)


def test_dampen(cut, size):
    found = unlearn.dampen(cut(BASE), cut(IMPORTANCES[0]), cut(IMPORTANCES[1]), select=2.0, strength=0.5)
    factor = (0.5 * FS[0] / FS[1].clamp_min(1e-30)).clamp_max(1)
    close(read(found, size), torch.where(FS[1] > 2 * FS[0], factor * THETA0, THETA0))


def test_combine_and_standard_errors(cut, size):
    parts = [Importance(cut(f), examples=n) for f, n in zip(IMPORTANCES, (1, 2, 3), strict=True)]
    shares = torch.tensor([1, 2, 3]).double() / 6
    stacked = torch.stack(FS).double()
    mean = (shares[:, None] * stacked).sum(0)
    close(read(Importance.combine(parts), size), mean)
    spread = (1.5 * (shares[:, None] * (stacked - mean)).square().sum(0)).sqrt()
    close(read(Importance.standard_errors(parts), size), spread)


def test_files_and_hashes(cut, tmp_path):
    imp = Importance(cut(IMPORTANCES[0]))
    imp.save(tmp_path / "cut.safetensors")
    Importance(IMPORTANCES[0]).save(tmp_path / "whole.safetensors")
    assert (tmp_path / "cut.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    _, metadata = safetensors.open_archive(tmp_path / "cut.safetensors")
    assert metadata["sum"]["a.weight"] == pytest.approx(float(IMPORTANCES[0]["a.weight"].double().sum()), rel=1e-11)
    hashes = content_of(cut(BASE))
    assert {name: found.partition("/")[0] for name, found in hashes.items()} == {
        name: hashlib.sha256(values.numpy().tobytes()).hexdigest()[:32] for name, values in BASE.items()
    }


def test_order(cut):
    values = cut(IMPORTANCES[0])
    sources = {name: (lambda name=name: values.chunks(name)) for name in values}
    sizes = {name: values.shape(name).numel() for name in values}
    ordered = FS[0].sort(descending=True).values
    found = order.thresholds(sources, [1, 20, 70])
    assert [kth.value for kth in found] == [float(ordered[k - 1]) for k in (1, 20, 70)]
    choice = order.choose(sources, 20, sizes, always=["scalar"], minimum={"a.bias": 3})
    chosen = {name: torch.cat([*choice.chunks(name), torch.zeros(0, dtype=torch.bool)]) for name in sources}
    expected = {
        "scalar": {0},
        "a.bias": set(IMPORTANCES[0]["a.bias"].argsort(descending=True, stable=True)[:3].tolist()),
    }
    left = [
        (-float(value), number, place)
        for number, name in enumerate(("a.weight", "a.bias"))
        for place, value in enumerate(IMPORTANCES[0][name].flatten())
        if place not in expected.get(name, ())
    ]
    for _, number, place in sorted(left)[:16]:
        expected.setdefault(("a.weight", "a.bias")[number], set()).add(place)
    assert {name: set(marks.nonzero().flatten().tolist()) for name, marks in chosen.items() if marks.any()} == expected
    each = order.per_source(sources, {"a.weight": 9, "a.bias": 2, "scalar": 1, "none": 0})
    top = IMPORTANCES[0]["a.weight"].flatten().argsort(descending=True, stable=True)[:9]
    assert set(torch.cat(list(each.chunks("a.weight"))).nonzero().flatten().tolist()) == set(top.tolist())
    (held,), (needed,) = order.concentration(sources, [20], [0.9])
    upto = ordered.double().cumsum(0)
    assert held.share == pytest.approx(float(upto[19] / upto[-1]), rel=1e-9)
    assert needed.k == int((upto < 0.9 * upto[-1]).sum()) + 1
