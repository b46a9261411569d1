"""A training step with a Tracker beside a plain one: per batch, per example, and per example in each tenth step.

python -m benchmarks.tracker [--rounds 20] [--threads 1] [--small]

All ways take turns in one process, with the same network, batch and optimizer (SGD); what is reported is the median over rounds of the
ratio to the plain step of the same round. The proof of the first step is not in it. Where each tenth step is observed, ten steps
are timed together, beside ten plain ones.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import squisher
from benchmarks import harness
from benchmarks.ewc import PLAIN, Step, measure, network

MODELS = ("mlp", "cnn", "transformer")


def cnn(small: bool) -> nn.Module:
    """Return a convolutional network on 32×32 images, with group norms."""
    width = 8 if small else 64
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for k in range(3):
        layers += [nn.GroupNorm(4, width * 2**k), nn.ReLU(), nn.Conv2d(width * 2**k, width * 2 ** (k + 1), 3, 2, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width * 8, 10))


def ways(name: str, small: bool) -> tuple[dict[str, Step], dict[str, Step], int]:
    """Return steps by name, ten steps by name, and the number of parameters."""
    if name == "cnn":
        torch.manual_seed(0)
        model, inputs, labels = cnn(small), torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    else:
        model, inputs, labels = network(name, small)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def passes() -> None:
        nn.functional.cross_entropy(model(inputs), labels).backward()

    def step(tracker: squisher.Tracker | None = None) -> None:
        optimizer.zero_grad()
        if tracker is None or tracker.per == "batch":
            passes()
            if tracker is not None:
                tracker.observe()
        else:
            with tracker.step():
                passes()
        optimizer.step()

    def ten(tracker: squisher.Tracker | None = None) -> None:
        for _ in range(10):
            step(tracker)

    batch, example = squisher.Tracker(model), squisher.Tracker(model, per="example")
    tenth = squisher.Tracker(model, per="example", every=10)
    single = {PLAIN: step, "per batch": lambda: step(batch), "per example": lambda: step(example)}
    return (
        single,
        {PLAIN: ten, "per example, each tenth step": lambda: ten(tenth)},
        sum(p.numel() for p in model.parameters()),
    )


def main() -> None:
    """Run all networks and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--small", action="store_true", help="small networks; nothing is written")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = {}
    for name in MODELS:
        single, tens, parameters = ways(name, options.small)
        measured = {**measure(single, options.rounds), **measure(tens, max(3, options.rounds // 4))}
        measured[PLAIN] = measure({PLAIN: single[PLAIN]}, 3)[PLAIN]
        found[name] = {"parameters": parameters, "ways": measured}
        print(name, {way: row["relative_to_plain"] for way, row in measured.items()}, flush=True)
    if not options.small:
        harness.write("tracker", {"rounds": options.rounds, "optimizer": "SGD", "cases": found})


if __name__ == "__main__":
    main()
