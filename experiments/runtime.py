"""Run time: the Fisher by the loop, the Fisher by the fast engine, and the Squisher, on each setting's network.

The paper's argument is time: the Fisher took 29,266 s (merging), 51,902 s (task embedding) and 15,216 s (EWC on permuted
MNIST) on GPUs, the Squisher under a second. There the Fisher was computed one example at a time (merging, EWC, UBGM, FISH) or
from mini-batch gradients (task embedding, pruning). How much of the saving is left if the Fisher is computed well?

One unit a setting: its network, its number of examples and its labels. All ways are timed in turn, several rounds, one
thread, medians over rounds:

    loop       one example (and class) at a time, as the reference codes do: `fisher(method="loop")`
    engine     the same numbers for all examples at once: `fisher(method="auto")`
    joint      sampled labels, squared per batch, one plain backward: `fisher(labels="sampled", per="batch")`
    live       `extract` from the live optimizer, every value multiplied by B and at hand
    file       `extract` from a saved checkpoint, every value read
    step       one training step, for comparison

The loop, the joint Fisher and the step are timed on few examples (the configuration says how many) and scaled linearly to
the setting's number. The engine has a fixed cost, because it proves itself against the loop on a first batch: it is timed on one
batch and on several, the difference is scaled, and the first batch is added once.
Weights and data are random: time does not depend on them. Run it alone, on a quiet machine.

python -m experiments runtime --scale cpu --jobs 1
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import squisher
from experiments.networks import Sliced, perceptron, vgg
from experiments.runs import Run, Score, Unit, seed_of

TITLE = "Run time"
BASELINE = "fisher (loop)"
METRIC = "seconds"
HIGHER_IS_BETTER = False
PAPER: dict[str, dict[str, float]] = {  # seconds on GPUs, tables.json "runtime"; the Squisher: "< 0.1 s", EWC "< 1 s"
    "Fisher merging": {"fisher (loop)": 29265.86296, "squisher": 0.1},
    "UBGM": {"fisher (loop)": 435.87693, "squisher": 0.1},
    "FISH mask": {"fisher (loop)": 698.26675, "squisher": 0.1},
    "Fisher pruning": {"joint": 2.52054, "squisher": 0.1},
    "task embedding": {"joint": 51902.01455, "squisher": 0.1},
    "EWC, split MNIST": {"fisher (loop)": 331.684358, "squisher": 1.0},
    "EWC, permuted MNIST": {"fisher (loop)": 15215.51869, "squisher": 1.0},
    "EWC, split CIFAR-100": {"fisher (loop)": 1246.39296, "squisher": 1.0},
}
MAIN_CASES = ("Fisher merging", "FISH mask", "EWC, split MNIST", "EWC, permuted MNIST", "EWC, split CIFAR-100")

MINILM = {"kind": "encoder", "hidden": 384, "layers": 6, "heads": 12, "intermediate": 1536, "vocabulary": 30522, "classes": 2, "frozen": "word_embeddings"}  # fmt: skip
VGG = [16, 16, 0, 32, 32, 0, 64, 64, 0, 128, 128, 0, 128, 128, 0]  # VGG-13 at a quarter of its width; 0: pooling
# `examples`: of one Fisher, as the reference codes take them (the merging code: at most 1000); `times`: how many Fishers the setting needs (tasks, contexts); `steps`: of one training run
CASES: dict[str, dict[str, Any]] = {
    "Fisher merging": {
        "network": MINILM, "length": 48, "labels": "data", "examples": 1000, "times": 4, "batch": 16, "steps": 130,
        "measured": {"loop": 6, "engine": 64},
    },
    "UBGM": {
        "network": MINILM, "length": 48, "labels": "sampled", "examples": 1000, "times": 4, "batch": 16, "steps": 80,
        "measured": {"loop": 6, "engine": 64},
    },
    "FISH mask": {
        "network": MINILM, "length": 32, "labels": "data", "examples": 1024, "times": 2, "batch": 16, "steps": 64,
        "measured": {"loop": 6, "engine": 64},
    },
    "Fisher pruning": {
        "network": {"kind": "vgg", "plan": VGG, "classes": 100}, "labels": "data", "examples": 10112, "times": 1,
        "batch": 128, "steps": 1185, "measured": {"loop": 16, "engine": 384},
    },
    "task embedding": {
        "network": {"kind": "mlp", "widths": [784, 256, 256, 10]}, "labels": "data", "examples": 16000, "times": 12,
        "batch": 64, "steps": 1000, "measured": {"loop": 64, "engine": 1024},
    },
    "EWC, split MNIST": {
        "network": {"kind": "mlp", "widths": [784, 400, 400, 10], "active": 2}, "labels": "exact", "examples": 12000,
        "times": 4, "batch": 128, "steps": 2000, "measured": {"loop": 64, "engine": 1024},
    },
    "EWC, permuted MNIST": {
        "network": {"kind": "mlp", "widths": [1024, 1000, 1000, 100], "active": 10}, "labels": "exact",
        "examples": 60000, "times": 9, "batch": 128, "steps": 5000, "measured": {"loop": 16, "engine": 1024},
    },
    "EWC, split CIFAR-100": {
        "network": {"kind": "mlp", "widths": [1024, 2000, 2000, 100], "active": 10}, "labels": "exact",
        "examples": 5000, "times": 9, "batch": 256, "steps": 5000, "measured": {"loop": 8, "engine": 512},
    },
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "quick": {
        "seeds": 1,
        "rounds": 2,
        "cases": {
            "EWC, split MNIST": {
                **CASES["EWC, split MNIST"],
                "network": {"kind": "mlp", "widths": [64, 32, 10], "active": 2},
                "measured": {"loop": 16, "engine": 512},
            },
            "Fisher pruning": {
                **CASES["Fisher pruning"],
                "network": {"kind": "vgg", "plan": [4, 0, 8, 0], "classes": 10},
                "measured": {"loop": 8, "engine": 256},
            },
        },
    },
    "cpu": {"seeds": 1, "rounds": 5, "cases": CASES},
}


WAYS = {
    "loop": "fisher (loop)",
    "engine": "fisher",
    "joint": "joint",
    "live": "squisher",
    "file": "squisher (file)",
}
"""What is timed, by the names of tables."""


def stages(config: dict[str, Any], seeds: range) -> list[list[Unit]]:
    """Return the stages: a unit for each case and repetition, each alone in its stage, because it is timed."""
    return [
        [Unit(f"seed-{seed}/{case}", "measure", {"case": case, "seed": seed})]
        for seed in seeds
        for case in config["cases"]
    ]


def scores(results: dict[str, dict[str, Any]]) -> list[Score]:
    """Return the seconds for the whole setting: all tasks or contexts."""
    return [
        Score(key.partition("/")[2], method, seed_of(key), result["setting_seconds"][way], METRIC)
        for key, result in results.items()
        for way, method in WAYS.items()
    ]


def build(network: dict[str, Any]) -> nn.Module:
    """Return a perceptron, a VGG (conv, ReLU, batch norm) or a BERT-type encoder with a head."""
    if network["kind"] == "mlp":
        return Sliced(perceptron(network["widths"]), slice(network.get("active")))
    if network["kind"] == "vgg":
        return vgg(network["plan"], network["classes"])
    return _encoder(network)


def _encoder(network: dict[str, Any]) -> nn.Module:
    try:
        from transformers import BertConfig, BertForSequenceClassification
    except ImportError as error:
        raise SystemExit("The encoder needs transformers: pip install 'torch-squisher[hf]'.") from error
    config = BertConfig(
        vocab_size=network["vocabulary"], hidden_size=network["hidden"], num_hidden_layers=network["layers"],
        num_attention_heads=network["heads"], intermediate_size=network["intermediate"], num_labels=network["classes"],
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(network["frozen"] not in name)  # as the text settings do at cpu scale
    return model


def examples(case: dict[str, Any], count: int, generator: torch.Generator) -> list[Any]:
    """Return random batches of the shape that the network takes: pairs, or Hugging Face's mappings."""
    network, out = case["network"], []
    for start in range(0, count, case["batch"]):
        size = min(case["batch"], count - start)
        if network["kind"] == "encoder":
            shape = (size, case["length"])
            labels = torch.randint(network["classes"], (size,), generator=generator)
            out.append({
                "input_ids": torch.randint(network["vocabulary"], shape, generator=generator),
                "attention_mask": torch.ones(shape, dtype=torch.long), "labels": labels,
            })  # fmt: skip
            continue
        shape = (size, 3, 32, 32) if network["kind"] == "vgg" else (size, network["widths"][0])
        classes = network["classes"] if network["kind"] == "vgg" else network.get("active", network["widths"][-1])
        out.append((torch.rand(shape, generator=generator), torch.randint(classes, (size,), generator=generator)))
    return out


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss of a batch."""
    if isinstance(batch, dict):
        return model(**batch).loss
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def measure(run: Run, case: str, seed: int) -> dict[str, Any]:
    """Time every way in turn, round after round, and scale the times to the setting."""
    plan = run.config["cases"][case]
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = build(plan["network"])
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    counts = {way: plan["measured"][way] for way in ("loop", "engine")}
    few, many = (examples(plan, counts[way], generator) for way in ("loop", "engine"))
    one = examples(plan, plan["batch"], generator)[0]

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, one).backward()
        optimizer.step()

    step()
    with tempfile.TemporaryDirectory(dir=_existing(run.out)) as folder:
        path = Path(folder) / "checkpoint.pt"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        ways: dict[str, Callable[[], Any]] = {
            "loop": lambda: squisher.fisher(model, few, labels=plan["labels"], method="loop"),
            "engine": lambda: squisher.fisher(model, many, labels=plan["labels"]),
            "first batch": lambda: squisher.fisher(model, many[:1], labels=plan["labels"]),
            "joint": lambda: squisher.fisher(model, many, labels="sampled", per="batch"),
            "live": lambda: _values(squisher.extract(optimizer, model, batch_size=plan["batch"])),
            "file": lambda: _values(squisher.extract(path, model, batch_size=plan["batch"])),
            "step": step,
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for way in ways.values():
            way()  # what is done once a process (imports, first allocations) is not timed
        for _ in range(run.config["rounds"]):
            for name, way in ways.items():
                began = time.perf_counter()
                way()
                seconds[name].append(time.perf_counter() - began)
    return summary(plan, seconds, sum(p.numel() for p in trained))


def summary(plan: dict[str, Any], seconds: dict[str, list[float]], parameters: int) -> dict[str, Any]:
    """Return medians, scaled to the setting's examples and tasks, and their ratios."""
    middle = {way: statistics.median(values) for way, values in seconds.items()}
    loop, engine, first = plan["measured"]["loop"], plan["measured"]["engine"], plan["batch"]
    per_example = {
        "loop": middle["loop"] / loop,
        "engine": max(0.0, middle["engine"] - middle["first batch"]) / (engine - first),
        "joint": middle["joint"] / engine,
    }
    one = {way: value * plan["examples"] for way, value in per_example.items()}
    one["engine"] = middle["first batch"] + per_example["engine"] * (plan["examples"] - first)
    one |= {way: middle[way] for way in ("live", "file")}
    whole = {way: value * plan["times"] for way, value in one.items()}
    training = middle["step"] * plan["steps"] * plan["times"]
    return {
        "parameters": parameters,
        "measured_seconds": {way: [round(v, 6) for v in values] for way, values in seconds.items()},
        "per_example_ms": {way: 1000 * value for way, value in per_example.items()},
        "setting_seconds": whole,
        "training_seconds": training,
        "engine_speedup": whole["loop"] / whole["engine"],
        "loop_of_training": whole["loop"] / training,
        "engine_of_training": whole["engine"] / training,
        "engine_over_live": whole["engine"] / whole["live"],
        "times": {"fisher": whole["engine"], "squisher": whole["live"]},
    }


def _values(importance: squisher.Importance) -> dict[str, Tensor]:
    return dict(importance.as_fisher().items())


def _existing(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
