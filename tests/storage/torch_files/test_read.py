"""What is read is what torch.load reads (here on files made by the tests, or trusted samples)."""

from __future__ import annotations

import argparse
import collections
import io
import pickle
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from squisher.errors import FileError
from squisher.storage import torch_files as pickles
from squisher.storage.byte_range import ByteRange
from squisher.storage.torch_files import Array, Global, Record, StoredTensor

FIXTURES = Path(__file__).parents[2] / "fixtures" / "pickles"
SHARED = Path(__file__).parents[4] / "shared" / "checkpoints"
SUFFIXES = {".pt", ".pth", ".bin", ".ckpt", ".pkl"}
SAMPLES = sorted(path for folder in (FIXTURES, SHARED) for path in folder.rglob("*") if path.suffix in SUFFIXES)
FORMATS = {"zip": {}, "legacy": {"_use_new_zipfile_serialization": False}, "zip5": {"pickle_protocol": 5}}


class Stub:
    """Stands for classes that are not installed where the tests run."""

    def __init__(self, *args: Any) -> None:
        self.stub_args = args

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            self.__dict__.update(part or {})

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


class StubUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] in ("deepspeed", "transformers", "accelerate", "torchao"):
            return type(name, (Stub,), {"__torch_function__": None})
        return super().find_class(module, name)


def rebuild_without_subclass(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """torch's own would need the subclass; its state is compared instead."""
    if function is not torch._utils._rebuild_wrapper_subclass:
        return function(*args)
    stub = Stub()
    stub.__setstate__(state)
    return stub


def torch_load(source: Any) -> Any:
    module = types.SimpleNamespace(Unpickler=StubUnpickler, load=pickle.load, __name__="pickle")
    return torch.load(source, pickle_module=module, weights_only=False, map_location="cpu")


def assert_same(ours: Any, theirs: Any, seen: set[tuple[int, int]] | None = None) -> int:
    """Walk both; returns how many tensors were compared."""
    seen = set() if seen is None else seen
    if (id(ours), id(theirs)) in seen:
        return 0
    seen.add((id(ours), id(theirs)))
    if isinstance(theirs, torch.Tensor):
        assert isinstance(ours, StoredTensor)
        values = theirs.detach().contiguous()
        loaded = ours.load()
        assert (loaded.dtype, loaded.shape) == (values.dtype, values.shape)
        assert (ours.shape, ours.numel, ours.dtype) == (tuple(values.shape), values.numel(), values.dtype)
        assert ours.requires_grad == theirs.requires_grad
        assert ours.is_contiguous == theirs.is_contiguous()
        assert loaded.reshape(-1).view(torch.uint8).equal(values.reshape(-1).view(torch.uint8))
        return 1
    if isinstance(theirs, dict):
        assert type(ours) is dict
        assert len(ours) == len(theirs)
        return sum(
            assert_same(a, b, seen) + assert_same(ours[a], theirs[b], seen) for a, b in zip(ours, theirs, strict=True)
        )
    if isinstance(theirs, torch.Size):
        assert ours == tuple(theirs)
    elif isinstance(theirs, (list, tuple)):
        assert type(ours) is type(theirs)
        assert len(ours) == len(theirs)
        return sum(assert_same(a, b, seen) for a, b in zip(ours, theirs, strict=True))
    elif isinstance(theirs, torch.device):
        assert ours == str(theirs)
    elif isinstance(theirs, np.ndarray):
        assert isinstance(ours, Array)
        assert ours.numpy().dtype == theirs.dtype
        np.testing.assert_array_equal(ours.numpy(), theirs)
    elif isinstance(theirs, np.generic):
        assert ours == theirs.item()
        assert type(ours) is type(theirs.item())
    elif isinstance(theirs, type):
        assert isinstance(ours, Global)
        assert ours.name.endswith(theirs.__name__)
    elif isinstance(theirs, Stub):
        assert isinstance(ours, Record)
        theirs_state = dict(vars(theirs))
        assert_same(ours.args, theirs_state.pop("stub_args", ()), seen)
        return assert_same(ours.attributes, theirs_state, seen)
    else:
        assert type(ours) is type(theirs)
        assert ours == theirs
    return 0


def saved(value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: "/".join(path.parts[-3:]))
def test_samples_are_read_as_torch_does(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._tensor._rebuild_from_type_v2", rebuild_without_subclass)
    compared = assert_same(pickles.read(path), torch_load(path))
    without_tensors = {"scheduler.bin", "scheduler.pt", "training_args.bin"}
    assert compared > 0 or path.name in without_tensors or "raw_sgd" in path.parts


def test_there_are_samples() -> None:
    assert len(SAMPLES) >= 7


DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint16,
    torch.uint32,
]


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype, options: dict[str, Any]) -> None:
    value = {
        "a": torch.arange(12).reshape(3, 4).to(dtype),
        "scalar": torch.ones(()).to(dtype),
        "none": torch.zeros(0, dtype=dtype),
    }
    # with what was saved: torch.load itself fails on some of the newer dtypes in the old format
    assert assert_same(pickles.read(ByteRange.of_bytes(saved(value, **options))), value) == 3


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_views_and_shared_storages(options: dict[str, Any], tmp_path: Path) -> None:
    base = torch.randn(6, 7, 5)
    value = [
        base,
        base[2],
        base[:, 3],
        base[1:5:2, ::3],
        base.permute(2, 0, 1),
        base[3, 3, 3],
        torch.randn(1, 4).expand(3, 4),
        torch.empty(0, 3)[:, 1:],
        base.mT,
        torch.randn(1, 5, 1)[:, ::5],
    ]
    path = tmp_path / "views.pt"
    torch.save(value, path, **options)
    ours = pickles.read(path)
    assert assert_same(ours, torch_load(path)) == len(value)
    assert ours[0].storage is ours[2].storage
    assert ours[0].storage.byte_range == ours[1].storage.byte_range != ours[6].storage.byte_range


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_containers_and_scalars(options: dict[str, Any]) -> None:
    shared = [1, 2]
    value = {
        "ordered": collections.OrderedDict(b=1, a=torch.ones(2)),
        "default": collections.defaultdict(list, x=[1]),
        "set": {1, "a", None},
        "frozen": frozenset({(1, 2)}),
        "bytes": b"\x00\xff",
        "empty": b"",
        "array": bytearray(b"abc"),
        "complex": 1 + 2j,
        "big": -(2**70),
        "floats": [0.1, float("inf"), -0.0],
        "flags": (True, False, None),
        "text": "äß中😀\ud800",
        "size": torch.Size([3, 4]),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 1),
        "again": [shared, shared],
        "numpy": [
            np.float64(1.5),
            np.int32(-3),
            np.bool_(True),
            np.arange(6.0).reshape(2, 3),
            np.asfortranarray(np.eye(3)),
        ],
        5: {"nested": [({},)]},
        (1, "x"): 0,
    }
    data = saved(value, **options)
    ours = pickles.read(ByteRange.of_bytes(data))
    assert_same(ours, torch_load(io.BytesIO(data)))
    assert ours["again"][0] is ours["again"][1]


@pytest.mark.parametrize("protocol", range(6))
def test_plain_pickles_of_every_protocol(protocol: int) -> None:
    value = {
        "a": [1, 2.5, "x", None, True, 300, 70000, -1],
        "t": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
        "b": {"c": []},
    }
    assert pickles.unpickle(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", range(6))
def test_objects_become_records(protocol: int) -> None:
    value = argparse.Namespace(lr=0.1, layers=[1, 2], nested=argparse.Namespace(a=1))
    record = pickles.unpickle(pickle.dumps([value, value], protocol))
    assert record[0] is record[1]
    assert record[0].name == "argparse.Namespace"
    assert record[0].get("lr") == 0.1
    assert record[0].get("missing", 7) == 7
    assert record[0].attributes["nested"].attributes == {"a": 1}


class Numbers(list):
    pass


class Table(dict):
    pass


class Slots:
    __slots__ = ("a", "b")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_foreign_containers_keep_their_items(protocol: int) -> None:
    slots = Slots()
    slots.a, slots.b = 1, [2]
    value = [Numbers([1, 2, 3]), Table(a=1, b=2), slots, collections.deque([4, 5], 9)]
    numbers, table, slotted, deque = pickles.unpickle(pickle.dumps(value, protocol))
    assert numbers.sequence == [1, 2, 3]
    assert table.mapping == {"a": 1, "b": 2}
    assert slotted.attributes == {"a": 1, "b": [2]}
    assert deque.sequence == [4, 5]


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
def test_whole_optimizer_and_module(options: dict[str, Any]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    ours = pickles.read(ByteRange.of_bytes(saved({"optimizer": optimizer, "model": model}, **options)))
    record = ours["optimizer"]
    assert record.name == "torch.optim.adamw.AdamW"
    parameters = record.get("param_groups")[0]["params"]
    for mine, live in zip(parameters, model.parameters(), strict=True):
        assert mine.subclass == "torch.nn.parameter.Parameter"
        assert mine.requires_grad
        assert mine.load().equal(live.data)
        assert record.get("state")[mine]["exp_avg_sq"].load().equal(optimizer.state[live]["exp_avg_sq"])
    layer = ours["model"].get("_modules")["0"]
    assert layer.name == "torch.nn.modules.linear.Linear"
    assert layer.get("_parameters")["weight"].storage is parameters[0].storage


def test_parameters_buffers_and_attributes() -> None:
    plain = torch.nn.Parameter(torch.randn(3), requires_grad=False)
    marked = torch.nn.Parameter(torch.randn(2))
    marked.tag = "expert"
    tensor = torch.randn(4)
    tensor.note = [1]
    ours = pickles.read(ByteRange.of_bytes(saved([plain, marked, tensor])))
    assert [t.requires_grad for t in ours] == [False, True, False]
    assert ours[1].attributes == {"tag": "expert"}
    assert ours[2].attributes == {"note": [1]}
    assert ours[2].subclass is None


class Quantised(torch.Tensor):
    """A subclass without data of its own, as torchao and DTensor are."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Quantised:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(function)


@pytest.mark.parametrize("parameter", [False, True])
def test_wrapper_subclasses_become_records(parameter: bool) -> None:
    value = Quantised(torch.arange(6, dtype=torch.uint8), torch.ones(1))
    ours = pickles.read(ByteRange.of_bytes(saved(torch.nn.Parameter(value) if parameter else value)))
    assert ours.name.endswith("Quantised")
    assert ours.get("shape") == (6,)
    assert ours.get("dtype") is torch.float32
    assert ours.get("codes").load().tolist() == list(range(6))


def test_sparse_conjugated_and_quantised_tensors_stay_records() -> None:
    value = [torch.eye(3).to_sparse(), torch.ones(2, dtype=torch.complex64).conj()]
    sparse, conjugated = pickles.read(ByteRange.of_bytes(saved(value)))
    assert isinstance(sparse, Record)
    assert isinstance(conjugated, Record)
    assert isinstance(sparse.args[1][0], StoredTensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_saved_through_numpy(dtype: torch.dtype) -> None:
    class Device:
        def __reduce__(self) -> Any:
            array = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
            return torch._utils._rebuild_device_tensor_from_numpy, (array, dtype, "cpu", False)

    ours = pickles.unpickle(pickle.dumps(Device(), 2))
    assert ours.load().equal(torch.arange(6).reshape(2, 3).to(dtype))


@pytest.mark.parametrize("protocol", [2, 4])
def test_tensors_in_plain_pickles(protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "net.pkl"
    path.write_bytes(pickle.dumps({"w": torch.arange(5.0), "b": torch.ones(2, dtype=torch.bfloat16)}, protocol))
    ours = pickles.read(path)
    assert ours["w"].load().tolist() == [0, 1, 2, 3, 4]
    assert ours["b"].load().dtype is torch.bfloat16


def test_byte_ranges_and_pieces(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    value = torch.randn(40, 5)
    torch.save({"view": value[7:30], "columns": value[:, 1:]}, path)
    ours = pickles.read(path)
    view, columns = ours["view"], ours["columns"]
    place = view.byte_range()
    offset, length = place.offset, place.length
    assert path.read_bytes()[offset : offset + length] == value[7:30].numpy().tobytes()
    assert view.read_flat(11, 20).equal(value[7:30].reshape(-1)[11:20])
    assert view.read_flat(5, 5).shape == (0,)
    with pytest.raises(ValueError, match="elements 0 to 116"):
        view.read_flat(0, 116)
    with pytest.raises(ValueError, match="contiguous"):
        columns.byte_range()
    with pytest.raises(ValueError, match="contiguous"):
        columns.read_flat(0, 1)


def test_a_torch_file_inside_a_zip_or_a_shard(tmp_path: Path) -> None:
    inner = saved({"v": torch.arange(4.0)})
    outer = tmp_path / "model.zip"
    with zipfile.ZipFile(outer, "w") as archive:
        archive.writestr("note.txt", "x" * 99, compress_type=zipfile.ZIP_DEFLATED)
        archive.writestr("policy.optimizer.pth", inner)
    entries = pickles.zip_entries(outer)
    assert set(entries) == {"policy.optimizer.pth"}
    assert pickles.read(entries["policy.optimizer.pth"])["v"].load().tolist() == [0, 1, 2, 3]
    with zipfile.ZipFile(entries["policy.optimizer.pth"].open()) as archive:
        assert any(name.endswith("data.pkl") for name in archive.namelist())
    legacy = saved({"v": torch.arange(4.0)}, _use_new_zipfile_serialization=False)
    shard = tmp_path / "__0_0.distcp"
    shard.write_bytes(b"junk" + inner + legacy + b"junk")
    whole = ByteRange.of(shard)
    for part in (whole.part(4, len(inner)), whole.part(4 + len(inner), len(legacy))):
        assert pickles.read(part)["v"].load().tolist() == [0, 1, 2, 3]


def test_stable_baselines_sample() -> None:
    entries = pickles.zip_entries(FIXTURES / "sb3_ppo.zip")
    state = pickles.read(entries["policy.optimizer.pth"])
    assert state["state"][0]["exp_avg_sq"].load().min() >= 0


def test_distributed_metadata_sample() -> None:
    metadata = pickles.unpickle((FIXTURES / "dcp.metadata").read_bytes())
    assert metadata.name == "torch.distributed.checkpoint.metadata.Metadata"
    tensors = metadata.get("state_dict_metadata")
    assert tensors["model.emb.weight"].get("size") == (21, 15)
    index, info = next(iter(metadata.get("storage_data").items()))
    assert index.get("fqn") in tensors
    assert info.get("relative_path").endswith(".distcp")


def test_training_arguments_sample() -> None:
    arguments = pickles.read(FIXTURES / "training_args.bin")
    assert arguments.name == "transformers.training_args.TrainingArguments"
    assert arguments.get("per_device_train_batch_size") == 8
    assert arguments.get("save_strategy").args == ("steps",)


def test_a_deflated_pickle_is_read_but_deflated_storages_are_not(tmp_path: Path) -> None:
    source = zipfile.ZipFile(io.BytesIO(saved({"a": 1, "v": torch.arange(64.0)})))
    for storages, readable in ((zipfile.ZIP_STORED, True), (zipfile.ZIP_DEFLATED, False)):
        path = tmp_path / f"{readable}.pt"
        with zipfile.ZipFile(path, "w") as archive:
            for name in source.namelist():
                archive.writestr(name, source.read(name), storages if "/data/" in name else zipfile.ZIP_DEFLATED)
        if readable:
            assert pickles.read(path)["v"].load().tolist() == list(range(64))
        else:
            with pytest.raises(FileError, match="compressed"):
                pickles.read(path)


def test_checksums_find_flipped_bits(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    torch.save(torch.arange(1000.0), path)
    tensor = pickles.read(path)
    tensor.storage.verify()
    data = bytearray(path.read_bytes())
    data[tensor.byte_range().offset + 123] ^= 4
    path.write_bytes(data)
    with pytest.raises(FileError, match="checksum"):
        pickles.read(path).storage.verify()


def test_archives_beyond_four_gigabytes(tmp_path: Path) -> None:
    path = tmp_path / "huge.pt"
    content = zipfile.ZipFile(io.BytesIO(saved(torch.arange(3.0))))
    with zipfile.ZipFile(path, "w") as archive:
        prefix = content.namelist()[0].split("/")[0]
        start = archive.fp.tell()
        info = zipfile.ZipInfo(f"{prefix}/padding")
        with archive.open(info, "w", force_zip64=True) as entry:
            entry.write(b"\0")
        # a hole of 5 GB: sparse, it takes no room on the disk
        archive.start_dir = start + (5 << 30)
        for name in content.namelist():
            archive.writestr(name, content.read(name))
    tensor = pickles.read(path)
    assert tensor.byte_range().offset > 5 << 30
    assert tensor.load().tolist() == [0, 1, 2]
