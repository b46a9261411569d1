"""The small networks that several settings train, and how accurate one is."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from experiments.data import Labelled

__all__ = ["Headed", "Sliced", "accuracy", "perceptron", "right_rows", "vgg"]


def perceptron(widths: Sequence[int], dropout: float | None = None) -> nn.Sequential:
    """Return linear layers with ReLU between them, and dropout behind each where a rate is given."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU(), *([] if dropout is None else [nn.Dropout(dropout)])]
    return nn.Sequential(*layers[: -1 if dropout is None else -2])


def vgg(plan: Sequence[int], classes: int) -> nn.Sequential:
    """Return OrthoReg's VGG: convolution, ReLU, normalization; a 0 in the plan is pooling; one linear layer at the end."""
    layers: list[nn.Module] = []
    channels = 3
    for width in plan:
        if not width:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(width)]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class Headed(nn.Module):
    """A perceptron's body, and a head that a task may have of its own."""

    def __init__(self, widths: Sequence[int], classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*perceptron(widths), nn.ReLU())
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits."""
        return self.head(self.body(inputs))


class Sliced(nn.Module):
    """A network of which only some outputs count: `head` is the slice in use."""

    def __init__(self, network: nn.Module, head: slice = slice(None)) -> None:
        super().__init__()
        self.network, self.head = network, head

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits of the classes in use."""
        return self.network(inputs)[:, self.head]


def accuracy(model: nn.Module, data: Labelled, size: int = 500) -> float:
    """Return the accuracy in percent, in evaluation mode."""
    return round(100.0 * right_rows(model, data, size).count("1") / len(data), 4)


@torch.no_grad()
def right_rows(model: nn.Module, data: Labelled, size: int = 500) -> str:
    """Return a 1 for every example that is classified correctly, a 0 for the others, in evaluation mode."""
    training = model.training
    model.eval()
    right = torch.cat([model(inputs).argmax(-1) == labels for inputs, labels in data.batches(size)])
    model.train(training)
    return "".join("01"[one] for one in right.tolist())
