"""Base + patch = tuned, to the bit; and nothing else passes for it."""

import json

import numpy as np
import pytest
import torch

from squisher import patch
from squisher.errors import FileError, NamingError, SquisherError
from squisher.storage import safetensors as archive
from squisher.storage.tensors import chunks_of


def models(share=0.02, seed=0):
    generator = torch.Generator().manual_seed(seed)
    base = {
        "a": torch.randn(50, 40, generator=generator),
        "b": torch.randn(300, generator=generator).to(torch.bfloat16),
        "same": torch.randn(9, generator=generator),
        "count": torch.tensor(5),
        "empty": torch.zeros(0, 3),
    }
    tuned = {name: tensor.clone() for name, tensor in base.items()}
    masks = {name: torch.rand(base[name].shape, generator=generator) < share for name in ("a", "b")}
    for name, mask in masks.items():
        tuned[name][mask] += 1
    return base, tuned, masks


def equal_bits(a, b):
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.contiguous().flatten().view(torch.uint8).tolist() == b.contiguous().flatten().view(torch.uint8).tolist()
    )


def check(base, tuned, path, **options):
    summary = patch.make(base, tuned, path, **options)
    back = patch.apply(base, path)
    assert list(back) == list(tuned)
    for name in tuned:
        assert equal_bits(back[name], tuned[name]), name
        assert back.dtype(name) == tuned[name].dtype
        for size in (7, 1 << 18):
            pieces = list(chunks_of(back, name, size))
            assert torch.equal(
                torch.cat([*pieces, torch.zeros(0, dtype=tuned[name].dtype)]).nan_to_num(),
                tuned[name].flatten().nan_to_num(),
            )
    return summary


@pytest.mark.parametrize("share", [0.0, 0.02, 0.9])
@pytest.mark.parametrize("masked", [False, True])
def test_there_and_back(tmp_path, share, masked):
    base, tuned, masks = models(share)
    summary = check(base, tuned, tmp_path / "p.safetensors", mask=masks if masked else None)
    assert summary.changed == {name: int(mask.sum()) for name, mask in masks.items() if mask.any()}
    assert summary.dropped == {}
    assert summary.total == sum(t.numel() for t in tuned.values())


def test_bits_count_not_values(tmp_path):
    base = {"w": torch.tensor([0.0, 0.0, float("nan"), 1.0, 1e-45])}
    tuned = {"w": torch.tensor([-0.0, 0.0, float("nan"), float("inf"), 0.0])}
    assert check(base, tuned, tmp_path / "p.safetensors").changed == {"w": 3}


def test_a_sparse_patch_is_small(tmp_path):
    base = {"w": torch.randn(1000, 1000)}
    tuned = {"w": base["w"].clone()}
    tuned["w"][::100, ::2] += 1
    check(base, tuned, tmp_path / "p.safetensors")
    assert (tmp_path / "p.safetensors").stat().st_size < 8 * 5000 + 2000


def test_files_larger_than_a_piece_and_the_same_bytes_twice(tmp_path):
    generator = torch.Generator().manual_seed(0)
    base = {"w": torch.randn(700, 1000, generator=generator)}
    tuned = {"w": base["w"].clone()}
    tuned["w"].view(-1)[torch.randperm(700_000, generator=generator)[:3500]] = 7.0
    for name, weights in (("base", base), ("tuned", tuned)):
        archive.save(tmp_path / f"{name}.safetensors", weights, {})
    lazy = [archive.open_archive(tmp_path / f"{name}.safetensors")[0] for name in ("base", "tuned")]
    seen = []
    patch.make(*lazy, tmp_path / "p.safetensors", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (700_000, 700_000)
    archive.save(tmp_path / "out.safetensors", patch.apply(lazy[0], tmp_path / "p.safetensors"), {})
    assert (tmp_path / "out.safetensors").read_bytes() == (tmp_path / "tuned.safetensors").read_bytes()
    first = (tmp_path / "p.safetensors").read_bytes()
    patch.make(base, tuned, tmp_path / "p.safetensors")
    assert (tmp_path / "p.safetensors").read_bytes() == first


def test_a_new_head_and_a_dropped_one(tmp_path):
    base, tuned, _ = models()
    tuned["head"] = torch.randn(4, 4)
    tuned["b"] = torch.randn(310).to(torch.bfloat16)  # more words
    del tuned["same"]
    check(base, tuned, tmp_path / "p.safetensors")


def test_differences_outside_the_mask(tmp_path):
    base, tuned, masks = models()
    tuned["a"][~masks["a"]] += 0.5
    tuned["same"] += 1
    tuned["head"] = torch.zeros(2, 2)
    outside = int((~masks["a"]).sum()) + 9 + 4
    path = tmp_path / "p.safetensors"
    with pytest.raises(SquisherError, match=rf"{outside:,}.*outside the mask.*3 tensors.*'a'"):
        patch.make(base, tuned, path, mask=masks)
    assert not path.exists()
    summary = patch.make(base, tuned, path, mask=masks, drop_outside=True)
    assert sum(summary.dropped.values()) == outside
    back = patch.apply(base, path)
    assert set(back) == set(base)
    assert torch.equal(back["a"], torch.where(masks["a"], tuned["a"], base["a"]))
    assert torch.equal(back["same"], base["same"])


def test_another_base_is_refused(tmp_path):
    base, tuned, _ = models()
    path = tmp_path / "p.safetensors"
    patch.make(base, tuned, path)
    for name in ("a", "same", "count"):
        other = {n: t.clone() for n, t in base.items()}
        other[name].view(-1)[0] += 1
        with pytest.raises(SquisherError, match=f"another base.*'{name}'"):
            archive.save(tmp_path / "out.safetensors", patch.apply(other, path), {})
        assert not (tmp_path / "out.safetensors").exists()
    with pytest.raises(NamingError, match="'same'"):
        patch.apply({n: t for n, t in base.items() if n != "same"}, path)
    with pytest.raises(SquisherError, match="another base"):
        patch.apply({**base, "a": base["a"].view(40, 50)}, path)["a"]


def test_what_does_not_fit(tmp_path):
    base, tuned, masks = models()
    path = tmp_path / "p.safetensors"
    with pytest.raises(NamingError, match="No tensor.*the base"):
        patch.make(base, {"x": torch.zeros(1)}, path)
    with pytest.raises(NamingError, match="float32.*base.*float16.*tuned"):
        patch.make(base, {**tuned, "a": tuned["a"].half()}, path)
    with pytest.raises(NamingError, match="The mask has 'x'"):
        patch.make(base, tuned, path, mask={**masks, "x": torch.ones(1, dtype=torch.bool)})
    with pytest.raises(NamingError, match="'a'.*shape.*mask"):
        patch.make(base, tuned, path, mask={"a": torch.ones(1, dtype=torch.bool)})
    archive.save(path, {"x": torch.zeros(1)}, {"kind": "mask"})
    with pytest.raises(FileError, match="is not a patch"):
        patch.apply(base, path)
    archive.save(path, {"x": torch.zeros(1)}, {"kind": "patch", "format_version": 2})
    with pytest.raises(FileError, match="format 2"):
        patch.apply(base, path)


def _damage(what, tensors, metadata):
    indices, values, entry = tensors["indices/a"], tensors["values/a"], metadata["tensors"]["a"]
    if what == "beyond the end":
        tensors["indices/a"] = indices + 2000
    elif what == "negative":
        indices[1] = -2
    elif what == "out of order":
        tensors["indices/a"] = indices.flip(0)
    elif what == "twice":
        indices[1] = indices[0]
    elif what == "differences overflow":
        indices[1:3] = torch.tensor([2**31 - 1, 5000 - 2**31], dtype=torch.int32)
    elif what == "unsigned":
        tensors["indices/a"] = torch.arange(len(indices), dtype=torch.uint8)
        tensors["indices/a"][1:3] = torch.tensor([2, 1])
    elif what == "other values":
        tensors["values/a"] = values.view(torch.int32)
    elif what == "narrow values":
        tensors["values/a"] = values.to(torch.bfloat16)
    elif what == "fewer":
        tensors["indices/a"], tensors["values/a"] = indices[:-1].clone(), values[:-1].clone()
    elif what == "not described":
        del metadata["tensors"]["a"]
    elif what == "not held":
        del tensors["values/a"], tensors["indices/a"]
    elif what == "another shape":
        entry["shape"] = [40, 50]
    elif what == "whole of another shape":
        del tensors["indices/a"]
        entry["encoding"] = "whole"
    elif what == "a description that is none":
        metadata["tensors"]["a"] = "whole"
    elif what == "names":
        metadata["names"].append("ghost")
    elif what == "a list among the names":
        metadata["names"].append(["a"])
    elif what == "a name left out":
        metadata["names"].remove("a")
    else:
        metadata["base"] = None


DAMAGES = [
    "beyond the end", "negative", "out of order", "twice", "differences overflow", "unsigned", "other values", "narrow values", "fewer",
    "not described", "not held", "another shape", "whole of another shape", "a description that is none", "names", "a list among the names", "a name left out",
    "base",
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_patch(tmp_path, damage):
    base, tuned, _ = models()
    path = tmp_path / "p.safetensors"
    patch.make(base, tuned, path)
    data, metadata = archive.open_archive(path)
    tensors, metadata = dict(data), json.loads(json.dumps(metadata))
    _damage(damage, tensors, metadata)
    del data  # it would be read from the file that is replaced
    archive.save(path, tensors, metadata)
    with pytest.raises(FileError, match="damaged"):
        patch.apply(base, path)["a"]


def test_chunks_without_a_change(tmp_path):
    base = {"w": torch.zeros(3 * (1 << 18) + 5), "v": torch.zeros(2, 1 << 18)}
    tuned = {name: tensor.clone() for name, tensor in base.items()}
    tuned["w"][(1 << 18) + 3] = 1  # in the second of four chunks
    tuned["v"][1, -1] = 1
    assert check(base, tuned, tmp_path / "p.safetensors").changed == {"w": 1, "v": 1}


@pytest.mark.parametrize("dtype", [torch.uint64, torch.uint16, torch.float8_e4m3fn, torch.complex64, torch.bool])
def test_types_that_torch_knows_little_about(tmp_path, dtype):
    base = {"w": torch.tensor([0, 1, 0, 1, 0, 1, 1]).to(dtype)}
    tuned = {"w": torch.tensor([0, 1, 0, 1, 0, 0, 1]).to(dtype)}
    path = tmp_path / "p.safetensors"
    assert patch.make(base, tuned, path).changed == {"w": 1}
    back = patch.apply(base, path)
    for size in (1, 7, 1 << 18):
        bits = [piece.view(torch.uint8) for piece in chunks_of(back, "w", size)]
        assert torch.equal(torch.cat(bits), tuned["w"].view(torch.uint8))


def test_a_type_that_no_file_holds(tmp_path):
    base = {"w": torch.zeros(3, dtype=torch.complex128)}
    with pytest.raises(SquisherError, match="'w'.*complex128"):
        patch.make(base, {"w": base["w"] + 1}, tmp_path / "p.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**40])
def test_places_beyond_32_bits(size):
    # As in a tensor of that many entries, which nobody has to hold: the last chunk of it, changed in its first and last entry.
    start = size - 1000
    indices = patch._indices(np.array([0, 999]), start, size)
    assert indices.tolist() == [start, size - 1]
    assert indices.dtype == (torch.int32 if size < 2**31 else torch.int64)
    earlier = torch.tensor([3], dtype=indices.dtype)
    places = torch.cat([earlier, indices]).numpy()
    chunk = patch._changed(torch.zeros(1000), start, places, torch.tensor([7.0, 8.0, 9.0]))
    assert chunk.nonzero().flatten().tolist() == [0, 999]
    assert (chunk[0], chunk[999]) == (8, 9)
    before = torch.zeros(1000)
    assert patch._changed(before, start - 1000, places, torch.tensor([7.0, 8.0, 9.0])) is before


def test_new_tensors_may_be_empty(tmp_path):
    base = {"same": torch.ones(3), "shrunk": torch.ones(3)}
    tuned = {"same": torch.ones(3), "shrunk": torch.zeros(0), "new": torch.zeros(2, 0)}
    check(base, tuned, tmp_path / "patch.safetensors")
