"""Files with a codec: decoded values against the definition, chunk by chunk; totals, errors, damage."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import squisher
from squisher.errors import FileError, SquisherError
from squisher.storage import codecs
from squisher.storage.tensors import CHUNK


def values(*shape, seed=0, zeros=0.1):
    """Squared gradients as they are: sixteen orders of magnitude, some zeros, rows and columns that differ."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.exp(4 * torch.randn(shape, generator=generator) - 25)
    return torch.where(torch.rand(shape, generator=generator) < zeros, 0.0, out)


TENSORS = {
    "matrix": values(40, 33),
    "vector": values(9, seed=1),
    "convolution": values(16, 5, 3, 3, seed=2),
    "experts": values(8, 20, 30, seed=3),
    "long": values(2, 5000, seed=4),
    "zero": torch.zeros(12, 13),
    "tiny": torch.full((16, 17), 1e-42),
    "nothing": torch.zeros(0, 7),
    "scalar": torch.tensor(3e-9),
    "constant": torch.full((20, 30), 2.5e-9),
}


def defined(stored, codec):
    """The decoder as anybody would write it from the format page."""
    out = {}
    for name, tensor in stored.items():
        if name.endswith(".log8.code"):
            own = name.removesuffix(".code")
            block = torch.arange(tensor.numel()) // 4096
            base, step, scale = (stored[f"{own}.{part}"][block] for part in ("base", "step", "scale"))
            code = tensor.flatten()
            value = scale.double() * (base + step * code.int()).view(torch.float32).double()
            value = torch.where(code > 0, value, 0)
            out[own.removesuffix(".log8")] = value.reshape(tensor.shape)
        elif name.endswith(".rank1.row"):
            column = stored[name.removesuffix("row") + "column"].double()
            out[name.removesuffix(".rank1.row")] = torch.tensordot(tensor.double(), column, dims=0)
        elif f".{codec}." not in name:
            out[name] = tensor.double()
    return out


@pytest.fixture(params=["log8", "rank1"])
def codec(request):
    return request.param


@pytest.fixture
def saved(codec, tmp_path):
    squisher.Importance(TENSORS, kind="fisher", unit="example").save(tmp_path / "a.safetensors", codec=codec)
    return tmp_path / "a.safetensors"


@pytest.mark.parametrize("size", [1, 7, None])
def test_decoded_as_defined(saved, codec, size):
    expected = defined(load_file(saved), codec)
    imp = squisher.load(saved)
    assert set(imp) == set(TENSORS) == set(expected)
    for name in TENSORS:
        assert imp.shape(name) == TENSORS[name].shape
        chunks = list(imp.chunks(name) if size is None else imp.chunks(name, size))
        assert all(chunk.numel() <= (size or math.inf) for chunk in chunks)
        flat = torch.cat([torch.zeros(0), *chunks])
        torch.testing.assert_close(flat.double(), expected[name].flatten(), rtol=2e-5, atol=1e-44)
        torch.testing.assert_close(imp[name].flatten(), flat, rtol=0, atol=0)


def test_log8_is_within_a_step(tmp_path):
    squisher.Importance(TENSORS).save(tmp_path / "a.safetensors", codec="log8")
    stored, imp = load_file(tmp_path / "a.safetensors"), squisher.load(tmp_path / "a.safetensors")
    for name, before in TENSORS.items():
        after = imp[name]
        assert torch.equal(after == 0, before == 0), "zeros stay zeros, and nothing else becomes one"
        normal = before > 1e-37
        if f"{name}.log8.step" not in stored:
            assert torch.equal(after, before)
        elif normal.any():
            # 2²³ is an octave in bits. Half a step to the next code, and as much again where the block's total was kept.
            limit = float(stored[f"{name}.log8.step"].max()) / 2**23 * 1.5 + 1e-6
            assert float((after[normal] / before[normal]).log2().abs().max()) <= limit


def test_rank1_is_the_product_of_means(tmp_path):
    squisher.Importance(TENSORS).save(tmp_path / "a.safetensors", codec="rank1")
    imp = squisher.load(tmp_path / "a.safetensors")
    for name, split in (("matrix", 1), ("convolution", 1), ("experts", 2)):
        v = TENSORS[name].double().flatten(split).flatten(0, split - 1)
        expected = torch.outer(v.mean(1), v.mean(0)) / v.mean()
        torch.testing.assert_close(imp[name].double().view_as(v), expected, rtol=1e-6, atol=0)
    assert torch.equal(imp["zero"], TENSORS["zero"])
    assert torch.equal(imp["vector"], TENSORS["vector"]), "vectors are kept whole"
    torch.testing.assert_close(imp["constant"], TENSORS["constant"])


def test_values_whose_products_underflow(tmp_path):
    small = values(30, 40, zeros=0) * 1e-22
    squisher.Importance({"w": small}).save(tmp_path / "a.safetensors", codec="rank1")
    v = small.double()
    expected = torch.outer(v.mean(1), v.mean(0)) / v.mean()
    assert float(expected.min()) ** 2 < 1e-60
    torch.testing.assert_close(squisher.load(tmp_path / "a.safetensors")["w"].double(), expected, rtol=1e-6, atol=0)


def test_totals_are_kept_and_recorded(saved):
    imp = squisher.load(saved)
    for name, before in TENSORS.items():
        total, squares = imp.provenance.sum[name], imp.provenance.sum_of_squares[name]
        after = imp[name].double()
        assert total == pytest.approx(float(after.sum()), rel=1e-6)
        assert squares == pytest.approx(float(after.square().sum()), rel=1e-6)
        if name != "tiny":  # where float32 itself has few digits
            assert total == pytest.approx(float(before.double().sum()), rel=1e-6)


def test_the_error_is_recorded(saved, codec):
    record = squisher.load(saved).provenance.codec
    before = torch.cat([t.flatten() for t in TENSORS.values()])
    after = torch.cat([squisher.load(saved)[name].flatten() for name in TENSORS])
    agreement = squisher.compare({"all": before}, {"all": after})
    assert record.name == codec
    assert record.entries == before.numel()
    assert record.spearman == pytest.approx(agreement.spearman, abs=1e-4)
    for size in (0.005, 0.1, 0.5):
        assert record.overlap[str(size)] == pytest.approx(agreement.overlap(size), abs=1e-6)
    assert record.scale == pytest.approx(1, rel=1e-5)


def test_a_sample_of_many_is_spread_over_all(tmp_path, monkeypatch):
    monkeypatch.setattr(codecs, "_SAMPLE", 1000)
    tensors = {"a": values(64, 64), "b": values(5000, seed=1)}
    for codec, least in (("log8", 0.9999), ("rank1", 0.5)):
        squisher.Importance(tensors).save(tmp_path / "a.safetensors", codec=codec)
        record = squisher.load(tmp_path / "a.safetensors").provenance.codec
        assert record.entries == math.ceil((4096 + 5000) / 11)  # the least prime above 9.1
        assert record.spearman > least
        assert record.scale == pytest.approx(1, rel=1e-5)  # of all, not of the sample


@pytest.mark.parametrize("size", [1, 7, 5000, None])
def test_written_the_same_from_chunks_of_any_size(tmp_path, codec, size):
    class Chunked(dict):
        def chunks(self, name, _=None):
            return iter(self[name].flatten().split(size or 1 << 18))

    tensors = {"w": values(90, 70, seed=5), "b": values(70, seed=6)}
    squisher.Importance(tensors).save(tmp_path / "whole.safetensors", codec=codec)
    encoded = codecs.Encoded(Chunked(tensors), codec)
    for name, tensor in load_file(tmp_path / "whole.safetensors").items():
        flat = torch.cat(list(encoded.chunks(name)))
        assert torch.equal(flat.view(tensor.shape), tensor)


def test_larger_than_a_chunk(tmp_path, codec):
    tensors = {"w": values(700, 600)}
    assert tensors["w"].numel() > CHUNK
    squisher.Importance(tensors).save(tmp_path / "a.safetensors", codec=codec)
    expected = defined(load_file(tmp_path / "a.safetensors"), codec)
    torch.testing.assert_close(
        squisher.load(tmp_path / "a.safetensors")["w"].double(), expected["w"], rtol=2e-5, atol=1e-44
    )


def test_sizes(tmp_path):
    tensors = {"w": values(512, 512), "b": values(512)}
    sizes = {}
    for name in ("exact", "log8", "rank1"):
        squisher.Importance(tensors).save(tmp_path / f"{name}.safetensors", codec=name)
        sizes[name] = (tmp_path / f"{name}.safetensors").stat().st_size
    assert sizes["log8"] < 0.26 * sizes["exact"]
    assert sizes["rank1"] < 0.02 * sizes["exact"]


def test_in_shards(tmp_path, codec):
    imp = squisher.Importance(TENSORS)
    imp.save(tmp_path / "one.safetensors", codec=codec)
    imp.save(tmp_path / "many.safetensors", codec=codec, shard_bytes=3000)
    assert (tmp_path / "many.safetensors.index.json").exists()
    one, many = squisher.load(tmp_path / "one.safetensors"), squisher.load(tmp_path / "many.safetensors")
    assert all(torch.equal(one[name], many[name]) for name in TENSORS)
    assert one.provenance == many.provenance


def test_codec_after_codec(tmp_path):
    squisher.Importance(TENSORS).save(tmp_path / "a.safetensors", codec="log8")
    squisher.load(tmp_path / "a.safetensors").save(tmp_path / "b.safetensors", codec="rank1")
    squisher.load(tmp_path / "b.safetensors").save(tmp_path / "c.safetensors")
    b, c = (squisher.load(tmp_path / f"{name}.safetensors") for name in "bc")
    assert (b.provenance.codec.name, b.provenance.codec.before) == ("rank1", ("log8",))
    assert (c.provenance.codec.name, c.provenance.codec.before) == ("exact", ("log8", "rank1"))
    assert all(torch.equal(b[name], c[name]) for name in TENSORS)


def test_bfloat16_and_float64(tmp_path, codec):
    tensors = {"low": values(60, 70).bfloat16(), "high": values(60, 70).double()}
    squisher.Importance(tensors).save(tmp_path / "a.safetensors", codec=codec)
    imp = squisher.load(tmp_path / "a.safetensors")
    for name in tensors:
        assert imp[name].dtype == imp.dtype(name) == torch.float32
        assert float(imp[name].double().sum()) == pytest.approx(float(tensors[name].double().sum()), rel=1e-6)


def test_refusals(tmp_path):
    imp = squisher.Importance({"w": values(60, 70)})
    with pytest.raises(SquisherError, match="'log7'.*'log8'"):
        imp.save(tmp_path / "a.safetensors", codec="log7")
    with pytest.raises(SquisherError, match="type of its own"):
        imp.save(tmp_path / "a.safetensors", codec="log8", dtype="bfloat16")
    with pytest.raises(SquisherError, match="uses the name"):
        squisher.Importance({"w.rank1.row": values(60, 70)}).save(tmp_path / "a.safetensors", codec="rank1")
    for codec in ("log8", "rank1"):
        with pytest.raises(SquisherError, match="too large"):
            squisher.Importance({"w": torch.full((60, 70), 1e40, dtype=torch.float64)}).save(
                tmp_path / "a.safetensors", codec=codec
            )
    assert not list(tmp_path.iterdir())


def test_damaged(saved, codec, tmp_path):
    stored = load_file(saved)
    with open(saved, "rb") as file:
        text = json.loads(file.read(int.from_bytes(file.read(8), "little")))["__metadata__"]["squisher"]

    def damaged(tensors, metadata=text):
        save_file(tensors, tmp_path / "b.safetensors", {"squisher": metadata})
        with pytest.raises(SquisherError) as error:
            squisher.load(tmp_path / "b.safetensors")["matrix"]
        return str(error.value)

    part = "scale" if codec == "log8" else "column"
    name = f"matrix.{codec}.{part}"
    assert "damaged" in damaged({n: t for n, t in stored.items() if n != name})
    assert "damaged" in damaged({**stored, name: stored[name].double()})
    assert "negative" in damaged({**stored, name: -stored[name]})
    assert "NaN" in damaged({**stored, name: stored[name] * np.nan})
    later = json.dumps({**json.loads(text), "codec": {"name": "log2"}})
    assert "update torch-squisher" in damaged(stored, later)


def test_damaged_is_a_file_error(saved, codec, tmp_path):
    stored = {n: t for n, t in load_file(saved).items() if not n.endswith((".base", ".column"))}
    with open(saved, "rb") as file:
        text = json.loads(file.read(int.from_bytes(file.read(8), "little")))["__metadata__"]["squisher"]
    save_file(stored, tmp_path / "b.safetensors", {"squisher": text})
    with pytest.raises(FileError):
        squisher.load(tmp_path / "b.safetensors")


def test_negative_zero_is_zero(tmp_path):
    values = torch.rand(5000, generator=torch.Generator().manual_seed(0))
    values[:7] = -0.0
    squisher.Importance({"w": values}).save(tmp_path / "a.safetensors", codec="log8")
    assert not squisher.load(tmp_path / "a.safetensors")["w"][:7].any()


@pytest.mark.parametrize("codec", ["log8", "rank1"])
def test_what_would_be_decoded_as_infinite_is_refused(tmp_path, codec):
    largest = torch.finfo(torch.float32).max
    cross = torch.full((64, 64), 1e-10)
    cross[0], cross[:, 0] = largest, largest
    with pytest.raises(SquisherError, match="too large"):
        squisher.Importance({"w": cross}).save(tmp_path / "a.safetensors", codec=codec)
    assert not list(tmp_path.iterdir())
