"""The commands quantize, unlearn and export, in processes of their own; on a folder of 25 million parameters."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import squisher
from squisher.cli import main
from squisher.storage import safetensors

SQUISHER = Path(sys.executable).with_name("squisher")


def run(*arguments):
    done = subprocess.run(
        [SQUISHER, *map(str, arguments)], capture_output=True, text=True, env=os.environ.copy(), check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def opened(path):
    return safetensors.open_archive(path)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama of 25.2 million parameters in bfloat16, its importance, and one of data to forget."""
    place = tmp_path_factory.mktemp("models")
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (16_384, 512), "model.norm.weight": (512,), "lm_head.weight": (16_384, 512)}
    for k in range(3):
        block = f"model.layers.{k}."
        shapes |= {f"{block}self_attn.{p}_proj.weight": (512, 512) for p in "qkvo"}
        shapes |= {f"{block}mlp.{p}_proj.weight": (1152, 512) for p in ("gate", "up")}
        shapes |= {f"{block}mlp.down_proj.weight": (512, 1152), f"{block}input_layernorm.weight": (512,)}
    model = place / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}))
    weights = {n: torch.randn(s, generator=generator).bfloat16() * 0.02 for n, s in shapes.items()}
    safetensors.save(model / "model.safetensors", weights, None, shard_bytes=30_000_000)
    whole = {n: torch.rand(s, generator=generator) * 1e-8 for n, s in shapes.items()}
    squisher.Importance(whole, examples=10, unit="example").save(model)
    forget = {n: f * torch.rand(f.shape, generator=generator).mul_(12) for n, f in whole.items()}
    squisher.Importance(forget, examples=5, unit="example").save(place / "forget.safetensors")
    assert sum(w.numel() for w in weights.values()) > 25_000_000
    return place


def test_quantize_plans(folder, tmp_path):
    model = folder / "model"
    said = run("quantize", model, "--importance", model, "--bits-per-weight", "4.2", "--out", tmp_path / "plan.json")
    assert "23 tensors at 4." in said
    plan = json.loads((tmp_path / "plan.json").read_text())
    found = squisher.quantize.sensitivity(opened(model / "model.safetensors.index.json"), squisher.load(model))
    expected = squisher.quantize.allocate(found, 4.2)
    assert plan == json.loads(json.dumps(expected.to_dict()))
    assert plan["bits_per_weight"] <= 4.2

    out = tmp_path / "types.txt"
    printed = run(
        "quantize", model, "--importance", model, "--bits-per-weight", "4.2", "--format", "llama.cpp", "--out", out,
        "--exclude", "embed|lm_head", "--json",
    )  # fmt: skip
    lines = out.read_text().splitlines()
    assert len(lines) == 21
    assert all(line.startswith(r"^blk\.") and line.split("=")[1].startswith("q") for line in lines)
    assert json.loads(printed)["kept"] == {"model.embed_tokens.weight": "excluded", "lm_head.weight": "excluded"}


def test_unlearn(folder, tmp_path):
    model = folder / "model"
    said = run(
        "unlearn", model, "--importance", model, "--forget", folder / "forget.safetensors", "--out", tmp_path / "out"
    )
    expected = squisher.unlearn.dampen(
        opened(model / "model.safetensors.index.json"),
        squisher.load(model),
        squisher.load(folder / "forget.safetensors"),
    )
    out = opened(tmp_path / "out" / "model.safetensors")
    assert list(out) == list(expected)
    assert all(torch.equal(out[name], expected[name]) for name in expected)
    changed = sum(count for count, _ in expected.counts().values())
    assert changed
    assert f"{changed:,} of" in said
    assert (tmp_path / "out" / "config.json").exists()


def test_exports(folder, tmp_path):
    model = folder / "model"
    whole = squisher.load(model)
    run("export", model, "--format", "ota", "--out", tmp_path / "exp_avg_sq.safetensors")
    plain = opened(tmp_path / "exp_avg_sq.safetensors")
    assert set(plain) == set(whole)
    assert torch.equal(plain["lm_head.weight"], whole["lm_head.weight"])

    run("export", model, "--format", "bergson", "--out", tmp_path / "bergson")
    state = torch.load(tmp_path / "bergson" / "optimizer.pt", weights_only=True)
    assert [entry["param_name"] for entry in state["state"].values()] == list(whole)
    assert state["param_groups"][0]["params"] == list(range(len(whole)))
    assert torch.equal(state["state"][0]["exp_avg_sq"], whole["model.embed_tokens.weight"])

    said = run("export", model, "--format", "squeezellm", "--model", model, "--out", tmp_path / "gradients")
    squares = opened(tmp_path / "gradients" / "model.safetensors")
    assert squares.dtype("lm_head.weight") == torch.float32
    assert all(torch.equal(squares[name], whole[name]) for name in ("lm_head.weight", "model.norm.weight"))
    assert json.loads((tmp_path / "gradients" / "config.json").read_text())["dtype"] == "float32"
    assert "have no importance" not in said


@pytest.mark.parametrize(
    ("arguments", "words", "status"),
    [
        (["quantize", "{m}", "--importance", "{m}", "--bits-per-weight", "1", "--out", "p.json"], "smallest widths take", 1),
        (["quantize", "{m}", "--importance", "{m}", "--bits-per-weight", "4", "--out", "p.json", "--bits", "x"], "with commas", 2),
        (["quantize", "{m}", "--importance", "{m}", "--bits-per-weight", "4", "--out", "p.json", "--format", "gguf"], "--format", 2),
        (["quantize", "{m}", "--importance", "{m}", "--bits-per-weight", "4", "--out", "no/p.json"], "no folder no", 1),
        (["quantize", "{m}", "--importance", "{m}", "--bits-per-weight", "4", "--out", "p", "--format", "mlx", "--bits", "4"], "between two widths", 2),
        (["export", "{m}", "--format", "squeezellm", "--out", "o"], "needs --model", 2),
        (["export", "{m}", "--format", "ota", "--model", "{m}", "--out", "o.safetensors"], "has no meaning", 2),
        (["export", "{m}", "--format", "ota", "--out", "o.pt"], ".safetensors file", 2),
        (["export", "{m}", "--format", "gguf", "--out", "o"], "bergson", 2),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path, monkeypatch, capsys, arguments, words, status):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["squisher", *(a.format(m="m") for a in arguments)])
    weights = {"w.weight": torch.ones(4, 4)}
    (tmp_path / "m").mkdir()
    safetensors.save(tmp_path / "m" / "model.safetensors", weights, None)
    squisher.Importance({"w.weight": torch.rand(4, 4, generator=torch.Generator().manual_seed(0))}).save(tmp_path / "m")
    with pytest.raises(SystemExit, match=str(status)):
        main()
    assert words in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]
