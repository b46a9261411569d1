"""Fisher pruning: which filters of a convolutional network can go.

What the paper did: VGG-13 on CIFAR-100 after OrthoReg (Lubana and Dick, 2021): 15 epochs of Adam, the least important 25, 50
or 75 % of all filters removed in one round, long retraining; 5 seeds. Its formula is ½θ²F a weight; the code that it follows
scores a filter by (Σ θ ĝ)², ĝ the mean gradient over about 10,000 images: a joint Fisher of the whole filter. Which form the
Squisher took is not said.

What we do at scale `cpu`: the same network at an eighth of its width, 10,000 of the 20,000 training images of our CIFAR-100
split (ours, because the copy at hand had pooled the official parts), 15 epochs, 3 epochs of retraining instead of 140. All
test images. The learning rate is chosen on seed 0 and 2,000 other images, once for all methods. Methods:

    fisher                    Σ ½θ²F, F from single examples and their labels: the Squisher's own aggregation
    squisher                  Σ ½θ²v̂ with what AdamW holds at its last step, the step that the weights are of
    fisher (OrthoReg)         (Σ θ ĝ)²; ĝ in evaluation mode over all training images, not augmented
    random                    the paper's baseline
    magnitude                 Σ θ²; not in the paper
    fisher (sampled labels)   Σ ½θ²F, unbiased for the Fisher (the exact one costs 100 backward passes, one a class)
    squisher (sqrt)           ½(Σ θ√v̂)²

"base 10 epochs" is the same run, ten epochs in: weights and optimizer state of that step. Values "before retraining" are those
of the network as it comes out of pruning. Filters need Torch-Pruning (`pip install 'torch-squisher[prune]'`). Scale `quick`
prunes single weights of a perceptron on the digits of scikit-learn; the same on MNIST is `experiments.pruning_weights`.

Nothing is concluded from a network that recognises less than half of the test images before it is pruned. Scale `cifar10` is what
two cores can do of that in an evening: CIFAR-10, 10,000 images to train on and 2,000 to test on (of the official parts), a
quarter of the width, 15 epochs, 20 epochs of retraining; Fisher, Squisher and random filters at every level, the rest at
the highest. The learning rate is chosen on 2,000 of the training images, held out for that alone. Which of the few test images
were right is kept, so that their choice is in the intervals.

Scale `quarter` is the same on all 20,000 images of CIFAR-100, every aggregation at every level, five seeds: about 15 hours of one
thread.

There is no scale `paper`: its protocol is this code with `divide_width` 1 (9,462,180 parameters), all 50,000 images, 140 epochs
of retraining, of which the rate falls by ten after 60 and after 100, and 5 seeds, on a GPU.
"""

from __future__ import annotations

import copy
import functools
import itertools
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import squisher
from experiments import data, networks, pruning_weights
from experiments.data import Labelled
from experiments.networks import accuracy, right_rows
from experiments.runs import Right, Run, Score, Unit
from experiments.tuning import share

TITLE = "Fisher pruning"
BASELINE = "random"
METRIC = "accuracy"
HIGHER_IS_BETTER = True
STAND_IN = (
    "VGG-13 (9.4M), 50,000 images, 140 epochs of retraining, unpruned near 67 %",
    "CIFAR-10: a quarter of its width, 10,000 images, 20 epochs of retraining; CIFAR-100: an eighth, 3 epochs, too weak to tell anything",
)
MAIN_CASES = ("25% pruned", "50% pruned", "75% pruned")
PAPER = {  # VGG-13, CIFAR-100, mean of 5 seeds; the last two rows are of the table on the length of training
    "25% pruned": {"fisher": 67.0, "squisher": 66.7, "random": 65.9},
    "50% pruned": {"fisher": 66.9, "squisher": 65.9, "random": 64.0},
    "75% pruned": {"fisher": 64.8, "squisher": 63.9, "random": 58.8},
    "75% pruned, base 10 epochs": {"fisher": 64.0, "squisher": 64.3},
}
SOUND_FROM = ("unpruned", 50.0)
FEW = 5000  # test images, of which is kept which were right

CONFIGS: dict[str, dict[str, Any]] = {
    "quick": {
        "seeds": 5,
        "perceptron": pruning_weights.PERCEPTRON
        | {
            "train": 1437,
            "widths": [64, 64, 32, 10],
            "epochs": 10,
            "batch": 32,
            "sparsities": [0.25, 0.5, 0.75],
            "scopes": ["global"],
        },
    },
    "cpu": {
        "seeds": 3,
        "filters": {
            "divide_width": 8,
            "images": 10_000,
            "validation": 2_000,
            "batch": 128,
            "decay": 0.01,
            "rates": [5e-4, 1e-3, 3e-3],
            "search_epochs": 3,
            "epochs": 15,
            "short_epochs": 10,
            "retrain_epochs": 3,
            "ratios": [0.25, 0.5, 0.75],
            "minimum": 0.05,
            "fisher_examples": 2_000,  # of the variants that look at single examples
            "methods": ["fisher (OrthoReg)", "squisher", "random", "magnitude"],
            "at_the_highest": ["fisher", "fisher (sampled labels)", "squisher (sqrt)"],
            "short_methods": ["fisher (OrthoReg)", "squisher"],
        },
    },
}
CONFIGS["quarter"] = {
    "seeds": 5,
    "filters": CONFIGS["cpu"]["filters"]
    | {
        "divide_width": 4,
        "images": 20_000,
        "retrain_epochs": 20,
        "methods": ["fisher", "fisher (OrthoReg)", "squisher", "random", "magnitude"],
        "at_the_highest": ["fisher (sampled labels)", "squisher (sqrt)"],
        "short_methods": ["fisher", "fisher (OrthoReg)", "squisher"],
    },
}
CONFIGS["cifar10"] = {
    "seeds": 5,
    "filters": CONFIGS["quarter"]["filters"]
    | {
        "classes": 10,
        "images": 10_000,
        "methods": ["fisher", "squisher", "random"],
        "at_the_highest": ["fisher (OrthoReg)", "magnitude"],
    },
}
BENCHMARKS = {"cpu": {"cifar10": "Fisher pruning, CIFAR-10", "cpu": "Fisher pruning, CIFAR-100"}}
CHANNELS = (64, 64, 0, 128, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0)  # 0: pooling


def stages(config: dict[str, Any], seeds: range) -> list[list[Unit]]:
    """Search of the learning rate; base networks and how they are pruned; retraining. At scale quick, perceptrons."""
    if "filters" not in config:
        return [[Unit(f"seed-{seed}", "perceptron", {"seed": seed}) for seed in seeds]]
    f = config["filters"]
    search = [Unit(f"search/{rate:g}", "search", {"rate": rate}) for rate in f["rates"]]
    bases = [Unit(f"seed-{seed}/base", "base", {"seed": seed}) for seed in seeds]
    last, ratios = max(f["ratios"]), f["ratios"]
    wanted = [(m, r, f["epochs"]) for r in ratios for m in f["methods"]]
    wanted += [(m, last, f["epochs"]) for m in f["at_the_highest"]]
    wanted += [(m, last, f["short_epochs"]) for m in f["short_methods"]]
    retrained = [
        Unit(f"seed-{seed}/{m}/{r:g}/{e}", "retrain", {"seed": seed, "method": m, "ratio": r, "epochs": e})
        for seed in seeds
        for m, r, e in wanted
    ]
    return [search, bases, retrained]


def scores(results: Mapping[str, dict[str, Any]]) -> list[Score]:
    """Return accuracy in percent by case, method and seed; "unpruned" is the network that a case starts from."""
    out = []
    whole = {r["seed"]: r["unpruned"] for r in results.values() if "unpruned" in r}
    longest = max((r["epochs"] for r in results.values() if "ratio" in r), default=None)
    for key, result in results.items():
        if key.startswith("search/"):
            continue
        seed = result["seed"]
        if "ratio" in result:
            case = _case(result, longest)
            out.append(Score(case, result["method"], seed, result["after"]))
            out.append(Score(case, "unpruned", seed, whole[seed][str(result["epochs"])]))
            continue
        for row in result["rows"]:
            if row.get("epochs") == longest:
                case = f"{row.get('ratio', row.get('sparsity')):.0%} pruned"
                if "after" in row:
                    out.append(Score(case, row["method"], seed, row["after"]))
                    out.append(Score(case, "unpruned", seed, result["unpruned"]))
                out.append(Score(f"{case}, before retraining", row["method"], seed, row["before"]))
    return out


def right(results: Mapping[str, dict[str, Any]]) -> Right:
    """Return which test images were classified correctly, if there are few and it was recorded."""
    longest = max((r["epochs"] for r in results.values() if "ratio" in r), default=None)
    return {(_case(r, longest), r["method"], r["seed"]): [r["right"]] for r in results.values() if "right" in r}


def chance(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the score of guessing, the same in all cases."""
    return {"": 100.0 / _classes(config)}


def _case(result: Mapping[str, Any], longest: int | None) -> str:
    name = f"{result['ratio']:.0%} pruned"
    return name if result["epochs"] == longest else f"{name}, base {result['epochs']} epochs"


def perceptron(run: Run, seed: int) -> dict[str, Any]:
    """Run the pruning of single weights of a perceptron on the digits of scikit-learn."""
    return pruning_weights.pruned_in_every_way(run.config["perceptron"], *data.digits(), seed)


def vgg(divide_width: int, classes: int) -> nn.Sequential:
    """Run VGG-13 at a fraction of its width."""
    return networks.vgg([width // divide_width for width in CHANNELS], classes)


def parts(run: Run) -> tuple[Labelled, Labelled, Labelled]:
    """Return images to train on, to choose the learning rate by, and to test on.

    The first two are disjoint where the images suffice; where all are trained on, `search` leaves the second out.
    """
    f = run.config["filters"]
    classes = _classes(run.config)
    folder = run.data_folder("cifar-10-batches-bin" if classes == 10 else "cifar-100-binary")
    return _parts(folder, classes, f["images"], f["validation"])


def _classes(config: Mapping[str, Any]) -> int:
    return config.get("filters", {"classes": 10}).get("classes", 100)


@functools.cache  # many short units of one process use them
def _parts(folder: Path, classes: int, images: int, validation: int) -> tuple[Labelled, Labelled, Labelled]:
    train, test = data.cifar(folder, classes)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    held = order[images:][:validation] if images + validation <= len(train) else order[images - validation : images]
    return train[order[:images]], train[held], test


def search(run: Run, rate: float) -> dict[str, Any]:
    """Return the accuracy on validation images after a few epochs, with a seed of its own."""
    train, validation, _ = parts(run)
    if torch.equal(train.inputs[-1], validation.inputs[-1]):  # all images are trained on, but not in the search
        train = train[: len(train) - len(validation)]
    torch.manual_seed(0)
    model = _network(run, train)
    for _ in _epochs(run, model, train, rate, run.config["filters"]["search_epochs"], seed=0):
        pass
    return {"rate": rate, "validation": accuracy(model, validation)}


def chosen_rate(run: Run) -> float:
    """Return the learning rate that was best on validation images."""
    found = [run.result(f"search/{rate:g}") for rate in run.config["filters"]["rates"]]
    return max(found, key=lambda result: result["validation"])["rate"]


def base(run: Run, seed: int) -> dict[str, Any]:
    """Train one network; prune copies of it in every way, without retraining."""
    f = run.config["filters"]
    train, _, test = parts(run)
    out: dict[str, Any] = {"seed": seed, "unpruned": {}, "rows": [], "times": {}, "spearman": {}, "overlap": {}}
    for epochs in (f["short_epochs"], f["epochs"]):
        kept = _trained(run, seed, epochs, train)
        model = _network(run, train)
        model.load_state_dict(kept["model"])
        out["unpruned"][str(epochs)] = accuracy(model, test)
        out["times"] = kept["times"]
        importances = kept["importances"]
        out["spearman"][str(epochs)] = {
            name: round(squisher.compare(importances["squisher"], importances[name]).spearman, 4)
            for name in ("fisher", "fisher (sampled labels)")
        }
        removed: dict[str, list[set[tuple[int, int]]]] = {}
        methods = f["methods"] + f["at_the_highest"] if epochs == f["epochs"] else f["short_methods"]
        for method, ratio in itertools.product(methods, f["ratios"]):
            smaller = pruned(model, importances, method, ratio, f["minimum"], seed)
            removed.setdefault(method, []).append(gone(model, smaller))
            out["rows"].append(
                {
                    "method": method,
                    "ratio": ratio,
                    "epochs": epochs,
                    "before": accuracy(smaller, test),
                    "parameters": sum(p.numel() for p in smaller.parameters()),
                    "widths": [layer.out_channels for layer in smaller if isinstance(layer, nn.Conv2d)],
                }
            )
        out["overlap"][str(epochs)] = {  # with what the reference's score removes; chance is the ratio
            method: [round(len(a & b) / len(b), 4) for a, b in zip(sets, removed["fisher (OrthoReg)"], strict=True)]
            for method, sets in removed.items()
            if method != "fisher (OrthoReg)"
        }
    return out


def retrain(run: Run, seed: int, method: str, ratio: float, epochs: int) -> dict[str, Any]:
    """Prune the network of this seed in one way and train what is left; the rate falls linearly to zero."""
    f = run.config["filters"]
    train, _, test = parts(run)
    kept = _trained(run, seed, epochs, train)
    model = _network(run, train)
    model.load_state_dict(kept["model"])
    smaller = pruned(model, kept["importances"], method, ratio, f["minimum"], seed)
    for _ in _epochs(run, smaller, train, chosen_rate(run), f["retrain_epochs"], seed=1000 + seed, decay=True):
        pass
    rows = right_rows(smaller, test)
    return {
        "seed": seed, "method": method, "ratio": ratio, "epochs": epochs, "after": share(rows),
        **({"right": rows} if len(test) <= FEW else {}),
    }  # fmt: skip


def pruned(
    model: nn.Sequential, importances: Mapping[str, Any], method: str, ratio: float, minimum: float, seed: int
) -> nn.Sequential:
    """Return a smaller copy of the network."""
    score = {"fisher (OrthoReg)": "orthoreg", "squisher (sqrt)": "sqrt", "random": "random", "magnitude": "magnitude"}
    orthoreg = method == "fisher (OrthoReg)"
    return squisher.prune.channels(
        model,
        None if orthoreg else importances.get(method.removesuffix(" (sqrt)")),
        torch.zeros(1, 3, 32, 32),
        ratio,
        score=score.get(method, "fisher"),
        gradients=importances[method] if orthoreg else None,
        minimum=minimum,
        seed=seed,
    )


def gone(model: nn.Sequential, smaller: nn.Sequential) -> set[tuple[int, int]]:
    """Return the filters that were removed, as (layer, index). Filters keep their biases, and no two of these are equal."""
    pairs = zip(model, smaller, strict=True)
    return {
        (layer, index)
        for layer, (whole, part) in enumerate(pairs)
        if isinstance(whole, nn.Conv2d)
        for index in (~torch.isin(whole.bias, part.bias)).nonzero().flatten().tolist()
    }


def _trained(run: Run, seed: int, epochs: int, train: Labelled) -> dict[str, Any]:
    """Return weights and their importances after this many epochs of one run."""
    f = run.config["filters"]

    def make() -> dict[str, Any]:
        torch.manual_seed(seed)
        model = _network(run, train)
        kept: dict[str, Any] = {}
        steps = _epochs(run, model, train, chosen_rate(run), f["epochs"], seed)
        for epoch, optimizer in enumerate(steps, 1):
            if epoch in (f["short_epochs"], f["epochs"]):
                kept[str(epoch)] = _importances(model, optimizer, train, f, seed)
        return kept

    return run.cached(f"pruning-{run.scale}-{seed}", make)[str(epochs)]


def _importances(
    model: nn.Module, optimizer: torch.optim.Optimizer, train: Labelled, f: dict[str, Any], seed: int
) -> dict[str, Any]:
    batches = train.batches(f["batch"])
    times, found = {}, {}

    def timed(name: str, make: Any) -> None:
        start = time.perf_counter()
        found[name] = make()
        times[name] = time.perf_counter() - start

    timed("squisher", lambda: dict(squisher.extract(optimizer, model, batch_size=f["batch"])))
    timed("fisher (OrthoReg)", lambda: mean_gradient(model, train, f["batch"]))
    few = f["fisher_examples"]
    for name, labels in (("fisher", "data"), ("fisher (sampled labels)", "sampled")):
        measured = functools.partial(squisher.fisher, model, batches, labels=labels, max_examples=few, seed=seed)
        timed(name, lambda measured=measured: dict(measured()))
    return {"model": copy.deepcopy(model.state_dict()), "importances": found, "times": times}


def mean_gradient(model: nn.Module, train: Labelled, size: int) -> dict[str, Tensor]:
    """Return the gradient of the mean loss over all images, in evaluation mode."""
    training = model.training
    model.eval()
    model.zero_grad()
    for images, labels in train.batches(size):
        (nn.functional.cross_entropy(model(images), labels, reduction="sum") / len(train)).backward()
    out = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.train(training)
    return out


def _network(run: Run, train: Labelled) -> nn.Sequential:
    return vgg(run.config["filters"]["divide_width"], int(train.labels.max()) + 1)


def _epochs(
    run: Run, model: nn.Module, train: Labelled, rate: float, epochs: int, seed: int, decay: bool = False
) -> Iterator[torch.optim.Optimizer]:
    """Train, and yield the optimizer after each epoch, without the smaller last batch of an epoch."""
    f = run.config["filters"]
    model.to(memory_format=torch.channels_last)  # a third faster
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=f["decay"])
    generator = torch.Generator().manual_seed(seed)
    steps = len(train) // f["batch"] * epochs
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps if decay else 1.0)
    for _ in range(epochs):
        model.train()
        for rows in data.shuffled(len(train), f["batch"], generator):
            images = data.augmented(train.inputs[rows], generator).contiguous(memory_format=torch.channels_last)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), train.labels[rows]).backward()
            optimizer.step()
            schedule.step()
        yield optimizer
