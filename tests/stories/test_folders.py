"""What people do with model folders, walked on a model of 22.7 million parameters; two folders have the same last part."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import squisher
from tests.commands import run
from tests.stories import shapes

A, B = "run-a/final", "run-b/final"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("stories")
    shapes.write(root / "base", shapes.base())
    for seed, name in enumerate((A, B), 1):
        shapes.write(root / name, *shapes.tuned(seed))
    shapes.tuned(3, classes=6)[1].save(root / "trec.safetensors")
    return root


def ok(done):
    assert done.returncode == 0, done.stderr
    return done.stdout


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_looking_at_an_importance(root, tmp_path):
    shown = ok(run("inspect", A, "--plot", tmp_path / "a.svg", cwd=root))
    assert "layer.0." in shown or "…0…" in shown
    assert "layer.5." in shown or "…5…" in shown
    assert "pooler.dense" in (tmp_path / "a.svg").read_text()


def test_two_runs_are_compared_and_told_apart(root):
    shown = ok(run("compare", A, B, cwd=root))
    assert A in shown
    assert B in shown
    other = json.loads(
        ok(run("compare", A, "trec.safetensors", "--exclude", "^classifier", "--scale", "auto", "--json", cwd=root))
    )
    assert 0 < other["spearman"] < 1


def test_three_tasks_and_their_similarity(root):
    found = json.loads(ok(run("similarity", A, B, "trec.safetensors", "--exclude", "^classifier", "--json", cwd=root)))
    assert found["tasks"] == [A, B, "trec"]
    assert all(0 < value <= 1.0001 for row in found["similarities"] for value in row)


def test_merging_two_fine_tunes(root, tmp_path):
    ok(run("merge", "fisher", A, B, "--out", tmp_path / "merged", cwd=root))
    merged, a, b = weights(tmp_path / "merged"), weights(root / A), weights(root / B)
    name = "bert.encoder.layer.3.output.dense.weight"
    f, g = (squisher.load(root / run_name)[name].double() * 32 for run_name in (A, B))
    floor = 1e-6 * (f.mean() + g.mean()) / 2
    f, g = f.clamp(min=floor), g.clamp(min=floor)
    torch.testing.assert_close(merged[name].double(), (f * a[name] + g * b[name]) / (f + g), rtol=1e-4, atol=1e-7)
    untouched = "bert.embeddings.word_embeddings.weight"
    assert torch.allclose(merged[untouched][5000:], a[untouched][5000:], atol=1e-7)
    assert f"| {A} |" in (tmp_path / "merged" / "README.md").read_text()


def test_pruning_three_quarters(root, tmp_path):
    found = json.loads(ok(run("prune", A, "--sparsity", "0.75", "--out", tmp_path / "pruned", "--json", cwd=root)))
    total = sum(t.numel() for t in weights(root / A).values())
    assert found["zeros"] == int(0.75 * total)
    assert sum(int((t == 0).sum()) for t in weights(tmp_path / "pruned").values()) == found["zeros"]


def test_a_patch_of_half_a_percent(root, tmp_path):
    mask, patch, small = (tmp_path / f"{name}.safetensors" for name in ("mask", "patch", "small"))
    assert "113," in ok(run("mask", A, "--keep", "0.005", "--always", "classifier", "--out", mask, cwd=root))
    ok(run("patch", "make", "base", A, "--out", patch, cwd=root))  # 44 chunks of the word embeddings did not change
    ok(run("patch", "apply", "base", patch, "--out", tmp_path / "back", cwd=root))
    back, tuned = weights(tmp_path / "back"), weights(root / A)
    assert all(torch.equal(back[name].view(torch.int32), tuned[name].view(torch.int32)) for name in tuned)
    ok(run("patch", "make", "base", A, "--mask", mask, "--drop-outside", "--out", small, cwd=root))
    assert small.stat().st_size < 0.02 * (root / A / "model.safetensors").stat().st_size


def test_where_bits_matter(root, tmp_path):
    found = json.loads(
        ok(
            run(
                "quantize",
                A,
                "--importance",
                A,
                "--bits-per-weight",
                "4.5",
                "--out",
                tmp_path / "plan.json",
                "--json",
                cwd=root,
            )
        )
    )
    assert found["bits_per_weight"] <= 4.5


def test_a_report_leads_with_the_answer(root, tmp_path):
    done = json.loads(
        ok(run("report", A, B, "--model", A, "--model", B, "--out", tmp_path / "r.html", "--json", cwd=root))
    )
    assert done["importances"][0]["answer"][0].startswith("pooler.dense holds ")
    assert [item["name"] for item in done["importances"]] == [A, B]
    assert done["importances"][0]["depth"]["layer"][:4] == [
        "bert.embeddings.word_embeddings", "bert.embeddings.position_embeddings", "bert.embeddings.token_type_embeddings",
        "bert.embeddings.LayerNorm",
    ]  # fmt: skip


def test_an_importance_of_another_model_is_refused(root, tmp_path):
    other = {f"other.{name}": tensor for name, tensor in squisher.load(root / A).items()}
    save_file({"x": torch.ones(3)}, tmp_path / "x.safetensors")
    squisher.Importance(other).save(tmp_path / "other.safetensors")
    done = run(
        "prune",
        A,
        "--importance",
        tmp_path / "other.safetensors",
        "--sparsity",
        "0.5",
        "--out",
        tmp_path / "p",
        cwd=root,
    )
    assert done.returncode == 1
    assert "bert.embeddings" in done.stderr
    assert not (tmp_path / "p").exists()
