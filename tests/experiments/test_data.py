"""The loaders, on small files in the official layouts."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import struct
import tarfile
import urllib.error

import numpy as np
import pytest
import torch

from experiments import data


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def test_mnist_is_read_gzipped_or_not(tmp_path):
    images = np.arange(3 * 28 * 28).reshape(3, 28, 28) % 256
    for part in ("train", "t10k"):
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(idx(images))
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.array([7, 0, 9]))))
    train, test = data.mnist(tmp_path)
    assert train.inputs.shape == (3, 784)
    assert torch.equal(train.inputs * 255, torch.tensor(images.reshape(3, 784), dtype=torch.float32))
    assert test.labels.tolist() == [7, 0, 9]


def test_what_is_missing_and_cannot_be_downloaded_is_named(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    with pytest.raises(SystemExit, match=r"There is no train-images-idx3-ubyte\[.gz\]"):
        data.mnist(tmp_path)


def test_a_download_with_another_checksum_is_refused(tmp_path, monkeypatch):
    class Answer:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def read(self):
            return b"something else"

    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: Answer())
    with pytest.raises(SystemExit, match="is not the known file"):
        data.mnist(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("classes", "folder", "labels"), [(10, "cifar-10-batches-bin", 1), (100, "cifar-100-binary", 2)]
)
def test_cifar_takes_the_fine_labels_of_the_binary_layout(tmp_path, classes, folder, labels):
    place = tmp_path / folder
    place.mkdir()
    rows = np.random.default_rng(0).integers(0, 256, (4, labels + 3072), np.uint8)
    names = ("data_batch_1.bin", "test_batch.bin") if classes == 10 else ("train.bin", "test.bin")
    for name in names:
        rows.tofile(place / name)
    train, test = data.cifar(tmp_path, classes)
    assert train.labels.tolist() == rows[:, labels - 1].tolist()
    assert test.inputs.shape == (4, 3, 32, 32)
    assert test.inputs[1, 2, 3, 4].item() == pytest.approx(rows[1, labels + 2 * 1024 + 3 * 32 + 4] / 127.5 - 1)


def test_cifar_is_downloaded_once_and_only_if_it_is_the_known_archive(tmp_path, monkeypatch):
    rows = np.random.default_rng(0).integers(0, 256, (4, 2 + 3072), np.uint8).tobytes()
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as archive:
        for name in ("cifar-100-binary/train.bin", "../../test.bin", "cifar-100-binary/fine_label_names.txt"):
            member = tarfile.TarInfo(name)
            member.size = len(rows)
            archive.addfile(member, io.BytesIO(rows))
    asked = []

    def answer(address, **_):
        asked.append(address)
        return io.BytesIO(whole.getvalue())

    monkeypatch.setattr("urllib.request.urlopen", answer)
    with pytest.raises(SystemExit, match="is not the known file"):
        data.cifar(tmp_path, 100)
    checksum = hashlib.md5(whole.getvalue(), usedforsecurity=False).hexdigest()
    monkeypatch.setitem(data.CIFAR_FILES, "cifar-100-binary", ("archive.tar.gz", checksum))
    for _ in range(2):
        train, test = data.cifar(tmp_path / "data", 100)
        assert len(train) == len(test) == 4
    assert len(asked) == 2
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert files == ["data/cifar-100-binary/test.bin", "data/cifar-100-binary/train.bin"]


def test_text_rows_and_a_missing_task(tmp_path):
    (tmp_path / "sst2").mkdir()
    with gzip.open(tmp_path / "sst2" / "train.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text_a": "fine", "label": 1}) + "\n")
    assert data.text_task(tmp_path, "sst2", "train") == [{"text_a": "fine", "label": 1}]
    with pytest.raises(SystemExit, match="text/sst2/eval.jsonl.gz"):
        data.text_task(tmp_path, "sst2", "eval")


def test_digits_are_split_once_and_for_all():
    train, test = data.digits()
    assert (len(train), len(test)) == (1437, 360)
    assert train.inputs.min() == 0
    assert train.inputs.max() == 1
    assert sum(len(labels) for _, labels in train.batches(100)) == 1437


def test_an_epoch_has_every_row_once_but_for_what_fills_no_batch():
    rows = data.shuffled(10, 3, torch.Generator().manual_seed(0))
    assert [len(batch) for batch in rows] == [3, 3, 3]
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.cat(rows), order[:9])
