"""A model of real size and shape without a framework: the 22.7 million parameters of a MiniLM classifier.

Its word embeddings are 45 chunks long, and a fine-tune leaves most of them untouched: only rows of tokens that were seen move.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

import squisher

HIDDEN, LAYERS, VOCABULARY = 384, 6, 30522
SEEN = torch.arange(1000, 1064)
"""The tokens that occur in the data of a fine-tune."""


def shapes(classes: int = 2) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the weight file."""
    h = HIDDEN
    found: dict[str, tuple[int, ...]] = {
        "bert.embeddings.word_embeddings.weight": (VOCABULARY, h),
        "bert.embeddings.position_embeddings.weight": (512, h),
        "bert.embeddings.token_type_embeddings.weight": (2, h),
    }

    def linear(name: str, rows: int, columns: int) -> None:
        found.update({f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)})

    def norm(name: str) -> None:
        found.update({f"{name}.weight": (h,), f"{name}.bias": (h,)})

    norm("bert.embeddings.LayerNorm")
    for k in range(LAYERS):
        layer = f"bert.encoder.layer.{k}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            linear(f"{layer}.attention.{part}", h, h)
        norm(f"{layer}.attention.output.LayerNorm")
        linear(f"{layer}.intermediate.dense", 4 * h, h)
        linear(f"{layer}.output.dense", h, 4 * h)
        norm(f"{layer}.output.LayerNorm")
    linear("bert.pooler.dense", h, h)
    linear("classifier", classes, h)
    return found


def base() -> dict[str, Tensor]:
    """Return the weights before any fine-tune."""
    torch.manual_seed(0)
    return {name: 0.02 * torch.randn(shape) for name, shape in shapes().items()}


def tuned(seed: int, classes: int = 2) -> tuple[dict[str, Tensor], squisher.Importance]:
    """Return a fine-tune of the base and its importance: as AdamW leaves them, word embeddings that were not seen untouched."""
    weights = base()
    torch.manual_seed(seed)
    values = {}
    for name, shape in shapes(classes).items():
        if name.startswith("classifier"):
            weights[name] = 0.02 * torch.randn(shape)
        moved = torch.zeros(shape)
        if "word_embeddings" in name:
            moved[SEEN] = 1.0
        else:
            moved += 1.0
        size = 1e-10 * (30.0 if "pooler" in name else 1.0) * (1 + seed)
        values[name] = moved * torch.randn(shape).square() * size
        weights[name] = weights[name] + 1e-3 * moved * torch.randn(shape)
    facts = {"batch_size": 32, "loss_reduction": "mean", "unit": "example", "bias_corrected": True}
    return weights, squisher.Importance(values, kind="squisher", **facts)


def write(folder: Path, weights: dict[str, Tensor], importance: squisher.Importance | None = None) -> Path:
    """Write a model folder, with its importance beside the weights."""
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "bert"}')
    if importance is not None:
        importance.save(folder)
    return folder
