"""The command line as a user meets it."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import squisher
from tests.commands import run, run_process


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.01)
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(16, 6)), torch.randint(0, 3, (16,))).backward()
        optimizer.step()
    path = tmp_path_factory.mktemp("run") / "checkpoint.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return path, squisher.extract(optimizer, model)


def test_extract_inspect_compare(checkpoint, tmp_path):
    source, live = checkpoint
    out = tmp_path / "squisher.safetensors"
    done = run("extract", source, "--out", out, "--batch-size", "16")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "4 tensors of Adam after 30 steps" in done.stdout
    assert "L2 weight decay 0.01" in done.stdout
    assert done.stdout.count("registration order") == 1
    assert "every shape occurs once" in done.stdout
    assert "--base-model" in done.stdout
    assert "--model)" not in done.stdout.replace("--base-model)", "")
    imp = squisher.load(out)
    assert all(torch.equal(imp[name], live[name]) for name in live)
    assert imp.provenance.batch_size == 16

    shown = run("inspect", out)
    assert shown.returncode == 0, shown.stderr
    for words in ("Adam", "0.weight", "16 examples", "L2 weight decay"):
        assert words in shown.stdout
    document = json.loads(run("inspect", out, "--json").stdout)
    assert document["provenance"]["optimizer"]["beta2"] == 0.999

    raw = tmp_path / "raw.safetensors"
    assert run("extract", source, "--out", raw, "--raw").returncode == 0
    result = run("compare", out, raw, "--json")
    agreement = json.loads(result.stdout)
    assert agreement["spearman"] == pytest.approx(1.0)
    assert agreement["scale"] == pytest.approx(1 / (1 - 0.999**30), rel=1e-4)
    assert result.stderr == ""
    assert "Spearman" in run("compare", out, raw).stdout


def test_a_checkpoint_is_extracted_on_the_fly(checkpoint):
    assert json.loads(run("inspect", checkpoint[0], "--json").stdout)["provenance"]["kind"] == "squisher"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "scale of a Fisher needs --batch-size"),
        (["--batch-size", 16, "--loss-reduction", "token_mean"], "--batch-tokens"),
        (["--batch-tokens", 100], "--loss-reduction"),
        (["--batch-size", 16, "--raw"], "without bias correction"),
        (["--batch-size", 16], None),
    ],
)
def test_extract_says_what_the_scale_of_a_fisher_lacks(checkpoint, tmp_path, options, words):
    said = run("extract", checkpoint[0], "--out", tmp_path, *options).stdout
    assert ("scale of a Fisher" in said) == (words is not None)
    assert words is None or words in said.splitlines()[-1]
    imp = squisher.load(tmp_path)
    if words is None:
        assert imp.as_fisher().provenance.per_unit
    else:
        with pytest.raises(squisher.SquisherError):
            imp.as_fisher()


def test_pictures(checkpoint, tmp_path):
    for command in (["inspect", checkpoint[0]], ["compare", checkpoint[0], checkpoint[0]]):
        picture = tmp_path / f"{command[0]}.png"
        done = run(*command, "--plot", picture)
        assert done.returncode == 0, done.stderr
        assert picture.read_bytes()[:4] == b"\x89PNG"


def test_json_of_extract_and_bfloat16(checkpoint, tmp_path):
    done = run(
        "extract",
        checkpoint[0],
        "--out",
        tmp_path,
        "--dtype",
        "bfloat16",
        "--json",
        "--loss-reduction",
        "sum",
        "--batch-size",
        4,
    )
    document = json.loads(done.stdout)
    assert document["file"] == str(tmp_path / "squisher.safetensors")
    assert document["provenance"]["loss_reduction"] == "sum"
    assert squisher.load(tmp_path)["0.weight"].dtype == torch.bfloat16


def test_the_same_input_gives_the_same_bytes(checkpoint, tmp_path):
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for file, threads in zip(files, "12", strict=True):
        run_process("extract", checkpoint[0], "--out", file, environment={"OMP_NUM_THREADS": threads})
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    ("arguments", "words", "status"),
    [
        (["extract", "nothing.pt", "--out", "a.safetensors"], "There is no file or folder nothing.pt", 1),
        (["extract", "bare.pt", "--out", "a.safetensors"], "--names FILE", 1),
        (["extract", "bare.pt", "--out", "a.bin"], "ends in .safetensors", 2),
        (["extract", "bare.pt", "--out", "no/such/a.safetensors"], "no folder no/such", 1),
        (["extract", "sgd.pt", "--out", "a.safetensors"], "squisher.Tracker", 1),
        (["extract", "cut.pt", "--out", "a.safetensors"], "cut.pt", 1),
        (["extract", "checkpoint.pt", "--out", "a.safetensors", "--dtype", "float16"], "float16 underflows", 2),
        (
            ["extract", "checkpoint.pt", "--out", "a.safetensors", "--loss-reduction", "avg"],
            "--loss-reduction is mean",
            2,
        ),
        (["inspect", "nothing.safetensors"], "There is no file nothing.safetensors", 1),
        (["inspect", "empty.safetensors"], "not a safetensors file", 1),
        (["merge", "fishr", "a", "b", "--out", "c"], "squisher: METHOD is average", 2),
        (["fisher", ".", "--data", "nothing.jsonl", "--out", "a.safetensors"], "Cannot read nothing.jsonl", 1),
    ],
)
def test_errors_are_one_paragraph_and_leave_nothing(checkpoint, tmp_path, arguments, words, status):
    (tmp_path / "checkpoint.pt").write_bytes(checkpoint[0].read_bytes())
    (tmp_path / "cut.pt").write_bytes(checkpoint[0].read_bytes()[:3000])
    (tmp_path / "empty.safetensors").write_bytes(b"")
    torch.save(torch.load(checkpoint[0])["optimizer"], tmp_path / "bare.pt")
    torch.save(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1).state_dict(), tmp_path / "sgd.pt")
    before = sorted(p.name for p in tmp_path.iterdir())
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == status
    assert done.stdout == ""
    assert words in done.stderr
    assert done.stderr.startswith("squisher: ")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert "Traceback" in run("--debug", *arguments, cwd=tmp_path).stderr


def test_wrong_usage_is_status_2_with_a_suggestion():
    done = run("extrct")
    assert done.returncode == 2
    assert "extract" in done.stderr
    assert run("extract", "x").returncode == 2
    assert run("extract", "x", "--out", "y", "--batch-size", "many").returncode == 2


def test_in_a_pipe_no_other_library_draws_a_bar(monkeypatch):
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "")
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS")
    run("--version")
    assert os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] == "1"


def test_version_and_help_without_torch():
    code = "import sys, squisher.cli as c\nsys.argv = ['squisher', '--help']\ntry:\n    c.main()\nexcept SystemExit:\n    pass\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "extract" in done.stdout
    assert run_process("--version").stdout.strip() == f"squisher {squisher.__version__}"
    for command in ("extract", "inspect", "compare"):
        assert "Example: squisher" in run(command, "--help").stdout


def test_a_checkpoint_is_asked_for_only_where_none_is_beside(tmp_path):
    from squisher.cli.extract import _has_earlier

    for name in ("checkpoint-9", "checkpoint-30", "checkpoint-best"):
        (tmp_path / name).mkdir()
    earlier = {
        name: _has_earlier(str(tmp_path / name))
        for name in ("checkpoint-9", "checkpoint-30", "checkpoint-best", "x.pt")
    }
    assert earlier == {"checkpoint-9": False, "checkpoint-30": True, "checkpoint-best": False, "x.pt": False}


@pytest.mark.parametrize("where", ["torch", "typer", "squisher.cli"])
def test_ctrl_c_while_modules_are_imported_is_no_traceback(where, tmp_path):
    code = f"""
import builtins, runpy, sys
plain = builtins.__import__
def interrupted(name, *more, **keywords):
    found = plain(name, *more, **keywords)
    if {where!r} in sys.modules:
        builtins.__import__ = plain
        raise KeyboardInterrupt
    return found
builtins.__import__ = interrupted
sys.argv = ["squisher", "inspect", "nothing.safetensors"]
runpy.run_module("squisher", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
