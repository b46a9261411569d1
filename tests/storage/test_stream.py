"""safetensors as streams: the library reads what we write, we read what it writes, and lies are refused."""

import errno
import json
import os
import struct

import pytest
import safetensors
import safetensors.torch
import torch

from squisher.errors import FileError, NamingError
from squisher.storage import safetensors as archive
from squisher.storage.safetensors import SafetensorsWriter, open_safetensors, read_header
from squisher.storage.tensors import chunks_of, dtype_of, shape_of

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def example():
    torch.manual_seed(0)
    tensors = {f"t.{str(d)[6:]}": (torch.rand(7, 5) * 9).to(d) for d in DTYPES}
    return tensors | {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 4), "ünï.cödé": torch.rand(3)}


def test_the_library_reads_what_is_written_and_the_reverse(tmp_path):
    tensors = example()
    archive.save(tmp_path / "a.safetensors", tensors, {"x": 1})
    back = safetensors.torch.load_file(tmp_path / "a.safetensors")
    safetensors.torch.save_file(tensors, tmp_path / "b.safetensors")
    lazy = open_safetensors(tmp_path / "b.safetensors")
    assert set(back) == set(lazy) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor)
        assert torch.equal(lazy[name], tensor)
        assert shape_of(lazy, name) == tensor.shape
        assert dtype_of(lazy, name) == tensor.dtype
        pieces = list(chunks_of(lazy, name, 4))
        assert all(piece.numel() <= 4 for piece in pieces)
        assert torch.equal(torch.cat(pieces) if pieces else tensor.reshape(-1), tensor.reshape(-1))
    with safetensors.safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"
        assert json.loads(file.metadata()["squisher"]) == {"x": 1}


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", ".."])
def test_an_index_cannot_point_outside_its_folder(tmp_path, shard):
    index = tmp_path / "x.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(FileError, match="outside its own folder"):
        open_safetensors(index)


@pytest.mark.parametrize(
    "index", ['{"weight_map": {"a": 3}}', '{"weight_map": {"a": null, "b": "x"}}', "[]", "{", "{}"]
)
def test_an_index_that_is_none(tmp_path, index):
    (tmp_path / "x.safetensors.index.json").write_text(index)
    with pytest.raises(FileError, match="not an index|not JSON"):
        open_safetensors(tmp_path / "x.safetensors.index.json")


def test_an_index_with_a_missing_shard_or_tensor(tmp_path):
    index = tmp_path / "x.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(FileError, match=r"gone.safetensors.*missing"):
        open_safetensors(index)
    archive.save(tmp_path / "here.safetensors", {"b": torch.zeros(2)}, {})
    index.write_text(json.dumps({"weight_map": {"a": "here.safetensors"}}))
    with pytest.raises(NamingError, match="'a'"):
        open_safetensors(index)


def damaged(header, data=b"\0" * 8):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01\x02",
        struct.pack("<Q", 1 << 60) + b"{}",
        damaged(b"not json"),
        damaged([1, 2]),
        damaged({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}),
        damaged({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}),
        damaged({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}),
        damaged({"a": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}}),
        damaged({"a": {"dtype": "F32", "shape": [1e99], "data_offsets": [0, 8]}}),
        damaged({"a": {"dtype": "F32", "shape": [0, 1 << 40, 1 << 40], "data_offsets": [0, 0]}}),
        damaged({"a": 7}),
        damaged({n: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for n in "ab"}),
        damaged({"__metadata__": {"x": 1}}),
        damaged(b"[" * 50_000),
    ],
)
def test_a_damaged_or_lying_file_is_refused(tmp_path, content):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(FileError, match=r"bad\.safetensors"):
        read_header(path)


def test_a_name_that_appears_twice_is_refused(tmp_path):
    entry = '{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]}'
    text = f'{{"a":{entry % (0, 4)},"a":{entry % (4, 8)}}}'.encode()
    (tmp_path / "twice.safetensors").write_bytes(damaged(text))
    with pytest.raises(NamingError, match="'a' appears twice"):
        read_header(tmp_path / "twice.safetensors")


def test_a_file_cut_after_opening_is_noticed_when_read(tmp_path):
    path = tmp_path / "a.safetensors"
    archive.save(path, {"a": torch.rand(1000)}, {})
    lazy, _ = archive.open_archive(path)
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(FileError, match="changed since"):
        lazy["a"]
    with pytest.raises(FileError, match="truncated"):
        read_header(path)


class Filling:
    """A file on a disk that takes some more calls, the last one only in part."""

    def __init__(self, file, calls):
        self.file, self.calls = file, calls

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, view):
        self.calls -= 1
        if self.calls < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(view if self.calls else view[:5])


@pytest.mark.parametrize("calls", [1, 2])  # full within the tensor, or only within the header
def test_a_disk_that_fills_up_is_told_and_leaves_nothing(tmp_path, calls):
    path = tmp_path / "x.safetensors"
    writer = SafetensorsWriter(path, {"a": (torch.float32, (4,))}, {})
    with pytest.raises(FileError, match="x.safetensors.*disk is full.*Nothing"), writer:
        writer._partial.file = Filling(writer._partial.file, calls)
        writer.write(torch.ones(4))
        writer.finish({})
    assert list(tmp_path.iterdir()) == []


def test_short_writes_are_continued(tmp_path):
    class Short(Filling):
        def write(self, view):
            return self.file.write(view[:7])

    path = tmp_path / "x.safetensors"
    with SafetensorsWriter(path, {"a": (torch.float32, (4,))}, {}) as writer:
        writer._partial.file = Short(writer._partial.file, 0)
        writer.write(torch.arange(4.0))
        writer.finish({})
        writer.publish()
    assert safetensors.torch.load_file(path)["a"].tolist() == [0, 1, 2, 3]


def test_a_folder_of_the_same_name_is_told(tmp_path):
    (tmp_path / "x.safetensors" / "inside").mkdir(parents=True)
    with pytest.raises(FileError, match="x.safetensors.*Nothing was left"):
        archive.save(tmp_path / "x.safetensors", {"a": torch.ones(4)}, None)
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_writer_that_got_too_few_bytes_does_not_publish(tmp_path):
    writer = SafetensorsWriter(tmp_path / "a.safetensors", {"a": (torch.float32, (4,))}, {})
    with pytest.raises(FileError, match="8 bytes.* 16"), writer:
        writer.write(torch.zeros(2))
        writer.finish({})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shard_bytes", [10**9, 900])
def test_without_metadata_it_is_a_plain_weight_file(tmp_path, shard_bytes):
    tensors = {f"layer.{k}": torch.rand(100) for k in range(5)}
    archive.save(tmp_path / "model.safetensors", tensors, None, shard_bytes=shard_bytes)
    index = tmp_path / "model.safetensors.index.json"
    if index.exists():
        assert json.loads(index.read_text())["metadata"] == {"total_size": 2000}
    for file in tmp_path.glob("*.safetensors"):
        with safetensors.safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    opened, metadata = archive.open_archive(tmp_path / "model.safetensors")
    assert metadata is None
    assert all(torch.equal(opened[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("kind", ["F4", "F6_E2M3", "F99"])
def test_a_type_that_is_not_known_is_named_and_not_called_damage(tmp_path, kind):
    (tmp_path / "a.safetensors").write_bytes(damaged({"a": {"dtype": kind, "shape": [2], "data_offsets": [0, 8]}}))
    with pytest.raises(FileError, match=f"'a' has the type '{kind}', which is not read"):
        open_safetensors(tmp_path / "a.safetensors")


def test_every_type_of_one_byte_that_torch_has(tmp_path):
    kinds = [kind for name, kind in vars(torch).items() if name.startswith("float8_")]
    tensors = {str(kind): torch.tensor([0.25, 1, 2]).to(kind) for kind in kinds}
    archive.save(tmp_path / "a.safetensors", tensors, None)
    found = open_safetensors(tmp_path / "a.safetensors")
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))
