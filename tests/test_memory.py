"""Memory that does not grow with the file: measured in a process of its own, as anonymous memory."""

import json
import subprocess
import sys

import pytest
import torch

import squisher

MEASURE = """
import json, sys, pathlib
sys.path.insert(0, {root!r})
import torch
import squisher, squisher.recycle, squisher.analysis.agreement, squisher.analysis.health
from benchmarks.harness import PeakMemory
folder = pathlib.Path({folder!r})
source, target = folder / "source.safetensors", folder / "target.safetensors"
warm = squisher.Importance({{"a": torch.rand(10)}})
warm.save(folder / "warm.safetensors")
squisher.load(folder / "warm.safetensors").save(folder / "warmer.safetensors")
squisher.compare(warm, warm); squisher.examine(warm)
with PeakMemory() as memory:
    {work}
print(json.dumps(memory.extra_mb))
"""


def extra_mb(folder, work):
    from pathlib import Path

    code = MEASURE.format(root=str(Path(__file__).parents[1]), folder=str(folder), work=work)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def make_source(folder, size):
    from pathlib import Path

    from benchmarks import archive

    archive.make(Path(folder) / "source.safetensors", size)


def test_a_round_trip_of_200_mb_takes_a_few_mb(tmp_path):
    make_source(tmp_path, 200_000_000)
    assert extra_mb(tmp_path, "squisher.load(source).save(target)") < 60
    assert (tmp_path / "target.safetensors").stat().st_size == (tmp_path / "source.safetensors").stat().st_size


def test_extraction_of_a_large_state_takes_a_few_mb(tmp_path):
    from benchmarks import extract

    extract.make(tmp_path / "optimizer.pt", 20_000_000)
    assert extra_mb(tmp_path, "squisher.extract(folder / 'optimizer.pt').save(target)") < 60


@pytest.mark.parametrize(
    "work",
    [
        "squisher.embed.embedding(one, by='row')",
        "[None for _ in squisher.prune.weights(one, one, nm='2:4').chunks('w')]",
    ],
)
def test_one_tensor_of_200_mb_takes_a_few_mb(tmp_path, work):
    squisher.Importance({"w": torch.rand(12_500, 4_000)}).save(tmp_path / "source.safetensors")
    assert extra_mb(tmp_path, f"squisher.embed.embedding(warm); one = squisher.load(source); {work}") < 60


def test_the_measurement_can_fail(tmp_path):
    make_source(tmp_path, 200_000_000)
    assert extra_mb(tmp_path, "kept = dict(squisher.load(source))") > 150


@pytest.mark.slow
def test_a_round_trip_of_1_gb_stays_below_100_mb(tmp_path):
    make_source(tmp_path, 1_000_000_000)
    assert extra_mb(tmp_path, "squisher.load(source).save(target)") < 100


@pytest.mark.slow
def test_an_extraction_from_2_4_gb_stays_below_100_mb(tmp_path):
    from benchmarks import extract

    extract.make(tmp_path / "optimizer.pt", 300_000_000)
    assert extra_mb(tmp_path, "squisher.extract(folder / 'optimizer.pt').save(target)") < 100


@pytest.mark.slow
def test_comparing_and_examining_1_gb_stays_below_200_mb(tmp_path):
    make_source(tmp_path, 1_000_000_000)
    assert extra_mb(tmp_path, "squisher.compare(squisher.load(source), squisher.load(source) * 2.0)") < 200
    assert extra_mb(tmp_path, "squisher.examine(squisher.load(source))") < 100
