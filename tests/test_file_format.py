"""The format page and the schema: what another program would be written from."""

import json
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
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


def page_reader():
    """The reader that the page prints, which knows nothing of this package."""
    names = {"np": np}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, names)
    return names["read"]


@pytest.mark.parametrize(
    "options", [{}, {"dtype": "bfloat16"}, {"dtype": "float64"}, {"codec": "log8"}, {"codec": "rank1"}]
)
@pytest.mark.parametrize("shard_bytes", [800, 1 << 30])
def test_the_reader_on_the_page(tmp_path, options, shard_bytes):
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.exp(3 * torch.randn(shape, generator=generator) - 20)
        * (torch.rand(shape, generator=generator) > 0.1)
        for name, shape in {"a.weight": (90, 70), "a.bias": (90,), "conv": (8, 4, 3, 3), "experts": (6, 10, 40)}.items()
    }
    path = tmp_path / "squisher.safetensors"
    squisher.Importance(tensors, kind="fisher").save(path, **options, shard_bytes=shard_bytes)
    assert path.exists() == (shard_bytes > 800)
    values, found = page_reader()(path)
    expected = squisher.load(path)
    assert set(values) == set(expected) == set(tensors)
    assert found["kind"] == "fisher"
    for name in expected:
        np.testing.assert_allclose(values[name], expected[name].double().numpy(), rtol=1e-6, atol=1e-44)


@pytest.mark.parametrize("later", [{"format_version": 3}, {"codec": {"name": "log2"}}])
def test_the_reader_on_the_page_refuses_what_it_does_not_know(tmp_path, later):
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "a", {"squisher": json.dumps({"format_version": 2, **later})})
    with pytest.raises(ValueError, match="later|not known"):
        page_reader()(tmp_path / "a")


def test_hashes_as_the_page_says(tmp_path):
    import hashlib

    module = model()
    imp = squisher.extract(optimizer_of(module), module)
    record = imp.provenance.model
    lines = "\n".join(f"{n} {','.join(map(str, p.shape))}" for n, p in sorted(module.named_parameters()))
    assert record["structure"] == "sha256:" + hashlib.sha256(lines.encode()).hexdigest()[:32]
    weight = module.state_dict()["0.weight"]
    both = weight.numpy().tobytes(), weight.bfloat16().view(torch.int16).numpy().tobytes()
    assert record["content"]["0.weight"] == "/".join(hashlib.sha256(one).hexdigest()[:32] for one in both)
