"""The laws that a model's gradients obey, found on a small copy of it that has random weights and sees random inputs.

Where scaling a channel up in one tensor and down in others leaves the network as it is, the sums of weight times gradient
over that channel cancel. Which tensors are tied so depends on the structure alone: it is found on a copy with few, narrow
channels, as the null space of such sums over random batches. No data, no weights of the checkpoint and no code beside it.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .hugging_face import small_model

__all__ = ["NO_HEADS", "Heads", "Law", "Reading", "derived_laws"]

_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_SMALL = {
    ("hidden_size", "d_model", "n_embd", "dim"): 32,
    ("intermediate_size", "d_ff", "n_inner", "ffn_dim", "hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim"): 44,
    ("vocab_size",): 37,
    ("embedding_size", "word_embed_proj_dim"): 32,
}
_LAYERS = 40  # more would take longer than the evidence is worth
_LENGTH = 7  # of the random inputs
_TERMS = 8  # of a law


@dataclass(frozen=True)
class Heads:
    """How the channels of attention are divided: heads of queries, heads of keys and values, channels of each."""

    queries: int
    keys: int
    channels: int


NO_HEADS = Heads(1, 1, 1)
"""For readings that take every channel alone."""


@dataclass(frozen=True)
class Reading:
    """Which channels of an axis are summed into one: each alone, the two of a rotary pair, all of a head; of one third of it.

    Attributes:
        axis: The axis whose channels are kept apart.
        fold: `plain`, `pairs` or `heads`.
        grouped: Whether heads of queries that share a head of keys are summed.
        third: Which third of a fused projection, one after the other (0, 1, 2) or in each head (3, 4, 5).
    """

    axis: int
    fold: str = "plain"
    grouped: bool = False
    third: int | None = None

    def channels(self, length: int, heads: Heads) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """Return, for each channel of the law, the channels of the axis that are summed; None where the axis has no such form."""
        own = np.arange(length)
        if self.third is not None:
            if length % 3 or (self.third > 2 and length != 3 * heads.queries * heads.channels):
                return None
            parts = own.reshape(3, -1) if self.third < 3 else own.reshape(heads.queries, 3, -1).swapaxes(0, 1)
            own = parts[self.third % 3].reshape(-1)
        if self.fold == "plain" and not self.grouped:
            return own[:, None]
        count = len(own) // heads.channels
        if len(own) % heads.channels or count not in (heads.queries, heads.keys):
            return None
        if self.grouped and (count != heads.queries or heads.keys == heads.queries):
            return None
        share = heads.queries // heads.keys if self.grouped else 1
        by_head = own.reshape(count // share, share, heads.channels)
        if self.fold == "plain":
            return by_head.swapaxes(1, 2).reshape(-1, share)
        if self.fold == "heads":
            return by_head.reshape(count // share, -1)
        halves = by_head.reshape(count // share, share, 2, heads.channels // 2)
        return np.moveaxis(halves, 3, 1).reshape(-1, 2 * share)


@dataclass(frozen=True)
class Law:
    """Channel sums that cancel: of each term, the parameter's name in the running model, how it is read, and its sign."""

    terms: Sequence[tuple[str, Reading, float]]
    heads: Heads


def derived_laws(folder: Path) -> list[Law]:
    """Return the laws of the model that a folder's config.json describes; none where no small copy can be built or run.

    Args:
        folder: With a config.json; transformers must be installed, and its own classes are all that is run.
    """
    found = small_model(folder, _shrink)
    if found is None:
        return []
    model, real = found
    own = _heads(model.config)
    if own is None or real is None:
        return []
    try:
        batches = list(_gradients(model))
    except Exception:  # a model that takes other inputs than these has no laws that we know
        return []
    weights = {name: p.detach() for name, p in model.named_parameters()}
    laws: list[Law] = []
    known: set[frozenset[str]] = set()
    for fold in ("plain", "pairs", "heads"):
        for terms in _null_laws(weights, batches, own, fold):
            members = frozenset(name for name, _, _ in terms)
            if len(members) > 1 and members not in known:
                known.add(members)
                laws.append(Law(terms, real))
    return laws


def _shrink(config: Any) -> tuple[Any, Heads | None]:
    """Return a config with the same layers, few and narrow channels, and how the real one divides its attention."""
    real, small = _heads(config), copy.deepcopy(config)
    if real is None or (getattr(config, "num_hidden_layers", 0) or 0) > _LAYERS:
        return small, None
    for names, value in _SMALL.items():
        for name in names:
            if isinstance(getattr(small, name, None), int):
                setattr(small, name, value)
    keys = 4 if real.keys == real.queries else 1 if real.keys == 1 else 2
    for name in (*_HEADS, "encoder_attention_heads", "decoder_attention_heads"):
        if isinstance(getattr(small, name, None), int):
            setattr(small, name, 4)
    if isinstance(getattr(small, "num_key_value_heads", None), int):
        small.num_key_value_heads = keys
    for name in ("head_dim", "d_kv"):
        if isinstance(getattr(small, name, None), int):
            setattr(small, name, 8)
    if isinstance(getattr(small, "image_size", None), int) and isinstance(getattr(small, "patch_size", None), int):
        small.image_size, small.patch_size = 8, 4
    return small, real


def _heads(config: Any) -> Heads | None:
    queries = next((n for name in _HEADS if isinstance(n := getattr(config, name, None), int)), None)
    width = next((n for name in ("hidden_size", "d_model", "n_embd") if isinstance(n := getattr(config, name, None), int)), None)  # fmt: skip
    if not queries or not width:
        return None
    given = [n for name in ("head_dim", "d_kv") if isinstance(n := getattr(config, name, None), int)]
    keys = getattr(config, "num_key_value_heads", None) or queries
    return Heads(queries, keys, given[0] if given else width // queries)


def _gradients(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield gradients for random inputs, and for random weights: at the start, biases are zero and norms one."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    model.double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(draw(*p.shape) * (0.5 if p.ndim < 2 else p.shape[-1] ** -0.5) + (1.0 if p.ndim < 2 else 0.0))
    config: Any = model.config
    tokens = lambda: torch.randint(5, 37, (2, _LENGTH), generator=generator)  # noqa: E731
    count = 12 + 2 * sum(p.ndim for p in model.parameters()) // 32
    for _ in range(count):
        if getattr(model, "main_input_name", "input_ids") == "pixel_values":
            inputs = {"pixel_values": draw(2, config.num_channels, 8, 8)}
        else:
            inputs = {"input_ids": tokens()}
        if getattr(config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = tokens()
        model.zero_grad()
        out = model(**inputs)
        logits = out.logits if hasattr(out, "logits") else out[0]
        (logits.log_softmax(-1) * draw(*logits.shape)).sum().backward()
        yield {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _readings(shape: Sequence[int], heads: Heads, fold: str) -> Iterator[tuple[Reading, Any]]:
    for axis, length in enumerate(shape[:2]):
        for grouped in (False, True):
            for third in (None, 0, 1, 2, 3, 4, 5) if len(shape) <= 2 else (None,):
                reading = Reading(axis, fold, grouped, third)
                channels = reading.channels(length, heads)
                if channels is not None:
                    yield reading, torch.from_numpy(channels)


def _null_laws(
    weights: Mapping[str, Tensor], batches: Sequence[Mapping[str, Tensor]], heads: Heads, fold: str
) -> Iterator[list[tuple[str, Reading, float]]]:
    """Yield the laws over the channels of one fold: sparse rows of the null space, with coefficients of plus and minus one."""
    vectors: dict[int, dict[tuple[str, Reading], Tensor]] = defaultdict(dict)
    for name, weight in weights.items():
        if not all(name in batch for batch in batches):  # an expert that a batch left out
            continue
        products = [weight * batch[name] for batch in batches]
        for reading, channels in _readings(weight.shape, heads, fold):
            others = [a for a in range(weight.ndim) if a != reading.axis]
            sums = [p.sum(others)[channels].sum(1) if others else p[channels].sum(1) for p in products]
            vectors[len(channels)][name, reading] = torch.cat(sums)
    for own in vectors.values():
        keys = [key for key, v in own.items() if float(v.norm()) > 1e-9]
        if len(keys) < 2:
            continue
        stacked = torch.stack([own[key] for key in keys])
        norms = stacked.norm(dim=1)
        if stacked.shape[1] <= len(keys):
            continue
        u, s, _ = torch.linalg.svd(stacked / norms[:, None], full_matrices=False)
        null = u[:, s < 1e-8 * s[0]].T / norms
        for row in _reduced(null):
            terms = [(name, reading, float(c)) for (name, reading), c in zip(keys, row, strict=True) if abs(c) > 1e-4]
            if len(terms) <= _TERMS and all(abs(abs(c) - 1) < 1e-3 for _, _, c in terms):
                yield [(name, reading, float(round(c))) for name, reading, c in terms]


def _reduced(rows: Tensor) -> Tensor:
    """Return the rows after elimination: the sparsest form that they have in the order of the columns."""
    a, row = rows / rows.abs().max() if len(rows) else rows, 0
    a = a.clone()
    for column in range(a.shape[1] if len(a) else 0):
        if row == len(a):
            break
        best = row + int(a[row:, column].abs().argmax())
        if float(a[best, column].abs()) < 1e-6:
            continue
        a[[row, best]] = a[[best, row]]
        a[row] /= a[row, column].clone()
        others = torch.arange(len(a)) != row
        a[others] -= a[others, column, None] * a[row]
        row += 1
    return a
