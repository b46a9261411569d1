"""The data sets, as the usual places give them: embedded digits, MNIST (IDX), CIFAR (binary), text tasks (JSON lines)."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import struct
import tarfile
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["Labelled", "augmented", "cifar", "cifar100_features", "digits", "mnist", "shuffled", "text_task"]

MNIST_ADDRESS = "https://ossci-datasets.s3.amazonaws.com/mnist/"
MNIST_FILES = {  # MD5 of the archives, as everyone quotes them
    "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
}


CIFAR_ADDRESS = "https://www.cs.toronto.edu/~kriz/"
CIFAR_FILES = {  # folder in the archive: the archive, its MD5 as its page has it
    "cifar-10-batches-bin": ("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),
    "cifar-100-binary": ("cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),
}


class Labelled(NamedTuple):
    """Inputs and labels, one row an example."""

    inputs: Tensor
    labels: Tensor

    def __getitem__(self, rows: Any) -> Labelled:  # type: ignore[override]
        """Return the rows asked for; a tensor, a slice or a mask."""
        return Labelled(self.inputs[rows], self.labels[rows])

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, size: int) -> list[tuple[Tensor, Tensor]]:
        """Return batches in order; the last may be smaller."""
        return list(zip(self.inputs.split(size), self.labels.split(size), strict=True))


def shuffled(count: int, size: int, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
    """Return the rows of one epoch in batches, in a random order, without a smaller last batch."""
    return torch.randperm(count, generator=generator)[: count // size * size].split(size)


def augmented(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return the images shifted by up to four pixels (with zeros), half of them mirrored."""
    count, _, height, width = images.shape
    padded = torch.nn.functional.pad(images, (4, 4, 4, 4))
    down, right = torch.randint(0, 9, (2, count, 1), generator=generator)
    rows = down + torch.arange(height)
    columns = right + torch.arange(width)
    flip = torch.rand(count, 1, generator=generator) < 0.5
    columns = torch.where(flip, columns.flip(1), columns)
    return padded[torch.arange(count).view(-1, 1, 1), :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def digits() -> tuple[Labelled, Labelled]:
    """Return handwritten digits, 8×8, values 0 to 1, that ship with scikit-learn: 1,437 to train on and 360 to test on."""
    from sklearn.datasets import load_digits

    data = load_digits()
    whole = Labelled(torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target))
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))
    return whole[order[:1437]], whole[order[1437:]]


def mnist(folder: Path) -> tuple[Labelled, Labelled]:
    """Return MNIST, values 0 to 1, images as vectors of 784: 60,000 to train on and 10,000 to test on."""
    out = []
    for part in ("train", "t10k"):
        images = _idx(folder, f"{part}-images-idx3-ubyte").flatten(1).float() / 255
        out.append(Labelled(images, _idx(folder, f"{part}-labels-idx1-ubyte").long()))
    return out[0], out[1]


def cifar(folder: Path, classes: int) -> tuple[Labelled, Labelled]:
    """Return CIFAR-10 or CIFAR-100 (fine labels) in the official binary layout, values −1 to 1, as (n, 3, 32, 32)."""
    name, first, labels = (
        ("cifar-10-batches-bin", "data_batch_1.bin", 1) if classes == 10 else ("cifar-100-binary", "train.bin", 2)
    )
    place = folder / name if (folder / name).exists() else folder
    if not (place / first).exists():
        place = _cifar_downloaded(folder, name)
    training = sorted(place.glob("data_batch_*.bin")) if classes == 10 else [place / "train.bin"]
    test = [place / ("test_batch.bin" if classes == 10 else "test.bin")]
    return _cifar_rows(training, labels), _cifar_rows(test, labels)


def cifar100_features(folder: Path) -> tuple[Labelled, Labelled]:
    """Return CIFAR-100 as the outputs of a frozen stack of five convolutions trained on CIFAR-10: vectors of 1,024.

    The stack is the one that van de Ven et al. ship; `cifar10_conv/conv.safetensors` has its weights under their own names.
    Images are normalised as there (the stack's own running means agree with that).
    """
    from safetensors.torch import load_file

    path = folder / "cifar10_conv" / "conv.safetensors"
    if not path.exists():
        raise SystemExit(
            f"There is no {path.parent.name}/{path.name} in {folder}: the frozen layers of split CIFAR-100."
        )
    weights = load_file(path)
    centre = torch.tensor([0.5071, 0.4865, 0.4409]).view(3, 1, 1)
    spread = torch.tensor([0.2673, 0.2564, 0.2761]).view(3, 1, 1)
    return tuple(  # type: ignore[return-value]
        Labelled(
            torch.cat([_convolved(weights, ((x + 1) / 2 - centre) / spread) for x in part.inputs.split(500)]),
            part.labels,
        )
        for part in cifar(folder, 100)
    )


@torch.no_grad()
def _convolved(weights: dict[str, Tensor], images: Tensor) -> Tensor:
    for number, stride in enumerate((1, 2, 2, 2, 2), 1):
        layer = f"convLayer{number}"
        kernel, bias = weights[f"{layer}.conv.weight"], weights[f"{layer}.conv.bias"]
        images = torch.nn.functional.conv2d(images, kernel, bias, stride, padding=1)
        if number < 5:  # the last one is bare
            mean, variance, scale, shift = (
                weights[f"{layer}.bn.{name}"] for name in ("running_mean", "running_var", "weight", "bias")
            )
            images = torch.nn.functional.batch_norm(images, mean, variance, scale, shift).relu()
    return images.flatten(1)


def text_task(folder: Path, name: str, part: str) -> list[dict[str, Any]]:
    """Return the rows of one text task: `part` is "train" or "eval"; {text_a[, text_b], label} each."""
    path = folder / name / f"{part}.jsonl.gz"
    if not path.exists():
        raise SystemExit(f"There is no {path.name} for the task {name}; --data needs text/{name}/{part}.jsonl.gz.")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _idx(folder: Path, name: str) -> Tensor:
    found = next((path for path in (folder / name, folder / f"{name}.gz") if path.exists()), None)
    data = _download(folder, name) if found is None else found.read_bytes()
    if found is None or found.suffix == ".gz":
        data = gzip.decompress(data)
    rank = data[3]
    shape = struct.unpack(f">{rank}I", data[4 : 4 + 4 * rank])
    return torch.frombuffer(bytearray(data[4 + 4 * rank :]), dtype=torch.uint8).view(shape)


def _download(folder: Path, name: str) -> bytes:
    data = _fetched(f"{MNIST_ADDRESS}{name}.gz", MNIST_FILES[name], f"{name}[.gz]", folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.gz").write_bytes(data)
    return data


def _cifar_downloaded(folder: Path, name: str) -> Path:
    archive, checksum = CIFAR_FILES[name]
    data = _fetched(f"{CIFAR_ADDRESS}{archive}", checksum, f"{name}/ in CIFAR's official binary layout", folder)
    out = folder / name
    out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(data)) as members:
        for member in members:
            content = members.extractfile(member) if member.name.endswith(".bin") else None
            if content is not None:
                (out / Path(member.name).name).write_bytes(content.read())  # the name alone: no path from the archive
    return out


def _fetched(address: str, checksum: str, what: str, folder: Path) -> bytes:
    """Return the bytes at an address; refuse any but the known ones."""
    try:
        with urllib.request.urlopen(address, timeout=60) as answer:
            data = answer.read()
    except OSError as error:
        raise SystemExit(f"There is no {what} in {folder}, and it could not be downloaded ({error}).") from error
    if hashlib.md5(data, usedforsecurity=False).hexdigest() != checksum:
        raise SystemExit(f"What was downloaded from {address} is not the known file; put it into {folder} by hand.")
    return data


def _cifar_rows(paths: list[Path], labels: int) -> Labelled:
    rows = np.concatenate([np.fromfile(path, np.uint8).reshape(-1, labels + 3072) for path in paths])
    images = torch.from_numpy(rows[:, labels:].reshape(-1, 3, 32, 32)).float() / 127.5 - 1
    return Labelled(images, torch.from_numpy(rows[:, labels - 1].astype(np.int64)))
