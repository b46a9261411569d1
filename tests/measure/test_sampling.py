from __future__ import annotations

import torch

from squisher.measure.sampling import categories, normals, uniforms


def test_a_number_depends_on_its_coordinates_alone():
    whole = uniforms(3, torch.arange(10), 1, 7)
    parts = torch.cat([uniforms(3, torch.arange(0, 4), 1, 7), uniforms(3, torch.arange(4, 10), 1, 7)])
    assert torch.equal(whole, parts)
    assert torch.equal(uniforms(3, torch.arange(10), 1, 5), whole[:, :5])
    for other in (
        uniforms(4, torch.arange(10), 1, 7),
        uniforms(3, torch.arange(10), 0, 7),
        uniforms(-3, torch.arange(10), 1, 7),
    ):
        assert not (other == whole).any()


def test_numbers_are_uniform_and_uncorrelated():
    u = uniforms(0, torch.arange(2000), 0, 50)
    assert u.min() > 0
    assert u.max() < 1
    assert abs(float(u.mean()) - 0.5) < 0.004
    counts = torch.histc(u.float(), 20, 0, 1)
    assert float(((counts - 5000) ** 2 / 5000).sum()) < 45  # chi square, 19 degrees of freedom, p of about 1e-3
    for a, b in ((u[:, :-1], u[:, 1:]), (u[:-1], u[1:]), (u, uniforms(1, torch.arange(2000), 0, 50))):
        assert abs(float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])) < 0.015


def test_normals_have_unit_variance():
    z = normals(0, torch.arange(1000), 0, 100)
    assert abs(float(z.mean())) < 0.01
    assert abs(float(z.var()) - 1) < 0.02


def test_categories_equal_the_plain_inverse_cdf():
    torch.manual_seed(0)
    for classes in (2, 10, 256, 257, 1000, 1024, 5003):
        p = torch.randn(40, classes, dtype=torch.float64).mul(3).softmax(1)
        u = torch.rand(40, dtype=torch.float64)
        plain = [int((row.cumsum(0) <= x).sum().clamp(max=classes - 1)) for row, x in zip(p, u, strict=True)]
        assert categories(p, u).tolist() == plain


def test_a_class_without_probability_is_never_drawn():
    p = torch.zeros(4, 1000)
    p[:, 300] = 0.5
    p[:, 900] = 0.5
    edge = torch.tensor([1e-16, 0.499999, 0.500001, 1 - 1e-16], dtype=torch.float64)
    assert categories(p, edge).tolist() == [300, 300, 900, 900]


def test_frequencies_follow_the_probabilities():
    p = torch.linspace(1, 5, 600).div(torch.linspace(1, 5, 600).sum())
    drawn = categories(p.expand(60000, 600), uniforms(0, torch.arange(600), 0, 100).flatten())
    thirds = torch.stack([(drawn // 200 == k).float().mean() for k in range(3)])
    assert torch.allclose(thirds, p.view(3, 200).sum(1), atol=0.01)
