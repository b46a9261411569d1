"""`squisher merge` as a user meets it: folders and files in, a folder that loads out, or one paragraph and nothing."""

import json
import os
import signal
import subprocess
import time

import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

import squisher
from squisher import merge
from squisher.storage.folders import open_model
from tests.commands import SQUISHER, run


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def trained(seed, steps=20):
    model = net(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(16, 6)), torch.randint(0, 3, (16,))).backward()
        optimizer.step()
    return model, optimizer


def folder(path, model, optimizer=None, dtype=torch.float32, shards=False):
    path.mkdir()
    weights = {n: t.to(dtype) if t.is_floating_point() else t for n, t in model.state_dict().items()}
    if shards:
        names = sorted(weights)
        parts = {"model-00001-of-00002.safetensors": names[:3], "model-00002-of-00002.safetensors": names[3:]}
        for file, own in parts.items():
            safetensors.torch.save_file({n: weights[n] for n in own}, path / file, {"format": "pt"})
        index = {"metadata": {}, "weight_map": {n: file for file, own in parts.items() for n in own}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        safetensors.torch.save_file(weights, path / "model.safetensors", {"format": "pt"})
    config = {"model_type": "toy", "torch_dtype": str(dtype)[6:], "_name_or_path": "/home/somebody/runs/7"}
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text("{}")
    (path / "tokenizer.json").write_text('{"version": "1.0"}')
    (path / "training_args.bin").write_bytes(b"not copied")
    if optimizer is not None:
        squisher.extract(optimizer, model, batch_size=16).save(path)
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name, seed in (("a", 1), ("b", 2)):
        folder(root / name, *trained(seed))
    folder(root / "base", net(0))
    model, optimizer = trained(3)
    squisher.extract(optimizer, model, batch_size=16).save(root / "base")
    return root


def loaded(path):
    return safetensors.torch.load_file(path / "model.safetensors")


def test_fisher_from_the_files_beside_the_models(models, tmp_path):
    done = run(
        "merge",
        "fisher",
        models / "a",
        models / "b",
        "--out",
        tmp_path / "out",
        "--coefficient",
        1,
        "--coefficient",
        0.5,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "6 tensors of 2 models merged (fisher)" in done.stdout
    weights = [loaded(models / name) for name in "ab"]
    imps = [squisher.load(models / name) for name in "ab"]
    expected = merge.fisher(weights, imps, [1, 0.5])
    result = loaded(tmp_path / "out")
    assert set(result) == set(weights[0])
    assert all(torch.equal(result[name], expected[name]) for name in result)
    assert torch.equal(result["1.running_mean"], weights[0]["1.running_mean"])
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert "_name_or_path" not in json.loads((tmp_path / "out" / "config.json").read_text())
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| a | 1 | Squisher of AdamW, 20 steps, batch size 16 |" in card
    assert "| b | 0.5 |" in card
    assert str(tmp_path) not in card
    assert str(models) not in card
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_the_other_methods_with_json(models, tmp_path):
    weights, base = [loaded(models / name) for name in "ab"], loaded(models / "base")
    imps, own = [squisher.load(models / name) for name in "ab"], squisher.load(models / "base")
    cases = {
        "average": ([], merge.average(weights)),
        "task-arithmetic": (["--base", models / "base", "--coefficient", -0.5, "--coefficient", 2],
                            merge.task_arithmetic(base, weights, [-0.5, 2])),
        "ubgm": (["--base", models / "base", "--size", 100, "--size", 300, "--base-size", 50, "--floor", "1e-12"],
                 merge.ubgm(base, weights, own, imps, sizes=[100, 300], base_size=50, delta=1e-12)),
    }  # fmt: skip
    for method, (options, expected) in cases.items():
        done = run("merge", method, models / "a", models / "b", "--out", tmp_path / method, "--json", *options)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["merged"] == 6
        result = loaded(tmp_path / method)
        assert all(torch.equal(result[name], expected[name]) for name in result), method


def test_shards_torch_files_types_and_exclusion(models, tmp_path):
    folder(tmp_path / "sharded", trained(1)[0], shards=True)
    (tmp_path / "torch").mkdir()
    torch.save(trained(2)[0].state_dict(), tmp_path / "torch" / "pytorch_model.bin")
    (tmp_path / "torch" / "config.json").write_text("{}")
    done = run(
        "merge",
        "average",
        "sharded",
        "torch",
        "--out",
        "out",
        "--dtype",
        "bfloat16",
        "--exclude",
        r"^3\.",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "Kept as in the first model: 3.bias (excluded), 3.weight (excluded)" in done.stdout
    expected = merge.average(
        [trained(1)[0].state_dict(), trained(2)[0].state_dict()], exclude=r"^3\.", dtype="bfloat16"
    )
    result = loaded(tmp_path / "out")
    for name, tensor in result.items():
        assert torch.equal(tensor, expected[name])
    assert result["0.weight"].dtype == torch.bfloat16
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_plain_files_and_a_checkpoint_as_importance(tmp_path):
    for name, seed in (("a", 1), ("b", 2)):
        model, optimizer = trained(seed)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / f"{name}.pt")
        safetensors.torch.save_file(model.state_dict(), tmp_path / f"{name}.safetensors")
    done = run(
        "merge", "fisher", "a.safetensors", "b.safetensors", "--importance", "a.pt", "--importance", "b.pt",
        "--out", "out.safetensors", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    again = run("merge", "fisher", "a.pt", "b.pt", "--out", "again.safetensors", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    expected = merge.fisher(
        [trained(k)[0].state_dict() for k in (1, 2)], [squisher.extract(*reversed(trained(k))) for k in (1, 2)]
    )
    for file in ("out.safetensors", "again.safetensors"):
        result = safetensors.torch.load_file(tmp_path / file)
        assert all(torch.equal(result[name], expected[name]) for name in result)


def test_the_same_input_gives_the_same_bytes(models, tmp_path):
    for k in "12":
        environment = {**os.environ, "OMP_NUM_THREADS": k}
        command = [SQUISHER, "merge", "fisher", models / "a", models / "b", "--out", tmp_path / k]
        subprocess.run(command, env=environment, check=True, capture_output=True)
    for file in (tmp_path / "1").iterdir():
        assert file.read_bytes() == (tmp_path / "2" / file.name).read_bytes()


def broken(root, models):
    """Folders that cannot be merged with `a`."""
    nan = trained(2)[0]
    nan[0].weight.data[1, 1] = float("nan")
    folder(root / "nan", nan)
    cut = folder(root / "cut", trained(2)[0])
    data = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(data[:-40])
    folder(root / "wide", nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 3)))
    (root / "empty").mkdir()
    quantised = folder(root / "quantised", trained(2)[0])
    (quantised / "config.json").write_text('{"quantization_config": {"quant_method": "bitsandbytes"}}')
    folder(root / "bare", trained(2)[0])


@pytest.mark.parametrize(
    ("arguments", "words", "status"),
    [
        (["average", "a", "nan"], "'0.weight' of model 2 has NaN", 1),
        (["average", "a", "cut"], "truncated", 1),
        (["average", "a", "empty"], "holds no weights", 1),
        (["average", "a", "nowhere"], "There is no model nowhere", 1),
        (["average", "a", "wide"], "different networks", 1),
        (["average", "a", "quantised"], "quantised (bitsandbytes)", 1),
        (["fisher", "a", "bare"], "There is no importance for bare", 1),
        (["fisher", "a", "b", "--importance", "a"], "2 models and 1 importances", 2),
        (["average", "a", "b", "--coefficient", "1"], "2 models and 1 coefficients", 2),
        (["average", "a", "b", "--importance", "a"], "--importance has no meaning for average", 2),
        (["average", "a", "b", "--base", "base"], "--base has no meaning for average", 2),
        (["task-arithmetic", "a", "b"], "needs --base", 2),
        (["mean", "a", "b"], "ubgm", 2),
        (["mean", "a", "b", "--out", "empty/.."], "ubgm", 2),
        (["average", "a", "b", "--out", "a"], "made from", 1),
        (["average", "a", "b", "--out", "no/such"], "There is no folder no", 1),
    ],
)
def test_errors_are_one_paragraph_and_leave_nothing(models, tmp_path, arguments, words, status):
    for name in ("a", "b", "base"):
        (tmp_path / name).symlink_to(models / name)
    broken(tmp_path, models)
    before = sorted(p.name for p in tmp_path.iterdir())
    out = [] if "--out" in arguments else ["--out", "out"]
    done = run("merge", *arguments, *out, cwd=tmp_path)
    assert done.returncode == status
    assert words in done.stderr
    assert done.stderr.startswith("squisher: ")
    assert done.stderr.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_a_model_with_the_coefficient_0_is_not_counted(models, tmp_path):
    done = run(
        *("merge", "average", models / "a", models / "b", "--coefficient", 1, "--coefficient", 0),
        "--out",
        tmp_path / "o",
    )
    assert " tensors of 1 model merged (average)." in done.stdout
    assert torch.equal(loaded(tmp_path / "o")["0.weight"], loaded(models / "a")["0.weight"])


def test_a_full_disk_is_refused_before_anything_is_written(models, tmp_path, monkeypatch):
    import shutil

    from squisher.errors import FileError
    from squisher.integrations.model_folders import merge_folders

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(FileError, match="only 100 are free"):
        merge_folders("average", [models / "a", models / "b"], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_killed_merge_leaves_nothing_that_loads(tmp_path):
    large = {f"layer.{k}": torch.randn(1000, 1000) for k in range(60)}
    for name in "ab":
        (tmp_path / name).mkdir()
        safetensors.torch.save_file(large, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text("{}")
    process = subprocess.Popen([SQUISHER, "merge", "average", "a", "b", "--out", "out"], cwd=tmp_path)
    deadline = time.monotonic() + 60
    while (
        not list(tmp_path.glob(".out.*.partial/out/.model*")) and time.monotonic() < deadline and process.poll() is None
    ):
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*/**/*.safetensors"))
    assert run("merge", "average", "a", "b", "--out", "out", cwd=tmp_path).returncode == 0
    assert torch.equal(loaded(tmp_path / "out")["layer.3"], large["layer.3"])


def test_tied_weights_are_written_once(tmp_path):
    for name in "ab":
        shared = torch.randn(50, 8)
        (tmp_path / name).mkdir()
        torch.save(
            {"embed.weight": shared, "lm_head.weight": shared, "x": torch.ones(3)},
            tmp_path / name / "pytorch_model.bin",
        )
    done = run("merge", "average", "a", "b", "--out", "out", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["tied"] == {"lm_head.weight": "embed.weight"}
    assert set(loaded(tmp_path / "out")) == {"embed.weight", "x"}


def test_large_outputs_are_sharded_with_an_index(models, tmp_path):
    from squisher.integrations.model_folders import merge_folders

    merge_folders("average", [models / "a", models / "b"], tmp_path / "out", shard_bytes=300)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert set(open_model(tmp_path / "out").weights) == set(loaded(models / "a"))


def test_help_names_the_methods():
    text = run("merge", "--help").stdout
    assert "Example: squisher" in text
    assert "task-arithmetic" in text
    assert "Example: squisher" in run("mergekit", "--help").stdout
