"""safetensors as streams: the library reads what we write, we read what it writes, and lies are refused."""

import json
import os
import signal
import struct
import subprocess
import sys
import time

import pytest
import safetensors
import safetensors.torch
import torch

from squisher import archive
from squisher.errors import FileError, NamingError, SquisherError
from squisher.stream import SafetensorsWriter, open_safetensors, read_header
from squisher.tensors import LazyTensors, chunks_of, dtype_of, numel_of, shape_of, tied_names

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


def test_the_same_input_gives_the_same_bytes(tmp_path):
    tensors = {"a": torch.rand(100_000), "b": torch.rand(3, 3)}
    files = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    threads = torch.get_num_threads()
    for count, file in zip((1, 2), files, strict=True):
        torch.set_num_threads(count)
        archive.save(file, tensors, {"k": "v"}, statistics=True)
    torch.set_num_threads(threads)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_chunks_of_a_plain_dict_and_of_a_file_have_the_same_borders(tmp_path):
    tensors = {"a": torch.rand(1000)}
    archive.save(tmp_path / "a.safetensors", tensors, {})
    lazy, _ = archive.open_archive(tmp_path / "a.safetensors")
    sizes = [[p.numel() for p in chunks_of(source, "a", 300)] for source in (tensors, lazy)]
    assert sizes == [[300, 300, 300, 100]] * 2
    assert numel_of(lazy, "a") == 1000


def test_shards_and_their_index(tmp_path):
    tensors = {f"layer.{k}": torch.rand(100) for k in range(7)}
    path = tmp_path / "big.safetensors"
    archive.save(path, tensors, {"a": 1}, shard_bytes=900, statistics=True)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == [*(f"big-0000{k}-of-00004.safetensors" for k in (1, 2, 3, 4)), "big.safetensors.index.json"]
    lazy, metadata = archive.open_archive(path)
    assert all(torch.equal(lazy[n], t) for n, t in tensors.items())
    assert list(lazy) == list(tensors)
    assert metadata["a"] == 1
    assert metadata["sum"]["layer.3"] == pytest.approx(tensors["layer.3"].double().sum().item())
    # Written again as one file, nothing of the old set is left to be found instead.
    archive.save(path, tensors, {"a": 2})
    assert [p.name for p in tmp_path.iterdir()] == ["big.safetensors"]
    archive.save(path, tensors, {"a": 3}, shard_bytes=900)
    assert not path.exists()
    assert archive.open_archive(path)[1] == {"a": 3}


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", ".."])
def test_an_index_cannot_point_outside_its_folder(tmp_path, shard):
    index = tmp_path / "x.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(FileError, match="outside its own folder"):
        open_safetensors(index)


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
    with pytest.raises(FileError, match="truncated"):
        lazy["a"]
    with pytest.raises(FileError, match="truncated"):
        read_header(path)


def test_nothing_is_left_behind_when_a_check_objects(tmp_path):
    def check(name, piece):
        if name == "b":
            raise SquisherError("no b please")

    path = tmp_path / "a.safetensors"
    path.write_bytes(b"what was there before")
    with pytest.raises(SquisherError, match="no b"):
        archive.save(path, {"a": torch.zeros(5), "b": torch.zeros(5)}, {}, check=check)
    assert path.read_bytes() == b"what was there before"
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_the_disk_that_is_too_small_is_named_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 10})())
    with pytest.raises(FileError, match="only 10 are free"):
        archive.save(tmp_path / "a.safetensors", {"a": torch.zeros(100)}, {})
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_missing_and_a_wrong_ending(tmp_path):
    with pytest.raises(FileError, match="No such file"):
        archive.save(tmp_path / "none" / "a.safetensors", {"a": torch.zeros(1)}, {})
    with pytest.raises(SquisherError, match=r"ends in \.safetensors"):
        archive.save(tmp_path / "a.bin", {"a": torch.zeros(1)}, {})
    with pytest.raises(NamingError, match="__metadata__"):
        archive.save(tmp_path / "a.safetensors", {"__metadata__": torch.zeros(1)}, {})
    with pytest.raises(SquisherError, match="complex128"):
        archive.save(tmp_path / "a.safetensors", {"a": torch.zeros(1, dtype=torch.complex128)}, {})


def test_a_writer_that_got_too_few_bytes_does_not_publish(tmp_path):
    writer = SafetensorsWriter(tmp_path / "a.safetensors", {"a": (torch.float32, (4,))}, {})
    with pytest.raises(FileError, match="8 bytes came instead of 16"), writer:
        writer.write(torch.zeros(2))
        writer.finish({})
    assert not list(tmp_path.iterdir())


KILLED = """
import sys, time, torch
from squisher import archive
class Slow(dict):
    def chunks(self, name, size):
        for k in range(1000):
            print("piece", flush=True); time.sleep(0.05); yield torch.zeros(10)
    def shape(self, name): return (10_000,)
    def dtype(self, name): return torch.float32
archive.save(sys.argv[1], Slow(a=None), {})
"""


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_process_leaves_no_file_under_the_final_name(tmp_path, signal_number):
    path = tmp_path / "out.safetensors"
    process = subprocess.Popen([sys.executable, "-c", KILLED, path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    process.stdout.readline()
    time.sleep(0.1)
    process.send_signal(signal_number)
    process.wait()
    process.stdout.close()
    assert not path.exists()
    assert not [p for p in tmp_path.iterdir() if p.suffix == ".safetensors"]


def test_tied_names_in_memory_and_on_disk(tmp_path):
    weight = torch.rand(4, 4)
    tensors = {
        "first": weight,
        "second": weight,
        "other": torch.rand(4, 4),
        "transposed": weight.t(),
        "empty": torch.empty(0),
    }
    assert tied_names(tensors) == {"second": "first"}
    archive.save(tmp_path / "a.safetensors", tensors, {})
    assert tied_names(open_safetensors(tmp_path / "a.safetensors")) == {}


def test_a_missing_name_says_what_is_near():
    lazy = LazyTensors({"layer.weight": None})
    with pytest.raises(KeyError, match=r"Did you mean 'layer.weight'"):
        lazy["layer.wieght"]


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


def test_reading_ahead_stops_when_nobody_listens_any_more():
    made = []

    def pieces():
        for k in range(1000):
            made.append(k)
            yield torch.zeros(1)

    stream = archive.ahead(pieces())
    next(stream)
    stream.close()
    assert len(made) < 10
