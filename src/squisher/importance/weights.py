"""Which model an importance belongs to: hashes of names and shapes, and of the weights where they are known."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import SquisherError, SquisherWarning
from ..ranks import is_sharded, whole
from ..storage.tensors import chunks_of, dtype_of, numel_of
from .core import Importance

__all__ = ["HASHED_BYTES", "Match", "check_weights", "content_of", "match", "structure_hash"]

HASHED_BYTES = 1 << 24
"""The most bytes of a model to hash, the smallest tensors first: training changes all of them."""


def structure_hash(shapes: Mapping[str, Sequence[int]]) -> str:
    """Return a hash of parameter names and shapes: equal for two models that an importance fits alike."""
    lines = "\n".join(f"{name} {','.join(map(str, shapes[name]))}" for name in sorted(shapes))
    return "sha256:" + hashlib.sha256(lines.encode()).hexdigest()[:32]


def content_of(
    weights: Mapping[str, Tensor], names: Iterable[str] | None = None, limit: int | None = HASHED_BYTES
) -> dict[str, str]:
    """Return the hash of each weight: the first 32 hexadecimal digits of the SHA-256 of its bytes.

    For float32 and float64 the hash of the values rounded to bfloat16 follows, after a slash: it identifies a copy in bfloat16.

    Args:
        weights: Any mapping; a lazy one is read chunk by chunk.
        names: The weights to hash, where the mapping has them; by default all.
        limit: Bytes to hash, the smallest weights first; None for all.
    """
    sizes = {
        name: numel_of(weights, name) * dtype_of(weights, name).itemsize
        for name in (weights if names is None else names)
        if name in weights
    }
    found: dict[str, str] = {}
    for name in sorted(sizes, key=lambda n: (sizes[n], n)):
        if limit is not None and found and limit < sizes[name]:
            break
        types = [dtype_of(weights, name)]
        types += [torch.bfloat16] if types[0] in (torch.float32, torch.float64) else []
        digests = [hashlib.sha256() for _ in types]
        for chunk in chunks_of(_gathered(weights, name), name):
            for digest, dtype in zip(digests, types, strict=True):
                digest.update(chunk.to(dtype).contiguous().view(-1).view(torch.uint8).numpy().data)
        found[name] = "/".join(digest.hexdigest()[:32] for digest in digests)
        limit = None if limit is None else limit - sizes[name]
    return found


def _gathered(weights: Mapping[str, Tensor], name: str) -> Mapping[str, Tensor]:
    """Return a mapping whose tensor of this name is whole; all processes with a shard must call this together."""
    if isinstance(weights, dict) and is_sharded(weights[name]):
        return {name: whole(weights[name])}
    return weights


class Match(NamedTuple):
    """How an importance's hashes and a model's weights compare."""

    compared: int
    differing: tuple[str, ...]

    @property
    def same(self) -> bool | None:
        """Whether it belongs to these weights; None where nothing is known."""
        return not self.differing if self.compared else None


def match(importance: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Match:
    """Compare the hashes of the weights that an importance was made with to a model's weights."""
    record = importance.provenance.model if isinstance(importance, Importance) else None
    known = (record or {}).get("content")
    if not isinstance(known, Mapping):
        return Match(0, ())
    found = content_of(weights, known)
    same = {name: _same(known[name], digest, dtype_of(weights, name)) for name, digest in found.items()}
    return Match(
        sum(one is not None for one in same.values()), tuple(name for name, one in same.items() if one is False)
    )


def _same(known: str, found: str, dtype: torch.dtype) -> bool | None:
    """Return whether two hashes are of the same values, perhaps rounded to bfloat16; None if their types cannot be compared."""
    if ("/" in known) == ("/" in found):
        return known.partition("/")[0] == found.partition("/")[0]
    if dtype == torch.float16:  # rounded from more digits, but not to bfloat16
        return None
    return not {*known.split("/")}.isdisjoint(found.split("/"))


def check_weights(
    importances: Sequence[Mapping[str, Tensor] | None],
    models: Sequence[Mapping[str, Tensor]],
    labels: Sequence[str],
    any_weights: bool = False,
) -> None:
    """Refuse importances that belong to another of the models; warn of those that belong to none of them.

    Args:
        importances: One per model; None is not checked.
        models: The weights of each.
        labels: Names of the models for messages.
        any_weights: Whether to check nothing.

    Raises:
        SquisherError: An importance belongs to another of the models; the message says which order is right.
    """
    if any_weights:
        return
    owners: dict[int, int] = {}
    strangers: list[tuple[int, Match]] = []
    for k, importance in enumerate(importances):
        if importance is None:
            continue
        found = match(importance, models[k])
        if found.same is not False:
            continue
        owner = next((j for j, model in enumerate(models) if j != k and match(importance, model).same), None)
        if owner is None:
            strangers.append((k, found))
        else:
            owners[k] = owner
    if owners:
        listed = "; ".join(f"number {k + 1}, given for {labels[k]}, belongs to {labels[j]}" for k, j in owners.items())
        place = {owners.get(k, k): k for k in range(len(models))}  # the number of each model's importance
        order = [place[j] for j in sorted(place)] if len(place) == len(models) else []  # two may belong to one model
        right = f" The right order is: {', '.join(f'number {k + 1}' for k in order)}." if order else ""
        raise SquisherError(
            f"Importances are given for the wrong models, as the hashes of the weights show: {listed}.{right} "
            "Give them in the order of the models, or use --any-weights if this is intended."
        )
    for k, found in strangers:
        warnings.warn(
            f"The importance given for {labels[k]} was made with other weights: {len(found.differing)} of {found.compared} tensors "
            f"compared differ, {found.differing[0]} for example. It is of another checkpoint. Use --any-weights if this is intended.",
            SquisherWarning,
            stacklevel=3,
        )
