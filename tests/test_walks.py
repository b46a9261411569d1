"""The three walks of CONTRIBUTING.md name functions that are called, in the order in which they are called."""

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import squisher

ROOT = Path(__file__).parents[1]
WALKS = {
    title: re.findall(r"^- `([\w/]+\.py)` `([\w.]+)`", body, re.MULTILINE)
    for title, body in re.findall(
        r"^\*\*`(.+?)`\*\*\n(.*?)(?=^\*\*|^## )", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S
    )
}


def called(action):
    """The functions of ours that an action calls, in order of their first call."""
    found = {}

    def watch(frame, event, _):
        file = frame.f_code.co_filename
        if event == "call" and "/squisher/" in file:
            first = next(iter(frame.f_locals), None) if frame.f_code.co_argcount else None
            owner = type(frame.f_locals[first]) if first == "self" else None
            name = frame.f_code.co_name
            for one in owner.__mro__ if owner else ():
                if vars(one).get(name) is not None and getattr(vars(one)[name], "__code__", None) is frame.f_code:
                    name = f"{one.__name__}.{name}"
            found.setdefault((file.rpartition("/squisher/")[2], name), len(found))

    sys.setprofile(watch)
    try:
        action()
    finally:
        sys.setprofile(None)
    return found


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    inputs, labels = torch.randn(16, 4), torch.randint(0, 3, (16,))
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    path = tmp_path_factory.mktemp("walk") / "checkpoint.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    imp = squisher.extract(path, batch_size=16)
    a = b = model.state_dict()
    f = g = imp
    return {
        "squisher": squisher,
        "path": path,
        "model": model,
        "inputs": inputs,
        "labels": labels,
        "a": a,
        "b": b,
        "f": f,
        "g": g,
    }


def test_there_are_three_walks_of_about_ten_lines():
    assert len(WALKS) == 3
    assert all(4 < len(steps) <= 11 for steps in WALKS.values())


@pytest.mark.parametrize("title", WALKS)
def test_a_walk_is_what_happens(title, names):
    code = compile(title.replace('"checkpoint.pt"', "path"), title, "eval")
    order = called(lambda: eval(code, dict(names)))
    places = []
    for step in WALKS[title]:
        assert step in order, f"{step} is not called by {title}"
        places.append(order[step])
    assert places == sorted(places), [WALKS[title][k] for k in sorted(range(len(places)), key=places.__getitem__)]


def test_files_that_contributing_names_exist():
    named = re.findall(r"`([\w/]+(?:\.py|\.md|/))`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 20
    missing = [name for name in named if not (ROOT / name).exists() and not (ROOT / "src/squisher" / name).exists()]
    assert not [name for name in missing if name != "utils.py"]
