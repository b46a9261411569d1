"""Memory of a merge, in a process of its own: the same for more layers and for more models."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import squisher
from squisher.storage import safetensors as archive

SIDE = 1024

MEASURE = """
import json, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from benchmarks.harness import PeakMemory
from squisher.integrations.model_folders import merge_folders
folder = Path({folder!r})
merge_folders("fisher", [folder / "warm"] * 2, folder / "warmed-{which}-{count}")
with PeakMemory() as memory:
    merge_folders("fisher", [folder / {which!r}] * {count}, folder / "out-{which}-{count}")
print(json.dumps(memory.extra_mb))
"""


def make(path, layers, dtype=torch.bfloat16):
    path.mkdir()
    names = [f"layers.{k}.weight" for k in range(layers)]
    archive.save(path / "model.safetensors", {n: torch.randn(SIDE, SIDE).to(dtype) for n in names}, None)
    values = {n: torch.rand(SIDE, SIDE) for n in names}
    squisher.Importance(values, kind="squisher", batch_size=16, loss_reduction="mean").save(path)


def extra_mb(folder, which, count):
    root = str(Path(__file__).parents[2])
    code = MEASURE.format(root=root, folder=str(folder), which=which, count=count)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("models")
    for name, layers in (("warm", 1), ("shallow", 4), ("deep", 24)):
        make(path / name, layers)
    return path


def test_memory_does_not_grow_with_layers_or_models(folder):
    few = extra_mb(folder, "shallow", 2)
    # 20 layers more are 40 MB of weights and 80 MB of importances a model; 10 models more are 240 MB.
    assert extra_mb(folder, "deep", 2) < few + 30
    assert extra_mb(folder, "shallow", 12) < few + 30
    assert few < 80
