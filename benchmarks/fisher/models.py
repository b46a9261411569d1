"""The models of the benchmark, in plain torch, so that every peer gets the same one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["CASES", "Case"]


class Block(nn.Module):
    """A residual block of a ResNet."""

    def __init__(self, inside: int, outside: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside)
        self.conv2, self.bn2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside)
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()
        self.shortcut = nn.Sequential()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        """Apply two convolutions and a shortcut."""
        y = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        return self.relu2(y + self.shortcut(x))


def resnet(width: int = 64, blocks: tuple[int, ...] = (2, 2, 2, 2)) -> nn.Module:
    """Return ResNet-18 for 32×32 images (11.2M parameters), or a narrower one."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inside = width
    for stage, count in enumerate(blocks):
        for number in range(count):
            outside = width * 2**stage
            layers.append(Block(inside, outside, 2 if number == 0 and stage > 0 else 1))
            inside = outside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 10))


class Attention(nn.Module):
    """Self-attention with one projection each."""

    def __init__(self, width: int, heads: int, causal: bool):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.o, self.heads, self.causal = nn.Linear(width, width), heads, causal

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention within each sequence."""
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A transformer layer: norm last as in BERT, or first as in GPT."""

    def __init__(self, width: int, heads: int, causal: bool):
        super().__init__()
        self.attention, self.causal = Attention(width, heads, causal), causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention and a two-layer network, each with a residual."""
        if self.causal:
            x = x + self.attention(self.norm1(x))
            return x + self.down(F.gelu(self.up(self.norm2(x))))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Transformer(nn.Module):
    """A BERT-type classifier, or a GPT-type language model with tied embeddings; positions are broadcast over the batch."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, length: int, classes: int | None):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads, classes is None) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes if classes is not None else vocabulary, bias=classes is not None)
        self.classes = classes
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)
        if classes is None:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits of the class, or of the token at every position."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)[None])
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.head(x if self.classes is None else x[:, 0])


class Vision(nn.Module):
    """A ViT: patches of 4×4 pixels, a class token, positions that are a parameter."""

    def __init__(self, width: int, layers: int, heads: int):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.first = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 65, width) * 0.02)
        self.layers = nn.ModuleList(Layer(width, heads, False) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of the class."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 0])


@dataclass(frozen=True)
class Case:
    """One model with its data.

    Attributes:
        name: what it is called in the results.
        build: makes the model, the same every time.
        data: makes (inputs, labels) for a number of examples.
        likelihood: of `squisher.fisher`.
        examples: how many are measured.
        batch: how many at a time.
    """

    name: str
    build: Callable[[], nn.Module]
    data: Callable[[int], tuple[Tensor, Tensor]]
    likelihood: str
    examples: int
    batch: int

    def batches(self, examples: int | None = None, batch: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Return the data in batches."""
        torch.manual_seed(1)
        x, y = self.data(examples or self.examples)
        size = batch or self.batch
        return list(zip(x.split(size), y.split(size), strict=True))

    def model(self) -> nn.Module:
        """Return the model, in evaluation mode."""
        torch.manual_seed(0)
        return self.build().eval()

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of plain training, summed over examples and positions."""
        logits = model(x)
        return F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="sum")


def _mlp(width: int = 1000) -> nn.Module:
    return nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def _warm(model: nn.Module, *shape: int) -> nn.Module:
    """Give batch norms statistics that are not the initial ones."""
    model.train()
    with torch.no_grad():
        model(torch.randn(*shape))
    return model


def _text(length: int, classes: int | None, vocabulary: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    def make(examples: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(0, vocabulary, (examples, length))
        return ids, torch.randint(0, classes, (examples,)) if classes else ids.roll(-1, 1)

    return make


def cases(small: bool = False, **changes: int) -> dict[str, Case]:
    """Return the models; `small` ones only show whether everything runs; `length`, `width` and `classes` are the encoder's."""
    vocabulary, width, layers = (500, 48, 2) if small else (30522, 384, 6)
    length, width, classes = changes.get("length", 64), changes.get("width", width), changes.get("classes", 10)
    picture = lambda n: (torch.randn(n, 3, 32, 32), torch.randint(0, 10, (n,)))  # noqa: E731
    flat = lambda n: (torch.randn(n, 784), torch.randint(0, 10, (n,)))  # noqa: E731
    found = [
        Case("mlp", lambda: _mlp(100 if small else 1000), flat, "categorical", 256 if small else 4096, 128),
        Case(
            "cnn",
            lambda: _warm(resnet(8 if small else 64), 16, 3, 32, 32),
            picture,
            "categorical",
            32 if small else 128,
            32,
        ),
        Case(
            "encoder",
            lambda: Transformer(vocabulary, width, layers, 6, max(length, 128), classes),
            _text(length, classes, vocabulary),
            "categorical",
            32 if small else 128,
            16,
        ),
        Case(
            "decoder",
            lambda: Transformer(vocabulary, width, layers, 6, max(length, 128), None),
            _text(length, None, vocabulary),
            "tokens",
            16 if small else 64,
            16,
        ),
        Case("vit", lambda: Vision(width, layers, 6), picture, "categorical", 32 if small else 128, 16),
    ]
    return {case.name: case for case in found}


CASES = tuple(cases())
