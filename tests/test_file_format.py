"""The format page and the schema: what another program would be written from."""

import json
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

import squisher
from squisher.storage.safetensors import read_header

PAGE = (Path(__file__).parents[1] / "docs" / "file-format.md").read_text("utf-8")
SCHEMA = json.loads((Path(squisher.__file__).parent / "importance" / "schema.json").read_text("utf-8"))


def provenance(path):
    return json.loads(read_header(path)[1]["squisher"])


def validate(document):
    jsonschema.Draft202012Validator(SCHEMA).validate(document)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 90), nn.ReLU(), nn.Linear(90, 30))


def optimizer_of(module, kind=torch.optim.AdamW, **options):
    optimizer = kind(module.parameters(), **options)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(torch.randn(16, 40)), torch.randint(0, 30, (16,))).backward()
        optimizer.step()
    return optimizer


def importances():
    module = model()
    batches = [(torch.randn(8, 40), torch.randint(0, 30, (8,))) for _ in range(3)]
    tracker = squisher.Tracker(module)
    module(torch.randn(4, 40)).sum().backward()
    tracker.observe()
    partial = model()
    partial[0].requires_grad_(False)
    groups = torch.optim.Adam([{"params": list(module[0].parameters()), "weight_decay": 0.1}, {"params": list(module[2].parameters()), "betas": (0.9, 0.99)}])  # fmt: skip
    module(torch.randn(4, 40)).sum().backward()
    groups.step()
    return {
        "squisher": squisher.extract(optimizer_of(module), module, batch_size=16),
        "groups, L2": squisher.extract(groups, module),
        "amsgrad": squisher.extract(optimizer_of(module, amsgrad=True), module),
        "as_fisher": squisher.extract(optimizer_of(module), module, batch_size=16).as_fisher(),
        "tracker": squisher.extract(tracker, module, batch_size=4),
        "fisher": squisher.fisher(module, batches, labels="data", standard_error=True),
        "sampled": squisher.fisher(module, batches, labels="sampled", seed=3),
        "absent": squisher.fisher(partial, batches, parameters=r"2\."),
        "wrapped": squisher.Importance({"w": torch.rand(3, 4)}, kind="fisher"),
        "embedding": squisher.embed.embedding(squisher.fisher(module, batches)),
    }


@pytest.mark.parametrize("codec", ["exact", "log8", "rank1"])
def test_every_file_is_valid(tmp_path, codec):
    for name, imp in importances().items():
        imp.save(tmp_path / f"{name}.safetensors", codec=codec)
        document = provenance(tmp_path / f"{name}.safetensors")
        validate(document)
        unknown = set(document) - set(SCHEMA["properties"])
        assert not unknown, f"{name}: keys without a schema"


def test_the_schema_can_fail(tmp_path):
    importances()["squisher"].save(tmp_path / "a.safetensors", codec="log8")
    document = provenance(tmp_path / "a.safetensors")
    for wrong in (
        {"kind": "hessian"},
        {"scale": 0},
        {"codec": {"name": "zip"}},
        {"naming": "recorded"},
        {"sum": {"w": -1}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            validate({**document, **wrong})


def test_the_page_names_every_key():
    keys = set(re.findall(r"`(\w+)`", PAGE))
    assert set(SCHEMA["properties"]) <= keys


def test_a_reader_written_from_the_page(tmp_path):
    imp = importances()["squisher"]
    code = next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "def log8" in block)
    names = {"np": np}
    exec(code, names)
    for codec in ("log8", "rank1"):
        path = tmp_path / f"{codec}.safetensors"
        imp.save(path, codec=codec)
        stored, loaded = load_file(path), squisher.load(path)
        name = "0.weight"
        if codec == "log8":
            values = names["log8"](*(stored[f"{name}.log8.{part}"] for part in ("code", "base", "step", "scale")))
        else:
            values = np.multiply.outer(*(stored[f"{name}.rank1.{part}"] for part in ("row", "column")))
        np.testing.assert_allclose(loaded[name].numpy(), values, rtol=1e-6)


def test_hashes_as_the_page_says(tmp_path):
    import hashlib

    module = model()
    imp = squisher.extract(optimizer_of(module), module)
    record = imp.provenance.model
    lines = "\n".join(f"{n} {','.join(map(str, p.shape))}" for n, p in sorted(module.named_parameters()))
    assert record["structure"] == "sha256:" + hashlib.sha256(lines.encode()).hexdigest()[:32]
    weight = module.state_dict()["0.weight"].numpy().tobytes()
    assert record["content"]["0.weight"] == hashlib.sha256(weight).hexdigest()[:32]
