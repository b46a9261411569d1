"""Tensors in several places: what is read is what lies there, however they were cut."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from squisher.storage.tensors import Block, Blocks, Joined, Slice


class Memory:
    """A tensor that counts what is read of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.shape, self.dtype = tensor, tuple(tensor.shape), tensor.dtype
        self.taken = 0

    def load(self) -> torch.Tensor:
        return self.read_flat(0, self.tensor.numel()).reshape(self.shape)

    def read_flat(self, start: int, stop: int) -> torch.Tensor:
        assert 0 <= start <= stop <= self.tensor.numel()
        self.taken += stop - start
        return self.tensor.reshape(-1)[start:stop].clone()


@st.composite
def tilings(draw: st.DrawFn) -> tuple[torch.Tensor, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """A tensor of up to four dimensions, cut in two again and again."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    parts = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        k = draw(st.integers(0, len(parts) - 1))
        offsets, sizes = parts[k]
        cuttable = [d for d in range(len(shape)) if sizes[d] > 1]
        if cuttable:
            d = draw(st.sampled_from(cuttable))
            at = draw(st.integers(1, sizes[d] - 1))
            left = (*sizes[:d], at, *sizes[d + 1 :])
            right = (*sizes[:d], sizes[d] - at, *sizes[d + 1 :])
            parts[k] = (offsets, left)
            parts.append(((*offsets[:d], offsets[d] + at, *offsets[d + 1 :]), right))
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape), draw(st.permutations(parts))


def part_of(whole: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    return whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].clone()


@settings(max_examples=300, deadline=None)
@given(tilings(), st.data())
def test_any_range_of_any_tiling(tiling, data):
    whole, parts = tiling
    memories = [Memory(part_of(whole, *part)) for part in parts]
    blocks = Blocks(whole.shape, whole.dtype, [Block(whole.shape, *p, m) for p, m in zip(parts, memories, strict=True)])
    assert blocks.gap is None
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    assert torch.equal(blocks.read_flat(start, stop), whole.reshape(-1)[start:stop])
    longest = max((m.tensor.numel() for m in memories), default=0)
    assert sum(m.taken for m in memories) <= stop - start + 2 * longest
    assert torch.equal(blocks.load(), whole)


@settings(max_examples=100, deadline=None)
@given(tilings(), st.data())
def test_a_part_left_out_or_moved_is_noticed(tiling, data):
    whole, parts = tiling
    blocks = [Block(whole.shape, *part, Memory(part_of(whole, *part))) for part in parts]
    lost = data.draw(st.integers(0, len(blocks) - 1))
    rest = blocks[:lost] + blocks[lost + 1 :]
    assert "elements instead of" in Blocks(whole.shape, whole.dtype, rest).gap
    same = [k for k, block in enumerate(blocks) if block.sizes == blocks[lost].sizes and k != lost]
    if same:
        assert Blocks(whole.shape, whole.dtype, [*rest, blocks[same[0]]]).gap == "two of its parts overlap"


def test_a_part_outside_is_noticed():
    block = Block((4,), (3,), (4,), Memory(torch.zeros(4)))
    assert Blocks((4,), torch.float32, [block]).gap == "one of its parts lies outside of it"


def test_runs_read_only_what_is_asked_for():
    a, b = Memory(torch.arange(10.0)), Memory(torch.arange(100.0, 110.0))
    runs = Joined((2, 4), torch.float32, [Slice(a, 7, 10), Slice(b, 5, 5), Slice(b, 0, 5)])
    expected = torch.tensor([7.0, 8, 9, 100, 101, 102, 103, 104])
    assert torch.equal(runs.load(), expected.reshape(2, 4))
    for start in range(9):
        for stop in range(start, 9):
            assert torch.equal(runs.read_flat(start, stop), expected[start:stop])
    a.taken = b.taken = 0
    runs.read_flat(4, 6)
    assert (a.taken, b.taken) == (0, 2)


def test_runs_must_fill_the_shape():
    with pytest.raises(ValueError, match="elements for the shape"):
        Joined((3,), torch.float32, [Slice(Memory(torch.zeros(2)), 0, 2)])
