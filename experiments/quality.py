"""How good is the Squisher as an estimate of the Fisher, and what spoils it?

The paper compares what applications do with the two. Here B·v̂ itself is compared with the exact Fisher (expectation over
the model's labels) and the empirical one (labels of the data), on training examples: rank correlation over all weights
(Spearman), scale (ratio of the traces, median ratio), and what the largest 1% and 10% have in common; along training and
over what people change: batch size, β₂, learning rate and schedule, dropout, clipping, L2 decay, number of examples.

At the end of every run the weights are frozen and a fresh optimizer with learning rate 0 collects another v̂, once as
trained (dropout, clipping and L2 as they were) and once clean (evaluation mode, nothing else). That splits the way from the
Squisher to the Fisher into four steps, each with a cause of its own:

    live → frozen           staleness: v̂ remembers gradients of earlier weights
    frozen → clean          train mode: dropout, clipping, decay in the gradient
    clean → empirical       sum-then-square: E[B·v̂] = F + (B − 1)μ², and the noise of finitely many steps
    empirical → exact       the data's labels instead of the model's

Scores are Spearman correlations with the exact Fisher. "squisher" is B·v̂ as anybody would extract it, "fisher (empirical)"
the empirical Fisher of the same examples, "fisher (other examples)" the exact Fisher of as many others (the noise of the
target), "initial" the exact Fisher of the network before training: what is known without any training at all.
"tracker" observed the gradients before clipping and decay.

python -m experiments quality --scale cpu --data DIR
"""

from __future__ import annotations

import math
import statistics
import warnings
from typing import Any

import torch
from torch import Tensor, nn

import squisher
from experiments.data import Labelled, digits, mnist, shuffled
from experiments.networks import perceptron
from experiments.runs import Run, Score, Unit, seed_of

TITLE = "Quality of the estimate"
BASELINE = "initial"
METRIC = "Spearman correlation with the exact Fisher"
HIGHER_IS_BETTER = True
MAIN_CASES = ("mlp: base",)
PAPER: dict[str, dict[str, float]] = {}  # the paper does not measure it

RECIPE = {
    "batch": 64, "lr": 1e-3, "beta2": 0.999, "schedule": "constant", "dropout": 0.0, "clip": None, "l2": None,
    "weight_decay": 0.01, "examples": None, "steps": 3000, "snapshots": [],
}  # fmt: skip
ALONG = [100, 300, 1000, 3000]
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "long": {"steps": 5000, "snapshots": [*ALONG, 5000]},
    "batch 16": {"batch": 16},
    "batch 256": {"batch": 256},
    "batch 512": {"batch": 512},
    "β₂ 0.9": {"beta2": 0.9},
    "β₂ 0.95": {"beta2": 0.95},
    "β₂ 0.99": {"beta2": 0.99},
    "rate 1e-4": {"lr": 1e-4},
    "cosine": {"schedule": "cosine", "snapshots": ALONG},
    "dropout 0.1": {"dropout": 0.1},
    "dropout 0.5": {"dropout": 0.5, "snapshots": ALONG},
    "dropout 0.5, cosine": {"dropout": 0.5, "schedule": "cosine"},
    "clip 1": {"clip": 1.0},
    "clip 0.1": {"clip": 0.1},
    "L2 1e-4": {"l2": 1e-4},
    "L2 1e-2": {"l2": 1e-2},
    "2,000 examples": {"examples": 2000, "snapshots": ALONG},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "quick": {
        "seeds": 3,
        "data": "digits",
        "recipe": {**RECIPE, "batch": 32, "steps": 400},
        "frozen_steps": 300,
        "networks": {"mlp": {"widths": [64, 32, 32, 10], "fisher_examples": 500}},
        "variants": {"mlp": {k: VARIANTS[k] for k in ("base", "β₂ 0.95", "cosine", "dropout 0.5", "clip 0.1")}},
        "along": [100, 200, 400],
    },
    "cpu": {
        "seeds": 3,
        "data": "mnist",
        "recipe": RECIPE,
        "frozen_steps": 1000,
        "networks": {
            "mlp": {"widths": [784, 128, 64, 10], "fisher_examples": 5000},
            "conv": {"channels": [8, 16], "hidden": 64, "fisher_examples": 2000},
        },
        "variants": {
            "mlp": VARIANTS,
            "conv": {
                k: VARIANTS[k] for k in ("base", "batch 256", "β₂ 0.95", "cosine", "dropout 0.1", "dropout 0.5", "clip 0.1")
            },
        },
        "along": None,
    },
}  # fmt: skip
LINKS = (("live", "frozen"), ("frozen", "clean"), ("clean", "empirical"), ("empirical", "exact"))


def stages(config: dict[str, Any], seeds: range) -> list[list[Unit]]:
    """Return the stages: a unit for each network, variant and seed; all may run at the same time."""
    return [
        [
            Unit(f"seed-{seed}/{network}/{variant}", "measure", {"network": network, "variant": variant, "seed": seed})
            for seed in seeds
            for network, variants in config["variants"].items()
            for variant in variants
        ]
    ]


def scores(results: dict[str, dict[str, Any]]) -> list[Score]:
    """Return Spearman's correlation with the exact Fisher at the end of training."""
    names = {
        "live": "squisher",
        "tracker": "squisher (tracker)",
        "empirical": "fisher (empirical)",
        "other": "fisher (other examples)",
        "initial": "initial",
    }
    out = []
    for key, result in results.items():
        _, network, variant = key.split("/", 2)
        for name, method in names.items():
            if name in result["against_exact"]:
                value = result["against_exact"][name]["spearman"]
                out.append(Score(f"{network}: {variant}", method, seed_of(key), value, METRIC))
    return out


def build(network: dict[str, Any], dropout: float) -> nn.Sequential:
    """Return a perceptron, or a small conv net on images halved in size; dropout behind every hidden layer."""
    if "widths" in network:
        return perceptron(network["widths"], dropout)
    first, second = network["channels"]
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)), nn.AvgPool2d(2),
        nn.Conv2d(1, first, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(first, second, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(dropout),
        nn.Linear(second * 16, network["hidden"]), nn.ReLU(), nn.Dropout(dropout), nn.Linear(network["hidden"], 10),
    )  # fmt: skip


def load(run: Run) -> Labelled:
    """Return the training examples, with mean 0 and variance 1."""
    train = digits()[0] if run.config["data"] == "digits" else mnist(run.data_folder("mnist"))[0]
    return Labelled((train.inputs - train.inputs.mean()) / train.inputs.std(), train.labels)


class Training:
    """Steps of Adam on shuffled epochs; the last, smaller batch of an epoch is left out."""

    def __init__(self, model: nn.Module, data: Labelled, recipe: dict[str, Any], seed: int, rate: float) -> None:
        self.model, self.data, self.recipe = model, data, recipe
        self.generator = torch.Generator().manual_seed(seed)
        self.order: list[Tensor] = []
        betas = (0.9, recipe["beta2"])
        if recipe["l2"] is None:
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
                model.parameters(), lr=rate, betas=betas, weight_decay=recipe["weight_decay"], fused=True
            )
        else:
            self.optimizer = torch.optim.Adam(
                model.parameters(), lr=rate, betas=betas, weight_decay=recipe["l2"], fused=True
            )
        polluted = recipe["clip"] is not None or recipe["l2"] is not None
        self.tracker = squisher.Tracker(model, beta2=recipe["beta2"]) if polluted and rate else None
        self.rate, self.done = rate, 0

    def advance(self, steps: int) -> None:
        """Train for this many more steps."""
        for _ in range(steps):
            if not self.order:
                self.order = list(shuffled(len(self.data), self.recipe["batch"], self.generator))
            batch = self.data[self.order.pop()]
            if self.recipe["schedule"] == "cosine":
                factor = 0.5 * (1 + math.cos(math.pi * self.done / self.recipe["steps"]))
                self.optimizer.param_groups[0]["lr"] = self.rate * factor
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(batch.inputs), batch.labels).backward()
            if self.tracker is not None:
                self.tracker.observe()
            if self.recipe["clip"] is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe["clip"])
            self.optimizer.step()
            self.done += 1

    def squisher(self) -> squisher.Importance:
        """Return B·v̂."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", squisher.SquisherWarning)  # L2 in the gradient: that is what is measured
            return squisher.extract(self.optimizer, self.model, batch_size=self.recipe["batch"]).as_fisher()


def measure(run: Run, network: str, variant: str, seed: int) -> dict[str, Any]:
    """Train one network, and compare what its optimizer holds with the Fisher along the way and at the end."""
    config = run.config
    shape = config["networks"][network]
    recipe = {**config["recipe"], **config["variants"][network][variant]}
    if recipe["snapshots"] and config["along"]:
        recipe["snapshots"] = config["along"]
    data = load(run)
    torch.manual_seed(seed)
    data = data[torch.randperm(len(data))[: recipe["examples"]]]
    count = min(shape["fisher_examples"], len(data))
    ours, others = data[:count], data[count : 2 * count]
    model = build(shape, recipe["dropout"])
    initial = fisher(model, ours, "exact")
    training = Training(model, data, recipe, seed, recipe["lr"])
    snapshots = []
    for step in sorted({*recipe["snapshots"], recipe["steps"]}):
        training.advance(step - training.done)
        live, exact, empirical = training.squisher(), fisher(model, ours, "exact"), fisher(model, ours, "data")
        against = {"exact": agreement(live, exact), "empirical": agreement(live, empirical)}
        snapshots.append({"step": step, **fit(model, ours, recipe["batch"], empirical), "squisher": against})
    found = {
        "live": live, "initial": initial, "empirical": empirical, "exact": exact, **frozen(run, model, data, recipe, seed)
    }  # fmt: skip
    if len(others) == count:
        found["other"] = fisher(model, others, "exact")
    if training.tracker is not None:
        found["tracker"] = squisher.extract(training.tracker, model, batch_size=recipe["batch"]).as_fisher()
    return {
        "snapshots": snapshots,
        "against_exact": {name: agreement(one, exact) for name, one in found.items() if name != "exact"},
        "against_empirical": {name: agreement(one, empirical) for name, one in found.items() if name != "empirical"},
        "links": {f"{a} → {b}": agreement(found[a], found[b]) for a, b in LINKS},
    }


def frozen(
    run: Run, model: nn.Module, data: Labelled, recipe: dict[str, Any], seed: int
) -> dict[str, squisher.Importance]:
    """Return the averages of a fresh optimizer at fixed weights: in training mode, and clean in evaluation mode."""
    clean = {**recipe, "dropout": 0.0, "clip": None, "l2": None, "schedule": "constant"}
    as_trained = {**recipe, "schedule": "constant"}
    out = {}
    for name, one in (("frozen", as_trained), ("clean", clean)):
        if name == "clean" and all(recipe[key] == clean[key] for key in ("dropout", "clip", "l2")):
            out[name] = out["frozen"]
            continue
        model.train(name == "frozen")
        training = Training(model, data, one, seed + 1000, 0.0)
        training.advance(run.config["frozen_steps"])
        out[name] = training.squisher()
    model.train()
    return out


def fisher(model: nn.Module, data: Labelled, labels: str) -> squisher.Importance:
    """Return the Fisher of these examples, in evaluation mode."""
    return squisher.fisher(model, data.batches(500), labels=labels)


@torch.no_grad()
def _outputs(model: nn.Module, data: Labelled) -> Tensor:
    training = model.training
    model.eval()
    outputs = model(data.inputs)
    model.train(training)
    return outputs


def fit(model: nn.Module, data: Labelled, batch: int, empirical: squisher.Importance) -> dict[str, float]:
    """Return how well the examples are fitted, and by how much the mean gradient μ raises B·v̂ at these weights.

    `mean_gradient` is Σμ²/ΣF over all weights; `predicted_scale` is 1 + (B − 1)·that, the expected scale of B·v̂ against the
    empirical Fisher were every gradient taken at these very weights.
    """
    outputs = _outputs(model, data)
    n = len(data)
    joint = squisher.fisher(model, [tuple(data)], labels="data", per="batch")  # N·(mean gradient)²
    trace = sum(float(values.double().sum()) for values in empirical.values())
    squared = sum(float(values.double().sum()) for values in joint.values()) / n
    share = (squared - trace / n) / (1 - 1 / n) / trace if trace else math.nan  # without the sampling noise of a mean
    return {
        "train_accuracy": 100.0 * (outputs.argmax(-1) == data.labels).double().mean().item(),
        "train_loss": nn.functional.cross_entropy(outputs, data.labels).item(),
        "mean_gradient": share,
        "predicted_scale": 1 + (batch - 1) * share,
    }


def agreement(a: squisher.Importance, b: squisher.Importance) -> dict[str, float]:
    """Rank, scale and overlap of a against b; `per_tensor` is the median Spearman of the weight tensors."""
    found = squisher.compare(a, b)
    inside = [row.spearman for row in found.rows if row.name.endswith("weight")]
    values = {
        "spearman": found.spearman,
        "per_tensor": statistics.median(inside),
        "scale": found.scale,
        "median_ratio": found.median_ratio,
        "top_1": found.overlap(0.01),
        "top_10": found.overlap(0.1),
    }
    return {name: float(f"{value:.5g}") for name, value in values.items()}
