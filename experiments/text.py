"""Text classification for the settings that need it: a pretrained encoder, tokenised tasks, fine-tuning that is kept.

A text configuration is a dict with

    model        a Hugging Face folder or name, or one of `experiments.pretrained`: "minilm", "mpnet", "smollm2"
    pooling      "mean": the encoder, the mean of its last states, dropout and a linear head (names body.*, head.*);
                 "own": the model's own classification class;
                 "letters": a language model, all of it under body.*, that reads a prompt and answers by a letter
    frozen       a regular expression of parameters that are not trained, or None. At cpu scale the word embeddings
                 (11.7 of MiniLM's 22.6 million parameters): a step is then almost twice as fast
    length       tokens at most; a batch is padded to its longest text, rounded up to a multiple of 8
    validation   how many training rows are held out for choices (never trained on)
    test         how many rows of the evaluation file are used at most (a fixed random part of it)
    train        how many training rows at most, or None
    device       "auto": a GPU where there is one; by default the CPU

and a recipe as in `experiments.tuning`; dropout is as the model has it.

Questions with choices: an encoder reads the context beside the question with each choice, and one output scores it. A task whose labels
are numbers (STS-B) has one output too, and a squared error.

Only what is trained is kept: everything else is the pretrained encoder.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from experiments.data import text_task
from experiments.pretrained import Lettered, language_model, source
from experiments.questions import LETTERS, as_choices, is_choice, prompt
from experiments.runs import Run
from experiments.tuning import Splits, accuracy, fingerprint, importance, train, tuned, weights_of

__all__ = [
    "Classifier",
    "Pooled",
    "Splits",
    "Texts",
    "accuracy",
    "by_length",
    "fine_tune",
    "importance",
    "load",
    "second_test",
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
    """Tokenised texts, padded to one length, and their labels; `types` has no columns where the model takes none.

    Rows are texts, or, for questions with choices, as many texts as there are choices.
    """

    tokens: Tensor
    mask: Tensor
    types: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Any) -> Texts:
        """Return the rows asked for; a tensor or a slice."""
        return Texts(self.tokens[rows], self.mask[rows], self.types[rows], self.labels[rows])

    def batch(self, rows: Any) -> dict[str, Tensor]:
        """Return a batch of a model's inputs with "labels", cut to its longest text."""
        part = self.take(rows)
        longest = min(part.tokens.shape[-1], max(8, -(-int(part.mask.sum(-1).max()) // 8) * 8))
        out = {"input_ids": part.tokens[..., :longest].long(), "attention_mask": part.mask[..., :longest].long()}
        if part.types.shape[-1]:
            out["token_type_ids"] = part.types[..., :longest].long()
        return {**out, "labels": part.labels}

    def batches(self, size: int) -> list[dict[str, Tensor]]:
        """Return all rows, for `squisher.fisher` and for evaluation: texts of similar length together, in a fixed order."""
        return [self.batch(rows) for rows in by_length(self.mask).split(size)]


def by_length(mask: Tensor) -> Tensor:
    """Return rows in the order of their number of tokens."""
    return mask.flatten(1).sum(1).argsort(stable=True)


class Pooled(nn.Module):
    """A body, the mean of its last states over the text's tokens, dropout and a linear head."""

    def __init__(self, body: nn.Module, dropout: float, width: int, classes: int) -> None:
        super().__init__()
        self.body = body
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, classes)
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def pooled(self, states: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the logits from the last states."""
        weight = attention_mask.unsqueeze(-1).to(states.dtype)
        return self.head(self.dropout((states * weight).sum(1) / weight.sum(1)))


class Classifier(Pooled):
    """An encoder as the body."""

    def __init__(self, body: nn.Module, classes: int) -> None:
        super().__init__(body, body.config.hidden_dropout_prob, body.config.hidden_size, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **inputs: Tensor) -> Tensor:
        """Return logits; of choices, if every row has several texts."""
        if input_ids.dim() == 3:
            flat = {name: value.flatten(0, 1) for name, value in inputs.items()}
            return self(input_ids.flatten(0, 1), attention_mask.flatten(0, 1), **flat).view(input_ids.shape[:2])
        states = self.body(input_ids=input_ids, attention_mask=attention_mask, **inputs).last_hidden_state
        return self.pooled(states, attention_mask)


def load(config: Mapping[str, Any], classes: int, seed: int) -> nn.Module:
    """Return the pretrained model with a new head drawn by the seed; frozen parameters require no gradient."""
    torch.manual_seed(seed)
    with _quiet() as transformers:
        if config["pooling"] == "letters":
            body, tokenizer = language_model(transformers, config["model"])
            letters = [tokenizer.encode(f" {letter}", add_special_tokens=False)[-1] for letter in LETTERS[:classes]]
            model: nn.Module = Lettered(body, letters)
        elif config["pooling"] == "mean":
            model = Classifier(_without_pooler(transformers, source(config["model"])), classes)
        else:
            own = transformers.AutoModelForSequenceClassification
            model = own.from_pretrained(source(config["model"]), num_labels=classes)
    for name, parameter in model.named_parameters():
        if config["frozen"] and re.search(config["frozen"], name):
            parameter.requires_grad_(False)
    return model.to(_device(config)).eval()


def splits(run: Run, task: str, config: Mapping[str, Any]) -> Splits:
    """Return a task, tokenised once: training rows, held-out rows, and rows of the evaluation file."""
    shape = {key: config[key] for key in ("model", "pooling", "length", "validation", "test", "train")}
    made = run.cached(f"tokens/{task}-{fingerprint(shape)}", lambda: _tokenised(run, task, config))
    parts = {name: Texts(*made[name]) for name in ("train", "validation", "test")}
    return Splits(**parts, classes=made["classes"])


def second_test(run: Run, task: str, part: str, config: Mapping[str, Any]) -> Texts:
    """Return all rows of another evaluation file of a task, tokenised once."""
    shape = {key: config[key] for key in ("model", "pooling", "length")}

    def make() -> tuple[Tensor, ...]:
        return _tokens(_tokenizer(config), _read(run, task, part), config["length"])

    return Texts(*run.cached(f"tokens/{task}-{part}-{fingerprint(shape)}", make))


def fine_tune(
    run: Run,
    task: str,
    seed: int,
    config: Mapping[str, Any],
    start: Mapping[str, Tensor] | None = None,
    name: str = "",
    kind: Any = None,
) -> dict[str, Any]:
    """Fine-tune on one task, or read the cached result.

    Args:
        run: Where it is kept.
        task: The task.
        seed: Of the head, the order of rows and dropout.
        config: The recipe; see the module.
        start: Weights to start from instead of the pretrained ones (and the seed's head).
        name: Told apart by this, where `start` is given.
        kind: What has `splits` and `load`; this module, or `experiments.upper`.

    Returns:
        What `tuning.tuned` says.
    """
    kind = kind or sys.modules[__name__]

    def make() -> dict[str, Any]:
        data = kind.splits(run, task, config)
        model = kind.load(config, data.classes, seed)
        if start is not None:
            model.load_state_dict(start, strict=False)
        return tuned(model, data, config, seed)

    return run.cached(f"{run.setting}/{task}-{seed}{name}-{fingerprint(config)}", make)


def _tokenised(run: Run, task: str, config: Mapping[str, Any]) -> dict[str, Any]:
    rows = {part: _read(run, task, part) for part in ("train", "eval")}
    lettered = config["pooling"] == "letters"
    asked = is_choice(rows["train"])
    if asked or lettered:
        rows = {part: as_choices(task, found) for part, found in rows.items()}
    tokenizer = _tokenizer(config)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(rows["train"]), generator=generator).tolist()
    held, kept = order[: config["validation"]], order[config["validation"] :][: config["train"]]
    tested = torch.randperm(len(rows["eval"]), generator=generator).tolist()[: config["test"]]
    chosen = {"train": ("train", kept), "validation": ("train", held), "test": ("eval", tested)}
    read = _prompts if lettered else _asked if asked else _tokens
    parts = {
        name: read(tokenizer, [rows[part][k] for k in which], config["length"])
        for name, (part, which) in chosen.items()
    }
    return {**parts, "classes": _outputs(rows["train"], lettered)}


def _tokenizer(config: Mapping[str, Any]) -> Any:
    with _quiet() as transformers:
        if config["pooling"] == "letters":
            return language_model(transformers, config["model"])[1]
        return transformers.AutoTokenizer.from_pretrained(source(config["model"]))


def _outputs(rows: list[dict[str, Any]], lettered: bool) -> int:
    """Return the number of outputs of a task: one for each letter of a choice, one score or number, or one for each class."""
    if "choices" in rows[0]:
        return max(len(row["choices"]) for row in rows) if lettered else 1
    return 1 if _is_number(rows) else 1 + max(int(row["label"]) for row in rows)


def _is_number(rows: list[dict[str, Any]]) -> bool:
    return any(isinstance(row["label"], float) for row in rows)


def _tokens(tokenizer: Any, rows: list[dict[str, Any]], length: int) -> tuple[Tensor, ...]:
    texts = [[row["text_a"] for row in rows]]
    if rows and "text_b" in rows[0]:
        texts.append([row["text_b"] for row in rows])
    return *_encoded(tokenizer, texts, length), _labels(rows)


def _asked(tokenizer: Any, rows: list[dict[str, Any]], length: int) -> tuple[Tensor, ...]:
    """Return the context with the question and each choice."""
    count = len(rows[0]["choices"]) if rows else 1
    texts = [
        [row["context"] for row in rows for _ in row["choices"]],
        [f"{row['question']} {choice}" for row in rows for choice in row["choices"]],
    ]
    found = _encoded(tokenizer, texts, length)
    return *(part.view(len(rows), count, part.shape[-1]) for part in found), _labels(rows)


def _prompts(tokenizer: Any, rows: list[dict[str, Any]], length: int) -> tuple[Tensor, ...]:
    """Return the truncated context with the question and its choices, padded on the right."""
    tokens = torch.zeros(len(rows), length, dtype=torch.int32)
    mask = torch.zeros(len(rows), length, dtype=torch.int8)
    for number, row in enumerate(rows):
        context, rest = (tokenizer.encode(part, add_special_tokens=False) for part in prompt(row))
        whole = (context[: max(0, length - len(rest))] + rest)[-length:]
        tokens[number, : len(whole)] = torch.tensor(whole, dtype=torch.int32)
        mask[number, : len(whole)] = 1
    return tokens, mask, torch.empty(len(rows), 0, dtype=torch.int8), _labels(rows)


def _encoded(tokenizer: Any, texts: list[list[str]], length: int) -> tuple[Tensor, Tensor, Tensor]:
    if not texts[0]:
        empty = torch.empty(0, length, dtype=torch.int32)
        return empty, empty.to(torch.int8), empty.to(torch.int8)
    found = tokenizer(*texts, truncation=True, max_length=length, padding="max_length", return_tensors="pt")
    types = found.get("token_type_ids", torch.empty(len(texts[0]), 0))
    return found["input_ids"].int(), found["attention_mask"].to(torch.int8), types.to(torch.int8)


def _labels(rows: list[dict[str, Any]]) -> Tensor:
    if _is_number(rows):
        return torch.tensor([row["label"] for row in rows]).unsqueeze(-1)
    return torch.tensor([int(row["label"]) for row in rows], dtype=torch.int64)


def _read(run: Run, task: str, part: str) -> list[dict[str, Any]]:
    """Return tasks from the data folder, or without one the paper's sentiment tasks from the Hub."""
    if run.data is not None or task not in HUB:
        return text_task(run.data_folder("text"), task, part)
    from datasets import load_dataset

    name, column, *parts = HUB[task]
    return [
        {"text_a": row[column], "label": row["label"]}
        for row in load_dataset(name, split=parts[0] if part == "train" else parts[1])
    ]


def _device(config: Mapping[str, Any]) -> str:
    return "cuda" if config.get("device") == "auto" and torch.cuda.is_available() else "cpu"


def _without_pooler(transformers: Any, source: str) -> nn.Module:
    try:
        return transformers.AutoModel.from_pretrained(source, add_pooling_layer=False)
    except TypeError:  # a class that never has one
        return transformers.AutoModel.from_pretrained(source)


@contextlib.contextmanager
def _quiet() -> Iterator[Any]:
    """Yield transformers, silenced; offline if the model is a folder."""
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
