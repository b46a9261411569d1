"""Whole or not at all, whoever else writes, and whatever was left behind by those who were killed."""

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

import squisher
from squisher.errors import FileError
from squisher.storage import atomic, safetensors
from squisher.storage.folders import write_model


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_threads_that_write_one_file_give_one_of_their_files_whole(tmp_path):
    path = tmp_path / "x.safetensors"
    count, failures = 8, []

    def write(k):
        tensors = {f"w{n}": torch.full((3000,), float(k)) for n in range(20)}
        try:
            for _ in range(3):
                safetensors.save(path, tensors, {"k": k})
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(k,)) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    tensors, metadata = safetensors.open_archive(path)
    assert {float(v) for name in tensors for v in tensors[name]} == {float(metadata["k"])}
    assert names(tmp_path) == ["x.safetensors"]


def test_threads_that_write_one_set_of_shards_give_one_of_their_sets_whole(tmp_path):
    path = tmp_path / "x.safetensors"
    failures = []

    def write(k):
        tensors = {f"w{n}": torch.full((100,), float(k)) for n in range(12)}
        try:
            for _ in range(4):
                safetensors.save(path, tensors, {"k": k}, shard_bytes=400 * (1 + k % 3))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    tensors, metadata = safetensors.open_archive(path)
    assert {float(v) for name in tensors for v in tensors[name]} == {float(metadata["k"])}
    assert len(names(tmp_path)) == 1 + 12 // (1 + metadata["k"] % 3)


HANGING = """
import sys, time, torch
from squisher.storage import safetensors
from squisher.storage.folders import write_model
class Slow(dict):
    def chunks(self, name, size):
        yield torch.zeros(10)
        print("writing", flush=True)
        time.sleep(600)
    def shape(self, name): return (10_000,)
    def dtype(self, name): return torch.float32
if sys.argv[2] == "file":
    safetensors.save(sys.argv[1], Slow(a=None), {})
else:
    write_model(sys.argv[1], Slow(a=None))
"""


@pytest.fixture
def hanging(tmp_path):
    """Start a process that is in the middle of writing; all of them are ended afterwards."""
    started = []

    def start(kind, name):
        process = subprocess.Popen(
            [sys.executable, "-c", HANGING, tmp_path / name, kind], stdout=subprocess.PIPE, cwd=tmp_path.parent
        )
        started.append(process)
        assert process.stdout.readline() == b"writing\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_a_killed_writer_left_is_removed_by_the_next_one_and_a_living_one_is_left_alone(tmp_path, hanging, kind):
    living = hanging(kind, "living.safetensors" if kind == "file" else "living")
    dead = hanging(kind, "dead.safetensors" if kind == "file" else "dead")
    assert len(names(tmp_path)) == 2
    dead.send_signal(signal.SIGKILL)
    dead.wait()
    safetensors.save(tmp_path / "new.safetensors", {"a": torch.zeros(3)}, {})
    left = names(tmp_path)
    assert len(left) == 2
    assert left[1] == "new.safetensors"
    assert left[0].startswith(".living")
    living.send_signal(signal.SIGKILL)
    living.wait()
    write_model(tmp_path / "folder", {"a": torch.zeros(3)})
    assert names(tmp_path) == ["folder", "new.safetensors"]
    assert names(tmp_path / "folder") == ["model.safetensors"]


def test_only_one_may_make_a_folder_at_a_time(tmp_path, hanging):
    first = hanging("folder", "out")
    with pytest.raises(FileError, match="another process"):
        write_model(tmp_path / "out", {"a": torch.zeros(3)})
    first.send_signal(signal.SIGKILL)
    first.wait()
    write_model(tmp_path / "out", {"a": torch.zeros(3)})
    assert names(tmp_path) == ["out"]


def test_partials_of_another_machine_are_left_alone_until_they_are_old(tmp_path):
    foreign = tmp_path / ".x.safetensors.0123abcd-0123456789abcdef.partial"
    other = tmp_path / ".x.safetensors.1234.partial"  # not a name that we give
    foreign.write_bytes(b"")
    other.write_bytes(b"")
    atomic.write_file(tmp_path / "a", b"")
    assert foreign.exists()
    os.utime(foreign, (0, 0))
    atomic.write_file(tmp_path / "a", b"")
    assert names(tmp_path) == [other.name, "a"]


def test_a_claim_of_another_machine_says_what_to_remove(tmp_path):
    left = tmp_path / f".x.safetensors.{'0' * 8}-{'0' * 16}.partial"
    left.write_bytes(b"")
    with pytest.raises(FileError, match="another machine.*remove") as error, atomic.claim(tmp_path / "x.safetensors"):
        pass
    assert str(left) in str(error.value)
    left.unlink()
    with atomic.claim(tmp_path / "x.safetensors"):
        assert len(names(tmp_path)) == 1
        with pytest.raises(FileError, match="another process") as error, atomic.claim(tmp_path / "x.safetensors"):
            pass
        assert "remove" not in str(error.value)  # its writer lives


def test_a_link_that_is_called_like_a_partial_leads_nowhere(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("x")
    machine = atomic._machine()
    (tmp_path / f".x.{machine}-0123456789abcdef.partial").symlink_to(tmp_path / "precious")
    os.mkfifo(tmp_path / f".y.{machine}-0123456789abcdef.partial")
    atomic.write_file(tmp_path / "a", b"content")
    assert (tmp_path / "precious" / "file").read_text() == "x"
    assert (tmp_path / "a").read_bytes() == b"content"


def test_a_folder_that_fails_leaves_nothing(tmp_path):
    def work():
        with atomic.new_folder(tmp_path / "out") as folder:
            assert folder.name == "out"
            (folder / "a").write_text("x")
            raise KeyError("from the one who writes")

    with pytest.raises(KeyError):
        work()
    assert names(tmp_path) == []


def test_a_file_that_something_still_reads_is_not_replaced(tmp_path):
    path = tmp_path / "a.safetensors"
    squisher.Importance({"w": torch.ones(4)}, "fisher").save(path)
    opened = squisher.load(path)
    with pytest.raises(FileError, match="still being read"):
        (opened * 2.0).save(path)
    with pytest.raises(FileError, match="still being read"):
        squisher.Importance({"w": torch.zeros(4)}, "fisher").save(path)
    assert opened["w"].tolist() == [1, 1, 1, 1]
    kept = squisher.Importance({"w": opened["w"]}, "fisher")
    del opened
    (kept * 2.0).save(path)
    assert squisher.load(path)["w"].tolist() == [2, 2, 2, 2]


def test_check_target(tmp_path):
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_text("x")
    folder.mkdir()
    atomic.check_target(tmp_path / "new")
    atomic.check_target(folder)
    atomic.check_target(file, overwrite=True)
    with pytest.raises(FileError, match="exists already.*--overwrite"):
        atomic.check_target(file)
    with pytest.raises(FileError, match="made from"):
        atomic.check_target(file, overwrite=True, sources=[tmp_path / "none", folder / ".." / "file"])
    (folder / "inside").write_text("x")
    with pytest.raises(FileError, match="exists already"):
        atomic.check_target(folder, overwrite=True)
    with pytest.raises(FileError, match="no folder"):
        atomic.check_target(tmp_path / "none" / "x")


@pytest.mark.parametrize("name", ["x" * 240, "é" * 120, "x" * 300, "nul\0", "\ud800"])
def test_names_that_are_too_long_or_no_text(tmp_path, name):
    path = tmp_path / name
    if len(os.fsencode(name.replace("\ud800", "?"))) <= 255 and "\0" not in name and "\ud800" not in name:
        atomic.write_file(path, b"1")
        assert path.read_bytes() == b"1"
        return
    with pytest.raises(FileError, match="Cannot write"):
        atomic.write_file(path, b"1")
    assert names(tmp_path) == []
