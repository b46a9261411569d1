"""Tasks as vectors: the definition, the invariants, and a family structure that is known."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import squisher
from squisher import embed
from squisher.errors import ArgumentError, NamingError, ScaleError, SquisherError
from squisher.importance import Importance
from tests.commands import run


def task(seed, scale=1.0, **provenance):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (6, 4), "a.bias": (6,), "norm.weight": (6,), "head.weight": (3, 6)}
    return Importance({n: torch.rand(s, generator=generator) ** 4 * scale for n, s in shapes.items()}, **provenance)


def flat(imp):
    return np.concatenate([imp[name].double().flatten().numpy() for name in imp])


def by_definition(a, b):
    h, g = flat(a), flat(b)
    kept = (h + g) > 0
    u, w = h[kept] / (h + g)[kept], g[kept] / (h + g)[kept]
    return 1 - (u @ w) / (np.linalg.norm(u) * np.linalg.norm(w))


def test_embedding_by_tensor_row_and_full(tmp_path):
    imp = task(0)
    by_tensor = embed.embedding(imp)
    assert {n: t.shape for n, t in by_tensor.items()} == dict.fromkeys(imp, torch.Size([1]))
    assert all(by_tensor[n].item() == pytest.approx(imp[n].mean().item()) for n in imp)
    by_row = embed.embedding(imp, by="row")
    assert set(by_row) == {"a.weight", "norm.weight", "head.weight"}
    assert torch.allclose(by_row["a.weight"], imp["a.weight"].mean(1))
    assert torch.equal(by_row["norm.weight"], imp["norm.weight"])
    assert embed.embedding(imp, by="full", exclude="head")["a.bias"].equal(imp["a.bias"])
    assert "head.weight" not in embed.embedding(imp, exclude="^head")
    by_row.save(tmp_path / "e.safetensors")
    assert squisher.load(tmp_path / "e.safetensors").provenance.embedding["by"] == "row"


def test_embedding_from_a_file_reads_sums_from_the_provenance_and_rows_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(embed, "CHUNK", 7)  # fewer than two rows
    imp = task(0)
    imp.save(tmp_path / "a.safetensors")
    lazy = squisher.load(tmp_path / "a.safetensors")
    for by in ("tensor", "row"):
        expected, found = embed.embedding(imp, by=by), embed.embedding(lazy, by=by)
        assert all(torch.allclose(found[n], expected[n], rtol=1e-6) for n in expected)


def test_distance_is_its_definition_symmetric_and_zero_for_the_same():
    a, b = task(0), task(1)
    assert embed.distance(a, b) == pytest.approx(by_definition(a, b), abs=1e-12)
    assert embed.distance(a, b) == embed.distance(b, a)
    assert embed.distance(a, a) == pytest.approx(0, abs=1e-12)
    assert 0 < embed.distance(a, b) < 1
    x, y = flat(a), flat(b)
    assert embed.distance(a, b, metric="cosine") == pytest.approx(
        1 - x @ y / np.linalg.norm(x) / np.linalg.norm(y), abs=1e-12
    )


@pytest.mark.parametrize("factor", [1e-14, 1e-30, 1e14])
def test_a_common_factor_changes_nothing_but_one_per_task_does(factor):
    a, b = task(0), task(1)
    assert embed.distance(a * factor, b * factor) == pytest.approx(embed.distance(a, b), rel=1e-5)
    assert abs(embed.distance(a * 10.0, b) - embed.distance(a, b)) > 0.01
    assert embed.distance(a * 10.0, b, metric="cosine") == pytest.approx(embed.distance(a, b, metric="cosine"))


def test_entries_that_are_zero_in_both_drop_out_and_disjoint_tasks_are_far():
    a = {"w": torch.tensor([1.0, 2.0, 0.0, 1e-42])}
    b = {"w": torch.tensor([2.0, 1.0, 0.0, 1e-42])}
    assert embed.distance(a, b) == pytest.approx(embed.distance({"w": a["w"][:2]}, {"w": b["w"][:2]}))
    assert embed.distance({"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.0, 1.0])}) == 1.0
    assert embed.distance({"w": torch.tensor([1.0])}, {"w": torch.tensor([0.0])}) == 1.0
    with pytest.raises(SquisherError, match="0 everywhere"):
        embed.distance({"w": torch.zeros(3)}, {"w": torch.zeros(3)})


def test_the_scale_rule_applies():
    known = {"kind": "squisher", "bias_corrected": True, "loss_reduction": "mean"}
    a, b = task(0, **known, batch_size=8), task(1, 8.0, **known, batch_size=1)
    assert embed.distance(a, b) == pytest.approx(embed.distance(task(0), task(1)), rel=1e-5)
    with pytest.raises(ScaleError, match="batch_size"):
        embed.distance(a, task(1, **known))
    assert embed.distance(a, task(1, **known), scale="stored") > 0


def test_what_does_not_fit_is_named():
    a = task(0)
    other = Importance({**dict(a), "head.weight": torch.rand(2, 6)})
    with pytest.raises(NamingError, match=r"'head\.weight'.*\(3, 6\).*\(2, 6\)"):
        embed.distance(a, other)
    assert embed.distance(a, other, exclude="head") == pytest.approx(0, abs=1e-12)
    with pytest.raises(NamingError, match=r"'head\.weight', which"):
        embed.distance(a, a.restrict("^a|norm"))
    with pytest.raises(NamingError, match="excludes all"):
        embed.distance(a, a, exclude=".")
    with pytest.raises(NamingError, match="'.' excludes all"):
        embed.embedding(a, exclude=".")
    with pytest.raises(SquisherError, match="not 'tensors'.*'tensor'"):
        embed.embedding(a, by="tensors")
    with pytest.raises(SquisherError, match="no entry"):
        embed.embedding({"a": torch.zeros(0, 3)})
    with pytest.raises(SquisherError, match="not 'euclid'"):
        embed.distance(a, a, metric="euclid")
    with pytest.raises(ArgumentError, match="regular expression"):
        embed.distance(a, a, exclude="(")


def test_sources_without_names_and_empty_rankings_are_refused():
    with pytest.raises(SquisherError, match="by name"):
        embed.rank({"w": torch.ones(2)}, [{"w": torch.ones(2)}])
    with pytest.raises(SquisherError, match="'t'"):
        embed.evaluate({"t": []}, {"t": {}})


def test_rank_and_matrix_agree():
    tasks = {f"t{k}": task(k) for k in range(4)}
    names, matrix = embed.distances(tasks)
    assert torch.equal(matrix, matrix.T)
    assert matrix.diagonal().eq(0).all()
    target = tasks.pop("t0")
    order = embed.rank(target, tasks)
    assert [d for _, d in order] == sorted(d for _, d in order)
    assert dict(order) == {n: pytest.approx(matrix[0, names.index(n)].item()) for n in tasks}
    with pytest.raises(SquisherError, match="at least one source"):
        embed.rank(target, {})


def test_evaluate_by_hand():
    gains = {"x": {"a": 0.9, "b": 0.5, "c": 0.1}, "y": {"a": 0.2, "b": 0.6, "c": 0.4}}
    perfect = embed.evaluate({"x": ["a", "b", "c"], "y": ["b", "c", "a"]}, gains)
    assert perfect == {"rho": 1.0, "mrr": 1.0, "ndcg": 1.0}
    worst = embed.evaluate({"x": ["c", "b", "a"], "y": ["a", "c", "b"]}, gains)
    assert worst["rho"] == 3.0
    assert worst["mrr"] == pytest.approx(1 / 3)
    best = 1 + (2**0.5 - 1) / math.log2(3)
    expected = [((2**0.5 - 1) / math.log2(3) + 1 / 2) / best] * 2
    assert worst["ndcg"] == pytest.approx(np.mean(expected))
    with pytest.raises(SquisherError, match="'x'"):
        embed.evaluate({"x": ["a"]}, gains)


def test_a_known_family_structure_is_recovered_by_fisher_and_squisher_alike():
    """Two families of tasks look at two halves of the input; every task is nearer to its family than to the other."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(16, 24), nn.ReLU())
    fishers, squishers = {}, {}
    for family in range(2):
        for member in range(3):
            model = nn.Sequential(*body, nn.Linear(24, 2))
            inputs = torch.randn(256, 16)
            inputs[:, 8 * (1 - family) : 8 * (1 - family) + 8] *= 0.05
            direction = torch.randn(8)
            labels = (inputs[:, 8 * family : 8 * family + 8] @ direction > 0).long()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99))
            for batch in torch.randperm(256).repeat(4).split(32):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
                optimizer.step()
            name = f"family {family}, task {member}"
            fishers[name] = squisher.fisher(model, [(inputs, labels)]).restrict("^0")
            squishers[name] = squisher.extract(optimizer, model, batch_size=32).restrict("^0")
    for kind in (fishers, squishers):
        names, matrix = embed.distances({n: embed.embedding(imp, by="full") for n, imp in kind.items()})
        for j, one in enumerate(names):
            near = [matrix[j, k] for k, other in enumerate(names) if k != j and other[:8] == one[:8]]
            far = [matrix[j, k] for k, other in enumerate(names) if other[:8] != one[:8]]
            assert max(near) < min(far)


def test_a_message_names_the_tasks_that_do_not_fit():
    tasks = {"sst2": {"a": torch.ones(2)}, "trec": {"a": torch.ones(2), "head": torch.ones(3)}}
    with pytest.raises(NamingError, match="'trec'.*'head'.*'sst2'"):
        embed.distances(tasks, scale="stored")
    with pytest.raises(NamingError, match="'trec'.*'head'.*the target"):
        embed.rank(tasks["sst2"], tasks, scale="stored")


@pytest.mark.parametrize("by", ["tensor", "row"])
def test_heads_of_different_shapes_are_not_compared_by_their_means(by, tmp_path):
    def task(seed, *head):
        generator = torch.Generator().manual_seed(seed)
        shapes = {"body.weight": (4, 3), "head.weight": head}
        tensors = {name: torch.rand(*shape, generator=generator) for name, shape in shapes.items()}
        found = embed.embedding(squisher.Importance(tensors, kind="fisher"), by=by)
        found.save(tmp_path / f"{seed}.safetensors")
        return squisher.load(tmp_path / f"{seed}.safetensors")

    a, b, c = task(0, 5, 4), task(1, 5, 3), task(2, 5, 4)
    with pytest.raises(NamingError, match=r"'head.weight' has the shape \(5, 4\).*\(5, 3\)"):
        embed.distance(a, b)
    assert embed.distance(a, b, exclude="head") >= 0
    assert embed.distance(a, c) > 0
    done = run("similarity", tmp_path / "0.safetensors", tmp_path / "1.safetensors")
    assert done.returncode == 1
    assert "head.weight" in done.stderr


def test_embeddings_of_two_kinds_are_not_compared():
    one = {"w": torch.rand(1, 5)}
    with pytest.raises(NamingError, match="by tensor.*by row"):
        embed.distance(embed.embedding(one, by="tensor"), embed.embedding(one, by="row"))
