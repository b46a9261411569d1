"""What making and applying a patch share: the names inside its file, and the hash of a tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from ..storage.tensors import chunks_of, dtype_of, shape_of

__all__ = ["FORMAT_VERSION", "INDICES", "VALUES", "Digest", "hash_of"]

FORMAT_VERSION = 1
INDICES, VALUES = "indices/", "values/"


class Digest:
    """The hash of one tensor: of its type, its shape and its bytes."""

    def __init__(self, tensors: Mapping[str, Tensor], name: str) -> None:
        kind = str(dtype_of(tensors, name)).removeprefix("torch.")
        self._hash = hashlib.sha256(f"{kind} {list(shape_of(tensors, name))}\n".encode())

    def add(self, piece: Tensor) -> None:
        """The next piece."""
        self._hash.update(piece.contiguous().view(torch.uint8).numpy().data)

    def text(self) -> str:
        """The hash of all pieces."""
        return "sha256:" + self._hash.hexdigest()[:40]


def hash_of(tensors: Mapping[str, Tensor], name: str) -> str:
    """The hash of a whole tensor, read in pieces."""
    digest = Digest(tensors, name)
    for piece in chunks_of(tensors, name):
        digest.add(piece)
    return digest.text()
