"""Importances to report on."""

from __future__ import annotations

from typing import Any

import torch

from squisher.importance import Importance

FACTS: dict[str, Any] = {
    "kind": "squisher",
    "optimizer": {"class": "AdamW", "key": "exp_avg_sq", "beta2": 0.999, "pollution": []},
    "steps": {"min": 300, "max": 300},
    "bias_corrected": True,
    "loss_reduction": "mean",
    "batch_size": 32,
    "unit": "example",
    "dtype_of_source": "float32",
    "naming": "recorded",
}


def tensors(layers: int = 3, seed: int = 0, classes: int = 2) -> dict[str, torch.Tensor]:
    """A small encoder: an embedding with rows that nobody used, a few layers, a head."""
    generator = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).square() * 10 ** torch.randn(*shape, generator=generator) * 1e-7

    out = {"embeddings.word.weight": some(20, 6)}
    out["embeddings.word.weight"][12:] = 0
    for k in range(layers):
        for kind, shape in (("attention.query", (6, 6)), ("attention.value", (6, 6)), ("output.dense", (6, 8))):
            out[f"encoder.layer.{k}.{kind}.weight"] = some(*shape) / (k + 1)
            out[f"encoder.layer.{k}.{kind}.bias"] = some(shape[0]) / (k + 1)
    out["classifier.weight"] = some(classes, 6)
    return out


def squisher(layers: int = 3, seed: int = 0, classes: int = 2, **changes: Any) -> Importance:
    return Importance(tensors(layers, seed, classes), **{**FACTS, **changes})
