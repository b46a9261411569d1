"""Every fixture with weights and first moments, its states behind other parameters of the same shape: never proven wrong.

Names that only order and shapes tell may come out wrong here, and are said to be a convention.
"""

from __future__ import annotations

import random
import shutil
from collections import defaultdict
from pathlib import Path

import pytest
import torch

import squisher
from squisher.errors import NamingError

FIXTURES = Path(__file__).parent.parent / "fixtures"
SHARED = Path(__file__).parents[3] / "shared" / "checkpoints"
PLAIN = [
    FIXTURES / "lightning" / "gan.ckpt",
    FIXTURES / "accelerate" / "ordered",
    *SHARED.glob("lightning_ckpt/last.ckpt"),
    *SHARED.glob("nanogpt_style/ckpt.pt"),
    *SHARED.glob("dict_model_optimizer/checkpoint.pt"),
]
HUGGING_FACE = [
    *(FIXTURES / "trainer" / name for name in ("bert", "llama_lora")),
    *(FIXTURES / "transformers4" / name for name in ("xlmr", "vit", "swin", "mixtral")),
    *(SHARED.glob("hf_*/checkpoint-6")),
]


def optimizers(tree):
    """Yield the numbered optimizer states in what a file holds."""
    if isinstance(tree, dict) and "state" in tree and "param_groups" in tree:
        yield tree
    elif isinstance(tree, (dict, list)):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from optimizers(value)


def exchanged(state, draw):
    """Return the states with those of one shape permuted, all of them or two."""
    classes = defaultdict(list)
    for k, own in state.items():
        classes[tuple(next(v for v in own.values() if torch.is_tensor(v) and v.ndim).shape)].append(k)
    several = [own for own in classes.values() if len(own) > 1]
    if several and draw.random() < 0.5:
        several = [draw.sample(draw.choice(several), 2)]
    moved = {a: b for own in several for a, b in zip(own, draw.sample(own, len(own)), strict=True)}
    return {k: state[moved.get(k, k)] for k in state}


def attack(source, tmp_path, count, **options):
    """Return how many exchanges were refused of those that were tried."""
    copy = tmp_path / source.name
    shutil.copytree(source, copy) if source.is_dir() else shutil.copyfile(source, copy)
    right = squisher.extract(copy, bias_correction=False, **options)
    values = {name: right[name] for name in right}
    files = [file for file in sorted(copy.iterdir()) if "optim" in file.name] if copy.is_dir() else [copy]
    contents = {file: torch.load(file, weights_only=False) for file in files}
    saved = [(file, one, one["state"]) for file in files for one in optimizers(contents[file])]
    draw, refused = random.Random(0), 0
    for _ in range(count):
        for file, one, state in saved:
            one["state"] = exchanged(state, draw)
            torch.save(contents[file], file)
        try:
            imp = squisher.extract(copy, bias_correction=False, **options)
        except NamingError:
            refused += 1
            continue
        wrong = {name for name in imp if name not in values or not torch.equal(imp[name], values[name])}
        assert not [name for name in wrong if imp.provenance.naming.of(name).level == "proven"]
    return refused


@pytest.mark.parametrize("source", PLAIN, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_permuted_states_of_a_fixture(tmp_path, source):
    attack(source, tmp_path, 6)


@pytest.mark.formats
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("source", HUGGING_FACE, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_permuted_states_of_a_fixture_of_hugging_face(tmp_path, source):
    attack(source, tmp_path, 6)
