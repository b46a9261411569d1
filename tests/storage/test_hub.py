"""Addresses on the Hub, with a Hub that is only pretended."""

import shutil
import sys
import types

import pytest
import torch
from torch import nn

import squisher
from squisher.errors import FileError, SquisherError
from squisher.storage.hub import _wanted, is_hub_id


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A repository in a folder, and what was asked of it."""
    remote, local = tmp_path / "remote", tmp_path / "cache"
    remote.mkdir()
    asked = {}

    class HfApi:
        def list_repo_files(self, repo, revision=None):
            asked.update(repo=repo, revision=revision)
            if repo == "no/such":
                raise RuntimeError("404: not found\nmore of it")
            return sorted(str(p.relative_to(remote)) for p in remote.rglob("*") if p.is_file())

    def snapshot_download(repo, revision=None, allow_patterns=()):
        asked["files"] = list(allow_patterns)
        for name in allow_patterns:
            (local / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(remote / name, local / name)
        return str(local)

    module = types.SimpleNamespace(HfApi=HfApi, snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return remote, asked


def checkpoint(path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.rand(4, 3)).sum().backward()
    optimizer.step()
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(optimizer.state_dict(), path)
    return squisher.extract(optimizer, model)


def test_only_the_state_is_fetched_not_the_weights(hub):
    remote, asked = hub
    live = checkpoint(remote / "step-5" / "optimizer.pt")
    for name in (
        "model.safetensors",
        "step-5/model-00001-of-00002.safetensors",
        "step-5/pytorch_model.bin",
        "README.md",
        "step-5/info.json",
    ):
        (remote / name).write_text("{}")
    imp = squisher.extract("hf://owner/name@v1.0/step-5")
    assert all(torch.equal(imp[name], live[name]) for name in live)
    assert asked == {"repo": "owner/name", "revision": "v1.0", "files": ["step-5/optimizer.pt", "step-5/info.json"]}
    assert torch.equal(squisher.extract("hf://owner/name/step-5/optimizer.pt")["weight"], live["weight"])


def test_refusals(hub, monkeypatch):
    remote, _ = hub
    (remote / "model.safetensors").write_text("")
    (remote / "config.json").write_text("{}")
    with pytest.raises(
        FileError, match=r"hf://owner/name holds no optimizer state, as most.*config\.json, model\.safetensors"
    ):
        squisher.extract("hf://owner/name")
    with pytest.raises(FileError, match="cannot be fetched: 404: not found$"):
        squisher.extract("hf://no/such")
    for wrong in ("hf://name", "hf://a/b@c/../../etc", "hf://a b/c"):
        with pytest.raises(SquisherError, match="not an address on the Hub"):
            squisher.extract(wrong)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(SquisherError, match=r"torch-squisher\[hf\]"):
        squisher.extract("hf://owner/name")


def test_what_is_fetched_of_every_layout():
    files = [
        "config.json", "model.safetensors", "optimizer.pt", "training_args.bin", "global_step10/zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "latest", "optimizer_0/.metadata", "optimizer_0/__0_0.distcp", "pytorch_model.bin", "weights.gguf", "README.md",
    ]  # fmt: skip
    wanted = set(_wanted(files, ""))
    assert wanted == set(files) - {"model.safetensors", "pytorch_model.bin", "weights.gguf", "README.md"}
    assert _wanted(["config.json", "model.safetensors"], "") == []
    assert is_hub_id("hf://a/b")
    assert not is_hub_id("a/b")
