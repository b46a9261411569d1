"""Masks in few bytes: the same bits back, from memory and from files."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from squisher import mask
from squisher.errors import FileError, SquisherError
from squisher.mask.choosing import pack
from squisher.storage import safetensors as archive
from squisher.storage.tensors import chunks_of


def random_mask(shape, share, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


MASKS = {
    "sparse": random_mask((40, 50), 0.004),
    "dense": random_mask((13, 7), 0.6),
    "all": torch.ones(3, 5, dtype=torch.bool),
    "none": torch.zeros(11, dtype=torch.bool),
    "scalar": torch.tensor(True),
    "empty": torch.zeros(0, 4, dtype=torch.bool),
}


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 70), share=st.sampled_from([0.0, 0.02, 0.3, 1.0]), size=st.integers(1, 20), read=st.integers(1, 20)
)
def test_any_cut_into_pieces_gives_the_same_bits_back(n, share, size, read):
    bits = random_mask((n,), share, seed=n)
    part, data = pack((n,), bits.split(size) if n else [])
    packed = mask.Mask.from_packed({"x": part}, {"x": data}, {})
    assert torch.equal(packed["x"], bits)
    assert torch.equal(torch.cat([*packed.chunks("x", read), torch.zeros(0, dtype=torch.bool)]), bits)
    assert packed.indices("x").tolist() == bits.nonzero().flatten().tolist()
    assert part.kept == packed.kept == int(bits.sum())


def test_the_smaller_encoding_is_taken():
    packed = mask.Mask(MASKS)
    assert {name: packed._layout[name].encoding for name in packed} == {
        "sparse": "indices", "dense": "bits", "all": "all", "none": "none", "scalar": "all", "empty": "none",
    }  # fmt: skip
    sizes = {name: packed._data[name].numel() * packed._data[name].itemsize for name in packed}
    assert sizes["dense"] == -(-91 // 8)
    assert sizes["sparse"] == 4 * int(MASKS["sparse"].sum()) <= 2000 // 8
    assert packed.total == sum(m.numel() for m in MASKS.values())


def test_round_trip_through_a_file(tmp_path):
    packed = mask.Mask(MASKS, keep=0.25, note={"a": 1})
    packed.save(tmp_path / "mask.safetensors")
    back = mask.load(tmp_path / "mask.safetensors")
    assert list(back) == list(MASKS)
    for name, bits in MASKS.items():
        assert torch.equal(back[name], bits)
        assert back[name].dtype == back.dtype(name) == torch.bool
        assert back.shape(name) == bits.shape
        assert back.count(name) == int(bits.sum())
        pieces = [*chunks_of(back, name, 5), torch.zeros(0, dtype=torch.bool)]
        assert torch.equal(torch.cat(pieces), bits.flatten())
    assert back.provenance["keep"] == 0.25
    assert back.provenance["note"] == {"a": 1}
    back.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "mask.safetensors").read_bytes()


def test_loading_reads_no_tensor(tmp_path, monkeypatch):
    mask.Mask(MASKS).save(tmp_path / "mask.safetensors")
    monkeypatch.setattr("squisher.storage.tensors.FileTensor.read_flat", lambda *_: pytest.fail("read"))
    back = mask.load(tmp_path / "mask.safetensors")
    assert back.kept == sum(int(m.sum()) for m in MASKS.values())


def test_what_is_no_mask_is_refused(tmp_path):
    with pytest.raises(SquisherError, match=r"'w'.*torch\.float32"):
        mask.Mask({"w": torch.ones(3)})
    with pytest.raises(FileError, match="There is no file"):
        mask.load(tmp_path / "missing.safetensors")
    archive.save(tmp_path / "other.safetensors", {"x": torch.zeros(1)}, {"kind": "fisher"})
    with pytest.raises(FileError, match="not a mask.*'fisher'"):
        mask.load(tmp_path / "other.safetensors")
    archive.save(tmp_path / "new.safetensors", {"x": torch.zeros(1)}, {"kind": "mask", "format_version": 9})
    with pytest.raises(FileError, match="format 9"):
        mask.load(tmp_path / "new.safetensors")
    with pytest.raises(KeyError, match=r"'dens'.*'dense'"):
        mask.Mask(MASKS)["dens"]
    with pytest.raises(SquisherError, match="3 entries"):
        pack((4,), [torch.ones(3, dtype=torch.bool)])


@pytest.mark.parametrize(
    "change",
    [{"shape": [40, 51], "encoding": "bits"}, {"kept": -1}, {"encoding": "magic"}, {"shape": "x"}, {"shape": [1, 1]}],
)
def test_a_description_that_does_not_fit_is_refused(tmp_path, change):
    path = tmp_path / "mask.safetensors"
    mask.Mask({"w": MASKS["sparse"]}).save(path)
    tensors, metadata = archive.open_archive(path)
    metadata["tensors"][0] |= change
    archive.save(tmp_path / "broken.safetensors", dict(tensors), json.loads(json.dumps(metadata)))
    with pytest.raises(FileError, match="'w'.*description"):
        mask.load(tmp_path / "broken.safetensors")


DAMAGE = {
    "order": ("sparse", lambda indices: indices.flip(0)),
    "beyond the end": ("sparse", lambda indices: torch.cat([indices[:-1], indices.new_tensor([2000])])),
    "before the start": ("sparse", lambda indices: torch.cat([indices.new_tensor([-1]), indices[1:]])),
    "type": ("sparse", lambda indices: indices.float()),
    "bits": ("dense", torch.zeros_like),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_values_are_refused_when_they_are_read(tmp_path, damage):
    which, change = DAMAGE[damage]
    mask.Mask({"w": MASKS[which]}).save(tmp_path / "mask.safetensors")
    tensors, metadata = archive.open_archive(tmp_path / "mask.safetensors")
    archive.save(tmp_path / "broken.safetensors", {"w": change(tensors["w"])}, metadata)
    for read in (lambda opened: opened["w"], lambda opened: opened.indices("w")):
        with pytest.raises(FileError, match="'w'.*damaged"):
            read(mask.load(tmp_path / "broken.safetensors"))
