"""No command replaces what is there, unless it is told to, and never what it reads."""

import pytest
import torch

import squisher
from squisher.storage.atomic import claim
from squisher.storage.folders import write_model
from tests.commands import run


@pytest.fixture
def files(tmp_path):
    for name, value in (("base", 1.0), ("tuned", 2.0)):
        write_model(tmp_path / name, {"w": torch.full((2, 64), value)})
    squisher.Importance({"w": torch.arange(1.0, 129.0).view(2, 64)}, "fisher").save(tmp_path / "imp.safetensors")
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2, 64))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2, 64)
    optimizer.step()
    torch.save(
        {"optimizer": optimizer.state_dict(), "model": {"w": torch.ones(2, 64), "v": torch.ones(3)}},
        tmp_path / "state.pt",
    )
    (tmp_path / "names.txt").write_text("w\n")
    squisher.mask.top_k({"w": torch.arange(1.0, 129.0).view(2, 64)}, 0.5).save(tmp_path / "mask.safetensors")
    return tmp_path


COMMANDS = {
    "extract": ["extract", "state.pt", "--names", "names.txt", "--out", "out.safetensors"],
    "mask": ["mask", "imp.safetensors", "--keep", "0.5", "--out", "out.safetensors"],
    "embed": ["embed", "imp.safetensors", "--out", "out.safetensors"],
    "patch make": ["patch", "make", "base", "tuned", "--out", "out.safetensors"],
    "merge": ["merge", "average", "base", "tuned", "--out", "out.safetensors"],
    "prune": ["prune", "base", "--importance", "imp.safetensors", "--sparsity", "0.5", "--out", "out.safetensors"],
    "quantize": [
        "quantize",
        "base",
        "--importance",
        "imp.safetensors",
        "--bits-per-weight",
        "8",
        "--out",
        "out.safetensors",
    ],
    "report": ["report", "imp.safetensors", "--out", "out.html"],
    "export": ["export", "imp.safetensors", "--format", "ota", "--out", "out.safetensors"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_an_output_that_exists_is_replaced_only_if_asked_for(files, command):
    arguments = COMMANDS[command]
    out = files / arguments[-1]
    out.write_text("precious")
    refused = run(*arguments, cwd=files)
    assert refused.returncode == 1
    assert "--overwrite" in refused.stderr
    assert out.read_text() == "precious"
    done = run(*arguments, "--overwrite", cwd=files)
    assert done.returncode == 0, done.stderr
    assert out.read_bytes() != b"precious"


@pytest.mark.parametrize("command", COMMANDS)
def test_an_output_that_another_process_writes_is_left_to_it(files, command):
    arguments, before = COMMANDS[command], set(files.iterdir())
    with claim(files / arguments[-1]):
        for options in ([], ["--overwrite"]):
            refused = run(*arguments, *options, cwd=files)
            assert refused.returncode == 1
            assert "another process" in refused.stderr
    assert set(files.iterdir()) == before
    assert run(*arguments, cwd=files).returncode == 0
    assert {path.name for path in set(files.iterdir()) - before} == {arguments[-1]}


@pytest.mark.parametrize(
    ("command", "source"),
    [("mask", "imp.safetensors"), ("embed", "imp.safetensors"), ("export", "imp.safetensors"), ("prune", "imp.safetensors"),
     ("merge", "imp.safetensors")],
)  # fmt: skip
def test_a_source_is_never_replaced(files, command, source):
    arguments = COMMANDS[command][:-1]
    if command == "merge":
        arguments = ["merge", "average", source, source, "--out"]
    before = (files / source).read_bytes()
    refused = run(*arguments, source, "--overwrite", cwd=files)
    assert refused.returncode == 1
    assert "made from" in refused.stderr
    assert (files / source).read_bytes() == before


@pytest.mark.parametrize("command", ["merge", "prune"])
def test_a_folder_is_never_replaced(files, command):
    refused = run(*COMMANDS[command][:-1], "tuned", "--overwrite", cwd=files)
    assert refused.returncode == 1
    assert sorted(p.name for p in (files / "tuned").iterdir()) == ["model.safetensors"]


def test_the_weights_in_a_source_folder_are_never_replaced(files):
    (files / "imp.safetensors").rename(files / "base" / "imp.safetensors")
    weights = files / "base" / "model.safetensors"
    before = weights.read_bytes()
    arguments = ["mask", "base/imp.safetensors", "--model", "base", "--keep", "0.5", "--overwrite", "--out"]
    refused = run(*arguments, "base/model.safetensors", cwd=files)
    assert refused.returncode == 1
    assert "made by squisher" in refused.stderr
    assert weights.read_bytes() == before
    (files / "mask.safetensors").rename(files / "base" / "mask.safetensors")
    done = run(*arguments, "base/mask.safetensors", cwd=files)
    assert done.returncode == 0, done.stderr


def test_nothing_that_a_model_needs_is_replaced_by_a_plan(files):
    """`--out base/config.json --overwrite` wrote the plan over the model's config."""
    arguments = [*COMMANDS["quantize"][:-1], "base/config.json", "--overwrite"]
    config = files / "base" / "config.json"
    config.write_text('{"model_type": "bert"}')
    refused = run(*arguments, cwd=files)
    assert refused.returncode == 1
    assert "choose another name" in refused.stderr
    assert config.read_text() == '{"model_type": "bert"}'
    for _ in range(2):  # a plan or a page of ours may lie beside the model, and be made again
        plan = run(*arguments[:-2], "base/plan.json", "--overwrite", cwd=files)
        page = run("report", "imp.safetensors", "--model", "base", "--out", "base/r.html", "--overwrite", cwd=files)
        assert (plan.returncode, page.returncode) == (0, 0), plan.stderr + page.stderr


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".gguf"])
def test_a_model_is_not_written_into_a_folder_that_is_called_like_a_file(files, suffix):
    """`--out merged.bin` made a folder of this name."""
    refused = run(*COMMANDS["merge"][:-1], f"merged{suffix}", cwd=files)
    assert refused.returncode == 2
    assert ".safetensors" in refused.stderr
    assert not (files / f"merged{suffix}").exists()
    taken = run(*COMMANDS["merge"][:-1], "names.txt", "--overwrite", cwd=files)
    assert taken.returncode == 2  # "or replace it with --overwrite", said one that had been given it
    assert (files / "names.txt").read_text() == "w\n"
    assert run(*COMMANDS["merge"][:-1], "merged-v1.5", cwd=files).returncode == 0
