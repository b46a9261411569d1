"""Text classification by the upper layers of an encoder: the lower ones are frozen, and what they say of a text is kept.

A configuration as in `experiments.text`, with pooling "mean", an encoder of BERT's kind and

    layers       how many layers, counted from the last, are trained; names are body.0.*, body.1.*, …, head.*

A text then costs its share of the layers, in training as in tests. Dropout is on in the layers that are trained only.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from experiments import text
from experiments.runs import Run
from experiments.tuning import Splits, fingerprint

__all__ = ["States", "Upper", "fine_tune", "load", "second_test", "splits"]


class States(NamedTuple):
    """What the lower layers say of texts, in half precision, padded to one length, and the labels; rows as in `text.Texts`."""

    states: Tensor
    mask: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Any) -> States:
        """Return the rows asked for; a tensor or a slice."""
        return States(self.states[rows], self.mask[rows], self.labels[rows])

    def batch(self, rows: Any) -> dict[str, Tensor]:
        """Return a batch of `Upper`'s inputs with "labels", cut to its longest text."""
        part = self.take(rows)
        longest = int(part.mask.sum(-1).max())
        states = part.states[..., :longest, :].float()
        return {"states": states, "attention_mask": part.mask[..., :longest].long(), "labels": part.labels}

    def batches(self, size: int) -> list[dict[str, Tensor]]:
        """Return all rows: texts of similar length together, in a fixed order."""
        return [self.batch(rows) for rows in text.by_length(self.mask).split(size)]


class Upper(text.Pooled):
    """Layers of an encoder as the body."""

    def forward(self, states: Tensor, attention_mask: Tensor) -> Tensor:
        """Return logits; of choices, if every row has several texts."""
        if states.dim() == 4:
            return self(states.flatten(0, 1), attention_mask.flatten(0, 1)).view(states.shape[:2])
        seen = (1.0 - attention_mask[:, None, None, :].to(states.dtype)) * torch.finfo(states.dtype).min
        for layer in self.body:
            found = layer(states, seen)
            states = found[0] if isinstance(found, tuple) else found  # transformers 4 gives a tuple
        return self.pooled(states, attention_mask)


def load(config: Mapping[str, Any], classes: int, seed: int) -> nn.Module:
    """Return the pretrained upper layers with a new head drawn by the seed."""
    body = text.load({**config, "frozen": None}, classes, 0).body
    torch.manual_seed(seed)
    layers = body.encoder.layer[-config["layers"] :]
    return Upper(layers, body.config.hidden_dropout_prob, body.config.hidden_size, classes).eval()


def splits(run: Run, task: str, config: Mapping[str, Any]) -> Splits:
    """Return the lower layers' outputs for a task, computed once."""
    read = text.splits(run, task, config)
    parts = {part: getattr(read, part) for part in ("train", "validation", "test")}
    shape = {key: config[key] for key in ("model", "length", "validation", "test", "train", "layers")}
    made = run.cached(f"states/{task}-{fingerprint(shape)}", lambda: {n: _below(p, config) for n, p in parts.items()})
    found = {part: States(made[part], rows.mask, rows.labels) for part, rows in parts.items()}
    return Splits(**found, classes=read.classes)


def second_test(run: Run, task: str, part: str, config: Mapping[str, Any]) -> States:
    """Return the lower layers' outputs for all rows of another evaluation file of a task, computed once."""
    rows = text.second_test(run, task, part, config)
    shape = {key: config[key] for key in ("model", "length", "layers")}
    made = run.cached(f"states/{task}-{part}-{fingerprint(shape)}", lambda: _below(rows, config))
    return States(made, rows.mask, rows.labels)


def fine_tune(*arguments: Any, **options: Any) -> dict[str, Any]:
    """Fine-tune on one task, once. Arguments and result as `text.fine_tune`."""
    return text.fine_tune(*arguments, **options, kind=sys.modules[__name__])


@torch.no_grad()
def _below(rows: text.Texts, config: Mapping[str, Any]) -> Tensor:
    """Return the output of the layer below the trained ones for every token; 0 for padding."""
    body = text.load(config, 2, 0).body
    found = torch.zeros(*rows.tokens.shape, body.config.hidden_size, dtype=torch.float16)
    for place in text.by_length(rows.mask).split(32):
        if not len(place):  # an empty part is one empty batch
            continue
        batch = rows.batch(place)
        batch.pop("labels")
        shape = batch["input_ids"].shape
        flat = {name: value.flatten(0, -2) for name, value in batch.items()}
        states = body(**flat, output_hidden_states=True).hidden_states[-1 - config["layers"]]
        found[place, ..., : shape[-1], :] = states.view(*shape, -1).half()
    return found
