"""Several fine-tuned models become one, entry by entry: Σ Fθ / Σ F. The baseline is the plain average ("linear").

The paper merges eight T5-Large fine-tunes (question answering and paraphrase; the code of MaTS): AdamW at a constant
rate, no merging coefficients, the empirical Fisher with true labels. Here, at scale `cpu`, two benchmarks:

- *Text*, the main one: MiniLM (a pretrained encoder of 22.6 million parameters), fine-tuned on four tasks with private
  heads (SST-2, Subj, TREC-6, SciTail; none is among the encoder's own training data). The body is merged, the heads are
  kept. Reduced: word embeddings are frozen, a fraction of an epoch, 96 examples for a Fisher, 300 to test on. All tasks see
  the same share of an epoch, as in the paper, so the number of steps differs by task.
- *MNIST rotations*, the controlled one: five rotations from one perceptron that was pretrained on upright digits.

Methods: `fisher` is the empirical Fisher, the paper's, with the data's labels; `fisher (exact)` weighs labels by the model's
probabilities. `squisher` is B·v̂ from the optimizer; `squisher (without bias correction)` is the accumulator v as it is stored, so
that a model that was trained for longer counts more (the paper says v and N·v give the same merge, which is true, and
nothing of bias correction). `(l2)`: every model's importance is first divided by its norm. `(floor 1e-8)`: MaTS's absolute floor. `squisher (β₂ = 0.95)` averages the same run's gradients with a shorter memory (a tracker
beside the optimizer; the paper trains again instead). `joint` squares the gradients of batches of B with the data's labels
at the final weights: the Squisher without its memory. Merging does not depend on a factor that all models share, so B
plays no part here. There are no coefficients and nothing is searched for, as in the paper. The committed run of scale `cpu`
measured the empirical Fisher for the last checkpoints only, and has no absolute floors. `(trace)`: every importance is divided by its
sum. Variants are of the last checkpoints.

Scales `eight` (MiniLM) and `eight-generative` (SmolLM2-135M, which reads a prompt and answers by a letter; all of it is merged but the
word embeddings, which are frozen, and there are no heads) take the paper's own eight tasks: all test rows, an empirical Fisher of
1,000 examples at every checkpoint. ROPES is a choice between two answers there, which is easier than the paper's
(`experiments.questions`). Training and test rows are what the folder of data has: 1,795 to 10,924 and 400 to 1,688 a task. A model
is trained for the same number of epochs on every task. They have not been run: about 20 and 40 hours of one thread.

Scale `eight-upper` is what of that fits an hour or two: MiniLM's lower four layers are frozen, the upper two are trained and merged
(`experiments.upper`); two epochs of a sixth of the training rows, texts cut at 48 tokens (a story of QuAIL's is longer than
that by far), 300 fixed test rows a task, an empirical Fisher of at most 300 examples.

Checkpoints: the last ("final", the paper's main table), the best on held-out training rows, and one after a third of the training.
`individual` is each task's own model. "Normalised accuracy" is merged / individual.

Scale `quick`: rotated digits from scikit-learn. There is no scale `paper`: eight T5-Large fine-tunes need a large GPU; the
recipe is AdamW, 1e-4 constant, batch 1024, until validation stops improving (200 to 1,300 steps), then the calls below.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import squisher
from experiments import rotated, text, upper
from experiments.runs import Right, Run, Score, Unit
from experiments.tuning import Splits, accuracy, fingerprint, importance, right_rows, share

TITLE = "Fisher merging"
BASELINE = "linear"
METRIC = "accuracy"
HIGHER_IS_BETTER = True
STAND_IN = (
    "eight T5-Large (770M) fine-tunes, all test rows, an empirical Fisher of a whole training set",
    "the eight tasks by the upper two layers of MiniLM (3.5M), a sixth of the rows, a Fisher of 300 examples; four other tasks by MiniLM (22.6M), "
    "a fraction of an epoch, a Fisher of 96; 300 fixed test rows a task",
)
MAIN_CASES = ("average",)
FIXED_ROWS = True
WHAT = ("seeds",)
"""What of a configuration says what is done; see `experiments.ewc`."""
_GUESSED = {
    "sst2": 50.0, "subj": 50.0, "scitail": 50.0, "trec6": 50 / 3, "cosmos_qa": 25.0, "paws": 50.0, "qasc": 12.5, "quail": 25.0,
    "quartz": 50.0, "ropes": 50.0, "social_iqa": 100 / 3, "wiki_qa": 50.0,
}  # fmt: skip
PAPER = {  # the main table (final checkpoints); the best ones are from the table on training length
    "average": {"fisher": 53.6, "squisher": 58.0, "linear": 48.5},
    "average, best checkpoint": {"fisher": 59.0, "squisher": 55.1},
    "cosmos_qa": {"fisher": 61.0, "squisher": 50.7, "linear": 39.4},
    "paws": {"fisher": 50.7, "squisher": 50.4, "linear": 48.0},
    "qasc": {"fisher": 73.7, "squisher": 85.9, "linear": 77.1},
    "quail": {"fisher": 57.2, "squisher": 60.7, "linear": 43.2},
    "quartz": {"fisher": 54.6, "squisher": 61.1, "linear": 59.3},
    "ropes": {"fisher": 12.6, "squisher": 36.1, "linear": 45.1},
    "social_iqa": {"fisher": 68.7, "squisher": 61.0, "linear": 48.0},
    "wiki_qa": {"fisher": 50.1, "squisher": 58.1, "linear": 27.6},
}

BODY = r"^body\."
_ADAM = {"schedule": "constant", "warmup": 0, "beta2": 0.999, "eps": 1e-8, "decay": 0.0, "clip": None}
_ROTATED = {
    "kind": "rotated",
    "tasks": {"-60°": 300, "-30°": 240, "30°": 180, "60°": 240, "90°": 120},  # steps: data sets differ in size
    "parity": False,
    "fisher_examples": 512,
    "every": 40,
    **_ADAM,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "quick": {
        "seeds": 3,
        "benchmarks": {
            "rotated digits": {
                **_ROTATED,
                "tasks": {"-30°": 180, "30°": 120, "60°": 150, "90°": 90},
                "source": "digits",
                "widths": [64, 32],
                "pretraining": {**_ADAM, "steps": 200, "batch": 32, "rate": 3e-3},
                "train": 800,
                "validation": 150,
                "test": None,
                "batch": 32,
                "rate": 3e-3,
                "seeds": 3,
            }
        },
    },
    "cpu": {
        "seeds": 5,
        "benchmarks": {
            "text": {
                "kind": "text",
                "model": "minilm",
                "pooling": "mean",
                "frozen": r"word_embeddings",
                "tasks": {"sst2": 130, "subj": 120, "trec6": 70, "scitail": 70},
                "length": 48,
                "train": None,
                "validation": 120,
                "test": 300,
                "batch": 16,
                "rate": 1e-4,
                "fisher_examples": 96,
                "every": 20,
                **_ADAM,
                "seeds": 5,
            },
            "MNIST rotations": {
                **_ROTATED,
                "source": "mnist",
                "widths": [200, 100],
                "pretraining": {**_ADAM, "steps": 1000, "batch": 64, "rate": 1e-3},
                "train": 10_000,
                "validation": 1000,
                "test": 5000,
                "batch": 64,
                "rate": 1e-3,
                "seeds": 5,
            },
        },
    },
}
_EIGHT = {
    **CONFIGS["cpu"]["benchmarks"]["text"],
    # The same number of epochs, 1.5, on all.
    "tasks": {
        "cosmos_qa": 204, "paws": 495, "qasc": 495, "quail": 183, "quartz": 294, "ropes": 1002, "social_iqa": 237, "wiki_qa": 147,
    },
    "length": 96,
    "validation": 200,
    "test": None,
    "rate": 5e-5,
    "fisher_examples": 1000,
    "empirical": True,
    "every": 49,
    "seeds": 3,
}  # fmt: skip
CONFIGS["eight"] = {"seeds": 3, "benchmarks": {"text": _EIGHT}}
CONFIGS["eight-upper"] = {
    "seeds": 5,
    "benchmarks": {
        "text": {
            **_EIGHT, "kind": "upper", "layers": 2, "length": 48, "validation": 100, "test": 300, "rate": 2e-4, "fisher_examples": 300,
            "tasks": {task: round(steps / 4) for task, steps in _EIGHT["tasks"].items()},
            "epochs": 2, "every": 12, "seeds": 5,
        }
    },
}  # fmt: skip
CONFIGS["eight-generative"] = {
    "seeds": 3,
    "benchmarks": {
        "text": {
            **_EIGHT, "model": "smollm2", "pooling": "letters", "frozen": r"embed_tokens", "length": 160, "rate": 2e-5,
            "tasks": {task: round(steps / 3) for task, steps in _EIGHT["tasks"].items()},  # half an epoch
        }
    },
}  # fmt: skip
BENCHMARKS = {
    "cpu": {
        "eight": "Fisher merging, the paper's eight tasks",
        "eight-upper": "Fisher merging, the paper's eight tasks, two layers",
        "eight-generative": "Fisher merging, the paper's eight tasks, SmolLM2",
        "cpu": "Fisher merging, four other tasks",
    }
}

KINDS: dict[str, Any] = {"text": text, "upper": upper, "rotated": rotated}
CHECKPOINTS = {"final": "", "best": ", best checkpoint", "short": ", short training"}


def stages(config: Mapping[str, Any], seeds: Sequence[int]) -> list[list[Unit]]:
    """Return the stages: every model with its importances, then every merge."""
    each = [(name, seed) for name, part in config["benchmarks"].items() for seed in list(seeds)[: part["seeds"]]]
    fits = [
        Unit(f"{name}/{seed}/{task}", "fit", {"benchmark": name, "task": task, "seed": seed})
        for name, seed in each
        for task in config["benchmarks"][name]["tasks"]
    ]
    merges = [
        Unit(f"{name}/{seed}/merged-{point}", "merge", {"benchmark": name, "checkpoint": point, "seed": seed})
        for name, seed in each
        for point in CHECKPOINTS
    ]
    return [fits, merges]


def fit(run: Run, benchmark: str, task: str, seed: int) -> dict[str, Any]:
    """Fine-tune one model, measure its Fishers, and say how good it is by itself."""
    config = run.config["benchmarks"][benchmark]
    kept = _tuned(run, config, task, seed)
    fishers = _fishers(run, config, task, seed)
    data = _splits(run, config, task)
    individual = {}
    for point, snapshot in kept["snapshots"].items():
        model = _loaded(config, data, snapshot["weights"])
        individual[point] = accuracy(model, data.test)
    return {
        "individual": individual,
        "history": kept["history"],
        "steps": {point: snapshot["step"] for point, snapshot in kept["snapshots"].items()},
        "times": {
            **fishers["seconds"],
            "squisher": kept["snapshots"]["final"]["seconds"],
            "training": kept["seconds"],
        },
    }


def merge(run: Run, benchmark: str, checkpoint: str, seed: int) -> dict[str, Any]:
    """Merge the bodies of all tasks in every way, and test them with each task's own head."""
    config = run.config["benchmarks"][benchmark]
    tasks = list(config["tasks"])
    snapshots = [_tuned(run, config, task, seed)["snapshots"][checkpoint] for task in tasks]
    fishers = [_fishers(run, config, task, seed)[checkpoint] for task in tasks]
    data = [_splits(run, config, task) for task in tasks]
    models = [_loaded(config, d, s["weights"]) for d, s in zip(data, snapshots, strict=True)]
    right: dict[str, dict[str, str]] = {}
    for method, weights in merged(snapshots, fishers, config["beta2"]).items():
        body = dict(weights)
        right[method] = {}
        for task, d, model in zip(tasks, data, models, strict=True):
            model.load_state_dict(body, strict=False)
            right[method][task] = right_rows(model, d.test)
    own = [run.result(f"{benchmark}/{seed}/{task}")["individual"][checkpoint] for task in tasks]
    return {
        "accuracy": {method: {task: share(rows) for task, rows in by.items()} for method, by in right.items()},
        "individual": dict(zip(tasks, own, strict=True)),
        **({} if config["kind"] == "rotated" else {"right": right}),
    }


def merged(
    snapshots: Sequence[Mapping[str, Any]], fishers: Sequence[Mapping[str, Mapping[str, Tensor]]], beta2: float
) -> dict[str, Mapping[str, Tensor]]:
    """Return the merged body by method, without methods that were not measured for this checkpoint."""
    bodies = [{n: w for n, w in s["weights"].items() if n.startswith("body.")} for s in snapshots]
    recycled = [importance(s, BODY) for s in snapshots]
    out = {"linear": squisher.merge.average(bodies), "squisher": squisher.merge.fisher(bodies, recycled)}
    for method in fishers[0]:
        out[method] = squisher.merge.fisher(bodies, [f[method] for f in fishers])
    if all("tracked" in s for s in snapshots):  # the last checkpoints
        # As the optimizer stores it: a mean that starts from 0.
        stored = [r * (1 - beta2 ** s["step"]) for r, s in zip(recycled, snapshots, strict=True)]
        measured = [f["fisher"] for f in fishers]
        tracked = [importance(s, BODY, what="tracked") for s in snapshots]
        out["squisher (without bias correction)"] = squisher.merge.fisher(bodies, stored, scale="stored")
        out["squisher (floor 1e-8)"] = squisher.merge.fisher(bodies, stored, scale="stored", floor=1e-8)
        out["fisher (floor 1e-8)"] = squisher.merge.fisher(bodies, measured, floor=1e-8)
        out["squisher (β₂ = 0.95)"] = squisher.merge.fisher(bodies, tracked)
        for name, how in (("l2", "l2"), ("trace", "mean")):
            out[f"fisher ({name})"] = squisher.merge.fisher(bodies, measured, normalize=how)
            out[f"squisher ({name})"] = squisher.merge.fisher(bodies, recycled, normalize=how)
    return out


def chance(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the score of guessing by the beginning of a case's name."""
    tasks = config["benchmarks"].get("text", {"tasks": {}})["tasks"]
    average = {"average": _mean(_GUESSED[task] for task in tasks)} if set(tasks) & set(_GUESSED) else {}
    return {**_GUESSED, **average, "MNIST rotations": 10.0, "rotated digits": 10.0}


def scores(results: Mapping[str, Mapping[str, Any]]) -> list[Score]:
    """Return averages over tasks for each checkpoint, absolute and normalised, and single tasks for the final one."""
    found = {key.split("/")[0] for key in results}
    main = "text" if "text" in found else min(found)
    out: list[Score] = []
    for key, result in results.items():
        benchmark, seed, what = key.split("/")
        if not what.startswith("merged-"):
            continue
        point = what.removeprefix("merged-")
        prefix = "" if benchmark == main else f"{benchmark}: "
        case = f"{prefix}average{CHECKPOINTS[point]}"
        individual = result["individual"]
        for method, tasks in {**result["accuracy"], "individual": individual}.items():
            share = [100 * tasks[task] / individual[task] for task in tasks]
            out.append(Score(case, method, int(seed), _mean(tasks.values())))
            out.append(Score(case, method, int(seed), _mean(share), "normalised accuracy"))
            if point == "final":
                out += [Score(f"{prefix}{task}", method, int(seed), value) for task, value in tasks.items()]
    return out


def right(results: Mapping[str, Mapping[str, Any]]) -> Right:
    """Return which test rows of the text tasks were classified correctly, if it was recorded."""
    out: Right = {}
    for key, result in results.items():
        benchmark, seed, what = key.split("/")
        if benchmark == "text" and "right" in result:
            case = f"average{CHECKPOINTS[what.removeprefix('merged-')]}"
            for method, by_task in result["right"].items():
                out[case, method, int(seed)] = list(by_task.values())
    return out


def _recipe(config: Mapping[str, Any], task: str) -> dict[str, Any]:
    steps = config["tasks"][task]
    others = ("tasks", "fisher_examples", "empirical", "seeds", "kind", "epochs")
    rest = {key: value for key, value in config.items() if key not in others}
    return {**rest, "train": _rows(config, task), "steps": steps, "keep": [round(steps / 3)], "track": True}


def _rows(config: Mapping[str, Any], task: str) -> int | None:
    """Return the number of training rows: such that the steps make `epochs`, if these are given."""
    return config["tasks"][task] * config["batch"] // config["epochs"] if "epochs" in config else config["train"]


def _tuned(run: Run, config: Mapping[str, Any], task: str, seed: int) -> dict[str, Any]:
    recipe = _recipe(config, task)
    kept = KINDS[config["kind"]].fine_tune(run, task, seed, recipe)
    kept["snapshots"]["short"] = kept["snapshots"].pop(str(recipe["keep"][0]))
    return kept


def _splits(run: Run, config: Mapping[str, Any], task: str) -> Splits:
    return KINDS[config["kind"]].splits(run, task, {**config, "train": _rows(config, task)})


def _loaded(config: Mapping[str, Any], data: Splits, weights: Mapping[str, Tensor]) -> nn.Module:
    if config["kind"] == "rotated":
        model = rotated.network(config, 0)
    else:
        model = KINDS[config["kind"]].load(config, data.classes, 0)
    model.load_state_dict(weights, strict=False)
    return model


def _fishers(run: Run, config: Mapping[str, Any], task: str, seed: int) -> dict[str, Any]:
    """Return the importances by checkpoint and method, on training rows; "seconds" by method for the final checkpoint."""

    def make() -> dict[str, Any]:
        data = _splits(run, config, task)
        rows = data.train.take(slice(0, config["fisher_examples"]))
        shuffled = [rows.batch(part) for part in torch.arange(len(rows)).split(config["batch"])]
        out: dict[str, Any] = {"seconds": {}}
        snapshots = _tuned(run, config, task, seed)["snapshots"]
        for point, snapshot in sorted(snapshots.items(), key=lambda item: item[0] != "final"):
            if point != "final" and snapshot["step"] == snapshots["final"]["step"]:
                out[point] = {name: found for name, found in out["final"].items() if name != "joint"}
                continue
            model = _loaded(config, data, snapshot["weights"])
            wanted = {"fisher": (rows.batches(16), {"labels": "data"})}
            if not config.get("empirical"):
                wanted["fisher (exact)"] = (rows.batches(16), {"labels": "exact"})
                if point == "final":
                    wanted["joint"] = (shuffled, {"labels": "data", "per": "batch"})
            out[point] = {}
            for method, (batches, how) in wanted.items():
                clock = time.perf_counter()
                found = squisher.fisher(model, batches, parameters=BODY, **how)
                out["seconds"].setdefault(method, time.perf_counter() - clock)
                out[point][method] = dict(found)
        return out

    examples = config["fisher_examples"]
    return run.cached(f"{run.setting}/fisher-{task}-{seed}-{examples}-{fingerprint(_recipe(config, task))}", make)


def _mean(values: Any) -> float:
    values = list(values)
    return sum(values) / len(values)
