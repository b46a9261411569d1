"""Addresses on the Hub, against a stand-in that speaks its HTTP interface."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import squisher
from squisher.cli import app
from squisher.errors import FileError, SquisherError
from squisher.storage.hub import Address, _wanted, is_hub_id
from tests.hub_server import serve

# huggingface_hub's own, from its HTTP client, while it uploads.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    from huggingface_hub import constants

    with serve() as server:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, server.address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True, raising=False)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield server


def fetched(hub):
    """The files whose content was asked for."""
    return [
        path.rpartition("/resolve/")[2].partition("/")[2]
        for method, path in hub.requests
        if method == "GET" and "/resolve/" in path
    ]


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def importance(seed, **provenance):
    generator = torch.Generator().manual_seed(seed)
    tensors = {n: torch.rand(p.shape, generator=generator) for n, p in model(0).named_parameters()}
    return squisher.Importance(tensors, kind="fisher", unit="example", **provenance)


def put_importance(hub, repo, imp, tmp_path, folder="", **options):
    imp.save(tmp_path / "squisher.safetensors", **options)
    files = {f"{folder}{path.name}": path.read_bytes() for path in tmp_path.glob("squisher*")}
    hub.repositories.setdefault(repo, [{}]).append(files)
    for path in tmp_path.glob("squisher*"):
        path.unlink()


def checkpoint(path):
    module = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.named_parameters())
    module(torch.rand(4, 3)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), path)
    return squisher.extract(optimizer, module)


# -- reading -----------------------------------------------------------------------------------------------------------


def test_only_the_state_is_fetched_not_the_weights(hub, tmp_path):
    live = checkpoint(tmp_path / "optimizer.pt")
    state = (tmp_path / "optimizer.pt").read_bytes()
    names = (
        "model.safetensors",
        "step-5/model-00001-of-00002.safetensors",
        "step-5/pytorch_model.bin",
        "README.md",
        "step-5/info.json",
    )
    hub.repositories["owner/name"] = [{"step-5/optimizer.pt": state, **dict.fromkeys(names, b"{}")}]
    imp = squisher.extract(f"hf://owner/name@{0:040x}/step-5")
    assert all(torch.equal(imp[name], live[name]) for name in live)
    assert sorted(fetched(hub)) == ["step-5/info.json", "step-5/optimizer.pt"]
    assert torch.equal(squisher.extract("hf://owner/name/step-5/optimizer.pt")["weight"], live["weight"])


@pytest.mark.parametrize("folder", ["run", "run/optimizer"])
def test_how_nanotron_cut_parameters_is_fetched_with_them(hub, tmp_path, folder):
    shutil.unpack_archive(Path(__file__).parents[1] / "fixtures" / "nanotron" / "tp2.zip", tmp_path)
    truth = load_file(tmp_path / "truth.safetensors")
    files = {f"run/{f.relative_to(tmp_path)}": f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()}
    hub.repositories["owner/name"] = [{**files, "other/model/model_weight.safetensors": b""}]
    imp = squisher.extract(f"hf://owner/name/{folder}", bias_correction=False)
    assert all(torch.equal(imp[name], value) for name, value in truth.items())
    assert set(fetched(hub)) == set(files) - {"run/truth.safetensors"}


@pytest.mark.parametrize("stages", [1, 2])
def test_weights_of_nanotron_are_fetched_only_where_needed(stages):
    state = f"run/optimizer/optimizer_pp-0-of-{stages}_dp-0-of-12_tp-0-of-1_exp-0-of-1.pt"
    weights = "run/model/model/norm/model_weight.safetensors"
    layer = "run/layer_00-model_00-model_states.pt"
    assert _wanted([state, weights, layer], "run") == [state] + [weights] * (stages > 1)


@pytest.mark.parametrize("folder", ["", "runs/1/"])
@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 300])
@pytest.mark.parametrize("codec", ["exact", "log8"])
def test_load(hub, tmp_path, folder, shard_bytes, codec):
    imp = importance(0)
    imp.save(tmp_path / "local.safetensors", codec=codec)
    local = squisher.load(tmp_path / "local.safetensors")
    put_importance(hub, "owner/name", imp, tmp_path, folder, shard_bytes=shard_bytes, codec=codec)
    loaded = squisher.load(f"hf://owner/name/{folder}")
    assert all(torch.equal(loaded[name], local[name]) for name in imp)
    if shard_bytes > 300:
        assert fetched(hub) == [f"{folder}squisher.safetensors"]
        named = squisher.load(f"hf://owner/name/{folder}squisher.safetensors")
        assert named.provenance == loaded.provenance


def test_commands_take_addresses(hub, tmp_path):
    for k, repo in enumerate(("o/a", "o/b")):
        put_importance(hub, repo, importance(k), tmp_path)
    assert run("inspect", "hf://o/a").exit_code == 0
    document = json.loads(run("compare", "hf://o/a", "hf://o/b", "--json").stdout)
    assert document["spearman"] == pytest.approx(squisher.compare(importance(0), importance(1)).spearman)
    assert run("similarity", "hf://o/a", "hf://o/b", "--json").exit_code == 0
    assert run("report", "hf://o/a", "hf://o/b", "--out", tmp_path / "r.html").exit_code == 0
    done = run("mask", "hf://o/a", "--keep", "0.1", "--out", tmp_path / "mask.safetensors")
    assert done.exit_code == 0, done.output
    done = run("compress", "hf://o/a", "--codec", "rank1", "--out", tmp_path / "small.safetensors")
    assert done.exit_code == 0, done.output


def test_models_on_the_hub_with_their_importance(hub, tmp_path):
    from safetensors.torch import load_file, save

    weights = [{n: t.detach() for n, t in model(k).state_dict().items()} for k in range(2)]
    for k, repo in enumerate(("o/a", "o/b")):
        put_importance(hub, repo, importance(k), tmp_path)
        more = {"model.safetensors": save(weights[k]), "config.json": b"{}", "optimizer.pt": b"never fetched"}
        hub.repositories[repo][-1].update(more)
    done = run("merge", "fisher", "hf://o/a", "hf://o/b", "--out", tmp_path / "merged")
    assert done.exit_code == 0, done.output
    expected = squisher.merge.fisher(weights, [importance(0), importance(1)])
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert all(torch.equal(merged[name], expected[name]) for name in merged)
    assert "| o/a | 1 |" in (tmp_path / "merged" / "README.md").read_text()
    assert not any("optimizer" in name for name in fetched(hub))
    patch = tmp_path / "patch.safetensors"
    squisher.patch.make(weights[0], weights[1], patch)
    for command in (
        ("prune", "hf://o/a", "--sparsity", "0.5"),
        ("unlearn", "hf://o/a", "--importance", "hf://o/a", "--forget", "hf://o/b"),
        ("patch", "apply", "hf://o/a", patch),
    ):
        done = run(*command, "--out", tmp_path / command[0])
        assert done.exit_code == 0, done.output
        assert (tmp_path / command[0] / "config.json").exists()


def test_offline_fails_at_once_and_uses_the_cache(hub, tmp_path, monkeypatch):
    from huggingface_hub import constants

    put_importance(hub, "o/a", importance(0), tmp_path)
    before = squisher.load("hf://o/a")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    assert torch.equal(squisher.load("hf://o/a")["0.weight"], before["0.weight"])
    with pytest.raises(FileError, match=r"hf://o/b.*127\.0\.0\.1"):
        squisher.load("hf://o/b")
    with pytest.raises(FileError, match="does not answer"):
        squisher.extract("hf://o/b")
    before.save(tmp_path / "squisher.safetensors")
    done = run("push", tmp_path / "squisher.safetensors", "hf://o/a")
    assert done.exit_code == 1
    assert "does not answer" in str(done.exception)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FileError, match="HF_HUB_OFFLINE.*cache"):
        squisher.load("hf://o/c")


def test_refusals(hub, monkeypatch):
    hub.repositories["owner/name"] = [{"model.safetensors": b"", "config.json": b"{}"}]
    with pytest.raises(FileError, match=r"hf://owner/name .*optimizer state.*config\.json"):
        squisher.extract("hf://owner/name")
    with pytest.raises(FileError, match=r"hf://owner/name.* no squisher\.safetensors"):
        squisher.load("hf://owner/name")
    with pytest.raises(FileError, match="hf://no/such .*no repository no/such"):
        squisher.extract("hf://no/such")
    with pytest.raises(FileError, match="hf://owner/name@v9 .*no revision v9"):
        squisher.load("hf://owner/name@v9")
    for wrong in ("hf://name", "hf://a/b@c/../../etc", "hf://a b/c"):
        with pytest.raises(SquisherError, match="not an address"):
            squisher.extract(wrong)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(SquisherError, match=r"torch-squisher\[hf\]"):
        squisher.extract("hf://owner/name")


def test_a_revision(hub, tmp_path):
    for k in range(2):
        put_importance(hub, "o/a", importance(k), tmp_path)
    commits = [hub.repositories["o/a"][k - 2] for k in range(2)]
    assert commits[0] != commits[1]
    for back in (2, 1):
        sha = f"{len(hub.repositories['o/a']) - back:040x}"
        assert torch.equal(squisher.load(f"hf://o/a@{sha}")["0.weight"], importance(2 - back)["0.weight"])
    assert torch.equal(squisher.load("hf://o/a")["0.weight"], importance(1)["0.weight"])


def test_private_and_gated(hub, tmp_path, monkeypatch):
    put_importance(hub, "o/a", importance(0), tmp_path)
    hub.private["o/a"] = True
    assert set(squisher.load("hf://o/a")) == set(importance(0))
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "another cache"))
    with pytest.raises(FileError, match="o/a.*private.*hf auth login"):
        squisher.load("hf://o/a")
    hub.private.clear()
    hub.gated.add("o/a")
    with pytest.raises(FileError, match="o/a is gated"):
        squisher.load("hf://o/a")


def test_a_download_that_breaks_off(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)  # the client waits before it tries again
    put_importance(hub, "o/a", importance(0), tmp_path)
    hub.cut = [100]
    assert torch.equal(squisher.load("hf://o/a")["0.weight"], importance(0)["0.weight"]), "it goes on from there"
    assert hub.cut == []
    put_importance(hub, "o/b", importance(1), tmp_path)
    hub.cut = [10] * 50
    with pytest.raises(FileError, match="hf://o/b cannot be fetched"):
        squisher.load("hf://o/b")
    hub.cut = []
    assert torch.equal(squisher.load("hf://o/b")["0.weight"], importance(1)["0.weight"]), "no half file is left"


def test_what_is_fetched_of_every_layout():
    files = [
        "config.json", "model.safetensors", "optimizer.pt", "training_args.bin", "global_step10/zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "latest", "optimizer_0/.metadata", "optimizer_0/__0_0.distcp", "pytorch_model.bin", "weights.gguf", "README.md",
    ]  # fmt: skip
    assert set(_wanted(files, "")) == set(files) - {
        "model.safetensors",
        "pytorch_model.bin",
        "weights.gguf",
        "README.md",
    }
    assert _wanted(["config.json", "model.safetensors"], "") == []


def test_addresses():
    assert Address.read("hf://o/n@v1/a/b.safetensors") == ("o/n", "v1", "a/b.safetensors")
    assert Address.read("hf://o/n@refs/pr/7") == ("o/n", "refs/pr/7", "")
    assert Address.read("hf://o/n@refs/pr/7/a") == ("o/n", "refs/pr/7", "a")
    assert Address.read("hf://o/n/epoch=3-step=500.ckpt") == ("o/n", None, "epoch=3-step=500.ckpt")
    assert str(Address.read("hf:/o/n/")) == "hf://o/n"
    assert is_hub_id("hf://o/n")
    assert not is_hub_id("folder/hf:/o")


# -- publishing --------------------------------------------------------------------------------------------------------


def test_push(hub, tmp_path):
    card = b"---\nlicense: mit\n---\n# A model\n\nWords.\n"
    hub.repositories["o/a"] = [{"README.md": card, "model.safetensors": b"weights"}]
    imp = importance(0, examples=100, estimator={"labels": "data"})
    imp.save(tmp_path / "file.safetensors", codec="log8")
    shown = run("push", tmp_path / "file.safetensors", "hf://o/a", "--dry-run")
    assert shown.exit_code == 0, shown.output
    assert hub.requests == []
    done = run("push", tmp_path / "file.safetensors", "hf://o/a")
    assert done.exit_code == 0, (done.output, done.exception)
    files = hub.files("o/a")
    assert set(files) == {"README.md", "model.safetensors", "squisher.safetensors"}
    assert files["squisher.safetensors"] == (tmp_path / "file.safetensors").read_bytes()
    assert files["model.safetensors"] == b"weights"
    text = files["README.md"].decode()
    assert text.startswith(card.decode())
    for words in ('squisher.load("hf://o/a")', "| examples | 100 |", "log8", "data"):
        assert words in text
        assert words in shown.output
    assert len(hub.repositories["o/a"]) == 2, "one commit"
    loaded = squisher.load("hf://o/a")
    assert loaded.provenance.codec.name == "log8"


def test_push_again_replaces_only_its_own(hub, tmp_path):
    hub.repositories["o/a"] = [{"README.md": b"# A\n", "model.safetensors": b"w"}]
    importance(0).save(tmp_path / "squisher.safetensors", shard_bytes=300)
    assert run("push", tmp_path / "squisher.safetensors", "hf://o/a").exit_code == 0
    sharded = set(hub.files("o/a"))
    assert "squisher.safetensors.index.json" in sharded
    changed = hub.files("o/a")["README.md"].decode() + "\nWords below.\n"
    hub.files("o/a")["README.md"] = changed.encode()
    importance(1).save(tmp_path / "one.safetensors")
    assert run("push", tmp_path / "one.safetensors", "hf://o/a").exit_code == 0
    assert set(hub.files("o/a")) == {"README.md", "model.safetensors", "squisher.safetensors"}
    text = hub.files("o/a")["README.md"].decode()
    assert text.count("squisher: begin") == 1
    assert text.startswith("# A\n")
    assert text.endswith("\nWords below.\n")
    assert torch.equal(squisher.load("hf://o/a")["0.weight"], importance(1)["0.weight"])


@pytest.mark.parametrize("private", [True, False])
def test_push_makes_a_repository_when_asked(hub, tmp_path, private):
    importance(0).save(tmp_path / "a.safetensors")
    options = ["--create", *(["--private"] if private else [])]
    shown = run("push", tmp_path / "a.safetensors", "hf://o/new", *options, "--dry-run")
    assert f"a new {'private' if private else 'public'} repository" in shown.output
    assert hub.requests == []
    for _ in range(2):  # the second time it is there
        done = run("push", tmp_path / "a.safetensors", "hf://o/new", *options)
        assert done.exit_code == 0, (done.output, done.exception)
    assert hub.private == {"o/new": private}
    assert set(hub.files("o/new")) == {"README.md", "squisher.safetensors"}


def test_extract_and_push(hub, tmp_path):
    live = checkpoint(tmp_path / "optimizer.pt")
    hub.repositories["o/a"] = [{}]
    done = run(
        "extract",
        tmp_path / "optimizer.pt",
        "--out",
        tmp_path / "s.safetensors",
        "--codec",
        "log8",
        "--push",
        "hf://o/a",
    )
    assert done.exit_code == 0, (done.output, done.exception)
    assert "Published: " in done.stdout
    assert set(hub.files("o/a")) == {"README.md", "squisher.safetensors"}
    assert set(squisher.load("hf://o/a")) == set(live)


def test_refused_pushes(hub, tmp_path, monkeypatch):
    importance(0).save(tmp_path / "a.safetensors")
    hub.repositories["o/a"] = [{}]

    def refused(*arguments):
        done = run("push", *arguments)
        assert done.exit_code == 1
        return str(done.exception)

    assert "There is no repository no/such on the Hub" in refused(tmp_path / "a.safetensors", "hf://no/such")
    assert "together with --create" in refused(tmp_path / "a.safetensors", "hf://no/such", "--private")
    assert "no/such" not in hub.repositories
    assert "give the repository" in refused(tmp_path / "a.safetensors", "hf://o/a/x.safetensors")
    assert "published already" in refused("hf://o/a", "hf://o/a")
    shutil.copy(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "401" in refused(tmp_path / "b.safetensors", "hf://o/a")
    assert hub.files("o/a") == {}
