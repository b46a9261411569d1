"""Training a small transformer under a mask: time of a step and optimizer state, beside plain training.

python -m benchmarks.mask [--width 384] [--layers 6] [--steps 20] [--rounds 3] [--keep 0.005]
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from torch import nn

import squisher
from benchmarks import harness

CASES = ("plain", "squisher: train_only", "squisher: compact")
VOCABULARY, LENGTH, BATCH = 8000, 64, 8


class Transformer(nn.Module):
    """An encoder with an embedding and a head."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, layers)
        self.classifier = nn.Linear(width, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits of whole sequences."""
        return self.classifier(self.body(self.embed(tokens)).mean(1))


def run(case: str, options: argparse.Namespace) -> dict[str, float]:
    torch.manual_seed(0)
    model = Transformer(options.width, options.layers)
    importance = squisher.Importance({name: torch.rand(p.shape) for name, p in model.named_parameters()})
    mask = squisher.mask.top_k(importance, options.keep, always="classifier")
    if case == CASES[2]:
        optimizer = squisher.mask.compact(model, mask, torch.optim.AdamW, lr=1e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if case == CASES[1]:
            squisher.mask.train_only(model, optimizer, mask)
    steps, backwards = [], []
    with harness.PeakMemory() as memory:
        for _ in range(options.steps + 2):
            tokens, labels = torch.randint(0, VOCABULARY, (BATCH, LENGTH)), torch.randint(0, 4, (BATCH,))
            start = time.perf_counter()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens), labels).backward()
            middle = time.perf_counter()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            steps.append(time.perf_counter() - start)
            backwards.append(middle - start)
    state = sum(
        v.numel() * v.element_size() for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)
    )
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "seconds": sorted(steps[2:])[len(steps[2:]) // 2],
        "forward_backward_seconds": sorted(backwards[2:])[len(backwards[2:]) // 2],
        "extra_mb": memory.extra_mb,
        "state_mb": state / 1e6,
        "parameters": parameters,
        "kept": mask.kept,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", type=float, default=0.005)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(run(options.case, options)))
        return
    names = ("width", "layers", "steps", "keep")
    arguments = [text for name in names for text in (f"--{name}", str(getattr(options, name)))]
    cases = harness.interleaved("benchmarks.mask", CASES, arguments, options.rounds)
    facts = {case: run(case, argparse.Namespace(**{**vars(options), "steps": 1})) for case in CASES}
    for case, entry in cases.items():
        entry["state_mb"] = facts[case]["state_mb"]
        entry["relative_to_plain"] = round(entry["seconds"] / cases[CASES[0]]["seconds"], 3)
    settings = {name: getattr(options, name) for name in names}
    counts = {name: facts[CASES[0]][name] for name in ("parameters", "kept")}
    harness.write("mask", {**settings, **counts, "optimizer": "AdamW, clipped", "cases": cases})


if __name__ == "__main__":
    main()
