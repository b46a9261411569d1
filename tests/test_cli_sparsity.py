"""The commands prune, mask and patch, as a user meets them."""

import pytest
import torch

import squisher
from squisher.storage import safetensors as archive
from tests.commands import run


def opened(path):
    return archive.open_archive(path)[0]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model folder of two shards with its importance, and a fine-tune of it under a mask."""
    folder = tmp_path_factory.mktemp("models")
    generator = torch.Generator().manual_seed(0)
    weights = {
        "body.weight": torch.randn(40, 30, generator=generator),
        "body.bias": torch.randn(40, generator=generator),
        "classifier.weight": torch.randn(4, 40, generator=generator),
    }
    (folder / "base").mkdir()
    archive.save(folder / "base" / "model.safetensors", weights, {}, shard_bytes=5000)
    (folder / "base" / "config.json").write_text('{"model_type": "toy"}')
    importance = squisher.Importance({name: torch.rand(w.shape, generator=generator) for name, w in weights.items()})
    importance.save(folder / "base")
    mask = squisher.mask.top_k(importance, 0.2, always="classifier")
    tuned = {name: torch.where(mask[name], w + 1, w) for name, w in weights.items()}
    (folder / "tuned").mkdir()
    archive.save(folder / "tuned" / "model.safetensors", tuned, {})
    return folder, weights, importance, mask, tuned


def test_prune_a_folder(place, tmp_path):
    folder, weights, importance, _, _ = place
    assert len(list((folder / "base").glob("model-*.safetensors"))) > 1
    done = run("prune", folder / "base", "--sparsity", "0.75", "--out", tmp_path / "out", "--plot", tmp_path / "p.png")
    assert done.returncode == 0, done.stderr
    assert "1,050 of 1,400 weights in 3 tensors are zero (75.00%)" in done.stdout
    expected = squisher.prune.weights(weights, importance, sparsity=0.75)
    out = opened(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(out[name], expected[name]) for name in weights)
    assert (tmp_path / "out" / "config.json").exists()
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


def test_a_model_without_an_importance_is_told_how_to_give_one(place, tmp_path):
    """The message spoke of optimizer states alone, as if the folder had been given as a checkpoint."""
    folder = place[0]
    done = run("prune", folder / "tuned", "--sparsity", "0.5", "--out", tmp_path / "out")
    assert done.returncode == 1
    assert "no squisher.safetensors beside it" in done.stderr
    assert "--importance" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_mask_of_values_that_cannot_be_ranked_does_not_blame_the_budget(tmp_path):
    archive.save(tmp_path / "i.safetensors", {"a": torch.tensor([1.0, -1.0])}, {"kind": "fisher"})
    done = run("mask", tmp_path / "i.safetensors", "--keep", "0.5", "--out", tmp_path / "m.safetensors")
    assert done.returncode == 1
    assert "negative values" in done.stderr
    assert "keep=" not in done.stderr


def test_matrices_without_an_importance_are_named(place, tmp_path):
    folder, _, importance, _, _ = place
    importance.restrict("body").save(tmp_path / "part.safetensors")
    options = ("prune", folder / "base", "--importance", tmp_path / "part.safetensors", "--sparsity", "0.5")
    assert "classifier.weight" in run(*options, "--out", tmp_path / "out").stdout
    assert "classifier.weight" not in run(*options, "--exclude", "classifier", "--out", tmp_path / "other").stdout


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        (["--nm", "2:4", "--exclude", "body"], {"nm": "2:4", "exclude": "body"}),
        (["--sparsity", "0.5", "--scope", "tensor", "--score", "random", "--seed", "3"], {"sparsity": 0.5, "scope": "tensor", "score": "random", "seed": 3}),
    ],
)  # fmt: skip
def test_its_options(place, tmp_path, options, arguments):
    folder, weights, importance, _, _ = place
    out = tmp_path / "out.safetensors"
    done = run(
        "prune", folder / "base", "--importance", folder / "base" / "squisher.safetensors", "--out", out, *options
    )
    assert done.returncode == 0, done.stderr
    expected = squisher.prune.weights(weights, importance, **arguments)
    assert all(torch.equal(opened(out)[name], expected[name]) for name in weights)


def test_magnitude_needs_no_importance(place, tmp_path):
    folder, _, _, _, tuned = place
    out = tmp_path / "out"
    assert run("prune", folder / "tuned", "--sparsity", "0.5", "--score", "magnitude", "--out", out).returncode == 0
    zeros = sum(int((opened(out / "model.safetensors")[name] == 0).sum()) for name in tuned)
    assert zeros == 1360 // 2
    done = run("prune", folder / "tuned", "--sparsity", "0.5", "--out", tmp_path / "x")
    assert done.returncode == 1
    assert not (tmp_path / "x").exists()


def test_a_mask_that_freezes_everything_says_so(place, tmp_path):
    done = run("mask", place[0] / "base", "--keep", "1e-5", "--out", tmp_path / "mask.safetensors")
    assert "0 of 1,400 entries" in done.stdout
    assert "freezes everything" in done.stderr


def test_mask_and_patch(place, tmp_path):
    folder, _, _, mask, tuned = place
    made, patch, out = tmp_path / "mask.safetensors", tmp_path / "patch.safetensors", tmp_path / "again"
    done = run(
        "mask", folder / "base", "--keep", "0.2", "--always", "classifier", "--out", made, "--plot", tmp_path / "m.png"
    )
    assert done.returncode == 0, done.stderr
    assert "280 of 1,400 entries in 3 tensors may train" in done.stdout
    loaded = squisher.mask.load(made)
    assert all(torch.equal(loaded[name], mask[name]) for name in mask)
    assert (tmp_path / "m.png").exists()
    done = run("patch", "make", folder / "base", folder / "tuned", "--mask", made, "--out", patch)
    assert done.returncode == 0, done.stderr
    assert "280 of 1,400 entries differ, in " in done.stdout
    done = run("patch", "apply", folder / "base", patch, "--out", out)
    assert done.returncode == 0, done.stderr
    assert all(torch.equal(opened(out / "model.safetensors")[name], tuned[name]) for name in tuned)
    assert (out / "config.json").exists()


def test_refusals_are_one_sentence(place, tmp_path):
    folder = place[0]
    made, patch = tmp_path / "mask.safetensors", tmp_path / "patch.safetensors"
    assert run("mask", folder / "base", "--keep", "0.01", "--out", made).returncode == 0
    done = run("patch", "make", folder / "base", folder / "tuned", "--mask", made, "--out", patch)
    assert done.returncode == 1
    assert "entries differ outside the mask" in done.stderr
    assert "Traceback" not in done.stderr
    assert not patch.exists()
    done = run("patch", "make", folder / "base", folder / "tuned", "--mask", made, "--drop-outside", "--out", patch)
    assert done.returncode == 0
    assert "outside the mask were left out" in done.stdout
    done = run("patch", "apply", folder / "tuned", patch, "--out", tmp_path / "out")
    assert done.returncode == 1
    assert "made from another base" in done.stderr
    assert not (tmp_path / "out").exists()
    done = run("patch", "make", folder / "base", folder / "tuned", "--drop-outside", "--out", patch)
    assert "needs --mask" in done.stderr
    done = run("mask", folder / "base", "--keep", "0.05", "--always", "classifier", "--out", made, "--overwrite")
    assert "160 are always kept" in done.stderr
    done = run("prune", folder / "base", "--out", tmp_path / "x")
    assert "either a sparsity" in done.stderr
