"""A small text data set and small random models of the real classes, in folders, for tests that need transformers."""

from __future__ import annotations

import gzip
import json
import random

WORDS = ("good", "bad", "fine", "poor", "film", "meal", "book", "very", "not", "the", "a", "was")


def write_task(folder, name, seed, train=96, test=24, pairs=False, classes=2, numbers=False):
    """A task whose label the words decide: {text_a[, text_b], label} rows, as JSON lines."""
    draw = random.Random(seed)
    (folder / name).mkdir(parents=True)
    for part, count in (("train", train), ("eval", test)):
        with gzip.open(folder / name / f"{part}.jsonl.gz", "wt", encoding="utf-8") as lines:
            for number in range(count):
                label = number % classes
                words = [draw.choice(WORDS[4:]) for _ in range(draw.randrange(2, 9))]
                words.insert(0, draw.choice(("good", "fine") if label else ("bad", "poor")))
                # The number makes every row another text.
                row = {"text_a": " ".join([*words, f"{part}{number}"]), "label": label + 0.5 if numbers else label}
                lines.write(json.dumps(row | ({"text_b": "the film"} if pairs else {})) + "\n")


def write_questions(folder, name, train=40, test=12, choices=3):
    """A task of questions: the right choice is the word that the context has."""
    draw = random.Random(3)
    (folder / name).mkdir(parents=True)
    for part, count in (("train", train), ("eval", test)):
        with gzip.open(folder / name / f"{part}.jsonl.gz", "wt", encoding="utf-8") as lines:
            for number in range(count):
                offered = draw.sample(WORDS, choices)
                label = draw.randrange(choices)
                row = {
                    "context": f"the {offered[label]} {part}{number}",
                    "question": "was",
                    "choices": offered,
                    "label": label,
                }
                lines.write(json.dumps(row) + "\n")


def write_model(folder, kind):
    """A BERT, RoBERTa or Llama of two tiny layers with a tokenizer of whole words."""
    import tokenizers
    import torch
    import transformers

    special = ["<pad>", "<unk>", "<s>", "</s>"]
    vocabulary = {word: k for k, word in enumerate([*special, *WORDS, *"ABCDEFGH"])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        model_input_names=["input_ids", "attention_mask", *(["token_type_ids"] if kind == "bert" else [])],
    ).save_pretrained(folder)
    shape = {
        "vocab_size": len(vocabulary),
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 40,
        "pad_token_id": 0,
        "initializer_range": 0.3,
    }
    torch.manual_seed(0)
    if kind == "llama":
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).save_pretrained(folder)
    elif kind == "bert":
        transformers.BertModel(transformers.BertConfig(**shape)).save_pretrained(folder)
    else:
        config = transformers.RobertaConfig(**shape, type_vocab_size=1)
        transformers.RobertaForMaskedLM(config).save_pretrained(folder)
    return str(folder)
