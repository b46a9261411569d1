from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest
from torch import nn

from squisher.errors import FileError, NamingError, SquisherError
from squisher.recycle.naming.hugging_face import built_by, meta_model
from squisher.storage.json_files import read_object


class Pretrained(nn.Module):
    def __init__(self, config):
        super().__init__()
        if config["broken"]:
            raise ValueError("a field is missing\nand more")
        self.layer = nn.Linear(2, 3)


class AutoConfig:
    calls: list[dict] = []  # noqa: RUF012

    @classmethod
    def from_pretrained(cls, folder, **options):
        cls.calls.append(options)
        return json.loads((folder / "config.json").read_text())


@pytest.fixture
def transformers(monkeypatch):
    """A transformers of one model."""
    module = ModuleType("transformers")
    module.__version__ = "5.1.0"
    module.PreTrainedModel = Pretrained
    module.TinyForCausalLM = Pretrained
    module.AutoConfig = AutoConfig
    monkeypatch.setitem(sys.modules, "transformers", module)
    AutoConfig.calls.clear()
    return module


def config(tmp_path, **content):
    content = {"architectures": ["TinyForCausalLM"], "broken": False, "transformers_version": "5.0.0", **content}
    (tmp_path / "config.json").write_text(json.dumps(content))
    return tmp_path


def test_a_model_without_weights_and_without_foreign_code(transformers, tmp_path):
    model = meta_model(config(tmp_path))
    assert model.layer.weight.is_meta
    assert AutoConfig.calls == [{"trust_remote_code": False, "local_files_only": True}]


@pytest.mark.parametrize("names", [["Unknown"], [], None, ["PreTrainedModel.__init__"], ["__version__"], [3], "Tiny"])
def test_what_transformers_does_not_have_is_refused(transformers, tmp_path, names):
    with pytest.raises(NamingError, match="code.*never run"):
        meta_model(config(tmp_path, architectures=names))


def test_what_transformers_cannot_build_is_refused_in_one_line(transformers, tmp_path):
    with pytest.raises(NamingError, match=r"TinyForCausalLM.*a field is missing.*5\.0\.0"):
        meta_model(config(tmp_path, broken=True))


def test_a_config_of_endless_layers_is_refused(transformers, tmp_path):
    with pytest.raises(NamingError, match="that many"):
        meta_model(config(tmp_path, num_hidden_layers=10**9))
    with pytest.raises(NamingError, match="that many"):
        meta_model(config(tmp_path, text_config={"n_layers": 10**9}))


def test_another_major_version_is_said(transformers, tmp_path):
    assert built_by(config(tmp_path)) == ""
    assert (
        built_by(config(tmp_path, transformers_version="4.40.1")) == " (built by transformers 5.1.0, saved by 4.40.1)"
    )


def test_without_transformers_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SquisherError, match=r"pip install 'torch-squisher\[hf\]'"):
        meta_model(config(tmp_path))


def test_what_is_no_json_object_is_refused(tmp_path):
    for text, message in (("[1]", "is not a JSON object"), ("{", "is not JSON"), ("[" * 100_000, "is not JSON")):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(FileError, match=message):
            read_object(tmp_path / "x.json")
    with pytest.raises(FileError, match="cannot be read"):
        read_object(tmp_path / "none.json")
