"""Files that are broken, or made to harm: a clear refusal or inert records, quickly, and nothing is executed."""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import os
import pickle
import random
import struct
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from squisher.errors import FileError, SquisherError
from squisher.storage import torch_files as pickles
from squisher.storage.byte_range import ByteRange
from squisher.storage.torch_files import Record
from squisher.storage.torch_files.machine import MAX_CHOSEN_KEYS

FIXTURES = Path(__file__).parents[2] / "fixtures" / "pickles"
MAGIC = pickle.dumps(0x1950A86A20F9469CFC6C, 2)


def saved(value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def with_pickle(data: bytes, storages: dict[str, bytes] | None = None, **more: bytes) -> ByteRange:
    """A torch zip file around a pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        for key, content in (storages or {}).items():
            archive.writestr(f"archive/data/{key}", content)
        for name, content in more.items():
            archive.writestr(f"archive/{name}", content)
    return ByteRange.of_bytes(buffer.getvalue(), "file.pt")


def tensor_pickle(
    shape: Any = (2,), stride: Any = (1,), offset: Any = 0, numel: Any = 2, key: Any = "0", location: str = "cpu"
) -> bytes:
    """The pickle of one float32 tensor that claims what it likes."""

    class Tensor:
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor_v2, (Storage(), offset, shape, stride, False, {})

    class Storage:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return ("storage", torch.FloatStorage, key, location, numel) if isinstance(value, Storage) else None

    buffer = io.BytesIO()
    Pickler(buffer, 2).dump(Tensor())
    return buffer.getvalue()


class Call:
    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


# Nothing is executed


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}], ids=["zip", "legacy"])
@pytest.mark.parametrize(
    ("function", "args"),
    [
        (os.system, ("touch {0}",)),
        (eval, ("open({0!r}, 'w')",)),
        (exec, ("open({0!r}, 'w')",)),
        (open, ("{0}", "w")),
        (os.mkdir, ("{0}",)),
        (functools.partial(os.mkdir, "x"), ()),
        (torch.load, ("{0}",)),
        (torch.save, (1, "{0}")),
        (Path.touch, (Path("x"),)),
        (np.save, ("{0}", 1)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_calls_are_only_recorded(function: Any, args: tuple[Any, ...], options: dict[str, Any], tmp_path: Path) -> None:
    target = tmp_path / "harm"
    args = tuple(a.format(str(target)) if isinstance(a, str) else a for a in args)
    record = pickles.read(ByteRange.of_bytes(saved({"x": Call(function, *args), "y": [1]}, **options)))
    assert isinstance(record["x"], Record)
    assert record["y"] == [1]
    assert not list(tmp_path.iterdir())


def test_results_of_getattr_are_not_called(tmp_path: Path) -> None:
    target = tmp_path / "harm"
    data = b"".join(
        [
            b"\x80\x02cbuiltins\ngetattr\ncos\n__dict__\nX\x06\x00\x00\x00system\x86R",
            b"X" + struct.pack("<I", len(f"touch {target}")) + f"touch {target}".encode(),
            b"\x85R}X\x01\x00\x00\x00aK\x01sb.",
        ]
    )
    record = pickles.unpickle(data)
    assert record.name == "(call)"
    assert record.args[0].name == "builtins.getattr"
    assert record.attributes == {"a": 1}
    assert not target.exists()


def test_no_module_is_imported() -> None:
    before = set(sys.modules)
    data = b"\x80\x02cantigravity\nfly\n)Rcthis\nc\n)R\x86."
    assert [record.name for record in pickles.unpickle(data)] == ["antigravity.fly", "this.c"]
    assert not {"antigravity", "this"} & (set(sys.modules) - before)


def test_inst_and_obj_are_inert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "eval", lambda *_: pytest.fail("eval was called"))
    assert pickles.unpickle(b"(S'1'\nibuiltins\neval\n.").name == "builtins.eval"
    assert pickles.unpickle(b"(cbuiltins\neval\nS'1'\no.").args == ("1",)


@pytest.mark.parametrize("data", [b"\x82\x01.", b"\x83\x01\x00.", b"\x84\x01\x00\x00\x00.", b"\x97.", b"N\x98."])
def test_instructions_that_reach_outside_are_refused(data: bytes) -> None:
    with pytest.raises(FileError, match="which is not read"):
        pickles.unpickle(b"\x80\x05" + data)


def test_codecs_and_bytes_are_bounded() -> None:
    assert pickles.unpickle(pickle.dumps(b"\xff\x00", 2)) == b"\xff\x00"
    for call in (
        b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x03\x00\x00\x00zip\x86R.",
        b"cbuiltins\nbytes\nJ\xff\xff\xff\x7f\x85R.",
        b"cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
    ):
        with pytest.raises(FileError, match="damaged"):
            pickles.unpickle(b"\x80\x02" + call)


# Structures made to exhaust


@pytest.mark.parametrize(
    "data",
    [
        b"]" * 100_000 + b"a" * 99_999 + b".",
        b"}" + b"K\x00}" * 100_000 + b"s" * 100_000 + b".",
        b"(" * 100_000 + b"l" * 100_000 + b".",
        b"cx\nY\nq\x00" + b"q\x010h\x00)\x81}K\x00h\x01sb" * 100_000 + b".",
        b"cx\nY\nq\x00" + b"q\x010h\x00h\x01\x85R" * 100_000 + b".",
        b"]q\x01h\x01a" * 10_000 + b".",
    ],
    ids=["lists", "dicts", "marks", "states", "arguments", "cycles"],
)
def test_deep_and_cyclic_structures_do_not_crash(data: bytes) -> None:
    pickles.unpickle(b"\x80\x02" + data)


def test_a_container_in_itself() -> None:
    loop = pickles.unpickle(b"\x80\x02]q\x00h\x00a.")
    assert loop[0] is loop
    record = pickles.unpickle(b"\x80\x02cx\nY\n)\x81q\x00}X\x01\x00\x00\x00ah\x00sb.")
    assert record.get("a") is record


@pytest.mark.parametrize(
    "data",
    [
        b"}N" + b"\x85" * 100_000 + b"Ns.",  # a deep tuple as a key: hashing it would overflow the stack
        b"N" + b"\x85" * 100_000 + b".",
        b"N" + b"2\x86" * 60 + b".",  # a tuple of 2**60 elements by sharing: hashing it would never end
        b"}(" + b"K\x01" * 100 + b"tNs.",
    ],
    ids=["deep key", "deep", "shared", "wide key"],
)
def test_tuples_that_cannot_be_hashed_safely_are_refused(data: bytes) -> None:
    with pytest.raises(FileError, match="tuple"):
        pickles.unpickle(b"\x80\x02" + data)


@pytest.mark.parametrize("key", [b"]", b"}", b"\x8f", b"(]t", b"\x96" + bytes(8)])
def test_unhashable_keys_are_refused(key: bytes) -> None:
    for data in (b"}" + key + b"Ns.", b"\x8f(" + key + b"\x90.", b"(" + key + b"\x91."):
        with pytest.raises(FileError, match="a key of"):
            pickles.unpickle(b"\x80\x05" + data)


def test_keys_with_chosen_hashes_are_few() -> None:
    def keyed(keys: list[Any]) -> bytes:
        return pickle.dumps(dict.fromkeys(keys), 4)

    prime = 2**61 - 1  # every multiple of it has the hash 0
    some = [prime * i for i in range(1, 50)]
    assert list(pickles.unpickle(keyed(some))) == some
    many = b"\x80\x04}" + b"".join(
        b"\x8a\x0a" + (prime * i).to_bytes(10, "little", signed=True) + b"Ns" for i in range(1, MAX_CHOSEN_KEYS + 2)
    )
    with pytest.raises(FileError, match="too many keys"):
        pickles.unpickle(many + b".")
    plain = list(range(MAX_CHOSEN_KEYS + 9))
    assert list(pickles.unpickle(keyed(plain))) == plain


@pytest.mark.parametrize(
    ("big", "repeat"),
    [
        (pickle.dumps([(i, i) for i in range(30_000)], 2)[2:-1], b"ccollections\nOrderedDict\nh\xff\x85R0"),
        (pickle.dumps("x" * 500_000, 2)[2:-1], b"c_codecs\nencode\nh\xffX\x06\x00\x00\x00latin1\x86R0"),
        (pickle.dumps({i: i for i in range(30_000)}, 2)[2:-1], b"cx\nY\n)\x81h\xffb0"),
        (pickle.dumps(list(range(30_000)), 2)[2:-1], b"cbuiltins\nset\nh\xff\x85R0"),
        (pickle.dumps(list(range(30_000)), 2)[2:-1], b"ctorch\nSize\nh\xff\x85R0"),
        (pickle.dumps(saved([]), 3)[2:-1], b"ctorch.storage\n_load_from_bytes\nh\xff\x85R0"),
    ],
    ids=["dict", "encode", "state", "set", "size", "nested"],
)
def test_repeated_work_on_one_object_is_refused(big: bytes, repeat: bytes) -> None:
    with pytest.raises(FileError, match="beyond measure"):
        pickles.unpickle(b"\x80\x03" + big + b"q\xff" + repeat * 20_000 + b".")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x8b\xff\xff\xff\x7f", "2147483647 bytes"),
        (b"\x8b\xff\xff\xff\xff", "-1 bytes"),
        (b"I" + b"9" * 1000 + b"\n.", "1000 digits"),
        (b"X\xff\xff\xff\xffabc.", "ends too early"),
        (b"\x8e" + b"\xff" * 8 + b".", "ends too early"),
        (b"\x95" + b"\xff" * 8 + b"N.", "ends too early"),
        (b"c" + b"a" * 9000 + b"\nb\n.", "name.*no end"),
        (b"\x80\x06N.", "pickle protocol 6"),
        (b"0.", "do not fit"),
        (b".", "ends too early"),
        (b"h\x05.", "do not fit"),
        (b"K\x01K\x02R.", "not a tuple"),
        (b"K\x01)R.", "a call of something"),
        (b"K\x01K\x02b.", "a state for something"),
        (b"K\x01K\x02a.", "no list"),
        (b"K\x01K\x02K\x02s.", "keys are set"),
        (b"(.", "left open"),
        (b"K\x01Q.", "objects outside itself"),
        (b"X\x02\x00\x00\x00\xff\xff.", "do not fit"),
        (b"", "ends too early"),
    ],
)
def test_damaged_pickles_are_named(data: bytes, message: str) -> None:
    with pytest.raises(FileError, match=message):
        pickles.unpickle(b"\x80\x02" + data)


# Tensors that claim what they do not have


def test_the_honest_tensor_is_read() -> None:
    span = with_pickle(tensor_pickle(), {"0": struct.pack("<2f", 1, 2)})
    assert pickles.read(span).load().tolist() == [1, 2]


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        ({"shape": (3,)}, "reaches beyond its storage"),
        ({"offset": 1}, "reaches beyond its storage"),
        ({"stride": (2,)}, "reaches beyond its storage"),
        ({"offset": -1}, "offset '-1'"),
        ({"shape": (-2,)}, "size, stride or offset"),
        ({"stride": (-1,)}, "size, stride or offset"),
        ({"shape": (2.0,)}, "size, stride or offset"),
        ({"shape": (True,)}, "size, stride or offset"),
        ({"shape": (2**63,), "stride": (0,)}, "size, stride or offset"),
        ({"shape": (10**15,), "stride": (0,)}, "an expanded tensor"),
        ({"shape": (2**40, 2**40), "stride": (0, 0)}, "elements"),
        ({"shape": (1,) * 99, "stride": (1,) * 99}, "99 sizes"),
        ({"shape": (2, 1)}, "2 sizes.*1 strides"),
        ({"shape": None}, "storage or a shape"),
        ({"numel": 3}, "8 bytes.* 12"),
        ({"numel": -1}, "storage without a size"),
        ({"numel": 2**70}, "storage without a size"),
        ({"key": "../../secret"}, "type or a key"),
        ({"key": "1"}, "data of storage '1'"),
        ({"key": ""}, "type or a key"),
        ({"key": 0}, "type or a key"),
        ({"location": "meta"}, "meta device"),
    ],
    ids=str,
)
def test_false_claims_are_refused(claim: dict[str, Any], message: str) -> None:
    with pytest.raises(FileError, match=message) as error:
        pickles.read(with_pickle(tensor_pickle(**claim), {"0": struct.pack("<2f", 1, 2)}))
    assert "file.pt" in str(error.value)


def test_meta_tensors_are_refused() -> None:
    with pytest.raises(FileError, match="meta device"):
        pickles.read(ByteRange.of_bytes(saved(torch.empty(3, device="meta"))))


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    torch.save(torch.arange(1000.0), path)
    tensor = pickles.read(path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(FileError, match="changed since.*1000 bytes"):
        tensor.load()
    path.unlink()
    with pytest.raises(FileError, match="no such file"):
        tensor.load()


# Numbers of numpy


def test_arrays_that_do_not_fit_are_refused_when_asked_for() -> None:
    array = pickles.unpickle(pickle.dumps(np.arange(4.0), 2))
    assert array.numpy().tolist() == [0, 1, 2, 3]
    version, _, dtype, order, content = array.state
    for shape in ((5,), (2**40, 2**40), (-4,), [4]):
        array.state = (version, shape, dtype, order, content)
        with pytest.raises(FileError, match="fit its data"):
            array.numpy()
    objects = pickles.unpickle(pickle.dumps(np.array([os.system, None], dtype=object), 2))
    with pytest.raises(FileError, match="plain numbers"):
        objects.numpy()


def test_big_endian_numpy_numbers_are_refused() -> None:
    with pytest.raises(FileError, match="little-endian"):
        pickles.unpickle(pickle.dumps(np.arange(4, dtype=">f8"), 2))


# Zip archives that lie


def patched(data: bytes, signature: bytes, offset: int, content: bytes, number: int = 0) -> bytes:
    at = -1
    for _ in range(number + 1):
        at = data.index(signature, at + 1)
    return data[: at + offset] + content + data[at + offset + len(content) :]


LOCAL, CENTRAL, END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
ZIP = with_pickle(tensor_pickle(), {"0": struct.pack("<2f", 1, 2)}).buffer or b""
BIG = struct.pack("<I", 0xFFFFFF)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (patched(patched(ZIP, CENTRAL, 20, BIG, 1), CENTRAL, 24, BIG, 1), "overlaps|reaches into"),
        (patched(ZIP, CENTRAL, 24, BIG), "two sizes"),
        (patched(ZIP, CENTRAL, 42, struct.pack("<I", 0), 1), "overlaps"),
        (patched(ZIP, CENTRAL, 42, BIG, 1), "overlaps"),
        (patched(ZIP, CENTRAL, 8, b"\x01\x00"), "encrypted"),
        (patched(ZIP, CENTRAL, 16, BIG), "checksum"),
        (patched(ZIP, LOCAL, 0, b"XXXX", 1), "should be"),
        (patched(ZIP, LOCAL, 30, b"X", 1), "two names"),
        (patched(ZIP, LOCAL, 28, b"\xff\xff", 1), "reaches into"),
        (patched(ZIP, CENTRAL, 28, b"\xff\xff", 1), "cut short"),
        (patched(ZIP, CENTRAL, 0, b"XXXX", 1), "directory is damaged"),
        (patched(ZIP, END, 10, b"\x09\x00"), "incomplete"),
        (patched(ZIP, END, 12, BIG), "should be"),
        (patched(ZIP, END, 16, BIG), "should be"),
        (patched(ZIP, END, 4, b"\x01\x00"), "in several"),
        (patched(ZIP, CENTRAL, 20, b"\xff" * 8), "its size"),
        (patched(ZIP, CENTRAL, 10, b"\x0c\x00", 1), "compressed"),
        (END + bytes(18), "with no data"),
        (ZIP[:-30], "is cut short"),
        (ZIP[: len(ZIP) // 2], "is cut short"),
    ],
)
def test_lying_archives_are_refused(data: bytes, message: str) -> None:
    assert data != ZIP
    with pytest.raises(FileError, match=message):
        pickles.read(ByteRange.of_bytes(data))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_double_entries_are_refused() -> None:
    buffer = io.BytesIO(ZIP)
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr("archive/data/0", b"12345678")
    with pytest.raises(FileError, match="twice"):
        pickles.read(ByteRange.of_bytes(buffer.getvalue()))


def test_zip_bombs_are_not_unpacked() -> None:
    for content, message in ((b"N" * (1 << 25), "too long"), (b"N" * (1 << 20), "does not have the size|checksum")):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data.pkl", content)
        data = buffer.getvalue()
        if "size" in message:  # claims to be small
            data = patched(data, CENTRAL, 24, struct.pack("<I", 100))
        with pytest.raises(FileError, match=message):
            pickles.read(ByteRange.of_bytes(data))


def test_archives_of_other_kinds_are_named() -> None:
    for more, message in (
        ({"constants.pkl": b"x"}, "TorchScript"),
        ({"byteorder": b"big"}, "'big'-endian"),
        ({"other/data.pkl": b"x"}, "2 data.pkl"),
    ):
        with pytest.raises(FileError, match=message):
            pickles.read(with_pickle(b"N.", **more))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("config.json", "{}")
    with pytest.raises(FileError, match="with no data"):
        pickles.read(ByteRange.of_bytes(buffer.getvalue()))


# The old format


def legacy(*parts: Any, tail: bytes = b"") -> ByteRange:
    return ByteRange.of_bytes(MAGIC + b"".join(pickle.dumps(part, 2) for part in parts) + tail, "old.pt")


LITTLE = {"little_endian": True, "protocol_version": 1001, "type_sizes": {}}


@pytest.mark.parametrize(
    ("span", "message"),
    [
        (legacy(1002, LITTLE, {}, []), "old torch format"),
        (legacy(1001, {"little_endian": False}, {}, []), "big-endian"),
        (legacy(1001, 5, {}, []), "big-endian"),
        (legacy(1001, LITTLE, {}, {}), "no list of storages"),
        (legacy(1001, LITTLE, {}, ["1"]), "nothing uses"),
        (legacy(1001, LITTLE, {}, [[]]), "nothing uses"),
        (legacy(1001, LITTLE), "ends too early"),
        (ByteRange.of_bytes(pickle.dumps({}, 2) + b"more", "x.pkl"), "not a torch file"),
    ],
)
def test_broken_old_files_are_named(span: ByteRange, message: str) -> None:
    with pytest.raises(FileError, match=message):
        pickles.read(span)


def old_tensor(view: Any, count: int = 4, keys: Any = ("7",), storage: int = 4) -> ByteRange:
    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return ("storage", torch.FloatStorage, "7", "cpu", storage, view) if value is Ellipsis else None

    buffer = io.BytesIO()
    Pickler(buffer, 2).dump(Call(torch._utils._rebuild_tensor, ..., 0, (2,), (1,)))
    head = MAGIC + pickle.dumps(1001, 2) + pickle.dumps(LITTLE, 2) + buffer.getvalue() + pickle.dumps(list(keys), 2)
    return ByteRange.of_bytes(head + struct.pack("<q4f", count, 0, 1, 2, 3), "old.pt")


def test_views_of_very_old_files() -> None:
    assert pickles.read(old_tensor(None)).load().tolist() == [0, 1]
    assert pickles.read(old_tensor(("9", 2, 2))).load().tolist() == [2, 3]
    for view in (("9", 3, 2), ("9", -1, 2), ("9", 0, -1), ([], 0, 2), 5):
        with pytest.raises(FileError, match=r"view|do not fit"):
            pickles.read(old_tensor(view))
    for claim, message in (
        ({"count": 3}, "two sizes"),
        ({"count": -1}, "two sizes"),
        ({"keys": ()}, "lacks the data"),
        ({"count": 9, "storage": 9}, "36 are asked for|cut short"),
    ):
        with pytest.raises(FileError, match=message):
            pickles.read(old_tensor(None, **claim))


def test_a_pickle_longer_than_the_first_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("squisher.storage.torch_files.FIRST_WINDOW", 64)
    data = saved({"text": "x" * 5000, "v": torch.arange(3.0)}, _use_new_zipfile_serialization=False)
    assert pickles.read(ByteRange.of_bytes(data))["v"].load().tolist() == [0, 1, 2]


def test_torch_files_inside_torch_files_end_somewhere() -> None:
    data = pickle.dumps(1, 2)
    for _ in range(5):
        data = pickle.dumps(Call(torch.storage._load_from_bytes, data), 3)
    with pytest.raises(FileError, match="too deep"):
        pickles.unpickle(data)


# What is no torch file at all


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
        (b"\n <!DOCTYPE html><html></html>", "web page"),
        (struct.pack("<Q", 20) + b'{"__metadata__":{}}  ', "safetensors"),
        (b"\x1f\x8b\x08\x00" + b"x" * 20, "compressed"),
        (b"\x89HDF\r\n\x1a\n" + b"x" * 20, "HDF5"),
        (b"GGUF" + b"x" * 20, "GGUF"),
        (b"x" * 257 + b"ustar" + b"x" * 300, "tar archive"),
        (b"\0" * 600, "zeros"),
        (b"hello", "not a torch file"),
    ],
)
def test_other_files_are_named(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "optimizer.pt"
    path.write_bytes(data)
    with pytest.raises(FileError, match=message) as error:
        pickles.read(path)
    assert str(path) in str(error.value)


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no such file"):
        pickles.read(tmp_path / "missing.pt")
    with pytest.raises(FileError, match="is a folder"):
        pickles.read(tmp_path)
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for ever
    with pytest.raises(FileError, match="not a regular file"):
        pickles.read(tmp_path / "pipe")
    with pytest.raises(FileError, match="null"):
        pickles.read("a\0b")


# Damage of any kind


BASES = {
    "zip": saved(
        {"state": {0: {"v": torch.arange(6.0).reshape(2, 3), "step": np.float64(3)}}, "groups": [{"lr": 0.1}]}
    ),
    "legacy": saved({"v": torch.arange(6.0), "w": torch.ones(2).half()}, _use_new_zipfile_serialization=False),
    "plain": pickle.dumps({"v": torch.arange(6.0), "s": {1, 2}, "n": np.arange(3)}, 4),
    "metadata": (FIXTURES / "dcp.metadata").read_bytes(),
}


@pytest.mark.parametrize("name", BASES)
def test_every_truncation_is_refused(name: str) -> None:
    data = BASES[name]
    for end in range(0, len(data), max(1, len(data) // 400)):
        with pytest.raises(FileError):
            pickles.read(ByteRange.of_bytes(data[:end]))


@pytest.mark.parametrize("sample", ["adamw.pt", "zero2_optim_states.pt", "training_args.bin"])
def test_truncated_samples_are_refused(sample: str) -> None:
    data = (FIXTURES / sample).read_bytes()
    for end in range(0, len(data), 100):
        with pytest.raises(FileError):
            pickles.read(ByteRange.of_bytes(data[:end]))


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_random_bytes_never_surprise(data: bytes) -> None:
    for attempt in (lambda: pickles.unpickle(data), lambda: pickles.read(ByteRange.of_bytes(b"\x80\x02" + data))):
        with contextlib.suppress(SquisherError):
            attempt()


@pytest.mark.parametrize("name", BASES)
def test_flipped_bytes_never_surprise(name: str) -> None:
    source, data = random.Random(0), BASES[name]
    for _ in range(300):
        broken = bytearray(data)
        for _ in range(source.choice((1, 1, 3, 8))):
            broken[source.randrange(len(broken))] = source.randrange(256)
        with contextlib.suppress(SquisherError):
            pickles.read(ByteRange.of_bytes(bytes(broken)))
