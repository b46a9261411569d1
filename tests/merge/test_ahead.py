"""Merged ahead of the writer: the same bytes, in order, and nothing left running."""

import threading

import pytest
import torch

from squisher import merge
from squisher.errors import SquisherError
from squisher.storage import safetensors as archive
from squisher.storage.folders import Ahead
from squisher.storage.tensors import CHUNK, chunks_of

SHAPES = {"short": (7,), "none": (0, 3), "long": (3 * CHUNK + 11,), "last": (5, 4)}


def models(count, dtype=torch.float32):
    return [{name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()} for _ in range(count)]


def fishers(count):
    return [{name: torch.rand(shape) for name, shape in SHAPES.items()} for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [2, 5])
def test_the_same_bytes_as_without_threads(tmp_path, count, dtype):
    torch.manual_seed(0)
    merged = merge.fisher(models(count, dtype), fishers(count))
    with Ahead(merged, list(merged)) as ahead:
        archive.save(tmp_path / "ahead.safetensors", ahead, None)
    archive.save(tmp_path / "plain.safetensors", merged, None)
    assert (tmp_path / "ahead.safetensors").read_bytes() == (tmp_path / "plain.safetensors").read_bytes()


def test_any_order_and_any_size_give_the_same_values():
    torch.manual_seed(0)
    merged = merge.fisher(models(2), fishers(2))
    with Ahead(merged, ["short", "none", "long"]) as ahead:
        assert list(ahead) == ["short", "none", "long"]
        assert "last" not in ahead
        for name, size in (("long", CHUNK), ("short", 3), ("short", CHUNK), ("none", CHUNK), ("long", CHUNK)):
            found = list(chunks_of(ahead, name, size))
            assert sum(map(len, found)) == merged[name].numel()
            assert all(len(piece) <= size for piece in found)
            assert torch.equal(torch.cat([*found, torch.empty(0)]), merged[name].flatten())
        assert torch.equal(ahead["short"], merged["short"])
        with pytest.raises(KeyError):
            ahead["last"]


def test_other_mappings_are_read_ahead_too():
    tensors = models(1)[0]
    with Ahead(tensors, list(tensors)) as ahead:
        for name in ahead:
            assert torch.equal(torch.cat([*chunks_of(ahead, name), torch.empty(0)]), tensors[name].flatten())


def test_an_error_comes_in_its_turn_and_no_thread_stays(tmp_path):
    before = threading.active_count()
    both = models(2)
    both[1]["long"][2 * CHUNK] = torch.nan
    merged = merge.average(both)
    seen = []
    with pytest.raises(SquisherError, match="'long'.*model 2.*NaN"), Ahead(merged, list(merged)) as ahead:
        for name in ahead:
            for piece in chunks_of(ahead, name):
                seen.append(len(piece))
    assert seen == [7, CHUNK, CHUNK]
    with Ahead(merged, list(merged)) as ahead:
        next(iter(chunks_of(ahead, "short")))  # and then the writer gives up
    assert threading.active_count() == before


def test_what_is_read_for_a_piece_does_not_grow_with_the_models():
    for count in (2, 8, 32):
        everyone = [{"x": torch.randn(2 * CHUNK)} for _ in range(count)]
        merged = merge.average(everyone)
        assert next(merged.short_chunks("x")).numel() * count <= 8 * CHUNK
        assert [len(piece) for piece in merged.chunks("x")] == [CHUNK, CHUNK]
        assert torch.equal(torch.cat(list(merged.chunks("x", 999))), merged["x"])
