"""`squisher embed` and `squisher similarity`, as a user meets them."""

import json

import pytest
import torch

import squisher
from squisher import embed
from squisher.importance import Importance
from squisher.report.svg import clustered
from tests.commands import run


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    made = {}
    for k, name in enumerate(("rain", "snow", "sun")):
        torch.manual_seed(k // 2)  # the first two are alike
        base = torch.rand(20, 10) ** 4
        torch.manual_seed(10 + k)
        made[name] = Importance(
            {"body.weight": base * (1 + 0.1 * torch.rand(20, 10)), "head.weight": torch.rand(2 + k, 20)}
        )
        made[name].save(folder / f"{name}.safetensors")
    return folder, made


def test_similarity_gives_the_api_numbers_and_puts_like_ones_together(tasks, tmp_path):
    folder, made = tasks
    files = [folder / f"{name}.safetensors" for name in made]
    done = run("similarity", *files, "--by", "full", "--exclude", "head", "--json", "--plot", tmp_path / "x.png")
    document = json.loads(done.stdout)
    assert document["tasks"] == ["rain", "snow", "sun"]
    _, expected = embed.distances({n: embed.embedding(i, by="full", exclude="head") for n, i in made.items()})
    assert torch.allclose(torch.tensor(document["distances"], dtype=torch.float64), expected, rtol=1e-6)
    assert torch.allclose(torch.tensor(document["similarities"], dtype=torch.float64), 1 - expected, rtol=1e-6)
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
    shown = run("similarity", *files, "--exclude", "head").stdout
    assert all(name in shown for name in made)
    assert shown.count("1.000") >= 3  # each task is like itself


def test_embed_writes_an_importance_that_similarity_takes(tasks, tmp_path):
    folder, made = tasks
    for name in made:
        done = run(
            "embed",
            folder / f"{name}.safetensors",
            "--out",
            tmp_path / f"{name}.safetensors",
            "--by",
            "row",
            "--exclude",
            "head",
        )
        assert "20 numbers of 1 tensors, by row" in done.stdout, done.stderr
    vector = squisher.load(tmp_path / "sun.safetensors")
    assert torch.allclose(vector["body.weight"], made["sun"]["body.weight"].mean(1))
    document = json.loads(run("similarity", *(tmp_path / f"{n}.safetensors" for n in made), "--json").stdout)
    assert document["distances"][0][1] < document["distances"][0][2]


@pytest.mark.parametrize(
    ("arguments", "words", "status"),
    [
        (["rain.safetensors"], "at least two files", 2),
        (["rain.safetensors", "rain.safetensors"], "given twice", 2),
        (["rain.safetensors", "sun.safetensors", "--by", "full"], "exclude", 1),
        (["rain.safetensors", "sun.safetensors", "--scale", "best"], "scale is auto", 2),
    ],
)
def test_errors(tasks, arguments, words, status):
    done = run("similarity", *arguments, cwd=tasks[0])
    assert done.returncode == status
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_clusters_stand_together():
    points = torch.tensor([0.0, 10.0, 0.1, 10.1, 5.0])
    order = clustered((points[:, None] - points[None]).abs())
    places = {k: order.index(k) for k in range(5)}
    assert abs(places[0] - places[2]) == 1
    assert abs(places[1] - places[3]) == 1
    assert sorted(order) == list(range(5))
