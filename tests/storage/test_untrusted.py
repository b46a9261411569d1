"""Files and paths that nobody vouches for: one sentence, soon, and never a raw exception."""

import contextlib
import json
import os
import struct
import subprocess
import sys

import pytest
import torch

import squisher
from squisher import patch
from squisher.errors import FileError, NamingError, SquisherError
from squisher.integrations import mergekit
from squisher.integrations.model_folders import merge_folders
from squisher.storage import hdf5_probe, json_files, safetensors
from squisher.storage.byte_range import ByteRange
from squisher.storage.folders import open_model, open_weights, write_model
from squisher.storage.torch_files import read, unpickle

DIGITS = "9" * 5000  # Python refuses to convert more than 4,300


def with_header(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype="F32", shape="[1]", offsets="[0,4]"):
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'


@pytest.mark.parametrize(
    "header",
    [
        f'{{"w":{entry(shape=f"[{DIGITS}]")}}}',
        f'{{"w":{entry(offsets=f"[0,{DIGITS}]")}}}',
        f'{{"w":{entry(offsets=f"[-{DIGITS[:4000]},{DIGITS[:4000]}]")}}}',
        f'{{"w":{entry(shape=f"[{DIGITS[:4000]}]")}}}',
        f'{{"w":{entry(shape="[1e0]")}}}',
        f'{{"w":{entry(shape="[true]")}}}',
        f'{{"w":{entry(shape="1")}}}',
        f'{{"w":{entry(shape="[" * 5000 + "]" * 5000)}}}',
        f'{{"w":{entry()},"w":{entry()}}}',
        f'{{"__metadata__":{{"a":1}},"w":{entry()}}}',
        f'{{"__metadata__":{{"a":"1","a":"2"}},"w":{entry()}}}',
        f'{{"":{entry()}}}',
        f'{{"\\ud800":{entry()}}}',
        f'{{"w":{entry(dtype="F31")}}}',
        '{"w":[]}',
        "[]",
        "[" * 100_000,
        "{" * 100_000,
        '{"w":NaN}',
        "\ufeff{}",
    ],
)
def test_headers_of_safetensors_files(tmp_path, header):
    path = with_header(tmp_path / "x.safetensors", header.encode(), bytes(4))
    for opened in (safetensors.open_safetensors, squisher.load, open_model):
        with pytest.raises((FileError, NamingError)):
            opened(path)


@pytest.mark.parametrize(
    "text",
    [DIGITS, f'{{"batch_size": {DIGITS}}}', "[]", '"x"', "{", "[" * 100_000, '{"format_version": 1e999}', "null"],
)
def test_provenances(tmp_path, text):
    header = {"__metadata__": {"squisher": text}, "w": json.loads(entry())}
    with pytest.raises(SquisherError):
        squisher.load(with_header(tmp_path / "x.safetensors", header, bytes(4)))


@pytest.mark.parametrize(
    "key", ["batch_size", "examples", "batch_tokens", "scale", "format_version", "kind", "absent", "naming", "sum"]
)
@pytest.mark.parametrize(
    "value", ["9" * 4000, "-1", "[[]]", '{"a": {"b": []}}', '"\\ud800"', "1e400", "true", '"' + "x" * 100_000 + '"']
)
def test_fields_of_a_provenance(tmp_path, key, value):
    text = f'{{"kind": "squisher", "format_version": 1, "{key}": {value}}}'
    header = {"__metadata__": {"squisher": text}, "w": json.loads(entry())}
    path = with_header(tmp_path / "x.safetensors", header, struct.pack("<f", 1.0))
    try:
        importance = squisher.load(path)
        repr(importance)
        importance.as_fisher()
        importance.save(tmp_path / "y.safetensors")
    except SquisherError:
        pass


@pytest.mark.parametrize(
    "index",
    [
        {"weight_map": {"a": "../model.safetensors"}},
        {"weight_map": {"a": "/etc/passwd"}},
        {"weight_map": {"a": "sub/x.safetensors"}},
        {"weight_map": {"a": "."}},
        {"weight_map": {"a": ""}},
        {"weight_map": {"a": "x\0y"}},
        {"weight_map": {"a": "\ud800"}},
        {"weight_map": {"a": "x" * 5000}},
        {"weight_map": {"a": ["x"]}},
        {"weight_map": []},
        {"weight_map": {}, "metadata": 3},
        3,
    ],
)
@pytest.mark.parametrize("name", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_an_index_that_leads_elsewhere(tmp_path, index, name):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "sub").mkdir()
    for place in (tmp_path / "model.safetensors", folder / "sub" / "x.safetensors"):
        safetensors.save(place, {"a": torch.zeros(2)}, None)
    (folder / name).write_text(json.dumps(index))
    if index == {"weight_map": {}, "metadata": 3}:
        assert len(open_model(folder).weights) == 0
        return
    with pytest.raises(SquisherError):
        open_model(folder)


def test_saving_beside_a_model_removes_nothing_but_old_shards(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("x")
    folder = tmp_path / "model"
    (folder / "squisher-").mkdir(parents=True)
    (folder / "squisher-00009-of-00009.safetensors").symlink_to(precious)
    (folder / "squisher-other.safetensors").write_text("x")
    (folder / "squisher-00001-of-00002.safetensors").write_text("old")
    shards = ["squisher-/../../precious", str(precious), "squisher-00009-of-00009.safetensors", "squisher-other.safetensors",
              "squisher-00001-of-00002.safetensors", "squisher-\0", 3]  # fmt: skip
    (folder / "squisher.safetensors.index.json").write_text(
        json.dumps({"weight_map": {str(k): shard for k, shard in enumerate(shards)}})
    )
    squisher.Importance({"w": torch.ones(3)}, "fisher").save(folder / "squisher.safetensors")
    assert precious.read_text() == "x"
    assert sorted(p.name for p in folder.iterdir()) == [
        "squisher-", "squisher-00009-of-00009.safetensors", "squisher-other.safetensors", "squisher.safetensors",
    ]  # fmt: skip
    assert squisher.load(folder)["w"].tolist() == [1, 1, 1]


def test_opening_a_folder_imports_no_reader_of_optimizer_states(tmp_path):
    write_model(tmp_path / "m", {"w": torch.zeros(2)})
    code = "import sys; from squisher.storage.folders import open_model; open_model(sys.argv[1]); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "m"], capture_output=True, text=True, check=True)
    ours = {name for name in done.stdout.split() if name.startswith("squisher.")}
    assert ours <= {"squisher.errors", "squisher.ranks"} | {
        name for name in ours if name.startswith("squisher.storage")
    }


READERS = {
    "load": squisher.load,
    "extract": squisher.extract,
    "open_model": open_model,
    "open_safetensors": safetensors.open_safetensors,
    "read_json": json_files.read_json,
    "mask": squisher.mask.load,
    "patch": lambda path: patch.apply({"w": torch.zeros(2)}, path),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "suffix", ["", ".safetensors", ".pt", ".safetensors.index.json", ".keras", ".msgpack", ".zip", ".ckpt"]
)
def test_pipes_and_devices_are_not_waited_for(tmp_path, reader, suffix):
    pipe = tmp_path / f"x{suffix}"
    os.mkfifo(pipe)
    with pytest.raises(SquisherError):
        READERS[reader](pipe)
    pipe.unlink()
    pipe.symlink_to("/dev/zero")
    with pytest.raises(SquisherError):
        READERS[reader](pipe)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", ["x" * 300, "x/" * 3000, "nul\0", "\ud800", "", "loop"])
def test_names_that_no_file_has(tmp_path, monkeypatch, reader, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    for path in (name, f"{name}.safetensors"):
        with pytest.raises(SquisherError) as caught:
            READERS[reader](path)
        assert len(str(caught.value)) < 2000
        str(caught.value).encode()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "pytorch_model.bin", "adapter_model.bin"])
def test_pipes_inside_a_folder(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(SquisherError):
        open_model(tmp_path)
    with pytest.raises(SquisherError):
        squisher.extract(tmp_path)


@pytest.mark.parametrize("config", ["[]", "3", '"x"', "{", "null", "[" * 100_000, DIGITS])
def test_odd_configurations(tmp_path, config):
    write_model(tmp_path / "m", {"w": torch.zeros(2)})
    (tmp_path / "m" / "config.json").write_text(config)
    with pytest.raises(FileError):
        open_model(tmp_path / "m")


@pytest.mark.parametrize(
    "quantized", [[], {}, None, 0, "", [1], {"a": 1}, "bnb", 3, {"quant_method": []}, {"quant_method": "x" * 9999}]
)
def test_odd_quantization_configs(tmp_path, quantized):
    write_model(tmp_path / "m", {"w": torch.zeros(2)})
    (tmp_path / "m" / "config.json").write_text(json.dumps({"quantization_config": quantized}))
    if not quantized:
        assert list(open_model(tmp_path / "m").weights) == ["w"]
        return
    with pytest.raises(SquisherError, match="quantised") as caught:
        open_model(tmp_path / "m")
    assert len(str(caught.value)) < 1000


ADAPTERS = ["[]", "3", "{", DIGITS, "[" * 100_000, "{}", '{"peft_type": []}', '{"peft_type": "LORA"}', '{"peft_type": "LORA", "r": "x"}',
            '{"peft_type": "LORA", "r": {}, "lora_alpha": [], "target_modules": 3, "rank_pattern": []}',
            '{"peft_type": "LORA", "r": 0, "lora_alpha": null, "alpha_pattern": {"a": "b"}}']  # fmt: skip


@pytest.mark.parametrize("config", ADAPTERS)
def test_odd_adapter_configurations(tmp_path, config):
    folder = tmp_path / "adapter"
    tensors = {f"base_model.model.w.lora_{ab}.weight": torch.ones(2, 2) for ab in "AB"}
    folder.mkdir()
    safetensors.save(folder / "adapter_model.safetensors", tensors, None)
    (folder / "adapter_config.json").write_text(config)
    torch.save({"state": {}, "param_groups": [{"params": [0, 1]}]}, folder / "optimizer.pt")
    write_model(tmp_path / "base", {"w.weight": torch.ones(2, 2)})
    for use in (
        lambda: squisher.extract(folder),
        lambda: merge_folders("average", [folder, folder], tmp_path / "out", base=tmp_path / "base"),
    ):
        with contextlib.suppress(SquisherError):
            use()


def test_a_torch_file_of_anything_is_no_weight_file(tmp_path):
    for k, content in enumerate([{}, [], {"a": 1}, None, 3, torch.zeros(3)]):
        torch.save(content, tmp_path / f"{k}.bin")
        with pytest.raises(SquisherError):
            open_weights(tmp_path / f"{k}.bin")


def bomb(levels, width):
    lines = ["a0: &a0 x"]
    lines += [f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * width)}]" for k in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize("source", [bomb(10, 10), "a: &a [*a]", "x" * 2_000_000, "[" * 100_000, "- " * 5000 + "x"])
def test_mergekit_configurations_that_stand_for_more_than_they_say(source):
    yaml = pytest.importorskip("yaml")
    with pytest.raises((ValueError, RecursionError, yaml.YAMLError)):
        mergekit._check_yaml(source, yaml)


def test_aliases_in_a_mergekit_configuration():
    yaml = pytest.importorskip("yaml")
    mergekit._check_yaml(
        "base: &b {weight: 1}\nmodels:\n- {model: a, parameters: *b}\n- {model: b, parameters: *b}", yaml
    )


@pytest.mark.parametrize(
    "opcodes",
    [
        b"\x94" * 6_000_000,
        b"}" * 6_000_000,
        b"(" * 200_000,
        b"]\x94" * 3_000_000,
        b"q\x01" * 3_000_000 + b"\x94" * 5_100_000,
    ],
)
def test_a_pickle_may_not_fill_the_memory(opcodes):
    with pytest.raises(FileError, match="more than"):
        unpickle(b"\x80\x04N" + opcodes + b".")


def test_a_zip_archive_of_very_many_entries(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"a": torch.zeros(3)}, path)
    data = path.read_bytes()
    end = data.rfind(b"PK\x05\x06")
    locator = data.rfind(b"PK\x06\x06", 0, end)
    count = (600_000).to_bytes(8, "little")
    path.write_bytes(data[: locator + 24] + count + count + data[locator + 40 :])
    with pytest.raises(FileError, match="too long"):
        read(path)


@pytest.mark.parametrize("kind", ["external", "soft", "crash", "memory"])
def test_hdf5_files_are_looked_at_by_another_process_first(tmp_path, kind):
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "x.h5"
    os.mkfifo(tmp_path / "pipe")
    with h5py.File(path, "w") as file:
        file["w"] = [1.0, 2.0]
        if kind == "external":
            file["optimizer"] = h5py.ExternalLink(str(tmp_path / "pipe"), "w")
        elif kind == "soft":
            file["optimizer"] = h5py.SoftLink("/w")
        elif kind == "memory":
            file.create_dataset("big", (1 << 24,), "u1", chunks=(1 << 24,))[:] = 1
    if kind in ("external", "soft"):
        with pytest.raises(FileError, match="link to elsewhere"):
            squisher.extract(path)
    elif kind == "crash":
        path.write_bytes(path.read_bytes()[:-64])
        with pytest.raises(FileError, match="damaged"):
            hdf5_probe.probe(ByteRange.of(path))
    else:
        hdf5_probe.probe(ByteRange.of(path))
        with pytest.raises(FileError, match="damaged"):
            hdf5_probe.probe(ByteRange.of(path), memory=1 << 23)


def unusual(kind):
    return {
        "float8": torch.ones(4).to(torch.float8_e4m3fn),
        "sparse": torch.ones(2, 2).to_sparse(),
        "csr": torch.ones(2, 2).to_sparse_csr(),
        "meta": torch.ones(4, device="meta"),
        "quantised": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
        "complex": torch.ones(4, dtype=torch.complex64),
        "integer": torch.ones(4, dtype=torch.int32),
        "boolean": torch.ones(4, dtype=torch.bool),
        "unsigned": torch.ones(4, dtype=torch.uint64),
        "float16": torch.ones(4, dtype=torch.float16),
        "not a tensor": [1.0, 2.0],
    }[kind]


KINDS = [
    "float8",
    "sparse",
    "csr",
    "meta",
    "quantised",
    "complex",
    "integer",
    "boolean",
    "unsigned",
    "float16",
    "not a tensor",
]


def outcome(use, kind):
    """What a function makes of an unusual importance: None where it refuses it by name."""
    try:
        return use({"w": unusual(kind)})
    except SquisherError as error:
        return None if "'w'" in str(error) or "float16" in str(error) else error


def written_and_read(folder):
    def use(tensors):
        squisher.Importance(tensors, "fisher").save(folder / "x.safetensors")
        return squisher.load(folder / "x.safetensors")["w"].float()

    return use


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_importances_of_unusual_tensors_are_refused(tmp_path, kind):
    weights = {"w": torch.ones(2, 2) if kind in ("sparse", "csr") else torch.ones(4)}
    assert outcome(written_and_read(tmp_path), kind) is None
    assert list(tmp_path.iterdir()) == []
    for use in (
        lambda imp: squisher.merge.fisher([weights, weights], [imp, imp])["w"],
        lambda imp: squisher.prune.weights(weights, imp, sparsity=0.5)["w"],
        lambda imp: squisher.mask.top_k(imp, 0.5)["w"],
        squisher.embed.embedding,
    ):
        assert not isinstance(outcome(use, kind), Exception)
