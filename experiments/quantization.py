"""Bits where they matter: tensors of one model get different widths under one budget, chosen by different importances.

Not in the paper. Two benchmarks: a language model of characters that is trained here on film reviews (perplexity), and MiniLM
fine-tuned on SST-2 (accuracy). Rounding is simulated: affine, to the nearest, groups of 64 with a 16-bit scale and offset, which
count in the budget. Tensors without an importance (MiniLM's frozen embeddings) stay as they are in all methods.

Methods: `uniform` gives every tensor the widest width that fits. The others choose widths by the least Σ ½F·(w − Q(w))² within the
budget: `magnitude` with F = 1, which is the error of the weights alone; `fisher` with the empirical Fisher of `fisher_examples`
training examples; `squisher` with the optimizer's accumulator. An allocation may only use what the budget allows, and all
use the same quantiser, so only the importance differs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import squisher
from experiments.comparison import document
from experiments.data import text_task
from experiments.page_parts import COLOURS, Parts, save, subplots, table
from experiments.runs import Run, Score, Unit
from experiments.spread import paired

METHODS = ("uniform", "magnitude", "fisher", "squisher")
WIDTHS = (2, 3, 4, 8)
_ADAM = {"schedule": "linear", "warmup": 10, "beta2": 0.999, "eps": 1e-8, "decay": 0.0, "clip": None}
_CHARACTERS = {
    "kind": "characters", "task": "rotten_tomatoes", "context": 64, "width": 128, "layers": 3, "heads": 4, "batch": 16,
    "rate": 2e-3, "steps": 500, "fisher_examples": 128, "test": 128, "budgets": [2.75, 3.0, 3.5, 4.5],
}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "quick": {"seeds": 1, "benchmarks": {"characters": {**_CHARACTERS, "task": None, "width": 32, "layers": 1, "steps": 60, "budgets": [3.0, 3.5]}}},
    "cpu": {
        "seeds": 5,
        "benchmarks": {
            "characters": _CHARACTERS,
            "minilm": {
                "kind": "text", "model": "minilm", "pooling": "mean", "frozen": r"word_embeddings", "task": "sst2", "length": 48,
                "train": 2000, "validation": 0, "test": 300, "batch": 16, "rate": 1e-4, "steps": 70, "every": None, "keep": [],
                **_ADAM, "fisher_examples": 64, "budgets": [2.75, 3.0, 3.5], "seeds": 2,
            },
        },
    },
}  # fmt: skip


def stages(config: Mapping[str, Any], seeds: Sequence[int]) -> list[list[Unit]]:
    """Return the stages: a unit for each benchmark and seed."""
    units = []
    for name, part in config["benchmarks"].items():
        for seed in list(seeds)[: part.get("seeds", len(seeds))]:
            units.append(Unit(f"{name}/{seed}", "quantize", {"benchmark": name, "seed": seed}))
    return [units]


def quantize(run: Run, benchmark: str, seed: int) -> dict[str, Any]:
    """Train, choose widths in every way, and measure the rounded model."""
    config = run.config["benchmarks"][benchmark]
    model, importances, measure = (_characters if config["kind"] == "characters" else _minilm)(run, config, seed)
    weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    ones = {name: torch.ones_like(weights[name]) for name in importances["squisher"] if name in weights}
    found = {
        method: squisher.quantize.sensitivity(weights, imp, WIDTHS)
        for method, imp in {"magnitude": ones, **importances}.items()
    }
    rows = []
    for budget in config["budgets"]:
        plans = {method: squisher.quantize.allocate(own, budget) for method, own in found.items()}
        fitting = [p for b in WIDTHS if (p := found["squisher"].uniform(b)).bits_per_weight <= budget]
        plans["uniform"] = max(fitting, key=lambda plan: plan.bits_per_weight)
        for method, plan in plans.items():
            model.load_state_dict(dict(squisher.quantize.simulate(weights, plan.bits)), strict=False)
            rows.append(
                {"budget": budget, "method": method, "value": measure(), "bits_per_weight": plan.bits_per_weight}
            )
    model.load_state_dict(weights, strict=False)
    return {"unrounded": measure(), "rows": rows, "weights": sum(w.numel() for w in weights.values())}


def scores(results: Mapping[str, Mapping[str, Any]]) -> list[Score]:
    """Return perplexity or accuracy by budget."""
    out = []
    for key, result in results.items():
        benchmark, seed = key.split("/")
        metric = "perplexity" if benchmark == "characters" else "accuracy"
        out.append(Score(benchmark, "unrounded", int(seed), result["unrounded"], metric))
        for row in result["rows"]:
            case = f"{benchmark}, {row['budget']:g} bits"
            out.append(Score(case, row["method"], int(seed), row["value"], metric))
    return out


def parts(folder: Path, images: Path) -> Parts:
    """Return the table and the figure of docs/quantize.md."""
    found = document("quantization", "cpu", folder)
    values: dict[tuple[str, str], dict[int, float]] = {}
    for score in found["scores"]:
        values.setdefault((score["case"], score["method"]), {})[score["seed"]] = score["value"]
    benchmarks = [b for b in found["config"]["benchmarks"] if (b, "unrounded") in values]
    rows = []
    figure, axes = subplots(len(benchmarks), (3.8 * len(benchmarks), 2.8))
    for axis, benchmark in zip(axes, benchmarks, strict=True):
        budgets = found["config"]["benchmarks"][benchmark]["budgets"]
        cases = [f"{benchmark}, {budget:g} bits" for budget in budgets]
        for case, budget in zip(cases, budgets, strict=True):
            cells = [values[case, method] for method in METHODS]
            gap = paired(values[case, "squisher"], values[case, "magnitude"])
            rows.append([benchmark, f"{budget:g}", *(_mean(cell) for cell in cells), str(gap)])
        rows.append([benchmark, "32", *[_mean(values[benchmark, "unrounded"])] * 4, ""])
        for method, colour in zip(METHODS, COLOURS, strict=False):
            axis.plot(
                budgets, [statistics.fmean(values[c, method].values()) for c in cases], "o-", color=colour, label=method
            )
        axis.axhline(
            statistics.fmean(values[benchmark, "unrounded"].values()), color=COLOURS[6], ls=":", label="not rounded"
        )
        axis.set_xlabel("bits a weight, scales included")
        axis.set_ylabel("perplexity of a character" if benchmark == "characters" else "accuracy, %")
        axis.set_title(benchmark)
    axes[0].legend(fontsize=7, frameon=False)
    save(figure, images / "quantize.png")
    counts = {b: len(values[b, "unrounded"]) for b in benchmarks}
    words = {
        "seeds": ", ".join(
            f"{count} seeds" if b == "characters" else f"{count} seeds of {b}" for b, count in counts.items()
        )
    }
    return Parts(
        {"quantization": table(["model", "bits a weight", *METHODS, "squisher − magnitude [95 %]"], rows)}, words
    )


def _mean(values: Mapping[int, float]) -> str:
    return f"{statistics.fmean(values.values()):.2f}"


# -- a language model of characters -------------------------------------------------------------------------------------


class Block(nn.Module):
    """Causal attention and a perceptron, each with a norm before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map states to states."""
        n, t, d = x.shape
        q, k, v = (y.view(n, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.before(x)).split(d, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, d))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


class Characters(nn.Module):
    """A small causal language model over bytes."""

    def __init__(self, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of the next character at every place."""
        places = torch.arange(tokens.shape[1]).expand_as(tokens)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places(places))))


def _losses(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the summed loss of each sequence."""
    logits = model(batch[:, :-1]).transpose(1, 2)
    return nn.functional.cross_entropy(logits, batch[:, 1:], reduction="none").sum(1)


def _characters(run: Run, config: Mapping[str, Any], seed: int) -> tuple[nn.Module, dict[str, Any], Any]:
    train, test = (_sequences(run, config, part) for part in ("train", "eval"))
    test = test[: config["test"]]
    torch.manual_seed(seed)
    model = Characters(config["context"], config["width"], config["layers"], config["heads"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["rate"], fused=True)
    for _ in range(config["steps"]):
        batch = train[torch.randint(len(train), (config["batch"],))]
        optimizer.zero_grad()
        _losses(model, batch).mean().div(config["context"]).backward()
        optimizer.step()
    some = train[torch.randperm(len(train))[: config["fisher_examples"]]]
    importances = {
        "fisher": squisher.fisher(model, list(some.split(32)), likelihood=_losses),
        "squisher": squisher.extract(optimizer, model),
    }

    @torch.no_grad()
    def perplexity() -> float:
        total = sum(float(_losses(model, batch).sum()) for batch in test.split(64))
        return math.exp(total / (len(test) * config["context"]))

    return model, importances, perplexity


def _sequences(run: Run, config: Mapping[str, Any], part: str) -> Tensor:
    """Return text as rows that are one character longer than the context."""
    if config["task"] is None:
        text = "the quick brown fox jumps over the lazy dog. " * 400
    else:
        text = "\n".join(row["text_a"] for row in text_task(run.data_folder("text"), config["task"], part))
    codes = torch.tensor([min(ord(c), 127) for c in text], dtype=torch.long)
    length = config["context"] + 1
    return codes[: len(codes) // length * length].view(-1, length)


# -- a fine-tuned encoder ------------------------------------------------------------------------------------------------


def _minilm(run: Run, config: Mapping[str, Any], seed: int) -> tuple[nn.Module, dict[str, Any], Any]:
    from experiments import text

    data = text.splits(run, config["task"], config)
    snapshot = text.fine_tune(run, config["task"], seed, config)["snapshots"]["final"]
    model = text.load(config, data.classes, seed)
    model.load_state_dict(snapshot["weights"], strict=False)
    rows = data.train.take(slice(0, config["fisher_examples"]))
    measured = squisher.fisher(model, rows.batches(16), likelihood="categorical")
    recycled = text.importance(snapshot)
    body = r"^body\."
    importances = {"fisher": measured.restrict(body), "squisher": recycled.restrict(body)}
    return model, importances, lambda: text.accuracy(model, data.test)
