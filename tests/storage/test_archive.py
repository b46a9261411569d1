"""Named tensors and one JSON: one file or shards, whole or not at all, the same bytes every time."""

import signal
import subprocess
import sys
import time

import pytest
import torch

import squisher
from squisher.errors import FileError, NamingError, SquisherError
from squisher.storage import safetensors as archive
from squisher.storage.folders import write_model
from squisher.storage.tensors import CHUNK, Computed


def test_the_same_input_gives_the_same_bytes(tmp_path):
    tensors = {"a": torch.rand(100_000), "b": torch.rand(3, 3)}
    files = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    threads = torch.get_num_threads()
    for count, file in zip((1, 2), files, strict=True):
        torch.set_num_threads(count)
        archive.save(file, tensors, {"k": "v"}, statistics=True)
    torch.set_num_threads(threads)
    assert files[0].read_bytes() == files[1].read_bytes()


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
    with pytest.raises(FileError, match="still being read"):
        archive.save(path, tensors, {"a": 2})
    # Written again as one file, nothing of the old set is left to be found instead.
    del lazy
    archive.save(path, tensors, {"a": 2})
    assert [p.name for p in tmp_path.iterdir()] == ["big.safetensors"]
    archive.save(path, tensors, {"a": 3}, shard_bytes=900)
    assert not path.exists()
    assert archive.open_archive(path)[1] == {"a": 3}


def test_nothing_is_left_behind_when_a_tensor_cannot_be_read(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"what was there before")
    with pytest.raises(SquisherError, match="'b' is sparse"):
        archive.save(path, {"a": torch.zeros(5), "b": torch.zeros(5).to_sparse()}, {})
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


KILLED = """
import signal, sys, time, torch
import squisher
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite that runs in the background has it ignored
from squisher.storage import safetensors as archive
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


def test_saves_where_denormal_numbers_are_switched_off(tmp_path):
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such switch")
    try:
        one = squisher.Importance({f"w{n}": torch.full((3,), 1.2345678e-20 / (n + 3)) for n in range(30)}, "fisher")
        one.save(tmp_path / "one.safetensors")
    finally:
        torch.set_flush_denormal(False)
    kept = squisher.load(tmp_path / "one.safetensors")
    assert all(torch.equal(kept[name], one[name]) for name in one)


def test_what_is_streamed_into_a_file_is_computed_by_one_thread(tmp_path):
    """With two threads on a busy machine, `unlearn` of 23 million weights took minutes instead of seconds."""
    seen, threads = [], torch.get_num_threads()

    class Watched(Computed):
        def chunks(self, name, size=CHUNK):
            seen.append(torch.get_num_threads())
            return super().chunks(name, size)

    torch.set_num_threads(2)
    try:
        archive.save(tmp_path / "w.safetensors", Watched({"a": torch.rand(3)}), None)
        write_model(tmp_path / "model", Watched({"a": torch.rand(3)}))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert seen == [1, 1]
