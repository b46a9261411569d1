"""What applications lose with each codec, paired with the exact file; a part of `python -m benchmarks.codecs`.

Two settings. Handwritten digits: a perceptron, one angle per task. Sentences: MiniLM (22.6M parameters, word embeddings frozen) with a
head per task, 40 steps on SST-2 and on Subj; bodies are merged, heads are not. The mask is of the start's Fisher (64 examples), and
EWC learns Subj after SST-2.

Numbers are accuracies in percent, means over the tasks that matter: both of a merge and of EWC, the one task of pruning and masks.
For task embeddings it is the largest change of a distance, relative to the exact one. `without importance` is what one does without:
the average, task arithmetic, magnitude pruning, a random mask, no penalty.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import squisher

CODECS = ("exact", "bfloat16", "log8", "rank1")
WITHOUT = "without importance"
PARTS = {"digits": (*CODECS, WITHOUT), "sentences": ("exact", "log8", "rank1", WITHOUT)}
"""The settings, and what is compared in each."""


def applications(
    part: str, data: Path, seeds: int, done: Collection[tuple[int, str]]
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of one seed and codec after another, of "digits" or of "sentences", except those that are done."""
    with tempfile.TemporaryDirectory() as cache:
        for seed in range(seeds):
            left = [codec for codec in PARTS[part] if (seed, codec) not in done]
            found = on_digits(seed, left) if part == "digits" else on_sentences(data, Path(cache), seed, left)
            for codec, values in found if left else ():
                yield [
                    {"seed": seed, "application": name, "codec": codec, "value": round(value, 4)}
                    for name, value in values.items()
                ]
                print("seed", seed, codec, values, flush=True)


def coded(importance: squisher.Importance, codec: str) -> squisher.Importance:
    """Return an importance as it comes back from a file with this codec."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.safetensors"
        importance.save(path, **({"dtype": "bfloat16"} if codec == "bfloat16" else {"codec": codec}))
        loaded = squisher.load(path)
        return squisher.Importance(dict(loaded.items()), **loaded.provenance.to_dict())


def moved(exact: Mapping[Any, squisher.Importance], coded: Mapping[Any, squisher.Importance], by: str) -> float:
    """Return the largest change of a distance between two tasks, in percent of the exact one."""
    pairs = [(a, b) for k, a in enumerate(exact) for b in list(exact)[k + 1 :]]
    before, after = (
        [squisher.embed.distance(*(squisher.embed.embedding(one[k], by=by) for k in pair)) for pair in pairs]
        for one in (exact, coded)
    )
    return 100 * max(abs(x - y) / x for x, y in zip(before, after, strict=True))


def random_mask(like: squisher.Importance, keep: float, seed: int, always: str | None = None) -> Any:
    """Return a mask of as many entries, chosen by chance."""
    generator = torch.Generator().manual_seed(seed)
    values = {name: torch.rand(like[name].shape, generator=generator) for name in like}
    return squisher.mask.top_k(squisher.Importance(values, kind="fisher"), keep=keep, always=always)


# -- digits ------------------------------------------------------------------------------------------------------------


def on_digits(seed: int, codecs: Collection[str]) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the results of every application with every codec, on the same models."""
    from experiments.data import digits

    train, test = digits()
    torch.manual_seed(seed)
    tasks = {angle: (_turned(train.inputs, angle), _turned(test.inputs, angle)) for angle in (0, 90, 180, 270)}
    start = network()
    fit(start, tasks[0][0], train.labels, seed)
    tuned, exact = {}, {}
    for angle in tasks:
        model = network(start)
        exact[angle] = fit(model, tasks[angle][0], train.labels, seed + 1, start=start)
        tuned[angle] = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    def accuracy(weights: Mapping[str, Tensor], *angles: int) -> float:
        model = network()
        model.load_state_dict({name: weights[name] for name in model.state_dict()})
        with torch.no_grad():
            right = [(model(tasks[angle][1]).argmax(1) == test.labels).float().mean() for angle in angles]
        return 100 * float(sum(right)) / len(right)

    two = [tuned[90], tuned[180]]
    base = start.state_dict()
    for codec in codecs:
        if codec == WITHOUT:
            magnitude = squisher.prune.weights(tuned[90], None, sparsity=0.6, score="magnitude")
            mask = random_mask(exact[0], 0.02, seed)
            yield (
                codec,
                {
                    "merge fisher": accuracy(squisher.merge.average(two), 90, 180),
                    "merge ubgm": accuracy(squisher.merge.task_arithmetic(base, two), 90, 180),
                    "prune 60%": accuracy(magnitude, 90),
                    "mask 2%": accuracy(masked(start, mask, tasks[90][0], train.labels, seed), 90),
                    "EWC": accuracy(consolidated(tuned[0], None, tasks[90][0], train.labels, seed), 0, 90),
                },
            )
            continue
        imp = {angle: coded(importance, codec) for angle, importance in exact.items()}
        pair = [imp[90], imp[180]]
        mask = squisher.mask.top_k(imp[0], keep=0.02)
        yield (
            codec,
            {
                "merge fisher": accuracy(squisher.merge.fisher(two, pair), 90, 180),
                "merge ubgm": accuracy(squisher.merge.ubgm(base, two, imp[0], pair), 90, 180),
                "prune 60%": accuracy(squisher.prune.weights(tuned[90], imp[90], sparsity=0.6), 90),
                "mask 2%": accuracy(masked(start, mask, tasks[90][0], train.labels, seed), 90),
                "EWC": accuracy(consolidated(tuned[0], imp[0], tasks[90][0], train.labels, seed), 0, 90),
                "embed by tensor": moved(exact, imp, "tensor"),
                "embed by row": moved(exact, imp, "row"),
            },
        )


def masks(seed: int) -> Iterator[dict[str, Any]]:
    """Yield how a mask of 2% trains for the angle of 90°, chosen from importances with more or less noise, exact and with rank1."""
    from experiments.data import digits

    train, test = digits()
    torch.manual_seed(seed)
    inputs = {angle: _turned(train.inputs, angle) for angle in (0, 90)}
    start = network()
    fit(start, inputs[0], train.labels, seed)
    found = {
        f"optimizer, {angle}°": fit(network(start), inputs[angle], train.labels, seed + 1, start=start)
        for angle in inputs
    }
    order = torch.randperm(len(train.labels), generator=torch.Generator().manual_seed(seed))
    for count in (16, 128, len(order)):
        batches = [(inputs[0][rows], train.labels[rows]) for rows in order[:count].split(64)]
        found[f"Fisher, 0°, {count} examples"] = squisher.fisher(start, batches, labels="exact")
    for name, importance in found.items():
        for codec in ("exact", "rank1"):
            mask = squisher.mask.top_k(coded(importance, codec), keep=0.02)
            model = network()
            model.load_state_dict(masked(start, mask, inputs[90], train.labels, seed))
            with torch.no_grad():
                right = (model(_turned(test.inputs, 90)).argmax(1) == test.labels).float().mean()
            yield {"seed": seed, "importance": name, "codec": codec, "value": round(100 * float(right), 4)}


def network(like: nn.Module | None = None) -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    if like is not None:
        model.load_state_dict(like.state_dict())
    return model


def fit(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    seed: int,
    start: nn.Module | None = None,
    before: Callable[[], None] | None = None,
    steps: int = 200,
    optimizer: torch.optim.Optimizer | None = None,
) -> squisher.Importance:
    """Train, and return what the optimizer holds."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3 if start is None else 3e-4)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = torch.randint(len(labels), (32,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
        if before is not None:
            before()
        optimizer.step()
    return squisher.extract(optimizer, model, batch_size=32)


def masked(start: nn.Module, mask: Any, inputs: Tensor, labels: Tensor, seed: int) -> Mapping[str, Tensor]:
    model = network(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    squisher.mask.train_only(model, optimizer, mask)
    fit(model, inputs, labels, seed, optimizer=optimizer)
    return model.state_dict()


def consolidated(
    weights: Mapping[str, Tensor], importance: squisher.Importance | None, inputs: Tensor, labels: Tensor, seed: int
) -> Mapping[str, Tensor]:
    model = network()
    model.load_state_dict(dict(weights))
    ewc = squisher.EWC(model, strength=1000.0)
    if importance is not None:
        ewc.consolidate(importance)
    fit(model, inputs, labels, seed, start=model, before=ewc.add_gradient_)
    return model.state_dict()


def _turned(inputs: Tensor, angle: int) -> Tensor:
    return torch.rot90(inputs.view(-1, 8, 8), angle // 90, (1, 2)).reshape(-1, 64)


# -- sentences ---------------------------------------------------------------------------------------------------------

RECIPE: dict[str, Any] = {
    "model": "minilm", "pooling": "mean", "frozen": "word_embeddings", "length": 32, "train": None, "validation": 10, "test": 400,
    "steps": 40, "batch": 16, "rate": 1e-4, "schedule": "constant", "warmup": 0, "beta2": 0.999, "eps": 1e-8, "decay": 0.0,
    "clip": None, "every": None, "keep": [],
}  # fmt: skip
FIRST, SECOND = "sst2", "subj"
BODY, HEAD, TRAINED = r"^body\.", r"^head\.", r"^(?!.*word_embeddings)"
PRUNED, KEPT, STRENGTH = 0.6, 0.005, 1e5


def on_sentences(data: Path, cache: Path, seed: int, codecs: Collection[str]) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the results of every application with every codec, on the same fine-tunes of MiniLM."""
    from experiments import text
    from experiments.runs import Run
    from experiments.tuning import accuracy, importance

    run = Run("codecs", "cpu", {}, data, cache)
    (cache / "cache").mkdir(exist_ok=True)
    rows = {task: text.splits(run, task, RECIPE) for task in (FIRST, SECOND)}
    tuned = {task: text.fine_tune(run, task, seed, RECIPE)["snapshots"]["final"] for task in rows}
    exact = {task: importance(one, BODY) for task, one in tuned.items()}
    start = text.load(RECIPE, 2, seed)
    base = {name: tensor for name, tensor in text.weights_of(start).items() if name.startswith("body.")}
    bodies = [{name: one["weights"][name] for name in base} for one in tuned.values()]
    first_rows = [rows[FIRST].train.batch(slice(k, k + 16)) for k in range(0, 64, 16)]
    before = squisher.fisher(start, first_rows, labels="exact", parameters=TRAINED)

    def model_of(task: str, body: Mapping[str, Tensor]) -> nn.Module:
        model = text.load(RECIPE, rows[task].classes, seed)
        model.load_state_dict({**tuned[task]["weights"], **dict(body)}, strict=False)
        return model

    def scored(body: Mapping[str, Tensor], *tasks: str) -> float:
        return sum(accuracy(model_of(task, body), rows[task].test) for task in tasks) / len(tasks)

    def masked(mask: Any) -> float:
        model = text.load(RECIPE, 2, seed)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=10 * RECIPE["rate"])
        squisher.mask.train_only(model, optimizer, mask)
        text.train(model, rows[FIRST].train, RECIPE, seed, optimizer=optimizer)
        return accuracy(model, rows[FIRST].test)

    def consolidated(importance: squisher.Importance | None) -> float:
        model = text.load(RECIPE, 2, seed)
        model.load_state_dict(bodies[0], strict=False)
        ewc = squisher.EWC(model, strength=STRENGTH)
        if importance is not None:
            ewc.consolidate(importance)
        text.train(model, rows[SECOND].train, RECIPE, seed, before_step=ewc.add_gradient_)
        learned = text.weights_of(model)
        return (accuracy(model, rows[SECOND].test) + scored({name: learned[name] for name in base}, FIRST)) / 2

    for codec in codecs:
        if codec == WITHOUT:
            magnitude = squisher.prune.weights(bodies[0], None, sparsity=PRUNED, score="magnitude")
            yield (
                codec,
                {
                    "merge fisher": scored(squisher.merge.average(bodies), *rows),
                    "merge ubgm": scored(squisher.merge.task_arithmetic(base, bodies), *rows),
                    f"prune {PRUNED:.0%}": scored(magnitude, FIRST),
                    f"mask {KEPT:.1%}": masked(random_mask(before, KEPT, seed, HEAD)),
                    "EWC": consolidated(None),
                },
            )
            continue
        imp = {task: coded(one, codec) for task, one in exact.items()}
        pair, start_imp = list(imp.values()), coded(before, codec)
        yield (
            codec,
            {
                "merge fisher": scored(squisher.merge.fisher(bodies, pair), *rows),
                "merge ubgm": scored(squisher.merge.ubgm(base, bodies, start_imp.restrict(BODY), pair), *rows),
                f"prune {PRUNED:.0%}": scored(squisher.prune.weights(bodies[0], imp[FIRST], sparsity=PRUNED), FIRST),
                f"mask {KEPT:.1%}": masked(squisher.mask.top_k(start_imp, keep=KEPT, always=HEAD)),
                "EWC": consolidated(imp[FIRST]),
                "embed by tensor": moved(exact, imp, "tensor"),
                "embed by row": moved(exact, imp, "row"),
            },
        )
