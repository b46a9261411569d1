"""Learning contexts one after the other with a quadratic penalty: what the EWC benchmarks share.

Three scenarios, as in van de Ven et al. Task: one output for each class of each context; the context is known in training, in
the Fisher and at the test, and selects the slice of outputs that is used. Domain: one output for each class of a context, shared by
all contexts. Class: one output for each class of each context, and all of them are always in use. One Adam goes through all
contexts without a reset.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import squisher
from experiments.data import Labelled, shuffled
from experiments.networks import Sliced, accuracy, perceptron

__all__ = ["METHODS", "Context", "Method", "hold_out", "learn_all", "permuted", "split"]

REFERENCE = 500  # inputs of the small exact Fisher that every importance is set beside


@dataclass(frozen=True)
class Method:
    """How a context's importance is made.

    Attributes:
        source: "none", "identity" (1 everywhere), "exact", "empirical", "joint", "optimizer" (Adam's state as it is),
            "tracker" (the same average of the data's gradients) or "moving" (of the squares of single examples).
        beta2: Of Adam and of the tracker.
        rule: Where λ comes from. "search": a search of its own. The others start from the exact Fisher's λ: "unchanged" uses
            it on v, without the batch size; "times N" uses it N-fold on v, N being the examples of a context; "first" converts
            it by `EWC.strength_like` after the first context.
        decoupled: Whether the penalty acts by `EWC.pull_` after the optimizer's step instead of in the gradient; λ is then
            another one.
        examples: How many a Fisher is measured on, at most; None for what the configuration says.
    """

    source: str
    beta2: float = 0.999
    rule: str = "search"
    decoupled: bool = False
    examples: int | None = None


METHODS = {
    "none": Method("none", rule="none"),
    "fisher": Method("exact"),
    "squisher": Method("optimizer"),
    "squisher (tracked)": Method("tracker"),
    "fisher (empirical)": Method("empirical"),
    "joint": Method("joint"),
    "squisher (β₂ = 0.95)": Method("optimizer", beta2=0.95),
    "squisher (without rescaling)": Method("optimizer", rule="unchanged"),
    "squisher (N·v)": Method("optimizer", rule="times N"),
    "squisher (tracked, strength_like)": Method("tracker", rule="first"),
    "identity": Method("identity"),
    "squisher (decoupled)": Method("optimizer", decoupled=True),
    "fisher (moving average)": Method("moving"),
}


@dataclass(frozen=True)
class Context:
    """One thing to learn: examples with labels counted from 0, and the outputs that stand for these labels."""

    train: Labelled
    test: Labelled
    head: slice
    pixels: Tensor | None = None

    def seen(self, examples: Labelled) -> Labelled:
        """Return the inputs and labels of this context."""
        return examples if self.pixels is None else Labelled(examples.inputs[:, self.pixels], examples.labels)


def split(train: Labelled, test: Labelled, contexts: int, seed: int, scenario: str = "task") -> list[Context]:
    """Return contexts with equally many classes each, in an order drawn by the seed."""
    classes = int(train.labels.max()) + 1
    each = classes // contexts
    order = torch.randperm(classes, generator=torch.Generator().manual_seed(seed))
    place = torch.empty_like(order)
    place[order] = torch.arange(classes)
    found = []
    for number in range(contexts):
        first = number * each
        parts = []
        for part in (train, test):
            places = place[part.labels]
            own = (places >= first) & (places < first + each)
            parts.append(Labelled(part.inputs[own], places[own] - (0 if scenario == "class" else first)))
        found.append(Context(parts[0], parts[1], _head(scenario, first, each)))
    return found


def permuted(train: Labelled, test: Labelled, contexts: int, seed: int, scenario: str = "task") -> list[Context]:
    """Return contexts of all classes, each with its own order of the pixels of padded (32×32) images."""
    classes = int(train.labels.max()) + 1
    padded = [nn.functional.pad(part.inputs.view(-1, 28, 28), (2, 2, 2, 2)).flatten(1) for part in (train, test)]
    generator = torch.Generator().manual_seed(seed)
    found = []
    for first in range(0, contexts * classes, classes):
        offset = first if scenario == "class" else 0
        parts = [Labelled(inputs, part.labels + offset) for inputs, part in zip(padded, (train, test), strict=True)]
        pixels = torch.randperm(1024, generator=generator)
        found.append(Context(parts[0], parts[1], _head(scenario, first, classes), pixels))
    return found


def _head(scenario: str, first: int, each: int) -> slice:
    """Return the outputs that a context uses."""
    return {"task": slice(first, first + each), "domain": slice(0, each), "class": slice(None)}[scenario]


def hold_out(train: Labelled, share: float, seed: int) -> tuple[Labelled, Labelled]:
    """Split the training examples at random; return the larger part and the held-out part."""
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    count = round(share * len(train))
    return train[order[count:]], train[order[:count]]


def learn_all(
    contexts: list[Context], method: Method, strength: float, config: dict[str, Any], seed: int
) -> dict[str, Any]:
    """Learn all contexts in order, with the importance of each past one in the penalty.

    Args:
        contexts: What to learn; `test` is what is scored.
        method: How importances are made.
        strength: λ; for the rules that convert it, the exact Fisher's.
        config: widths, iterations, batch, lr, fisher_examples.
        seed: Of the network and of the order of the examples.

    Returns:
        Accuracies in percent at the end (mean, and of each context), those right after each context was learnt, the total of
        each importance as the penalty uses it and of a small exact Fisher at the same weights, the λ given and used, times,
        in which contexts the library warned of growth, and the context after which numbers were no longer finite, if any.
    """
    torch.manual_seed(seed)
    model = Sliced(perceptron(config["widths"]))
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"], betas=(0.9, method.beta2), fused=True)
    kind = {"tracker": "batch", "moving": "example"}.get(method.source)
    tracker = None if kind is None else squisher.Tracker(model, optimizer, method.beta2, per=kind)
    given = strength
    if method.rule == "times N":
        strength *= statistics.fmean(len(context.train) for context in contexts)
    ewc = squisher.EWC(model, strength=strength)
    generator = torch.Generator().manual_seed(seed)
    out: dict[str, Any] = {
        "learnt": [], "traces": [], "reference_traces": [], "spearman": [], "warned": [], "diverged": None,
        "left_to_loop": [], "fisher_seconds": [],
    }  # fmt: skip
    if method.source == "exact":
        out["times"] = {"fisher": 0.0, "squisher": 0.0}
    for number, context in enumerate(contexts):
        model.head = context.head
        if tracker is not None:
            tracker.reset()
        _learn(model, optimizer, context, config, generator, tracker, ewc, method.decoupled)
        out["learnt"].append(_accuracy(model, context))
        if not all(bool(p.isfinite().all()) for p in model.parameters()):
            out["diverged"] = number + 1
            break
        if method.source == "none" or number == len(contexts) - 1:
            continue
        try:
            _consolidate(ewc, method, strength, model, optimizer, tracker, context, config, out)
        except squisher.SquisherError as error:
            if not any(word in str(error) for word in ("NaN", "infinite")):
                raise
            out["diverged"] = number + 1
            break
    scores = []
    for context in contexts:
        model.head = context.head
        scores.append(_accuracy(model, context))
    return {
        "accuracy": round(statistics.fmean(scores), 4),
        "contexts": scores,
        "given": given,
        "strength": ewc.strength,
        **{key: [_short(v) for v in value] if isinstance(value, list) else value for key, value in out.items()},
    }


def _learn(
    model: Sliced,
    optimizer: torch.optim.Optimizer,
    context: Context,
    config: dict[str, Any],
    generator: torch.Generator,
    tracker: squisher.Tracker | None,
    ewc: squisher.EWC,
    decoupled: bool,
) -> None:
    rows = _epochs(len(context.train), config["batch"], generator)
    per = None if tracker is None else tracker.per
    for batch in itertools.islice(rows, config["iterations"]):
        inputs, labels = context.seen(context.train[batch])
        optimizer.zero_grad()
        with tracker.step() if per == "example" else contextlib.nullcontext():  # type: ignore[union-attr]
            nn.functional.cross_entropy(model(inputs), labels).backward()
        if per == "batch":
            tracker.observe()  # type: ignore[union-attr]
        if ewc.tasks and not decoupled:
            ewc.add_gradient_()
        optimizer.step()
        if ewc.tasks and decoupled:
            ewc.pull_(optimizer)


def _epochs(count: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield rows of batches without end."""
    while True:
        yield from shuffled(count, size, generator)


def _accuracy(model: Sliced, context: Context) -> float:
    return accuracy(model, context.seen(context.test), size=len(context.test))


def _consolidate(
    ewc: squisher.EWC,
    method: Method,
    strength: float,
    model: Sliced,
    optimizer: torch.optim.Optimizer,
    tracker: squisher.Tracker | None,
    context: Context,
    config: dict[str, Any],
    out: dict[str, Any],
) -> None:
    examples = context.seen(context.train[: method.examples or config["fisher_examples"]])
    scaled = method.rule not in ("unchanged", "times N")
    start = time.perf_counter()
    if method.source in ("exact", "empirical"):
        labels = "exact" if method.source == "exact" else "data"
        importance = squisher.fisher(model, examples.batches(500), labels=labels)
    elif method.source == "identity":
        importance = squisher.Importance({n: torch.ones_like(p) for n, p in model.named_parameters()}, kind="fisher")
    elif method.source == "joint":
        importance = squisher.fisher(model, examples.batches(len(examples)), per="batch")
    else:
        importance = squisher.extract(
            optimizer if tracker is None else tracker, model, batch_size=config["batch"] if scaled else None
        )
    taken = time.perf_counter() - start
    if method.source == "exact":  # the other one too, only for its time, at the same weights
        out["times"]["fisher"] += taken
        out["fisher_seconds"].append(taken)
        start = time.perf_counter()
        squisher.extract(optimizer, model, batch_size=config["batch"])
        out["times"]["squisher"] += time.perf_counter() - start
    few = context.seen(context.train[:REFERENCE])
    reference = squisher.fisher(model, few.batches(REFERENCE), labels="exact")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ewc.consolidate(importance, scale="auto" if scaled else "stored")
    if any(issubclass(w.category, squisher.SquisherWarning) for w in caught):
        out["warned"].append(ewc.tasks)
    if method.rule == "first" and ewc.tasks == 1:
        ewc.strength = ewc.strength_like(reference, strength)
    out["traces"].append(ewc.totals[-1])
    out["reference_traces"].append(sum(float(reference[name].double().sum()) for name in reference))
    if method.source == "exact":
        out["left_to_loop"].append(len(importance.provenance.coverage["loop"]))
    if method.source != "identity":  # constant: it has no ranks
        out["spearman"].append(squisher.compare(importance, reference).spearman)


def _short(value: float) -> float:
    return float(f"{value:.6g}")
