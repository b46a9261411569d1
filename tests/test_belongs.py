"""An importance belongs to the weights it was made with: another order is refused, other weights are told."""

import warnings

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import squisher
from squisher.cli import app
from squisher.errors import SquisherError, SquisherWarning
from squisher.importance.weights import check_weights, content_of, match


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture
def trained(tmp_path):
    """Three models that went different ways from one start, each with its own importance beside it."""
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).state_dict()
    out = {}
    for k, name in enumerate("abc"):
        torch.manual_seed(k)
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
        model.load_state_dict(start)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(torch.randn(16, 6)), torch.randint(0, 3, (16,))).backward()
            optimizer.step()
        (tmp_path / name).mkdir()
        save_file(model.state_dict(), tmp_path / name / "model.safetensors")
        torch.save(model.state_dict(), tmp_path / name / "weights.pt")
        (tmp_path / name / "config.json").write_text("{}")
        imp = squisher.extract(optimizer, model, batch_size=16)
        imp.save(tmp_path / f"{name}.safetensors")
        out[name] = {n: t.clone() for n, t in model.state_dict().items()}, imp
    return out


def merged(tmp_path, models, importances, *more):
    given = [part for name in importances for part in ("--importance", tmp_path / f"{name}.safetensors")]
    return run("merge", "fisher", *(tmp_path / name for name in models), *given, "--out", tmp_path / "out", *more)


def test_a_swapped_order_is_refused_and_the_right_one_named(trained, tmp_path):
    done = merged(tmp_path, "ab", "ba")
    assert done.exit_code == 1
    text = str(done.exception)
    assert "number 1, given for a, belongs to b; number 2, given for b, belongs to a" in text
    assert "The right order is: number 2, number 1." in text
    assert not (tmp_path / "out").exists()
    done = merged(tmp_path, "abc", "cab")
    assert "The right order is: number 2, number 3, number 1." in str(done.exception)
    assert merged(tmp_path, "ab", "ab").exit_code == 0


def test_any_weights_overrides(trained, tmp_path):
    assert merged(tmp_path, "ab", "ba", "--any-weights").exit_code == 0


def test_other_weights_are_told(trained, tmp_path):
    done = merged(tmp_path, "ab", "ac")
    assert done.exit_code == 0, done.exception
    assert "The importance given for b was made with other weights: 4 of 4 tensors compared differ" in done.stderr
    silent = run("merge", "fisher", tmp_path / "a", tmp_path / "b", "--importance", tmp_path / "a.safetensors", "--importance", tmp_path / "c.safetensors", "--out", tmp_path / "out2", "--any-weights")  # fmt: skip
    assert "other weights" not in silent.stderr


@pytest.mark.parametrize("command", ["prune", "report", "quantize", "unlearn"])
def test_commands_for_one_model(trained, tmp_path, command):
    def said(importance, *more):
        file, model, out = tmp_path / f"{importance}.safetensors", tmp_path / "a", tmp_path / f"{importance}{len(more)}"
        arguments = {
            "prune": [model, "--importance", file, "--sparsity", "0.5", "--out", out],
            "report": [file, "--model", model, "--out", out.with_suffix(".html")],
            "quantize": [model, "--importance", file, "--bits-per-weight", "20", "--group", "2", "--out", out],
            "unlearn": [model, "--importance", file, "--forget", tmp_path / "a.safetensors", "--out", out],
        }
        done = run(command, *arguments[command], *more)
        assert done.exit_code == 0, done.exception
        return done.stderr

    assert "was made with other weights" in said("b")
    assert "other weights" not in said("a")
    assert said("b", "--any-weights") == ""


def test_nothing_is_said_where_nothing_is_known(trained):
    weights, imp = trained["a"]
    plain = squisher.Importance(dict(imp.items()), kind="fisher")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_weights([plain, dict(imp.items()), None], [weights] * 3, ["x", "y", "z"])
    assert match(plain, weights).same is None
    assert match(imp, weights).same is True
    assert match(imp, trained["b"][0]).same is False


def test_frozen_and_renamed_tensors_are_left_out(trained):
    weights, imp = trained["a"]
    some = {name: tensor for name, tensor in weights.items() if name != "0.weight"}
    assert match(imp, some).same is True
    assert match(imp, {f"module.{name}": tensor for name, tensor in weights.items()}).same is None


def test_a_copy_in_another_precision_is_known(trained):
    def low(name, dtype=torch.bfloat16):
        return {key: tensor.to(dtype) for key, tensor in trained[name][0].items()}

    imp, other = trained["a"][1], trained["b"][1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_weights([imp, other], [low("a"), low("b")], ["a", "b"])
    assert match(imp, low("a")).same is True
    assert match(imp, low("b")).same is False
    assert match(imp, low("b", torch.float16)).same is None, "which of its digits were lost is not known"
    with pytest.raises(SquisherError, match="number 2, number 1"):
        check_weights([other, imp], [low("a"), low("b")], ["a", "b"])


def test_a_copy_in_more_digits_is_known(trained):
    weights, imp = trained["a"]
    low = {name: tensor.bfloat16() for name, tensor in weights.items()}
    made = imp.with_provenance(model={"content": content_of(low)})
    assert match(made, {name: tensor.float() for name, tensor in low.items()}).same is True
    assert match(made, trained["b"][0]).same is False


def test_float32_is_compared_to_the_last_digit(trained):
    weights, imp = trained["a"]
    near = {name: torch.nextafter(tensor, torch.tensor(9.0)) for name, tensor in weights.items()}
    assert match(imp, near).same is False


def test_two_importances_of_one_model(trained):
    (a, imp), (b, _) = trained["a"], trained["b"]
    with pytest.raises(SquisherError, match="number 2, .*b, belongs to a"):
        check_weights([imp, imp], [a, b], ["a", "b"])


def test_hashes_of_weights_beside_a_state(trained, tmp_path):
    weights, _ = trained["a"]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    model.load_state_dict(weights)
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.rand(4, 6)).sum().backward()
    optimizer.step()
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    save_file(model.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    for hash_weights in (False, True):
        imp = squisher.extract(folder, hash_weights=hash_weights)
        assert imp.provenance.model["content"] == content_of(model.state_dict(), imp, None)
        assert match(imp, model.state_dict()).same is True
        assert match(imp, weights).same is False


def test_the_smallest_are_hashed_first(trained):
    weights, _ = trained["a"]
    sizes = {name: tensor.numel() * 4 for name, tensor in weights.items()}
    assert list(content_of(weights, weights, limit=sizes["2.bias"] + sizes["0.bias"])) == ["2.bias", "0.bias"]
    assert set(content_of(weights, weights, limit=None)) == set(weights)


def test_a_measured_fisher_belongs_to_its_model(trained):
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    model.load_state_dict(trained["a"][0])
    imp = squisher.fisher(model, [(torch.randn(8, 6), torch.randint(0, 3, (8,)))])
    assert match(imp, trained["a"][0]).same is True
    assert match(imp, trained["b"][0]).same is False


def test_ewc_tells_of_other_weights(trained):
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    model.load_state_dict(trained["a"][0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        squisher.EWC(model).consolidate(trained["a"][1])
    with pytest.warns(SquisherWarning, match="other weights.* 4 of 4"):
        squisher.EWC(model).consolidate(trained["b"][1])


def test_shrink_tells_before_it_opens_the_model(trained, tmp_path):
    def said(*more):
        given = ["--importance", tmp_path / "b.safetensors", "--sparsity", "0.5", "--out", tmp_path / "smaller"]
        return run("shrink", tmp_path / "a", *given, *more).stderr

    assert "made with other weights: 4 of 4 tensors" in said()
    assert "other weights" not in said("--any-weights")
